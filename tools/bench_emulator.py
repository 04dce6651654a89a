"""How long the emulator takes: `python tools/bench_emulator.py [--force]` writes docs/results and the table of docs/emulator.md.

Each row is one call of `fl.emulate` on built kernels (float16, no mask): seconds, median of seven.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import flashlab as fl
from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "emulator.md"
BEGIN = "<!-- times: begin (written by tools/bench_emulator.py) -->\n"
END = "<!-- times: end -->"

CALLS = (
    ("flash2", 128, True), ("flash2", 128, False), ("flash1", 128, True), ("standard", 128, True), ("flash3", 128, True),
    ("flash2", 1024, True),
)  # fmt: skip
"""Algorithm, length (2 heads, head dim 64), sanitised."""


def seconds(call: Callable[[], object]) -> float:
    """The median of seven calls, after one that isn't counted."""
    taken: list[float] = []
    for _ in range(8):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def rows() -> list[dict[str, Any]]:
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
    """What was timed, on so many cores."""

    cores: int
    rows: tuple[Row, ...]


def headline(data: Calls) -> str:
    """The first call's time."""
    row = data.rows[0]
    return (f"the emulator on {data.cores} cores: {row.algorithm}, float16, 2 heads × {row.length} × 64, "
            f"in {row.seconds:.3f} s")  # fmt: skip


def table(data: Calls) -> str:
    """A row per call."""
    rows = [
        (row.algorithm, f"2 × {row.length:,} × 64", "yes" if row.sanitize else "no", f"{row.seconds:.3f}")
        for row in data.rows
    ]
    return markdown_table(("algorithm", "float16", "sanitised", "s"), rows)


KIND = Kind(
    "emulator", "Speed: how long the emulator takes", "seconds that the emulator takes, on a CPU",
    "python tools/bench_emulator.py", Calls, headline, table,
)  # fmt: skip


def page_with(text: str, block: str) -> str:
    """The page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + block + END + rest.partition(END)[2]


def block() -> str:
    """The newest measurement as the page shows it."""
    newest = results.latest("emulator", ROOT / results.FOLDER)
    return "" if newest is None else KIND.markdown(newest) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--force", action="store_true", help="replace the file of today")
    data = {"cores": os.cpu_count(), "rows": rows()}
    print(results.save(KIND, ["standard", "flash1", "flash2", "flash3"], data, subject="calls", folder=ROOT / results.FOLDER,
                       replace=parser.parse_args().force))  # fmt: skip
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), block()), encoding="utf-8")


if __name__ == "__main__":
    main()
