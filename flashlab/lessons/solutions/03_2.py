@fl.program
def my_flash1(m, q, k, v, problem, tile):
    """Algorithm 1 of the FlashAttention paper, forward."""
    out, o = m.output("out"), m.workspace("o", v.cols)
    l, top = m.workspace("l", 1, vector=True), m.workspace("m", 1, vector=True)
    split = ("rows", "none")
    rows, last = problem.row_tiles(tile), max(1, problem.key_tiles(tile)) - 1
    for block in m.launch("flash1", warps=4):
        for i in range(rows):
            block.step("init")
            # lines 2 and 5: O = 0, l = 0, m = -inf, in HBM
            block.store(o, block.full(tile.rows, v.cols, 0.0), i, tile.rows)  # solution
            block.store(l, block.full(tile.rows, 1, 0.0), i, tile.rows)  # solution
            block.store(top, block.full(tile.rows, 1, float("-inf")), i, tile.rows)  # solution
        for j in range(last + 1):
            block.step("load_kv")
            # line 6
            k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)  # solution
            for i in range(rows):
                block.step("load_q_o")
                # line 8: Q_i to SRAM; O_i, l_i and m_i to registers
                q_i, o_i = block.load(q, i, tile.rows), block.fetch(o, i, tile.rows)  # solution
                l_i = block.fetch(l, i, tile.rows)  # solution
                m_i = block.fetch(top, i, tile.rows, fill=float("-inf"))  # solution
                block.step("scores")
                # line 9, and the mask
                s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)  # solution
                s = block.mask(s, i, j)  # solution
                block.step("update")
                # lines 10 to 12, as in 03.1
                m_new = block.maximum(m_i, s.max())  # solution
                p = block.exp(s - m_new.finite())  # solution
                alpha = block.exp(m_i - m_new.finite())  # solution
                l_new = l_i * alpha + p.sum()  # solution
                o_i = o_i * (l_i * alpha)  # solution
                p = p.round(problem.dtype)  # solution
                o_i = block.matmul(p, v_j, split=split, acc=o_i)  # solution
                o_i = o_i / l_new.nonzero()  # solution
                block.step("store")
                # lines 12 and 13; in the last round, out instead of o
                block.store(out if j == last else o, o_i, i, tile.rows)  # solution
                block.store(l, l_new, i, tile.rows)  # solution
                block.store(top, m_new, i, tile.rows)  # solution
    return out
