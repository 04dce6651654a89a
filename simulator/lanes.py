"""A formula for many sequences at once. As the lanes of a warp, they go together until a branch parts them.

The lengths of many sequences are arrays, and so is all that follows from them. Arithmetic takes arrays as it takes numbers. But
`if`, `min` and `max` need one answer. Where lanes disagree, `Diverged` says which side each takes. The caller then evaluates the
formula once for each side. So a formula is written for one problem, and there are as many evaluations as ways through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np

from simulator.dtypes import Array

T = TypeVar("T")
_SAFE = 2**62
"""Sums up to here fit into 64 bits."""


class Diverged(Exception):
    """Lanes take different sides of a branch. `yes` says which ones take the first."""

    def __init__(self, yes: Array) -> None:
        super().__init__("lanes diverge")
        self.yes = yes


class OneByOne(Exception):
    """A formula asks for a plain number, as `range` does. So its sequences are evaluated one by one."""


class Lanes(np.ndarray):
    """An integer, or a truth, for each lane. Its last axis is that of the lanes.

    >>> n = lanes_of([3, 5])
    >>> (n * n + 1).tolist(), bool(n > 0)
    ([10, 26], True)
    >>> max(n, 4)
    Traceback (most recent call last):
        ...
    simulator.lanes.Diverged: lanes diverge
    """

    def __bool__(self) -> bool:
        yes = np.asarray(self) != 0
        if yes.ndim > 1:
            raise OneByOne
        if yes.all():
            return True
        if yes.any():
            raise Diverged(yes)
        return False

    def _plain(self) -> NoReturn:
        raise OneByOne

    __index__ = __int__ = __float__ = __hash__ = _plain  # pyright: ignore[reportAssignmentType]


def lanes_of(numbers: Array | list[int], *, exact: bool = True) -> Lanes:
    """Numbers as lanes: in 64 bits, or if these are not `exact`, as integers of any size, which take longer."""
    return np.asarray(numbers, np.int64 if exact else object).view(Lanes)


def least(a: int, b: int) -> int:
    """The smaller one, lane by lane. `min` would part the lanes."""
    return np.minimum(a, b) if isinstance(a, Lanes) or isinstance(b, Lanes) else min(a, b)


def most(a: int, b: int) -> int:
    """The larger one, lane by lane."""
    return np.maximum(a, b) if isinstance(a, Lanes) or isinstance(b, Lanes) else max(a, b)


def ways(lanes: Array, evaluate: Callable[[Array], T]) -> Iterator[tuple[Array, T]]:
    """Evaluates a formula for lanes, and yields it for those that went one way together. A lane alone is `evaluate`'s to see."""
    waiting = [lanes]
    while waiting:
        together = waiting.pop()
        try:
            found = evaluate(together)
        except Diverged as parted:
            waiting += [together[~parted.yes], together[parted.yes]]
        except OneByOne:
            waiting += np.split(together, len(together))[::-1]
        else:
            yield together, found


def summed_over(number: int | Array, times: int | Array) -> int:
    """A number of each lane, added up. Each lane counts so many `times`, as does a number that all lanes share.

    >>> summed_over(lanes_of([3, 5]), np.array([10, 1])), summed_over(7, np.array([10, 1])), summed_over(7, 2)
    (35, 77, 14)
    """
    every = int(np.sum(times))
    if not isinstance(number, np.ndarray):
        return number * every
    x, t = np.asarray(number), np.asarray(times)
    if x.dtype == bool:
        x = x.astype(np.int64)
    if int(np.abs(x).max()) * every >= _SAFE:
        x = x.astype(object)
    return int(np.dot(x, t))


def largest(number: int | Array) -> int:
    """The largest number of any lane."""
    return int(np.asarray(number).max())


def over_rows(ufunc: np.ufunc, rows: Array) -> int:
    """Reduces the first axis, that of row tiles, to a number, or to one for each lane if the array has these, too."""
    found = ufunc.reduce(rows, axis=0)
    return found.view(Lanes) if found.ndim else int(found)  # pyright: ignore[reportReturnType]


total, lowest, highest = (partial(over_rows, ufunc) for ufunc in (np.add, np.minimum, np.maximum))
