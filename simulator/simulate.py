"""Run tile programs on data (numbers and counts) or on shapes alone (counts)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from threading import Event, Lock
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np

from simulator.config import Config
from simulator.counts import Counts, summed
from simulator.devices import Device
from simulator.dtypes import Array, as_numpy
from simulator.errors import Said, UsageError
from simulator.machine import Machine
from simulator.memory import check_memory
from simulator.operations.caches import check_scales
from simulator.operations.operation import Operand, Operation
from simulator.problem import FP8, Problem, Tile
from simulator.program import Program
from simulator.ragged import APART, evaluated, joined
from simulator.tensors import HbmTensor
from simulator.threads import together, workers
from simulator.trace import Recorder, Sizes, Trace

TileLike = Tile | tuple[int, int] | str | None


@dataclass(frozen=True, repr=False)
class Run:
    """What a tile program computed and counted.

    `outputs` has the operation's outputs by name, in their dtypes. Attention has `out` (batch, heads, len_q,
    head_dim_v) and, if it was asked for, `lse` (batch, heads, len_q). `trace` is that of one head if it was asked for,
    else None.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float16")
    >>> run = fl.simulate("flash2", *fl.random_inputs(p), lse=True)
    >>> run.out.dtype.name, run.lse.shape, run.trace
    ('float16', (1, 2, 64), None)
    >>> run
    <run of flash2: out (1, 2, 64, 16) float16, lse (1, 2, 64) float32>
    """

    outputs: Mapping[str, Array]
    counts: Counts
    trace: Trace | None

    renderer: ClassVar[Callable[[Run], str] | None] = None
    """How a notebook shows a run. `flashlab` sets it."""

    def __repr__(self) -> str:
        has = [f"{name} {x.shape} {x.dtype.name}" for name, x in self.outputs.items()]
        traced = [] if self.trace is None else [f"a trace of {len(self.trace.events):,} steps"]
        return f"<run of {self.counts.algorithm}: {', '.join([*has, *traced])}>"

    def _repr_html_(self) -> str | None:
        render = type(self).renderer
        return None if render is None else render(self)

    @property
    def out(self) -> Array:
        """The output that is called `out`."""
        return self.outputs["out"]

    @property
    def lse(self) -> Array | None:
        """The LSE if it was asked for, else None."""
        return self.outputs.get("lse")


class Scales(NamedTuple):
    """The scales of 8-bit operands, float32: an operand times its scale is the value that it stands for.

    Each of the kernel's tiles has one scale: q (batch, heads, row tiles), k and v (batch, kv_heads, key tiles). Those
    of q and k are positive, because a kernel takes the maxima of scores before it scales them.
    `flashlab.measure.fp8.quantize` makes scales.

    >>> import flashlab as fl, numpy as np
    >>> fl.Scales(*(np.ones((1, 2, 1), np.float32) for _ in "qkv")).q.shape
    (1, 2, 1)
    """

    q: Any
    k: Any
    v: Any

    @classmethod
    def of(cls, given: Any) -> Self:
        """Three arrays as scales. Raises `UsageError` for anything else."""
        try:
            q, k, v = given
        except (TypeError, ValueError):
            raise UsageError("scales", type(given).__name__, "fl.Scales(q, k, v), or three arrays") from None
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not hasattr(x, "shape"):
                raise UsageError(f"scales.{name}", type(x).__name__, "an array, float32")
        return cls(q, k, v)

    def as_numpy(self) -> Scales:
        """The same as arrays of NumPy. Raises `UsageError`."""
        return Scales(*(as_numpy(f"scales.{name}", x) for name, x in zip("qkv", self, strict=True)))

    def named(self, problem: Problem, tile: Tile) -> dict[str, Any]:
        """The scales by the names of the kernels' arguments: `q_scale`, `k_scale`, `v_scale`.

        Raises `UsageError` for a problem that isn't 8-bit, for other shapes and dtypes, and for NumPy scales that aren't
        finite, or of q or k that aren't positive, or so large that scores leave float32.
        """
        p = problem
        if p.dtype != FP8:
            raise UsageError("scales", "given", f"None for {p.dtype}: only {FP8} has scales")
        q_tiles, k_tiles = (p.batch, p.heads, p.row_tiles(tile)), (p.batch, p.kv_heads, p.key_tiles(tile))
        for name, x, shape, side in (
            ("q", self.q, q_tiles, tile.rows),
            ("k", self.k, k_tiles, tile.cols),
            ("v", self.v, k_tiles, tile.cols),
        ):
            if tuple(x.shape) != shape:
                raise UsageError(f"scales.{name}.shape", tuple(x.shape), f"{shape}, one per {side} rows of {name}")
            if str(x.dtype).removeprefix("torch.") != "float32":
                raise UsageError(f"scales.{name}.dtype", str(x.dtype), "float32")
        named = {f"{name}_scale": x for name, x in zip("qkv", self, strict=True)}
        check_scales(p, named, "scales.{}")
        return named


def run_on_data(
    program: Program,
    arrays: Mapping[str, Array],
    problem: Problem,
    *,
    tile: TileLike,
    device: Device,
    asked: Collection[str] = (),
    trace: tuple[int, int] | None = None,
) -> Run:
    """Run a tile program on arrays by name. The CPU's cores share out the batches or heads.

    `asked` names the outputs on request that are wanted, such as "lse". `trace` is the (batch, head) to trace. Raises
    `UsageError` for arrays that don't fit the problem, and `SramOverflow`.

    Each core has a thread with a machine of its own, and BLAS keeps to one thread meanwhile. The many products are
    small, and the threads of BLAS wait for one another at each: that costs more than they bring, and far more beside
    other work.

    Of a ragged batch, each sequence has a machine. Its program is given a ragged batch of one.

    An interrupt, or what one thread raises, also ends the other threads at their next step.
    """
    operation, problem = program.operation, program.operation.settled(problem, arrays)
    config = program.configure(problem, device, tile)
    operation.check(problem, arrays, config.tile)
    check_memory(f"a run of {program.name} on data", _bytes_held(operation, arrays, problem, config.tile, asked))
    if trace is not None:
        steps, nbytes = trace_size(program, problem, tile=config.tile, device=device, asked=asked)
        check_memory(f"a trace of {steps:,} steps", nbytes)
    stop = Event()

    def run(part: Part) -> tuple[Machine, list[str]]:
        machine = Machine(
            program.name, operation, part.problem, config, device, asked=asked, data=part.arrays, stop=stop
        )
        return machine, _run(program, machine)

    parts = _sequences(operation, arrays, problem) if problem.apart else _parts(operation, arrays, problem)
    with one_blas_thread():
        if len(parts) == 1:
            done = [run(parts[0])]
        else:
            done = together([partial(run, part) for part in parts], stop.set, min(len(parts), workers()))
        recorded = None if trace is None else _record(program, arrays, problem, config, device, asked, trace)
    outputs: dict[str, Array] = {}
    for operand in operation.outputs:
        if operand.when(problem) and operand.name in done[0][1] and (operand.name in asked or not operand.asked):
            pieces = [machine.result(operand.name) for machine, _ in done]
            outputs[operand.name] = (
                pieces[0] if len(pieces) == 1 else np.concatenate(pieces, _cut_along(operand, problem))
            )
    each = [machine.close() for machine, _ in done]
    on_shapes = partial(_on_shapes, program, config=config, device=device, asked=asked)
    counts = (
        joined(each, [1] * len(each), problem, operation, config, on_shapes) if problem.apart else summed(each, problem)
    )
    return Run(outputs, counts, recorded)


def _bytes_held(
    operation: Operation, arrays: Mapping[str, Array], problem: Problem, tile: Tile, asked: Collection[str]
) -> int:
    """Bytes that a run holds beside the caller's arrays: float32 copies of these, and the outputs. A program's workspaces
    come on top, and are looked at one by one."""
    copies = sum(4 * x.size for x in arrays.values() if x.dtype != np.float32)
    outputs = [x for x in operation.outputs if x.when(problem) and (x.name in asked or not x.asked)]
    return copies + sum(x.spec(problem, tile, "output").nbytes for x in outputs)


class Part(NamedTuple):
    """Some heads or batches of a problem, and their arrays by name."""

    problem: Problem
    arrays: Mapping[str, Array]


_WORTH_A_THREAD = 1 << 20  # scores


def _parts(operation: Operation, arrays: Mapping[str, Array], problem: Problem) -> list[Part]:
    """The problem in as many parts as the CPU has cores, cut along the batches, or along the KV heads of one batch."""
    p = problem
    pieces = p.batch if p.batch > 1 else p.kv_heads
    n = max(1, min(workers(), pieces, p.batch * p.heads * p.len_q * p.len_kv // _WORTH_A_THREAD))
    operands = [operation.operand(name, problem) for name in arrays]
    # what all parts need would be counted once for each, and says nothing of which part is meant
    has = (*operation.taken(p), *(x for x in operation.outputs if x.when(p)))
    if n == 1 or any(_cut_along(x, p) is None for x in has):
        return [Part(p, arrays)]
    parts = list[Part]()
    for i in range(n):
        cut = range(i * pieces // n, (i + 1) * pieces // n)
        heads = {} if p.batch > 1 else {"heads": len(cut) * p.queries_per_kv, "kv_heads": len(cut)}
        one = p.replace(batch=len(cut)) if p.batch > 1 else p.replace(**heads)
        parts.append(Part(one, {x.name: _piece(arrays[x.name], x, cut, p) for x in operands}))
    return parts


def _sequences(operation: Operation, arrays: Mapping[str, Array], problem: Problem) -> list[Part]:
    """The sequences of a ragged batch, each with its rows of the arrays."""
    parts = list[Part]()
    operands = [operation.operand(name, problem) for name in arrays]
    alone = [each for each in operands if each.axes != ("offsets",)]  # a sequence has offsets of its own
    cuts: list[dict[str, slice]]
    if problem.ragged:
        spans = zip(problem.spans, problem.bit_spans, strict=True)
        named = [{"len_q": rows, "len_kv": keys, "bit_bytes": bits} for (rows, keys), bits in spans]
        cuts = [{axis: slice(span.start, span.stop) for axis, span in each.items()} for each in named]
    else:
        cuts = [_cut_of(problem, b, one) for b, one in enumerate(problem.sequences)]
    for one, cut in zip(problem.sequences, cuts, strict=True):
        parts.append(Part(one, {each.name: each.cut(arrays[each.name], cut) for each in alone}))
    return parts


def _cut_of(problem: Problem, request: int, one: Problem) -> dict[str, slice]:
    """Where a request over pages lies along the axes of all arrays."""
    cut = {"batch": slice(request, request + 1), "table_pages": slice(one.table_pages)}
    if problem.varlen:
        cut["len_q"] = slice(problem.cu_seqlens_q[request], problem.cu_seqlens_q[request + 1])
    return cut


def _cut_along(operand: Operand, problem: Problem) -> int | None:
    """The axis along which the parts of a problem cut an array. It is None if all parts need the whole array."""
    if problem.ragged:
        names = APART
    elif problem.varlen and "batch" not in operand.axes:
        names = ("len_q",)
    else:
        names = ("batch",) if problem.apart or problem.batch > 1 else ("heads", "kv_heads")
    return next((axis for axis, name in enumerate(operand.axes) if name in names), None)


def _piece(x: Array, operand: Operand, cut: range, problem: Problem) -> Array:
    """The part of an array that belongs to some batches, or to some KV heads."""
    axis = _cut_along(operand, problem)
    if axis is None:
        return x
    each = problem.queries_per_kv if operand.axes[axis] == "heads" else 1
    return x[(slice(None),) * axis + (slice(cut.start * each, cut.stop * each),)]


_limiting = Lock()


@contextmanager
def one_blas_thread() -> Generator[None]:
    """Keeps NumPy's BLAS to one thread. Of calls that overlap the first does so, and puts back what it found.

    A second one would find the first one's single thread, and leave that behind. Where the simulator has no threads of its
    own, none of BLAS's are in their way.
    """
    if workers() == 1 or not _limiting.acquire(blocking=False):
        yield
        return
    try:
        with _blas().limit(limits=1, user_api="blas"):
            yield
    finally:
        _limiting.release()


@cache
def _blas() -> Any:
    """The BLAS that NumPy has loaded."""
    from threadpoolctl import ThreadpoolController  # pyright: ignore[reportMissingTypeStubs]  # it needs ctypes

    return ThreadpoolController()


def run_on_shapes(
    program: Program,
    problem: Problem,
    *,
    tile: TileLike,
    device: Device,
    asked: Collection[str] = (),
    infer: bool = False,
) -> Counts:
    """Run a tile program on shapes alone, for exact counts without data. Raises `SramOverflow`.

    With `infer`, what most rows of blocks of a large problem cost follows from what a few do (`Representatives`).
    """
    config = program.configure(problem, device, tile)
    run = partial(_on_shapes, program, config=config, device=device, asked=asked, infer=infer)
    return evaluated(problem, program.operation, config, run)


def _on_shapes(
    program: Program, one: Problem, *, config: Config, device: Device, asked: Collection[str], infer: bool = False
) -> Counts:
    """The same for a plain problem, or for one sequence."""
    machine = Machine(program.name, program.operation, one, config, device, asked=asked, data=None, infer=infer)
    _run(program, machine)
    return machine.close()


def trace_size(
    program: Program, problem: Problem, *, tile: TileLike, device: Device, asked: Collection[str] = ()
) -> tuple[int, int]:
    """How many steps a trace of one head has, and about how many bytes it takes. The program runs on shapes."""
    config, one = program.configure(problem, device, tile), head_of(problem, 0)
    machine = Machine(program.name, program.operation, one, config, device, asked=asked, data=None, infer=True)
    machine.recorder = Sizes(machine.book)
    program(machine, *machine.inputs, one, config.tile)
    launches = machine.close().launches
    steps, kept = (sum(launch.bytes(what, "trace") for launch in launches) for what in ("steps", "kept"))
    return steps, kept


def head_of(problem: Problem, batch: int) -> Problem:
    """One head of a batch as a problem of its own. Of requests with a prefix in common it is one head of all."""
    if problem.len_prefix is not None:
        return problem.replace(heads=1, kv_heads=None)
    one = problem.sequences[batch] if problem.page_size else problem.requests([batch])
    return one.replace(heads=1, kv_heads=None)


def _record(
    program: Program,
    arrays: Mapping[str, Array],
    problem: Problem,
    config: Config,
    device: Device,
    asked: Collection[str],
    head: tuple[int, int],
) -> Trace:
    """Run one (batch, head) alone, block by block, and record it. What batches have in common is run for all of them."""
    b, h = head
    one, recorder = head_of(problem, b), Recorder()
    places = {"heads": h, "kv_heads": h // problem.queries_per_kv}
    if one.batch < problem.batch:
        places["batch"] = b
    operands = {name: program.operation.operand(name, problem) for name in arrays}
    cut = {"table_pages": slice(one.table_pages)}
    if problem.varlen:
        cut["len_q"] = _cut_of(problem, b, one)["len_q"]
        arrays = {name: x for name, x in arrays.items() if operands[name].axes != ("offsets",)}
    data = {name: operands[name].cut(operands[name].part(x, places), cut) for name, x in arrays.items()}
    machine = Machine(
        program.name, program.operation, one, config, device, asked=asked, data=data, recorder=recorder,
        first_head=b * problem.heads + h,
    )  # fmt: skip
    program(machine, *machine.inputs, one, config.tile)
    tile = config.tile.rows, config.tile.cols
    return Trace(
        program.name,
        head,
        asdict(problem),
        tile,
        device.name,
        device.sram_per_block,
        recorder.sources,
        recorder.events,
        recorder.tensors,
        recorder.buffers,
        program.operation.pages(problem, arrays),
    )


def _run(program: Program, machine: Machine) -> list[str]:
    """Run a program, and return the names of the outputs that it returned.

    Raises `UsageError` if one that its operation always writes is missing, for anything that isn't an output, and for an
    output that the program didn't write.
    """
    problem = machine.problem
    result: Any = program(machine, *machine.inputs, problem, machine.tile)
    handles: list[Any] = [x for x in (result if type(result) is tuple else (result,)) if x is not None]  # pyright: ignore
    names = [x.name if isinstance(x, HbmTensor) else "" for x in handles]
    outputs, always = program.operation.outputs, [operand.name for operand in program.operation.written(problem)]
    if not set(always) <= set(names) <= {operand.name for operand in outputs}:
        wanted = ", ".join(f'm.output("{name}")' for name in always)
        besides = " and ".join(f'm.output("{operand.name}")' for operand in outputs if operand.asked)
        accepted = f"{wanted}, or that and {besides}" if besides else wanted
        raise UsageError(f"return value of {program.name}", cast("object", result), accepted)
    for name in names:
        if (missing := machine.unwritten(name)) > 0:
            whole = machine.outputs[name].spec.nbytes
            written = f"{whole - missing:,} of {whole:,} bytes written"
            raise UsageError(
                f"output {name} of {program.name}", Said(written), "all of it, by block.store or block.atomic_add"
            )
    return names
