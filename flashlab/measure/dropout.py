"""How fast attention with dropout is, in both passes: `python -m flashlab.measure.dropout`.

Our kernels for Hopper take turns with themselves without dropout, with those for any GPU, and with torch's cuDNN and flash, on the
same arrays. A ratio is a call's time over that of ours with dropout, in one round. Kernels of ours have one mask, so their
results are compared. Which weights a library drops is its own affair: there only a result that has all weights is refused. Our
backward passes get the output and the LSE of our forward pass, the others' those of their own.
Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

from rich.progress import track

from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells, normal
from flashlab.measure.timing import interleaved
from flashlab.run.plan import gpu_plan
from simulator.names import DType
from simulator.operations.draws import random_optional

RATE = 0.1
PLAIN = "without dropout"
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "sdpa-flash": "FLASH_ATTENTION"}
PASSES: dict[Literal["forward", "backward"], tuple[str, str]] = {
    "forward": ("flash3", "flash2"),
    "backward": ("flash3_backward", "flash2_backward"),
}
"""Of each pass our kernels: for Hopper, and for any GPU."""
OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}

Call = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """One call in one cell: milliseconds and FLOP/s (medians), and its time over that of ours with dropout, by rounds."""

    of: Literal["forward", "backward"]
    call: str
    dtype: str
    head_dim: int
    causal: bool
    length: int
    milliseconds: float
    tflops: float
    ratio: float
    quartiles: tuple[float, float]
    rounds: int


class Dropout(Data):
    """What was measured, at one rate."""

    rate: float
    rows: tuple[Row, ...]
    not_run: tuple[str, ...]


def measure(cell: Cell, of: Literal["forward", "backward"], seconds: float, not_run: list[str]) -> list[Row]:
    """Time one pass in one cell, for about so many `seconds`. Raises `RuntimeError` if our kernels differ."""
    torch: Any = import_module("torch")
    names = ["q", "k", "v", "dout"]
    arrays = dict(zip(names, normal(torch, cell, names), strict=True))
    (ours, other), p = PASSES[of], cell.problem.replace(dropout=RATE)
    state = {name: torch.from_numpy(x).cuda() for name, x in random_optional(p).items()}
    calls = {ours: _ours(ours, p, arrays, state), PLAIN: _ours(ours, cell.problem, arrays, {})}
    calls[other] = _ours(other, p, arrays, state)
    found, plain = calls[ours](), calls[PLAIN]()
    if not apart(found, calls[other]()) < 0.02 < 0.1 < apart(found, plain):
        raise RuntimeError(f"{ours} and {other} differ, or drop nothing, at {cell}")
    for name, backend in BACKENDS.items():
        try:
            call = _sdpa(torch, cell, of, backend, arrays)
            if not 0.1 < apart(call(), plain) < 1:
                raise RuntimeError("it drops nothing, or computes something else")
            calls[name] = call
        except Exception as error:  # whatever another library raises must not stop ours
            not_run.append(f"{name}, {of}, {cell}: {' '.join(str(error).split())}"[:300])
    times = dict(zip(calls, interleaved(torch, list(calls.values()), seconds), strict=True))
    flops = cell.flops * (2.5 if of == "backward" else 1)
    rows: list[Row] = []
    for name, took in times.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(took, times[ours], strict=True)], n=4)
        each = statistics.median(took)
        rows.append(
            Row(of, name, cell.dtype, cell.head_dim, cell.causal, cell.length, each, flops / each / 1e9, middle, (low, high),
                len(took))
        )  # fmt: skip
    return rows


def apart(found: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """How far results are apart, as a share of their size; of several arrays the worst."""
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, other, strict=True))


def _ours(algorithm: str, p: Any, arrays: dict[str, Any], state: dict[str, Any]) -> Call:
    """A call of a plan. Its results are a tuple."""
    given = {name: arrays[name] for name in "qkv"} | state
    of = "backward" if algorithm.endswith("backward") else "forward"
    if of == "backward":
        before = gpu_plan(PASSES["forward"][0], p, lse=True).run(**given)
        given |= {"dout": arrays["dout"], "out": before["out"], "lse": before["lse"]}
    run = partial(gpu_plan(algorithm, p).run, **given)

    def call() -> tuple[Any, ...]:
        outputs = run()
        return tuple(outputs[name] for name in OUTPUTS[of])

    return call


def _sdpa(torch: Any, cell: Cell, of: str, backend: str, arrays: dict[str, Any]) -> Call:
    """torch's own, by a backend of `scaled_dot_product_attention`. A backward pass is that of one forward pass, called again."""
    attention, p = import_module("torch.nn.attention"), cell.problem
    given = [arrays[name].detach().requires_grad_(of == "backward") for name in "qkv"]

    def forward() -> tuple[Any, ...]:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            return (
                torch.nn.functional.scaled_dot_product_attention(*given, dropout_p=RATE, is_causal=p.causal, scale=p.scale),
            )  # fmt: skip

    if of == "forward":
        return forward
    (out,) = forward()
    return lambda: torch.autograd.grad(out, given, arrays["dout"], retain_graph=True)


def headline(data: Dropout) -> str:
    """How ours compares with each other call, in each pass."""
    parts: list[str] = []
    for of, (ours, _) in PASSES.items():
        ratios: dict[str, list[float]] = {}
        for row in data.rows:
            if row.of == of and row.call != ours:
                ratios.setdefault(row.call, []).append(row.ratio)
        each = ", ".join(f"{min(r):.2f} to {max(r):.2f} for {name}" for name, r in ratios.items())
        parts.append(f"{ours}: times over its own, {each}")
    return f"dropout {data.rate:g}; {'; '.join(parts)}"


def table(data: Dropout) -> str:
    """A row per call and cell."""
    header = ("pass", "call", "head dim", "mask", "length", "ms", "TFLOP/s", "ratio")
    return markdown_table(header, [
        (r.of, r.call, str(r.head_dim), "causal" if r.causal else "full", f"{r.length:,}", f"{r.milliseconds:.3f}",
         f"{r.tflops:.0f}", f"{r.ratio:.2f}")
        for r in data.rows
    ])  # fmt: skip


KIND = Kind(
    "dropout",
    "Speed: dropout",
    "the time of both passes with dropout, beside the same without, other kernels of ours, cuDNN and SDPA's flash",
    "python -m flashlab.measure.dropout",
    Dropout,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--head-dims", nargs="+", type=int, default=[64, 128], help="of the cells (default: 64 and 128)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the cells")
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell and pass")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the files")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    given = parser.parse_args()
    not_run: list[str] = []
    chosen = cells((cast("DType", given.dtype),), given.head_dims, (False, True), (4096, 16384))
    rows = [
        asdict(row)
        for cell in track(chosen, "dropout")
        for of in PASSES
        for row in measure(cell, of, given.seconds, not_run)
    ]
    for line in not_run:
        print(f"not run: {line}", file=sys.stderr)
    data = {"rate": RATE, "rows": rows, "not_run": not_run}
    algorithms = [name for names in PASSES.values() for name in names]
    print(results.save(KIND, algorithms, data, subject="flash3", folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
