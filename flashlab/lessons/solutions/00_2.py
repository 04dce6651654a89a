@fl.program
def my_layer_norm(m, q, k, v, problem, tile):
    """out = (q - mean) / sqrt(variance + 1e-5), each row by itself."""
    out = m.output("out")
    for block in m.launch("layer_norm", rows=problem.row_tiles(tile), warps=4):
        block.step("load")
        x = block.fetch(q, block.i, tile.rows)
        block.step("normalize")
        # x has the shape (tile.rows, q.cols), and x.sum() has one value a row;
        # block.elementwise(np.sqrt, …) takes roots
        mean = x.sum() / q.cols  # solution
        centred = x - mean  # solution
        variance = (centred * centred).sum() / q.cols  # solution
        y = centred / block.elementwise(np.sqrt, variance + 1e-5)  # solution
        block.step("store")
        block.store(out, y, block.i, tile.rows)  # solution
    return out
