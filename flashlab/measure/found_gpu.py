"""Runs the defects of published kernels on this machine's GPU, plainly and under compute-sanitizer's four tools.

    python -m flashlab.measure.found_gpu CHECKOUT… [--out docs/results] [--force] [--workers 8] [--timeout 120]

Each file is the one that the newest result of `flashlab.measure.found` is about, to the byte; `git` isn't needed. nvcc compiles
the kernel from the file's own lines (`flashlab.emulator.reduced`), and it gets the arguments that `flashlab emulate` makes of
the same words. A process of its own launches it, once under each tool, and 1,000 times without one: a race may show itself in
results that are wrong, or that differ from launch to launch. It needs CuPy, nvcc, compute-sanitizer and a C++ compiler.
docs/found-in-public-kernels.md shows the newest result.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from flashlab.cli.emulate import values
from flashlab.emulator import BuildError, Empty
from flashlab.emulator.build import parsed
from flashlab.emulator.files import packed
from flashlab.emulator.reduced import write
from flashlab.measure import results, sanitizers
from flashlab.measure.corpus_defects import Defect
from flashlab.measure.found import KIND as ON_A_CPU
from flashlab.measure.found import Row as OnACpu
from flashlab.measure.found import blob_of, here, parser
from flashlab.measure.found_answers import error, nans
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.sanitizers import TOOLS, limited
from flashlab.run.devices import current_device
from flashlab.run.nvrtc import Compiled
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Unavailable, UsageError

__all__ = ["KIND", "FoundOnGpu", "Job", "Plain", "Row", "Seen", "prepared", "run", "seen"]

LAUNCHES = 1000
_OPTIONS = {"racecheck": ("--racecheck-report", "all")}


class Seen(Data):
    """What a tool of compute-sanitizer said of one launch."""

    tool: str
    findings: int | None
    """Errors, of racecheck hazards; None: the tool didn't come to its end."""
    warnings: int
    """How many of the hazards are warnings."""
    first: str
    """The first message, or why it didn't come to its end."""
    kernel: bool
    """Does a message name the kernel?"""
    lines: list[int]
    """The lines of the file that messages name."""
    takes_part: bool
    """Is one of them a line that takes part in the defect?"""


class Plain(Data):
    """The same launch without a tool, many times, each on the same arrays."""

    launches: int
    distinct: int | None
    """How many different results the launches left; None: they didn't come to their end."""
    error: float | None
    """How far an element of one of these results is at most from NumPy's in float64 (of the first 20, where they differ)."""
    nans: int | None
    """The most elements that are NaN in one of these results."""
    said: str
    """Why the launches didn't come to their end."""


class Row(Data):
    """One defect on a GPU."""

    repository: str
    file: str
    commit: str
    kernel: str
    registers: int
    """Per thread, as ptxas reports them."""
    plain: Plain
    tools: list[Seen]


class FoundOnGpu(Data):
    """What a GPU and compute-sanitizer show of the defects of published kernels."""

    rows: list[Row]


@dataclass(frozen=True)
class Job:
    """A defect ready to be launched from a folder: its arguments, and which of them are arrays that the kernel may write."""

    defect: Defect
    folder: Path
    registers: int
    given: Mapping[str, Any]
    outputs: tuple[str, ...]

    def command(self, out: str, launches: int) -> list[str]:
        """The launches, as a process that leaves what it found in a folder."""
        (self.folder / out).mkdir()
        words = (str(self.folder), str(self.folder / out), str(launches))
        return [sys.executable, "-m", "flashlab.measure.found_child", *words]


def prepared(defect: Defect, checkout: Path, folder: Path, arch: int) -> Job:
    """Compile a defect's kernel for compute capability `arch` (90 for 9.0), and write down its arguments.

    Raises `BuildError` for a kernel that doesn't compile, `Unavailable` without a compiler.
    """
    path = checkout / defect.file
    given = values("--arg", defect.arguments)
    parameters, arena = packed(path, defect.kernel, given)
    arrays = arena.buffers
    pointers = {np.uint64(arena.pointer(name)).tobytes(): name for name in arrays}
    entry, registers = _compiled(defect, path, folder, arch)
    job: dict[str, Any] = {
        "entry": entry, "grid": defect.grid, "block": defect.block, "sram": defect.sram,
        "arrays": {name: buffer.data.nbytes for name, buffer in arrays.items()},
        "arguments": [{"array": pointers[x]} if x in pointers else {"bytes": x.hex()} for x in parameters],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    # as in the emulator, nobody has written the others
    written: dict[str, Any] = {name: buffer.data for name, buffer in arrays.items() if buffer.written.any()}
    np.savez(folder / "written.npz", **written)
    outputs = tuple(name for name, buffer in arrays.items() if not buffer.read_only)
    return Job(defect, folder, registers, given, outputs)


def _compiled(defect: Defect, path: Path, folder: Path, arch: int) -> tuple[str, int]:
    """The kernel's name in the machine code that nvcc leaves in the folder, and its registers."""
    if not (nvcc := shutil.which("nvcc")):
        raise Unavailable("nvcc is not on the PATH: install the CUDA toolkit, or add its bin folder to PATH")
    source = write(parsed(path, [defect.kernel], arch=10 * arch), [defect.kernel], folder / "source")
    command = [
        nvcc, "-cubin", f"-arch=sm_{arch}", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas=-v",
        *source.options, "-o", str(folder / "kernel.cubin"), str(source.path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kernels = Compiled(image=b"", log=done.stderr).resources
    if done.returncode or len(kernels) != 1:
        wrong = [line for line in done.stderr.splitlines() if "error" in line] or [f"nvcc made {len(kernels)} kernels"]
        raise BuildError(f"{defect.kernel} of {path.name} doesn't compile: {wrong[0]}")
    ((name, resources),) = kernels.items()
    return name, resources.registers


def seen(job: Job, tool: str, program: str, timeout: float) -> Seen:
    """What a tool says of one launch. `program` is the path of compute-sanitizer."""
    options = _OPTIONS.get(tool, ())
    found = sanitizers.findings(program, tool, job.command(tool, 1), timeout, *options)
    name = Path(job.defect.file).name
    lines = sorted({int(line) for file, _, line in (place.rpartition(":") for place in found.places) if file == name})
    kernels = [kernel.rpartition("::")[2] for kernel in found.kernels]
    return Seen(
        tool=tool, findings=found.number, warnings=found.warnings, first=found.first.replace(f"{job.folder}/", ""),
        kernel=job.defect.kernel.partition("<")[0] in kernels, lines=lines,
        takes_part=not set(lines).isdisjoint(job.defect.lines),
    )  # fmt: skip


def run(job: Job, timeout: float) -> Plain:
    """What the launches leave without a tool."""
    ran = limited(job.command("plain", LAUNCHES), timeout)
    left = job.folder / "plain"
    if not (left / "distinct.json").exists():
        why = f"not done within {timeout:.0f} s" if ran.killed else (ran.text.strip() or "no output").splitlines()[-1]
        return Plain(launches=LAUNCHES, distinct=None, error=None, nans=None, said=why)
    with np.load(left / "kept.npz") as file:
        numbers = dict.fromkeys(key.partition("/")[0] for key in file.files)
        kept = [{name: _shaped(job.given[name], file[f"{i}/{name}"]) for name in job.outputs} for i in numbers]
    errors = [far for each in kept if (far := error(job.defect, job.given, each)) is not None]
    return Plain(
        launches=LAUNCHES, distinct=json.loads((left / "distinct.json").read_text(encoding="utf-8")),
        error=max(errors, default=None), nans=max(nans(each.values()) for each in kept), said="",
    )  # fmt: skip


def _shaped(given: Array | Empty, left: Array) -> Array:
    """The bytes of an array with the dtype and shape of the argument."""
    return left.view(numpy_dtype(given.dtype) if isinstance(given, Empty) else given.dtype).reshape(given.shape)


def recorded(defects: Sequence[tuple[Defect, Path]]) -> list[OnACpu]:
    """The record of each defect on the emulator. Raises `UsageError` for a file that isn't the one on record."""
    newest = results.latest(ON_A_CPU.name)
    known = {(row.repository, row.file, row.kernel): row for row in (ON_A_CPU.data(newest).rows if newest else ())}
    rows: list[OnACpu] = []
    for defect, folder in defects:
        row = known.get((defect.repository, defect.file, defect.kernel))
        if row is None:
            raise UsageError("kernel", defect.kernel, f"one that {results.FOLDER}/{ON_A_CPU.name} has a record of")
        if row.blob != blob_of(folder / defect.file):
            raise UsageError("checkout", str(folder), f"commit {row.commit} of {row.repository}: {row.file} is another")
        rows.append(row)
    return rows


def measured(checkouts: Sequence[Path], workers: int, timeout: float) -> FoundOnGpu:
    """Run all defects whose files are in these checkouts, `workers` processes at a time."""
    defects = list(here(checkouts))
    known, program, capability = recorded(defects), sanitizers.program(), current_device().compute_capability
    arch = 10 * capability[0] + capability[1]

    def ready(i: int) -> Job:
        (Path(name) / str(i)).mkdir()
        return prepared(*defects[i], Path(name) / str(i), arch)

    with TemporaryDirectory(prefix="flashlab-") as name, ThreadPoolExecutor(workers) as pool:
        jobs = list(pool.map(ready, range(len(defects))))
        plain = [pool.submit(run, job, timeout) for job in jobs]
        tools = [[pool.submit(seen, job, tool, program, timeout) for tool in TOOLS] for job in jobs]
        rows: list[Row] = []
        for i, row in enumerate(known):
            rows.append(
                Row(
                    repository=row.repository, file=row.file, commit=row.commit, kernel=row.kernel,
                    registers=jobs[i].registers, plain=plain[i].result(), tools=[each.result() for each in tools[i]],
                )
            )  # fmt: skip
            print(f"{row.kernel}: {', '.join(map(said, rows[-1].tools))}", file=sys.stderr, flush=True)
    return FoundOnGpu(rows=rows)


def headline(data: FoundOnGpu) -> str:
    """How many of the defects each tool names at a line that takes part, and how many show themselves without one."""
    counts = ", ".join(f"{tool} {sum(named(row, tool) for row in data.rows)}" for tool in TOOLS)
    differ = sum((row.plain.distinct or 0) > 1 for row in data.rows)
    return (
        f"of {len(data.rows)} defects of published kernels, compute-sanitizer names at a line that takes part: {counts}; "
        f"{differ} show themselves in results that differ from launch to launch"
    )


def named(row: Row, tool: str) -> bool:
    """Did a tool name a line that takes part in the defect?"""
    return any(each.takes_part for each in row.tools if each.tool == tool)


def said(each: Seen) -> str:
    """What a tool found, in a few words."""
    if each.findings is None:
        return "no end"
    if not each.findings:
        return "–"
    return f"{each.findings:,}, " + ("at its lines" if each.takes_part else "elsewhere" if each.lines else "no line")


def without(plain: Plain) -> str:
    """What the launches without a tool showed, in a few words."""
    if plain.distinct is None:
        return plain.said
    differ = f"{plain.distinct:,} results" if plain.distinct > 1 else "always the same"
    return f"{differ}, {plain.nans:,} NaN" if plain.nans else f"{differ}{off(plain.error)}"


def off(error: float | None) -> str:
    """How far a result is from NumPy's, in a few words.

    >>> off(0.125), off(0.0), off(None)
    (', 0.12 off', '', '')
    """
    return f", {error:.2g} off" if error else ""


def table(data: FoundOnGpu) -> str:
    """A row for each defect."""
    return markdown_table(("file", "kernel", *TOOLS, "without a tool"), [
        (f"{row.repository}: {row.file}", f"`{row.kernel}`", *map(said, row.tools), without(row.plain)) for row in data.rows
    ])  # fmt: skip


KIND = Kind(
    "found-gpu",
    "Correctness: defects of published kernels on a GPU",
    "what a GPU and compute-sanitizer show of the same launches",
    "python -m flashlab.measure.found_gpu CHECKOUT…",
    FoundOnGpu,
    headline,
    table,
)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=8, help="processes at a time (%(default)s)")
    options.add_argument("--timeout", type=float, default=120, help="seconds for each (%(default)s)")
    given = options.parse_args()
    try:
        data = measured(given.checkouts, given.workers, given.timeout).model_dump()
        print(results.save(KIND, [], data, subject="kernels", folder=given.out, replace=given.force))
    except (UsageError, Unavailable, BuildError) as wrong:
        print(wrong, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
