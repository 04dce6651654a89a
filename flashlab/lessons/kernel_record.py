"""What one block of a launch did, read from the numbers that its threads told (`kernels_cu/emulator/told.h`)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flashlab.lessons.kernel_telling import Variable
from simulator.dtypes import Array

STEP, VALUE, SHARED, BARRIER, GONE, ACCESS = range(6)
HEAD = 3
"""Numbers before the entries: how many there are, the block, and whether some are missing."""
LAST = 1 << 30
"""A line behind all others."""
BLOCK = -1
"""Stands for the thread where an array is the whole block's."""


class Moment(NamedTuple):
    """A step, and which time it is; of a kernel without steps, how many barriers were before."""

    step: str
    turn: int


class Access(NamedTuple):
    """An access to neighbouring elements: by which thread, to which bytes of an array, from which place in the code."""

    thread: int
    array: str
    offset: int
    bytes: int
    store: bool
    place: int


@dataclass
class Record:
    """What the threads of a block did, moment by moment.

    `values` are by name and thread what variables held in a moment, one value after the other: the first axis, then the
    declared extents. `loops` are those that a moment is in, with their variables' values. `final` are the arrays in HBM after the
    launch.
    """

    moments: list[Moment]
    values: dict[Moment, dict[str, dict[int, Array]]]
    loops: dict[Moment, dict[str, int]]
    accesses: dict[Moment, list[Access]]
    final: Mapping[str, Array]
    lines: Mapping[str, int]
    """Where the variables are declared, for the first time."""
    scopes: Mapping[tuple[Moment, str], tuple[int, int]]
    """Where a moment's variable is declared, and the next one of that name."""
    sizes: Mapping[str, int]
    """The bytes of their elements; 0 if they are words of a struct."""
    capped: bool

    def shape(self, moment: Moment, name: str) -> tuple[int, ...]:
        """The extents of a shared array, as it was told last up to a moment; empty if it wasn't."""
        until = self.moments[: self.moments.index(moment) + 1]
        told = (self.values.get(m, {}).get(name, {}).get(BLOCK) for m in reversed(until))
        return next((array.shape[1:] for array in told if array is not None), ())


@dataclass
class _Thread:
    """How far a thread has come."""

    moment: Moment
    turns: Counter[str] = field(default_factory=Counter[str])
    loops: dict[int, int] = field(default_factory=dict[int, int])
    begun: bool = True


def read(
    room: Array, variables: Sequence[Variable], arrays: Sequence[str], final: Mapping[str, Array], *, steps: bool
) -> Record:
    """The record in an array of numbers. `arrays` are HBM's, in their order. Without `steps`, barriers alone part it."""
    values: defaultdict[Moment, dict[str, dict[int, list[Array]]]] = defaultdict(lambda: defaultdict(dict))
    scopes: dict[tuple[Moment, str], tuple[int, int]] = {}
    accesses: defaultdict[Moment, list[Access]] = defaultdict(list)
    loops: dict[Moment, dict[int, int]] = {}
    moments: dict[Moment, None] = {}
    threads: dict[int, _Thread] = {}
    sizes: dict[str, int] = {}

    def begin(thread: _Thread, moment: Moment, *, at_once: bool) -> None:
        thread.moment, thread.begun = moment, at_once
        if at_once:
            loops.setdefault(moment, dict(thread.loops))
        moments.setdefault(moment)

    def leave_inner(thread: _Thread) -> None:
        """A moment between barriers isn't in the loops that it goes through."""
        known = loops.get(thread.moment, {})
        for k in [k for k, n in known.items() if thread.loops.get(k, n) != n]:
            del known[k]

    i, end = HEAD, int(room[0])
    while i < end:
        kind, number, n = (int(x) for x in room[i : i + HEAD])
        told = room[i + HEAD : i + HEAD + n]
        i += HEAD + n
        if number not in threads:
            threads[number] = _Thread(Moment("", 0))
            begin(threads[number], Moment("", 0), at_once=steps)
        thread = threads[number]
        if kind == STEP and steps:
            name = "".join(chr(int(x)) for x in told)
            thread.turns[name] += 1
            begin(thread, Moment(name, thread.turns[name]), at_once=True)
        elif kind == BARRIER and not steps:
            loops.setdefault(thread.moment, dict(thread.loops))
            begin(thread, Moment("", thread.moment.turn + 1), at_once=False)
        elif kind in (VALUE, SHARED):
            variable = variables[int(told[0])]
            if variable.of_loop:
                thread.loops[int(told[0])] = int(told[5])
                continue
            extents = [int(x) for x in told[2:5] if x] or [1]
            if not thread.begun:
                begin(thread, thread.moment, at_once=True)
            who = BLOCK if kind == SHARED else number
            sizes[variable.name] = int(told[1])
            values[thread.moment][variable.name].setdefault(who, []).append(told[5:].reshape(extents))
            scopes[thread.moment, variable.name] = _scope(variables, variable)
        elif kind == GONE:
            if thread.begun and not steps:
                leave_inner(thread)
            thread.loops.pop(int(told[0]), None)
        elif kind == ACCESS:
            if not thread.begun:
                begin(thread, thread.moment, at_once=True)
            elif not steps:
                leave_inner(thread)
            which, offset, nbytes, store, place = (int(x) for x in told)
            name = arrays[which] if which >= 0 else variables[-1 - which].name
            accesses[thread.moment].append(Access(number, name, offset, nbytes, bool(store), place))
    named = {moment: {variables[k].name: x for k, x in found.items()} for moment, found in loops.items()}
    declared = {variable.name: variable.line for variable in reversed(variables)}
    held = {
        moment: {name: {t: _stacked(x) for t, x in of.items()} for name, of in names.items()}
        for moment, names in values.items()
    }
    return Record(list(moments), held, named, dict(accesses), final, declared, scopes, sizes, bool(room[2]))


def _stacked(values: Sequence[Array]) -> Array:
    """One value after the other; of several variables of one name, those of the last."""
    return np.stack([x for x in values if x.shape == values[-1].shape])


def _scope(variables: Sequence[Variable], variable: Variable) -> tuple[int, int]:
    later = [x.line for x in variables if x.name == variable.name and x.line > variable.line]
    return variable.line, min(later, default=LAST)


def assigned(source: Sequence[str], name: str, first: int, last: int) -> int:
    """The last line from `first` to before `last` that gives a variable a value, or hands it to a function; 0 if none does.

    >>> assigned(["float m = 0;", "m += x[0];", "if (m == 1) m2 = m;"], "m", 1, 4)
    2
    """
    this = rf"(?<![\w.]){re.escape(name)}\b"
    sets = re.compile(rf"{this}(?:\s*\[[^=;]*\]|\.\w+)*\s*(?:[-+*/%&|^]?=(?!=)|\+\+|--)|(?:\+\+|--){this}")
    hands = re.compile(rf"^\s*[\w:]+(?:<[^()]*>)?\([^=]*{this}[^=]*\);\s*$")
    lines = ((n, source[n - 1].split("//")[0]) for n in range(first, min(last, len(source) + 1)))
    found: list[int] = []
    for n, line in lines:
        if sets.search(line):
            found.append(n)
            if re.search(rf"\bconst\b[^;]*{this}", line):
                break  # nothing changes it later
        elif hands.search(line):
            found.append(n)
    return found[-1] if found else 0


def lines_of_step(source: Sequence[str], step: str) -> tuple[int, int]:
    """The first line of a step, and the line of the next step's mark; the whole source if it has no such step."""
    marks = [(n, match[1]) for n, line in enumerate(source, 1) if (match := re.search(r"//\s*step:\s*(\w+)", line))]
    ends = [n for n, _ in marks[1:]] + [len(source) + 1]
    for (n, name), end in zip(marks, ends, strict=False):
        if name == step:
            return n, end
    return 1, len(source) + 1
