@fl.program
def my_flash2(m, q, k, v, problem, tile):
    """FlashAttention-2: one block for each tile of queries; m, l and O stay in registers to the end."""
    out, lse, split = m.output("out"), m.output("lse"), ("rows", "none")
    for block in m.launch("flash2", rows=problem.row_tiles(tile), warps=4):
        block.step("load_q")
        # the block's own queries, once; the state of its rows
        q_i = block.load(q, block.i, tile.rows)  # solution
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("scores")
            k_j = block.load(k, j, tile.cols)  # solution
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)  # solution
            s = block.mask(s, block.i, j)  # solution
            block.step("update")
            # m_new, p, alpha, l_i, acc: nothing is divided here
            m_new = block.maximum(m_i, s.max())  # solution
            p = block.exp(s - m_new.finite())  # solution
            alpha = block.exp(m_i - m_new.finite())  # solution
            l_i = l_i * alpha + p.sum()  # solution
            acc = acc * alpha  # solution
            m_i = m_new  # solution
            block.step("output")
            v_j = block.load(v, j, tile.cols)  # solution
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)  # solution
        block.step("store")
        # out is acc / l_i, lse is m_i + block.log(l_i)
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)  # solution
        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)  # solution
    return out, lse
