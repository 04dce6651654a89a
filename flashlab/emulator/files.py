"""Runs a kernel of anybody's `.cu` file on the emulator. Its arguments are given by name, as arrays and numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashlab.emulator.build import build
from flashlab.emulator.library import Arena, Launched, Library, Parameter
from flashlab.emulator.source import kernels_of
from flashlab.emulator.unset import unset_local
from flashlab.run.host import is_array, to_numpy
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError, unknown

__all__ = ["Empty", "FileRun", "emulate_file", "parameters_of"]

_MOST_THREADS = 1024
_MOST_BLOCKS = ((1 << 31) - 1, 65535, 65535)
_MOST_BLOCK = (1024, 1024, 64)
_NUMBERS: Mapping[tuple[str, int], str] = {
    **{("i", n): f"i{n}" for n in (1, 2, 4, 8)},
    **{("u", n): f"u{n}" for n in (1, 2, 4, 8)},
    **{("f", n): f"f{n}" for n in (4, 8)},
}


_SCALARS = (np.bool_, np.integer, np.floating)


@dataclass(frozen=True)
class Empty:
    """An array for a kernel to fill: its shape and dtype, with no element written yet.

    >>> Empty((2, 3), "float16").nbytes
    12
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple or any(type(n) is not int or n < 0 for n in self.shape):
            raise UsageError("shape", self.shape, "a tuple of sizes, as in (100,) or (4, 100)")
        try:
            numpy_dtype(self.dtype)
        except TypeError:
            raise UsageError("dtype", self.dtype, "the name of a NumPy dtype or bfloat16") from None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, repr=False)
class FileRun:
    """A launch of somebody's kernel: the `arrays` as it left them (NumPy), by parameter's name, and what it did.

    `unwritten` gives, for each `Empty` array with gaps, how many of its bytes no thread wrote. It stays empty after a
    launch that was stopped.

    >>> _ = Path("half.cu").write_text("__global__ void half(float* y) { y[threadIdx.x] = 0; }")
    >>> run = emulate_file("half.cu", {"y": Empty((64,))}, grid=1, block=32)
    >>> run.passed, run.complaints()
    (False, ['y: 128 bytes were never written'])
    >>> run
    half: 1 finding
    y: 128 bytes were never written
    """

    arrays: dict[str, Array]
    launched: Launched
    unwritten: dict[str, int]

    @property
    def passed(self) -> bool:
        """True if nothing was misused and every `Empty` array was filled."""
        return not self.launched.findings and not self.unwritten

    def complaints(self) -> list[str]:
        """Everything that is wrong, one line each."""
        left = [f"{name}: {n:,} bytes were never written" for name, n in self.unwritten.items()]
        return [*map(str, self.launched.findings), *left]

    def __repr__(self) -> str:
        found = self.complaints()
        verdict = f"{len(found)} finding{'s' if len(found) > 1 else ''}" if found else "passed"
        notes = [f"note: {x}" for x in self.launched.notes]
        return "\n".join([f"{self.launched.kernel}: {verdict}", *found, *notes])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the arrays."""
        return {"passed": self.passed, "launch": self.launched.to_dict(), "unwritten": self.unwritten}


def emulate_file(
    path: Path | str, arguments: Mapping[str, Any], *, grid: int | Sequence[int], block: int | Sequence[int],
    kernel: str | None = None, sram: int = 0, macros: Mapping[str, object] | None = None,
    device: Device | str = "h100", sanitize: bool = True, workers: int | None = None, time_limit: float = 60,
) -> FileRun:  # fmt: skip
    """Run one kernel of a `.cu` file on the CPU, and check every access.

    `arguments` maps the parameters' names to numbers, arrays of NumPy, CuPy, torch or JAX (which are copied; the kernel
    may not write through a pointer to const), and `Empty` for arrays that the kernel fills. `grid` (blocks) and `block`
    (threads per block) are one to three numbers each. `kernel` may be left out if the file has only one;
    `name<float, 4>` instantiates a template. `sram` is the dynamic shared memory in bytes per block, and `macros` are
    defined for the compiler. `workers` is how many CPU threads share the blocks (default: one per core). A kernel that
    still runs after `time_limit` seconds (0: no limit) is stopped, which is a finding.

    Raises `UsageError` for bad input, `BuildError` for a source that doesn't compile, `Unavailable` without a compiler.

    >>> source = "__global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }"
    >>> _ = Path("twice.cu").write_text(source)
    >>> run = emulate_file("twice.cu", {"x": np.ones(64, "f4"), "y": Empty((64,))}, grid=1, block=64)
    >>> run.passed, float(run.arrays["y"].sum()), run.launched.total("hbm.read")
    (True, 128.0, 256)
    """
    path = Path(path)
    where = Device.named(device)
    text = _source(path)
    name = kernel or _only(kernels_of(text), path)
    blocks, threads = _extent("grid", grid, _MOST_BLOCKS), _extent("block", block, _MOST_BLOCK)
    if (n := int(np.prod(threads))) > _MOST_THREADS:
        raise UsageError("block", block, f"at most {_MOST_THREADS:,} threads, these are {n:,}")
    if type(sram) is not int or sram < 0:
        raise UsageError("sram", sram, "a number of bytes of at least 0")
    if not 0 <= time_limit < float("inf"):
        raise UsageError("time_limit", time_limit, "seconds, at least 0 (0: no limit)")
    if sram > where.sram_per_block:
        raise UsageError("sram", sram, f"at most {where.sram_per_block:,}, which is what {where.name} has per block")
    major, minor = where.compute_capability
    defined = [_macro(key, value) for key, value in (macros or {}).items()]
    library = build(path, defined, arch=100 * major + 10 * minor, entries=[name])
    arguments = {key: to_numpy(key, x) if is_array(x) else x for key, x in arguments.items()}
    arena = Arena()
    given = _given(library, name, parameters_of(text, name), arguments, arena)
    launched = library.launch(
        name, blocks, threads, given, arena, sram=sram, sanitize=sanitize, workers=workers, time_limit=time_limit
    )
    left: dict[str, Array] = {}
    unwritten: dict[str, int] = {}
    for key, buffer in arena.buffers.items():
        value = cast("Array | Empty", arguments[key])
        dtype = numpy_dtype(value.dtype) if isinstance(value, Empty) else value.dtype
        left[key] = buffer.data.copy().view(dtype).reshape(value.shape)
        judged = isinstance(value, Empty) and sanitize and not launched.stopped
        if judged and (missing := int((buffer.written == 0).sum())):
            unwritten[key] = missing

    def repeat(library: Library, watched: tuple[str, int] | None) -> tuple[Launched, Arena]:
        fresh = Arena()
        given = _given(library, name, parameters_of(text, name), arguments, fresh)
        done = library.launch(
            name,
            blocks,
            threads,
            given,
            fresh,
            sram=sram,
            sanitize=False,
            workers=1,
            time_limit=time_limit,
            watched=watched,
        )
        return done, fresh

    if sanitize and not launched.findings:
        rebuilt = functools.partial(_rebuilt, path, defined, 100 * major + 10 * minor, name)
        launched = replace(launched, findings=unset_local(library, name, left, arena, rebuilt, repeat))
    return FileRun(left, launched, unwritten)


def _rebuilt(path: Path, macros: Sequence[str], arch: int, kernel: str, options: Sequence[str]) -> Library:
    return build(path, [*macros, *options], arch=arch, entries=[kernel])


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError("file", str(path), f"a CUDA source that can be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError("file", str(path), "a CUDA source: this file isn't UTF-8 text") from None


def parameters_of(text: str, kernel: str) -> list[str]:
    """The names of a kernel's parameters, as its source spells them; empty if the source doesn't define that kernel.

    >>> parameters_of("__global__ void scale(float* __restrict__ x, const float factor, int n) {}", "scale")
    ['x', 'factor', 'n']
    """
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(kernel.split('<')[0])}\s*\(([^)]*)\)\s*{{", bare)
    if not found:
        return []
    plain = re.sub(r"<[^<>]*>|\[[^]]*\]", "", found[1])  # commas in a type, the extent of an array
    return [words[-1] for part in plain.split(",") if (words := re.findall(r"\w+", part.split("=")[0]))]


def _macro(name: str, value: object) -> str:
    if not name.isidentifier():
        raise UsageError("macros", name, "a name that C allows for a macro")
    return f"-D{name}={int(value) if isinstance(value, bool) else value}"


def _only(kernels: Sequence[str], path: Path) -> str:
    if len(kernels) != 1:
        names = ", ".join(kernels) or "no __global__ function that isn't a template"
        raise UsageError("kernel", None, f"the name of one of {path.name}'s: {names} (a template as name<float, 4>)")
    return kernels[0]


def _extent(name: str, given: int | Sequence[int], most: tuple[int, int, int]) -> tuple[int, int, int]:
    """One, two or three extents as three, each checked against its limit."""
    parts: tuple[object, ...] = tuple(given) if isinstance(given, Sequence) else (given,)
    sizes = [n for n in parts if type(n) is int and n >= 1]
    if not 1 <= len(parts) <= 3 or len(sizes) != len(parts):
        raise UsageError(name, given, "one to three whole numbers of at least 1")
    x, y, z = (*sizes, 1, 1)[:3]
    if x > most[0] or y > most[1] or z > most[2]:
        raise UsageError(name, given, f"at most {most[0]:,} × {most[1]:,} × {most[2]:,}")
    return x, y, z


def _given(
    library: Library, kernel: str, names: Sequence[str], arguments: Mapping[str, Any], arena: Arena
) -> list[bytes]:
    """The parameters' bytes, in order. Arrays are copied into the arena, and their parameter holds the pointer."""
    wanted = library.parameters(kernel)
    if len(names) != len(wanted):
        names = [f"arg{i}" for i in range(len(wanted))]
    for name in arguments:
        if name not in names:
            raise unknown("argument", name, names)
    if missing := [name for name in names if name not in arguments]:
        raise UsageError("arguments", ", ".join(arguments) or "none", f"also {', '.join(missing)}, as {kernel} has")
    return [_bytes(arena, name, arguments[name], wish) for name, wish in zip(names, wanted, strict=True)]


def _bytes(arena: Arena, name: str, value: Any, wanted: Parameter) -> bytes:
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
    if wanted.kind == "s":
        if not isinstance(value, bytes | np.generic | np.ndarray):
            raise UsageError(name, value, f"a struct's {wanted.size} bytes: bytes, or a structured NumPy scalar")
        given = value if isinstance(value, bytes) else cast("Array", value).tobytes()
        if len(given) != wanted.size:
            raise UsageError(name, f"{len(given)} bytes", f"{wanted.size}, the size of the parameter")
        return given
    return _number(name, value, wanted.kind, np.dtype(_NUMBERS[wanted.kind, wanted.size]))


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


def _number(name: str, value: Any, letter: str, kind: np.dtype[Any]) -> bytes:
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
