"""flash2: each warp loads, multiplies and exponentiates for itself. Two blocks per SM fill each other's gaps by chance.

The four warps of a block have a scheduler each and do the same, so one actor stands for them. The warps of two blocks
share the units instruction by instruction. So products go fragment by fragment: 16 head dims, or 16 keys, at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.config import Config, padded
from simulator.problem import Problem
from simulator.time.beside import compared, products, vector
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work, first_touch, resident, rows_inside
from simulator.time.order import by_groups_of_heads, longest_first
from simulator.time.rates import DRAM_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates

MAX, EXP, MASK = 2, 3, 4
"""ALU operations per element. `MAX`: a maximum at half rate. `EXP`: an FMA, an addition and half a conversion at half
rate. `MASK`: two comparisons and a selection, partly at half rate."""
FACTORS = 4
"""Exponentials per row for the factor of a rescaling: each of the four lanes that share a row takes it."""
COLUMNS = 64
"""Columns of V that a warp reads before it multiplies them. It reads the next ones meanwhile."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    c = _Cycles(problem, config, rates)
    order = by_groups_of_heads(longest_first(problem, config.tile), problem, config)

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        run = _double_buffered if config.stages == 2 else _single_buffered
        return [("warps", run(sm, c, walk[0]))]

    return [Launch("flash2", block, order, resident(config, rates.device, c.sram))]


class _Cycles:
    """The cycles of each operation of a tile. `sram` is bytes per block."""

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        br, bc = padded(config.tile.rows), padded(config.tile.cols)
        d, dv, es, w = padded(problem.head_dim), padded(problem.head_dim_v), problem.itemsize, config.warps
        matmul = rates.fma if problem.dtype == "float32" else rates.warp_matmul
        self.unit = "alu" if problem.dtype == "float32" else "tensor"
        cold = first_touch(problem, config.tile)
        rows, keys = rows_inside(problem, config.tile)
        self.q, self.out = rates.copy(rows * d * es, dram=1), rates.copy(rows * dv * es, dram=1)
        self.k, self.v = rates.copy(keys * d * es, cold), rates.copy(keys * dv * es, cold)
        self.d_steps, self.key_steps = d // 16, bc // 16
        self.scores = matmul(2 * br * bc * 16)
        self.output = matmul(2 * br * 16 * dv)
        self.k_read = rates.sram(w * bc * 16 * es + (0 if config.q_in_registers else br * 16 * es))
        self.v_read = rates.sram(w * 16 * dv * es)
        self.maximum, self.mask = rates.alu(MAX * br * bc), rates.alu(MASK * br * bc)
        self.exp, self.exp_alu = rates.exp(br * 16), rates.alu(EXP * br * 16)
        self.rescale = self.normalize = rates.alu(br * dv)
        self.factors = rates.exp(br * FACTORS)
        self.alone, self.pieces = rates.alone, max(1, dv // COLUMNS)
        self.sram = (br * d + config.stages * bc * (d + dv)) * es


def _double_buffered(sm: SM, c: _Cycles, work: Work) -> Actor:
    """K and V of the next tile are loaded while this tile is computed."""
    sm.use("copy", c.q, "load_q")
    ready = _load_both(sm, c, DRAM_LATENCY)
    for j in range(work.tiles):
        yield ready + SRAM_LATENCY
        if j + 1 < work.tiles:
            ready = _load_both(sm, c, L2_LATENCY)
        yield from _scores(sm, c)
        yield from _softmax(sm, c, j >= work.tiles - work.masked)
        yield from _output(sm, c)
    yield from _store(sm, c)


def _load_both(sm: SM, c: _Cycles, latency: float) -> float:
    sm.use("copy", c.k, "load_k")
    return sm.use("copy", c.v, "load_v") + latency


def _single_buffered(sm: SM, c: _Cycles, work: Work) -> Actor:
    """V_j is loaded during the scores of tile j, and K_{j+1} after them."""
    sm.use("copy", c.q, "load_q")
    k_ready = sm.use("copy", c.k, "load_k") + DRAM_LATENCY
    for j in range(work.tiles):
        yield k_ready + SRAM_LATENCY
        v_ready = sm.use("copy", c.v, "load_v") + L2_LATENCY
        yield from _scores(sm, c)
        if j + 1 < work.tiles:
            k_ready = sm.use("copy", c.k, "load_k") + L2_LATENCY
        yield from _softmax(sm, c, j >= work.tiles - work.masked)
        yield v_ready + SRAM_LATENCY
        yield from _output(sm, c)
    yield from _store(sm, c)


def _scores(sm: SM, c: _Cycles) -> Actor:
    for _ in range(c.d_steps):
        yield sm.use("sram", c.k_read, "scores") + SRAM_LATENCY
        yield _multiply(sm, c, c.scores, "scores")


def _multiply(sm: SM, c: _Cycles, cycles: float, name: str) -> float:
    """When products end. A block has one warp on each scheduler, which leaves gaps that only the other block fills."""
    if c.unit != "tensor":
        return sm.use(c.unit, cycles, name)
    return max(products(sm, cycles, name), sm.now + c.alone * cycles)


def _softmax(sm: SM, c: _Cycles, masked: bool) -> Actor:
    if masked:
        yield from compared(sm, "mask", c.mask)
    yield from compared(sm, "softmax", c.maximum)
    yield sm.now + 4 * SRAM_LATENCY  # as flash3_2
    yield from vector(sm, "rescale", exp=c.factors, alu=c.rescale)


def _output(sm: SM, c: _Cycles) -> Actor:
    for _ in range(c.key_steps):
        yield from vector(sm, "softmax", pieces=1, exp=c.exp, alu=c.exp_alu)
        read = sm.use("sram", c.v_read / c.pieces, "output")
        for piece in range(c.pieces):
            yield read + SRAM_LATENCY
            if piece + 1 < c.pieces:
                read = sm.use("sram", c.v_read / c.pieces, "output")
            yield _multiply(sm, c, c.output / c.pieces, "output")


def _store(sm: SM, c: _Cycles) -> Actor:
    yield from vector(sm, "normalize", alu=c.normalize)
    sm.use("copy", c.out, "store_o")
