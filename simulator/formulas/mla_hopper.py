"""The counts of latent attention on Hopper in closed form."""

from __future__ import annotations

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.flash_decoding import count_tree, tree_spec
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.mla_hopper import HALVES, OUTPUT_WARPS, splits, sram_bytes


def mla_hopper(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """See `count_hopper`. TMA's boxes count whole, with their rows behind the last key."""
    count_hopper(book, "mla_hopper", problem, tile, config, lse=lse)


def count_hopper(book: Book, launch: str, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request of n keys, with H rows of heads and queries: it reads 1152 n bytes of latent rows for each tile of up to 64 rows,
    and 1152 H of Q for each chunk of 1024 keys.

    Each chunk writes H (512 + 2) float32 of a partial result, which is read once, and counts up by 4 bytes for each warp of the
    output. Nodes above the chunks do the same, 1/32 as many at each level. A single chunk does neither.
    """
    p, es, t, s = problem, problem.itemsize, book.tensors, splits(problem, tile)
    heads, rows, cols = p.batch * p.kv_heads, padded(tile.rows), padded(tile.cols)
    d, dv = padded(p.head_dim), padded(p.head_dim_v)
    tiles = heads * sum(int((stop - first).sum()) for _, first, stop in s.spans())
    partial = tree_spec(book, s, heads, OUTPUT_WARPS)
    if lse:
        book.tensor(Spec("lse", p.batch * p.heads, p.len_q, 1, "float32", "output", vector=True))
    book.launch(launch, s.row_tiles * s.runs * heads, config.warps, config.heads_together, sram_bytes(p, tile))

    units = working = pairs_merged = keys = 0
    seen = list[tuple[int, int]]()
    for inside, begin, stop in s.spans():
        if (stop > begin).any():
            seen.append((int(begin[stop > begin].min()), int(stop.max())))
        first, last = begin // s.chunk, np.maximum(stop - 1, 0) // s.chunk
        chunks = last - first + 1
        working += heads * int(chunks.sum())
        queried = np.where(stop > begin, chunks, 0)  # rows that see no key need no queries
        units += heads * int(queried.sum())
        book.add("load_q", "q", hbm_read=heads * int((queried * inside).sum()) * t["q"].row_bytes)
        book.distinct("q", "read", heads * int(inside[stop > begin].sum()) * t["q"].row_bytes)
        keys += heads * int((np.minimum(stop * tile.cols, p.len_kv) - begin * tile.cols).sum())
        pairs_merged += count_tree(book, first, last, inside, heads, partial.row_bytes, OUTPUT_WARPS)

    boxes = tiles * tile.cols * round_up(p.head_dim, PANEL) * es
    in_pages = p.page_size is not None
    book.add("load_latent", "latent", hbm_read=keys * t["latent"].row_bytes if in_pages else boxes)
    if seen:
        begin, end = min(first for first, _ in seen) * tile.cols, max(stop for _, stop in seen) * tile.cols
        book.distinct("latent", "read", heads * (min(end, p.len_kv) - begin) * t["latent"].row_bytes)
    book.add("load_q", "q", sram_write=units * rows * d * es)
    book.add("scores", "q", sram_read=tiles * rows * d * es)
    book.add("load_latent", "latent", sram_write=tiles * cols * d * es)
    book.add("scores", "latent", sram_read=tiles * cols * d * es)
    book.add("output", "latent", sram_read=tiles * cols * dv * es)
    book.add("softmax", "p", sram_write=tiles * rows * cols * es)
    book.add("output", "p", sram_read=tiles * HALVES * rows * cols * es)
    for step, step_of_reads, n in (("softmax", "rescale", tiles), ("share_sum", "share_sum", working)):
        book.add(step, "alpha", sram_write=n * 4 * rows)
        book.add(step_of_reads, "alpha", sram_read=n * HALVES * 4 * rows)
    for step, name in [("store_o", "out"), *([("store_lse", "lse")] if lse else [])]:
        book.add(step, name, hbm_write=t[name].nbytes)
        book.distinct(name, "write", t[name].nbytes)

    square, column, output, finished = tile.rows * tile.cols, tile.rows, tile.rows * p.head_dim_v, heads * s.row_tiles
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=tiles * 2 * rows * cols * (d + dv),
        other=tiles * (passes * square + 4 * column + output)
        + pairs_merged * (3 * output + 6 * column)
        + finished * (output + 2 * column * lse),
        exp=tiles * (square + column) + 2 * pairs_merged * column,
    )
