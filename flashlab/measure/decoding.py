"""How fast one new query reads a long cache: `python -m flashlab.measure.decoding`.

Calls run in CUDA graphs, because a model that decodes runs in one. Each graph has all calls of a contender over several sets of
inputs, together larger than the L2, so K and V come from DRAM. Graphs take turns. `read` is a kernel that does nothing but read
the same bytes: the roof. Needs a GPU and torch.

With `--algorithm paged` requests have lengths of any kind, and their keys lie in pages of a random order. Two calls of FlashInfer
and one of cuDNN get the same requests and pages. Other peers take no pages. They get as many requests, all as long as these are
on average: the same bytes, evenly dealt. Latent attention (`mla`, `mla_hopper`, both in pages) and `cascade` are timed beside
FlashInfer where it is installed, and `cascade` beside our kernels that don't share a prefix. With `--kv-dtype int8,float8_e4m3fn`
the caches of `paged` are quantised, and timed beside the same requests in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.progress import track

from flashlab.measure import results
from flashlab.measure.contenders import (
    AGAINST,
    CELLS,
    DRAFTS,
    FEATURES,
    Calls,
    Cell,
    chosen,
    contenders,
    flops,
    nbytes,
)
from flashlab.measure.paged_peers import reason
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.timing import captured, turns
from simulator.errors import Unavailable, UsageError
from simulator.problem import CACHES

_COLD = 400e6  # bytes of K and V in all sets, several times the L2
_CALLS = 24  # of a graph, about


@dataclass(frozen=True, kw_only=True)
class Row(Cell):
    """A cell: the bytes of all keys and values, the FLOPs, and by contender microseconds (the median) and its time over the
    algorithm's (median of a round's ratios). `read` is the kernel that only reads. `failed` holds why a peer wasn't timed."""

    nbytes: int
    microseconds: dict[str, float]
    ratios: dict[str, float]
    rounds: int
    flops: int | None = None
    failed: dict[str, str] = field(default_factory=dict[str, str])


class Decoding(Data):
    """What was measured, of one algorithm."""

    algorithm: str
    rows: tuple[Row, ...]


def measure(algorithm: str, cell: Cell, against: Sequence[str], rounds: int) -> Row:
    """Time a cell. A peer that doesn't take it is left out. Raises `RuntimeError` if contenders don't agree."""
    torch: Any = import_module("torch")
    moved = nbytes(algorithm, cell)
    failed = dict[str, str]()
    sets = list[Calls]()
    for _ in range(max(2, min(16, int(_COLD / moved) + 1))):
        left = [name for name in against if name not in failed]
        sets.append(contenders(torch, algorithm, cell, left, failed))
    repeats = max(1, _CALLS // len(sets))
    graphs = dict[str, Any]()
    for name in sets[-1]:
        try:
            graphs[name] = captured(torch, [each[name] for each in sets], repeats)[0]
        except Exception as error:  # other libraries raise what they like
            if name not in against:
                raise
            failed[name] = reason(error)
    names = list(graphs)
    times = {name: [x / repeats / len(sets) for x in found] for name, found in turns(torch, graphs, rounds).items()}
    middle = {name: statistics.median(found) for name, found in times.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(times[algorithm], times[name], strict=True)) for name in names[1:]
    }
    return Row(
        **asdict(cell), nbytes=moved, microseconds=middle, ratios=ratios, rounds=rounds, flops=flops(algorithm, cell), failed=failed
    )  # fmt: skip


def _peers(data: Decoding) -> list[str]:
    """All that were timed, in one cell at least."""
    return list(dict.fromkeys(name for row in data.rows for name in row.ratios if name != "read"))


def headline(data: Decoding) -> str:
    """The ratio to each peer, as a range over the cells, and the share of the read."""
    each = list[str]()
    for name in _peers(data):
        found = [row.ratios[name] for row in data.rows if name in row.ratios]
        each.append(f"{min(found):.2f} to {max(found):.2f} × {name}")
    shares = [r.ratios["read"] for r in data.rows]
    of_read = f"{min(shares):.0%} to {max(shares):.0%} of a plain read"
    return f"{data.algorithm}, one query, K and V from DRAM: {', '.join(each)}; {of_read}"


def table(data: Decoding) -> str:
    """A row per cell: microseconds, and what each peer takes of the algorithm's time. A peer that doesn't take a cell is a dash."""
    peers = _peers(data)
    paged = data.rows[0].page_size is not None
    counted = all(row.flops for row in data.rows)
    quantized, featured, chunked = (
        any(getattr(row, name) for row in data.rows) for name in ("kv_dtype", "feature", "chunk")
    )
    header = (
        "batch",
        "heads",
        "keys",
        *(("of",) if quantized else ()),
        *(("with",) if featured else ()),
        *(("pages of",) if paged else ()),
        *(("chunks of",) if chunked else ()),
        "µs",
        *(("TFLOP/s",) if counted else ()),
        "GB/s",
        "of a plain read",
        *(f"{name} µs" for name in peers),
        *(f"× {name}" for name in peers),
    )
    return markdown_table(header, [
        (str(r.batch), f"{r.heads}, {r.kv_heads}", _keys(r), *((r.kv_dtype or "",) if quantized else ()),
         *((f"{DRAFTS} drafts" if r.feature == "drafts" else (r.feature or "").replace("_", " "),) if featured else ()),
         *((str(r.page_size),) if paged else ()),
         *((f"{r.chunk:,}" if r.chunk else "its own",) if chunked else ()), f"{took:.1f}",
         *((f"{(r.flops or 0) / took / 1e6:,.0f}",) if counted else ()), f"{r.nbytes / took / 1e3:,.0f}",
         f"{r.ratios['read']:.0%}", *(f"{r.microseconds[name]:.1f}" if name in r.ratios else "–" for name in peers),
         *(f"{r.ratios[name]:.2f}" if name in r.ratios else "–" for name in peers))
        for r in data.rows
        for took in [r.microseconds[data.algorithm]]
    ])  # fmt: skip


def _keys(row: Row) -> str:
    """How many keys a request has, in words."""
    if row.len_prefix is not None:
        return f"{row.len_prefix:,} shared, {row.len_kv:,} own"
    return f"{row.len_kv:,}" if row.longest is None else f"mean {row.len_kv:,}, longest {row.longest:,}"


KIND = Kind(
    "decoding",
    "Speed: decoding",
    "the time of one query against a long cache in CUDA graphs, beside peers and a plain read of the same bytes",
    "python -m flashlab.measure.decoding",
    Decoding,
    headline,
    table,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--algorithm", default="flash_decoding", choices=CELLS, help="whose kernel is timed (default: %(default)s)"
    )
    own = "; ".join(f"{name}: {','.join(names)}" for name, names in AGAINST.items())
    parser.add_argument("--against", help=f"peers, separated by commas ({own})")
    parser.add_argument(
        "--kv-dtype", help="quantise the caches of paged, beside bfloat16: int8,float8_e4m3fn, or one of them"
    )
    parser.add_argument(
        "--features",
        help=f"time paged with a feature, beside the same call without: {','.join(FEATURES)}, or some of them",
    )
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
    if given.kv_dtype and (algorithm != "paged" or given.against):
        print("--kv-dtype: expected --algorithm paged, without --against", file=sys.stderr)
        return 2
    dtypes: list[str | None] = given.kv_dtype.split(",") if given.kv_dtype else [None]
    for dtype in filter(None, dtypes):
        if dtype not in CACHES:
            print(UsageError("kv-dtype", dtype, " or ".join(CACHES)), file=sys.stderr)
            return 2
    if given.features and (algorithm != "paged" or given.against or given.kv_dtype):
        print("--features: expected --algorithm paged, without --against and --kv-dtype", file=sys.stderr)
        return 2
    features: list[str] = given.features.split(",") if given.features else []
    for name in features:
        if name not in FEATURES:
            print(UsageError("features", name, " or ".join(FEATURES)), file=sys.stderr)
            return 2
    for line in left_out:
        print(line, file=sys.stderr)
    torch: Any = import_module("torch")
    rows = list[dict[str, Any]]()
    cells = [replace(cell, kv_dtype=dtype) for dtype in dtypes for cell in CELLS[algorithm]]
    if features:  # the size of a page has little to do with them
        cells = [replace(CELLS[algorithm][0], feature=name) for name in features]
    for cell in track(cells, algorithm):
        row = measure(algorithm, cell, against, given.rounds)
        for name, why in row.failed.items():
            where = f" with pages of {cell.page_size}" if cell.page_size else ""
            print(f"not run: {name}{where} ({why})", file=sys.stderr)
        rows.append(asdict(row))
        torch.cuda.empty_cache()
    data = {"algorithm": algorithm, "rows": rows}
    condition = "quantized" if given.kv_dtype else "features" if features else None
    names = [algorithm] if condition else [algorithm, *against]
    saved: Any = {"subject": algorithm, "condition": condition, "folder": given.out, "replace": given.force}
    print(results.save(KIND, names, data, **saved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
