"""standard: three launches, whose warps wait for everything that they load. S and P go through HBM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.config import Config, padded
from simulator.problem import Problem
from simulator.programs.standard import COLS, ROWS
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work, resident
from simulator.time.rates import DRAM_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates

MASK = 4  # ALU operations per element: comparisons and a selection
IN_FLIGHT = 4  # how many chunks of a row a warp loads before it waits


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    passes = (Pass(alu=2), Pass(alu=2, exp=True), Pass(alu=3, exp=True, stores=True))
    return [
        scores(problem, config, rates),
        softmax("standard_softmax", passes, problem, rates),
        output(problem, config, rates),
    ]


class Pass:
    """One pass over a row of S: its ALU operations per element, whether it exponentiates, and whether it stores P."""

    def __init__(self, alu: int, exp: bool = False, stores: bool = False) -> None:
        self.alu, self.exp, self.stores = alu, exp, stores


def scores(problem: Problem, config: Config, rates: Rates) -> Launch:
    """One block per tile of S: loads, a matrix product, a store."""
    p, tile, es = problem, config.tile, problem.itemsize
    br, bc, d = padded(tile.rows), padded(tile.cols), padded(p.head_dim)
    matmul, unit = _matmul(problem, rates)
    load, read = rates.copy((br + bc) * d * es), rates.sram((br + config.warps * bc) * 16 * es)
    step, mask, store = matmul(2 * br * bc * 16), rates.alu(MASK * br * bc), rates.copy(br * bc * 4, dram=1)

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        def warps() -> Actor:
            yield sm.use("copy", load, "load_q, load_k") + L2_LATENCY + SRAM_LATENCY
            for _ in range(d // 16):
                yield sm.use("sram", read, "scores") + SRAM_LATENCY
                yield sm.use(unit, step, "scores")
            yield sm.use("alu", mask, "mask")
            yield sm.use("copy", store, "store_s")

        return [("warps", warps())]

    blocks = p.batch * p.heads * p.row_tiles(tile) * p.key_tiles(tile)
    return Launch(
        "standard_scores", block, [([(Work(1), blocks)], 1)], resident(config, rates.device, (br + bc) * d * es)
    )


def softmax(name: str, passes: Sequence[Pass], problem: Problem, rates: Rates) -> Launch:
    """One warp per row, pass by pass and chunk by chunk."""
    p, chunk = problem, ROWS * COLS * IN_FLIGHT
    slots = rates.device.max_warps_per_sm // ROWS // 2  # registers leave room for half of the warps
    in_flight = slots * rates.device.sms * ROWS * p.len_kv * 4
    again = 0.0 if in_flight < rates.device.l2 / 2 else 1.0  # does a pass after the first find S in the L2?

    def warps(sm: SM, walk: Sequence[Work]) -> Actor:
        for n, each in enumerate(passes):
            load = rates.copy(chunk * 4, dram=again if n else 1.0)
            for _ in range(walk[0].tiles):
                yield sm.use("copy", load, "load_s") + DRAM_LATENCY
                alu = sm.use("alu", rates.alu(each.alu * chunk), "softmax")
                yield max(alu, sm.use("exp", rates.exp(chunk), "softmax") if each.exp else 0.0)
                if each.stores:
                    sm.use("copy", rates.copy(chunk * p.itemsize, dram=1), "store_p")

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        return [("warps", warps(sm, walk))]

    tiles = -(-p.len_kv // (COLS * IN_FLIGHT))
    return Launch(name, block, [([(Work(tiles), p.batch * p.heads * -(-p.len_q // ROWS))], 1)], slots)


def output(problem: Problem, config: Config, rates: Rates) -> Launch:
    """One block per row tile, with P and V tile by tile."""
    p, tile, es = problem, config.tile, problem.itemsize
    br, bc, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim_v)
    matmul, unit = _matmul(problem, rates)
    load_p, load_v = rates.copy(br * bc * es, dram=1), rates.copy(bc * dv * es)
    read, step = rates.sram((br + config.warps * dv) * 16 * es), matmul(2 * br * dv * 16)
    store = rates.copy(br * dv * es, dram=1)

    def warps(sm: SM, walk: Sequence[Work]) -> Actor:
        for _ in range(walk[0].tiles):
            sm.use("copy", load_p, "load_p")
            yield sm.use("copy", load_v, "load_v") + DRAM_LATENCY + SRAM_LATENCY
            for _ in range(bc // 16):
                yield sm.use("sram", read, "output") + SRAM_LATENCY
                yield sm.use(unit, step, "output")
        sm.use("copy", store, "store_o")

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        return [("warps", warps(sm, walk))]

    order = [([(Work(p.key_tiles(tile)), p.batch * p.heads * p.row_tiles(tile))], 1)]
    return Launch("standard_output", block, order, resident(config, rates.device, bc * (br + dv) * es))


def _matmul(problem: Problem, rates: Rates) -> tuple[Callable[[float], float], str]:
    """A function from FLOPs to cycles for matrix products, and the unit that does them."""
    return (rates.fma, "alu") if problem.dtype == "float32" else (rates.warp_matmul, "tensor")
