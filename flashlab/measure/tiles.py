"""Whether the tile that `flash3` chooses is the fastest: `python -m flashlab.measure.tiles flash3`.

In each cell, every tile that leaves registers for its accumulators takes turns with the chosen one. A ratio is a tile's time over
the chosen one's, in one round. The cells are those of the benchmark, at more head dims, and the odd ones. A test holds the
choice to what was measured. Needs a Hopper GPU and torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.progress import track

from flashlab.measure import odd, results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells
from flashlab.measure.timing import interleaved
from flashlab.run.plan import Plan, gpu_plan
from simulator.errors import UsageError
from simulator.problem import Tile

ACCUMULATORS = {128: 208, 192: 128}
"""Registers of a thread that S, P and O may take together, by rows of a tile: the rest of 240 or of 160 is for all else."""


@dataclass(frozen=True)
class Row:
    """A tile in one cell: its milliseconds (median), and the median over rounds of its time over that of the `chosen` one."""

    dtype: str
    head_dim: int
    causal: bool
    length: int
    shape: str | None
    tile: tuple[int, int]
    chosen: bool
    milliseconds: float
    ratio: float
    rounds: int


class Tiles(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def candidates(head_dim: int) -> Iterator[Tile]:
    """The tiles of a head dim whose S, P and O fit a thread's registers, and which aren't far too small.

    >>> [tuple(tile) for tile in candidates(256)]
    [(128, 64), (128, 80), (128, 96)]
    """
    for rows, registers in ACCUMULATORS.items():
        for cols in range(64, 193, 16):
            if cols * 3 // 4 + head_dim // 2 <= registers:
                yield Tile(rows, cols)


def chosen() -> list[Cell]:
    """The cells."""
    usual = cells(("bfloat16",), (64, 80, 96, 128, 160, 192, 256), (False, True), (1024, 4096, 16384))
    return [*usual, *odd.cells()]


def plans(algorithm: str, cell: Cell) -> dict[Tile, Plan]:
    """A plan for each tile that compiles without spills and fits the SRAM, the chosen one first."""
    first = gpu_plan(algorithm, cell.problem)
    found = {first.counts.tile: first}
    for tile in candidates(cell.head_dim):
        try:
            found.setdefault(tile, gpu_plan(algorithm, cell.problem, tile=tile))
        except UsageError:  # more SRAM than a block may have
            continue
    return found


def measure(algorithm: str, cell: Cell, seconds: float) -> list[Row]:
    """Time the tiles of one cell for about so many `seconds`."""
    torch: Any = import_module("torch")
    p = cell.problem
    arrays = {
        name: torch.randn((p.batch, heads, length, p.head_dim), device="cuda").to(getattr(torch, p.dtype))
        for name, heads, length in (("q", p.heads, p.len_q), ("k", p.kv_heads, p.len_kv), ("v", p.kv_heads, p.len_kv))
    }
    found = plans(algorithm, cell)
    calls: list[Callable[[], object]] = [partial(plan.run, **arrays) for plan in found.values()]
    times = interleaved(torch, calls, seconds)
    return [
        Row(
            cell.dtype, cell.head_dim, cell.causal, cell.length, cell.shape, (tile.rows, tile.cols), i == 0,
            statistics.median(took), statistics.median(a / b for a, b in zip(took, times[0], strict=True)), len(took),
        )
        for i, (tile, took) in enumerate(zip(found, times, strict=True))
    ]  # fmt: skip


def by_cell(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each cell."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.dtype, row.head_dim, row.causal, row.length, row.shape), []).append(row)
    return found


def headline(data: Tiles) -> str:
    """In how many cells no tile is faster than the chosen one by more than 3 %, and the worst cell."""
    best = [min(row.ratio for row in rows) for rows in by_cell(data.rows).values()]
    near = sum(ratio >= 0.97 for ratio in best)
    return (
        f"{data.algorithm}: in {near} of {len(best)} cells no tile is faster than the chosen one by more than 3 %; "
        f"in the worst one takes {min(best):.2f} of its time"
    )


def table(data: Tiles) -> str:
    """A row per cell: the chosen tile, and the fastest."""
    header = ("dtype", "head dim", "mask", "length", "chosen", "ms", "fastest", "of its time")
    lines: list[tuple[str, ...]] = []
    for rows in by_cell(data.rows).values():
        own, best = next(row for row in rows if row.chosen), min(rows, key=lambda row: row.ratio)
        lines.append((
            own.dtype, str(own.head_dim), "causal" if own.causal else "full", own.shape or f"{own.length:,}",
            "{} × {}".format(*own.tile), f"{own.milliseconds:.3f}", "{} × {}".format(*best.tile), f"{best.ratio:.3f}",
        ))  # fmt: skip
    return markdown_table(header, lines)


KIND = Kind(
    "tiles",
    "Speed: which tile",
    "the time of every tile that fits, each round beside the chosen one",
    "python -m flashlab.measure.tiles flash3",
    Tiles,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("algorithm", help="whose kernels are timed: flash3, or a rung of it")
    parser.add_argument("--seconds", type=float, default=0.1, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args()
    work = chosen()
    with ThreadPoolExecutor() as pool:  # compiles many kernels at a time
        list(pool.map(partial(plans, given.algorithm), work))
    rows = [
        asdict(row) for cell in track(work, given.algorithm) for row in measure(given.algorithm, cell, given.seconds)
    ]
    data = {"algorithm": given.algorithm, "rows": rows}
    print(results.save(KIND, [given.algorithm], data, subject=given.algorithm, folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
