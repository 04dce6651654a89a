"""K and V of 8 bits, as caches keep them: what each scale is for, quantisation, and the values that they stand for.

An element times its scale is the value. An array's four axes are batch or pages, KV heads, keys, head dim. The axes of its scale
are those of `AXES`; so their number tells what a scale is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from simulator.dtypes import Array, as_numpy, numpy_dtype
from simulator.errors import UsageError, among, dtype_name
from simulator.fields import LARGEST_FACTOR
from simulator.names import DType
from simulator.operations.operation import Operand, storage_dtypes
from simulator.problem import CACHES, DTYPES, FP8, SCALES, WIDTH, Problem

AXES: dict[str, tuple[str, ...]] = {
    "tensor": ("whole",),
    "head": ("kv_heads",),
    "channel": ("kv_heads", "head_dim"),
    "token": ("batch", "kv_heads", "len_kv"),
}
"""The axes of a scale, by what it is for. In pages a token's are ("pages", "kv_heads", "page_size")."""
LARGEST = {FP8: 448.0, "int8": 127.0}
"""The largest element of each dtype that quantisation makes. The least is its negative."""
_OVER: dict[str, tuple[int, ...]] = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "channel": (0, 2), "token": (3,)}
"""Of an array, the axes that one scale spans."""


def scales_of(name: str, token: tuple[str, ...], make: Callable[..., Operand] = Operand) -> tuple[Operand, ...]:
    """The operands that a scale of "k" or "v" may be: a form for each thing that it may be for, `token` those of keys."""

    field = f"{name}_scale"

    def one(form: str) -> Operand:
        def has(problem: Problem) -> bool:
            return getattr(problem, field) == form

        return make(name=field, axes=token if form == "token" else AXES[form], dtype="float32", default=1.0, when=has)

    return tuple(one(form) for form in AXES if name == "k" or form != "channel")


def dtypes_of(arrays: Mapping[str, Any], accepted: str) -> tuple[DType, str]:
    """The storage dtype, which q says, and the dtype of k and v: the same, or of 8 bits beside q of 16.

    Raises a `UsageError` that names the array at fault.
    """
    dtype, found, other = storage_dtypes(arrays, "q", accepted), dtype_name(arrays["k"]), dtype_name(arrays["v"])
    if found != dtype and not (found in CACHES and dtype in DTYPES[1:]):
        either = f", or {' or '.join(CACHES)}" if dtype in DTYPES[1:] else ""
        raise UsageError("k.dtype", found, f"{dtype}, as q has{either}" if found in WIDTH else accepted)
    if other != found:
        own = f"{found}, as {'q' if found == dtype else 'k'} has"
        raise UsageError("v.dtype", other, own if other in WIDTH else accepted)
    return dtype, found


def form_of_scale(name: str, scale: Any) -> str | None:
    """What a scale is for, by its shape: one of `SCALES`, or None where there is none. Raises `UsageError`."""
    if scale is None:
        return None
    channel = ", (kv_heads, head_dim)" if name == "k_scale" else ""
    accepted = f"an array (1,), (kv_heads,){channel} or one like {name[0]} without its last axis, float32"
    if not hasattr(scale, "shape"):
        raise UsageError(name, type(scale).__name__, accepted)
    if dtype_name(scale) != "float32":
        raise UsageError(f"{name}.dtype", dtype_name(scale), "float32")
    shape = tuple(scale.shape)
    forms = {1: "tensor" if shape == (1,) else "head", 2: "channel", 3: "token"}
    form = forms.get(len(shape))
    if form is None or (form == "channel" and not channel):
        raise UsageError(f"{name}.shape", shape, accepted)
    return form


def scale_fields(dtype: str, kv_dtype: str, scales: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem whose K and V have a dtype, with these scales. Raises `UsageError`."""
    if dtype == FP8:  # its scales are of tiles
        return {}
    for name, x in scales.items():
        if x is not None and kv_dtype == dtype:
            raise UsageError(name, "given", f"None for K and V of {kv_dtype}: only {FP8} and int8 have scales")
    return {"kv_dtype": kv_dtype, **{name: form_of_scale(name, x) for name, x in scales.items()}}


def largest_scale(problem: Problem, name: str) -> float:
    """The largest scale of "q", "k" or "v". Scores are multiplied with those of q and k, and with the problem's own.

    >>> p = Problem(batch=1, heads=8, len_q=1, len_kv=64, head_dim=64, dtype="float16", kv_dtype="int8", scale=2.0)
    >>> largest_scale(p, "k"), largest_scale(p, "v")
    (5e+29, 1e+30)
    """
    if name == "v":
        return LARGEST_FACTOR
    most = LARGEST_FACTOR / max(1.0, abs(problem.scale))
    return math.sqrt(most) if problem.dtype == FP8 else most


def check_scales(problem: Problem, arrays: Mapping[str, Any], said: str = "{}_scale") -> None:
    """Looks at NumPy's scales: one of NaN would spread, and one below 0 would turn the order of scores. Of tiles (in 8 bits), those
    of q and k aren't 0 either, and those of v have any sign. Raises `UsageError`, which names them as `said`."""
    tiles = problem.dtype == FP8
    for name in ("q", "k", "v"):
        x = arrays.get(f"{name}_scale")
        if isinstance(x, np.ndarray):  # to look at values on a GPU would wait for the GPU
            scale: Array = x  # pyright: ignore[reportUnknownVariableType]
            most = largest_scale(problem, name)
            size = np.abs(scale) if tiles and name == "v" else scale
            none = size == 0 if tiles and name != "v" else False
            for place in np.argwhere(~((size >= 0) & (size <= most)) | none):
                at = tuple(place.tolist())
                accepted = (
                    ("a finite number" if name == "v" else "a positive number")
                    if tiles
                    else "a finite number of at least 0"
                )
                shown = f"{said.format(name)}[{', '.join(map(str, at))}]"
                raise UsageError(shown, float(scale[at]), f"{accepted}, up to {most:.3g}")


def _spread(scale: Array, form: str) -> Array:
    """A scale with the four axes of its array."""
    return np.expand_dims(scale if form != "tensor" else scale.reshape(()), _OVER[form])


def dequantized(problem: Problem, arrays: Mapping[str, Any], name: str) -> Array:
    """The values that "k" or "v" of a problem stands for, float64; of one that isn't quantised its own."""
    values, form, scale = (
        np.asarray(arrays[name], np.float64),
        getattr(problem, f"{name}_scale"),
        arrays.get(f"{name}_scale"),
    )
    return values if form is None or scale is None else values * _spread(scale.astype(np.float64), form)


def quantized(x: Array, dtype: str, form: str | None, counts: Array | None = None) -> tuple[Array, Array | None]:
    """An array of four axes in a dtype of 8 bits, and its scale for each of what `form` says, float32 (None: without one).

    The largest of what a scale spans becomes `LARGEST`. `counts` says which keys count, (batch or pages, KV heads, keys): the
    scales don't know the others.
    """
    if form is None:
        return rounded(x, dtype), None
    sizes = np.abs(x) if counts is None else np.where(counts[..., None], np.abs(x), 0)
    top = sizes.max(_OVER[form], keepdims=True, initial=0.0)
    # a subnormal scale has few bits, or is 0 where a GPU takes subnormals for it
    scale = np.maximum(np.where(top > 0, top, 1.0) / LARGEST[dtype], np.finfo(np.float32).tiny).astype(np.float32)
    elements = rounded(x / scale, dtype)
    return elements, scale.reshape(1) if form == "tensor" else scale.squeeze(_OVER[form])


def rounded(x: Array, dtype: str) -> Array:
    """Values rounded to a dtype of 8 bits, ties to even. NaN is one of e4m3, and -128 as int8, which quantisation doesn't make."""
    kept = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        kept = np.where(np.isnan(kept), -128, np.rint(kept))
    return kept.astype(numpy_dtype(dtype))


class QuantizedCache(NamedTuple):
    """K and V of 8 bits with their scales (None: 1), as `fl.attention` and its like take them by name.

    >>> import flashlab as fl
    >>> q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=2, len_q=1, len_kv=64, head_dim=32, dtype="float16"))
    >>> fl.simulate("flash_decoding", q, **fl.quantize_cache(k, v)._asdict()).out.shape
    (1, 2, 1, 32)
    """

    k: Array
    v: Array
    k_scale: Array | None
    v_scale: Array | None

    def values(self) -> tuple[Array, Array]:
        """The K and V that they stand for, float64.

        >>> import flashlab as fl, numpy as np
        >>> _, k, v = fl.random_inputs(fl.Problem(batch=1, heads=2, len_q=64, head_dim=32, dtype="float16"))
        >>> bool(np.abs(fl.quantize_cache(k, v).values()[0] - k).max() < 0.02)
        True
        """
        of_k, of_v = (
            np.asarray(x, np.float64) * (1 if scale is None else _spread(np.asarray(scale, np.float64), _form(scale)))
            for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return of_k, of_v


def _form(scale: Array) -> str:
    return form_of_scale("k_scale", scale) or ""


def quantize_cache(
    k: Any, v: Any, dtype: str = "int8", *, k_scale: str | None = "token", v_scale: str | None = "token"
) -> QuantizedCache:
    """Quantise K and V, (batch, kv_heads, len_kv, head_dim) of NumPy, CuPy, torch or JAX, to int8 or float8_e4m3fn.

    `k_scale` and `v_scale` say what each scale is for: "tensor", "head", "token", of K also "channel"; None for no scale. The
    largest value that a scale spans becomes 127 or 448. The results are NumPy's. Raises `UsageError`, also for NaN and inf.

    >>> import flashlab as fl
    >>> q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=8, kv_heads=2, len_q=4, len_kv=100, head_dim=64, dtype="float16"))
    >>> cache = quantize_cache(k, v, k_scale="channel")
    >>> cache.k.dtype.name, cache.k_scale.shape, cache.v_scale.shape
    ('int8', (2, 64), (1, 2, 100))
    >>> fl.attention(q, **cache._asdict(), backend="emulator").shape
    (1, 8, 4, 64)
    """
    among("dtype", dtype, CACHES)
    found: list[tuple[Array, Array | None]] = []
    for name, x, form in (("k", k, k_scale), ("v", v, v_scale)):
        if form is not None:
            among(f"{name}_scale", form, SCALES if name == "k" else SCALES[:-1])
        given = as_numpy(name, x)
        if (
            given.dtype.kind not in "fV" or given.dtype.type is np.void
        ):  # V: bfloat16 and its like, and bytes without a type
            raise UsageError(f"{name}.dtype", given.dtype.name, "a floating dtype")
        values = np.asarray(given, np.float32)
        if values.ndim != 4:
            raise UsageError(f"{name}.shape", values.shape, "(batch, kv_heads, len_kv, head_dim)")
        if not np.isfinite(values).all():
            raise UsageError(name, "NaN or inf", "finite values")
        if found and values.shape[:3] != found[0][0].shape[:3]:
            raise UsageError(
                "v.shape", values.shape, f"({', '.join(map(str, found[0][0].shape[:3]))}, head_dim), as k has"
            )
        found.append(quantized(values, dtype, form))
    (of_k, scale_k), (of_v, scale_v) = found
    return QuantizedCache(of_k, of_v, scale_k, scale_v)
