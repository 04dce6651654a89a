"""Anybody's kernel file on the emulator: its arguments by name, as arrays and numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashlab.emulator.build import build, kernels_of
from flashlab.emulator.library import Arena, Launched, Library
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import SramOverflow, UsageError, unknown

__all__ = ["Empty", "FileRun", "emulate_file", "parameters_of"]

_MOST_THREADS = 1024
_MOST_BLOCKS = ((1 << 31) - 1, 65535, 65535)
_MOST_BLOCK = (1024, 1024, 64)
_NUMBERS: Mapping[tuple[str, int], str] = {
    **{("i", n): f"i{n}" for n in (1, 2, 4, 8)}, **{("u", n): f"u{n}" for n in (1, 2, 4, 8)},
    **{("f", n): f"f{n}" for n in (4, 8)},
}  # fmt: skip


@dataclass(frozen=True)
class Empty:
    """An array for a kernel to fill: nobody has written it.

    >>> Empty((2, 3), "float16").nbytes
    12
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class FileRun:
    """A launch of somebody's kernel: the `arrays` as it left them, by parameter, and what it did.

    `unwritten`: bytes of `Empty` arrays that no thread wrote.
    """

    arrays: dict[str, Array]
    launched: Launched
    unwritten: dict[str, int]

    @property
    def passed(self) -> bool:
        """Nothing was misused, and what was empty is filled."""
        return not self.launched.findings and not self.unwritten

    def complaints(self) -> list[str]:
        """Everything that is wrong, a line each."""
        left = [f"{name}: {n:,} bytes were never written" for name, n in self.unwritten.items()]
        return [*map(str, self.launched.findings), *left]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the arrays."""
        return {"passed": self.passed, "launch": self.launched.to_dict(), "unwritten": self.unwritten}


def emulate_file(
    path: Path | str, arguments: Mapping[str, Any], *, grid: int | Sequence[int], block: int | Sequence[int],
    kernel: str | None = None, sram: int = 0, macros: Mapping[str, object] | None = None,
    device: Device | str = "h100", sanitize: bool = True, workers: int | None = None, time_limit: float = 60,
) -> FileRun:  # fmt: skip
    """Run one kernel of a `.cu` file on the CPU, with every access looked at.

    `arguments` by parameter name: numbers, NumPy arrays (copied; what lies behind a pointer to const may not be written),
    and `Empty` for arrays that the kernel is to fill. `kernel` may be left out if the file has one; `name<float, 4>`
    instantiates a template. `sram`: bytes of dynamic shared memory a block; `macros` are defined for the compiler.
    `time_limit` (seconds) ends a kernel whose threads wait for what never comes.

    Raises `UsageError` for bad input, `BuildError` for a source that doesn't compile, `Unavailable` without a compiler.

    >>> source = Path("/tmp/double.cu")                                            # doctest: +SKIP
    >>> run = emulate_file(source, {"x": np.ones(64, "f4"), "n": 64}, grid=1, block=64)  # doctest: +SKIP
    """
    path = Path(path)
    where = Device.named(device)
    if not path.is_file():
        raise UsageError("file", str(path), "a CUDA source: there is no such file")
    text = path.read_text(encoding="utf-8", errors="replace")
    name = kernel or _only(kernels_of(text), path)
    blocks, threads = _extent("grid", grid, _MOST_BLOCKS), _extent("block", block, _MOST_BLOCK)
    if (n := int(np.prod(threads))) > _MOST_THREADS:
        raise UsageError("block", block, f"at most {_MOST_THREADS:,} threads, these are {n:,}")
    if sram < 0:
        raise UsageError("sram", sram, "a number of bytes of at least 0")
    if sram > where.sram_per_block:
        raise SramOverflow("sram", sram, needed=sram, limit=where.sram_per_block, device=where.name)
    major, minor = where.compute_capability
    defined = [f"-D{key}={value}" for key, value in (macros or {}).items()]
    library = build(path, defined, arch=100 * major + 10 * minor, entries=[name])
    arena = Arena()
    given = _given(library, name, parameters_of(text, name), arguments, arena)
    launched = library.launch(
        name, blocks, threads, given, arena, sram=sram, sanitize=sanitize, workers=workers, time_limit=time_limit
    )
    left: dict[str, Array] = {}
    unwritten: dict[str, int] = {}
    for key, buffer in arena.buffers.items():
        value = cast("Array | Empty", arguments[key])
        left[key] = buffer.data.copy().view(numpy_dtype(str(value.dtype))).reshape(value.shape)
        if isinstance(value, Empty) and sanitize and (missing := int((buffer.written == 0).sum())):
            unwritten[key] = missing
    return FileRun(left, launched, unwritten)


def parameters_of(text: str, kernel: str) -> list[str]:
    """The names of a kernel's parameters, as far as its source says them.

    >>> parameters_of("__global__ void scale(float* __restrict__ x, const float factor, int n) {}", "scale")
    ['x', 'factor', 'n']
    """
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(kernel.split('<')[0])}\s*\(([^)]*)\)", bare)
    if not found or not found[1].strip():
        return []
    return [re.findall(r"\w+", part.split("=")[0])[-1] for part in found[1].split(",")]


def _only(kernels: Sequence[str], path: Path) -> str:
    if len(kernels) != 1:
        names = ", ".join(kernels) or "no __global__ function that isn't a template"
        raise UsageError("kernel", None, f"the name of one of {path.name}'s: {names}")
    return kernels[0]


def _extent(name: str, given: int | Sequence[int], most: tuple[int, int, int]) -> tuple[int, int, int]:
    """Three numbers from one, two or three."""
    parts = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(parts) <= 3 or any(type(n) is not int or n < 1 for n in parts):
        raise UsageError(name, given, "one to three whole numbers of at least 1")
    x, y, z = (*parts, 1, 1)[:3]
    if x > most[0] or y > most[1] or z > most[2]:
        raise UsageError(name, given, f"at most {most[0]:,} × {most[1]:,} × {most[2]:,}")
    return x, y, z


def _given(
    library: Library, kernel: str, names: Sequence[str], arguments: Mapping[str, Any], arena: Arena
) -> list[bytes]:
    """The parameters' bytes, in order; arrays go into the arena."""
    wanted = library.parameters(kernel)
    if len(names) != len(wanted):
        names = [f"arg{i}" for i in range(len(wanted))]
    for name in arguments:
        if name not in names:
            raise unknown("argument", name, names)
    if missing := [name for name in names if name not in arguments]:
        raise UsageError("arguments", ", ".join(arguments) or "none", f"also {', '.join(missing)}")
    return [_bytes(arena, name, arguments[name], *kind) for name, kind in zip(names, wanted, strict=True)]


def _bytes(arena: Arena, name: str, value: Any, letter: str, size: int) -> bytes:
    if letter in "pc":
        if value is None:
            return np.uint64(0).tobytes()
        if isinstance(value, Empty):
            if letter == "c":
                raise UsageError(name, value, "an array with values: the kernel only reads it")
            arena.put(name, np.empty(value.shape, numpy_dtype(value.dtype)), written=False)
        elif isinstance(value, np.ndarray):
            arena.put(name, cast("Array", value))
            arena.buffers[name].read_only = letter == "c"
        else:
            raise UsageError(name, value, "an array: the parameter is a pointer")
        return np.uint64(arena.pointer(name)).tobytes()
    if letter == "s":
        if not isinstance(value, bytes | np.generic | np.ndarray):
            raise UsageError(name, value, f"a struct's {size} bytes: bytes, or a structured NumPy scalar")
        given = value if isinstance(value, bytes) else cast("Array", value).tobytes()
        if len(given) != size:
            raise UsageError(name, f"{len(given)} bytes", f"{size}, the size of the parameter")
        return given
    if not isinstance(value, bool | int | float | np.number):
        raise UsageError(name, value, "a number")
    number = float(cast("float", value)) if letter == "f" else cast("int", value)
    kind = np.dtype(_NUMBERS[letter, size])
    if letter in "iu":
        if number != int(number):
            raise UsageError(name, str(value), "a whole number")
        if not np.iinfo(kind).min <= int(number) <= np.iinfo(kind).max:
            raise UsageError(name, str(value), f"a number that a parameter of {size} bytes can hold")
    return np.array(number, kind).tobytes()
