"""The scales of quantised K and V in a tile program for few queries (see `simulator.operations.caches`).

A scale for all of K, or for a head of it, multiplies the scores. Such a scale of V multiplies what the warps join. A key's own
scale multiplies a column of S, and a value's own a column of P. The scale of a column of K multiplies a column of Q. So the tensor
cores multiply the elements, which float16 holds exactly. A power of two for each query brings it to float16.
"""

from __future__ import annotations

from simulator.block import Block
from simulator.machine import Machine
from simulator.problem import Problem
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

LEAST = 2.0**-126
"""Before a scale of V is known, outputs are relative to this: the least normal float32."""


def query_parts(problem: Problem) -> int:
    """How many parts of a query are multiplied with K. Times a column's scale, a query has float32's bits. Two float16 numbers that
    add up hold all but the least of them."""
    return 2 if problem.k_scale == "channel" else 1


def query_factors(problem: Problem) -> bool:
    """Is each query multiplied with a power of two, so that float16 holds it? Its largest element says which."""
    return problem.quantized and (problem.dtype == "bfloat16" or problem.k_scale == "channel")


class CacheScales:
    """The scales of one launch. `of` has the handles of K's and of V's, where there are any."""

    def __init__(self, m: Machine, table: HbmTensor | None = None) -> None:
        self.problem, self.stages, self.in_registers = m.problem, m.config.stages, m.config.q_in_registers
        self.warps, self.tile, self.parts = m.config.warps, m.tile, query_parts(m.problem)
        self.forms = {"k": m.problem.k_scale, "v": m.problem.v_scale}
        self.of = {name: m.optional(f"{name}_scale") for name, form in self.forms.items() if form}
        if table is not None:
            self.of |= {name: m.paged(x, table) for name, x in self.of.items() if self.forms[name] == "token"}

    def reserve(self, block: Block) -> None:
        """SRAM for scales that lie beside keys, values and queries."""
        for name, x in self.of.items():
            if self.forms[name] == "token":
                block.alloc(x.name, self.tile.cols, copies=self.stages)
            elif self.forms[name] == "channel":
                block.alloc(x.name, x.rows, copies=self.stages + 1)

    def begin(self, block: Block) -> None:
        """A unit begins, and none of its scales is there yet."""
        self.held = dict[str, SramTile]()
        self.scale: Registers | float = self.problem.scale
        self.base = block.full(1, 1, 1.0)  # of V, if none follows

    def fetch(self, block: Block) -> None:
        """HBM to each warp: one scale for all of K and of V, or for this head. A channel's go to SRAM."""
        if self.forms["k"] in ("tensor", "head"):
            self.scale = block.fetch(self.of["k"], 0, 1, warps=self.warps) * self.problem.scale
        elif self.forms["k"] == "channel":
            self.channels = block.load(self.of["k"], 0, self.of["k"].rows, stages=self.stages + 1)
        if self.forms["v"] in ("tensor", "head"):
            self.base = block.fetch(self.of["v"], 0, 1, warps=self.warps)

    def find_factors(self, block: Block, q: SramTile) -> None:
        """The power of two for each query. Where the warps don't keep Q, each warp reads it once more for that. No number here
        depends on it."""
        if query_factors(self.problem) and not self.in_registers:
            block.to_registers(q, "none")
            if self.forms["k"] == "channel":
                block.to_registers(self.channels, "none")

    def queries(self, block: Block, q: SramTile | Registers, *, now: bool) -> SramTile | Registers:
        """Q with a column times its scale of K: once where the warps keep Q, else for each product."""
        if self.forms["k"] != "channel" or now != self.in_registers:
            return q
        held = q if isinstance(q, Registers) else block.to_registers(q, "none")
        return held * block.to_registers(self.channels, "none").T

    def scores(self, block: Block, s: Registers) -> Registers:
        """A tile of S times the scales of its keys."""
        if isinstance(self.scale, Registers):
            s = s * self.scale
        return s * block.to_registers(self.held["k"], "rows").T if self.forms["k"] == "token" else s

    def load(self, block: Block, name: str, j: int) -> None:
        """HBM to SRAM: the scales of a tile of keys or values."""
        if self.forms[name] == "token":
            tile = block.load(self.of[name], j, self.tile.cols, stages=self.stages)
            self.held[name] = tile

    def first_base(self, block: Block) -> Registers:
        """Before a chunk's first tile: the scale of V that its outputs are relative to."""
        return block.full(1, 1, LEAST) if self.forms["v"] == "token" else self.base

    def joined(self, factor: Registers, base: Registers) -> Registers:
        """The factor of a chunk's outputs where warps join. From there on they are relative to no scale of V."""
        return factor if self.forms["v"] is None else factor * base

    def weigh(
        self, block: Block, p: Registers, acc: Registers, base: Registers
    ) -> tuple[Registers, Registers, Registers]:
        """P with a column times its value's scale, relative to the largest so far. So float16 holds it, however small scales
        are. The sum so far is made relative to the same scale."""
        if self.forms["v"] != "token":
            return p, acc, base
        scales = block.to_registers(self.held["v"], "rows").T
        top = block.maximum(base, scales.max())
        return p * (scales / top), acc * (base / top), top
