"""Lesson 14: the judge of a zigzag, which is a class that deals rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlab.lessons.class_exercise import Found
from flashlab.lessons.histories import raised


def _wrong(kind: str, step: str, message: str) -> Found:
    return Found(kind, message, step)


_DEALT = ((16, 4), (36, 3), (512, 8), (6, 1))
"""Rows, and ranks that share them."""


def zigzag(answer: Any) -> Found:
    """Rows that all ranks have as many of and work as much on; and launches that have each visible pair once."""
    try:
        dealer = answer()
        for n, ranks in _DEALT:
            rows = [dealer.rows(n, ranks, rank) for rank in range(ranks)]
            found = _rows(n, ranks, rows)
            for rank in range(ranks) if found is None else ():
                for of in range(ranks):
                    found = found or _launch(n, ranks, rank, of, rows, dealer.seen(n, ranks, rank, of))
            if found is not None:
                return found
    except Exception as error:  # whatever a learner's class raises
        return _wrong("crash", "rows", raised(error, answer))
    n, ranks = 512, 8
    pairs = [_pairs(rank, n, ranks, dealer) for rank in range(ranks)]
    return Found(
        "passed", f"each of {ranks} ranks computes {pairs[0]:,} of {sum(pairs):,} pairs, {n // ranks} rows each"
    )


def _pairs(rank: int, n: int, ranks: int, dealer: Any) -> int:
    return sum(row + 1 for row in dealer.rows(n, ranks, rank))


def _numbers(x: Any) -> bool:
    return isinstance(x, list | tuple | range) and all(isinstance(row, int | np.integer) for row in x)  # pyright: ignore


def _rows(n: int, ranks: int, rows: Sequence[Any]) -> Found | None:
    """Has each row one rank, and each rank as many rows, as much work, and two pieces at most?"""
    said = f"{n} rows, {ranks} ranks"
    owner = dict[int, int]()
    for rank, own in enumerate(rows):
        if not _numbers(own):
            return _wrong("usage", "rows", f"rows returns {type(own).__name__}: a list of numbers is asked ({said})")
        for row in own:
            if not 0 <= row < n:
                return _wrong("asked", "rows", f"rank {rank} has row {row}, which isn't there ({said})")
            if row in owner:
                return _wrong("asked", "rows", f"rank {rank} has row {row}, and so has rank {owner[row]} ({said})")
            owner[row] = rank
    missing = next((row for row in range(n) if row not in owner), None)
    if missing is not None:
        return _wrong("asked", "rows", f"nobody has row {missing} ({said})")
    sizes = [len(own) for own in rows]
    if max(sizes) != min(sizes):
        return _wrong(
            "asked",
            "rows",
            f"rank {sizes.index(max(sizes))} has {max(sizes)} rows, and rank {sizes.index(min(sizes))} {min(sizes)} ({said})",
        )
    work = [sum(row + 1 for row in own) for own in rows]
    if max(work) > 1.01 * min(work):
        busy, idle = work.index(max(work)), work.index(min(work))
        return _wrong(
            "asked", "rows", f"rank {busy} has {max(work) / min(work):.3g} times the pairs of rank {idle} ({said})"
        )
    for rank, own in enumerate(rows):
        steps = np.diff(np.asarray(own, np.int64))
        if (steps < 0).any():
            why = "in its own square the causal mask needs them in order"
            return _wrong("asked", "rows", f"the rows of rank {rank} don't rise: {why} ({said})")
        if (pieces := 1 + int((steps > 1).sum())) > 2:
            why = "a launch computes rows that lie in one piece"
            return _wrong(
                "asked", "rows", f"the rows of rank {rank} lie in {pieces} pieces, and two are enough: {why} ({said})"
            )
    return None


def _launch(n: int, ranks: int, rank: int, of: int, rows: list[Any], launch: Any) -> Found | None:
    """Are the pairs of a launch those that a causal mask leaves, and no others?"""
    said = f"{n} rows, {ranks} ranks"
    mine, theirs = np.asarray(rows[rank]), np.asarray(rows[of])
    shown = np.zeros((len(mine), len(theirs)), bool)
    if launch is not None:
        try:
            some, keys, causal = launch
            high, wide = shown[some, keys].shape
            shown[some, keys] = np.tri(high, wide, wide - high, dtype=bool) if causal else True
        except (TypeError, ValueError, IndexError):
            return _wrong(
                "usage",
                "seen",
                f"seen returns {launch!r}: (rows, keys, causal) is asked, two slices and yes or no ({said})",
            )
    due = theirs[None, :] <= mine[:, None]
    whose = f"the keys of rank {of}, {'an earlier' if of < rank else 'a later'} rank" if of != rank else "its own keys"
    for i, j in np.argwhere(shown != due)[:1]:
        pair = f"row {mine[i]} {'sees' if due[i, j] else 'must not see'} key {theirs[j]}"
        what = "and no launch has that pair" if due[i, j] else "and the launch has that pair"
        return _wrong("numbers", "seen", f"rank {rank} and {whose}: {pair}, {what} ({said})")
    return None
