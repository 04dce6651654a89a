"""FlashAttention-3 over K and V in pages, for Hopper: requests with many new queries each, and with any number of keys.

`paged` has a few rows per tile, because decoding reads much and computes little. A prefill, or some hundred tokens that are
appended to a long context, computes as much as attention in training does. So the tiles and the warpgroups that multiply are those
of `flash3`. Of pages whose keys fill a tile, or a tile them, TMA brings boxes. From others four warps copy keys row by row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

from simulator.config import WORK, Config, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.paged import PAGED
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash_decoding
from simulator.programs.flash3 import ABOUT as FLASH3
from simulator.programs.flash3 import MBARRIERS, PANEL, backwards, configure_rung
from simulator.programs.flash3 import sram_bytes as plain_sram_bytes
from simulator.programs.scores import join_sink, of_head, soft_cap
from simulator.tensors import HbmTensor

ROWS = 128
"""Queries of a row tile: 64 for each of two warpgroups."""
COPIERS = 4
"""Warps that copy: two K, and two V."""
ASKERS = 2
"""Warps that ask TMA for boxes: one for K, and one for V."""
TOLD = 16
"""Bytes that tell the warps of a block which row tile is next: request, head, first row, number of keys."""


SWIZZLED = 8
"""Rows after which the swizzle of a tile begins anew: a box has a multiple of them."""


def box_rows(problem: Problem, tile: Tile) -> int:
    """How many rows of a page TMA brings in one box: all of it, or as many as a tile has. 0 where neither divides the other.

    >>> p = Problem(batch=1, heads=1, len_q=512, len_kv=512, head_dim=128, dtype="float16")
    >>> [box_rows(p.replace(page_size=n), Tile(128, 128)) for n in (1, 16, 64, 100, 256)]
    [0, 16, 64, 0, 128]
    """
    size = problem.page_size or 1
    rows = min(size, tile.cols)
    return rows if max(size, tile.cols) % rows == 0 and rows % SWIZZLED == 0 else 0


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile that leaves its warpgroups' registers for the warps that copy, else what is accepted."""
    del problem
    if tile.rows in (64, 128) and tile.cols % 16 == 0 and tile.cols <= 128:
        return None
    return "64 or 128 rows, 64 for each warpgroup, and a multiple of 16 columns up to 128"


def shares(tile: Tile) -> int:
    """Into how many parts the keys of a tile are split: each of two warps has one or two, of up to 32 keys, a lane for each."""
    return 2 if tile.cols <= 64 else 4


def choose_tile(problem: Problem) -> Tile:
    """As many keys as registers and SRAM leave room for. A soft cap takes registers, too."""
    d, capped = padded(problem.head_dim), problem.soft_cap is not None
    if d <= 128:
        return Tile(ROWS, 128)
    if d <= 192:
        return Tile(ROWS, 64 if capped and d > 160 else 96)
    return Tile(ROWS, 48 if capped else 64)


def pays(problem: Problem, device: Device) -> bool:
    """Is it faster than `paged`? It is where `flash3` is faster than `flash_decoding`, if all requests are as long.

    >>> from simulator.devices import DEVICES
    >>> p = Problem(batch=16, heads=32, kv_heads=8, len_q=512, len_kv=8192, head_dim=128, dtype="bfloat16", page_size=16)
    >>> [pays(p.replace(batch=b, len_q=n), DEVICES["h100"]) for b, n in ((16, 512), (1, 512), (16, 32), (4, 32), (64, 32))]
    [True, True, True, True, True]
    >>> [pays(p.replace(batch=b, len_q=n), DEVICES["h100"]) for b, n in ((16, 16), (64, 1), (1, 32))]
    [False, False, False]
    """
    return not flash_decoding.pays(problem, device)


def mbarriers(stages: int) -> int:
    """Room for the mbarriers and for what is told, in float32 elements."""
    return MBARRIERS + 16 * (stages > 2)


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block: those of `flash3`, with room for the mbarriers of a third stage."""
    return plain_sram_bytes(problem, tile, stages) + 4 * (mbarriers(stages) - MBARRIERS)


def listeners(config: Config) -> int:
    """The warps that are told which row tile is next: those that multiply, and all but one that load."""
    return 4 * config.consumers + (ASKERS if config.page_box else COPIERS) - 1


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """Two warpgroups of 64 rows. Wide heads leave them no registers to take one row tile after the other.

    Copies take longer than boxes of TMA: they are issued row by row. So the ring has three stages where that many fit.
    """
    rung = configure_rung(problem, device, tile, choose_tile(problem), stages=3, sram=sram_bytes)
    drawn = padded(problem.head_dim) <= 192
    together = heads_that_share_the_l2(problem, device)
    return replace(
        rung,
        heads_together=together,
        constants=(*([("PAGE_BOX", box)] if (box := box_rows(problem, rung.tile)) else []), *features(problem)),
        persistent=drawn,
        dynamic=drawn,
        told=True,
        sorted=True,
    )


@program(configure=configure, operation=PAGED)
def flash3_paged(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Algorithm 1 of FlashAttention-3 (arXiv 2407.08608) over pages (PagedAttention, arXiv 2309.06180), one request.

    q, out (batch, heads, len_q, d); k, v (pages, kv_heads, page_size, d); block_table (batch, pages of a request) int32; seq_lens
    (batch) int32; lse (batch, heads, len_q) float32, natural logarithm. A block takes a row tile of Br queries of a head, those of
    long requests first. Two warps look the pages of K_j up and copy its rows, and two those of V_j, each warp its own share. Rows
    behind the last key become zeros. Or a warp looks up the page of each box of K_j, and another one of V_j, and TMA brings them.
    Boxes behind the last key's are of its page again, and rows of V_j behind that key are cleared.
    """
    c, out, lse = m.config, m.output("out"), m.output("lse")
    k, v = m.paged(k, block_table), m.paged(v, block_table)
    drawn = m.workspace("drawn", 1, "int32", rows=1, vector=True, shared=True, zeros=True) if c.dynamic else None
    visible = partial(backwards, problem, tile)
    rows, box = problem.row_tiles(tile), c.page_box
    panel = PANEL if box else None
    for block in m.launch("flash3_paged", rows=rows, warps=c.warps, readers=c.consumers, walk=visible):
        i = block.i
        block.step("load_q")
        for ring in (k, v):
            block.alloc(ring.name, tile.cols, ring.cols, ring.dtype, copies=c.stages, panel=PANEL)
        block.alloc("mbarriers", mbarriers(c.stages))
        if drawn:
            block.arrive(drawn, 0)
        block.tell(WORK, listeners(c), TOLD)
        q_i = block.load(q, i, tile.rows, panel=PANEL)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            block.look_up(k, j, tile.cols, shares(tile), box=box)
            k_j = block.load(k, j, tile.cols, stages=c.stages, panel=panel)
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = soft_cap(block, s, problem)
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
        m_i, l_i, acc = join_sink(block, of_head("sinks", m, block, 4 * c.consumers), m_i, l_i, acc)
        acc = acc / l_i.nonzero()
        logsumexp = m_i + block.log(l_i)
        block.step("store_o")
        block.store(out, acc, i, tile.rows)
        block.step("store_lse")
        block.store(lse, logsumexp, i, tile.rows)
    return out, lse


ABOUT = {
    "flash3_paged": FLASH3
    | {
        "load_q": "A warp finds the row tile's request among 32, the longest first, and tells the others. TMA brings the queries.",
        "load_k": "Walk on, from the last key tile to the first. Warps look its pages up. TMA brings boxes, or they copy rows.",
        "load_v": "Other warps do the same for the values of these keys.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""
