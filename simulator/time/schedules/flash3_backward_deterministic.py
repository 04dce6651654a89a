"""flash3_backward_deterministic: a tile of flash3_backward, in which blocks take turns to add to dQ.

The thread that loads Q and dO reads whose turn it is, a tile late, and another one passes the turn on. The first key tile of a
query tile stores its part, and the last one reads the sum and writes dQ. Here each visit takes the mean of what visits take. How
long a block waits for its turn behind blocks of other SMs isn't modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simulator.config import Config
from simulator.formulas.flash3_backward_deterministic import visited
from simulator.formulas.walk import walk
from simulator.problem import Problem, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward import KEYS, warpgroups
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work, rows_inside
from simulator.time.rates import BOX_DRAM_LATENCY, BOX_L2_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates
from simulator.time.schedules.flash2_backward import STORED, add, delta, parts, sinks
from simulator.time.schedules.flash3_backward import Cycles, Shared, consumers, drifting


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    p, name, rows = problem, "flash3_backward", config.tile.rows
    tiles = p.row_tiles(config.tile)
    unseen = (1 - visited(p, config.tile)[0] / tiles) * rows_inside(p, config.tile)[0] if tiles else 0.0
    turn = 4.0  # whose turn is first; dQ of queries that see no key is 0
    return [
        delta(f"{name}_delta", p, config, rates, rows=rows, further=turn + unseen * p.head_dim * p.itemsize),
        drifting(name, lambda c: partial(_block, c=c), _InTurn(p, config, rates), p, config),
        *parts(name, p, config, rates),
        *sinks(name, p, config, rates),
    ]


class _InTurn(Cycles):
    """The cycles of a consumer, whose dQ takes what it takes in the mean over all visits of a query tile."""

    computed = (*Cycles.computed, "written")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        super().__init__(problem, config, rates)
        p, tile, es, pairs = problem, config.tile, problem.itemsize, max(1, walk(problem, config.tile).pairs)
        columns = round_up(p.head_dim, PANEL) // warpgroups(tile)[1]
        part, rows = KEYS * columns * 4, rows_inside(p, tile)[0]
        dq = rows * p.head_dim * es / self.consumers
        last, first = (n / pairs for n in visited(p, tile))  # as many last ones of several as first ones read the sum
        each = p.row_tiles(tile) / pairs
        found = _found_in_dram(p, config, rates, each)
        middle = max(0.0, 1 - first - last)
        cold = min(1.0, max(0.0, found - each) / middle) if middle else 0.0  # the first one stores
        self.read = first  # the share of visits that wait for the sum
        self.port = rates.sram((1 + first - last) * part + last * dq)
        self.added = (
            rates.copy(first * part, dram=1)
            + rates.reduce(middle * part, cold)
            + rates.copy(first * part)
            + rates.copy(last * dq, dram=1)
        )
        self.written = rates.alu((first + STORED * last) * KEYS * columns)
        boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
        self.q, self.dout = (rates.copy(rows * (x * es + 4), found) for x in (boxes, boxes_v))


def _found_in_dram(problem: Problem, config: Config, rates: Rates, first: float) -> float:
    """The share of visits that find Q, dO and the sums in DRAM: the first one, or where those of the heads side by side don't fit
    into the L2, the first one of the key tiles that run at once."""
    p, heads = problem, config.heads_together
    boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
    if heads * p.len_q * (boxes * (p.itemsize + 4) + boxes_v * p.itemsize) <= rates.device.l2 / 2:
        return min(1.0, first)
    return min(1.0, max(first, heads // p.queries_per_kv * config.parts / rates.device.sms))


class _Shared(Shared):
    """Also, of each tile of dQ: that it is this block's turn, that all consumers have added, and that the next turn may be told."""

    def __init__(self, sm: SM, c: _InTurn) -> None:
        super().__init__(sm, c)
        self.turn, self.added, self.known, self.read = sm.barrier(), sm.barrier(c.consumers), sm.barrier(), c.read
        self.written = c.written

    def add(self, sm: SM, c: Cycles, n: int) -> Actor:
        """Wait for the turn, add, store or read, and say so."""
        yield self.turn.opening(n)
        yield sm.now + SRAM_LATENCY
        yield from add(sm, c.port, c.added)
        yield sm.now + self.read * L2_LATENCY
        yield from vector(sm, "add_dq", alu=self.written)
        self.added.arrive()


def _block(sm: SM, walk: Sequence[Work], c: _InTurn) -> list[tuple[str, Actor]]:
    shared = _Shared(sm, c)
    return [
        ("producer", _producer(sm, walk[0], c, shared)),
        ("turns", _turns(sm, walk[0], shared)),
        *consumers(sm, walk, c, shared),
    ]


def _producer(sm: SM, work: Work, c: _InTurn, shared: _Shared) -> Actor:
    """The producer hears which key tile the block has drawn. Behind a tile's loads it reads whose turn it is at the one before."""

    def turn(n: int) -> Actor:
        if n >= 2:
            yield shared.known.opening(n - 2)
        yield sm.now + L2_LATENCY
        shared.turn.arrive()

    yield sm.now + L2_LATENCY + SRAM_LATENCY
    for n in range(max(1, work.tiles)):
        if work.tiles:
            latency = BOX_L2_LATENCY if n else BOX_DRAM_LATENCY
            yield from shared.q.load(n, latency)
            yield from shared.dout.load(n, latency)
        if n == 0:
            shared.load_kv(sm, c)
        else:
            yield from turn(n - 1)
    if work.tiles:
        yield from turn(work.tiles - 1)


def _turns(sm: SM, work: Work, shared: _Shared) -> Actor:
    """The thread that passes the turn on. Its fence waits until the additions have arrived."""
    for n in range(work.tiles):
        yield shared.added.opening(n)
        shared.known.arrive()
        yield sm.free["copy"] + L2_LATENCY
