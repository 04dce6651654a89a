"""What may bend the scores and weights of attention: an array's mask, a soft cap, ALiBi, dropout and sinks.

Each hook does nothing where the problem has none of them: what is left is the paper's algorithm.
"""

from __future__ import annotations

from simulator.block import Block
from simulator.machine import Machine
from simulator.problem import Tile
from simulator.programs.dropout import dropped, kept_sum, read_state
from simulator.programs.mask import pack_mask
from simulator.programs.scores import alibi, join_sink, of_head, soft_cap
from simulator.registers import Registers


class Variant:
    """What bends the scores and weights of one launch, whose blocks have a row tile of one head each.

    `warps` compute, and each of them requests the numbers of its head. They and `loaders` more request the entries of a mask's
    list. A mask that an array says is packed by a launch of its own, before the program's. `walk` then says which key tiles a row
    tile sees, from the last to the first if `backwards`. Without such a mask it is None.
    """

    def __init__(self, m: Machine, tile: Tile, *, warps: int, loaders: int = 0, backwards: bool = False) -> None:
        self._m, self._warps, self._listeners = m, warps, warps + loaders
        self._packed = pack_mask(m, tile, backwards=backwards)
        self._slope: Registers | None = None
        self.walk = self._packed.walk if self._packed else None

    def begin(self, block: Block) -> None:
        """A row tile begins: HBM to each warp, its head's slope, the seed of dropout, and the length of the mask's list."""
        self._slope = of_head("alibi_slopes", self._m, block, self._warps)
        read_state(self._m, block, self._warps)
        if self._packed:
            self._packed.begin(block, self._listeners)

    def visit(self, block: Block, j: int) -> None:
        """Key tile j is next: HBM to each warp, its entry in the mask's list."""
        if self._packed:
            self._packed.visit(block, j, self._listeners)

    def bend(self, block: Block, s: Registers, j: int) -> Registers:
        """Tile j of S after the soft cap, and with ALiBi's bias."""
        return alibi(block, soft_cap(block, s, self._m.problem), self._slope, j)

    def mask(self, block: Block, s: Registers, j: int) -> Registers:
        """Tile j of S with -inf for hidden pairs: those that causal mask and window hide, and those that an array does."""
        return self._packed.hide(block, s, j) if self._packed else block.mask(s, block.i, j)

    def drop(self, block: Block, p: Registers, j: int) -> Registers:
        """Tile j of P with 0 for what dropout drops."""
        return dropped(self._m, block, p, block.i, j)

    def finish(
        self, block: Block, m_i: Registers, l_i: Registers, acc: Registers
    ) -> tuple[Registers, Registers, Registers]:
        """m, l and the accumulator of rows that have seen all keys, and with them the head's sink."""
        return join_sink(block, of_head("sinks", self._m, block, self._warps), m_i, l_i, acc)

    def kept(self, l_i: Registers) -> Registers:
        """The divisor of the accumulator: l, or with dropout as much of l as it keeps on average."""
        return kept_sum(l_i, self._m.problem)
