SMS = 132


def chunk_tiles(problem, tile):
    """How many tiles of keys a chunk has. The longer a chunk, the fewer partial results."""
    group, keys = problem.queries_per_kv, problem.key_tiles(tile)
    # blocks for each chunk: one for each sequence, KV head, and tile of the group's heads
    blocks = problem.batch * problem.kv_heads * -(-group // tile.rows)  # solution
    # so many chunks fill the GPU: at least SMS blocks. Their length is rounded down: rather one chunk more than one less
    most = keys // -(-SMS // blocks)  # solution
    # and the bytes: 32 keys for each head of the group, or partial results cost more than a sixteenth of K and V
    least = -(-32 * group // tile.cols)  # solution
    # the bytes come first
    return max(least, most)  # solution


@fl.program
def my_split_decoding(m, q, k, v, problem, tile):
    """Flash-Decoding: each chunk of the keys has a block of its own, and a second launch merges what they leave."""
    out, split, size, keys = m.output("out"), ("rows", "none"), chunk_tiles(problem, tile), problem.key_tiles(tile)
    # at least one chunk: without keys there is an output to write, too
    chunks = max(1, -(-keys // size))  # solution
    # of each chunk of each head: O, which isn't divided yet, m, and l
    o_of = m.workspace("partial", v.cols, axes={"chunk": chunks}, flat=True)
    m_of, l_of = (m.workspace(name, 1, axes={"chunk": chunks}, vector=True) for name in ("partial_m", "partial_l"))
    q = m.packed(q)

    def tiles(i, chunk):
        """The tiles of keys of a chunk: a range. The last chunk may be shorter."""
        return range(chunk * size, min((chunk + 1) * size, keys))  # solution

    heads = -(-problem.queries_per_kv // tile.rows)
    for block in m.launch("attend", rows=heads, cols=chunks, warps=1, of=q, walk=tiles):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        m_i, l_i = block.full(tile.rows, 1, float("-inf")), block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("attend")
            k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)
            s = block.mask(s, block.i, j, group=problem.queries_per_kv)
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            l_i, m_i = l_i * alpha + p.sum(), m_new
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc * alpha)
        block.step("store_partial")
        # what this chunk, block.j, has of each head: m.packed(x).at(chunk=block.j) has the heads of the group as rows
        for tensor, part in ((o_of, acc), (m_of, m_i), (l_of, l_i)):  # solution
            block.store(m.packed(tensor).at(chunk=block.j), part, block.i, tile.rows)  # solution

    for block in m.launch("merge", rows=problem.len_q, warps=1):
        m_i, l_i = block.full(1, 1, float("-inf")), block.full(1, 1, 0.0)
        acc = block.full(1, v.cols, 0.0)
        for c in range(chunks):
            block.step("load_partial")
            # this head's O, m and l of chunk c: one row of each, block.fetch(tensor.at(chunk=c), block.i, 1)
            o_c, m_c, l_c = (block.fetch(x.at(chunk=c), block.i, 1) for x in (o_of, m_of, l_of))  # solution
            block.step("merge")
            # both sides on one maximum, then added; nothing is divided here
            m_new = block.maximum(m_i, m_c)  # solution
            alpha, beta = block.exp(m_i - m_new.finite()), block.exp(m_c - m_new.finite())  # solution
            l_i = l_i * alpha + l_c * beta  # solution
            acc = acc * alpha + o_c * beta  # solution
            m_i = m_new  # solution
        block.step("store")
        block.store(out, acc / l_i.nonzero(), block.i, 1)  # solution
    return out
