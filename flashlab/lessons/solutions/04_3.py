@fl.program
def my_lean_flash2(m, q, k, v, problem, tile):
    """FlashAttention-2, with Q taken from SRAM once, and not once for every tile of keys."""
    out, lse = m.output("out"), m.output("lse")
    for block in m.launch("flash2", rows=problem.row_tiles(tile), warps=4):
        block.step("load_q")
        # load the tile, then block.to_registers(...): its rows are shared out among the warps
        q_i = block.to_registers(block.load(q, block.i, tile.rows))  # solution
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("scores")
            k_j = block.load(k, j, tile.cols)
            # each warp has its own rows of q_i: how do the four share the bytes of k_j?
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)  # solution
            s = block.mask(s, block.i, j)
            block.step("update")
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha, m_new
            block.step("output")
            v_j = block.load(v, j, tile.cols)
            # and of v_j?
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)  # solution
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)
        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)
    return out, lse
