# ruff: noqa: E501  (a table)
"""Wrong answers that were written before anybody looked at the checks: from the tasks and the solutions alone. None may pass.

A row is an exercise, what its solution has, and what stands there instead. One that was written turned out to be right: in 08.2 an
element takes 2 bytes, whatever the problem says, because all of that lesson's arrays have 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple


class WrongAnswer(NamedTuple):
    exercise: str
    was: str
    becomes: str


_ROWS = [
    ("00.1", "block.fetch(k,", "block.fetch(v,"),
    ("00.1", "x + y,", "block.maximum(x, y),"),
    ("00.1", "x + y,", 'x.round("bfloat16") + y,'),
    ("00.1", "x + y,", "block.elementwise(np.abs, x + y),"),
    ("00.1", "block.store(out, x + y", "block.store(out, x, block.i, tile.rows)\n        block.store(out, x + y"),
    ("00.2", "variance + 1e-5)", "variance) + 1e-5"),
    ("00.2", "1e-5)\n", "1e-6)\n"),
    ("00.2", "(centred * centred).sum() / q.cols", "(x * x).sum() / q.cols - mean * mean"),
    ("00.2", "x.sum() / q.cols", "(x.sum() / q.cols).round(problem.dtype)"),
    ("00.2", "x.sum() / q.cols", "x.sum().T.sum() / (q.cols * tile.rows)"),
    ("00.2", "centred * centred", "block.elementwise(np.abs, centred)"),
    ("00.2", "variance + 1e-5", "block.maximum(variance, 1.0)"),
    ("00.3", "variance + 1e-5", "variance"),
    ("00.3", "normal * -1.702", "normal * -1.6"),
    ("00.3", "normal * -1.702", "x * -1.702"),
    ("00.3", "tile.rows) + block.fetch", "tile.rows) * block.fetch"),
    ("00.3", "(centred * centred).sum() / q.cols", "(x * x).sum() / q.cols - mean * mean"),
    ("00.3", "x.sum() / q.cols", "x.max()"),
    ("00.3", "+ 1.0)", "+ 1.0).round(\"bfloat16\")"),
    ("00.4", "range(-(-q.cols // 32))", "range(-(-v.cols // 32))"),
    ("00.4", "step, 32)", "step, 16)"),
    ("00.4", "block.load(v, step, 32, block.j,", "block.load(v, step, 32, block.i,"),
    ("00.4", "block.store(out, acc, block.i, tile.rows, block.j,", "block.store(out, acc, block.i, tile.rows, block.i,"),
    ("00.4", "tile.cols, 0.0)", "tile.cols, 1.0)"),
    ("00.4", 'split=("rows", "none")', 'split=("none", "none")'),
    ("00.4", "range(-(-q.cols // 32))", "range(min(2, -(-q.cols // 32)))"),
    ("01.1", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("01.1", "scale=problem.scale", "scale=0.125"),
    ("01.1", "block.load(k,", "block.load(v,"),
    ("01.1", "block.j, tile.cols)\n    return", "0, tile.cols)\n    return"),
    ("01.1", "block.matmul(q_i,", "block.matmul(block.load(q, block.i, tile.rows),"),
    ("01.2", "x.max().finite()", "x.max().T.max().finite()"),
    ("01.2", "x.max().finite()", "x.max().finite() * 0.5"),
    ("01.2", "x - x.max().finite()", "x - 50.0"),
    ("01.2", "e.sum().nonzero()", "e.max().nonzero()"),
    ("01.2", "block.load(v, j,", "block.load(v, cols - 1 - j,"),
    ("01.2", ", acc=acc)", ")"),
    ("01.2", "e / e.sum().nonzero()", "e / (e.sum() + 1.0)"),
    ("01.2", "for j in range(cols)", "for j in range(max(1, cols - 1))"),
    ("01.3", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("01.3", "block.mask(s, block.i, 0)", "block.mask(s, 0, 0)"),
    ("01.3", "s.max().finite()", "s.max().T.max().finite()"),
    ("01.3", "block.exp(s - s.max().finite())", "block.exp(block.maximum(s, -1e4) - s.max().finite())"),
    ("01.3", "s = block.mask(s, block.i, 0)", "s = block.maximum(block.mask(s, block.i, 0), -1e4)"),
    ("01.3", """        s = block.mask(s, block.i, 0)
        block.step("softmax")
        # at the end .round(problem.dtype), as everything is that the tensor cores multiply
        e = block.exp(s - s.max().finite())
""", """        top = s.max()
        s = block.mask(s, block.i, 0)
        block.step("softmax")
        e = block.exp(s - top)
"""),
    ("02.1", "x.max()", "x.max().T.max()"),
    ("02.1", 'float("-inf")', "-1e4"),
    ("02.1", "total + block.exp(x - top).sum()", "block.maximum(total, block.exp(x - top).sum())"),
    ("02.1", "block.store(out, block.exp(x - top)", "block.store(out, block.exp(x - x.max())"),
    ("02.1", "x.max()", "block.elementwise(np.abs, x).max()"),
    ("02.1", "block.exp(x - top) / total", "block.exp(x - top) / (total + 0.01)"),
    ("02.2", "x.max()", "x.max().T.max()"),
    ("02.2", 'float("-inf")', "-1e4"),
    ("02.2", "            total = total *", "            top = new_top\n            total = total *"),
    ("02.2", "block.exp(top - new_top)", "block.exp(top - new_top) * block.exp(top - new_top)"),
    ("02.2", "block.exp(x - new_top).sum()", "block.exp(x - new_top).max()"),
    ("02.2", "block.maximum(top, x.max())", "x.max()"),
    ("02.2", "block.exp(x - top) / total", "block.exp(x - x.max()) / total"),
    ("02.3", "acc * alpha", "acc * alpha * alpha"),
    ("02.3", "s.max()", "s.max().T.max()"),
    ("02.3", 'float("-inf")', "-1e4"),
    ("02.3", "block.maximum(top, s.max())", "s.max()"),
    ("02.3", "block.load(v, j,", "block.load(v, 0,"),
    ("02.3", """            acc = acc * alpha
            top = new_top
            block.step("output")
            # add e @ v_j to acc; e has to be rounded: e.round(problem.dtype)
            acc = block.matmul(e.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
""", """            top = new_top
            block.step("output")
            acc = block.matmul(e.round(problem.dtype), v_j, split=("rows", "none"), acc=acc) * alpha
"""),
    ("02.3", "            s = block.mask(s, block.i, j)  # -inf beyond the last key\n", ""),
    ("02.3", "            alpha = block.exp(top - new_top)\n", "            top = new_top\n            alpha = block.exp(top - new_top)\n"),
    ("02.3", "            new_top = block.maximum(top, s.max())\n            e = block.exp(s - new_top)\n", "            e = block.exp(s - top)\n            new_top = block.maximum(top, s.max())\n"),
    ("03.1", "block.exp(s - m_new.finite())", "block.exp(s - m_i.finite())"),
    ("03.1", "o_i * (l_i * alpha)", "o_i * l_i"),
    ("03.1", ", acc=o_i)", ")"),
    ("03.1", "s.max()", "s.max().T.max()"),
    ("03.1", "o_i / l_new.nonzero()", "o_i / l_i.nonzero()"),
    ("03.1", "l_i * alpha + p.sum()", "(l_i + p.sum()) * alpha"),
    ("03.1", "block.exp(m_i - m_new.finite())", "block.exp(m_i - m_new)"),
    ("03.1", "o_i * (l_i * alpha)", "o_i * (l_i * alpha * alpha)"),
    ("03.2", 'tile.rows, 1, float("-inf")', "tile.rows, 1, -1e4"),
    ("03.2", "s.max()", "s.max().T.max()"),
    ("03.2", "out if j == last else o", "o if j == last else out"),
    ("03.2", "block.store(l, l_new,", "block.store(l, l_i,"),
    ("03.2", "block.fetch(o,", "block.fetch(out,"),
    ("03.2", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("03.2", "block.mask(s, i, j)", "block.mask(s, j, i)"),
    ("03.2", "o_i * (l_i * alpha)", "o_i * (l_new * alpha)"),
    ("03.2", """                s = block.mask(s, i, j)
                block.step("update")
                # lines 10 to 12, as in 03.1
                m_new = block.maximum(m_i, s.max())
""", """                m_new = block.maximum(m_i, s.max())
                s = block.mask(s, i, j)
                block.step("update")
"""),
    ("03.2", "block.store(top, m_new,", "block.store(top, s.max(),"),
    ("03.3", "(4 * problem.head_dim) // 16 * 16", "(4 * problem.head_dim) // 8 * 8"),
    ("03.3", "problem.head_dim) // 16 * 16\n    return", "problem.head_dim) // 8 * 8\n    return"),
    ("03.3", "4 * problem.head_dim", "3 * problem.head_dim"),
    ("03.3", "cols = elements // (4 * problem.head_dim) // 16 * 16", "cols = -(-elements // (4 * problem.head_dim) // 16) * 16"),
    ("03.3", "elements // (4 * problem.head_dim) // 16 * 16", "min(elements // (4 * problem.head_dim) // 16 * 16, 256)"),
    ("03.3", "min(cols, problem.head_dim)", "min(cols, 64)"),
    ("03.3", "device.sram_per_block //", "232448 //"),
    ("03.3", "// problem.itemsize", "// 2"),
    ("04.1", 'float("-inf")', "-1e4"),
    ("04.1", "s.max()", "s.max().T.max()"),
    ("04.1", "acc * alpha", "acc * alpha * alpha"),
    ("04.1", "p.sum()", "p.max()"),
    ("04.1", "m_i + block.log(l_i)", "m_i + l_i"),
    ("04.1", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("04.1", """            acc = acc * alpha
            m_i = m_new
            block.step("output")
            v_j = block.load(v, j, tile.cols)
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)
""", """            m_i = m_new
            block.step("output")
            v_j = block.load(v, j, tile.cols)
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc) * alpha
"""),
    ("04.1", "            s = block.mask(s, block.i, j)\n", ""),
    ("04.1", "range(problem.key_tiles(tile))", "range(max(1, problem.len_kv // tile.cols))"),
    ("04.1", "            alpha = block.exp(m_i", "            m_i = m_new\n            alpha = block.exp(m_i"),
    ("04.1", "block.load(v, j,", "block.load(v, problem.key_tiles(tile) - 1 - j,"),
    ("04.1", """            s = block.mask(s, block.i, j)
            block.step("update")
            # m_new, p, alpha, l_i, acc: nothing is divided here
            m_new = block.maximum(m_i, s.max())
""", """            m_new = block.maximum(m_i, s.max())
            s = block.mask(s, block.i, j)
            block.step("update")
"""),
    ("04.1", "            m_new = block.maximum(m_i, s.max())\n            p = block.exp(s - m_new.finite())\n", "            p = block.exp(s - m_i.finite())\n            m_new = block.maximum(m_i, s.max())\n"),
    ("04.2", "last_key // tile.cols + 1", "-(-last_key // tile.cols)"),
    ("04.2", "min((i + 1) * tile.rows, problem.len_q) - 1", "min((i + 1) * tile.rows - 1, problem.len_q)"),
    ("04.2", "problem.len_kv - problem.len_q\n", "problem.len_kv - problem.len_q + 1\n"),
    ("04.2", "problem.len_kv - problem.len_q\n", "problem.len_kv - problem.len_q - 1\n"),
    ("04.2", "max(0, last_key", "max(1, last_key"),
    ("04.2", "range(max(0, last_key // tile.cols + 1))", "range(min(i + 1, problem.key_tiles(tile)))"),
    ("04.2", "(i + 1) * tile.rows", "(i + 1) * tile.cols"),
    ("04.2", "last_query + problem.len_kv - problem.len_q", "last_query + max(0, problem.len_kv - problem.len_q)"),
    ("04.2", "(i + 1) * tile.rows, problem.len_q)", "(i + 1) * tile.rows, problem.len_kv)"),
    ("04.2", "            s = block.mask(s, block.i, j)\n            m_new = block.maximum(m_i, s.max())\n", "            m_new = block.maximum(m_i, s.max())\n            s = block.mask(s, block.i, j)\n"),
    ("04.2", "            s = block.mask(s, block.i, j)\n", ""),
    ("04.3", "block.to_registers(block.load(q, block.i, tile.rows))", "block.fetch(q, block.i, tile.rows)"),
    ("04.3", "acc * alpha, m_new", "acc * alpha * alpha, m_new"),
    ("04.3", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("04.3", "            k_j = block.load(k, j, tile.cols)\n", "            k_j = block.load(k, j, tile.cols)\n            k_j = block.load(k, j, tile.cols)\n"),
    ("04.3", "            s = block.mask(s, block.i, j)\n", ""),
    ("05.1", "a * x[i] + y[i]", "a * (x[i] + y[i])"),
    ("05.1", "if (i < n)", "if (i <= n)"),
    ("05.1", "blockIdx.x * blockDim.x", "blockIdx.x * 128"),
    ("05.1", "if (i < n)", "if (i < n / 4 * 4)"),
    ("05.1", "if (i < n)", "if (i > 0 && i < n)"),
    ("05.2", "+= part[t + half];\n    __syncthreads();", "+= part[t + half];\n    if (half > 32) __syncthreads();"),
    ("05.2", "if (t < half)", "if (t <= half)"),
    ("05.2", "if (t == 0) sums", "sums"),
    ("05.2", "int half = 64", "int half = 32"),
    ("05.2", "  part[t] = mine;\n  __syncthreads();\n", "  part[t] = mine;\n  if (t < 64) __syncthreads();\n"),
    ("05.3", "mask = 16; mask > 0; mask /= 2) top", "mask = 8; mask > 0; mask /= 2) top"),
    ("05.3", "expf(v[i] - top)", "exp2f(v[i] - top)"),
    ("05.3", "float top = -INFINITY", "float top = 0"),
    ("05.3", "float top = -INFINITY", "float top = -1e4f"),
    ("05.3", "fmaxf(top, __shfl_xor_sync(", "fmaxf(top, __shfl_down_sync("),
    ("05.3", "? x[row * cols + c] : -INFINITY", "? x[row * cols + c] : 0"),
    ("05.4", "float m = -INFINITY", "float m = -1e4f"),
    ("05.4", "s[c] * scale", "s[c] * 0.17677669f"),
    ("05.4", "j + c < len_kv ? s[c]", "j + c <= len_kv ? s[c]"),
    ("05.4", "l += expf(s[c] - m_new)", "l += expf(s[c] - m)"),
    ("05.4", "    l *= expf(m - m_new);\n    for (int c = 0; c < BC; ++c) l += expf(s[c] - m_new);\n", "    for (int c = 0; c < BC; ++c) l += expf(s[c] - m_new);\n    l *= expf(m - m_new);\n"),
    ("05.4", "m + logf(l)", "m + log2f(l)"),
    ("05.4", "s[c] * scale : -INFINITY", "s[c] * scale : -1e4f"),
    ("05.4", "blockIdx.y * len_kv * D", "blockIdx.y * len_q * D"),
    ("05.5", "s[c] * scale", "s[c] * 0.17677669f"),
    ("05.5", "s[c] * scale : -INFINITY", "s[c] * scale : -1e4f"),
    ("05.5", "float m = -INFINITY", "float m = -1e4f"),
    ("05.5", "acc[d] *= alpha", "acc[d] *= alpha * alpha"),
    ("05.5", "    m = m_new;\n", ""),
    ("05.5", "j + i / D < len_kv ? v[j * D + i] : 0", "v[j * D + i]"),
    ("05.5", "if (row < len_q) {", "{"),
    ("05.5", "lse[blockIdx.y * len_q + row]", "lse[row]"),
    ("05.5", "acc[d] += p * v_tile[c][d]", "acc[d] += p * (j + c < len_kv ? v[(j + c) * D + d] : 0)"),
    ("05.5", "++c) {\n      const float p", "c += 2) {\n      const float p"),
    ("06.1", "mma(c[0], c[1], a, b)", "mma(c[1], c[0], a, b)"),
    ("06.1", "load_b_rows(k_tile", "load_b_rows(q_tile"),
    ("06.1", "8 * n + 2 * t", "16 * n + 2 * t"),
    ("06.1", "row = g +", "row = lane_id() % 8 +"),
    ("06.1", "d < 64", "d < 48"),
    ("06.2", "chunk ^ row % 8", "chunk ^ row % 2"),
    ("06.2", "(chunk ^ row % 8)", "(chunk + row / 2) % CHUNKS"),
    ("06.2", "row * CHUNKS + (chunk ^ row % 8)", "chunk * ROWS + row"),
    ("06.2", "(chunk ^ row % 8)", "(chunk ^ (row & 6))"),
    ("06.2", "(chunk ^ row % 8)", "(chunk * (row % 8)) % 8"),
    ("06.3", "copy_wait<1>", "copy_wait<2>"),
    ("06.3", "    barrier();\n    for", "    __syncwarp();\n    for"),
    ("06.3", "sum += tile[j % 2]", "sum += tile[(j + 1) % 2]"),
    ("06.3", "if (j + 1 < tiles)", "if (j + 2 < tiles)"),
    ("07.1", "tile[32][33]", "tile[32][34]"),
    ("07.1", "row < cols && col < rows", "row < rows && col < cols"),
    ("07.1", "y[row * rows + col]", "y[row * cols + col]"),
    ("07.1", "if (row < rows && col < cols) tile", "tile"),
    ("07.1", "= tile[tx][i]", "= x[col * cols + row]"),
    ("07.1", "i += 8", "i += 16"),
    ("07.2", "j < n;", "j <= n;"),
    ("07.2", "int j = i;", "int j = i + 1;"),
    ("07.2", "2 * v.x, 2 * v.y", "2 * v.y, 2 * v.x"),
    ("07.2", "*reinterpret_cast<float4*>(y + i) = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);", "*reinterpret_cast<float2*>(y + i) = make_float2(2 * v.x, 2 * v.y);\n    *reinterpret_cast<float2*>(y + i + 2) = make_float2(2 * v.z, 2 * v.w);"),
    ("07.3", "if (first + r < rows)", "if (first + r <= rows)"),
    ("07.3", "a[(first + r) * cols + c]", "a[(first + r) * rows + c]"),
    ("07.3", "sum[r] += a", "sum[r] = a"),
    ("07.3", "mine = x[c]", "mine = x[lane]"),
    ("08.1", "warpgroups = tile.rows // 64", "warpgroups = 2"),
    ("08.1", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("08.1", "block.mask(s, block.i, j)", "block.mask(s, j, block.i)"),
    ("08.1", "block.load(v, j, tile.cols, panel=64)", "block.load(v, j, tile.cols, panel=128)"),
    ("08.1", "block.load(k, j, tile.cols, panel=64)", "block.load(k, j, tile.cols, panel=32)"),
    ("08.1", "            s = block.mask(s, block.i, j)\n            block.step(\"softmax\")\n            m_new = block.maximum(m_i, s.max())\n", "            m_new = block.maximum(m_i, s.max())\n            s = block.mask(s, block.i, j)\n            block.step(\"softmax\")\n"),
    ("08.2", "-(-problem.head_dim // 64) * 64", "-(-problem.head_dim // 32) * 32"),
    ("08.2", "// 16 * 16", "// 32 * 32"),
    ("08.2", "// 16 * 16", "// 8 * 8"),
    ("08.2", "- rows * row_bytes", "- 2 * rows * row_bytes"),
    ("08.2", ", 256)", ", 128)"),
    ("08.2", "device.sram_per_block", "232448"),
    ("08.3", "acc * alpha", "acc * alpha * alpha"),
    ("08.3", "s.max()", "s.max().T.max()"),
    ("08.3", 'float("-inf")', "-1e4"),
    ("08.3", "block.walk[0]", "0"),
    ("08.3", "block.walk[0]", "block.walk[-1]"),
    ("08.3", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("08.3", "            s = block.mask(s, block.i, j)\n", ""),
    ("09.1", "448.0", "240.0"),
    ("09.1", "np.abs, x).max()", "np.abs, x).max().T.max()"),
    ("09.1", "np.abs, x).max().nonzero()", "np.abs, x).nonzero().max()"),
    ("09.1", "block.elementwise(np.abs, x).max().nonzero()", "block.maximum(block.elementwise(np.abs, x).max(), 1.0)"),
    ("09.2", "scale=problem.scale", "scale=q.cols**-0.5"),
    ("09.2", "* of_k.T", "* of_k.T.max()"),
    ("09.2", "* of_q * of_k.T", "* (of_q * of_q) * of_k.T"),
    ("09.2", "* of_q * of_k.T", "/ of_q * of_k.T"),
    ("09.3", "* 32.0", "* 1024.0"),
    ("09.3", "acc * alpha +", "acc * alpha * alpha +"),
    ("09.3", "l_i * alpha +", "l_i * alpha * alpha +"),
    ("09.3", ".max().T.max().nonzero()", ".nonzero().max().T.max()"),
    ("09.3", 'float("-inf")', "-1e4"),
    ("09.3", "s.max()", "s.max().T.max()"),
    ("09.3", "acc / l_i,", "acc / l_i / 32.0,"),
    ("09.3", "of_v = block", "of_v = of_v if j else block"),
    ("10.1", "len_kv - len_q + 1;", "len_kv - len_q;"),
    ("10.1", "sum * scale", "sum * 0.17677669f"),
    ("10.1", "min(static_cast<int>(blockIdx.x + 1) * BR, len_q) - 1", "static_cast<int>(blockIdx.x + 1) * BR - 1"),
    ("10.1", "float m = -INFINITY", "float m = -1e4f"),
    ("10.1", "sum * scale : -INFINITY", "sum * scale : -1e4f"),
    ("10.1", "expf(m - m_new);", "expf(m - m_new) * expf(m - m_new);"),
    ("10.1", "j + c <= row", "j + c < row"),
    ("10.1", "lse[blockIdx.y * len_q + row]", "lse[row]"),
    ("10.1", "(k) + blockIdx.y * len_kv", "(k) + blockIdx.y * len_q"),
    ("10.1", "fmaxf(m_new, s[c])", "fmaxf(m_new, sum * scale)"),
    ("10.1", "acc[d].x / l, acc[d].y / l", "acc[d].y / l, acc[d].x / l"),
]  # fmt: skip

WRONG_ANSWERS = [WrongAnswer(*row) for row in _ROWS]
