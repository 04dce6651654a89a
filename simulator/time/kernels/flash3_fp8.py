"""flash3_fp8: flash3's blocks and producer with operands of a byte: half the bytes in, twice the products a clock, as many
exponentials. A consumer waits for what it asked for, as flash3_2's do; P V comes CHUNK head dims at a time into registers of
its own, and is added to O by FMAs while the next of them is multiplied.

No row of the catalogue, as a `Problem` has no 8-bit dtype: its `dtype` is the output's here. Quantisation isn't timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from simulator.config import Config, heads_that_share_the_l2
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.problem import Problem, Tile, round_up
from simulator.programs import flash3 as program
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.kernels import flash3
from simulator.time.kernels.flash3 import ROWS, Cycles, Shared, exponentials, multiply, producer, store
from simulator.time.launch import Launch, Work
from simulator.time.rates import RS_LATENCY, SS_LATENCY, Rates

CHUNK = 64
"""Head dims of P V that are summed up on their own."""


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As the kernel's launch does: three warpgroups up to head dim 128 where the sequence is long enough for their tile."""
    if problem.itemsize != 2:
        raise UsageError("dtype", problem.dtype, "float16 or bfloat16, of the output of flash3_fp8")
    long = problem.head_dim <= 128 and problem.kv_length > 4096
    chosen = Tile(192, 128) if long else Tile(128, 128)
    if tile is not None:
        chosen = Tile.parse(tile)
    config = program.configure(problem, device, Tile(chosen.rows, chosen.cols // 2))
    return replace(config, tile=chosen, heads_together=heads_that_share_the_l2(problem, device))


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    """flash3's launch, and the distinct bytes that it moves."""
    p = problem
    moved = (p.batch * p.heads * p.len_q * (p.head_dim + 2 * p.value_dim + 4)
             + p.batch * p.num_kv_heads * p.kv_length * (p.head_dim + p.value_dim))  # fmt: skip
    c = _Cycles(problem, config, rates)
    launch = flash3.launch("flash3_fp8", problem, config, c)
    return [replace(launch, block=partial(_block, c=c), moved=moved)]


class _Cycles(Cycles):
    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        super().__init__(problem, config, rates)
        cols = config.tile.cols
        self.q, self.k, self.v = (
            self.q / 2,
            self.k / 2,
            self.v / 2 * round_up(cols, 128) / cols,
        )  # V in whole panels of keys
        self.scores, self.output = self.scores / 2, self.output / 2
        self.d_steps, self.key_steps = self.d_steps // 2, self.key_steps // 2
        self.chunks = round_up(problem.value_dim, CHUNK) // CHUNK
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
