"""flash3_backward_1: a thread of a consumer loads. Each product is waited for, and the consumers meet once a tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simulator.config import Config
from simulator.problem import Problem
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward import KEYS
from simulator.time.beside import compared, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Launch, Work
from simulator.time.rates import BOX_DRAM_LATENCY, BOX_L2_LATENCY, L2_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules import flash3_backward as top
from simulator.time.schedules.flash2_backward import add, around

TAKE_AWAY = 1
"""ALU operations per element: the sums of dP begin at 0, and D is taken away."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    c = Cycles(problem, config, rates)
    main = top.drifting("flash3_backward_1", lambda c: partial(_block, c=c), c, problem, config)
    return around("flash3_backward", main, problem, config, rates, panel=PANEL)


class Cycles(top.Cycles):
    """Those of flash3_backward, and those of D."""

    computed = (*top.Cycles.computed, "take_away")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        super().__init__(problem, config, rates)
        self.take_away = rates.alu(TAKE_AWAY * KEYS * config.tile.rows)


def _block(sm: SM, walk: Sequence[Work], c: Cycles) -> list[tuple[str, Actor]]:
    shared = top.Shared(sm, c)
    return [(f"consumer {w}", _consumer(sm, walk[0], c, shared, w == 0)) for w in range(c.consumers)]


def _consumer(sm: SM, work: Work, c: Cycles, shared: top.Shared, loader: bool) -> Actor:
    products = {name: sm.barrier() for name in ("scores", "dp", "dv", "dk", "dq")}
    if loader:
        if work.tiles:
            yield from _load(sm, shared, 0, BOX_DRAM_LATENCY)
        shared.load_kv(sm, c)
    yield shared.kv_full.opening(0)
    yield sm.now + SRAM_LATENCY
    for n in range(work.tiles):
        yield from compute_ds(sm, c, shared, n, products, masked=n < work.masked)
        shared.ds.arrive()
        sm.start(sm.actor, multiply(sm, c, shared.ds, n, products))
        yield shared.ds.opening(n)  # the barrier of the block: all are done with the tile before, too
        if loader and n + 1 < work.tiles:
            yield from _load(sm, shared, n + 1, BOX_L2_LATENCY)
        yield products["dq"].opening(n)
        yield sm.now + SS_LATENCY
        yield from add(sm, c.port, c.added)
        shared.q.release(n)
        shared.dout.release(n)
    yield from vector(sm, "store_dkv", alu=c.round)
    sm.use("copy", c.stored, "store_dkv")


def _load(sm: SM, shared: top.Shared, n: int, latency: float) -> Actor:
    """Into a slot that is free: whoever loads has met all others. Two of its warps load LSE and D, and wait for them."""
    for ring in (shared.q, shared.dout):
        yield from ring.load(n, latency)
    yield sm.now + L2_LATENCY


def compute_ds(sm: SM, c: Cycles, shared: top.Shared, n: int, products: dict[str, Barrier], *, masked: bool) -> Actor:
    """P and dS of the n-th tile, with S and dP waited for together."""
    yield from shared.q.ready(n)
    yield from shared.dout.ready(n)
    sm.start(sm.actor, top.asked(sm, ("scores", c.scores, products["scores"]), ("dp", c.dp, products["dp"])))
    yield products["dp"].opening(n)
    yield sm.now + SS_LATENCY
    if masked:
        yield from compared(sm, "mask", c.mask)
    sm.use("sram", c.numbers, "exp")
    yield from vector(sm, "exp", exp=c.exp, alu=c.exp_alu)
    yield sm.use("sram", c.numbers, "dp") + SRAM_LATENCY
    yield from vector(sm, "dp", alu=c.take_away)
    yield from vector(sm, "ds", alu=c.ds)
    yield sm.use("sram", c.ds_stored, "ds")


def multiply(sm: SM, c: Cycles, ds: Barrier, n: int, products: dict[str, Barrier]) -> Actor:
    """dV and dK, and dQ when all of dS is there."""
    yield from top.asked(sm, ("dv", c.dv, products["dv"]), ("dk", c.dk, products["dk"]))
    yield ds.opening(n)
    yield from top.asked(sm, ("dq", c.dq, products["dq"]))
