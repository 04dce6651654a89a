"""The S matrix as a grid of cells, launch by launch, and the steps at which cells change their state.

A trace knows transfers, not tiles of S. But a block works on the last rows that it moved of Q (or of a tensor along Q:
O, l, m), and on the last keys that it moved of K or V. The current tile lies where the two meet. A transfer of a tensor
as large as S gives both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

from simulator.catalogue import CATALOGUE
from simulator.operations.attention import ATTENTION
from simulator.problem import Problem
from simulator.trace import Event, Trace

__all__ = ["Cell", "Changes", "Grid", "grids", "roles_of"]

_ALONG = {"len_q": "queries", "len_kv": "keys"}
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


Range = tuple[int, int]
Rectangle = tuple[Range, Range]
Changes = list[list[tuple[int, Cell]]]
"""Per event, the cells (by row-major index) that change, with their new states. A launch starts with all NOT_YET."""


def grids(trace: Trace, problem: Problem) -> tuple[list[Grid | None], Changes]:
    """The grid of each launch (None if it does not touch S), and the changes at each event."""
    changes: Changes = [[] for _ in trace.events]
    roles = roles_of(trace, problem)
    found: list[Grid | None] = []
    start = 0
    for _, launch in groupby(trace.events, key=lambda event: event.launch):
        events = list(launch)
        touched = list(_touched(events, roles))
        grid = _grid(touched, trace.tile, problem)
        if grid is not None:
            for at, cell, state in _changes(events, touched, grid, problem):
                changes[start + at].append((cell, state))
        found.append(grid)
        start += len(events)
    return found, changes


def roles_of(trace: Trace, problem: Problem) -> dict[str, str]:
    """The role of each tensor: it lies along the "queries" or the "keys", or is as large as S ("scores")."""
    operations = {row.name: row.operation for row in CATALOGUE.values()}
    operation = operations.get(trace.algorithm, ATTENTION)
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


def _touched(events: list[Event], roles: dict[str, str]) -> Iterator[dict[Rectangle, Cell]]:
    """Per event, the rectangles of S whose operands it loads or reads."""
    block: object = None
    queries: Range | None = None
    keys: Range | None = None
    for event in events:
        if event.block != block:
            block, queries, keys = event.block, None, None
        touched: dict[Rectangle, Cell] = {}
        for transfer in event.transfers:
            role = roles.get(transfer.tensor)
            if role in ("queries", "scores"):
                queries = transfer.rows or queries
            if role == "keys":
                keys = transfer.rows or keys
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


def _grid(touched: list[dict[Rectangle, Cell]], tile: tuple[int, int], problem: Problem) -> Grid | None:
    rectangles = {rectangle for each in touched for rectangle in each}
    height, width = (_unit({rectangle[side] for rectangle in rectangles}, tile[side]) for side in (0, 1))
    if not height or not width:
        return None
    height *= -(-problem.len_q // (height * MOST_CELLS))
    width *= -(-problem.len_kv // (width * MOST_CELLS))
    return Grid(-(-problem.len_q // height), -(-problem.len_kv // width), height, width)


def _unit(ranges: set[Range], tile: int) -> int:
    """The side of a cell: the tile's if every range lies in the raster of tiles, otherwise the widest range's."""
    fits = all(first % tile == 0 and last - first <= tile for first, last in ranges)
    return tile if ranges and fits else max((last - first for first, last in ranges), default=0)


def _changes(
    events: list[Event], touched: list[dict[Rectangle, Cell]], grid: Grid, problem: Problem
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
    yielded += _never_touched(cells, grid, problem)
    yield from sorted(yielded, key=lambda change: change[0])


def _next_of_block(events: list[Event], cells: list[dict[int, Cell]], at: int) -> dict[int, Cell]:
    """The cells that the block touches next, after event `at`."""
    for later in range(at + 1, len(events)):
        if events[later].block != events[at].block:
            break
        if cells[later]:
            return cells[later]
    return {}


def _never_touched(cells: list[dict[int, Cell]], grid: Grid, problem: Problem) -> Iterator[tuple[int, int, Cell]]:
    """The cells that no block visits: SKIPPED from when their row is first touched, or MISSED once the row is left."""
    first: dict[int, int] = {}
    last: defaultdict[int, int] = defaultdict(lambda: len(cells) - 1)
    reached: set[int] = set()
    for at, here in enumerate(cells):
        for cell in here:
            first.setdefault(cell // grid.cols, at)
            last[cell // grid.cols] = min(at + 1, len(cells) - 1)
            reached.add(cell)
    for cell in range(grid.rows * grid.cols):
        if cell in reached:
            continue
        row, col = divmod(cell, grid.cols)
        end = min((row + 1) * grid.height, problem.len_q) - 1
        keys = problem.keys_of_rows(row * grid.height, end)
        visible = keys.start < min((col + 1) * grid.width, keys.stop) and keys.stop > col * grid.width
        yield (last[row], cell, Cell.MISSED) if visible else (first.get(row, len(cells) - 1), cell, Cell.SKIPPED)


def _cells(rectangles: dict[Rectangle, Cell], grid: Grid) -> dict[int, Cell]:
    found: dict[int, Cell] = {}
    for ((top, bottom), (left, right)), state in rectangles.items():
        for row in range(top // grid.height, -(-bottom // grid.height)):
            for col in range(left // grid.width, -(-right // grid.width)):
                found[row * grid.cols + col] = max(state, found.get(row * grid.cols + col, state))
    return found
