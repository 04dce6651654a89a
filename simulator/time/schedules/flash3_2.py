"""flash3_2: a producer fills the ring. Each consumer waits for its products, then for its exponentials, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simulator.config import Config
from simulator.problem import Problem
from simulator.time.beside import compared, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Block, Launch, Work
from simulator.time.order import in_order
from simulator.time.rates import RS_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules.flash3 import Cycles, Shared, multiply, producer, store


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    order = [(in_order(problem, config.tile), problem.batch * problem.heads)]
    c = Cycles(problem, config, rates)

    def in_step(blocks: int) -> Block:
        return partial(_block, c=c.together(blocks), meeting=True)

    return [Launch("flash3_2", partial(_block, c=c), order, in_step=in_step, chance=1 / c.consumers)]


def _block(sm: SM, walk: Sequence[Work], c: Cycles, *, meeting: bool = False) -> list[tuple[str, Actor]]:
    """The actors of a block. If they are `meeting`, the consumers begin each tile together."""
    shared, met = Shared(sm, c), sm.barrier(c.consumers) if meeting else None
    consumers = [(f"consumer {w}", _consumer(sm, walk[0], c, shared, met)) for w in range(c.consumers)]
    return [("producer", producer(sm, walk, c, shared)), *consumers]


def _consumer(sm: SM, work: Work, c: Cycles, shared: Shared, met: Barrier | None) -> Actor:
    yield shared.q_full.opening(0)
    for j in range(work.tiles):
        yield from shared.k.ready(j)
        yield from multiply(sm, c.scores, c.d_steps, "scores", SS_LATENCY)
        shared.k.release(j)
        yield from softmax(sm, c, j < work.masked)
        yield from shared.v.ready(j)
        yield from multiply(sm, c.output, c.key_steps, "output", RS_LATENCY)
        shared.v.release(j)
        if met is not None:
            met.arrive()
            yield met.opening(j)
    yield from store(sm, c)


def softmax(sm: SM, c: Cycles, masked: bool) -> Actor:
    if masked:
        yield from compared(sm, "mask", c.mask)
    yield from compared(sm, "softmax", c.maximum)
    # two shuffles, the factors of the rescaling, and the latencies between them
    yield sm.now + 4 * SRAM_LATENCY
    # the rescaling needs none of the exponentials of the scores: it runs while their unit works them off
    yield from vector(sm, "softmax", exp=c.exp + c.factors, alu=c.exp_alu + c.rescale)
