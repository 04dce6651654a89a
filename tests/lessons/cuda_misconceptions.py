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
]  # fmt: skip

MISCONCEPTIONS = [Misconception(*row) for row in _ROWS]
