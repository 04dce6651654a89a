"""Packs a trace into the page's data: one JSON document, and all values as one array of 24-bit floats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.player.grid import Scores, grids, roles_of
from flashlab.player.parts import parts, pool
from flashlab.player.sources import Kernel, kernels_of, step_lines
from simulator.catalogue import CATALOGUE
from simulator.dtypes import Array
from simulator.trace import Event, Trace, Transfer

__all__ = ["THINNINGS", "Thinning", "document", "float24", "kept", "values"]


@dataclass(frozen=True)
class Thinning:
    """How much of each register tile a page keeps: the most rows and columns of a matrix, and rows of a vector.

    None keeps all.
    """

    rows: int | None = None
    cols: int | None = None
    vector: int | None = None

    def of(self, x: Array) -> Array:
        """The part of a tile that is kept."""
        rows, cols = self.shape(x)
        return x[np.ix_(kept(x.shape[0], rows), kept(x.shape[1], cols))]

    def shape(self, x: Array) -> tuple[int, int]:
        """The shape of the part of a tile that is kept."""
        limits = (self.vector, None) if x.shape[1] == 1 else (self.rows, self.cols)
        rows, cols = (n if most is None else min(n, most) for n, most in zip(x.shape, limits, strict=True))
        return (rows, cols) if rows and cols else (0, 0)


THINNINGS = (
    Thinning(), Thinning(32, 32), Thinning(16, 16), Thinning(8, 16), Thinning(8, 8), Thinning(6, 6), Thinning(4, 4), Thinning(0, 0),
    Thinning(0, 0, 16), Thinning(0, 0, 4), Thinning(0, 0, 0),
)  # fmt: skip
"""From all values to none, in the order in which a page tries them."""


def kept(n: int, most: int) -> Array:
    """The indices that are kept of n: all, or `most` of them, spread evenly. The page's script computes the same.

    >>> kept(10, 4).tolist()
    [0, 2, 5, 7]
    """
    return np.arange(min(n, most)) * n // max(1, min(n, most))


def document(trace: Trace, kernel: str | Path | None = None) -> dict[str, Any]:
    """All that the page knows of a trace, except the values of its register tiles."""
    names, scores = _Names(), Scores.of(trace)
    cells, changes = grids(trace, scores)
    roles, partial = roles_of(trace, scores.problem), parts(trace, scores)
    states: dict[tuple[int, ...], int] = {}
    kernels = kernels_of(trace, kernel)
    files = list(dict.fromkeys(each.name for each in kernels.values()))
    srams: dict[tuple[tuple[str, int], ...], int] = {}
    sources = list(trace.sources)
    events = [
        [
            names[event.step],
            _source(sources, event),
            event.line,
            srams.setdefault(tuple(event.sram.items()), len(srams)),
            [_transfer(names, sources, each) for each in event.transfers],
            [int(n) for change in changed for n in change],
            [(names[name], *x.shape) for name, x in event.values.items()],
            -1 if partial is None else states.setdefault(tuple(map(int, partial.states[n])), len(states)),
        ]
        for n, (event, changed) in enumerate(zip(trace.events, changes, strict=True))
    ]
    return {
        "algorithm": trace.algorithm,
        "subtitle": _subtitle(trace, scores),
        "device": trace.device,
        "sram_limit": trace.sram_limit,
        "len_q": scores.queries,
        "len_kv": scores.keys,
        "each": scores.problem.len_q,
        "prefix": scores.prefix,
        "roles": roles,
        "firsts": {name: scores.first_key(name) for name, role in roles.items() if role == "keys"},
        "mask": scores.mask,
        "parts": partial and {"boxes": [[*keys, level] for keys, level in partial.boxes], "states": list(states)},
        "pool": pool(trace),
        "launches": list(_launches(trace.events, cells, kernels, files)),
        "blocks": list(_blocks(trace.events)),
        "sources": [_listing(trace, name) for name in sources],
        "kernels": [each._asdict() for each in {each.name: each for each in kernels.values()}.values()],
        "tensors": {name: asdict(shape) for name, shape in trace.tensors.items()},
        "buffers": {name: asdict(shape) for name, shape in trace.buffers.items()},
        "events": events,
        "all": len(events),
        "srams": [list(each) for each in srams],
        "names": list(names),
    }


def _subtitle(trace: Trace, scores: Scores) -> str:
    """A sentence that says what is computed."""
    (batch, head), problem = trace.head, scores.problem
    queries, keys = "query" if problem.len_q == 1 else "queries", "key" if problem.len_kv == 1 else "keys"
    first = f"{problem.len_q:,} {queries} × {problem.len_kv:,} {keys}"
    whose = f"Batch {batch}, head {head}"
    if scores.prefix is not None:
        first = f"{problem.len_q:,} {queries} each × {scores.prefix:,} keys in common and up to {problem.len_kv:,} of its own"
        whose = f"{problem.batch:,} request{'s' if problem.batch > 1 else ''}, head {head}"
    words = [
        first,
        f"head dim {problem.head_dim}",
        problem.dtype,
    ]
    if problem.head_dim_v != problem.head_dim:
        words.append(f"values of {problem.head_dim_v}")
    if problem.page_size is not None:
        words.append(f"pages of {problem.page_size:,} {'key' if problem.page_size == 1 else 'keys'}")
    words += problem.replace(lengths=None, len_q=problem.len_q, len_kv=problem.len_kv).words
    rows, cols = trace.tile
    return f"{whose}: {', '.join(words)}. Tiles of {rows} × {cols}, on {trace.device}."


class _Names(dict[str, int]):
    """Gives each name a number, in the order in which names are first looked up."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def _source(sources: list[str], at: Event | Transfer) -> int:
    return sources.index(at.source) if at.source in sources else -1


def _transfer(names: _Names, sources: list[str], transfer: Transfer) -> list[Any]:
    where = 0 if transfer.rows is None or transfer.cols is None else [*transfer.rows, *transfer.cols]
    moved = [each for kind, n in transfer.nbytes.items() for each in (names[kind], n)]
    return [names[transfer.tensor], _source(sources, transfer), transfer.line, where, *moved]


def _launches(
    events: list[Event], cells: list[Any], kernels: dict[str, Kernel], files: list[str]
) -> Iterator[dict[str, Any]]:
    """Per launch: its name, first event, the event after its last, grid of S, .cu, and what each step is for."""
    start, words = 0, {launch: said for row in CATALOGUE.values() for launch, said in row.about.items()}
    for (name, group), grid in zip(groupby(events, key=lambda event: event.launch), cells, strict=True):
        stop = start + sum(1 for _ in group)
        yield {
            "name": name,
            "start": start,
            "stop": stop,
            "grid": None if grid is None else asdict(grid),
            "kernel": files.index(kernels[name].name) if name in kernels else None,
            "about": words.get(name, {}),
        }
        start = stop


def _blocks(events: list[Event]) -> Iterator[list[int]]:
    """Per block: its row tile, key tile, first event, the event after its last, and its request (-1: of all)."""
    start = 0
    for (_, request, block), group in groupby(events, key=lambda event: (event.launch, event.request, event.block)):
        stop = start + sum(1 for _ in group)
        yield [*block, start, stop, -1 if request is None else request]
        start = stop


def _listing(trace: Trace, name: str) -> dict[str, Any]:
    """A function's text, and the steps in it by the line at which they begin."""
    first, text = trace.sources[name]
    begins = sorted({event.line for event in trace.events if event.source == name and event.step})
    return {"name": name, "first": first, "text": text, "steps": {n: _step(text, first, n) for n in begins}}


def _step(text: str, first: int, line: int) -> tuple[int, str]:
    """The last line of the step that begins at `line`, and the author's comment on that first line."""
    lines = text.splitlines()
    comment = re.search(r"\.step\([^#]*\)\s*#\s*(.+)", lines[line - first]) if 0 <= line - first < len(lines) else None
    return step_lines(text, first, line)[1], comment[1].strip() if comment else ""


def values(events: Iterable[Event], thinning: Thinning) -> bytes:
    """The values of all register tiles, in order, packed by `float24`."""
    parts = [thinning.of(x).ravel() for event in events for x in event.values.values()]
    return float24(np.concatenate(parts) if parts else np.zeros(0, np.float32))


def float24(x: Array) -> bytes:
    """float32 values rounded to 24 bits (over four digits), as three planes of bytes, which compress better."""
    bits = np.ascontiguousarray(x, "<f4").view("<u4")
    rounded = (bits.astype(np.uint64) + 0x80) >> 8
    overflown = (rounded & 0x7FFFFF) >= 0x7F8000  # values that rounding takes past the largest, infinities and NaN
    rounded = np.where(overflown, bits >> 8, rounded).astype(np.uint32)
    rounded[np.isnan(x)] = 0x7FC000
    return b"".join(((rounded >> shift) & 0xFF).astype(np.uint8).tobytes() for shift in (16, 8, 0))
