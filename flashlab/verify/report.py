"""The report of a verification: rows, a verdict, and the smallest problem that fails."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from flashlab.verify.raised import Raised, raised
from simulator.problem import COMMON_MASKS, FEATURES, FIELDS

SCHEMA = 1
"""The version of `Report.to_dict`. It rises when a key changes its meaning."""

FEW = 3
"""The most failures, and the most reasons, in the few lines of `str(report)`."""
SHOWN = 10
"""The most failures that are printed one by one. `Report.rows` has them all."""

TAKES_NO = "the function takes no "
"""How a row begins that says which keyword a function lacks."""

COLUMNS = ("passed", "failed", "not run", "worst, x the rule")
"""The figures of each check, in tables."""

_MASKS, _SOME_KNOW = (
    {FIELDS[name].words: f" {FIELDS[name].words}" for name in names}
    for names in (
        COMMON_MASKS,
        [name for name in FEATURES if name not in (*COMMON_MASKS, "block_size", "k_scale", "v_scale")],
    )
)
"""How a row's problem shows a feature that every kernel knows, or another one, by the feature's words. The size of a mask's blocks
is none of its own, nor are the scales of quantised K and V."""

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check on one case. `worst` is the largest error over what the rule allows (None: the check measures none).

    `place` is the (file, line) of what failed, where a line of the kernel's is to blame. `ended`: the target ended the
    process that it ran in.
    """

    check: str
    case: str
    problem: str
    dtype: str
    status: Status
    worst: float | None = None
    detail: str = ""
    seconds: float = 0.0
    place: tuple[str, int] | None = None
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The smallest failing case that was found: what was wrong, Python that shows it, and the likely mistake, if known."""

    message: str
    python: str
    likely: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What `flashlab.verify` found. `print()` shows it, `to_dict()` and `to_markdown()` keep it.

    `passed` is true if nothing failed and at least half of the checks asked for ran. `verdict` is "passed", "passed,
    LSE unchecked" (the target returns no LSE), "failed", "too little ran" or "nothing run". `domain` says what the
    problems were shaped to, and `place` is the (file, line) of a function that was verified. `str(report)` is a summary
    of fewer than 20 lines.

    >>> import flashlab as fl
    >>> report = fl.verify("flash2", checks=["gqa"], dtypes=["float16"])
    >>> isinstance(report, fl.Report), report.to_dict()["counts"]
    (True, {'passed': 4, 'failed': 0, 'not run': 0})
    """

    target: str
    backend: str
    rule: str
    seed: int
    full: bool
    lse_checked: bool
    seconds: float
    rows: Sequence[Row]
    failing: Failing | None = None
    domain: str = ""
    place: tuple[str, int] | None = None

    def __repr__(self) -> str:
        """One line: pytest shows this of a report that an assertion names."""
        first = f": {self._told[0].check}, {self._told[0].case}" if self._told else ""
        likely = f"; likely: {self.failing.likely}" if self.failing and self.failing.likely else ""
        return f"<Report {self.headline}{first}{likely}>"

    def __str__(self) -> str:
        """The report in fewer than 20 lines: the verdict, what failed, what was not run, the smallest failing case."""
        return "\n".join(self._lines()) + (f"\n\n{self._program()}" if self.failing else "")

    def _repr_html_(self) -> str:
        """What a notebook's cell shows: the same lines, and the table by check where one opens it."""
        first, *rest = (escape(line.strip()) for line in self._lines())
        heads = "".join(f"<th>{name}</th>" for name in ("check", *COLUMNS))
        rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in self._summary())
        shown = [f"<p><b>{'✔' if self.passed else '✘'} {first}</b></p>"]
        if rest:
            shown.append(f"<ul>{''.join(f'<li>{line}</li>' for line in rest)}</ul>")
        shown.append(f"<details><summary>by check</summary><table><tr>{heads}</tr>{rows}</table></details>")
        if self.failing:
            shown.append(f"<pre>{escape(self._program())}</pre>")
        return "\n".join(shown)

    def _lines(self) -> list[str]:
        lines = [self.headline]
        if self.domain:
            lines.append(f"  domain: {self.domain}")
        lines += [f"  {line}" for line in self._failures(FEW)]
        reasons = self._reasons().most_common()
        lines += [f"  not run ({n}): {reason}" for reason, n in reasons[:FEW]]
        if len(reasons) > FEW:
            lines.append(f"  not run ({sum(n for _, n in reasons[FEW:])}): for {len(reasons) - FEW} more reasons")
        if self.never_ran:
            lines.append(f"  never run: {', '.join(self.never_ran)}")
        if self.failing:
            lines.append(f"  smallest failing case: {self.failing.message}")
            if self.failing.likely:
                lines.append(f"  likely: {self.failing.likely}")
        return lines

    def _program(self) -> str:
        return "\n".join(line for line in self.failing.python.splitlines() if line) if self.failing else ""

    @property
    def passed(self) -> bool:
        return self.verdict.startswith("passed")

    @property
    def verdict(self) -> str:
        passed, failed, _ = self.counts.values()
        if failed:
            return "failed"
        if not passed:
            return "nothing run"
        # What refuses most of the checks hides more than it shows: often a slip in `supports`. A kernel that is for few
        # problems has a domain, in which all checks run. What few kernels know at all says nothing of that.
        if passed < len(self._without_unknown) / 2:
            return "too little ran"
        return "passed" if self.lse_checked else "passed, LSE unchecked"

    @property
    def counts(self) -> dict[Status, int]:
        """How many rows passed, failed and were not run."""
        found = Counter(row.status for row in self.rows)
        statuses: tuple[Status, ...] = ("passed", "failed", "not run")
        return {status: found[status] for status in statuses}

    @property
    def headline(self) -> str:
        """The verdict, and how much of what was asked for ran."""
        counts = self.counts
        ran = f"{len(self.rows) - counts['not run']:,} of {len(self.rows):,} checks ran"
        failed = f"{counts['failed']:,} failed, " if counts["failed"] else ""
        return f"{self.target} on {self.backend}: {self.verdict} ({failed}{ran})"

    @property
    def never_ran(self) -> list[str]:
        """What was asked for and never ran, of features and grouped heads. A scale here is one that isn't the default."""
        masks = {**_MASKS, "grouped heads": ":"}
        return [*_never_ran(masks, self._without_unknown), *_never_ran(_SOME_KNOW, self.rows)]

    @property
    def _without_unknown(self) -> list[Row]:
        """The rows without those that ask for a soft cap, sinks, ALiBi or a mask of a target that never ran any."""
        unknown = _never_ran(_SOME_KNOW, self.rows)
        return [row for row in self.rows if not any(_SOME_KNOW[word] in row.problem for word in unknown)]

    @property
    def failed(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.status == "failed"]

    @property
    def raised(self) -> list[Raised]:
        """The kinds of problems that a function raises the same exception for, and perhaps never meant to take."""
        return raised(self.rows) if self.backend == "callable" else []

    @property
    def _told(self) -> list[Row]:
        """The failures that are told one by one: wrong numbers first, then exceptions."""
        of_kinds = {id(row) for found in self.raised for row in found.rows}
        rest = [row for row in self.failed if id(row) not in of_kinds]
        return sorted(rest, key=lambda row: row.detail.startswith("raised "))

    def _failures(self, most: int) -> list[str]:
        """A line for each of the first failures, and for each kind that is always the same exception."""
        rows = self._told
        lines = [f"failed: {row.check}, {row.case} ({row.problem}): {row.detail}" for row in rows[:most]]
        if len(rows) > most:
            lines.append(f"... and {len(rows) - most} more")
        return [*lines, *map(str, self.raised)]

    def _reasons(self) -> Counter[str]:
        """Why checks were not run, and how many. What a function has no keyword for is one reason."""
        found = Counter(row.detail for row in self.rows if row.status == "not run")
        unknown = [reason for reason in found if reason.startswith(TAKES_NO)]
        if len(unknown) > 1:
            n = sum(found.pop(reason) for reason in unknown)
            found[TAKES_NO + ", ".join(reason.removeprefix(TAKES_NO) for reason in unknown)] = n
        return found

    @property
    def checks(self) -> list[str]:
        """The checks' names, in the order in which they ran."""
        return list(dict.fromkeys(row.check for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. An infinite ratio becomes the string "inf"."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            if row["worst"] == float("inf"):
                row["worst"] = "inf"
        return {
            "schema": SCHEMA, "target": self.target, "backend": self.backend, "verdict": self.verdict, "passed": self.passed,
            "lse_checked": self.lse_checked, "rule": self.rule, "seed": self.seed, "full": self.full,
            "seconds": round(self.seconds, 3), "counts": self.counts,
            "rows": rows, "domain": self.domain, "failing": None if self.failing is None else asdict(self.failing),
        }  # fmt: skip

    def to_markdown(self) -> str:
        """Markdown: a table by check, then what failed, what was not run, and the smallest failing case."""
        lines = [f"## {self.headline}", "", f"Rule: {self.rule}.", ""]
        lines += [f"| check | {' | '.join(COLUMNS)} |", "| --- | ---: | ---: | ---: | ---: |"]
        lines += [f"| {' | '.join(cells)} |" for cells in self._summary()]
        not_run = [row for row in self.rows if row.status == "not run"]
        for title, found in (("Failed", self._told), ("Not run", not_run)):
            shown = [f"- {row.check}, {row.case} (`{row.problem}`): {row.detail}" for row in found]
            shown += [f"- {each}" for each in self.raised] if title == "Failed" else []
            lines += ["", f"{title}:", "", *shown] if shown else []
        if self.failing:
            lines += ["", f"Smallest failing case: {self.failing.message}"]
            lines += ["", f"Likely: {self.failing.likely}"] if self.failing.likely else []
            lines += ["", "```python", self.failing.python, "```"]
        return "\n".join(lines) + "\n"

    def print(self, file: Any = None) -> None:
        """Print the table and the failures to the terminal, or into an open text file."""
        from rich.table import Table  # imported only to print, since it is slow to import

        from flashlab.views import tables

        console = tables.console(sys.stdout if file is None else file)
        console.print(self.headline, markup=False, soft_wrap=True)
        table = Table()
        table.add_column("check")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for cells in self._summary():
            table.add_row(*cells, style="red" if cells[2] != "0" else None)
        console.print(table)
        for line in self._failures(SHOWN):
            console.print(line, style="red", markup=False)
        for reason, n in self._reasons().items():
            console.print(f"not run ({n}): {reason}", style="dim", markup=False)
        if self.never_ran:
            console.print(f"never run: {', '.join(self.never_ran)}", markup=False)
        if self.failing:
            console.print(f"\nSmallest failing case: {self.failing.message}", markup=False)
            if self.failing.likely:
                console.print(f"Likely: {self.failing.likely}", markup=False)
            console.print()
            console.print(self.failing.python, markup=False, soft_wrap=True)  # no wrapping, so that it can be copied

    def _summary(self) -> list[tuple[str, ...]]:
        table: list[tuple[str, ...]] = []
        for check in self.checks:
            rows = [row for row in self.rows if row.check == check]
            counts = Counter(row.status for row in rows)
            worst = max((row.worst for row in rows if row.worst is not None), default=None)
            numbers = (str(counts[status]) for status in ("passed", "failed", "not run"))
            table.append((check, *numbers, "" if worst is None else f"{worst:.2f}"))
        return table


def _never_ran(marks: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    """The words of those features that rows ask for, of which none was run."""
    asked = {word: [row for row in rows if mark in row.problem] for word, mark in marks.items()}
    return [word for word, found in asked.items() if found and all(row.status == "not run" for row in found)]
