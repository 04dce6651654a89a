"""The report of a verification: rows, a verdict, and the smallest problem that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

SCHEMA = 1
"""The version of `Report.to_dict`. It rises when a key changes its meaning."""

SHOWN = 10
"""The most failures that are printed one by one. `Report.rows` has them all."""

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check on one case. `worst` is the largest error over what the rule allows (None: the check measures none)."""

    check: str
    case: str
    problem: str
    dtype: str
    status: Status
    worst: float | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The smallest failing case that was found: what was wrong, and Python that shows it."""

    message: str
    python: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `flashlab.verify` found. `print()` shows it, `to_dict()` and `to_markdown()` keep it.

    `passed` is true if something ran and nothing failed. `verdict` is "passed", "passed, LSE unchecked" (the target
    returns no LSE), "failed" or "nothing run".

    >>> import flashlab as fl
    >>> report = fl.verify("flash2", checks=["gqa"], dtypes=["float16"])
    >>> isinstance(report, fl.Report), report.to_dict()["counts"]
    (True, {'passed': 3, 'failed': 0, 'not run': 0})
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

    @property
    def passed(self) -> bool:
        return self.verdict.startswith("passed")

    @property
    def verdict(self) -> str:
        statuses = {row.status for row in self.rows}
        if "failed" in statuses:
            return "failed"
        if "passed" not in statuses:
            return "nothing run"
        return "passed" if self.lse_checked else "passed, LSE unchecked"

    @property
    def failed(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.status == "failed"]

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
        counts = Counter(row.status for row in self.rows)
        return {
            "schema": SCHEMA, "target": self.target, "backend": self.backend, "verdict": self.verdict, "passed": self.passed,
            "lse_checked": self.lse_checked, "rule": self.rule, "seed": self.seed, "full": self.full,
            "seconds": round(self.seconds, 3), "counts": {s: counts[s] for s in ("passed", "failed", "not run")},
            "rows": rows, "failing": None if self.failing is None else asdict(self.failing),
        }  # fmt: skip

    def to_markdown(self) -> str:
        """Markdown: a table by check, then what failed, what was not run, and the smallest failing case."""
        lines = [f"## {self.target} on {self.backend}: {self.verdict}", "", f"Rule: {self.rule}.", ""]
        lines += ["| check | passed | failed | not run | worst, x the rule |", "| --- | ---: | ---: | ---: | ---: |"]
        lines += [f"| {' | '.join(cells)} |" for cells in self._summary()]
        for title, status in (("Failed", "failed"), ("Not run", "not run")):
            if found := [row for row in self.rows if row.status == status]:
                lines += ["", f"{title}:", ""]
                lines += [f"- {row.check}, {row.case} (`{row.problem}`): {row.detail}" for row in found]
        if self.failing:
            lines += ["", f"Smallest failing case: {self.failing.message}", "", "```python", self.failing.python, "```"]
        return "\n".join(lines) + "\n"

    def print(self, file: Any = None) -> None:
        """Print the table and the failures to the terminal, or into an open text file."""
        from rich.console import Console  # imported only to print, since it is slow to import
        from rich.table import Table

        console = Console(file=file)
        table = Table(title=f"{self.target} on {self.backend}: {self.verdict}", title_justify="left")
        table.add_column("check")
        for name in ("passed", "failed", "not run", "worst, x the rule"):
            table.add_column(name, justify="right")
        for cells in self._summary():
            table.add_row(*cells, style="red" if cells[2] != "0" else None)
        console.print(table)
        for row in self.failed[:SHOWN]:
            console.print(f"failed: {row.check}, {row.case} ({row.problem}): {row.detail}", style="red", markup=False)
        if len(self.failed) > SHOWN:
            console.print(f"... and {len(self.failed) - SHOWN} more", style="red")
        reasons = Counter(row.detail for row in self.rows if row.status == "not run")
        for reason, n in reasons.items():
            console.print(f"not run ({n}): {reason}", style="dim", markup=False)
        if self.failing:
            console.print(f"\nSmallest failing case: {self.failing.message}\n", markup=False)
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
