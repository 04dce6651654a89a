"""FlashAttention-2, backward, with the same bits in each run: blocks add to dQ in the order of their key tiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from simulator.block import Block
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, Walk
from simulator.program import program
from simulator.programs import flash2_backward as unordered
from simulator.registers import Registers
from simulator.tensors import HbmTensor


class InTurn(unordered.Turns):
    """Blocks add in the order of their key tiles. A counter per query tile, at its first row, says which one is next."""

    ZEROS: ClassVar = True
    """Are the counters zeros before and after, or does the first launch set them?"""

    def __init__(self, m: Machine, k: HbmTensor, problem: Problem, tile: Tile) -> None:
        self.turns = m.workspace("turns", 1, "int32", vector=True, zeros=self.ZEROS).firsts(tile.rows)

    def walk(self, walk: Walk) -> Iterable[int]:
        """From the last query tile to the first: blocks that begin together wait least so."""
        return reversed(walk)

    def add(self, block: Block, dq_sum: HbmTensor, part: Registers, i: int, rows: int, head: int) -> None:
        """Wait until all key tiles before this one have added, add, and count up for the next one."""
        block.fetch(self.turns.head(head), i, 1)
        super().add(block, dq_sum, part, i, rows, head)
        block.arrive(self.turns.head(head), i)


class Drawn(InTurn):
    """A block draws its key tile as it begins, so it waits only for blocks that have begun."""

    def __init__(self, m: Machine, k: HbmTensor, problem: Problem, tile: Tile) -> None:
        self.drawn = m.workspace("drawn", 1, "int32", rows=1, of=k, vector=True, zeros=True)
        self.number = m.workspace("number", 1, "int32", rows=problem.len_kv, of=k, vector=True).firsts(tile.cols)
        super().__init__(m, k, problem, tile)

    def draw(self, block: Block) -> None:
        """One thread draws, and tells the other warps."""
        block.step("draw")
        block.arrive(self.drawn, 0)
        block.store(self.number, block.full(1, 1, 0.0), block.i, 1)
        block.fetch(self.number, block.i, 1, warps=block.warps)


@program(operation=BACKWARD)
def flash2_backward_deterministic(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, ...]:
    """`flash2_backward`, in which blocks wait for their turns to add to dQ. All shapes are the same.

    A counter per query tile, at its first row, says how many key tiles have added to its dQ. Another one per KV head gives out the
    key tiles, of a ragged batch one per KV head and sequence.
    """
    return unordered.backward("flash2_backward_deterministic", m, q, k, v, out, lse, dout, problem, tile, order=Drawn)
