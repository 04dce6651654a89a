"""The counts of cascade attention in closed form, for many row tiles at a time."""

from __future__ import annotations

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.dtypes import Array
from simulator.lanes import highest, lanes_of, least, lowest, most, total, ways
from simulator.problem import MARGIN, Problem, Tile
from simulator.programs.cascade import STAGES, own_splits, parts, parts_seen, splits, uneven, warps
from simulator.programs.flash_decoding import Splits

_NUMBERS = 1 << 20
"""So many numbers of queries and requests are looked at together."""


def sram_bytes(problem: Problem, tile: Tile) -> int:
    """SRAM per block: its queries, and two tiles of K and of V."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    return (padded(tile.rows) * d + STAGES * padded(tile.cols) * (d + dv)) * problem.itemsize


def cascade(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per KV head, with R rows (queries of all requests times heads of a group), a prefix of n keys and m own keys each: it reads
    2nd of the prefix for each tile of up to 128 rows, and 2md of each request's own. With a window, n and m are what a tile's rows
    see of them.

    Each chunk of keys, 2,048 of the prefix or 512 own ones, reads its rows' queries, and writes d + 1 float32 a row. The merge
    reads these.
    """
    p, t = problem, book.tensors
    of_prefix, of_suffix = parts(p, tile)
    axes, heads = (("parts", of_prefix + of_suffix),), p.batch * p.heads
    partial = book.tensor(Spec("partial", heads, p.len_q, p.head_dim_v, "float32", "workspace", axes=axes, flat=True))
    partial_lse = book.tensor(Spec("partial_lse", heads, p.len_q, 1, "float32", "workspace", axes=axes, vector=True))
    if lse:
        book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    prefix, suffix = splits(p, tile)
    own = np.unique(np.array(p.seq_lens, np.int64), return_counts=True)
    for s, launch, names, n in (
        (prefix, "cascade_prefix", ("k_prefix", "v_prefix"), of_prefix),
        (suffix, "cascade_suffix", ("k", "v"), of_suffix),
    ):
        w, blocks = warps(s), s.problem.batch * p.kv_heads * s.row_tiles * n
        book.launch(launch, blocks, w, config.heads_together, sram_bytes(p, s.tile))
        if s is prefix:
            _count_side(book, prefix, *names, n, every=not uneven(p))
        else:
            _count_suffix(book, p, tile, *own, n)
        if s is suffix:
            _count_lengths(book, p, "load_q", blocks * w)
        elif p.left is not None:
            first, end = prefix.requests(np.arange(prefix.row_tiles))
            _count_lengths(book, p, "load_q", int((end - first).sum()) * p.kv_heads * n * w)

    rows = heads * p.len_q
    book.launch("cascade_merge", rows, 1, config.heads_together, 0)
    _count_lengths(book, p, "load_part", rows)
    merged = rows * (of_prefix + of_suffix)
    if uneven(p):
        merged = p.heads * _merged(p, tile, *own)
    for spec in (partial, partial_lse):
        book.add("load_part", spec.name, hbm_read=merged * spec.row_bytes)
        book.distinct(spec.name, "read", merged * spec.row_bytes)
    if p.sinks:
        book.add("normalize", "sinks", hbm_read=4 * rows)
        book.distinct("sinks", "read", 4 * p.heads * (rows > 0))
    for step, name in [("store_o", "out"), *([("store_lse", "lse")] if lse else [])]:
        book.add(step, name, hbm_write=t[name].nbytes)
        book.distinct(name, "write", t[name].nbytes)
    d, sinks = p.head_dim_v, int(p.sinks)
    book.compute(
        other=merged * (3 * d + 5) + rows * (sinks * (d + 5) + d + 2 * lse),
        exp=2 * (merged + rows * sinks),
    )


def _count_lengths(book: Book, problem: Problem, step: str, times: int) -> None:
    """That a length is read so many times, if requests have their own."""
    if problem.lengths is not None and times:
        book.add(step, "seq_lens", hbm_read=4 * times)
        book.distinct("seq_lens", "read", 4 * problem.batch)


def _merged(problem: Problem, tile: Tile, keys: Array, requests: Array) -> int:
    """The partial results of a head that the merge reads. So many `requests` have so many own `keys`."""
    merged, at_a_time = 0, max(1, _NUMBERS // len(keys))
    for first in range(0, problem.len_q, at_a_time):
        queries = np.arange(first, min(first + at_a_time, problem.len_q))
        begin, end = parts_seen(problem, tile, queries[:, None], keys)
        merged += int(np.dot((end - begin).sum(0), requests))
    return merged


def _count_suffix(book: Book, problem: Problem, tile: Tile, keys: Array, requests: Array, parts: int) -> None:
    """The launch over own keys: each request that has as many counts alike, and different ones are counted together."""

    most_bytes = (float(keys.max()) + MARGIN) * (problem.len_q + MARGIN) * problem.heads * problem.head_dim * MARGIN

    def evaluate(lanes: Array) -> Book:
        one, alone = Book(book.algorithm, problem, tile, book.device, book.config), len(lanes) == 1
        one.tensors = book.tensors
        one.launch("cascade_suffix", 0, 0)
        own = int(keys[lanes[0]]) if alone else lanes_of(keys[lanes], exact=most_bytes < 2.0**62)
        _count_side(one, own_splits(problem, tile, own, 1), "k", "v", parts, every=not uneven(problem))
        return one

    for lanes, one in ways(np.arange(len(keys)), evaluate):
        book.add_times(one, requests[lanes])


def _count_side(book: Book, s: Splits, k: str, v: str, parts: int, *, every: bool) -> None:
    """One side's launch: all chunks of its keys, for all of its rows. If not `every` block writes a partial result, those do whose
    rows see a key."""
    p, tile, t, es, d = s.problem, s.tile, book.tensors, s.problem.itemsize, s.problem.head_dim_v
    heads, rows, cols, w = p.batch * p.kv_heads, padded(tile.rows), padded(tile.cols), warps(s)
    q_tile, k_tile, v_tile = rows * padded(p.head_dim) * es, cols * padded(p.head_dim) * es, cols * padded(d) * es
    units = tiles = written = last = 0
    first = p.len_kv
    for inside, start, stop in s.spans():
        chunks = -(-stop // s.chunk) - start // s.chunk  # of which these rows see a key
        units, tiles = units + heads * total(chunks), tiles + heads * total(stop - start)
        rows_read = heads * total(chunks * inside)
        written += rows_read
        last = most(last, highest(stop))
        first = least(first, lowest(np.where(stop > 0, start, first)))
        keys = heads * total(np.minimum(stop * tile.cols, p.len_kv) - start * tile.cols)
        book.add("load_q", "q", hbm_read=rows_read * t["q"].row_bytes)
        book.distinct("q", "read", heads * total(np.where(stop > 0, inside, 0)) * t["q"].row_bytes)
        for step, name in (("load_k", k), ("load_v", v)):
            book.add(step, name, hbm_read=keys * t[name].row_bytes)
    book.add("load_q", "q", sram_write=units * q_tile)
    book.add("scores", "q", sram_read=tiles * q_tile)
    reached = heads * most(0, least(last * tile.cols, p.len_kv) - first * tile.cols)
    for name, load, use, size in ((k, "load_k", "scores", k_tile), (v, "load_v", "output", v_tile)):
        book.add(load, name, sram_write=tiles * size)
        book.add(use, name, sram_read=tiles * w * size)
        book.distinct(name, "read", reached * t[name].row_bytes)
    blocks = units
    if every:
        blocks, written = heads * s.row_tiles * parts, heads * s.rows * parts
    for name in ("partial", "partial_lse"):
        book.add("store_part", name, hbm_write=written * t[name].row_bytes)
        book.distinct(name, "write", written * t[name].row_bytes)

    square, column, output = tile.rows * tile.cols, tile.rows, tile.rows * d
    passes = (
        3 + (p.scale != 1.0) + 3 * (p.soft_cap is not None)
    )  # scale, maximum, difference, sum, and those of the cap
    book.compute(
        matmul=tiles * 2 * rows * cols * (padded(p.head_dim) + padded(d)),
        other=tiles * (passes * square + 4 * column + output) + blocks * (output + 2 * column),
        exp=tiles * (square + column),
    )
