@fl.program(operation="backward")
def my_dv(m, q, k, v, out, lse, dout, problem, tile):
    """dV: a block owns a tile of keys and walks over the queries. P comes back from S and the LSE."""
    dv, split = m.output("dv"), ("rows", "none")
    for block in m.launch("dv", rows=problem.key_tiles(tile), warps=4):
        j = block.i
        block.step("load_k")
        k_j = block.load(k, j, tile.cols)
        dv_j = block.full(tile.cols, v.cols, 0.0)
        for i in range(problem.row_tiles(tile)):
            block.step("scores")
            # S transposed, K_j times Q_i transposed: its rows are keys, so that P is ready for the next product
            q_i = block.load(q, i, tile.rows)  # solution
            s = block.matmul(k_j, q_i.T, split=split, scale=problem.scale)  # solution
            s = block.mask(s.T, i, j).T
            block.step("weights")
            # P from S and the LSE; .T lays the LSE of these queries across, one for each column
            lse_i = block.fetch(lse, i, tile.rows).T  # solution
            p = block.exp(s - lse_i.finite())  # solution
            block.step("dv")
            # dV_j: for each key the rows of dO, weighted; what the tensor cores multiply is rounded
            do_i = block.load(dout, i, tile.rows)  # solution
            dv_j = block.matmul(p.round(problem.dtype), do_i, split=split, acc=dv_j)  # solution
        block.step("store")
        block.store(dv, dv_j, j, tile.cols)
    return dv
