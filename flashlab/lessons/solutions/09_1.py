@fl.program
def my_eight_bits(m, q, k, v, problem, tile):
    """out = q as it is after e4m3, with a scale for each row."""
    out = m.output("out")
    for block in m.launch("eight_bits", rows=problem.row_tiles(tile), warps=4):
        block.step("load")
        x = block.fetch(q, block.i, tile.rows)
        block.step("quantise")
        # scale: what a row is divided by, so that its largest number becomes 448; 1 or anything for a row of zeros.
        # block.elementwise(np.abs, x) takes absolute values, x.nonzero() has 1 in place of 0
        scale = block.elementwise(np.abs, x).max().nonzero() / 448.0  # solution
        # eight: the row in e4m3; .round("float8_e4m3fn") rounds
        eight = (x / scale).round("float8_e4m3fn")  # solution
        block.step("store")
        # what the eight bits stand for
        block.store(out, eight * scale, block.i, tile.rows)  # solution
    return out
