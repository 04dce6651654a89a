"""Hardware counters of the kernels, held against simulator and formula: `simulated = formula = measured`.

The kernels run in a process of their own under `ncu` (Nsight Compute), many problems in one: its start costs seconds.
Bytes requested from HBM and SRAM must be equal to the byte, the operations of the tensor cores to the operation; reads
from DRAM must lie between what a cold cache cannot avoid and what is requested.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from flashlab.measure import ncu
from flashlab.measure import workload as case_files
from flashlab.measure.ncu import Measured, parse
from flashlab.measure.problems import l2_problems, matrix
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.workload import Case
from simulator import Counts, count, dram, shape_run
from simulator.catalogue import get
from simulator.counts import LaunchCounts
from simulator.devices import Device
from simulator.errors import Unavailable
from simulator.problem import FP8

__all__ = [
    "KIND", "Check", "CountersReport", "DramCheck", "LaunchReport", "Measured", "ModelCheck", "compare", "l2_problems",
    "matrix", "parse", "run",
]  # fmt: skip

_GLOBAL, _SHARED = "smsp__sass_data_bytes_mem_global_op_", "smsp__sass_data_bytes_mem_shared_op_"

BYTES: dict[str, tuple[str, ...]] = {
    "hbm.read": (f"{_GLOBAL}ld", f"{_GLOBAL}ldgsts", "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld"),
    "hbm.write": (f"{_GLOBAL}st", "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st"),
    "hbm.atomic": (f"{_GLOBAL}red", f"{_GLOBAL}atom", "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_red"),
    "sram.read": (f"{_SHARED}ld", f"{_SHARED}ldsm", f"{_SHARED}gmma"),
    "sram.write": (f"{_SHARED}st", f"{_SHARED}stsm", f"{_SHARED}ldgsts"),
}
"""The counters whose sum is each level and direction of the contract. A GPU without one moves no such bytes."""

TENSOR_OPS = {
    "float16": ("sm__ops_path_tensor_src_fp16", "sm__ops_path_tensor_src_fp16_dst_fp32"),
    "bfloat16": ("sm__ops_path_tensor_src_bf16_dst_fp32",),
    FP8: ("sm__ops_path_tensor_src_fp8",),
}
"""Operations of the tensor cores, by the dtype of the operands; the first that the GPU has."""

EXP = "sm__inst_executed_pipe_xu"
EXP_FACTOR = (0.9, 3.5)
"""Within which the unit for special functions must agree with `exp`: it also does reciprocals and logarithms, one a row or
so, which tells where rows see few keys."""

DRAM_READ, DRAM_WRITE = "dram__bytes_read", "dram__bytes_write"
DRAM_SLACK = 64 * 1024
"""Stray reads: the launch's parameters, code, page tables (bytes)."""
DRAM_FROM = 1_000_000
"""Problems that allocate no more than this (bytes) are too small for a judgement of DRAM reads."""

RATES = {
    "l2_hit_rate": "lts__t_sector_hit_rate.pct",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "warp_efficiency": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
"""Reported, not judged: percent, percent, and threads an instruction (of 32)."""

SECTORS = {
    f"sectors_{op}": f"smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{op}" for op in ("ld", "st", "ldgsts", "red")
}
WAVEFRONTS = {
    f"wavefronts_{op}": f"smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{op}"
    for op in ("ld", "st", "ldsm", "stsm", "ldgsts")
}
"""By instruction: sectors of 32 bytes in HBM, and passes over the banks of SRAM, conflicts included."""

EXTRAS = {
    "local_bytes": ("smsp__sass_data_bytes_mem_local",),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared",),
    **{name: (metric,) for name, metric in {**SECTORS, **WAVEFRONTS}.items()},
}
"""Reported, not judged here: spilled bytes, conflicts (these two as the hardware sees them: kernels in one another's way
conflict, too), sectors and wavefronts. The emulator's sectors and wavefronts are held against these."""


@dataclass(frozen=True)
class Check:
    """One quantity of one launch, as simulated, by formula, and measured (None: not to be had)."""

    what: str
    simulated: int | None
    formula: int
    measured: int | None

    @property
    def verdict(self) -> str:
        if self.simulated not in (None, self.formula):
            return "differs"
        return "not measured" if self.measured is None else "equal" if self.measured == self.formula else "differs"


@dataclass(frozen=True)
class DramCheck:
    """Reads from DRAM of one launch from a cold L2: `low` (compulsory) and `high` (requested) hold them, give or take
    64 KB. `judged` is False for small problems; `estimate` is the L2 model's. `written` is a lower bound: dirty lines
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
            f"{c.what}: simulated {_figure(c.simulated)}, formula {_figure(c.formula)}, measured {_figure(c.measured)}"
            for c in self.checks
            if c.verdict == "differs"
        ]
        if self.dram and self.dram.judged and not self.dram.inside:
            d = self.dram
            found.append(f"DRAM read: measured {d.measured:,}, outside {d.low:,} to {d.high:,} (± 64 KB)")
        if self.exp_factor is not None and not EXP_FACTOR[0] <= self.exp_factor <= EXP_FACTOR[1]:
            found.append(f"exp: {self.exp_factor:.2f} × the formula's, outside {EXP_FACTOR[0]} to {EXP_FACTOR[1]}")
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
        checks = [check for launch in self.launches for check in launch.checks if check.measured is not None]
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
        return {"equal": "=", "differs": "≠", "not measured": "?"}[check.verdict]

    rows = [(c.what, _figure(c.simulated), _figure(c.formula), _figure(c.measured), sign(c)) for c in launch.checks]
    table(
        f"{launch.case.name}: {launch.launch}, {launch.blocks:,} blocks", ("", "simulated", "formula", third, ""), rows
    )
    if launch.dram:
        d = launch.dram
        line(
            f"DRAM read {d.measured:,} bytes, between compulsory {d.low:,} and requested {d.high:,}"
            f""
            f"{'' if d.judged else ' (too small to judge)'}; at least {d.written:,} written"
        )
    if launch.exp_factor is not None:
        line(f"special function unit: {launch.exp_factor:.2f} × exp")
    if launch.rates:
        line(", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in launch.rates.items()))
    line(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in launch.extras.items()))


def _line(launch: LaunchReport) -> tuple[str, ...]:
    checks = {check.what: check for check in launch.checks}

    def cell(what: str) -> str:
        check = checks.get(what)
        if check is None or check.measured is None:
            return ""
        return f"= {check.measured:,}" if check.verdict == "equal" else f"{check.measured:,} ≠ {check.formula:,}"

    d = launch.dram
    return (
        launch.case.name,
        launch.launch,
        *(cell(what) for what in (*BYTES, "flops.matmul")),
        f"{d.measured:,}" if d else "",
        f"{launch.rates.get('l2_hit_rate', 0):.0f} %",
        f"{launch.rates.get('occupancy', 0):.0f} %",
    )


def _figure(n: int | None) -> str:
    return "?" if n is None else f"{n:,}"


def _extent(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


# How it is run


def run(
    cases: Sequence[Case],
    *,
    device: Device | None = None,
    simulate_up_to: int = 1_000_000,
    timeout: float = 600,
    progress: Callable[[Iterable[list[Case]]], Iterable[list[Case]]] = iter,
) -> CountersReport:
    """Run the cases' kernels under ncu on this machine's GPU and compare every launch with simulator and formula.

    Problems of more tiles than `simulate_up_to` are compared with the formula alone. A case that fails leaves those of
    other algorithms standing: it is one line in `.errors`. `progress` wraps the batches of cases that share a process.
    Raises `Unavailable` without a GPU, without ncu, or without the permission to read counters.
    """
    from flashlab.run.devices import current_device

    device = current_device() if device is None else device
    metrics = _metrics()
    launches: list[LaunchReport] = []
    models: list[ModelCheck] = []
    errors: list[str] = []
    for batch in progress(_by_algorithm(cases)):
        counts = [count(case.algorithm, case.problem, tile=case.tile, device=device, lse=case.lse) for case in batch]
        names = [x.name for c in counts for x in c.launches if x.blocks]
        try:
            measured = parse(_profile(batch, metrics, timeout))
            if [m.kernel for m in measured] != names:
                raise RuntimeError(f"ncu saw {len(measured)} launches of the {len(names)} that were to run")
        except RuntimeError as error:
            if isinstance(error, Unavailable):
                raise
            errors.append(f"{batch[0].algorithm}: {error}")
            continue
        left = iter(measured)
        for case, formula in zip(batch, counts, strict=True):
            simulated = _simulated(case, formula, simulate_up_to)
            mine = [
                compare(case, simulated, formula, i, next(left)) for i, x in enumerate(formula.launches) if x.blocks
            ]
            launches += mine
            models += _model(case, formula, mine)
    return CountersReport(device.name, tuple(launches), tuple(models), tuple(errors))


def _by_algorithm(cases: Sequence[Case]) -> list[list[Case]]:
    """One profiler session for each run of cases of one algorithm: what fails in one leaves the others standing."""
    return [list(group) for _, group in groupby(cases, key=lambda case: case.algorithm)]


def _simulated(case: Case, formula: Counts, most: int) -> Counts | None:
    if case.problem.row_tiles(formula.tile) * case.problem.key_tiles(formula.tile) > most:
        return None
    return shape_run(case.algorithm, case.problem, tile=case.tile, device=formula.device, lse=case.lse)


def _model(case: Case, formula: Counts, launches: Sequence[LaunchReport]) -> list[ModelCheck]:
    """The model against the measurement; none for a problem that is too small to judge."""
    drams = [launch.dram for launch in launches if launch.dram and launch.dram.judged]
    if not drams or len(drams) < len(launches):
        return []
    large = formula.hbm.peak > formula.device.l2 / 2
    return [ModelCheck(case.name, formula.dram.estimate, sum(d.measured for d in drams), large)]


def compare(case: Case, simulated: Counts | None, formula: Counts, index: int, measured: Measured) -> LaunchReport:
    """Hold one measured launch against the same launch of simulator and formula. Needs no GPU."""
    launch = formula.launches[index]
    shadow = None if simulated is None else simulated.launches[index]
    # no counter sees what TMA writes into SRAM
    unseen = {"sram.write"} if get(case.algorithm).kernels[index].boxes else set[str]()
    checks = [
        Check(
            what,
            None if shadow is None else shadow.bytes(what),
            launch.bytes(what),
            None if what in unseen else measured.total(names),
        )
        for what, names in BYTES.items()
    ]
    if operations := TENSOR_OPS.get(case.problem.dtype):
        simulated_ops = None if shadow is None else shadow.flops_matmul
        found = next((n for name in operations if (n := measured.total([name])) is not None), None)
        checks.append(Check("flops.matmul", simulated_ops, launch.flops_matmul, found))
    functions = measured.total([EXP])
    return LaunchReport(
        case=case,
        launch=launch.name,
        blocks=launch.blocks,
        checks=tuple(checks),
        dram=_dram(formula, launch, measured),
        exp=None if functions is None or not launch.exp else (launch.exp, 32 * functions),
        rates={name: measured.metrics[metric] for name, metric in RATES.items() if metric in measured.metrics},
        extras={name: total for name, names in EXTRAS.items() if (total := measured.total(names)) is not None},
    )


def _dram(counts: Counts, launch: LaunchCounts, measured: Measured) -> DramCheck | None:
    read = measured.total([DRAM_READ])
    if read is None:
        return None
    bounds = dram.of_launch(counts, launch)
    return DramCheck(
        measured=read,
        low=bounds.low,
        high=bounds.high,
        estimate=bounds.estimate,
        written=measured.total([DRAM_WRITE]) or 0,
        judged=counts.hbm.peak > DRAM_FROM,
    )


def _metrics() -> tuple[str, ...]:
    """The metrics to ask for, as far as the GPU has them."""
    sums = [name for names in (*BYTES.values(), *EXTRAS.values()) for name in names]
    sums += [*chain(*TENSOR_OPS.values()), EXP, DRAM_READ, DRAM_WRITE]
    wanted = [f"{name}.sum" for name in sums] + list(RATES.values())
    return tuple(name for name in dict.fromkeys(wanted) if name.split(".")[0] in ncu.known())


def _profile(cases: Sequence[Case], metrics: Sequence[str], timeout: float) -> str:
    """What ncu printed about the launches of `cases`, run in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = case_files.command(case_files.write(cases, Path(folder)), "--counted")
        kernels = {entry for case in cases for entry in case.entries}
        return ncu.profile(command, kernels=kernels, metrics=metrics, timeout=timeout)


# What its file holds and says


class Quantity(Data):
    """One quantity of one launch: a `Check` and its verdict."""

    what: str
    simulated: int | None
    formula: int
    measured: int | None
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
        f"; DRAM reads within the interval (± 64 KB) in {s.dram_inside} of the {s.dram_checked} launches of"
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
        rows.append((launch.case, launch.launch, *(_cell(cells.get(what)) for what in levels), read))
    models = [
        (model.case, f"{model.measured:,}", f"{model.estimate:,}", f"{model.error:+.1%}")
        for model in data.models
        if model.large
    ]
    text = markdown_table(("problem", "launch", *levels, "DRAM read"), rows)
    if models:
        text += "\n\n" + markdown_table(("problem", "DRAM read", "L2 model", "error"), models)
    return text


def _cell(row: Quantity | None) -> str:
    if row is None or row.verdict == "not measured":
        return ""
    return f"= {row.measured:,}" if row.verdict == "equal" else f"**{row.measured} ≠ {row.formula:,}**"


KIND = Kind(
    "counters",
    "Bytes: counted and measured",
    "simulated, formula and measured bytes, launch by launch; DRAM reads; the error of the L2 model",
    "flashlab counters --matrix --l2 --save docs/results",
    Counted,
    headline,
    table,
)
