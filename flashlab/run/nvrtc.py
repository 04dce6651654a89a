"""Compiles the kernels without a GPU: NVRTC makes the machine code, and its log says what each entry point takes."""

import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels_cu
from flashlab.base import cache
from simulator.config import Config
from simulator.errors import Unavailable
from simulator.problem import FP8, ITEMSIZE, round_up

__all__ = [
    "OPTIONS",
    "CompileError",
    "Compiled",
    "CompilerMissing",
    "Resources",
    "compile_kernel",
    "cuda_include_dir",
    "defines",
    "release",
    "sources_digest",
]

OPTIONS = ("-std=c++17",)
"""The options of every compilation. The launcher on a GPU adds the same."""

_REPORT = ("--ptxas-options=-v", "--ptxas-options=-warn-spills")
_INSTALL = "pip install 'cuda-bindings==12.9.*' 'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*'"
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, FP8: 2}  # of what isn't an 8-bit operand
_COLUMNS = {1: 128, 2: 16, 4: 16}  # by bytes of an element: of a fragment, or of a whole panel that TMA writes


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
    ('-DFL_DTYPE=1', '-DHEAD_DIM=48', '-DBR=64', '-DBC=32', '-DWARPS=4', '-DSTAGES=2', '-DQ_IN_REGISTERS=1', '-DDYNAMIC=0')
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: the kernels have {', '.join(_DTYPES)}")
    values = {
        "FL_DTYPE": _DTYPES[dtype],
        "HEAD_DIM": round_up(head_dim, _COLUMNS[ITEMSIZE[dtype]]),
        "BR": config.tile.rows,
        "BC": config.tile.cols,
        "WARPS": config.warps,
        "STAGES": config.stages,
        "Q_IN_REGISTERS": int(config.q_in_registers),
        "DYNAMIC": int(config.dynamic),
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

    def make(folder: Path) -> None:
        includes = (f"-I{kernels_cu.include_dir()}", f"-I{cuda_include_dir()}")
        compiled = _compile(nvrtc, path, (*options, *includes), ptx=arch.startswith("compute_"))
        (folder / "image").write_bytes(compiled.image)
        (folder / "log").write_bytes(compiled.log.encode())

    key = cache.digest(name, path.read_bytes(), sources_digest(), _cuda_headers(), _nvrtc_build(), *options)
    kept = cache.entry("compiled", key, make)
    return Compiled(image=(kept / "image").read_bytes(), log=(kept / "log").read_bytes().decode())


def release() -> str:
    """Which NVRTC this is, to the build: "V12.9.86". Raises `CompilerMissing` without one."""
    return re.findall(r"V\d+\.\d+\.\d+", _nvrtc_build())[0]


def sources_digest() -> str:
    """A hash that changes with any header of the kernels, which a compiler's own cache may not look into."""
    headers = sorted(kernels_cu.include_dir().rglob("*.cuh"))
    return cache.digest(*(part for path in headers for part in (path.name, path.read_bytes())))[:16]


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


@functools.cache
def _cuda_headers() -> str:
    """What tells one version of the CUDA headers from another, wherever and whenever they were installed: all names and sizes, and
    what is in those for numbers of 8 and 16 bits, which kernels compute with."""
    headers = [path for path in sorted(cuda_include_dir().iterdir()) if path.is_file()]
    read = (path.read_bytes() for path in headers if re.match(r"cuda_(fp|bf)\d", path.name))
    return cache.digest(*(f"{path.name} {path.stat().st_size}" for path in headers), *read)


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


@functools.cache
def _nvrtc_build() -> str:
    """Which NVRTC this is, to the build: what stands at the head of any PTX that it makes."""
    ptx = _compile_text(_nvrtc(), b"", "empty.cu", (), ptx=True).image.decode()
    return "\n".join(line for line in ptx.splitlines() if line.startswith("//"))


def _compile(nvrtc: Any, path: Path, options: Sequence[str], *, ptx: bool) -> Compiled:
    return _compile_text(nvrtc, path.read_bytes(), path.name, options, ptx=ptx)


def _compile_text(nvrtc: Any, text: bytes, name: str, options: Sequence[str], *, ptx: bool) -> Compiled:
    def checked(answer: tuple[Any, ...]) -> Any:
        if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} with {' '.join(options)}:\n{said}")
        size, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        image = bytearray(checked(size(program)))
        checked(get(program, image))
        return Compiled(image=bytes(image), log=said)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _figure(pattern: str, text: str, default: int | None = None) -> int:
    if match := re.search(pattern, text):
        return int(match[1])
    if default is None:
        raise CompileError(f"ptxas's report lacks {pattern!r}:\n{text}")
    return default
