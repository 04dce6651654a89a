"""The counts of standard attention with the two-pass online softmax, in closed form."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book
from simulator.formulas.standard import row_softmax, three_launches
from simulator.problem import Problem, Tile


def two_pass_softmax(book: Book, problem: Problem, config: Config, *, lse: bool) -> None:
    """Two passes: 2 reads and 1 write per element of S."""
    passes = {"online_pass": 1, "store_p": 1}
    row_softmax(book, problem, config, name="online_softmax", passes=passes, other=(5, 4), exp=(2, 1), lse=lse)


def online_softmax(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """The counts of `standard`, but the middle launch reads S twice, not three times."""
    three_launches(book, problem, tile, config, two_pass_softmax, lse=lse)
