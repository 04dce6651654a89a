"""Attention on a GPU: plans (counts, kernels, grid), made once a configuration and launched through CuPy."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import kernels_cu
from flashlab import arrays, compiler, launching, tma
from flashlab.arrays import View, cupy
from simulator import catalogue, count
from simulator.counts import Counts
from simulator.devices import DEVICES, Device
from simulator.errors import UsageError, unknown
from simulator.problem import ITEMSIZE, Problem, output_dtype
from simulator.program import Program
from simulator.simulate import Scales, TileLike, Window, problem_of

__all__ = ["ARCH", "Plan", "Ready", "attention", "current_device", "plan"]

ARCH: str | None = os.environ.get("FLASHLAB_ARCH")
"""`compute_75`, say, to run that architecture's PTX instead of the GPU's own code: a T4's kernels on a newer GPU."""

_INPUTS = ("q", "k", "v")
_ARRAYS = (*_INPUTS, "out")
_SCALES = ("q_scale", "k_scale", "v_scale")
_NULL = np.uintp(0)
_MOST_BLOCKS = (1 << 31) - 1
_MOST_CALLS = 1024  # kept with all that is decided for their arrays
_MOST_KEPT = 256  # sets of pointers that a plan keeps what it passes for
_STATIC_SRAM = 48 * 1024  # what a block may use without asking


def attention(
    q: Any, k: Any, v: Any, *, algorithm: str | Program = "flash2", causal: bool = False, window: Window = None,
    scale: float | None = None, lse: bool = False, out: Any = None, tile: TileLike = None, backend: str = "gpu",
    device: Device | str | None = None, scales: Scales | None = None,
) -> Any:  # fmt: skip
    """Attention by one of the kernels: arrays of CuPy, torch or JAX in GPU memory in, the same kind out.

    `backend="emulator"` runs the kernel on the CPU as built for `device` (None: "h100"): it takes NumPy arrays, too, and
    raises `EmulationError` for every misuse of the machine that it sees.

    q `(batch, heads, len_q, head_dim)`, k and v `(batch, kv_heads, len_kv, head_dim)`, strided or not, float32, float16
    or bfloat16. Returns `out` like q; with `lse=True` `(out, lse)`, the LSE float32 `(batch, heads, len_q)`, natural
    logarithm. `flash3_fp8` takes float8_e4m3fn (of CuPy, which has no such dtype, arrays of uint8) and returns bfloat16;
    `scales` are what its operands are to be multiplied with, contiguous arrays of the same kind (None: 1).

    `causal` is aligned bottom-right, `window=(left, right)` inclusive; `tile=None` is the default for GPU, head dim and
    dtype. Runs on the framework's current stream, on the GPU where the arrays lie. `out=` (CuPy, torch) is written in
    place and returned. Inputs never change; those that a kernel can't take as they lie are copied.

    Raises `UsageError` for bad input, `Unavailable` without a GPU or CuPy.

    >>> import cupy, flashlab as fl                                                    # doctest: +SKIP
    >>> q, k, v = (cupy.random.rand(1, 8, 1024, 64).astype("float16") for _ in "qkv")  # doctest: +SKIP
    >>> fl.attention(q, k, v, causal=True).shape                                       # doctest: +SKIP
    (1, 8, 1024, 64)
    """
    if backend == "emulator":
        from flashlab.emulator import attention as emulated

        return emulated(
            q, k, v, algorithm=algorithm, causal=causal, window=window, scale=scale, lse=lse, out=out, tile=tile,
            device=device, scales=scales,
        )  # fmt: skip
    if backend != "gpu":
        raise unknown("backend", backend, ["gpu", "emulator"])
    if device is not None:
        raise UsageError("device", device, "None: backend 'gpu' runs where the arrays lie")
    framework = arrays.framework("q", q)
    views: dict[str, View] = {}
    for name, x in zip(_ARRAYS, (q, k, v) if out is None else (q, k, v, out), strict=False):
        if type(x) is not type(q) and arrays.framework(name, x) is not framework:
            raise UsageError(name, type(x).__name__, f"an array of the same kind as q ({type(q).__name__})")
        views[name] = view = framework.view(name, x)
        if view.device != views["q"].device:
            raise UsageError(f"{name}.device", view.device, f"GPU {views['q'].device}, where q lies")
    if out is not None and not framework.writable:
        raise UsageError("out", "an immutable array", "None: only CuPy and torch arrays are written in place")
    first = views["q"]
    options = ARCH, algorithm, causal, window, scale, tile, lse
    with framework.stream(first.device):
        if out is None:
            _kept(_cached_plan, _layouts(views), first.device, *options)  # raises before anything is allocated
            out = framework.empty(first.shape, output_dtype(first.dtype), first)
            views["out"] = arrays.framework("out", out).view("out", out)
        logs = framework.empty(first.shape[:3], "float32", first) if lse else None
        if logs is not None:
            views["lse"] = arrays.framework("lse", logs).view("lse", logs)
        if scales is not None:
            views |= {name: framework.view(name, x) for name, x in zip(_SCALES, Scales.of(scales), strict=True)}
        call = _kept(_cached_call, tuple([x[:5] for x in views.values()]), *options)
        if call.ready is not None:
            call.ready.launch()
        else:
            _launch_padded(call, views)
        out = framework.hand_back(out, first)
        return out if logs is None else (out, framework.hand_back(logs, first))


# an array's pointer, shape, strides, dtype and device: a View without its owner
_Place = tuple[int, tuple[int, ...], tuple[int, ...], str, int]
_Layout = tuple[tuple[int, ...], tuple[int, ...], str, int]


class _Call(NamedTuple):
    """What is decided once for arrays that lie where they lie: the plan, which arrays must go through padded buffers,
    and the plan made ready for the arrays where none must."""

    plan: Plan
    padded: tuple[str, ...]
    ready: Ready | None


def _kept(cached: Any, *key: Any) -> Any:
    """What a cached function has for a key; made anew for one that can't be kept (with a list, say, for a tile)."""
    try:
        return cached(*key)
    except TypeError:
        return cached.__wrapped__(*key)


@functools.lru_cache(maxsize=_MOST_CALLS, typed=True)
def _cached_call(
    places: tuple[_Place, ...], arch: str | None, algorithm: str | Program, causal: bool, window: Window,
    scale: float | None, tile: TileLike, lse: bool,
) -> _Call:  # fmt: skip
    """The one look-up of a warm call: whatever its checks depend on is part of the key, so that each is made once.

    `places` are those of q, k, v, out, lse if asked for, and perhaps the scales.
    """
    names = (*_INPUTS, "out", *(("lse",) if lse else ()), *_SCALES)
    views = {name: View(*place, None) for name, place in zip(names, places, strict=False)}
    options = arch, algorithm, causal, window, scale, tile, lse
    plan, padded = _kept(_cached_plan, _layouts(views), views["q"].device, *options)
    _check_out(views)
    if _SCALES[0] in views:
        _check_scales([views[name] for name in _SCALES], views["q"].device, plan.counts)
    out = views["out"]
    # kernels write whole 16-byte chunks: a row of the caller's that isn't made of those is not theirs to write
    if out.shape[-1] * ITEMSIZE[out.dtype] % 16 or not arrays.is_aligned(out):
        padded = (*padded, "out")
    return _Call(plan, padded, None if padded else plan.ready(views))


def _layouts(views: Mapping[str, View]) -> tuple[_Layout, ...]:
    """Of q, k and v what a plan depends on: shape, strides, dtype, and where the base lies in a 16-byte chunk."""
    return tuple([(x.shape, x.strides, x.dtype, x.pointer & 15) for x in (views[name] for name in _INPUTS)])


@functools.lru_cache(maxsize=4096, typed=True)
def _cached_plan(
    layouts: tuple[_Layout, ...], device: int, arch: str | None, algorithm: str | Program, causal: bool,
    window: Window, scale: float | None, tile: TileLike, lse: bool,
) -> tuple[Plan, tuple[str, ...]]:  # fmt: skip
    """The plan for inputs of these layouts on the current device, and those inputs that it can't take as they lie."""
    views = {
        name: View(base, shape, strides, dtype, device, None)
        for name, (shape, strides, dtype, base) in zip(_INPUTS, layouts, strict=True)
    }
    q, k, v = (SimpleNamespace(shape=view.shape, dtype=view.dtype) for view in views.values())
    problem = problem_of(q, k, v, causal=causal, window=window, scale=scale)
    boxed = {name for kernel in catalogue.get(algorithm).kernels for name, _ in kernel.boxes}
    padded = tuple(
        name for name, view in views.items()
        if not arrays.is_aligned(view) or (name in boxed and not tma.takes(view))
    )  # fmt: skip
    return plan(algorithm, problem, tile=tile, lse=lse, arch=arch), padded


def _launch_padded(call: _Call, views: Mapping[str, View]) -> None:
    """Runs a plan on arrays of any layout: what a kernel can't take goes through padded buffers."""
    passed = dict(views)
    for name in call.padded:
        passed[name] = arrays.padded_like(views[name])
        if name != "out":
            arrays.copy(views[name], passed[name])
    call.plan.ready(passed).launch()
    if "out" in call.padded:
        arrays.copy(passed["out"], views["out"])


def _check_out(views: Mapping[str, View]) -> None:
    q, out = views["q"], views["out"]
    if out.shape != q.shape:
        raise UsageError("out.shape", out.shape, f"{q.shape}, as q has")
    if out.dtype != output_dtype(q.dtype):
        raise UsageError("out.dtype", out.dtype, f"{output_dtype(q.dtype)}, for q of {q.dtype}")
    if arrays.overlaps_itself(out):
        raise UsageError("out.strides", out.strides, "elements that don't overlap each other")
    for name in _INPUTS:
        if arrays.overlap(out, views[name]):
            raise UsageError("out", f"memory shared with {name}", "an array apart from the inputs")


def _check_scales(scales: Sequence[View], device: int, counts: Counts) -> None:
    Scales(*scales).named(counts.problem, counts.tile)
    for name, x in zip(_INPUTS, scales, strict=True):
        if x.device != device:
            raise UsageError(f"scales.{name}.device", x.device, f"GPU {device}, where q lies")
        dense = [4 * math.prod(x.shape[i:]) for i in (1, 2, 3)]
        if any(n > 1 and has != want for n, has, want in zip(x.shape, x.strides, dense, strict=True)):
            raise UsageError(f"scales.{name}.strides", x.strides, "a contiguous array")


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
        launching.check_problem(problem, device)
        if row.hopper:
            launching.check_hopper(row.name, problem, device)
        self.device = device
        self.counts: Counts = count(algorithm, problem, tile=tile, device=device, lse=lse)
        config = self.counts.config
        assert config is not None
        launching.check_tile(config, problem)
        for launch in self.counts.launches:
            if launch.blocks > _MOST_BLOCKS:
                blocks = f"{launch.blocks:,} blocks of {launch.name}"
                raise UsageError("problem", blocks, f"a grid of at most {_MOST_BLOCKS:,}")
        self.tensors = [
            (x.name, x.nbytes, launching.strides_of(x, problem.batch)) for x in self.counts.tensors.values()
        ]
        self._ready = functools.lru_cache(_MOST_KEPT)(functools.partial(Ready, self))
        self._shape = launching.shape_struct(problem, config.heads_together)
        macros = compiler.defines(config, problem.dtype, problem.head_dim)
        self._launches = [
            _Launch(
                kernel=kernel_of(
                    kernel.source, kernel.entry, macros, "sm_90a" if row.hopper else arch, launch.sram_peak
                ),
                grid=(launching.blocks_of(kernel, self.counts, launch),),
                block=(32 * launch.warps,),
                sram=launch.sram_peak,
                arguments=tuple(name if name in self.counts.tensors else None for name in kernel.arguments),
                boxes=launching.box_rows(kernel, self.counts),
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
        self._ones = {name: cupy().asarray(x) for name, x in launching.unit_scales(self.counts).items()}
        if self._ones:
            cupy().cuda.get_current_stream().synchronize()  # whichever stream comes next finds them written
        return {name: (x.data.ptr, ()) for name, x in self._ones.items()}

    def launches_at(self, places: Sequence[_At]) -> list[tuple[tuple[int, ...], _Packed]]:
        """Each launch and what it passes when the tensors lie at these pointers, with these strides."""
        problem, values = self.counts.problem, dict[str | None, Any]({None: _NULL})
        for (name, *_), (pointer, strides) in zip(self.tensors, places, strict=True):
            vector = self.counts.tensors[name].vector
            values[name] = np.uintp(pointer) if vector else np.array((pointer, *strides[:3]), launching.TENSOR)[()]
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
    kernel = _compiled(source, entry, macros, arch, compiler.sources_digest(), here)
    if sram > max(_STATIC_SRAM, kernel.max_dynamic_shared_size_bytes):  # never lowered: plans share the kernel
        kernel.max_dynamic_shared_size_bytes = sram
    return kernel


@functools.cache
def _compiled(source: str, entry: str, macros: tuple[str, ...], arch: str | None, digest: str, device: int) -> Any:
    del device  # part of the key
    path = kernels_cu.source(source)
    if arch is None:
        # CuPy adds the GPU's -arch, and its cache doesn't look into headers: hence their digest
        options = (*compiler.OPTIONS, f"-I{kernels_cu.include_dir()}", *macros, f"-DFL_DIGEST={digest}")
        return cupy().RawModule(code=path.read_text(encoding="utf-8"), options=options).get_function(entry)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / f"{entry}.ptx"
        ptx.write_bytes(compiler.compile_kernel(source, macros, arch=arch).image)
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


_NAMES = {
    "Tesla T4": "t4", "A100-SXM4-40GB": "a100-40", "A100-SXM4-80GB": "a100-80", "H100 80GB HBM3": "h100",
    "H200": "h200", "B200": "b200", "L4": "l4", "L40S": "l40s", "GeForce RTX 3090": "3090", "GeForce RTX 4090": "4090",
    "GeForce RTX 5090": "5090",
}  # fmt: skip
"""What drivers call the devices of the table, without "NVIDIA "."""

_FLOPS = {
    (7, 5): (1024, 128), (8, 0): (2048, 128), (8, 6): (512, 256), (8, 9): (512, 256), (9, 0): (4096, 256),
    (10, 0): (8192, 256),
}  # fmt: skip
"""FLOPs a clock and SM by compute capability: 16-bit tensor cores with float32 accumulation, and plain float32."""


def current_device() -> Device:
    """The current GPU as a `Device`: that of the table, or one built from what the driver says.

    Raises `Unavailable` without CuPy or a GPU.
    """
    return _device(cupy().cuda.runtime.getDevice())


@functools.cache
def _device(index: int) -> Device:
    runtime = cupy().cuda.runtime
    has = runtime.getDeviceProperties(index)
    title = has["name"].decode().removeprefix("NVIDIA ")
    capability, sms, sram = (
        (has["major"], has["minor"]),
        has["multiProcessorCount"],
        has["sharedMemPerBlockOptin"],
    )
    known = DEVICES.get(_NAMES.get(title, ""))
    if known and (known.compute_capability, known.sms, known.sram_per_block) == (capability, sms, sram):
        return known
    # cudaDevAttrClockRate and MemoryClockRate (kHz), GlobalMemoryBusWidth (bits); some virtual GPUs say 0
    clock, memory_clock, bus = (max(1, runtime.deviceGetAttribute(attribute, index)) for attribute in (13, 36, 37))
    tensor, plain = _FLOPS.get(capability, (1024, 256))
    return Device(
        name=title, title=title, compute_capability=capability, sms=sms, sram_per_block=sram,
        sram_per_sm=has["sharedMemPerMultiprocessor"], l2=has["l2CacheSize"], bandwidth=2e3 * memory_clock * bus / 8,
        tensor_flops=1e3 * clock * sms * tensor, fp32_flops=1e3 * clock * sms * plain, memory=has["totalGlobalMem"],
        max_warps_per_sm=has["maxThreadsPerMultiProcessor"] // 32, source="the driver",
    )  # fmt: skip
