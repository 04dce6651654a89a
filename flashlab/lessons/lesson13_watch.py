"""A history of a learner's manager, to be watched: call by call in the player of the pages, and told in lines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from flashlab.lessons.histories import Failure, Model, Operation, Pool, World, replay
from flashlab.serve.costs import Model as Costed
from flashlab.serve.day import FREE, Bound, Change, Day, Served, Step
from flashlab.serve.page import page

BRANCHES = (
    Operation("allocate_slots", "a", n=10),
    Operation("fork", "a", "b"),
    Operation("fork", "a", "c"),
    Operation("allocate_slots", "b", n=1),
    Operation("allocate_slots", "a", n=3),
    Operation("allocate_slots", "c", n=1),
    Operation("free", "a"),
    Operation("allocate_slots", "b", n=5),
)
"""A prompt of ten tokens, three answers to it, and their tokens by turns."""
POOL = Pool(8, 4)
_HEIGHT = 620


class Watched(NamedTuple):
    """A history: a page of HTML, and a line for each call."""

    html: str
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def frame(self) -> str:
        """What a notebook shows: the page in an iframe that may only run its script."""
        return (
            f'<iframe title="pages, call by call" sandbox="allow-scripts" width="100%" height="{_HEIGHT}" '
            f'style="border: 0; width: 100%; height: {_HEIGHT}px" srcdoc="{escape(self.html)}"></iframe>'
        )

    def _repr_html_(self) -> str:
        return self.frame() if self.html else f"<pre>{escape(repr(self))}</pre>"


def watch(manager: Callable[..., Any], history: Sequence[Operation] = BRANCHES) -> Any:
    """A manager of 13.3 with a history: the player of the pages, or lines where a page is being made or the manager is wrong."""
    found = replay(manager, POOL, history, copying=True)
    if isinstance(found, Failure):
        return Watched("", tuple(found.told))
    world, steps, said = World(manager(*POOL), Model(POOL, copying=True)), list[Step](), list[str]()
    names = list(dict.fromkeys(name for operation in history for name in operation[1:3] if name))
    before: dict[int, Change] = {}
    for operation in history:
        copies = world.copied
        answer = world.do(operation)
        step = _step(world, operation, names, before, len(steps))
        steps.append(step)
        copied = " A block is copied first." if world.copied > copies else ""
        said.append(f"{operation} → {answer}.{copied}")
    lines = [
        f"{n}  {text}  {step.blocks} pages in use, {step.tables - step.blocks} saved by sharing"
        for n, (text, step) in enumerate(zip(said, steps, strict=True), 1)
    ]
    if os.environ.get("FLASHLAB_STATIC"):
        print("[in Jupyter there is a player here: which request owns which page, call by call]")
        print("\n".join(lines))
        return None
    served = tuple(Served(name, _first(history, name), 0, 0, 0.0, 0.0, 0, 0, 0) for name in names)
    day = Day(
        "your manager", "", "", Costed(), POOL.blocks + 1, POOL.size, "", "", Bound(0, 0, 0, 0.0), served, tuple(steps)
    )
    return Watched(page(day, said), tuple(lines))


def _first(history: Sequence[Operation], name: str) -> float:
    """The number of the call in which a request appears."""
    return float(next(n for n, operation in enumerate(history) if name in operation[1:3]))


def _step(world: World, operation: Operation, names: list[str], before: dict[int, Change], n: int) -> Step:
    """What there is after a call. The page's block 0 is nobody's, so blocks count from 1 there."""
    tables, size = world.manager.tables, world.model.pool.size
    times = Counter(block for table in tables.values() for block in table)
    now = {
        block + 1: Change(
            block + 1, min(names.index(name) for name, table in tables.items() if block in table), times[block]
        )
        for block in times
    }
    changes = [now.get(block, Change(block, FREE, 0)) for block in range(1, world.model.pool.blocks + 1)]
    changes = tuple(x for x in changes if before.get(x.block, Change(x.block, FREE, 0)) != x)
    before.update({x.block: x for x in changes})
    parts = [(names.index(x), operation.n if x == operation.request else 0, len(table)) for x, table in tables.items()]
    rows = {
        (table[i // size], i % size) for name, table in tables.items() for i in range(len(world.model.tokens[name]))
    }
    used = len(times)
    return Step(
        float(n), 0.0, len(parts), operation.n, 0, 0, 0, 0, 0, used, sum(times.values()), used * size - len(rows), changes,
        tuple(parts),
    )  # fmt: skip
