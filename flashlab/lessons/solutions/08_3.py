@fl.program
def my_rung3(m, q, k, v, problem, tile):
    """S of a tile is issued before O += P V of the tile before: V lags K by one (Algorithm 2 of FlashAttention-3)."""
    out, lse, split = m.output("out"), m.output("lse"), ("rows", "none")

    def visible(i):
        return problem.tiles_of_row(i, tile)

    for block in m.launch("rung3", rows=problem.row_tiles(tile), warps=12, readers=2, walk=visible):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows, panel=64)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        p = None  # of the tile before
        for j in reversed(block.walk):
            block.step("scores")
            k_j = block.load(k, j, tile.cols, stages=2, panel=64)
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)
            block.step("output")
            # O += P V of the tile before, if there is one
            if p is not None:  # solution
                v_j = block.load(v, j + 1, tile.cols, stages=2, panel=64)  # solution
                acc = block.matmul(p, v_j, split=split, acc=acc)  # solution
            block.step("softmax")
            s = block.mask(s, block.i, j)
            # m_new, p, alpha; l_i and acc rescaled; p.round(problem.dtype) waits for its turn
            m_new = block.maximum(m_i, s.max())  # solution
            p = block.exp(s - m_new.finite())  # solution
            alpha = block.exp(m_i - m_new.finite())  # solution
            l_i = l_i * alpha + p.sum()  # solution
            acc = acc * alpha  # solution
            m_i, p = m_new, p.round(problem.dtype)  # solution
        block.step("last_output")
        # one P V is left
        if p is not None:  # solution
            v_j = block.load(v, block.walk[0], tile.cols, stages=2, panel=64)  # solution
            acc = block.matmul(p, v_j, split=split, acc=acc)  # solution
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)
        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)
    return out, lse
