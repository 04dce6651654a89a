"""Memory for launches: buffers that lie far apart, and what is known of their bytes."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["NOBODYS", "Arena", "Buffer"]

NOBODYS = 4
"""The state of a byte that no thread may touch."""


class Arena:
    """Buffers that lie far apart, so that an access past the end of one hits none of the others.

    A wrong index of 32 bits leads at most 32 GB away. So the nearest buffer is the one that was meant.

    >>> arena = Arena()
    >>> x = arena.put("x", np.arange(4, dtype="float32"))
    >>> x
    array([0., 1., 2., 3.], dtype=float32)
    """

    _GAP = 1 << 20

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self._laid: dict[tuple[int, int], tuple[str, Any, np.ndarray[Any, Any]]] = {}

    def new(self, name: str, nbytes: int) -> np.ndarray[Any, Any]:
        """A buffer of uint8 that counts as unwritten. Its bits are NaNs in every floating-point dtype."""
        gap = self._GAP + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = _memory(2 * gap + -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        data = np.frombuffer(memory, np.uint8)[gap : gap + nbytes]
        data[:] = 0xFF
        self.buffers[name] = Buffer(name, data, np.zeros(nbytes, np.uint8))
        return data

    def put(self, name: str, values: np.ndarray[Any, Any], *, written: bool = True) -> np.ndarray[Any, Any]:
        """A contiguous copy of an array in the arena. Unless `written`, only shape and dtype are taken over."""
        values = np.ascontiguousarray(values)
        data = self.new(name, values.nbytes)
        if written:
            data[:] = values.reshape(-1).view(np.uint8)
            self.buffers[name].written[:] = 1
        self.buffers[name].strides = values.strides
        return data.view(values.dtype).reshape(values.shape)

    def lay(self, name: str, array: np.ndarray[Any, Any], *, read_only: bool = False) -> int:
        """The address of an array in a copy of the whole memory that it is a view of. Views of one memory share a copy."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        low, high = np.lib.array_utils.byte_bounds(owner)
        if (low, high) not in self._laid:
            whole: Any = (ctypes.c_ubyte * (high - low)).from_address(low)
            memory: np.ndarray[Any, Any] = np.frombuffer(whole, np.uint8)
            self.put(name, memory)
            self.buffers[name].strides = owner.strides
            self.buffers[name].read_only = True
            self._laid[low, high] = name, owner, memory
        buffer = self.buffers[self._laid[low, high][0]]
        buffer.read_only &= read_only
        return buffer.data.ctypes.data + array.ctypes.data - low

    def bring_back(self) -> None:
        """Copy what was laid out, and changed, to where it came from."""
        for name, _, memory in self._laid.values():
            if not self.buffers[name].read_only:
                memory[:] = self.buffers[name].data

    def pointer(self, name: str) -> int:
        """The address of a buffer."""
        return self.buffers[name].data.ctypes.data


_APART = 1 << 37
_places = itertools.count()


def _memory(nbytes: int) -> Any:
    """Zeros, far from others where the system lets it. They go when nobody refers to them any more."""
    if sys.platform != "linux" or sys.maxsize < 1 << 40:
        return mmap.mmap(-1, nbytes)
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    system.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    wish = (1 << 44) + next(_places) % 256 * _APART  # only a wish: what is in use is left alone
    place = system.mmap(wish, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if place == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * nbytes).from_address(place)
    weakref.finalize(memory, system.munmap, place, nbytes)
    return memory


@dataclass
class Buffer:
    """A buffer of an arena.

    `written` holds 1 for each byte that has a value, and `NOBODYS` for one that belongs to nobody; launches keep it up to date.
    `read_only` forbids kernels to write.
    `strides` are in bytes per axis, empty for a buffer that is no array.
    """

    name: str
    data: np.ndarray[Any, Any]
    written: np.ndarray[Any, Any]
    read_only: bool = False
    strides: tuple[int, ...] = ()

    def index(self, offset: int) -> str:
        """The index of the element at an offset in bytes, as text: `[0, 3]`."""
        places = dict.fromkeys(range(len(self.strides)), 0)
        for axis in sorted(places, key=lambda axis: -self.strides[axis]):
            places[axis], offset = divmod(offset, self.strides[axis])
        return f"[{', '.join(map(str, places.values()))}]" if places else ""
