"""Arrays laid into memory that verification owns: guard bands around them, garbage between their rows, both checked after.

One small class a framework (NumPy, torch, CuPy, JAX) makes views of flat buffers, so that a stray read finds NaN and a
stray write is seen.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Unavailable, unknown
from simulator.problem import FP8, round_up

GUARD = 512
"""Elements of garbage before and after an array: a multiple of every alignment that a kernel asks for."""


class Frame(Protocol):
    """What verification needs of an array framework. `views`: can arrays be views of buffers that verification owns?"""

    name: str
    views: bool

    def put(self, flat: Array) -> Any: ...
    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any: ...
    def get(self, x: Any) -> Array: ...
    def pick(self, x: Any, heads: list[int]) -> Any: ...
    def litter(self, sizes: Iterable[int]) -> None: ...


class NumpyFrame:
    name, views = "numpy", True

    def put(self, flat: Array) -> Any:
        return flat.copy()

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return np.lib.stride_tricks.as_strided(buffer[offset:], shape, tuple(s * buffer.itemsize for s in strides))

    def get(self, x: Any) -> Array:
        return np.asarray(x)

    def pick(self, x: Any, heads: list[int]) -> Any:
        return x[:, heads]

    def litter(self, sizes: Iterable[int]) -> None:
        """Nothing: NumPy gives memory back to the system, where it cannot be left full of garbage."""


class TorchFrame:
    name, views = "torch", True

    def __init__(self) -> None:
        try:
            torch: Any = importlib.import_module("torch")
        except ImportError:
            raise Unavailable("framework = 'torch': PyTorch is not installed (pip install torch)") from None
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def put(self, flat: Array) -> Any:
        if flat.dtype == numpy_dtype("bfloat16"):
            return self.torch.from_numpy(flat.view(np.int16).copy()).to(self.device).view(self.torch.bfloat16)
        if flat.dtype == numpy_dtype(FP8):
            return self.torch.from_numpy(flat.view(np.uint8).copy()).to(self.device).view(self.torch.float8_e4m3fn)
        return self.torch.from_numpy(flat.copy()).to(self.device)

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return self.torch.as_strided(buffer, shape, strides, offset)

    def get(self, x: Any) -> Array:
        x = x.detach().contiguous()
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).cpu().numpy().view(numpy_dtype("bfloat16"))
        if x.dtype == self.torch.float8_e4m3fn:
            return x.view(self.torch.uint8).cpu().numpy().view(numpy_dtype(FP8))
        return x.cpu().numpy()

    def pick(self, x: Any, heads: list[int]) -> Any:
        return x.view(self.torch.uint8)[:, heads].view(x.dtype)  # float8 has few operations

    def litter(self, sizes: Iterable[int]) -> None:
        """Leave NaN in the memory that the caching allocator hands out next."""
        held = [self.torch.full((n,), 255, dtype=self.torch.uint8, device=self.device) for n in sizes if n]
        del held


class CupyFrame:
    name, views = "cupy", True

    def __init__(self) -> None:
        try:
            cupy: Any = importlib.import_module("cupy")
        except ImportError:
            raise Unavailable(
                "framework = 'cupy': CuPy is not installed (pip install 'flashlab-attention[gpu]')"
            ) from None
        self.cupy = cupy

    def put(self, flat: Array) -> Any:
        raw = self.cupy.asarray(flat.view(np.uint8))
        return raw if flat.dtype == numpy_dtype(FP8) else raw.view(flat.dtype)  # CuPy has no float8

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        tight = tuple(s * buffer.itemsize for s in strides)
        return self.cupy.ndarray(shape, buffer.dtype, buffer.data + offset * buffer.itemsize, tight)

    def get(self, x: Any) -> Array:
        dense = self.cupy.ascontiguousarray(x)
        dtype = numpy_dtype(FP8) if dense.dtype == np.uint8 else dense.dtype
        return self.cupy.asnumpy(dense.reshape(-1).view(self.cupy.uint8)).view(dtype).reshape(dense.shape)

    def pick(self, x: Any, heads: list[int]) -> Any:
        return x[:, heads]

    def litter(self, sizes: Iterable[int]) -> None:
        """Leave NaN in the memory that the pool hands out next."""
        held = [self.cupy.full(n, 255, self.cupy.uint8) for n in sizes if n]
        del held


class JaxFrame:
    """JAX owns its memory and its arrays are dense: nothing to guard, nothing to lay out."""

    name, views = "jax", False

    def __init__(self) -> None:
        try:
            jax: Any = importlib.import_module("jax")
        except ImportError:
            raise Unavailable("framework = 'jax': JAX is not installed (pip install jax)") from None
        self.jax = jax

    def put(self, flat: Array) -> Any:
        return flat

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return self.jax.numpy.asarray(np.ascontiguousarray(NumpyFrame().view(buffer, shape, strides, offset)))

    def get(self, x: Any) -> Array:
        return np.asarray(x)

    def pick(self, x: Any, heads: list[int]) -> Any:
        return x[:, np.array(heads)]

    def litter(self, sizes: Iterable[int]) -> None:
        """Nothing: the memory is JAX's."""


FRAMES = {"numpy": NumpyFrame, "torch": TorchFrame, "cupy": CupyFrame, "jax": JaxFrame}


def frame_named(name: str) -> Frame:
    """A framework by name; `Unavailable` says how to get it."""
    if name not in FRAMES:
        raise unknown("framework", name, FRAMES)
    return FRAMES[name]()


@dataclass
class Placed:
    """An array inside a buffer: `view` is what a kernel gets, `before` what the buffer held."""

    frame: Frame
    buffer: Any
    view: Any
    before: Array
    inside: Array

    def harm(self, *, written: bool = False) -> str | None:
        """What happened to the buffer: to the garbage around the array, and (unless it is an output) to the array."""
        if not self.frame.views:
            return None
        changed = self.frame.get(self.buffer).view(np.uint8).reshape(self.before.size, -1) != self.before.view(
            np.uint8
        ).reshape(self.before.size, -1)
        touched = changed.any(-1)
        if touched[~self.inside].any():
            return "memory outside of it was written"
        return "it was changed" if touched.any() and not written else None


def place(frame: Frame, x: Array, layout: str, garbage: float) -> Placed:
    """Lay `x` (batch, heads, length, head_dim) into a buffer full of `garbage`, in a layout of `cases.LAYOUTS`."""
    batch, heads, length, dim = x.shape
    step = 2 if layout == "strided" else 1
    # whole 16-byte units for every dtype, and at least one of garbage: still a layout that needs no copy
    unit = max(8, 16 // x.itemsize)
    row = {"padded": round_up(dim, unit) + unit, "strided": 2 * dim}.get(layout, dim)
    strides = (heads * length * row, length * row, row, step)
    if layout == "bshd":
        strides = (length * heads * row, row, heads * row, step)
    offset = GUARD + (layout == "misaligned")
    flat = np.full(offset + batch * heads * length * row + GUARD, garbage, x.dtype)
    inside = np.zeros(flat.size, bool)
    for mine, value in ((flat, x), (inside, True)):
        np.lib.stride_tricks.as_strided(mine[offset:], x.shape, tuple(s * mine.itemsize for s in strides))[...] = value
    buffer = frame.put(flat)
    return Placed(frame, buffer, frame.view(buffer, x.shape, strides, offset), flat, inside)
