"""Measures FlashAttention-3 in FP8: its accuracy (one scale, a scale per tile, rotated) and its speed, also beside cuDNN's FP8.

The experiment is that of the FlashAttention-3 paper (arXiv 2407.08608, section 4.3). Inputs are from N(0, 1), and one
entry in a thousand has an addend from N(0, 100). The error is the root mean square of the output's difference from
float64: first against a reference that takes the inputs as float16 rounds them, for the error of the kernels alone; then in
the paper's own setting, at 8,192 tokens against a reference that takes them unrounded.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flashlab.base.host import from_numpy, to_numpy
from flashlab.integrations.peers import cudnn_graph, fp8_cudnn
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells
from flashlab.measure.timing import interleaved
from flashlab.run.arrays import cupy, framework
from flashlab.run.call import attention as run_attention
from flashlab.run.devices import current_device
from flashlab.run.plan import gpu_plan
from simulator import Problem, Scales, naive
from simulator.dtypes import Array
from simulator.errors import Unavailable
from simulator.problem import FP8
from simulator.quantize import Quantized, quantize

__all__ = ["KIND", "Fp8Report", "accuracy", "attention", "on_torch", "run"]


def attention(x: Quantized, *, causal: bool = False) -> Array:
    """Run the kernel on a Hopper GPU. Returns `out` (batch, heads, length, head_dim) as a NumPy array in bfloat16."""
    operands = [from_numpy(each, "cupy") for each in (x.q, x.k, x.v)]
    scales = Scales(*(from_numpy(each, "cupy") for each in x.scales))
    return to_numpy("out", run_attention(*operands, algorithm="flash3_fp8", scales=scales, causal=causal))


@dataclass(frozen=True)
class Accuracy:
    """The root mean square error of a kernel with one way of quantisation, against float64."""

    kernel: str
    rmse: float


@dataclass(frozen=True)
class Speed:
    """One problem in FP8 and in bfloat16: TFLOP/s of both, and how many times as fast FP8 is (medians over the rounds).

    `ratio` is of the attention kernel alone, whose V is already transposed. `ratio_of_calls` is of a whole call, which
    transposes V. Where cuDNN's FP8 was timed in the same rounds, `tflops_cudnn` are its TFLOP/s, `ratio_to_cudnn` and
    `ratio_of_calls_to_cudnn` how many times as fast our kernel and our call are, and `cudnn_out` is the dtype that it wrote.
    """

    head_dim: int
    causal: bool
    length: int
    tflops: float
    tflops_bfloat16: float
    ratio: float
    ratio_of_calls: float
    tflops_cudnn: float | None = None
    ratio_to_cudnn: float | None = None
    ratio_of_calls_to_cudnn: float | None = None
    cudnn_out: str | None = None


@dataclass(frozen=True)
class Fp8Report:
    """What `run` found: errors against the rounded inputs' reference, speed, and errors in the paper's own setting.

    `cudnn` says which cuDNN was timed, and `not_run` why in some cells, or in all, it wasn't.
    """

    device: str
    inputs: str
    accuracy: tuple[Accuracy, ...]
    speed: tuple[Speed, ...]
    papers_inputs: str
    papers: tuple[Accuracy, ...]
    cudnn: str | None = None
    not_run: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every error is finite."""
        return all(math.isfinite(row.rmse) for row in (*self.accuracy, *self.papers))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "device": self.device,
            "inputs": self.inputs,
            "accuracy": [asdict(row) for row in self.accuracy],
            "speed": [asdict(row) for row in self.speed],
            "papers_inputs": self.papers_inputs,
            "papers": [asdict(row) for row in self.papers],
            "cudnn": self.cudnn,
            "not_run": list(self.not_run),
        }

    def print(self) -> None:
        """Print two tables: errors and speed."""
        from flashlab.views.tables import line, table

        settings = (
            (self.inputs, "error", self.accuracy),
            (f"{self.papers_inputs}, unrounded", "error, the paper's setting", self.papers),
        )
        for inputs, title, errors in settings:
            line(inputs)
            table(title, ("kernel", "RMSE"), [(row.kernel, f"{row.rmse:.2e}") for row in errors], left=1)
        rows = [
            (
                str(s.head_dim),
                "causal" if s.causal else "full",
                f"{s.length:,}",
                f"{s.tflops:.0f}",
                f"{s.tflops_bfloat16:.0f}",
                f"{s.ratio:.2f}",
                f"{s.ratio_of_calls:.2f}",
                *(
                    "" if x is None else f"{x:.{digits}f}"
                    for x, digits in ((s.tflops_cudnn, 0), (s.ratio_to_cudnn, 2), (s.ratio_of_calls_to_cudnn, 2))
                ),
            )
            for s in self.speed
        ]
        table(
            "speed",
            ("head dim", "mask", "length", "TFLOP/s", "bfloat16", "ratio", "with V's transposition", "cuDNN FP8", "× cuDNN",
             "with V's transposition, × cuDNN"),
            rows,
            left=2,
        )  # fmt: skip
        if self.cudnn:
            line(self.cudnn)
        for reason in self.not_run:
            line(f"not run: {reason}")


WAYS = {"one scale": (False, False), "a scale per tile": (True, False), "a scale per tile, rotated": (True, True)}
"""The ways of quantisation in the paper's experiment, as `blocks` and `rotate` of `quantize`."""


def outliers(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Numbers from N(0, 1), of which one in a thousand has an addend from N(0, 100), in float64."""
    return random.standard_normal(shape) + 10 * random.standard_normal(shape) * (random.random(shape) < 1e-3)


@dataclass(frozen=True)
class Drawn:
    """Inputs with outliers, in words and as float16, and what float64 makes of them."""

    said: str
    half: list[Array]
    exact: Array


def drawn(length: int, *, rounded: bool, heads: int = 8, head_dim: int = 128, seed: int = 0) -> Drawn:
    """The experiment's inputs (1, heads, length, head_dim). The reference takes them rounded to float16, or as they were drawn."""
    random = np.random.default_rng(seed)
    shape = (1, heads, length, head_dim)
    whole = [outliers(random, shape) for _ in "qkv"]
    half = [x.astype(np.float16) for x in whole]
    given = half if rounded else [x.astype(np.float32) for x in whole]  # 2^13 times finer
    # head by head, for the scores of all of them are gigabytes
    exact = np.concatenate([naive(*(x[:, h : h + 1] for x in given)).out for h in range(heads)], axis=1)
    return Drawn(f"{heads} heads × {length} × {head_dim}, N(0, 1) + N(0, 100) · Bernoulli(0.001)", half, exact)


def accuracy(x: Drawn) -> tuple[Accuracy, ...]:
    """The error of each kernel and way of quantisation."""

    def error(out: Array) -> float:
        return float(np.sqrt(np.mean((out.astype(np.float64) - x.exact) ** 2)))

    plain = run_attention(*(from_numpy(each, "cupy") for each in x.half), algorithm="flash3")
    found = [Accuracy("flash3, float16", error(to_numpy("out", plain)))]
    for said, (blocks, rotate) in WAYS.items():
        out = attention(quantize(*x.half, blocks=blocks, rotate=rotate))
        found.append(Accuracy(f"flash3_fp8, {said}", error(out)))
    return tuple(found)


def on_torch(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], None]:
    """A function that launches the attention kernel alone, on torch's stream, as often as it is called.

    q, k, v are torch tensors (batch, heads, length, head_dim). They are rounded to e4m3 with scales of 1 and V is
    transposed here, ahead of the calls. The output is dropped.
    """
    torch: Any = importlib.import_module("torch")
    p = problem.replace(dtype=FP8)
    given = [*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), torch.empty_like(q, dtype=torch.bfloat16)]
    planned, kind = gpu_plan("flash3_fp8", p), framework("q", given[0])
    spec = planned.counts.tensors["v_t"]
    v_t = torch.empty((p.batch, spec.heads // p.batch, spec.rows, spec.cols), dtype=torch.uint8, device="cuda")
    given.append(v_t.view(torch.float8_e4m3fn))
    views = kind.views(dict(zip(("q", "k", "v", "out", "v_t"), given, strict=True)))
    stream = cupy().cuda.Stream.from_external(torch.cuda.current_stream())
    with stream:
        planned.launch(views)

    def call(held: Any = given) -> None:
        del held  # the kernel knows only their addresses
        with stream:
            planned.launch(views, first=1)

    return call


FAR = 0.1
"""How far cuDNN's output may be from ours before it isn't timed: the root mean square of the difference, relative to that of ours.
Each of the two roundings of P makes about 0.03, and an output in e4m3 as much again."""


def cudnn_beside(p: Problem, eight: Sequence[Any], ours: Callable[[], Any]) -> Callable[[], Any]:
    """A call of cuDNN's FP8 on the same tensors. Raises whatever cuDNN raises, and `ValueError` for an output far from ours."""
    call = fp8_cudnn.forward(p, *eight)
    wanted, got = (x.float() for x in (ours(), call()))
    off = float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    if not off <= FAR:
        raise ValueError(f"the result is wrong: {off:.2g} of its size from ours, where {FAR} is allowed")
    return call


def speed(cells: Sequence[Cell], not_run: list[str], seconds: float = 0.5) -> list[Speed]:
    """Time FP8 beside bfloat16 and, where it is installed, cuDNN's FP8 in each cell, for about `seconds`, with calls interleaved.

    Quantisation isn't timed. `not_run` is told why cuDNN wasn't. Raises `Unavailable` without torch.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise Unavailable("the benchmark needs PyTorch, for its events: pip install torch") from None
    found: list[Speed] = []
    for cell in cells:
        p = cell.problem
        plain = [torch.randn((p.batch, p.heads, p.len_q, p.head_dim), device="cuda").to(torch.bfloat16) for _ in "qkv"]
        eight, out = [x.to(torch.float8_e4m3fn) for x in plain], torch.empty_like(plain[0])

        def call(eight: list[Any] = eight, out: Any = out, p: Problem = p) -> Any:
            return run_attention(*eight, algorithm="flash3_fp8", out=out, **p.masks)

        def bfloat16(plain: list[Any] = plain, out: Any = out, p: Problem = p) -> Any:
            return run_attention(*plain, algorithm="flash3", out=out, **p.masks)

        calls: list[Callable[[], Any]] = [on_torch(p, *plain), call, bfloat16]
        try:
            calls.append(cudnn_beside(p, eight, call))
        except Exception as reason:  # whatever another library raises must not stop ours
            where = "" if isinstance(reason, Unavailable) else f", {p.head_dim} × {p.len_q:,}{' causal' * p.causal}"
            not_run.append(f"cuDNN's FP8{where}: {' '.join(str(reason).split())}"[:300])
        ours, whole, sixteen, *peer = interleaved(torch, calls, seconds)
        row = Speed(
            p.head_dim, p.causal, p.len_q, _tflops(cell, ours), _tflops(cell, sixteen), _ratio(ours, sixteen),
            _ratio(whole, sixteen),
        )  # fmt: skip
        for other in peer:
            row = replace(
                row, tflops_cudnn=_tflops(cell, other), ratio_to_cudnn=_ratio(ours, other),
                ratio_of_calls_to_cudnn=_ratio(whole, other), cudnn_out=str(calls[-1]().dtype).removeprefix("torch."),
            )  # fmt: skip
        found.append(row)
    return found


def _tflops(cell: Cell, times: list[float]) -> float:
    return cell.flops / statistics.median(times) / 1e9


def _ratio(times: list[float], other: list[float]) -> float:
    """How many times as long the other takes: the median over the rounds."""
    return statistics.median(b / a for a, b in zip(times, other, strict=True))


def run(*, lengths: Sequence[int] = (1024, 4096, 16384), head_dims: Sequence[int] = (128, 256)) -> Fp8Report:
    """Measure accuracy and speed. Raises `Unavailable` without a Hopper GPU."""
    chosen = cells(("bfloat16",), head_dims, (False, True), lengths)
    title = current_device().title  # before the references are computed, which takes its time
    own, papers = drawn(4096, rounded=True), drawn(8192, rounded=False)
    not_run = list[str]()
    rows = tuple(speed(chosen, not_run))
    cudnn = cudnn_graph.versions() if any(row.tflops_cudnn for row in rows) else None
    reasons = tuple(dict.fromkeys(not_run))
    return Fp8Report(title, own.said, accuracy(own), rows, papers.said, accuracy(papers), cudnn, reasons)


class Eight(Data):
    """A report, as `Fp8Report.to_dict` returns it."""

    passed: bool
    device: str
    inputs: str
    accuracy: tuple[Accuracy, ...]
    speed: tuple[Speed, ...]
    papers_inputs: str | None = None  # results from before 2026-11-23 have no errors in the paper's setting
    papers: tuple[Accuracy, ...] = ()
    cudnn: str | None = None
    """The versions of cuDNN's FP8, where it was timed."""
    not_run: tuple[str, ...] = ()
    """Why cuDNN's FP8 wasn't timed."""


def headline(data: Eight) -> str:
    """One sentence: the speed at each head dim, and the error of each way of quantisation."""
    ratios: dict[int, list[float]] = {}
    for row in data.speed:
        ratios.setdefault(row.head_dim, []).append(row.ratio)
    fast = "; ".join(f"{min(r):.2f} to {max(r):.2f} × bfloat16 at head dim {dim}" for dim, r in ratios.items())
    errors = ", ".join(f"{row.rmse:.1e} ({row.kernel})" for row in data.accuracy)
    return f"FP8: {fast}; RMSE {errors}"


def table(data: Eight) -> str:
    """Two Markdown tables: a row per way of quantisation, and a row per cell."""
    errors = markdown_table(("kernel", "RMSE"), [(row.kernel, f"{row.rmse:.2e}") for row in data.accuracy])
    rows = [
        (
            str(s.head_dim),
            "causal" if s.causal else "full",
            str(s.length),
            f"{s.tflops:.0f}",
            f"{s.tflops_bfloat16:.0f}",
            f"{s.ratio:.2f}",
            "" if s.ratio_to_cudnn is None else f"{s.ratio_to_cudnn:.2f}",
        )
        for s in data.speed
    ]
    return (
        f"{errors}\n\n{markdown_table(('head dim', 'mask', 'length', 'TFLOP/s', 'bfloat16', 'ratio', '× cuDNN'), rows)}"
    )


KIND = Kind(
    "fp8",
    "Numbers: FP8's error, and its speed",
    "FlashAttention-3 in FP8: errors on inputs with outliers, speed beside bfloat16",
    "flashlab fp8 --save docs/results",
    Eight,
    headline,
    table,
)
