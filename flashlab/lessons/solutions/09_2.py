@fl.program
def my_eight_bit_scores(m, q, k, v, problem, tile):
    """out = S = scale q k^T, multiplied in e4m3: a scale for each row of q and for each row of k."""
    out, e4m3 = m.output("out"), "float8_e4m3fn"
    rows, cols = problem.row_tiles(tile), problem.key_tiles(tile)
    for block in m.launch("eight_bit_scores", rows=rows, cols=cols, warps=4):
        block.step("load")
        q_i, k_j = block.fetch(q, block.i, tile.rows), block.fetch(k, block.j, tile.cols)
        of_q = block.elementwise(np.abs, q_i).max().nonzero() / 448.0
        of_k = block.elementwise(np.abs, k_j).max().nonzero() / 448.0
        keys = block.alloc("keys", tile.cols, q.cols, e4m3)
        block.step("quantise")
        # q8: q_i in e4m3. k8: k_j in e4m3, which goes to SRAM, where the tensor cores take it from: block.put(keys, k8)
        q8 = (q_i / of_q).round(e4m3)  # solution
        k8 = (k_j / of_k).round(e4m3)  # solution
        block.put(keys, k8)  # solution
        block.step("scores")
        # the product of q8 and keys.T, times problem.scale; then both scales, of which of_k belongs to the columns: of_k.T
        s = block.matmul(q8, keys.T, split=("rows", "none"), scale=problem.scale)  # solution
        s = s * of_q * of_k.T  # solution
        block.step("store")
        block.store(out, s, block.i, tile.rows, block.j, tile.cols)
    return out
