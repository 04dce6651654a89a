"""Seed and offset of dropout, as callers say them: by numbers, or by an array that kernels read when they run."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.problem import FIELDS

__all__ = ["state_of"]

_LIMIT = 1 << 63


def _is_zero(x: Any) -> bool:
    return isinstance(x, int | np.integer) and bool(x == 0)


def state_of(dropout: Any, seed: Any, offset: Any, rng_state: Any) -> Array | None:
    """Seed and offset as NumPy's array, or None where `rng_state` has them, or nothing is dropped.

    Dropout without a seed is refused: a seed of our choice would drop the same weights in each call. Raises `UsageError`.

    >>> state_of(0.1, 7, 0, None), state_of(None, None, 0, None)
    (array([7, 0]), None)
    """
    if not FIELDS["dropout"].checked(dropout):
        for name, value, none in (("seed", seed, None), ("offset", offset, 0), ("rng_state", rng_state, None)):
            if value is not None and (none is None or not _is_zero(value)):
                said = value if name != "rng_state" else type(value).__name__
                raise UsageError(name, said, f"{none} without dropout")
        return None
    if rng_state is not None:
        if seed is not None:
            raise UsageError("seed", seed, "None with rng_state, which has seed and offset")
        if not _is_zero(offset):
            raise UsageError("offset", offset, "0 with rng_state, which has seed and offset")
        return None
    if seed is None:
        raise UsageError("seed", None, "an integer with dropout, or rng_state: equal seeds and offsets drop the same")
    return np.array([_integer("seed", seed), _integer("offset", offset)], np.int64)


def _integer(name: str, value: Any) -> int:
    """An integer of 64 bits. Raises `UsageError`."""
    accepted = "an integer from -2^63 to 2^63 - 1"
    try:
        number = index(value)
    except TypeError:
        raise UsageError(name, value, accepted) from None
    if isinstance(value, bool) or not -_LIMIT <= number < _LIMIT:
        raise UsageError(name, value, accepted)
    return number
