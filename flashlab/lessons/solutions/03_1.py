@fl.program
def my_update(m, q, k, v, problem, tile):
    """FlashAttention-1, one block a head. Loads and stores are given; the update of m, l and O is yours."""
    out, o = m.output("out"), m.workspace("o", v.cols)  # O so far, float32, divided by l
    l, top = m.workspace("l", 1, vector=True), m.workspace("m", 1, vector=True)
    last = max(1, problem.key_tiles(tile)) - 1
    for block in m.launch("flash1", warps=4):
        block.step("init")
        for i in range(problem.row_tiles(tile)):
            block.store(o, block.full(tile.rows, v.cols, 0.0), i, tile.rows)
            block.store(l, block.full(tile.rows, 1, 0.0), i, tile.rows)
            block.store(top, block.full(tile.rows, 1, float("-inf")), i, tile.rows)
        for j in range(last + 1):
            block.step("load_kv")
            k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)
            for i in range(problem.row_tiles(tile)):
                block.step("load_q_o")
                q_i, o_i = block.load(q, i, tile.rows), block.fetch(o, i, tile.rows)
                l_i = block.fetch(l, i, tile.rows)
                m_i = block.fetch(top, i, tile.rows, fill=float("-inf"))
                block.step("scores")
                s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
                s = block.mask(s, i, j)
                block.step("update")
                # m_new, p = exp(s - m_new), alpha, l_new; -inf - -inf is no number: subtract m_new.finite()
                m_new = block.maximum(m_i, s.max())  # solution
                p = block.exp(s - m_new.finite())  # solution
                alpha = block.exp(m_i - m_new.finite())  # solution
                l_new = l_i * alpha + p.sum()  # solution
                # o_i was divided by l_i: undo that and rescale, add p.round(problem.dtype) @ v_j,
                # divide by l_new.nonzero()
                o_i = o_i * (l_i * alpha)  # solution
                p = p.round(problem.dtype)  # solution
                o_i = block.matmul(p, v_j, split=("rows", "none"), acc=o_i)  # solution
                o_i = o_i / l_new.nonzero()  # solution
                block.step("store")
                block.store(l, l_new, i, tile.rows)
                block.store(top, m_new, i, tile.rows)
                block.store(out if j == last else o, o_i, i, tile.rows)
    return out
