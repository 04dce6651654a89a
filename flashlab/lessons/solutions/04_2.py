@fl.program
def my_causal_flash2(m, q, k, v, problem, tile):
    """FlashAttention-2 that visits only the tiles of which a causal mask leaves anything."""
    out, lse = m.output("out"), m.output("lse")

    def visible(i):
        """The key tiles that row tile i has to visit: a range."""
        # its last query is (i + 1) * tile.rows - 1, or problem.len_q - 1 if that comes first;
        # query t sees the keys 0 to t + problem.len_kv - problem.len_q
        last_query = min((i + 1) * tile.rows, problem.len_q) - 1  # solution
        last_key = last_query + problem.len_kv - problem.len_q  # solution
        return range(max(0, last_key // tile.cols + 1))  # solution

    for block in m.launch("flash2", rows=problem.row_tiles(tile), warps=4, walk=visible):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("update")
            k_j = block.load(k, j, tile.cols)
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = block.mask(s, block.i, j)
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha, m_new
            v_j = block.load(v, j, tile.cols)
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)
        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)
    return out, lse
