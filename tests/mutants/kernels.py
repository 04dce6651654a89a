"""Seeded bugs in the kernels: patches of the .cu and .cuh files. None reaches memory that isn't the caller's."""

from __future__ import annotations

from tests.mutants.zoo import Mutant

FLASH1, STANDARD, ONLINE = (f"kernels_cu/{name}.cu" for name in ("flash1", "standard", "online_softmax"))
MASK, MMA, PARAMS, TILE, TYPES, WARP = (
    f"kernels_cu/include/{name}.cuh" for name in ("mask", "mma", "params", "tile", "types", "warp")
)

KERNELS = [
    Mutant(
        mechanism="offsets of 32 bits",
        algorithm="flash2",
        file=PARAMS,
        check="huge",
        blind=True,
        find="return static_cast<char*>(t.data) + batch * t.batch + head * t.head + row * t.row;",
        put="return static_cast<char*>(t.data) + static_cast<unsigned>(batch * t.batch + head * t.head + row * t.row);",
    ),
    Mutant(
        mechanism="garbage past the head dim not cut off",
        algorithm="flash2",
        file=TILE,
        check="memory",
        blind=True,
        find="min(max(row_bytes - chunk * CHUNK_BYTES, 0), CHUNK_BYTES)",
        put="(row_bytes > chunk * CHUNK_BYTES ? CHUNK_BYTES : 0)",
    ),
    Mutant(
        mechanism="one row past the end loaded",
        algorithm="flash2",
        file=TILE,
        check="memory",
        blind=True,
        find="return row < rows ?",
        put="return row <= rows ?",
    ),
    Mutant(
        mechanism="one row past the end stored",
        algorithm="standard",
        file=STANDARD,
        check="memory",
        blind=True,
        step="store_o",
        find="const int bytes = row < shape.len_q ? padded_row_bytes(shape) : 0;",
        put="const int bytes = row <= shape.len_q ? padded_row_bytes(shape) : 0;",
    ),
    Mutant(
        mechanism="padding of a workspace row left as it was",
        algorithm="standard",
        file=STANDARD,
        check="memory",
        blind=True,
        step="store_p",
        find="for (int key = first; key < round_up(shape.len_kv, CHUNK_ELEMENTS); key += WARP_COLUMNS) {",
        put="for (int key = first; key < shape.len_kv; key += WARP_COLUMNS) {",
    ),
    Mutant(
        mechanism="exponential of ten bits",
        algorithm="flash1",
        file=TYPES,
        check="rule",
        blind=True,
        find='asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));',
        put='asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); y = __uint_as_float(__float_as_uint(y) & 0xffffe000u);',
    ),
    Mutant(
        mechanism="mask left out where a tile only seems fully visible",
        algorithm="flash2",
        file=MASK,
        check="key_sets",
        blind=True,
        find="(visible_keys(shape, first_row).last + 1) / columns - 1}",
        put="(visible_keys(shape, first_row).last + 1) / columns}",
    ),
    Mutant(
        mechanism="maximum over half of the lanes that hold a row",
        algorithm="flash2",
        file=WARP,
        check="rule",
        blind=False,
        find="return fmaxf(x, shuffle_xor(x, 2));",
        put="return x;",
    ),
    Mutant(
        mechanism="copies to SRAM not waited for",
        algorithm="standard",
        file=STANDARD,
        check="rule",
        blind=False,
        step="load_v",
        find="copy_wait<0>();",
        put="copy_wait<1>();",
    ),
    Mutant(
        mechanism="running maximum starts at 0",
        algorithm="flash1",
        file=FLASH1,
        check="rule",
        blind=True,
        step="init",
        find="store_global(m + statistics + row, -INF);",
        put="store_global(m + statistics + row, 0.f);",
    ),
    Mutant(
        mechanism="partial sums merged without a common maximum",
        algorithm="online_softmax",
        file=ONLINE,
        check="rule",
        blind=False,
        step="online_pass",
        find="const float l = warp_sum(lane_l * exp_approx(lane_m - base));",
        put="const float l = warp_sum(lane_l);",
    ),
]
"""Killed where there is a GPU."""
