"""Emulator against GPU, on a machine that has one: the same inputs, the outputs and the hardware's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashlab.measure import counters, emulated
from flashlab.measure.counter_report import LaunchReport
from flashlab.measure.results import Content, Data, Kind, markdown_table
from flashlab.measure.workload import Case
from flashlab.run.emulated import Emulation
from simulator.catalogue import get
from simulator.operations.operation import Arrays

__all__ = ["KIND", "Agreement", "Row", "distance", "run"]

HALF = 0.5
"""Outputs may differ by this much of what rounding explains for each: the rule's bound of a row."""


REPORTED = {
    "wavefronts_ldgsts": "how the L1 joins copies whose lines of 128 bytes in HBM and SRAM don't match isn't known"
}
"""Quantities that may differ, and why: reported, not judged."""


@dataclass(frozen=True)
class Row:
    """One quantity of one launch: the emulator's and the hardware's count."""

    case: str
    launch: str
    what: str
    emulator: int
    gpu: int

    @property
    def equal(self) -> bool:
        return self.emulator == self.gpu


@dataclass(frozen=True)
class Agreement:
    """What `run` found. `outputs[case]`: the worst row's distance between the two outputs (and LSEs), as a share of the
    rule's bound; `findings` are the emulator's, `errors` cases that the GPU's counters couldn't be read for."""

    device: str
    rows: tuple[Row, ...]
    outputs: dict[str, float]
    findings: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def differing(self) -> list[Row]:
        """What is judged and differs."""
        return [row for row in self.rows if not row.equal and row.what not in REPORTED]

    @property
    def passed(self) -> bool:
        """All counts that are judged equal, all outputs within half of the bound, no findings."""
        near = all(ratio <= HALF for ratio in self.outputs.values())
        return bool(self.rows) and near and not (self.differing or self.findings or self.errors)

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(case.split()[0] for case in self.outputs))

    @property
    def summary(self) -> dict[str, Any]:
        by_what: dict[str, list[int]] = {}
        for row in self.rows:
            equal, compared = by_what.setdefault(row.what, [0, 0])
            by_what[row.what] = [equal + row.equal, compared + 1]
        return {
            "problems": len(self.outputs),
            "compared": len(self.rows),
            "equal": sum(row.equal for row in self.rows),
            "by_quantity": by_what,
            "worst_output": max(self.outputs.values(), default=0.0),
            "findings": len(self.findings),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "device": self.device,
            "summary": self.summary,
            "rows": [asdict(row) for row in self.rows],
            "outputs": self.outputs,
            "findings": list(self.findings),
            "errors": list(self.errors),
        }

    def print(self) -> None:
        """A line a quantity, and what differs."""
        from flashlab.views.tables import line, table

        s = self.summary
        rows = [(what, str(compared), str(equal)) for what, (equal, compared) in s["by_quantity"].items()]
        table("the emulator's counts and the hardware's", ("count", "launches", "equal"), rows)
        for row in self.differing[:20]:
            line(f"{row.case}, {row.launch}: {row.what}: emulator {row.emulator:,}, GPU {row.gpu:,}")
        for text in (*self.findings, *self.errors):
            line(text)
        for what, why in REPORTED.items():
            line(f"{what}: not judged, {why}")
        line(f"outputs of {s['problems']} problems: at most {s['worst_output']:.2f} of the rule's bound apart")
        line("passed" if self.passed else "FAILED")


def run(cases: Sequence[Case], *, progress: Callable[[Iterable[Case]], Iterable[Case]] = iter) -> Agreement:
    """Run every case on this machine's GPU, under its counters, and on the emulator as built for that GPU.

    Raises `Unavailable` without a GPU, ncu or a C++ compiler.
    """
    from flashlab.run.devices import current_device

    device = current_device()
    outputs: dict[str, float] = {}
    findings: list[str] = []
    mine: list[LaunchReport] = []
    with ThreadPoolExecutor(1) as pool:  # ncu works in a process of its own
        reading = pool.submit(counters.run, cases, device=device)
        for case in progress(cases):
            done = emulated.emulated(case, device)
            outputs[case.name] = _apart(case, done)
            findings += [f"{case.name}: {finding}" for finding in done.findings]
            mine += emulated.launches(case, done)
        hardware = reading.result()
    measured = {(launch.case.name, launch.launch): launch for launch in hardware.launches}
    pairs = [(launch, measured.get((launch.case.name, launch.launch))) for launch in mine]
    rows = [row for launch, other in pairs if other is not None for row in _rows(launch, other)]
    return Agreement(device.name, tuple(rows), outputs, tuple(findings), hardware.errors)


def _rows(mine: LaunchReport, other: LaunchReport) -> list[Row]:
    """What both counted of a launch."""
    emulated, gpu = (
        {**{check.what: check.measured for check in launch.checks}, **launch.extras} for launch in (mine, other)
    )
    return [
        Row(mine.case.name, mine.launch, what, count, gpu_count)
        for what, count in emulated.items()
        if count is not None and (gpu_count := gpu.get(what)) is not None
    ]


def _apart(case: Case, done: Emulation) -> float:
    """How far the GPU's outputs lie from the emulator's."""
    from flashlab.base.host import from_numpy, to_numpy
    from flashlab.run.plan import gpu_plan

    inputs = get(case.algorithm).operation.draw(case.problem, seed=0)
    plan = gpu_plan(case.algorithm, case.problem, tile=case.tile, lse=case.lse)
    on_gpu = plan.run({name: from_numpy(x, "cupy") for name, x in inputs.items()})
    return distance(case, inputs, {name: to_numpy(name, x) for name, x in on_gpu.items()}, done.outputs)


def distance(case: Case, inputs: Arrays, a: Arrays, b: Arrays) -> float:
    """The worst row's distance between two results, as a share of the rule's bound for that row."""
    operation, worst = get(case.algorithm).operation, 0.0
    bounds = operation.bounds(case.problem, inputs, operation.judge(case.problem, inputs))
    for name in a.keys() & b.keys():
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where(x == y, 0, np.abs(x - y))  # rows without keys: both LSEs are -inf
        if apart.ndim > bounds[name].ndim:
            apart = np.linalg.norm(apart, axis=-1)
        worst = np.maximum(worst, (apart / np.maximum(bounds[name], 1e-300)).max(initial=0))  # NaN stays
    return float(worst)


class Summary(Data):
    """How many counts were compared and are equal, also by quantity (equal, compared)."""

    problems: int
    compared: int
    equal: int
    by_quantity: dict[str, tuple[int, int]]
    worst_output: float
    findings: int


class Agreed(Data):
    """A report, as `Agreement.to_dict` gives it."""

    passed: bool
    device: str
    summary: Summary
    rows: tuple[Row, ...]
    outputs: dict[str, float]
    findings: tuple[str, ...]
    errors: tuple[str, ...]


def headline(data: Agreed) -> str:
    """Which quantities are equal in every launch, and how many launches differ in the others."""
    s = data.summary
    same = ", ".join(what for what, (equal, compared) in s.by_quantity.items() if equal == compared)
    apart = [f"{what} in {equal} of {n}" for what, (equal, n) in s.by_quantity.items() if equal != n]
    return (
        f"emulator and GPU over {s.problems} problems: equal in every launch: {same}"
        f"{'; ' if apart else ''}{', '.join(apart)}; outputs at most {s.worst_output:.2f} of the rule's bound apart; "
        f"{s.findings} findings"
    )


def table(data: Agreed) -> str:
    """A row per quantity."""
    rows = [(what, f"{n:,}", f"{equal:,}") for what, (equal, n) in data.summary.by_quantity.items()]
    return markdown_table(("count", "launches", "equal"), rows)


def passed(data: Content, algorithm: str) -> bool | None:
    """Are all bytes of an algorithm the same on both, without a finding or an error? None if none were compared."""
    rows = [row for row in data["rows"] if row["case"].startswith(f"{algorithm} ")]
    bytes_ = [row["emulator"] == row["gpu"] for row in rows if row["what"].startswith(("hbm.", "sram."))]
    wrong = any(said.startswith(f"{algorithm} ") for said in (*data["findings"], *data["errors"]))
    return (all(bytes_) and not wrong) if bytes_ or wrong else None


KIND = Kind(
    "agreement",
    "Bytes: the emulator's counts and the hardware's",
    "the emulator against the GPU: bytes, sectors, wavefronts, outputs",
    "flashlab counters standard online_softmax flash1 flash2 --matrix --backend both --save docs/results",
    Agreed,
    headline,
    table,
    passed=passed,
)
