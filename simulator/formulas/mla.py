"""The counts of absorbed latent attention in closed form."""

from __future__ import annotations

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.flash_decoding import count_tree, reached, tree_spec
from simulator.lanes import total
from simulator.problem import Problem, Tile
from simulator.programs.mla import row_warps, splits
from simulator.programs.scores import distinct_heads

STAGES = 2


def sram_bytes(problem: Problem, tile: Tile, warps: int) -> int:
    """SRAM per block: queries, two tiles of the latent cache, P, and a maximum and a sum per row of each warp."""
    d, rows, cols = padded(problem.head_dim), padded(tile.rows), padded(tile.cols)
    statistics = 2 * (warps // row_warps(tile)) * rows * 4
    return (rows * d + STAGES * cols * d + rows * cols) * problem.itemsize + statistics


def mla(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """See `count_latent`."""
    count_latent(book, "mla", problem, tile, config, lse=lse)


def count_latent(book: Book, launch: str, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request of n keys, with H rows of heads and queries: it reads 1152 n bytes of latent rows for each tile of up to 64 rows,
    and 1152 H of Q for each chunk (of 512 keys unless the problem says how many).

    Each chunk writes H (512 + 2) float32 of a partial result, which is read once, and counts up by 4 bytes a warp. Nodes above the
    chunks do the same, 1/32 as many at each level. A single chunk does neither.
    """
    p, es, t, s, w = problem, problem.itemsize, book.tensors, splits(problem, tile), config.warps
    heads, rows, cols = p.batch * p.kv_heads, padded(tile.rows), padded(tile.cols)
    d, dv = padded(p.head_dim), padded(p.head_dim_v)
    by_rows = row_warps(tile)
    by_keys = max(1, w // by_rows)
    tiles = heads * sum(total(stop - first) for _, first, stop in s.spans())
    partial = tree_spec(book, s, heads, w)
    if lse:
        book.tensor(Spec("lse", p.batch * p.heads, p.len_q, 1, "float32", "output", vector=True))
    book.launch(launch, s.row_tiles * s.runs * heads, w, config.heads_together, sram_bytes(p, tile, w))

    units = working = pairs_merged = merged_rows = sinks = 0
    for inside, begin, stop in s.spans():
        seen = stop > begin
        first, last = begin // s.chunk, np.maximum(stop - 1, 0) // s.chunk
        chunks = last - first + 1
        working += heads * total(chunks)
        merged_rows += heads * total(np.where(chunks > 1, inside, 0))
        sinks += heads * total(np.where(chunks == 1, distinct_heads(inside, s.group, 8), 0))
        queried = np.where(seen, chunks, 0)  # rows that see no key need no queries
        units += heads * total(queried)
        book.add("load_q", "q", hbm_read=heads * total(queried * inside) * t["q"].row_bytes)
        book.distinct("q", "read", heads * total(np.where(seen, inside, 0)) * t["q"].row_bytes)
        keys = heads * total(np.minimum(stop * tile.cols, p.len_kv) - begin * tile.cols)
        book.add("load_latent", "latent", hbm_read=keys * t["latent"].row_bytes)
        pairs_merged += count_tree(book, first, last, inside, heads, partial.row_bytes, w)

    first_key, end_key = reached(s)
    book.distinct("latent", "read", heads * (end_key - first_key) * t["latent"].row_bytes)
    book.add("load_q", "q", sram_write=units * rows * d * es)
    book.add("scores", "q", sram_read=tiles * by_keys * rows * d * es)
    book.add("load_latent", "latent", sram_write=tiles * cols * d * es)
    book.add("scores", "latent", sram_read=tiles * by_rows * cols * d * es)
    book.add("output", "latent", sram_read=tiles * cols * dv * es)
    book.add("softmax", "p", sram_write=tiles * rows * cols * es)
    book.add("output", "p", sram_read=tiles * w * rows * cols * es)
    of_warps = by_keys * rows * 4
    book.add("softmax", "m_warps", sram_write=tiles * of_warps, sram_read=tiles * w * of_warps)
    book.add("join", "l_warps", sram_write=working * of_warps, sram_read=working * w * of_warps)
    for step, name in [("store_o", "out"), *([("store_lse", "lse")] if lse else [])]:
        book.add(step, name, hbm_write=t[name].nbytes)
        book.distinct(name, "write", t[name].nbytes)

    square, column, output, finished = tile.rows * tile.cols, tile.rows, tile.rows * p.head_dim_v, heads * s.row_tiles
    passes = (
        3 + (p.scale != 1.0) + 3 * (p.soft_cap is not None)
    )  # scale, maximum, difference, sum, and those of the cap
    if p.sinks:  # each warp has columns of a unit's rows
        book.add("store_o", "sinks", hbm_read=4 * (merged_rows + w * sinks))
        book.distinct("sinks", "read", 4 * p.heads * (s.rows > 0))
        book.compute(other=finished * (output + 5 * column), exp=finished * 2 * column)
    book.compute(
        matmul=tiles * 2 * rows * cols * (d + dv),
        other=tiles * (passes * square + 4 * column + output)
        + pairs_merged * (3 * output + 6 * column)
        + finished * (output + 2 * column * lse),
        exp=tiles * (square + column) + 2 * pairs_merged * column,
    )
