"""flash1_backward: one block per KV head, K and V outside, Q inside. Each tile reads dQ from HBM and writes it back.

The warps share the products as those of flash2_backward do. But they load nothing ahead. Where what all blocks go over is
more than the L2 holds, each tile comes from DRAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.config import Config, padded
from simulator.formulas.flash1_backward import sram_bytes
from simulator.problem import Problem
from simulator.time.beside import vector
from simulator.time.engine import SM, Actor, Barrier
from simulator.time.launch import Launch, Work, resident, rows_inside
from simulator.time.rates import DEPENDENT, DRAM_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates
from simulator.time.schedules.flash2_backward import DELTA, STORED, Cycles, arrive, gradient_of_scores, multiply

UPDATE = 8
"""ALU operations per element of dQ: two selections and a shuffle put four columns into a lane, then an FMA."""
INSTRUCTIONS = 24
"""Instructions for 8 columns of 16 rows of dQ: four columns into a lane, an address, bounds, the load, sums, the store.
Most need the result of the one before."""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    p, tile, es = problem, config.tile, problem.itemsize
    c = Cycles(p, config, rates)
    d, dv, br, bc = padded(p.head_dim), padded(p.head_dim_v), padded(tile.rows), padded(tile.cols)
    slots = resident(config, rates.device, sram_bytes(p, tile))
    visits, keys_tiles = p.queries_per_kv * p.row_tiles(tile), max(1, p.key_tiles(tile))
    queries, keys = rows_inside(p, tile)
    # all blocks go over Q, dO, O and dQ of their heads again and again
    heads = min(p.batch * p.kv_heads, slots * rates.device.sms) * p.queries_per_kv
    again = heads * p.len_q * ((d + 2 * dv) * es + d * 4) > rates.device.l2 / 2
    dram, latency = (1.0, DRAM_LATENCY) if again else (0.0, L2_LATENCY)
    load, filled = rates.copy(queries * (d + 2 * dv) * es, dram), rates.sram(br * (d + 2 * dv) * es)
    # K and V, the zeros at the beginning, and dK and dV, spread over the visits
    zeros = p.queries_per_kv * p.len_q * p.head_dim * 4 + p.len_kv * (p.head_dim + p.head_dim_v) * es
    once = rates.copy(2 * keys * (d + dv) * es + zeros / keys_tiles, dram=1) / max(1, visits)
    round_dkv = rates.alu(STORED * bc * (d + dv)) / c.actors / max(1, visits)
    delta_read, delta = rates.sram(2 * br * dv * es) / c.actors, rates.alu(DELTA * br * dv) / c.actors
    fragments = -(-br * d // (16 * 8 * config.warps))  # of dQ, of a warp
    dq, update = rates.copy(queries * d * 4, dram) / c.actors, rates.alu(UPDATE * br * d) / c.actors

    def warps(sm: SM, work: Work, n: int, shared: dict[str, float], met: Barrier) -> Actor:
        meetings = 0

        def meet() -> Actor:
            nonlocal meetings
            met.arrive()
            yield met.opening(meetings)
            meetings += 1

        for _ in range(work.tiles):
            yield from meet()
            if n == 0:
                sm.use("copy", once, "load_kv, store_dkv")
                end = sm.use("copy", load, "load_q, load_do")
                arrive(sm, end, filled, "load_q, load_do")
                shared["ready"] = end + latency
            yield from meet()
            yield shared["ready"] + SRAM_LATENCY
            yield sm.use("sram", delta_read, "delta") + SRAM_LATENCY
            yield from vector(sm, "delta", alu=delta)
            yield sm.now + 4 * SRAM_LATENCY  # shuffles, and D through SRAM
            yield from meet()
            yield from gradient_of_scores(sm, c, masked=True)
            yield from meet()
            for name in ("dv", "dk", "dq"):
                yield from multiply(sm, c, getattr(c, name), name)
            for _ in range(fragments):  # a load for each, which the warp waits for
                yield sm.use("copy", dq / fragments, "update_dq") + latency
                sm.use("alu", update / fragments, "update_dq")
                yield sm.now + INSTRUCTIONS * DEPENDENT
                sm.use("copy", dq / fragments, "update_dq")
            yield from vector(sm, "store_dkv", pieces=1, alu=round_dkv)

    def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
        shared, met = {"ready": 0.0}, sm.barrier(c.actors)
        return [(f"warps {4 * n}-{4 * n + 3}", warps(sm, walk[0], n, shared, met)) for n in range(c.actors)]

    order = [([(Work(visits * keys_tiles), p.batch * p.kv_heads)], 1)]
    return [Launch("flash1_backward", block, order, slots)]
