"""The counts of latent attention on Hopper in closed form."""

from __future__ import annotations

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.flash_decoding import reached
from simulator.formulas.paged import count_look_ups
from simulator.lanes import total
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.mla_hopper import HALVES, MBARRIERS, MERGE_WARPS, STAGES, merges, splits
from simulator.programs.scores import distinct_heads


def sram_bytes(problem: Problem, tile: Tile) -> int:
    """SRAM per block: queries, two tiles of the latent cache, P, a number per row, the mbarriers."""
    d, rows, cols = padded(problem.head_dim), padded(tile.rows), padded(tile.cols)
    return (rows * d + STAGES * cols * d + rows * cols) * problem.itemsize + 4 * rows + 4 * MBARRIERS


def mla_hopper(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """See `count_hopper`. TMA's boxes count whole, with their rows behind the last key."""
    count_hopper(book, "mla_hopper", problem, tile, config, lse=lse)


def count_hopper(book: Book, launch: str, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request of n keys, with H rows of heads and queries: it reads 1152 n bytes of latent rows for each tile of up to 64 rows,
    and 1152 H of Q for each chunk of 1024 keys.

    Each chunk writes H (512 + 2) float32 of a partial result. The second launch reads them: the output once, m and l in each of the
    four warps of a row. A single chunk has no partial result.
    """
    p, es, t, s = problem, problem.itemsize, book.tensors, splits(problem, tile)
    heads, rows, cols = p.batch * p.kv_heads, padded(tile.rows), padded(tile.cols)
    d, dv = padded(p.head_dim), padded(p.head_dim_v)
    tiles = heads * sum(total(stop - first) for _, first, stop in s.spans())
    if s.runs > 1:
        for name, wide in (("partial", p.head_dim_v), ("partial_m", 1), ("partial_l", 1)):
            flat: dict[str, bool] = {"flat" if wide > 1 else "vector": True}
            axes = (("parts", s.runs),)
            book.tensor(Spec(name, heads, s.rows, wide, "float32", "workspace", axes=axes, **flat))
    if lse:
        book.tensor(Spec("lse", p.batch * p.heads, p.len_q, 1, "float32", "output", vector=True))
    book.launch(launch, s.row_tiles * s.runs * heads, config.warps, config.heads_together, sram_bytes(p, tile))

    units = working = keys = finished = merged_rows = parts = sinks = 0
    for inside, begin, stop in s.spans():
        seen = stop > begin
        first, last = begin // s.chunk, np.maximum(stop - 1, 0) // s.chunk
        chunks = last - first + 1
        working += heads * total(chunks)
        queried = np.where(seen, chunks, 0)  # rows that see no key need no queries
        units += heads * total(queried)
        book.add("load_q", "q", hbm_read=heads * total(queried * inside) * t["q"].row_bytes)
        book.distinct("q", "read", heads * total(np.where(seen, inside, 0)) * t["q"].row_bytes)
        keys += heads * total(np.minimum(stop * tile.cols, p.len_kv) - begin * tile.cols)
        split = chunks > 1
        finished += heads * total(~split)
        sinks += heads * total(np.where(split, 0, distinct_heads(inside, s.group, 8)))
        merged_rows += heads * total(np.where(split, inside, 0))
        parts += heads * total(np.where(split, chunks * inside, 0))  # of all rows

    wide = round_up(p.head_dim, PANEL) * es
    in_boxes = p.page_size is None or config.page_box > 0
    book.add("load_latent", "latent", hbm_read=tiles * tile.cols * wide if in_boxes else keys * t["latent"].row_bytes)
    if p.page_size is not None:
        count_look_ups(book, "load_latent", s, config)
    if config.page_box or p.ragged:
        book.add("load_latent", "latent", sram_write=(tiles * tile.cols - keys) * wide)  # rows that are cleared
    first_key, end_key = reached(s)
    book.distinct("latent", "read", heads * (end_key - first_key) * t["latent"].row_bytes)
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
    rest = p.batch * p.heads * p.len_q - merged_rows
    _count_outputs(book, rest, lse=lse)
    _count_sinks(book, p, "share_sum", sinks, finished * tile.rows)
    for name, row_bytes in (("partial", t["partial"].row_bytes), ("partial_m", 4), ("partial_l", 4)) if parts else ():
        book.add("store_partial", name, hbm_write=parts * row_bytes)
        book.distinct(name, "write", parts * row_bytes)

    square, column, output = tile.rows * tile.cols, tile.rows, tile.rows * p.head_dim_v
    passes = (
        3 + (p.scale != 1.0) + 3 * (p.soft_cap is not None)
    )  # scale, maximum, difference, sum, and those of the cap
    book.compute(
        matmul=tiles * 2 * rows * cols * (d + dv),
        other=tiles * (passes * square + 4 * column + output) + finished * (output + 2 * column * lse),
        exp=tiles * (square + column),
    )
    if merges(p, tile):
        book.launch(f"{launch}_merge", s.rows * heads, MERGE_WARPS, config.heads_together)
        for name, row_bytes in (
            (("partial", t["partial"].row_bytes), ("partial_m", 4), ("partial_l", 4)) if parts else ()
        ):
            book.add("merge", name, hbm_read=parts * row_bytes * (1 if name == "partial" else MERGE_WARPS))
            book.distinct(name, "read", parts * row_bytes)
        _count_outputs(book, merged_rows, lse=lse)
        _count_sinks(book, p, "store_o", MERGE_WARPS * merged_rows, merged_rows)
        each, one = (
            (2 * parts - merged_rows) * p.head_dim_v,
            4 * parts - 2 * merged_rows,
        )  # of outputs, and of statistics
        book.compute(other=each + one + merged_rows * (p.head_dim_v + 2 * lse), exp=parts)


def _count_sinks(book: Book, problem: Problem, step: str, asked: int, rows: int) -> None:
    """Sinks that warps have asked for, and so many rows that they join."""
    if problem.sinks and asked:
        book.add(step, "sinks", hbm_read=4 * asked)
        book.distinct("sinks", "read", 4 * problem.heads)
        book.compute(other=rows * (problem.head_dim_v + 5), exp=rows * 2)


def _count_outputs(book: Book, rows: int, *, lse: bool) -> None:
    """Finished rows of out and the LSE."""
    for step, name in [("store_o", "out"), *([("store_lse", "lse")] if lse else [])] if rows else ():
        nbytes = rows * book.tensors[name].row_bytes
        book.add(step, name, hbm_write=nbytes)
        book.distinct(name, "write", nbytes)
