@fl.program(operation="backward")
def my_dq(m, q, k, v, out, lse, dout, problem, tile):
    """dQ: a block owns a tile of queries and walks over the keys, once."""
    dq, split = m.output("dq"), ("rows", "none")
    for block in m.launch("dq", rows=problem.row_tiles(tile), warps=4):
        i = block.i
        block.step("load_q")
        q_i, do_i = block.load(q, i, tile.rows), block.load(dout, i, tile.rows)
        lse_i = block.fetch(lse, i, tile.rows)
        block.step("delta")
        # D, a number for each query, before the block has seen a key: block.to_registers(do_i) has dO
        d_i = (block.to_registers(do_i) * block.fetch(out, i, tile.rows)).sum()  # solution
        dq_i = block.full(tile.rows, k.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("weights")
            k_j = block.load(k, j, tile.cols)
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)
            s = block.mask(s, i, j)
            p = block.exp(s - lse_i.finite())
            block.step("ds")
            # dP, then dS = P * (dP - D)
            v_j = block.load(v, j, tile.cols)  # solution
            dp = block.matmul(do_i, v_j.T, split=split)  # solution
            ds = p * (dp - d_i)  # solution
            block.step("dq")
            # dQ_i gets dS times K_j
            dq_i = block.matmul(ds.round(problem.dtype), k_j, split=split, acc=dq_i)  # solution
        block.step("store")
        # S was scale * Q times K transposed: what does that make of dQ?
        block.store(dq, dq_i * problem.scale, i, tile.rows)  # solution
    return dq
