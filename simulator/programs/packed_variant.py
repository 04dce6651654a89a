"""What may bend scores and weights where the rows of a tile are packed heads: a quantised cache's scales, a soft cap, and drafts.

The hooks are those of `simulator.programs.variant`, and some more for scales. Sinks join where a row's tree ends (`climb`).
"""

from __future__ import annotations

from simulator.block import Block
from simulator.machine import Machine
from simulator.programs.drafts import Drafts
from simulator.programs.quantized import CacheScales
from simulator.programs.scores import soft_cap
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile


class PackedVariant:
    """What bends the scores and weights of one launch, whose tiles have the queries of `group` heads as rows.

    `table` is the block table, where the cache lies in pages.
    """

    def __init__(self, m: Machine, group: int, table: HbmTensor | None = None) -> None:
        self._problem, self._group = m.problem, group
        self._scales, self._drafts = CacheScales(m, table), Drafts(m, group)
        self.passes = self._scales.parts

    def reserve(self, block: Block) -> None:
        """A unit begins: SRAM for the scales that go there."""
        self._scales.reserve(block)
        self._scales.begin(block)

    def begin(self, block: Block, q_i: SramTile) -> None:
        """The queries are there: HBM to each warp, the scales of all keys, and a power of two for each query."""
        self._scales.fetch(block)
        self._scales.find_factors(block, q_i)

    def keep(self, block: Block, q_i: SramTile | Registers) -> SramTile | Registers:
        """The queries as they stay for all key tiles, and HBM to each warp, the words of their drafts."""
        self._drafts.fetch(block)
        return self._scales.queries(block, q_i, now=True)

    def load(self, block: Block, name: str, j: int) -> None:
        """HBM to SRAM: the scales of a tile of keys or values."""
        self._scales.load(block, name, j)

    def queries(self, block: Block, q_i: SramTile | Registers) -> SramTile | Registers:
        """The queries as a product takes them: with the scales of K's columns."""
        return self._scales.queries(block, q_i, now=False)

    @property
    def scale(self) -> float:
        """The factor of a product, where it is one number for all."""
        return self._scales.scale if isinstance(self._scales.scale, float) else 1.0

    def bend(self, block: Block, s: Registers) -> Registers:
        """A tile of S times the scales of its keys, and after the soft cap."""
        return soft_cap(block, self._scales.scores(block, s), self._problem)

    def mask(self, block: Block, s: Registers, j: int) -> Registers:
        """Tile j of S with -inf for hidden pairs: those that causal mask and window hide, and the drafts of other branches."""
        return self._drafts.hide(block, block.mask(s, block.i, j, group=self._group), j)

    def first_base(self, block: Block) -> Registers:
        """The scale of V that a chunk's outputs are relative to, before its first tile."""
        return self._scales.first_base(block)

    def weigh(
        self, block: Block, p: Registers, acc: Registers, base: Registers
    ) -> tuple[Registers, Registers, Registers]:
        """P times the scales of its values, both and the accumulator relative to the largest scale so far, and that scale."""
        return self._scales.weigh(block, p, acc, base)

    def joined(self, factor: Registers, base: Registers) -> Registers:
        """The factor of a warp's outputs where warps join. From there on they are relative to no scale."""
        return self._scales.joined(factor, base)
