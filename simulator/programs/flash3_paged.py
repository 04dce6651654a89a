"""FlashAttention-3 over K and V in pages, for Hopper: requests with many new queries each, and with any number of keys.

`paged` has a few rows per tile, because decoding reads much and computes little. A prefill, or some hundred tokens that are
appended to a long context, computes as much as attention in training does. So the tiles and the warpgroups that multiply are those
of `flash3`. If a page fills whole tiles, or a tile whole pages, TMA brings boxes. From other pages four warps copy keys row by row.
"""

from __future__ import annotations

from functools import partial
from math import inf

from simulator.config import WORK, Config
from simulator.machine import Machine
from simulator.operations.paged import PAGED
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import MBARRIERS, PANEL, backwards, counter, reserve
from simulator.programs.variant import Variant
from simulator.tensors import HbmTensor

COPIERS = 4
"""Warps that copy: two K, and two V."""
ASKERS = 2
"""Warps that ask TMA for boxes: one for K, and one for V."""
TOLD = 16
"""Bytes that tell the warps of a block which row tile is next: request, head, first row, number of keys."""


def shares(tile: Tile) -> int:
    """How many parts a tile's keys are split into. Each of two warps has one part or two, of up to 32 keys, a lane for each."""
    return 2 if tile.cols <= 64 else 4


def mbarriers(stages: int) -> int:
    """Room for the mbarriers, and for the next row tile's numbers, in float32 elements."""
    return MBARRIERS + 16 * (stages > 2)


def listeners(config: Config) -> int:
    """The warps that are told which row tile is next: those that multiply, and all but one that load."""
    return 4 * config.consumers + (ASKERS if config.page_box else COPIERS) - 1


@program(operation=PAGED)
def flash3_paged(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Algorithm 1 of FlashAttention-3 (arXiv 2407.08608) over pages (PagedAttention, arXiv 2309.06180), one request.

    q, out (batch, heads, len_q, d); k, v (pages, kv_heads, page_size, d); block_table (batch, pages of a request) int32; seq_lens
    (batch) int32; lse (batch, heads, len_q) float32, natural logarithm. A block takes a row tile of Br queries of a head, those of
    long requests first. Two warps look the pages of K_j up and copy its rows, and two those of V_j, each warp its own share. Rows
    behind the last key become zeros. Or a warp looks up the page of each box of K_j, and another one of V_j, and TMA brings them.
    Boxes behind the last key's are of its page again, and rows of V_j behind that key are cleared.

    Of requests with different numbers of queries, q and out are (1, heads, len_q of all, d), and cu_seqlens_q (requests + 1) int32
    says where each one's queries begin. Rows of Q behind the last query are the next request's, and are cleared.
    """
    c, out, lse = m.config, m.output("out"), m.output("lse")
    k, v = m.paged(k, block_table), m.paged(v, block_table)
    drawn, variant = counter(m), Variant(m, tile, warps=4 * c.consumers)
    visible = partial(backwards, problem, tile)
    rows, box = problem.row_tiles(tile), c.page_box
    panel = PANEL if box else None
    for block in m.launch("flash3_paged", rows=rows, warps=c.warps, readers=c.consumers, walk=visible):
        i = block.i
        block.step("load_q")
        reserve(block, (k, v), tile, c.stages, mbarriers(c.stages))
        if drawn:
            block.arrive(drawn, 0)
        block.tell(WORK, listeners(c), TOLD)
        q_i = block.load(q, i, tile.rows, panel=PANEL, clear=problem.varlen)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            block.look_up(k, j, tile.cols, shares(tile), box=box)  # the pages of these keys, in the block table
            k_j = block.load(k, j, tile.cols, stages=c.stages, panel=panel)
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = variant.bend(block, s, j)
            block.step("mask")
            s = block.mask(s, i, j)
            block.step("softmax")
            m_new = block.maximum(m_i, s.max())
            p = block.exp(s - m_new.finite())
            block.step("rescale")
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha + p.sum()
            acc = acc * alpha
            m_i = m_new
            block.step("load_v")
            block.look_up(v, j, tile.cols, shares(tile), box=box)
            v_j = block.load(v, j, tile.cols, stages=c.stages, panel=panel, clear=box > 0)
            block.step("output")
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
        block.step("normalize")
        m_i, l_i, acc = variant.finish(block, m_i, l_i, acc)
        acc = acc / l_i.nonzero()
        logsumexp = m_i + block.log(l_i)
        block.step("store_o")
        block.store(out, acc, i, tile.rows)
        block.step("store_lse")
        block.store(lse, logsumexp, i, tile.rows)
    return out, lse
