"""FlashAttention-2, forward: Q outside, K and V inside. The warps split Q (split-Q). It skips hidden tiles."""

from __future__ import annotations

from functools import partial
from math import inf

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.variant import Variant
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile


@program
def flash2(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Algorithm 1 of FlashAttention-2 (arXiv 2307.08691), forward.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); out like q; lse (batch, heads, len_q) float32,
    natural logarithm. There is one block per row tile of Br queries. Its warps split the rows, so every warp reads all
    of K_j and V_j. The `variant` is what masks, a soft cap, ALiBi, dropout and sinks change.
    """
    c = m.config
    out, lse = m.output("out"), m.output("lse")
    variant = Variant(m, tile, warps=c.warps)
    visible = variant.walk or partial(problem.tiles_of_row, tile=tile)
    for block in m.launch("flash2", rows=problem.row_tiles(tile), warps=c.warps, readers=c.readers, walk=visible):
        i = block.i
        block.step("load_q")
        q_i: SramTile | Registers = block.load(q, i, tile.rows)
        if c.q_in_registers:
            q_i = block.to_registers(q_i)
        variant.begin(block)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages)
            variant.visit(block, j)
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = variant.bend(block, s, j)
            block.step("mask")
            s = variant.mask(block, s, j)
            block.step("softmax")
            m_new = block.maximum(m_i, s.max())
            p = block.exp(s - m_new.finite())
            block.step("rescale")
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha + p.sum()
            acc = acc * alpha
            m_i = m_new
            block.step("load_v")
            v_j = block.load(v, j, tile.cols, stages=c.stages)
            block.step("output")
            p = variant.drop(block, p, j)
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
        block.step("normalize")
        m_i, l_i, acc = variant.finish(block, m_i, l_i, acc)
        acc = acc / variant.kept(l_i).nonzero()
        logsumexp = m_i + block.log(l_i)
        block.step("store_o")
        block.store(out, acc, i, tile.rows)
        block.step("store_lse")
        block.store(lse, logsumexp, i, tile.rows)
    return out, lse
