"""flash3_backward_2: a producer loads a ring ahead. Consumers meet for dQ alone, and free a slot when dV and dK are done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simulator.config import Config
from simulator.problem import Problem
from simulator.programs.flash3 import PANEL
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work
from simulator.time.rates import BOX_DRAM_LATENCY, BOX_L2_LATENCY, RS_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules import flash3_backward as top
from simulator.time.schedules.flash2_backward import add, around
from simulator.time.schedules.flash3_backward_1 import Cycles, compute_ds, multiply


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    c = Cycles(problem, config, rates)
    main = top.drifting("flash3_backward_2", lambda c: partial(_block, c=c), c, problem, config)
    return around("flash3_backward", main, problem, config, rates, panel=PANEL)


def _block(sm: SM, walk: Sequence[Work], c: Cycles) -> list[tuple[str, Actor]]:
    shared = top.Shared(sm, c)
    consumers = [(f"consumer {w}", _consumer(sm, walk[0], c, shared)) for w in range(c.consumers)]
    return [("producer", producer(sm, walk[0], c, shared)), *consumers]


def producer(sm: SM, work: Work, c: top.Cycles, shared: top.Shared) -> Actor:
    """The producer of a block with one key tile: its keys come first."""
    shared.load_kv(sm, c)
    for n in range(work.tiles):
        latency = BOX_L2_LATENCY if n else BOX_DRAM_LATENCY
        yield from shared.q.load(n, latency)
        yield from shared.dout.load(n, latency)


def _consumer(sm: SM, work: Work, c: Cycles, shared: top.Shared) -> Actor:
    products = {name: sm.barrier() for name in ("scores", "dp", "dv", "dk", "dq")}
    yield shared.kv_full.opening(0)
    yield sm.now + SRAM_LATENCY
    for n in range(work.tiles):
        yield from compute_ds(sm, c, shared, n, products, masked=n < work.masked)
        shared.ds.arrive()
        sm.start(sm.actor, multiply(sm, c, shared.ds, n, products))
        yield shared.ds.opening(n)
        yield products["dk"].opening(n)
        yield sm.now + RS_LATENCY
        shared.dout.release(n)
        shared.q.release(n)
        yield products["dq"].opening(n)
        yield sm.now + SS_LATENCY
        yield from add(sm, c.port, c.added)
    yield from vector(sm, "store_dkv", alu=c.round)
    sm.use("copy", c.stored, "store_dkv")
