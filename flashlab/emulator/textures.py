"""Texture objects for kernels on the emulator: an array, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flashlab.emulator.library import Arena, Parameter
from simulator.errors import UsageError

__all__ = ["TEXTURE", "Texture"]

_STRUCT = np.dtype(
    [("base", "u8"), ("pitch", "i8"), ("slice", "i8"), ("width", "i4"), ("height", "i4"), ("depth", "i4"),
     ("channels", "u1"), ("channel_bytes", "u1"), ("kind", "u1"), ("linear", "u1"), ("normalized", "u1"),
     ("as_floats", "u1"), ("address", "u1"), ("unused", "u1", (5,))]
)  # fmt: skip
"""The layout of `struct Texture` in kernels_cu/emulator/textures.h."""

TEXTURE = Parameter("v", "s", _STRUCT.itemsize)
"""What a parameter is that takes a texture."""

_ADDRESS = {"wrap": "w", "clamp": "c", "mirror": "m", "border": "b"}


@dataclass(frozen=True)
class Texture:
    """An argument for a parameter of type `cudaTextureObject_t`.

    `array` (width,), (height, width) or (depth, height, width), of integers or floats of 8 to 32 bits; with `channels` 2 or
    4 it has one axis more, the last. Layers are the first axis. `linear` filters between texels; `normalized` coordinates go
    from 0 to 1; `as_floats` reads integers as 0 .. 1 (cudaReadModeNormalizedFloat); `address` says what lies outside: clamp,
    border, wrap, mirror.

    >>> Texture(np.zeros((3, 5), "float32"), linear=True).array.shape
    (3, 5)
    """

    array: np.ndarray[Any, Any]
    channels: int = 1
    linear: bool = False
    normalized: bool = False
    as_floats: bool = False
    address: Literal["clamp", "border", "wrap", "mirror"] = "clamp"

    def __post_init__(self) -> None:
        x = self.array
        if self.channels not in (1, 2, 4):
            raise UsageError("channels", self.channels, "1, 2 or 4")
        axes = x.ndim - (self.channels > 1)
        if not 1 <= axes <= 3 or 0 in x.shape or (self.channels > 1 and x.shape[-1] != self.channels):
            raise UsageError("array", x.shape, "(width,), (height, width) or (depth, height, width), and channels")
        if x.dtype.kind not in "iuf" or x.dtype.itemsize > 4 or (x.dtype.kind == "f" and x.dtype.itemsize < 2):
            raise UsageError("array", f"array of {x.dtype}", "integers of 8 to 32 bits, float16 or float32")
        if self.address not in _ADDRESS:
            raise UsageError("address", self.address, "clamp, border, wrap or mirror")
        if self.address in ("wrap", "mirror") and not self.normalized:
            raise UsageError("address", self.address, "clamp or border, where coordinates aren't normalized")

    def placed(self, arena: Arena, name: str) -> bytes:
        """The texture object's bytes, after the array was copied into an arena under `name`."""
        x = arena.put(name, self.array)
        arena.buffers[name].read_only = True
        extents = [*x.shape[: x.ndim - (self.channels > 1)]]
        depth, height, width = [1] * (3 - len(extents)) + extents
        one = np.zeros((), _STRUCT)
        one["base"], one["pitch"] = arena.pointer(name), width * self.channels * x.itemsize
        one["slice"] = height * one["pitch"]
        one["width"], one["height"], one["depth"] = width, height, depth
        one["channels"], one["channel_bytes"], one["kind"] = self.channels, x.itemsize, ord(x.dtype.kind)
        one["linear"], one["normalized"], one["as_floats"] = self.linear, self.normalized, self.as_floats
        one["address"] = ord(_ADDRESS[self.address])
        return one.tobytes()
