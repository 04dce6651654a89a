"""mla_hopper: one warpgroup loads, one has the scores, and two have half of the output's columns each. Then rows are merged.

A tile serves both products, so its slot is free only when its output is done. The ring has two slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.config import Config
from simulator.errors import UsageError
from simulator.problem import Problem
from simulator.programs.mla_hopper import HALVES, MERGE_WARPS, merges, splits
from simulator.time.beside import products, vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Launch, Work
from simulator.time.rates import (
    BOX_DRAM_LATENCY,
    DRAM_LATENCY,
    L2_LATENCY,
    RS_LATENCY,
    SRAM_LATENCY,
    SS_LATENCY,
    Rates,
)
from simulator.time.schedules.flash_decoding import streamed, works

VECTOR_WORK, RESCALED = 9, 0.5
"""ALU operations per element of S, as flash1; and of the output, which is rarely multiplied."""
AT_A_TIME = 16
"""Chunks that a warp of the merge asks for before it waits."""
QUERY_PASSES = 4
"""How often the scores' warpgroup asks for a quarter of its queries."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    p, tile = problem, config.tile
    s = splits(p, tile)
    if s.tiles(0) != s.tiles(s.row_tiles - 1):
        raise UsageError(
            "len_q", p.len_q, "queries that see the same tiles of keys: the model of time knows no more of mla_hopper"
        )
    order = [([(work, n * s.row_tiles) for work, n in works(s)], p.batch)]
    es, d, dv, split = p.itemsize, p.head_dim, p.head_dim_v, s.runs > 1
    inside, rows = min(tile.rows, s.rows / s.row_tiles), tile.rows
    box = tile.cols * d * es
    load = max(rates.copy(box), streamed(box / s.row_tiles, order, rates))
    scores, output = (rates.warpgroup_matmul(2 * rows * tile.cols * n) for n in (d, dv))
    of_scores = rates.sram((rows + tile.cols) * d * es)
    of_output = rates.sram(HALVES * rows * tile.cols * es + tile.cols * dv * es)
    exp, alu, rescale = (
        rates.exp(rows * tile.cols),
        rates.alu(VECTOR_WORK * rows * tile.cols),
        rates.alu(RESCALED * rows * dv),
    )
    store = rates.copy(inside * dv * (4 if split else es), dram=1)
    queries = rates.copy(inside * d * es)

    def loading(sm: SM, agenda: Sequence[Work], full: list[Barrier], empty: list[Barrier]) -> Actor:
        for j in range(sum(work.tiles for work in agenda)):
            slot, turn = j % config.stages, j // config.stages
            if turn:
                yield empty[slot].opening(turn - 1)
            full[slot].arrive_at(sm.use("copy", load, "load_latent") + BOX_DRAM_LATENCY)

    def weighing(sm: SM, agenda: Sequence[Work], full: list[Barrier], handed: Barrier, taken: Barrier) -> Actor:
        j = 0
        for work in agenda:
            yield sm.use("copy", queries, "load_q") + QUERY_PASSES * L2_LATENCY
            for _ in range(work.tiles):
                yield full[j % config.stages].opening(j // config.stages)
                yield max(products(sm, scores, "scores"), sm.use("sram", of_scores, "scores")) + SS_LATENCY
                yield from vector(sm, "softmax", exp=exp, alu=alu)
                if j:
                    yield taken.opening(j - 1)
                yield sm.now + 2 * SRAM_LATENCY
                handed.arrive()
                j += 1

    def accumulating(sm: SM, agenda: Sequence[Work], empty: list[Barrier], handed: Barrier, taken: Barrier) -> Actor:
        j = 0
        for n, work in enumerate(agenda):
            for _ in range(work.tiles):
                yield handed.opening(j)
                yield from vector(sm, "rescale", alu=rescale)
                taken.arrive()
                yield max(products(sm, output, "output"), sm.use("sram", of_output, "output")) + RS_LATENCY
                empty[j % config.stages].arrive()
                j += 1
            yield sm.use("copy", store, "store_partial" if split else "store_o")
            sm.work_ends(n)

    def block(sm: SM, agenda: Sequence[Work]) -> list[tuple[str, Actor]]:
        full, empty = ([sm.barrier() for _ in range(config.stages)] for _ in range(2))
        handed, taken = sm.barrier(), sm.barrier()
        return [
            ("loads", loading(sm, agenda, full, empty)),
            ("scores", weighing(sm, agenda, full, handed, taken)),
            ("output", accumulating(sm, agenda, empty, handed, taken)),
        ]

    first = Launch("mla_hopper", block, order, 1, persistent=True)
    return [first, merged(p, rates, s.runs, s.rows)] if merges(p, tile) else [first]


def merged(p: Problem, rates: Rates, chunks: int, rows: int) -> Launch:
    """The launch that adds up what the chunks of a row have: a block for each row."""
    row = p.head_dim_v * 4

    def add_up(sm: SM, walk: Sequence[Work]) -> Actor:
        yield sm.use("copy", rates.copy(MERGE_WARPS * walk[0].tiles * 8), "merge") + L2_LATENCY
        for first in range(0, walk[0].tiles, AT_A_TIME):
            few = min(AT_A_TIME, walk[0].tiles - first)
            yield sm.use("copy", rates.copy(few * row), "merge") + DRAM_LATENCY
        sm.use("copy", rates.copy(p.head_dim_v * p.itemsize), "store_o")

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        return [("warps", add_up(sm, walk))]

    order = [([(Work(chunks), rows)], p.batch)]
    slots = rates.device.max_warps_per_sm // MERGE_WARPS
    return Launch("mla_hopper_merge", block, order, slots)
