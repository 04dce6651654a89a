"""Runs Nsight Compute's command line (ncu), and reads what it counts of the kernels that a command launches."""

from __future__ import annotations

import csv
import functools
import io
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashlab.measure import workload
from simulator.errors import Unavailable

__all__ = ["Measured", "known", "parse", "profile", "program"]


@dataclass(frozen=True)
class Measured:
    """What ncu measured of one launch: values by metric name."""

    kernel: str
    metrics: Mapping[str, float]

    def total(self, names: Iterable[str]) -> int | None:
        """The sum of counters. One that the GPU lacks counts as 0; if it lacks all of them, the sum is None."""
        found = [self.metrics[f"{name}.sum"] for name in names if f"{name}.sum" in self.metrics]
        return round(sum(found)) if found else None


@functools.cache
def known() -> frozenset[str]:
    """The metrics that this GPU has, by their names before the dot.

    ncu refuses a whole request if one of its metrics is missing. Raises `Unavailable` without ncu, or without
    permission to read counters.
    """
    done = subprocess.run([program(), "--query-metrics"], capture_output=True, text=True, timeout=120, check=False)
    _refuse(done.stdout + done.stderr)
    return frozenset(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE))


def profile(
    command: Sequence[str],
    *,
    kernels: Iterable[str],
    metrics: Sequence[str],
    timeout: float,
    options: Sequence[str] = (),
) -> str:
    """Run a command under ncu and return what ncu prints about its launches of `kernels`, for `parse`.

    `kernels` are regular expressions, `metrics` full metric names, `options` further options of ncu. Raises
    `RuntimeError` if the command fails or isn't done after `timeout` seconds, and `Unavailable` where ncu can't work.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        line = [
            program(), "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", *options,
            "--kernel-name", f"regex:^({'|'.join(sorted(set(kernels)))})$", "--metrics", ",".join(metrics),
            "--log-file", str(log), *command,
        ]  # fmt: skip
        try:
            env = workload.environment()
            done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False, env=env)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done within {timeout:.0f} s") from None
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    _refuse(printed + done.stderr)
    if done.returncode:
        lines = (*printed.splitlines(), *done.stderr.splitlines())  # the program's own last word says more than ncu's
        said = [x for x in lines if x.strip() and not x.startswith('"')]
        raise RuntimeError(f"ncu ended with {done.returncode}: {said[-1] if said else 'no output'}")
    return printed


def parse(text: str) -> list[Measured]:
    """The launches in what `ncu --csv --page raw --print-units base` printed, in order.

    >>> parse('==PROF== Connected\\n"ID","Kernel Name","dram__bytes_read.sum"\\n"","","byte"\\n"0","flash2","1,024"\\n')
    [Measured(kernel='flash2', metrics={'dram__bytes_read.sum': 1024.0})]
    """
    table = text[match.start() :] if (match := re.search(r'^"ID",', text, re.MULTILINE)) else ""
    rows = list(csv.DictReader(io.StringIO("\n".join(x for x in table.splitlines() if x.startswith('"')))))
    found: list[Measured] = []
    for row in rows[1:]:  # the first row holds the units
        values = {name: _number(value) for name, value in row.items() if re.match(r"[a-z0-9]+__", name)}
        kernel = row["Kernel Name"].split("(")[0]
        found.append(Measured(kernel, {name: value for name, value in values.items() if value is not None}))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # "n/a", or empty
        return None


def program() -> str:
    """The path of ncu. Raises `Unavailable` where there is none."""
    if found := shutil.which("ncu"):
        return found
    raise Unavailable(
        "ncu is not on the PATH: install Nsight Compute (part of the CUDA toolkit) or add its folder to PATH"
    )


def _refuse(printed: str) -> None:
    """Raise `Unavailable`, in one line, for a failure of ncu that the user can remedy."""
    if "ERR_NVGPUCTRPERM" in printed:
        raise Unavailable(
            "no permission to read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or let users in with the driver "
            "option NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )
    if match := re.search(r"Failed to initialize the profiler: (\w+)|(LibraryNotLoaded)", printed):
        reason = match[1] or match[2]
        raise Unavailable(f"ncu cannot reach the GPU's counters here ({reason}): a container or a VM may hide them")
