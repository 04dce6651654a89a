"""How long the emulator takes: `python -m flashlab.measure.emulator_speed [--out docs/results] [--force]`.

Each row gives the seconds that one call of `fl.emulate` takes on kernels that are already compiled (float16, no mask), the
median of seven.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import flashlab as fl
from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table

CALLS = (
    ("flash2", 128, True),
    ("flash2", 128, False),
    ("flash1", 128, True),
    ("standard", 128, True),
    ("flash3", 128, True),
    ("flash2", 1024, True),
)
"""Algorithm, length (with 2 heads and head dim 64), and whether the run is sanitised."""


def seconds(call: Callable[[], object]) -> float:
    """The median time of seven calls, after one that isn't counted."""
    taken: list[float] = []
    for _ in range(8):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def rows() -> list[dict[str, Any]]:
    """What each of `CALLS` takes, as plain data for `Row`."""
    found: list[dict[str, Any]] = []
    for algorithm, length, sanitize in CALLS:
        arrays = fl.random_inputs(fl.Problem(batch=1, heads=2, len_q=length, head_dim=64, dtype="float16"))
        took = seconds(lambda a=algorithm, x=arrays, s=sanitize: fl.emulate(a, *x, sanitize=s))
        found.append({"algorithm": algorithm, "length": length, "sanitize": sanitize, "seconds": took})
    return found


class Row(Data):
    """One call: 2 heads × `length` × 64 in float16."""

    algorithm: str
    length: int
    sanitize: bool
    seconds: float


class Calls(Data):
    """What was timed, on a machine with `cores` cores."""

    cores: int
    rows: tuple[Row, ...]


def headline(data: Calls) -> str:
    """One sentence: the first call's time."""
    row = data.rows[0]
    return (
        f"the emulator on {data.cores} cores: {row.algorithm}, float16, 2 heads × {row.length} × 64, "
        f"in {row.seconds:.3f} s"
    )


def table(data: Calls) -> str:
    """A Markdown table with one row per call."""
    rows = [
        (row.algorithm, f"2 × {row.length:,} × 64", "yes" if row.sanitize else "no", f"{row.seconds:.3f}")
        for row in data.rows
    ]
    return markdown_table(("algorithm", "float16", "sanitised", "s"), rows)


KIND = Kind(
    "emulator",
    "Speed: how long the emulator takes",
    "seconds that the emulator takes, on a CPU",
    "python -m flashlab.measure.emulator_speed",
    Calls,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args()
    data = {"cores": os.cpu_count(), "rows": rows()}
    names = ["standard", "flash1", "flash2", "flash3"]
    print(results.save(KIND, names, data, subject="calls", folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
