"""Run tile programs: on data (numbers and counts) or on shapes alone (counts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from simulator.counts import Counts
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
    """Run a tile program on arrays."""
    config = program.configure(problem, device, tile)
    machine = Machine(program.name, problem, config, device, lse=lse, data=(q, k, v))
    out, lse_out = _returned(program(machine, *machine.inputs, problem, config.tile), program.name)
    counts = machine.close()
    recorded = None if trace is None else _record(program, q, k, v, problem, machine, trace)
    return Run(
        machine.result(out),
        machine.result(lse_out)[..., 0] if lse and lse_out else None,
        counts,
        recorded,
    )


def run_on_shapes(program: Program, problem: Problem, *, tile: TileLike, device: Device, lse: bool) -> Counts:
    """Run a tile program on shapes alone: exact counts, no data."""
    config = program.configure(problem, device, tile)
    machine = Machine(program.name, problem, config, device, lse=lse, data=None)
    _returned(program(machine, *machine.inputs, problem, config.tile), program.name)
    return machine.close()


def _record(
    program: Program, q: Array, k: Array, v: Array, problem: Problem, whole: Machine, head: tuple[int, int]
) -> Trace:
    """Run one head alone, block by block, with a recorder listening."""
    b, h = head
    kv = h // problem.queries_per_kv
    one = problem.replace(batch=1, heads=1, kv_heads=None)
    recorder = Recorder()
    data = q[b : b + 1, h : h + 1], k[b : b + 1, kv : kv + 1], v[b : b + 1, kv : kv + 1]
    machine = Machine(program.name, one, whole.config, whole.device, lse=whole.lse, data=data, recorder=recorder)
    program(machine, *machine.inputs, one, whole.tile)
    shape = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    tile = whole.tile.rows, whole.tile.cols
    return Trace(
        program.name,
        head,
        shape,
        tile,
        whole.device.name,
        whole.device.sram_per_block,
        recorder.sources,
        recorder.events,
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
