"""FlashAttention-3, forward, for Hopper. TMA loads whole boxes, warpgroups multiply from SRAM, walks go backwards."""

from __future__ import annotations

from functools import partial
from math import inf

from simulator.block import Block
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.variant import Variant
from simulator.tensors import HbmTensor

PANEL = 64
"""Columns of a box: 128 bytes of 16-bit elements, the widest row that TMA swizzles."""
MBARRIERS = 32
"""Room for the ring's mbarriers in float32 elements: 128 bytes of SRAM."""


def counter(m: Machine) -> HbmTensor | None:
    """The counter from which blocks draw their row tiles, if they do."""
    return m.workspace("drawn", 1, "int32", rows=1, vector=True, shared=True, zeros=True) if m.config.dynamic else None


def draw(block: Block, drawn: HbmTensor | None, warps: int) -> None:
    """Where blocks draw their row tiles: draw the next one's number, which the producer tells the `warps` that multiply."""
    if drawn is not None:
        block.arrive(drawn, 0)
        block.tell("number", warps)


def reserve(block: Block, rings: tuple[HbmTensor, HbmTensor], tile: Tile, stages: int, mbarriers: int) -> None:
    """SRAM for the rings of K and V, and for `mbarriers`, in float32 elements."""
    for ring in rings:
        block.alloc(ring.name, tile.cols, ring.cols, ring.dtype, copies=stages, panel=PANEL)
    block.alloc("mbarriers", mbarriers)


def backwards(problem: Problem, tile: Tile, i: int) -> range:
    """The walk of row tile i: the key tiles that the mask leaves, from the last to the first."""
    return problem.tiles_of_row(i, tile)[::-1]


def attend(
    name: str, m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """The launch of any rung. Rungs differ in what runs beside what, not in what they move.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); out like q; lse (batch, heads, len_q) float32,
    natural logarithm. A block has a row tile of Br queries, 64 per warpgroup. So each warpgroup reads all of K_j and
    V_j from SRAM, but no columns that pad a box. In a ragged batch, boxes of Q and V that reach into the next sequence are
    cleared there.
    """
    c, ragged = m.config, problem.lengths is not None
    out, lse = m.output("out"), m.output("lse")
    drawn = counter(m)
    variant = Variant(m, tile, warps=4 * c.consumers, loaders=1, backwards=True)
    visible = variant.walk or partial(backwards, problem, tile)
    for block in m.launch(name, rows=problem.row_tiles(tile), warps=c.warps, readers=c.consumers, walk=visible):
        i = block.i
        block.step("load_q")
        reserve(block, (k, v), tile, c.stages, MBARRIERS)
        draw(block, drawn, 4 * c.consumers)
        q_i = block.load(q, i, tile.rows, panel=PANEL, clear=ragged)
        variant.begin(block)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages, panel=PANEL)
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
            v_j = block.load(v, j, tile.cols, stages=c.stages, panel=PANEL, clear=ragged)
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


@program
def flash3(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Algorithm 1 of FlashAttention-3 (arXiv 2407.08608), forward. The top rung: `flash3_3` with a tile scheduler."""
    return attend("flash3", m, q, k, v, problem, tile)
