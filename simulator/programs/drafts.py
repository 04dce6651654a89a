"""Drafts in a tile program for few queries: a word for each query says which of a request's last keys it sees."""

from __future__ import annotations

import numpy as np

from simulator.block import Block
from simulator.lanes import most
from simulator.machine import Machine
from simulator.operations.paged import shown_drafts
from simulator.problem import Problem, Tile
from simulator.registers import Registers


def first_tile(problem: Problem, tile: Tile) -> int:
    """The first key tile that has a draft. All behind it have."""
    return most(problem.offset, 0) // tile.cols


class Drafts:
    """The mask of drafts of one launch, if the problem has one. Rows are packed heads, `group` of them a query."""

    def __init__(self, m: Machine, group: int) -> None:
        self._problem, self._tile, self._warps, self._group = m.problem, m.tile, m.config.warps, group
        self._words = m.optional("draft_mask") if m.problem.drafts else None
        self._shown = shown_drafts(m.problem, m.values["draft_mask"].reshape(-1)) if self._words and m.data else None

    def fetch(self, block: Block) -> None:
        """HBM to each warp that computes: a word for each query of the row tile, where its keys have a draft."""
        if self._words is None or not self._are_in(block.walk[-1]):
            return
        rows, last = self._tile.rows, self._problem.len_q * self._group - 1
        tiles = [int(i) * rows for i in np.atleast_1d(block.i)]
        parts = [(r // self._group, min(r + rows - 1, last) // self._group + 1, 0, 4) for r in tiles]
        block.request(self._words, parts, warps=self._warps)

    def hide(self, block: Block, s: Registers, j: int) -> Registers:
        """Tile j of S, with -inf for the drafts that a row doesn't see."""
        if self._shown is None or not self._are_in(j):
            return s
        return block.show(s, self._shown, block.i, j, group=self._group)

    def _are_in(self, j: int) -> bool:
        return j >= first_tile(self._problem, self._tile)
