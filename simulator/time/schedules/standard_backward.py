"""standard_backward: six launches, whose warps wait for everything that they load. P, dP and dS go through HBM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.config import Config, padded
from simulator.problem import Problem
from simulator.programs.standard import COLS, ROWS
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work, resident
from simulator.time.rates import DRAM_LATENCY, L2_LATENCY, SRAM_LATENCY, Rates

MASK, EXP, PACK, DS, DELTA = 4, 1, 1, 3, 3
"""ALU operations per element.

- `MASK`: comparisons and a selection.
- `EXP`: an FMA.
- `PACK`: half a conversion at half rate, of P on its way to SRAM.
- `DS`: a difference, a product, and half a conversion at half rate.
- `DELTA`: dO and O are unpacked, and an FMA.
"""


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    of = _Launches(problem, config, rates)
    d, dv, es = problem.head_dim, problem.head_dim_v, problem.itemsize
    return [
        of.square("p", "scores", d, exp=True),
        of.sums("dv", dv, 4, by_keys=True),
        of.square("dp", "dp", dv),
        of.rows(),
        of.sums("dq", d, es, by_keys=False),
        of.sums("dk", d, es, by_keys=True),
    ]


class _Launches:
    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        self.p, self.config, self.rates = problem, config, rates
        self.br, self.bc = padded(config.tile.rows), padded(config.tile.cols)
        float32 = problem.dtype == "float32"
        self.matmul, self.unit = (rates.fma, "alu") if float32 else (rates.warp_matmul, "tensor")

    def square(self, to: str, product: str, dim: int, *, exp: bool = False) -> Launch:
        """One block per tile of P or dP: loads, a matrix product, for P exponentials, a store in float32."""
        p, rates, d = self.p, self.rates, padded(dim)
        elements, sram = self.br * self.bc, (self.br + self.bc) * d * p.itemsize
        load, read = rates.copy(sram), rates.sram((self.br + self.config.warps * self.bc) * 16 * p.itemsize)
        step, store = self.matmul(2 * elements * 16), rates.copy(elements * 4, dram=1)

        def warps(sm: SM) -> Actor:
            yield sm.use("copy", load, "load") + L2_LATENCY + SRAM_LATENCY
            for _ in range(d // 16):
                yield sm.use("sram", read, product) + SRAM_LATENCY
                yield sm.use(self.unit, step, product)
            if exp:
                yield sm.use("alu", rates.alu(MASK * elements), "mask")
                yield max(sm.use("alu", rates.alu(EXP * elements), "exp"), sm.use("exp", rates.exp(elements), "exp"))
            yield sm.use("copy", store, f"store_{to}")

        def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
            return [("warps", warps(sm))]

        blocks = p.batch * p.heads * p.row_tiles(self.config.tile) * p.key_tiles(self.config.tile)
        slots = resident(self.config, rates.device, sram)
        return Launch(f"standard_backward_{to}", block, [([(Work(1), blocks)], 1)], slots)

    def sums(self, to: str, dim: int, itemsize: int, *, by_keys: bool) -> Launch:
        """A block has a tile of keys, or of rows, and goes over all tiles of P or dS, which has so many bytes an element."""
        p, rates, d, es, tile = self.p, self.rates, padded(dim), self.p.itemsize, self.config.tile
        own, other = (self.bc, self.br) if by_keys else (self.br, self.bc)
        from_hbm, load = rates.copy(self.br * self.bc * itemsize, dram=1), rates.copy(other * d * es)
        read, step = rates.sram((own + self.config.warps * d) * 16 * es), self.matmul(2 * own * d * 16)
        pack, stored = rates.alu(PACK * self.br * self.bc), rates.sram(self.br * self.bc * es)
        store = rates.copy(own * d * es, dram=1)

        def warps(sm: SM, work: Work) -> Actor:
            for _ in range(work.tiles):
                there = sm.use("copy", from_hbm, "load") + DRAM_LATENCY
                if itemsize > es:  # P is rounded on its way through registers, before the other tile is asked for
                    yield there
                    yield sm.use("alu", pack, "load")
                    sm.use("sram", stored, "load")
                    there = 0.0
                yield max(there, sm.use("copy", load, "load") + L2_LATENCY) + SRAM_LATENCY
                for _ in range(other // 16):
                    yield sm.use("sram", read, to) + SRAM_LATENCY
                    yield sm.use(self.unit, step, to)
            sm.use("copy", store, f"store_{to}")

        def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
            return [("warps", warps(sm, walk[0]))]

        rows, keys = p.row_tiles(tile), p.key_tiles(tile)
        visits, blocks = (p.queries_per_kv * rows, p.kv_heads * keys) if by_keys else (keys, p.heads * rows)
        slots = resident(self.config, rates.device, (self.br * self.bc + other * d) * es)
        return Launch(f"standard_backward_{to}", block, [([(Work(visits), p.batch * blocks)], 1)], slots)

    def rows(self) -> Launch:
        """dS: one warp per row, chunk by chunk. Stores keep the compiler from loading ahead."""
        p, rates, chunk = self.p, self.rates, ROWS * COLS
        first = rates.copy(2 * ROWS * p.head_dim_v * p.itemsize, dram=1)
        load, store = rates.copy(2 * chunk * 4, dram=1), rates.copy(chunk * p.itemsize, dram=1)

        def warps(sm: SM, work: Work) -> Actor:
            yield sm.use("copy", first, "delta") + DRAM_LATENCY
            yield sm.use("alu", rates.alu(DELTA * ROWS * p.head_dim_v), "delta") + 5 * SRAM_LATENCY
            for _ in range(work.tiles):
                yield sm.use("copy", load, "load_p, load_dp") + DRAM_LATENCY
                yield sm.use("alu", rates.alu(DS * chunk), "ds")
                sm.use("copy", store, "store_ds")

        def block(sm: SM, walk: Sequence[Work]) -> list[tuple[str, Actor]]:
            return [("warps", warps(sm, walk[0]))]

        slots = resident(replace(self.config, warps=ROWS, blocks_per_sm=16), rates.device, 0)
        order = [([(Work(-(-p.len_kv // COLS)), p.batch * p.heads * -(-p.len_q // ROWS))], 1)]
        return Launch("standard_backward_ds", block, order, slots)
