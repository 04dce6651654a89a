"""FlashAttention-2, backward. Key tiles run in parallel, recompute S and P, and add up dQ by atomics.

A launch before that computes D = rowsum(dO * O).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import gcd, inf

from simulator.block import Block
from simulator.config import padded, warps_for
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, Walk, round_up
from simulator.program import program
from simulator.programs.dropout import dropped, kept_sum, of_kept, of_kept_sum, read_state
from simulator.programs.scores import cap_slope, less_dlse, of_head, soft_cap
from simulator.registers import Registers
from simulator.tensors import HbmTensor

SINK_ROWS = 256
"""Rows that a warp takes together for the gradient of a sink: eight per lane."""


def warp_grid(problem: Problem, tile: Tile) -> tuple[int, int]:
    """The warps form a grid: how many lie along the keys of a tile, and how many along its queries and the head dim.

    For dQ those along the keys take its rows instead. Two across halve the registers that dK and dV take.
    """
    rows, narrowest = padded(tile.rows), padded(min(problem.head_dim, problem.head_dim_v))
    return warps_for(gcd(rows, padded(tile.cols))), 2 if rows % 32 == 0 and narrowest >= 32 else 1


def prepare(
    name: str,
    m: Machine,
    out: HbmTensor,
    dout: HbmTensor,
    dq_sum: HbmTensor | None = None,
    *,
    rows: int,
    walk: Callable[[int], Walk] | None = None,
    begin: Callable[[Block], None] = lambda block: None,
) -> HbmTensor:
    """Line 4 of Algorithm 2: D = rowsum(dO * O), less the gradient of the LSE, which is returned.

    Sets `dq_sum` to 0, if atomics will add to it. A block has `rows` rows: those of a tile, as the sums lie in tiles.
    Each may `begin` something more, which may depend on what it walks over.
    """
    delta, covered = m.workspace("delta", 1, vector=True), dq_sum or out
    across = 0 if covered.spec.flat else rows
    for block in m.launch(
        f"{name}_delta", rows=-(-covered.rows // rows), warps=4, walk=walk, along="delta", across=across
    ):
        i = block.i
        block.step("delta")
        d_i = (block.fetch(dout, i, rows) * block.fetch(out, i, rows)).sum()
        block.store(delta, less_dlse(m, block, d_i, i, rows), i, rows)
        if dq_sum is not None:
            block.step("zero_dq")
            block.store(dq_sum, block.full(rows, dq_sum.cols, 0.0), i, rows)
        begin(block)
    return delta


def convert(name: str, m: Machine, dq_sum: HbmTensor, dq: HbmTensor, problem: Problem, rows: int) -> None:
    """dQ is scale times the sum, rounded to the storage dtype. A block has `rows` rows, as in `prepare`."""
    for block in m.launch(f"{name}_convert", rows=-(-dq_sum.rows // rows), warps=4, along="convert_dq"):
        block.step("convert_dq")
        total = block.fetch(dq_sum, block.i, rows) * of_kept(problem.scale, problem)
        block.store(dq, total.columns(0, dq.cols), block.i, rows)


def sink_gradient(name: str, m: Machine, lse: HbmTensor, delta: HbmTensor, problem: Problem) -> tuple[HbmTensor, ...]:
    """dsink = -sum_i exp(sink - LSE_i) D_i for each batch (or sequence) and head, if there are sinks. One warp has a head."""
    if not problem.sinks:
        return ()
    dsinks = m.output("dsinks")
    for block in m.launch(f"{name}_sinks", warps=1, along="sequences_of_lengths"):
        block.step("dsinks")
        total = block.full(SINK_ROWS, 1, 0.0)
        sink = of_head("sinks", m, block, 1) if problem.len_q else block.full(1, 1, -inf)  # without rows it isn't read
        assert sink is not None
        for i in range(-(-problem.len_q // SINK_ROWS)):
            p_i = block.exp(sink - block.fetch(lse, i, SINK_ROWS, fill=inf).finite())
            total = total + p_i * block.fetch(delta, i, SINK_ROWS)
        block.store(dsinks, total.T.sum() * -1.0, 0, 1)
    return (dsinks,)


@program(operation=BACKWARD)
def flash2_backward(
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
    """Algorithm 2 of FlashAttention-2 (arXiv 2307.08691).

    q, dq (batch, heads, len_q, d); k, v, dk, dv (batch, kv_heads, len_kv, d); out, dout like q; lse (batch, heads,
    len_q) float32. There is one block per KV head and key tile of Bc keys. dK_j and dV_j stay in its registers, summed
    over the query heads of the group. It computes S transposed, with keys as rows, because the next products need P^T
    and dS^T. The warps form a grid over S^T, and another one over dV, dK and dQ, so P and dS pass through SRAM.
    The sums of dQ lie as the accumulators do, so whole tiles of them count, with their rows and columns outside.
    """
    return backward("flash2_backward", m, q, k, v, out, lse, dout, problem, tile)


class Turns:
    """The order in which blocks add to dQ. Here there is none: each adds as soon as it can."""

    def __init__(self, m: Machine, k: HbmTensor, problem: Problem, tile: Tile) -> None:
        """The counters that it needs."""

    def draw(self, block: Block) -> None:
        """The block gets its key tile: here by its number."""

    def walk(self, walk: Walk) -> Iterable[int]:
        """The order of the query tiles."""
        return walk

    def add(self, block: Block, dq_sum: HbmTensor, part: Registers, i: int, rows: int, head: int) -> None:
        """Add to the sums of query tile i, of the `head`-th head of the group."""
        block.atomic_add(dq_sum.head(head), part.columns(0, dq_sum.cols), i, rows)


def backward(
    name: str,
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
    order: type[Turns] = Turns,
) -> tuple[HbmTensor, ...]:
    """`flash2_backward`, whose main launch has this name, and blocks that add to dQ in an order."""
    c = m.config
    dq, dk, dv = (m.output(name) for name in ("dq", "dk", "dv"))
    dq_sum = m.workspace("dq_sum", padded(q.cols), rows=round_up(problem.len_q, tile.rows), flat=True)
    delta = prepare("flash2_backward", m, out, dout, dq_sum, rows=tile.rows)
    along, across = warp_grid(problem, tile)
    shared = across, along  # how many warps read each byte of the left and of the right operand of a product
    visible = partial(problem.transposed.tiles_of_row, tile=Tile(tile.cols, tile.rows))
    tiles, turns = problem.key_tiles(tile), order(m, k, problem, tile)
    for block in m.launch(name, rows=tiles, warps=c.warps, walk=visible, of=k, along="len_kv"):
        j = block.i
        p_shared, ds_shared = (block.alloc(s, tile.cols, tile.rows, problem.dtype) for s in ("p", "ds"))
        turns.draw(block)
        block.step("load_kv")
        k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)
        read_state(m, block, c.warps)
        dk_j, dv_j = block.full(tile.cols, k.cols, 0.0), block.full(tile.cols, v.cols, 0.0)
        for g in range(problem.queries_per_kv):
            for i in turns.walk(block.walk):
                block.step("load_q")
                q_i = block.load(q.head(g), i, tile.rows, stages=c.stages)
                lse_i = block.fetch(lse.head(g), i, tile.rows, warps=along).T
                block.step("load_do")
                do_i = block.load(dout.head(g), i, tile.rows, stages=c.stages)
                d_i = kept_sum(block.fetch(delta.head(g), i, tile.rows, warps=along), problem).T
                block.step("scores")
                s = soft_cap(block, block.matmul(k_j, q_i.T, split=shared, scale=problem.scale), problem)
                slope = cap_slope(s, problem)
                block.step("mask")
                s = block.mask(s.T, i, j).T
                block.step("exp")
                p = block.exp(s - lse_i.finite())
                block.put(p_shared, dropped(m, block, p.T, i, j, member=g).T.round(problem.dtype))
                block.step("dp")
                dp = block.matmul(v_j, do_i.T, split=shared)
                dp = dropped(m, block, dp.T, i, j, member=g).T
                block.step("ds")
                bent = p if slope is None else p * slope
                block.put(ds_shared, (bent * (dp - d_i)).round(problem.dtype))
                block.step("dv")
                dv_j = block.matmul(p_shared, do_i, split=shared, acc=dv_j)
                block.step("dk")
                dk_j = block.matmul(ds_shared, q_i, split=shared, acc=dk_j)
                block.step("dq")
                dq_i = block.matmul(ds_shared.T, k_j, split=shared)
                turns.add(block, dq_sum, dq_i, i, tile.rows, g)
        block.step("store_dkv")
        block.store(dk, dk_j * of_kept(problem.scale, problem), j, tile.cols)
        block.store(dv, of_kept_sum(dv_j, problem), j, tile.cols)
    convert("flash2_backward", m, dq_sum, dq, problem, tile.rows)
    return dq, dk, dv, *sink_gradient("flash2_backward", m, lse, delta, problem)
