"""Plans: all of a call but its arrays (counts, compiled kernels, grids), made once per configuration and run often."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashlab.base import host
from flashlab.run import abi, arrays, devices, tma
from flashlab.run.arrays import Allocate, Framework, Read, View, cupy, from_the_pool
from flashlab.run.kernels import launch_of
from flashlab.run.launch import Launcher, Zeros, enter, laid_out
from simulator import catalogue, count
from simulator.counts import Counts
from simulator.devices import Device
from simulator.errors import Said, Unavailable, UsageError, among
from simulator.names import AnyBackend, DeviceName
from simulator.operations.operation import Operation
from simulator.problem import WIDTH, Problem
from simulator.program import Program
from simulator.simulate import TileLike, run_on_data
from simulator.support import MOST_BLOCKS

__all__ = ["EmulatorPlan", "Plan", "Ready", "SimulatorPlan", "gpu_plan", "plan"]

_POSED = ("sinks", "alibi_slopes", "mask", "block_mask", "draft_mask", "cu_seqlens_q", "dlse")
"""Inputs that a problem with them must be given: their defaults would answer another problem. Other defaults have a meaning:
scales are 1, and tables are full."""
_MOST_KEPT = 256  # layouts of a call's arrays for which a plan keeps what it decided
_MOST_PLACES = 4096  # sets of pointers for which a plan keeps the same


class Plan:
    """All of a call but its arrays, for the GPU that is current when it is made. `run` calls.

    `counts` are what a call moves, to the byte; `device` is the GPU's model. `workspace` is how many bytes a call allocates
    beside the outputs that it returns. (An LSE that wasn't asked for goes to memory that all calls share.) Arrays that
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
        sm_margin: int = 0,
    ) -> None:
        row = catalogue.get(algorithm)
        row.check(problem, device)
        self._made = (
            functools.partial(gpu_plan, tile=tile, lse=lse, arch=arch, sm_margin=sm_margin),
            (algorithm, problem),
        )
        self.device, self.operation, self.gpu = device, row.operation, cupy().cuda.runtime.getDevice()
        self.counts: Counts = count(algorithm, problem, tile=tile, device=device, lse=lse)
        config = self.counts.config
        assert config is not None
        row.check(problem, device, config.tile)
        for launch in self.counts.launches:
            if launch.blocks > MOST_BLOCKS:
                blocks = f"{launch.blocks:,} blocks of {launch.name}"
                raise UsageError("problem", blocks, f"a grid of at most {MOST_BLOCKS:,}")
        tensors = self.counts.tensors
        self.returned = _returned(self.operation, self.counts, lse)
        self._required = _required(self.operation, problem)
        self._known = {x.name for x in self.operation.inputs} | self.returned.keys()
        self.zeros = {x.name: Zeros(x.nbytes) for x in tensors.values() if x.zeros}
        self.workspace = _workspace(self.counts)
        self.tensors = [(x.name, x.nbytes, abi.strides_of(x, problem.rows_batch)) for x in tensors.values()]
        self._launcher = functools.lru_cache(_MOST_KEPT)(functools.partial(Launcher, self))
        self._ready = functools.lru_cache(_MOST_KEPT)(functools.partial(Ready, self))
        self._warm = dict[tuple[Any, ...], Ready]()
        self.shape = abi.shape_struct(problem, config.heads_together)
        self.launches = [
            launch_of(kernel, self.counts, launch, arch)
            for launch, kernel in zip(self.counts.launches, row.launched(problem, config), strict=True)
            if launch.blocks
        ]
        self.left_out = {
            name: _constant(np.resize(x, tensors[name].nbytes // x.itemsize).tobytes(), x.dtype, self.gpu).data
            for name, x in abi.defaults(self.counts, self.operation).items()
        }
        for x in tensors.values():
            if x.role == "output" and x.name not in self.returned:
                self.left_out[x.name] = arrays.unread(x.nbytes, self.gpu)
        for x in tensors.values():
            if x.role != "workspace" and not x.vector and x.row_bytes != x.cols * x.itemsize:
                arrays.warm_copies(x.dtype, self.gpu)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made

    def launch(self, views: Mapping[str, View], *, first: int = 0, allocate: Allocate = from_the_pool) -> None:
        """Launches the kernels from number `first` on, on CuPy's current device and stream, on inputs and outputs by name.

        All must fit, as `fits` says. Inputs left out have their defaults. Outputs left out go to memory that no code reads.
        """
        enter(cuda := cupy().cuda)
        pointers = [view.pointer for view in views.values()]
        self.launcher(views).launch(pointers, cuda.get_current_stream().ptr, allocate, first)

    def launcher(self, views: Mapping[str, View]) -> Launcher:
        """What queues the kernels for arrays with the strides of these, wherever they lie."""
        return self._launcher(tuple((name, _of_four_axes(view)) for name, view in views.items()))

    def fits(self, name: str, view: View) -> bool:
        """Can the kernels take an array as it lies? They write whole chunks of 16 bytes, so an output's rows must end with
        one."""
        spec = self.counts.tensors[name]
        if spec.vector:
            return True
        whole_chunks = spec.role == "input" or view.shape[-1] * WIDTH[view.dtype] % 16 == 0
        return arrays.is_aligned(view) and whole_chunks and (name not in self.boxed or tma.takes(view))

    def launch_padded(self, views: Mapping[str, View], *, allocate: Allocate = from_the_pool) -> None:
        """Launches the kernels on arrays of any layout: what they can't take goes through padded buffers, and back."""
        passed = dict(views)
        for name, view in views.items():
            if self.fits(name, view):
                continue
            if name in self.operation.in_place:
                accepted = (
                    "rows of whole 16 bytes, and a base and strides of such: what is written in place isn't copied"
                )
                raise UsageError(f"{name}.strides", view.strides, accepted)
            passed[name] = arrays.padded_like(view, allocate)
            if self.counts.tensors[name].role == "input":
                arrays.copy(view, passed[name])
        self.launch(passed, allocate=allocate)
        for name, view in views.items():
            if passed[name] is not view and self.counts.tensors[name].role == "output":
                arrays.copy(passed[name], view)

    def run(self, given: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Runs on arrays by name, of CuPy, torch or JAX on the plan's GPU; the outputs by name, of the same kind. An
        `rng_state` of NumPy's is copied there first. Outputs that are given (`out=`, of CuPy or torch) are written in place.

        The kernels are queued on the framework's current stream there. Raises `UsageError` for arrays that aren't those of
        the plan's problem, or lie elsewhere.
        """
        plain = given.__class__ is dict and not named
        handed: Mapping[str, Any] = named if given is None else given if plain else _handed(given, named)
        found = arrays.read(handed)
        ready = None if found is None else self._warm.get(tuple(found[1]))
        if found is None or ready is None:
            found, ready = self._first(handed, found)
        return ready.run(found[2], handed)

    def _first(self, handed: Mapping[str, Any], found: Read | None) -> tuple[Read, Ready]:
        """What a call needs if its arrays don't lie as those of an earlier call did."""
        named = {name: x for name, x in handed.items() if x is not None}
        if not self._required <= named.keys() <= self._known:
            inputs = {name: x for name, x in named.items() if name not in self.returned}
            _bound(self.operation, self.counts.problem, inputs)
        state = named.pop("rng_state") if isinstance(named.get("rng_state"), np.ndarray) else None
        found = found or arrays.checked(named)
        if state is not None:
            found = arrays.with_state(found, np.ascontiguousarray(state))
        held, layout, _ = found
        if (ready := self._warm.get(tuple(layout))) is None:
            framework: Framework = layout[0]
            views = framework.views(held)
            first, x = next(iter(views.items()))
            if x.device != self.gpu:
                raise UsageError(f"{first}.device", x.device, f"GPU {self.gpu}, for which the plan was made")
            ready = self.ready(framework, views)
            keep(self._warm, tuple(layout), ready, _MOST_KEPT)
        return found, ready

    def ready(self, framework: Framework, views: Mapping[str, View]) -> Ready:
        """The plan for arrays that lie as these do, wherever they begin. Raises `UsageError` for those that aren't the plan's."""
        return self._ready(
            framework, tuple((name, view._replace(pointer=0, owner=None)) for name, view in views.items())
        )

    @functools.cached_property
    def boxed(self) -> frozenset[str]:
        """The arrays that a kernel takes as TMA descriptors."""
        return frozenset(name for launch in self.launches for name in launch.boxes)


class Ready:
    """A plan for arrays of one framework whose shapes, strides and dtypes are known and checked: all of a call but pointers.

    `given` are the arrays that callers bring, by operand. Raises `UsageError` for those that aren't the plan's.
    """

    def __init__(self, plan: Plan, framework: Framework, given: tuple[tuple[str, View], ...]) -> None:
        views = dict(given)
        plan.operation.check(plan.counts.problem, views, plan.counts.tile)
        for name, view in views.items():
            if plan.counts.tensors[name].vector:
                arrays.check_contiguous(name, view)
        self._written = views.keys() & plan.returned.keys()
        if self._written and not framework.writable:
            accepted = "None: only CuPy and torch arrays are written in place"
            raise UsageError(min(self._written), "an immutable array", accepted)
        self._plan, self._framework, self._views, self._cuda = plan, framework, views, cupy().cuda
        self._device, self._current, self._pointer = plan.gpu, self._cuda.runtime.getDevice, framework.pointer
        made = {name: shape for name, shape in plan.returned.items() if name not in views}
        self._makers = [(name, framework.maker(*shape, plan.gpu)) for name, shape in made.items()]
        self._made = {
            name: View(0, shape, arrays.dense(shape, WIDTH[dtype]), dtype, plan.gpu, None)
            for name, (shape, dtype) in made.items()
        }
        laid = self._views | self._made
        fit = all(plan.fits(name, view._replace(pointer=0)) for name, view in laid.items())
        self._launcher = plan.launcher(laid) if fit else None
        self._found = dict[tuple[int, ...], bool]()

    def run(self, pointers: list[int], given: Mapping[str, Any]) -> dict[str, Any]:
        """Queues the kernels for arrays that begin there, on the framework's current stream; the plan's outputs by name, of
        the kind of what was `given`.

        Raises `UsageError` for outputs that aren't apart from other arrays.
        """
        device, framework = self._device, self._framework
        if self._current() != device:
            with self._cuda.Device(device):
                return self.run(pointers, given)
        fit = self._found.get(tuple(pointers))
        if fit is None:
            fit = self._look_at(pointers)
        made: dict[str, Any] = {}
        for name, make in self._makers:
            made[name] = x = make()
            pointers.append(self._pointer(x))
        if fit and self._launcher is not None:
            enter(self._cuda)
            self._launcher.launch(pointers, framework.queue(device), framework.allocate)
        else:
            with framework.stream(device):
                self._plan.launch_padded(self._at(pointers), allocate=framework.allocate)
        if not framework.writable:
            with framework.stream(device):
                like = next(x for x in given.values() if x is not None)
                made = {name: framework.hand_back(x, like) for name, x in made.items()}
        return {name: made.get(name, given.get(name)) for name in self._plan.returned} if self._written else made

    def _at(self, pointers: list[int]) -> dict[str, View]:
        """The arrays where they lie now: those that callers bring, and outputs as far as they are made."""
        laid = (self._views | self._made).items()
        return {name: view._replace(pointer=pointer) for (name, view), pointer in zip(laid, pointers, strict=False)}

    def _look_at(self, pointers: list[int]) -> bool:
        """Can the kernels take the arrays where they lie? Raises `UsageError` for outputs that aren't apart from the others."""
        views, returned = self._at(pointers), self._plan.returned
        outputs = {name: view for name, view in views.items() if name in returned}
        arrays.check_apart(outputs, {name: view for name, view in views.items() if name not in outputs})
        if len(self._found) >= _MOST_PLACES:
            self._found.clear()
        fit = all(self._plan.fits(name, view) for name, view in views.items())
        self._found[tuple(pointers)] = fit
        return fit


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
    run on the framework's current stream, and several threads may call at once. A plan that was pickled is made anew where it is
    loaded.

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
    algorithm: str | Program, problem: Problem, *, tile: TileLike = None, lse: bool = False, arch: str | None = None,
    sm_margin: int = 0,
) -> Plan:  # fmt: skip
    """The plan of an algorithm on the current GPU; its counts are those of `fl.count(…, device=current_device())`, or of a GPU
    with `sm_margin` SMs fewer."""
    arch = arch or devices.ARCH
    return Plan(algorithm, problem, tile, lse, devices.without(devices.gpu_device(arch), sm_margin), arch, sm_margin)


class SimulatorPlan:
    """A plan that runs the tile program."""

    def __init__(self, algorithm: str | Program, problem: Problem, tile: TileLike, lse: bool, device: Device) -> None:
        self._made = algorithm, problem, tile, lse, device
        self.row, self.device, self._lse = catalogue.get(algorithm), device, lse
        self.counts: Counts = count(algorithm, problem, tile=tile, device=device, lse=lse)
        self.workspace = _workspace(self.counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made

    def run(self, given: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Runs on arrays by name; the outputs by name, NumPy. Outputs that are given (`out=`, NumPy) are written in place.

        Raises `UsageError` for arrays that aren't those of the plan's problem.
        """
        returned, handed = _returned(self.row.operation, self.counts, self._lse), _handed(given, named)
        both = self.row.operation.in_place
        rest = {name: x for name, x in handed.items() if name not in returned or name in both}
        found = _bound(self.row.operation, self.counts.problem, rest)
        inputs = {name: host.operand(name, x) for name, x in found.items() if name not in both}
        written = {name: host.writable(name, handed[name]) for name in returned if name in handed}
        self.row.operation.check(self.counts.problem, {**inputs, **written}, self.counts.tile)
        arrays.check_apart(
            *({name: arrays.host_view(name, x) for name, x in each.items()} for each in (written, inputs))
        )
        outputs = self._outputs({**inputs, **{name: x for name, x in written.items() if name in both}})
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
        catalogue.get(algorithm).check(problem, device)
        super().__init__(algorithm, problem, tile, lse, device)
        self.row.check(problem, device, self.counts.tile)

    def _outputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        from flashlab.run.emulated import emulate_problem  # only where a kernel is emulated

        done = emulate_problem(
            self.row, self.counts.problem, inputs, lse=self._lse, tile=self.counts.tile, device=self.device
        )
        return dict(done.checked().outputs)


def _workspace(counts: Counts) -> int:
    """How many bytes a call allocates beside its outputs. Counters aren't among them: a plan keeps those."""
    return laid_out(x for x in counts.tensors.values() if x.role == "workspace" and not x.zeros)[1]


def _returned(operation: Operation, counts: Counts, lse: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """The outputs that a call returns, by name: their shapes and dtypes."""
    p, tensors = counts.problem, counts.tensors
    outputs = [x for x in operation.outputs if x.when(p) and x.name in tensors and (lse or not x.asked)]
    return {x.name: (x.shape(p, counts.tile), x.dtype_in(p)) for x in outputs}


def _handed(given: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a call by name, without those that are None."""
    if not isinstance(given, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("arrays", Said(type(given).__name__), "arrays by name: a mapping, or keywords")
    return {name: x for name, x in {**(given or {}), **named}.items() if x is not None}


def _required(operation: Operation, problem: Problem) -> set[str]:
    """What a call of a plan needs: the operation's required inputs, and those that the plan's problem says it has."""
    posed = {*_POSED, *operation.in_place}
    return {x.name for x in operation.required} | {x.name for x in operation.taken(problem) if x.name in posed}


def _bound(operation: Operation, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call by name. Raises `UsageError` for unknown ones, and for those that are missing."""
    found = operation.bound((), inputs)
    for name in sorted(_required(operation, problem) - found.keys()):
        raise UsageError(name, None, f"an array: the plan is for a problem that has {name}")
    return found


def _of_four_axes(view: View) -> tuple[int, ...]:
    """A view's strides, with those of batch and heads where it is one matrix for all of them."""
    return (0,) * (4 - len(view.strides)) + view.strides


@functools.lru_cache(maxsize=64)
def _constant(content: bytes, dtype: np.dtype[Any], device: int) -> Any:
    """A vector on the current `device` that calls share: no kernel writes it."""
    del device  # part of the key
    made = cupy().asarray(np.frombuffer(content, dtype))
    cupy().cuda.get_current_stream().synchronize()  # whichever stream comes next finds it written
    return made


def keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Puts a value into a dictionary of limited size: the oldest value gives way."""
    if len(kept) >= most:
        kept.pop(next(iter(kept)), None)
    kept[key] = value
