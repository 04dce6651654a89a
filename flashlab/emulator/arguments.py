"""Places a kernel's arguments: numbers as the bytes of its parameters, arrays in an arena, and pointers to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from flashlab.base.host import Empty, Poisoned, is_array, to_numpy
from flashlab.emulator.arena import NOBODYS, Arena
from flashlab.emulator.library import Library, Parameter
from flashlab.emulator.symbols import number
from flashlab.emulator.textures import TEXTURE, Texture
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError, unknown

__all__ = ["AsItLies", "bytes_of", "given", "named", "notes_on", "on_host"]

_NUMBERS: Mapping[tuple[str, int], str] = {
    **{("i", n): f"i{n}" for n in (1, 2, 4, 8)},
    **{("u", n): f"u{n}" for n in (1, 2, 4, 8)},
    **{("f", n): f"f{n}" for n in (4, 8)},
}


@dataclass(frozen=True)
class AsItLies:
    """An array or a number as CuPy's RawKernel passes it: the memory as it lies, which the kernel changes; bytes as they are."""

    value: Any


def on_host(name: str, value: Any) -> Any:
    """An argument with its array, if it has one, as NumPy's."""
    if isinstance(value, Poisoned) and is_array(value.values):
        return Poisoned(to_numpy(name, value.values), value.parts)
    return to_numpy(name, value) if is_array(value) else value


def named(arguments: Mapping[str, Any] | Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Arguments by name; a sequence has them in the order of the parameters. Raises `UsageError`."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if len(arguments) != len(names):
        raise UsageError("arguments", f"{len(arguments)} values", f"{len(names)}: {', '.join(names)}")
    return dict(zip(names, arguments, strict=True))


def notes_on(library: Library, kernel: str, arguments: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What a GPU would see that a caller may not mean: arrays that aren't contiguous, numbers of another size."""
    notes: list[str] = []
    wanted = library.parameters(kernel)
    for name, wish in zip(names, wanted, strict=False):
        whole = arguments.get(name)
        value: Any = whole.value if isinstance(whole, AsItLies) else whole
        if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
            array = cast("Array", value)
            said = f"{name} isn't contiguous (shape {array.shape}, strides {array.strides} bytes): "
            if isinstance(whole, AsItLies):
                notes.append(said + "the kernel gets its memory as it lies")
            else:
                notes.append(said + "its values were copied in order; CuPy's RawKernel passes the memory as it lies")
        if isinstance(whole, AsItLies) and (difference := _difference(value, wish)):
            notes.append(f"{name} is {difference}")
    return notes


def _difference(value: Any, wanted: Parameter) -> str:
    """How a value differs from what a kernel takes it for; empty if it doesn't."""
    if wanted.kind not in "iuf" or not wanted.size:
        return ""
    if wanted.passed != "v":
        if not isinstance(value, np.ndarray) or (wanted.size == 1 and wanted.kind in "iu"):
            return ""
        dtype = cast("Array", value).dtype
        same = dtype.itemsize == wanted.size and (dtype.kind == "f") == (wanted.kind == "f")
        return "" if same else f"an array of {dtype}, and the kernel reads {np.dtype(f'{wanted.kind}{wanted.size}')}"
    number = np.asarray(value).dtype
    if (number.kind == "f") == (wanted.kind == "f") and (number.kind != "f" or number.itemsize == wanted.size):
        return ""
    return f"passed as {number}, and the kernel reads its first {wanted.size} bytes as {np.dtype(f'{wanted.kind}{wanted.size}')}"


def given(
    library: Library, kernel: str, names: Sequence[str], arguments: Mapping[str, Any], arena: Arena
) -> list[bytes]:
    """The parameters' bytes, in order. Arrays are copied into the arena, and their parameter holds the pointer."""
    wanted = library.parameters(kernel)
    if len(names) != len(wanted):
        names = [""] * len(wanted)
    names = [name or f"arg{i}" for i, name in enumerate(names)]
    members = {f"{names[i]}.{name}": (names[i], what, at) for (i, name), (what, at) in library.fields(kernel).items()}
    in_parts = {members[name][0] for name in arguments if name in members}
    for name in arguments:
        if name not in names and name not in members:
            of = [each for each in members if each.startswith(f"{name.partition('.')[0]}.")]
            raise unknown("argument", name, of or names)
    if missing := [name for name in names if name not in arguments and name not in in_parts]:
        parts = [name for name in missing if any(each.startswith(f"{name}.") for each in members)]
        hint = (
            f" ({', '.join(parts)} by its members, as {next(x for x in members if x.startswith(parts[0]))})"
            if parts
            else ""
        )
        raise UsageError(
            "arguments", ", ".join(arguments) or "none", f"also {', '.join(missing)}, as {kernel} has{hint}"
        )
    placed: list[bytes] = []
    for name, wish in zip(names, wanted, strict=True):
        if name not in in_parts:
            placed.append(bytes_of(arena, name, arguments[name], wish))
            continue
        if name in arguments:
            raise UsageError("arguments", name, f"{name} as a whole, or its members, not both")
        whole = bytearray(wish.size)  # what isn't said is 0
        for own, (of, what, at) in members.items():
            if of == name and own in arguments:
                part = bytes_of(arena, own, arguments[own], what)
                whole[at : at + len(part)] = part
        placed.append(bytes(whole))
    return placed


def bytes_of(arena: Arena, name: str, value: Any, wanted: Parameter) -> bytes:
    if isinstance(value, AsItLies):
        return _as_it_lies(arena, name, value.value, wanted)
    if isinstance(value, Poisoned):
        given = bytes_of(arena, name, value.values, wanted)
        if wanted.passed == "v":
            raise UsageError(name, "an array with parts of nobody", "a value: the parameter is no pointer")
        each = arena.buffers[name].data.nbytes // max(1, math.prod(value.values.shape))
        for start, stop in value.parts:
            arena.buffers[name].data[start * each : stop * each] = 0xFF
            arena.buffers[name].written[start * each : stop * each] = NOBODYS
        return given
    if wanted.passed != "v":
        if value is None:
            return np.uint64(0).tobytes()
        if isinstance(value, Empty):
            if wanted.passed == "c":
                raise UsageError(name, value, "an array with values: the kernel only reads it")
            _check_elements(name, numpy_dtype(value.dtype), wanted)
            arena.put(name, np.empty(value.shape, numpy_dtype(value.dtype)), written=False)
        elif isinstance(value, np.ndarray):
            given_array = cast("Array", value)
            if given_array.dtype.hasobject or not given_array.dtype.isnative:
                raise UsageError(name, f"array of {given_array.dtype}", "numbers in this machine's byte order")
            _check_elements(name, given_array.dtype, wanted)
            arena.put(name, given_array)
            arena.buffers[name].read_only = wanted.passed == "c"
        else:
            raise UsageError(name, value, "an array: the parameter is a pointer")
        return np.uint64(arena.pointer(name)).tobytes()
    if isinstance(value, Texture) and wanted == TEXTURE:
        return value.placed(arena, name)
    if wanted.kind == "s":
        if not isinstance(value, bytes | np.generic | np.ndarray):
            raise UsageError(name, value, f"a struct's {wanted.size} bytes: bytes, or a structured NumPy scalar")
        given = value if isinstance(value, bytes) else cast("Array", value).tobytes()
        if len(given) != wanted.size:
            raise UsageError(name, f"{len(given)} bytes", f"{wanted.size}, the size of the parameter")
        return given
    return number(name, value, wanted.kind, np.dtype(_NUMBERS[wanted.kind, wanted.size]))


def _check_elements(name: str, dtype: np.dtype[Any], wanted: Parameter) -> None:
    """Refuse an array whose elements the kernel would misread, such as float64 behind a float*.

    A type that is no number in C++ (half, float4, a struct) may be made of several elements. A char* or a void* may
    point to anything.
    """
    if wanted.size == 0 or (wanted.kind in "iu" and wanted.size == 1):
        return
    if wanted.kind == "s":
        if not dtype.itemsize or wanted.size % dtype.itemsize:
            raise UsageError(
                name, f"array of {dtype}", f"elements whose size divides {wanted.size} bytes, as the kernel has it"
            )
        return
    same_kind = dtype.kind == "f" if wanted.kind == "f" else dtype.kind in "iub"
    if not same_kind or dtype.itemsize != wanted.size:
        wish = np.dtype(f"{wanted.kind}{wanted.size}")
        raise UsageError(
            name, f"array of {dtype}", f"{wish}, as the kernel has it (.astype changes, .view reinterprets)"
        )


def _as_it_lies(arena: Arena, name: str, value: Any, wanted: Parameter) -> bytes:
    if isinstance(value, np.ndarray):
        address = arena.lay(name, cast("Array", value), read_only=wanted.passed == "c")
        passed = np.uint64(address).tobytes()
    else:
        passed = np.asarray(value).tobytes()
    size = wanted.size if wanted.passed == "v" else 8
    if len(passed) < size:
        raise UsageError(name, f"{len(passed)} bytes", f"{size}: the kernel reads as many")
    return passed[:size]
