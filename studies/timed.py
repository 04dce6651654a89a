"""The studies that time calls side by side: append, decoding, dropout, emulator, features, lengths, revisions, tiles.

All are one loop: cells, the contenders of a cell, rounds in which each is called once, rows, a table. Contenders take turns on the
same arrays, so that clocks and temperature are the same for all. A ratio is that of one round, and the median is reported. A
`Study` says what its cells are and how a cell becomes rows, and `main` does the rest. All but `emulator` need a GPU and torch.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

import flashlab as fl
import kernels_cu
from flashlab.integrations.peers import flex
from flashlab.measure import odd, results
from flashlab.measure.results import Kind
from flashlab.measure.speed import HIDDEN, TOKENS, Cell, cells, normal
from flashlab.measure.timing import captured, interleaved, turns
from flashlab.run.devices import current_device
from flashlab.run.plan import gpu_plan
from simulator import Problem
from simulator.api import count
from simulator.catalogue import get
from simulator.errors import Unavailable, UsageError
from simulator.operations.attention import ATTENTION
from simulator.operations.draws import random_optional
from simulator.problem import CACHES, Tile
from studies import contenders
from studies.contenders import APPENDED, DECODED, DRAFTS, Append, Calls, Decode, reason
from studies.rows import CELL, Made, data, each, grouped, row, shown

Call = Callable[[], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a run is asked for. `only` are names of the study's own, such as features. `not_run` is filled on the way."""

    against: Sequence[str] = ()
    only: Sequence[str] = ()
    seconds: float | None = None
    rounds: int = 15
    sources: Path | None = None
    revision: str = ""
    not_run: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class Study(Kind[Any]):
    """A kind of result, and how it is measured: the `cells` of an algorithm, and the rows of one.

    `head` is what the data hold beside the rows, by default the algorithm. `problems` of a cell are compiled beforehand, many at a
    time. The algorithms of a study that is `together` are in one file. `only` are what its cells can be chosen by.
    """

    algorithms: Sequence[str]
    cells: Callable[[str, Asked], Sequence[Any]]
    measure: Callable[[str, Any, Asked], Sequence[Row]]
    head: Callable[[Sequence[str], Asked], Row] = lambda names, _: {"algorithm": names[0]}
    problems: Callable[[Any], Iterable[Problem]] = lambda _: ()
    subject: str | None = None
    together: bool = False
    only: Sequence[str] = ()
    peers: Callable[[str, Sequence[str] | None], Sequence[str]] = lambda _, given: given or ()


def quartiles(times: Sequence[float], base: Sequence[float]) -> Row:
    """The ratio of each round: the median, and the two quartiles beside it."""
    low, middle, high = statistics.quantiles(over(times, base), n=4)
    return {"ratio": middle, "quartiles": (low, high), "rounds": len(base)}


def over(times: Sequence[float], base: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(times, base, strict=True)]


def timed(calls: Mapping[Any, Call], seconds: float) -> dict[Any, list[float]]:
    """Milliseconds of each call in each round."""
    return dict(zip(calls, interleaved(import_module("torch"), list(calls.values()), seconds), strict=True))


def drawn(p: Problem) -> dict[str, Any]:
    """Normal random tensors for q, k, v, and what else the problem has."""
    torch: Any = import_module("torch")
    sizes = {"q": (p.heads, p.len_q), "k": (p.kv_heads, p.len_kv), "v": (p.kv_heads, p.len_kv)}
    shapes = {name: (p.batch, *size, p.head_dim) for name, size in sizes.items()}
    arrays = {x: torch.randn(shape, device="cuda").to(getattr(torch, p.dtype)) for x, shape in shapes.items()}
    return arrays | {name: torch.from_numpy(x).cuda() for name, x in random_optional(p).items()}


def cell_of(cell: Cell, took: Sequence[float]) -> Row:
    """The fields of a cell, and the median of its times."""
    return {name: getattr(cell, name) for name in CELL} | {"milliseconds": statistics.median(took)}


TIMED: Mapping[str, Any] = {**CELL, "milliseconds": float, "ratio": float, "rounds": int}
QUARTILES = tuple[float, float]

# -- decoding and appends: in CUDA graphs, because a model that decodes runs in one -----------------------------------

_COLD = 400e6  # bytes of K and V in all sets of inputs, several times the L2: they come from DRAM
_CALLS, _GRAPH_S = 24, 0.02  # of a graph: calls of decoding, about, and seconds of appends
SERVED: Mapping[str, Any] = {"microseconds": dict[str, float], "ratios": dict[str, float], "rounds": int}
"""By contender microseconds (the median) and its time over the algorithm's (median of a round's ratios)."""


def served(algorithm: str, sets: Sequence[Calls], repeats: int, asked: Asked, failed: dict[str, str]) -> Row:
    """Time the calls of several sets of inputs, each contender's in a graph. `failed` are peers that don't take the cell."""
    torch: Any = import_module("torch")
    graphs = dict[str, Any]()
    for name in sets[-1]:
        try:
            graphs[name] = captured(torch, [each[name] for each in sets], repeats)[0]
        except Exception as error:  # other libraries raise what they like
            if name not in asked.against:
                raise
            failed[name] = reason(error)
    calls = repeats * len(sets)
    times = {name: [x / calls for x in found] for name, found in turns(torch, graphs, asked.rounds).items()}
    ratios = {name: statistics.median(over(found, times[algorithm])) for name, found in times.items()}
    del ratios[algorithm]
    torch.cuda.empty_cache()
    asked.not_run.extend(line for x, why in failed.items() if (line := f"{x} ({why})") not in asked.not_run)
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {"microseconds": middle, "ratios": ratios, "rounds": asked.rounds, "failed": failed}


def peers_of(of: Any) -> list[str]:
    """All that were timed, in one cell at least."""
    return list(dict.fromkeys(name for r in of.rows for name in r.ratios if name != "read"))


def beside(of: Any) -> list[str]:
    """The ratio to each peer, as a range over the cells."""
    ranges = {name: [r.ratios[name] for r in of.rows if name in r.ratios] for name in peers_of(of)}
    return [f"{min(found):.2f} to {max(found):.2f} × {name}" for name, found in ranges.items()]


def served_table(columns: str, of: Any, *, micro: bool = False, **made: Callable[[Any], Any]) -> str:
    """A row per cell: the columns, with `micro` the peers' µs, and what each takes of the algorithm's time."""
    peers = peers_of(of)
    times = each(peers if micro else (), lambda x, r: f"{r.microseconds[x]:.1f}" if x in r.ratios else "–")
    ratios = each((f"× {x}" for x in peers), lambda x, r: f"{r.ratios[x[2:]]:.2f}" if x[2:] in r.ratios else "–")
    made |= {
        "took": lambda r: r.microseconds[of.algorithm],
        "rate": lambda r: (r.flops or 0) / r.microseconds[of.algorithm] / 1e6,
    }
    return shown(" | ".join([columns, *(f"{x} µs={x}" for x in times), *ratios]), **made, **times, **ratios)(of)


def decoding_cells(algorithm: str, asked: Asked) -> list[Decode]:
    """The cells, or those of `paged` with the dtypes of its cache or the features that are asked for."""
    if not asked.only:
        return list(DECODED[algorithm])
    if algorithm != "paged":
        raise UsageError("only", ",".join(asked.only), "the algorithm paged")
    few = {"kv_dtype": DECODED["paged"], "feature": DECODED["paged"][:1]}  # a feature minds no size of pages
    named = [("kv_dtype" if name in CACHES else "feature", name) for name in asked.only]
    return [cell.model_copy(update={key: name}) for key, name in named for cell in few[key]]


def decoding_row(algorithm: str, cell: Decode, asked: Asked) -> list[Row]:
    """Time a cell. Raises `RuntimeError` if contenders don't agree."""
    moved, failed, sets = contenders.nbytes(algorithm, cell), dict[str, str](), list[Calls]()
    for _ in range(max(2, min(16, int(_COLD / moved) + 1))):
        left = [name for name in asked.against if name not in failed]
        sets.append(contenders.contenders(import_module("torch"), algorithm, cell, left, failed))
    found = served(algorithm, sets, max(1, _CALLS // len(sets)), asked, failed)
    return [{**cell.model_dump(), **found, "nbytes": moved, "flops": contenders.flops(algorithm, cell)}]


def decoding_headline(of: Any) -> str:
    shares = [r.ratios["read"] for r in of.rows]
    of_read = f"{min(shares):.0%} to {max(shares):.0%} of a plain read"
    return f"{of.algorithm}, one query, K and V from DRAM: {', '.join(beside(of))}; {of_read}"


def decoding_table(of: Any) -> str:
    def keys(r: Any) -> str:
        if r.len_prefix is not None:
            return f"{r.len_prefix:,} shared, {r.len_kv:,} own"
        return f"{r.len_kv:,}" if r.longest is None else f"mean {r.len_kv:,}, longest {r.longest:,}"

    where = {"of=kv_dtype": "kv_dtype", "with": "feature", "pages of=page_size": "page_size", "chunks of": "chunk"}
    has = " | ".join(["keys", *(column for column, name in where.items() if any(getattr(r, name) for r in of.rows))])
    flops = "TFLOP/s=rate:,.0f | " if all(r.flops for r in of.rows) else ""
    columns = f"batch | heads=both | {has} | µs=took:.1f | {flops}GB/s=speed:,.0f | of a plain read=share:.0%"
    made: Made = {
        "both": lambda r: f"{r.heads}, {r.kv_heads}", "keys": keys, "share": lambda r: r.ratios["read"],
        "with": lambda r: f"{DRAFTS} drafts" if r.feature == "drafts" else (r.feature or "").replace("_", " "),
        "chunks of": lambda r: f"{r.chunk:,}" if r.chunk else "its own",
        "speed": lambda r: r.nbytes / r.microseconds[of.algorithm] / 1e3,
    }  # fmt: skip
    return served_table(columns, of, micro=True, **made)


DECODED_ROW = row(
    "DecodingRow", "A cell: the bytes of all keys and values, and the FLOPs. `read` is the kernel that only reads. `failed` says"
    " why a peer wasn't timed.", Decode, **SERVED, nbytes=int, flops=(int | None, None), failed=(dict[str, str], {}),
)  # fmt: skip
DECODING = Study(
    "decoding", "Speed: decoding",
    "the time of one query against a long cache in CUDA graphs, beside peers and a plain read of the same bytes",
    "python -m studies decoding", data("Decoding", "Of one algorithm.", DECODED_ROW, algorithm=str), decoding_headline,
    decoding_table, algorithms=("flash_decoding",), cells=decoding_cells, measure=decoding_row,
    only=(*CACHES, *contenders.FEATURES), peers=contenders.check,
)  # fmt: skip


def append_row(algorithm: str, cell: Append, asked: Asked) -> list[Row]:
    """Time a cell. Raises `RuntimeError` if a result breaks the rule."""
    batch, failed, names = contenders.Batch(import_module("torch"), cell), dict[str, str](), (algorithm, *asked.against)
    calls = contenders.ready(algorithm, {name: partial(batch.call, name) for name in names}, failed)
    for name, call in calls.items():
        batch.check(name, call())
    found = served(algorithm, [calls], max(1, round(_GRAPH_S * 500e12 / cell.work)), asked, failed)
    return [{**cell.model_dump(), **found, "longest": max(keys for _, keys in cell.lengths), "flops": cell.work}]


def append_headline(of: Any) -> str:
    rates = [r.flops / r.microseconds[of.algorithm] / 1e6 for r in of.rows]
    return "; ".join([f"{of.algorithm}, ragged and causal: {min(rates):.0f} to {max(rates):.0f} TFLOP/s", *beside(of)])


def append_table(of: Any) -> str:
    paged = "pages of=page_size | " if of.rows[0].page_size is not None else ""
    return served_table(
        f"requests=batch | new tokens=new | tokens | {paged}µs=took:,.0f | TFLOP/s=rate:,.0f", of,
        tokens=lambda r: f"mean {r.mean:,}, longest {r.longest:,}" if r.skewed else f"{r.mean:,}",
        new=lambda _: contenders.NEW if paged else "all",
    )  # fmt: skip


APPENDED_ROW = row(
    "AppendRow", "A cell: the longest request's tokens, and the FLOPs. `failed` are peers that don't take it, and what they said.",
    Append, **SERVED, longest=int, flops=int, failed=dict[str, str],
)  # fmt: skip
APPEND = Study(
    "append", "Speed: appends and ragged prefills",
    "the time of many new queries of ragged requests, over pages or not, in CUDA graphs beside peers",
    "python -m studies append", data("Appending", "Of one algorithm.", APPENDED_ROW, algorithm=str), append_headline,
    append_table, algorithms=("flash3_paged",), cells=lambda name, _: APPENDED[name], measure=append_row,
    peers=contenders.check,
)  # fmt: skip

# -- dropout: both passes, beside the same without, other kernels of ours, cuDNN and SDPA's flash ---------------------

RATE, PLAIN = 0.1, "without dropout"
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "sdpa-flash": "FLASH_ATTENTION"}
OTHERS = {"flash3": "flash2", "flash3_backward": "flash2_backward"}
"""Of our kernels for Hopper, those for any GPU."""
OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def pass_of(algorithm: str) -> str:
    return "backward" if algorithm.endswith("backward") else "forward"


def dropout_rows(algorithm: str, cell: Cell, asked: Asked) -> list[Row]:
    """Time one pass in one cell. Which weights a library drops is its own affair: there only a result that has all weights is
    refused. Raises `RuntimeError` if our kernels, which have one mask, differ."""
    torch: Any = import_module("torch")
    of, names = pass_of(algorithm), ["q", "k", "v", "dout"]
    arrays = dict(zip(names, normal(torch, cell, names), strict=True))
    ours, other, p = algorithm, OTHERS[algorithm], cell.problem.replace(dropout=RATE)
    state = {name: torch.from_numpy(x).cuda() for name, x in random_optional(p).items()}
    calls: dict[str, Call] = {ours: _dropped(ours, p, arrays, state), PLAIN: _dropped(ours, cell.problem, arrays, {})}
    calls[other] = _dropped(other, p, arrays, state)
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
            asked.not_run.append(f"{name}, {of}, {cell}: {' '.join(str(error).split())}"[:300])
    times, work = timed(calls, asked.seconds or 0.5), cell.flops * (2.5 if of == "backward" else 1) / 1e9
    return [
        {**cell_of(cell, took), **quartiles(took, times[ours]), "of": of, "call": name, "tflops": work / statistics.median(took)}
        for name, took in times.items()
    ]  # fmt: skip


def apart(found: Sequence[Any], other: Sequence[Any]) -> float:
    """How far results are apart, as a share of their size; of several arrays the worst."""
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, other, strict=True))


def _dropped(algorithm: str, p: Problem, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> Call:
    """A call of a plan, whose results are a list. A backward pass gets the output and the LSE of our forward pass."""
    given = {name: arrays[name] for name in "qkv"} | dict(state)
    if pass_of(algorithm) == "backward":
        before = gpu_plan("flash3", p, lse=True).run(**given)
        given |= {"dout": arrays["dout"], "out": before["out"], "lse": before["lse"]}
    plan, outputs = gpu_plan(algorithm, p), OUTPUTS[pass_of(algorithm)]
    return lambda: list(map(plan.run(**given).__getitem__, outputs))


def _sdpa(torch: Any, cell: Cell, of: str, backend: str, arrays: Mapping[str, Any]) -> Call:
    """torch's own, by a backend of `scaled_dot_product_attention`. A backward pass is that of one forward pass, called again."""
    attention, p = import_module("torch.nn.attention"), cell.problem
    given = [arrays[name].detach().requires_grad_(of == "backward") for name in "qkv"]
    how: dict[str, Any] = {"dropout_p": RATE, "is_causal": p.causal, "scale": p.scale}

    def forward() -> list[Any]:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            return [torch.nn.functional.scaled_dot_product_attention(*given, **how)]

    if of == "forward":
        return forward
    (out,) = forward()
    return lambda: torch.autograd.grad(out, given, arrays["dout"], retain_graph=True)


def dropout_headline(of: Any) -> str:
    parts = list[str]()
    for ours in OTHERS:
        ratios = grouped((r for r in of.rows if r.of == pass_of(ours) and r.call != ours), "call")
        each = ", ".join(f"{min(r):.2f} to {max(r):.2f} for {name}" for name, r in ratios.items())
        parts.append(f"{ours}: times over its own, {each}")
    return f"dropout {of.rate:g}; {'; '.join(parts)}"


DROPPED_ROW = row(
    "DropoutRow", "One call in one cell, with its FLOP/s. `ratio` is its time over that of ours with dropout, by rounds.", **TIMED,
    of=Literal["forward", "backward"], call=str, tflops=float, quartiles=QUARTILES,
)  # fmt: skip
DROPOUT = Study(
    "dropout", "Speed: dropout",
    "the time of both passes with dropout, beside the same without, other kernels of ours, cuDNN and SDPA's flash",
    "python -m studies dropout",
    data("Dropout", "At one rate.", DROPPED_ROW, rate=float, not_run=tuple[str, ...]), dropout_headline,
    shown("pass=of | call | head dim=head_dim | mask | length:, | ms=milliseconds:.3f | TFLOP/s=tflops:.0f | ratio:.2f"),
    algorithms=(*OTHERS, *OTHERS.values()), measure=dropout_rows,
    cells=lambda name, _: cells(("bfloat16",), (64, 128), (False, True), (4096, 16384)) if name in OTHERS else [],
    head=lambda _, asked: {"rate": RATE, "not_run": asked.not_run}, subject="flash3", together=True,
)  # fmt: skip

# -- features: what a soft cap, sinks, ALiBi, windows and masks cost. lengths: ragged batches beside padded ones ------


def documents(seed: int = 0) -> list[int]:
    """Lengths from 50 to 2,000, as many tokens as other batches have in all."""
    numbers, left = random.Random(seed), TOKENS
    found = list[int]()
    while left > 2000:
        found.append(numbers.randint(50, 2000))
        left -= found[-1]
    return [*found, left]


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
"""Normal scores stay far below a cap of 50, where a polynomial serves; a cap of 1 bends them all. A mask is packed in each call.
Documents are sequences of 50 to 2,000 tokens in one row."""
PEERS_AT = 128
"""The head dim at which there are peers: each of their cells is compiled."""


def feature_cells(algorithm: str, asked: Asked) -> list[tuple[str, Cell]]:
    del algorithm
    every = cells(("bfloat16",), (64, 128, 256), (False, True), (4096, 16384))
    some = {"window 1024": [c for c in every if c.causal], "documents": [c for c in every if c.problem.batch == 1]}
    return [(name, c) for name in asked.only or FEATURES for c in some.get(name, every)]


def feature_row(algorithm: str, of: tuple[str, Cell], asked: Asked) -> list[Row]:
    (feature, cell), arrays = of, drawn(p := of[1].problem.replace(**FEATURES[of[0]]))
    with_it, without, qkv = gpu_plan(algorithm, p), gpu_plan(algorithm, cell.problem), {x: arrays[x] for x in "qkv"}
    calls: dict[str, Call] = {"": partial(with_it.run, **arrays), "plain": partial(without.run, **qkv)}
    for name in asked.against if cell.head_dim == PEERS_AT else ():
        try:
            calls[name] = _checked(PEERS[name](p, qkv, arrays), calls[""])
        except Exception as error:  # whatever another library raises must not stop ours
            asked.not_run.append(f"{name}, {feature}, {cell}: {' '.join(str(error).split())}"[:300])
    times = timed(calls, asked.seconds or 0.3)
    work = with_it.counts.flops.matmul / count(algorithm, cell.problem, device=without.device).flops.matmul
    others = {name: statistics.median(times[name]) if name in times else None for name in ("plain", *PEERS)}
    found = {**cell_of(cell, times[""]), **quartiles(times[""], times["plain"])}
    return [{**found, "feature": feature, "work": work, **others}]


def _checked(call: Call, ours: Any) -> Any:
    """The call. Raises `RuntimeError` if its result is another than ours."""
    far = float((call().float() - ours()["out"].float()).abs().max())
    if not far < 0.1:
        raise RuntimeError(f"the result is {far:.2g} apart from ours")
    return call


def _cudnn(p: Problem, arrays: Mapping[str, Any], optional: Mapping[str, Any]) -> Call:
    """cuDNN with a mask of booleans. Raises `Unavailable` for a problem without one."""
    if list(p.applied) not in (["mask"], ["causal", "mask"]) or p.mask != "dense":
        raise Unavailable("cuDNN is a peer where there is a mask of booleans")
    torch, attention = import_module("torch"), import_module("torch.nn.attention")
    mask = optional["mask"].tril(p.offset) if p.causal else optional["mask"]

    def call() -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*arrays.values(), attn_mask=mask, scale=p.scale)

    return call


PEERS: Mapping[str, Callable[[Problem, Any, Any], Call]] = {"flex": flex.prepare, "cudnn": _cudnn}


def feature_headline(of: Any) -> str:
    each = grouped(of.rows, "feature", lambda r: r.ratio / r.work).items()
    said = "; ".join(f"{name} {statistics.median(r):.2f} (worst {max(r):.2f})" for name, r in each)
    return f"{of.algorithm}: time over the plain call's, for the same matrix products: {said}"


def _plain_rate(r: Any) -> float:
    """The plain call's FLOPs, those of hidden pairs included, in TFLOP/s of the time with the feature."""
    return ATTENTION.flops(Cell(r.dtype, r.head_dim, r.causal, r.length).problem) / r.milliseconds / 1e9


FEATURED_ROW = row(
    "FeatureRow", "A feature in one cell, beside the `plain` call's milliseconds. `work` is its share of the plain call's matrix"
    " products, by the formula. `flex` and `cudnn` are the milliseconds of FlexAttention and of cuDNN with a mask.", **TIMED,
    feature=str, plain=float, quartiles=QUARTILES, work=float, flex=float | None, cudnn=(float | None, None),
)  # fmt: skip
FEATURED = Study(
    "features", "Speed: what changes the scores",
    "the time of a soft cap, sinks, ALiBi, a window and a mask, each round beside the plain call",
    "python -m studies features flash3", data("Features", "Of one algorithm.", FEATURED_ROW, algorithm=str), feature_headline,
    shown("feature | head dim=head_dim | mask | length:, | ms=milliseconds:.3f | plain ms=plain:.3f | ratio:.2f | work:.2f"
          " | TFLOP/s of the plain call's=rate:.0f | FlexAttention ms=flex:.3f | cuDNN ms=cudnn:.3f", rate=_plain_rate),
    algorithms=("flash3",), cells=feature_cells, measure=feature_row, only=tuple(FEATURES),
    problems=lambda of: (of[1].problem.replace(**FEATURES[of[0]]), of[1].problem),
)  # fmt: skip

BATCHES: dict[str, list[int]] = {
    "2 of 8,192": [8192] * 2,
    "16 of 1,024": [1024] * 16,
    "128 of 128": [128] * 128,
    "documents of 50 to 2,000": documents(),
    "one of 8,192 among 64 of 128": [128] * 32 + [8192] + [128] * 32,
}
"""The ragged batches by name: 16,384 tokens each."""


def ragged(batch: str, dim: int, causal: bool) -> Problem:
    """A batch as a problem: bfloat16, of the field's hidden size."""
    sizes: dict[str, Any] = {"batch": 1, "heads": HIDDEN // dim, "head_dim": dim}
    return Problem(**sizes, lengths=BATCHES[batch], dtype="bfloat16", causal=causal)


def lengths_row(algorithm: str, of: tuple[str, Problem], asked: Asked) -> list[Row]:
    """Time one batch. Raises `RuntimeError` if its longest sequence gets another result alone, but for rounding."""
    batch, p = of
    plan, padded = (gpu_plan(algorithm, x) for x in (p, p.padded))
    arrays = drawn(p)
    longest = max(range(len(p.spans)), key=lambda s: len(p.spans[s][0]))
    rows = slice(p.spans[longest][0].start, p.spans[longest][0].stop)  # self-attention: its keys lie alike
    alone = gpu_plan(algorithm, p.sequences[longest].replace(lengths=None))
    one, out = alone.run(**{x: arrays[x][:, :, rows] for x in "qkv"})["out"], plan.run(**arrays)["out"]
    far = float((one.float() - out[:, :, rows].float()).abs().max())
    if not far < 0.05:
        raise RuntimeError(f"sequence {longest} of {len(p.spans)} is {far:.2g} apart from what it is alone")
    calls = {"milliseconds": partial(plan.run, **arrays), "padded": partial(padded.run, **drawn(p.padded))}
    times = timed(calls, asked.seconds or 0.3)
    work, tokens = plan.counts.flops.matmul / padded.counts.flops.matmul, p.padded.batch * p.padded.len_q
    found = {name: statistics.median(took) for name, took in times.items()}
    found |= quartiles(times["padded"], times["milliseconds"])
    sizes = {"dtype": p.dtype, "head_dim": p.head_dim, "causal": p.causal, "sequences": len(p.spans), "tokens": p.len_q}
    return [{"batch": batch, **sizes, "padded_tokens": tokens, "work": work, **found}]


def lengths_headline(of: Any) -> str:
    ratios, shares = grouped(of.rows, "batch"), grouped(of.rows, "batch", lambda r: r.ratio * r.work)
    middle = statistics.median
    each = (f"{x} {middle(r):.2f} × ({middle(shares[x]):.2f} of what the work allows)" for x, r in ratios.items())
    return f"{of.algorithm}: the padded batch's time over the ragged one's: {'; '.join(each)}"


LENGTHS_ROW = row(
    "LengthsRow", "A batch in one cell: milliseconds of the ragged and of the padded batch (medians), and the median ratio of a"
    " round. `work` is the ragged batch's share of the padded one's matrix products, by the formula. The inverse is ideal.",
    batch=str, dtype=str, head_dim=int, causal=bool, sequences=int, tokens=int, padded_tokens=int, milliseconds=float, padded=float,
    ratio=float, quartiles=QUARTILES, work=float, rounds=int,
)  # fmt: skip
LENGTHS = Study(
    "lengths", "Speed: ragged batches", "the time of ragged batches, each round beside the padded batch",
    "python -m studies lengths flash3", data("Lengths", "Of one algorithm.", LENGTHS_ROW, algorithm=str), lengths_headline,
    shown("batch | head dim=head_dim | mask | tokens:, | padded to=padded_tokens:, | ms=milliseconds:.3f | padded ms=padded:.3f"
          " | ratio:.2f | work:.3f"),
    algorithms=("flash3",), measure=lengths_row, problems=lambda of: (of[1], of[1].padded),
    cells=lambda _name, _asked: [(x[0], ragged(*x)) for x in product(BATCHES, (64, 128, 256), (False, True))],
)  # fmt: skip

# -- tiles: every tile that leaves registers for its accumulators, beside the chosen one ------------------------------

ACCUMULATORS = {128: 208, 192: 128}
"""Registers of a thread that S, P and O may take together, by rows of a tile: the rest of 240 or of 160 is for all else."""


def candidates(head_dim: int) -> list[Tile]:
    """The tiles of a head dim whose S, P and O fit a thread's registers, and which aren't far too small.

    >>> [tuple(tile) for tile in candidates(256)]
    [(128, 64), (128, 80), (128, 96)]
    """
    every = product(ACCUMULATORS.items(), range(64, 193, 16))
    return [Tile(rows, cols) for (rows, most), cols in every if cols * 3 // 4 + head_dim // 2 <= most]


def tile_cells(algorithm: str = "", asked: Asked | None = None) -> list[Cell]:
    """Those of the benchmark, at more head dims, and the odd ones, for any algorithm."""
    del algorithm, asked
    usual = cells(("bfloat16",), (64, 80, 96, 128, 160, 192, 256), (False, True), (1024, 4096, 16384))
    return [*usual, *odd.cells()]


def tile_rows(algorithm: str, cell: Cell, asked: Asked) -> list[Row]:
    """Time each tile that compiles without spills and fits the SRAM, the chosen one first."""
    p, first = cell.problem, gpu_plan(algorithm, cell.problem)
    plans: dict[Any, Any] = {first.counts.tile: first}
    for tile in candidates(cell.head_dim):
        try:
            plans.setdefault(tile, gpu_plan(algorithm, p, tile=tile))
        except UsageError:  # more SRAM than a block may have
            continue
    arrays = drawn(p)
    times = timed({tile: partial(plan.run, **arrays) for tile, plan in plans.items()}, asked.seconds or 0.1)
    base = times[first.counts.tile]
    return [
        {**cell_of(cell, took), "shape": cell.shape, "tile": tuple(tile), "chosen": took is base, "rounds": len(took),
         "ratio": statistics.median(over(took, base))}
        for tile, took in times.items()
    ]  # fmt: skip


def by_cell(rows: Iterable[Any]) -> dict[tuple[Any, ...], list[Any]]:
    """The rows of each cell."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for r in rows:
        found.setdefault((r.dtype, r.head_dim, r.causal, r.length, r.shape), []).append(r)
    return found


def tile_headline(of: Any) -> str:
    best = [min(r.ratio for r in rows) for rows in by_cell(of.rows).values()]
    near = f"in {sum(ratio >= 0.97 for ratio in best)} of {len(best)} cells no tile is faster than the chosen one by more than 3 %"
    return f"{of.algorithm}: {near}; in the worst one takes {min(best):.2f} of its time"


def tile_table(of: Any) -> str:
    """A row per cell: the chosen tile, and the fastest."""
    best = {cell: min(rows, key=lambda r: r.ratio) for cell, rows in by_cell(of.rows).items()}

    def fastest(r: Any) -> Any:
        return best[r.dtype, r.head_dim, r.causal, r.length, r.shape]

    return shown(
        "dtype | head dim=head_dim | mask | length | chosen | ms=milliseconds:.3f | fastest | of its time=share:.3f",
        length=lambda r: r.shape or f"{r.length:,}", chosen=lambda r: "{} × {}".format(*r.tile),
        fastest=lambda r: "{} × {}".format(*fastest(r).tile), share=lambda r: fastest(r).ratio,
    )(of.model_copy(update={"rows": [r for r in of.rows if r.chosen]}))  # fmt: skip


TILE_ROW = row(
    "TileRow", "A tile in one cell: its milliseconds, and by rounds its time over that of the `chosen` one (medians).",
    **TIMED, shape=str | None, tile=tuple[int, int], chosen=bool,
)  # fmt: skip
TILES = Study(
    "tiles", "Speed: which tile", "the time of every tile that fits, each round beside the chosen one",
    "python -m studies tiles flash3", data("Tiles", "Of one algorithm.", TILE_ROW, algorithm=str), tile_headline, tile_table,
    algorithms=("flash3",), cells=tile_cells, measure=tile_rows, problems=lambda cell: (cell.problem,),
)  # fmt: skip

# -- revisions: kernels beside the same kernels of another revision, compiled here and now ----------------------------


def revision_cells(algorithm: str, asked: Asked) -> list[Cell]:
    """The cells that an algorithm takes, in the dtype that it is made for."""
    if asked.sources is None or not asked.revision:
        raise UsageError("sources", None, "the folder kernels_cu of another revision, and --revision, its name")
    of, device = get(algorithm), current_device()
    dtype = "bfloat16" if "bfloat16" in of.dtypes else of.dtypes[0]
    every = cells((dtype,), (64, 128, 256), (False, True), (1024, 4096, 16384))
    return [cell for cell in every if of.support.refusal(algorithm, cell.problem, device) is None]


def revision_row(algorithm: str, cell: Cell, asked: Asked) -> list[Row]:
    """Time one cell, the V transposition of 8-bit kernels included. Over 1, this revision is faster."""
    assert asked.sources is not None
    arrays, calls = drawn(cell.problem), dict[str, Call]()
    calls["mine"] = partial(gpu_plan(algorithm, cell.problem).run, **arrays)
    with kernels_cu.sources_in(asked.sources):
        calls["before"] = partial(gpu_plan(algorithm, cell.problem).run, **arrays)
    times = timed(calls, asked.seconds or 0.5)
    before = statistics.median(times["before"])
    found = {**cell_of(cell, times["mine"]), **quartiles(times["before"], times["mine"])}
    return [{**found, "algorithm": algorithm, "before": before}]


def revision_headline(of: Any) -> str:
    each = grouped(of.rows, "algorithm").items()
    said = "; ".join(f"{name} {statistics.median(r):.3f} (worst {min(r):.3f})" for name, r in each)
    return f"speed over that of revision {of.revision}: {said}"


def revision_table(of: Any) -> str:
    columns = f"head dim=head_dim | mask | length:, | ms=milliseconds:.3f | ms of {of.revision}=before:.3f | ratio:.3f"
    return shown(f"algorithm | dtype | {columns}")(of)


REVISION_ROW = row(
    "RevisionRow", "A kernel in one cell: milliseconds of this revision and of the other one (medians), and the median ratio of a"
    " round.", **TIMED, algorithm=str, before=float, quartiles=QUARTILES,
)  # fmt: skip
REVISIONS = Study(
    "revisions", "Speed: kernels beside an older revision of theirs",
    "times of kernels whose sources changed, each round beside the old sources",
    "python -m studies revisions flash3_fp8 --sources OLD/kernels_cu --revision 7379015",
    data("Revisions", "`revision` names the other sources.", REVISION_ROW, revision=str), revision_headline, revision_table,
    algorithms=(), cells=revision_cells, measure=revision_row, together=True,
    head=lambda _, asked: {"revision": asked.revision},
)  # fmt: skip

# -- the emulator, on a CPU -------------------------------------------------------------------------------------------

EMULATED = {
    "flash2": ((128, True), (128, False), (1024, True)),
    **dict.fromkeys(("flash1", "standard", "flash3"), ((128, True),)),
}
"""By algorithm lengths (with 2 heads and head dim 64), and whether the run is sanitised."""


def emulated_row(algorithm: str, of: tuple[int, bool], asked: Asked) -> list[Row]:
    """The median time of seven calls, after one that isn't counted."""
    (length, sanitize), taken = of, list[float]()
    arrays = fl.random_inputs(Problem(batch=1, heads=2, len_q=length, head_dim=64, dtype="float16"))
    for _ in range(8):
        begun = time.perf_counter()
        fl.emulate(algorithm, *arrays, sanitize=sanitize)
        taken.append(time.perf_counter() - begun)
    return [{"algorithm": algorithm, "length": length, "sanitize": sanitize, "seconds": statistics.median(taken[1:])}]


def emulated_headline(of: Any) -> str:
    said = "{0.algorithm}, float16, 2 heads × {0.length} × 64, in {0.seconds:.3f} s".format(of.rows[0])
    return f"the emulator on {of.cores} cores: {said}"


EMULATED_ROW = row("EmulatedRow", "One call of a compiled kernel, float16, without a mask.", algorithm=str, length=int,
                   sanitize=bool, seconds=float)  # fmt: skip
EMULATOR = Study(
    "emulator", "Speed: how long the emulator takes", "seconds that the emulator takes, on a CPU", "python -m studies emulator",
    data("Emulated", "On a machine with `cores` cores.", EMULATED_ROW, cores=int), emulated_headline,
    shown("algorithm | float16=size | sanitised | s=seconds:.3f", size=lambda r: f"2 × {r.length:,} × 64",
          sanitised=lambda r: "yes" if r.sanitize else "no"),
    algorithms=tuple(EMULATED), cells=lambda name, _: EMULATED[name], measure=emulated_row, subject="calls", together=True,
    head=lambda _names, _asked: {"cores": os.cpu_count()},
)  # fmt: skip


STUDIES = {study.name: study for study in (APPEND, DECODING, DROPOUT, EMULATOR, FEATURED, LENGTHS, REVISIONS, TILES)}


def main(name: str, words: Sequence[str]) -> None:
    """Run a study of this file."""
    run(STUDIES[name], words)


def run(study: Study, words: Sequence[str]) -> None:
    """Run a study: a file for each algorithm, or for all together. What wasn't run is told in a line on stderr."""
    name = study.name
    parser = argparse.ArgumentParser(f"python -m studies {name}", description=study.holds)
    some = "*" if study.algorithms else "+"
    parser.add_argument(
        "algorithms", nargs=some, default=study.algorithms, help="whose kernels are timed (%(default)s)"
    )
    parser.add_argument("--against", help="peers, separated by commas; features have none unless asked")
    parser.add_argument("--only", help=f"some of what is timed: {', '.join(study.only) or 'here nothing is chosen'}")
    parser.add_argument("--seconds", type=float, help="per cell")
    parser.add_argument("--rounds", type=int, default=15, help="per cell, of what runs in graphs (%(default)s)")
    parser.add_argument("--sources", type=Path, help="kernels_cu of another revision (git worktree add OLD REVISION)")
    parser.add_argument("--revision", default="", help="what the other revision is called")
    parser.add_argument("--condition", help="what sets this run apart: in the file's name")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args(words)
    peers, only = (text.split(",") if text else None for text in (given.against, given.only))
    for x in only or ():
        if x not in study.only:
            raise UsageError("only", x, " or ".join(study.only) or "nothing")
    for group in [given.algorithms] if study.together else [[x] for x in given.algorithms]:
        against = () if only and study is DECODING else study.peers(group[0], peers)
        asked = Asked(against, only or (), given.seconds, given.rounds, given.sources, given.revision)
        work = [(of, cell) for of in group for cell in study.cells(of, asked)]
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(gpu_plan, of, p) for of, cell in work for p in study.problems(cell)]:
                done.result()
        rows = [r for of, cell in track(work, name) for r in study.measure(of, cell, asked)]
        for line in asked.not_run:
            print(f"not run: {line}", file=sys.stderr)
        timed = dict.fromkeys(x for r in rows for x in r.get("ratios", ()) if x in against)
        found, subject = (
            {**study.head(group, asked), "rows": rows},
            study.subject or (None if study.together else group[0]),
        )
        apart = study is DECODING and only and ("quantized" if {*only} <= {*CACHES} else "features")
        named: Any = {"subject": subject, "condition": given.condition or apart or None, "folder": given.out}
        print(results.save(study, [*group, *timed], found, **named, replace=given.force))
