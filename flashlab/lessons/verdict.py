"""What a check says: text in a terminal, HTML in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple
from zipfile import BadZipFile

from flashlab.lessons.lines import at_line, line_of_hang

if TYPE_CHECKING:
    from pathlib import Path

    from flashlab.base.process import Outcome
    from simulator import Trace

HEADLINES = {
    "passed": "Passed",
    "numbers": "Wrong numbers",
    "bytes": "Right numbers, wrong bytes",
    "bits": "Right numbers, but other bits each time",
    "arithmetic": "Right numbers, but computed elsewhere",
    "unrounded": "Right numbers, but no tensor core multiplies that",
    "overwritten": "Right numbers, but from SRAM that was overwritten",
    "repeated": "Right numbers, but each warp does all the work",
    "registers": "Right numbers, but more registers than there are",
    "history": "A history that breaks it",
    "starved": "Somebody starves",
    "asked": "Right numbers, but not what the exercise asks",
    "sectors": "Right bytes, too many sectors",
    "instructions": "Right bytes, too many instructions",
    "conflicts": "Right bytes, bank conflicts",
    "passes": "Right bytes, too many passes over the banks",
    "overlap": "Right bytes, but nothing overlaps",
    "misuse": "Misuse of the machine",
    "compile error": "Compile error",
    "missing kernel": "Missing kernel",
    "parameters": "Wrong parameter list",
    "sram": "Too much SRAM",
    "hang": "Hang",
    "no end": "No end yet",
    "crash": "Crash",
    "exit": "Exit",
    "flood": "Flood of output",
    "memory": "Out of memory",
    "out of bounds": "Out of bounds",
    "short cut": "Short cut",
    "not started": "Not started",
    "usage": "This cannot be checked",
    "unavailable": "Not here",
}
"""The kinds of verdicts."""
TAMPERED = "the files in which its check keeps what came out are gone, or were changed, while it ran"
PATIENCE = 4
"""By the clock a check may take so many times the seconds that it may take of a processor."""
UNREADABLE = OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, BadZipFile
"""What reading such files raises."""


@dataclass(frozen=True)
class Line:
    """One tensor against its budget, in bytes; `way` is "read" or "written", `level` "HBM" or "SRAM"."""

    tensor: str
    way: str
    moved: int
    budget: int
    level: str = "HBM"
    right: bool = False
    """Are the numbers right? Then nothing is missing that they need."""

    @property
    def equal(self) -> bool:
        return self.moved == self.budget

    @property
    def verdict(self) -> str:
        if self.equal:
            return "equal"
        if self.moved < self.budget and self.right:
            return "fewer than the budget, though the numbers are right: it goes another way than the exercise asks"
        if self.moved < self.budget:
            return "too few: part of what this takes was never loaded" if self.way == "read" else "too few"
        ratio = f", {self.moved / self.budget:.3g} times the budget" if self.budget else ""
        return f"too many{ratio}"


class Place(NamedTuple):
    """A tile of an output."""

    batch: int = 0
    head: int = 0
    row_tile: int = 0
    col_tile: int = 0


@dataclass(frozen=True)
class Verdict:
    """The result of `fl.check`; it shows itself, and never raises.

    `kind` is one of `HEADLINES`, `message` says what is wrong and where, `budget` has the bytes tensor by tensor.
    `place` is the first wrong tile, `trace` that of its head. `tutor` says where the program first differs from the
    solution, whose trace is `due`: in the step named `step`, which is number `at` of the trace. A kernel has no trace.

    >>> Verdict("00.1", "crash", "ZeroDivisionError: division by zero, in line 3")
    00.1  Crash: ZeroDivisionError: division by zero, in line 3
    """

    exercise: str
    kind: str
    message: str = ""
    budget: tuple[Line, ...] = ()
    problem: str = ""
    sram: str = ""
    afterwards: str = ""
    printed: str = ""
    place: Place = Place()
    findings: tuple[str, ...] = ()
    """Of a CUDA file: what else the emulator found, each in a line."""
    tutor: str = ""
    step: str = ""
    at: int = 0
    trace: Trace | None = field(default=None, repr=False)
    due: Trace | None = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        return self.kind == "passed"

    @property
    def headline(self) -> str:
        return HEADLINES[self.kind]

    def __repr__(self) -> str:
        parts = [f"{self.exercise}  {self.headline}{': ' + self.message if self.message else ''}"]
        if self.tutor:
            parts.append(f"      first difference from the solution: {self.tutor}")
        if self.budget:
            parts.append(f"      bytes for {self.problem}:")
            parts += [
                f"      {x.level:<4} {x.tensor:>6} {x.way:<7} {x.moved:>14,} of {x.budget:>14,}  {x.verdict}"
                for x in self.budget
            ]
        parts += [f"      {text}" for text in (*self.findings, self.sram, self.afterwards) if text]
        if self.printed:
            parts.append("      it printed:\n" + self.printed)
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        mark = "✔" if self.passed else "…" if self.kind in ("not started", "unavailable") else "✘"
        parts = [
            f"<p><b>{mark} {escape(self.exercise)} {self.headline}</b>{': ' if self.message else ''}{escape(self.message)}</p>"
        ]
        if self.budget:
            rows = "".join(
                f"<tr><td>{x.level}</td><td>{escape(x.tensor)}</td><td>{x.way}</td>{_number(x.moved)}{_number(x.budget)}"
                f"<td>{'✔' if x.equal else '✘'} {x.verdict}</td></tr>"
                for x in self.budget
            )
            head = "<tr><th></th><th>tensor</th><th></th><th>yours</th><th>budget</th><th></th></tr>"
            parts.append(f"<p>Bytes for {escape(self.problem)}:</p><table>{head}{rows}</table>")
        parts += [f"<p>{escape(text)}</p>" for text in (*self.findings, self.sram, self.afterwards) if text]
        if self.printed:
            parts.append(f"<details><summary>It printed</summary><pre>{escape(self.printed)}</pre></details>")
        if self.tutor:
            parts.insert(1, f"<p>First difference from the solution: {escape(self.tutor)}</p>")
        if self.trace is not None and self.trace.events:  # a program that launches nothing has no step to show
            parts.append(self._player())
        return "".join(parts)

    def _player(self) -> str:
        """The player on the learner's own trace: beside the solution's where they first differ, else where the tile is stored."""
        assert self.trace is not None
        player = import_module("flashlab").player
        if self.due is not None:
            where = "<p>Your program, and the solution beside it, at the first step that differs:</p>"
            return where + player(self.trace, self.due, step=max(1, self.at)).frame()
        i, j = self.place.row_tile, self.place.col_tile
        blocks = [event.block for event in self.trace.events]
        steps = [n for n, block in enumerate(blocks, 1) if block in ((i, j), (i, 0))] or [len(blocks)]
        return f"<p>Your program, where that tile is stored:</p>{player(self.trace, step=steps[-1]).frame()}"


def unended(exercise: str, message: str, seconds: float, printed: str) -> Verdict:
    """The verdict on what the clock ended. On a slow or busy machine it may have been right."""
    more = 3 * seconds
    why = "a slow or busy machine, or a loop without end"
    what = f"run it again, or with seconds={more:g}, which waits for {PATIENCE * more:g}"
    return Verdict(exercise, "no end", f"{message}: {why}; {what}", printed=printed)


def stopped(exercise: str, outcome: Outcome, folder: Path, file: str, seconds: float) -> Verdict | None:
    """The verdict on an answer whose process in that folder didn't come to its end, with the learner's line; None if it did."""
    if outcome.kind == "done":
        return None
    where = at_line(line_of_hang(folder, file), file)
    if outcome.kind == "no end":
        return unended(exercise, f"{outcome.message}{where}", seconds, outcome.printed)
    after = f" after {seconds:g} seconds of work{where}" if outcome.kind == "hang" else ""
    return Verdict(exercise, outcome.kind, f"{outcome.message}{after}", printed=outcome.printed)


def unsent(exercise: str, error: Exception) -> Verdict:
    """The verdict on an answer that no other process can get, for it holds an open file, a lock or the like."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return Verdict(exercise, "usage", f"it cannot be sent to another process: {reason}")


def _number(n: int) -> str:
    return f'<td style="text-align: right">{n:,}</td>'
