"""The kind `verify` of results in docs/results: the file's schema, its headline and its table."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from pydantic import Field

from flashlab.measure.results import Content, Data, Kind, markdown_table
from flashlab.verify.report import Failing, Row, Status

__all__ = ["KIND"]

STATUSES: tuple[Status, ...] = ("passed", "failed", "not run")


class Verified(Data):
    """A verification report, as `Report.to_dict` returns it."""

    schema_: Annotated[int, Field(alias="schema")]
    target: str
    backend: str
    verdict: str
    passed: bool
    lse_checked: bool
    rule: str
    seed: int
    full: bool
    seconds: float
    counts: dict[Status, int]
    rows: tuple[Row, ...]
    failing: Failing | None
    domain: str = ""


def headline(data: Verified) -> str:
    """One sentence: how many checks passed, and where others failed."""
    n = data.counts
    failed = dict.fromkeys(f"{row.check} ({row.case})" for row in data.rows if row.status == "failed")
    where = f", in {', '.join(failed)}" if failed else ""
    how = "full" if data.full else "quick"
    return (
        f"{data.target} on {data.backend} ({how}): {data.verdict}; {n['passed']:,} checks passed, "
        f"{n['failed']:,} failed{where}, {n['not run']:,} not run"
    )


def table(data: Verified) -> str:
    """A Markdown table with one row per check."""
    by_check: dict[str, Counter[str]] = {}
    for row in data.rows:
        by_check.setdefault(row.check, Counter())[row.status] += 1
    rows = [(check, *(str(found[status]) for status in STATUSES)) for check, found in by_check.items()]
    return markdown_table(("check", *STATUSES), rows)


def passed(data: Content, algorithm: str) -> bool | None:
    """Did an algorithm's kernels pass on a GPU? None if something else was verified."""
    return data["passed"] if (data["target"], data["backend"]) == (algorithm, "gpu") else None


KIND = Kind(
    "verify",
    "Numbers: against float64",
    "numbers against naive attention in float64",
    "flashlab verify flash2 --backend gpu --save docs/results",
    Verified,
    headline,
    table,
    passed=passed,
)
