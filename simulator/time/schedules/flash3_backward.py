"""flash3_backward: a producer, and two warpgroups with 64 keys each that walk over the queries which see them.

A consumer issues S and dP together. It takes the exponentials of S beside dP, writes dS to SRAM, and issues dQ of the tile
before, then dV and dK. It adds dQ to HBM while dV and dK run. A tile's dS is written when both consumers are done with the
tile before. Nothing else keeps them together.

The tensor cores read operands in SRAM through its port. So do tiles that arrive, dS, LSE and D. And an addition to dQ takes
as many turns of the port as its bytes, because they are the load-store unit's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple, Protocol, Self, TypeVar

from simulator.config import Config
from simulator.problem import Problem, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward import KEYS, warpgroups
from simulator.time.beside import compared, products, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Block, Launch, Work, rows_inside
from simulator.time.order import key_tiles
from simulator.time.rates import BOX_DRAM_LATENCY, BOX_L2_LATENCY, RS_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules.flash2_backward import STORED, TURN, add, around, arrive, first_queries, parts, reduced

EXP, BEGIN, DS, MASK = 1, 0.5, 3, 4
"""ALU operations per element.

- `EXP`: an FMA.
- `BEGIN`: dP begins at -D. A load brings it for one of two keys, and a move for the other.
- `DS`: a product, and two halves of a conversion at half rate, of P and of dS.
- `MASK`: two comparisons and a selection, partly at half rate.
"""
DEEP = 16
"""Rows or columns that one instruction of wgmma sums over."""
WARPS = 4
"""Warps of a consumer. Each reads all of LSE and D."""

C = TypeVar("C", bound="Cycles")


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    main = drifting("flash3_backward", lambda c: partial(_block, c=c), Cycles(problem, config, rates), problem, config)
    first, *others = around("flash3_backward", main, problem, config, rates, panel=PANEL)
    return [first, *others[:2], *parts("flash3_backward", problem, config, rates), *others[2:]]


def drifting(name: str, block: Callable[[C], Block], c: C, problem: Problem, config: Config) -> Launch:
    """A main launch, one block per SM. Nothing arranges turns of its consumers: chance puts them in step, or doesn't."""

    def in_step(blocks: int) -> Block:
        return block(c.in_step())

    return Launch(
        name, block(c), key_tiles(problem, config), persistent=config.persistent,
        dynamic=config.persistent and config.dynamic, in_step=in_step, chance=1 / c.consumers,
    )  # fmt: skip


class Product(NamedTuple):
    """A matrix product of a warpgroup: cycles of the tensor cores and of SRAM's port, in so many instructions."""

    cycles: float
    read: float
    steps: int

    @staticmethod
    def of(rates: Rates, cols: int, deep: int, es: int, *, in_registers: int = 0) -> Product:
        """64 x cols sums over `deep`. A's first columns may lie in registers, the others and B in SRAM."""
        read = rates.sram((KEYS * (deep - in_registers) + cols * deep) * es)
        return Product(rates.warpgroup_matmul(2 * KEYS * cols * deep), read, deep // DEEP)

    def times(self, n: int) -> Product:
        return self._replace(cycles=self.cycles * n, read=self.read * n)


class Staged(Protocol):
    """A block with a ring: its stages, and the consumers that use it."""

    stages: int
    consumers: int


class Cycles:
    """The cycles of each operation of a consumer; loads are for the whole block."""

    multiplied = ("scores", "dp", "dv", "dk", "dq")
    computed = ("numbers", "begin", "mask", "exp", "exp_alu", "ds", "ds_stored", "port", "added", "round", "stored")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        p, tile, es = problem, config.tile, problem.itemsize
        d, dv, br, bc = round_up(p.head_dim, DEEP), round_up(p.head_dim_v, DEEP), tile.rows, tile.cols
        boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
        self.consumers, self.stages = config.consumers, config.stages
        product = partial(Product.of, rates, es=es)
        self.scores, self.dp = product(br, d), product(br, dv)
        self.dv, self.dk = product(dv, br, in_registers=br), product(d, br, in_registers=br)
        columns = boxes // warpgroups(tile)[1]  # of dQ, 64 rows of which a consumer computes
        self.dq = product(columns, bc)
        elements = KEYS * br
        # a lane's two neighbouring queries of each 8, by a load that takes a whole turn
        self.numbers = rates.sram(WARPS * br / 8 * TURN)
        self.exp, self.mask = rates.exp(elements), rates.alu(MASK * elements)
        self.begin, self.exp_alu, self.ds = (rates.alu(n * elements) for n in (BEGIN, EXP, DS))
        self.ds_stored = rates.sram(elements * es)
        sums = KEYS * columns * 4
        self.port, self.added = rates.sram(sums), reduced(p, tile, rates, sums)
        queries, keys = rows_inside(p, tile)
        cold = first_queries(p, tile)
        self.q, self.dout = (rates.copy(queries * (x * es + 4), cold) for x in (boxes, boxes_v))  # with LSE or D
        self.q_filled, self.do_filled = rates.sram(br * boxes * es), rates.sram(br * boxes_v * es)
        self.kv, self.kv_filled = (
            rates.copy(keys * (boxes + boxes_v) * es, 1 / config.parts),
            rates.sram(bc * (boxes + boxes_v) * es),
        )
        self.round = rates.alu(STORED * KEYS * (d + dv))
        size = es if config.parts == 1 else 4
        self.stored = rates.copy(keys / config.consumers * (p.head_dim + p.head_dim_v) * size, dram=1)

    def in_step(self) -> Self:
        """The cycles of all consumers together, as if they were one consumer."""
        one = copy(self)
        for name in self.computed:
            setattr(one, name, getattr(self, name) * self.consumers)
        for name in self.multiplied:
            setattr(one, name, getattr(self, name).times(self.consumers))
        one.consumers = 1
        return one


class Ring:
    """The slots of Q or dO in SRAM. `full` opens when a tile has arrived, `empty` when all consumers have used it."""

    def __init__(self, sm: SM, c: Staged, name: str, cycles: float, filled: float, stages: int = 0) -> None:
        self.sm, self.name, self.cycles, self.filled, self.stages = sm, name, cycles, filled, stages or c.stages
        self.full = [sm.barrier() for _ in range(self.stages)]
        self.empty = [sm.barrier(c.consumers) for _ in range(self.stages)]

    def load(self, n: int, latency: float = BOX_L2_LATENCY) -> Actor:
        """Load the n-th tile as soon as its slot is free."""
        slot, turn = n % self.stages, n // self.stages
        if turn:
            yield self.empty[slot].opening(turn - 1)
        end = self.sm.use("copy", self.cycles, self.name)
        arrive(self.sm, end, self.filled, self.name)
        self.full[slot].arrive_at(end + latency)

    def ready(self, n: int) -> Actor:
        """Wait until the n-th tile has arrived and the actor has seen its barrier open."""
        yield self.full[n % self.stages].opening(n // self.stages)
        yield self.sm.now + SRAM_LATENCY

    def release(self, n: int) -> None:
        self.empty[n % self.stages].arrive()


class Shared:
    """What the actors of a block share: the rings, the barriers of K and V, and that dS of a tile is written and read."""

    def __init__(self, sm: SM, c: Cycles) -> None:
        self.q, self.dout = Ring(sm, c, "load_q", c.q, c.q_filled), Ring(sm, c, "load_do", c.dout, c.do_filled)
        self.kv_full, self.kv_empty, self.ds = sm.barrier(), sm.barrier(c.consumers), sm.barrier(c.consumers)

    def load_kv(self, sm: SM, c: Cycles) -> None:
        end = sm.use("copy", c.kv, "load_kv")
        arrive(sm, end, c.kv_filled, "load_kv")
        self.kv_full.arrive_at(end + BOX_DRAM_LATENCY)

    def add(self, sm: SM, c: Cycles, n: int) -> Actor:
        """Add dQ of the n-th tile."""
        del n
        yield from add(sm, c.port, c.added)


def _block(sm: SM, walk: Sequence[Work], c: Cycles) -> list[tuple[str, Actor]]:
    shared = Shared(sm, c)
    return [("producer", _producer(sm, walk, c, shared)), *consumers(sm, walk, c, shared)]


def consumers(sm: SM, walk: Sequence[Work], c: Cycles, shared: Shared) -> list[tuple[str, Actor]]:
    return [(f"consumer {w}", _consumer(sm, walk, c, shared)) for w in range(c.consumers)]


def _producer(sm: SM, walk: Sequence[Work], c: Cycles, shared: Shared) -> Actor:
    """The producer loads the first queries, whose slots are free before those of K and V."""
    n = 0
    for r, work in enumerate(walk):
        for i in range(max(1, work.tiles)):
            if work.tiles:
                latency = BOX_L2_LATENCY if n else BOX_DRAM_LATENCY
                yield from shared.q.load(n, latency)
                yield from shared.dout.load(n, latency)
                n += 1
            if i == 0:
                if r:
                    yield shared.kv_empty.opening(r - 1)
                shared.load_kv(sm, c)


def _consumer(sm: SM, walk: Sequence[Work], c: Cycles, shared: Shared) -> Actor:
    scores, dp, dq, dv, dk = (sm.barrier() for _ in range(5))
    n = late = 0  # tiles of queries so far, and those whose dQ has been computed beside the next tile's products
    for r, work in enumerate(walk):
        yield shared.kv_full.opening(r)
        yield sm.now + SRAM_LATENCY
        for i in range(work.tiles):
            yield from shared.q.ready(n)
            yield from shared.dout.ready(n)
            yield sm.use("sram", c.numbers, "dp") + SRAM_LATENCY
            yield from vector(sm, "dp", pieces=1, alu=c.begin)
            sm.start(sm.actor, asked(sm, ("scores", c.scores, scores), ("dp", c.dp, dp)))
            yield scores.opening(n)
            yield sm.now + SS_LATENCY
            if i < work.masked:
                yield from compared(sm, "mask", c.mask)
            sm.use("sram", c.numbers, "exp")
            yield from vector(sm, "exp", exp=c.exp, alu=c.exp_alu)
            yield dp.opening(n)
            yield sm.now + SS_LATENCY
            yield from vector(sm, "ds", alu=c.ds)
            if n:
                yield shared.ds.opening(n - 1)
            yield sm.use("sram", c.ds_stored, "ds")
            both = ("dv", c.dv, dv), ("dk", c.dk, dk)
            if i:
                sm.start(sm.actor, asked(sm, ("dq", c.dq, dq), *both))
                yield dq.opening(late)
                late += 1
                yield sm.now + SS_LATENCY
                yield from shared.add(sm, c, n - 1)
            else:
                sm.start(sm.actor, asked(sm, *both))
            yield dv.opening(n)
            yield sm.now + RS_LATENCY
            shared.dout.release(n)
            yield dk.opening(n)
            yield sm.now + RS_LATENCY
            shared.q.release(n)
            shared.ds.arrive()
            n += 1
        if work.tiles:
            yield shared.ds.opening(n - 1)
            yield from multiply(sm, c.dq, "dq")
            yield sm.now + SS_LATENCY
            yield from shared.add(sm, c, n - 1)
        shared.kv_empty.arrive()
        yield from vector(sm, "store_dkv", alu=c.round)
        sm.use("copy", c.stored, "store_dkv")
        sm.work_ends(r)


def asked(sm: SM, *groups: tuple[str, Product, Barrier]) -> Actor:
    """What a warpgroup has the tensor cores do, in this order. A barrier opens when its product is done."""
    for name, product, done in groups:
        yield from multiply(sm, product, name)
        done.arrive()


def multiply(sm: SM, product: Product, name: str) -> Actor:
    """Products, instruction by instruction. Each takes as long as the tensor cores need, or SRAM for the operands."""
    for _ in range(product.steps):
        read = sm.use("sram", product.read / product.steps, name)
        yield max(read, products(sm, product.cycles / product.steps, name))
