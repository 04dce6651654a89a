"""TMA's descriptors. They tell the copy engine of a Hopper GPU how an array lies. The driver encodes them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from flashlab.run.arrays import View
from simulator.errors import Unavailable
from simulator.problem import FP8, ITEMSIZE

__all__ = ["DESCRIPTOR", "ROW_BYTES", "descriptor", "takes"]

DESCRIPTOR = np.dtype({"names": ["words"], "formats": [("u8", (16,))], "itemsize": 128})
"""`struct TensorMap` of the kernels."""

ROW_BYTES = 128
"""Of a row of a box: the reach of the swizzle."""
_UNUSED = np.zeros((), DESCRIPTOR)[()]
_MOST_STRIDE = 1 << 40


def takes(view: View) -> bool:
    """Can a descriptor describe the array as it lies? Strides must be positive, and under 2^40 bytes."""
    return all(n <= 1 or 0 < stride < _MOST_STRIDE for n, stride in zip(view.shape[:3], view.strides, strict=False))


def descriptor(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, rows: int) -> Any:
    """Descriptor of a (batch, head, row, column) array for boxes of `rows` rows and 128 bytes, as a NumPy scalar.

    `strides` in bytes, multiples of 16, columns contiguous; float16, bfloat16 or float8_e4m3fn. An array without elements
    gets a descriptor that must not be used.
    """
    if 0 in shape:
        return _UNUSED
    driver = _driver()
    batch, heads, length, columns = shape
    # the stride of an axis of one element is never used, but checked
    reach = [stride if n > 1 else 16 for n, stride in zip(shape[:3], strides, strict=False)]
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{'UINT8' if dtype == FP8 else dtype.upper()}"),
        4,
        pointer,
        [driver.cuuint64_t(n) for n in (columns, length, heads, batch)],
        [driver.cuuint64_t(stride) for stride in reversed(reach)],
        [driver.cuuint32_t(n) for n in (ROW_BYTES // ITEMSIZE[dtype], rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {status.name} for shape {shape}, strides {strides}, boxes of {rows} rows"
        )
    return np.array(([int(word) for word in encoded.opaque],), DESCRIPTOR)[()]


@functools.cache
def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise Unavailable("TMA's descriptors need the driver's Python bindings: pip install cuda-bindings") from None
