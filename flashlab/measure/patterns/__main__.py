"""What ncu counts for every access pattern on a GPU, and whether the emulator counts the same.

python -m flashlab.measure.patterns measure    measure under ncu and write docs/results
python -m flashlab.measure.patterns compare    hold the emulator to the newest file there
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashlab.measure import ncu, results
from flashlab.measure.metrics import SECTORS, WAVEFRONTS
from flashlab.measure.patterns.emulate import crosses_lines, differences, pattern_of
from flashlab.measure.patterns.patterns import Pattern, patterns
from flashlab.measure.results import Data, Kind, markdown_table

COUNTERS = {
    **SECTORS,
    **WAVEFRONTS,
    # the same by the hardware's own counters, where it has them by instruction
    "hardware_wavefronts_ld": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld",
    "hardware_wavefronts_st": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st",
}


def measure(folder: Path, *, replace: bool) -> None:
    """Launch all patterns under ncu and save what it counted."""
    chosen = patterns()
    names = {name: metric for name, metric in COUNTERS.items() if metric in ncu.known()}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "patterns.json"
        file.write_text(json.dumps([asdict(pattern) for pattern in chosen]), encoding="utf-8")
        printed = ncu.profile(
            [sys.executable, "-m", "flashlab.measure.patterns.gpu", str(file)],
            kernels={pattern.kernel for pattern in chosen},
            metrics=[f"{metric}.sum" for metric in names.values()],
            timeout=600,
            options=("--cache-control", "none"),
        )
    rows = [
        _row(pattern, {name: measured.total([metric]) or 0 for name, metric in names.items()})
        for pattern, measured in zip(chosen, ncu.parse(printed), strict=True)
    ]
    about = {**results.environment(), "command": "python -m flashlab.measure.patterns measure"}
    print(results.save(KIND, [], {"rows": rows}, subject="access", folder=folder, replace=replace, about=about))


def _row(pattern: Pattern, counters: dict[str, int]) -> dict[str, Any]:
    lanes = {"at": " ".join(map(str, pattern.at))}
    if pattern.kernel.startswith("copy"):
        lanes["to"] = " ".join(map(str, pattern.to))
    return {
        "kernel": pattern.kernel,
        "name": pattern.name,
        "mask": f"{pattern.mask:#010x}",
        **lanes,
        "counters": {name: value for name, value in counters.items() if value},
    }


def compare(folder: Path) -> int:
    """Print every pattern that the emulator unexpectedly counts otherwise, and return how many there are."""
    result = results.latest("patterns", folder)
    if result is None:
        sys.exit(f"no measured patterns in {folder}: python -m flashlab.measure.patterns measure, on a GPU")
    rows = result.data["rows"]
    found = differences(rows)
    unexpected = [
        text for row, text in found if not (row["kernel"].startswith("copy") and crosses_lines(pattern_of(row)))
    ]
    for text in unexpected:
        print(text)
    known = len(found) - len(unexpected)
    print(
        f"{len(rows) - len(found)} of {len(rows)} patterns are counted alike; {known} copies across lines of 128 bytes are "
        f"not, as expected ({result.path.name})"
    )
    return len(unexpected)


class Row(Data):
    """One pattern: an instruction, the lanes that take part, the byte offsets of all 32 lanes, and what was counted.

    A counter that is 0 is left out.
    """

    kernel: str
    name: str
    mask: str
    at: str
    to: str | None = None
    counters: dict[str, int]


class Patterns(Data):
    """What `measure` counted."""

    rows: tuple[Row, ...]


def headline(data: Patterns) -> str:
    """How many patterns there are."""
    instructions = {row.kernel for row in data.rows}
    return (
        f"sectors and wavefronts of {len(data.rows)} access patterns of a warp, over {len(instructions)} "
        "instructions: what the emulator's counts are held to"
    )


def table(data: Patterns) -> str:
    """A row per pattern."""
    names = list(dict.fromkeys(name for row in data.rows for name in row.counters))
    cells = [
        (row.kernel, row.name, row.mask, *(str(row.counters.get(name, "")) for name in names)) for row in data.rows
    ]
    return markdown_table(("kernel", "pattern", "lanes", *names), cells)


KIND = Kind(
    "patterns",
    "Bytes: access patterns of a warp",
    "sectors and wavefronts of one warp's accesses, pattern by pattern",
    "python -m flashlab.measure.patterns measure",
    Patterns,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flashlab.measure.patterns", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("--folder", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--force", action="store_true", help="replace today's file")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.folder, replace=options.force)
    else:
        sys.exit(compare(options.folder) > 0)


if __name__ == "__main__":
    main()
