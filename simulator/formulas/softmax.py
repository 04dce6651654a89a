"""The counts of the softmax of a vector in closed form, four ways.

A pass over the row fetches it tile by tile into registers, so each pass requests the row once. n is how many tiles the row has.
"""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book, Spec
from simulator.problem import Problem, Tile


def softmax_naive(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 1 of 1805.02867: 2 loads and 1 store per element."""
    del lse
    cols, n = problem.head_dim, _tiles(problem, tile)
    book.launch("softmax_naive", 1, 1, config.heads_together)
    _passes(book, "row_sum", "store")
    book.compute(other=2 * cols + n, exp=2 * cols)


def softmax_safe(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 2 of 1805.02867: 3 loads and 1 store per element."""
    del lse
    cols, n = problem.head_dim, _tiles(problem, tile)
    book.launch("softmax_safe", 1, 1, config.heads_together)
    _passes(book, "row_max", "row_sum", "store")
    book.compute(other=5 * cols + 2 * n, exp=2 * cols)


def softmax_online(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 3 of 1805.02867: 2 loads and 1 store per element. Each tile rescales the sum."""
    del lse
    cols, n = problem.head_dim, _tiles(problem, tile)
    book.launch("softmax_online", 1, 1, config.heads_together)
    _passes(book, "online_pass", "store")
    book.compute(other=5 * cols + 4 * n, exp=2 * cols + n)


def softmax_merge(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Section 3.1 of 1805.02867: n blocks write a pair each, and n blocks fetch all n pairs each."""
    del lse
    cols, n = problem.head_dim, _tiles(problem, tile)
    x = book.tensors["x"]
    pairs = [book.tensor(Spec(name, 1, n, 1, "float32", "workspace", vector=True)) for name in ("m", "l")]
    book.launch("partial", n, 1, config.heads_together)
    book.add("partial", "x", hbm_read=x.nbytes)
    book.distinct("x", "read", x.nbytes)
    for pair in pairs:
        book.add("partial", pair.name, hbm_write=pair.nbytes)
        book.distinct(pair.name, "write", pair.nbytes)
    book.compute(other=3 * cols, exp=cols)

    book.launch("merge", n, 1, config.heads_together)
    for pair in pairs:
        book.add("merge", pair.name, hbm_read=n * pair.nbytes)
        book.distinct(pair.name, "read", pair.nbytes)
    _passes(book, "store")
    book.compute(other=6 * n * n + 2 * cols, exp=2 * n * n + cols)


def _tiles(problem: Problem, tile: Tile) -> int:
    return -(-problem.head_dim // tile.cols)


def _passes(book: Book, *steps: str) -> None:
    """Passes over x, one in each step. The last one stores."""
    x, out = book.tensors["x"], book.tensors["out"]
    for step in steps:
        book.add(step, "x", hbm_read=x.nbytes)
    book.add(steps[-1], "out", hbm_write=out.nbytes)
    book.distinct("x", "read", x.nbytes)
    book.distinct("out", "write", out.nbytes)
