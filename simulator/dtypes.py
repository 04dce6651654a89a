"""The storage dtypes, and rounding to them."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype of a storage dtype; bfloat16 comes from ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes  # only for bfloat16: it costs import time

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def round_to(x: Array, dtype: str) -> Array:
    """float32 values rounded to the nearest of a storage dtype, ties to even, as float32 again.

    >>> float(round_to(np.array([1.0001], np.float32), "float16")[0])
    1.0
    """
    if dtype == "float32":
        return x
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(x), x, rounded.view(np.float32))
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)
