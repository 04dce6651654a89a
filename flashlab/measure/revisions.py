"""Kernels beside the same kernels of another revision: `python -m flashlab.measure.revisions OLD/kernels_cu flash3_fp8`.

`git worktree add OLD REVISION` makes the folder. Both are compiled here and now, and take turns on the same arrays, so
that clocks and temperature are the same for both. A ratio is the other revision's time over this one's, in one round:
over 1, this revision is faster. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.progress import track

import kernels_cu
from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells
from flashlab.measure.timing import interleaved
from flashlab.run.plan import gpu_plan
from simulator.catalogue import get, with_kernels
from simulator.devices import Device


@dataclass(frozen=True)
class Row:
    """A kernel in one cell: milliseconds of this revision and of the other one (medians), and the median ratio of a round."""

    algorithm: str
    dtype: str
    head_dim: int
    causal: bool
    length: int
    milliseconds: float
    before: float
    ratio: float
    quartiles: tuple[float, float]
    rounds: int


class Revisions(Data):
    """What was measured; `revision` names the other sources."""

    revision: str
    rows: tuple[Row, ...]


def chosen(algorithm: str, device: Device) -> list[Cell]:
    """The cells that an algorithm takes, in the dtype that it is made for."""
    support = get(algorithm).support
    dtype = "bfloat16" if "bfloat16" in get(algorithm).dtypes else get(algorithm).dtypes[0]
    return [
        cell
        for cell in cells((dtype,), (64, 128, 256), (False, True), (1024, 4096, 16384))
        if support.refusal(algorithm, cell.problem, device) is None
    ]


def measure(algorithm: str, cell: Cell, other: Path, seconds: float) -> Row:
    """Time one cell for about so many `seconds`, the V transposition of 8-bit kernels included."""
    torch: Any = import_module("torch")
    p = cell.problem
    shape, dtype = (p.batch, p.heads, p.len_q, p.head_dim), getattr(torch, p.dtype)
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for _ in "qkv")

    def prepared() -> Callable[[], object]:
        return partial(gpu_plan(algorithm, p).run, q=q, k=k, v=v)

    mine = prepared()
    with kernels_cu.sources_in(other):
        theirs = prepared()
    after, before = interleaved(torch, [mine, theirs], seconds)
    ratios = [old / new for old, new in zip(before, after, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    times = statistics.median(after), statistics.median(before)
    return Row(algorithm, p.dtype, cell.head_dim, cell.causal, cell.length, *times, middle, (low, high), len(ratios))


def headline(data: Revisions) -> str:
    """The median and the worst ratio of each algorithm."""
    ratios: dict[str, list[float]] = {}
    for row in data.rows:
        ratios.setdefault(row.algorithm, []).append(row.ratio)
    each = "; ".join(f"{name} {statistics.median(r):.3f} (worst {min(r):.3f})" for name, r in ratios.items())
    return f"speed over that of revision {data.revision}: {each}"


def table(data: Revisions) -> str:
    """A row per algorithm and cell."""
    header = ("algorithm", "dtype", "head dim", "mask", "length", "ms", f"ms of {data.revision}", "ratio")
    return markdown_table(header, [
        (r.algorithm, r.dtype, str(r.head_dim), "causal" if r.causal else "full", f"{r.length:,}",
         f"{r.milliseconds:.3f}", f"{r.before:.3f}", f"{r.ratio:.3f}")
        for r in data.rows
    ])  # fmt: skip


KIND = Kind(
    "revisions",
    "Speed: kernels beside an older revision of theirs",
    "times of kernels whose sources changed, each round beside the old sources",
    "python -m flashlab.measure.revisions OLD/kernels_cu flash3_fp8 --revision 7379015",
    Revisions,
    headline,
    table,
)


def main() -> None:
    from flashlab.run.devices import current_device

    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("sources", type=Path, help="the folder kernels_cu of the other revision")
    parser.add_argument("algorithms", nargs="+", choices=with_kernels(language="cuda"), help="whose kernels are timed")
    parser.add_argument("--revision", required=True, help="what the other revision is called")
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args()
    work = [(name, cell) for name in given.algorithms for cell in chosen(name, current_device())]
    rows = [asdict(measure(name, cell, given.sources, given.seconds)) for name, cell in track(work, "cells")]
    data = {"revision": given.revision, "rows": rows}
    print(results.save(KIND, given.algorithms, data, folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
