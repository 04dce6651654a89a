"""Plans: all of a call but its arrays (counts, compiled kernels, grids), made once a configuration and launched through CuPy."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from flashlab.run import abi, nvrtc, tma
from flashlab.run.arrays import View, cupy
from flashlab.run.devices import current_device
from simulator import catalogue, count
from simulator.counts import Counts
from simulator.devices import DEVICES, Device
from simulator.errors import UsageError, unknown
from simulator.problem import Problem
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["ARCH", "Plan", "Ready", "kernel_of", "plan"]

ARCH: str | None = os.environ.get("FLASHLAB_ARCH")
"""`compute_75`, say, to run that architecture's PTX instead of the GPU's own code: a T4's kernels on a newer GPU."""

_NULL = np.uintp(0)
_MOST_BLOCKS = (1 << 31) - 1
_MOST_KEPT = 256  # sets of pointers that a plan keeps what it passes for
_STATIC_SRAM = 48 * 1024  # what a block may use without asking


class _Packed:
    """A launch's arguments as the driver takes them: a pointer to each."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._values = [np.array(x) for x in arguments]  # which must stay where they are
        self._pointers = np.array([x.ctypes.data for x in self._values], np.uintp)
        self.pointer: int = self._pointers.ctypes.data


@dataclass(frozen=True)
class _Launch:
    """One kernel with its grid; `arguments` are names of tensors and vectors, None for a NULL. `boxes` are those that the
    kernel gets TMA's descriptors of, with the rows of a box."""

    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    sram: int
    arguments: tuple[str | None, ...]
    boxes: Mapping[str, int]

    @functools.cached_property
    def configuration(self) -> tuple[int, ...]:
        """What the driver is told first: function, grid, block, SRAM."""
        (blocks,), (threads,) = self.grid, self.block
        return self.kernel.kernel.ptr, blocks, 1, 1, threads, 1, 1, self.sram


# an array's pointer and strides
_At = tuple[int, tuple[int, ...]]


class Ready:
    """A plan for arrays that lie at known places (None for a workspace), in the order of `plan.tensors`: what is left is
    to allocate the workspaces and to queue the kernels."""

    def __init__(self, plan: Plan, places: tuple[_At | None, ...]) -> None:
        self._plan, self._places = plan, places
        self._workspaces = [nbytes for (_, nbytes, _), at in zip(plan.tensors, places, strict=True) if at is None]
        self._queue = functools.lru_cache(_MOST_KEPT)(self._queued)

    def launch(self, first: int = 0) -> None:
        """Launches the kernels, from the `first` on, on CuPy's current device and stream; the workspaces come from CuPy's pool."""
        cuda = cupy().cuda
        # held until the launches are queued; the pool hands memory on in the stream's order
        held = [cuda.alloc(nbytes) for nbytes in self._workspaces]
        stream, launch = cuda.get_current_stream().ptr, cuda.driver.launchKernel
        # by the driver, for CuPy takes as long to look at arguments of known types as all the rest
        for configuration, arguments in self._queue(*[memory.ptr for memory in held])[first:]:
            launch(*configuration, stream, arguments.pointer, 0)

    def _queued(self, *workspaces: int) -> list[tuple[tuple[int, ...], _Packed]]:
        """The launches and what each passes, when the workspaces lie at these pointers."""
        left = iter(workspaces)
        places = [
            (next(left), strides) if at is None else at
            for (_, _, strides), at in zip(self._plan.tensors, self._places, strict=True)
        ]
        return self._plan.launches_at(places)


class Plan:
    """All of a call but its arrays: `counts` (what will be moved, to the byte), the `device`, the compiled kernels."""

    def __init__(
        self,
        algorithm: str | Program,
        problem: Problem,
        tile: TileLike,
        lse: bool,
        device: Device,
        arch: str | None,
    ) -> None:
        row = catalogue.get(algorithm)
        if not row.kernels:
            raise UsageError("algorithm", row.name, "one with a CUDA kernel (fl.simulate runs one's own)")
        abi.check_problem(problem, device)
        if row.hopper:
            abi.check_hopper(row.name, problem, device)
        self.device = device
        self.counts: Counts = count(algorithm, problem, tile=tile, device=device, lse=lse)
        config = self.counts.config
        assert config is not None
        abi.check_tile(config, problem)
        for launch in self.counts.launches:
            if launch.blocks > _MOST_BLOCKS:
                blocks = f"{launch.blocks:,} blocks of {launch.name}"
                raise UsageError("problem", blocks, f"a grid of at most {_MOST_BLOCKS:,}")
        self.tensors = [(x.name, x.nbytes, abi.strides_of(x, problem.batch)) for x in self.counts.tensors.values()]
        self._ready = functools.lru_cache(_MOST_KEPT)(functools.partial(Ready, self))
        self._shape = abi.shape_struct(problem, config.heads_together)
        macros = nvrtc.defines(config, problem.dtype, problem.head_dim)
        self._launches = [
            _Launch(
                kernel=kernel_of(
                    kernel.source, kernel.entry, macros, "sm_90a" if row.hopper else arch, launch.sram_peak
                ),
                grid=(abi.blocks_of(kernel, self.counts, launch),),
                block=(32 * launch.warps,),
                sram=launch.sram_peak,
                arguments=tuple(name if name in self.counts.tensors else None for name in kernel.arguments),
                boxes=abi.box_rows(kernel, self.counts),
            )
            for launch, kernel in zip(self.counts.launches, row.kernels, strict=True)
            if launch.blocks
        ]

    def launch(self, views: Mapping[str, View]) -> None:
        """Launches the kernels on CuPy's current device and stream; `views` as for `ready`."""
        self.ready(views).launch()

    def ready(self, views: Mapping[str, View]) -> Ready:
        """The plan for arrays that lie where these do: q, k, v, out and what else the caller brings, by name. Scales that he
        doesn't bring are 1.

        All must be `arrays.is_aligned`, and rows of `out` have room for whole 16-byte chunks.
        """
        return self._ready(
            tuple([
                (x.pointer, x.strides) if (x := views.get(name)) else self._unit_scales.get(name)
                for name, *_ in self.tensors
            ])
        )  # fmt: skip

    @functools.cached_property
    def _unit_scales(self) -> dict[str, _At]:
        """Where scales of 1 lie, for those that the plan's kernels take."""
        self._ones = {name: cupy().asarray(x) for name, x in abi.unit_scales(self.counts).items()}
        if self._ones:
            cupy().cuda.get_current_stream().synchronize()  # whichever stream comes next finds them written
        return {name: (x.data.ptr, ()) for name, x in self._ones.items()}

    def launches_at(self, places: Sequence[_At]) -> list[tuple[tuple[int, ...], _Packed]]:
        """Each launch and what it passes when the tensors lie at these pointers, with these strides."""
        problem, values = self.counts.problem, dict[str | None, Any]({None: _NULL})
        for (name, *_), (pointer, strides) in zip(self.tensors, places, strict=True):
            vector = self.counts.tensors[name].vector
            values[name] = np.uintp(pointer) if vector else np.array((pointer, *strides[:3]), abi.TENSOR)[()]
        found: list[tuple[tuple[int, ...], _Packed]] = []
        for each in self._launches:
            own = dict(values)
            for (name, *_), (pointer, strides) in zip(self.tensors, places, strict=True):
                if rows := each.boxes.get(name):
                    spec = self.counts.tensors[name]
                    shape = problem.batch, spec.heads // problem.batch, spec.rows, spec.cols
                    own[name] = tma.descriptor(pointer, shape, strides, spec.dtype, rows)
            found.append((each.configuration, _Packed([*[own[name] for name in each.arguments], self._shape])))
        return found


def plan(
    algorithm: str | Program, problem: Problem, *, tile: TileLike = None, lse: bool = False, arch: str | None = None
) -> Plan:
    """The plan of an algorithm on the current GPU; its counts are those of `fl.count(…, device=current_device())`.

    `arch` as `ARCH`: the kernels of that architecture, configured as for the first device of the table that has it.
    """
    arch = arch or ARCH
    return Plan(algorithm, problem, tile, lse, _device_of_arch(arch) if arch else current_device(), arch)


def kernel_of(source: str, entry: str, macros: tuple[str, ...], arch: str | None, sram: int) -> Any:
    """A kernel of the current device, compiled or from a cache, that may use `sram` bytes a block."""
    here = cupy().cuda.runtime.getDevice()
    kernel = _compiled(source, entry, macros, arch, nvrtc.sources_digest(), here)
    if sram > max(_STATIC_SRAM, kernel.max_dynamic_shared_size_bytes):  # never lowered: plans share the kernel
        kernel.max_dynamic_shared_size_bytes = sram
    return kernel


@functools.cache
def _compiled(source: str, entry: str, macros: tuple[str, ...], arch: str | None, digest: str, device: int) -> Any:
    del device  # part of the key
    path = kernels_cu.source(source)
    if arch is None:
        # CuPy adds the GPU's -arch, and its cache doesn't look into headers: hence their digest
        options = (*nvrtc.OPTIONS, f"-I{kernels_cu.include_dir()}", *macros, f"-DFL_DIGEST={digest}")
        return cupy().RawModule(code=path.read_text(encoding="utf-8"), options=options).get_function(entry)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / f"{entry}.ptx"
        ptx.write_bytes(nvrtc.compile_kernel(source, macros, arch=arch).image)
        kernel = cupy().RawModule(path=str(ptx)).get_function(entry)
        _ = kernel.attributes  # loads the file while it is there
        return kernel


def _device_of_arch(arch: str) -> Device:
    known: dict[str, Device] = {}
    for device in DEVICES.values():
        known.setdefault("compute_{}{}".format(*device.compute_capability), device)
    if arch not in known:
        raise unknown("FLASHLAB_ARCH", arch, known)
    return known[arch]
