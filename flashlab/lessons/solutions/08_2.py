def my_ring(problem, device, tile=None):
    """Br = 128 and a ring of two stages: the widest Bc that fits, a multiple of 16 and at most 256.

    In SRAM: Q, two stages of K and of V, all in whole boxes of 64 columns, and 128 bytes of mbarriers.
    """
    rows, stages = 128, 2
    # cols: Bc, from device.sram_per_block, problem.head_dim and problem.itemsize
    row_bytes = -(-problem.head_dim // 64) * 64 * problem.itemsize  # solution
    left = device.sram_per_block - 128 - rows * row_bytes  # solution
    cols = min(left // (stages * 2 * row_bytes) // 16 * 16, 256)  # solution
    return fl.Config(tile=fl.Tile(rows, cols), warps=12, stages=stages, consumers=2)


@fl.program(configure=my_ring)
def my_rung2(m, q, k, v, problem, tile):
    """One warpgroup loads, two compute; K and V go round a ring. Nothing is missing here."""
    out, lse, split, stages = m.output("out"), m.output("lse"), ("rows", "none"), m.config.stages
    for block in m.launch("rung2", rows=problem.row_tiles(tile), warps=12, readers=2):
        block.step("load_q")
        block.alloc("mbarriers", 32)  # 128 bytes
        q_i = block.load(q, block.i, tile.rows, panel=64)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in reversed(range(problem.key_tiles(tile))):
            block.step("scores")
            k_j = block.load(k, j, tile.cols, stages=stages, panel=64)
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)
            s = block.mask(s, block.i, j)
            block.step("softmax")
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha, m_new
            block.step("output")
            v_j = block.load(v, j, tile.cols, stages=stages, panel=64)
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, tile.rows)
        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)
    return out, lse
