# ruff: noqa: E501  (a table)
"""What learners of CUDA get wrong: each solution with one thought in it changed, and what the check has to say about it.

Where the emulator names no fault, the last columns have the step that the mistake is in, or the line, and the reason: the tutor
has to name both.
"""

from __future__ import annotations

from tests.flashlab.lessons.misconceptions import Misconception

_ROWS = [
    ("05.1", "no-guard", "  if (i < n)  // solution\n", "", "out of bounds", r"axpy\.cu:\d+: out of bounds.*reads 4 bytes.*\| +out\[i\] ="),
    ("05.1", "every-block-the-first-elements", "blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x", "numbers", r"out\[128\], in row tile 1.*never written", "4", "i is 0 and should be 128"),
    ("05.1", "blocks-of-256-always", "blockIdx.x * blockDim.x", "blockIdx.x * 256", "numbers", r"out\[\d+\], in row tile \d.*never written", "4", "i is 256 and should be 128"),
    ("05.1", "guard-one-too-strict", "if (i < n)", "if (i < n - 1)", "numbers", r"out\[999\], in row tile 7.*all others are right.*4 bytes of out were never written", "6", r"the solution stores out\[999\], and in yours no thread does"),
    ("05.1", "reads-what-it-writes", "out[i] = a * x[i] + y[i];", "{ out[i] = a * x[i]; __syncwarp(); out[i] += y[i]; }", "bytes", "out read: you moved 4,000 bytes, the budget is 0", "7", "its threads read 512 bytes of out here, and those of the solution 0"),
    ("05.1", "the-factor-on-the-wrong-array", "a * x[i] + y[i]", "x[i] + a * y[i]", "numbers", r"out\[0\], in row tile 0", "7", r"out\[0\] is .* and should be"),
    ("05.1", "one-thread-for-all-of-its-block", "  if (i < n)  // solution\n    out[i] = a * x[i] + y[i];", "  if (threadIdx.x == 0)\n    for (int e = i; e < min(n, i + static_cast<int>(blockDim.x)); ++e) out[e] = a * x[e] + y[e];", "instructions", r"out written: 1,000 warp instructions, the budget is 32"),
    ("05.2", "barrier-in-the-loop-only", "  part[t] = mine;\n  __syncthreads();  // solution\n", "  part[t] = mine;\n", "misuse", r"row_sum\.cu:\d+.*part.*\|.*part\[t \+ half\]"),
    ("05.2", "barrier-before-the-loop-only", "    __syncthreads();  // solution\n  }", "  }", "misuse", r"row_sum\.cu:\d+: race: .*part.*\|.*part\[t \+ half\]"),
    ("05.2", "barrier-inside-the-if", "    if (t < half) part[t] += part[t + half];\n    __syncthreads();", "    if (t < half) { part[t] += part[t + half]; __syncthreads(); }", "misuse", r"row_sum\.cu:\d+: barrier:.*64 of the block's threads don't come"),
    ("05.2", "barrier-of-the-warp", "    __syncthreads();  // solution\n  }", "    __syncwarp();\n  }", "misuse", r"row_sum\.cu:\d+: race:"),
    ("05.2", "the-tree-stops-early", "half > 0", "half > 1", "numbers", r"sums\[0\], in row tile 0", "9", "your loop over half has ended"),
    ("05.2", "one-thread-adds-all-parts", "    if (t < half) part[t] += part[t + half];\n", "    for (int i = half; t == 0 && i < 2 * half; ++i) part[0] += part[i];\n", "passes", r"part read in SRAM: [\d,]+ of [\d,]+ passes over the banks; the budget is 174 in all"),
    ("05.3", "maximum-of-a-lane", "  for (int mask = 16; mask > 0; mask /= 2) top = ", "  for (int mask = 16; mask > 16; mask /= 2) top = ", "numbers", r"y\[0, 0\], in row tile 0", "15", "top is the maximum of x alone: what came before, or what other threads have, is missing"),
    ("05.3", "no-maximum", "expf(v[i] - top)", "expf(v[i])", "numbers", r"y\[0, 0\], in row tile 0, is nan", "20", r"v\[0\] is inf and should be"),
    ("05.3", "shuffles-down-and-keeps-it", "sum += __shfl_xor_sync(0xffffffff, sum, mask)", "sum += __shfl_down_sync(0xffffffff, sum, mask)", "numbers", r"y\[0, 1\], in row tile 0", "23", "sum is .* and should be"),
    ("05.3", "shuffles-four-of-five", "mask /= 2) sum", "mask /= 4) sum", "numbers", r"y\[0, 0\], in row tile 0", "23", "sum is .* and should be"),
    ("05.3", "a-shuffle-some-lanes-skip", "sum += __shfl_xor_sync(0xffffffff, sum, mask);", "if (lane < cols - 235) sum += __shfl_xor_sync(0xffffffff, sum, mask);", "misuse", r"row_softmax\.cu:\d+: divergent collective"),
    ("05.3", "reads-the-row-again", "v[i] = expf(v[i] - top);", "if (lane + 32 * i < cols) v[i] = x[row * cols + lane + 32 * i]; __syncwarp(); v[i] = expf(v[i] - top);", "bytes", "x read: you moved 16,384 bytes, the budget is 8,192: too many, 2 times", "20", "its threads read 8,192 bytes of x here, and those of the solution 4,096"),
    ("05.3", "exchanges-through-shared-memory", "top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, mask));", "{ __shared__ float tops[4][32]; tops[threadIdx.x / 32][lane] = top; __syncwarp(); top = fmaxf(top, tops[threadIdx.x / 32][lane ^ mask]); __syncwarp(); }", "passes", r"passes over the banks; the budget is 96 in all"),
    ("05.4", "maximum-starts-at-0", "float m = -INFINITY", "float m = 0", "numbers", r"lse\[0, 0\], in row tile 0, is -inf", "load_q", "m starts at 0 and not at -inf"),
    ("05.4", "no-barrier-after-the-load", ": 0;\n    __syncthreads();  // solution\n", ": 0;\n", "misuse", r"scores_lse\.cu:\d+, step scores: (race|uninitialised): .*k_tile.*\|.*q_row\[d\] \* k_tile"),
    ("05.4", "no-barrier-before-the-load", "    // step: load_k\n    __syncthreads();  // solution\n", "    // step: load_k\n", "misuse", r"scores_lse\.cu:\d+, step load_k: race: .*k_tile"),
    ("05.4", "keys-past-the-end-count", "j + c < len_kv ? s[c] * scale : -INFINITY", "s[c] * scale", "numbers", r"lse\[0, 0\], in row tile 0", "scores", "s has values where the mask hides the key"),
    ("05.4", "forgets-the-scale", "s[c] * scale :", "s[c] :", "numbers", r"lse\[0, 0\], in row tile 0", "scores", "s was not multiplied by scale"),
    ("05.4", "l-is-not-rescaled", "    l *= expf(m - m_new);  // solution\n", "", "numbers", r"lse\[0, \d+\], in row tile 0", "softmax", r"what l had before was not multiplied by exp\(m - m_new\)"),
    ("05.4", "threads-without-a-query-leave", "  // step: load_q\n", "  if (row >= len_q) return;\n  // step: load_q\n", "misuse", r"scores_lse\.cu:\d+.*(barrier|uninitialised|race)"),
    ("05.4", "each-thread-its-own-keys", "k_tile[c][d];\n", "(j + c < len_kv ? k[(j + c) * D + d] : 0);\n", "bytes", r"k read: you moved .*the budget is 8,192", "scores", "its threads read .* bytes of k here, and those of the solution 0"),
    ("05.4", "no-maximum", "m_new = fmaxf(m_new, s[c]);", "m_new = 0;", "numbers", r"lse\[0, 0\], in row tile 0", "scores", "m_new is 0 in all threads"),
    ("05.5", "maximum-starts-at-0", "float m = -INFINITY", "float m = 0", "numbers", r"out\[0, 0, 0\], in row tile 0, is nan", "load_q", "m starts at 0 and not at -inf"),
    ("05.5", "output-is-not-rescaled", "    for (int d = 0; d < D; ++d) acc[d] *= alpha;  // solution\n", "", "numbers", r"out\[0, \d+, 0\], in row tile 0", "rescale", "acc was not multiplied by alpha"),
    ("05.5", "divides-at-every-tile", "    m = m_new;\n", "    m = m_new;\n    for (int d = 0; d < D; ++d) acc[d] /= l;\n", "numbers", r"out\[0, 0, 0\], in row tile 0", "output", r"acc was divided by l = \S+ here, and the solution does that elsewhere"),
    ("05.5", "divides-in-each-round-and-multiplies-back", "    for (int d = 0; d < D; ++d) acc[d] *= alpha;  // solution\n", "    if (j > 0)\n      for (int d = 0; d < D; ++d) acc[d] = acc[d] / l * alpha * l;\n", "asked", r"my_flash2\.cu:37: divides by l in each round.*\| +for"),
    ("05.5", "alpha-twice", "acc[d] *= alpha;", "acc[d] *= alpha * alpha;", "numbers", r"out\[0, \d+, 0\], in row tile 0", "rescale", r"acc was multiplied by alpha = \S+ once too often"),
    ("05.5", "never-divides", "acc[d] / l;", "acc[d];", "numbers", r"out\[0, 0, 0\], in row tile 0", "store_o", "out was not divided by l"),
    ("05.5", "v-past-the-end-left-as-it-was", "v_tile[i / D][i % D] = j + i / D < len_kv ? v[j * D + i] : 0;", "if (j + i / D < len_kv) v_tile[i / D][i % D] = v[j * D + i];", "misuse", r"my_flash2\.cu:\d+, step output: uninitialised.*v_tile"),
    ("05.5", "every-tile-of-v-the-first", "v[j * D + i]", "v[i]", "numbers", r"out\[0, 0, 0\], in row tile 0", "load_v", r"the block doesn't load v\[0, 32, 0\] and loads v\[0, 0, 0\]"),
    ("05.5", "lse-without-its-maximum", "m + logf(l);", "logf(l);", "numbers", r"lse\[0, 0\], in row tile 0", "store_lse", "lse lacks m"),
    ("05.5", "rescales-upside-down", "alpha = expf(m - m_new)", "alpha = expf(m_new - m)", "numbers", r"out\[0, 0, 0\], in row tile 0", "rescale", "alpha is one over what it should be"),
    ("05.5", "rescales-the-output-only", "    l *= alpha;  // solution\n", "", "numbers", r"out\[0, \d+, 0\], in row tile 0", "rescale", "l was not multiplied by alpha"),
    ("05.5", "one-thread-loads-v", "for (int i = t; i < BC * D; i += BR) v_tile", "for (int i = 0; t == 0 && i < BC * D; ++i) v_tile", "instructions", r"v read: 2,048 warp instructions, the budget is 128"),
    ("06.1", "without-tensor-cores", """    mma(c[0], c[1], a, b);  // solution
  }
""", """  }
  auto product = [&](int row, int column) {
    float sum = 0;
    for (int d = 0; d < 64; ++d) {
      const unsigned x = q_tile.at(row, d / 8) - base + d % 8 * 2, y = k_tile.at(column, d / 8) - base + d % 8 * 2;
      sum += __half2float(*reinterpret_cast<const __half*>(sram + x)) * __half2float(*reinterpret_cast<const __half*>(sram + y));
    }
    return sum;
  };
  for (int n = 0; n < 2; ++n)
    for (int e = 0; e < 4; ++e) c[n][e] = product(lane_id() / 4 + e / 2 * 8, 8 * n + 2 * (lane_id() % 4) + e % 2);
""", "arithmetic", r"mma: 0 FLOPs of tensor cores, this takes 32,768"),
    ("06.1", "a-column-for-each-lane", "8 * n + 2 * t + e % 2", "8 * n + t", "numbers", r"s\[0, 0\], in row tile 0.*bytes of s were never written", "33", "column is 0 and should be 1"),
    ("06.1", "rows-and-columns-of-a-fragment-mixed-up", "g + e / 2 * 8", "g + e % 2 * 8", "numbers", r"s\[0, 0\], in row tile 0.*bytes of s were never written", "32", "row is 8 and should be 0"),
    ("06.1", "neighbouring-rows-in-a-lane", "g + e / 2 * 8", "2 * g + e / 2", "numbers", r"s\[1, 0\], in row tile 0", "32", "row is 1 and should be 8"),
    ("06.1", "k-as-v", "load_b_rows(k_tile, 0, d)", "load_b_columns(k_tile, 0, d)", "numbers", r"s\[0, 0\], in row tile 0", "23", "b doesn't hold what it should"),
    ("06.1", "the-first-columns-at-every-step", "load_b_rows(k_tile, 0, d)", "load_b_rows(k_tile, 0, 0)", "numbers", r"s\[0, 0\], in row tile 0", "23", "b doesn't hold what it should"),
    ("06.1", "transposes-the-result", "row < len_q && column < len_kv) s[row * len_kv + column]", "column < len_q && row < len_kv) s[column * len_kv + row]", "numbers", r"s\[0, 1\], in row tile 0", "34", "s is transposed"),
    ("06.2", "another-order-but-the-same-in-each-row", "chunk ^ row % 8", "chunk ^ 5", "conflicts", "tile read in SRAM: 512 passes over the banks, 64 would do"),
    ("06.2", "changes-every-eight-rows", "chunk ^ row % 8", "chunk ^ row / 8", "conflicts", "tile read in SRAM: .* passes over the banks"),
    ("06.2", "half-of-the-rows", "chunk ^ row % 8", "chunk ^ row % 4", "conflicts", "tile read in SRAM: .* passes over the banks"),
    ("06.2", "no-permutation", "chunk ^ row % 8", "chunk & row % 8", "misuse", r"swizzle\.cu:\d+: race: .*tile"),
    ("06.2", "leaves-its-row", "chunk ^ row % 8", "chunk + row % 8", "misuse", r"swizzle\.cu:\d+: "),
    ("06.2", "padding", "row * CHUNKS + (chunk ^ row % 8)", "row * (CHUNKS + 1) + chunk", "out of bounds", r"swizzle\.cu:\d+: out of bounds: .*tile"),
    ("06.3", "waits-for-the-next-tile-too", "copy_wait<1>()", "copy_wait<0>()", "overlap", r"tile read in SRAM: 0 bytes of it while a copy was on its way"),
    ("06.3", "no-wait", "    copy_wait<1>();  // solution\n", "", "misuse", r"column_sums\.cu:\d+: wait forgotten: .*tile.*\| +for \(int r"),
    ("06.3", "waits-but-no-barrier", "    copy_wait<1>();  // solution\n    barrier();  // solution\n", "    copy_wait<1>();\n", "misuse", r"column_sums\.cu:\d+: (race|uninitialised|wait forgotten): .*tile"),
    ("06.3", "barrier-before-the-wait", "    copy_wait<1>();  // solution\n    barrier();  // solution\n", "    barrier();\n    copy_wait<1>();\n", "misuse", r"column_sums\.cu:\d+: .*tile"),
    ("06.3", "no-barrier-after-the-sum", "sum += tile[j % 2][r][t];\n    // the next round writes into the place that was just read\n    barrier();  // solution\n", "sum += tile[j % 2][r][t];\n", "misuse", r"column_sums\.cu:\d+.*race: .*tile"),
    ("06.3", "no-empty-group-at-the-end", "load(j + 1); else copy_commit();", "load(j + 1);", "misuse", r"column_sums\.cu:\d+: wait forgotten"),
    ("06.3", "one-place-only", "j % 2", "0", "misuse", r"column_sums\.cu:\d+: .*tile"),
    ("06.3", "loads-past-the-end", "if (j + 1 < tiles) load(j + 1); else copy_commit();", "load(j + 1); load(j + 2);", "misuse", r"column_sums\.cu:\d+: .*tile"),
    ("06.3", "loads-after-the-sum", "    if (j + 1 < tiles) load(j + 1); else copy_commit();  // solution\n    copy_wait<1>();  // solution\n    barrier();  // solution\n    for (int r = 0; r < TILE; ++r) sum += tile[j % 2][r][t];\n", "    copy_wait<0>();\n    barrier();\n    for (int r = 0; r < TILE; ++r) sum += tile[j % 2][r][t];\n    barrier();\n    if (j + 1 < tiles) load(j + 1);\n", "overlap", r"tile read in SRAM: 0 bytes of it while a copy was on its way"),
    ("07.1", "no-padding", "tile[32][33]", "tile[32][32]", "conflicts", "tile read in SRAM: 4,096 passes over the banks, 128 would do"),
    ("07.1", "writes-down-a-column", "y[row * rows + col] = tile[tx][i]", "y[(32 * blockIdx.x + tx) * rows + 32 * blockIdx.y + i] = tile[i][tx]", "sectors", "y written: 4,096 sectors of 32 bytes, the budget is 512"),
    ("07.1", "the-block-s-place-is-not-mirrored", "const int row = 32 * blockIdx.x + i, col = 32 * blockIdx.y + tx;", "const int row = 32 * blockIdx.y + i, col = 32 * blockIdx.x + tx;", "numbers", r"y\[0, 32\], in row tile 0", "13", "col is 32 and should be 0"),
    ("07.1", "no-barrier", "  __syncthreads();  // solution\n", "", "misuse", r"transpose\.cu:\d+: .*tile"),
    ("07.1", "forgets-to-transpose-the-tile", "= tile[tx][i];", "= tile[i][tx];", "numbers", r"y\[0, 1\], in row tile 0", "14", r"y\[0, 1\] has the value that belongs to y\[1, 0\]"),
    ("07.1", "a-thread-its-own-row-only", "row = 32 * blockIdx.y + i", "row = 32 * blockIdx.y", "numbers", r"y\[0, 1\], in row tile 0", "8", "row is 0 in all threads"),
    ("07.2", "no-tail", "    for (int j = i; j < n; ++j) y[j] = 2 * x[j];  // solution\n", "", "numbers", r"y\[\d+\], in row tile \d+, is nan.*were never written", "9", r"the solution stores y\[\d+\], and in yours no thread does"),
    ("07.2", "a-float4-past-the-end", "if (i + 3 < n)", "if (i < n)", "out of bounds", r"twice\.cu:\d+: out of bounds: .*past the end of x"),
    ("07.2", "one-by-one", "*reinterpret_cast<float4*>(y + i) = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);", "for (int j = 0; j < 4; ++j) y[i + j] = 2 * (j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w);", "instructions", "y written: 64 warp instructions, the budget is 16"),
    ("07.2", "each-thread-its-own-number", "4 * (blockIdx.x * blockDim.x + threadIdx.x)", "blockIdx.x * blockDim.x + threadIdx.x", "misuse", r"twice\.cu:\d+: misaligned: .*x\[1\]"),
    ("07.2", "forgets-the-fourth", "2 * v.z, 2 * v.w)", "2 * v.z, v.w)", "numbers", r"y\[3\], in row tile 0.*all of them 0.5 times", "7", r"y\[3\] is .* and should be"),
    ("07.3", "x-for-each-row", "* mine;", "* *const_cast<const volatile float*>(x + c);", "bytes", "x read: you moved .*the budget is 2,048: too many", "9", "its threads read 2,560 bytes of x here, and those of the solution 512"),
    ("07.3", "rows-past-the-end", "      if (first + r < rows) sum[r]", "      sum[r]", "out of bounds", r"four_rows\.cu:\d+: out of bounds: .*past the end of a"),
    ("07.3", "the-same-row-four-times", "a[(first + r) * cols + c]", "a[first * cols + c]", "numbers", r"y\[1\], in row tile 0", "9", r"the block doesn't load a\[1, 0\]"),
    ("07.3", "one-row-a-block-after-all", "first = 4 * blockIdx.x", "first = blockIdx.x", "numbers", r"y\[7\], in row tile 1.*never written", "3", "first is 1 and should be 4"),
    ("07.3", "blocks-share-rows", "first = 4 * blockIdx.x", "first = 2 * blockIdx.x", "numbers", r"y\[10\], in row tile 2.*never written", "3", "first is 2 and should be 4"),
    ("10.1", "a-float-at-a-time", "const float4 a = q_row[d], b = k_tile[c][d];", "const volatile float* one = reinterpret_cast<const volatile float*>(&k_tile[c][d]); const float4 a = q_row[d], b = make_float4(one[0], one[1], one[2], one[3]);", "passes", r"k_tile read in SRAM: 24,576 of 37,632 passes over the banks; the budget is 31,680 in all"),
    ("10.1", "shuffles-in-place-of-loads", """      for (int d = 0; d < CHUNKS; ++d) {  // solution
        const float4 b = v_tile[c][d];  // solution
        acc[d].x += p * b.x, acc[d].y += p * b.y, acc[d].z += p * b.z, acc[d].w += p * b.w;  // solution
""", """      const float4 own = v_tile[c][t % CHUNKS];
      for (int d = 0; d < CHUNKS; ++d) {
        acc[d].x += p * __shfl_sync(0xffffffff, own.x, d), acc[d].y += p * __shfl_sync(0xffffffff, own.y, d);
        acc[d].z += p * __shfl_sync(0xffffffff, own.z, d), acc[d].w += p * __shfl_sync(0xffffffff, own.w, d);
""", "passes", r"registers shuffled: 24,576 of [\d,]+ passes over the banks; the budget is 31,680 in all"),
    ("10.1", "loads-only-the-keys-that-the-last-query-sees", "inside = j + i / CHUNKS < len_kv", "inside = j + i / CHUNKS < keys", "bytes", r"k read: you moved .*: fewer than the budget, though the numbers are right: it goes another way", "load_k", "its threads read .* bytes of k here, and those of the solution"),
    ("10.1", "queries-without-an-end", "min(static_cast<int>(blockIdx.x + 1) * BR, len_q) - 1", "static_cast<int>(blockIdx.x + 1) * BR - 1", "passes", r"passes over the banks; the budget is", "load_k", "yours comes here once more, and the solution does not"),
    ("10.1", "last-key-begins-its-tile", "len_kv - len_q + 1;", "len_kv - len_q;", "numbers", r"out\[0, \d+, 0\], in row tile 1", "19", "keys is .* and should be"),
    ("10.1", "loads-what-the-mask-hides", "j < keys; j += BC", "j < len_kv; j += BC", "bytes", r"k read: you moved 65,536 bytes, the budget is 49,152", "20", "its threads read 4,096 bytes of k here, and those of the solution 0"),
    ("10.1", "forgets-the-mask", "j + c <= row + len_kv - len_q ? sum * scale : -INFINITY", "j + c < len_kv ? sum * scale : -INFINITY", "numbers", r"out\[0, 0, 0\], in row tile 0", "scores", "s has values where the mask hides the key"),
    ("10.1", "the-mask-of-the-first-query", "last_row + len_kv - len_q + 1;", "static_cast<int>(blockIdx.x) * BR + len_kv - len_q + 1;", "numbers", r"out\[0, \d+, 0\], in row tile 0", "19", "keys is 1 and should be 64"),
    ("10.1", "top-left", "row + len_kv - len_q ?", "row ?", "numbers", r"out\[0, 0, 0\], in row tile 0", "scores", r"s\[1\] is -inf and should be"),
    ("10.1", "no-barrier-after-the-load", "    __syncthreads();  // both tiles are there  // solution\n", "", "misuse", r"capstone\.cu:\d+, step scores: (race|uninitialised)"),
    ("10.1", "no-barrier-before-the-load", "    __syncthreads();  // nobody still reads the tiles before  // solution\n", "", "misuse", r"capstone\.cu:\d+, step load_k: race"),
    ("10.1", "reads-past-the-keys", "const bool inside = j + i / CHUNKS < len_kv;", "const bool inside = true;", "out of bounds", r"capstone\.cu:\d+.*past the end of (k|v)"),
    ("10.1", "output-is-not-rescaled", "acc[d].x *= alpha, acc[d].y *= alpha, acc[d].z *= alpha, acc[d].w *= alpha;", "acc[d].x *= alpha;", "numbers", r"out\[0, \d+, \d\], in row tile 0", "rescale", r"acc\[\d\]\[2\] is .* and should be"),
    ("10.1", "maximum-starts-at-0", "float m = -INFINITY", "float m = 0", "numbers", r"out\[0, 0, 0\], in row tile 0, is nan", "load_q", "m starts at 0 and not at -inf"),
    ("10.1", "lse-without-its-sum", "m + logf(l);", "m;", "numbers", r"lse\[0, 1\], in row tile 0", "store_lse", r"lse lacks log\(l\)"),
    ("11.4", "no-barrier-before-the-load", "      __syncthreads();  // nobody still reads the tiles before  // solution\n", "", "misuse", r"dk_dv\.cu:\d+, step load_q: race"),
    ("11.4", "no-barrier-after-the-load", "      __syncthreads();  // the tiles are there  // solution\n", "", "misuse", r"dk_dv\.cu:\d+, step weights: (race|uninitialised)"),
    ("11.4", "a-barrier-for-half-of-the-threads", "      __syncthreads();  // the tiles are there  // solution\n", "      if (t < BR) __syncthreads();\n", "misuse", r"dk_dv\.cu"),
    ("11.4", "lse-in-base-2", "expf(s * scale - lse_tile[r])", "exp2f(s * scale - lse_tile[r])", "numbers", r"d[kv]\[0, 0, 0\], in row tile 0", "weights", r"p\[\d+\] is .* and should be"),
    ("11.4", "scale-after-the-exponential", "expf(s * scale - lse_tile[r])", "expf(s - lse_tile[r]) * scale", "numbers", r"d[kv]\[0, 0, 0\], in row tile 0", "weights", r"p\[\d+\] is .* and should be"),
    ("11.4", "no-d", "p[r] * (dp - delta_tile[r])", "p[r] * dp", "numbers", r"dk\[0, 0, \d+\], in row tile 0", "ds", r"ds\[\d+\] is .* and should be"),
    ("11.4", "d-outside-of-the-brackets", "p[r] * (dp - delta_tile[r])", "p[r] * dp - delta_tile[r]", "numbers", r"dk\[0, 0, \d+\], in row tile 0", "ds", r"ds\[\d+\] is .* and should be"),
    ("11.4", "dk-without-the-scale", "dk_row[d] * scale", "dk_row[d]", "numbers", r"dk\[0, 0, 0\], in row tile 0.*all of them 5.657 times", "store_dkv", r"dk .*(times what it should be|scale)"),
    ("11.4", "dv-with-the-scale", "= dv_row[d];", "= dv_row[d] * scale;", "numbers", r"dv\[0, 0, 0\], in row tile 0.*all of them 0.1768 times", "store_dkv", r"dv .*(times what it should be|scale)"),
    ("11.4", "the-group-s-sum-left-out", "g < group", "g < 1", "numbers", r"d[kv]\[0, 0, 0\], in row tile 0", "load_q", "the solution comes here once more, and yours does not"),
    ("11.4", "heads-of-a-group-lie-apart", "blockIdx.y * group + g", "blockIdx.y + g * gridDim.y", "numbers", r"d[kv]\[0, \d+, \d+\], in row tile 0", "load_q", "head is 2 and should be 1"),
    ("11.4", "lse-of-the-first-head", "lse[head * len_q + i + t]", "lse[i + t]", "numbers", r"d[kv]\[0, 0, \d+\], in row tile 0", "load_do", "lse_tile"),
    ("11.4", "lse-of-the-first-queries", "lse[head * len_q + i + t]", "lse[head * len_q + t]", "numbers", r"d[kv]\[0, 0, \d+\], in row tile 0", "load_do", "lse_tile"),
    ("11.4", "each-thread-asks-for-dO-itself", "dv_row[d] += p[r] * do_tile[r][d]", "dv_row[d] += p[r] * (i + r < len_q ? dout[(head * len_q + i + r) * D + d] : 0)", "bytes", r"dout read: you moved .*: too many", "dv", "its threads read .* bytes of dout here"),
    ("11.4", "queries-past-the-end", "i + n / D < len_q ? dout[(head * len_q + i) * D + n] : 0", "dout[(head * len_q + i) * D + n]", "out of bounds", r"dk_dv\.cu:\d+.*past the end of dout"),
    ("11.4", "stores-keys-past-the-end", "d < D && key < len_kv; ++d) dk[", "d < D; ++d) dk[", "out of bounds", r"dk_dv\.cu:\d+.*past the end of dk"),
    ("11.4", "dk-from-its-own-key", "ds[r] * q_tile[r][d]", "ds[r] * k_row[d]", "numbers", r"dk\[0, 0, \d+\], in row tile 0", "dk", "dk_row"),
    ("11.4", "dp-from-k", "dp += v_row[d] * do_tile[r][d]", "dp += k_row[d] * do_tile[r][d]", "numbers", r"dk\[0, 0, \d+\], in row tile 0", "ds", r"ds\[\d+\] is .* and should be"),
    ("11.5", "the-first-32-columns", "c < cols; c += 32", "c < 32; c += 32", "numbers", r"delta\[0\], in row tile 0", "products", r"the block doesn't load out\[0, 32\]"),
    ("11.5", "no-shuffles", "  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);  // solution\n", "", "numbers", r"delta\[0\], in row tile 0", "shuffles", "sum was left as it was"),
    ("11.5", "one-shuffle-too-few", "mask = 16; mask > 0", "mask = 8; mask > 0", "numbers", r"delta\[0\], in row tile 0", "shuffles", "sum is .* and should be"),
    ("11.5", "lane-31-after-shfl-down", "sum += __shfl_xor_sync(0xffffffff, sum, mask);  // solution\n  // step: store\n  if (lane == 0)", "sum += __shfl_down_sync(0xffffffff, sum, mask);\n  // step: store\n  if (lane == 31)", "numbers", r"delta\[0\], in row tile 0", "shuffles", "sum is .* and should be"),
    ("11.5", "the-square-of-o", "dout[row * cols + c] * out", "out[row * cols + c] * out", "numbers", r"delta\[0\], in row tile 0", "products", "sum is .* and should be"),
    ("11.5", "each-lane-a-stretch", "c = lane; c < cols; c += 32", "c = lane * ((cols + 31) / 32); c < cols && c < (lane + 1) * ((cols + 31) / 32); ++c", "sectors", r"(out|dout) read"),
    ("11.5", "each-lane-the-whole-row", "c = lane; c < cols; c += 32", "c = 0; c < cols; ++c", "numbers", r"delta\[0\], in row tile 0.*32 times", "products", "sum is .* and should be"),
    ("11.5", "rows-past-the-end", "  if (row >= rows) return;\n", "", "out of bounds", r"row_dots\.cu:\d+.*past the end of (out|dout)"),
    ("11.5", "a-block-for-each-row", "row = blockIdx.x * 4 + warp", "row = blockIdx.x", "numbers", r"delta\[2\], in row tile 0.*never written", "4", "row is 0 in all threads"),
    ("11.5", "in-shared-memory-without-a-barrier", "  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);  // solution\n", "  __shared__ float part[4][32];\n  part[warp][lane] = sum;\n  if (lane == 0)\n    for (int i = 1; i < 32; ++i) sum += part[warp][i];\n", "misuse", r"row_dots\.cu:\d+, step shuffles: (race|uninitialised)"),
    ("11.6", "the-place-in-the-tile", "const int place = (head * len_q + query) * len_kv + key;", "const int place = threadIdx.y * blockDim.x + threadIdx.x;", "numbers", r"z\[\d, \d+, \d+\]", "place", "place is"),
    ("11.6", "the-place-as-it-lies", "(head * len_q + query) * len_kv + key", "(head * rows + row) * cols + col", "numbers", r"z\[\d, \d+, \d+\].*keys as rows", "place", "place is"),
    ("11.6", "all-heads-alike", "(head * len_q + query) * len_kv + key", "query * len_kv + key", "numbers", r"z\[1, \d+, \d+\]", "place", "place is"),
    ("11.6", "rows-are-queries", "query = flipped ? col : row, key = flipped ? row : col", "query = row, key = col", "numbers", r"z\[\d, \d+, \d+\].*keys as rows", "place", "key is 1 and should be 0"),
    ("11.6", "keys-and-queries-in-number", "len_q = flipped ? cols : rows, len_kv = flipped ? rows : cols", "len_q = rows, len_kv = cols", "numbers", r"z\[\d, \d+, \d+\].*keys as rows", "place", "len_kv is 15 and should be 23"),
    ("11.6", "kept-as-it-is", "weight / keep", "weight", "numbers", r"z\[0, 0, \d+\].*all of them 0.9 times", "drop", "z was not divided by keep"),
    ("11.6", "times-keep", "weight / keep", "weight * keep", "numbers", r"z\[0, 0, \d+\].*all of them 0.81 times", "drop", "z is 0.81 times what it should be, throughout"),
    ("11.6", "drops-what-is-kept", "keep ? weight / keep : 0", "keep ? 0 : weight / keep", "numbers", r"z\[0, 0, \d+\]", "drop", r"z\[0, 0, \d+\] is 0 and should be"),
    ("11.6", "less-than-what-is-dropped", "uniform(seed, place) < keep", "uniform(seed, place) < 1 - keep", "numbers", r"z\[0, 0, \d+\]", "drop", r"z\[0, 0, \d+\] is 0 and should be"),
    ("11.6", "one-seed-for-ever", "uniform(seed, place)", "uniform(7, place)", "numbers", r"z\[\d, \d+, \d+\].*seed \d{2}", "drop", "x is .* and should be"),
    ("11.6", "loads-only-what-is-kept", "const float weight = p[i];  // solution\n  z[i] = uniform(seed, place) < keep ? weight / keep : 0;", "z[i] = uniform(seed, place) < keep ? p[i] / keep : 0;", "bytes", r"p read: you moved .*fewer than the budget", "drop", "its threads read"),
    ("11.6", "past-the-end", "  if (row >= rows || col >= cols) return;  // solution\n", "", "misuse", r"drop\.cu:\d+, step drop: race: .*z\["),
    ("11.6", "the-weight-of-its-place", "const int i = (head * rows + row) * cols + col;", "const int i = place;", "numbers", r"z\[\d, \d+, \d+\].*keys as rows", "drop", "i is"),
    ("11.6", "tiles-of-eight", "blockIdx.y * blockDim.y + threadIdx.y", "blockIdx.y * 8 + threadIdx.y", "numbers", r"z\[\d, \d+, \d+\]", "place", "row is"),
]  # fmt: skip

MISCONCEPTIONS = [Misconception(*row) for row in _ROWS]
