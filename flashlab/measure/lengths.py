"""What a ragged batch saves over a padded one: `python -m flashlab.measure.lengths flash3`.

Each call takes turns with the plain kernel on the padded batch, whose sequences are all as long as the longest, so that clocks
and temperature are the same for both. A ratio is the padded batch's time over the ragged one's, in one round: where the
lengths are equal, it shows what the offsets cost. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import HIDDEN, TOKENS
from flashlab.measure.timing import interleaved
from flashlab.run.plan import gpu_plan
from simulator import Problem


def documents(seed: int = 0) -> list[int]:
    """Lengths from 50 to 2,000, as many tokens as other batches have in all."""
    drawn, left = random.Random(seed), TOKENS
    found = list[int]()
    while left > 2000:
        found.append(drawn.randint(50, 2000))
        left -= found[-1]
    return [*found, left]


BATCHES: dict[str, list[int]] = {
    "2 of 8,192": [8192] * 2,
    "16 of 1,024": [1024] * 16,
    "128 of 128": [128] * 128,
    "documents of 50 to 2,000": documents(),
    "one of 8,192 among 64 of 128": [128] * 32 + [8192] + [128] * 32,
}
"""The batches by name: 16,384 tokens each."""


@dataclass(frozen=True)
class Row:
    """A batch in one cell: milliseconds of the ragged and of the padded batch (medians), and the median ratio of a round.

    `work` is the ragged batch's share of the padded one's matrix products, by the formula. The ideal ratio is its inverse.
    """

    batch: str
    dtype: str
    head_dim: int
    causal: bool
    sequences: int
    tokens: int
    padded_tokens: int
    milliseconds: float
    padded: float
    ratio: float
    quartiles: tuple[float, float]
    work: float
    rounds: int


class Lengths(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def problem(batch: str, head_dim: int, causal: bool) -> Problem:
    """A batch as a problem: bfloat16, of the field's hidden size."""
    heads = HIDDEN // head_dim
    return Problem(batch=1, heads=heads, lengths=BATCHES[batch], head_dim=head_dim, dtype="bfloat16", causal=causal)


def measure(algorithm: str, batch: str, head_dim: int, causal: bool, seconds: float) -> Row:
    """Time one batch for about so many `seconds`. Raises `RuntimeError` if its longest sequence gets another result alone."""
    torch: Any = import_module("torch")
    p = problem(batch, head_dim, causal)
    plans = [gpu_plan(algorithm, each) for each in (p, p.padded)]
    drawn = [
        {name: torch.randn(shape, device="cuda").to(torch.bfloat16) for name in "qkv"}
        for shape in ((each.batch, each.heads, each.len_q, each.head_dim) for each in (p, p.padded))
    ]
    _check(algorithm, p, drawn[0], plans[0].run(**drawn[0])["out"])
    calls: list[Callable[[], object]] = [partial(plan.run, **arrays) for plan, arrays in zip(plans, drawn, strict=True)]
    times = interleaved(torch, calls, seconds)
    ratios = [b / a for a, b in zip(times[0], times[1], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    work = plans[0].counts.flops.matmul / plans[1].counts.flops.matmul
    return Row(
        batch, p.dtype, head_dim, causal, len(p.spans), p.len_q, p.padded.batch * p.padded.len_q,
        statistics.median(times[0]), statistics.median(times[1]), middle, (low, high), work, len(ratios),
    )  # fmt: skip


def _check(algorithm: str, p: Problem, arrays: dict[str, Any], out: Any) -> None:
    """The longest sequence alone has the same result, but for rounding."""
    longest = max(range(len(p.spans)), key=lambda s: len(p.spans[s][0]))
    rows = slice(p.spans[longest][0].start, p.spans[longest][0].stop)  # self-attention: its keys lie alike
    alone = gpu_plan(algorithm, p.sequences[longest].replace(lengths=None))
    one = alone.run(**{name: x[:, :, rows] for name, x in arrays.items()})["out"]
    apart = float((one.float() - out[:, :, rows].float()).abs().max())
    if not apart < 0.05:
        raise RuntimeError(f"sequence {longest} of {len(p.spans)} is {apart:.2g} apart from what it is alone")


def headline(data: Lengths) -> str:
    """The median ratio of each batch, and how near it comes to what the work allows."""
    found: dict[str, list[Row]] = {}
    for row in data.rows:
        found.setdefault(row.batch, []).append(row)
    each = "; ".join(
        f"{batch} {statistics.median(r.ratio for r in rows):.2f} × "
        f"({statistics.median(r.ratio * r.work for r in rows):.2f} of what the work allows)"
        for batch, rows in found.items()
    )
    return f"{data.algorithm}: the padded batch's time over the ragged one's: {each}"


def table(data: Lengths) -> str:
    """A row per batch and cell."""
    header = ("batch", "head dim", "mask", "tokens", "padded to", "ms", "padded ms", "ratio", "work")
    return markdown_table(header, [
        (r.batch, str(r.head_dim), "causal" if r.causal else "full", f"{r.tokens:,}", f"{r.padded_tokens:,}",
         f"{r.milliseconds:.3f}", f"{r.padded:.3f}", f"{r.ratio:.2f}", f"{r.work:.3f}")
        for r in data.rows
    ])  # fmt: skip


KIND = Kind(
    "lengths",
    "Speed: ragged batches",
    "the time of ragged batches, each round beside the padded batch",
    "python -m flashlab.measure.lengths flash3",
    Lengths,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("algorithms", nargs="+", help="whose kernels are timed")
    parser.add_argument("--seconds", type=float, default=0.3, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the files")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    given = parser.parse_args()
    work = list(product(BATCHES, (64, 128, 256), (False, True)))
    for algorithm in given.algorithms:
        problems = [each for p in (problem(*cell) for cell in work) for each in (p, p.padded)]
        with ThreadPoolExecutor() as pool:  # compiles many kernels at a time
            list(pool.map(partial(gpu_plan, algorithm), problems))
        rows = [asdict(measure(algorithm, *cell, given.seconds)) for cell in track(work, algorithm)]
        data = {"algorithm": algorithm, "rows": rows}
        print(results.save(KIND, [algorithm], data, subject=algorithm, folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
