"""What lies beside S: the partial results of chunks of keys, and the pool of pages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from flashlab.player.grid import Range, Scores, moved, operation_of, roles_of
from flashlab.views import palette
from simulator.problem import Problem
from simulator.trace import Event, Trace

__all__ = ["Part", "Parts", "parts", "pool"]


class Part(IntEnum):
    """The state of a partial result, for the rows that a block works on."""

    NONE = 0
    WRITTEN = 1
    """It is written at this step."""
    THERE = 2
    READ = 3
    """It is read at this step."""


@dataclass(frozen=True)
class Parts:
    """The partial results of a trace: for each the keys that it is of, and its level in the tree (0: a block's own).

    `states` has one `Part` for each of them per event, and one for the output behind them.
    """

    boxes: list[tuple[Range, int]]
    states: list[tuple[Part, ...]]


def parts(trace: Trace, scores: Scores) -> Parts | None:
    """The partial results, or None for a trace without any: an algorithm that splits no keys, or keys of a single chunk."""
    names = {
        name
        for name, shape in trace.tensors.items()
        if shape.role == "workspace" and not shape.vector and palette.kind_of(name) == "o"
    }
    seen = _Seen(scores, roles_of(trace, scores.problem), names)
    states = [seen.event(event) for event in trace.events]
    if not seen.boxes:
        return None
    planes = range(max(seen.boxes) + 1)
    boxes = [seen.boxes.get(plane, ((0, 0), 0)) for plane in planes]
    return Parts(boxes, [tuple(state.get(plane, Part.NONE) for plane in (*planes, _OUT)) for state in states])


_OUT = -1
"""The plane that stands for the output."""


class _Seen:
    """What the events so far have written, and what the current block has moved."""

    def __init__(self, scores: Scores, roles: dict[str, str], names: set[str]) -> None:
        self._scores, self._roles, self._names = scores, roles, names
        self._written = defaultdict[int, list[Range]](list)
        self._block: object = None
        self._begin()
        self.boxes = dict[int, tuple[Range, int]]()

    def _begin(self) -> None:
        self._row: int | None = None
        self._keys: Range | None = None
        self._below = set[int]()

    def event(self, event: Event) -> dict[int, Part]:
        """The states of planes after an event."""
        block = event.launch, event.request, event.block
        if block != self._block:
            self._block = block
            self._begin()
        now = dict[int, Part]()
        for each in event.transfers:
            rows = moved(each.rows, self._scores.first_query(event.request))
            role = self._roles.get(each.tensor)
            if rows and role == "queries":
                self._row = rows[0]
            if role == "keys":
                self._keys = _both(self._keys, moved(each.rows, self._scores.first_key(each.tensor)))
            plane = _OUT if each.tensor == "out" else each.plane if each.tensor in self._names else None
            if plane is None or rows is None:
                continue
            if "hbm.read" in each.nbytes:
                now[plane] = Part.READ
                self._below.add(plane)
            if "hbm.write" in each.nbytes:
                now[plane] = Part.WRITTEN
                self._written[plane].append(rows)
                if plane != _OUT:
                    self._box(plane)
        row = self._row
        there = {} if row is None else {
            plane: Part.THERE for plane, each in self._written.items() if any(a <= row < b for a, b in each)
        }  # fmt: skip
        return there | now

    def _box(self, plane: int) -> None:
        below = [self.boxes[each] for each in self._below if each in self.boxes]
        keys, level = self._keys, 0
        for each, of in below:
            keys, level = _both(keys, each), max(level, of + 1)
        self.boxes[plane] = _both(self.boxes.get(plane, (None, 0))[0], keys) or (0, 0), level


def _both(a: Range | None, b: Range | None) -> Range | None:
    return (min(a[0], b[0]), max(a[1], b[1])) if a and b else a or b


def pool(trace: Trace) -> dict[str, Any] | None:
    """The pool of pages: how many there are, how many keys each has, the pages of each request, and which request was traced.

    `tensors` are those that lie in the pool. None where K and V don't lie in pages.
    """
    if not trace.pages:
        return None
    inputs = operation_of(trace).inputs
    return {
        "pages": trace.problem["pages"],
        "size": trace.problem["page_size"],
        "tables": trace.pages,
        "lengths": Problem(**trace.problem).seq_lens,
        "own": trace.head[0],
        "tensors": [operand.name for operand in inputs if "pages" in operand.axes],
    }
