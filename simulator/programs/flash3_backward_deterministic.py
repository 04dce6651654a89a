"""FlashAttention-2's backward pass on Hopper, with the same bits in each run: blocks add to dQ in the order of their key tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from simulator.block import Block
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, Walk
from simulator.program import program
from simulator.programs import flash3_backward as unordered
from simulator.programs.dropout import of_kept
from simulator.programs.flash2_backward import prepare
from simulator.registers import Registers
from simulator.tensors import HbmTensor


class InTurn(unordered.Turns):
    """In the order of key tiles. The first one writes its part, and the last one writes dQ. A counter per query tile, at its first
    row, says whose turn it is."""

    def prepare(self, out: HbmTensor, dout: HbmTensor, dq_sum: HbmTensor) -> HbmTensor:
        """Sets the counters to the first key tiles that the queries see. dQ of queries that see none is 0."""
        problem, tile = self.problem, self.tile
        self.turns = self.m.workspace("turns", 1, "int32", vector=True).firsts(tile.rows)

        def begin(block: Block) -> None:
            block.step("zero_dq")
            block.store(self.turns, block.full(1, 1, 0.0), block.i, 1)
            if not block.walk:
                block.store(self.dq, block.full(tile.rows, self.dq.cols, 0.0), block.i, tile.rows)

        def walk(i: int) -> range:
            return range(bool(problem.tiles_of_row(i, tile)))

        return prepare("flash3_backward", self.m, out, dout, rows=tile.rows, walk=walk, begin=begin)

    def apart(self) -> Callable[[int], object]:
        """At which query tiles a key tile comes first, and at which last."""
        visible = partial(self.problem.transposed.tiles_of_row, tile=Tile(self.tile.cols, self.tile.rows))
        return lambda j: tuple(self._place(i, j) for i in visible(j))

    def announce(self, block: Block) -> None:
        """Where in the order this block comes."""
        block.leave("place")

    def walk(self, walk: Walk) -> Iterable[int]:
        """From the last query tile to the first: blocks that begin together wait least so."""
        return reversed(walk)

    def add(self, block: Block, dq_sum: HbmTensor, part: Registers, i: int, rows: int, head: int) -> None:
        """Wait until all key tiles before this one have added, add, and let the next one."""
        first, last = self._place(i, int(np.ravel(block.i)[0]))
        sums, turns = dq_sum.head(head), self.turns.head(head)
        part = part.columns(0, dq_sum.cols)  # the products go over whole boxes
        block.fetch(turns, i, 1)
        block.hear("place", 4 * self.m.config.consumers)
        if not last:
            if first:
                block.store(sums, part, i, rows)
            else:
                block.atomic_add(sums, part, i, rows)
            block.arrive(turns, i)
            return
        total = part if first else block.fetch(sums, i, rows) + part
        block.arrive(turns, i)
        total = total * of_kept(self.problem.scale, self.problem)
        block.store(self.dq.head(head), total.columns(0, self.dq.cols), i, rows)

    def finish(self, dq_sum: HbmTensor) -> None:
        """Nothing is left."""

    def _place(self, i: int, j: int) -> tuple[bool, bool]:
        """Is key tile j the first one of query tile i, and is it the last one?"""
        seen = self.problem.tiles_of_row(i, self.tile)
        return j == seen[0], j == seen[-1]


@program(operation=BACKWARD)
def flash3_backward_deterministic(
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
    """`flash3_backward`, in which blocks wait for their turns to add to dQ. All shapes are the same.

    A counter per query tile, at its first row, says which key tile adds to its dQ next. Blocks draw their key tiles from
    another counter, so they wait only for blocks that have begun. The first key tile writes its part of the sum, so it needs no
    zeros. The last one reads the sum, adds its part and writes dQ, so no launch rounds the sums.
    """
    return unordered.backward("flash3_backward", m, q, k, v, out, lse, dout, problem, tile, order=InTurn)
