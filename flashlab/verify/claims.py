"""Can a time be true? From cold inputs no kernel is faster than the memory that it has to read."""

from __future__ import annotations

import math

from simulator import Device, Problem, UsageError
from simulator.names import DeviceName

__all__ = ["least_seconds", "refused"]


def least_seconds(problem: Problem, device: DeviceName | Device = "h100") -> float:
    """The least time that attention can take from cold inputs, in seconds: the compulsory bytes over the rate of the DRAM.

    These are q, and the keys and values that some query sees, each read once; and as much of out as doesn't fit the L2, where
    it may stay for a while. K and V count nothing where a mask may hide them or requests may share their pages.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=32, len_q=1, len_kv=100_000, head_dim=128, dtype="float16")
    >>> round(least_seconds(p) * 1e6)
    489
    """
    p, on = problem, Device.named(device)
    item = 1 if p.quantized else p.itemsize
    rows = keys = 0
    for one, n in p.different.items():
        rows += n * one.len_q
        if one.len_q and p.mask is None and p.page_size is None:
            seen = one.keys_of_rows(0, one.len_q - 1)
            keys += n * len(seen)
    heads = p.batch * p.heads
    read = heads * rows * p.head_dim * p.itemsize + p.batch * p.kv_heads * keys * (p.head_dim + p.head_dim_v) * item
    written = heads * rows * p.head_dim_v * p.itemsize
    return (read + max(0, written - on.l2)) / on.bandwidth


def refused(problem: Problem, seconds: float, device: DeviceName | Device = "h100") -> str:
    """Why a claimed time from cold inputs can't be true, or "" if it can. Raises `UsageError` for what is no time."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("seconds", seconds, "a time of at least 0 seconds")
    least, on = least_seconds(problem, device), Device.named(device)
    if seconds >= least:
        return ""
    return (
        f"{seconds * 1e6:.4g} µs can't be true from cold inputs: the bytes that must be read and written take {least * 1e6:.4g} µs "
        f"of {on.title or on.name}'s memory"
    )
