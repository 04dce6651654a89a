"""Runs compute-sanitizer's four tools over a small grid of the kernels, and over planted faults that they must find.

A tool that has found nothing is believed only if it found what was planted. Faults are planted in kernels of a few
lines, and in our own (without their barriers, or on inputs that nobody wrote).

`python -m flashlab.measure.sanitizers FAULT` runs one planted fault.
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
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from flashlab.measure import workload as case_files
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.workload import Case
from simulator import CATALOGUE, Problem
from simulator.catalogue import Algorithm, with_kernels
from simulator.errors import Unavailable
from simulator.operations.backward import BACKWARD
from simulator.problem import SCORES

__all__ = [
    "FAULTS",
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
class Fault:
    """A planted fault: the tool that must find it, what it is, and a function that runs it."""

    tool: str
    what: str
    plant: Callable[[], None]


@dataclass(frozen=True)
class Ran:
    """What a program printed, or as much of it as it had when it was killed."""

    text: str
    killed: bool
    seconds: float


@dataclass(frozen=True)
class Findings:
    """What a tool said: how many findings (None: it did not finish), in which kernels, and its first message.

    `warnings` says how many of the findings are warnings. `places` are the lines that the messages name, as k.cu:12.
    """

    number: int | None
    kernels: tuple[str, ...]
    first: str
    warnings: int = 0
    places: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One tool on one target: an algorithm's cases, or a planted fault."""

    tool: str
    target: str
    cases: int
    findings: int | None
    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class SanitizersReport:
    """What the tools found in the kernels and in the planted faults."""

    device: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """True if the tools found nothing in the kernels and every planted fault."""
        return bool(self.rows) and all(row.verdict in ("clean", "found") for row in self.rows)

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(row.target for row in self.rows if row.target not in FAULTS))

    @property
    def summary(self) -> dict[str, Any]:
        planted = [row for row in self.rows if row.target in FAULTS]
        real = [row for row in self.rows if row.target not in FAULTS]
        return {
            "tools": list(dict.fromkeys(row.tool for row in self.rows)),
            "runs": sum(row.cases for row in real),
            "findings": sum(row.findings or 0 for row in real),
            "unfinished": sum(row.verdict == "not finished" for row in self.rows),
            "faults": len(planted),
            "faults_found": sum(row.verdict == "found" for row in planted),
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
            if row.verdict not in ("clean", "found"):
                line(f"{row.tool}, {row.target}: {row.detail}")
        line("passed" if self.passed else "FAILED")


class Summary(Data):
    """Runs and findings over the kernels, and how many planted faults were found."""

    tools: tuple[str, ...]
    runs: int
    findings: int
    unfinished: int
    faults: int
    faults_found: int


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
    )


def table(data: Sanitized) -> str:
    """A Markdown table with one row per tool and target."""
    rows = [(r.tool, r.target, str(r.cases), str(r.findings), r.verdict) for r in data.rows]
    return markdown_table(("tool", "algorithm", "problems", "findings", "verdict"), rows)


KIND = Kind(
    "sanitizers",
    "Memory: compute-sanitizer",
    "compute-sanitizer's four tools over the kernels and over planted faults",
    "flashlab sanitize --save docs/results",
    Sanitized,
    headline,
    table,
)


def grid(algorithms: Sequence[str] | None = None) -> list[Case]:
    """A small grid: each algorithm (default: all with kernels) in each dtype on a few problems.

    The problems have ragged edges, masks, GQA and empty rows, and where an algorithm knows them a soft cap, sinks, ALiBi, a
    ragged batch, and masks.
    """
    problems: dict[str, dict[str, Any]] = {
        "ragged causal": {"heads": 2, "len_q": 97, "head_dim": 40, "causal": True},
        "GQA, window": {"heads": 4, "kv_heads": 2, "len_q": 130, "head_dim": 64, "window": (33, 5)},
        "fewer queries": {"heads": 1, "len_q": 33, "len_kv": 239, "head_dim": 128, "causal": True},
        "empty rows": {"heads": 1, "len_q": 150, "len_kv": 17, "head_dim": 64, "causal": True},
    }
    scored: dict[str, dict[str, Any]] = {
        "soft cap, sinks, ALiBi": {**problems["ragged causal"], "soft_cap": 5.0, "sinks": True, "alibi": True},
        "sinks, empty rows": {**problems["empty rows"], "sinks": True},
    }
    sequences: dict[str, dict[str, Any]] = {
        "sequences": {"heads": 2, "lengths": [70, 0, (3, 97), (0, 5), (65, 130)], "head_dim": 64, "causal": True}
    }
    masks: dict[str, dict[str, Any]] = {
        "mask": {**problems["fewer queries"], "mask": "dense"},
        "bits": {**problems["ragged causal"], "mask": "bits"},
        "blocks": {**problems["fewer queries"], "mask": "blocks"},
        "mask, sequences": {**sequences["sequences"], "mask": "dense"},
        "bits, sequences": {**sequences["sequences"], "mask": "bits"},
    }
    # 8-bit rows fill multiples of 16 bytes here: the kernel reads padding without using it, and nobody writes padding
    whole: dict[str, dict[str, Any]] = {"ragged causal": {**problems["ragged causal"], "head_dim": 48}}

    def shapes(row: Algorithm) -> dict[str, dict[str, Any]]:
        known = set(row.support.masks)
        own = whole if row.support.eight_bit else scored if set(SCORES) <= known else {}
        ragged = sequences if "lengths" in known and not row.operation.in_pages else {}
        if {"sinks", "lengths"} <= known and row.operation is BACKWARD:
            ragged = {**ragged, "sequences, sinks": {**sequences["sequences"], "sinks": True}}
        return problems | own | ragged | (masks if "mask" in known else {})

    def fitted(algorithm: str, problem: Problem) -> Problem:
        return CATALOGUE[algorithm].operation.fitted(problem)

    return [
        Case(
            f"{algorithm} {dtype} {name}",
            algorithm,
            fitted(algorithm, Problem(batch=1, dtype=dtype, **shape)),
            lse=True,
        )
        for algorithm in algorithms or with_kernels()
        for dtype, (name, shape) in product(CATALOGUE[algorithm].dtypes, shapes(CATALOGUE[algorithm]).items())
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

    With `faults`, also run the planted faults. A process that isn't done after `timeout` seconds counts as not
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
        for name, fault in FAULTS.items() if faults else ():
            if fault.tool in tools:
                command = [sys.executable, "-m", "flashlab.measure.sanitizers", name]
                future = pool.submit(findings, path, fault.tool, command, timeout)
                work.append(partial(_awaited, fault.tool, name, 1, future))
        rows = [each() for each in progress(work)]
    return SanitizersReport(device.name, tuple(rows))


def _awaited(tool: str, target: str, cases: int, future: Future[Findings]) -> Row:
    return _judged(tool, target, cases, future.result())


def _judged(tool: str, target: str, cases: int, found: Findings) -> Row:
    planted = target in FAULTS
    if found.number is None:
        return Row(tool, target, cases, None, "not finished", found.first)
    if planted:
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
    if not found.number and "launched " not in ran.text:
        said = [line for line in ran.text.splitlines() if line.strip() and not line.startswith("=========")]
        return Findings(None, (), (said or [found.first or "no output"])[-1])
    return found


def parse(text: str) -> Findings:
    """Read what compute-sanitizer printed.

    >>> parse("========= ERROR SUMMARY: 0 errors")
    Findings(number=0, kernels=(), first='', warnings=0, places=())
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


# The planted faults


def _tiny(source: str, threads: int = 64) -> Callable[[], None]:
    """A function that runs a kernel of a few lines on an array of 64 floats that nobody wrote."""

    def plant() -> None:
        from flashlab.run.arrays import cupy

        kernel = cupy().RawKernel(f'extern "C" __global__ void planted(float* x) {{ {source} }}', "planted")
        kernel((1,), (threads,), (cupy().empty(64, "float32"),))

    return plant


def _without_barriers() -> None:
    """Run flash2, compiled from a copy of the headers whose barrier does nothing."""
    import kernels_cu

    with tempfile.TemporaryDirectory() as folder:
        headers = Path(folder) / "include"
        shutil.copytree(kernels_cu.include_dir(), headers)
        for path in headers.rglob("*.cuh"):
            path.write_text(path.read_text().replace("__syncthreads()", "(void)0"))
        kernels_cu.include_dir = lambda: headers
        case_files.launch(_PLAIN)


def _unwritten() -> None:
    """Run flash2 on q, k and v as they come from the allocator."""
    from flashlab.run.plan import gpu_plan

    gpu_plan("flash2", _PLAIN[0].problem).launch({})


_PLAIN = [Case("plain", "flash2", Problem(batch=1, heads=1, len_q=200, head_dim=64, dtype="float16"))]

FAULTS: Mapping[str, Fault] = {
    "write-past-the-end": Fault("memcheck", "a store 4 KB past the end", _tiny("x[1024 + threadIdx.x] = 1;")),
    "missing-barrier": Fault(
        "racecheck",
        "neighbours exchange words through SRAM with no barrier between",
        _tiny("__shared__ volatile float s[64]; s[threadIdx.x] = threadIdx.x; x[threadIdx.x] = s[63 - threadIdx.x];"),
    ),
    "flash2-without-barriers": Fault("racecheck", "our flash2 without its barriers", _without_barriers),
    "read-unwritten": Fault("initcheck", "a load of what nobody wrote", _tiny("x[threadIdx.x] = x[threadIdx.x] + 1;")),
    "flash2-on-unwritten-inputs": Fault("initcheck", "our flash2 on inputs that nobody wrote", _unwritten),
    "divergent-barrier": Fault(
        "synccheck",
        "a barrier that part of a warp never reaches",
        _tiny("if (threadIdx.x < 40) { __syncthreads(); } x[threadIdx.x] = 1;"),
    ),
}
"""The planted faults by name. If a tool misses one, its silence elsewhere means nothing."""


if __name__ == "__main__":
    from flashlab.run.arrays import cupy

    cupy().cuda.set_allocator(None)
    FAULTS[sys.argv[1]].plant()
    cupy().cuda.runtime.deviceSynchronize()
    print("launched 1 fault")
