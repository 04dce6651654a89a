"""The case of lessons 03, 04 and 07: FlashAttention-1 requests fewer bytes than standard attention, and takes longer."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from flashlab.lessons.lesson07 import measured
from simulator import Problem
from simulator.names import DType
from simulator.time.prediction import Timeline

TOKENS, HIDDEN = 16384, 2048
"""Of every problem that was timed: tokens of all its sequences, and heads times head dim."""


def problem(head_dim: int, length: int, dtype: DType = "float16") -> Problem:
    """One of the problems that were timed: sequences of one length, without a mask.

    >>> problem(64, 4096).batch, problem(64, 4096).heads
    (4, 32)
    """
    return Problem(
        batch=TOKENS // length, heads=HIDDEN // head_dim, len_q=length, head_dim=head_dim, dtype=dtype, causal=False
    )


def timed() -> list[Problem]:
    """The problems without a mask on which both FlashAttention-1 and standard attention were timed."""
    rows = [row for row in measured()["before_flash2"] if row["algorithm"] == "flash1" and not row["causal"]]
    return [problem(row["head_dim"], row["length"], row["dtype"]) for row in rows]


def took(algorithm: str, p: Problem) -> float:
    """Seconds that an algorithm took on one of these problems, on an H200.

    >>> took("flash1", problem(64, 4096)) > took("standard", problem(64, 4096)) > took("flash2", problem(64, 4096))
    True
    """
    rows: list[dict[str, Any]] = measured()["before_flash2"]
    rows += [{"algorithm": row["peer"] or "flash2", **row} for row in measured()["times"]]
    cell = (algorithm, p.dtype, p.head_dim, p.causal, p.len_q)
    found = [
        row for row in rows if tuple(row[k] for k in ("algorithm", "dtype", "head_dim", "causal", "length")) == cell
    ]
    return found[0]["milliseconds"] / 1e3


def a_round(t: Timeline) -> dict[str, float]:
    """The clocks that a block of FlashAttention-1 spends on each part of one round of its inner loop, by the time model.

    A part lasts from its first event to the next part's first one, so waiting for its results is in it.

    >>> import flashlab as fl
    >>> parts = a_round(fl.timeline("flash1", problem(64, 4096), device="h200"))
    >>> max(parts, key=parts.get)
    'update_o'
    """
    parts = [(name, next(events).start) for name, events in groupby(t.events, lambda event: event.name)]
    begun = [n for n, (name, _) in enumerate(parts) if name == parts[0][0]]
    first = parts[begun[0] : begun[1] + 1]
    return {name: after - start for (name, start), (_, after) in zip(first, first[1:], strict=False)}


STATES = {
    "long_scoreboard": "numbers from L2 or DRAM",
    "short_scoreboard": "numbers from SRAM, or an exponential",
    "barrier": "other warps, at a barrier",
    "wait": "its own last instruction",
    "selected": "nothing: it works",
    "not_selected": "its turn",
    "math_pipe_throttle": "a unit that is busy",
    "mio_throttle": "the queue to SRAM",
    "lg_throttle": "the queue to memory",
    "no_instruction": "its next instruction to be fetched",
}
"""What a warp waits for in a state, as ncu names it (Nsight Compute, "Warp Scheduler States")."""


def waits(algorithm: str, p: Problem) -> list[dict[str, Any]]:
    """The launches of an algorithm on a problem, as a result of kind `waits` has them."""
    cell = (algorithm, p.batch, p.heads, p.len_q, p.head_dim)
    return [
        row
        for row in measured()["waits"]
        if tuple(row[k] for k in ("algorithm", "batch", "heads", "length", "head_dim")) == cell
    ]
