"""How many tiles the mask leaves, in closed form: sums over all row tiles, without a loop over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.dtypes import Array
from simulator.lanes import Lanes, least, most, total
from simulator.problem import Problem, Tile

_FEW_ROWS = 64
"""So many row tiles of sequences that go together are taken one by one."""


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a i + b) / m) for i = 0 … n-1, in the steps of Euclid's algorithm. m > 0; a and b may be
    negative.

    >>> floor_sum(5, 3, 2, 1) == sum((2 * i + 1) // 3 for i in range(5))
    True
    """
    n = most(n, 0)
    total = n * (n - 1) // 2 * (a // m) + n * (b // m)
    a, b = a % m, b % m
    top = a * n + b
    # a lane that is done has a = 0, and n = 0 from here on
    return total + floor_sum(top // m, most(a, 1), m, top % m) if np.any(top >= m) else total


class Walk(NamedTuple):
    """What the row tiles of one head visit together. Its numbers may have lanes.

    `pairs` counts the (row tile, key tile) pairs, `keys` the keys that all pairs load, and `distinct_keys` the keys
    that are loaded at least once. `to_the_end` counts the row tiles that visit the last key tile.
    """

    pairs: int
    keys: int
    distinct_keys: int
    to_the_end: int


def walk(problem: Problem, tile: Tile) -> Walk:
    """Sum `Problem.tiles_of_row` over all row tiles.

    Row tile i sees the keys from max(0, i Br + a) to min(len_kv, i Br + b). So its first and last key tiles are floors
    of an arithmetic progression, cut off at both ends. The last row tile may be ragged, so it is added by itself.
    """
    p, (br, bc), rows = problem, tile, problem.row_tiles(tile)
    if not rows or not p.len_kv:
        return Walk(0, 0, 0, 0)
    n, tiles = p.len_kv, p.key_tiles(tile)
    a = -(rows * br) - n if p.left is None else p.offset - p.left
    b = rows * br + n if p.right is None else br + p.offset + p.right
    # full row tiles that see any key: i br + b > 0 and i br + a < n
    first = most(0, -b // br + 1)
    stop = most(first, least(rows - 1, -((a - n) // br)))

    def progression(lo: int, hi: int, shift: int) -> int:
        """The sum of floor((i br + shift) / bc) for lo <= i < hi."""
        return floor_sum(hi - lo, bc, br, lo * br + shift)

    cut = least(most(first, -((b - n) // br)), stop)  # from here on, row tiles reach the last key tile
    ends = progression(first, cut, b + bc - 1) + (stop - cut) * tiles
    begin = least(most(first, -(a // br)), stop)  # before this one, row tiles begin with key tile 0
    starts = progression(begin, stop, a)
    to_the_end = stop - least(most(first, ((tiles - 1) * bc - b) // br + 1), stop)

    any_full = stop > first
    start, end = ends_of_row(p, rows - 1, tile)
    pairs = ends - starts + end - start
    to_the_end += (start < end) * (end == tiles)
    low = any_full * ends_of_row(p, first, tile)[0] + (1 - any_full) * start
    high = most(end, any_full * ends_of_row(p, stop - 1, tile)[1])
    distinct = (pairs > 0) * (least(high * bc, n) - low * bc)
    return Walk(pairs, pairs * bc - to_the_end * (tiles * bc - n), distinct, to_the_end)


def ends_of_row(problem: Problem, i: int, tile: Tile) -> tuple[int, int]:
    """`Problem.tiles_of_row` as two numbers, which may have lanes: the first key tile, and the one behind the last."""
    p, first = problem, i * tile.rows
    start = 0 if p.left is None else most(0, first + p.offset - p.left)
    last = least(first + tile.rows, p.len_q) - 1
    stop = p.len_kv if p.right is None else least(p.len_kv, last + p.offset + p.right + 1)
    seen = start < stop
    return seen * (start // tile.cols), seen * -(-stop // tile.cols)


def tiles_of_rows(problem: Problem, tile: Tile, i: Array) -> tuple[Array, Array]:
    """The first key tile of each row tile i, and the one behind its last: `Problem.tiles_of_row` for an array. If the keys have
    lanes, these are the last axis.

    >>> p = Problem(batch=1, heads=1, len_q=4, head_dim=8, dtype="float16", causal=True)
    >>> tiles_of_rows(p, Tile(1, 2), np.arange(4))
    (array([0, 0, 0, 0]), array([1, 1, 2, 2]))
    """
    p, n, offset = problem, np.asarray(problem.len_kv), np.asarray(problem.offset)
    first = (i * tile.rows).reshape(*i.shape, *[1] * n.ndim)
    start = np.zeros_like(first + n) if p.left is None else np.maximum(0, first + offset - p.left)
    last = np.minimum(first + tile.rows, p.len_q) - 1
    stop = np.zeros_like(first) + n if p.right is None else np.minimum(n, last + offset + p.right + 1)
    seen = start < stop
    return np.where(seen, start // tile.cols, 0), np.where(seen, -(-stop // tile.cols), 0)


class Weighted(NamedTuple):
    """A few row tiles that stand for all: the sum of a number over all of them is that of weight times number over these."""

    rows: Array
    weights: Array

    def sum(self, numbers: Array) -> int:
        """The sum over all row tiles, from the numbers of these, or from those of each lane."""
        if numbers.ndim > 1:
            return total(self.weights[:, None] * numbers)
        return int(np.dot(self.weights.astype(object), numbers.astype(object))) if len(self.rows) else 0


def weighted_rows(problem: Problem, tile: Tile, period: int) -> Weighted:
    """Row tiles that stand for all, where a number grows by the same from each row tile to the one `period` behind it.

    It may grow otherwise near a place where a mask begins or ends to cut the keys of a row tile. Row tiles whose keys are less
    than a key tile and a byte of bits away from it are taken one by one, and so is the last one, which may be ragged. In
    a stretch between two such places the first two periods say how the number grows.

    >>> p = Problem(batch=1, heads=1, len_q=10**6, head_dim=8, dtype="float16", causal=True)
    >>> few = weighted_rows(p, Tile(64, 64), period=1)
    >>> first, stop = tiles_of_rows(p, Tile(64, 64), few.rows)
    >>> len(few.rows) < 20, few.sum(stop - first) == walk(p, Tile(64, 64)).pairs
    (True, True)
    """
    p, br, rows, edge = problem, tile.rows, problem.row_tiles(tile), 2 + (tile.cols + 8) // tile.rows
    if isinstance(p.len_kv, Lanes) and rows <= _FEW_ROWS:
        return Weighted(np.arange(rows, dtype=np.int64), np.ones(rows, np.int64))
    cuts = {0, rows - 1, rows}
    if p.left is not None:  # the window's begin passes the first key and the last one
        cuts |= {-(-(p.left - p.offset) // br), -(-(p.left - p.offset + p.len_kv) // br)}
    if p.right is not None:  # so does its end
        cuts |= {-(-(1 - br - p.offset - p.right) // br), -(-(p.len_kv - br - p.offset - p.right) // br)}
    at = sorted({min(max(0, cut), rows) for cut in cuts})
    found: dict[int, int] = {}
    for low, high in zip(at, at[1:], strict=False):
        alone = [*range(low, min(low + edge, high)), *range(max(low + edge, high - edge), high)]
        found |= dict.fromkeys(alone, 1)
        low, high = low + edge, high - edge
        if high - low <= 2 * period:
            found |= dict.fromkeys(range(low, high), 1)
            continue
        for i in range(low, low + period):
            n = -(-(high - i) // period)
            later = n * (n - 1) // 2  # of the growth from one period to the next
            found |= {i: n - later, i + period: later}
    return Weighted(np.array(list(found), np.int64), np.array(list(found.values()), np.int64))
