"""Tensor maps (TMA descriptors) for the emulator, by the rules of a GPU's `cuTensorMapEncodeTiled`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.errors import UsageError

__all__ = ["UNUSED", "tensor_map"]

_MAGIC = 0x50414D524F534E54  # the bytes "TNSORMAP"
_MOST_DIMENSIONS = 5
_MOST_BOX = 256
_MAP = np.dtype(
    [("magic", "u8"), ("base", "u8"), ("stride", "i8", (4,)), ("extent", "u4", (5,)), ("box", "u4", (5,)),
     ("element_bytes", "u4"), ("rank", "u4"), ("swizzle", "u4"), ("unused", "u1", (28,))]
)  # fmt: skip
"""The layout of `struct TensorMap` in kernels_cu/emulator/hopper.h."""

UNUSED = bytes(_MAP.itemsize)
"""Stands in for the descriptor of an array without elements. A copy by it is a finding."""


def tensor_map(
    pointer: int,
    itemsize: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: int = 128,
) -> bytes:
    """The 128-byte descriptor of an array, by which a kernel on the emulator copies the array box by box.

    `pointer` is the array's address. All sequences go from the innermost dimension outwards: `extents` and `box` are in
    elements of `itemsize` bytes, `strides` in bytes, without the innermost dimension's. `swizzle` is the width of the
    swizzle's pattern in bytes (128, 64, 32, or 0 for none); a box's rows must be as wide.

    Raises `UsageError` for what a GPU's copy engine (TMA) would not take.

    >>> len(tensor_map(4096, 2, (64, 100), (128,), (64, 32)))
    128
    """
    rank = len(extents)
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise UsageError("extents", tuple(extents), f"1 to {_MOST_DIMENSIONS} of them")
    if len(strides) != rank - 1 or len(box) != rank:
        raise UsageError("strides, box", (tuple(strides), tuple(box)), f"{rank - 1} and {rank} of them, as extents")
    if pointer % 16:
        raise UsageError("pointer", hex(pointer), "a multiple of 16")
    if min(extents) < 1 or max(extents) > 1 << 32:
        raise UsageError("extents", tuple(extents), "1 to 2^32 each")
    if any(stride % 16 or not 0 < stride < 1 << 40 for stride in strides):
        raise UsageError("strides", tuple(strides), "multiples of 16, under 2^40")
    if min(box) < 1 or max(box) > _MOST_BOX:
        raise UsageError("box", tuple(box), f"1 to {_MOST_BOX} each")
    if box[0] * itemsize % 16:
        raise UsageError("box", tuple(box), "rows of a multiple of 16 bytes")
    if swizzle not in (0, 32, 64, 128):
        raise UsageError("swizzle", swizzle, "0, 32, 64 or 128")
    if swizzle and box[0] * itemsize != swizzle:
        raise UsageError("box", tuple(box), f"rows of {swizzle // itemsize} elements, as wide as the swizzle's pattern")
    one = np.zeros((), _MAP)
    one["magic"], one["base"], one["element_bytes"] = _MAGIC, pointer, itemsize
    one["rank"], one["swizzle"] = rank, swizzle
    one["extent"], one["box"] = 1, 1
    one["stride"][: rank - 1], one["extent"][:rank], one["box"][:rank] = strides, np.minimum(extents, 2**32 - 1), box
    return one.tobytes()
