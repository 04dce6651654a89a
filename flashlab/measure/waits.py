"""Why fewer bytes can take longer: what standard attention, FlashAttention-1 and FlashAttention-2 wait for.

    python -m flashlab.measure.waits [--out docs/results] [--force]

This writes a result of kind `waits`. It needs a GPU, CuPy and ncu. Each launch runs once under ncu, from a cold L2 with
nothing else running, and four questions are asked of it:

 - How long did it take, and in which share of its clocks was each unit busy? A kernel that is bound by memory keeps the
   way to memory busy. A kernel that waits keeps nothing busy.
 - How many warps did an SM hold, of those that it has room for?
 - What did a warp do, or wait for, in the clocks of its life?
 - Does FlashAttention-1 take longer if there are more heads? Each head is one block. If blocks wait for something that
   they share, one head alone is quicker. If each waits for itself, one head takes as long as many. Standard attention
   stands beside it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashlab.measure import ncu, results, workload
from flashlab.measure.metrics import BYTES, DRAM_READ, DRAM_WRITE, RATES
from flashlab.measure.profile import ACTIVE, CLOCKS, DURATION, SUMS, UNITS
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import HIDDEN, TOKENS
from flashlab.measure.workload import Case
from simulator import Problem

ALGORITHMS = ("standard", "flash1", "flash2")
HEADS = (1, 16, 64, 128, 132, 264)
"""Heads, and so FlashAttention-1's blocks. An H200 has 132 SMs, and an SM has room for two of them at head dim 64."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_((?!.*_not_issued)\w+)_per_issue_active")
"""The warps of a scheduler that are in some state, on average over the clocks in which it issues an instruction."""
ISSUED = "selected"
"""The state of a warp that isn't stalled: its instruction is issued."""

EXPECTED = {
    "bytes": "flash1 isn't short of bytes: DRAM and L2 are each under 25 % busy, where standard's launches keep one of them "
    "busy for most of the time.",
    "units": "No unit of an SM is busy for more than a quarter of flash1's time.",
    "issue": "Under flash1 an SM issues in less than a sixth of its slots: a scheduler has one warp, and that one waits.",
    "barriers": "The warps of flash1 spend more time at barriers and on results of memory than on anything else.",
    "alone": "One head takes flash1 at least 0.85 of the time of 128 heads: a block waits for itself, not for the others.",
    "two": "264 heads take less than 1.4 times as long as 132: two blocks of an SM fill each other's gaps.",
    "turn": "With 264 heads flash1 takes at most 1.1 times as long as standard attention, with one head over 50 times as long.",
}
"""What was expected, in the words of that time, before anything here was measured."""


def cases() -> list[Case]:
    """The algorithms beside each other in three cells of `flashlab bench`; then FlashAttention-1 and standard attention with
    more and more heads."""

    def case(name: str, batch: int, heads: int, length: int, dim: int) -> Case:
        problem = Problem(batch=batch, heads=heads, len_q=length, head_dim=dim, dtype="float16")
        return Case(f"{name} {batch}×{heads}×{length}×{dim}", name, problem)

    cells = [(64, 1024), (64, 4096), (128, 4096)]
    beside = [case(name, TOKENS // n, HIDDEN // dim, n, dim) for dim, n in cells for name in ALGORITHMS]
    return beside + [case(name, 1, heads, 4096, 64) for name in ALGORITHMS[:2] for heads in HEADS]


def metrics() -> list[str]:
    """What ncu is asked for, as far as the GPU has it."""
    known = ncu.known()
    busy = [f"{name}.avg.pct_of_peak_sustained_elapsed" for name in UNITS.values()]
    sums = [name for level in ("hbm.read", "hbm.write") for name in BYTES[level]]
    sums += [DRAM_READ, DRAM_WRITE, SUMS["all"]]
    stalls = sorted(f"{name}.ratio" for name in known if STALL.fullmatch(name))
    asked = [*busy, *(f"{name}.sum" for name in sums), CLOCKS, ACTIVE, DURATION, *RATES.values(), *stalls]
    return [name for name in asked if name.split(".")[0] in known]


def measure(timeout: float = 580) -> dict[str, Any]:
    """Run all cases under ncu, for the data of a result. Raises `RuntimeError` if ncu saw another number of launches."""
    chosen = cases()
    workload.warm(chosen)
    with tempfile.TemporaryDirectory() as folder:
        command = workload.command(workload.write(chosen, Path(folder)), "--counted")
        entries = [entry for case in chosen for entry in case.entries]
        found = ncu.parse(ncu.profile(command, kernels=entries, metrics=metrics(), timeout=timeout))
    if [launch.kernel for launch in found] != entries:
        raise RuntimeError(
            f"ncu saw {len(found)} launches, expected {len(entries)}: {', '.join(dict.fromkeys(entries))}"
        )
    owners = [case for case in chosen for _ in case.entries]
    return {"expected": EXPECTED, "rows": [row(case, launch) for case, launch in zip(owners, found, strict=True)]}


def row(case: Case, launch: ncu.Measured) -> dict[str, Any]:
    """What ncu counted of one launch."""
    m, p = launch.metrics, case.problem
    stalls = {
        match[1]: value for name, value in m.items() if (match := STALL.fullmatch(name.partition(".")[0])) and value
    }
    life = sum(stalls.values())
    return {
        "algorithm": case.algorithm,
        "launch": launch.kernel,
        "batch": p.batch,
        "heads": p.heads,
        "length": p.len_q,
        "head_dim": p.head_dim,
        "milliseconds": m[DURATION] / 1e6,
        "clocks": m[CLOCKS],
        "active": m[ACTIVE] / m[CLOCKS],
        "busy": {
            name: m[f"{metric}.avg.pct_of_peak_sustained_elapsed"] / 100
            for name, metric in UNITS.items()
            if f"{metric}.avg.pct_of_peak_sustained_elapsed" in m
        },
        "occupancy": m[RATES["occupancy"]] / 100,
        "l2_hit_rate": m[RATES["l2_hit_rate"]] / 100,
        "requested": sum(launch.total(BYTES[level]) or 0 for level in ("hbm.read", "hbm.write")),
        "dram": launch.total((DRAM_READ, DRAM_WRITE)) or 0,
        "instructions": launch.total((SUMS["all"],)) or 0,
        "states": {name: value / life for name, value in sorted(stalls.items(), key=lambda x: -x[1])},
    }


class Row(Data):
    """One launch under ncu. `requested` and `dram` are bytes, read and written; `active` is the share of the clocks in which
    an SM had a block, on average; `states` shares out a warp's clocks by what it did or waited for ("selected": it issued)."""

    algorithm: str
    launch: str
    batch: int
    heads: int
    length: int
    head_dim: int
    milliseconds: float
    clocks: float
    active: float
    busy: dict[str, float]
    occupancy: float
    l2_hit_rate: float
    requested: int
    dram: int
    instructions: int
    states: dict[str, float]


class Waits(Data):
    """What `measure` found, and what was expected before it."""

    expected: dict[str, str]
    rows: tuple[Row, ...]


def headline(data: Waits) -> str:
    """One sentence: the time of FlashAttention-1 beside standard attention's, and what its warps wait for."""
    largest = max(data.rows, key=lambda r: (r.batch * r.heads * r.length**2 * (r.batch > 1), -r.head_dim))
    cell = (largest.batch, largest.heads, largest.length, largest.head_dim)
    of = {name: [r for r in data.rows if r.algorithm == name and _cell(r) == cell] for name in ALGORITHMS}
    took, asked = (
        {n: sum(getattr(r, key) for r in rows) for n, rows in of.items()} for key in ("milliseconds", "requested")
    )
    one = of["flash1"][0]
    waits = [f"{name} {share:.0%}" for name, share in one.states.items() if name != ISSUED][:2]
    return (
        f"flash1 requests {asked['standard'] / asked['flash1']:.1f} times fewer bytes than standard attention and takes "
        f"{took['flash1'] / took['standard']:.1f} times as long; its warps spend their time on {' and '.join(waits)}"
    )


def _cell(row: Row) -> tuple[int, int, int, int]:
    return row.batch, row.heads, row.length, row.head_dim


def table(data: Waits) -> str:
    """A row per launch."""
    units = ("tensor", "exp", "issue", "sram", "l2", "dram")
    header = ("launch", "problem", "ms", "requested, GB", "DRAM, GB", "occupancy", *units, "most of a warp's time")
    return markdown_table(header, [
        (r.launch, "×".join(map(str, _cell(r))), f"{r.milliseconds:.3f}", f"{r.requested / 1e9:.2f}", f"{r.dram / 1e9:.2f}",
         f"{r.occupancy:.0%}", *(f"{r.busy[unit]:.0%}" if unit in r.busy else "" for unit in units),
         ", ".join(f"{name} {share:.0%}" for name, share in list(r.states.items())[:3]))
        for r in data.rows
    ])  # fmt: skip


KIND = Kind(
    "waits",
    "Speed: fewer bytes and slower, and why",
    "what the launches of standard attention, FlashAttention-1 and 2 wait for: busy units, warps, their states, heads",
    "python -m flashlab.measure.waits",
    Waits,
    headline,
    table,
)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args(words)
    data = measure()
    print(results.save(KIND, ALGORITHMS, data, subject="fewer-bytes", folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
