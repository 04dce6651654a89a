@fl.program(operation="latent attention")
def my_latent(m, q, latent, problem, tile):
    """One row for each token, and all heads share it: its 576 numbers are the key, and the first 512 of them are the value.

    q (batch, heads, len_q, 576)   latent (batch, 1, len_kv, 576)   out (batch, heads, len_q, 512)
    """
    out, group, split = m.output("out"), problem.queries_per_kv, ("rows", "none")
    # all heads of all queries as rows of one matrix, of q and of out: row n belongs to query n // group
    q, rows = m.packed(q), m.packed(out)  # solution
    # how many tiles of tile.rows rows do they fill? A packed tensor knows its .rows
    tiles = -(-q.rows // tile.rows)  # solution
    for block in m.launch("latent", rows=tiles, warps=1, of=q):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, problem.head_dim_v, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("load_latent")
            # a tile of rows of the cache
            k_j = block.load(latent, j, tile.cols)  # solution
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)  # solution
            # no query sees what lies behind the last key, and with a causal mask no query sees a later token
            s = block.mask(s, block.i, j, group=group)  # solution
            block.step("update")
            m_new = block.maximum(m_i, s.max())
            p = block.exp(s - m_new.finite())
            alpha = block.exp(m_i - m_new.finite())
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha, m_new
            block.step("output")
            # the values: they are in SRAM. x.columns(n, width) are columns n * width to (n + 1) * width of a tile, and move nothing
            v_j = k_j.columns(0, problem.head_dim_v)  # solution
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)  # solution
        block.step("store")
        block.store(rows, acc / l_i.nonzero(), block.i, tile.rows)  # solution
    return out
