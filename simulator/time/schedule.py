"""Blocks over the slots of all SMs. They start in the order of their number, each in the slot that is free first.

Their number doesn't matter: a run of equal blocks is dealt out in rounds, and so are parts that come again and again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np

Runs = Sequence[tuple[float, int]]
"""Blocks in their order, as runs (duration, how many in a row)."""
Parts = Sequence[tuple[Runs, int]]
"""Runs, and how often they come in a row."""
STEPS = 1 << 15
"""About how many blocks of a part are dealt out one by one. Of a part that comes more often than that, the middle is taken to
fill all slots alike: no slot is ever idle in it."""


def finish(parts: Parts, slots: int) -> float:
    """When the last block ends if all slots are free at 0.

    >>> finish([([(2.0, 3), (1.0, 2)], 1)], 2)
    4.0
    """
    free: list[float] = [0.0] * slots
    for runs, times in parts:
        steps = sum(min(n, 3 * slots) for _, n in runs)
        dealt = min(times, 2 * max(1, STEPS // max(1, steps)))
        for _ in range(dealt // 2):
            free = _taken(free, runs)
        between = (times - dealt) * sum((duration * n for duration, n in runs), 0.0) / slots
        free = [time + between for time in free]
        for _ in range(dealt - dealt // 2):
            free = _taken(free, runs)
    return max(free)


def _taken(free: list[float], runs: Runs) -> list[float]:
    """When each slot is free, as a heap, after it has taken its blocks."""
    slots = len(free)
    for duration, count in runs:
        if duration <= 0 or count <= 0:
            continue
        # In some rounds every slot takes one block of this duration, in whatever order. Take them all at once.
        rounds = count // slots - 2
        if rounds > 0 and (rounds := rounds - int((max(free) - min(free)) / duration)) > 0:
            free = [time + rounds * duration for time in free]
            count -= rounds * slots
            heapq.heapify(free)
        for _ in range(count):
            heapq.heapreplace(free, free[0] + duration)
    return free


def deal(parts: Parts, blocks: int) -> float:
    """When the last of `blocks` persistent blocks ends. Block b takes the works b, b + blocks, and so on, in turn.

    >>> deal([([(3.0, 1), (1.0, 3)], 1)], 2)
    4.0
    """
    ends, at = np.zeros(blocks), 0
    for runs, times in parts:
        once, further = _dealt(runs, blocks)
        # the n-th time it begins with block `at + n further`: after some times with the first one's again
        again = blocks // gcd(further, blocks)
        often, rest = divmod(times, again)
        for n in range(min(times, again)):
            ends += float(often + (n < rest)) * np.roll(once, at + n * further)
        at = (at + times * further) % blocks
    return float(ends.max())


def _dealt(runs: Runs, blocks: int) -> tuple[np.ndarray[Any, np.dtype[np.float64]], int]:
    """How long each block has worked at the end if block 0 begins, and which one is next."""
    ends, at = np.zeros(blocks), 0
    for duration, count in runs:
        rounds, rest = divmod(count, blocks)
        ends += rounds * duration
        ends[at : at + rest] += duration
        ends[: max(0, at + rest - blocks)] += duration
        at = (at + rest) % blocks
    return ends, at
