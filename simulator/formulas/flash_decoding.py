"""The counts of Flash-Decoding in closed form, for many row tiles at a time. Decoding has one or a few."""

from __future__ import annotations

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.dtypes import Array
from simulator.lanes import highest, least, lowest, most, total
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding import CHILDREN, FRAGMENT, Splits, told, told_words
from simulator.programs.quantized import query_factors, query_parts


def sram_bytes(problem: Problem, tile: Tile, warps: int, stages: int) -> int:
    """SRAM per block: the queries of the units whose keys are on their way, the ring of K and V, what the warps have of a unit,
    for those that merge, and with lengths the next units."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    rows, cols = padded(tile.rows, FRAGMENT), padded(tile.cols)
    queries, ring = (stages + 1) * rows * d * problem.itemsize, stages * cols * (d + dv) * problem.kv_itemsize
    scales = stages * cols * [problem.k_scale, problem.v_scale].count("token")
    scales += (stages + 1) * d * (problem.k_scale == "channel")
    words = scales + warps * told_words(problem, stages)
    return queries + ring + warps * rows * dv * 4 + (2 * warps + 1) * rows * 4 + words * 4


def flash_decoding(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """See `count_decoding`."""
    count_decoding(book, "flash_decoding", problem, tile, config, lse=lse)


def count_decoding(book: Book, launch: str, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per KV head, with n keys in runs of r, G heads of one query: it reads 2nd of K and V, and n/r Gd of Q.

    Each run writes G(d + 2) float32 of a partial result, which is read once, and counts up by 4 bytes a warp. Nodes above the runs
    do the same, 1/32 as many at each level. A single run does neither.
    """
    run = dict(config.constants)["RUN"]
    p, es, t, s, w = problem, problem.itemsize, book.tensors, Splits(problem, tile, run), config.warps
    heads, rows, cols = p.batch * p.kv_heads, padded(tile.rows, FRAGMENT), padded(tile.cols)
    d, dv = padded(p.head_dim), padded(p.head_dim_v)
    q_tile, k_tile, v_tile = rows * d * es, cols * d * p.kv_itemsize, cols * dv * p.kv_itemsize
    pairs = heads * sum(total(stop - first) for _, first, stop in s.spans())
    partial = tree_spec(book, s, heads, w)
    if lse:
        book.tensor(Spec("lse", p.batch * p.heads, p.len_q, 1, "float32", "output", vector=True))
    peak = sram_bytes(p, tile, w, config.stages)
    book.launch(launch, s.row_tiles * s.runs * heads, 2 * w, config.heads_together, peak)

    units = blocks = pairs_merged = all_keys = 0
    for inside, begin, stop in s.spans():
        seen = stop > begin
        first, last = begin // s.chunk, np.maximum(stop - 1, 0) // s.chunk
        working = last - first + 1
        blocks += heads * total(np.where(seen, working, 0))
        runs = last // run - first // run + 1
        queried = np.where(seen, runs, 0)  # rows that see no key need no queries
        units += heads * total(queried)
        book.add("load_q", "q", hbm_read=heads * total(queried * inside) * t["q"].row_bytes)
        book.distinct("q", "read", heads * total(np.where(seen, inside, 0)) * t["q"].row_bytes)
        keys = heads * total(np.minimum(stop * tile.cols, p.len_kv) - begin * tile.cols)
        all_keys += keys
        for step, name in (("load_k", "k"), ("load_v", "v")):
            book.add(step, name, hbm_read=keys * t[name].row_bytes)
        first, last = first // run, last // run
        pairs_merged += heads * total(working - runs)
        pairs_merged += count_tree(book, first, last, inside, heads, partial.row_bytes, w)

    book.add("load_q", "q", sram_write=units * q_tile)
    for readers, nbytes in told(p):
        book.add("load_q", "units", sram_write=units * w * nbytes, sram_read=readers * units * w * nbytes)
    if config.q_in_registers or query_factors(p):
        book.add("load_q", "q", sram_read=units * w * q_tile)
    if not config.q_in_registers:
        book.add("scores", "q", sram_read=pairs * w * q_tile)
    first_key, end_key = reached(s)
    distinct = heads * (end_key - first_key)
    for name, load, use, size in (("k", "load_k", "scores", k_tile), ("v", "load_v", "output", v_tile)):
        book.add(load, name, sram_write=pairs * size)
        book.add(use, name, sram_read=pairs * size)
        book.distinct(name, "read", distinct * t[name].row_bytes)
    _count_scales(book, p, config, units, pairs, all_keys, distinct)
    written_and_read = (
        ("m_warps", w, w * w, rows),
        ("l_warps", w, w, rows),
        ("o_warps", w, w, rows * dv),
        ("m", 1, 1, rows),
    )
    for name, writes, reads, size in written_and_read:
        book.add("join", name, sram_write=blocks * writes * 4 * size, sram_read=blocks * reads * 4 * size)
    written = [("store_o", "out"), *([("store_lse", "lse")] if lse else [])]
    for step, name in written:
        book.add(step, name, hbm_write=t[name].nbytes)
        book.distinct(name, "write", t[name].nbytes)

    square, column, output, finished = tile.rows * tile.cols, tile.rows, tile.rows * p.head_dim_v, heads * s.row_tiles
    passes = (
        3 + (p.scale != 1.0) + 3 * (p.soft_cap is not None)
    )  # scale, maximum, difference, sum, and those of the cap
    if p.sinks:
        book.add("store_o", "sinks", hbm_read=4 * heads * s.rows)
        book.distinct("sinks", "read", 4 * p.heads * (s.rows > 0))
        book.compute(other=finished * (output + 5 * column), exp=finished * 2 * column)
    book.compute(
        matmul=pairs * 2 * rows * cols * (query_parts(p) * d + dv),
        other=pairs * (passes * square + 4 * column + output)
        + blocks * (output + (2 + (p.v_scale is not None)) * column)
        + pairs_merged * (3 * output + 6 * column)
        + finished * (output + 2 * column * lse),
        exp=pairs * (square + column) + (blocks + 2 * pairs_merged) * column,
    )


def _count_scales(
    book: Book, problem: Problem, config: Config, units: int, tiles: int, keys: int, distinct: int
) -> None:
    """The scales of quantised K and V: for so many units that see a key, tiles and keys, of which `distinct` are distinct.

    One for all or for a head is 4 bytes per warp and unit. One per channel is 4d bytes per unit, one per token 4 bytes per key.
    """
    p, tile, w = problem, config.tile, config.warps
    d, cols, square, column = padded(p.head_dim), padded(tile.cols), tile.rows * tile.cols, tile.rows
    other = 0
    for name, form, load, use in (
        ("k_scale", p.k_scale, "load_k", "scores"),
        ("v_scale", p.v_scale, "load_v", "output"),
    ):
        if form in ("tensor", "head"):
            book.add("load_q", name, hbm_read=4 * w * units)
            book.distinct(name, "read", 4 * (p.kv_heads if form == "head" else 1) * (units > 0))
        elif form == "channel":
            each = tiles if not config.q_in_registers else units
            book.add("load_q", name, hbm_read=4 * p.head_dim * units, sram_write=4 * d * units)
            book.add("load_q" if config.q_in_registers else use, name, sram_read=4 * d * w * each)
            if not config.q_in_registers:
                book.add("load_q", name, sram_read=4 * d * w * units)
            book.distinct(name, "read", 4 * p.head_dim * p.kv_heads * (units > 0))
            other += each * column * p.head_dim
        elif form == "token":
            book.add(load, name, hbm_read=4 * keys, sram_write=4 * cols * tiles)
            book.add(use, name, sram_read=4 * cols * tiles)
            book.distinct(name, "read", 4 * distinct)
    if p.k_scale in ("tensor", "head"):
        other += units + tiles * square * (p.scale == 1.0)
    if p.k_scale == "token":
        other += tiles * square
    if p.v_scale == "token":
        other += tiles * (square + 2 * tile.cols + 2 + column * p.head_dim_v)
    book.compute(other=other)


def reached(s: Splits) -> tuple[int, int]:
    """The first key that is loaded for any row tile, and the one behind the last. Both are 0 if no row sees a key."""
    p, cols = s.problem, s.tile.cols
    first = p.key_tiles(s.tile)
    stop = 0
    for _, begins, stops in s.spans():
        first = least(first, lowest(np.where(begins < stops, begins, first)))
        stop = most(stop, highest(stops))
    return (stop > 0) * first * cols, least(stop * cols, p.len_kv)


def tree_spec(book: Book, s: Splits, heads: int, warps: int) -> Spec:
    """Enters what the tree has in HBM, with counters for so many warps, and returns what partial outputs are."""
    p, parts = s.problem, (("parts", sum(s.room)),)
    partial = Spec("partial", heads, s.rows, p.head_dim_v, "float32", "workspace", axes=parts, flat=True)
    if s.room:
        book.tensor(partial)
        for name in ("partial_m", "partial_l"):
            book.tensor(Spec(name, heads, s.rows, 1, "float32", "workspace", vector=True, axes=parts))
        nodes = (("nodes", s.counters),)
        book.tensor(
            Spec("arrivals", heads, s.row_tiles * warps, 1, "int32", "workspace", vector=True, axes=nodes, zeros=True)
        )
    return partial


def count_tree(book: Book, first: Array, last: Array, inside: Array, heads: int, row_bytes: int, warps: int) -> int:
    """The way up the tree from row tiles' first and last runs, with so many rows inside: how many pairs are merged there."""
    merged = 0
    while (split := first < last).any():
        children = np.where(split, last - first + 1, 0)
        first, last = first // CHILDREN, last // CHILDREN
        arrived, parents = heads * total(children), heads * total(np.where(split, last - first + 1, 0))
        for name, nbytes in (("partial", row_bytes), ("partial_m", 4), ("partial_l", 4)):
            moved = heads * total(children * inside) * nbytes
            book.add("store_partial", name, hbm_write=moved)
            book.add("merge", name, hbm_read=moved)
            for way in ("read", "write"):
                book.distinct(name, way, moved)
        book.add("arrive", "arrivals", hbm_atomic=4 * warps * arrived)
        for way in ("read", "write"):
            book.distinct("arrivals", way, 4 * warps * parents)
        merged += arrived - parents
    return merged
