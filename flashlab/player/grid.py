"""The S matrix as a grid of cells, launch by launch, and the steps at which cells change their state.

A trace knows transfers, not tiles of S. But a block works on the last rows that it moved of Q (or of a tensor along Q:
O, l, m), and on the last keys that it moved of K or V. The current tile lies where the two meet. A transfer of a tensor
as large as S gives both.

Keys in pages are keys of their request, and stand where they are among these. Requests with a prefix in common have one S:
their queries are its rows, one request below the other. The keys of the prefix come first, then those that each has of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

import numpy as np

from simulator.catalogue import CATALOGUE
from simulator.operations.attention import ATTENTION
from simulator.operations.cascade import Sides, first_keys
from simulator.operations.operation import Operation
from simulator.problem import Problem
from simulator.simulate import head_of
from simulator.trace import Event, Trace, Transfer

__all__ = ["Cell", "Changes", "Grid", "Range", "Scores", "grids", "moved", "operation_of", "roles_of"]

_ALONG = {"len_q": "queries", "len_kv": "keys", "len_prefix": "keys", "pages": "keys"}
_LIKE_S = ("s", "p", "ds", "dp")
MOST_CELLS = 128
"""The most cells per side. In a larger grid, one cell stands for several tiles."""


class Cell(IntEnum):
    """The state of a cell."""

    NOT_YET = 0
    LOADED = 1
    WORK = 2
    DONE = 3
    SKIPPED = 4
    """The mask leaves nothing in this cell, and no block of the launch visits it."""
    MISSED = 5
    """The mask leaves pairs in this cell, but no block of the launch visits it."""


@dataclass(frozen=True)
class Grid:
    """`rows` x `cols` cells of `height` x `width` elements of S."""

    rows: int
    cols: int
    height: int
    width: int


@dataclass(frozen=True)
class Scores:
    """S of a trace: `queries` x `keys` of the `problem` that was traced. The first `prefix` keys are common to all requests."""

    problem: Problem
    queries: int
    keys: int
    prefix: int | None = None

    @classmethod
    def of(cls, trace: Trace) -> Scores:
        p = head_of(Problem(**trace.problem), trace.head[0])
        if p.len_prefix is None:
            return cls(p, p.len_q, p.len_kv)
        return cls(p, p.batch * p.len_q, p.len_prefix + p.len_kv, p.len_prefix)

    @property
    def mask(self) -> list[int | None]:
        """How far a query sees to the left and to the right of the key that it is aligned with, and that of query 0."""
        p = self.problem
        return [p.left, p.right, p.offset] if self.prefix is None else [None, None, 0]

    def first_query(self, request: int | None) -> int:
        """The row of S at which a request's queries begin."""
        return (request or 0) * self.problem.len_q

    def first_key(self, tensor: str) -> int:
        """The column of S at which the rows of a tensor along the keys begin."""
        return 0 if self.prefix is None or tensor.endswith("_prefix") else self.prefix

    def seen(self, first: int, last: int, key: int) -> range:
        """The keys that any of the rows first to last (inclusive) sees. With a prefix they are of the side that `key` lies on."""
        p = self.problem
        if self.prefix is None:
            return p.keys_of_rows(first, last)
        found = list[range]()
        for b in range(first // p.len_q, last // p.len_q + 1):
            begin, end = max(first - b * p.len_q, 0), min(last - b * p.len_q, p.len_q - 1)
            own = p.seq_lens[b]
            if key < self.prefix:
                found.append(range(int(first_keys(p, np.arange(begin, end + 1), own).min()), self.prefix))
            else:
                keys = Sides.of(p).suffix.replace(batch=1, len_kv=own).keys_of_rows(begin, end)
                found.append(range(keys.start + self.prefix, keys.stop + self.prefix))
        found = [keys for keys in found if keys]
        return range(min(x.start for x in found), max(x.stop for x in found)) if found else range(0)


Range = tuple[int, int]
Rectangle = tuple[Range, Range]
Changes = list[list[tuple[int, Cell]]]
"""Per event, the cells (by row-major index) that change, with their new states. A launch starts with all NOT_YET."""


def grids(trace: Trace, scores: Scores) -> tuple[list[Grid | None], Changes]:
    """The grid of each launch (None if it does not touch S), and the changes at each event.

    A launch goes on with what the launches before have done where all share one S, of a prefix and of own keys. So does one that
    only merges partial results.
    """
    changes: Changes = [[] for _ in trace.events]
    roles = roles_of(trace, scores.problem)
    found: list[Grid | None] = []
    before, left = dict[Rectangle, Cell](), dict[int, Cell]()
    start = 0
    for _, launch in groupby(trace.events, key=lambda event: event.launch):
        events = list(launch)
        touched = list(_touched(events, roles, scores))
        grid = _grid(touched, trace.tile, scores)
        merges = grid is None and any(_is_part(each) for event in events for each in event.transfers)
        if before and grid is None and merges:
            grid = found[-1]
            changes[start] += [(cell, max(Cell.DONE, state)) for cell, state in left.items()]
        elif before and grid is not None and scores.prefix is not None:
            changes[start] += list(_cells(before, grid).items())
        if grid is not None:
            for at, cell, state in _changes(events, touched, grid, scores):
                changes[start + at].append((cell, state))
        before |= dict.fromkeys((each for now in touched for each in now), Cell.DONE)
        found.append(grid)
        left = {cell: state for each in changes[start : start + len(events)] for cell, state in each}
        start += len(events)
    return found, changes


def _is_part(transfer: Transfer) -> bool:
    """Is it one of several partial results that a launch before has left?"""
    return transfer.plane is not None and "hbm.read" in transfer.nbytes


def operation_of(trace: Trace) -> Operation:
    """The operation that a trace is of. That of a program of one's own is the first one which has its inputs, or attention."""
    if row := CATALOGUE.get(trace.algorithm):
        return row.operation
    given = {name for name, shape in trace.tensors.items() if shape.role == "input"}
    fits = (row.operation for row in CATALOGUE.values() if given <= {x.name for x in row.operation.inputs})
    return next(fits, ATTENTION)


def roles_of(trace: Trace, problem: Problem) -> dict[str, str]:
    """The role of each tensor: it lies along the "queries" or the "keys", or is as large as S ("scores")."""
    operation = operation_of(trace)
    roles: dict[str, str] = {}
    for operand in (*operation.inputs, *operation.outputs):
        along = [_ALONG[axis] for axis in operand.axes if axis in _ALONG]
        if along:
            roles[operand.name] = along[0] if len(along) == 1 else "scores"
    for name, shape in trace.tensors.items():
        if shape.role == "workspace" and shape.rows == problem.len_q:
            # O is as large as S if there are as many keys as columns of V; then the name decides
            like_s = not shape.vector and shape.cols == problem.len_kv
            roles[name] = (
                "scores" if like_s and (problem.len_kv != problem.head_dim_v or name in _LIKE_S) else "queries"
            )
    return roles


def _touched(events: list[Event], roles: dict[str, str], scores: Scores) -> Iterator[dict[Rectangle, Cell]]:
    """Per event, the rectangles of S whose operands it loads or reads."""
    block: object = None
    queries: Range | None = None
    keys: Range | None = None
    for event in events:
        if (event.request, event.block) != block:
            block, queries, keys = (event.request, event.block), None, None
        touched: dict[Rectangle, Cell] = {}
        for transfer in event.transfers:
            role = roles.get(transfer.tensor)
            if role in ("queries", "scores"):
                queries = moved(transfer.rows, scores.first_query(event.request)) or queries
            if role == "keys":
                keys = moved(transfer.rows, scores.first_key(transfer.tensor)) or keys
            if role == "scores":
                keys = transfer.cols or keys
            reads_sram = transfer.rows is None and "sram.read" in transfer.nbytes
            to_registers = "hbm.read" in transfer.nbytes and "sram.write" not in transfer.nbytes
            if queries and keys and role and (role != "queries" or reads_sram or "sram.write" in transfer.nbytes):
                works = role == "scores" or reads_sram or to_registers
                rectangle = queries, keys
                if works or rectangle not in touched:
                    touched[rectangle] = Cell.WORK if works else Cell.LOADED
        yield touched


def moved(rows: Range | None, by: int) -> Range | None:
    """A range of rows, so many further on."""
    return rows and (rows[0] + by, rows[1] + by)


def _grid(touched: list[dict[Rectangle, Cell]], tile: tuple[int, int], scores: Scores) -> Grid | None:
    rectangles = {rectangle for each in touched for rectangle in each}
    height, width = (_unit({rectangle[side] for rectangle in rectangles}, tile[side]) for side in (0, 1))
    if not height or not width:
        return None
    height *= -(-scores.queries // (height * MOST_CELLS))
    width *= -(-scores.keys // (width * MOST_CELLS))
    return Grid(-(-scores.queries // height), -(-scores.keys // width), height, width)


def _unit(ranges: set[Range], tile: int) -> int:
    """The side of a cell: the tile's if every range lies in the raster of tiles, otherwise the widest range's."""
    fits = all(first % tile == 0 and last - first <= tile for first, last in ranges)
    return tile if ranges and fits else max((last - first for first, last in ranges), default=0)


def _changes(
    events: list[Event], touched: list[dict[Rectangle, Cell]], grid: Grid, scores: Scores
) -> Iterator[tuple[int, int, Cell]]:
    """Yields (event, cell, state) in the order of events. A block leaves a cell that it worked on as DONE, and a cell
    that it only loaded as NOT_YET."""
    cells = [_cells(each, grid) for each in touched]
    yielded: list[tuple[int, int, Cell]] = []
    worked: set[int] = set()
    state: dict[int, Cell] = {}
    for at, here in enumerate(cells):
        for cell, new in here.items():
            if new is Cell.WORK:
                worked.add(cell)
            elif cell in worked:
                new = Cell.WORK  # another operand of the current tile
            if state.get(cell) is not new:
                state[cell] = new
                yielded.append((at, cell, new))
        if here and at + 1 < len(events):
            following = _next_of_block(events, cells, at)
            for cell in here.keys() - following.keys():
                state[cell] = Cell.DONE if cell in worked else Cell.NOT_YET
                yielded.append((at + 1, cell, state[cell]))
                worked.discard(cell)
    yielded += _never_touched(cells, grid, scores)
    yield from sorted(yielded, key=lambda change: change[0])


def _next_of_block(events: list[Event], cells: list[dict[int, Cell]], at: int) -> dict[int, Cell]:
    """The cells that the block touches next, after event `at`."""
    for later in range(at + 1, len(events)):
        if (events[later].request, events[later].block) != (events[at].request, events[at].block):
            break
        if cells[later]:
            return cells[later]
    return {}


def _never_touched(cells: list[dict[int, Cell]], grid: Grid, scores: Scores) -> Iterator[tuple[int, int, Cell]]:
    """The cells that no block visits: SKIPPED from when their row is first touched, or MISSED once the row is left.

    Nothing is said of the prefix where a launch is about own keys, and the other way round.
    """
    first: dict[int, int] = {}
    last: defaultdict[int, int] = defaultdict(lambda: len(cells) - 1)
    reached: set[int] = set()
    for at, here in enumerate(cells):
        for cell in here:
            first.setdefault(cell // grid.cols, at)
            last[cell // grid.cols] = min(at + 1, len(cells) - 1)
            reached.add(cell)
    sides = {_on_prefix(cell, grid, scores) for cell in reached}
    for cell in range(grid.rows * grid.cols):
        if cell in reached or (scores.prefix is not None and _on_prefix(cell, grid, scores) not in sides):
            continue
        row, col = divmod(cell, grid.cols)
        end = min((row + 1) * grid.height, scores.queries) - 1
        keys = scores.seen(row * grid.height, end, col * grid.width)
        visible = keys.start < min((col + 1) * grid.width, keys.stop) and keys.stop > col * grid.width
        yield (last[row], cell, Cell.MISSED) if visible else (first.get(row, len(cells) - 1), cell, Cell.SKIPPED)


def _on_prefix(cell: int, grid: Grid, scores: Scores) -> bool:
    return cell % grid.cols * grid.width < (scores.prefix or 0)


def _cells(rectangles: dict[Rectangle, Cell], grid: Grid) -> dict[int, Cell]:
    found: dict[int, Cell] = {}
    for ((top, bottom), (left, right)), state in rectangles.items():
        for row in range(top // grid.height, -(-bottom // grid.height)):
            for col in range(left // grid.width, -(-right // grid.width)):
                found[row * grid.cols + col] = max(state, found.get(row * grid.cols + col, state))
    return found
