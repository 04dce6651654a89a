"""flash2_backward: a block has a key tile and walks over the queries that see it. Launches before and after it move sums.

The block's warps lie two on each scheduler. One actor stands for four of them, one on each. All of them meet twice a tile,
because P and dS pass through SRAM. A copy that arrives takes turns of SRAM's port, and so does an addition to dQ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from simulator.config import Config, padded
from simulator.formulas.flash2_backward import sram_bytes
from simulator.formulas.walk import walk
from simulator.problem import Problem, Tile
from simulator.programs.flash2_backward import SINK_ROWS, warp_grid
from simulator.programs.flash3_backward import PART_ROWS
from simulator.time.beside import compared, products, vector
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work, resident, rows_inside
from simulator.time.order import key_tiles
from simulator.time.rates import DRAM_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates

EXP, BEGIN, DS, MASK = 2, 1, 2, 4
"""ALU operations per element.

- `EXP`: an FMA, and half a conversion of P at half rate.
- `BEGIN`: the sum of dP begins at -D.
- `DS`: a product, and half a conversion at half rate.
- `MASK`: two comparisons and a selection, partly at half rate.
"""
STORED = 2
"""ALU operations per element of a gradient that is stored: the scale, and half a conversion at half rate."""
DELTA = 3
"""ALU operations per element of dO and O, for D: each is unpacked, and an FMA."""
TURN = 128
"""Bytes of SRAM's port that an instruction of a warp takes at least, however few it reads."""
PIECES = 8
"""In how many pieces tiles arrive in SRAM, and dQ is added, with work of others in between."""
ROWS_AT_ONCE = 64
"""Rows of the sums of dQ that the four warps of a block of the last launch load before they wait."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    return around("flash2_backward", main("flash2_backward", problem, config, rates), problem, config, rates)


def main(name: str, problem: Problem, config: Config, rates: Rates, *, in_turn: bool = False) -> Launch:
    """The main launch. If blocks add `in_turn`, they ask for it and pass it on. None waits for a block of another SM here."""
    c = Cycles(problem, config, rates)
    return Launch(
        name, partial(_block, c=c, in_turn=in_turn), key_tiles(problem, config), resident(config, rates.device, c.sram)
    )


def around(name: str, middle: Launch, problem: Problem, config: Config, rates: Rates, panel: int = 16) -> list[Launch]:
    """The launches before and after the main one: D and zeros for the sums of dQ, and dQ from the sums.

    A row of the sums has whole boxes of `panel` columns.
    """
    columns = -(-problem.head_dim // panel) * panel
    before = delta(f"{name}_delta", problem, config, rates, rows=config.tile.rows, zeros=columns)
    return [
        before,
        middle,
        _convert(f"{name}_convert", problem, config, rates, columns),
        *sinks(name, problem, config, rates),
    ]


def delta(
    name: str, problem: Problem, config: Config, rates: Rates, *, rows: int, zeros: int = 0, further: float = 0.0
) -> Launch:
    """The first launch: a block has so many `rows`, sets so many columns of their sums to 0, and writes so many `further` bytes."""
    p = problem
    inside = min(rows, p.len_q / max(1, -(-p.len_q // rows)))
    loaded = rates.copy(2 * inside * p.head_dim_v * p.itemsize, dram=1)
    stored, work = (
        rates.copy((inside + rows * zeros) * 4 + further, dram=1),
        rates.alu(DELTA * rows * padded(p.head_dim_v)),
    )

    def warps(sm: SM) -> Actor:
        yield sm.use("copy", loaded, "delta") + DRAM_LATENCY
        yield from vector(sm, "delta", alu=work)
        sm.use("copy", stored, "zero_dq" if zeros else "delta")

    blocks = p.batch * p.heads * -(-p.len_q // rows)
    return _rows_launch(name, warps, blocks, config, rates)


def _convert(name: str, problem: Problem, config: Config, rates: Rates, columns: int) -> Launch:
    p, rows = problem, config.tile.rows
    inside, times = rows_inside(p, config.tile)[0], -(-rows // ROWS_AT_ONCE)
    loaded = rates.copy(rows * columns * 4, dram=1) / times
    stored = rates.copy(inside * p.head_dim * p.itemsize, dram=1) / times
    work = rates.alu(STORED * rows * columns) / times

    def warps(sm: SM) -> Actor:
        for _ in range(times):
            yield sm.use("copy", loaded, "convert_dq") + DRAM_LATENCY
            yield from vector(sm, "convert_dq", alu=work)
            sm.use("copy", stored, "convert_dq")

    return _rows_launch(name, warps, p.batch * p.heads * p.row_tiles(config.tile), config, rates)


def parts(name: str, problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    """The launch that adds up parts of dK and dV, if there are any."""
    p, n = problem, config.parts
    if n == 1:
        return []
    inside = min(PART_ROWS, p.len_kv / max(1, -(-p.len_kv // PART_ROWS)))

    def warps(sm: SM) -> Actor:
        for d in (p.head_dim, p.head_dim_v):
            yield sm.use("copy", rates.copy(n * inside * d * 4, dram=1), "add_parts") + DRAM_LATENCY
            yield from vector(sm, "add_parts", alu=rates.alu((n + 1) * PART_ROWS * d))
            sm.use("copy", rates.copy(inside * d * p.itemsize, dram=1), "add_parts")

    return [_rows_launch(f"{name}_parts", warps, p.batch * p.kv_heads * -(-p.len_kv // PART_ROWS), config, rates)]


def sinks(name: str, problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    """The launch for the gradients of sinks, if there are any: a warp has a head."""
    p = problem
    if not p.sinks:
        return []

    def warps(sm: SM, works: Sequence[Work]) -> Actor:
        for _ in range(works[0].tiles):
            yield sm.use("copy", rates.copy(2 * SINK_ROWS * 4, dram=1), "dsinks") + DRAM_LATENCY
            yield from vector(sm, "dsinks", pieces=1, exp=rates.exp(SINK_ROWS), alu=rates.alu(3 * SINK_ROWS))

    def block(sm: SM, works: Sequence[Work]) -> list[tuple[str, Actor]]:
        return [("warp", warps(sm, works))]

    slots = resident(replace(config, warps=1, blocks_per_sm=32), rates.device, 0)
    return [Launch(f"{name}_sinks", block, [([(Work(-(-p.len_q // SINK_ROWS)), p.batch * p.heads)], 1)], slots)]


def _rows_launch(name: str, warps: Callable[[SM], Actor], blocks: int, config: Config, rates: Rates) -> Launch:
    def block(sm: SM, works: Sequence[Work]) -> list[tuple[str, Actor]]:
        return [("warps", warps(sm))]

    slots = resident(replace(config, warps=4, blocks_per_sm=16), rates.device, 0)
    return Launch(name, block, [([(Work(1), blocks)], 1)], slots)


class Product(NamedTuple):
    """A matrix product of an actor: cycles of the tensor cores and of SRAM's port, in so many `steps`.

    If it reads `ahead`, the operands of a step come while the step before is multiplied.
    """

    cycles: float
    read: float
    steps: int
    ahead: bool = True


class Cycles:
    """The cycles of each operation of a tile for one actor; loads are for the whole block. `sram` is bytes per block."""

    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        p, tile, es, actors = problem, config.tile, problem.itemsize, max(1, config.warps // 4)
        br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
        along, across = warp_grid(p, tile)
        float32 = p.dtype == "float32"
        self.unit, matmul = ("alu", rates.fma) if float32 else ("tensor", rates.warp_matmul)
        self.actors, self.stages, self.alone = actors, config.stages, rates.alone

        def product(rows: int, cols: int, deep: int, ahead: bool) -> Product:
            """Of rows x cols sums over `deep`: each warp across reads the left operand, each one along the right one."""
            read = rates.sram((across * rows + along * cols) * deep * es)
            return Product(matmul(2 * rows * cols * deep) / actors, read / actors, deep // 16, ahead)

        # with more queries the compiler unrolls no steps over the head dim, so that registers don't spill
        self.scores, self.dp = (product(bc, br, dim, not float32 and br <= 64) for dim in (d, dv))
        self.dv, self.dk = (product(bc, dim, br, not float32) for dim in (dv, d))
        self.dq = product(br, d, bc, not float32)
        elements = br * bc / actors
        self.mask, self.exp = rates.alu(MASK * elements), rates.exp(elements)
        self.exp_alu, self.begin, self.ds = (rates.alu(n * elements) for n in (EXP, BEGIN, DS))
        self.p_stored = rates.sram(elements * es)
        # LSE or D of two columns, by a shuffle each, for each 8 queries of a warp
        self.numbers = rates.sram(2 * br / 8 / across * config.warps / actors * TURN)
        self.port, self.added = rates.sram(br * d * 4) / actors, reduced(p, tile, rates, br * d * 4) / actors
        queries, keys = rows_inside(p, tile)
        cold = first_queries(p, tile)
        self.q, self.dout = rates.copy(queries * d * es, cold), rates.copy(queries * dv * es, cold)
        self.kv, self.stored = (
            rates.copy(keys * (d + dv) * es, dram=1),
            rates.copy(keys * (d + dv) * es, dram=1) / actors,
        )
        self.filled, self.kv_filled = rates.sram(br * (d + dv) * es), rates.sram(bc * (d + dv) * es)
        self.round = rates.alu(STORED * bc * (d + dv)) / actors
        self.sram = sram_bytes(p, tile, config.stages)


def first_queries(problem: Problem, tile: Tile) -> float:
    """The share of the loads of Q and dO that DRAM serves if the L2 serves all others."""
    pairs = walk(problem.transposed, Tile(tile.cols, tile.rows)).pairs
    return min(1.0, problem.row_tiles(tile) / pairs) if pairs else 1.0


def reduced(problem: Problem, tile: Tile, rates: Rates, nbytes: float) -> float:
    """Cycles of additions of so many bytes to the sums of dQ, the first of which bring the sums from DRAM."""
    return rates.reduce(nbytes, first_queries(problem, tile))


def arrive(sm: SM, end: float, cycles: float, name: str) -> None:
    """A copy that ends at `end` is written to SRAM, piece by piece."""

    def pieces() -> Actor:
        for _ in range(PIECES):
            yield sm.use("sram", cycles / PIECES, name)

    sm.wake(end, sm.actor, pieces())


class _Shared:
    """What the actors of a block share: their barrier, and when what was asked for is there."""

    def __init__(self, sm: SM, c: Cycles) -> None:
        self.met, self.ready = sm.barrier(c.actors), 0.0


def _block(sm: SM, works: Sequence[Work], c: Cycles, *, in_turn: bool) -> list[tuple[str, Actor]]:
    shared = _Shared(sm, c)
    return [(f"warps {4 * n}-{4 * n + 3}", _warps(sm, c, works[0], shared, n, in_turn)) for n in range(c.actors)]


def _warps(sm: SM, c: Cycles, work: Work, shared: _Shared, n: int, in_turn: bool) -> Actor:
    meetings = 0

    def load(latency: float) -> None:
        """One actor loads for all."""
        if n == 0:
            sm.use("copy", c.q, "load_q")
            end = sm.use("copy", c.dout, "load_do")
            arrive(sm, end, c.filled, "load_q, load_do")
            shared.ready = end + latency

    def meet() -> Actor:
        nonlocal meetings
        shared.met.arrive()
        yield shared.met.opening(meetings)
        meetings += 1

    if n == 0:
        end = sm.use("copy", c.kv, "load_kv")
        arrive(sm, end, c.kv_filled, "load_kv")
        shared.ready = end + DRAM_LATENCY
    if work.tiles:
        load(DRAM_LATENCY)
    for i in range(work.tiles):
        yield shared.ready + SRAM_LATENCY
        yield from meet()
        if c.stages == 2 and i + 1 < work.tiles:
            load(L2_LATENCY)
        yield from gradient_of_scores(sm, c, i < work.masked)
        yield from meet()
        yield from multiply(sm, c, c.dv, "dv")
        yield from multiply(sm, c, c.dk, "dk")
        if c.stages == 1:
            yield from meet()
            if i + 1 < work.tiles:
                load(L2_LATENCY)
        yield from multiply(sm, c, c.dq, "dq")
        if in_turn:
            if n == 0:
                yield sm.now + L2_LATENCY  # a thread reads whose turn it is
            yield from meet()
        yield from add(sm, c.port, c.added)
        if in_turn:
            yield from meet()
            if n == 0:
                yield sm.free["copy"] + L2_LATENCY  # its fence: the additions have arrived, and the turn is passed on
    yield shared.ready
    yield from vector(sm, "store_dkv", alu=c.round)
    sm.use("copy", c.stored, "store_dkv")


def gradient_of_scores(sm: SM, c: Cycles, masked: bool) -> Actor:
    """S, P and its copy in SRAM, dP, dS and its copy in SRAM."""
    yield from multiply(sm, c, c.scores, "scores")
    if masked:
        yield from compared(sm, "mask", c.mask)
    yield sm.use("sram", c.numbers, "exp") + SRAM_LATENCY
    yield from vector(sm, "exp", exp=c.exp, alu=c.exp_alu)
    sm.use("sram", c.p_stored, "exp")
    yield sm.use("sram", c.numbers, "dp") + SRAM_LATENCY
    yield from vector(sm, "dp", alu=c.begin)
    yield from multiply(sm, c, c.dp, "dp")
    yield from vector(sm, "ds", alu=c.ds)
    yield sm.use("sram", c.p_stored, "ds")


def multiply(sm: SM, c: Cycles, product: Product, name: str) -> Actor:
    """Each step reads its operands and multiplies them. By itself, one warp of a scheduler leaves gaps."""
    cycles, read = product.cycles / product.steps, product.read / product.steps
    there = sm.use("sram", read, name)
    for step in range(product.steps):
        yield there + SRAM_LATENCY
        if product.ahead and step + 1 < product.steps:
            there = sm.use("sram", read, name)
        if c.unit == "tensor":
            yield max(products(sm, cycles, name), sm.now + c.alone * cycles)
        else:
            yield sm.use(c.unit, cycles, name)
        if not product.ahead and step + 1 < product.steps:
            there = sm.use("sram", read, name)


def add(sm: SM, port: float, cycles: float) -> Actor:
    """Add to the sums of dQ. Nobody waits for the L2, but the load-store unit takes the same turns as SRAM."""
    for _ in range(PIECES):
        yield sm.use("sram", port / PIECES, "add_dq")
        sm.use("copy", cycles / PIECES, "add_dq")
