import triton
import triton.language as tl


@triton.jit
def my_flash2(q, k, v, out, lse, len_q, len_kv, scale, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr):
    # q, out (heads, len_q, D)   k, v (heads, len_kv, D)   lse (heads, len_q): a program has ROWS queries of a head
    tiles = tl.cdiv(len_q, ROWS)
    head, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, D)
    # step: load_q
    at = (head * len_q + row)[:, None] * D + column[None, :]
    q_i = tl.load(q + at, (row < len_q)[:, None], 0.0)
    m, l = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for j in range(0, len_kv, COLS):
        key = j + tl.arange(0, COLS)
        # step: load_k
        # where this tile of K and V lies, and which of its rows there are
        place = (head * len_kv + key)[:, None] * D + column[None, :]  # solution
        k_j = tl.load(k + place, (key < len_kv)[:, None], 0.0)  # solution
        # step: scores
        s = tl.dot(q_i, k_j.T, input_precision="ieee") * scale  # solution
        s = tl.where((key < len_kv)[None, :], s, float("-inf"))  # solution
        # step: rescale
        # m_new, p, alpha; then l, acc and m
        m_new = tl.maximum(m, tl.max(s, 1))  # solution
        p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m - m_new)  # solution
        l, acc, m = l * alpha + tl.sum(p, 1), acc * alpha[:, None], m_new  # solution
        # step: load_v
        v_j = tl.load(v + place, (key < len_kv)[:, None], 0.0)  # solution
        # step: output
        acc = tl.dot(p.to(v_j.dtype), v_j, acc, input_precision="ieee")  # solution
    # step: store
    # out is acc / l, in the dtype of q; lse is m + log l
    tl.store(out + at, (acc / l[:, None]).to(q_i.dtype), (row < len_q)[:, None])  # solution
    tl.store(lse + head * len_q + row, m + tl.log(l), row < len_q)  # solution
