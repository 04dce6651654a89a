@fl.program
def my_safe_softmax(m, q, k, v, problem, tile):
    """out = softmax(q), by rows, tile.cols columns at a time, in three passes: maximum, sum, quotient."""
    out, chunks = m.output("out"), range(-(-q.cols // tile.cols))
    for block in m.launch("safe_softmax", rows=problem.row_tiles(tile), warps=4):
        block.step("row_max")
        top = block.full(tile.rows, 1, float("-inf"))
        for c in chunks:
            x = block.fetch(q, block.i, tile.rows, c, tile.cols)
            # top becomes the larger of itself and the maximum of x
            top = block.maximum(top, x.max())  # solution
        block.step("row_sum")
        total = block.full(tile.rows, 1, 0.0)
        for c in chunks:
            x = block.fetch(q, block.i, tile.rows, c, tile.cols)
            # add the exponentials of x - top to total
            total = total + block.exp(x - top).sum()  # solution
        block.step("store")
        for c in chunks:
            x = block.fetch(q, block.i, tile.rows, c, tile.cols)
            # the quotient goes to tile (block.i, c) of out
            block.store(out, block.exp(x - top) / total, block.i, tile.rows, c, tile.cols)  # solution
    return out
