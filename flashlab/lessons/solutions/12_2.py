@fl.program
def my_merge(m, q, k, v, problem, tile):
    """Two blocks have half of the keys each, and leave O and the LSE of their half. A second launch merges."""
    out, lse = m.output("out"), m.output("lse")
    o_of = m.workspace("partial", v.cols, axes={"half": 2})
    lse_of = m.workspace("partial_lse", 1, axes={"half": 2}, vector=True)
    rows, keys = problem.row_tiles(tile), problem.key_tiles(tile)
    middle = -(-keys // 2)  # the first half has the tile more: with one tile the second half is empty

    def half(i, n):
        return range(middle) if n == 0 else range(middle, keys)

    # FlashAttention-2 on half of the keys, as in 04.1. Nothing is missing here
    for block in m.launch("halves", rows=rows, cols=2, warps=4, walk=half):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("attend")
            k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = block.mask(s, block.i, j)
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            l_i, m_i = l_i * alpha + p.sum(), m_new
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc * alpha)
        block.step("store_partial")
        block.store(o_of.at(half=block.j), acc / l_i.nonzero(), block.i, tile.rows)
        block.store(lse_of.at(half=block.j), m_i + block.log(l_i), block.i, tile.rows)

    for block in m.launch("merge", rows=rows, warps=4):
        block.step("load_partial")
        # O and the LSE of both halves: block.fetch(tensor.at(half=0), block.i, tile.rows), and half=1
        o_a, o_b = (block.fetch(o_of.at(half=n), block.i, tile.rows) for n in range(2))  # solution
        lse_a, lse_b = (block.fetch(lse_of.at(half=n), block.i, tile.rows) for n in range(2))  # solution
        block.step("weights")
        # the larger LSE; what each half weighs beside it; and what they weigh together
        top = block.maximum(lse_a, lse_b).finite()  # solution
        a, b = block.exp(lse_a - top), block.exp(lse_b - top)  # solution
        total = a + b  # solution
        block.step("store")
        # out is the weighted mean of both, lse that of all keys; a row without any key has out 0 and lse -inf
        block.store(out, (o_a * a + o_b * b) / total.nonzero(), block.i, tile.rows)  # solution
        block.store(lse, top + block.log(total), block.i, tile.rows)  # solution
    return out, lse
