"""How fast one new query reads a long cache: `python -m flashlab.measure.decoding`.

Calls run in CUDA graphs, because a model that decodes runs in one. Each graph has all calls of a contender over several sets of
inputs, together larger than the L2, so K and V come from DRAM. Graphs take turns. `read` is a kernel that does nothing but read
the same bytes: the roof. Needs a GPU and torch.
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
from flashlab.run.arrays import cupy

CELLS = (
    (1, 32, 8, 8192),
    (1, 32, 8, 65536),
    (16, 32, 8, 8192),
    (64, 32, 8, 4096),
    (64, 32, 32, 4096),
    (1, 64, 8, 131072),
)
"""Batch, heads, KV heads, keys: bfloat16, head dim 128, one query."""
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
    round's ratios). `read` is the kernel that only reads."""

    batch: int
    heads: int
    kv_heads: int
    len_kv: int
    nbytes: int
    microseconds: dict[str, float]
    ratios: dict[str, float]
    rounds: int


class Decoding(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def measure(algorithm: str, cell: tuple[int, int, int, int], against: Sequence[str], rounds: int) -> Row:
    """Time a cell. Raises `RuntimeError` if a contender is over 2 % of V's spread away from the others."""
    torch: Any = import_module("torch")
    batch, heads, kv_heads, len_kv = cell
    nbytes = 2 * batch * kv_heads * len_kv * HEAD_DIM * 2
    sets = [_drawn(torch, cell) for _ in range(max(2, min(16, int(_COLD / nbytes) + 1)))]
    names = [algorithm, *against, "read"]
    calls = {name: [_call(name, arrays) for arrays in sets] for name in names}
    outs = [calls[name][0]().float() for name in names[:-1]]
    for name, out in zip(names[1:-1], outs[1:], strict=True):
        if not float((out - outs[0]).abs().max()) < 0.02:
            raise RuntimeError(f"{algorithm} and {name} differ at {cell}")
    repeats = max(1, _CALLS // len(sets))
    graphs = {name: _graph(torch, calls[name], repeats) for name in names}
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
    return Row(batch, heads, kv_heads, len_kv, nbytes, middle, ratios, rounds)


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


def _graph(torch: Any, calls: Sequence[Callable[[], Any]], repeats: int) -> Any:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:  # the first may compile
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
    return graph


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
    header = (
        "batch",
        "heads",
        "keys",
        "µs",
        "GB/s",
        "of a plain read",
        *(f"{name} µs" for name in peers_),
        *(f"× {name}" for name in peers_),
    )
    return markdown_table(header, [
        (str(r.batch), f"{r.heads}, {r.kv_heads}", f"{r.len_kv:,}", f"{r.microseconds[data.algorithm]:.1f}",
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
    parser.add_argument("--against", default=",".join(AGAINST), help="peers, separated by commas")
    parser.add_argument("--rounds", type=int, default=15, help="per cell")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args()
    against = given.against.split(",")
    for name in against:
        peers.check(name)
    torch: Any = import_module("torch")
    rows = list[dict[str, Any]]()
    for cell in track(CELLS, given.algorithm):
        rows.append(asdict(measure(given.algorithm, cell, against, given.rounds)))
        torch.cuda.empty_cache()
    data = {"algorithm": given.algorithm, "rows": rows}
    print(
        results.save(
            KIND, [given.algorithm, *against], data, subject=given.algorithm, folder=given.out, replace=given.force
        )
    )


if __name__ == "__main__":
    main()
