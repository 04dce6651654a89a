"""FlashAttention-2, forward, in Triton: the steps of `simulator/programs/flash2.py` and of `kernels_cu/flash2.cu`.

    q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    in the storage dtype
    lse (batch, heads, len_q) float32         rows padded to 16 bytes; strides are in elements

One program owns ROWS rows of Q and walks the tiles of COLS keys that they see. Its source says which bytes of HBM a tile
is. The compiler chooses the rest: what lies in SRAM, who copies it and when, and which instructions multiply.
"""

import triton
import triton.language as tl

LOG2E, LN2, LOWEST = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453), tl.constexpr(-3.4028235e38)


@triton.jit
def places(x, stride, first, length, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    CHUNK: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements of 16 bytes: rows are padded to those
    row, column = first + tl.arange(0, ROWS), tl.arange(0, max(16, triton.next_power_of_2(HEAD_DIM)))[None, :]
    inside = (row < length)[:, None] & (column < triton.cdiv(HEAD_DIM, CHUNK) * CHUNK)
    return x + row.to(tl.int64)[:, None] * stride + column, inside, (HEAD_DIM % CHUNK == 0) | (column < HEAD_DIM)


@triton.jit
def load(x, stride, first, length, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    at, inside, wanted = places(x, stride, first, length, ROWS, HEAD_DIM)
    return tl.where(wanted, tl.load(at, inside, 0.0), 0.0)  # what pads a row may be anything


@triton.jit
def flash2(
    q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row, out, out_batch, out_head, out_row,
    lse, batch, heads, kv_heads, len_q, len_kv, left, right, group, scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(len_q, ROWS)  # long rows first, and `group` heads side by side, as in flash2.cu
    first_head = tl.program_id(0) // (group * tiles) * group
    beside, place = tl.minimum(group, batch * heads - first_head), tl.program_id(0) - first_head * tiles
    flat_head, first_row = (first_head + place % beside).to(tl.int64), (tiles - 1 - place // beside) * ROWS
    b, h, kv_head = flat_head // heads, flat_head % heads, flat_head % heads // (heads // kv_heads)
    # step: load_q
    q_i = load(q + b * q_batch + h * q_head, q_row, first_row, len_q, ROWS, HEAD_DIM)
    offset = len_kv - len_q  # row i has key i + offset on its diagonal: the tile's rows from `low` to `high`
    row, low = first_row + tl.arange(0, ROWS), first_row + offset
    high = tl.minimum(first_row + ROWS, len_q) - 1 + offset
    sign = tl.where(scale > 0, 1.0, tl.where(scale < 0, -1.0, 0.0))  # flips S, so that its maximum is P's
    c = tl.where(scale == 0, 1.0, tl.abs(scale)) * LOG2E  # exp(|scale| s) = exp2(c s)
    m, l = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros(q_i.shape, tl.float32)
    for first in range(tl.maximum(0, low - left) // COLS * COLS, tl.minimum(len_kv - 1, high + right) + 1, COLS):
        # step: load_k
        k_j = load(k + b * k_batch + kv_head * k_head, k_row, first, len_kv, COLS, HEAD_DIM)
        # step: scores
        s = tl.dot(q_i, k_j.T, input_precision="ieee")
        # step: mask
        if (first < high - left) | (first + COLS - 1 > tl.minimum(len_kv - 1, low + right)) | (sign != 1.0):
            key = first + tl.arange(0, COLS)
            at = key[None, :] - row[:, None] - offset
            s = tl.where((at >= -left) & (at <= right) & (key < len_kv)[None, :], sign * s, float("-inf"))
        # step: softmax
        m_new = tl.maximum(m, c * tl.max(s, 1))
        p = tl.exp2(c * s - m_new[:, None])
        # step: rescale
        alpha = tl.exp2(m - m_new)
        l, m = l * alpha + tl.sum(p, 1), m_new
        # step: load_v
        v_j = load(v + b * v_batch + kv_head * v_head, v_row, first, len_kv, COLS, HEAD_DIM)
        # step: output
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision="ieee")
    # step: normalize
    acc *= (1.0 / tl.where(l > 0, l, 1.0))[:, None]
    # step: store_o
    at, inside, _ = places(out + b * out_batch + h * out_head, out_row, first_row, len_q, ROWS, HEAD_DIM)
    tl.store(at, acc.to(q_i.dtype), inside)
    # step: store_lse
    tl.store(lse + flat_head * len_q + row, (m + tl.log2(l)) * LN2, row < len_q)
