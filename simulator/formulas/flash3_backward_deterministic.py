"""The counts of the backward pass for Hopper with dQ in one order, in closed form."""

from __future__ import annotations

from math import gcd

from simulator.config import Config
from simulator.counts import Book, Spec
from simulator.formulas.flash2_backward import count_delta
from simulator.formulas.flash2_backward_deterministic import count_turns
from simulator.formulas.flash3_backward import count_after, count_main, count_workspaces
from simulator.formulas.walk import tiles_of_rows, weighted_rows
from simulator.problem import Problem, Tile


def visited(problem: Problem, tile: Tile) -> tuple[int, int]:
    """How many row tiles of a head visit a key tile, and how many visit several."""
    few = weighted_rows(problem, tile, tile.cols // gcd(tile.cols, tile.rows))
    first, stop = tiles_of_rows(problem, tile, few.rows)
    return few.sum(stop - first > 0), few.sum(stop - first > 1)


def flash3_backward_deterministic(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """`flash3_backward`, but the first key tile of some queries writes its part of dQ. The last one reads the sum and writes dQ.

    The order takes 4 bytes, read once and counted up once, for each pair of tiles that is visited, and for each block a number
    that is drawn and told. A wait counts the one read that ends it. How many reads come before is chance, and no property of the
    algorithm.
    """
    del lse
    p, t = problem, book.tensors
    heads, tiles = p.batch * p.heads, p.row_tiles(tile)
    seen = count_workspaces(book, problem, tile, config)
    some, several = (heads * n for n in visited(p, tile))

    count_delta(book, "flash3_backward", problem, tile.rows, zeros=False)
    book.tensor(Spec("turns", heads, p.len_q, 1, "int32", "workspace", vector=True))
    unseen = heads * (p.len_q - seen.distinct_keys) * t["dq"].row_bytes
    for name, nbytes in (("turns", 4 * heads * tiles), ("dq", unseen)):
        book.add("zero_dq", name, hbm_write=nbytes)
        book.distinct(name, "write", nbytes)

    count_main("flash3_backward", book, problem, tile, config, seen, in_turn=True)
    count_turns(book, problem, tile, seen)
    pairs = heads * seen.pairs
    part, cols = tile.rows * t["dq_sum"].row_bytes, t["dq_sum"].cols
    book.add("dq", "dq_sum", hbm_write=several * part, hbm_read=several * part)
    book.add("dq", "dq_sum", hbm_atomic=(pairs - some - several) * part)
    book.add("dq", "dq", hbm_write=heads * seen.distinct_keys * t["dq"].row_bytes)
    book.add("load_q", "place", sram_write=4 * pairs)
    book.add("dq", "place", sram_read=4 * pairs * 4 * config.consumers)
    for way in ("read", "write"):
        book.distinct("dq_sum", way, several * part)
    book.distinct("dq", "write", heads * seen.distinct_keys * t["dq"].row_bytes)
    book.compute(other=(some + several) * tile.rows * cols)
    count_after(book, problem, config)
