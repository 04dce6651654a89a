"""Plans: all of a call but its arrays (counts, compiled kernels, grids), made once per configuration and launched through CuPy."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from flashlab.run import abi, arrays, host, nvrtc, tma, tritonc
from flashlab.run.abi import At
from flashlab.run.arrays import Allocate, Framework, Place, View, cupy, from_the_pool
from flashlab.run.devices import current_device
from simulator import catalogue, count
from simulator.catalogue import Kernel
from simulator.counts import Counts, LaunchCounts, Spec
from simulator.devices import DEVICES, Device
from simulator.errors import Said, SramOverflow, Unavailable, UsageError, among, unknown
from simulator.names import AnyBackend, DeviceName
from simulator.operations.operation import Operation
from simulator.problem import WIDTH, Problem, Tile, round_up
from simulator.program import Program
from simulator.programs import flash3_backward_deterministic, flash3_paged, flash_decoding
from simulator.simulate import TileLike, run_on_data
from simulator.support import MOST_BLOCKS

__all__ = [
    "ARCH",
    "EmulatorPlan",
    "Plan",
    "Ready",
    "SimulatorPlan",
    "elsewhere",
    "gpu_plan",
    "kernel_of",
    "on_the_gpu",
    "plan",
]

ARCH: str | None = os.environ.get("FLASHLAB_ARCH")
"""`compute_75`, say, to run that architecture's PTX instead of the GPU's own code: a T4's kernels on a newer GPU."""

APART = False
"""Does each workspace have an allocation of its own? So that memcheck sees what runs from one into the next."""

_ONE_ORDER = " in one order"
_FASTEST = {
    "attention": ("flash_decoding", "flash3", "flash2"),
    "backward": ("flash3_backward_deterministic", "flash3_backward", "flash3_backward_wide", "flash2_backward"),
    "backward in one order": ("flash3_backward_deterministic", "flash3_backward_wide", "flash2_backward_deterministic"),
    "paged attention": ("flash3_paged", "paged"),
    "latent attention": ("mla_hopper", "mla"),
    "paged latent attention": ("mla_hopper_paged", "mla_paged"),
}

_PAYS: dict[str, Callable[[Problem, Device], bool]] = {
    "flash3_backward_deterministic": flash3_backward_deterministic.pays,
    "flash3_paged": flash3_paged.pays,
    "flash_decoding": flash_decoding.pays,
}
"""Where the fastest is so for some problems only: whether it is."""

_POSED = ("sinks", "alibi_slopes", "mask", "block_mask", "draft_mask", "dlse")
"""Inputs whose default would be another problem's answer. That of the others says something: scales of 1, full tables."""
_MOST_KEPT = 256  # sets of pointers that a plan keeps what it passes for
_MOST_ZEROS = 256  # streams and captured calls for which a plan has zeros ahead
_ZEROS = 8 << 20  # bytes of them, about
_ALIGNED = 32  # bytes: each workspace begins at a multiple, so at a sector of the L2
_STATIC_SRAM = 48 * 1024  # what a block may use without asking


class _Packed:
    """A launch's arguments as the driver takes them: a pointer to each."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._values = [np.array(x) for x in arguments]  # kept: the driver reads them through the pointers
        self._pointers = np.array([x.ctypes.data for x in self._values], np.uintp)
        self.pointer: int = self._pointers.ctypes.data


@dataclass(frozen=True)
class _Launch:
    """One kernel with its grid. `arguments` are names of what its `language` passes (`abi.VALUES`). `boxes` names the tensors
    that the kernel takes as TMA descriptors, each with the rows of its box."""

    language: str
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


class _Zeros:
    """Memory of zeros, which kernels leave as zeros: counters of blocks, above all.

    Each stream of a thread has its own, because calls on other streams may run at the same time. So has each call that a
    graph captures: the graph may be replayed beside them. They are made ahead, so that a call sets nothing to 0. But nothing
    can be made ahead while a graph captures: such a call takes a workspace, and its graph sets it to 0.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(max(1, nbytes), 256)
        self._held: list[Any] = []
        self._ahead: list[int] = []
        self._of_stream = dict[tuple[int, int], int]()
        if not cupy().cuda.get_current_stream().is_capturing():
            self._make()

    def at(self, stream: Any, take: Allocate) -> tuple[int, Any]:
        """The pointer to zeros for a call on the current stream, and what holds them. `take` is the call's allocator."""
        if stream.is_capturing():
            try:
                return self._ahead.pop(), self._held
            except IndexError:
                pointer, memory = take(self._nbytes)
                cupy().cuda.runtime.memsetAsync(pointer, 0, self._nbytes, stream.ptr)
                return pointer, memory
        key = threading.get_ident(), stream.ptr
        while key not in self._of_stream:
            try:
                self._of_stream[key] = self._ahead.pop()
            except IndexError:  # another thread may take what this one makes
                self._make()
        return self._of_stream[key], self._held

    def _make(self) -> None:
        """Makes some ahead."""
        number = max(4, min(_MOST_ZEROS, _ZEROS // self._nbytes))
        made = cupy().zeros((number * self._nbytes,), np.uint8)
        cupy().cuda.get_current_stream().synchronize()  # whichever stream comes next finds them
        self._held.append(made)
        self._ahead += [made.data.ptr + i * self._nbytes for i in reversed(range(number))]


class Ready:
    """A plan for arrays that lie at known places (None for a workspace), in the order of `plan.tensors`: what is left is
    to allocate the workspaces and to queue the kernels."""

    def __init__(self, plan: Plan, places: tuple[At | None, ...]) -> None:
        self._plan, self._places = plan, places
        missing = [name for (name, *_), at in zip(plan.tensors, places, strict=True) if at is None]
        own = [plan.counts.tensors[name] for name in missing if name not in plan.zeros]
        pieces = [_laid_out(x) for x in (([x] for x in own) if APART else [own] if own else [])]
        begins = {name: (i, offset) for i, (offsets, _) in enumerate(pieces) for name, offset in offsets.items()}
        self._pieces = [nbytes for _, nbytes in pieces]
        self._workspaces = [(*begins.get(name, (0, 0)), plan.zeros.get(name)) for name in missing]
        self._queue = functools.lru_cache(_MOST_KEPT)(self._queued)

    def launch(self, first: int = 0, *, allocate: Allocate | None = None) -> None:
        """Launches the kernels from number `first` on, on CuPy's current device and stream.

        `allocate` is the allocator of the workspaces (None: CuPy's pool). It must hand memory on in that stream's order.
        """
        cuda = _cuda()
        stream, launch, take = cuda.get_current_stream(), cuda.driver.launchKernel, allocate or from_the_pool
        # held until the launches are queued: allocators hand memory on in the stream's order
        pieces = [take(nbytes) for nbytes in self._pieces]
        held = [
            (pieces[i][0] + offset, None) if zeros is None else zeros.at(stream, take)
            for i, offset, zeros in self._workspaces
        ]
        # the driver's own call: CuPy's looks at the arguments' types, which takes as long as all the rest
        for configuration, arguments in self._queue(*[pointer for pointer, _ in held])[first:]:
            launch(*configuration, stream.ptr, arguments.pointer, 0)

    def _queued(self, *workspaces: int) -> list[tuple[tuple[int, ...], _Packed]]:
        """The launches and what each passes, when the workspaces lie at these pointers."""
        left = iter(workspaces)
        places = [
            (next(left), strides) if at is None else at
            for (_, _, strides), at in zip(self._plan.tensors, self._places, strict=True)
        ]
        return self._plan.launches_at(places)


class Plan:
    """All of a call but its arrays, for the GPU that is current when it is made. `run` calls.

    `counts` are what a call moves, to the byte; `device` is the GPU's model. `workspace` is how many bytes a call allocates
    beside the outputs that it returns. (An LSE that nobody asked for is written to memory that all calls share.) Arrays that
    the kernels can't take as they lie go through padded buffers, as large as `counts.tensors` says.

    Making a plan compiles and loads all that a call launches. A call then allocates and launches, and does nothing else, so
    that a CUDA graph can capture the first one. There is one exception: where arrays are neither dense nor laid out as the
    kernels take them, CuPy compiles what copies them at the first call.

    Compiled kernels are kept on disk. CuPy keeps those that it compiles, in `CUPY_CACHE_DIR`, and Triton its own, in
    `TRITON_CACHE_DIR`. CuPy never compiles for Hopper's sm_90a, nor for an `arch` that was asked for: flashlab compiles those
    itself, and keeps them in its own cache (`flashlab cache dir`).

    Several threads may use a plan at once, on any streams. A kernel that counts the blocks that are done leaves its counters at 0
    for the next call, so an aborted launch spoils a plan.
    """

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
        row.check(problem, device)
        self.device, self.operation, self._gpu = device, row.operation, cupy().cuda.runtime.getDevice()
        self.counts: Counts = count(algorithm, problem, tile=tile, device=device, lse=lse)
        config = self.counts.config
        assert config is not None
        row.check(problem, device, config.tile)
        for launch in self.counts.launches:
            if launch.blocks > MOST_BLOCKS:
                blocks = f"{launch.blocks:,} blocks of {launch.name}"
                raise UsageError("problem", blocks, f"a grid of at most {MOST_BLOCKS:,}")
        tensors = self.counts.tensors
        self._returned = _returned(self.operation, self.counts, lse)
        self._required = _required(self.operation, problem)
        self._known = {x.name for x in self.operation.inputs} | self._returned.keys()
        self.zeros = {x.name: _Zeros(x.nbytes) for x in tensors.values() if x.zeros}
        self.workspace = _workspace(self.counts)
        self.tensors = [(x.name, x.nbytes, abi.strides_of(x, problem.batch)) for x in tensors.values()]
        self._ready = functools.lru_cache(_MOST_KEPT)(functools.partial(Ready, self))
        self._called = functools.lru_cache(_MOST_KEPT)(self._call)
        self._shape = abi.shape_struct(problem, config.heads_together)
        self._launches = [
            _LAUNCHES[kernel.language](kernel, self.counts, launch, arch)
            for launch, kernel in zip(self.counts.launches, row.launched(problem, config), strict=True)
            if launch.blocks
        ]
        self._left_out = {
            name: _constant(np.resize(x, tensors[name].nbytes // x.itemsize).tobytes(), x.dtype, self._gpu).data
            for name, x in abi.defaults(self.counts, self.operation).items()
        }
        for x in tensors.values():
            if x.role == "output" and x.name not in self._returned:
                self._left_out[x.name] = arrays.unread(x.nbytes, self._gpu)
        for x in tensors.values():
            if x.role != "workspace" and not x.vector and x.row_bytes != x.cols * x.itemsize:
                arrays.warm_copies(x.dtype, self._gpu)

    def launch(self, views: Mapping[str, View]) -> None:
        """Launches the kernels on CuPy's current device and stream; `views` as for `ready`."""
        self.ready(views).launch()

    def fits(self, name: str, view: View) -> bool:
        """Can the kernels take an array as it lies? They write whole chunks of 16 bytes, so an output's rows must end with
        one."""
        spec = self.counts.tensors[name]
        if spec.vector:
            return True
        whole_chunks = spec.role == "input" or view.shape[-1] * WIDTH[view.dtype] % 16 == 0
        return arrays.is_aligned(view) and whole_chunks and (name not in self.boxed or tma.takes(view))

    def launch_padded(self, views: Mapping[str, View], *, allocate: Allocate | None = None) -> None:
        """Launches the kernels on arrays of any layout: what they can't take goes through padded buffers, and back."""
        passed = dict(views)
        for name, view in views.items():
            if self.fits(name, view):
                continue
            passed[name] = arrays.padded_like(view, allocate or from_the_pool)
            if self.counts.tensors[name].role == "input":
                arrays.copy(view, passed[name])
        self.ready(passed).launch(allocate=allocate)
        for name, view in views.items():
            if passed[name] is not view and self.counts.tensors[name].role == "output":
                arrays.copy(passed[name], view)

    def run(self, given: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Runs on arrays by name, of CuPy, torch or JAX on the plan's GPU; the outputs by name, of the same kind. An
        `rng_state` of NumPy's is copied there first. Outputs that are given (`out=`, of CuPy or torch) are written in place.

        The kernels are queued on the framework's current stream there. Raises `UsageError` for arrays that aren't those of
        the plan's problem, or lie elsewhere.
        """
        handed = _handed(given, named)
        if not self._required <= handed.keys() <= self._known:
            inputs = {name: x for name, x in handed.items() if name not in self._returned}
            _bound(self.operation, self.counts.problem, inputs)
        state = handed.pop("rng_state") if isinstance(handed.get("rng_state"), np.ndarray) else None
        framework = arrays.framework_of(handed)
        held = framework.shared(handed)
        places = {name: framework.place(name, x) for name, x in held.items()}
        first, (*_, device) = next(iter(places.items()))
        if device != self._gpu:
            raise UsageError(f"{first}.device", device, f"GPU {self._gpu}, for which the plan was made")
        with framework.stream(device):
            if state is not None:
                held["rng_state"] = x = framework.numbers(np.ascontiguousarray(state))
                places["rng_state"] = framework.place("rng_state", x)
            for name, (shape, dtype) in self._returned.items():
                if name not in handed:
                    held[name] = x = framework.empty(shape, dtype)
                    places[name] = framework.place(name, x)
                elif not framework.writable:
                    raise UsageError(
                        name, "an immutable array", "None: only CuPy and torch arrays are written in place"
                    )
            if ready := self._called(framework, tuple(places.items())):
                ready.launch(allocate=framework.allocate)
            else:
                self.launch_padded(framework.views(places), allocate=framework.allocate)
            return {
                name: handed[name] if name in handed else framework.hand_back(held[name], handed[first])
                for name in self._returned
            }

    def _call(self, framework: Framework, places: tuple[tuple[str, Place], ...]) -> Ready | None:
        """The plan for arrays that lie there, checked; None if some must go through padded buffers. Whatever its checks depend
        on is an argument, so each is made once."""
        views = framework.views(dict(places))
        self.operation.check(self.counts.problem, views, self.counts.tile)
        outputs = {name: view for name, view in views.items() if name in self._returned}
        arrays.check_apart(outputs, {name: view for name, view in views.items() if name not in outputs})
        for name, view in views.items():
            if self.counts.tensors[name].vector:
                arrays.check_contiguous(name, view)
        return self.ready(views) if all(self.fits(name, view) for name, view in views.items()) else None

    @functools.cached_property
    def boxed(self) -> frozenset[str]:
        """The arrays that a kernel takes as TMA descriptors."""
        return frozenset(name for launch in self._launches for name in launch.boxes)

    def ready(self, views: Mapping[str, View]) -> Ready:
        """The plan for arrays that lie where these do: inputs and outputs by name. Inputs left out have their defaults, and
        outputs left out are written where nobody reads.

        All must be `arrays.is_aligned`, and an output's rows must have room for whole chunks of 16 bytes.
        """
        found = [
            (view.pointer, _of_four_axes(view)) if (view := views.get(name)) else self._place_of_default(name, strides)
            for name, _, strides in self.tensors
        ]
        return self._ready(tuple(found))

    def _place_of_default(self, name: str, strides: tuple[int, ...]) -> At | None:
        """Where an operand lies that callers left out; None for a workspace."""
        return (self._left_out[name].ptr, strides) if name in self._left_out else None

    def launches_at(self, places: Sequence[At]) -> list[tuple[tuple[int, ...], _Packed]]:
        """Each launch and what it passes when the tensors lie at these pointers, with these strides."""
        at = {name: place for (name, *_), place in zip(self.tensors, places, strict=True)}
        if (problem := self.counts.problem).page_size is not None:
            for name in at.keys() & {"k", "v"}:
                abi.check_pages(problem, self.counts.tensors[name], at[name][1])
        values = {each.language: abi.VALUES[each.language](self.counts, at, self._shape) for each in self._launches}
        found: list[tuple[tuple[int, ...], _Packed]] = []
        for each in self._launches:
            own = values[each.language] | {name: self._box(name, rows, at[name]) for name, rows in each.boxes.items()}
            found.append((each.configuration, _Packed([own[name] for name in each.arguments])))
        return found

    def _box(self, name: str, rows: int, at: At) -> Any:
        """The TMA descriptor of a tensor."""
        spec, (pointer, strides) = self.counts.tensors[name], at
        shape = abi.boxed_shape(spec, self.counts.problem)
        return tma.descriptor(pointer, shape, strides, spec.dtype, rows)


def plan(
    algorithm: str | Program,
    problem: Problem,
    *,
    backend: AnyBackend = "gpu",
    tile: TileLike = None,
    device: Device | DeviceName | None = None,
    lse: bool = False,
    arch: str | None = None,
) -> Plan | EmulatorPlan | SimulatorPlan:
    """What an algorithm does to a problem, decided once and run often: `plan(…).run(q=q, k=k, v=v)` gives the outputs by name.

    `backend` is "gpu" (the current one: arrays of CuPy, torch or JAX), "emulator" (the kernels on the CPU, built for `device`)
    or "simulator" (the tile program). `.counts` are those of `fl.count` there. `lse=True` has the LSE among the outputs.
    `arch` as `FLASHLAB_ARCH`: the kernels of that architecture, configured as for the first device of the table that has it.

    On a GPU, making the plan is the warm-up: the kernels are compiled, or found on disk, and loaded. From then on neither
    `run` nor `fl.attention` on such arrays compiles anything, and a CUDA graph can capture the first call. Outputs may be given,
    too: `run(q=q, k=k, v=v, out=out)` writes them in place. `.workspace` is how many bytes a call allocates beside them. Calls
    run on the framework's current stream, and several threads may call at once.

    Raises `UsageError`, `SramOverflow` for a tile that doesn't fit, `Unavailable` for what isn't here.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float16", causal=True)
    >>> plan = fl.plan("flash2", p, backend="simulator")
    >>> q, k, v = fl.random_inputs(p)
    >>> plan.run(q=q, k=k, v=v)["out"].shape, plan.counts == fl.count("flash2", p)
    ((1, 2, 64, 16), True)
    """
    problem = Problem.checked(problem)
    if arch is not None and not isinstance(arch, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("arch", arch, "an architecture by name, such as sm_80")
    among("backend", backend, ["gpu", "emulator", "simulator"])
    if backend == "gpu":
        if device is not None:
            raise UsageError("device", device, "None: backend 'gpu' runs on the current GPU")
        try:
            return gpu_plan(algorithm, problem, tile=tile, lse=lse, arch=arch)
        except Unavailable as missing:
            raise Unavailable(f"{missing} ({arrays.EMULATOR})") from None
    on = Device.named("h100" if device is None else device)
    return (EmulatorPlan if backend == "emulator" else SimulatorPlan)(algorithm, problem, tile, lse, on)


def gpu_plan(
    algorithm: str | Program, problem: Problem, *, tile: TileLike = None, lse: bool = False, arch: str | None = None
) -> Plan:
    """The plan of an algorithm on the current GPU; its counts are those of `fl.count(…, device=current_device())`."""
    arch = arch or ARCH
    return Plan(algorithm, problem, tile, lse, gpu_device(arch), arch)


def on_the_gpu(
    algorithm: str | Program,
    operation: Operation,
    problem: Problem,
    tile: TileLike,
    arch: str | None,
    *,
    one_order: bool = False,
) -> str | Program:
    """The algorithm itself; for "auto" the fastest that takes the problem on the current GPU. `one_order` is as in `elsewhere`."""
    return fastest(operation, problem, gpu_device(arch), tile, one_order=one_order) if is_auto(algorithm) else algorithm


def fastest(
    operation: Operation, problem: Problem, device: Device, tile: TileLike = None, *, one_order: bool = False
) -> str:
    """The fastest algorithm that takes the problem on a device. `one_order` is as in `elsewhere`."""
    names = _FASTEST[operation.name + _ONE_ORDER * one_order]
    asked = None if tile is None else Tile.parse(tile)
    takes = [name for name in names if not catalogue.get(name).refuses(problem, device, asked)]
    pays = {} if one_order else _PAYS
    return next((name for name in takes if pays.get(name, _always)(problem, device)), [*takes, names[-1]][0])


def elsewhere(algorithm: str | Program, operation: Operation, *, one_order: bool = False) -> str | Program:
    """The algorithm itself; for "auto" the one that runs anywhere, and on the emulator is the fastest.

    With `one_order` it is one of those of which each run gives the same bits.
    """
    return _FASTEST[operation.name + _ONE_ORDER * one_order][-1] if is_auto(algorithm) else algorithm


def is_auto(algorithm: Any) -> bool:
    """An array in the wrong place compares element by element: whoever looks the name up refuses it."""
    return isinstance(algorithm, str) and algorithm == "auto"


def _always(problem: Problem, device: Device) -> bool:
    del problem, device
    return True


def gpu_device(arch: str | None) -> Device:
    """The model of the current GPU, or that of an architecture by name."""
    return _device_of_arch(arch) if arch else current_device()


class SimulatorPlan:
    """A plan that runs the tile program."""

    def __init__(self, algorithm: str | Program, problem: Problem, tile: TileLike, lse: bool, device: Device) -> None:
        self.row, self.device, self._lse = catalogue.get(algorithm), device, lse
        self.counts: Counts = count(algorithm, problem, tile=tile, device=device, lse=lse)
        self.workspace = _workspace(self.counts)

    def run(self, given: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Runs on arrays by name; the outputs by name, NumPy. Outputs that are given (`out=`, NumPy) are written in place.

        Raises `UsageError` for arrays that aren't those of the plan's problem.
        """
        returned, handed = _returned(self.row.operation, self.counts, self._lse), _handed(given, named)
        rest = {name: x for name, x in handed.items() if name not in returned}
        found = _bound(self.row.operation, self.counts.problem, rest)
        inputs = {name: host.operand(name, x) for name, x in found.items()}
        written = {name: host.writable(name, handed[name]) for name in returned if name in handed}
        self.row.operation.check(self.counts.problem, {**inputs, **written}, self.counts.tile)
        arrays.check_apart(
            *({name: arrays.host_view(name, x) for name, x in each.items()} for each in (written, inputs))
        )
        outputs = self._outputs(inputs)
        for name, x in written.items():
            x[...] = outputs[name]
        return {**outputs, **written}

    def _outputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        asked = ("lse",) if self._lse else ()
        run = run_on_data(
            self.row.program, inputs, self.counts.problem, tile=self.counts.tile, device=self.device, asked=asked
        )
        return dict(run.outputs)


class EmulatorPlan(SimulatorPlan):
    """A plan that runs the kernels on the CPU. Misuse of the machine raises `EmulationError`."""

    def __init__(self, algorithm: str | Program, problem: Problem, tile: TileLike, lse: bool, device: Device) -> None:
        super().__init__(algorithm, problem, tile, lse, device)
        self.row.check(problem, device, self.counts.tile)

    def _outputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        from flashlab.run.emulated import emulate_problem  # only where a kernel is emulated

        done = emulate_problem(
            self.row, self.counts.problem, inputs, lse=self._lse, tile=self.counts.tile, device=self.device
        )
        return dict(done.checked().outputs)


def _laid_out(tensors: Iterable[Spec]) -> tuple[dict[str, int], int]:
    """Where each array begins in a piece of memory that holds them all, by name, and the bytes of the piece. The largest comes
    first, so that it begins where allocations do."""
    offsets, end = dict[str, int](), 0
    for x in sorted(tensors, key=lambda x: -x.nbytes):
        offsets[x.name] = round_up(end, _ALIGNED)
        end = offsets[x.name] + x.nbytes
    return offsets, end


def _workspace(counts: Counts) -> int:
    """How many bytes a call allocates beside its outputs. Counters aren't among them: a plan keeps those."""
    return _laid_out(x for x in counts.tensors.values() if x.role == "workspace" and not x.zeros)[1]


def _returned(operation: Operation, counts: Counts, lse: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """The outputs that a call returns, by name: their shapes and dtypes."""
    p, tensors = counts.problem, counts.tensors
    outputs = [x for x in operation.outputs if x.when(p) and x.name in tensors and (lse or not x.asked)]
    return {x.name: (x.shape(p, counts.tile), x.dtype_in(p)) for x in outputs}


def _handed(given: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a call by name, without those that are None."""
    if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("arrays", Said(type(given).__name__), "arrays by name: a mapping, or keywords")
    return {name: x for name, x in {**(given or {}), **named}.items() if x is not None}


def _required(operation: Operation, problem: Problem) -> set[str]:
    """What a call of a plan needs: the operation's required inputs, and those that the plan's problem is said to have."""
    return {x.name for x in operation.required} | {x.name for x in operation.taken(problem) if x.name in _POSED}


def _bound(operation: Operation, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call by name. Raises `UsageError` for unknown ones, and for those that are missing."""
    found = operation.bound((), inputs)
    for name in sorted(_required(operation, problem) - found.keys()):
        raise UsageError(name, None, f"an array: the plan is for a problem that has {name}")
    return found


def _of_four_axes(view: View) -> tuple[int, ...]:
    """A view's strides, with those of batch and heads where it is one matrix for all of them."""
    return (0,) * (4 - len(view.strides)) + view.strides


class _Thread(threading.local):
    cuda: Any = None
    """CuPy's, where this thread has a context."""


_thread = _Thread()
_compiling: dict[Any, threading.Lock] = {}


def _cuda() -> Any:
    """CuPy's `cuda`, once this thread has a context: the driver needs one to launch, and only the runtime makes it."""
    cuda = cupy().cuda
    if _thread.cuda is not cuda:
        cuda.runtime.setDevice(cuda.runtime.getDevice())
        _thread.cuda = cuda
    return cuda


def _in_cuda(kernel: Kernel, counts: Counts, launch: LaunchCounts, arch: str | None) -> _Launch:
    """A launch of a kernel in CUDA."""
    config, problem = counts.config, counts.problem
    assert config is not None
    macros = nvrtc.defines(config, problem.dtype, problem.head_dim)
    return _Launch(
        language="cuda",
        kernel=kernel_of(kernel.source, kernel.entry, macros, kernel.arch or arch, launch.sram_peak),
        grid=(abi.blocks_of(kernel, counts, launch),),
        block=(32 * launch.warps,),
        sram=launch.sram_peak,
        arguments=abi.passed(kernel, counts),
        boxes=abi.box_rows(kernel, counts),
    )


def _in_triton(kernel: Kernel, counts: Counts, launch: LaunchCounts, arch: str | None) -> _Launch:
    """A launch of a kernel in Triton, whose compiler chooses how much SRAM it takes."""
    key = kernel, counts.problem.dtype, counts.problem.head_dim, counts.tile, counts.device.name
    with _compiling.setdefault(key, threading.Lock()):  # as in `kernel_of`
        compiled = tritonc.compile_kernel(kernel, counts)
    if compiled.sram > counts.device.sram_per_block:
        needed, limit = compiled.sram, counts.device.sram_per_block
        raise SramOverflow("tile", str(counts.tile), needed=needed, limit=limit, device=counts.device.name)
    ending, image = ("ptx", compiled.ptx) if arch else ("cubin", compiled.cubin)
    return _Launch(
        language="triton",
        kernel=_roomy(_loaded(image, ending, kernel.entry, _cuda().runtime.getDevice()), compiled.sram),
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
    key = source, text, entry, macros, arch, nvrtc.sources_digest(), _cuda().runtime.getDevice()
    with _compiling.setdefault(key, threading.Lock()):  # a second thread waits, rather than compile it as well
        return _roomy(_compiled(*key), sram)


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


@functools.lru_cache(maxsize=64)
def _constant(content: bytes, dtype: np.dtype[Any], device: int) -> Any:
    """A vector on the current `device` that calls share: no kernel writes it."""
    del device  # part of the key
    made = cupy().asarray(np.frombuffer(content, dtype))
    cupy().cuda.get_current_stream().synchronize()  # whichever stream comes next finds it written
    return made


def _device_of_arch(arch: str) -> Device:
    known: dict[str, Device] = {}
    for device in DEVICES.values():
        known.setdefault("compute_{}{}".format(*device.compute_capability), device)
    if arch not in known:
        raise unknown("FLASHLAB_ARCH", arch, known)
    return known[arch]
