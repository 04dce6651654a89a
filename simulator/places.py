"""Rows of an array in HBM that numbers in HBM name: slots of a pool, or whole pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.dtypes import Array


class Places(NamedTuple):
    """The rows that the blocks in lockstep reach, `rows_in_all` of them.

    `rows` are their numbers, (blocks, rows), -1 where there is none. On shapes alone nobody knows them: the rows from number
    `first` on stand for them. On data, `first` is the number of the row that says the first of them.

    >>> list(Places(0, 3, np.array([[7, -1], [5, 6]])).runs())
    [(5, 8)]
    """

    first: int
    rows_in_all: int
    rows: Array | None = None

    def runs(self) -> list[tuple[int, int]]:
        """The same rows, as few runs (first row, row after the last one) as they make."""
        if not self.rows_in_all:
            return []
        if self.rows is None:
            return [(self.first, self.first + self.rows_in_all)]
        rows = np.sort(self.rows[self.rows >= 0])
        cuts = np.flatnonzero(np.diff(rows) > 1) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, cuts)]
