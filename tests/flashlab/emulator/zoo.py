"""The zoo: seeded faults in .cu sources, each with what must catch it. What the fields mean: mutant.py."""

from __future__ import annotations

from tests.flashlab.emulator.mutant import ALIGNED, FULL, NARROW, NO_KEYS, ONE_STAGE, RAGGED, Mutant

TILE, PARAMS, MMA = (f"include/{name}.cuh" for name in ("tile", "params", "mma"))

_LOAD_V = "load_tile<THREADS>(v_tile, v_rows + j * BC * v.row, v.row, shape.len_kv - j * BC, row_bytes(shape));"

WAITS = [
    Mutant(
        mechanism="barrier after a copy removed", kernel="flash2", sees="race", blind=False, tool="racecheck",
        within="load_k", old="copy_wait<0>(); … barrier();", new="",
        at="load_b_rows(k_tile(j)", via="ldmatrix(b.r", step="scores", tensor="k",
    ),
    Mutant(
        mechanism="barrier before a tile's reuse removed", kernel="standard", sees="race", blind=True, tool="racecheck",
        old="for (int j = 0; j < key_tiles; ++j) { … barrier();", new="", problem=FULL,
        at="load_tile<THREADS>(p_tile", step="load_p", tensor="p", other="load_a(p_tile",
    ),
    Mutant(
        mechanism="barrier between partial maxima and their reduction removed", kernel="flash1", sees="race", blind=False,
        within="row_max", old="barrier(); float m_tile", new="float m_tile", tool="racecheck",
        also=("uninitialised",), at="m_tile[f][half] = fmaxf", step="row_max", tensor="row_max", other="store_shared(row_max(",
    ),
    Mutant(
        mechanism="barrier between a row's factors and their use removed", kernel="flash1", sees="race", blind=False,
        within="output", old="barrier();", new="", tool="racecheck",
        also=("uninitialised",),
        at="load_shared<float2>(coefficients(row))", step="update_o", tensor="a+b", other="store_shared(coefficients(row)",
    ),
    Mutant(
        mechanism="barrier before the single stage is filled again removed", kernel="flash2", sees="race", blind=True,
        within="load_k", old="barrier(); if (j < tiles.last) load_k(j + 1, next);", new="if (j < tiles.last) load_k(j + 1, next);",
        problem=ONE_STAGE, tool="racecheck",
        at="if (j < tiles.last) load_k(j + 1, next);", step="load_k", tensor="k", other="load_b_rows(k_tile(j)",
    ),
    Mutant(
        mechanism="wait leaves one group too many", kernel="flash2", sees="wait forgotten", blind=False, problem=ONE_STAGE,
        within="load_v", old="copy_wait<1>();", new="copy_wait<2>();", tool="racecheck",
        at="load_b_columns(v_tile(j)", step="output", tensor="v", other="load_v(j, here);", also=("race",),
    ),
    Mutant(
        mechanism="wait before the commit", kernel="standard", sees="wait forgotten", blind=False, tool="racecheck",
        within="load_v", old="copy_commit(); copy_wait<0>();", new="copy_wait<0>(); copy_commit();",
        at="load_a(p_tile", step="output", tensor="p", other="load_tile<THREADS>(p_tile",
    ),
    Mutant(
        mechanism="commit removed", kernel="flash1", sees="wait forgotten", blind=False, tool="racecheck",
        within="load_q", old="copy_commit();", new="",
        at="load_b_rows(k_tile", step="scores", tensor="k", other="load_tile<THREADS>(k_tile",
    ),
    Mutant(
        mechanism="barrier before the wait", kernel="standard", sees="wait forgotten", blind=False, tool="racecheck",
        within="load_k", old="copy_wait<0>(); barrier();", new="barrier(); copy_wait<0>();",
        at="load_a(q_tile", step="scores", tensor="q", other="load_tile<THREADS>(q_tile",
        also=("race",),
    ),
    Mutant(
        mechanism="thread ends with copies on their way", kernel="flash2", sees="wait forgotten", blind=True, problem=NO_KEYS,
        within="output", old="copy_wait<0>();", new="",
        at="load_tile<THREADS>(q_tile", tensor="q", step="load_q",
    ),
    Mutant(
        mechanism="stale buffer of the ring", kernel="flash2", sees="wait forgotten", blind=False, tool="racecheck",
        within="output", old="load_b_columns(v_tile(j), key", new="load_b_columns(v_tile(j + 1), key",
        at="load_b_columns(v_tile(j + 1)", step="output", tensor="v", other="load_v(j + 1, next);", also=("race",),
    ),
    Mutant(
        mechanism="two stages in one buffer", kernel="flash2", sees="wait forgotten", blind=True, tool="racecheck",
        old="(j & (STAGES - 1)) * KVTile::BYTES", new="0 * KVTile::BYTES",
        at="load_b_rows(k_tile(j)", step="scores", tensor="k", other="else if (j < tiles.last) { … load_k(j + 1, next);",
        also=("race",),
    ),
    Mutant(
        mechanism="tiles overlap in SRAM", kernel="standard", sees="race", blind=False, tool="racecheck",
        old="k_tile{q_tile.base + q_tile.BYTES}", new="k_tile{q_tile.base + q_tile.BYTES / 2}",
        at="load_tile<THREADS>(k_tile", step="load_k", tensor="q", other="load_tile<THREADS>(q_tile",
    ),
]  # fmt: skip
"""Barriers and the waits for copies."""

MEMORY = [
    Mutant(
        mechanism="row past the end read", kernel="flash2", sees="out of bounds", blind=True, file=TILE, tool="memcheck",
        old="return row < rows ?", new="return row <= rows ?",
        at="load_tile<THREADS>(q_tile", via="copy_async(", step="load_q", tensor="q", also=("uninitialised",),
    ),
    Mutant(
        mechanism="row past the end written", kernel="standard", sees="out of bounds", blind=True, tool="memcheck",
        old="const int bytes = row < shape.len_q ?", new="const int bytes = row <= shape.len_q ?",
        at="store_row(row_address(out", via="store_global(row + place", step="store_o", tensor="out",
        also=("race between blocks",),
    ),
    Mutant(
        mechanism="columns past the end written", kernel="online_softmax", sees="out of bounds", blind=True, tool="memcheck",
        old="key < round_up(shape.len_kv, CHUNK_ELEMENTS)", new="key <= round_up(shape.len_kv, CHUNK_ELEMENTS)",
        at="store_elements(p_row", step="store_p", tensor="p", also=("race", "race between blocks"),
    ),
    Mutant(
        mechanism="query head for the KV head", kernel="flash2", sees="out of bounds", blind=True, tool="memcheck",
        old="row_address(k, batch, kv_head(shape, head), own.kv)", new="row_address(k, batch, head, 0)",
        at="if (tiles.first <= tiles.last) load_k", step="load_k", tensor="k", also=("uninitialised",),
    ),
    Mutant(
        mechanism="tile behind the end of the SRAM", kernel="flash2", sees="out of bounds", blind=False, tool="memcheck",
        old="k_tile(j).base + STAGES * KVTile::BYTES}", new="k_tile(j).base + (STAGES + 1) * KVTile::BYTES}",
        at="load_v(j + 1, next);", step="load_v", tensor="v",
    ),
    Mutant(
        mechanism="static SRAM array too small", kernel="block_sum", sees="out of bounds", blind=False, tool="memcheck",
        old="part[128]", new="part[127]", at="part[threadIdx.x] = i < n", step="load",
    ),
    Mutant(
        mechanism="index overflows 32 bits", kernel="histogram", sees="out of bounds", blind=False, tool="memcheck",
        old="const unsigned hash =", new="const int hash =", at="atomicAdd(&bins[bin]", step="count", tensor="bins",
    ),
    Mutant(
        mechanism="elements taken for bytes", kernel="online_softmax", sees="misaligned", blind=False, tool="memcheck",
        old="p_row + static_cast<long long>(key) * ELEMENT_BYTES", new="p_row + static_cast<long long>(key)",
        at="store_elements(p_row", step="store_p", tensor="p", also=("uninitialised",),
    ),
    Mutant(
        mechanism="vector access at an odd element", kernel="axpy", sees="misaligned", blind=False, tool="memcheck",
        old="reinterpret_cast<const float4*>(x)[i]", new="*reinterpret_cast<const float4*>(x + 4 * i - (i > 0))",
        at="const float4 left", step="load", tensor="x",
    ),
    Mutant(
        mechanism="SRAM of the ragged rows never written", kernel="flash1", sees="uninitialised", blind=True,
        within="stats", old="store_shared(coefficients(row),", new="if (row < rows) store_shared(coefficients(row),",
        at="load_shared<float2>(coefficients(row))", step="update_o", tensor="a+b", problem=RAGGED.replace(len_q=20),
    ),
    Mutant(
        mechanism="workspace not initialised", kernel="flash1", sees="uninitialised", blind=False, tool="initcheck",
        within="init", old="store_global(m + statistics + row, -INF);", new="",
        at="m_old = load_global<float>(m + place)", step="stats", tensor="m",
    ),
    Mutant(
        mechanism="row stride of half a tile forgotten", kernel="standard", sees="uninitialised", blind=False,
        old="row_address(s, batch, head, row + 8 * half)", new="row_address(s, batch, head, row)", tool="initcheck",
        at="float m = -INF; … load_global<float4>(s_row + key * 4LL)", step="row_max", tensor="s",
    ),
    Mutant(
        mechanism="padding of a workspace row never written", kernel="standard", sees="uninitialised", blind=True,
        old="for (int key = first; key < round_up(shape.len_kv, CHUNK_ELEMENTS); key += WARP_COLUMNS) {",
        new="for (int key = first; key < shape.len_kv; key += WARP_COLUMNS) {", tool="initcheck",
        at="load_tile<THREADS>(p_tile", step="load_p", tensor="p",
    ),
    Mutant(
        mechanism="output read before it is written", kernel="transpose", sees="uninitialised", blind=False, tool="initcheck",
        old="down + threadIdx.x] = tile", new="down + threadIdx.x] += tile",
        at="down + threadIdx.x] += tile", step="store", tensor="y",
    ),
    Mutant(
        mechanism="input written", kernel="axpy", sees="input written", blind=True,
        old="reinterpret_cast<float4*>(y)[i] = right;",
        new="reinterpret_cast<float4*>(y)[i] = right;\n  const_cast<float*>(x)[4 * i] = 0;",
        at="const_cast<float*>(x)", step="store", tensor="x",
    ),
    Mutant(
        mechanism="batch stride forgotten", kernel="flash2", sees="race between blocks", blind=True, file=PARAMS,
        old="batch * t.batch", new="0 * t.batch", at="store_row(address", step="store_o", tensor="out",
    ),
    Mutant(
        mechanism="LSE written by every lane of a quad", kernel="flash2", sees="race", blind=True,
        old="if (inside && t == 0)", new="if (inside)", at="store_global(row_lse", step="store_lse", tensor="lse",
        other="store_global(row_lse",
    ),
    Mutant(
        mechanism="zeroed by one block while others add", kernel="histogram", sees="race between blocks", blind=True,
        within="count", old="",
        new="  if (blockIdx.x == 0 && threadIdx.x < bin_count) bins[threadIdx.x] = 0;\n  __syncthreads();\n",
        at="atomicAdd(&bins[bin]", step="count", tensor="bins", other="bins[threadIdx.x] = 0",
    ),
    Mutant(
        mechanism="add without an atomic", kernel="block_sum", sees="race between blocks", blind=True,
        old="atomicAdd(y, part[0])", new="y[0] += part[0]", at="y[0] += part[0]", step="add", tensor="y",
    ),
]  # fmt: skip
"""Who touches which bytes."""

TOGETHER = [
    Mutant(
        mechanism="barrier of a reduction's steps removed", kernel="block_sum", sees="race", blind=False, tool="racecheck",
        within="tree", old="__syncthreads();", new="",
        at="part[threadIdx.x] += part", step="tree", tensor="part", other="part[threadIdx.x] += part",
    ),
    Mutant(
        mechanism="words exchanged in a warp without its barrier", kernel="warp_sums", sees="race", blind=False,
        old="__syncwarp();", new="", tool="racecheck",
        at="const float mirrored", step="mirror", tensor="words", other="words[threadIdx.x] = mine", also=("uninitialised",),
    ),
    Mutant(
        mechanism="shuffle under divergence", kernel="online_softmax", sees="divergent collective", blind=True,
        old="const float m = warp_max(lane_m);", new="const float m = first < shape.len_kv ? warp_max(lane_m) : -INF;",
        at="const float l = warp_sum", other="const float m = first", via="shuffle_xor", step="online_pass", tool="synccheck",
        also=("uninitialised",),
    ),
    Mutant(
        mechanism="shuffle's mask lacks the lane", kernel="warp_sums", sees="divergent collective", blind=False,
        old="0xffffffffu, sum, distance", new="0xffffu, sum, distance", tool="synccheck",
        at="__shfl_xor_sync(0xffffu", step="sum",
    ),
    Mutant(
        mechanism="matrix load under divergence", kernel="standard", sees="divergent collective", blind=True,
        old="a[f] = load_a(q_tile, warp_row + 16 * f, d);",
        new="if (first_row + warp_row + 16 * f + g < shape.len_q) a[f] = load_a(q_tile, warp_row + 16 * f, d);",
        at="load_b_rows(k_tile", other="a[f] = load_a(q_tile", via="ldmatrix(b.r", step="scores", tool="synccheck",
        also=("uninitialised",),
    ),
    Mutant(
        mechanism="barrier under divergence", kernel="block_sum", sees="barrier", blind=True, tool="synccheck",
        within="load", old="part[threadIdx.x] = i < n ? x[i] : 0; __syncthreads();",
        new="  if (i < n) {\n    part[threadIdx.x] = x[i];\n    __syncthreads();\n  } else {\n    part[threadIdx.x] = 0;\n  }",
        at="part[threadIdx.x + half]; … __syncthreads();", other="__syncthreads(); } else", step="tree",
    ),
    Mutant(
        mechanism="warps at barriers of different lines", kernel="block_sum", sees="barrier", blind=True,
        within="tree", old="__syncthreads();",
        new="if (threadIdx.x < 32)\n      __syncthreads();\n    else\n      __syncthreads(), (void)0;",
        at="__syncthreads(), (void)0", other="__syncthreads(); else", step="tree",
    ),
    Mutant(
        mechanism="early return before a barrier", kernel="standard", sees="barrier", blind=True, tool="synccheck",
        old="const Tile<BR, BC> p_tile{sram_base()};",
        new="if (first_row + warp_row >= shape.len_q) return;\n  const Tile<BR, BC> p_tile{sram_base()};",
        at="for (int j = 0; j < key_tiles; ++j) { … barrier();", also=("uninitialised",), problem=FULL.replace(len_q=100),
    ),
    Mutant(
        mechanism="barrier's thread count too large", kernel="hand_over", sees="barrier", blind=False, hangs=True,
        old="barrier_of(64)", new="barrier_of(96)", at="barrier_of(96)", via="emu_named_barrier", step="sum",
    ),
    Mutant(
        mechanism="barrier's thread counts differ", kernel="hand_over", sees="barrier", blind=False, hangs=True,
        old="barrier_of(64)", new="barrier_of(warp == 0 ? 64 : 96)", at="barrier_of(warp == 0", step="sum",
    ),
    Mutant(
        mechanism="half a warp at a barrier, half at a shuffle", kernel="block_sum", sees="divergent collective", blind=False,
        within="tree", old="__syncthreads(); }",
        new="__syncthreads();\n  }\n  if (threadIdx.x < 16) __syncthreads();\n  __shfl_sync(0xffffffffu, 0, 0);\n",
        at="__shfl_sync(0xffffffffu, 0, 0)", other="if (threadIdx.x < 16) __syncthreads()", step="tree", tool="synccheck",
        hangs=True,
    ),
    Mutant(
        mechanism="flag that nobody sets", kernel="hand_over", sees="deadlock", blind=False, hangs=True,
        old="if (lane == 0) { total", new="if (lane == 32) {\n      total", at="while (atomicAdd(flag", step="wait",
    ),
]  # fmt: skip
"""What threads must do together."""

NUMBERS = [
    Mutant(
        mechanism="accumulators not rescaled", kernel="flash2", sees="numbers", blind=False,
        old="rescale(o[i], alpha[i]);", new="",
    ),
    Mutant(
        mechanism="matrices of a fragment in the wrong order", kernel="flash2", sees="numbers", blind=False, file=MMA,
        old="ldmatrix(b.r, tile.right(corner, k / CHUNK_ELEMENTS) + n * TileT::ROW_BYTES);",
        new="ldmatrix(b.r, tile.right(tile.at(lane_id() % 16, lane_id() / 16), k / CHUNK_ELEMENTS) + n * TileT::ROW_BYTES);",
    ),
    Mutant(
        mechanism="fragment not transposed", kernel="flash1", sees="numbers", blind=False, file=MMA,
        old="ldmatrix_transposed(b.r, tile", new="ldmatrix(b.r, tile",
    ),
    Mutant(
        mechanism="stored unswizzled, loaded swizzled", kernel="flash1", sees="numbers", blind=False,
        old="store_shared(partial_o(warp).at(16 * f + 8 * half + g, sram_chunk) + t % 2 * 8,",
        new="store_shared(partial_o(warp).base + (16 * f + 8 * half + g) * PartialO::ROW_BYTES + sram_chunk * 16 + t % 2 * 8,",
    ),
    Mutant(
        mechanism="mask left out of the diagonal's tiles", kernel="flash2", sees="numbers", blind=True, file="include/mask.cuh",
        old="(visible_keys(shape, first_row).last + 1) / columns - 1}", new="visible_keys(shape, last_row).last / columns}",
    ),
    Mutant(
        mechanism="old maximum of another row", kernel="flash1", sees="numbers", blind=True,
        old="if (lse && j == key_tiles - 1) store_global(lse + place, m_new + log_approx(l_new));",
        new="if (lse && j == key_tiles - 1) store_global(lse + place, top + log_approx(l_new));",
    ),
]  # fmt: skip
"""Right in all that a machine can check, and wrong."""

COUNTS = [
    Mutant(
        mechanism="swizzle removed", kernel="flash2", sees="wavefronts", blind=True, file=TILE, problem=ALIGNED,
        old="(chunk ^ row >> (3 - BITS)) % GROUP", new="chunk % GROUP", step="scores", tensor="k",
    ),
    Mutant(
        mechanism="padding of a transposed tile removed", kernel="transpose", sees="wavefronts", blind=True,
        old="tile[32][33]", new="tile[32][32]", step="store", tensor="tile",
    ),
    Mutant(
        mechanism="neighbouring threads copy neighbouring rows", kernel="flash2", sees="sectors", blind=True, file=TILE,
        problem=NARROW, old="row = i / CHUNKS, chunk = i % CHUNKS;", new="row = i % ROWS, chunk = i / ROWS;",
        step="load_k", tensor="k",
    ),
    Mutant(
        mechanism="columns written where rows should be", kernel="transpose", sees="sectors", blind=True,
        old="y[(across + row) * n + down + threadIdx.x] = tile[threadIdx.x][row];",
        new="y[(across + threadIdx.x) * n + down + row] = tile[row][threadIdx.x];", step="store", tensor="y",
    ),
    Mutant(
        mechanism="store past the primitives", kernel="standard", sees="plain", blind=True,
        old="store_global(s_row + key * 4LL, make_float2(", new="*reinterpret_cast<float2*>(s_row + key * 4LL) = (make_float2(",
    ),
    Mutant(
        mechanism="K loaded anew for each tile of Q", kernel="flash1", sees="bytes", blind=True, problem=FULL,
        within="load_q", old="copy_commit();",
        new="if (i > 0)\n        load_tile<THREADS>(k_tile, row_address(k, batch, kv_head(shape, head), j * BC), k.row, "
        "keys, row_bytes(shape));\n      copy_commit();",
        step="load_q", tensor="k",
    ),
    Mutant(
        mechanism="masked tiles not skipped", kernel="flash2", sees="bytes", blind=True, file="include/mask.cuh",
        old="return {keys.first / columns, keys.last / columns};", new="return {0, (shape.len_kv - 1) / columns};",
        step="load_k", tensor="k",
    ),
    Mutant(
        mechanism="fragment of K read for each product", kernel="flash1", sees="bytes", blind=True,
        within="scores", old="FragmentA a = load_a(q_tile, 16 * f, d);",
        new="FragmentA a = load_a(q_tile, 16 * f, d);\n          b[0] = load_b_rows(k_tile, warp * WARP_KEYS, d);",
        step="scores", tensor="k",
    ),
    Mutant(
        mechanism="step mark after what it marks", kernel="standard", sees="ledger", blind=True,
        within="load_v", old=_LOAD_V, new=f"// step: load_p (longer than it takes)\n{_LOAD_V}\n// step: load_v (too late)\n",
        step="load_p", tensor="v",
    ),
]  # fmt: skip
"""Right numbers, and more bytes, sectors or passes than needed; or counted where they don't belong."""

ZOO = [*WAITS, *MEMORY, *TOGETHER, *NUMBERS, *COUNTS]
