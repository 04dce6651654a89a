"""flash3, and what its rungs share: warpgroups that multiply by wgmma, a ring of K and V, softmax beside the products.

`flash3` itself has persistent blocks with a tile scheduler, a producer, and consumers that take turns at the tensor
cores (ping-pong), as in `flash3_3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Self

from simulator.config import Config
from simulator.problem import Problem, round_up
from simulator.time.beside import compared, products, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Launch, Work, first_touch, rows_inside
from simulator.time.order import by_groups_of_heads, longest_first
from simulator.time.rates import (
    BOX_DRAM_LATENCY,
    BOX_L2_LATENCY,
    RS_LATENCY,
    SRAM_LATENCY,
    SS_LATENCY,
    TURN,
    Rates,
)

ROWS = 64
"""Rows of Q per warpgroup."""
RISEN, MAX, EXP, MASK = 1, 2, 3, 4
"""ALU operations per element.

- `RISEN` (has a row's maximum risen?): three-way integer maxima, half an instruction at half rate.
- `MAX`: a float maximum at half rate.
- `EXP`: an FMA, an addition, and half a conversion at half rate.
- `MASK`: two comparisons and a selection, partly at half rate.
"""
FACTORS = 4
"""Exponentials per row for the factor of a rescaling: each of the four lanes that share a row takes it."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    return [launch("flash3", problem, config, Cycles(problem, config, rates))]


def launch(name: str, problem: Problem, config: Config, c: Cycles) -> Launch:
    """A launch with the kernel's tile scheduler: groups of heads share the L2, the longest rows first."""
    order = by_groups_of_heads(longest_first(problem, config.tile), problem, config)
    return Launch(name, partial(overlapped, c=c), order, persistent=config.persistent, dynamic=config.dynamic)


class Cycles:
    """The cycles of each operation of a warpgroup; loads are for the whole block. `sram` is bytes per block."""

    computed = ("scores", "output", "risen", "maximum", "mask", "exp", "exp_alu", "rescale", "factors", "normalize")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        d, dv, es, bc = (
            round_up(problem.head_dim, 64),
            round_up(problem.head_dim_v, 64),
            problem.itemsize,
            config.tile.cols,
        )
        self.consumers, self.stages = config.consumers, config.stages
        cold = first_touch(problem, config.tile)
        rows, keys = rows_inside(problem, config.tile)
        self.q = rates.copy(rows * d * es, dram=1)
        self.out = rates.copy(rows / config.consumers * dv * es, dram=1)
        self.k, self.v = rates.copy(keys * d * es, cold), rates.copy(keys * dv * es, cold)
        self.scores, self.output = rates.warpgroup_matmul(2 * ROWS * bc * d), rates.warpgroup_matmul(2 * ROWS * bc * dv)
        self.d_steps, self.key_steps = d // 16, bc // 16
        self.risen, self.maximum, self.mask = (rates.alu(n * ROWS * bc) for n in (RISEN, MAX, MASK))
        self.exp, self.exp_alu = rates.exp(ROWS * bc), rates.alu(EXP * ROWS * bc)
        self.accumulators = (3 * bc // 2 + dv) // 2  # registers per lane: S in float32, P in half of that, O
        self.sram = (config.tile.rows * d + config.stages * bc * (d + dv)) * es
        self.rescale = self.normalize = rates.alu(ROWS * dv)
        self.factors = rates.exp(ROWS * FACTORS)

    def together(self, blocks: int) -> Self:
        """The cycles of `blocks` blocks that do the same at the same time, as if they were one block."""
        one = copy(self)
        for name in ("q", "k", "v", "out", *self.computed):
            setattr(one, name, getattr(self, name) * blocks)
        return one

    def in_step(self, blocks: int) -> Self:
        """The cycles of all consumers of `blocks` blocks together, as if they were one consumer."""
        one = self.together(blocks)
        for name in ("out", *self.computed):
            setattr(one, name, getattr(one, name) * self.consumers)
        one.consumers = 1
        return one


class Ring:
    """The slots of K or V in SRAM. `full` opens when a tile has arrived, `empty` when all consumers have used it."""

    def __init__(self, sm: SM, c: Cycles, name: str, cycles: float) -> None:
        self.sm, self.name, self.cycles, self.stages = sm, name, cycles, c.stages
        self.full = [sm.barrier() for _ in range(c.stages)]
        self.empty = [sm.barrier(c.consumers) for _ in range(c.stages)]

    def load(self, n: int, latency: float = BOX_L2_LATENCY) -> Actor:
        """Load the n-th tile as soon as its slot is free."""
        slot, turn = n % self.stages, n // self.stages
        if turn:
            yield self.empty[slot].opening(turn - 1)
        self.full[slot].arrive_at(self.sm.use("copy", self.cycles, self.name) + latency)

    def ready(self, n: int) -> Actor:
        """Wait until the n-th tile has arrived and the actor has seen its barrier open."""
        yield self.full[n % self.stages].opening(n // self.stages)
        yield self.sm.now + SRAM_LATENCY

    def release(self, n: int) -> None:
        self.empty[n % self.stages].arrive()


class Shared:
    """What the actors of a block share: the rings, Q's barriers, and the barriers for turns at the tensor cores."""

    def __init__(self, sm: SM, c: Cycles) -> None:
        self.k, self.v = Ring(sm, c, "load_k", c.k), Ring(sm, c, "load_v", c.v)
        self.q_full, self.q_empty = sm.barrier(), sm.barrier(c.consumers)
        self.turn: list[Barrier] = [sm.barrier() for _ in range(c.consumers)]


def overlapped(sm: SM, walk: Sequence[Work], c: Cycles) -> list[tuple[str, Actor]]:
    """The actors of a block with a producer, and with consumers whose softmax runs beside products."""
    shared = Shared(sm, c)
    shared.turn[0].arrive()
    actors = [("producer", producer(sm, walk, c, shared))]
    return actors + [(f"consumer {w}", _consumer(sm, walk, c, shared, w)) for w in range(c.consumers)]


def producer(sm: SM, walk: Sequence[Work], c: Cycles, shared: Shared) -> Actor:
    """The producer loads K, then Q, then V one tile behind K, each as soon as its slot is free."""
    k = v = 0
    for n, work in enumerate(walk):
        latency = BOX_DRAM_LATENCY if n == 0 else BOX_L2_LATENCY
        if work.tiles:
            yield from shared.k.load(k, latency)
            k += 1
        if n:
            yield shared.q_empty.opening(n - 1)
        shared.q_full.arrive_at(sm.use("copy", c.q, "load_q") + BOX_DRAM_LATENCY)
        for j in range(work.tiles):
            if j + 1 < work.tiles:
                yield from shared.k.load(k, latency)
                k += 1
            yield from shared.v.load(v, latency)
            v += 1


def _consumer(sm: SM, walk: Sequence[Work], c: Cycles, shared: Shared, w: int) -> Actor:
    """A consumer issues S of a tile before P V of the tile before. It looks for the maxima while P V runs."""
    k_ring, v_ring, following = shared.k, shared.v, shared.turn[(w + 1) % c.consumers]
    scores, output = sm.barrier(), sm.barrier()
    k = v = turns = 0
    for n, work in enumerate(walk):
        yield shared.q_full.opening(n)
        for j in range(work.tiles):
            yield from k_ring.ready(k)
            if j:
                yield shared.turn[w].opening(turns)
                yield sm.now + TURN
                turns += 1
            sm.start(sm.actor, _asked(sm, c, scores, v_ring.ready(v) if j else None, output, following))
            yield scores.opening(k)
            yield sm.now + SS_LATENCY
            k_ring.release(k)
            k += 1
            if j == work.tiles - 1:
                shared.q_empty.arrive()
            if j < work.masked:
                yield from compared(sm, "mask", c.mask)
            yield from compared(sm, "softmax", c.risen if j else c.maximum)
            if j:
                yield output.opening(turns - 1)
                yield sm.now + RS_LATENCY
                v_ring.release(v)
                v += 1
            yield from exponentials(sm, c)
        if work.tiles:
            yield from v_ring.ready(v)
            yield from multiply(sm, c.output, c.key_steps, "output", RS_LATENCY)
            v_ring.release(v)
            v += 1
        else:
            shared.q_empty.arrive()
        yield from store(sm, c)
        sm.work_ends(n)


def _asked(sm: SM, c: Cycles, scores: Barrier, v: Actor | None, output: Barrier, following: Barrier) -> Actor:
    """What a consumer has the tensor cores do: S and, with `v`, P V.

    They run instruction by instruction, and those of other consumers come in between. The consumer passes its turn
    on when the last instruction begins.
    """
    yield from multiply(sm, c.scores, c.d_steps, "scores", 0.0)
    scores.arrive()
    if v is None:
        return
    yield from v
    for step in range(c.key_steps):
        if step == c.key_steps - 1:
            following.arrive()
        yield products(sm, c.output / c.key_steps, "output")
    output.arrive()


def multiply(sm: SM, cycles: float, steps: int, name: str, latency: float) -> Actor:
    """Issue products in `steps` instructions, and wait for their result."""
    for _ in range(steps):
        yield products(sm, cycles / steps, name)
    yield sm.now + latency


def exponentials(sm: SM, c: Cycles) -> Actor:
    """One FMA, one exp2 and one addition per element, and the conversion to the storage dtype."""
    yield from vector(sm, "softmax", exp=c.exp, alu=c.exp_alu)


def store(sm: SM, c: Cycles) -> Actor:
    yield from vector(sm, "normalize", alu=c.normalize)
    sm.use("copy", c.out, "store_o")
