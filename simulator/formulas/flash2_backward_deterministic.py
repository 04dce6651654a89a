"""The counts of FlashAttention-2's backward pass with dQ in one order, in closed form."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book, Spec
from simulator.formulas.flash2_backward import count_before, count_convert, count_main, count_sinks
from simulator.formulas.walk import Walk
from simulator.problem import Problem, Tile


def flash2_backward_deterministic(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """`flash2_backward`, and what the order takes: 4 bytes, read once and counted up once, for each pair of tiles that is
    visited, and for each block a number that is drawn, told and read by each warp.

    A wait counts the one read that ends it. How many reads come before is chance, and no property of the algorithm.
    """
    del lse
    p, kv_heads, keys = problem, problem.batch * problem.kv_heads, problem.key_tiles(tile)
    count_before(book, p, tile)
    book.tensor(Spec("drawn", kv_heads, 1, 1, "int32", "workspace", vector=True, zeros=True))
    book.tensor(Spec("number", kv_heads, p.len_kv, 1, "int32", "workspace", vector=True))
    book.tensor(Spec("turns", p.batch * p.heads, p.len_q, 1, "int32", "workspace", vector=True, zeros=True))
    seen = count_main(book, "flash2_backward_deterministic", p, tile, config)
    blocks = kv_heads * keys
    book.add("draw", "drawn", hbm_atomic=4 * blocks)
    book.add("draw", "number", hbm_write=4 * blocks, hbm_read=4 * blocks * config.warps)
    for way in ("read", "write"):
        book.distinct("drawn", way, 4 * kv_heads if keys else 0)
        book.distinct("number", way, 4 * blocks)
    count_turns(book, p, tile, seen)
    count_convert(book, "flash2_backward", tile.rows)
    count_sinks(book, "flash2_backward", p)


def count_turns(book: Book, problem: Problem, tile: Tile, seen: Walk) -> None:
    """What the main launch reads and counts up in front of its additions and behind them. `seen` is what its key tiles visit."""
    heads = problem.batch * problem.heads
    pairs = heads * seen.pairs
    book.add("dq", "turns", hbm_read=4 * pairs, hbm_atomic=4 * pairs)
    for way in ("read", "write"):
        book.distinct("turns", way, 4 * heads * -(-seen.distinct_keys // tile.rows))
