"""Runs a kernel so that it tells what one of its blocks does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashlab.base import cache
from flashlab.emulator import Empty, build, emulate_file
from flashlab.emulator.library import Line
from flashlab.lessons.kernel_exercise import KernelExercise, Launch
from flashlab.lessons.kernel_record import HEAD, Moment, Record, assigned, lines_of_step, read
from flashlab.lessons.kernel_telling import RECORD, ROOM, telling


@dataclass(frozen=True)
class Told:
    """A kernel and what a block of it did: its `record`, its `source`, and the line of each place in its code."""

    record: Record
    source: Sequence[str]
    line_of: Mapping[int, int]
    given: frozenset[str]
    """The lines that the learner was given."""
    block: tuple[int, ...]
    """The threads of a block."""

    def thread(self, number: int) -> str:
        """A thread in words."""
        return f"thread {point(number, self.block)}"

    def line(self, moment: Moment, name: str) -> int:
        """The line that gives a variable its value in a moment, or where it should."""
        first, last = lines_of_step(self.source, moment.step)
        declared, next_ = self.record.scopes.get((moment, name), (first, last))
        first, last = max(first, declared), min(last, next_)
        return assigned(self.source, name, first, last) or (
            lines_of_step(self.source, moment.step)[0] if moment.step else 0
        )

    def anchor(self, other: Told, line: int) -> int:
        """The line here of the last one, up to a line of the other source, that the learner was given; 0 without one."""
        for text in reversed(other.source[:line]):
            if text in self.given and self.source.count(text) == 1:
                return self.source.index(text) + 1
        return 0

    def guard(self, line: int) -> int:
        """The line of the `if` that a line is the body of, or that line."""
        above = self.source[line - 2].split("//")[0].strip() if line > 1 else ""
        return line - 1 if above.startswith("if ") and above.endswith(")") else line


def point(number: int, extents: Sequence[int]) -> str:
    """A block or a thread as CUDA counts it: by one number, or by three.

    >>> point(33, (64,)), point(33, (32, 8))
    ('33', '(1, 1, 0)')
    """
    x, y, z = (*extents, 1, 1)[:3]
    return str(number) if y == z == 1 else str((number % x, number // x % y, number // x // y))


def told(
    text: str, beside: Path, exercise: KernelExercise, launch: Launch, block: int, steps: bool, seconds: float
) -> Told:
    """What a block of a source does in a launch; headers may lie in the folder `beside`."""
    kernel = exercise.kernel
    source = telling(text, kernel)
    given = frozenset(line for line in exercise.skeleton.splitlines() if line.strip("{} "))

    def write(folder: Path) -> None:
        (folder / "told.cu").write_text(source.text, encoding="utf-8")

    path = cache.entry("told", cache.digest(source.text), write) / "told.cu"
    room = np.zeros(ROOM)
    room[:2] = HEAD, block
    done = emulate_file(
        path, launch.arguments, grid=launch.grid, block=launch.block, kernel=kernel, includes=[beside],
        symbols={RECORD: room}, sanitize=False, workers=1, time_limit=seconds,
    )  # fmt: skip
    arrays = [name for name, value in launch.arguments.items() if isinstance(value, np.ndarray | Empty)]
    record = read(done.symbols[RECORD], source.variables, arrays, done.arrays, steps=steps)
    library = build(path, entries=[kernel], includes=[beside])
    places = {x.place for accesses in record.accesses.values() for x in accesses}
    lines = {place: _line(library.places.get(place, ()), path) for place in places}
    return Told(record, text.splitlines(), lines, given, launch.block)


def _line(chain: Sequence[Line], path: Path) -> int:
    """The outermost line of a file in a chain of calls."""
    return next((line.number for line in reversed(chain) if line.file == str(path)), 0)
