@fl.program(operation="paged attention")
def my_paged(m, q, k, v, block_table, problem, tile):
    """One query of a request, over K and V in pages. The heads of a group are rows of a tile.

    q (1, heads, 1, d)   k, v (pages, kv_heads, page_size, d)   block_table (1, pages of the request), int32
    """

    def place(n):
        """Where key n of the request lies: which entry of the block table has its page, and which row of the page it is."""
        return n // problem.page_size, n % problem.page_size  # solution

    out, q, group, split = m.packed(m.output("out")), m.packed(q), problem.queries_per_kv, ("rows", "none")
    # the keys and values in the request's order: m.paged(pool, table, place)
    k, v = (m.paged(pool, block_table, place) for pool in (k, v))  # solution
    for block in m.launch("paged", rows=-(-group // tile.rows), warps=1, of=q):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("look_up")
            # the entries of the table that this tile needs are read, and counted: block.look_up(tensor, j, rows)
            block.look_up(k, j, tile.cols)  # solution
            block.step("scores")
            k_j = block.load(k, j, tile.cols)  # solution
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)  # solution
            # block.mask(s, block.i, j, group=group) puts -inf behind the last key
            s = block.mask(s, block.i, j, group=group)  # solution
            block.step("update")
            m_new = block.maximum(m_i, s.max())
            p = block.exp(s - m_new.finite())
            alpha = block.exp(m_i - m_new.finite())
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha, m_new
            block.step("output")
            v_j = block.load(v, j, tile.cols)  # solution
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)
    return out
