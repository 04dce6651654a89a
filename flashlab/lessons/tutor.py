"""The tutor: it runs a learner's program in step with the solution, and names the first thing that differs.

Both run one head, block by block. What they load, the register tiles that they keep by name and what they store are
compared step by step. A name that the learner chose otherwise is no difference: its value stands under another name.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from flashlab.lessons import watch
from flashlab.lessons.catalogue import EXERCISES, solution
from flashlab.lessons.exercise import MARK, Case
from flashlab.lessons.reasons import CLOSE, CLOSER, Form, form_of, reasons, same, told_apart, worst
from simulator import Block, Device, Program, Trace
from simulator.dtypes import Array
from simulator.trace import Event, Recorder

WAYS = {"hbm.read": "reads {} from HBM", "sram.read": "reads {} from SRAM", "sram.write": "writes {} to SRAM"}
NOT_LOADED = "; yours does not"
Moved = tuple[Any, ...]
"""A tile of a tensor, or a way and a tensor."""
LOOPS = ("g", "i", "j", "c", "step")
"""The variables of loops that a step is told by."""
FAR_OFF = 60.0
"""So far from a row's maximum exponentials overflow, or vanish, in float32 or soon after."""
MOST_LATER = 60
"""How many steps on it is looked whether a reason holds again."""
_VALUE = re.compile(r" = -?\d[\d.e+-]*")


class Stored(NamedTuple):
    """A tile that was stored, or `added` by atomics: where, and its values `(rows, cols)`."""

    tensor: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    values: Array
    line: int
    added: bool = False

    @property
    def place(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        return self.tensor, self.rows, self.cols


class Steps(Recorder):
    """Records the steps of one head: what each stored, where the program's loops were, and what its block walks over.

    Of what it loads from pages, where each key lies: by tensor and key, page and row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[dict[tuple[str, int], tuple[int, int]]] = []
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
        """Note the values that the newest transfer, a store or an addition, has moved."""
        moved = self.events[-1].transfers[-1]
        (first, last), (start, stop) = moved.rows or (0, 0), moved.cols or (0, 0)
        inside = values[: last - first, : stop - start].copy()
        added = "hbm.atomic" in moved.nbytes
        self.stored[-1].append(Stored(tensor, (first, last), (start, stop), inside, moved.line, added))

    def gathered(self, tensor: str, first: int, rows: Array, page_size: int) -> None:
        """Note in which rows of a pool the keys from `first` on lie, which are read now."""
        self.places[-1] |= {(tensor, first + n): divmod(row, page_size) for n, row in enumerate(rows.tolist())}

    def _begin(self, name: str, frame: FrameType) -> None:
        super()._begin(name, frame)
        assert self._block is not None
        self.places.append({})
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
    program: Program, exercise: str, case: Case, head: tuple[int, int], *, values: bool = True
) -> tuple[Difference | None, Trace, Trace]:
    """The first difference between a program and the solution on one (batch, head), and the traces of both.

    Without `values` only what they move is compared.
    """
    mine, trace = _run(program, case, head)
    due, expected = _run(solution(exercise), case, head)
    sram = bool(EXERCISES[exercise].budget(case.problem, case.tile).sram)
    ways = list(WAYS)[: 3 if sram else 1]
    found = first_difference(mine, due, ways, values=values) or first_difference(mine, due, ways, CLOSER, values=values)
    for name, (first, text) in expected.sources.items():
        expected.sources[name] = first, _hidden(exercise, text)
    return found, trace, expected


def _run(program: Program, case: Case, head: tuple[int, int]) -> tuple[Steps, Trace]:
    """One head of a case, block by block; what raises ends it. All heads of a group where outputs are sums over them, and where
    they are rows of one tile. The program is told of the whole problem: it may count the blocks of all heads.
    """
    (b, h), p = head, case.problem
    together = case.heads_are_rows or any("kv_heads" in operand.axes for operand in program.operation.outputs)
    kv, group = h // p.queries_per_kv, p.queries_per_kv if together else 1
    first = h // group * group
    where = {"batch": slice(b, b + 1), "heads": slice(first, first + group), "kv_heads": slice(kv, kv + 1)}
    data = {name: program.operation.operand(name, p).cut(x, where) for name, x in case.arrays().items()}
    one, device, steps = p.replace(batch=1, heads=group, kv_heads=1), Device.named(case.device), Steps()
    config = program.configure(one, device, None if case.own_tile else case.tile)
    machine = watch.WatchedMachine(program.name, program.operation, one, config, device, data=data, recorder=steps)
    try:
        program(machine, *machine.inputs, p if case.heads_are_rows else one, config.tile)
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


def first_difference(
    mine: Steps, due: Steps, ways: Sequence[str] = ("hbm.read",), close: float = CLOSE, *, values: bool = True
) -> Difference | None:
    """Where the steps of two programs first differ, and how; None if nowhere. Bytes of these `ways` are compared.

    Another value of a variable is a difference only if a store that it feeds differs: the learner may compute in another
    form. What comes to the same so far is a form, but for a maximum that is `FAR_OFF`: the next exponential may be lost by it.
    A variable that a step should have changed and did not may be changed in a later one. What a program was at when it stopped
    has no values. Without `values` only what is moved counts: where the numbers are right.
    """
    before: dict[str, Array] = {}
    known: dict[str, Array] = {}
    found: dict[str, Difference] = {}
    maxima: dict[str, Difference] = {}
    moved, expected_moves = _moved(mine.events), _moved(due.events)
    at_its_end = len(mine.events) - 1 if mine.stopped else -1

    def first(otherwise: Difference | None, feeding: Container[str] | None = None) -> Difference | None:
        chosen = [x for name, x in (*found.items(), *maxima.items()) if feeding is None or name in feeding]
        return min(chosen, key=lambda x: x.number, default=otherwise)

    for n, (a, b) in enumerate(zip(mine.events, due.events, strict=False)):
        at = _place(b, due.loops[n])
        if n and b.launch != due.events[n - 1].launch:
            before = {}
        if a.block == b.block and (words := _blocks(mine.blocks[n], due.blocks[n], ways)):
            return Difference(n + 1, "launch", f"launch `{b.launch}`, row tile {b.block[0]}: {words}")
        if (a.step, a.block) != (b.step, b.block):
            words = f"{at}: the solution is here, and your program is at {_place(a, mine.loops[n])}"
            return first(Difference(n + 1, b.step, words))
        block = b.launch, b.block
        words = _loads(a, b, ways, moved[a.launch, a.block], expected_moves[block])
        if words and not (n == at_its_end and words.endswith(NOT_LOADED)):  # where it stopped it loads nothing more
            return first(Difference(n + 1, b.step, at + words))
        if n != at_its_end and (words := _gathers(mine.places[n], due.places[n])):
            return first(Difference(n + 1, b.step, at + words))
        if n == at_its_end:
            break
        for name in sorted(b.values if values else (), key=_assigned(b, due.sources)):
            expected, actual = b.values[name], a.values.get(name, known.get(name))
            form = _form(name, b, due.sources)
            near = (
                CLOSER if form and "max" in form.lines else close
            )  # an exponential takes what a maximum is off as it is
            if actual is None or same(actual, expected, near):
                continue
            if any(same(x, expected, close) for other, x in a.values.items() if other not in b.values):
                continue
            if name not in a.values and not (name in before and same(actual, before[name], close)):
                continue  # a name that the learner has used for something else
            if name not in found:
                found[name] = Difference(
                    n + 1, b.step, at + _said(name, actual, expected, _why(name, n, mine, due), close)
                )
            if _maximum_far_off(actual, expected, form):
                maxima.setdefault(name, found[name])
        fed: set[str] = set()
        for stored in due.stored[n]:
            feeding = _feeding(stored, b, due.sources)
            if words := _store(stored, mine.stored[n], due.stored[n], b, before, due.sources, close):
                found_elsewhere = any(same(x.values, stored.values, close) for x in mine.stored[n])
                return first(Difference(n + 1, b.step, at + words), () if found_elsewhere else feeding)
            fed |= feeding
        for name in fed:
            found.pop(name, None)  # its way of computing comes to the same
        if words := _stored_too_often(mine.stored[n], due.stored[n]):
            return first(Difference(n + 1, b.step, at + words))
        before |= b.values
        known |= a.values
    n = min(len(mine.events), len(due.events))
    if mine.stopped and mine.events:
        last = len(mine.events) - 1
        words = f"{_place(mine.events[last], mine.loops[last])}: your program stops here"
        return first(Difference(last + 1, mine.events[last].step, words))
    if n < len(due.events):
        words = f"{_place(due.events[n], due.loops[n])}: the solution goes on, and your program has ended"
        return first(Difference(n, due.events[n].step, words))
    if n < len(mine.events):
        words = f"{_place(mine.events[n], mine.loops[n])}: your program goes on, and the solution has ended"
        return first(Difference(n + 1, mine.events[n].step, words))
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
        a, b = (f"{x.warps} warps, which read an operand that they share {_times(x.readers)}" for x in (mine, due))
        return f"yours has {a}, the solution {b}"
    return ""


def _tiles(walk: Sequence[int]) -> str:
    return f"the tiles {walk[0]} to {walk[-1]}" if len(walk) > 1 else f"tile {walk[0]} alone" if walk else "no tile"


def _moved(events: Sequence[Event]) -> dict[tuple[str, tuple[int, int]], Counter[Moved]]:
    """How often each block loads each tile, and how many bytes of each tensor it moves in each way."""
    found: defaultdict[tuple[str, tuple[int, int]], Counter[Moved]] = defaultdict(Counter)
    for event in events:
        block = found[event.launch, event.block]
        block.update(_tiles_loaded(event))
        for transfer in event.transfers:
            for way, nbytes in transfer.nbytes.items():
                block[way, transfer.tensor] += nbytes
    return found


def _tiles_loaded(event: Event) -> Counter[Moved]:
    return Counter((t.tensor, t.rows, t.cols or (0, 0)) for t in event.transfers if t.rows and "hbm.read" in t.nbytes)


def _loads(mine: Event, due: Event, ways: Sequence[str], moved: Counter[Moved], expected: Counter[Moved]) -> str:
    """What was loaded from elsewhere, too often or not at all, or moved in another way.

    What the block moves in another step is no difference: `moved` is what the learner's block moves in all, and `expected` what
    the solution's does.
    """
    a, b = _tiles_loaded(mine), _tiles_loaded(due)
    more = [tile for tile in a - b if moved[tile] > expected[tile]]
    for tensor, rows, cols in b - a:
        if moved[tensor, rows, cols] < expected[tensor, rows, cols]:
            others = [f"{_span(r, c)}" for t, r, c in a - b if t == tensor]
            yours = f"; yours loads {others[0]}" if others else NOT_LOADED
            return f": the solution loads {_span(rows, cols)} of {tensor}{yours}"
    for tile in more:
        tensor, rows, cols = tile
        often = f", {_times(moved[tile])} in all, and the solution {_times(expected[tile])}"
        never = ", and the solution does not"
        return f": yours loads {_span(rows, cols)} of {tensor}" + (often if expected[tile] else never)
    for way in ways:
        for tensor in dict.fromkeys(t.tensor for t in (*due.transfers, *mine.transfers)):
            x, y = (sum(t.nbytes.get(way, 0) for t in event.transfers if t.tensor == tensor) for event in (mine, due))
            if x != y and moved[way, tensor] != expected[way, tensor]:
                return f": yours {WAYS[way].format(f'{x:,} bytes of {tensor}')}, the solution {y:,}"
    return ""


def _gathers(mine: Mapping[tuple[str, int], tuple[int, int]], due: Mapping[tuple[str, int], tuple[int, int]]) -> str:
    """The first key that is taken from elsewhere in the pool, or not through the block table."""
    for (tensor, key), (page, row) in due.items():
        if (yours := mine.get((tensor, key))) != (page, row):
            of_yours = f"from row {yours[1]} of page {yours[0]}" if yours else f"as if {tensor} had no pages"
            return (
                f": the solution takes key {key} of {tensor} from row {row} of page {page}; yours takes it {of_yours}"
            )
    return ""


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


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


def _store(
    due: Stored, mine: Sequence[Stored], others: Sequence[Stored], event: Event, before: Mapping[str, Array],
    sources: Mapping[str, tuple[int, str]], close: float,
) -> str:  # fmt: skip
    """What was stored elsewhere than the solution's, not at all, or with other values."""
    there = [x for x in mine if x.place == due.place]
    where = f"{_span(due.rows, due.cols)} of {due.tensor}"
    if not there:
        elsewhere = [_span(x.rows, x.cols) for x in mine if x.tensor == due.tensor and x.place not in
                     {y.place for y in others}]  # fmt: skip
        into = [x.tensor for x in mine if (x.rows, x.cols) == (due.rows, due.cols) and x.place not in
                {y.place for y in others}]  # fmt: skip
        yours = f"stores {elsewhere[0]}" if elsewhere else f"stores them to {into[0]}" if into else "does not"
        return f": the solution stores {where}; yours {yours}"
    if due.added != there[0].added:
        ours, yours = ("adds to", "stores there") if due.added else ("stores", "adds to what is there")
        return f": the solution {ours} {where}, and yours {yours}"
    if any(same(x.values, due.values, close) for x in there):
        return ""
    scope = {name: x[: due.values.shape[0]] for name, x in {**before, **event.values}.items()}
    name, mine_ = f"what is stored to {due.tensor}", there[0].values
    if mine_.shape != due.values.shape:
        return _said(name, mine_, due.values, "", close)
    first, text = sources.get(event.source, (1, ""))
    lines = next((range(a, b + 1) for a, b, _ in _flows(text)[1] if a <= due.line - first + 1 <= b), range(0))
    form = Form("\n".join(text.splitlines()[n - 1] for n in lines), text)
    row, _ = worst(mine_, due.values, close)
    return _said(
        name, mine_, due.values, next(reasons(name, mine_, due.values, scope, None, row, form=form), ""), close
    )


def _stored_too_often(mine: Sequence[Stored], due: Sequence[Stored]) -> str:
    for tensor, rows, cols in Counter(x.place for x in mine) - Counter(x.place for x in due):
        return f": yours stores {_span(rows, cols)} of {tensor} once more than the solution"
    return ""


def _feeding(stored: Stored, event: Event, sources: Mapping[str, tuple[int, str]]) -> set[str]:
    """The variables that a store of the solution depends on, from its text."""
    first, text = sources.get(event.source, (1, ""))
    flows, stores = _flows(text)
    names = {x for start, end, given in stores if start <= stored.line - first + 1 <= end for x in given}
    reached: set[str] = set()
    while names:
        reached |= names
        names = {x for name in names for x in flows.get(name, ())} - reached
    return reached


@cache
def _flows(text: str) -> tuple[dict[str, set[str]], list[tuple[int, int, set[str]]]]:
    """What each variable is assigned from, and the variables in what each `block.store` or `atomic_add` takes, with its lines."""

    def names(node: ast.AST) -> set[str]:
        return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}

    flows: defaultdict[str, set[str]] = defaultdict(set)
    stores: list[tuple[int, int, set[str]]] = []
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for to, of in pairs:
                for name in names(to):
                    flows[name] |= names(of)
        elif not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        elif node.func.attr == "put":
            for name in names(node.args[0]):
                flows[name] |= names(node.args[1])
        elif node.func.attr in ("store", "atomic_add"):
            stores.append((node.lineno, node.end_lineno or node.lineno, names(node.args[1])))
    return dict(flows), stores


def _maximum_far_off(actual: Array, expected: Array, form: Form | None) -> bool:
    if form is None or "max" not in form.lines or actual.shape != expected.shape:
        return False
    with np.errstate(invalid="ignore"):
        return bool((np.abs(actual - expected) > FAR_OFF).any())


def _form(name: str, event: Event, sources: Mapping[str, tuple[int, str]]) -> Form | None:
    """How the solution computes a variable in a step."""
    first, text = sources.get(event.source, (1, ""))
    step = takewhile(lambda line: "block.step(" not in line, text.splitlines()[event.line - first + 1 :])
    return form_of(name, "\n".join(step), text)


def _state(events: Sequence[Event]) -> dict[str, Array]:
    """What the variables hold after some steps."""
    return {name: x for event in events for name, x in event.values.items()}


def _explanations(name: str, n: int, mine: Steps, due: Steps) -> list[str]:
    """What may explain that a variable has another value in step n."""
    event, known = due.events[n], _state(mine.events[: n + 1])
    before = _state([x for x in due.events[:n] if x.launch == event.launch])  # those of another launch explain nothing
    expected, actual = event.values[name], known.get(name)
    if actual is None or actual.shape != expected.shape or np.array_equal(actual, expected):
        return []
    scope = {**before, **{x: y for x, y in event.values.items() if x != name}}
    row, _ = worst(actual, expected)
    form = _form(name, event, due.sources)
    adds_up = name in before or (
        form is not None and any(name in line.split("=", 1)[1] for line in form.lines.splitlines())
    )
    rest = "the tiles before are forgotten" if adds_up else ""
    return list(reasons(name, actual, expected, scope, before.get(name), row, rest=rest, form=form, old=before))


def _why(name: str, n: int, mine: Steps, due: Steps) -> str:
    """The likeliest reason. Of several those are left that hold again, where the step comes to differ once more."""
    found = _explanations(name, n, mine, due)
    for m in range(n + 1, min(len(mine.events), len(due.events), n + MOST_LATER)):
        if len(found) < 2:
            break
        a, b = mine.events[m], due.events[m]
        if a.step == b.step == due.events[n].step and name in a.values and name in b.values:
            again = [_VALUE.sub("", x) for x in _explanations(name, m, mine, due)]
            found = [x for x in found if _VALUE.sub("", x) in again] or found
    return next(iter(found), "")


def _said(name: str, actual: Array, expected: Array, why: str, close: float) -> str:
    """The first wrong row, and what was done otherwise if a small thing explains it."""
    if actual.shape != expected.shape:
        return f": {name} is {actual.shape}, and should be {expected.shape}"
    row, col = worst(actual, expected, close)
    element = f"in column {col} it" if expected.shape[1] > 1 else "it"
    values = "is {} and should be {}".format(*told_apart(actual[row, col], expected[row, col]))
    if why:
        return f", row {row}: {why} ({element} {values})"
    return f", row {row}: {name} {values}" + (f" (in column {col})" if expected.shape[1] > 1 else "")
