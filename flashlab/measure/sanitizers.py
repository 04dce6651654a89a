"""Runs compute-sanitizer's four tools over a small grid of the kernels, and over planted faults that they must find.

A tool that has found nothing is believed only if it found what was planted (see `flashlab.measure.planted`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flashlab.measure import workload as case_files
from flashlab.measure.planted import CONTROLS, FAULTS
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.workload import Case
from simulator import CATALOGUE, Problem
from simulator.catalogue import with_kernels
from simulator.errors import Unavailable
from simulator.operations.problems import posed as posed_in

__all__ = [
    "KIND",
    "OPTIONS",
    "TOOLS",
    "Findings",
    "Ran",
    "Row",
    "SanitizersReport",
    "findings",
    "grid",
    "limited",
    "parse",
    "program",
    "run",
]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

OPTIONS: Mapping[str, tuple[str, ...]] = {
    # CuPy and torch raise API errors themselves, and some bindings ask the driver for functions that it doesn't have
    "memcheck": ("--leak-check", "no", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
"""By tool, what is said to it."""
_PLACE = re.compile(r"\bin (?:\S*/)?([\w.+-]+\.cuh?):(\d+)")


@dataclass(frozen=True)
class Ran:
    """What a program printed, or as much of it as it had when it was killed."""

    text: str
    killed: bool
    seconds: float


@dataclass(frozen=True)
class Findings:
    """What a tool said: how many findings (None: it did not finish), in which kernels, and its first message.

    `warnings` says how many of the findings are warnings. `places` are the lines that the messages name, as k.cu:12. `ended`
    says whether the program came to its end.
    """

    number: int | None
    kernels: tuple[str, ...]
    first: str
    warnings: int = 0
    places: tuple[str, ...] = ()
    ended: bool = True


@dataclass(frozen=True)
class Row:
    """One tool on one target: an algorithm's cases, a planted fault, or a control."""

    tool: str
    target: str
    cases: int
    findings: int | None
    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class SanitizersReport:
    """What the tools found in the kernels, in the planted faults and in the controls."""

    device: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """True if the tools found nothing in the kernels and every planted fault, and the controls ran.

        A control that is silent is no failure: the tool has learned to follow it."""
        return bool(self.rows) and all(row.verdict in ("clean", "found", "reported", "silent") for row in self.rows)

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(row.target for row in self._of_kernels))

    @property
    def _of_kernels(self) -> list[Row]:
        return [row for row in self.rows if row.target not in (*FAULTS, *CONTROLS)]

    @property
    def summary(self) -> dict[str, Any]:
        planted = [row for row in self.rows if row.target in FAULTS]
        controls = [row for row in self.rows if row.target in CONTROLS]
        real = self._of_kernels
        return {
            "tools": list(dict.fromkeys(row.tool for row in self.rows)),
            "runs": sum(row.cases for row in real),
            "findings": sum(row.findings or 0 for row in real),
            "unfinished": sum(row.verdict == "not finished" for row in self.rows),
            "faults": len(planted),
            "faults_found": sum(row.verdict == "found" for row in planted),
            "controls": len(controls),
            "controls_reported": sum(row.verdict == "reported" for row in controls),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"passed": self.passed, "device": self.device, "summary": self.summary, "rows": rows}

    def print(self) -> None:
        """Print a table, and the first message of every finding."""
        from flashlab.views.tables import line, table

        rows = [
            (r.tool, r.target, str(r.cases), "?" if r.findings is None else str(r.findings), r.verdict)
            for r in self.rows
        ]
        table("compute-sanitizer", ("tool", "target", "problems", "findings", "verdict"), rows, left=2)
        for row in self.rows:
            if row.verdict not in ("clean", "found", "reported"):
                line(f"{row.tool}, {row.target}: {row.detail}")
        line("passed" if self.passed else "FAILED")


class Summary(Data):
    """Runs and findings over the kernels, how many planted faults were found, and how many controls were reported."""

    tools: tuple[str, ...]
    runs: int
    findings: int
    unfinished: int
    faults: int
    faults_found: int
    controls: int = 0
    controls_reported: int = 0


class Sanitized(Data):
    """A report, as `SanitizersReport.to_dict` returns it."""

    passed: bool
    device: str
    summary: Summary
    rows: tuple[Row, ...]


def headline(data: Sanitized) -> str:
    """One sentence: what the tools found in the kernels, and how many of the planted faults."""
    s = data.summary
    return (
        f"{s.findings} findings by {', '.join(s.tools)} over {s.runs} runs; "
        f"{s.faults_found} of {s.faults} seeded faults found"
        + (f"; {s.controls_reported} of {s.controls} right kernels reported" if s.controls else "")
    )


def table(data: Sanitized) -> str:
    """A Markdown table with one row per tool and target."""
    rows = [(r.tool, r.target, str(r.cases), str(r.findings), r.verdict) for r in data.rows]
    return markdown_table(("tool", "algorithm", "problems", "findings", "verdict"), rows)


KIND = Kind(
    "sanitizers",
    "Memory: compute-sanitizer",
    "compute-sanitizer's four tools over the kernels, over planted faults, and over right kernels that they report",
    "flashlab sanitize --save docs/results",
    Sanitized,
    headline,
    table,
)


def grid(algorithms: Sequence[str] | None = None) -> list[Case]:
    """A small grid: each algorithm (default: all with kernels) in each dtype on a few problems.

    The problems have ragged edges, masks, GQA and empty rows. An algorithm gets those that ask only for what it knows, by its row
    of the catalogue: among them may be a soft cap, sinks, ALiBi, a ragged batch and masks.
    """

    def posed(algorithm: str) -> Iterable[tuple[str, Problem]]:
        row = CATALOGUE[algorithm]
        for dtype, name, shape in ((x, *each) for x in row.dtypes for each in posed_in(row.operation.sanitized, x)):
            # 8-bit rows fill multiples of 16 bytes here: the kernel reads padding without using it, and nobody writes padding
            whole = {"head_dim": 48} if row.support.eight_bit and shape["head_dim"] == 40 else {}
            sizes: dict[str, Any] = {"batch": 1, "dtype": dtype, **shape, **whole}
            problem = Problem(**sizes)
            fitted = row.fitted(problem)
            if problem.unknown_mask(row.support.masks, algorithm) is None and row.refusal(fitted) is None:
                yield name, fitted

    return [
        Case(f"{algorithm} {problem.dtype} {name}", algorithm, problem, lse=True)
        for algorithm in algorithms or with_kernels()
        for name, problem in posed(algorithm)
    ]


def run(
    cases: Sequence[Case] | None = None,
    *,
    tools: Sequence[str] = TOOLS,
    faults: bool = True,
    timeout: float = 600,
    workers: int = 4,
    progress: Callable[[Iterable[Callable[[], Row]]], Iterable[Callable[[], Row]]] = iter,
) -> SanitizersReport:
    """Run the tools over the cases (default: the grid): one process per tool and algorithm, `workers` at a time.

    With `faults`, also run the planted faults and the controls. A process that isn't done after `timeout` seconds counts as not
    finished. `progress` wraps the runs, as `tqdm.tqdm` would. Raises `Unavailable` without a GPU or compute-sanitizer.
    """
    from flashlab.run.devices import current_device

    path, device = program(), current_device()
    cases = grid() if cases is None else cases
    case_files.warm(cases)
    work: list[Callable[[], Row]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for algorithm in dict.fromkeys(case.algorithm for case in cases):
            mine = [case for case in cases if case.algorithm == algorithm]
            inside = Path(folder) / algorithm
            inside.mkdir()
            command = case_files.command(case_files.write(mine, inside), "--exact")
            for tool in tools:
                future = pool.submit(findings, path, tool, command, timeout)
                work.append(partial(_awaited, tool, algorithm, len(mine), future))
        for name, each in {**FAULTS, **CONTROLS}.items() if faults else ():
            if each.tool in tools:
                command = [sys.executable, "-m", "flashlab.measure.planted", name]
                future = pool.submit(findings, path, each.tool, command, timeout)
                work.append(partial(_awaited, each.tool, name, 1, future))
        rows = [each() for each in progress(work)]
    return SanitizersReport(device.name, tuple(rows))


def _awaited(tool: str, target: str, cases: int, future: Future[Findings]) -> Row:
    return _judged(tool, target, cases, future.result())


def _judged(tool: str, target: str, cases: int, found: Findings) -> Row:
    if found.number is None:
        return Row(tool, target, cases, None, "not finished", found.first)
    if target in CONTROLS:
        if not found.ended:  # what failed is no right kernel
            return Row(tool, target, cases, None, "not finished", found.first)
        verdict = "reported" if found.number else "silent"
        return Row(tool, target, cases, found.number, verdict, CONTROLS[target].what)
    if target in FAULTS:
        return Row(tool, target, cases, found.number, "found" if found.number else "MISSED", FAULTS[target].what)
    if not found.number:
        return Row(tool, target, cases, 0, "clean")
    where = f" (in {', '.join(found.kernels)})" if found.kernels else ""
    return Row(tool, target, cases, found.number, "FINDINGS", found.first + where)


def limited(command: Sequence[str], timeout: float) -> Ran:
    """Run a command, and kill it with its children at the end of the time."""
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=case_files.environment(),
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
        killed = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a tool's child, too, whose kernel never ends
        text, _ = process.communicate()
        killed = True
    return Ran(text, killed, time.monotonic() - begun)


def findings(path: str, tool: str, command: Sequence[str], timeout: float, *options: str) -> Findings:
    """What a tool finds in a command, which prints a line with "launched " when its kernels have run.

    `path` is that of compute-sanitizer. `options` stand in for those of `OPTIONS`.
    """
    ran = limited([path, "--tool", tool, *(options or OPTIONS[tool]), *command], timeout)
    if ran.killed:
        return Findings(None, (), f"not done within {timeout:.0f} s")
    found = parse(ran.text)
    # without this line the program failed before its kernels ran, so that no findings would mean nothing
    ended = "launched " in ran.text
    if not found.number and not ended:
        said = [line for line in ran.text.splitlines() if line.strip() and not line.startswith("=========")]
        return Findings(None, (), (said or [found.first or "no output"])[-1])
    return replace(found, ended=ended)


def parse(text: str) -> Findings:
    """Read what compute-sanitizer printed.

    >>> parse("========= ERROR SUMMARY: 0 errors")
    Findings(number=0, kernels=(), first='', warnings=0, places=(), ended=True)
    >>> found = parse("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)")
    >>> found.number, found.warnings
    (2, 1)
    """
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    number, warnings = None, 0
    for said in lines:  # another line says how many of the errors were not printed
        if match := re.match(r"(?:ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazards?)", said):
            number = (number or 0) + int(match[1] or match[2])
        if match := re.match(r"RACECHECK SUMMARY: .*\b(\d+) warning", said):
            warnings += int(match[1])
    places = (re.search(r"\bat (?:void )?([\w:]+)(?:<.*>)?(?:\(.*\))?\+0x", said) for said in lines)
    kernels = dict.fromkeys(place[1] for place in places if place)
    frame = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY")
    first = next((said for said in lines if said and not said.startswith(frame)), "")
    named = dict.fromkeys(f"{name}:{line}" for name, line in _PLACE.findall("\n".join(lines)))
    return Findings(number, tuple(kernels), first, warnings, tuple(named))


def program() -> str:
    """The path of compute-sanitizer. Raises `Unavailable` where there is none."""
    if found := shutil.which("compute-sanitizer"):
        return found
    raise Unavailable("compute-sanitizer is not on the PATH: install the CUDA toolkit, or add its bin folder to PATH")
