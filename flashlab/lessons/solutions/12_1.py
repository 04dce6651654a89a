@fl.program
def my_decoding(m, q, k, v, problem, tile):
    """Decoding: one query for each sequence. The query heads that share a KV head are rows of one tile."""
    out, split = m.output("out"), ("rows", "none")
    # m.packed(x) has the query heads of a group as rows of one matrix: needed of q, and of out, which is returned as it was
    q, rows = m.packed(q), m.packed(out)  # solution
    # a group has problem.queries_per_kv heads: how many tiles of tile.rows rows do they fill?
    tiles = -(-problem.queries_per_kv // tile.rows)  # solution
    for block in m.launch("decode", rows=tiles, warps=1, of=q):
        block.step("load_q")
        # the block's heads, once; the state of its rows
        q_i = block.load(q, block.i, tile.rows)  # solution
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("scores")
            # one tile of keys, for all of these heads
            k_j = block.load(k, j, tile.cols)  # solution
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)  # solution
            s = block.mask(s, block.i, j, group=problem.queries_per_kv)
            block.step("update")
            # m_new, p, alpha, l_i, acc, as in 04.1
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
        # each head's row, divided once
        block.store(rows, acc / l_i.nonzero(), block.i, tile.rows)  # solution
    return out
