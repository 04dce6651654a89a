"""FlashAttention-1, forward, as printed: K and V outside, Q inside, and O, l, m in HBM. The warps split K (split-K)."""

from __future__ import annotations

from math import inf

from simulator.config import padded
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.tensors import HbmTensor

CHUNK = 64
"""How many columns of O the warps sum up at a time. Their partial results must fit into SRAM beside K, V and Q."""


@program
def flash1(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor | None]:
    """Algorithm 1 of FlashAttention (arXiv 2205.14135), forward, as printed.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); out like q; lse (batch, heads, len_q) float32 if
    asked for. There is one block per head. O, l and m lie in HBM as float32. Each j reads and writes them, and the last
    j writes `out` in place of O. The warps split the keys of a tile. So every warp reads all of Q_i, and their partial
    maxima, sums and outputs meet in SRAM.
    """
    c = m.config
    out = m.output("out")
    lse = m.output("lse") if m.lse else None
    o = m.workspace("o", v.cols)
    row_sums, row_maxima = m.workspace("l", 1, vector=True), m.workspace("m", 1, vector=True)
    last = max(1, problem.key_tiles(tile)) - 1
    chunks = -(-padded(v.cols) // CHUNK)
    for block in m.launch("flash1", warps=c.warps):
        maxima = block.alloc("row_max", tile.rows, copies=c.warps)
        sums = block.alloc("row_sum", tile.rows, copies=c.warps)
        partial = block.alloc("partial_o", tile.rows, min(padded(v.cols), CHUNK), copies=c.warps)
        a, b = block.alloc("a", tile.rows), block.alloc("b", tile.rows)
        block.step("init")
        for i in range(problem.row_tiles(tile)):
            block.store(o, block.full(tile.rows, v.cols, 0.0), i, tile.rows)
            block.store(row_sums, block.full(tile.rows, 1, 0.0), i, tile.rows)
            block.store(row_maxima, block.full(tile.rows, 1, -inf), i, tile.rows)
        for j in range(last + 1):
            block.step("load_k")
            k_j = block.load(k, j, tile.cols)
            block.step("load_v")
            v_j = block.load(v, j, tile.cols)
            for i in range(problem.row_tiles(tile)):
                block.step("load_q")
                q_i = block.load(q, i, tile.rows)
                block.step("scores")
                s = block.matmul(q_i, k_j.T, split=("none", "rows"), scale=problem.scale)
                block.step("mask")
                s = block.mask(s, i, j)
                block.step("row_max")
                block.put(maxima, s.max(), copies=c.warps)
                m_tile = block.get(maxima, split="none")
                block.step("exp")
                p = block.exp(s - m_tile.finite())
                block.step("row_sum")
                block.put(sums, p.sum(), copies=c.warps)
                block.step("stats")
                m_tile, l_tile = block.get(maxima), block.get(sums)
                m_i, l_i = block.fetch(row_maxima, i, tile.rows, fill=-inf), block.fetch(row_sums, i, tile.rows)
                m_new = block.maximum(m_i, m_tile)
                old, new = block.exp(m_i - m_new.finite()), block.exp(m_tile - m_new.finite())
                l_new = old * l_i + new * l_tile
                block.store(row_sums, l_new, i, tile.rows)
                block.store(row_maxima, m_new, i, tile.rows)
                block.put(a, l_i * old / l_new.nonzero())
                block.put(b, new / l_new.nonzero())
                if lse and j == last:
                    block.store(lse, m_new + block.log(l_new), i, tile.rows)
                for chunk in range(chunks):
                    block.step("output")
                    pv = block.matmul(p.round(problem.dtype), v_j.columns(chunk, CHUNK), split=("cols", "rows"))
                    block.put(partial, pv, copies=c.warps)
                    block.step("update_o")
                    o_i = block.fetch(o, i, tile.rows, chunk, CHUNK)
                    o_i = block.get(a) * o_i + block.get(b) * block.get(partial)
                    block.store(out if j == last else o, o_i, i, tile.rows, chunk, CHUNK)
    return out, lse
