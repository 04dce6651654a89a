"""The counts of dropout: the seed and the offset."""

from __future__ import annotations

from simulator.counts import Book
from simulator.problem import Problem


def count_state(book: Book, problem: Problem, step: str, *, blocks: int, warps: int) -> None:
    """Each of `warps` warps of each block requests 16 bytes."""
    if problem.dropout and blocks:
        nbytes = 8 * problem.rng_words
        book.add(step, "rng_state", hbm_read=nbytes * warps * blocks)
        book.distinct("rng_state", "read", nbytes)
