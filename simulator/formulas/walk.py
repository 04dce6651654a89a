"""How many tiles the mask leaves, in closed form: sums over all row tiles, without a loop over them."""

from __future__ import annotations

from typing import NamedTuple

from simulator.problem import Problem, Tile


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a i + b) / m) for i = 0 … n-1, in the steps of Euclid's algorithm. m > 0; a and b may be
    negative.

    >>> floor_sum(5, 3, 2, 1) == sum((2 * i + 1) // 3 for i in range(5))
    True
    """
    if n <= 0:
        return 0
    total = n * (n - 1) // 2 * (a // m) + n * (b // m)
    a, b = a % m, b % m
    top = a * n + b
    if top < m:
        return total
    return total + floor_sum(top // m, a, m, top % m)


class Walk(NamedTuple):
    """What the row tiles of one head visit together.

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
    first, stop = max(0, -b // br + 1), min(rows - 1, -((a - n) // br))
    count = max(0, stop - first)

    def progression(lo: int, hi: int, shift: int) -> int:
        """The sum of floor((i br + shift) / bc) for lo <= i < hi."""
        return floor_sum(hi - lo, bc, br, lo * br + shift) if hi > lo else 0

    cut = min(max(first, -((b - n) // br)), max(first, stop))  # from here on, row tiles reach the last key tile
    ends = progression(first, cut, b + bc - 1) + (max(first, stop) - cut) * tiles
    begin = min(max(first, -(a // br)), max(first, stop))  # before this one, row tiles begin with key tile 0
    starts = progression(begin, max(first, stop), a)
    reach_last = min(max(first, ((tiles - 1) * bc - b) // br + 1), max(first, stop))
    to_the_end = max(first, stop) - reach_last
    pairs = ends - starts if count else 0

    tail = p.tiles_of_row(rows - 1, tile)
    pairs += len(tail)
    to_the_end += bool(tail) and tail.stop == tiles
    low = p.tiles_of_row(first, tile).start if count else tail.start
    high = tail.stop if tail else (p.tiles_of_row(stop - 1, tile).stop if count else 0)
    distinct = min(high * bc, n) - low * bc if pairs else 0
    return Walk(pairs, pairs * bc - to_the_end * (tiles * bc - n), distinct, to_the_end)
