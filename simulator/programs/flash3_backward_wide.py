"""The backward pass on Hopper for wide heads: a launch for dK and dV, one for dQ, each for the gradients of its own rows."""

from __future__ import annotations

from functools import partial

from simulator.block import Block
from simulator.config import WORK, Config, padded
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, round_up
from simulator.program import program
from simulator.programs.flash2_backward import prepare, sink_gradient
from simulator.programs.flash3 import MBARRIERS, PANEL
from simulator.tensors import HbmTensor

MESSAGE = 32
"""Bytes that say which tile of a sequence a block has."""
HELD = 128
"""Columns of K_j and V_j that stay in registers while a block walks over the queries, if they have so many."""


def held(columns: int) -> int:
    """How many of these columns stay in registers."""
    return min(HELD, padded(columns)) if columns > PANEL else 0


def queries(tile: Tile) -> Tile:
    """In the launch for dK and dV a tile is square: as many queries as keys."""
    return Tile(tile.cols, tile.cols)


def v_stages(problem: Problem, stages: int) -> int:
    """In the launch for dQ the widest heads leave room for one V_j."""
    return 1 if round_up(problem.head_dim_v, PANEL) > 3 * PANEL else stages


@program(operation=BACKWARD)
def flash3_backward_wide(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, ...]:
    """Equations of FlashAttention's Algorithm 4 (arXiv 2205.14135), each gradient by blocks that own its rows.

    q, dq (batch, heads, len_q, d); k, v, dk, dv (batch, kv_heads, len_kv, d); out, dout like q; lse (batch, heads,
    len_q) float32. Both main launches compute S and dP: seven products, but no sum lies in HBM, and each run gives the
    same bits.
    For dK and dV a block has Bc keys of a KV head. S and dP are computed transposed, with keys as rows. One warpgroup
    computes P and dV, the other one dP, dS and dK. So P passes through SRAM, in float32: dS needs it unrounded. A part
    of K_j and V_j stays in registers.
    For dQ a block has Br queries, a half for each warpgroup. Its dS stays in registers.
    In a ragged batch, boxes of what a block walks over are cleared where they reach into the next sequence.
    """
    dq, dk, dv = (m.output(name) for name in ("dq", "dk", "dv"))
    delta = prepare("flash3_backward_wide", m, out, dout, rows=tile.cols)
    of_keys(m, q, k, v, lse, dout, delta, dk, dv, problem, tile)
    of_queries(m, q, k, v, lse, dout, delta, dq, problem, tile)
    return dq, dk, dv, *sink_gradient("flash3_backward_wide", m, lse, delta, problem)


def tell(block: Block, c: Config, problem: Problem) -> None:
    """In a ragged batch one thread looks for the block's sequence, and tells all warps its tile, the walk and the sequence."""
    if problem.lengths is not None:
        block.tell(WORK, c.warps, MESSAGE)


def of_keys(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    delta: HbmTensor,
    dk: HbmTensor,
    dv: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> None:
    """dK and dV: a block per KV head and key tile, summed over the query heads of the group."""
    c, rows, ragged = m.config, queries(tile).rows, problem.lengths is not None
    visible = partial(problem.transposed.tiles_of_row, tile=queries(tile))
    tiles = problem.key_tiles(tile)
    launch = m.launch(
        "flash3_backward_wide_dkv", rows=tiles, warps=c.warps, readers=1, walk=visible, of=k, along="len_kv"
    )
    for block in launch:
        j = block.i
        p_shared = block.alloc("p", tile.cols, rows, copies=c.stages)
        lse_shared, d_shared = (block.alloc(name, c.stages * rows) for name in ("lse", "delta"))
        block.alloc("mbarriers", MBARRIERS)
        for ring in (q, dout):
            block.alloc(ring.name, rows, ring.cols, ring.dtype, copies=c.stages, panel=PANEL)
        block.step("load_kv")
        tell(block, c, problem)
        k_j, v_j = (block.load(x, j, tile.cols, panel=PANEL) for x in (k, v))
        for x in (k_j, v_j):
            block.hold(x, held(x.cols))
        dk_j, dv_j = block.full(tile.cols, k.cols, 0.0), block.full(tile.cols, v.cols, 0.0)
        for g in range(problem.queries_per_kv):
            for i in block.walk:
                block.step("load_q")
                q_i = block.load(q.head(g), i, rows, stages=c.stages, panel=PANEL, clear=ragged)
                block.put(lse_shared, block.fetch(lse.head(g), i, rows))
                block.step("scores")
                s = block.matmul(k_j, q_i.T, split=("rows", "none"), scale=problem.scale)
                block.step("mask")
                s = block.mask(s.T, i, j).T
                block.step("exp")
                p = block.exp(s - block.get(lse_shared, 4).T.finite())
                block.put(p_shared, p)
                block.step("load_do")
                do_i = block.load(dout.head(g), i, rows, stages=c.stages, panel=PANEL, clear=ragged)
                block.put(d_shared, block.fetch(delta.head(g), i, rows))
                d_i = block.get(d_shared, 4).T
                block.step("dv")
                dv_j = block.matmul(p.round(problem.dtype), do_i, split=("rows", "none"), acc=dv_j)
                block.step("dp")
                dp = block.matmul(v_j, do_i.T, split=("rows", "none"))
                block.step("ds")
                ds = (block.get(p_shared) * (dp - d_i)).round(problem.dtype)
                block.step("dk")
                dk_j = block.matmul(ds, q_i, split=("rows", "none"), acc=dk_j)
        block.step("store_dkv")
        block.store(dk, dk_j * problem.scale, j, tile.cols)
        block.store(dv, dv_j, j, tile.cols)


def of_queries(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    delta: HbmTensor,
    dq: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> None:
    """dQ: a block per query head and row tile."""
    c, ragged, slots = m.config, problem.lengths is not None, v_stages(problem, m.config.stages)
    visible = partial(problem.tiles_of_row, tile=tile)
    tiles = problem.row_tiles(tile)
    for block in m.launch("flash3_backward_wide_dq", rows=tiles, warps=c.warps, readers=c.consumers, walk=visible):
        i = block.i
        block.alloc("mbarriers", MBARRIERS)
        for ring, stages in ((k, c.stages), (v, slots)):
            block.alloc(ring.name, tile.cols, ring.cols, ring.dtype, copies=stages, panel=PANEL)
        block.step("load_q")
        tell(block, c, problem)
        q_i = block.load(q, i, tile.rows, panel=PANEL)
        lse_i = block.fetch(lse, i, tile.rows).finite()
        block.step("load_do")
        do_i = block.load(dout, i, tile.rows, panel=PANEL)
        d_i = block.fetch(delta, i, tile.rows)
        dq_i = block.full(tile.rows, q.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages, panel=PANEL, clear=ragged)
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            block.step("load_v")
            v_j = block.load(v, j, tile.cols, stages=slots, panel=PANEL, clear=ragged)
            block.step("dp")
            dp = block.matmul(do_i, v_j.T, split=("rows", "none"))
            block.step("mask")
            s = block.mask(s, i, j)
            block.step("exp")
            p = block.exp(s - lse_i)
            block.step("ds")
            ds = (p * (dp - d_i)).round(problem.dtype)
            block.step("dq")
            dq_i = block.matmul(ds, k_j, split=("rows", "none"), acc=dq_i)
        block.step("store_dq")
        block.store(dq, dq_i * problem.scale, i, tile.rows)
