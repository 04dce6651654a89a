"""What a soft cap, sinks, ALiBi, windows and masks cost: `python -m flashlab.measure.features flash3 [--flex]`.

Each call takes turns with the same call without the feature, on the same arrays, so that clocks and temperature are the
same for both. A ratio is its time over the plain call's, in one round. With `--flex`, FlexAttention (compiled) computes
some cells, too. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from rich.progress import track

from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells
from flashlab.measure.timing import interleaved
from flashlab.run.plan import gpu_plan
from simulator.api import count
from simulator.names import DType
from simulator.operations.attention import ATTENTION, random_optional

FEATURES: dict[str, dict[str, Any]] = {
    "soft cap 50": {"soft_cap": 50.0},
    "soft cap 1": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "window 1024": {"window": (1024, 0)},
    "random half mask": {"mask": "dense"},
    "random half mask, bits": {"mask": "bits"},
    "random half of the blocks": {"mask": "blocks"},
}
"""What is timed. Normal scores stay far below a cap of 50, where a polynomial serves; a cap of 1 bends them all.
A mask is packed in each call."""

FLEX = Cell("bfloat16", 128, True, 16384)
"""The cell in which FlexAttention is a peer."""


@dataclass(frozen=True)
class Row:
    """A feature in one cell: milliseconds with it and without (medians), and the median ratio of a round.

    `work` is its share of the plain call's matrix products, by the formula. `flex` is FlexAttention's milliseconds.
    """

    feature: str
    dtype: str
    head_dim: int
    causal: bool
    length: int
    milliseconds: float
    plain: float
    ratio: float
    quartiles: tuple[float, float]
    work: float
    flex: float | None
    rounds: int


class Features(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def measure(algorithm: str, feature: str, cell: Cell, seconds: float, flex: bool) -> Row:
    """Time one feature in one cell for about so many `seconds`."""
    torch: Any = import_module("torch")
    plain = cell.problem
    p = plain.replace(**FEATURES[feature])
    shape, dtype = (p.batch, p.heads, p.len_q, p.head_dim), getattr(torch, p.dtype)
    arrays = {name: torch.randn(shape, device="cuda").to(dtype) for name in "qkv"}
    optional = {name: torch.from_numpy(x).cuda() for name, x in random_optional(p).items()}
    with_it, without = gpu_plan(algorithm, p), gpu_plan(algorithm, plain)
    calls: list[Callable[[], object]] = [partial(with_it.run, **arrays, **optional), partial(without.run, **arrays)]
    if flex and cell == FLEX and feature != "sinks" and p.mask in (None, "dense"):
        try:
            calls.append(_flex(torch, feature, arrays, optional, calls[0]))
        except Exception as error:  # whatever another library raises must not stop ours
            print(f"FlexAttention, {feature}: {type(error).__name__}: {error}", file=sys.stderr)
    times = interleaved(torch, calls, seconds)
    ratios = [a / b for a, b in zip(times[0], times[1], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    work = with_it.counts.flops.matmul / count(algorithm, plain, device=without.device).flops.matmul
    milliseconds, before, *peer = map(statistics.median, times)
    return Row(
        feature, p.dtype, cell.head_dim, cell.causal, cell.length, milliseconds, before, middle, (low, high), work,
        peer[0] if peer else None, len(ratios),
    )  # fmt: skip


def _flex(torch: Any, feature: str, arrays: dict[str, Any], optional: dict[str, Any], ours: Any) -> Callable[[], Any]:
    """FlexAttention, compiled, on the same causal problem. Raises `RuntimeError` if its result is another."""
    module: Any = import_module("torch.nn.attention.flex_attention")
    cap, window = FEATURES[feature].get("soft_cap"), FEATURES[feature].get("window")
    slopes, visible = optional.get("alibi_slopes"), optional.get("mask")

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s if cap is None else cap * torch.tanh(s / cap)
        return s if slopes is None else s - slopes[h] * (i - j)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        causal = (j <= i) & (i - j <= window[0]) if window else j <= i
        return causal if visible is None else causal & visible[i, j]

    n = arrays["q"].shape[2]
    mask = module.create_block_mask(seen, None, None, n, n, device="cuda")
    torch.compiler.reset()  # or a cap that differs becomes a variable, which it refuses
    compiled = torch.compile(module.flex_attention, dynamic=False)
    changed = score if cap is not None or slopes is not None else None
    call = partial(compiled, *arrays.values(), score_mod=changed, block_mask=mask)
    apart = float((call().float() - ours()["out"].float()).abs().max())
    if not apart < 0.1:
        raise RuntimeError(f"FlexAttention's result for {feature} is {apart:.2g} apart from ours")
    return call


def chosen() -> list[Cell]:
    """The cells: bfloat16, 16k tokens in all."""
    return cells(("bfloat16",), (64, 128, 256), (False, True), (4096, 16384))


def headline(data: Features) -> str:
    """The median and the worst ratio of each feature."""
    ratios: dict[str, list[float]] = {}
    for row in data.rows:
        ratios.setdefault(row.feature, []).append(row.ratio / row.work)
    each = "; ".join(f"{name} {statistics.median(r):.2f} (worst {max(r):.2f})" for name, r in ratios.items())
    return f"{data.algorithm}: time over the plain call's, for the same matrix products: {each}"


def table(data: Features) -> str:
    """A row per feature and cell."""
    header = (
        "feature",
        "head dim",
        "mask",
        "length",
        "ms",
        "plain ms",
        "ratio",
        "work",
        "TFLOP/s of the plain call's",
        "FlexAttention ms",
    )
    return markdown_table(header, [
        (r.feature, str(r.head_dim), "causal" if r.causal else "full", f"{r.length:,}", f"{r.milliseconds:.3f}",
         f"{r.plain:.3f}", f"{r.ratio:.2f}", f"{r.work:.2f}", f"{_rate(r):.0f}", "" if r.flex is None else f"{r.flex:.3f}")
        for r in data.rows
    ])  # fmt: skip


def _rate(row: Row) -> float:
    """The plain call's FLOPs, those of hidden pairs included, in TFLOP/s of the time with the feature."""
    problem = Cell(cast("DType", row.dtype), row.head_dim, row.causal, row.length).problem
    return ATTENTION.flops(problem) / row.milliseconds / 1e9


KIND = Kind(
    "features",
    "Speed: what changes the scores",
    "the time of a soft cap, sinks, ALiBi, a window and a mask, each round beside the plain call",
    "python -m flashlab.measure.features flash3 --flex",
    Features,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("algorithms", nargs="+", help="whose kernels are timed")
    parser.add_argument("--flex", action="store_true", help="FlexAttention, too")
    parser.add_argument(
        "--features", nargs="+", choices=FEATURES, default=list(FEATURES), help="what is timed (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the files")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    given = parser.parse_args()
    for algorithm in given.algorithms:
        work = [
            (feature, cell)
            for feature in given.features
            for cell in chosen()
            if feature != "window 1024" or cell.causal
        ]
        problems = [cell.problem.replace(**change) for feature, cell in work for change in (FEATURES[feature], {})]
        with ThreadPoolExecutor() as pool:  # compiles many kernels at a time
            list(pool.map(partial(gpu_plan, algorithm), problems))
        rows = [asdict(measure(algorithm, *each, given.seconds, given.flex)) for each in track(work, algorithm)]
        data = {"algorithm": algorithm, "rows": rows}
        print(results.save(KIND, [algorithm], data, subject=algorithm, folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
