"""flash_decoding: half of the warps copy and compute, and the other half merges what they have of a chunk.

Copies run ahead, on into the next units. All SMs share DRAM: a block that has more to do than others gets what these leave. A merge
across blocks begins with a fence, which waits for all copies that the SM has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.config import Config, padded
from simulator.errors import UsageError
from simulator.formulas.flash_decoding import FRAGMENT
from simulator.problem import Problem
from simulator.programs.flash_decoding import TILES_PER_CHUNK, Splits
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Launch, Runs, Work
from simulator.time.rates import DEPENDENT, DRAM_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates
from simulator.time.schedule import deal

VECTOR_WORK = 9
"""ALU operations per element of S, as flash1."""
MERGE_INSTRUCTIONS = 400
"""Instructions of a warp that merges 32 children of a row, by the source: 31 pairs of two shuffles and eight products each, the
weights of five levels, and the loads. Most need the result of the one before."""


def works(s: Splits) -> Runs:
    """The works of the only row tile: its runs of key tiles. Those between the first and the last one are whole."""
    ends = [Work(len(s.walk(0, j))) for j in dict.fromkeys((0, s.runs - 1))]
    whole = Work(s.run * s.chunk), max(0, s.runs - 2)
    return [(ends[0], 1), *([whole, (ends[1], 1)] if len(ends) > 1 else [])]


def streamed(nbytes: float, order: Sequence[tuple[Runs, int]], rates: Rates) -> float:
    """Cycles in which a tile of so many bytes comes from DRAM to the SM that has most of them."""
    tiles = [([(float(work.tiles), n) for work, n in runs], times) for runs, times in order]
    total = sum(times * sum(tiles * n for tiles, n in runs) for runs, times in tiles)
    busy = max(1.0, total / max(1.0, deal(tiles, rates.device.sms)))  # SMs, if all were as busy as the busiest
    clock = rates.loaded(0.0, 1.0)
    return max(rates.copy(nbytes), nbytes * busy * clock / rates.bandwidth)


def one_row_tile(problem: Problem, s: Splits, name: str) -> None:
    """Raises `UsageError` for queries that are several tiles of rows."""
    if s.row_tiles > 1:
        rows = f"queries of one tile of rows ({s.tile.rows} // {s.group} of each head)"
        raise UsageError("len_q", problem.len_q, f"{rows}: the model of time knows no more of {name}")


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    p, tile, w = problem, config.tile, config.warps
    s = Splits(p, tile, dict(config.constants)["RUN"])
    one_row_tile(p, s, "flash_decoding")
    order = [(works(s), p.batch * p.kv_heads * s.row_tiles)]
    rows, cols, d, dv = padded(tile.rows, FRAGMENT), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    load = streamed(min(tile.cols, p.len_kv) * (d + dv) * p.itemsize, order, rates)
    read = rates.sram(cols * (d + dv) * p.itemsize + w * rows * d * p.itemsize * (not config.q_in_registers))
    matmul, unit = (rates.fma, "alu") if p.dtype == "float32" else (rates.warp_matmul, "tensor")
    product, exp, alu = matmul(2 * rows * cols * (d + dv)), rates.exp(rows * cols), rates.alu(VECTOR_WORK * rows * cols)
    joined, partial = rates.sram(w * rows * dv * 4), rates.copy(rows * dv * 4)
    # the counter; and of each row of a warp its statistics, the two halves of its columns, and 32 children
    merging = L2_LATENCY + -(-rows // w) * (3 * L2_LATENCY + MERGE_INSTRUCTIONS * DEPENDENT)

    def compute(sm: SM, agenda: Sequence[Work], filled: Barrier, free: Barrier) -> Actor:
        tiles, copied, chunks = sum(work.tiles for work in agenda), list[float](), 0
        for _ in range(min(config.stages, tiles)):
            copied.append(sm.use("copy", load, "load_k, load_v") + DRAM_LATENCY)
        j = 0
        for work in agenda:
            for i in range(work.tiles):
                yield copied[j] + SRAM_LATENCY
                yield max(sm.use("sram", read, "scores, output"), sm.use(unit, product, "scores, output"))
                yield from vector(sm, "softmax", exp=exp, alu=alu)
                j += 1
                if len(copied) < tiles:
                    copied.append(sm.use("copy", load, "load_k, load_v") + DRAM_LATENCY)
                if (i + 1) % TILES_PER_CHUNK == 0 or i + 1 == work.tiles:
                    if chunks:
                        yield free.opening(chunks - 1)
                    yield sm.use("sram", joined, "join") + 4 * SRAM_LATENCY
                    filled.arrive()
                    chunks += 1

    def ends(sm: SM, n: int) -> Actor:
        """A work has ended when its results are merged. After the last one nothing is on its way that a fence waits for."""
        yield sm.now + 2 * SRAM_LATENCY + ((s.runs > 1) * (DRAM_LATENCY + merging) + L2_LATENCY)
        sm.work_ends(n)

    def merge(sm: SM, agenda: Sequence[Work], filled: Barrier, free: Barrier) -> Actor:
        chunks = 0
        for n, work in enumerate(agenda):
            for _ in range(-(-work.tiles // TILES_PER_CHUNK)):
                yield filled.opening(chunks)
                yield sm.use("sram", joined, "join") + SRAM_LATENCY
                free.arrive()
                chunks += 1
            sm.start("", ends(sm, n))
            if s.runs > 1:
                sm.use("copy", partial, "store_partial")
                yield sm.free["copy"] + DRAM_LATENCY  # the fence
                yield sm.now + merging
            sm.use("copy", rates.copy(rows * dv * p.itemsize), "store_o")

    def block(sm: SM, agenda: Sequence[Work]) -> list[tuple[str, Actor]]:
        filled, free = sm.barrier(), sm.barrier()
        return [("warps", compute(sm, agenda, filled, free)), ("merge", merge(sm, agenda, filled, free))]

    return [Launch("flash_decoding", block, order, 1, persistent=True)]
