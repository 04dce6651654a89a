"""Runs a Python script whose kernels the emulator runs: a stand-in for CuPy takes its place, over NumPy arrays.

A kernel gets the memory of its arrays as it lies, and the bytes of its numbers as they are. So a view, a broadcast array or a
number of another size does here what it does on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
import traceback
import types
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashlab.base.files import path_of
from flashlab.emulator.arguments import AsItLies
from flashlab.emulator.files import FileRun, emulate_source
from flashlab.emulator.strings import Located, Own, embedded
from simulator.dtypes import Array
from simulator.errors import UsageError

__all__ = ["ScriptRun", "run_script"]

_LIKE_CUPY = {int: np.int64, float: np.float64, bool: np.bool_, complex: np.complex128}
"""What CuPy makes of Python's numbers."""


@dataclass(frozen=True)
class ScriptRun:
    """The `launches` of a script in their order, and the `error` that ended it, if one did: a line."""

    launches: tuple[FileRun, ...]
    error: str | None = None

    @property
    def passed(self) -> bool:
        """True if the script came to its end and no launch misused anything."""
        return self.error is None and all(launch.passed for launch in self.launches)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the arrays."""
        return {"passed": self.passed, "launches": [launch.to_dict() for launch in self.launches], "error": self.error}


def run_script(path: Path | str, arguments: Sequence[str] = (), **options: Any) -> ScriptRun:
    """Run a Python script, in this process, with a stand-in for CuPy: `RawKernel` and `RawModule` are emulated.

    `options` are those of `emulate_file` that say how kernels are built and run: `device`, `sanitize`, `time_limit`, `blocks` and
    so on. Raises `UsageError` for a script that can't be read.
    """
    script = path_of("file", path)
    if not script.is_file():
        raise UsageError("file", str(path), "a Python script")
    launches: list[FileRun] = []
    with _in_place(_modules(script, launches, options), script, arguments):
        error = _error_of(script)
    return ScriptRun(tuple(launches), error)


def _error_of(script: Path) -> str | None:
    """How a script ended, if not well. What it raised is printed, as Python does."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return None if ended.code in (None, 0) else f"the script ended with status {ended.code}"
    except Exception as error:
        traceback.print_exception(error)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    return None


@contextmanager
def _in_place(modules: Mapping[str, types.ModuleType], script: Path, arguments: Sequence[str]) -> Generator[None]:
    """These modules in place of others of their names, and the script's own arguments and folder."""
    kept = {name: x for name, x in sys.modules.items() if name.split(".")[0] in ("cupy", "cupyx")}
    argv, path = sys.argv, list(sys.path)
    for name in kept:
        del sys.modules[name]
    sys.modules.update(modules)
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx")]:
            del sys.modules[name]
        sys.modules.update(kept)
        sys.argv, sys.path[:] = argv, path


# The stand-in


class ndarray(np.ndarray):
    """An array that lies on a CPU, and has what CuPy's has besides."""

    def get(self, *_: Any, out: Any = None, **__: Any) -> Any:
        found = np.array(self).view(np.ndarray)
        if out is not None:
            out[...] = found
        return found if out is None else out

    @property
    def device(self) -> Any:
        return _Device()


class _Device:
    id = 0
    compute_capability = "90"
    attributes: Mapping[str, int] = {}

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None: ...
    def use(self) -> None: ...
    def synchronize(self) -> None: ...


class _Stream(_Device):
    ptr = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> Any:
        return self

    def wait_event(self, *_: Any) -> None: ...


class _Lends(types.ModuleType):
    """A module with the names of one of NumPy's; arrays come from its functions as the stand-in's."""

    def __init__(self, name: str, lender: Any, own: Mapping[str, Any] | None = None) -> None:
        super().__init__(name)
        self._lender = lender
        self.__dict__.update(own or {})
        self.__path__ = []  # a package: `import cupy.cuda` finds it in sys.modules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self._lender, name):
            raise AttributeError(
                f"{self.__name__}.{name} isn't emulated: flashlab runs RawKernel and RawModule over NumPy"
            )
        found = getattr(self._lender, name)
        if isinstance(found, type) or not callable(found):
            return found

        @functools.wraps(found)
        def called(*given: Any, **named: Any) -> Any:
            return _as_ours(_with_dtype(found, given, named))

        return called


def _with_dtype(function: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """A call; where NumPy's function has no `dtype`, `stream` or `blocking` as CuPy's has, what it returns gets that type."""
    others = {name: x for name, x in named.items() if name not in ("stream", "blocking")}
    try:
        return function(*given, **others)
    except TypeError:
        if "dtype" not in others:
            raise
        dtype = others.pop("dtype")
        return np.asarray(function(*given, **others)).astype(dtype)


def _as_ours(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.view(ndarray)
    if isinstance(value, np.generic):  # CuPy's sums stay on the GPU
        return np.asarray(cast(Any, value)).view(ndarray)
    if isinstance(value, tuple | list):
        every = [_as_ours(each) for each in cast("Sequence[Any]", value)]
        return every if isinstance(value, list) else tuple(every)
    return value


def _refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"cupy.{name} isn't emulated: flashlab runs RawKernel and RawModule")

    return refuse


def _modules(script: Path, launches: list[FileRun], options: Mapping[str, Any]) -> dict[str, types.ModuleType]:
    """The modules that stand in for CuPy's."""

    class RawKernel:
        def __init__(self, code: str, name: str, options: Sequence[str] = (), *_: Any, **__: Any) -> None:
            self.code, self.name, self.options = code, name, tuple(options)
            self.max_dynamic_shared_size_bytes = 48 * 1024
            self.asked = _caller()

        def __call__(self, grid: Any, block: Any, args: Sequence[Any] = (), *, shared_mem: int = 0, **_: Any) -> None:
            source = _source(script, self.asked, self.code, self.name, self.options)
            given = [_passed(each) for each in args]
            run = emulate_source(
                source, given, grid=_sizes(grid), block=_sizes(block), sram=int(shared_mem), **options_
            )
            launches.append(run)

        def compile(self, *_: Any, **__: Any) -> None: ...

    class RawModule:
        def __init__(
            self, code: str | None = None, *, path: str | None = None, options: Sequence[str] = (),
            name_expressions: Sequence[str] | None = None, **_: Any,
        ) -> None:  # fmt: skip
            del name_expressions  # an instance is asked for by its name
            self.code = Path(path).read_text(encoding="utf-8") if code is None and path is not None else code or ""
            self.options = tuple(options)

        def get_function(self, name: str) -> RawKernel:
            return RawKernel(self.code, name, self.options)

        def get_global(self, name: str) -> Any:
            raise NotImplementedError(
                f"RawModule.get_global({name!r}) isn't emulated: use `flashlab emulate` with --symbol"
            )

        def compile(self, *_: Any, **__: Any) -> None: ...

    options_ = dict(options)
    runtime = types.SimpleNamespace(
        deviceSynchronize=_nothing, getDeviceCount=lambda: 1, getDevice=lambda: 0, setDevice=_nothing,
        streamSynchronize=_nothing, memGetInfo=lambda: (1 << 34, 1 << 34),
    )  # fmt: skip

    def compiled(code: str, options: Sequence[str] = (), **_: Any) -> RawModule:
        return RawModule(code, options=options)

    def get_array_module(*_: Any) -> types.ModuleType:
        return made["cupy"]

    cuda: dict[str, Any] = {
        "Device": _Device, "Stream": _Stream, "Event": _Stream, "runtime": runtime, "is_available": lambda: True,
        "get_current_stream": _Stream, "get_elapsed_time": _no_time, "synchronize": _nothing,
        "compile_with_cache": compiled,
    }  # fmt: skip
    _Stream.null = _Stream()  # type: ignore[attr-defined]
    nothing = types.SimpleNamespace()
    made: dict[str, types.ModuleType] = {
        "cupy.cuda": _Lends("cupy.cuda", nothing, cuda),
        "cupy.random": _Lends("cupy.random", np.random),
        "cupy.linalg": _Lends("cupy.linalg", np.linalg),
        "cupy.fft": _Lends("cupy.fft", np.fft),
        "cupy.testing": _Lends("cupy.testing", np.testing),
    }
    own: dict[str, Any] = {
        "RawKernel": RawKernel, "RawModule": RawModule, "ndarray": ndarray, "asnumpy": _on_the_host, "__version__": "13.0.0",
        "get_array_module": get_array_module, "get_default_memory_pool": _Pool, "get_default_pinned_memory_pool": _Pool,
        **{name: _refused(name) for name in ("ElementwiseKernel", "ReductionKernel", "fuse")},
        **{name.split(".")[1]: module for name, module in made.items()},
    }  # fmt: skip
    made["cupy"] = _Lends("cupy", np, own)
    return made


class _Pool:
    def free_all_blocks(self) -> None: ...
    def used_bytes(self) -> int:
        return 0

    total_bytes = used_bytes


def _on_the_host(array: Any, *_: Any, **__: Any) -> Array:
    return np.array(array).view(np.ndarray)


def _nothing(*_: Any) -> None: ...
def _no_time(*_: Any) -> float:
    return 0.0


def _sizes(extent: Any) -> Any:
    return tuple(int(n) for n in cast("Sequence[Any]", extent)) if isinstance(extent, Sequence) else int(extent)


def _passed(value: Any) -> Any:
    """An argument as CuPy passes it. Raises `TypeError` as CuPy does."""
    if isinstance(value, ndarray | np.generic):
        return AsItLies(value)
    if type(value) in _LIKE_CUPY:
        return AsItLies(_LIKE_CUPY[type(value)](value))
    if value is None:
        return AsItLies(np.uint64(0))
    raise TypeError(f"Unsupported type {type(value)}")


def _caller() -> Path | None:
    """The file that makes a kernel."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return Path(frame.f_code.co_filename) if frame else None


def _source(script: Path, asked: Path | None, code: str, name: str, options: Sequence[str]) -> Located:
    """A kernel's source. Its lines are those of the file that has it in a string, if that is found; else its own."""
    text = f'#line 1 "{name.partition("<")[0]}"\n{code}'
    path = script
    for file in (asked, script):
        if file is None or not os.path.isfile(file):
            continue
        try:
            found = next((each for each in embedded(file) if each.text == code), None)
        except UsageError:
            continue
        if found:
            text, path = found.source, file
            break
    return Located(path, name, text, Own.of(options, path))
