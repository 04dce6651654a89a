"""Blocks over the slots of all SMs. They start in the order of their number, each in the slot that is free first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Runs = Sequence[tuple[float, int]]
"""Blocks in their order, as runs (duration, how many in a row)."""


def finish(runs: Runs, slots: int) -> float:
    """When the last block ends if all slots are free at 0.

    >>> finish([(2.0, 3), (1.0, 2)], 2)
    4.0
    """
    free = [0.0] * slots
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
    return max(free)


def deal(costs: Sequence[float], blocks: int) -> float:
    """When the last of `blocks` persistent blocks ends. Block b takes the units b, b + blocks, and so on, in turn.

    >>> deal([3.0, 1.0, 1.0, 1.0], 2)
    4.0
    """
    return max((sum(costs[b::blocks]) for b in range(min(blocks, len(costs)))), default=0.0)
