"""Compiles the kernels without a GPU: NVRTC makes the machine code, and its log says what each entry point takes."""

import base64
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels_cu
from simulator.config import Config
from simulator.errors import Unavailable
from simulator.problem import FP8, ITEMSIZE, round_up

__all__ = [
    "OPTIONS",
    "CompileError",
    "Compiled",
    "CompilerMissing",
    "Resources",
    "cache_dir",
    "compile_kernel",
    "cuda_include_dir",
    "defines",
    "sources_digest",
]

OPTIONS = ("-std=c++17",)
"""What every kernel is compiled with, by whomever: the launcher on a GPU adds the same."""

_REPORT = ("--ptxas-options=-v", "--ptxas-options=-warn-spills")
_INSTALL = "pip install 'cuda-bindings==12.9.*' 'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*'"
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, FP8: 2}  # of what isn't an 8-bit operand
_FRAGMENT, _PANEL_BYTES = 16, 128  # of a kernel's tiles: columns of a warp's, bytes of those that TMA writes


class CompilerMissing(Unavailable):
    """NVRTC or the CUDA headers aren't installed; the message says what to install."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message is its log."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What an entry point takes: registers and bytes of stack and spills a thread, bytes of static SRAM a block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel source, compiled: a cubin (PTX for a `compute_XX` target) and the compiler's log."""

    image: bytes
    log: str

    @property
    def resources(self) -> Mapping[str, Resources]:
        """By entry point, as ptxas reports them; empty for PTX, which hasn't been through it."""
        found: dict[str, Resources] = {}
        for part in self.log.split("Compiling entry function '")[1:]:
            found[part[: part.index("'")]] = Resources(
                registers=_figure(r"Used (\d+) registers", part),
                stack=_figure(r"(\d+) bytes stack frame", part),
                spill_stores=_figure(r"(\d+) bytes spill stores", part),
                spill_loads=_figure(r"(\d+) bytes spill loads", part),
                static_smem=_figure(r"(\d+) bytes smem", part, default=0),
            )
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines of the log that warn: ptxas's on spills among them, and its remarks on wgmma (C75xx)."""
        return tuple(
            line.strip() for line in self.log.splitlines() if re.search(r"\bwarning\b|\(C75\d\d\)", line, re.I)
        )

    @property
    def spills(self) -> int:
        """Bytes that a thread moves to and from local memory, over all entry points."""
        return sum(each.spill_stores + each.spill_loads for each in self.resources.values())


def defines(config: Config, dtype: str, head_dim: int) -> tuple[str, ...]:
    """The macros of one configuration, as compiler options.

    >>> from simulator.config import Config, Tile
    >>> defines(Config(tile=Tile(64, 32), warps=4, stages=2, q_in_registers=True), "float16", 40)
    ('-DFL_DTYPE=1', '-DHEAD_DIM=48', '-DBR=64', '-DBC=32', '-DWARPS=4', '-DSTAGES=2', '-DQ_IN_REGISTERS=1', '-DPAIRS=0')
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: the kernels have {', '.join(_DTYPES)}")
    values = {
        "FL_DTYPE": _DTYPES[dtype],
        "HEAD_DIM": round_up(head_dim, _PANEL_BYTES // ITEMSIZE[dtype] if config.consumers else _FRAGMENT),
        "BR": config.tile.rows,
        "BC": config.tile.cols,
        "WARPS": config.warps,
        "STAGES": config.stages,
        "Q_IN_REGISTERS": int(config.q_in_registers),
        "PAIRS": int(config.pairs),
        **dict(config.constants),
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def compile_kernel(name: str, options: Sequence[str] = (), *, arch: str) -> Compiled:
    """Compiles `kernels_cu/<name>.cu` for `arch`: "sm_80" makes a cubin, "compute_75" PTX.

    `options` are those of `defines`, and any of NVRTC's. What was compiled before comes from a cache on disk. Raises
    `CompileError`, and `CompilerMissing` without NVRTC.
    """
    nvrtc = _nvrtc()
    path = kernels_cu.source(name)
    options = (*OPTIONS, *options, *_REPORT, f"-arch={arch}")
    key = _digest(name, path.read_text(), sources_digest(), _nvrtc_version(), *options)
    cached = cache_dir() / "compiled" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        stored = json.loads(cached.read_bytes())
        return Compiled(image=base64.b64decode(stored["image"]), log=stored["log"])
    includes = (f"-I{kernels_cu.include_dir()}", f"-I{cuda_include_dir()}")
    compiled = _compile(nvrtc, path, (*options, *includes), ptx=arch.startswith("compute_"))
    stored = {"log": compiled.log, "image": base64.b64encode(compiled.image).decode()}
    _replace(cached, json.dumps(stored).encode())
    return compiled


def sources_digest() -> str:
    """A hash that changes with any header of the kernels, which a compiler's own cache may not look into."""
    headers = sorted(kernels_cu.include_dir().rglob("*.cuh"))
    return _digest(*(part for path in headers for part in (path.name, path.read_text())))[:16]


def cache_dir() -> Path:
    """Where compiled kernels are kept: `FLASHLAB_CACHE`, or the system's folder for a user's caches."""
    if override := os.environ.get("FLASHLAB_CACHE"):
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "flashlab" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "flashlab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashlab"


@functools.cache
def cuda_include_dir() -> Path:
    """The CUDA headers of NVRTC's own major version: those of NVIDIA's wheels, or else of an installed toolkit."""
    major = _nvrtc_version().split(".")[0]
    wheels = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (wheels.submodule_search_locations or ())] if wheels else []
    candidates = [root / folder / "include" for root in roots for folder in (f"cu{major}", "cuda_runtime")]
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    candidates += [Path(f"/usr/local/cuda-{major}/include"), Path("/usr/local/cuda/include")]
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise CompilerMissing(f"the CUDA headers are missing: {_INSTALL}")


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompilerMissing(f"NVRTC's Python bindings are missing: {_INSTALL}") from error


@functools.cache
def _nvrtc_version() -> str:
    try:
        _, major, minor = _nvrtc().nvrtcVersion()  # the first call loads the library
    except RuntimeError as error:
        raise CompilerMissing(f"NVRTC's library is missing: {_INSTALL}") from error
    return f"{major}.{minor}"


def _compile(nvrtc: Any, path: Path, options: Sequence[str], *, ptx: bool) -> Compiled:
    def checked(answer: tuple[Any, ...]) -> Any:
        if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{path.name}: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{path.name} with {' '.join(options)}:\n{text}")
        size, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        image = bytearray(checked(size(program)))
        checked(get(program, image))
        return Compiled(image=bytes(image), log=text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file in one step, so that nobody reads half of it; a cache that can't be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)


def _digest(*parts: str) -> str:
    # lengths keep ("ab", "c") apart from ("a", "bc")
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()


def _figure(pattern: str, text: str, default: int | None = None) -> int:
    if match := re.search(pattern, text):
        return int(match[1])
    if default is None:
        raise CompileError(f"ptxas's report lacks {pattern!r}:\n{text}")
    return default
