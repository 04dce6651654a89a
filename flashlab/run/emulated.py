"""The algorithms' own kernels on the emulator: attention, with every byte by step and tensor held against the formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.base.files import path_of
from flashlab.base.host import operand
from flashlab.emulator.build import build
from flashlab.emulator.library import Arena, Finding, Launched, check_limits
from flashlab.emulator.maps import UNUSED, tensor_map
from flashlab.run import abi, arrays, interpreter, nvrtc, tritonc
from flashlab.run.arrays import host_view
from simulator import Algorithm, catalogue, count
from simulator.algorithm import Kernel
from simulator.counts import Counts, LaunchCounts, Spec
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import SramOverflow
from simulator.fields import flag
from simulator.memory import check_memory
from simulator.names import DeviceName
from simulator.problem import Problem, row_bytes, spell_masks
from simulator.program import Program
from simulator.simulate import Scales, TileLike, run_on_data, run_on_shapes

__all__ = ["Emulation", "EmulationError", "emulate"]


class EmulationError(RuntimeError):
    """A kernel misused the machine; the message has a line for each finding.

    >>> raise EmulationError("mine.cu:7, step scores: race: thread 32 of block 0 reads what another thread wrote, …")
    Traceback (most recent call last):
        ...
    flashlab.run.emulated.EmulationError: mine.cu:7, step scores: race: thread 32 of block 0 reads what another ...
    """


@dataclass(frozen=True, repr=False)
class Emulation:
    """What an algorithm's `kernels` did: `outputs` by name, the `launches` beside the formula's `counts`.

    `unwritten`: bytes of the outputs that no thread wrote, by tensor; of a launch that a finding stopped neither these nor
    its bytes are judged. `left` names workspaces that should be zeros again and aren't, a line each.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=20, head_dim=16, dtype="float16")
    >>> run = fl.emulate("standard", *fl.random_inputs(p))
    >>> [launch.kernel for launch in run.launches], run.complaints()
    (['standard_scores', 'standard_softmax', 'standard_output'], [])
    >>> run
    standard on h100: passed
    """

    outputs: Mapping[str, Array]
    counts: Counts
    launches: tuple[Launched, ...]
    unwritten: Mapping[str, int]
    kernels: tuple[Kernel, ...]
    left: tuple[str, ...] = ()
    program: Program | None = field(default=None, compare=False)

    @property
    def out(self) -> Array:
        """The output called `out`."""
        return self.outputs["out"]

    @property
    def lse(self) -> Array | None:
        """The LSE, where it was asked for."""
        return self.outputs.get("lse")

    @cached_property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launches for finding in launch.findings]

    @cached_property
    def differences(self) -> list[str]:
        """Where the bytes, by step and tensor, or the matrix products aren't the formula's, a line each.

        So is the SRAM of a block: the kernels are launched with what the formula says, and the tile program lays it out.
        """
        planned = zip(self.counts.launches, self.kernels, strict=True)
        formula = [(launch, kernel) for launch, kernel in planned if launch.blocks]
        return [
            line
            for launch, (expected, kernel) in zip(self.launches, formula, strict=True)
            if not launch.stopped
            for line in _compare(launch, expected, kernel)
        ] + self._sram()

    def _sram(self) -> list[str]:
        """Where a block of the tile program holds other bytes of SRAM than the formula says."""
        c = self.counts
        if self.program is None or c.problem.mask:  # what a mask leaves is data: then the counts are the program's own
            return []
        try:
            asked = ("lse",) if "lse" in c.tensors else ()
            run = run_on_shapes(self.program, c.problem, tile=c.tile, device=c.device, asked=asked)
        except SramOverflow as error:
            return [str(error)]
        return [
            f"{x.name}: {x.sram_peak:,} bytes of SRAM per block in the tile program, the formula {y.sram_peak:,}"
            for x, y, kernel in zip(run.launches, c.launches, self.kernels, strict=True)
            if x.sram_peak != y.sram_peak and kernel.settles("sram.peak")
        ]

    def checked(self) -> Emulation:
        """Itself, if nothing was misused and every output written. Raises `EmulationError` with a line for each finding."""
        left = [f"never written: {dict(self.unwritten)}"] if self.unwritten else []
        if complaints := [*map(str, self.findings), *left, *self.left]:
            raise EmulationError("\n".join(complaints))
        return self

    @property
    def passed(self) -> bool:
        """Nothing was misused, every output written, and every byte is the formula's."""
        return not self.findings and not self.unwritten and not self.left and not self.differences

    def complaints(self) -> list[str]:
        """Everything that is wrong, a line each."""
        left = [f"{name}: {n:,} bytes were never written" for name, n in self.unwritten.items()]
        return [*map(str, self.findings), *left, *self.left, *self.differences]

    def __repr__(self) -> str:
        found = self.complaints()
        verdict = f"{len(found)} complaint{'s' if len(found) > 1 else ''}" if found else "passed"
        return "\n".join([f"{self.counts.algorithm} on {self.counts.device.name}: {verdict}", *found])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the arrays."""
        return {
            "passed": self.passed,
            "algorithm": self.counts.algorithm,
            "device": self.counts.device.name,
            "problem": asdict(self.counts.problem),
            "tile": str(self.counts.tile),
            "launches": [launch.to_dict() for launch in self.launches],
            "unwritten": dict(self.unwritten),
            "differences": self.differences,
        }


def _compare(launch: Launched, expected: LaunchCounts, kernel: Kernel) -> list[str]:
    wanted = {
        (step, tensor, what): n for (step, tensor, what), n in expected.ledger.items() if n and kernel.settles(what)
    }
    # without what makes a block ready, as in Launched.counted
    found = {key: n for key, n in launch.ledger.items() if n and (key[0] or key[2] != "sram.write")}
    for step, tensor, what in [key for key in found if "+" in key[1]]:  # arrays that lie interleaved in one place
        parts = [(step, name, what) for name in tensor.split("+")]
        if sum(wanted.get(part, 0) for part in parts) == found[step, tensor, what]:
            del found[step, tensor, what]
            for part in parts:
                wanted.pop(part, None)
    lines = [
        f"{launch.kernel}, step {key[0] or '(none)'}, {key[2]} of {key[1]}: {found.get(key, 0):,} bytes, "
        f"the formula {wanted.get(key, 0):,}"
        for key in sorted({*found, *wanted})
        if found.get(key) != wanted.get(key)
    ]
    if launch.flops != expected.flops_matmul and kernel.settles("flops.matmul"):
        lines.append(f"{launch.kernel}: {launch.flops:,} matmul FLOPs, the formula {expected.flops_matmul:,}")
    return lines


@spell_masks
def emulate(
    algorithm: str | Program, *arrays: Any, lse: Any = False, tile: TileLike = None, device: Device | DeviceName | None = None,
    sanitize: bool = True, watch: bool = False, source: Path | str | None = None, workers: int | None = None,
    time_limit: float = 0, scales: Scales | None = None, **named: Any,
) -> Emulation:  # fmt: skip
    """Run an algorithm's kernels on the CPU: arrays of NumPy, CuPy, torch or JAX in, NumPy's out; shapes and options as
    `flashlab.attention` has them.

    The arrays are the inputs of the algorithm's operation, in order or by name. The kernels are built as for `device` (None:
    "h100"). `sanitize=False` only computes and counts. `watch` also looks at loads and stores that don't go through the
    primitives (slower; a test proves that our kernels have none). `source`: a `.cu` file that stands in for the algorithm's
    own, with the same kernels, watched. `workers`: how many blocks run at the same time (None: as many as there are cores).
    A launch that still runs after `time_limit` (seconds; 0: none) is stopped, which is a finding.

    Raises `UsageError` for bad input, `Unavailable` without a C++ compiler.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=20, head_dim=16, dtype="float16")
    >>> run = fl.emulate("flash2", *fl.random_inputs(p))
    >>> run.passed, run.launches[0].total("hbm.read") == fl.count("flash2", p).hbm.read
    (True, True)
    """
    row = catalogue.get(algorithm)
    if not isinstance(lse, bool):  # of a backward pass an input
        named, lse = {"lse": lse, **named}, False
    inputs, masks = row.operation.apart(named)
    given = {name: operand(name, x) for name, x in row.operation.bound(arrays, inputs).items()}
    problem = row.operation.problem(given, **masks)
    if scales is not None:
        on = Device.named("h100" if device is None else device)
        given |= Scales.of(scales).as_numpy().named(problem, row.program.configure(problem, on, tile).tile)
    return emulate_problem(
        row, problem, given, lse=lse, tile=tile, device=device, sanitize=sanitize, watch=watch, source=source, workers=workers,
        time_limit=time_limit,
    )  # fmt: skip


def emulate_problem(
    row: Algorithm, problem: Problem, arrays: Mapping[str, Array], *, lse: bool = False, tile: TileLike = None,
    device: Device | DeviceName | None = None, sanitize: bool = True, watch: bool = False, source: Path | str | None = None,
    workers: int | None = None, time_limit: float = 0,
) -> Emulation:  # fmt: skip
    """`emulate` for NumPy arrays by name, if the problem is known."""
    on = Device.named("h100" if device is None else device)
    check_limits(workers, time_limit)
    sanitize, watch = flag("sanitize", sanitize), flag("watch", watch)
    problem = row.operation.settled(problem, arrays)
    row.check(problem, on)
    counts = count(row.program, problem, tile=tile, device=on, lse=lse)
    config = counts.config
    assert config is not None
    row.check(problem, counts.device, config.tile)
    row.operation.check(problem, arrays, config.tile)
    if problem.mask:  # which tiles it hides is data
        asked = ("lse",) if lse else ()
        counts = run_on_data(row.program, arrays, problem, tile=tile, device=on, asked=asked).counts
    held = sum(spec.nbytes for spec in counts.tensors.values())
    check_memory("an emulation, with a note for each byte", 2 * held)
    arena, kernels = Arena(), row.launched(problem, config)
    _fill(arena, counts, {**abi.defaults(counts, row.operation), **arrays})
    for name in row.operation.in_place & arena.buffers.keys():
        arena.buffers[name].read_only = False
    job = _Job(
        counts, arena, None if source is None else path_of("source", source), sanitize, watch, workers, time_limit
    )
    launches = [
        _LAUNCHES[kernel.language](job, kernel, launch)
        for launch, kernel in zip(counts.launches, kernels, strict=True)
        if launch.blocks
    ]
    outputs = [x for x in counts.tensors.values() if x.role == "output" and x.name not in row.operation.in_place]
    judged = sanitize and not any(launched.stopped for launched in launches)
    unwritten = {spec.name: int((arena.buffers[spec.name].written == 0).sum()) for spec in outputs} if judged else {}
    asked = [x for x in row.operation.outputs if x.when(problem) and x.name in counts.tensors and (lse or not x.asked)]
    found = {x.name: _values(arena, counts.tensors[x.name], x.shape(problem, config.tile)) for x in asked}
    zeros = [spec.name for spec in counts.tensors.values() if spec.zeros and judged]
    left = [f"{name}: not all zeros, as the next launch needs it" for name in zeros if arena.buffers[name].data.any()]
    return Emulation(
        found,
        counts,
        tuple(launches),
        {name: n for name, n in unwritten.items() if n},
        kernels,
        tuple(left),
        row.program,
    )


@dataclass(frozen=True)
class _Job:
    """What the launches of a call share. `source` stands in for the algorithm's own file."""

    counts: Counts
    arena: Arena
    source: Path | None
    sanitize: bool
    watch: bool
    workers: int | None
    time_limit: float

    def values(self, language: str) -> dict[str | None, Any]:
        """All that a launch may pass, by name."""
        config = self.counts.config
        assert config is not None
        places = {name: (self.arena.pointer(name), x.strides) for name, x in self.arena.buffers.items()}
        return abi.VALUES[language](self.counts, places, abi.shape_struct(self.counts.problem, config.heads_together))


def _in_cuda(job: _Job, kernel: Kernel, launch: LaunchCounts) -> Launched:
    """Run a kernel in CUDA, compiled for the CPU."""
    counts, problem, config = job.counts, job.counts.problem, job.counts.config
    assert config is not None
    major, minor = counts.device.compute_capability
    library = build(
        job.source or abi.source_of(kernel),
        nvrtc.defines(config, problem.dtype, problem.head_dim),
        arch=100 * major + 10 * minor,
        watch=job.watch or job.source is not None,
    )
    values = {name: x.tobytes() for name, x in job.values("cuda").items()} | {
        name: _tensor_map(job.arena, counts.tensors[name], problem, rows)
        for name, rows in abi.box_rows(kernel, counts).items()
    }
    return library.launch(
        kernel.entry,
        (abi.blocks_of(kernel, counts, launch),),
        (32 * launch.warps,),
        [values[name] for name in abi.passed(kernel, counts)],
        job.arena,
        sram=launch.sram_peak,
        sanitize=job.sanitize,
        workers=job.workers,
        time_limit=job.time_limit,
    )


def _in_triton(job: _Job, kernel: Kernel, launch: LaunchCounts) -> Launched:
    """Run a kernel in Triton by its interpreter, which is always watched."""
    values = {name: x.item() for name, x in job.values("triton").items() if name is not None}
    return interpreter.launch(
        job.source or abi.source_of(kernel),
        kernel.entry,
        abi.blocks_of(kernel, job.counts, launch),
        {**values, **tritonc.constants_of(job.counts)},
        job.arena,
        {x.name: x.dtype for x in job.counts.tensors.values()},
        time_limit=job.time_limit,
    )


_LAUNCHES = {"cuda": _in_cuda, "triton": _in_triton}
"""By language: what runs a launch."""


def _fill(arena: Arena, counts: Counts, inputs: Mapping[str, Array]) -> None:
    """Put every tensor into the arena."""
    batch = counts.problem.rows_batch
    for spec in counts.tensors.values():
        if spec.vector and spec.name in inputs:
            arena.put(spec.name, np.ascontiguousarray(inputs[spec.name], numpy_dtype(spec.dtype)))
            arena.buffers[spec.name].read_only = True
            strides = abi.strides_of(spec, batch)
        elif spec.name in inputs:
            x = inputs[spec.name]
            lead = (batch, spec.heads // batch) if spec.heads % batch == 0 else (1, spec.heads)
            strides = _place(arena, spec.name, x if x.ndim == 4 else x.reshape(*lead, spec.rows, spec.cols))
        elif spec.zeros:
            arena.put(spec.name, np.zeros(spec.nbytes, np.uint8))
            strides = abi.strides_of(spec, batch)
        else:
            arena.new(spec.name, spec.nbytes)
            strides = abi.strides_of(spec, batch)
        arena.buffers[spec.name].strides = strides if spec.vector else (*strides, spec.itemsize)


def _tensor_map(arena: Arena, spec: Spec, problem: Problem, rows: int) -> bytes:
    """The descriptor of an input that is copied in boxes of `rows` rows and 128 bytes, as `flashlab.run.tma` makes it."""
    extents = abi.boxed_shape(spec, problem)[::-1]
    if 0 in extents:
        return UNUSED
    strides = arena.buffers[spec.name].strides
    # the stride of an axis of one element is never used, but checked
    reach = [stride if n > 1 else 16 for n, stride in zip(extents[1:], reversed(strides[:3]), strict=True)]
    return tensor_map(arena.pointer(spec.name), spec.itemsize, extents, reach, (128 // spec.itemsize, rows, 1, 1))


def _place(arena: Arena, name: str, x: Array) -> tuple[int, int, int]:
    """An input as it lies if a kernel can take it so, else with its rows padded. And the strides of batch, head and row."""
    padded = row_bytes(x.shape[-1], x.itemsize)
    if arrays.is_aligned(host_view(name, x)) and x.size and all(stride > 0 for stride in x.strides):
        strides = (x.strides[0], x.strides[1], x.strides[2])
    else:
        strides = (x.shape[1] * x.shape[2] * padded, x.shape[2] * padded, padded)
    reach = sum((n - 1) * stride for n, stride in zip(x.shape[:3], strides, strict=True)) + padded if x.size else 0
    data = arena.new(name, reach)
    buffer = arena.buffers[name]
    buffer.read_only = True
    if x.size:
        np.ndarray(x.shape, x.dtype, data.data, strides=(*strides, x.itemsize))[...] = x
        np.ndarray((*x.shape[:3], padded), np.uint8, buffer.written.data, strides=(*strides, 1))[...] = 1
    return strides


def _values(arena: Arena, spec: Spec, shape: tuple[int, ...]) -> Array:
    """The values of an output of a shape, in an array of its own."""
    buffer, dtype = arena.buffers[spec.name], numpy_dtype(spec.dtype)
    if not spec.vector and len(shape) == 4:
        return np.ndarray(shape, dtype, buffer.data, strides=buffer.strides).copy()
    rows = buffer.data.reshape(spec.heads, spec.rows, spec.row_bytes)
    return np.ascontiguousarray(rows[..., : spec.cols * spec.itemsize]).view(dtype).reshape(shape)
