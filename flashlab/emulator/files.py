"""Runs a kernel of anybody's `.cu` file on the emulator. Its arguments are given by name, as arrays and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashlab.base.files import path_of
from flashlab.base.host import Empty, Poisoned, is_array, to_numpy
from flashlab.emulator import arguments as args
from flashlab.emulator import scan
from flashlab.emulator import symbols as device_data
from flashlab.emulator.build import BuildError, build, survey
from flashlab.emulator.launches import Launch
from flashlab.emulator.library import Arena, Launched, Library, check_limits
from flashlab.emulator.source import Kernel, Survey, read
from flashlab.emulator.strings import Located, located
from flashlab.emulator.textures import Texture
from flashlab.emulator.unset import unset_local
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError
from simulator.fields import flag, integer, listed

__all__ = [
    "Empty",
    "FileRun",
    "Poisoned",
    "emulate_file",
    "emulate_source",
    "options_of_build",
    "packed",
    "parameters_of",
]

_MOST_THREADS = 1024
_MOST_BLOCKS = ((1 << 31) - 1, 65535, 65535)
_MOST_BLOCK = (1024, 1024, 64)


@dataclass(frozen=True, repr=False)
class FileRun:
    """A launch of somebody's kernel: the `arrays` as it left them (NumPy), by parameter's name, and what it did.

    `unwritten` gives, for each `Empty` array with gaps, how many of its bytes no thread wrote. It stays empty after a
    launch that was stopped. `symbols` are the `__constant__` and `__device__` variables that the kernel uses, as it left
    them. `notes` say what was taken from the file's own launches, and what else the caller should know.

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
    symbols: dict[str, Array] = field(default_factory=dict[str, Array])
    notes: tuple[str, ...] = ()

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
        return {
            "passed": self.passed, "launch": self.launched.to_dict(), "unwritten": self.unwritten, "notes": self.notes,
        }  # fmt: skip


def emulate_file(
    path: Path | str, arguments: Mapping[str, Any] | Sequence[Any], *, grid: int | Sequence[int] | None = None,
    block: int | Sequence[int] | None = None, kernel: str | None = None, sram: int | None = None,
    macros: Mapping[str, object] | None = None, includes: Sequence[Path | str] = (), std: str = "c++17",
    symbols: Mapping[str, Any] | None = None, device: Device | str = "h100", sanitize: bool = True,
    workers: int | None = None, time_limit: float = 60, blocks: int | None = None,
) -> FileRun:  # fmt: skip
    """Run one kernel of a `.cu` file, or of a string in a Python file, on the CPU, and check every access.

    The file may be as it was published: what the kernel doesn't use, as host code, is left out, and a header that isn't
    found counts as empty. A Python file is read, never run: `FILE.py:name` is a kernel in one of its strings, or what the file
    binds such a string to.

    `arguments` maps the parameters' names (or lists, in their order) to numbers, arrays of NumPy, CuPy, torch or JAX (which are
    copied; the kernel may not write through a pointer to const), `Empty` for arrays that the kernel fills, and `Texture` for
    texture objects.
    `grid` (blocks) and `block` (threads per block) are one to three numbers each, `sram` is the dynamic shared memory in
    bytes per block; what is left
    out is that of the file's own launches of the kernel, where they say it in constants (`notes` tell). `kernel` may be left
    out if the file has only one; `space::name` is one in a namespace, `name<float, 4>` instantiates a template. `macros` are
    defined for the compiler, `includes` are folders of headers, `std` is c++14, c++17 or c++20. `symbols` are values for
    `__constant__` and `__device__` variables by name; the others begin as the source has them. `workers` is how many CPU
    threads share the blocks (default: one per core). A kernel that still runs after `time_limit` seconds of processor
    time (0: no limit) is stopped, which is a finding. Of a large grid only so many `blocks` may run, spread over it:
    counts and findings are then theirs alone.

    Raises `UsageError` for bad input, `BuildError` for a source that doesn't compile, `Unavailable` without a compiler.

    >>> source = "__global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }"
    >>> _ = Path("twice.cu").write_text(source)
    >>> run = emulate_file("twice.cu", {"x": np.ones(64, "f4"), "y": Empty((64,))}, grid=1, block=64)
    >>> run.passed, float(run.arrays["y"].sum()), run.launched.total("hbm.read")
    (True, 128.0, 256)
    """
    return emulate_source(
        located(path, kernel), arguments, grid=grid, block=block, sram=sram, macros=macros, includes=includes, std=std,
        symbols=symbols, device=device, sanitize=sanitize, workers=workers, time_limit=time_limit, blocks=blocks,
    )  # fmt: skip


def emulate_source(
    source: Located, arguments: Mapping[str, Any] | Sequence[Any], *, grid: Any = None, block: Any = None,
    sram: int | None = None, macros: Mapping[str, object] | None = None, includes: Sequence[Path | str] = (),
    std: str = "c++17", symbols: Mapping[str, Any] | None = None, device: Device | str = "h100", sanitize: bool = True,
    workers: int | None = None, time_limit: float = 60, blocks: int | None = None,
) -> FileRun:  # fmt: skip
    """What `emulate_file` does, for a source that was found. Arguments may be `AsItLies`."""
    path, own = source.path, source.own
    if not isinstance(arguments, Mapping | list | tuple):
        raise UsageError("arguments", arguments, "a dictionary, a value for each name, or a list of values in order")
    for argument, given in (("macros", macros), ("symbols", symbols)):
        if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(argument, given, "a dictionary, a value for each name")
    where = Device.named(device)
    check_limits(workers, time_limit)
    sanitize = flag("sanitize", sanitize)
    _check_limits(grid, block, sram, where)
    if blocks is not None:
        integer("blocks", blocks, 1)
    options = options_of_build(where, macros, includes, max(std, own.std))
    options |= {
        "macros": [*own.macros, *options["macros"]], "includes": [*options["includes"], *own.includes], "text": source.text,
    }  # fmt: skip
    found = survey(path, **options)
    chosen, entry = _chosen(found, source.kernel, path)
    extent, threads, dynamic, notes = _shape(found, chosen, entry, grid, block, sram)
    _check_limits(extent, threads, dynamic, where)
    whole_grid = math.prod(_three(extent))
    partial_grid = blocks is not None and blocks < whole_grid
    if partial_grid:
        notes = (*notes, f"{blocks:,} of {whole_grid:,} blocks ran: counts and findings are theirs alone")
    try:
        library = _built(path, entry, chosen, found, options)
    except BuildError as error:
        if missing := [name for name in sorted(source.unknown) if re.search(rf"[‘'`]{name}[’']", str(error))]:
            told = ", ".join(f"-D {name}=VALUE" for name in missing)
            raise BuildError(f"{error}\nonly a run of {path.name} would tell {', '.join(missing)}: {told}") from None
        raise
    names = [name or f"arg{i}" for i, name in enumerate(chosen.parameters)]
    arguments = {key: args.on_host(key, x) for key, x in args.named(arguments, names).items()}
    values = {key: to_numpy(key, x) if is_array(x) else x for key, x in (symbols or {}).items()}

    def launch(library: Library, **how: Any) -> tuple[Launched, Arena]:
        arena = Arena()
        given = args.given(library, entry, chosen.parameters, arguments, arena)
        device_data.reset(library, values)
        sizes: Any = {"sram": dynamic, "time_limit": time_limit, "blocks": blocks if partial_grid else 0}
        return library.launch(entry, _three(extent), _three(threads), given, arena, **sizes, **how), arena

    launched, arena = launch(library, sanitize=sanitize, workers=workers)
    left: dict[str, Array] = {}
    unwritten: dict[str, int] = {}
    for key, buffer in arena.buffers.items():
        whole = arguments[key]
        if isinstance(whole, Texture | args.AsItLies):  # the first is only read, the second the caller's own
            continue
        value = cast("Array | Empty", whole.values if isinstance(whole, Poisoned) else whole)
        dtype = numpy_dtype(value.dtype) if isinstance(value, Empty) else value.dtype
        left[key] = buffer.data.copy().view(dtype).reshape(value.shape)
        judged = isinstance(value, Empty) and sanitize and not launched.stopped and not partial_grid
        if judged and (missing := int((buffer.written == 0).sum())):
            unwritten[key] = missing
    data = device_data.get(library)

    def rebuilt(more: Sequence[str], watch: bool) -> Library:
        changed: dict[str, Any] = options | {"macros": [*options["macros"], *more], "watch": watch}
        return build(path, entries=[entry], **changed)

    if sanitize and not launched.findings:
        repeated = partial(launch, sanitize=False, workers=1)
        launched = replace(launched, findings=unset_local(library, entry, left, arena, rebuilt, repeated))
    arena.bring_back()
    return FileRun(left, launched, unwritten, data, (*notes, *args.notes_on(library, entry, arguments, names)))


def options_of_build(
    device: Device, macros: Mapping[str, object] | None, includes: Sequence[Path | str], std: str
) -> dict[str, Any]:
    """The keywords of `build` for these options. Raises `UsageError`."""
    if macros is not None and not isinstance(macros, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("macros", macros, "a dictionary, a value for each name")
    major, minor = device.compute_capability
    folders = listed("includes", includes, "a list of folders")
    return {
        "macros": [_macro(key, value) for key, value in (macros or {}).items()],
        "arch": 100 * major + 10 * minor, "includes": [_folder(folder) for folder in folders], "std": std,
    }  # fmt: skip


def _check_limits(grid: Any, block: Any, sram: Any, device: Device) -> None:
    """Raise `UsageError` for a launch that no device takes, or not this one. What is None isn't known yet."""
    if grid is not None:
        _extent("grid", grid, _MOST_BLOCKS)
    if block is not None and (n := int(np.prod(_extent("block", block, _MOST_BLOCK)))) > _MOST_THREADS:
        raise UsageError("block", block, f"at most {_MOST_THREADS:,} threads, these are {n:,}")
    if sram is not None and (type(sram) is not int or sram < 0):
        raise UsageError("sram", sram, "a number of bytes of at least 0")
    if sram is not None and sram > device.sram_per_block:
        raise UsageError("sram", sram, f"at most {device.sram_per_block:,}, which is what {device.name} has per block")


def _folder(folder: Path | str) -> Path:
    found = path_of("includes", folder, "a folder that is there")
    if not found.is_dir():
        raise UsageError("includes", str(folder), "a folder that is there")
    return found


def _chosen(found: Survey, kernel: str | None, path: Path) -> tuple[Kernel, str]:
    """The kernel that is meant, and the name of its instance."""
    if kernel is None:
        names = list(dict.fromkeys(each.name for each in found.kernels))
        if not names:
            raise UsageError("file", str(path), "a source with kernels: it has no __global__ function")
        if len(names) > 1:
            plain = ", ".join(dict.fromkeys(each.name for each in found.kernels if not each.template))
            templates = ", ".join(
                f"{each.name}<…>" + _instances(found, each.name, "") for each in found.kernels if each.template
            )
            told = ", ".join(filter(None, (plain, templates)))
            raise UsageError("kernel", None, f"the name of one of {path.name}'s: {told}")
        kernel = names[0]
    one = found.kernel(kernel)
    if one.clusters:
        raise UsageError("kernel", kernel, "a kernel without clusters of several blocks, which aren't emulated")
    if not one.template or "<" in kernel:
        return one, one.name + kernel[kernel.index("<") :] if "<" in kernel else one.name
    instances = found.instances(one.name)
    if len(instances) != 1:
        told = _instances(found, one.name, f": name an instance, as {one.name}<float, 4>")
        raise UsageError("kernel", kernel, f"a kernel; this is a template{told}")
    return one, instances[0]


def _instances(found: Survey, name: str, otherwise: str) -> str:
    instances = found.instances(name)
    return f" (this template's instances in the file: {', '.join(instances)})" if instances else otherwise


def _shape(
    found: Survey, kernel: Kernel, entry: str, grid: Any, block: Any, sram: int | None
) -> tuple[Any, Any, int, tuple[str, ...]]:
    """Grid, block and dynamic SRAM: as given, or as the file's launches have them, and a line that says so."""
    known_launches = [x for x in found.of(kernel.name) if x.grid or x.block or x.sram is not None]
    launched = [x for x in known_launches if x.instance == entry] or known_launches
    taken: list[str] = []

    def known(name: str, given: Any) -> Any:
        if given is not None:
            return given
        values = dict.fromkeys(getattr(x, name) for x in launched)
        if len(values) == 1 and (value := next(iter(values))) is not None:
            taken.append(f"{name} {_spelled(value)}")
            return value
        unit = {"grid": "blocks per grid", "block": "threads per block", "sram": "bytes per block"}[name]
        raise UsageError(name, None, f"{unit}{_why(values, launched, kernel)}")

    whole = known("grid", grid), known("block", block)
    needs_sram = sram is None and any(x.sram != 0 for x in launched)
    dynamic = known("sram", sram) if needs_sram else sram or 0
    places = ", ".join(dict.fromkeys(f"{Path(x.file).name}:{x.line}" for x in launched))
    notes = (f"{', '.join(taken)}: as launched at {places}",) if taken else ()
    return *whole, dynamic, notes


def _spelled(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    x, y, z = cast("tuple[int, int, int]", value)
    return ",".join(map(str, (x, y, z) if z > 1 else (x, y) if y > 1 else (x,)))


def _why(values: Mapping[Any, None], launched: Sequence[Launch], kernel: Kernel) -> str:
    if not launched:
        return f", as in 8 or 8,2: the file has no launch of {kernel.name} with constants"
    places = ", ".join(dict.fromkeys(f"{Path(x.file).name}:{x.line}" for x in launched))
    if len(values) > 1 and None not in values:
        return f": the file launches {kernel.name} with {' and '.join(map(_spelled, values))} ({places})"
    return f", as in 8 or 8,2: at {places} the file works it out from more than constants"


def _three(extent: int | Sequence[int]) -> Sequence[int]:
    return extent if isinstance(extent, Sequence) else (extent,)


_refused: set[tuple[Path, str, str]] = set()


def _built(path: Path, entry: str, kernel: Kernel, found: Survey, options: Mapping[str, Any]) -> Library:
    """The library of a kernel. All kernels of a file that are no templates share one, if they build together."""
    names = [each.name for each in found.kernels if not each.template]
    together = [name for name in names if names.count(name) == 1]
    key = path.resolve(), read(path), repr(options)
    if len(together) > 1 and entry in together and key not in _refused:
        try:
            return build(path, entries=together, **options)
        except (BuildError, UsageError):  # of another kernel, perhaps
            _refused.add(key)
    return build(path, entries=[entry], **options)


def packed(path: Path, kernel: str, arguments: Mapping[str, Any]) -> tuple[list[bytes], Arena]:
    """A kernel's parameters as their bytes, in order, and the arena that the pointers among them lead into.

    `arguments` are those of `emulate_file`. Raises what it raises.
    """
    found, arena = survey(path), Arena()
    chosen, entry = _chosen(found, kernel, path)
    library = _built(path, entry, chosen, found, {})
    return args.given(library, entry, chosen.parameters, arguments, arena), arena


def parameters_of(text: str, kernel: str) -> list[str]:
    """The names of a kernel's parameters, as its source spells them; empty if the source doesn't define that kernel.

    >>> parameters_of("__global__ void scale(float* __restrict__ x, const float factor, int n) {}", "scale")
    ['x', 'factor', 'n']
    """
    tokens = scan.Tokens.of(text)
    for piece in scan.pieces_of(tokens):
        if piece.kernel and kernel.partition("<")[0] in (piece.name, piece.names[0]):
            return scan.parameters(tokens, piece)
    return []


def _macro(name: str, value: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("macros", name, "a name that C allows for a macro")
    return f"-D{name}={int(value) if isinstance(value, bool) else value}"


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
