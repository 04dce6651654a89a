"""Variables in a GPU's memory (`__constant__`, `__device__`): the host sets them before a launch and reads them after it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from flashlab.emulator.library import Library
from simulator.dtypes import Array
from simulator.errors import UsageError, unknown

__all__ = ["Symbol", "get", "number", "reset", "symbols_of"]

_SCALARS = (np.bool_, np.integer, np.floating)


@dataclass(frozen=True)
class Symbol:
    """A variable: its `bytes` at `address`, of elements of `size` bytes and a `kind` (i, u, f; s: anything else).

    `first` are the bytes that the source gives it. A `constant` one may not be set.
    """

    name: str
    address: int
    bytes: int
    kind: str
    size: int
    constant: bool
    first: bytes

    def set(self, value: Any) -> None:
        """Give it an array's bytes, or a number. Raises `UsageError` for another type or size."""
        if self.constant:
            raise UsageError(self.name, "a value", "nothing: the source has it const")
        dtype = self.dtype
        if isinstance(value, np.ndarray):
            given = np.ascontiguousarray(cast("Array", value))
            if self.kind != "s" and given.dtype != dtype and given.dtype.itemsize != self.size:
                raise UsageError(self.name, f"array of {given.dtype}", f"{dtype}, as the source has it")
            if self.kind != "s" and (given.dtype.kind == "f") != (self.kind == "f"):
                raise UsageError(self.name, f"array of {given.dtype}", f"{dtype}, as the source has it")
        elif self.bytes == self.size and self.kind in "iuf":
            given = np.frombuffer(number(self.name, value, self.kind, dtype), dtype)
        else:
            raise UsageError(self.name, value, f"an array of {self.bytes:,} bytes")
        if given.nbytes != self.bytes:
            raise UsageError(self.name, f"{given.nbytes:,} bytes", f"{self.bytes:,}, the size of the variable")
        ctypes.memmove(self.address, given.tobytes(), self.bytes)

    def get(self) -> Array:
        """A copy of what it holds: an array of one axis, of bytes where the element's type has no name in NumPy."""
        held = np.frombuffer(ctypes.string_at(self.address, self.bytes), np.uint8)
        return held.view(self.dtype).copy()

    @property
    def dtype(self) -> np.dtype[Any]:
        return (
            np.dtype(f"{self.kind}{self.size}") if self.kind in "iuf" and self.size in (1, 2, 4, 8) else np.dtype("u1")
        )


_tables: dict[str, dict[str, Symbol]] = {}


def symbols_of(library: Library) -> Mapping[str, Symbol]:
    """The variables that a library's kernels use, by name."""
    key = str(library.path)
    if key not in _tables:
        _tables[key] = _read(library)
    return _tables[key]


def _read(library: Library) -> dict[str, Symbol]:
    dll: Any = ctypes.CDLL(str(library.path))
    found: dict[str, Symbol] = {}
    index = 0
    while hasattr(dll, f"emu_symbol_{index}"):
        ask = getattr(dll, f"emu_symbol_{index}")
        ask.restype = ctypes.c_char_p
        at, n, letters, size = ctypes.c_void_p(), ctypes.c_ulong(), ctypes.create_string_buffer(4), ctypes.c_uint()
        name = ask(ctypes.byref(at), ctypes.byref(n), letters, ctypes.byref(size)).decode()
        words, address = letters.raw.decode(), at.value or 0
        found[name] = Symbol(
            name, address, n.value, words[1], size.value, words[0] == "c", ctypes.string_at(address, n.value)
        )
        index += 1
    return found


def reset(library: Library, values: Mapping[str, Any]) -> None:
    """Give every variable what the source gives it, and those of `values` their own."""
    known = symbols_of(library)
    for name in values:
        if not known:
            raise UsageError("symbol", name, "none: the file has no __constant__ or __device__ variable")
        if name not in known:
            raise unknown("symbol", name, known)
    for name, symbol in known.items():
        if name in values:
            symbol.set(values[name])
        elif not symbol.constant:
            ctypes.memmove(symbol.address, symbol.first, symbol.bytes)


def get(library: Library) -> dict[str, Array]:
    """What every variable holds."""
    return {name: symbol.get() for name, symbol in symbols_of(library).items() if not symbol.constant}


def number(name: str, value: Any, letter: str, kind: np.dtype[Any]) -> bytes:
    """The bytes of a number, as a parameter of that dtype holds it."""
    plain: object = value.item() if isinstance(cast("object", value), _SCALARS) else value
    if not isinstance(plain, int | float):
        raise UsageError(name, value, "a number")
    accepted = f"a number that a parameter of {kind.itemsize} bytes can hold"
    if letter in "iu":
        if not isinstance(plain, int) and not plain.is_integer():
            raise UsageError(name, str(value), "a whole number")
        if not np.iinfo(kind).min <= plain <= np.iinfo(kind).max:
            raise UsageError(name, str(value), accepted)
        return np.array(int(plain), kind).tobytes()
    try:
        with np.errstate(over="raise"):
            return np.float64(plain).astype(kind).tobytes()
    except (OverflowError, FloatingPointError):
        raise UsageError(name, str(value), accepted) from None
