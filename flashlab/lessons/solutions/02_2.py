@fl.program
def my_online_softmax(m, q, k, v, problem, tile):
    """The same in two passes: the first finds maximum and sum together."""
    out, chunks = m.output("out"), range(-(-q.cols // tile.cols))
    for block in m.launch("online_softmax", rows=problem.row_tiles(tile), warps=4):
        block.step("online_pass")
        top, total = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        for c in chunks:
            x = block.fetch(q, block.i, tile.rows, c, tile.cols)
            # the new maximum; the old total, rescaled to it, plus what x adds; remember the maximum
            new_top = block.maximum(top, x.max())  # solution
            total = total * block.exp(top - new_top) + block.exp(x - new_top).sum()  # solution
            top = new_top  # solution
        block.step("store")
        for c in chunks:
            x = block.fetch(q, block.i, tile.rows, c, tile.cols)
            block.store(out, block.exp(x - top) / total, block.i, tile.rows, c, tile.cols)  # solution
    return out
