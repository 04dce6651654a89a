"""A few rows of blocks stand for all. So one's own program is counted quickly where its blocks walk over many tiles.

Under a mask each row of blocks walks over tiles of its own. All rows together then take a number of steps that grows with the
square of the length. But from row to row a walk changes by the same number of tiles, until the mask begins to cut in another way.
The cost changes with it. So rows whose walks change alike form a part, and a few rows of it are run. A polynomial of degree 2 goes
through the first three. It must tell, to the byte, the costs of the others that are run: the fourth row, two in the middle and the
last two. Then it stands for all rows between. If it fails, the part is cut in two: into every second row (a program may do
something every other time), or into halves. In the end each row is run.

That is no proof for a program that treats one row in the middle unlike its neighbours. So `LaunchCounts.inferred` says how many
rows were not run, and `shape_run` runs all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulator.problem import Walk

MOST_STEPS = 1 << 15
"""Each row is run if all walks together have at most this many tiles."""
_FEW = 12  # a part of at most 12 rows is run, row by row
_LONGEST_PERIOD = 16
_PARTINGS = 4  # a program may do something every 2nd or 4th time

Intervals = tuple[tuple[int, int], ...]


class Cost(NamedTuple):
    """The cost of a row of blocks: numbers that add up, the most bytes in SRAM, and the rows of each array that it reaches."""

    sums: Mapping[Hashable, int]
    peak: int
    reached: Mapping[Hashable, Intervals]

    def numbers(self) -> dict[Hashable, int]:
        """All of it as numbers. One that adds up may be missing, and is then 0."""
        ends = {
            ("reached", what, n, side): end
            for what, intervals in self.reached.items()
            for n, interval in enumerate(intervals)
            for side, end in enumerate(interval)
        }
        return {**{("sum", key): n for key, n in self.sums.items()}, "peak": self.peak, **ends}

    def shape(self) -> dict[Hashable, int]:
        """How many intervals of each array it reaches."""
        return {what: len(intervals) for what, intervals in self.reached.items()}


Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Representatives:
    """Which rows of a launch are run, and what all rows cost together. Callers ask `wanted` until it returns no more rows.

    >>> walks = [(range(i + 1),) for i in range(1000)]
    >>> chosen = Representatives(walks, period=1)
    >>> while rows := chosen.wanted():
    ...     for i in rows:
    ...         chosen.ran(i, Cost({"loads": len(walks[i][0])}, peak=64, reached={}))
    >>> chosen.sums()["loads"] == sum(range(1001)), chosen.inferred > 900
    (True, True)
    """

    def __init__(self, walks: Sequence[tuple[Walk, ...]], period: int) -> None:
        self._known: dict[int, Cost] = {}
        self._open = [(part, 0) for part in _alike(walks, period)]
        self._alone: list[int] = []
        self._fitted: list[range] = []

    def wanted(self) -> list[int]:
        """The rows that must be run next."""
        while self._open:
            rows = sorted({part[k] for part, _ in self._open for k in _points(len(part))} - self._known.keys())
            if rows:
                return rows
            parts, self._open = self._open, []
            for part, partings in parts:
                self._settle(part, partings)
        return []

    def ran(self, row: int, cost: Cost) -> None:
        """Note what a row costs."""
        self._known[row] = cost

    @property
    def inferred(self) -> int:
        """How many rows were not run."""
        return sum(len(part) for part in self._fitted) - len(
            {i for part in self._fitted for i in part} & self._known.keys()
        )

    def sums(self) -> dict[Hashable, int]:
        """For all rows together, the numbers that add up."""
        total = defaultdict[Hashable, int](int)
        for row in self._alone:
            for key, n in self._known[row].sums.items():
                total[key] += n
        for part in self._fitted:
            n, lines = len(part), self._polynomials(part)
            for key in {key for k in range(3) for key in self._known[part[k]].sums}:
                a, b, c = lines["sum", key]
                total[key] += n * a + n * (n - 1) // 2 * b + n * (n - 1) * (n - 2) // 6 * c
        return dict(total)

    @property
    def peak(self) -> int:
        """The most bytes that a block of any row has in SRAM."""
        return max((cost.peak for cost in self._known.values()), default=0)

    def reached(self) -> dict[Hashable, Intervals]:
        """The rows of each array that are reached, as intervals without overlap."""
        ends = defaultdict[Hashable, list[Numbers]](list)
        for row in self._alone:
            for what, intervals in self._known[row].reached.items():
                ends[what].append(np.array(intervals, np.int64).T)
        for part in self._fitted:
            k, lines = np.arange(len(part), dtype=np.int64), self._polynomials(part)
            for what, intervals in self._known[part[0]].reached.items():
                for n in range(len(intervals)):
                    both = [lines["reached", what, n, side] for side in (0, 1)]
                    ends[what].append(np.array([a + b * k + c * (k * (k - 1) // 2) for a, b, c in both]))
        return {what: united(np.concatenate(found, axis=1)) for what, found in ends.items()}

    def _settle(self, part: range, partings: int) -> None:
        """Let a few rows stand for a part, if their costs fit. Else cut it in two."""
        if all(row in self._known for row in part):
            self._alone += part
        elif self._fits(part, _points(len(part))):
            self._fitted.append(part)
        elif partings < _PARTINGS and not self._fits(part, range(4)):
            self._open += [(part[::2], 2 * partings or 2), (part[1::2], 2 * partings or 2)]
        else:
            self._open += [(part[: len(part) // 2], partings), (part[len(part) // 2 :], partings)]

    def _fits(self, part: range, points: Sequence[int]) -> bool:
        lines, shape = self._polynomials(part), self._known[part[0]].shape()
        if lines["peak"][2]:  # then the largest one may be anywhere
            return False
        for k in points:
            cost = self._known[part[k]]
            found = cost.numbers()
            if cost.shape() != shape:
                return False
            for key in {*lines, *found}:
                a, b, c = lines.get(key, (0, 0, 0))
                if found.get(key, 0) != a + b * k + c * (k * (k - 1) // 2):
                    return False
        return True

    def _polynomials(self, part: range) -> dict[Hashable, tuple[int, int, int]]:
        """For each number of the first three rows: the first value, the first difference and the second one."""
        first = [self._known[part[k]].numbers() for k in range(3)]
        lines: dict[Hashable, tuple[int, int, int]] = {}
        for key in {key for numbers in first for key in numbers}:
            x, y, z = (numbers.get(key, 0) for numbers in first)
            lines[key] = x, y - x, z - 2 * y + x
        return lines


def _points(n: int) -> list[int]:
    """The rows of a part of n that are run."""
    return list(range(n)) if n <= _FEW else sorted({0, 1, 2, 3, n // 3, n // 2 + 1, n - 2, n - 1})


def _alike(walks: Sequence[tuple[Walk, ...]], period: int) -> Iterator[range]:
    """Parts of the rows. From one row of a part to the next, each walk changes by the same number of tiles."""
    x = np.array([[n for walk in row for n in (walk.start, walk.stop, walk.step)] for row in walks], np.int64)  # pyright: ignore
    last = x.max(axis=1, initial=0)
    edge = last == last.max(initial=0)  # it may be ragged
    edge[0] = edge[-1] = True

    def borders(lag: int) -> Numbers:
        """Where a part ends: the difference from the walks `lag` rows before begins to be another one."""
        label = np.column_stack([x[lag:] - x[:-lag], edge[lag:]])
        return lag + 1 + np.flatnonzero((label[1:] != label[:-1]).any(axis=1))

    lags = [lag for lag in sorted({*range(1, _LONGEST_PERIOD + 1), period}) if _FEW * lag < len(walks)]
    if not lags:
        yield range(len(walks))
        return
    lag = min(lags, key=lambda lag: lag * (len(borders(lag)) + 1))
    at = [0, lag, *borders(lag).tolist(), len(walks)]
    for start, stop in zip(at, at[1:], strict=False):
        yield from (range(first, stop, lag) for first in range(start, min(start + lag, stop)))


def united(ends: Numbers) -> Intervals:
    """Intervals without overlap that cover the same as `ends`, which has the intervals' beginnings and their ends."""
    low, high = ends[:, np.argsort(ends[0])]
    furthest = np.maximum.accumulate(high)
    begins = np.flatnonzero(np.concatenate([[True], low[1:] > furthest[:-1]]))
    stops = np.concatenate([begins[1:] - 1, [len(low) - 1]])
    return tuple(zip(low[begins].tolist(), furthest[stops].tolist(), strict=True))
