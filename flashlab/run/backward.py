"""The gradients of attention: arrays of any framework in, the same kind out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Unpack

from flashlab.run import arrays, host
from flashlab.run import plan as plans
from flashlab.run.plan import Plan
from flashlab.run.randomness import state_of
from simulator.devices import Device
from simulator.errors import UsageError, unknown
from simulator.fields import flag
from simulator.names import Backend, DeviceName
from simulator.operations.backward import BACKWARD
from simulator.problem import FIELDS, Masks, spell_masks
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["attention_backward", "one_order"]


@spell_masks
def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, sinks: Any = None,
    algorithm: str | Program = "auto", tile: TileLike = None,
    backend: Backend = "gpu", device: Device | DeviceName | None = None, seed: int | None = None, offset: int = 0,
    rng_state: Any = None, deterministic: bool = False, **masks: Unpack[Masks],
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients `(dq, dk, dv)` of attention, or with `sinks` `(dq, dk, dv, dsinks)`, for `dout`, the gradient of its output.

    `out` and `lse` are what `attention(q, k, v, lse=True)` returned, and the masks are those that it was given. P is
    recomputed from them, so nothing of size len_q × len_kv is kept. Arrays are as `attention` takes them: CuPy, torch or JAX
    in GPU memory, strided or not, and with `backend="emulator"` also NumPy. `dout` and `out` have the shape and dtype of q,
    `lse` is float32 `(batch, heads, len_q)`, contiguous. So is `dlse`, the gradient of the LSE, if the loss depends on that, too:
    where parts of attention are merged by their LSEs, say. `sinks` are those of the forward pass, float32 `(heads,)`, and so is
    their gradient. The gradients have the dtype of q; dk and dv are summed over the
    query heads that share a KV head. `algorithm="auto"` is the fastest that takes the problem there.
    With `dropout`, seed and offset (or `rng_state`) are those that `attention` was given too. `flash2_backward` takes
    `lengths` and `soft_cap`, with `deterministic` or without. `flash3_backward` and `flash3_backward_wide` take `lengths`.

    dq may be added up by atomics, in an order that differs from call to call: so may its last bits. dk and dv don't change. With
    `deterministic`, dq doesn't either: an algorithm is taken that adds it up in one order.
    Gradients in float16 can overflow or vanish: scale the loss, as in all training in float16. Raises `UsageError` for bad
    input, `Unavailable` without a GPU or CuPy, and `EmulationError` if a kernel misuses the emulated machine.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=20, head_dim=16, dtype="float16", causal=True)
    >>> q, k, v = fl.random_inputs(p)
    >>> out, lse = fl.attention(q, k, v, causal=True, lse=True, backend="emulator")
    >>> dq, dk, dv = fl.attention_backward(out, q, k, v, out, lse, causal=True, backend="emulator")
    >>> dq.shape, dk.dtype.name
    ((1, 2, 20, 16), 'float16')
    """
    named, options = BACKWARD.apart(masks)
    if (lengths := options.get("lengths")) is not None:
        options["lengths"] = FIELDS["lengths"].checked(lengths)  # a plan is kept by them, and not by a list
    state = state_of(options.get("dropout"), seed, offset, rng_state)
    named |= {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse, "sinks": sinks,
              "rng_state": rng_state}  # fmt: skip
    given = BACKWARD.bound((), named)
    if flag("deterministic", deterministic):
        one_order(algorithm)  # refuses others
    if not plans.is_auto(algorithm) and plans.catalogue.get(algorithm).operation is not BACKWARD:
        raise unknown("algorithm", algorithm, ["auto", *plans.catalogue.of(BACKWARD)])
    if backend == "emulator":
        chosen = plans.elsewhere(algorithm, BACKWARD, one_order=deterministic)
        return _emulated(given if state is None else {**given, "rng_state": state}, chosen, tile, device, options)
    if backend != "gpu":
        raise unknown("backend", backend, ["gpu", "emulator"])
    if device is not None:
        raise UsageError("device", device, "None: backend 'gpu' runs where the arrays lie")
    framework = arrays.framework_of(given)
    held = framework.shared(given)
    views = framework.views({name: framework.place(name, x) for name, x in held.items()})
    shapes = tuple((name, x.shape, x.dtype) for name, x in views.items())
    with framework.stream(views["q"].device):
        plan = _plan(shapes, views["q"].device, plans.ARCH, algorithm, tile, deterministic, **options)
        found = plan.run(given if state is None else {**given, "rng_state": state})
    return _returned(found, lambda x: x)


def _returned(found: Mapping[str, Any], like: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The gradients in order. Those of sinks are summed over the batches, of which the kernel has each by itself."""
    gradients = tuple(like(found[name]) for name in ("dq", "dk", "dv"))
    return (*gradients, like(found["dsinks"]).sum(0)) if "dsinks" in found else gradients


def one_order(algorithm: str | Program) -> str | Program:
    """The algorithm, if each run of it gives the same bits; for "auto" the one that runs anywhere. Raises `UsageError` for others.

    >>> one_order("auto")
    'flash2_backward_deterministic'
    """
    if plans.is_auto(algorithm):
        return plans.elsewhere(algorithm, BACKWARD, one_order=True)
    if plans.catalogue.get(algorithm).atomics:
        accepted = [row.name for row in plans.catalogue.of(BACKWARD).values() if not row.atomics]
        raise UsageError("algorithm", algorithm, f"auto, {', '.join(accepted)} where deterministic")
    return algorithm


@functools.lru_cache(maxsize=4096, typed=True)
def _plan(
    shapes: tuple[tuple[str, tuple[int, ...], str], ...],
    device: int,
    arch: str | None,
    algorithm: str | Program,
    tile: TileLike,
    one_order: bool,
    /,
    **masks: Unpack[Masks],
) -> Plan:
    """The plan for inputs of these shapes and dtypes on the current device."""
    del device  # part of the key
    inputs = {name: SimpleNamespace(shape=shape, dtype=dtype) for name, shape, dtype in shapes}
    problem = BACKWARD.problem(inputs, **masks)
    BACKWARD.check(problem, inputs)
    algorithm = plans.on_the_gpu(algorithm, BACKWARD, problem, tile, arch, one_order=one_order)
    return plans.gpu_plan(algorithm, problem, tile=tile, arch=arch)


def _emulated(
    given: dict[str, Any], algorithm: str | Program, tile: TileLike, device: Device | DeviceName | None, masks: Masks
) -> tuple[Any, ...]:
    from flashlab.run.emulated import emulate

    q = given["q"]
    for name, x in given.items():
        if not host.fits_kind(name, x, q):
            raise UsageError(name, type(x).__name__, f"an array of the same kind as q ({type(q).__name__})")
        host.check_no_grad(name, x)
    found = emulate(algorithm, **given, tile=tile, device=device, **masks).checked().outputs
    return _returned(found, functools.partial(host.like, q))
