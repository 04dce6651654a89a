"""Compiles the kernels in Triton, on a machine with a GPU or without: what `nvrtc` is for CUDA.

A kernel's parameters are called by what they are, and a launch fills them in by name (`abi.triton_parameters`). The
constants of the compiler are the tile, ROWS and COLS, and HEAD_DIM.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.run import abi
from simulator.algorithm import Kernel
from simulator.counts import Counts
from simulator.errors import Unavailable

__all__ = ["OPTIONS", "Compiled", "compile_kernel", "compiler", "constants_of", "function", "interpreter", "package"]

OPTIONS: dict[str, Any] = {"enable_fp_fusion": True, "maxnreg": 255}
"""What every kernel is compiled with, over what its configuration says. Where no one says how many registers there are,
the assembler may take 32 and spill the rest."""

_OLDEST = "3.6"
_INSTALL = f"pip install 'triton>={_OLDEST}', on Linux"
_SCRATCH = (None, None)  # pointers behind a kernel's own parameters: ours need no memory of that kind


@dataclass(frozen=True)
class Compiled:
    """A kernel, compiled: a cubin, and the PTX that it was assembled from. A launch passes what `arguments` name, in order
    (None: NULL). A block has `warps` warps, and `sram` bytes of shared memory."""

    cubin: bytes
    ptx: bytes
    arguments: tuple[str | None, ...]
    warps: int
    sram: int


def compile_kernel(kernel: Kernel, counts: Counts) -> Compiled:
    """Compiles a kernel for the device and the configuration of `counts`.

    Triton keeps on disk what it compiles (`TRITON_CACHE_DIR`). Raises `Unavailable` without Triton, where it is set to its
    interpreter, and where it can't keep anything.
    """
    compiler()
    assert counts.config is not None
    path, (major, minor) = abi.source_of(kernel), counts.device.compute_capability
    options = {"num_warps": counts.config.warps, "num_stages": counts.config.stages, **OPTIONS}
    return _compiled(
        path, path.read_text(encoding="utf-8"), kernel.entry, 10 * major + minor, tuple(constants_of(counts).items()),
        tuple(abi.triton_parameters(counts).items()), tuple(options.items()),
    )  # fmt: skip


def constants_of(counts: Counts) -> dict[str, int]:
    """The constants of a kernel's compilation."""
    assert counts.config is not None
    tile = {"ROWS": counts.tile.rows, "COLS": counts.tile.cols}
    return {**tile, "HEAD_DIM": counts.problem.head_dim, **dict(counts.config.constants)}


def compiler() -> Any:
    """Triton, set to its compiler. Raises `Unavailable`."""
    if (found := package()).knobs.runtime.interpret:
        raise Unavailable("TRITON_INTERPRET is set, and Triton compiles nothing for a GPU: start again without it")
    return found


def interpreter() -> Any:
    """Triton, set to its interpreter, which runs on a CPU. Raises `Unavailable`."""
    if not (found := package()).knobs.runtime.interpret:
        raise Unavailable(
            "on a CPU, Triton's interpreter runs its kernels: set TRITON_INTERPRET=1 before Triton is imported"
        )
    return found


def package() -> Any:
    """Triton, if it is here. Raises `Unavailable`."""
    try:
        found: Any = importlib.import_module("triton")
    except ImportError:
        raise Unavailable(f"kernels in Triton need it: {_INSTALL}") from None
    if _number(found.__version__) < _number(_OLDEST):
        raise Unavailable(f"Triton {found.__version__} is too old: {_INSTALL}")
    return found


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def function(path: Path, entry: str) -> Any:
    """A kernel of a module, as Triton's decorator made it: for its compiler, or for its interpreter."""
    return getattr(_module(path, path.read_text(encoding="utf-8")), entry)


@functools.cache
def _module(path: Path, text: str) -> Any:
    del text  # part of the key
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _compiled(
    path: Path,
    text: str,
    entry: str,
    arch: int,
    constants: tuple[tuple[str, int], ...],
    parameters: tuple[tuple[str, tuple[str, int | None]], ...],
    options: tuple[tuple[str, Any], ...],
) -> Compiled:
    del text  # part of the key
    of, targets = (importlib.import_module(name) for name in ("triton.compiler", "triton.backends.compiler"))
    kernel, known, fixed = function(path, entry), dict(parameters), dict(constants)
    types = {name: "constexpr" if name in fixed else known[name][0] for name in kernel.arg_names}
    passed = [name for name in types if name not in fixed]
    places = {name: (i,) for i, name in enumerate(types)}
    divided = {places[name]: [["tt.divisibility", n]] for name in passed if (n := known[name][1])}
    made = of.ASTSource(kernel, types, {places[name]: fixed[name] for name in types if name in fixed}, divided)
    try:
        found = of.compile(made, targets.GPUTarget("cuda", arch, 32), dict(options))
    except OSError as error:
        raise Unavailable(
            f"Triton can't keep what it compiles ({error}): set TRITON_CACHE_DIR to a folder that can be written"
        ) from None
    about = found.metadata
    assert not (about.global_scratch_size or about.profile_scratch_size), "a kernel that asks for memory of its own"
    return Compiled(
        cubin=found.asm["cubin"],
        ptx=found.asm["ptx"].encode(),
        arguments=(*passed, *_SCRATCH),
        warps=about.num_warps,
        sram=about.shared,
    )
