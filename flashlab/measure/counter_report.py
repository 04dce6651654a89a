"""What the hardware counters were found to say, launch by launch: the checks, the report for people, and the file of record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ConfigDict

from flashlab.measure.metrics import BYTES
from flashlab.measure.results import Content, Data, Kind, markdown_table
from flashlab.measure.workload import Case

__all__ = [
    "DRAM_SLACK", "EXP_FACTOR", "EXP_PER_THREAD", "KIND", "Check", "Counted", "CountersReport", "DramCheck", "LaunchReport",
    "ModelCheck",
]  # fmt: skip

EXP_FACTOR = (0.9, 1.25)
EXP_PER_THREAD = 160
"""Within which the unit for special functions must agree with `exp`. It also does reciprocals, logarithms and the integer
divisions by which a block finds its work: three instructions each, and up to 50 of them a thread, whatever `exp` is. Measured
were 80 instructions of a thread in paged and 127 in mla, when these still divided for each row and key."""
EXP_OF_A_CAP = 3
"""A soft cap's tanh adds an exponential and a reciprocal to a score's own exponential, where scores aren't small."""

DRAM_SLACK = 96 * 1024
"""How far reads from DRAM may lie outside of what is compulsory and requested. The launch's own instructions and constants are
read, too (70 KB were measured of paged in float32), and whole sectors of rows that begin anywhere (96 KB of a mask's 1,283)."""


@dataclass(frozen=True)
class Check:
    """One quantity of one launch, as simulated, by formula, and measured (None: not to be had).

    `sectors` is what the counters show of it where that is not the quantity itself, because they work in whole sectors
    (`flashlab.measure.sectors` predicts it); else None. What the kernel's source leaves to its compiler isn't `settled`:
    then the measurement is reported, and not judged.
    """

    what: str
    simulated: int | None
    formula: int
    measured: int | None
    sectors: int | None = None
    settled: bool = True

    @property
    def verdict(self) -> str:
        if self.simulated not in (None, self.formula):
            return "differs"
        if self.measured is None:
            return "not measured"
        if not self.settled:
            return "the compiler's"
        return "equal" if self.measured == _expected(self) else "differs"


@dataclass(frozen=True)
class DramCheck:
    """Reads from DRAM of one launch from a cold L2: `low` (compulsory) and `high` (requested) hold them, give or take
    `DRAM_SLACK`. `judged` is False for small problems; `estimate` is the L2 model's. `written` is a lower bound: dirty lines
    stay in the L2."""

    measured: int
    low: int
    high: int
    estimate: int
    written: int
    judged: bool

    @property
    def inside(self) -> bool:
        return self.low - DRAM_SLACK <= self.measured <= self.high + DRAM_SLACK


@dataclass(frozen=True)
class LaunchReport:
    """One launch of one case."""

    case: Case
    launch: str
    blocks: int
    threads: int
    checks: tuple[Check, ...]
    dram: DramCheck | None
    exp: tuple[int, int] | None
    """Elements by formula; threads × instructions of the special function unit."""
    rates: Mapping[str, float]
    extras: Mapping[str, int]

    @property
    def exp_factor(self) -> float | None:
        return self.exp[1] / self.exp[0] if self.exp and self.exp[0] else None

    @property
    def failures(self) -> list[str]:
        """What differs, a line each."""
        found = [
            f"{c.what}: simulated {_figure(c.simulated)}, formula {_figure(c.formula)}, "
            f"{'' if c.sectors is None else f'in sectors {c.sectors:,}, '}measured {_figure(c.measured)}"
            for c in self.checks
            if c.verdict == "differs"
        ]
        if self.dram and self.dram.judged and not self.dram.inside:
            d = self.dram
            found.append(
                f"DRAM read: measured {d.measured:,}, outside {d.low:,} to {d.high:,} (± {DRAM_SLACK >> 10} KB)"
            )
        if self.exp is not None:
            most = self.exp[0] * (EXP_OF_A_CAP if self.case.problem.soft_cap else 1)
            low, high = EXP_FACTOR[0] * self.exp[0], EXP_FACTOR[1] * most + EXP_PER_THREAD * self.threads
            if not low <= self.exp[1] <= high:
                found.append(f"exp: measured {self.exp[1]:,}, outside {low:,.0f} to {high:,.0f}")
        return found

    def to_dict(self) -> dict[str, Any]:
        dram = None if self.dram is None else {**asdict(self.dram), "inside": self.dram.inside}
        return {
            "case": self.case.name,
            "algorithm": self.case.algorithm,
            "problem": asdict(self.case.problem),
            "tile": None if self.case.tile is None else str(self.case.tile),
            "lse": self.case.lse,
            "launch": self.launch,
            "blocks": self.blocks,
            "rows": [{**asdict(check), "verdict": check.verdict} for check in self.checks],
            "dram": dram,
            "exp_factor": self.exp_factor,
            **self.rates,
            **self.extras,
            "failures": self.failures,
        }


@dataclass(frozen=True)
class ModelCheck:
    """The L2 model's estimate of a problem's DRAM reads, all launches together. `large`: its arrays fill over half of
    the L2, so that there is something to estimate; a smaller problem is read once."""

    case: str
    estimate: int
    measured: int
    large: bool

    @property
    def error(self) -> float:
        """Relative; above 0: the model says too much."""
        return (self.estimate - self.measured) / max(1, self.measured)


@dataclass(frozen=True)
class CountersReport:
    """What `run` found. `errors` are cases that could not be measured, with the reason."""

    device: str
    launches: tuple[LaunchReport, ...]
    models: tuple[ModelCheck, ...] = ()
    errors: tuple[str, ...] = ()
    third: str = "measured"
    """What the third count is called beside simulated and formula: by the hardware, or emulated."""

    @property
    def passed(self) -> bool:
        """Everything that was measured agrees, and everything was measured."""
        return bool(self.launches) and not self.errors and not any(launch.failures for launch in self.launches)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Flat: one row a launch and quantity."""
        return [
            {
                "case": launch.case.name,
                "algorithm": launch.case.algorithm,
                "launch": launch.launch,
                **asdict(check),
                "verdict": check.verdict,
            }
            for launch in self.launches
            for check in launch.checks
        ]

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(launch.case.algorithm for launch in self.launches))

    @property
    def summary(self) -> dict[str, Any]:
        checks = [check for launch in self.launches for check in launch.checks if check.verdict in ("equal", "differs")]
        judged = [launch.dram for launch in self.launches if launch.dram and launch.dram.judged]
        errors = [abs(model.error) for model in self.models if model.large]
        return {
            "problems": len({launch.case.name for launch in self.launches}),
            "launches": len(self.launches),
            "compared": len(checks),
            "equal": sum(check.verdict == "equal" for check in checks),
            "dram_checked": len(judged),
            "dram_inside": sum(d.inside for d in judged),
            "exp_factor": _extent([x.exp_factor for x in self.launches if x.exp_factor is not None]),
            "model_problems": len(errors),
            "model_median_error": statistics.median(errors) if errors else None,
            "model_worst_error": max(errors, default=None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "device": self.device,
            "summary": self.summary,
            "launches": [launch.to_dict() for launch in self.launches],
            "models": [{**asdict(model), "error": model.error} for model in self.models],
            "errors": list(self.errors),
        }

    def print(self) -> None:
        """Tables for people: every quantity of a few launches, a line a launch of many."""
        from flashlab.views.tables import line, table

        if len(self.launches) <= 4:
            for launch in self.launches:
                _print_launch(launch, self.third)
        else:
            columns = ("problem", "launch", *BYTES, "tensor ops", "DRAM read", "L2 hits", "occupancy")
            table(f"simulated = formula = {self.third}", columns, [_line(launch) for launch in self.launches], left=2)
        for launch in self.launches:
            for failure in launch.failures:
                line(f"{launch.case.name}, {launch.launch}: {failure}")
        for error in self.errors:
            line(f"not {self.third}: {error}" if self.third == "measured" else error)
        for model in self.models if len(self.launches) <= 4 else [m for m in self.models if m.large]:
            said = f"the L2 model says {model.estimate:,} ({model.error:+.1%})"
            line(f"{model.case}: DRAM read {model.measured:,}, {said}")
        s = self.summary
        line(f"{s['equal']:,} of {s['compared']:,} counts equal over {s['launches']} launches")
        if s["dram_checked"]:
            line(f"DRAM reads inside the interval: {s['dram_inside']} of {s['dram_checked']}")
        if s["model_problems"]:
            error = f"median error {s['model_median_error']:.1%}, worst {s['model_worst_error']:.1%}"
            line(f"L2 model over {s['model_problems']} problems larger than half of the L2: {error}")
        line("passed" if self.passed else "FAILED")


def _print_launch(launch: LaunchReport, third: str) -> None:
    from flashlab.views.tables import line, table

    def sign(check: Check) -> str:
        return {"equal": "=", "differs": "≠", "not measured": "?", "the compiler's": "~"}[check.verdict] + _unit(check)

    rows = [(c.what, _figure(c.simulated), _figure(c.formula), _figure(c.measured), sign(c)) for c in launch.checks]
    table(
        f"{launch.case.name}: {launch.launch}, {launch.blocks:,} blocks", ("", "simulated", "formula", third, ""), rows
    )
    if launch.dram:
        d = launch.dram
        line(
            f"DRAM read {d.measured:,} bytes, between compulsory {d.low:,} and requested {d.high:,}"
            f"{'' if d.judged else ' (too small to judge)'}; at least {d.written:,} written"
        )
    if launch.exp_factor is not None:
        line(f"special function unit: {launch.exp_factor:.2f} × exp")
    if launch.rates:
        line(", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in launch.rates.items()))
    line(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in launch.extras.items()))


def _line(launch: LaunchReport) -> tuple[str, ...]:
    checks = {check.what: check for check in launch.checks}

    d = launch.dram
    return (
        launch.case.name,
        launch.launch,
        *(_cell(checks.get(what)) for what in (*BYTES, "flops.matmul")),
        f"{d.measured:,}" if d else "",
        f"{launch.rates.get('l2_hit_rate', 0):.0f} %",
        f"{launch.rates.get('occupancy', 0):.0f} %",
    )


def _figure(n: int | None) -> str:
    return "?" if n is None else f"{n:,}"


def _cell(row: Check | Quantity | None) -> str:
    """What was measured, and what it should have been where that differs. Of what is the compiler's, the formula is beside it."""
    if row is None or row.measured is None:
        return ""
    if row.verdict == "the compiler's":
        return f"{row.measured:,} ~ {row.formula:,}"
    return (f"= {row.measured:,}" if row.verdict == "equal" else f"{row.measured:,} ≠ {_expected(row):,}") + _unit(row)


def _expected(row: Check | Quantity) -> int:
    """What is to be measured."""
    return row.formula if row.sectors is None else row.sectors


def _unit(row: Check | Quantity) -> str:
    return "" if row.sectors is None else " in sectors"


def _extent(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


# What its file holds and says


class Quantity(Data):
    """One quantity of one launch: a `Check` and its verdict."""

    what: str
    simulated: int | None
    formula: int
    measured: int | None
    sectors: int | None = None
    settled: bool = True
    verdict: str


class Dram(Data):
    """A launch's reads from DRAM: a `DramCheck` and whether they lie inside."""

    measured: int
    low: int
    high: int
    estimate: int
    written: int
    judged: bool
    inside: bool


class Launch(Data):
    """One launch of one case. `problem` are the arguments of a `Problem`; counters that are reported and not judged stand
    under their own names (`EXTRAS`)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]  # pyright: ignore[reportIncompatibleVariableOverride]

    case: str
    algorithm: str
    problem: dict[str, Any]
    tile: str | None
    lse: bool
    launch: str
    blocks: int
    rows: tuple[Quantity, ...]
    dram: Dram | None
    exp_factor: float | None
    l2_hit_rate: float | None = None
    occupancy: float | None = None
    warp_efficiency: float | None = None
    failures: tuple[str, ...]


class Model(Data):
    """The L2 model on one problem: a `ModelCheck` and its error."""

    case: str
    estimate: int
    measured: int
    large: bool
    error: float


class Summary(Data):
    """How many counts and launches were compared, and how the L2 model did on large problems."""

    problems: int
    launches: int
    compared: int
    equal: int
    dram_checked: int
    dram_inside: int
    exp_factor: tuple[float, float] | None
    model_problems: int
    model_median_error: float | None
    model_worst_error: float | None


class Counted(Data):
    """A report, as `CountersReport.to_dict` gives it."""

    passed: bool
    device: str
    summary: Summary
    launches: tuple[Launch, ...]
    models: tuple[Model, ...]
    errors: tuple[str, ...]


def headline(data: Counted) -> str:
    """How many counts are equal, how many launches' DRAM reads lie inside, and the L2 model's error."""
    s = data.summary
    text = f"{s.equal:,} of {s.compared:,} counts of bytes and matrix FLOPs equal over {s.launches} launches"
    text += (
        f"; DRAM reads within the interval (± {DRAM_SLACK >> 10} KB) in {s.dram_inside} of the {s.dram_checked} launches of"
        " problems over 1 MB"
    )
    errors = {m.case: abs(m.error) for m in data.models if m.large}
    fresh = {case for case in errors if "fresh" in case}
    for name, chosen in (("that it was fitted to", errors.keys() - fresh), ("measured after that", fresh)):
        if found := sorted(errors[case] for case in chosen):
            text += (
                f"; L2 model on {len(found)} problems {name}: median error {statistics.median(found):.1%},"
                f" worst {found[-1]:.1%}"
            )
    return text


def table(data: Counted) -> str:
    """A row per launch, and a row per large problem of the L2 model."""
    levels = ("hbm.read", "hbm.write", "sram.read", "sram.write")
    rows: list[tuple[str, ...]] = []
    for launch in data.launches:
        cells = {row.what: row for row in launch.rows}
        read = f"{launch.dram.measured:,}" if launch.dram else ""
        rows.append((launch.case, launch.launch, *(_emphasised(cells.get(what)) for what in levels), read))
    models = [
        (model.case, f"{model.measured:,}", f"{model.estimate:,}", f"{model.error:+.1%}")
        for model in data.models
        if model.large
    ]
    text = markdown_table(("problem", "launch", *levels, "DRAM read"), rows)
    if models:
        text += "\n\n" + markdown_table(("problem", "DRAM read", "L2 model", "error"), models)
    return text


def _emphasised(row: Quantity | None) -> str:
    """The cell in Markdown: bold where it differs."""
    return f"**{_cell(row)}**" if row and row.verdict == "differs" else _cell(row)


def passed(data: Content, algorithm: str) -> bool | None:
    """Does every count of an algorithm that was judged equal its hardware counter? None if none was."""
    mine = [launch for launch in data["launches"] if launch["algorithm"] == algorithm]
    verdicts = [row["verdict"] for launch in mine for row in launch["rows"] if row["verdict"] in ("equal", "differs")]
    failed = any(error.startswith(f"{algorithm} ") for error in data["errors"])
    return ("differs" not in verdicts and not failed) if verdicts or failed else None


KIND = Kind(
    "counters",
    "Bytes: counted and measured",
    "simulated, formula and measured bytes, launch by launch; DRAM reads; the error of the L2 model",
    "flashlab counters --matrix --l2 --save docs/results",
    Counted,
    headline,
    table,
    passed=passed,
)
