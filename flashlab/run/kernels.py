"""The kernels of a launch on the current GPU: compiled, or found in a cache, loaded, and ready to be queued."""

from __future__ import annotations

import functools
import tempfile
import threading
from pathlib import Path
from typing import Any

import kernels_cu
from flashlab.run import abi, arrays, nvrtc, tritonc
from flashlab.run.arrays import cupy
from flashlab.run.launch import Launch, enter
from simulator.algorithm import Kernel
from simulator.counts import Counts, LaunchCounts
from simulator.errors import SramOverflow

__all__ = ["kernel_of", "launch_of"]

_STATIC_SRAM = 48 * 1024  # what a block may use without asking
_compiling: dict[Any, threading.Lock] = {}


def launch_of(kernel: Kernel, counts: Counts, launch: LaunchCounts, arch: str | None) -> Launch:
    """A launch of a plan. With `arch` the kernel is that of another architecture, which the GPU's driver compiles."""
    return _LAUNCHES[kernel.language](kernel, counts, launch, arch)


def _in_cuda(kernel: Kernel, counts: Counts, launch: LaunchCounts, arch: str | None) -> Launch:
    """A launch of a kernel in CUDA."""
    config, problem = counts.config, counts.problem
    assert config is not None
    macros = nvrtc.defines(config, problem.dtype, problem.head_dim)
    return Launch(
        language="cuda",
        kernel=kernel_of(kernel.source, kernel.entry, macros, kernel.arch or arch, launch.sram_peak),
        grid=(abi.blocks_of(kernel, counts, launch),),
        block=(32 * launch.warps,),
        sram=launch.sram_peak,
        arguments=abi.passed(kernel, counts),
        boxes=abi.box_rows(kernel, counts),
    )


def _in_triton(kernel: Kernel, counts: Counts, launch: LaunchCounts, arch: str | None) -> Launch:
    """A launch of a kernel in Triton, whose compiler chooses how much SRAM it takes."""
    key = kernel, counts.problem.dtype, counts.problem.head_dim, counts.tile, counts.device.name
    with _compiling.setdefault(key, threading.Lock()):  # as in `kernel_of`
        compiled = tritonc.compile_kernel(kernel, counts)
    if compiled.sram > counts.device.sram_per_block:
        needed, limit = compiled.sram, counts.device.sram_per_block
        raise SramOverflow("tile", str(counts.tile), needed=needed, limit=limit, device=counts.device.name)
    ending, image = ("ptx", compiled.ptx) if arch else ("cubin", compiled.cubin)
    return Launch(
        language="triton",
        kernel=_roomy(_loaded(image, ending, kernel.entry, _device()), compiled.sram),
        grid=(abi.blocks_of(kernel, counts, launch),),
        block=(32 * compiled.warps,),
        sram=compiled.sram,
        arguments=compiled.arguments,
        boxes={},
    )


_LAUNCHES = {"cuda": _in_cuda, "triton": _in_triton}
"""By language: what makes a launch."""


def kernel_of(source: str, entry: str, macros: tuple[str, ...], arch: str | None, sram: int) -> Any:
    """A kernel of the current device, compiled or from a cache, that may use `sram` bytes per block."""
    text = kernels_cu.source(source).read_text(encoding="utf-8")
    key = source, text, entry, macros, arch, nvrtc.sources_digest(), _device()
    with _compiling.setdefault(key, threading.Lock()):  # a second thread waits, rather than compile it as well
        return _roomy(_compiled(*key), sram)


def _device() -> int:
    """The number of the current device. This thread then has a context of it."""
    enter(cuda := cupy().cuda)
    return cuda.runtime.getDevice()


def _roomy(kernel: Any, sram: int) -> Any:
    """A kernel that may use `sram` bytes per block from now on. Plans share it, so this never lowers what it may use."""
    if sram > max(_STATIC_SRAM, kernel.max_dynamic_shared_size_bytes):
        kernel.max_dynamic_shared_size_bytes = sram
    return kernel


@functools.cache
def _compiled(
    source: str, text: str, entry: str, macros: tuple[str, ...], arch: str | None, digest: str, device: int
) -> Any:
    if arch is None:
        # CuPy adds the GPU's -arch, and its cache doesn't look into headers: hence their digest
        options = (*nvrtc.OPTIONS, f"-I{kernels_cu.include_dir()}", *macros, f"-DFL_DIGEST={digest}")
        try:
            return cupy().RawModule(code=text, options=options).get_function(entry)
        except OSError as error:
            raise arrays.cache_refused(error) from None
    return _loaded(nvrtc.compile_kernel(source, macros, arch=arch).image, "ptx", entry, device)


@functools.cache
def _loaded(image: bytes, ending: str, entry: str, device: int) -> Any:
    """A kernel on the current `device`, from what a compiler made."""
    del device  # part of the key
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{entry}.{ending}"
        path.write_bytes(image)
        kernel = cupy().RawModule(path=str(path)).get_function(entry)
        _ = kernel.attributes  # loads the file while it is there
        return kernel
