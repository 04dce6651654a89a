"""flash3_fp8: the blocks and the producer of flash3, with operands of one byte.

It loads half the bytes and multiplies twice as fast, but has as many exponentials. P V of a key tile has registers of
its own, and FMAs add it to O. Here this is called a fold; elsewhere it is promotion, or two-level accumulation. A
product with ones gives the row sums.

Up to head dim 128, a consumer issues S of a tile together with P V of the tile before, as in flash3, but consumers
don't take turns. The FMAs run beside the exponentials. Above 128, a consumer waits for each product, as in flash3_2. P
V comes `CHUNK` head dims at a time, and one chunk is added to O while the next is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from simulator.config import Config
from simulator.problem import Problem, round_up
from simulator.programs.flash3_fp8 import KEYS, ONES, PANEL
from simulator.time.beside import compared, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Block, Launch, Work, resident
from simulator.time.rates import DRAM_LATENCY, RS_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules import flash3
from simulator.time.schedules.flash3 import ROWS, Cycles, Shared, exponentials, multiply, producer, store

CHUNK = 64
"""How many head dims of P V a consumer multiplies at a time if there are no registers for all."""
OVERLAPPED = 128
"""The largest head dim for which the registers hold P V beside S."""
EXP = 2
"""ALU operations per element: an FMA, and half a conversion at half rate. Only an exact LSE takes an addition."""
TURN_WORK = 8
"""ALU operations per element of V to transpose it: they move bytes from words to other words."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    """The launch that transposes V, and the launch of attention."""
    c = _Cycles(problem, config, rates)
    launch = flash3.launch("flash3_fp8", problem, config, c)

    def in_step(blocks: int) -> Block:
        return partial(_block, c=c.in_step(blocks))

    launch = replace(launch, block=partial(_block, c=c), in_step=in_step, chance=1 / c.consumers)
    return [_transpose(problem, config, rates), launch]


def _transpose(problem: Problem, config: Config, rates: Rates) -> Launch:
    """The launch that transposes V: each block takes `KEYS` rows."""
    elements = KEYS * round_up(problem.head_dim_v, 16)
    moved, turned, work = rates.copy(elements, dram=1), rates.sram(elements), rates.alu(TURN_WORK * elements)

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        def warps() -> Actor:
            yield sm.use("copy", moved, "fetch_v") + DRAM_LATENCY
            yield sm.use("sram", turned, "transpose") + SRAM_LATENCY
            yield sm.use("sram", turned, "transpose") + SRAM_LATENCY
            yield from vector(sm, "transpose", alu=work)
            sm.use("copy", moved, "store_v")

        return [("warps", warps())]

    blocks = problem.batch * problem.kv_heads * -(-problem.len_kv // KEYS)
    slots = resident(replace(config, warps=4, blocks_per_sm=16), rates.device, elements)
    return Launch("flash3_fp8_transpose", block, [([(Work(1), blocks)], 1)], slots)


class _Cycles(Cycles):
    computed = (*Cycles.computed, "fold")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        d, dv, cols = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL), config.tile.cols
        super().__init__(problem.replace(head_dim=d, head_dim_v=dv), config, rates)
        self.v *= round_up(cols, PANEL) / cols  # whole panels of keys
        self.out *= 2 * problem.head_dim_v / dv  # in 16 bits
        self.scores, self.output = self.scores / 2, self.output / 2 * (dv + ONES) / dv
        self.d_steps, self.key_steps = d // 32, max(1, cols // 32)
        self.exp_alu = rates.alu((EXP + problem.exact_lse) * ROWS * cols)
        self.overlapped = max(d, dv) <= OVERLAPPED
        self.chunks = 1 if self.overlapped else dv // CHUNK
        self.fold = rates.alu(ROWS * dv / self.chunks)


def _block(sm: SM, walk: Sequence[Work], c: _Cycles) -> list[tuple[str, Actor]]:
    shared = Shared(sm, c)
    consumer = _overlapped if c.overlapped else _in_turn
    consumers = [(f"consumer {w}", consumer(sm, walk, c, shared)) for w in range(c.consumers)]
    return [("producer", producer(sm, walk, c, shared)), *consumers]


def _overlapped(sm: SM, walk: Sequence[Work], c: _Cycles, shared: Shared) -> Actor:
    """A consumer issues S of a tile before P V of the tile before, and looks for the maxima while P V runs.

    Then it adds P V to O beside the exponentials.
    """
    scores, output = sm.barrier(), sm.barrier()
    k = v = beside = 0
    for n, work in enumerate(walk):
        yield shared.q_full.opening(n)
        for j in range(work.tiles):
            yield from shared.k.ready(k)
            sm.start(sm.actor, _asked(sm, c, scores, shared.v.ready(v) if j else None, output))
            yield scores.opening(k)
            yield sm.now + SS_LATENCY
            shared.k.release(k)
            k += 1
            if j == work.tiles - 1:
                shared.q_empty.arrive()
            if j < work.masked:
                yield from compared(sm, "mask", c.mask)
            yield from compared(sm, "softmax", c.risen if j else c.maximum)
            if j:
                yield output.opening(beside)
                yield sm.now + RS_LATENCY
                beside += 1
                shared.v.release(v)
                v += 1
            yield from vector(sm, "softmax", exp=c.exp, alu=c.exp_alu + (c.fold if j else 0.0))
        if work.tiles:
            yield from shared.v.ready(v)
            yield from multiply(sm, c.output, c.key_steps, "output", RS_LATENCY)
            shared.v.release(v)
            v += 1
            yield from vector(sm, "output", alu=c.fold)
        else:
            shared.q_empty.arrive()
        yield from store(sm, c)
        sm.work_ends(n)


def _asked(sm: SM, c: _Cycles, scores: Barrier, v: Actor | None, output: Barrier) -> Actor:
    """What a consumer has the tensor cores do: S and, with `v`, P V."""
    yield from multiply(sm, c.scores, c.d_steps, "scores", 0.0)
    scores.arrive()
    if v is not None:
        yield from v
        yield from multiply(sm, c.output, c.key_steps, "output", 0.0)
        output.arrive()


def _in_turn(sm: SM, walk: Sequence[Work], c: _Cycles, shared: Shared) -> Actor:
    """A consumer that waits for each result: S, the softmax, and P V chunk by chunk."""
    k = 0
    chunk, folded = sm.barrier(), sm.barrier()  # they open when a chunk of P V is computed, and when it is added to O
    for n, work in enumerate(walk):
        yield shared.q_full.opening(n)
        for j in range(work.tiles):
            yield from shared.k.ready(k)
            yield from multiply(sm, c.scores, c.d_steps, "scores", SS_LATENCY)
            shared.k.release(k)
            if j < work.masked:
                yield from compared(sm, "mask", c.mask)
            yield from compared(sm, "softmax", c.risen if j else c.maximum)
            yield from exponentials(sm, c)
            yield from shared.v.ready(k)
            first = k * c.chunks
            sm.start(sm.actor, _chunks(sm, c, chunk, folded, first))
            for i in range(c.chunks):
                yield chunk.opening(first + i)
                yield sm.now + RS_LATENCY
                if i == c.chunks - 1:
                    shared.v.release(k)
                yield from vector(sm, "output", alu=c.fold)
                folded.arrive()
            k += 1
        shared.q_empty.arrive()
        yield from store(sm, c)
        sm.work_ends(n)


def _chunks(sm: SM, c: _Cycles, done: Barrier, folded: Barrier, first: int) -> Actor:
    """P V, chunk by chunk. Two chunks have registers."""
    for i in range(c.chunks):
        if i > 1:
            yield folded.opening(first + i - 2)
        yield from multiply(sm, c.output / c.chunks, c.key_steps, "output", 0.0)
        done.arrive()
