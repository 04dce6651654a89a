@fl.program
def my_scores(m, q, k, v, problem, tile):
    """out = S = scale q k^T: one block for each tile of S."""
    out = m.output("out")
    rows, cols = problem.row_tiles(tile), problem.key_tiles(tile)
    for block in m.launch("scores", rows=rows, cols=cols, warps=4):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        block.step("load_k")
        # key tile block.j, tile.cols keys of it
        k_j = block.load(k, block.j, tile.cols)  # solution
        block.step("scores")
        # q_i times the transpose of k_j, times problem.scale
        s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)  # solution
        block.step("store_s")
        # tile (block.i, block.j) of S
        block.store(out, s, block.i, tile.rows, block.j, tile.cols)  # solution
    return out
