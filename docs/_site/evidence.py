"""What is evidence of an algorithm's kernels as they are now, and what of older ones.

    python -m docs._site.evidence           # what to measure again, with the commands; then the ticks by state
    python -m docs._site.evidence renew     # today's digests, into docs/results/kernels.json (it needs NVRTC)

Each result says which kernels it measured (`flashlab.measure.sources`). README, pages and lessons take the newest result of
today's kernels; where there is none, the newest of older kernels, which is shown as such.
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashlab.measure import results, sources
from simulator.algorithm import Algorithm
from simulator.catalogue import CATALOGUE
from simulator.operations.softmax import SOFTMAX

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / results.FOLDER
TIMES = ("bench", "fp8", "ladder", "blind", "decoding", "append")
"""The kinds that time kernels, the plainest first."""
STATES = {"today's": "✓", "older": "○", "failed": "✗"}


@dataclass(frozen=True)
class Evidence:
    """The result that stands for one column of an algorithm. `failed` is a newer one that found a fault, or the only one."""

    algorithm: str
    column: str
    result: results.Result | None
    failed: results.Result | None = None

    @property
    def state(self) -> str:
        """A key of `STATES`, or "" without any result."""
        if self.result is None:
            return "failed" if self.failed else ""
        return "today's" if self.result.of_today(self.algorithm) else "older"

    @property
    def dates(self) -> tuple[str, str]:
        """The day of the measurement, and since when the kernels are what they are."""
        assert self.result is not None
        return self.result.content["date"][:10], sources.known(FOLDER)[self.algorithm].since

    @property
    def said(self) -> str:
        """Of what kernel it is, in a few words."""
        measured, since = self.dates
        return "" if self.state == "today's" else f"of an older kernel: measured {measured}, today's is of {since}"


@functools.cache
def measured(kind: str) -> tuple[results.Result, ...]:
    """The results of a kind, oldest first."""
    return tuple(results.find(FOLDER, kind=kind))


def judged(column: str, kind: str) -> Callable[[Algorithm], Evidence]:
    """What finds the evidence of a column whose kind says whether an algorithm passed."""

    def find(row: Algorithm) -> Evidence:
        says = results.kinds()[kind].passed
        found = [(of, says(of.data, row.name)) for of in measured(kind) if row.name in of.algorithms]
        best = max((of for of, passed in found if passed), key=functools.partial(_rank, row.name), default=None)
        newer = [of for of, passed in found if passed is False and (best is None or _date(of) > _date(best))]
        return Evidence(row.name, column, best, newer[-1] if newer else None)

    return find


def _rank(name: str, of: results.Result) -> tuple[bool, bool, bool, str]:
    """What comes last is shown: today's kernels, all checks, no special condition, the newest."""
    return of.of_today(name), bool(of.data.get("full")), of.condition is None, _date(of)


def _date(of: results.Result) -> str:
    return str(of.content["date"])


def timed(row: Algorithm) -> Evidence:
    """The result that times it: on its own, or else beside the algorithm that it leads to."""
    found = [
        (of, n) for n, kind in enumerate(TIMES) for of in measured(kind) if row.name in of.content.get("kernels", {})
    ]

    def rank(case: tuple[results.Result, int]) -> tuple[bool, bool, bool, int, str]:
        of, kind = case
        return of.of_today(row.name), of.algorithms == (row.name,), of.condition is None, -kind, _date(of)

    best = max(found, key=rank, default=None)
    return Evidence(row.name, "speed", best and best[0])


COLUMNS: Mapping[str, Callable[[Algorithm], Evidence]] = {
    "CPU emulator": judged("CPU emulator", "agreement"),
    "bytes = counters": judged("bytes = counters", "counters"),
    "verified": judged("verified", "verify"),
    "speed": timed,
}
"""The columns of README's matrix that are measured."""


def rows() -> list[Algorithm]:
    """The algorithms of the matrix. Softmax's vector programs belong to a lesson."""
    return [row for row in CATALOGUE.values() if row.operation is not SOFTMAX]


def evidence() -> Iterator[Evidence]:
    for row in rows():
        for find in COLUMNS.values():
            yield find(row)


def states() -> str:
    """How many ticks of each column are in each state, as a table."""
    found = list(evidence())
    lines = [
        (column, *(str(sum(x.column == column and x.state == state for x in found)) for state in STATES))
        for column in COLUMNS
    ]
    total = [str(sum(int(line[n]) for line in lines)) for n in range(1, len(STATES) + 1)]
    head = ("", *(f"{sign} {state}" for state, sign in STATES.items()))
    return results.markdown_table(head, [*lines, ("all", *total)])


def stale() -> Iterator[tuple[str, list[str]]]:
    """The commands that would measure again what is of older kernels, or failed, and what each is for."""
    found: dict[str, list[str]] = {}
    for x in evidence():
        if x.state in ("older", "failed"):
            of = x.failed if x.result is None else x.result
            assert of is not None
            found.setdefault(of.content["command"], []).append(f"{x.algorithm}: {x.column} ({x.said or 'it failed'})")
    yield from found.items()


def main(argv: list[str]) -> None:
    if argv == ["renew"]:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        sources.renew(FOLDER, today)
        return
    for command, what in stale():
        print(command, *(f"    {each}" for each in what), sep="\n")
    print(f"\n{states()}")


if __name__ == "__main__":
    main(sys.argv[1:])
