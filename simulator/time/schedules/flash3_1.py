"""flash3_1: the consumers load for themselves. A slot is refilled when the whole block is done with its tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simulator.config import Config
from simulator.problem import Problem
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Block, Launch, Work, resident
from simulator.time.order import in_order
from simulator.time.rates import BOX_DRAM_LATENCY, BOX_L2_LATENCY, RS_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules.flash3 import Cycles, Shared, multiply, store
from simulator.time.schedules.flash3_2 import softmax

OTHER_REGISTERS = 40
"""Roughly the registers per lane besides S, P and O. The kernel sets no limit, so blocks that fit share an SM."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    order = [(in_order(problem, config.tile), problem.batch * problem.heads)]
    c = Cycles(problem, config, rates)
    slots = resident(config, rates.device, c.sram, registers=c.accumulators + OTHER_REGISTERS)

    def in_step(blocks: int) -> Block:
        return partial(_block, c=c.together(blocks))

    # the warpgroups of a block meet after each tile: chance decides between blocks
    by_chance = in_step if slots > 1 else None
    return [Launch("flash3_1", partial(_block, c=c), order, slots, in_step=by_chance, chance=1 / slots)]


def _block(sm: SM, walk: Sequence[Work], c: Cycles) -> list[tuple[str, Actor]]:
    shared, done = Shared(sm, c), sm.barrier(c.consumers)  # the barrier of the block, after each tile
    return [(f"warpgroup {w}", _warpgroup(sm, walk[0], c, shared, done, w == 0)) for w in range(c.consumers)]


def _warpgroup(sm: SM, work: Work, c: Cycles, shared: Shared, done: Barrier, loader: bool) -> Actor:
    if loader:
        shared.q_full.arrive_at(sm.use("copy", c.q, "load_q") + BOX_DRAM_LATENCY)
        for j in range(min(c.stages, work.tiles)):
            load_both(sm, c, shared, j, BOX_DRAM_LATENCY)
    yield shared.q_full.opening(0)
    for j in range(work.tiles):
        yield from shared.k.ready(j)
        yield from multiply(sm, c.scores, c.d_steps, "scores", SS_LATENCY)
        yield from softmax(sm, c, j < work.masked)
        yield from shared.v.ready(j)
        yield from multiply(sm, c.output, c.key_steps, "output", RS_LATENCY)
        done.arrive()
        yield done.opening(j)
        if loader and j + c.stages < work.tiles:
            load_both(sm, c, shared, j + c.stages, BOX_L2_LATENCY)
    yield from store(sm, c)


def load_both(sm: SM, c: Cycles, shared: Shared, j: int, latency: float) -> None:
    for ring in (shared.k, shared.v):
        ring.full[j % c.stages].arrive_at(sm.use("copy", ring.cycles, ring.name) + latency)
