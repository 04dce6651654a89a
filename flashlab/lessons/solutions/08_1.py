@fl.program
def my_rung1(m, q, k, v, problem, tile):
    """FlashAttention-2 with TMA and WGMMA: whole boxes, 64 rows a warpgroup, tiles from the last to the first."""
    out, lse, split = m.output("out"), m.output("lse"), ("rows", "none")

    def visible(i):
        return problem.tiles_of_row(i, tile)

    # how many warpgroups share the tile's rows, 64 each
    warpgroups = tile.rows // 64  # solution
    rows = problem.row_tiles(tile)
    for block in m.launch("rung1", rows=rows, warps=4 * warpgroups, readers=warpgroups, walk=visible):
        block.step("load_q")
        # Q_i, in boxes of 64 columns
        q_i = block.load(q, block.i, tile.rows, panel=64)  # solution
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in reversed(block.walk):
            block.step("scores")
            # K_j, in boxes; S, whose rows are shared out among the warpgroups; the mask
            k_j = block.load(k, j, tile.cols, panel=64)  # solution
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)  # solution
            s = block.mask(s, block.i, j)  # solution
            block.step("softmax")
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha, m_new
            block.step("output")
            # V_j, in boxes; O
            v_j = block.load(v, j, tile.cols, panel=64)  # solution
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)  # solution
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)
        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)
    return out, lse
