"""How fast a kernel is, side by side with what one would use instead.

Every round calls each kernel once, so that clocks and temperature are the same for all; a ratio is that of one
round, and the median of the rounds is reported. In cells that take the kernel under test less than `SHORT` milliseconds, each
call is replayed from a CUDA graph (`timing` says how calls are timed). Before it is timed, a kernel's output is checked by
the rule of `flashlab verify`, in some rows; memory that it must write is full of NaN. Afterwards the rounds are repeated for
the clock rate of each call, and NVML says what held the clock down.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal, Protocol

from flashlab.base.host import to_numpy
from flashlab.measure import peers
from flashlab.measure.load import POWER, Gpu, Held, Watch, clocks
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.timing import captured, interleaved
from flashlab.run.choose import fastest
from flashlab.verify.rule import Expected, expect, judge
from simulator import Problem
from simulator.catalogue import CATALOGUE, get
from simulator.devices import Device
from simulator.errors import Unavailable, UsageError
from simulator.names import DType
from simulator.operations.backward import BACKWARD

__all__ = [
    "BENCH", "LADDER", "Bench", "BenchReport", "Cell", "Row", "Yardstick", "cells", "flat", "normal", "outer_heads",
    "run", "sampled",
]  # fmt: skip

TOKENS, HIDDEN = 16384, 2048
"""The field's convention: tokens of all sequences together, and heads × head dim."""

SHORT = 0.2
"""Milliseconds. In a cell that takes less, calls are replayed from CUDA graphs, as a model runs kernels that are so short."""

_SAMPLES, _SAMPLED_ROWS = 4, 8
"""What is checked of the first head and of the last: so many pieces of so many rows."""


@dataclass(frozen=True)
class Cell:
    """One problem of a benchmark: self-attention over sequences of one length."""

    dtype: DType
    head_dim: int
    causal: bool
    length: int

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=max(1, TOKENS // self.length),
            heads=HIDDEN // self.head_dim,
            len_q=self.length,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
        )

    @property
    def shape(self) -> str | None:
        """Batch, heads, KV heads and lengths in words, where they aren't the field's."""
        return None

    def kernel(self, algorithm: str) -> str:
        """The algorithm that runs here: `algorithm`, or where its kernels refuse a backward pass the fastest that takes it."""
        row, device = get(algorithm), Device.named("h200")
        if row.operation is not BACKWARD or row.refuses(self.problem, device) is None:
            return algorithm
        return fastest(BACKWARD, self.problem, device)

    @property
    def flops(self) -> float:
        """Of a forward pass, by the field's convention: 4 · length² · head dim · heads, halved if causal."""
        p = self.problem
        return 4.0 * p.batch * p.heads * p.len_q**2 * p.head_dim / (2 if self.causal else 1)


@dataclass(frozen=True)
class Yardstick:
    """What the GPU does in the same run: an 8192³ matrix product in a dtype (TFLOP/s), and a copy in its memory
    (GB/s, read and write)."""

    dtype: str
    matmul: float
    copy: float


@dataclass(frozen=True)
class Row:
    """One kernel in one cell. `peer` is None for the kernel under test; `ratio` is the peer's time over its time, by
    rounds: over 1, the kernel under test is faster. `error` is relative to what the rule allows; over 1 is wrong.
    `shape` is that of an odd cell: batch × (heads, KV heads) × queries × keys. `kernel` is the algorithm that ran in place of the
    one under test, which refuses the cell. `mhz` is the SMs' clock rate while the kernel
    runs, by their own count. `capped` is the share of the cell's time in which the power limit lowered the clock, and
    `reasons` are all that held it down. `queued` says whether a call was queued by Python or replayed from a graph."""

    dtype: str
    head_dim: int
    causal: bool
    length: int
    peer: str | None
    milliseconds: float
    tflops: float
    of_matmul: float | None
    ratio: float | None
    quartiles: tuple[float, float] | None
    error: float
    rounds: int
    shape: str | None = None
    kernel: str | None = None
    queued: Literal["by Python", "in a graph"] = "by Python"
    mhz: float | None = None
    capped: float | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchReport:
    """What `run` measured; `not_run` says which peers were not, and why."""

    algorithm: str
    device: str
    yardsticks: tuple[Yardstick, ...]
    rows: tuple[Row, ...]
    not_run: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """The kernel under test was timed, and its results were right."""
        mine = [row for row in self.rows if row.peer is None]
        return bool(mine) and all(row.error <= 1 for row in mine)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "algorithm": self.algorithm,
            "device": self.device,
            "tokens": TOKENS,
            "hidden": HIDDEN,
            "flops": f"{4 * trial_of(self.algorithm).PRODUCTS:g} * length^2 * head_dim * heads * batch, halved if causal",
            "yardsticks": [asdict(yardstick) for yardstick in self.yardsticks],
            "rows": [asdict(row) for row in self.rows],
            "not_run": list(self.not_run),
        }

    def cells(self) -> list[dict[str, Any]]:
        """The report as `flat` has it."""
        return flat(self)

    def print(self) -> None:
        """A table, the yardsticks, and what was not run."""
        from flashlab.views.tables import line, table

        rows = [
            (_named(row, self.algorithm), row.dtype, str(row.head_dim), "causal" if row.causal else "full",
             row.shape or f"{row.length:,}", f"{row.milliseconds:.3f}", f"{row.tflops:.0f}",
             "" if row.of_matmul is None else f"{row.of_matmul:.0%}", "" if row.ratio is None else f"{row.ratio:.3f}",
             _clock(row), _queued(row))
            for row in self.rows
        ]  # fmt: skip
        columns = (
            "kernel",
            "dtype",
            "head dim",
            "mask",
            "length",
            "ms",
            "TFLOP/s",
            "of matmul",
            "ratio",
            "MHz",
            "queued",
        )
        odd = any(row.shape for row in self.rows)
        of = "odd cells" if odd else f"{TOKENS:,} tokens, hidden size {HIDDEN:,}"
        table(f"{of}, on {self.device}", columns, rows, left=2)
        line(f"ratio: the peer's time over that of {self.algorithm}")
        line("MHz: the clock of the SMs, and what held it down; the power limit, in a share of the time")
        for y in self.yardsticks:
            line(f"{y.dtype}: 8192³ matrix product {y.matmul:.0f} TFLOP/s; copy in memory {y.copy:,.0f} GB/s")
        for reason in self.not_run:
            line(f"not run: {reason}")


def cells(
    dtypes: Sequence[DType] = ("bfloat16", "float16"),
    head_dims: Sequence[int] = (64, 128),
    masks: Sequence[bool] = (False, True),
    lengths: Sequence[int] = (1024, 4096, 16384),
) -> list[Cell]:
    """The cells of a benchmark; the field's own by default. Raises `UsageError` for lengths and head dims that have none."""
    for length in lengths:
        if length < 1:
            raise UsageError("len_q", length, "a number of tokens over 0")
    for head_dim in head_dims:
        if not 1 <= head_dim <= HIDDEN:
            raise UsageError("head_dim", head_dim, f"1 to {HIDDEN:,}: a token's heads have {HIDDEN:,} numbers together")
    return [Cell(*choice) for choice in product(dtypes, head_dims, masks, lengths)]


def run(
    algorithm: str = "flash2",
    against: Sequence[str] = ("sdpa-flash",),
    *,
    cells: Sequence[Cell] | None = None,
    tile: Any = None,
    seconds: float = 1.0,
    progress: Callable[[Iterable[Cell]], Iterable[Cell]] = iter,
) -> BenchReport:
    """Time `algorithm` and the peers in `against` in every cell, about `seconds` each; `progress` wraps the cells.

    A peer that isn't installed, or refuses a cell, or computes something else there, is one line in `.not_run`. Raises
    `Unavailable` without a GPU or without torch, `UsageError` for an unknown name.
    """
    if get(algorithm).support.eight_bit:
        raise UsageError("algorithm", algorithm, "one of 16 or 32 bits: `flashlab fp8` times this one beside flash3")
    for name in against:
        peers.check(name)
    if not 0 < seconds < math.inf:
        raise UsageError("seconds", seconds, "a number over 0")
    torch = _torch()
    not_run: list[str] = []
    present: list[str] = []
    for name in against:
        try:
            peers.layout(name)
            present.append(name)
        except Unavailable as reason:
            not_run.append(f"{name}: {reason}")
    chosen = list(_default_cells() if cells is None else cells)
    gpu = _watched(not_run)
    yardsticks = {dtype: _yardstick(torch, dtype) for dtype in dict.fromkeys(cell.dtype for cell in chosen)}
    rows: list[Row] = []
    for cell in progress(chosen):
        rows += _bench_cell(torch, cell, algorithm, tile, present, seconds, yardsticks[cell.dtype], gpu, not_run)
    device: str = torch.cuda.get_device_name()
    return BenchReport(algorithm, device, tuple(yardsticks.values()), tuple(rows), tuple(not_run))


_default_cells = cells  # `run` has a parameter of that name


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise Unavailable("the benchmark needs PyTorch, for its events and its peers: pip install torch") from None
    if not torch.cuda.is_available():
        raise Unavailable("the benchmark needs an NVIDIA GPU that torch can use")
    return torch


def _watched(not_run: list[str]) -> Gpu | None:
    """The GPU, if NVML answers; some drivers of virtual GPUs don't."""
    try:
        gpu = Gpu()
        gpu.reasons()
        gpu.capped()
        return gpu
    except Exception as reason:
        not_run.append(f"what holds the clock down: {reason}")
        return None


class Trial(Protocol):
    """What a cell times: ours and the peers on the same tensors, and how far each result is off."""

    PRODUCTS: ClassVar[float]
    """Matrix products, as a multiple of the forward's."""

    def __init__(self, torch: Any, cell: Cell) -> None: ...
    def ours(self, algorithm: str, tile: Any) -> Callable[[], Any]:
        """A call of one of flashlab's algorithms."""
        ...

    def peer(self, name: str) -> Callable[[], Any]:
        """A call of another library. It raises whatever the library raises."""
        ...

    def error(self, name: str | None, call: Callable[[], Any]) -> float:
        """The error of a call's worst sampled row, as a share of what the rule allows. None is ours."""
        ...


def trial_of(algorithm: str) -> type[Trial]:
    """How an algorithm's operation is timed."""
    from flashlab.measure.gradients import Backward

    return Backward if get(algorithm).operation is BACKWARD else _Forward


def _bench_cell(
    torch: Any,
    cell: Cell,
    algorithm: str,
    tile: Any,
    names: Sequence[str],
    seconds: float,
    yardstick: Yardstick,
    gpu: Gpu | None,
    not_run: list[str],
) -> list[Row]:
    trial, runs = trial_of(algorithm)(torch, cell), cell.kernel(algorithm)
    calls: dict[str | None, Callable[[], Any]] = {None: trial.ours(runs, tile if runs == algorithm else None)}
    errors: dict[str | None, float] = {}
    for name in names:
        try:
            call = trial.ours(name, None) if name in CATALOGUE else trial.peer(name)
            errors[name] = trial.error(name, call)
        except Exception as reason:  # whatever another library raises must not stop ours
            not_run.append(f"{name}, {_said(cell)}: {type(reason).__name__}: {' '.join(str(reason).split())}"[:300])
            continue
        if errors[name] > 1:
            not_run.append(f"{name}, {_said(cell)}: the result is wrong ({errors[name]:.2f} × what the rule allows)")
            continue
        calls[name] = call
    errors[None] = trial.error(None, calls[None])
    replays: dict[str | None, Callable[[], Any]] = {}
    if statistics.median(interleaved(torch, [calls[None]], 0, least=1)[0]) < SHORT:
        replays = {name: found for name, call in calls.items() if (found := _replay(torch, trial, name, call))}
    ready = list((calls | replays).values())
    held: Held | None = None
    if gpu is None:
        times = interleaved(torch, ready, seconds)
    else:
        with Watch(gpu) as watch:
            times = interleaved(torch, ready, seconds)
        held = watch.held
    rates = clocks(torch, ready, seconds / 3)
    flops = cell.flops * trial.PRODUCTS
    rows = [
        _row(cell, flops, name, own, times[0], yardstick, errors[name], name in replays, mhz, held)
        for name, own, mhz in zip(calls, times, rates, strict=True)
    ]
    return rows if runs == algorithm else [replace(rows[0], kernel=runs), *rows[1:]]


def _replay(torch: Any, trial: Trial, name: str | None, call: Callable[[], Any]) -> Callable[[], Any] | None:
    """The call as a replay of a CUDA graph; None if it can't be captured, or if a replay has a wrong result."""
    try:
        graph, (returned,) = captured(torch, [call])

        def replay() -> Any:
            graph.replay()
            return returned

        return replay if trial.error(name, replay) <= 1 else None
    except Exception:  # each library says it in its own way
        return None


def _row(
    cell: Cell,
    flops: float,
    peer: str | None,
    times: list[float],
    ours: list[float],
    yardstick: Yardstick,
    error: float,
    replayed: bool,
    mhz: float,
    held: Held | None,
) -> Row:
    ratios = [] if peer is None else [t / o for t, o in zip(times, ours, strict=True)]
    milliseconds = statistics.median(times)
    tflops = flops / milliseconds / 1e9
    low, _, high = statistics.quantiles(ratios, n=4) if ratios else (0.0, 0.0, 0.0)
    return Row(
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        causal=cell.causal,
        length=cell.length,
        peer=peer,
        milliseconds=milliseconds,
        tflops=tflops,
        of_matmul=tflops / yardstick.matmul,
        ratio=statistics.median(ratios) if ratios else None,
        quartiles=(low, high) if ratios else None,
        error=error,
        rounds=len(times),
        shape=cell.shape,
        queued="in a graph" if replayed else "by Python",
        mhz=mhz,
        capped=None if held is None else held.capped,
        reasons=() if held is None else held.reasons,
    )


def _said(cell: Cell) -> str:
    return f"{cell.dtype} × {cell.head_dim} {'causal' if cell.causal else 'full'} {cell.shape or cell.length}"


@dataclass(frozen=True)
class _Sample:
    """Some rows of one head, and what a correct kernel returns for them."""

    batch: int
    head: int
    rows: list[int]
    expected: Expected


def outer_heads(p: Problem) -> list[tuple[int, int]]:
    """The first head and the last, as (batch, head)."""
    return list(dict.fromkeys([(0, 0), (p.batch - 1, p.heads - 1)]))


def sampled(length: int, causal: bool) -> list[list[int]]:
    """The rows of a head that are checked, from its first ones to its last ones: in pieces of neighbours under a causal mask."""
    n = min(_SAMPLED_ROWS, length)
    starts = [(length - n) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    pieces = [list(range(start, start + n)) for start in starts]
    return pieces if causal else [[row for piece in pieces for row in piece]]


def _samples(p: Problem, tensors: Sequence[Any]) -> list[_Sample]:
    """Rows of the first head and of the last, from their first ones to their last ones.

    `tensors` are q, k and v (batch, heads, length, head_dim). Some rows are a problem of their own. Under a causal mask these
    are neighbours, and their keys end with the last one that they see.
    """
    pieces = sampled(p.len_q, p.causal)
    found: list[_Sample] = []
    for b, h in outer_heads(p):
        shared = h // p.queries_per_kv
        heads = h, shared, shared
        q, k, v = (to_numpy(name, x[b : b + 1, n : n + 1]) for name, x, n in zip("qkv", tensors, heads, strict=True))
        for rows in pieces:
            keys = rows[-1] + 1 + p.offset if p.causal else p.len_kv
            alone = p.replace(batch=1, heads=1, kv_heads=1, len_q=len(rows), len_kv=keys)
            found.append(_Sample(b, h, rows, expect(alone, q[:, :, rows], k[:, :, :keys], v[:, :, :keys])))
    return found


class _Forward:
    """A forward pass."""

    PRODUCTS: ClassVar[float] = 1.0

    def __init__(self, torch: Any, cell: Cell) -> None:
        self.torch, self.problem = torch, cell.problem
        self.bhsd = normal(torch, cell, "qkv")
        self.samples = _samples(self.problem, self.bhsd)

    def ours(self, algorithm: str, tile: Any) -> Callable[[], Any]:
        from flashlab.run.call import attention

        out, p = self.torch.full_like(self.bhsd[0], float("nan")), self.problem

        def call() -> Any:
            return attention(*self.bhsd, algorithm=algorithm, out=out, tile=tile, **p.masks)

        return call

    def peer(self, name: str) -> Callable[[], Any]:
        p, tensors = self.problem, self.bhsd
        if peers.layout(name) == "bshd":
            tensors = [x.transpose(1, 2).contiguous() for x in tensors]
        return peers.prepare(name, *tensors, causal=p.causal, scale=p.scale)

    def error(self, name: str | None, call: Callable[[], Any]) -> float:
        swapped = name is not None and peers.layout(name) == "bshd"
        return _error(self.torch, call, self.bhsd[0], self.samples, swapped)


def _error(torch: Any, call: Callable[[], Any], like: Any, samples: Sequence[_Sample], swapped: bool) -> float:
    """The error of a call's worst sampled row, as a share of what the rule allows. `like` has the output's shape: the
    allocator's next block of that size is full of NaN."""
    litter = torch.full_like(like, float("nan"))
    del litter
    out = call()
    out = out.swapaxes(1, 2) if swapped else out
    parts = ((out[x.batch : x.batch + 1, x.head : x.head + 1, x.rows], x.expected) for x in samples)
    return max(judge(expected, to_numpy("out", part), None).worst for part, expected in parts)


def normal(torch: Any, cell: Cell, names: Iterable[str]) -> list[Any]:
    """Normal random tensors of a cell's shapes, (batch, heads, length, head_dim), in GPU memory."""
    p, generator = cell.problem, torch.Generator(device="cuda").manual_seed(0)
    queries, keys = (p.batch, p.heads, p.len_q, p.head_dim), (p.batch, p.kv_heads, p.len_kv, p.head_dim)
    shapes, dtype = [keys if name in ("k", "v") else queries for name in names], getattr(torch, cell.dtype)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def _yardstick(torch: Any, dtype: str) -> Yardstick:
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(getattr(torch, dtype)) for _ in "ab")
    product_ = torch.empty_like(a)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)

    def matmul() -> Any:
        return torch.matmul(a, b, out=product_)

    def copy() -> Any:
        return target.copy_(source)

    products, copies = interleaved(torch, [matmul, copy], seconds=0.2)
    moved = 2 * source.numel()
    return Yardstick(dtype, 2 * n**3 / statistics.median(products) / 1e9, moved / statistics.median(copies) / 1e6)


class Bench(Data):
    """A report, as `BenchReport.to_dict` gives it."""

    passed: bool
    algorithm: str
    device: str
    tokens: int
    hidden: int
    flops: str
    yardsticks: tuple[Yardstick, ...]
    rows: tuple[Row, ...]
    not_run: tuple[str, ...]


def flat(report: BenchReport | Bench) -> list[dict[str, Any]]:
    """A flat row per cell: the kernel under test, its share of the matmul rate, and its ratio to each peer there."""
    found: list[dict[str, Any]] = []
    for row in report.rows:
        cell = {name: getattr(row, name) for name in ("dtype", "head_dim", "causal", "length")}
        if row.shape is not None:
            cell["shape"] = row.shape
        if row.peer is None:
            same = {
                "kernel": row.kernel or report.algorithm,
                "device": report.device,
                **cell,
                "milliseconds": row.milliseconds,
            }
            clock = {} if row.mhz is None else {"mhz": row.mhz, "capped": row.capped, "queued": row.queued}
            found.append(
                {**same, "tflops": row.tflops, "share_of_matmul": row.of_matmul, "rounds": row.rounds, **clock}
            )
        else:
            found[-1][f"ratio_{row.peer.replace('-', '_')}"] = row.ratio
    return found


def _clock(row: Row) -> str:
    """A kernel's clock rate and what held it down, for a table.

    >>> from dataclasses import replace
    >>> row = Row("float16", 64, False, 1024, None, 1.0, 300.0, 0.5, None, None, 0.3, 11, mhz=1512.6, capped=0.82)
    >>> _clock(row), _clock(replace(row, reasons=("power limit", "temperature")))
    ('1513', '1513 (power limit 82%, temperature)')
    """
    if row.mhz is None:
        return ""
    share = "" if row.capped is None else f" {row.capped:.0%}"
    reasons = ", ".join(name + (share if name == POWER else "") for name in row.reasons)
    return f"{row.mhz:.0f}" + (f" ({reasons})" if reasons else "")


def _named(row: Row, algorithm: str) -> str:
    """Which kernel a row is of, for a table.

    >>> row = Row("float16", 192, False, 1000, None, 1.0, 300.0, 0.5, None, None, 0.3, 11, kernel="flash2_backward")
    >>> _named(row, "flash3_backward")
    'flash2_backward (for flash3_backward)'
    """
    return row.peer or (algorithm if row.kernel is None else f"{row.kernel} (for {algorithm})")


def _queued(row: Row) -> str:
    return "" if row.mhz is None else row.queued  # of older results nobody knows


def headline(data: Bench) -> str:
    """The ratios to each peer, over all cells."""
    groups: dict[str, list[float]] = {}
    for row in data.rows:
        if row.peer is not None and row.ratio is not None:
            groups.setdefault(row.peer, []).append(row.ratio)
    parts = [
        f"{min(ratios):.2f} to {max(ratios):.2f} × {peer} (median {statistics.median(ratios):.2f})"
        for peer, ratios in groups.items()
    ]
    return f"speed of {data.algorithm}: {'; '.join(parts) or 'no peer was run'}"


def table(data: Bench) -> str:
    """A row per kernel and cell."""
    header = ("dtype", "head dim", "mask", "length", "kernel", "TFLOP/s", "ratio", "of matmul", "MHz", "queued")
    return markdown_table(header, [
        (r.dtype, str(r.head_dim), "causal" if r.causal else "full", r.shape or str(r.length), _named(r, data.algorithm),
         f"{r.tflops:.0f}", "" if r.ratio is None else f"{r.ratio:.2f}",
         "" if r.of_matmul is None else f"{r.of_matmul:.0%}", _clock(r), _queued(r))
        for r in data.rows
    ])  # fmt: skip


BENCH = Kind(
    "bench",
    "Speed: against peers",
    "times side by side with peers",
    "flashlab bench flash2 --against sdpa-flash,cudnn,sdpa-efficient,fa4 --save docs/results",
    Bench,
    headline,
    table,
)
LADDER = Kind(
    "ladder",
    "Speed: rung by rung",
    "the rungs of an algorithm beside each other",
    "flashlab bench flash3 --against flash3_3,flash3_2,flash3_1,flash2,cudnn --save docs/results",
    Bench,
    headline,
    table,
)
