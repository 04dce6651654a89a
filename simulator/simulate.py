"""Run tile programs: on data (numbers and counts) or on shapes alone (counts)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self, cast

import numpy as np
from threadpoolctl import ThreadpoolController  # pyright: ignore[reportMissingTypeStubs]

from simulator.config import Config
from simulator.counts import Counts, summed
from simulator.devices import Device
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.machine import HbmTensor, Machine
from simulator.problem import DTYPES, FP8, ITEMSIZE, Problem, Tile
from simulator.program import Program
from simulator.trace import Recorder, Trace

Window = tuple[int | None, int | None] | None
TileLike = Tile | tuple[int, int] | str | None


@dataclass(frozen=True)
class Run:
    """`out` (batch, heads, len_q, head_dim_v) in the storage dtype, `lse` (batch, heads, len_q) float32 if asked for,
    the `counts`, and the `trace` of one head if asked for.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float16")
    >>> run = fl.simulate("flash2", *fl.random_inputs(p), lse=True)
    >>> run.out.dtype.name, run.lse.shape, run.trace
    ('float16', (1, 2, 64), None)
    """

    out: Array
    lse: Array | None
    counts: Counts
    trace: Trace | None


def problem_of(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None, scale: float | None = None
) -> Problem:
    """The problem that arrays `(batch, heads, length, head_dim)` pose. Only `.shape` and `.dtype` are looked at.

    Raises `UsageError` naming the array at fault.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(getattr(x, "shape", ())) != 4:
            raise UsageError(f"{name}.shape", getattr(x, "shape", type(x).__name__), "(batch, heads, length, head_dim)")
    names = {name: str(x.dtype).removeprefix("torch.") for name, x in (("q", q), ("k", k), ("v", v))}
    for name, dtype in names.items():
        if dtype not in ITEMSIZE:
            raise UsageError(f"{name}.dtype", dtype, f"one of {', '.join(DTYPES)}, or {FP8} for flash3_fp8")
        if dtype != names["q"]:
            raise UsageError(f"{name}.dtype", dtype, f"{names['q']}, as q has")
    (batch, heads, len_q, dim), (kb, kv_heads, len_kv, kd), (vb, vh, vl, dim_v) = (tuple(x.shape) for x in (q, k, v))
    if (kb, kd) != (batch, dim):
        raise UsageError("k.shape", tuple(k.shape), f"batch {batch} and head_dim {dim}, as q has")
    if (vb, vh, vl) != (kb, kv_heads, len_kv):
        raise UsageError("v.shape", tuple(v.shape), f"batch, heads and length {(kb, kv_heads, len_kv)}, as k has")
    # what follows stays None, so that the problem equals the one a user would write
    return Problem(
        batch=batch, heads=heads, kv_heads=None if kv_heads == heads else kv_heads, len_q=len_q,
        len_kv=None if len_kv == len_q else len_kv, head_dim=dim, head_dim_v=None if dim_v == dim else dim_v,
        dtype=names["q"], causal=causal, window=window, scale=scale,
    )  # fmt: skip


class Scales(NamedTuple):
    """What 8-bit operands are to be multiplied with, float32, one for each of the kernel's tiles: q (batch, heads, row tiles),
    k and v (batch, kv_heads, key tiles). Those of q and k are positive: a kernel takes maxima of scores before it scales them.
    `flashlab.measure.fp8.quantize` makes them.

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

    def named(self, problem: Problem, tile: Tile) -> dict[str, Any]:
        """As the kernels' arguments are called. Raises `UsageError` for other shapes, dtypes, scales of q or k that
        aren't positive (NumPy's only), or a problem of other dtypes."""
        p = problem
        if p.dtype != FP8:
            raise UsageError("scales", "given", f"None for {p.dtype}: only {FP8} has scales")
        q_tiles, k_tiles = (p.batch, p.heads, p.row_tiles(tile)), (p.batch, p.num_kv_heads, p.key_tiles(tile))
        for name, x, shape, side in (
            ("q", self.q, q_tiles, tile.rows),
            ("k", self.k, k_tiles, tile.cols),
            ("v", self.v, k_tiles, tile.cols),
        ):
            if tuple(x.shape) != shape:
                raise UsageError(
                    f"scales.{name}.shape", tuple(x.shape), f"{shape}, one for every {side} rows of {name}"
                )
            if str(x.dtype).removeprefix("torch.") != "float32":
                raise UsageError(f"scales.{name}.dtype", str(x.dtype), "float32")
            if name != "v" and isinstance(x, np.ndarray):  # on a GPU a look would have to wait for it
                least = float(cast(Array, x).min(initial=np.inf))
                if not least > 0:
                    raise UsageError(f"scales.{name}", least, "positive numbers")
        return {f"{name}_scale": x for name, x in zip("qkv", self, strict=True)}


def run_on_data(
    program: Program, q: Array, k: Array, v: Array, problem: Problem, *, tile: TileLike, device: Device, lse: bool,
    trace: tuple[int, int] | None, scales: Scales | None = None,
) -> Run:  # fmt: skip
    """Run a tile program on arrays, the heads or batches shared out among the cores.

    Each core has a thread with a machine of its own; BLAS keeps to one thread meanwhile, because its threads, waiting for
    one another at every one of these many small products, cost more than they bring (and a hundredfold beside other work).
    """
    config = program.configure(problem, device, tile)

    def run(part: Part) -> tuple[Machine, HbmTensor, HbmTensor | None]:
        machine = Machine(program.name, part.problem, config, device, lse=lse, data=part.arrays)
        return machine, *_returned(program(machine, *machine.inputs, part.problem, config.tile), program.name)

    given = {} if scales is None else Scales.of(scales).named(problem, config.tile)
    arrays: dict[str, Array] = {"q": q, "k": k, "v": v, **{name: x[..., None] for name, x in given.items()}}
    parts = _parts(arrays, problem)
    with _blas().limit(limits=1, user_api="blas"):  # pyright: ignore[reportUnknownMemberType]
        if len(parts) == 1:
            done = [run(parts[0])]
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                done = list(pool.map(run, parts))
        recorded = None if trace is None else _record(program, arrays, problem, config, device, lse, trace)
    axis = 0 if problem.batch > 1 else 1
    out = np.concatenate([machine.result(out) for machine, out, _ in done], axis)
    rows = [machine.result(row_lse)[..., 0] for machine, _, row_lse in done if lse and row_lse]
    counts = summed([machine.close() for machine, _, _ in done], problem)
    return Run(out, np.concatenate(rows, axis) if rows else None, counts, recorded)


class Part(NamedTuple):
    """Some of the heads or batches of a problem, and their arrays by name."""

    problem: Problem
    arrays: Mapping[str, Array]


_WORTH_A_THREAD = 1 << 20  # scores


def _parts(arrays: Mapping[str, Array], problem: Problem) -> list[Part]:
    """The problem cut along its batches, or if there is but one along its KV heads, into as many parts as there are cores."""
    p = problem
    pieces = p.batch if p.batch > 1 else p.num_kv_heads
    n = max(1, min(os.cpu_count() or 1, pieces, p.batch * p.heads * p.len_q * p.kv_length // _WORTH_A_THREAD))
    cuts = [slice(i * pieces // n, (i + 1) * pieces // n) for i in range(n)]
    if p.batch > 1:
        return [Part(p.replace(batch=c.stop - c.start), {name: x[c] for name, x in arrays.items()}) for c in cuts]
    group, parts = p.queries_per_kv, list[Part]()
    for c in cuts:
        kv_heads = c.stop - c.start
        one = p.replace(heads=kv_heads * group, kv_heads=kv_heads if p.kv_heads is not None else None)
        parts.append(Part(one, {name: _heads(x, c, p) for name, x in arrays.items()}))
    return parts


def _heads(x: Array, kv_heads: slice, problem: Problem) -> Array:
    """Of an array with query or KV heads those that belong to some KV heads."""
    each = x.shape[1] // problem.num_kv_heads
    return x[:, kv_heads.start * each : kv_heads.stop * each]


@cache
def _blas() -> ThreadpoolController:
    """The BLAS that NumPy has loaded."""
    return ThreadpoolController()


def run_on_shapes(program: Program, problem: Problem, *, tile: TileLike, device: Device, lse: bool) -> Counts:
    """Run a tile program on shapes alone: exact counts, no data."""
    config = program.configure(problem, device, tile)
    machine = Machine(program.name, problem, config, device, lse=lse, data=None)
    _returned(program(machine, *machine.inputs, problem, config.tile), program.name)
    return machine.close()


def _record(
    program: Program, arrays: Mapping[str, Array], problem: Problem, config: Config, device: Device, lse: bool,
    head: tuple[int, int],
) -> Trace:  # fmt: skip
    """Run one head alone, block by block, with a recorder listening."""
    b, h = head
    one = problem.replace(batch=1, heads=1, kv_heads=None)
    recorder = Recorder()
    data = {name: x[b : b + 1, h * x.shape[1] // problem.heads][:, None] for name, x in arrays.items()}
    machine = Machine(program.name, one, config, device, lse=lse, data=data, recorder=recorder)
    program(machine, *machine.inputs, one, config.tile)
    shape = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    tile = config.tile.rows, config.tile.cols
    return Trace(
        program.name,
        head,
        shape,
        tile,
        device.name,
        device.sram_per_block,
        recorder.sources,
        recorder.events,
        recorder.tensors,
        recorder.buffers,
    )


def _returned(result: Any, name: str) -> tuple[HbmTensor, HbmTensor | None]:
    """What a program returned: `out`, or `(out, lse)`."""
    pair = result if type(result) is tuple else (result, None)  # pyright: ignore[reportUnknownVariableType]
    out, lse = cast("tuple[Any, Any]", pair) if len(pair) == 2 else (None, None)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(out, HbmTensor) or not isinstance(lse, HbmTensor | None) or out.name != "out":
        raise UsageError(
            f"return value of {name}", cast("object", result), 'm.output("out"), or that and m.output("lse")'
        )
    return out, lse
