# ruff: noqa: E501  (a table)
"""What learners of CUDA get wrong: each solution with one thought in it changed, and what the check has to say about it."""

from __future__ import annotations

from tests.lessons.misconceptions import Misconception

_ROWS = [
    ("05.1", "no-guard", "  if (i < n)  // solution\n", "", "out of bounds", r"axpy\.cu:\d+: out of bounds.*reads 4 bytes.*\| +out\[i\] ="),
    ("05.1", "every-block-the-first-elements", "blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x", "misuse", r"axpy\.cu:\d+.*race between blocks.*out\["),
    ("05.1", "blocks-of-256-always", "blockIdx.x * blockDim.x", "blockIdx.x * 256", "numbers", r"out\[\d+\], in row tile \d.*never written"),
    ("05.1", "guard-one-too-strict", "if (i < n)", "if (i < n - 1)", "numbers", r"out\[999\], in row tile 7.*all others are right.*4 bytes of out were never written"),
    ("05.1", "reads-what-it-writes", "out[i] = a * x[i] + y[i];", "{ out[i] = a * x[i]; __syncwarp(); out[i] += y[i]; }", "bytes", "out read: you moved 4,000 bytes, the budget is 0"),
    ("05.2", "barrier-in-the-loop-only", "  part[t] = mine;\n  __syncthreads();  // solution\n", "  part[t] = mine;\n", "misuse", r"row_sum\.cu:\d+.*part.*\|.*part\[t \+ half\]"),
    ("05.2", "barrier-before-the-loop-only", "    __syncthreads();  // solution\n  }", "  }", "misuse", r"row_sum\.cu:\d+: race: .*part.*\|.*part\[t \+ half\]"),
    ("05.2", "barrier-inside-the-if", "    if (t < half) part[t] += part[t + half];\n    __syncthreads();", "    if (t < half) { part[t] += part[t + half]; __syncthreads(); }", "misuse", r"row_sum\.cu:\d+: barrier:.*64 of the block's threads don't come"),
    ("05.2", "barrier-of-the-warp", "    __syncthreads();  // solution\n  }", "    __syncwarp();\n  }", "misuse", r"row_sum\.cu:\d+: race:"),
    ("05.2", "the-tree-stops-early", "half > 0", "half > 1", "numbers", r"sums\[0\], in row tile 0"),
    ("05.3", "maximum-of-a-lane", "  for (int mask = 16; mask > 0; mask /= 2) top = ", "  for (int mask = 16; mask > 16; mask /= 2) top = ", "numbers", r"y\[0, 0\], in row tile 0"),
    ("05.3", "no-maximum", "expf(v[i] - top)", "expf(v[i])", "numbers", r"y\[0, 0\], in row tile 0, is nan"),
    ("05.3", "shuffles-down-and-keeps-it", "sum += __shfl_xor_sync(0xffffffff, sum, mask)", "sum += __shfl_down_sync(0xffffffff, sum, mask)", "numbers", r"y\[0, 1\], in row tile 0"),
    ("05.3", "shuffles-four-of-five", "mask /= 2) sum", "mask /= 4) sum", "numbers", r"y\[0, 0\], in row tile 0"),
    ("05.3", "a-shuffle-some-lanes-skip", "sum += __shfl_xor_sync(0xffffffff, sum, mask);", "if (lane < cols - 235) sum += __shfl_xor_sync(0xffffffff, sum, mask);", "misuse", r"row_softmax\.cu:\d+: divergent collective"),
    ("05.3", "reads-the-row-again", "v[i] = expf(v[i] - top);", "if (lane + 32 * i < cols) v[i] = x[row * cols + lane + 32 * i]; __syncwarp(); v[i] = expf(v[i] - top);", "bytes", "x read: you moved 16,384 bytes, the budget is 8,192: too many, 2 times"),
    ("05.4", "no-barrier-after-the-load", ": 0;\n    __syncthreads();  // solution\n", ": 0;\n", "misuse", r"scores_lse\.cu:\d+, step scores: (race|uninitialised): .*k_tile.*\|.*q_row\[d\] \* k_tile"),
    ("05.4", "no-barrier-before-the-load", "    // step: load_k\n    __syncthreads();  // solution\n", "    // step: load_k\n", "misuse", r"scores_lse\.cu:\d+, step load_k: race: .*k_tile"),
    ("05.4", "keys-past-the-end-count", "j + c < len_kv ? s[c] * scale : -INFINITY", "s[c] * scale", "numbers", r"lse\[0, 0\], in row tile 0"),
    ("05.4", "forgets-the-scale", "s[c] * scale :", "s[c] :", "numbers", r"lse\[0, 0\], in row tile 0"),
    ("05.4", "l-is-not-rescaled", "    l *= expf(m - m_new);  // solution\n", "", "numbers", r"lse\[0, \d+\], in row tile 0"),
    ("05.4", "threads-without-a-query-leave", "  // step: load_q\n", "  if (row >= len_q) return;\n  // step: load_q\n", "misuse", r"scores_lse\.cu:\d+.*(barrier|uninitialised|race)"),
    ("05.4", "each-thread-its-own-keys", "k_tile[c][d];\n", "(j + c < len_kv ? k[(j + c) * D + d] : 0);\n", "bytes", r"k read: you moved .*the budget is 8,192"),
    ("05.5", "output-is-not-rescaled", "    for (int d = 0; d < D; ++d) acc[d] *= alpha;  // solution\n", "", "numbers", r"out\[0, \d+, 0\], in row tile 0"),
    ("05.5", "divides-at-every-tile", "    m = m_new;\n", "    m = m_new;\n    for (int d = 0; d < D; ++d) acc[d] /= l;\n", "numbers", r"out\[0, 0, 0\], in row tile 0"),
    ("05.5", "never-divides", "acc[d] / l;", "acc[d];", "numbers", r"out\[0, 0, 0\], in row tile 0"),
    ("05.5", "v-past-the-end-left-as-it-was", "v_tile[i / D][i % D] = j + i / D < len_kv ? v[j * D + i] : 0;", "if (j + i / D < len_kv) v_tile[i / D][i % D] = v[j * D + i];", "misuse", r"my_flash2\.cu:\d+, step output: uninitialised.*v_tile"),
    ("05.5", "every-tile-of-v-the-first", "v[j * D + i]", "v[i]", "numbers", r"out\[0, 0, 0\], in row tile 0"),
    ("05.5", "lse-without-its-maximum", "m + logf(l);", "logf(l);", "numbers", r"lse\[0, 0\], in row tile 0"),
    ("06.1", "a-column-for-each-lane", "8 * n + 2 * t + e % 2", "8 * n + t", "numbers", r"s\[0, 0\], in row tile 0.*bytes of s were never written"),
    ("06.1", "rows-and-columns-of-a-fragment-mixed-up", "g + e / 2 * 8", "g + e % 2 * 8", "numbers", r"s\[0, 0\], in row tile 0.*bytes of s were never written"),
    ("06.1", "neighbouring-rows-in-a-lane", "g + e / 2 * 8", "2 * g + e / 2", "numbers", r"s\[1, 0\], in row tile 0"),
    ("06.1", "k-as-v", "load_b_rows(k_tile, 0, d)", "load_b_columns(k_tile, 0, d)", "numbers", r"s\[0, 0\], in row tile 0"),
    ("06.1", "the-first-columns-at-every-step", "load_b_rows(k_tile, 0, d)", "load_b_rows(k_tile, 0, 0)", "numbers", r"s\[0, 0\], in row tile 0"),
    ("06.1", "transposes-the-result", "row < len_q && column < len_kv) s[row * len_kv + column]", "column < len_q && row < len_kv) s[column * len_kv + row]", "numbers", r"s\[0, 1\], in row tile 0"),
    ("06.2", "another-order-but-the-same-in-each-row", "chunk ^ row % 8", "chunk ^ 5", "conflicts", "tile read in SRAM: 512 passes over the banks, 64 would do"),
    ("06.2", "changes-every-eight-rows", "chunk ^ row % 8", "chunk ^ row / 8", "conflicts", "tile read in SRAM: .* passes over the banks"),
    ("06.2", "half-of-the-rows", "chunk ^ row % 8", "chunk ^ row % 4", "conflicts", "tile read in SRAM: .* passes over the banks"),
    ("06.2", "no-permutation", "chunk ^ row % 8", "chunk & row % 8", "misuse", r"swizzle\.cu:\d+: race: .*tile"),
    ("06.2", "leaves-its-row", "chunk ^ row % 8", "chunk + row % 8", "misuse", r"swizzle\.cu:\d+: "),
    ("06.2", "padding", "row * CHUNKS + (chunk ^ row % 8)", "row * (CHUNKS + 1) + chunk", "out of bounds", r"swizzle\.cu:\d+: out of bounds: .*tile"),
    ("06.3", "no-wait", "    copy_wait<1>();  // solution\n", "", "misuse", r"column_sums\.cu:\d+: wait forgotten: .*tile.*\| +for \(int r"),
    ("06.3", "waits-but-no-barrier", "    copy_wait<1>();  // solution\n    barrier();  // solution\n", "    copy_wait<1>();\n", "misuse", r"column_sums\.cu:\d+: (race|uninitialised|wait forgotten): .*tile"),
    ("06.3", "barrier-before-the-wait", "    copy_wait<1>();  // solution\n    barrier();  // solution\n", "    barrier();\n    copy_wait<1>();\n", "misuse", r"column_sums\.cu:\d+: .*tile"),
    ("06.3", "no-barrier-after-the-sum", "sum += tile[j % 2][r][t];\n    // the next round writes into the place that was just read\n    barrier();  // solution\n", "sum += tile[j % 2][r][t];\n", "misuse", r"column_sums\.cu:\d+.*race: .*tile"),
    ("06.3", "no-empty-group-at-the-end", "load(j + 1); else copy_commit();", "load(j + 1);", "misuse", r"column_sums\.cu:\d+: wait forgotten"),
    ("06.3", "one-place-only", "j % 2", "0", "misuse", r"column_sums\.cu:\d+: .*tile"),
    ("06.3", "loads-past-the-end", "if (j + 1 < tiles) load(j + 1); else copy_commit();", "load(j + 1); load(j + 2);", "misuse", r"column_sums\.cu:\d+: .*tile"),
]  # fmt: skip

MISCONCEPTIONS = [Misconception(*row) for row in _ROWS]
