@fl.program
def my_matmul(m, q, k, v, problem, tile):
    """out = q @ v: one block for each tile of out. It walks along q's columns and v's rows, 32 at a time."""
    out = m.output("out")
    rows, cols = problem.row_tiles(tile), -(-v.cols // tile.cols)
    for block in m.launch("matmul", rows=rows, cols=cols, warps=4):
        acc = block.full(tile.rows, tile.cols, 0.0)
        for step in range(-(-q.cols // 32)):
            block.step("load")
            # a: tile (block.i, step) of q, tile.rows x 32
            a = block.load(q, block.i, tile.rows, step, 32)  # solution
            # b: tile (step, block.j) of v, 32 x tile.cols
            b = block.load(v, step, 32, block.j, tile.cols)  # solution
            block.step("multiply")
            # add a @ b to acc; the four warps share the rows of a, and each reads all of b
            acc = block.matmul(a, b, split=("rows", "none"), acc=acc)  # solution
        block.step("store")
        block.store(out, acc, block.i, tile.rows, block.j, tile.cols)  # solution
    return out
