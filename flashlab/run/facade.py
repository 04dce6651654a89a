"""One way in: a call of an operation on arrays of any framework, on a GPU or on the emulator.

Whatever a call decides is decided once. A warm call reads its arrays, finds by one look into a dictionary what was decided for
such arrays and options, and queues the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Unpack

from flashlab.base import host
from flashlab.run import arrays, choose, devices
from flashlab.run.arrays import Read, View
from flashlab.run.plan import EmulatorPlan, Plan, Ready, gpu_plan, keep
from flashlab.run.randomness import state_of
from simulator.devices import Device
from simulator.errors import UsageError, among
from simulator.fields import flag
from simulator.names import Backend, DeviceName
from simulator.operations.operation import Operation
from simulator.problem import FIELDS, MASKS, Masks
from simulator.program import Program
from simulator.simulate import Scales, TileLike

__all__ = ["called"]

_MASKS = frozenset(MASKS)
_SCALES = {f"scales.{name}": f"{name}_scale" for name in "qkv"}
"""The name of each scale in an error, and its operand."""
_PAGES = ("seq_lens", "draft_mask", "cu_seqlens_q")
"""What an operation has only where keys lie in pages, if at all."""
_MOST_KEPT = 4096  # calls with all that was decided for them
_warm = dict[tuple[Any, ...], Ready]()

Differentiate = Callable[..., tuple[Any, ...] | None]
"""`differentiate(given, **options)`: the outputs, if a gradient is to flow through an input, or else None. It isn't asked again for
a call that was decided."""


def called(
    operation: Operation, given: dict[str, Any], masks: Masks, *, algorithm: str | Program, tile: TileLike, backend: Backend,
    device: Device | DeviceName | None, lse: bool = False, one_order: bool = False, scales: Scales | None = None,
    seed: int | None = None, offset: int = 0, sm_margin: int = 0, differentiate: Differentiate | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The outputs of an operation, in order, of the kind of the arrays that are `given` by name.

    None is left out. Outputs that are given are written in place. With `one_order`, each run of the algorithm gives the same bits.
    `sm_margin` SMs are left to others: persistent kernels launch so many blocks fewer.
    Raises `UsageError` for bad input, `Unavailable` for what isn't here, and `EmulationError`.
    """
    if scales is not None:
        given |= _scaled(operation, scales)
    how = (operation, algorithm, tile, lse, one_order, sm_margin)
    key: tuple[Any, ...] = (*how, differentiate, devices.ARCH)
    known = masks.keys() <= _MASKS
    if masks:
        if (lengths := masks.get("lengths")) is not None:
            masks["lengths"] = FIELDS["lengths"].checked(lengths)  # a call is kept by them, and not by a list
        key += (*masks.items(), *map(type, masks.values()))  # True equals 1, but not to the checks
    state = None
    if seed is not None or offset.__class__ is not int or offset:
        state = state_of(masks.get("dropout"), seed, offset, given.get("rng_state"))
    read = None
    if (
        known
        and backend.__class__ is str
        and backend == "gpu"
        and device is None
        and lse.__class__ is one_order.__class__ is bool
    ):
        read = arrays.read(given)
        if read is not None and state is not None:
            read = arrays.with_state(read, state)
        if read is not None and (ready := _found((*key, *read[1]))) is not None:
            return tuple(ready.run(read[2], given).values())

    among("backend", backend, ["gpu", "emulator"])
    _check(operation, given, algorithm, lse, one_order)
    state_of(masks.get("dropout"), seed, offset, given.get("rng_state"))  # refuses dropout without a seed
    if differentiate is not None:
        more: Any = {"backend": backend, "device": device, "scales": scales, "seed": seed, "offset": offset}
        found = differentiate(given, algorithm=algorithm, lse=lse, tile=tile, **more, **masks)
        if found is not None:
            return found
    if not known:
        named, masks = operation.apart(masks)
        given |= named
    for name, x in given.items():
        host.check_no_grad(name, x)
    if backend == "emulator":
        given |= {} if state is None else {"rng_state": state}
        return _emulated(given, Device.named("h100" if device is None else device), masks, *how)
    if device is not None:
        raise UsageError("device", device, "None: backend 'gpu' runs where the arrays lie")
    if read is None:
        read = arrays.checked(given) if state is None else arrays.with_state(arrays.checked(given), state)
    ready = _decided(read, masks, *how, devices.ARCH)
    with suppress(TypeError):  # with a list, say, for a tile
        keep(_warm if known else {}, (*key, *read[1]), ready, _MOST_KEPT)
    return tuple(ready.run(read[2], given).values())


def _found(key: tuple[Any, ...]) -> Ready | None:
    """What is kept for a call. It is None, too, where nothing can be kept: a tile may be a list, say."""
    try:
        return _warm.get(key)
    except TypeError:
        return None


def _scaled(operation: Operation, scales: Any) -> dict[str, Any]:
    """Scales by the names that errors have for them."""
    if "q_scale" not in {x.name for x in operation.inputs}:
        raise host.refused("scales", type(scales).__name__, "None with a block_table")
    return dict(zip(_SCALES, Scales.of(scales), strict=True))


def _check(
    operation: Operation, given: Mapping[str, Any], algorithm: str | Program, lse: bool, one_order: bool
) -> None:
    """Raises `UsageError` for what any backend refuses, before it looks at an array."""
    inputs = {x.name for x in operation.inputs}
    others = {x.name for x in operation.outputs} | _SCALES.keys()
    for name, x in given.items():
        if x is not None and name not in inputs | others:
            raise host.refused(name, type(x).__name__, f"None {'without' if name in _PAGES else 'with'} a block_table")
    operation.bound((), {name: x for name, x in given.items() if name in inputs})
    flag("lse", lse)
    choose.check(algorithm, operation)
    if flag("deterministic", one_order):
        choose.one_order(algorithm, operation)


def _emulated(
    given: dict[str, Any], device: Device, masks: Masks, operation: Operation, algorithm: Any, tile: Any, lse: bool,
    one_order: bool, sm_margin: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The outputs by the emulator."""
    found = {name: x for name, x in given.items() if x is not None}
    first, q = next(iter(found.items()))
    inputs = {x.name for x in operation.inputs}
    for name, x in found.items():
        if name in inputs and not host.fits_kind(name, x, q):
            raise UsageError(name, type(x).__name__, f"an array of the same kind as {first} ({type(q).__name__})")
    for name in operation.in_place & found.keys():
        host.check_shared(name, found[name])
    on_cpu = {name: host.operand(name, x) for name, x in found.items() if name in inputs}
    problem = operation.problem(on_cpu, **masks)
    name = choose.chosen(algorithm, operation, problem, one_order=one_order)
    plan = EmulatorPlan(name, problem, tile, lse, devices.without(device, sm_margin))
    if scales := [found.pop(name) for name in _SCALES if name in found]:
        found |= Scales.of(scales).as_numpy().named(plan.counts.problem, plan.counts.tile)
    return tuple(host.like(q, x) for x in plan.run(found | on_cpu).values())


def _decided(read: Read, masks: Masks, operation: Operation, *options: Any) -> Ready:
    """All that a call decides about arrays that lie as these do. Raises `UsageError`."""
    held, (framework, *_), _ = read
    views: dict[str, View] = framework.views(held)
    inputs, device = {x.name for x in operation.inputs}, next(iter(views.values())).device
    shapes = tuple((name, x.shape, x.dtype) for name, x in views.items() if name in inputs)
    with framework.stream(device):
        try:
            plan = _plan(shapes, device, operation, *options, **masks)
        except TypeError:  # as above
            plan = _plan.__wrapped__(shapes, device, operation, *options, **masks)
        if scales := [views[name] for name in _SCALES if name in views]:
            Scales(*scales).named(plan.counts.problem, plan.counts.tile)
        return plan.ready(framework, {_SCALES.get(name, name): view for name, view in views.items()})


@functools.lru_cache(maxsize=_MOST_KEPT, typed=True)
def _plan(
    shapes: tuple[tuple[str, tuple[int, ...], str], ...], device: int, operation: Operation, algorithm: str | Program,
    tile: TileLike, lse: bool, one_order: bool, sm_margin: int, arch: str | None, /, **masks: Unpack[Masks],
) -> Plan:  # fmt: skip
    """The plan for inputs of these shapes and dtypes on the current device."""
    del device  # part of the key
    inputs = {name: SimpleNamespace(shape=shape, dtype=dtype) for name, shape, dtype in shapes}
    problem = operation.problem(inputs, **masks)
    operation.check(problem, inputs)
    algorithm = choose.chosen(algorithm, operation, problem, devices.gpu_device(arch), tile, one_order=one_order)
    return gpu_plan(algorithm, problem, tile=tile, lse=lse, arch=arch, sm_margin=sm_margin)
