"""The counts of FlashAttention-2 in closed form."""

from __future__ import annotations

from functools import partial

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.formulas.mask import count_masked, count_packing
from simulator.formulas.scores import count_scores
from simulator.formulas.walk import walk
from simulator.problem import Problem, Tile


def flash2(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 1 of 2307.08691. Per head, without padding and masks, it moves 2Nd + 2Nd Tr + N elements.

    It writes the LSE whether that was asked for or not.
    """
    del lse
    p, es, t = problem, problem.itemsize, book.tensors
    heads, rows, w, readers = p.batch * p.heads, p.row_tiles(tile), config.warps, config.readers
    book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    visited = walk(p, tile)
    q_tile, k_tile, v_tile = br * d * es, bc * d * es, bc * dv * es
    ring = config.stages * (k_tile + v_tile) if visited.pairs else 0
    count_packing(book, p, tile, config.heads_together)
    book.launch("flash2", rows * heads, w, config.heads_together, q_tile + ring, partial(p.tiles_of_row, tile=tile))

    tiles, pairs = heads * rows, heads * visited.pairs
    q_bytes = heads * p.len_q * t["q"].row_bytes
    book.add("load_q", "q", hbm_read=q_bytes, sram_write=tiles * q_tile)
    if config.q_in_registers:
        book.add("load_q", "q", sram_read=tiles * q_tile)
    else:
        book.add("scores", "q", sram_read=pairs * q_tile)
    for name, load, use, size in (("k", "load_k", "scores", k_tile), ("v", "load_v", "output", v_tile)):
        book.add(load, name, hbm_read=heads * visited.keys * t[name].row_bytes, sram_write=pairs * size)
        book.add(use, name, sram_read=pairs * readers * size)
        book.distinct(name, "read", t[name].heads * visited.distinct_keys * t[name].row_bytes)
    book.add("store_o", "out", hbm_write=t["out"].nbytes)
    book.add("store_lse", "lse", hbm_write=t["lse"].nbytes)
    book.distinct("q", "read", q_bytes)
    book.distinct("out", "write", t["out"].nbytes)
    book.distinct("lse", "write", t["lse"].nbytes)

    count_masked(book, p, tile, readers=w)
    count_scores(book, p, tile, tiles=tiles, pairs=pairs, warps=w)
    count_state(book, p, "load_q", blocks=tiles, warps=w)
    square, column = tile.rows * tile.cols, tile.rows
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=pairs * 2 * br * bc * (d + dv),
        other=pairs * (passes * square + 4 * column + tile.rows * p.head_dim_v)
        + tiles * (tile.rows * p.head_dim_v + (2 + bool(p.dropout)) * column),
        exp=pairs * (square + column),
    )
