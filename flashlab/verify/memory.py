"""Arrays laid into memory that verification owns: guard bands around them, garbage between their rows, both checked after.

One small class a framework (NumPy, torch, CuPy, JAX) makes views of flat buffers, so that a stray read finds NaN and a
stray write is seen.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from simulator.dtypes import Array, as_numpy
from simulator.errors import Unavailable, unknown
from simulator.problem import round_up

GUARD = 512
"""Elements of garbage before and after an array: a multiple of every alignment that a kernel asks for."""


class Frame:
    """What verification needs of an array framework. `views`: can arrays be views of buffers that verification owns?"""

    name: ClassVar[str]
    install: ClassVar[str] = ""
    views: ClassVar[bool] = True
    device: Any = None

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module(self.name)
        except ImportError:
            raise Unavailable(f"framework = '{self.name}': {self.install}") from None

    def put(self, values: Array) -> Any:
        """An array with these values, in memory of its own."""
        from flashlab.base.host import from_numpy  # only where something is run

        return from_numpy(values.copy(), self.name, self.device)

    def get(self, x: Any) -> Array:
        """The values of an array, whatever framework it came back from."""
        return as_numpy("result", x)

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        """A part of a flat buffer as an array; strides and offset in elements."""
        raise NotImplementedError

    def pick(self, x: Any, heads: list[int]) -> Any:
        """Some heads of an array, one after the other."""
        return x[:, heads]

    def litter(self, sizes: Iterable[int]) -> None:
        """Leaves NaN in the memory that is handed out next, where a framework keeps any: of so many bytes each."""


class NumpyFrame(Frame):
    name = "numpy"

    def litter(self, sizes: Iterable[int]) -> None:
        held = [np.full(n, 255, np.uint8) for n in sizes if n]
        del held

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return np.lib.stride_tricks.as_strided(buffer[offset:], shape, tuple(s * buffer.itemsize for s in strides))


class TorchFrame(Frame):
    name, install = "torch", "PyTorch is not installed (pip install torch)"

    def __init__(self) -> None:
        super().__init__()
        self.device = "cuda" if self.module.cuda.is_available() else "cpu"

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return self.module.as_strided(buffer, shape, strides, offset)

    def pick(self, x: Any, heads: list[int]) -> Any:
        return x.view(self.module.uint8)[:, heads].view(x.dtype)  # float8 has few operations

    def litter(self, sizes: Iterable[int]) -> None:
        held = [self.module.full((n,), 255, dtype=self.module.uint8, device=self.device) for n in sizes if n]
        del held


class CupyFrame(Frame):
    name, install = "cupy", "CuPy is not installed (pip install 'cupy-cuda12x[ctk]')"

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        tight = tuple(s * buffer.itemsize for s in strides)
        return self.module.ndarray(shape, buffer.dtype, buffer.data + offset * buffer.itemsize, tight)

    def litter(self, sizes: Iterable[int]) -> None:
        held = [self.module.full(n, 255, self.module.uint8) for n in sizes if n]
        del held


class JaxFrame(Frame):
    """JAX owns its memory and its arrays are dense: nothing to guard, nothing to lay out."""

    name, install = "jax", "JAX is not installed (pip install jax)"
    views = False

    def view(self, buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return self.put(NumpyFrame().view(self.get(buffer), shape, strides, offset))

    def pick(self, x: Any, heads: list[int]) -> Any:
        return x[:, np.array(heads)]


FRAMES: dict[str, type[Frame]] = {"numpy": NumpyFrame, "torch": TorchFrame, "cupy": CupyFrame, "jax": JaxFrame}


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

    def refilled(self, other: Placed) -> Placed:
        """This buffer with the content of another of its kind."""
        self.buffer[...] = other.buffer
        return replace(self, before=other.before)

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
    """Lay `x` (batch, heads, length, head_dim) into a buffer full of `garbage`, in a layout of `cases.LAYOUTS`.

    Numbers per head, (heads,), have no rows to lay out: they are contiguous, but may begin anywhere.
    """
    if x.ndim < 4:
        layout = layout if layout == "misaligned" else "plain"
    batch, heads, length, dim = (1,) * (4 - x.ndim) + x.shape
    step = 2 if layout == "strided" else 1
    # whole 16-byte units for every dtype, and at least one of garbage: still a layout that needs no copy
    unit = max(8, 16 // x.itemsize)
    row = {"padded": round_up(dim, unit) + unit, "strided": 2 * dim}.get(layout, dim)
    strides = (heads * length * row, length * row, row, step)
    if layout == "bshd":
        strides = (length * heads * row, row, heads * row, step)
    offset = GUARD + (layout == "misaligned")
    if x.dtype.kind in "iu":  # integers have no NaN
        garbage = int(np.iinfo(x.dtype).min) + 1
    flat = np.full(offset + batch * heads * length * row + GUARD, garbage, x.dtype)
    inside = np.zeros(flat.size, bool)
    strides = strides[4 - x.ndim :]
    for mine, value in ((flat, x), (inside, True)):
        np.lib.stride_tricks.as_strided(mine[offset:], x.shape, tuple(s * mine.itemsize for s in strides))[...] = value
    buffer = frame.put(flat)
    return Placed(frame, buffer, frame.view(buffer, x.shape, strides, offset), flat, inside)
