"""In which order the row tiles of all heads are taken. Few are listed. Of many, neighbours that walk alike are grouped."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from simulator.config import Config
from simulator.problem import Problem, Tile
from simulator.time.costs import LONGEST_WALK
from simulator.time.launch import Runs, Work

LISTED = 1024
"""The most row tiles of a head that are listed one by one."""
GROUPS = 64
"""About how many groups the others make, and then each end has `LISTED` / 8 that are listed."""


def in_order(problem: Problem, tile: Tile) -> Runs:
    """The work of each row tile of a head, in the order of the rows."""
    return _runs(problem.row_tiles(tile), problem, tile)


def longest_first(problem: Problem, tile: Tile) -> Runs:
    """The last row tile first: under a causal mask it walks farthest."""
    return in_order(problem, tile)[::-1]


def by_groups_of_heads(runs: Runs, problem: Problem, config: Config) -> list[tuple[Runs, int]]:
    """The order of a launch in which a group of heads takes a row tile before it takes the next one."""
    return _by_groups(runs, problem.batch * problem.heads, config.heads_together)


def key_tiles(problem: Problem, config: Config) -> list[tuple[Runs, int]]:
    """The order of a backward pass, whose blocks have a key tile and walk over the queries that see it.

    A block goes over the query heads of a group, or over a part of them. A group of heads takes a key tile before it takes
    the next one, the first keys first: under a causal mask most queries see them.
    """
    p, members = problem, problem.queries_per_kv // config.parts
    walks = in_order(p.transposed, Tile(config.tile.cols, config.tile.rows))
    runs = [(Work(each.tiles * members, each.masked * members), n) for each, n in walks]
    return _by_groups(runs, p.batch * p.kv_heads * config.parts, max(1, config.heads_together // members))


def _by_groups(runs: Runs, number: int, together: int) -> list[tuple[Runs, int]]:
    """Of a `number` of heads, so many `together` take a work before they take the next one."""
    whole, rest = divmod(number, together)
    return [
        ([(each, n * heads) for each, n in runs], times) for heads, times in ((together, whole), (rest, 1)) if heads
    ]


def work(problem: Problem, tile: Tile, i: int) -> Work:
    """The work of row tile i."""
    tiles = problem.tiles_of_row(i, tile)
    first = i * tile.rows
    last = min(first + tile.rows, problem.len_q) - 1
    seen_by_all = range(problem.keys_of_rows(last, last).start, problem.keys_of_rows(first, first).stop)
    full = range(-(-seen_by_all.start // tile.cols), max(0, seen_by_all.stop) // tile.cols)
    return Work(len(tiles), len(tiles) - min(len(tiles), len(full)))


def _runs(n: int, problem: Problem, tile: Tile) -> Runs:
    """The work of each of `n` row tiles.

    Of many, those at the ends are listed, which decide how evenly a launch ends, and those about a row where the mask begins
    to cut otherwise. Between them a walk is as much longer than the walk a period before as all others are. So a group of
    walks whose distance is a period is said by its mean.
    """
    if n <= LISTED:
        return [(work(problem, tile, i), 1) for i in range(n)]
    period = tile.cols // gcd(tile.rows, tile.cols)
    rows, margin = problem.row_tiles(tile), period + (LONGEST_WALK + 2) * (tile.cols // tile.rows + 1)
    listed = [
        (0, LISTED // 8),
        (n, LISTED // 8),
        *((i, margin) for cut in _cuts(problem, tile) for i in (cut, rows - cut)),
    ]
    runs: list[tuple[Work, int]] = []
    at = 0
    for low, high in sorted((max(0, i - wide), min(n, i + wide)) for i, wide in listed if -wide < i < n + wide):
        runs += _grouped(problem, tile, range(at, low), period, -(-n // GROUPS))
        runs += [(work(problem, tile, i), 1) for i in range(max(at, low), high)]
        at = max(at, high)
    return runs


def _cuts(problem: Problem, tile: Tile) -> Iterator[int]:
    """The row tiles from which on the mask hides the first keys, or all, and those to which it hides the last ones, or all."""
    p = problem
    for shift in (None if p.left is None else -p.left, p.right):
        if shift is not None:
            yield from ((key - p.offset - shift) // tile.rows for key in (0, p.len_kv))


def _grouped(problem: Problem, tile: Tile, rows: range, period: int, size: int) -> Iterator[tuple[Work, int]]:
    """The works of row tiles, in groups of about `size` neighbours."""
    size = -(-size // period) * period
    for first in rows[::size]:
        for i in range(first, min(first + period, first + size, rows.stop)):
            alike = range(i, min(first + size, rows.stop), period)
            down, up = _means(work(problem, tile, alike[0]), work(problem, tile, alike[-1]))
            yield from ((down, len(alike) - len(alike) // 2), (up, len(alike) // 2))


def _means(first: Work, last: Work) -> tuple[Work, Work]:
    """Two works that together are as much as the first and the last, and half as many of each as all between them.

    A further tile of a long walk costs what the last one did (`Costs`), so only the sum of their tiles matters.
    """
    tiles = first.tiles + last.tiles
    return Work(tiles // 2, first.masked), Work(tiles - tiles // 2, first.masked)
