"""Runs a kernel on a problem, the emulator's way: what is launched on which arrays is data, which a GPU can be handed as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import flashlab as fl
import kernels_cu
from flashlab import emulator
from flashlab.run import abi, nvrtc
from simulator.catalogue import get
from simulator.counts import Counts, Spec
from simulator.devices import DEVICES
from simulator.dtypes import numpy_dtype


@dataclass(frozen=True)
class Pointer:
    """An argument: where an array lies; with strides (batch, head, row; in bytes) as the kernels' `struct Tensor`."""

    array: str
    strides: tuple[int, int, int] | None = None

    def at(self, address: int) -> np.generic:
        """The argument, of an array that lies at `address`."""
        return np.uintp(address) if self.strides is None else np.array((address, *self.strides), abi.TENSOR)[()]


@dataclass(frozen=True)
class Array:
    """An array of a job: what it holds before the first launch (None: nobody wrote it), and whether kernels may write it."""

    name: str
    nbytes: int
    values: bytes | None = None
    read_only: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel: its source, how it is compiled, its grid, and its arguments, each a NumPy scalar or a pointer."""

    path: Path
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Pointer | np.generic, ...]
    macros: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    sram: int = 0


@dataclass(frozen=True)
class Job:
    """Launches, one after the other, on arrays that they share. `arch`: what they are compiled for, 900 for sm_90."""

    arrays: tuple[Array, ...]
    launches: tuple[Launch, ...]
    arch: int = 900
    watch: bool = False
    specs: Mapping[str, Spec] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """What the launches did, and what the arrays hold afterwards."""

    launched: tuple[emulator.Launched, ...]
    arrays: Mapping[str, np.ndarray[Any, Any]]

    @property
    def findings(self) -> list[emulator.Finding]:
        return [finding for launched in self.launched for finding in launched.findings]


def emulate(job: Job, *, sanitize: bool = True, time_limit: float = 20, workers: int | None = None) -> Ran:
    """Run a job on the CPU. `workers=1` runs one block after the other, in order."""
    arena = emulator.Arena()
    for array in job.arrays:
        data = arena.new(array.name, array.nbytes)
        if array.values is not None:
            data[:] = np.frombuffer(array.values, np.uint8)
            arena.buffers[array.name].written[:] = 1
        arena.buffers[array.name].read_only = array.read_only
    done: list[emulator.Launched] = []
    for x in job.launches:
        library = emulator.build(x.path, (*x.includes, *x.macros), arch=job.arch, watch=job.watch)
        scalars = [a.at(arena.pointer(a.array)) if isinstance(a, Pointer) else a for a in x.arguments]
        arguments = [scalar.tobytes() for scalar in scalars]
        done.append(
            library.launch(
                x.entry,
                x.grid,
                x.block,
                arguments,
                arena,
                sram=x.sram,
                sanitize=sanitize,
                time_limit=time_limit,
                workers=workers,
            )
        )
    return Ran(tuple(done), {array.name: arena.buffers[array.name].data for array in job.arrays})


def attention_job(
    algorithm: str, problem: fl.Problem, *, tile: tuple[int, int] | None = None, device: str = "h200", lse: bool = True,
    sources: Mapping[str, Path] | None = None, includes: Sequence[str] = (), watch: bool = False, seed: int = 0,
) -> tuple[Job, Counts]:  # fmt: skip
    """An algorithm's launches on random inputs, and what the formula says of them. `sources`: files in place of the real ones."""
    counts = fl.count(algorithm, problem, tile=tile, device=device, lse=lse)
    config = counts.config
    assert config is not None
    given = dict(zip("qkv", fl.random_inputs(problem, seed=seed), strict=True))
    arrays = [
        Array(s.name, s.nbytes, _laid_out(given[s.name], s) if s.name in given else None, s.name in given)
        for s in counts.tensors.values()
    ]
    pointers: dict[str, Pointer] = {
        s.name: Pointer(s.name, None if s.by_pointer else abi.strides_of(s, problem.batch))
        for s in counts.tensors.values()
    }
    shape = abi.shape_struct(problem, config.heads_together)
    macros = nvrtc.defines(config, problem.dtype, problem.head_dim)
    launches = tuple(
        Launch(
            (sources or {}).get(kernel.source, kernels_cu.source(kernel.source)),
            kernel.entry,
            (launch.blocks,),
            (32 * launch.warps,),
            (*(pointers.get(name, np.uintp(0)) for name in kernel.arguments), shape),
            macros,
            tuple(includes),
            launch.sram_peak,
        )
        for launch, kernel in zip(counts.launches, get(algorithm).launched(problem, counts.config), strict=True)
    )
    major, minor = DEVICES[device].compute_capability
    return Job(tuple(arrays), launches, 100 * major + 10 * minor, watch, counts.tensors), counts


def _laid_out(x: np.ndarray[Any, Any], spec: Spec) -> bytes:
    """An array as bytes, its rows padded as the contract says."""
    rows = np.zeros((spec.heads * spec.rows, spec.row_bytes), np.uint8)
    rows[:, : spec.cols * spec.itemsize] = np.ascontiguousarray(x).reshape(len(rows), spec.cols).view(np.uint8)
    return rows.tobytes()


def array_of(ran: Ran, job: Job, name: str, problem: fl.Problem) -> np.ndarray[Any, Any]:
    """`out` (batch, heads, len_q, head_dim) or `lse` (batch, heads, len_q) of a run."""
    spec = job.specs[name]
    rows = ran.arrays[name].reshape(spec.heads * spec.rows, -1)[:, : spec.cols * spec.itemsize]
    shape = (problem.batch, problem.heads, problem.len_q)
    values = (
        np.ascontiguousarray(rows).view(numpy_dtype(spec.dtype)) if not spec.vector else ran.arrays[name].view("f4")
    )
    return values.reshape(shape if spec.vector else (*shape, spec.cols))


# Kernels of a few lines, as a learner writes them: kernels/*.cu

PLAIN = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class Plain:
    """A plain kernel on a problem of size `n`: its grid, and its arguments in order. An array is an input unless its name
    stands in `results`, which has what the kernel should leave there; None in place of an array: nobody wrote it."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: Mapping[str, Any]
    results: Mapping[str, np.ndarray[Any, Any]]


def plain(name: str, n: int) -> Plain:
    """The problem of a plain kernel."""
    random = np.random.default_rng(0)
    x = random.standard_normal(n * n if name == "transpose" else n).astype("f4")
    if name == "block_sum":
        y = np.zeros(1, "f4")
        return Plain((-(-n // 128),), (128,), {"x": x, "y": y, "n": np.int32(n)}, {"y": x.sum(keepdims=True)})
    if name == "transpose":
        square = x.reshape(n, n)
        return Plain((n // 32, n // 32), (32, 8), {"x": x, "y": None, "n": np.int32(n)}, {"y": square.T.reshape(-1)})
    if name == "warp_sums":
        groups = x.reshape(-1, 32)
        expected = groups.sum(1, keepdims=True) - groups[:, ::-1]
        return Plain((n // 64,), (64,), {"x": x, "y": None}, {"y": expected.reshape(-1)})
    if name == "axpy":
        y = random.standard_normal(n).astype("f4")
        arguments = {"x": x, "y": y, "a": np.float32(2), "n": np.int32(n)}
        return Plain((-(-n // 512),), (128,), arguments, {"y": 2 * x + y})
    if name == "histogram":
        keys = random.integers(0, 1 << 30, n, dtype=np.int32)
        bins = np.bincount((keys.astype(np.uint64) * 2654435761 % 2**32 % 16).astype(int), minlength=16).astype("i4")
        arguments = {"keys": keys, "bins": np.zeros(16, "i4"), "n": np.int32(n), "bin_count": np.int32(16)}
        return Plain((-(-n // 64),), (64,), arguments, {"bins": bins})
    if name == "aggregate":
        positive = np.array([(x > 0).sum()], "i4")
        return Plain((n // 64,), (64,), {"x": x, "count": np.zeros(1, "i4")}, {"count": positive})
    assert name == "hand_over", name
    x = abs(x[:32]) + 1
    return Plain((1,), (96,), {"x": x, "y": None, "flag": np.zeros(1, "i4")}, {"y": x / x.sum()})


def plain_job(name: str, n: int, source: Path | None = None) -> Job:
    """A plain kernel's launch."""
    p = plain(name, n)
    arrays: list[Array] = []
    arguments: list[Pointer | np.generic] = []
    for argument, value in p.arguments.items():
        if isinstance(value, np.generic):
            arguments.append(value)
            continue
        arguments.append(Pointer(argument))
        if value is None:
            arrays.append(Array(argument, p.results[argument].nbytes))
        else:
            arrays.append(
                Array(argument, value.nbytes, value.tobytes(), read_only=argument not in (*p.results, "flag"))
            )
    launch = Launch(source or PLAIN / f"{name}.cu", name, p.grid, p.block, tuple(arguments))
    return Job(tuple(arrays), (launch,), watch=True)
