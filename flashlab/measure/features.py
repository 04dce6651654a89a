"""What a soft cap, sinks, ALiBi, windows and masks cost: `python -m flashlab.measure.features flash3 [--peers]`.

Each call takes turns with the same call without the feature, on the same arrays, so that clocks and temperature are the
same for both. A ratio is its time over the plain call's, in one round. With `--peers`, FlexAttention (compiled) takes turns, too,
where it can say the feature, and cuDNN where it is a mask of booleans: at one head dim, because each cell is compiled.
Needs a GPU and torch.
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

from flashlab.integrations.peers import flex
from flashlab.measure import results
from flashlab.measure.lengths import documents
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells
from flashlab.measure.timing import interleaved
from flashlab.run.plan import gpu_plan
from simulator import Problem
from simulator.api import count
from simulator.errors import Unavailable
from simulator.names import DType
from simulator.operations.attention import ATTENTION
from simulator.operations.draws import random_optional

FEATURES: dict[str, dict[str, Any]] = {
    "soft cap 50": {"soft_cap": 50.0},
    "soft cap 1": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "window 1024": {"window": (1024, 0)},
    "random half mask": {"mask": "dense"},
    "random half mask, bits": {"mask": "bits"},
    "random half of the blocks": {"mask": "blocks"},
    "documents": {"lengths": documents()},
}
"""What is timed. Normal scores stay far below a cap of 50, where a polynomial serves; a cap of 1 bends them all.
A mask is packed in each call. Documents are sequences of 50 to 2,000 tokens in one row."""

PEERS_AT = 128
"""The head dim at which there are peers."""


@dataclass(frozen=True)
class Row:
    """A feature in one cell: milliseconds with it and without (medians), and the median ratio of a round.

    `work` is its share of the plain call's matrix products, by the formula. `flex` and `cudnn` are the milliseconds of
    FlexAttention and of cuDNN with a mask.
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
    cudnn: float | None = None


class Features(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def measure(algorithm: str, feature: str, cell: Cell, seconds: float, peers: bool) -> Row:
    """Time one feature in one cell for about so many `seconds`."""
    torch: Any = import_module("torch")
    plain = cell.problem
    p = plain.replace(**FEATURES[feature])
    shape, dtype = (p.batch, p.heads, p.len_q, p.head_dim), getattr(torch, p.dtype)
    arrays = {name: torch.randn(shape, device="cuda").to(dtype) for name in "qkv"}
    optional = {name: torch.from_numpy(x).cuda() for name, x in random_optional(p).items()}
    with_it, without = gpu_plan(algorithm, p), gpu_plan(algorithm, plain)
    calls: dict[str, Callable[[], object]] = {
        "": partial(with_it.run, **arrays, **optional),
        "plain": partial(without.run, **arrays),
    }
    for name, prepare in PEERS.items() if peers and cell.head_dim == PEERS_AT else ():
        try:
            calls[name] = _checked(prepare(p, arrays, optional), calls[""])
        except Exception as error:  # whatever another library raises must not stop ours
            print(f"{name}, {feature}, {cell}: {' '.join(str(error).split())}"[:300], file=sys.stderr)
    times = dict(zip(calls, interleaved(torch, list(calls.values()), seconds), strict=True))
    ratios = [a / b for a, b in zip(times[""], times["plain"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    work = with_it.counts.flops.matmul / count(algorithm, plain, device=without.device).flops.matmul
    found = {name: statistics.median(took) for name, took in times.items()}
    return Row(
        feature, p.dtype, cell.head_dim, cell.causal, cell.length, found[""], found["plain"], middle, (low, high), work,
        found.get("flex"), len(ratios), found.get("cudnn"),
    )  # fmt: skip


def _checked(call: Callable[[], Any], ours: Any) -> Callable[[], Any]:
    """The call. Raises `RuntimeError` if its result is another than ours."""
    apart = float((call().float() - ours()["out"].float()).abs().max())
    if not apart < 0.1:
        raise RuntimeError(f"the result is {apart:.2g} apart from ours")
    return call


def _cudnn(p: Problem, arrays: dict[str, Any], optional: dict[str, Any]) -> Callable[[], Any]:
    """cuDNN with a mask of booleans. Raises `Unavailable` for a problem without one."""
    if list(p.applied) not in (["mask"], ["causal", "mask"]) or p.mask != "dense":
        raise Unavailable("cuDNN is a peer where there is a mask of booleans")
    torch, attention = import_module("torch"), import_module("torch.nn.attention")
    mask = optional["mask"].tril(p.offset) if p.causal else optional["mask"]

    def call() -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*arrays.values(), attn_mask=mask, scale=p.scale)

    return call


PEERS: dict[str, Callable[[Problem, dict[str, Any], dict[str, Any]], Callable[[], Any]]] = {
    "flex": flex.prepare,
    "cudnn": _cudnn,
}
"""What makes a peer's call ready, by its name."""


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
        "cuDNN ms",
    )
    return markdown_table(header, [
        (r.feature, str(r.head_dim), "causal" if r.causal else "full", f"{r.length:,}", f"{r.milliseconds:.3f}",
         f"{r.plain:.3f}", f"{r.ratio:.2f}", f"{r.work:.2f}", f"{_rate(r):.0f}",
         *("" if peer is None else f"{peer:.3f}" for peer in (r.flex, r.cudnn)))
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
    "python -m flashlab.measure.features flash3 --peers",
    Features,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("algorithms", nargs="+", help="whose kernels are timed")
    parser.add_argument("--peers", action="store_true", help="FlexAttention and cuDNN, too")
    parser.add_argument(
        "--features", nargs="+", choices=FEATURES, default=list(FEATURES), help="what is timed (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the files")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    parser.add_argument(
        "--condition", help="what sets this run apart, such as some of the features: in the file's name"
    )
    given = parser.parse_args()
    for algorithm in given.algorithms:
        work = [
            (feature, cell)
            for feature in given.features
            for cell in chosen()
            if (feature != "window 1024" or cell.causal) and (feature != "documents" or cell.problem.batch == 1)
        ]
        problems = [cell.problem.replace(**change) for feature, cell in work for change in (FEATURES[feature], {})]
        with ThreadPoolExecutor() as pool:  # compiles many kernels at a time
            list(pool.map(partial(gpu_plan, algorithm), problems))
        rows = [asdict(measure(algorithm, *each, given.seconds, given.peers)) for each in track(work, algorithm)]
        data = {"algorithm": algorithm, "rows": rows}
        path = results.save(
            KIND, [algorithm], data, condition=given.condition, subject=algorithm, folder=given.out, replace=given.force
        )
        print(path)


if __name__ == "__main__":
    main()
