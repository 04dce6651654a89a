"""Attention over K and V in pages, or by other operands than attention's: arrays of any framework in, the same kind out."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Unpack

from flashlab.run import arrays, host
from flashlab.run import plan as plans
from flashlab.run.plan import Plan
from simulator.devices import Device
from simulator.dtypes import Array
from simulator.errors import UsageError, unknown
from simulator.fields import flag
from simulator.names import Backend, DeviceName
from simulator.operations.operation import Operation
from simulator.problem import FIELDS, Masks
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["attention"]


def attention(
    operation: Operation, given: dict[str, Any], *, algorithm: str | Program, lse: bool, tile: TileLike, backend: Backend,
    device: Device | DeviceName | None, out: Any = None, **masks: Unpack[Masks],
) -> Any:  # fmt: skip
    """An operation whose outputs are `out` and the LSE. `given` are its operands by name: q, pools, a table, perhaps lengths.

    `out` is written in place, if it is given.
    """
    flag("lse", lse)
    found = operation.bound((), given)
    for name, x in found.items():
        host.check_no_grad(name, x)
    if not plans.is_auto(algorithm) and plans.catalogue.get(algorithm).operation is not operation:
        raise unknown("algorithm", algorithm, list(plans.catalogue.of(operation)))
    if (lengths := masks.get("lengths")) is not None:
        masks["lengths"] = FIELDS["lengths"].checked(lengths)  # a plan is kept by them, and not by a list
    if backend == "emulator":
        from flashlab.run.emulated import emulate

        for name, x in found.items():
            if not host.fits_kind(name, x, found["q"]):
                raise UsageError(
                    name, type(x).__name__, f"an array of the same kind as q ({type(found['q']).__name__})"
                )
        target = None if out is None else _checked(operation, found, out, **masks)
        run = emulate(
            plans.elsewhere(algorithm, operation), **found, lse=lse, tile=tile, device=device, **masks
        ).checked()
        outputs = {name: host.like(found["q"], x) for name, x in run.outputs.items()}
        if target is not None:
            target[...], outputs["out"] = run.out, target
    else:
        if device is not None:
            raise UsageError("device", device, "None: backend 'gpu' runs where the arrays lie")
        framework = arrays.framework_of(found)
        held = framework.shared(found)
        views = framework.views({name: framework.place(name, x) for name, x in held.items()})
        shapes = tuple((name, x.shape, x.dtype) for name, x in views.items())
        with framework.stream(views["q"].device):
            device_number = views["q"].device
            plan = _plan(operation, shapes, device_number, plans.ARCH, algorithm, tile, lse, **masks)
            outputs = plan.run(found, out=out)
    return (outputs["out"], outputs["lse"]) if lse else outputs["out"]


def _checked(operation: Operation, given: dict[str, Any], out: Any, **masks: Unpack[Masks]) -> Array:
    """An `out` of NumPy's. Raises `UsageError` for one of another shape or dtype, or that isn't apart from the inputs."""
    inputs, target = {name: host.operand(name, x) for name, x in given.items()}, host.writable("out", out)
    operation.check(operation.problem(inputs, **masks), {"out": target})
    views = {name: arrays.host_view(name, x) for name, x in inputs.items()}
    arrays.check_apart({"out": arrays.host_view("out", target)}, views)
    return target


@functools.lru_cache(maxsize=4096, typed=True)
def _plan(
    operation: Operation,
    shapes: tuple[tuple[str, tuple[int, ...], str], ...],
    device: int,
    arch: str | None,
    algorithm: str | Program,
    tile: TileLike,
    lse: bool,
    /,
    **masks: Unpack[Masks],
) -> Plan:
    """The plan for inputs of these shapes and dtypes on the current device."""
    del device  # part of the key
    inputs = {name: SimpleNamespace(shape=shape, dtype=dtype) for name, shape, dtype in shapes}
    problem = operation.problem(inputs, **masks)
    operation.check(problem, inputs)
    algorithm = plans.on_the_gpu(algorithm, operation, problem, tile, arch)
    return plans.gpu_plan(algorithm, problem, tile=tile, lse=lse, arch=arch)
