"""Adapters for other libraries' kernels, with their conventions. A library is imported only when it is asked for.

Torch's backends are called through the operators behind `scaled_dot_product_attention`. These return the LSE, and the
function itself might quietly choose another backend. At this level their conventions differ: `flash` aligns a causal
mask bottom-right (the function never passes it one with len_q != len_kv), `efficient` and `cudnn` align it top-left.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from flashlab.verify.adapter import Adapter
from simulator import Problem
from simulator.errors import Unavailable, unknown


def _half(problem: Problem, multiple: int, largest: int) -> str | None:
    p = problem
    if p.dtype == "float32":
        return "float16 and bfloat16 only"
    if p.head_dim % multiple or p.head_dim > largest:
        return f"head dims that are multiples of {multiple}, up to {largest}"
    return None if p.len_q and p.len_kv else "no empty sequences"


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported ({error}): pip install {package}") from None


def _operator(name: str) -> Callable[..., Any]:
    """An operator of torch. If torch refuses its arguments, it raises NotImplementedError, which means "not run"."""
    op = getattr(_module("torch", "torch").ops.aten, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return op(*arguments, **keywords)
        except RuntimeError as error:
            if type(error) is not RuntimeError or "CUDA" in str(error):
                raise  # a fault of the GPU
            raise NotImplementedError(str(error).strip().split("\n")[0]) from None

    return call


def _flash() -> Adapter:
    op = _operator("_scaled_dot_product_flash_attention")

    def sdpa_flash(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return op(q, k, v, 0.0, causal, False, scale=scale)[:2]

    # this operator's LSE of an empty row is +inf
    return Adapter(
        sdpa_flash, "torch", lse="e", supports=lambda p: _half(p, 8, 256), name="sdpa-flash", empty_lse=math.inf
    )


def _cudnn() -> Adapter:
    op = _operator("_scaled_dot_product_cudnn_attention")

    def cudnn(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(lse.shape[:3])

    return Adapter(
        cudnn,
        "torch",
        causal="top-left",
        lse="e",
        supports=lambda p: _half(p, 8, 128),
        name="cudnn",
    )


def _efficient() -> Adapter:
    op = _operator("_scaled_dot_product_efficient_attention")

    def sdpa_efficient(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]  # its LSE is padded to more rows

    def supports(p: Problem) -> str | None:
        if p.kv_heads != p.heads:
            return "no GQA"
        if p.head_dim * p.itemsize % 16:
            return "rows of whole 16 bytes only"
        return None if p.len_q and p.len_kv else "no empty sequences"

    return Adapter(sdpa_efficient, "torch", causal="top-left", lse="e", supports=supports, name="sdpa-efficient")


def _fa4() -> Adapter:
    attention = _module("flash_attn.cute", "flash-attn-4").flash_attn_func

    def fa4(q: Any, k: Any, v: Any, causal: bool, scale: float, window: Any = (None, None)) -> Any:
        return attention(q, k, v, softmax_scale=scale, causal=causal, window_size=tuple(window), return_lse=True)[:2]

    return Adapter(fa4, "torch", layout="bshd", lse="e", supports=lambda p: _half(p, 8, 256), name="fa4")


def _flashinfer() -> Adapter:
    prefill = _module("flashinfer", "flashinfer-python").single_prefill_with_kv_cache

    def flashinfer(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse = prefill(q[0], k[0], v[0], causal=causal, sm_scale=scale, return_lse=True)
        return out[None], lse.swapaxes(0, 1)[None]

    def supports(p: Problem) -> str | None:
        if p.batch != 1:
            return "one sequence at a time"
        return _half(p, 64, 256) if p.head_dim in (64, 128, 256) else "head dims 64, 128 and 256"

    return Adapter(flashinfer, "torch", layout="bshd", lse="2", supports=supports, name="flashinfer")


OUTSIDERS: dict[str, Callable[[], Adapter]] = {
    "sdpa-flash": _flash,
    "cudnn": _cudnn,
    "sdpa-efficient": _efficient,
    "fa4": _fa4,
    "flashinfer": _flashinfer,
}
"""The built-in adapters by name."""


def outsider(name: str) -> Adapter:
    """The adapter of this name. Raises `UsageError` for an unknown name, and `Unavailable` with what to install."""
    if name not in OUTSIDERS:
        raise unknown("target", name, OUTSIDERS)
    return OUTSIDERS[name]()
