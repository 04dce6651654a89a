"""The counts of FlashAttention-3 in closed form. They hold for every rung: rungs differ in time alone."""

from __future__ import annotations

from functools import partial

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.formulas.mask import count_masked, count_packing
from simulator.formulas.scores import count_scores
from simulator.formulas.walk import walk
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import MBARRIERS, PANEL, backwards


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block: Q, the ring of K and V, the mbarriers."""
    d, dv = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL)
    rows, cols = round_up(tile.rows, 16), round_up(tile.cols, 16)
    return (rows * d + stages * cols * (d + dv)) * problem.itemsize + 4 * MBARRIERS


def flash3(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """2Nd + 2Nd Tr + N elements per head, as in FlashAttention-2. But TMA's boxes count whole, with their rows outside.

    It writes the LSE whether that was asked for or not.
    """
    del lse
    p, es, t = problem, problem.itemsize, book.tensors
    heads, rows, readers = p.batch * p.heads, p.row_tiles(tile), config.consumers
    book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
    visited = walk(p, tile)
    count_packing(book, p, tile, config.heads_together)
    book.launch(
        book.algorithm,
        rows * heads,
        config.warps,
        config.heads_together,
        sram_bytes(p, tile, config.stages),
        partial(backwards, p, tile),
    )

    tiles, pairs = heads * rows, heads * visited.pairs
    count_draws(book, config, tiles)
    if p.lengths is not None:  # rows of the next sequence are cleared
        book.add("load_q", "q", sram_write=heads * (rows * tile.rows - p.len_q) * boxes * es)
        book.add("load_v", "v", sram_write=heads * (visited.pairs * tile.cols - visited.keys) * boxes_v * es)
    book.add("load_q", "q", hbm_read=tiles * tile.rows * boxes * es, sram_write=tiles * br * boxes * es)
    book.add("scores", "q", sram_read=pairs * br * d * es)
    for name, load, use, width, box in (("k", "load_k", "scores", d, boxes), ("v", "load_v", "output", dv, boxes_v)):
        book.add(load, name, hbm_read=pairs * tile.cols * box * es, sram_write=pairs * bc * box * es)
        book.add(use, name, sram_read=pairs * readers * bc * width * es)
        book.distinct(name, "read", t[name].heads * visited.distinct_keys * t[name].row_bytes)
    book.add("store_o", "out", hbm_write=t["out"].nbytes)
    book.add("store_lse", "lse", hbm_write=t["lse"].nbytes)
    book.distinct("q", "read", t["q"].nbytes)
    book.distinct("out", "write", t["out"].nbytes)
    book.distinct("lse", "write", t["lse"].nbytes)

    count_masked(book, p, tile, readers=4 * readers + 1)
    count_scores(book, p, tile, tiles=tiles, pairs=pairs, warps=4 * readers)
    count_state(book, p, "load_q", blocks=tiles, warps=4 * readers)
    square, column = tile.rows * tile.cols, tile.rows
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=pairs * 2 * br * bc * (d + dv),
        other=pairs * (passes * square + 4 * column + tile.rows * p.head_dim_v)
        + tiles * (tile.rows * p.head_dim_v + (2 + bool(p.dropout)) * column),
        exp=pairs * (square + column),
    )


def count_draws(book: Book, config: Config, tiles: int) -> None:
    """Blocks that draw their row tiles count up for each, and tell the warps that multiply by a number in SRAM."""
    count_counter(book, config, tiles, "load_q")
    if config.dynamic:
        book.add("load_q", "number", sram_write=4 * tiles, sram_read=4 * tiles * 4 * config.consumers)


def count_counter(book: Book, config: Config, tiles: int, step: str) -> None:
    """The counter from which blocks draw their tiles, if they do."""
    if config.dynamic:
        book.tensor(Spec("drawn", 1, 1, 1, "int32", "workspace", vector=True, zeros=True, shared=True))
        book.add(step, "drawn", hbm_atomic=4 * tiles)
        for way in ("read", "write"):
            book.distinct("drawn", way, 4 * (tiles > 0))
