"""The tutor for kernels: the learner's and the solution run on the same launch, and the first thing that differs is named.

Both tell what the threads of one block hold (`kernel_telling`). Their variables, their arrays in shared memory and what they
store are compared step by step; of a kernel without steps, from barrier to barrier. A name that the learner chose otherwise
is no difference.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashlab.lessons.kernel_exercise import KernelExercise, Launch
from flashlab.lessons.kernel_record import BLOCK, Access, Moment, Record, lines_of_step
from flashlab.lessons.kernel_told import Told, point, told
from flashlab.lessons.reasons import form_of, reasons, same, told_apart, worst
from simulator.dtypes import Array

MOST_BLOCKS = 64
"""How many blocks are looked at, one after the other."""
REST = "what came before, or what other threads have, is missing"
UNSET = 1e37
"""The emulator fills variables that nobody set with larger numbers, or with NaN."""


@dataclass(frozen=True)
class Difference:
    """The first difference: the learner's line (0: none), the step, and what differs in words."""

    line: int
    step: str
    words: str


def compare(
    path: Path, exercise: KernelExercise, launch: Launch, moved: tuple[str, str] | None, seconds: float, *,
    rounds: bool = False,
) -> Difference | None:  # fmt: skip
    """The first difference between a file and the solution on a launch, or None.

    With `moved`, an array and a way ("read" or "written"), its bytes are compared, else numbers. With `rounds`, only how often
    they come to each step.
    """
    mine, due = path.read_text(encoding="utf-8"), exercise.solution
    steps = all("// step:" in text for text in (mine, due))
    for block in range(min(int(np.prod(launch.grid)), MOST_BLOCKS)):
        ours, theirs = (told(text, path.parent, exercise, launch, block, steps, seconds) for text in (mine, due))
        if rounds:
            found = once_more(ours, theirs) if steps else None
        else:
            found = first_moved(ours, theirs, *moved) if moved else first_difference(ours, theirs, launch)
        if found:
            where = f"block {point(block, launch.grid)}"
            return _with_its_place(found, path.name, ours, where, ours.record.capped or theirs.record.capped)
    return None


def _with_its_place(found: Difference, file: str, ours: Told, block: str, capped: bool) -> Difference:
    line = f"{file}:{found.line}, " if found.line else ""
    code = ours.source[found.line - 1].split("//")[0].strip() if found.line else ""
    missing = "; not all that the block did could be kept" if capped else ""
    words = f"{line}{found.words.replace(_WHERE, block)}{missing}"
    return Difference(found.line, found.step, f"{words}  |  {code}" if code else words)


_WHERE = "this block"
"""Stands for the block's number, which is known last."""


# -- in step --------------------------------------------------------------------------------------------------------


class _Item(NamedTuple):
    """What a moment leaves in a variable: rows are threads, or those of an array in shared memory."""

    actual: Array
    expected: Array
    threads: list[int]
    extents: tuple[int, ...]


def first_difference(mine: Told, due: Told, launch: Launch) -> Difference | None:
    """Where two kernels first differ, and how.

    A variable that a step should have changed and did not may be changed in a later one. So it counts as a difference once it
    has another value where the learner does change it, or if it never does. What is late in shared memory counts as soon as
    anything else differs, for that may come of it. A variable of another name is recognised by the value that it once has.
    """
    known: defaultdict[str, dict[int, Array]] = defaultdict(dict)
    before: dict[str, dict[int, Array]] = {}
    late: dict[str, Difference] = {}
    stored, wanted = _stores(mine.record), _stores(due.record)
    ours, theirs = ({name for of in told.record.values.values() for name in of} for told in (mine, due))
    names: dict[str, str] = {}
    own_page = _on_an_empty_page(mine, ours)
    own_way = own_page and len(mine.record.moments) != len(due.record.moments)
    for moment in due.record.moments:
        if moment not in mine.record.moments and not own_way:
            words = f"{_place(moment, due.record)}, {_WHERE}: the solution comes here once more, and yours does not"
            return next(iter(late.values()), Difference(_loop_line(mine, due, moment), moment.step, words))
        now, expected = mine.record.values.get(moment, {}), due.record.values.get(moment, {})
        for name, values in now.items():
            known[name].update(values)
        compared: list[str] = [] if own_way else list(expected)
        for name in sorted(compared, key=lambda x: due.line(moment, x) or due.record.lines[x]):
            own = names[name] if name in names else _named(name, now, expected, ours, theirs)
            names |= {name: own} if own else {}
            if own_page and any(len(now.get(own, {}).get(t, ())) != len(x) for t, x in expected[name].items()):
                continue
            item = _item(known[own], expected[name]) if own else None
            if item is None:
                continue
            if _equal(item):
                late.pop(name, None)
                continue
            others = (x for x in now if x not in expected)
            if any(other and _equal(other) for other in (_item(now[x], expected[name]) for x in others)):
                continue
            scope = _scope(item, name, before, {**_loads(due.record, moment), **expected}, launch)
            found = None if _whole(item.expected) else _loaded(mine, due, moment)
            found = found or _differs(mine, due, moment, own, name, item, scope, before.get(name))
            if own in now:
                return next((late[x] for x in late if BLOCK in known[names[x]]), late.get(name, found))
            late.setdefault(name, found)
        for name, values in expected.items():
            before[name] = {**before.get(name, {}), **values}
        if found := _outputs(mine, due, moment, stored, wanted, before, launch):
            return next(iter(late.values()), found)
    if late:
        return next(iter(late.values()))
    return None if own_way else once_more(mine, due)


def once_more(mine: Told, due: Told) -> Difference | None:
    """The first moment that the solution has no more."""
    for moment in mine.record.moments:
        if moment not in due.record.moments:
            words = f"{_place(moment, mine.record)}, {_WHERE}: yours comes here once more, and the solution does not"
            return Difference(_loop_line(mine, mine, moment), moment.step, words)
    return None


def _on_an_empty_page(mine: Told, ours: set[str]) -> bool:
    """Is the kernel the learner's own in all, without steps? Then names that are the solution's may mean other things."""
    given = {word for line in mine.given for word in re.findall(r"\w+", line.split("//")[0])}
    return not given & ours and not any(moment.step for moment in mine.record.moments)


def _named(
    name: str, now: Mapping[str, Mapping[int, Array]], expected: Mapping[str, Mapping[int, Array]], ours: set[str],
    theirs: set[str],
) -> str:  # fmt: skip
    """The learner's name for a variable: the same, or that of the only one of their own with its value; empty if there is none."""
    if name in ours:
        return name
    items = ((x, _item(now[x], expected[name])) for x in now if x not in theirs)
    found = [x for x, item in items if item and _equal(item)]
    return found[0] if len(found) == 1 else ""


def _place(moment: Moment, record: Record) -> str:
    """A moment in words."""
    loops = [f"{name} = {n}" for name, n in record.loops.get(moment, {}).items()]
    barriers = f"after barrier {moment.turn}" if moment.turn else "before the first barrier"
    step = f"step `{moment.step}`" if moment.step else barriers if len(record.moments) > 1 else "in the kernel"
    return ", ".join([step, *loops])


def _loop_line(mine: Told, there: Told, moment: Moment) -> int:
    """The line of the learner's loop that goes through a moment."""
    names = [name for name in there.record.loops.get(moment, {}) if name in mine.record.lines]
    return mine.record.lines[names[-1]] if names else 0


def _unset(x: Array) -> Array:
    return np.isnan(x) | ((np.abs(x) > UNSET) & np.isfinite(x)) | np.isin(x, (-0x01010102, 0xFEFEFEFE))


def _item(actual: Mapping[int, Array], expected: Mapping[int, Array]) -> _Item | None:
    """The values of the threads that both have, without those that the solution leaves unset; None if there are none."""

    def fits(x: Array, y: Array) -> bool:
        return x.ndim == y.ndim if BLOCK in expected else x.shape[1:] == y.shape[1:]  # a tile may be padded

    threads = [t for t in sorted(expected) if t in actual and fits(actual[t], expected[t])]
    if not threads:
        return None
    # as many values as the solution's, one after the other, or else the last
    all_ = all(len(actual[t]) == len(expected[t]) == len(expected[threads[0]]) for t in threads)
    e, a = ([x[t] if all_ else x[t][-1:] for t in threads] for x in (expected, actual))
    extents = tuple(int(n) for n in np.min([x.shape for x in (*e, *a)], axis=0))
    inside = tuple(slice(n) for n in extents)
    e, a = (np.stack([x[inside].astype(np.float64) for x in each]) for each in (e, a))
    if BLOCK in expected:
        e, a, extents = e[0, -1], a[0, -1], extents[1:]
    e, a = (x.reshape(len(x), -1) for x in (e, a))
    skip = _unset(e)
    if skip.all():
        return None
    return _Item(np.where(skip, 0, a), np.where(skip, 0, e), threads, extents)


def _whole(x: Array) -> bool:
    """Whole numbers count or are places."""
    finite = x[np.isfinite(x)]
    return bool(finite.size and (finite == np.round(finite)).all())


def _equal(item: _Item) -> bool:
    """Are the values those that they should be? Whole numbers must be equal. In a tile they may lie in other places."""
    a, e = item.actual, item.expected
    equal = np.array_equal if _whole(e) and np.isfinite(a).all() else same
    return (BLOCK in item.threads and equal(np.sort(a, None), np.sort(e, None))) or equal(a, e)


def _loads(record: Record, moment: Moment) -> dict[str, dict[int, Array]]:
    """By array in HBM, what each thread loads of it in a moment, as a variable's one value."""
    found: defaultdict[str, defaultdict[int, list[Array]]] = defaultdict(lambda: defaultdict(list))
    for x in record.accesses.get(moment, []):
        if not x.store and x.array in record.final:
            array = record.final[x.array].reshape(-1)
            found[x.array][x.thread].append(array[x.offset // array.itemsize : (x.offset + x.bytes) // array.itemsize])
    return {name: {t: np.concatenate(x)[None] for t, x in threads.items()} for name, threads in found.items()}


def _scope(
    item: _Item, name: str, before: Mapping[str, Mapping[int, Array]], now: Mapping[str, Mapping[int, Array]],
    launch: Launch,
) -> dict[str, Array]:  # fmt: skip
    """What else the same threads hold, in the solution, and the kernel's arguments that are fractions.

    An old maximum less a new one, as an exponential, is what sums are rescaled by.
    """

    def rows(of: Mapping[str, Mapping[int, Array]]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for other, values in of.items():
            if other == name or BLOCK in values or not all(t in values for t in item.threads):
                continue
            told = [values[t][-1].astype(np.float64).reshape(-1) for t in item.threads]
            if len({len(row) for row in told}) == 1 and not _whole(np.stack(told)):
                found[other] = np.stack(told)
        return found

    old, scope = rows(before), rows({**before, **now})
    single = [{x: v for x, v in found.items() if v.shape[1] == 1} for found in (old, scope)]
    for other, value in launch.arguments.items():
        if type(value) is np.float32:
            scope[other] = np.full((len(item.expected), 1), float(value))
    with np.errstate(all="ignore"):
        scope |= {
            f"exp({x} - {y})": np.exp(u - v) for x, u in single[0].items() for y, v in single[1].items() if x != y
        }
        scope |= {f"log({x})": np.log(v) for x, v in single[1].items() if (v > 0).all()}
    return scope


def _differs(
    mine: Told, due: Told, moment: Moment, name: str, declared_as: str, item: _Item, scope: Mapping[str, Array],
    before: Mapping[int, Array] | None,
) -> Difference:  # fmt: skip
    """How the learner's variable differs from the solution's, which is `declared_as` it is there."""
    row, column = worst(item.actual, item.expected)
    shared = BLOCK in item.threads
    index = np.unravel_index(row * item.expected.shape[1] + column if shared else column, item.extents)
    index, declared = (index, item.extents) if shared else (index[1:], item.extents[1:])
    element = name + "".join(f"[{n}]" for n in index) if declared != (1,) else name
    thread, line = item.threads[0 if shared else row], mine.line(moment, name)
    if shared and (shape := mine.record.shape(moment, name)):
        store = _store_of(mine.record, moment, name, int(np.ravel_multi_index(index, shape)))
        thread, line = (store.thread, mine.line_of.get(store.place) or line) if store else (thread, line)
    who = f"{mine.thread(thread)} of {_WHERE}" if thread != BLOCK else _WHERE
    never = bool(_unset(item.actual)[row, column])
    yours, right = told_apart(item.actual[row, column], item.expected[row, column])
    values = f"{element} {'has no value' if never else f'is {yours}'} and should be {right}"
    if mine.record.sizes[name] == 0:
        values = f"{name} doesn't hold what it should"
    held = None
    if before is not None and all(x in before for x in item.threads):
        held = np.stack([before[x][-1].astype(np.float64).reshape(-1) for x in item.threads])
        held = held.reshape(item.expected.shape) if held.size == item.expected.size else None
    why = ""
    if not item.actual.any() and not np.isneginf(item.expected).any():
        why = f"{name} is 0 in all threads"
    elif not (_whole(item.expected) and _whole(item.actual)):
        with np.errstate(all="ignore"):
            step = slice(*(n - 1 for n in lines_of_step(due.source, moment.step)))
            form = form_of(declared_as, "\n".join(due.source[step]), "\n".join(due.source))
            why = next(reasons(name, item.actual, item.expected, scope, held, row, rest=REST, form=form), "")
    words = f"{why} ({values})" if why else values
    over = [x for x in due.record.loops.get(moment, {}) if x in mine.record.lines]
    if over and over[-1] not in mine.record.loops.get(moment, {}):  # the learner's loop has ended
        line, words = mine.record.lines[over[-1]], f"your loop over {over[-1]} has ended; {words}"
    return Difference(line, moment.step, f"{_place(moment, due.record)}, {who}: {words}")


def _loaded(mine: Told, due: Told, until: Moment) -> Difference | None:
    """The first moment in which the block doesn't load what the solution's does, and never will."""

    def elements(told: Told, name: str, moments: Sequence[Moment]) -> dict[int, Access]:
        size = told.record.final[name].itemsize
        accesses = (x for m in moments for x in told.record.accesses.get(m, []) if x.array == name and not x.store)
        return {i: x for x in accesses for i in range(x.offset // size, (x.offset + x.bytes) // size)}

    moments = due.record.moments
    for name in due.record.final:
        if not elements(due, name, moments).keys() - elements(mine, name, mine.record.moments).keys():
            continue
        for moment in moments[: moments.index(until) + 1]:
            ours, theirs = (elements(told, name, [moment]) for told in (mine, due))
            lacking = theirs.keys() - ours.keys()
            if not lacking or not ours:
                continue
            others = ours.keys() - theirs.keys()
            more = f" and loads {_element(due, name, min(others))}" if others else ""
            words = f"the block doesn't load {_element(due, name, min(lacking))}{more}"
            line = mine.line_of.get(ours[min(others or ours)].place, 0)
            return Difference(line, moment.step, f"{_place(moment, due.record)}, {_WHERE}: {words}")
    return None


def _store_of(record: Record, moment: Moment, name: str, element: int) -> Access | None:
    """The latest store to an element of an array in shared memory, up to the end of a moment."""
    until = record.moments[: record.moments.index(moment) + 1]
    stores = (x for m in reversed(until) for x in reversed(record.accesses.get(m, [])) if x.store and x.array == name)
    return next((x for x in stores if x.offset <= element * record.sizes[name] < x.offset + x.bytes), None)


# -- what goes to HBM -----------------------------------------------------------------------------------------------


_Stores = Mapping[tuple[str, int], tuple[Access, Moment]]
"""By array and element, the store that wrote it last."""


def _stores(record: Record) -> _Stores:
    found: dict[tuple[str, int], tuple[Access, Moment]] = {}
    for moment, accesses in record.accesses.items():
        for x in accesses:
            if x.store and x.array in record.final:
                size = record.final[x.array].itemsize
                for i in range(x.offset // size, (x.offset + x.bytes) // size):
                    found[x.array, i] = x, moment
    return found


def _outputs(
    mine: Told, due: Told, moment: Moment, stored: _Stores, wanted: _Stores, before: Mapping[str, Mapping[int, Array]],
    launch: Launch,
) -> Difference | None:  # fmt: skip
    """What a moment's stores to HBM, `wanted` as far as nothing overwrites them later, have otherwise in what is `stored`.

    Where other blocks store, too, as in a counter that was given, the last value isn't this block's: it is asked when it stores.
    """
    threads: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (name, i), (x, at) in sorted(wanted.items(), key=lambda item: item[0]):
        if at == moment:
            threads[name][x.thread].append(i)
    for name, rows in threads.items():
        given = isinstance(launch.arguments.get(name), np.ndarray)
        there = {i for (array, i), (_, at) in stored.items() if array == name and (at == moment or not given)}
        if missing := next(((t, i) for t, row in sorted(rows.items()) for i in row if i not in there), None):
            return _missing(mine, due, moment, name, missing, stored)
        if given:
            continue
        width = max(map(len, rows.values()))
        a, e = (np.zeros((len(rows), width)) for _ in range(2))
        for n, row in enumerate(rows.values()):
            a[n, : len(row)], e[n, : len(row)] = (x.record.final[name].reshape(-1)[row] for x in (mine, due))
        item = _Item(a, e, list(rows), (width,))
        if not _equal(item):
            if found := _loaded(mine, due, moment):
                return found
            row, column = worst(a, e)
            i = rows[item.threads[row]][column]
            scope = _scope(item, name, before, _loads(due.record, moment), launch)
            with np.errstate(all="ignore"):
                step = slice(*(n - 1 for n in lines_of_step(due.source, moment.step)))
                form = form_of(name, "\n".join(due.source[step]), "\n".join(due.source))
                why = next(reasons(name, a, e, scope, None, row, rest=REST, form=form), "")
            why = why or _elsewhere(name, mine.record.final[name], due.record.final[name])
            yours, right = told_apart(a[row, column], e[row, column])
            values = f"{_element(due, name, i)} is {yours} and should be {right}"
            access = stored[name, i][0]
            where = f"{_place(moment, due.record)}, {mine.thread(access.thread)} of {_WHERE}"
            words = f"{where}: {why} ({values})" if why else f"{where}: {values}"
            return Difference(mine.line_of.get(access.place, 0), moment.step, words)
    return None


def _element(told: Told, name: str, i: int) -> str:
    return f"{name}[{', '.join(str(n) for n in np.unravel_index(i, told.record.final[name].shape))}]"


def _missing(mine: Told, due: Told, moment: Moment, name: str, missing: tuple[int, int], stored: _Stores) -> Difference:
    """Of an element that no thread stores."""
    thread, i = missing
    own = next(
        ((k, x) for (array, k), (x, _) in stored.items() if array == name and x.thread == thread and k != i), None
    )
    yours = f"stores {_element(due, name, own[0])}" if own else "stores nothing there"
    if own:
        line = mine.line_of.get(own[1].place, 0)
    else:
        near = next(
            (x.place for x in due.record.accesses[moment] if x.array == name and x.thread == thread and x.store), 0
        )
        line = mine.guard(mine.line(moment, name)) or mine.anchor(due, due.line_of.get(near, 0))
    where = f"{_place(moment, due.record)}, {mine.thread(thread)} of {_WHERE}"
    words = f"{where}: the solution stores {_element(due, name, i)}, and in yours no thread does; this one {yours}"
    return Difference(line, moment.step, words)


def _elsewhere(name: str, actual: Array, expected: Array) -> str:
    """Whether what is stored belongs to other elements, as when an index is transposed."""
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    if a.ndim == 2 and a.shape[0] == a.shape[1] and same(a, e.T):
        return f"{name} is transposed"
    wrong = np.argwhere(~np.isclose(a, e, rtol=1e-3, atol=0) & np.isfinite(a))
    if not len(wrong):
        return ""
    first = tuple(int(n) for n in wrong[0])
    places = np.argwhere(np.isclose(e, a[first], rtol=1e-5, atol=0))
    if len(places) != 1:
        return ""
    (there,) = ([int(n) for n in place] for place in places)
    return f"{name}{list(first)} has the value that belongs to {name}{there}"


# -- bytes ----------------------------------------------------------------------------------------------------------


def first_moved(mine: Told, due: Told, array: str, way: str) -> Difference | None:
    """The first line that moves other bytes of an array than the solution's step."""

    def of(told: Told) -> dict[Moment, list[Access]]:
        found = {
            m: [x for x in xs if x.array == array and x.store == (way == "written")]
            for m, xs in told.record.accesses.items()
        }
        return {m: xs for m, xs in found.items() if xs}

    ours, theirs = of(mine), of(due)
    for moment in dict.fromkeys([*due.record.moments, *mine.record.moments]):
        a, b = (sum(x.bytes for x in moved.get(moment, [])) for moved in (ours, theirs))
        if a == b:
            continue
        totals: Counter[int] = Counter()
        for x in ours.get(moment, []):
            totals[mine.line_of.get(x.place, 0)] += x.bytes
        sums = zip(totals, accumulate(totals.values()), strict=True)
        line = next((line for line, total in sums if total > b), 0) or next(reversed(totals), 0)
        if moment not in due.record.moments or moment not in mine.record.moments:
            line = _loop_line(mine, mine if moment in mine.record.moments else due, moment) or line
        line = line or lines_of_step(mine.source, moment.step)[0]
        does = "read" if way == "read" else "write"
        where = _place(moment, mine.record if moment in mine.record.moments else due.record)
        words = f"{where}, {_WHERE}: its threads {does} {a:,} bytes of {array} here, and those of the solution {b:,}"
        return Difference(line, moment.step, words)
    return None
