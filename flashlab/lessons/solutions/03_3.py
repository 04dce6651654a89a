def my_blocks(problem, device, tile=None):
    """Line 1 of Algorithm 1: the block sizes, rounded down to multiples of 16.

    device.sram_per_block is in bytes, problem.itemsize is the bytes of an element, problem.head_dim d.
    """
    # rows, cols: Br and Bc
    elements = device.sram_per_block // problem.itemsize  # solution
    cols = elements // (4 * problem.head_dim) // 16 * 16  # solution
    rows = min(cols, problem.head_dim) // 16 * 16  # solution
    return fl.Config(tile=fl.Tile(rows, cols), warps=4)


@fl.program(configure=my_blocks)
def my_sized_flash1(m, q, k, v, problem, tile):
    """FlashAttention-1 with the tile that my_blocks has chosen. Nothing is missing here."""
    out, o = m.output("out"), m.workspace("o", v.cols)
    l, top = m.workspace("l", 1, vector=True), m.workspace("m", 1, vector=True)
    rows, last = range(problem.row_tiles(tile)), max(1, problem.key_tiles(tile)) - 1
    for block in m.launch("flash1", warps=4):
        block.step("init")
        for i in rows:
            block.store(o, block.full(tile.rows, v.cols, 0.0), i, tile.rows)
            block.store(l, block.full(tile.rows, 1, 0.0), i, tile.rows)
            block.store(top, block.full(tile.rows, 1, float("-inf")), i, tile.rows)
        for j in range(last + 1):
            block.step("load_kv")
            k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)
            for i in rows:
                block.step("update")
                q_i, o_i = block.load(q, i, tile.rows), block.fetch(o, i, tile.rows)
                l_i = block.fetch(l, i, tile.rows)
                m_i = block.fetch(top, i, tile.rows, fill=float("-inf"))
                s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
                s = block.mask(s, i, j)
                m_new = block.maximum(m_i, s.max())
                p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
                l_new = l_i * alpha + p.sum()
                o_i = o_i * (l_i * alpha)
                o_i = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=o_i)
                block.store(out if j == last else o, o_i / l_new.nonzero(), i, tile.rows)
                block.store(l, l_new, i, tile.rows)
                block.store(top, m_new, i, tile.rows)
    return out
