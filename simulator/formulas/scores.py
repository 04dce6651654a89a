"""The counts of what a kernel does to scores beside scaling and masking them: soft cap, ALiBi, sinks."""

from __future__ import annotations

from simulator.counts import Book
from simulator.problem import Problem, Tile


def count_scores(book: Book, problem: Problem, tile: Tile, *, tiles: int, pairs: int, warps: int) -> None:
    """Of `tiles` row tiles that walk `pairs` key tiles in all. Each of `warps` warps requests its head's numbers."""
    p = problem
    for step, name, has in (("load_q", "alibi_slopes", p.alibi), ("normalize", "sinks", p.sinks)):
        if has and tiles:
            book.add(step, name, hbm_read=4 * warps * tiles)
            book.distinct(name, "read", 4 * p.heads)
    # a cap divides, takes the tanh and multiplies; ALiBi multiplies a distance and adds
    per_score = 3 * (p.soft_cap is not None) + 2 * p.alibi
    book.compute(other=pairs * per_score * tile.rows * tile.cols)
    if p.sinks:  # the new maximum, two differences to it, l's product and sum, and the accumulator's product
        book.compute(other=tiles * tile.rows * (5 + p.head_dim_v), exp=tiles * 2 * tile.rows)
