"""flash3_backward_wide: a launch for D, one for dK and dV, and one for dQ. No sums lie in HBM.

For dK and dV, one consumer computes P and dV, the other one dP, dS and dK. P passes through SRAM in float32. For dQ, two
consumers have 64 queries each and walk over the keys. Each waits for its products, but takes exponentials beside dP.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Self

from simulator.config import Config
from simulator.problem import Problem, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward_wide import held, queries, v_stages
from simulator.time.beside import compared, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Block, Launch, Work, first_touch, rows_inside
from simulator.time.order import by_groups_of_heads, key_tiles, longest_first
from simulator.time.rates import BOX_DRAM_LATENCY, BOX_L2_LATENCY, RS_LATENCY, SRAM_LATENCY, SS_LATENCY, Rates
from simulator.time.schedules.flash2_backward import STORED, TURN, arrive, delta, first_queries, sinks
from simulator.time.schedules.flash3_backward import BEGIN, DEEP, KEYS, MASK, WARPS, Product, Ring, asked, multiply

EXP, DS = 2, 2
"""ALU operations per element, of P and of dS: an FMA or a product, and half a conversion at half rate."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    name, tile = "flash3_backward_wide", config.tile
    of_keys, of_queries = _Keys(problem, config, rates), _Queries(problem, config, rates)
    square = replace(config, tile=queries(tile))

    def in_step(blocks: int) -> Block:
        return partial(_queries_block, c=of_queries.in_step())

    rows = by_groups_of_heads(longest_first(problem, tile), problem, config)
    return [
        delta(f"{name}_delta", problem, config, rates, rows=tile.cols),
        Launch(f"{name}_dkv", partial(_keys_block, c=of_keys), key_tiles(problem, square)),
        Launch(f"{name}_dq", partial(_queries_block, c=of_queries), rows, in_step=in_step, chance=1 / config.consumers),
        *sinks(name, problem, config, rates),
    ]


class _Keys:
    """The cycles of the launch for dK and dV: of a consumer, which has all 64 keys."""

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        p, tile, es = problem, queries(config.tile), problem.itemsize
        d, dv, side = round_up(p.head_dim, DEEP), round_up(p.head_dim_v, DEEP), tile.cols
        boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
        self.consumers, self.stages = config.consumers, config.stages
        product = partial(Product.of, rates, es=es)
        self.scores, self.dp = product(side, d, in_registers=held(d)), product(side, dv, in_registers=held(dv))
        self.dv, self.dk = product(dv, side, in_registers=side), product(d, side, in_registers=side)
        elements = KEYS * side
        self.numbers = rates.sram(WARPS * side / 8 * TURN)
        self.exp, self.mask = rates.exp(elements), rates.alu(MASK * elements)
        self.begin, self.exp_alu, self.ds = (rates.alu(n * elements) for n in (BEGIN, EXP, DS))
        self.p = rates.sram(elements * 4)
        rows, keys = rows_inside(p, tile)
        cold = first_queries(p, tile)
        self.q, self.dout = (rates.copy(rows * (x * es + 4), cold) for x in (boxes, boxes_v))
        self.q_filled, self.do_filled = (rates.sram(side * x * es) for x in (boxes, boxes_v))
        self.k, self.v = (rates.copy(keys * x * es, dram=1) for x in (boxes, boxes_v))
        self.held_k, self.held_v = rates.sram(KEYS * held(d) * es), rates.sram(KEYS * held(dv) * es)
        self.round_k, self.round_v = rates.alu(STORED * KEYS * d), rates.alu(STORED * KEYS * dv)
        self.stored_k, self.stored_v = (rates.copy(keys * x * es, dram=1) for x in (p.head_dim, p.head_dim_v))


def _keys_block(sm: SM, walk: Sequence[Work], c: _Keys) -> list[tuple[str, Actor]]:
    shared = SimpleNamespace(
        q=Ring(sm, c, "load_q", c.q, c.q_filled),
        dout=Ring(sm, c, "load_do", c.dout, c.do_filled),
        k_full=sm.barrier(),
        v_full=sm.barrier(),
        p_full=sm.barrier(),
    )
    return [
        ("producer", _producer_of_keys(sm, walk[0], c, shared)),
        ("consumer 0", _weights(sm, walk[0], c, shared)),
        ("consumer 1", _scores_gradient(sm, walk[0], c, shared)),
    ]


def _producer_of_keys(sm: SM, work: Work, c: _Keys, shared: SimpleNamespace) -> Actor:
    """The producer loads K, the first queries, then V, and dO one tile behind Q."""
    shared.k_full.arrive_at(_loaded(sm, c.k, c.q_filled, "load_k") + BOX_DRAM_LATENCY)
    if work.tiles:
        yield from shared.q.load(0, BOX_DRAM_LATENCY)
    shared.v_full.arrive_at(_loaded(sm, c.v, c.do_filled, "load_v") + BOX_DRAM_LATENCY)
    for n in range(work.tiles):
        yield from shared.dout.load(n, BOX_L2_LATENCY if n else BOX_DRAM_LATENCY)
        if n + 1 < work.tiles:
            yield from shared.q.load(n + 1)


def _loaded(sm: SM, cycles: float, filled: float, name: str) -> float:
    """When a tile has come that no ring holds. It has as many bytes as one of queries."""
    end = sm.use("copy", cycles, name)
    arrive(sm, end, filled, name)
    return end


def _weights(sm: SM, work: Work, c: _Keys, shared: SimpleNamespace) -> Actor:
    """The consumer for P and dV."""
    yield shared.k_full.opening(0)
    yield sm.use("sram", c.held_k, "load_k") + SRAM_LATENCY
    for n in range(work.tiles):
        yield from shared.q.ready(n)
        yield from multiply(sm, c.scores, "scores")
        yield sm.now + SS_LATENCY
        if n < work.masked:
            yield from compared(sm, "mask", c.mask)
        sm.use("sram", c.numbers, "exp")
        yield from vector(sm, "exp", exp=c.exp, alu=c.exp_alu)
        shared.q.release(n)
        yield sm.use("sram", c.p, "exp")
        shared.p_full.arrive()
        yield from shared.dout.ready(n)
        yield from multiply(sm, c.dv, "dv")
        yield sm.now + RS_LATENCY
        shared.dout.release(n)
    yield from vector(sm, "store_dkv", alu=c.round_v)
    sm.use("copy", c.stored_v, "store_dkv")


def _scores_gradient(sm: SM, work: Work, c: _Keys, shared: SimpleNamespace) -> Actor:
    """The consumer for dP, dS and dK."""
    yield shared.v_full.opening(0)
    yield sm.use("sram", c.held_v, "load_v") + SRAM_LATENCY
    for n in range(work.tiles):
        yield from shared.dout.ready(n)
        yield sm.use("sram", c.numbers, "dp") + SRAM_LATENCY
        yield from vector(sm, "dp", pieces=1, alu=c.begin)
        yield from multiply(sm, c.dp, "dp")
        yield sm.now + SS_LATENCY
        shared.dout.release(n)
        yield shared.p_full.opening(n)
        yield sm.use("sram", c.p, "ds") + SRAM_LATENCY
        yield from vector(sm, "ds", alu=c.ds)
        yield from shared.q.ready(n)
        yield from multiply(sm, c.dk, "dk")
        yield sm.now + RS_LATENCY
        shared.q.release(n)
    yield from vector(sm, "store_dkv", alu=c.round_k)
    sm.use("copy", c.stored_k, "store_dkv")


class _Queries:
    """The cycles of the launch for dQ, of a consumer with 64 queries; loads are for the whole block."""

    computed = ("mask", "begin", "exp", "exp_alu", "ds", "round", "stored")
    multiplied = ("scores", "dp", "dq")

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        p, tile, es = problem, config.tile, problem.itemsize
        d, dv, bc = round_up(p.head_dim, DEEP), round_up(p.head_dim_v, DEEP), tile.cols
        boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
        self.consumers, self.stages, self.v_stages = config.consumers, config.stages, v_stages(p, config.stages)
        product = partial(Product.of, rates, es=es)
        self.scores, self.dp, self.dq = product(bc, d), product(bc, dv), product(d, bc, in_registers=bc)
        elements = KEYS * bc
        self.exp, self.mask = rates.exp(elements), rates.alu(MASK * elements)
        # -D of a row is moved to each of its elements; dS is a product and half a conversion, and nobody wants P rounded
        self.begin, self.exp_alu, self.ds = rates.alu(elements), rates.alu(elements), rates.alu(DS * elements)
        rows, keys = rows_inside(p, tile)
        cold = first_touch(p, tile)
        self.q = rates.copy(rows * (boxes + boxes_v) * es, dram=1)
        self.q_filled = rates.sram(tile.rows * (boxes + boxes_v) * es)
        self.k, self.v = (rates.copy(keys * x * es, cold) for x in (boxes, boxes_v))
        self.k_filled, self.v_filled = (rates.sram(bc * x * es) for x in (boxes, boxes_v))
        self.round = rates.alu(STORED * KEYS * d)
        self.stored = rates.copy(rows / config.consumers * p.head_dim * es, dram=1)

    def in_step(self) -> Self:
        """The cycles of both consumers together, as if they were one."""
        one = copy(self)
        for name in self.computed:
            setattr(one, name, getattr(self, name) * self.consumers)
        for name in self.multiplied:
            setattr(one, name, getattr(self, name).times(self.consumers))
        one.consumers = 1
        return one


def _queries_block(sm: SM, walk: Sequence[Work], c: _Queries) -> list[tuple[str, Actor]]:
    k, v = Ring(sm, c, "load_k", c.k, c.k_filled), Ring(sm, c, "load_v", c.v, c.v_filled, c.v_stages)
    shared = SimpleNamespace(k=k, v=v, q_full=sm.barrier())
    consumers = [(f"consumer {w}", _rows(sm, walk[0], c, shared)) for w in range(c.consumers)]
    return [("producer", _producer_of_queries(sm, walk[0], c, shared)), *consumers]


def _producer_of_queries(sm: SM, work: Work, c: _Queries, shared: SimpleNamespace) -> Actor:
    shared.q_full.arrive_at(_loaded(sm, c.q, c.q_filled, "load_q, load_do") + BOX_DRAM_LATENCY)
    for j in range(work.tiles):
        latency = BOX_L2_LATENCY if j else BOX_DRAM_LATENCY
        yield from shared.k.load(j, latency)
        yield from shared.v.load(j, latency)


def _rows(sm: SM, work: Work, c: _Queries, shared: SimpleNamespace) -> Actor:
    """A consumer issues dP as soon as V is there, and takes exponentials beside it."""
    scores, dp = sm.barrier(), sm.barrier()
    yield shared.q_full.opening(0)
    yield sm.now + SRAM_LATENCY
    for j in range(work.tiles):
        yield from shared.k.ready(j)
        yield from vector(sm, "dp", pieces=1, alu=c.begin)
        sm.start(sm.actor, asked(sm, ("scores", c.scores, scores)))
        yield from shared.v.ready(j)
        sm.start(sm.actor, _after(sm, c, j, scores, dp))
        yield scores.opening(j)
        yield sm.now + SS_LATENCY
        if j >= work.tiles - work.masked:
            yield from compared(sm, "mask", c.mask)
        yield from vector(sm, "exp", exp=c.exp, alu=c.exp_alu)
        yield dp.opening(j)
        yield sm.now + SS_LATENCY
        shared.v.release(j)
        yield from vector(sm, "ds", alu=c.ds)
        yield from multiply(sm, c.dq, "dq")
        yield sm.now + RS_LATENCY
        shared.k.release(j)
    yield from vector(sm, "store_dq", alu=c.round)
    sm.use("copy", c.stored, "store_dq")


def _after(sm: SM, c: _Queries, j: int, scores: Barrier, dp: Barrier) -> Actor:
    """A warpgroup's products come in their order."""
    yield scores.opening(j)
    yield from asked(sm, ("dp", c.dp, dp))
