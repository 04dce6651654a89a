"""The counts of the backward pass for Hopper with dQ in one order, in closed form."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book
from simulator.formulas.flash2_backward_deterministic import count_turns
from simulator.formulas.flash3_backward import count_after, count_main
from simulator.problem import Problem, Tile


def flash3_backward_deterministic(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """`flash3_backward`, and what the order takes: 4 bytes, read once and counted up once, for each pair of tiles that is
    visited, and for each block a number that is drawn and told.

    A wait counts the one read that ends it. How many reads come before is chance, and no property of the algorithm.
    """
    del lse
    seen = count_main(book, problem, tile, config, in_turn=True)
    count_turns(book, problem, tile, seen)
    count_after(book, problem, tile, config)
