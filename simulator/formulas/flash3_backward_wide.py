"""The counts of the backward pass for wide heads in closed form, launch by launch."""

from __future__ import annotations

from functools import partial

from simulator.config import WORK, Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.flash2_backward import count_delta, count_sinks
from simulator.formulas.walk import walk
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import MBARRIERS, PANEL
from simulator.programs.flash3_backward_wide import MESSAGE, held, queries, v_stages


def sram_of_keys(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block for dK and dV: K_j and V_j, the stages of Q_i, dO_i, P, LSE and D, the mbarriers."""
    d, dv, cols = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL), round_up(tile.cols, 16)
    in_float32 = stages * cols * cols + 2 * round_up(stages * tile.cols, 16) + MBARRIERS
    return (1 + stages) * cols * (d + dv) * problem.itemsize + 4 * in_float32


def sram_of_queries(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block for dQ: Q_i and dO_i, the stages of K_j and V_j, the mbarriers."""
    d, dv = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL)
    rows, cols = round_up(tile.rows, 16), round_up(tile.cols, 16)
    ring = cols * (stages * d + v_stages(problem, stages) * dv)
    return (rows * (d + dv) + ring) * problem.itemsize + 4 * MBARRIERS


def flash3_backward_wide(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """In elements per query head: for dK and dV 2Nd + Tc (2Nd + 2N) read and 2Nd written, for dQ 2Nd + 2N + Tr 2Nd and Nd.

    TMA's boxes count whole, with their rows outside. Before, D takes 2Nd read and N written.
    """
    del lse
    heads = problem.batch * problem.heads
    book.tensor(Spec("delta", heads, problem.len_q, 1, "float32", "workspace", vector=True))
    count_delta(book, "flash3_backward_wide", problem, tile.cols)
    count_keys(book, problem, tile, config)
    count_queries(book, problem, tile, config)
    count_sinks(book, "flash3_backward_wide", problem)


def count_message(book: Book, problem: Problem, config: Config, step: str, blocks: int) -> None:
    """What one thread of a block tells all warps in a ragged batch."""
    if problem.lengths is not None:
        book.add(step, WORK, sram_write=blocks * MESSAGE, sram_read=blocks * MESSAGE * config.warps)


def count_keys(book: Book, problem: Problem, tile: Tile, config: Config) -> None:
    """The launch for dK and dV."""
    p, es, t, square = problem, problem.itemsize, book.tensors, queries(tile)
    heads, visits = p.batch * p.heads, p.batch * p.kv_heads * p.key_tiles(tile)

    # a key tile sees those queries that a row tile of the transposed problem sees as keys
    seen = walk(p.transposed, square)
    side, d, dv = padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
    pairs, rows = heads * seen.pairs, heads * seen.keys
    visible = partial(p.transposed.tiles_of_row, tile=square)
    peak = sram_of_keys(p, tile, config.stages)
    together, ragged = config.heads_together, p.lengths is not None
    book.launch("flash3_backward_wide_dkv", visits, config.warps, together, peak, visible, along="len_kv")
    count_message(book, p, config, "load_kv", visits)
    for name, width, box, step in (("k", d, boxes, "scores"), ("v", dv, boxes_v, "dp")):
        if visits:
            book.add("load_kv", name, hbm_read=visits * tile.cols * box * es, sram_write=visits * side * box * es)
            book.add("load_kv", name, sram_read=visits * side * held(width) * es)
            book.distinct(name, "read", t[name].nbytes)
            book.add("store_dkv", f"d{name}", hbm_write=t[f"d{name}"].nbytes)
            book.distinct(f"d{name}", "write", t[f"d{name}"].nbytes)
        book.add(step, name, sram_read=pairs * side * (width - held(width)) * es)
    for load, use, name, vector, width, box, products in (
        ("load_q", "exp", "q", "lse", d, boxes, ("scores", "dk")),
        ("load_do", "load_do", "dout", "delta", dv, boxes_v, ("dp", "dv")),
    ):
        book.add(load, name, hbm_read=pairs * tile.cols * box * es, sram_write=pairs * side * box * es)
        book.add(load, name, sram_write=ragged * (pairs * tile.cols - rows) * box * es)  # cleared
        book.add(load, vector, hbm_read=rows * 4, sram_write=pairs * side * 4)
        book.add(use, vector, sram_read=pairs * 4 * side * 4)
        book.distinct(name, "read", heads * seen.distinct_keys * t[name].row_bytes)
        book.distinct(vector, "read", heads * seen.distinct_keys * 4)
        for step in products:
            book.add(step, name, sram_read=pairs * side * width * es)
    book.add("exp", "p", sram_write=pairs * side * side * 4)
    book.add("ds", "p", sram_read=pairs * side * side * 4)
    book.compute(
        matmul=pairs * 2 * side * side * 2 * (d + dv),
        other=pairs * (3 + (p.scale != 1.0)) * tile.cols**2 + visits * tile.cols * p.head_dim,
        exp=pairs * tile.cols**2,
    )


def count_queries(book: Book, problem: Problem, tile: Tile, config: Config) -> None:
    """The launch for dQ."""
    p, es, t = problem, problem.itemsize, book.tensors
    heads, kv_heads = p.batch * p.heads, p.batch * p.kv_heads
    seen, visits = walk(p, tile), heads * p.row_tiles(tile)
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
    pairs, readers = heads * seen.pairs, config.readers
    peak = sram_of_queries(p, tile, config.stages)
    visible = partial(p.tiles_of_row, tile=tile)
    book.launch("flash3_backward_wide_dq", visits, config.warps, config.heads_together, peak, visible)
    if not visits:
        return
    count_message(book, p, config, "load_q", visits)
    cleared = (pairs * tile.cols - heads * seen.keys) * (p.lengths is not None)
    for load, name, vector, box in (("load_q", "q", "lse", boxes), ("load_do", "dout", "delta", boxes_v)):
        book.add(load, name, hbm_read=visits * tile.rows * box * es, sram_write=visits * br * box * es)
        book.add(load, vector, hbm_read=t[vector].nbytes)
        book.distinct(name, "read", t[name].nbytes)
        book.distinct(vector, "read", t[vector].nbytes)
    for load, name, box in (("load_k", "k", boxes), ("load_v", "v", boxes_v)):
        book.add(load, name, hbm_read=pairs * tile.cols * box * es, sram_write=(pairs * bc + cleared) * box * es)
        book.distinct(name, "read", kv_heads * seen.distinct_keys * t[name].row_bytes)
    for step, left, right, width in (("scores", "q", "k", d), ("dp", "dout", "v", dv)):
        book.add(step, left, sram_read=pairs * br * width * es)
        book.add(step, right, sram_read=pairs * readers * bc * width * es)
    book.add("dq", "k", sram_read=pairs * readers * bc * d * es)
    book.add("store_dq", "dq", hbm_write=t["dq"].nbytes)
    book.distinct("dq", "write", t["dq"].nbytes)
    book.compute(
        matmul=pairs * 2 * br * bc * (2 * d + dv),
        other=pairs * (3 + (p.scale != 1.0)) * tile.rows * tile.cols + visits * tile.rows * p.head_dim,
        exp=pairs * tile.rows * tile.cols,
    )
