"""How fast one new query reads a long cache: `python -m flashlab.measure.decoding`.

Calls run in CUDA graphs, because a model that decodes runs in one. Each graph has all calls of a contender over several sets of
inputs, together larger than the L2, so K and V come from DRAM. Graphs take turns. `read` is a kernel that does nothing but read
the same bytes: the roof. Needs a GPU and torch.

With `--algorithm paged` requests have lengths of any kind, and their keys lie in pages of a random order. Peers get as many
requests, all as long as these are on average: the same bytes, evenly dealt.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.progress import track

from flashlab.measure import peers, results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.timing import captured
from flashlab.run.arrays import cupy
from simulator.catalogue import get

CELLS = (
    (1, 32, 8, 8192),
    (1, 32, 8, 65536),
    (16, 32, 8, 8192),
    (64, 32, 8, 4096),
    (64, 32, 32, 4096),
    (1, 64, 8, 131072),
)
"""Batch, heads, KV heads, keys: bfloat16, head dim 128, one query."""
PAGES = (16, 1, 64)
"""Keys per page, for requests in pages."""
PAGED_CELL = (64, 32, 8, 4096)
"""Of them the keys are an average."""
LONGEST = 28_000
AGAINST = ("sdpa-flash", "cudnn")
HEAD_DIM = 128
_COLD = 400e6  # bytes of K and V in all sets, several times the L2
_CALLS = 24  # of a graph, about
_READ = r"""
extern "C" __global__ void read(const uint4* k, const uint4* v, unsigned* out, long long n) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  unsigned x = 0;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step)
    for (const uint4* p : {k, v}) {
      const uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
      x ^= a.x ^ b.x ^ c.x ^ d.x ^ a.w ^ b.w ^ c.w ^ d.w;
    }
  for (; i < n; i += step) x ^= k[i].x ^ v[i].x;
  if (x == 12345) out[0] = x;  // never seen, but the compiler doesn't know
}
"""

Tensors = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Row:
    """A cell: the bytes of K and V, and by contender microseconds (the median) and its time over the algorithm's (median of a
    round's ratios). `read` is the kernel that only reads. Of requests in pages `len_kv` is the mean, and `longest` the most."""

    batch: int
    heads: int
    kv_heads: int
    len_kv: int
    nbytes: int
    microseconds: dict[str, float]
    ratios: dict[str, float]
    rounds: int
    page_size: int | None = None
    longest: int | None = None


class Decoding(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def measure(
    algorithm: str, cell: tuple[int, int, int, int], against: Sequence[str], rounds: int, page_size: int | None = None
) -> Row:
    """Time a cell. Raises `RuntimeError` if a contender is over 2 % of V's spread away from the others, or where the algorithm's
    keys are in pages, another bit than `flash_decoding`'s on the gathered keys."""
    torch: Any = import_module("torch")
    batch, heads, kv_heads, len_kv = cell
    nbytes = 2 * batch * kv_heads * len_kv * HEAD_DIM * 2
    sets = [_drawn(torch, cell) for _ in range(max(2, min(16, int(_COLD / nbytes) + 1)))]
    names = [algorithm, *against, "read"]
    calls = {name: [_call(name, arrays) for arrays in sets] for name in names if page_size is None or name != algorithm}
    if page_size is not None:
        calls[algorithm] = [_paged_call(torch, algorithm, cell, page_size) for _ in sets]
    outs = [calls[name][0]().float() for name in names[page_size is not None : -1]]
    for out in outs[1:]:
        if not float((out - outs[0]).abs().max()) < 0.02:
            raise RuntimeError(f"{' and '.join(names[:-1])} differ at {cell}")
    repeats = max(1, _CALLS // len(sets))
    graphs = {name: captured(torch, calls[name], repeats)[0] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 2):
        for n in range(len(names)):
            name = names[(i + n) % len(names)]  # each takes every place in the order
            took = _microseconds(torch, graphs[name]) / repeats / len(sets)
            if i >= 2:  # the first rounds warm up
                times[name].append(took)
    middle = {name: statistics.median(found) for name, found in times.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(times[algorithm], times[name], strict=True)) for name in names[1:]
    }
    longest = None if page_size is None else max(skewed(batch, len_kv))
    return Row(batch, heads, kv_heads, len_kv, nbytes, middle, ratios, rounds, page_size, longest)


def skewed(requests: int, mean: int) -> list[int]:
    """Lengths with this mean, of which few are long: the longest has `LONGEST` keys, and each the same share of the one before.

    >>> lengths = skewed(64, 4096)
    >>> max(lengths), sum(lengths) == 64 * 4096, sorted(lengths)[32]
    (28000, True, 846)
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        low, high = (
            (share, high) if sum(LONGEST * share**i for i in range(requests)) < requests * mean else (low, share)
        )
    lengths = [round(LONGEST * low**i) for i in range(requests)]
    lengths[-1] += requests * mean - sum(lengths)
    return lengths


def _paged_call(torch: Any, algorithm: str, cell: tuple[int, int, int, int], page_size: int) -> Callable[[], Any]:
    """A call on requests of `skewed` lengths in a random order, in pages that lie anywhere."""
    batch, heads, kv_heads, mean = cell
    lengths = torch.tensor(skewed(batch, mean))[torch.randperm(batch)]
    counts = (lengths + page_size - 1) // page_size
    order, table = torch.randperm(int(counts.sum())).int(), torch.zeros((batch, int(counts.max())), dtype=torch.int32)
    for line, own in zip(table, order.split(counts.tolist()), strict=True):
        line[: len(own)] = own
    shapes = (batch, heads, 1, HEAD_DIM), *[(len(order), page_size, kv_heads, HEAD_DIM)] * 2
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    arrays = {"q": q, "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    arrays |= {"block_table": table.cuda(), "seq_lens": lengths.int().cuda()}
    b = int(lengths.argmax())
    pages = arrays["block_table"][b, : int(counts[b])].long()
    own = (x[pages].flatten(0, 1)[: int(lengths[b])].transpose(0, 1)[None].contiguous() for x in (k, v))
    attention = import_module("flashlab.run.call").attention
    if not torch.equal(attention(**arrays)[b : b + 1], attention(q[b : b + 1], *own, algorithm="flash_decoding")):
        raise RuntimeError(f"{algorithm} and flash_decoding differ at {cell}, pages of {page_size}")

    def call() -> Any:
        return attention(**arrays, algorithm=algorithm)

    return call


def _drawn(torch: Any, cell: tuple[int, int, int, int]) -> Tensors:
    batch, heads, kv_heads, len_kv = cell
    shapes = (batch, heads, 1, HEAD_DIM), *[(batch, kv_heads, len_kv, HEAD_DIM)] * 2
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v


def _call(name: str, arrays: Tensors) -> Callable[[], Any]:
    if name == "read":
        return _read(*arrays)
    q, k, v = (x.transpose(1, 2).contiguous() if peers.layout(name) == "bshd" else x for x in arrays)
    return peers.prepare(name, q, k, v, causal=False, scale=HEAD_DIM**-0.5)


def _read(q: Any, k: Any, v: Any) -> Callable[[], None]:
    torch: Any = import_module("torch")
    cp = cupy()
    kernel, n = cp.RawKernel(_READ, "read"), k.numel() * k.element_size() // 16
    blocks = 4 * torch.cuda.get_device_properties().multi_processor_count

    def call() -> None:
        with cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((blocks,), (512,), (k.data_ptr(), v.data_ptr(), q.data_ptr(), n))

    return call


def _microseconds(torch: Any, graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def headline(data: Decoding) -> str:
    """The ratio to each peer, as a range over the cells, and the share of the read."""
    names = [name for name in data.rows[0].ratios if name != "read"]
    each = ", ".join(
        f"{min(r.ratios[name] for r in data.rows):.2f} to {max(r.ratios[name] for r in data.rows):.2f} × {name}"
        for name in names
    )
    shares = [r.ratios["read"] for r in data.rows]
    return f"{data.algorithm}, one query, K and V from DRAM: {each}; {min(shares):.0%} to {max(shares):.0%} of a plain read"


def table(data: Decoding) -> str:
    """A row per cell: microseconds, and what each peer takes of the algorithm's time."""
    peers_ = [name for name in data.rows[0].ratios if name != "read"]
    paged = data.rows[0].page_size is not None
    header = (
        "batch",
        "heads",
        "keys",
        *(("pages of",) if paged else ()),
        "µs",
        "GB/s",
        "of a plain read",
        *(f"{name} µs" for name in peers_),
        *(f"× {name}" for name in peers_),
    )
    return markdown_table(header, [
        (str(r.batch), f"{r.heads}, {r.kv_heads}", f"{r.len_kv:,}" if not paged else f"mean {r.len_kv:,}, longest {r.longest:,}",
         *((str(r.page_size),) if paged else ()), f"{r.microseconds[data.algorithm]:.1f}",
         f"{r.nbytes / r.microseconds[data.algorithm] / 1e3:,.0f}", f"{r.ratios['read']:.0%}",
         *(f"{r.microseconds[name]:.1f}" for name in peers_), *(f"{r.ratios[name]:.2f}" for name in peers_))
        for r in data.rows
    ])  # fmt: skip


KIND = Kind(
    "decoding",
    "Speed: decoding",
    "the time of one query against a long cache in CUDA graphs, beside peers and a plain read of the same bytes",
    "python -m flashlab.measure.decoding",
    Decoding,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--algorithm", default="flash_decoding", help="whose kernel is timed")
    parser.add_argument("--against", help=f"peers, separated by commas ({','.join(AGAINST)}; of paged flash_decoding)")
    parser.add_argument("--rounds", type=int, default=15, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args()
    paged = get(given.algorithm).operation.in_pages
    against = given.against.split(",") if given.against else ["flash_decoding"] if paged else [*AGAINST]
    for name in against:
        peers.check(name)
    torch: Any = import_module("torch")
    rows = list[dict[str, Any]]()
    cells = [(PAGED_CELL, size) for size in PAGES] if paged else [(cell, None) for cell in CELLS]
    for cell, page_size in track(cells, given.algorithm):
        rows.append(asdict(measure(given.algorithm, cell, against, given.rounds, page_size)))
        torch.cuda.empty_cache()
    data = {"algorithm": given.algorithm, "rows": rows}
    print(
        results.save(
            KIND, [given.algorithm, *against], data, subject=given.algorithm, folder=given.out, replace=given.force
        )
    )


if __name__ == "__main__":
    main()
