"""flash1: one block per head, K and V outside, Q inside. Each tile reads O, l and m from HBM and writes them back.

Nothing overlaps: a block does one thing after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.config import Config, padded
from simulator.problem import Problem
from simulator.programs.flash1 import CHUNK
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work, resident
from simulator.time.rates import DEPENDENT, L2_LATENCY, SRAM_LATENCY, Rates

VECTOR_WORK = 9  # ALU operations per element of S: scale, mask, maximum, difference, sum
UPDATE_WORK = 6  # ALU operations per element of O: the sum of the warps' parts, the rescaling, the conversion
UPDATE_BATCH = 8  # how many rows of O a warp loads before it waits
ROW_INSTRUCTIONS = 70  # instructions per row of that, by the compiled code: addresses, bounds, sums, stores


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    p, w, es, outer = problem, config.warps, problem.itemsize, max(1, problem.key_tiles(config.tile))
    br, bc = padded(config.tile.rows), padded(config.tile.cols)
    d, dv = padded(p.head_dim), padded(p.head_dim_v)
    float32 = p.dtype == "float32"
    matmul, unit = (rates.fma, "alu") if float32 else (rates.warp_matmul, "tensor")
    keys = rates.copy(bc * (d + dv) * es) / max(1, p.row_tiles(config.tile))  # K and V, spread over the row tiles
    load, o = rates.copy(br * d * es), rates.copy(br * dv * 4)
    scores, output = matmul(2 * br * bc * d), matmul(2 * br * bc * dv)
    reads = rates.sram((w * br + bc) * d * es), rates.sram(bc * dv * es)
    partial_o, statistics = rates.sram(w * br * dv * 4), rates.alu(VECTOR_WORK * br * bc)
    exp, update = rates.exp(br * bc), rates.alu(UPDATE_WORK * br * dv)
    chunks, columns = -(-dv // CHUNK), min(dv, CHUNK) // 16
    batches = -(-br // (w * UPDATE_BATCH))
    fragments, rows = chunks * columns, chunks * batches

    def both(sm: SM, name: str, read: float, product: float) -> float:
        """A fragment is read and then multiplied. The reads of other warps run beside it."""
        return max(sm.use("sram", read, name), sm.use(unit, product, name)) + 2 * SRAM_LATENCY

    def warps(sm: SM, walk: Sequence[Work]) -> Actor:
        """The warps wait for everything that they load, from HBM or SRAM."""
        for _ in range(walk[0].tiles):
            sm.use("copy", keys, "load_k, load_v")
            yield sm.use("copy", load, "load_q") + L2_LATENCY + SRAM_LATENCY
            for _ in range(d // 16):
                yield both(sm, "scores", reads[0] / (d // 16), scores / (d // 16))
            yield from vector(sm, "row_max, row_sum", alu=statistics)
            yield sm.now + 4 * SRAM_LATENCY  # two barriers, and the exchange between warps
            yield from vector(sm, "exp", exp=exp)
            yield sm.now + L2_LATENCY  # the step "stats" loads l and m of the rows
            for _ in range(chunks):
                for _ in range(columns):
                    yield both(sm, "output", reads[1] / fragments, output / fragments)
                    yield sm.use("sram", partial_o / fragments, "output")
                for _ in range(batches):
                    yield sm.use("copy", o / rows, "update_o") + L2_LATENCY
                    sm.use("alu", update / rows, "update_o")
                    yield sm.use("sram", partial_o / rows, "update_o") + SRAM_LATENCY
                    # a warp is alone on its scheduler, and most instructions need the result of the one before
                    yield sm.now + UPDATE_BATCH * ROW_INSTRUCTIONS * DEPENDENT
                    sm.use("copy", o / rows, "update_o")

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        return [("warps", warps(sm, walk))]

    sram = (bc * (d + dv) + br * d) * es + w * br * (min(dv, CHUNK) + 2) * 4 + br * 8
    tiles = outer * p.row_tiles(config.tile)
    return [Launch("flash1", block, [([(Work(tiles), p.batch * p.heads)], 1)], resident(config, rates.device, sram))]
