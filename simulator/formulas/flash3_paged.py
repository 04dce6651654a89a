"""The counts of FlashAttention-3 over pages in closed form."""

from __future__ import annotations

from functools import partial
from math import gcd, lcm

import numpy as np

from simulator.config import WORK, Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.flash3 import count_counter
from simulator.formulas.flash3 import sram_bytes as plain_sram_bytes
from simulator.formulas.paged import entries
from simulator.formulas.scores import count_scores
from simulator.formulas.walk import tiles_of_rows, walk, weighted_rows
from simulator.lanes import highest, lowest
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import MBARRIERS, PANEL, backwards
from simulator.programs.flash3_paged import TOLD, listeners, mbarriers, shares


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block: those of `flash3`, with room for the mbarriers of a third stage."""
    return plain_sram_bytes(problem, tile, stages) + 4 * (mbarriers(stages) - MBARRIERS)


def flash3_paged(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request: of K and V what flash3 moves, where pages come in boxes, else what flash2 moves; boxes of Q; and for K and for V
    4 bytes of the block table for each box, or for each page that a share of a tile's keys touches.

    It writes the LSE whether that was asked for or not.
    """
    del lse
    p, es, t = problem, problem.itemsize, book.tensors
    heads, rows = p.batch * p.heads, p.row_tiles(tile)
    book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    visited, tiles = walk(p, tile), heads * rows
    pairs = heads * visited.pairs
    visible = partial(backwards, p, tile)
    sram = sram_bytes(p, tile, config.stages)
    book.launch(book.algorithm, tiles, config.warps, config.heads_together, sram, visible)

    count_counter(book, config, tiles, "load_q")
    book.add("load_q", WORK, sram_write=TOLD * tiles, sram_read=TOLD * tiles * listeners(config))
    boxes = tiles * round_up(p.head_dim, PANEL) * es
    book.add("load_q", "q", hbm_read=tile.rows * boxes, sram_write=br * boxes)
    if p.varlen:  # rows of the next request are cleared
        book.add("load_q", "q", sram_write=heads * (rows * tile.rows - p.len_q) * round_up(p.head_dim, PANEL) * es)
    book.add("scores", "q", sram_read=pairs * br * d * es)
    for name, load, use, width in (("k", "load_k", "scores", d), ("v", "load_v", "output", dv)):
        if config.page_box:
            box = round_up(t[name].cols, PANEL) * es
            book.add(load, name, hbm_read=pairs * tile.cols * box, sram_write=pairs * bc * box)
        else:
            book.add(load, name, hbm_read=heads * visited.keys * t[name].row_bytes, sram_write=pairs * bc * width * es)
        book.add(use, name, sram_read=pairs * config.readers * bc * width * es)
        book.distinct(name, "read", p.batch * p.kv_heads * visited.distinct_keys * t[name].row_bytes)
    book.add("store_o", "out", hbm_write=t["out"].nbytes)
    book.add("store_lse", "lse", hbm_write=t["lse"].nbytes)
    book.distinct("q", "read", t["q"].nbytes)
    book.distinct("out", "write", t["out"].nbytes)
    book.distinct("lse", "write", t["lse"].nbytes)
    if config.page_box:
        outside = visited.pairs * tile.cols - visited.keys  # rows of V behind the last key
        book.add("load_v", "v", sram_write=heads * outside * round_up(p.head_dim_v, PANEL) * es)
    _count_look_ups(book, p, tile, config.page_box)

    count_scores(book, p, tile, tiles=tiles, pairs=pairs, warps=4 * config.consumers)
    square, column = tile.rows * tile.cols, tile.rows
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=pairs * 2 * br * bc * (d + dv),
        other=pairs * (passes * square + 4 * column + tile.rows * p.head_dim_v)
        + tiles * (tile.rows * p.head_dim_v + 2 * column),
        exp=pairs * (square + column),
    )


def _count_look_ups(book: Book, p: Problem, tile: Tile, box: int) -> None:
    """What is read of the block table: for K, and again for V, the page of each box, or those of each share of each tile."""
    size, cols, n = p.page_size or 1, tile.cols, np.asarray(p.len_kv)
    repeats = lcm(cols, box or size)  # keys
    few = weighted_rows(p, tile, repeats // gcd(repeats, tile.rows))
    first, stop = tiles_of_rows(p, tile, few.rows)
    begins, ends = first * cols, np.minimum(stop * cols, n)
    seen = begins < ends
    if not seen.any():
        return
    if box:
        looked = -(-ends // box) - begins // box
    else:
        looked = entries(ends, size, cols, shares(tile)) - entries(begins, size, cols, shares(tile))
    looked = few.sum(np.where(seen, looked, 0))
    for step in ("load_k", "load_v"):
        book.add(step, "block_table", hbm_read=4 * p.batch * p.heads * looked)
    low, high = lowest(np.where(seen, begins, n)), highest(ends * seen)
    pages = (high - 1) // size - low // size + 1
    book.distinct("block_table", "read", 4 * (low < high) * pages)
