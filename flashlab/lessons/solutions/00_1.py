@fl.program
def my_add(m, q, k, v, problem, tile):
    """out = q + k, element by element."""
    out = m.output("out")
    for block in m.launch("add", rows=problem.row_tiles(tile), warps=4):
        block.step("load")
        x = block.fetch(q, block.i, tile.rows)
        # the same tile of k
        y = block.fetch(k, block.i, tile.rows)  # solution
        block.step("store")
        # the sum, to the same tile of out
        block.store(out, x + y, block.i, tile.rows)  # solution
    return out
