"""Arrays as callers hand them over, the storage dtypes, and rounding to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from simulator.errors import Said, UsageError

Array = np.ndarray[Any, np.dtype[Any]]

foreign: Callable[[str, Any], Array] | None = None
"""Makes NumPy's array of another framework's. `flashlab` puts its door here; this layer knows no framework."""


def as_numpy(name: str, x: Any) -> Array:
    """An argument as NumPy's array. Raises `UsageError` for anything that is no array, and for a masked one.

    >>> as_numpy("q", [1, 2])
    Traceback (most recent call last):
        ...
    simulator.errors.UsageError: q = 'list': expected an array of NumPy...
    """
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(name, Said("masked array"), "an array whose values all count: its mask would be lost")
    if isinstance(x, np.ndarray):
        return cast("Array", x)
    if foreign is None:
        raise UsageError(name, type(x).__name__, "an array of NumPy")
    return foreign(name, x)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype for a storage dtype. Those of bfloat16 and float8_e4m3fn come from ml_dtypes."""
    if dtype in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes  # imported for these dtypes only, because the import takes time

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


def round_to(x: Array, dtype: str) -> Array:
    """float32 values rounded to the nearest value of a storage dtype, ties to even. The result is float32.

    >>> float(round_to(np.array([1.0001], np.float32), "float16")[0])
    1.0
    """
    if dtype == "float32":
        return x
    flat = x.ravel(order="K")
    if dtype == "float16" and np.dot(flat, flat) < 65504.0**2:  # nothing overflows or is NaN: there is a quick way
        # Adding 1.5 * 2^(e + 13), where e is the exponent of x, rounds x to float16's step of 2^(e - 10). That step is
        # never below 2^-24, so e is taken as at least -14 (113 with float32's bias).
        bits = flat.view(np.uint32) & np.uint32(0x7F800000)
        np.maximum(bits, np.uint32(113 << 23), out=bits)
        bits += np.uint32((13 << 23) | 0x400000)
        rounded = np.empty_like(x)
        into = rounded.ravel(order="K")
        np.add(flat, bits.view(np.float32), out=into)
        into -= bits.view(np.float32)
        return rounded
    with np.errstate(over="ignore"):
        return x.astype(numpy_dtype(dtype)).astype(np.float32)
