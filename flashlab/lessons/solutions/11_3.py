@fl.program(operation="backward")
def my_flash2_backward(m, q, k, v, out, lse, dout, problem, tile):
    """The backward pass of FlashAttention-2, under a causal mask: keys outside, queries inside."""
    dq, dk, dv = (m.output(name) for name in ("dq", "dk", "dv"))
    delta, dq_sum, split = m.workspace("delta", 1, vector=True), m.workspace("dq_sum", q.cols), ("rows", "none")

    for block in m.launch("before", rows=problem.row_tiles(tile), warps=4):
        block.step("delta")
        d_i = (block.fetch(dout, block.i, tile.rows) * block.fetch(out, block.i, tile.rows)).sum()
        block.store(delta, d_i, block.i, tile.rows)
        block.step("zero_dq")
        block.store(dq_sum, block.full(tile.rows, q.cols, 0.0), block.i, tile.rows)

    def seeing(j):
        """The query tiles that see some key of tile j: a range."""
        # query t sees the keys 0 to t + problem.len_kv - problem.len_q; so which query is the first to see a key of this tile?
        first = max(0, j * tile.cols - (problem.len_kv - problem.len_q))  # solution
        return range(first // tile.rows, problem.row_tiles(tile))  # solution

    for block in m.launch("main", rows=problem.key_tiles(tile), warps=4, of=k, walk=seeing):
        j, ds_shared = block.i, block.alloc("ds", tile.cols, tile.rows, problem.dtype)
        block.step("load_kv")
        # the block's own keys and values, once; the state of its rows
        k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)  # solution
        dk_j, dv_j = block.full(tile.cols, k.cols, 0.0), block.full(tile.cols, v.cols, 0.0)
        for g in range(problem.queries_per_kv):
            for i in block.walk:
                block.step("load_q")
                # of the g-th query head of the group: q.head(g), dout.head(g), lse.head(g), delta.head(g)
                q_i, do_i = block.load(q.head(g), i, tile.rows), block.load(dout.head(g), i, tile.rows)  # solution
                lse_i = block.fetch(lse.head(g), i, tile.rows).T  # solution
                d_i = block.fetch(delta.head(g), i, tile.rows).T  # solution
                block.step("weights")
                # as in 11.1, with keys as rows
                s = block.matmul(k_j, q_i.T, split=split, scale=problem.scale)  # solution
                s = block.mask(s.T, i, j).T  # solution
                p = block.exp(s - lse_i.finite())  # solution
                block.step("ds")
                # as in 11.2, transposed; rounded, for two products need it
                dp = block.matmul(v_j, do_i.T, split=split)  # solution
                ds = (p * (dp - d_i)).round(problem.dtype)  # solution
                block.step("dkv")
                # two sums that stay in registers
                dv_j = block.matmul(p.round(problem.dtype), do_i, split=split, acc=dv_j)  # solution
                dk_j = block.matmul(ds, q_i, split=split, acc=dk_j)  # solution
                block.step("dq")
                # dS has keys as rows, and dQ wants queries: it goes through SRAM, and comes back as ds_shared.T
                block.put(ds_shared, ds)  # solution
                part = block.matmul(ds_shared.T, k_j, split=split)  # solution
                # other blocks have parts of these rows, too: block.atomic_add(tensor, tile, i, rows)
                block.atomic_add(dq_sum.head(g), part, i, tile.rows)  # solution
        block.step("store_dkv")
        block.store(dk, dk_j * problem.scale, j, tile.cols)  # solution
        block.store(dv, dv_j, j, tile.cols)  # solution

    for block in m.launch("after", rows=problem.row_tiles(tile), warps=4):
        block.step("convert_dq")
        block.store(dq, block.fetch(dq_sum, block.i, tile.rows) * problem.scale, block.i, tile.rows)
    return dq, dk, dv
