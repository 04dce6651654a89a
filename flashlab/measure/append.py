"""How fast many new queries of ragged requests are: `python -m flashlab.measure.append`.

`flash3_paged` appends 512 tokens to each of 16 contexts of skewed lengths, over pages of several sizes in a random order. Beside
it `flash3` computes the same on keys that lie one behind the other: what pages cost. With `--algorithm flash3` causal prefills of
ragged batches are timed. FlashAttention-4 and FlashInfer run beside them where they are installed.

Calls run in CUDA graphs, which take turns, because short ones would else wait for Python. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from flashlab.measure import contenders, results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.timing import captured, turns
from simulator import Problem
from simulator.dtypes import numpy_dtype
from simulator.errors import Unavailable, UsageError, unknown
from simulator.operations.attention import ATTENTION

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
NEW = 512
"""New tokens of each request of an append."""
_FA4, _FLASHINFER = "fa4", "flashinfer"
_CALLS_S = 0.02  # seconds that a graph takes, about


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Requests with `mean` tokens on average: those of an append are in the cache, and `NEW` come to each. `skewed` lengths are
    lognormal. Without `page_size` keys lie one behind the other, and all tokens are new."""

    batch: int
    mean: int
    skewed: bool = True
    page_size: int | None = None

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The queries and the keys of each request."""
        cached = lognormal(self.batch, self.mean) if self.skewed else [self.mean] * self.batch
        return [(n, n) if self.page_size is None else (NEW, n + NEW) for n in cached]

    @property
    def problem(self) -> Problem:
        """The batch as attention on sequences, one behind the other: bfloat16, causal."""
        sizes: dict[str, Any] = {"batch": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        return Problem(**sizes, lengths=self.lengths, dtype="bfloat16", causal=True)


def lognormal(requests: int, mean: int, seed: int = 0) -> list[int]:
    """Skewed lengths with this mean: lognormal with σ = 1, as in traces of chats, and at least 1.

    >>> lengths = lognormal(16, 8192)
    >>> sum(lengths) == 16 * 8192, min(lengths), max(lengths)
    (True, 666, 29393)
    """
    drawn = random.Random(seed)
    shares = [drawn.lognormvariate(0, 1) for _ in range(requests)]
    lengths = [max(1, round(x / sum(shares) * requests * mean)) for x in shares]
    lengths[lengths.index(max(lengths))] += requests * mean - sum(lengths)
    return lengths


def flops(cell: Cell) -> int:
    """FLOPs of the pairs that the mask leaves: n² / 2 of n new tokens with each other, and all with what is cached.

    >>> flops(Cell(batch=8, mean=2048, skewed=False)) == 4 * HEAD_DIM * HEADS * 8 * 2048**2 // 2
    True
    """
    return 2 * HEAD_DIM * HEADS * sum(new * (2 * keys - new) for new, keys in cell.lengths)


CELLS: Mapping[str, tuple[Cell, ...]] = {
    "flash3_paged": tuple(Cell(batch=16, mean=8192, page_size=size) for size in (16, 64, 1)),
    "flash3": (
        Cell(batch=8, mean=2048, skewed=False), Cell(batch=32, mean=1024), Cell(batch=16, mean=4096), Cell(batch=128, mean=256),
    ),
}  # fmt: skip
"""What is timed, by algorithm."""
AGAINST: Mapping[str, tuple[str, ...]] = {
    "flash3_paged": ("flash3", "paged", _FA4, _FLASHINFER),
    "flash3": (_FA4, _FLASHINFER),
}
"""The peers of each algorithm."""


@dataclass(frozen=True, kw_only=True)
class Row(Cell):
    """A cell: the longest request's tokens, the FLOPs, and by contender microseconds (the median) and its
    time over the algorithm's (median of a round's ratios). `failed` are peers that don't take the cell, and what they said."""

    longest: int
    flops: int
    microseconds: dict[str, float]
    ratios: dict[str, float]
    rounds: int
    failed: dict[str, str]


class Appending(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


Call = Callable[[], Any]


class Batch:
    """The arrays of a cell on the device: queries, keys and values one behind the other, and where asked for in pages."""

    def __init__(self, torch: Any, cell: Cell) -> None:
        self.torch, self.cell, self.problem = torch, cell, cell.problem
        torch.manual_seed(0)
        p = self.problem
        self.q, self.k, self.v = (
            torch.randn((n, heads, HEAD_DIM), device=contenders.DEVICE).to(torch.bfloat16)
            for n, heads in ((p.len_q, HEADS), (p.len_kv, KV_HEADS), (p.len_kv, KV_HEADS))
        )
        queries, keys = zip(*cell.lengths, strict=True)
        self.starts_q, self.starts_kv = (self.int32([*accumulate(x, initial=0)]) for x in (queries, keys))
        self.lens, self.longest = self.int32(keys), (max(queries), max(keys))
        if cell.page_size is not None:
            self._page(cell.page_size, keys)

    def int32(self, numbers: Sequence[int]) -> Any:
        return self.torch.tensor(numbers, dtype=self.torch.int32, device=contenders.DEVICE)

    def _page(self, size: int, keys: Sequence[int]) -> None:
        """Pools `(pages, page_size, kv_heads, head_dim)` of a random order of pages. The rest of each last page is NaN."""
        torch, counts = self.torch, [-(-n // size) for n in keys]
        order = torch.randperm(sum(counts)).int()
        self.table = torch.zeros((len(keys), max(counts)), dtype=torch.int32)
        for line, own in zip(self.table, order.split(counts), strict=True):
            line[: len(own)] = own
        self.table, self.indices = self.table.to(contenders.DEVICE), order.to(contenders.DEVICE)
        self.pages_before = self.int32([*accumulate(counts, initial=0)])
        self.last_page = self.int32([(n - 1) % size + 1 for n in keys])
        pools = [x.new_full((sum(counts) * size, *x.shape[1:]), float("nan")) for x in (self.k, self.v)]
        for b, n in enumerate(keys):
            key, first = torch.arange(n, device=contenders.DEVICE), int(self.starts_kv[b])
            at = self.table[b].long()[key // size] * size + key % size
            for pool, x in zip(pools, (self.k, self.v), strict=True):
                pool[at] = x[first : first + n]
        self.pools = [x.view(-1, size, *x.shape[1:]) for x in pools]

    def call(self, name: str) -> Call:
        """A contender's call, which returns `(queries of all requests, heads, head_dim)`."""
        made = {_FA4: self._fa4, _FLASHINFER: self._flashinfer, "flash3": self._sequences}.get(name)
        return self._requests(name) if made is None else made()

    def _attention(self, **given: Any) -> Any:
        backend = "gpu" if contenders.BACKEND == "gpu" else "emulator"
        return import_module("flashlab.run.call").attention(**given, causal=True, backend=backend)

    def _sequences(self) -> Call:
        rows = {name: x.transpose(0, 1)[None] for name, x in zip("qkv", (self.q, self.k, self.v), strict=True)}
        call = partial(self._attention, **rows, algorithm="flash3", lengths=self.cell.lengths)
        return lambda: call()[0].transpose(0, 1)

    def _requests(self, algorithm: str) -> Call:
        q = self.q.view(self.cell.batch, NEW, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (pool.transpose(1, 2) for pool in self.pools)
        given = {"q": q, "k": k, "v": v, "block_table": self.table, "seq_lens": self.lens}
        call = partial(self._attention, **given, algorithm=algorithm)
        return lambda: call().transpose(1, 2).reshape(self.q.shape)

    def _fa4(self) -> Call:
        attention = _fa4()
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), self.longest, strict=True))
        given = {name: n for name, n in longest.items() if name in signature(attention).parameters}
        if self.cell.page_size is None:
            arrays, given = [self.q, self.k, self.v], given | {"cu_seqlens_k": self.starts_kv}
        else:
            arrays, given = [self.q, *self.pools], given | {"seqused_k": self.lens, "page_table": self.table}
        call = partial(
            attention, *arrays, cu_seqlens_q=self.starts_q, causal=True, softmax_scale=HEAD_DIM**-0.5, **given
        )

        def run() -> Any:
            found = call()
            return found if hasattr(found, "dtype") else found[0]

        return run

    def _flashinfer(self) -> Call:
        library, torch = _flashinfer(), self.torch
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=contenders.DEVICE)
        known: dict[str, Any] = {"causal": True, "sm_scale": HEAD_DIM**-0.5, "q_data_type": self.q.dtype}
        if self.cell.page_size is None:
            wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
            wrapper.plan(self.starts_q, self.starts_kv, HEADS, KV_HEADS, HEAD_DIM, **known)
            return lambda: wrapper.run(self.q, self.k, self.v)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        lists = self.starts_q, self.pages_before, self.indices, self.last_page
        wrapper.plan(*lists, HEADS, KV_HEADS, HEAD_DIM, self.cell.page_size, **known)
        return lambda: wrapper.run(self.q, tuple(self.pools))

    def check(self, name: str, out: Any) -> None:
        """Raise `RuntimeError` unless the rule holds for the first head of the shortest request."""
        lengths = self.cell.lengths
        b = min(range(len(lengths)), key=lambda i: lengths[i][1])
        (queries, keys), first, key = lengths[b], int(self.starts_q[b]), int(self.starts_kv[b])
        cut = ((self.q, first, queries), (self.k, key, keys), (self.v, key, keys), (out, first, queries))
        *inputs, found = (_numpy(self.torch, x[at : at + n, 0])[None, None] for x, at, n in cut)
        p = Problem(batch=1, heads=1, len_q=queries, len_kv=keys, head_dim=HEAD_DIM, dtype="bfloat16", causal=True)
        arrays = dict(zip("qkv", inputs, strict=True))
        truth = ATTENTION.judge(p, arrays)
        off = np.linalg.norm(found.astype(np.float64) - truth["out"], axis=-1)
        if not (off <= ATTENTION.bounds(p, arrays, truth)["out"]).all():
            raise RuntimeError(f"{name} breaks the rule at {self.cell}")


def _numpy(torch: Any, x: Any) -> Any:
    return x.contiguous().view(torch.int16).cpu().numpy().view(numpy_dtype("bfloat16"))


def _fa4() -> Any:
    try:
        return import_module("flash_attn.cute.interface").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"flash_attn.cute cannot be imported ({error}): pip install flash-attn-4") from None


def _flashinfer() -> Any:
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise Unavailable(f"flashinfer cannot be imported ({error}): pip install flashinfer-python") from None


def chosen(algorithm: str, given: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The peers that are timed, and a line for each that isn't installed.

    Raises `UsageError` for an unknown one, and `Unavailable` for one that was asked for and isn't installed.
    """
    found, lines = list[str](), list[str]()
    for name in AGAINST[algorithm] if given is None else given:
        if name not in AGAINST[algorithm]:
            raise unknown("against", name, AGAINST[algorithm])
        try:
            {_FA4: _fa4, _FLASHINFER: _flashinfer}.get(name, lambda: None)()
        except Unavailable as error:
            if given is not None:
                raise
            lines.append(f"not run: {name} ({error})")
        else:
            found.append(name)
    return found, lines


def measure(algorithm: str, cell: Cell, against: Sequence[str], rounds: int) -> Row:
    """Time a cell. A peer that doesn't take it is left out. Raises `RuntimeError` if a result breaks the rule."""
    torch: Any = import_module("torch")
    batch, graphs, failed = Batch(torch, cell), dict[str, Any](), dict[str, str]()
    repeats = max(1, round(_CALLS_S * 500e12 / flops(cell)))
    for name in (algorithm, *against):
        try:
            call = batch.call(name)
            out = call()
            graphs[name] = captured(torch, [call], repeats)[0]
        except Exception as error:  # other libraries raise what they like
            if name == algorithm:
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            continue
        batch.check(name, out)
    times = {name: [x / repeats for x in found] for name, found in turns(torch, graphs, rounds).items()}
    own = times[algorithm]
    ratios = {
        name: statistics.median(b / a for a, b in zip(own, found, strict=True))
        for name, found in times.items()
        if name != algorithm
    }
    middle = {name: statistics.median(found) for name, found in times.items()}
    longest = max(keys for _, keys in cell.lengths)
    return Row(
        **asdict(cell),
        longest=longest,
        flops=flops(cell),
        microseconds=middle,
        ratios=ratios,
        rounds=rounds,
        failed=failed,
    )


def _peers(data: Appending) -> list[str]:
    return list(dict.fromkeys(name for row in data.rows for name in row.ratios))


def headline(data: Appending) -> str:
    """The rates, and the ratio to each peer, as ranges over the cells."""
    rates = [row.flops / row.microseconds[data.algorithm] / 1e6 for row in data.rows]
    each = [f"{data.algorithm}, ragged and causal: {min(rates):.0f} to {max(rates):.0f} TFLOP/s"]
    for name in _peers(data):
        found = [row.ratios[name] for row in data.rows if name in row.ratios]
        each.append(f"{min(found):.2f} to {max(found):.2f} × {name}")
    return "; ".join(each)


def table(data: Appending) -> str:
    """A row per cell: microseconds and rate, and what each peer takes of the algorithm's time."""
    peers, paged = _peers(data), data.rows[0].page_size is not None
    header = (
        "requests", "new tokens", "tokens", *(("pages of",) if paged else ()), "µs", "TFLOP/s", *(f"× {name}" for name in peers),
    )  # fmt: skip
    return markdown_table(header, [
        (str(r.batch), str(NEW) if paged else "all", _tokens(r), *((str(r.page_size),) if paged else ()), f"{took:,.0f}",
         f"{r.flops / took / 1e6:,.0f}", *(f"{r.ratios[name]:.2f}" if name in r.ratios else "–" for name in peers))
        for r in data.rows
        for took in [r.microseconds[data.algorithm]]
    ])  # fmt: skip


def _tokens(row: Row) -> str:
    return f"mean {row.mean:,}, longest {row.longest:,}" if row.skewed else f"{row.mean:,}"


KIND = Kind(
    "append",
    "Speed: appends and ragged prefills",
    "the time of many new queries of ragged requests, over pages or not, in CUDA graphs beside peers",
    "python -m flashlab.measure.append",
    Appending,
    headline,
    table,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--algorithm", default="flash3_paged", choices=CELLS, help="whose kernel is timed (default: %(default)s)"
    )
    own = "; ".join(f"{name}: {','.join(names)}" for name, names in AGAINST.items())
    parser.add_argument("--against", help=f"peers, separated by commas ({own})")
    parser.add_argument("--rounds", type=int, default=15, help="per cell (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args()
    algorithm = given.algorithm
    try:
        against, left_out = chosen(algorithm, given.against.split(",") if given.against else None)
    except (UsageError, Unavailable) as error:
        print(error, file=sys.stderr)
        return 2
    for line in left_out:
        print(line, file=sys.stderr)
    torch: Any = import_module("torch")
    rows = list[dict[str, Any]]()
    for cell in track(CELLS[algorithm], algorithm):
        rows.append(asdict(measure(algorithm, cell, against, given.rounds)))
        torch.cuda.empty_cache()
    data = {"algorithm": algorithm, "rows": rows}
    print(results.save(KIND, [algorithm, *against], data, subject=algorithm, folder=given.out, replace=given.force))
    return 0


if __name__ == "__main__":
    sys.exit(main())
