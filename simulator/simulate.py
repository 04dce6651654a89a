"""Run tile programs: on data (numbers and counts) or on shapes alone (counts)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from threadpoolctl import ThreadpoolController  # pyright: ignore[reportMissingTypeStubs]

from simulator.config import Config
from simulator.counts import Counts, summed
from simulator.devices import Device
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.machine import HbmTensor, Machine
from simulator.problem import ITEMSIZE, Problem, Tile
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
            raise UsageError(f"{name}.dtype", dtype, f"one of {', '.join(ITEMSIZE)}")
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


def run_on_data(
    program: Program, q: Array, k: Array, v: Array, problem: Problem, *, tile: TileLike, device: Device, lse: bool,
    trace: tuple[int, int] | None,
) -> Run:  # fmt: skip
    """Run a tile program on arrays, the heads or batches shared out among the cores.

    Each core has a thread with a machine of its own; BLAS keeps to one thread meanwhile, because its threads, waiting for
    one another at every one of these many small products, cost more than they bring (and a hundredfold beside other work).
    """
    config = program.configure(problem, device, tile)

    def run(part: Part) -> tuple[Machine, HbmTensor, HbmTensor | None]:
        machine = Machine(program.name, part.problem, config, device, lse=lse, data=(part.q, part.k, part.v))
        return machine, *_returned(program(machine, *machine.inputs, part.problem, config.tile), program.name)

    parts = _parts(q, k, v, problem)
    with _blas().limit(limits=1, user_api="blas"):  # pyright: ignore[reportUnknownMemberType]
        if len(parts) == 1:
            done = [run(parts[0])]
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                done = list(pool.map(run, parts))
        recorded = None if trace is None else _record(program, q, k, v, problem, config, device, lse, trace)
    axis = 0 if problem.batch > 1 else 1
    out = np.concatenate([machine.result(out) for machine, out, _ in done], axis)
    rows = [machine.result(row_lse)[..., 0] for machine, _, row_lse in done if lse and row_lse]
    counts = summed([machine.close() for machine, _, _ in done], problem)
    return Run(out, np.concatenate(rows, axis) if rows else None, counts, recorded)


class Part(NamedTuple):
    """Some of the heads or batches of a problem, and their arrays."""

    problem: Problem
    q: Array
    k: Array
    v: Array


_WORTH_A_THREAD = 1 << 20  # scores


def _parts(q: Array, k: Array, v: Array, problem: Problem) -> list[Part]:
    """The problem cut along its batches, or if there is but one along its KV heads, into as many parts as there are cores."""
    p = problem
    pieces = p.batch if p.batch > 1 else p.num_kv_heads
    n = max(1, min(os.cpu_count() or 1, pieces, p.batch * p.heads * p.len_q * p.kv_length // _WORTH_A_THREAD))
    cuts = [slice(i * pieces // n, (i + 1) * pieces // n) for i in range(n)]
    if p.batch > 1:
        return [Part(p.replace(batch=c.stop - c.start), q[c], k[c], v[c]) for c in cuts]
    group, parts = p.queries_per_kv, list[Part]()
    for c in cuts:
        kv_heads = c.stop - c.start
        one = p.replace(heads=kv_heads * group, kv_heads=kv_heads if p.kv_heads is not None else None)
        parts.append(Part(one, q[:, c.start * group : c.stop * group], k[:, c], v[:, c]))
    return parts


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
    program: Program, q: Array, k: Array, v: Array, problem: Problem, config: Config, device: Device, lse: bool,
    head: tuple[int, int],
) -> Trace:  # fmt: skip
    """Run one head alone, block by block, with a recorder listening."""
    b, h = head
    kv = h // problem.queries_per_kv
    one = problem.replace(batch=1, heads=1, kv_heads=None)
    recorder = Recorder()
    data = q[b : b + 1, h : h + 1], k[b : b + 1, kv : kv + 1], v[b : b + 1, kv : kv + 1]
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
