"""flash3_fp8: flash3's blocks and producer with operands of a byte: half the bytes in, twice the products a clock, as many
exponentials. A consumer waits for what it asked for, as flash3_2's do; P V comes CHUNK head dims at a time into registers of
its own, and is added to O by FMAs while the next of them is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from simulator.config import Config
from simulator.problem import Problem, round_up
from simulator.programs.flash3_fp8 import KEYS, PANEL
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.kernels import flash3
from simulator.time.kernels.flash3 import ROWS, Cycles, Shared, exponentials, multiply, producer, store
from simulator.time.launch import Block, Launch, Work, resident
from simulator.time.rates import DRAM_LATENCY, RS_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates

CHUNK = 64
"""Head dims of P V that are summed up on their own."""
TURN_WORK = 8
"""ALU operations that turning an element of V takes: bytes out of words and into others."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    """V is transposed first."""
    c = _Cycles(problem, config, rates)
    launch = flash3.launch("flash3_fp8", problem, config, c)

    def in_step(blocks: int) -> Block:
        return partial(_block, c=c.in_step(blocks))

    launch = replace(launch, block=partial(_block, c=c), in_step=in_step, chance=1 / c.consumers)
    return [_transpose(problem, config, rates), launch]


def _transpose(problem: Problem, config: Config, rates: Rates) -> Launch:
    """A block turns KEYS rows of V."""
    elements = KEYS * round_up(problem.value_dim, 16)
    moved, turned, work = rates.copy(elements, dram=1), rates.sram(elements), rates.alu(TURN_WORK * elements)

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        def warps() -> Actor:
            yield sm.use("copy", moved, "fetch_v") + DRAM_LATENCY
            yield sm.use("sram", turned, "transpose") + SRAM_LATENCY
            yield sm.use("sram", turned, "transpose") + SRAM_LATENCY
            yield from vector(sm, "transpose", alu=work)
            sm.use("copy", moved, "store_v")

        return [("warps", warps())]

    blocks = problem.batch * problem.num_kv_heads * -(-problem.kv_length // KEYS)
    slots = resident(replace(config, warps=4, blocks_per_sm=16), rates.device, elements)
    return Launch("flash3_fp8_transpose", block, [((Work(1),), blocks)], slots)


class _Cycles(Cycles):
    computed = (*Cycles.computed, "fold")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        d, dv, cols = round_up(problem.head_dim, PANEL), round_up(problem.value_dim, PANEL), config.tile.cols
        super().__init__(problem.replace(head_dim=d, head_dim_v=dv), config, rates)
        self.v *= round_up(cols, PANEL) / cols  # whole panels of keys
        self.out *= 2 * problem.value_dim / dv  # in 16 bits
        self.scores, self.output = self.scores / 2, self.output / 2
        self.d_steps, self.key_steps = d // 32, max(1, cols // 32)
        self.chunks = dv // CHUNK
        self.fold = rates.alu(ROWS * CHUNK)


def _block(sm: SM, walk: Sequence[Work], c: _Cycles) -> list[tuple[str, Actor]]:
    shared = Shared(sm, c)
    consumers = [(f"consumer {w}", _consumer(sm, walk, c, shared)) for w in range(c.consumers)]
    return [("producer", producer(sm, walk, c, shared)), *consumers]


def _consumer(sm: SM, walk: Sequence[Work], c: _Cycles, shared: Shared) -> Actor:
    k = 0
    chunk = sm.barrier()  # opens with each chunk of P V that is there
    for n, work in enumerate(walk):
        yield shared.q_full.opening(n)
        for j in range(work.tiles):
            yield from shared.k.ready(k)
            yield from multiply(sm, c.scores, c.d_steps, "scores", SS_LATENCY)
            shared.k.release(k)
            if j == work.tiles - 1:
                shared.q_empty.arrive()
            if j < work.masked:
                yield from vector(sm, "mask", alu=c.mask)
            yield from vector(sm, "softmax", alu=c.risen if j else c.maximum)
            yield from exponentials(sm, c)
            yield from shared.v.ready(k)
            sm.start(sm.actor, _chunks(sm, c, chunk))
            for i in range(c.chunks):
                yield chunk.opening(k * c.chunks + i)
                yield sm.now + RS_LATENCY
                yield from vector(sm, "output", alu=c.fold)
            shared.v.release(k)
            k += 1
        if not work.tiles:
            shared.q_empty.arrive()
        yield from store(sm, c)
        sm.work_ends(n)


def _chunks(sm: SM, c: _Cycles, done: Barrier) -> Actor:
    """P V, chunk by chunk: two are on their way, so that the tensor cores don't wait for the sums."""
    for _ in range(c.chunks):
        yield from multiply(sm, c.output / c.chunks, c.key_steps, "output", 0.0)
        done.arrive()
