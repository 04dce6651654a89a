@fl.program
def my_weighted_mean(m, q, k, v, problem, tile):
    """out = softmax(q) @ v in one pass: scores q (rows x keys), values v (keys x dim)."""
    out = m.output("out")
    for block in m.launch("weighted_mean", rows=problem.row_tiles(tile), warps=4):
        top, total = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("load")
            s = block.to_registers(block.load(q, block.i, tile.rows, j, tile.cols))
            s = block.mask(s, block.i, j)  # -inf beyond the last key
            v_j = block.load(v, j, tile.cols)
            block.step("softmax")
            # as in the online softmax, but keep e = exp(s - new_top)
            new_top = block.maximum(top, s.max())  # solution
            e = block.exp(s - new_top)  # solution
            block.step("rescale")
            # total and acc were summed up under the old maximum: rescale both to the new one
            alpha = block.exp(top - new_top)  # solution
            total = total * alpha + e.sum()  # solution
            acc = acc * alpha  # solution
            top = new_top  # solution
            block.step("output")
            # add e @ v_j to acc; e has to be rounded: e.round(problem.dtype)
            acc = block.matmul(e.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)  # solution
        block.step("store")
        # only now divide by total
        block.store(out, acc / total, block.i, tile.rows)  # solution
    return out
