"""Attention on a GPU: arrays of any framework in, the same kind out; whatever a call decides is decided once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from flashlab.run import arrays
from flashlab.run import plan as plans
from flashlab.run.arrays import View
from flashlab.run.plan import Plan, Ready
from simulator.counts import Counts
from simulator.devices import Device
from simulator.errors import UsageError, unknown
from simulator.operations.attention import Window, problem_of
from simulator.problem import output_dtype
from simulator.program import Program
from simulator.simulate import Scales, TileLike

__all__ = ["attention"]

_INPUTS = ("q", "k", "v")
_SCALES = ("q_scale", "k_scale", "v_scale")
_MOST_CALLS = 1024  # kept with all that is decided for their arrays


def attention(
    q: Any, k: Any, v: Any, *, algorithm: str | Program = "flash2", causal: bool = False, window: Window = None,
    scale: float | None = None, lse: bool = False, out: Any = None, tile: TileLike = None, backend: str = "gpu",
    device: Device | str | None = None, scales: Scales | None = None,
) -> Any:  # fmt: skip
    """Attention by one of the kernels: arrays of CuPy, torch or JAX in GPU memory in, the same kind out.

    `backend="emulator"` runs the kernel on the CPU as built for `device` (None: "h100"): it takes NumPy arrays, too, and
    raises `EmulationError` for every misuse of the machine that it sees.

    q `(batch, heads, len_q, head_dim)`, k and v `(batch, kv_heads, len_kv, head_dim)`, strided or not, float32, float16
    or bfloat16. Returns `out` like q; with `lse=True` `(out, lse)`, the LSE float32 `(batch, heads, len_q)`, natural
    logarithm. `flash3_fp8` takes float8_e4m3fn (of CuPy, which has no such dtype, arrays of uint8) and returns bfloat16;
    `scales` are what its operands are to be multiplied with, contiguous arrays of the same kind (None: 1).

    `causal` is aligned bottom-right, `window=(left, right)` inclusive; `tile=None` is the default for GPU, head dim and
    dtype. Runs on the framework's current stream, on the GPU where the arrays lie. `out=` (CuPy, torch) is written in
    place and returned. Inputs never change; those that a kernel can't take as they lie are copied.

    Raises `UsageError` for bad input, `Unavailable` without a GPU or CuPy.

    >>> import cupy, flashlab as fl                                                    # doctest: +SKIP
    >>> q, k, v = (cupy.random.rand(1, 8, 1024, 64).astype("float16") for _ in "qkv")  # doctest: +SKIP
    >>> fl.attention(q, k, v, causal=True).shape                                       # doctest: +SKIP
    (1, 8, 1024, 64)
    """
    if backend == "emulator":
        from flashlab.run.emulated import attention as emulated

        return emulated(
            q, k, v, algorithm=algorithm, causal=causal, window=window, scale=scale, lse=lse, out=out, tile=tile,
            device=device, scales=scales,
        )  # fmt: skip
    if backend != "gpu":
        raise unknown("backend", backend, ["gpu", "emulator"])
    if device is not None:
        raise UsageError("device", device, "None: backend 'gpu' runs where the arrays lie")
    framework, views = arrays.views_of(
        {"q": q, "k": k, "v": v} if out is None else {"q": q, "k": k, "v": v, "out": out}
    )
    if out is not None and not framework.writable:
        raise UsageError("out", "an immutable array", "None: only CuPy and torch arrays are written in place")
    first = views["q"]
    options = plans.ARCH, algorithm, causal, window, scale, tile, lse
    with framework.stream(first.device):
        if out is None:
            _kept(_cached_plan, _shapes(views), first.device, *options)  # raises before anything is allocated
            out = framework.empty(first.shape, output_dtype(first.dtype), first)
            views["out"] = arrays.framework("out", out).view("out", out)
        logs = framework.empty(first.shape[:3], "float32", first) if lse else None
        if logs is not None:
            views["lse"] = arrays.framework("lse", logs).view("lse", logs)
        if scales is not None:
            views |= {name: framework.view(name, x) for name, x in zip(_SCALES, Scales.of(scales), strict=True)}
        call = _kept(_cached_call, tuple([x[:5] for x in views.values()]), *options)
        if call.ready is not None:
            call.ready.launch(allocate=framework.workspace(first))
        else:
            call.plan.launch_padded(views, allocate=framework.workspace(first))
        out = framework.hand_back(out, first)
        return out if logs is None else (out, framework.hand_back(logs, first))


# an array's pointer, shape, strides, dtype and device: a View without its owner
_Place = tuple[int, tuple[int, ...], tuple[int, ...], str, int]
_Shape = tuple[tuple[int, ...], str]


class _Call(NamedTuple):
    """What is decided once for arrays that lie where they lie: the plan, and the plan made ready for them, unless some must
    go through padded buffers."""

    plan: Plan
    ready: Ready | None


def _kept(cached: Any, *key: Any) -> Any:
    """What a cached function has for a key; made anew for one that can't be kept (with a list, say, for a tile)."""
    try:
        return cached(*key)
    except TypeError:
        return cached.__wrapped__(*key)


@functools.lru_cache(maxsize=_MOST_CALLS, typed=True)
def _cached_call(
    places: tuple[_Place, ...],
    arch: str | None,
    algorithm: str | Program,
    causal: bool,
    window: Window,
    scale: float | None,
    tile: TileLike,
    lse: bool,
) -> _Call:
    """The one look-up of a warm call: whatever its checks depend on is part of the key, so that each is made once.

    `places` are those of q, k, v, out, lse if asked for, and perhaps the scales.
    """
    names = (*_INPUTS, "out", *(("lse",) if lse else ()), *_SCALES)
    views = {name: View(*place, None) for name, place in zip(names, places, strict=False)}
    options = arch, algorithm, causal, window, scale, tile, lse
    plan = _kept(_cached_plan, _shapes(views), views["q"].device, *options)
    _check_out(views)
    if _SCALES[0] in views:
        _check_scales([views[name] for name in _SCALES], views["q"].device, plan.counts)
    return _Call(plan, plan.ready(views) if all(plan.fits(name, view) for name, view in views.items()) else None)


def _shapes(views: Mapping[str, View]) -> tuple[_Shape, ...]:
    """Of q, k and v what a plan depends on."""
    return tuple([(x.shape, x.dtype) for x in (views[name] for name in _INPUTS)])


@functools.lru_cache(maxsize=4096, typed=True)
def _cached_plan(
    shapes: tuple[_Shape, ...],
    device: int,
    arch: str | None,
    algorithm: str | Program,
    causal: bool,
    window: Window,
    scale: float | None,
    tile: TileLike,
    lse: bool,
) -> Plan:
    """The plan for inputs of these shapes and dtypes on the current device."""
    del device  # part of the key
    q, k, v = (SimpleNamespace(shape=shape, dtype=dtype) for shape, dtype in shapes)
    problem = problem_of(q, k, v, causal=causal, window=window, scale=scale)
    return plans.gpu_plan(algorithm, problem, tile=tile, lse=lse, arch=arch)


def _check_out(views: Mapping[str, View]) -> None:
    q, out = views["q"], views["out"]
    if out.shape != q.shape:
        raise UsageError("out.shape", out.shape, f"{q.shape}, as q has")
    if out.dtype != output_dtype(q.dtype):
        raise UsageError("out.dtype", out.dtype, f"{output_dtype(q.dtype)}, for q of {q.dtype}")
    if arrays.overlaps_itself(out):
        raise UsageError("out.strides", out.strides, "elements that don't overlap each other")
    for name in _INPUTS:
        if arrays.overlap(out, views[name]):
            raise UsageError("out", f"memory shared with {name}", "an array apart from the inputs")


def _check_scales(scales: Sequence[View], device: int, counts: Counts) -> None:
    Scales(*scales).named(counts.problem, counts.tile)
    for name, x in zip(_INPUTS, scales, strict=True):
        if x.device != device:
            raise UsageError(f"scales.{name}.device", x.device, f"GPU {device}, where q lies")
        dense = [4 * math.prod(x.shape[i:]) for i in (1, 2, 3)]
        if any(n > 1 and has != want for n, has, want in zip(x.shape, x.strides, dense, strict=True)):
            raise UsageError(f"scales.{name}.strides", x.strides, "a contiguous array")
