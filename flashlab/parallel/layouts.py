"""Which rows of a sequence a rank holds."""

from __future__ import annotations

import numpy as np

from simulator.dtypes import Array
from simulator.errors import UsageError, among

__all__ = ["LAYOUTS", "check", "chunks", "order", "rows", "seen", "striped"]

LAYOUTS = ("contiguous", "zigzag")
"""`contiguous`: rank r holds the r-th of `ranks` chunks. `zigzag`: it holds chunks r and 2·ranks - 1 - r of 2·ranks."""


def chunks(layout: str, length: int, ranks: int, rank: int, *, argument: str = "length") -> tuple[range, ...]:
    """The rows of `length` that a rank holds, as ranges in the order in which they lie there.

    Under a causal mask later rows see more keys, so with `contiguous` the last rank works most. With `zigzag` each rank has
    an early and a late chunk, and all work alike. It is the order of torch's head-tail balancer. `argument` is what an error
    calls the length. Raises `UsageError` for a length that doesn't divide.

    >>> chunks("contiguous", 16, 4, 1), chunks("zigzag", 16, 4, 1)
    ((range(4, 8),), (range(2, 4), range(12, 14)))
    """
    check(layout, length, ranks, argument=argument)
    if layout == "contiguous":
        n = length // ranks
        return (range(rank * n, (rank + 1) * n),)
    n, last = length // (2 * ranks), 2 * ranks - 1 - rank
    return range(rank * n, (rank + 1) * n), range(last * n, (last + 1) * n)


def check(layout: str, length: int, ranks: int, *, argument: str = "length") -> None:
    """Raise `UsageError` for an unknown layout, and for a length that it can't deal to so many ranks in equal parts."""
    parts = ranks * (1 + (among("layout", layout, LAYOUTS) == "zigzag"))
    if length % parts:
        raise UsageError(argument, length, f"a multiple of {parts}: {layout} deals {parts} chunks to {ranks} ranks")


def rows(layout: str, length: int, ranks: int, rank: int, *, argument: str = "length") -> Array:
    """The same rows one by one, int64 `(length / ranks,)`: `x[:, :, rows(…)]` is what the rank holds of x.

    >>> rows("zigzag", 16, 4, 3).tolist()
    [6, 7, 8, 9]
    """
    return np.concatenate([np.arange(x.start, x.stop) for x in chunks(layout, length, ranks, rank, argument=argument)])


def order(layout: str, length: int, ranks: int, *, argument: str = "length") -> Array:
    """All rows, rank by rank, int64 `(length,)`: `x[order]` deals, and `y[np.argsort(order)]` puts back.

    >>> order("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return np.concatenate([rows(layout, length, ranks, rank, argument=argument) for rank in range(ranks)])


def seen(layout: str, rank: int, of: int, rows: int, keys: int, *, causal: bool) -> tuple[slice, slice, bool] | None:
    """What a rank's rows see of another rank's keys: which rows, which keys, and whether a causal mask is left between these.

    `rows` and `keys` are how many a rank holds; the slices are of those. None where nothing is seen. A zigzag's chunks see each
    other whole or not at all, but those of one rank: so each step of a ring is the same work for all ranks.

    >>> seen("zigzag", 1, 0, 8, 8, causal=True), seen("zigzag", 1, 2, 8, 8, causal=True)
    ((slice(0, 8, None), slice(0, 4, None), False), (slice(4, 8, None), slice(0, 8, None), False))
    >>> seen("contiguous", 1, 2, 8, 8, causal=True)
    """
    every_row, every_key = slice(0, rows), slice(0, keys)
    if not causal or rank == of:
        return every_row, every_key, causal
    if layout == "contiguous":
        return (every_row, every_key, False) if of < rank else None
    return (every_row, slice(0, keys // 2), False) if of < rank else (slice(rows // 2, rows), every_key, False)


def striped(length: int, ranks: int, rank: int, interleave: int = 1) -> Array:
    """The keys that a rank holds of a cache that is striped over ranks, int64: key n lies on rank `n // interleave % ranks`.

    A cache grows by a key at a time, and this keeps ranks within `interleave` keys of one another. Any length will do.

    >>> striped(10, 2, 0, interleave=2).tolist(), striped(10, 2, 1, interleave=2).tolist()
    ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7])
    """
    keys = np.arange(length)
    return keys[keys // interleave % ranks == rank]
