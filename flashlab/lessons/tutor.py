"""The tutor: it runs a learner's program in step with the solution, and names the first thing that differs.

Both run one head, block by block. What they load, the register tiles that they keep by name and what they store are
compared step by step. A name that the learner chose otherwise is no difference: its value stands under another name.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NamedTuple

from flashlab.lessons import watch
from flashlab.lessons.catalogue import EXERCISES, solution
from flashlab.lessons.exercise import MARK, Case
from flashlab.lessons.reasons import reasons, same, worst
from simulator import Block, Device, Program, Trace
from simulator.dtypes import Array
from simulator.trace import Event, Recorder

WAYS = {"hbm.read": "reads {} from HBM", "sram.read": "reads {} from SRAM", "sram.write": "writes {} to SRAM"}
LOOPS = ("i", "j", "c", "step")
"""The variables of loops that a step is told by."""


class Stored(NamedTuple):
    """A tile that was stored: where, and its values `(rows, cols)`."""

    tensor: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    values: Array

    @property
    def place(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        return self.tensor, self.rows, self.cols


class Steps(Recorder):
    """Records the steps of one head: what each stored, where the program's loops were, and what its block walks over."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[list[Stored]] = []
        self.loops: list[dict[str, int]] = []
        self.blocks: list[Block] = []
        self.stopped = False
        """Has the program raised an exception, in its last step?"""

    def bytes(self, tensor: str, nbytes: dict[str, int], frame: FrameType) -> None:
        while frame.f_code.co_filename == watch.__file__ and frame.f_back:
            frame = frame.f_back
        super().bytes(tensor, nbytes, frame)

    def store(self, tensor: str, values: Array) -> None:
        """Note the values that the newest transfer, a store, has moved."""
        moved = self.events[-1].transfers[-1]
        (first, last), (start, stop) = moved.rows or (0, 0), moved.cols or (0, 0)
        inside = values[: last - first, : stop - start].copy()
        self.stored[-1].append(Stored(tensor, (first, last), (start, stop), inside))

    def _begin(self, name: str, frame: FrameType) -> None:
        super()._begin(name, frame)
        assert self._block is not None
        self.stored.append([])
        self.blocks.append(self._block)
        self.loops.append({x: n for x in LOOPS if isinstance(n := frame.f_locals.get(x), int)})


@dataclass(frozen=True)
class Difference:
    """The first difference: the number of the learner's step, from 1, its name, and what differs in words."""

    number: int
    step: str
    words: str


def compare(
    program: Program, exercise: str, case: Case, head: tuple[int, int]
) -> tuple[Difference | None, Trace, Trace]:
    """The first difference between a program and the solution on one (batch, head), and the traces of both."""
    mine, trace = _run(program, case, head)
    due, expected = _run(solution(exercise), case, head)
    sram = bool(EXERCISES[exercise].budget(case.problem, case.tile).sram)
    found = first_difference(mine, due, list(WAYS)[: 3 if sram else 1])
    for name, (first, text) in expected.sources.items():
        expected.sources[name] = first, _hidden(exercise, text)
    return found, trace, expected


def _run(program: Program, case: Case, head: tuple[int, int]) -> tuple[Steps, Trace]:
    """One head of a case, block by block; what raises ends it."""
    b, h = head
    kv = h // case.problem.queries_per_kv
    q, k, v = case.inputs()
    data = {"q": q[b : b + 1, h : h + 1], "k": k[b : b + 1, kv : kv + 1], "v": v[b : b + 1, kv : kv + 1]}
    one, device, steps = case.problem.replace(batch=1, heads=1, kv_heads=None), Device.named(case.device), Steps()
    config = program.configure(one, device, None if case.own_tile else case.tile)
    machine = watch.WatchedMachine(program.name, program.operation, one, config, device, data=data, recorder=steps)
    try:
        program(machine, *machine.inputs, one, config.tile)
    except Exception:  # the verdict tells it; the steps up to here are what there is to see
        steps.end()
        steps.stopped = True
    tile = config.tile.rows, config.tile.cols
    trace = Trace(program.name, head, asdict(case.problem), tile, device.name, device.sram_per_block, steps.sources,
                  steps.events, steps.tensors, steps.buffers)  # fmt: skip
    return steps, trace


def _hidden(exercise: str, text: str) -> str:
    """The solution's text without what the learner is to write: the player shows values, and gives nothing away."""
    marked = {
        line.replace(MARK, "").rstrip() for line in EXERCISES[exercise].marked.splitlines() if line.endswith(MARK)
    }
    blank = (line[: len(line) - len(line.lstrip())] + "# …" if line in marked else line for line in text.splitlines())
    return "\n".join(blank) + "\n"


# -- in step --------------------------------------------------------------------------------------------------------


def first_difference(mine: Steps, due: Steps, ways: Sequence[str] = ("hbm.read",)) -> Difference | None:
    """Where the steps of two programs first differ, and how; None if nowhere. Bytes of these `ways` are compared.

    A variable that a step should have changed and did not may be changed in a later one. So it counts as a difference
    once it has another value than the solution's where the program does change it, or if it never does.
    """
    before: dict[str, Array] = {}
    known: dict[str, Array] = {}
    late: dict[str, Difference] = {}
    for n, (a, b) in enumerate(zip(mine.events, due.events, strict=False)):
        at = _place(b, due.loops[n])
        if a.block == b.block and (words := _blocks(mine.blocks[n], due.blocks[n], ways)):
            return Difference(n + 1, "launch", f"launch `{b.launch}`, row tile {b.block[0]}: {words}")
        if (a.step, a.block) != (b.step, b.block):
            words = f"{at}: the solution is here, and your program is at {_place(a, mine.loops[n])}"
            return next(iter(late.values()), Difference(n + 1, b.step, words))
        if words := _loads(a, b, ways):
            return Difference(n + 1, b.step, at + words)
        for name in sorted(b.values, key=_assigned(b, due.sources)):
            expected, actual = b.values[name], a.values.get(name, known.get(name))
            if actual is None or actual.shape != expected.shape:
                continue
            if same(actual, expected):
                late.pop(name, None)
                continue
            if any(same(x, expected) for other, x in a.values.items() if other not in b.values):
                continue
            scope = {**before, **{x: y for x, y in b.values.items() if x != name}}
            words = at + _said(name, actual, expected, scope, before.get(name))
            if name in a.values:
                return late.get(name, Difference(n + 1, b.step, words))
            late.setdefault(name, Difference(n + 1, b.step, words))
        if words := _stores(mine.stored[n], due.stored[n], b, before):
            return next(iter(late.values()), Difference(n + 1, b.step, at + words))
        before |= b.values
        known |= a.values
    if late:
        return next(iter(late.values()))
    n = min(len(mine.events), len(due.events))
    if mine.stopped and mine.events:
        last = len(mine.events) - 1
        words = f"{_place(mine.events[last], mine.loops[last])}: your program stops here"
        return Difference(last + 1, mine.events[last].step, words)
    if n < len(due.events):
        words = f"{_place(due.events[n], due.loops[n])}: the solution goes on, and your program has ended"
        return Difference(n, due.events[n].step, words)
    if n < len(mine.events):
        words = f"{_place(mine.events[n], mine.loops[n])}: your program goes on, and the solution has ended"
        return Difference(n + 1, mine.events[n].step, words)
    return None


def _place(event: Event, loops: Mapping[str, int]) -> str:
    """A step in words: its name, the block's tile, and the loops that it is in."""
    where = [f"row tile {event.block[0]}", *(f"{name} = {n}" for name, n in loops.items())]
    return ", ".join([f"step `{event.step}`" if event.step else "before the first step", *where])


def _blocks(mine: Block, due: Block, ways: Sequence[str]) -> str:
    """What differs in the launch: what a block walks over and, if SRAM is compared, how many share an operand."""
    a, b = list(mine.walk), list(due.walk)
    if a != b:
        return f"yours walks over {_tiles(a)}, the solution over {_tiles(b)}"
    if "sram.read" in ways and (mine.warps, mine.readers) != (due.warps, due.readers):
        a, b = (f"{x.warps} warps, which read an operand that they share {x.readers} times" for x in (mine, due))
        return f"yours has {a}, the solution {b}"
    return ""


def _tiles(walk: Sequence[int]) -> str:
    return f"the tiles {walk[0]} to {walk[-1]}" if len(walk) > 1 else f"tile {walk[0]} alone" if walk else "no tile"


def _loads(mine: Event, due: Event, ways: Sequence[str]) -> str:
    """What was loaded from elsewhere, too often or not at all, or moved in another way."""
    a, b = (
        Counter((t.tensor, t.rows or (0, 0), t.cols or (0, 0)) for t in event.transfers if "hbm.read" in t.nbytes)
        for event in (mine, due)
    )
    for tensor, rows, cols in b - a:
        others = [f"{_span(r, c)}" for t, r, c in a - b if t == tensor]
        return f": the solution loads {_span(rows, cols)} of {tensor}; yours " + (
            f"loads {others[0]}" if others else "does not"
        )
    for tensor, rows, cols in a - b:
        again = " again" if (tensor, rows, cols) in b else ""
        return f": yours loads {_span(rows, cols)} of {tensor}{again}, and the solution does not"
    for way in ways:
        for tensor in dict.fromkeys(t.tensor for t in (*due.transfers, *mine.transfers)):
            x, y = (sum(t.nbytes.get(way, 0) for t in event.transfers if t.tensor == tensor) for event in (mine, due))
            if x != y:
                return f": yours {WAYS[way].format(f'{x:,} bytes of {tensor}')}, the solution {y:,}"
    return ""


def _span(rows: tuple[int, int], cols: tuple[int, int]) -> str:
    columns = "" if cols == (0, 1) else f" and columns {cols[0]} to {cols[1] - 1}"
    return f"rows {rows[0]} to {rows[1] - 1}{columns}"


def _assigned(event: Event, sources: Mapping[str, tuple[int, str]]) -> Callable[[str], int]:
    """A key that sorts names by where a step assigns them."""
    first, text = sources.get(event.source, (1, ""))
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and first + node.lineno - 1 >= event.line:
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    return lambda name: lines.get(name, len(text))


def _stores(mine: Sequence[Stored], due: Sequence[Stored], event: Event, before: Mapping[str, Array]) -> str:
    """What was stored elsewhere, not at all, or with other values."""
    for expected in due:
        there = [x for x in mine if x.place == expected.place]
        where = f"{_span(expected.rows, expected.cols)} of {expected.tensor}"
        if not there:
            others = [_span(x.rows, x.cols) for x in mine if x.tensor == expected.tensor and x.place not in
                      {y.place for y in due}]  # fmt: skip
            return f": the solution stores {where}; yours " + (f"stores {others[0]}" if others else "does not")
        if not any(same(x.values, expected.values) for x in there):
            scope = {name: x[: expected.values.shape[0]] for name, x in {**before, **event.values}.items()}
            return _said(f"what is stored to {expected.tensor}", there[0].values, expected.values, scope, None)
    places = Counter(x.place for x in mine) - Counter(x.place for x in due)
    for tensor, rows, cols in places:
        return f": yours stores {_span(rows, cols)} of {tensor} once more than the solution"
    return ""


def _said(name: str, actual: Array, expected: Array, scope: Mapping[str, Array], before: Array | None) -> str:
    """The first wrong row, and what was done otherwise if a small thing explains it."""
    if actual.shape != expected.shape:
        return f": {name} is {actual.shape}, and should be {expected.shape}"
    row, col = worst(actual, expected)
    element = f"in column {col} it" if expected.shape[1] > 1 else "it"
    values = f"is {actual[row, col]:.5g} and should be {expected[row, col]:.5g}"
    why = next(reasons(name, actual, expected, scope, before, row), "")
    if why:
        return f", row {row}: {why} ({element} {values})"
    return f", row {row}: {name} {values}" + (f" (in column {col})" if expected.shape[1] > 1 else "")
