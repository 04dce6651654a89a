"""Adapters for other libraries' kernels, with their conventions. A library is imported only when it is asked for.

`sdpa` is torch's `scaled_dot_product_attention` itself, which runs on a CPU too. Torch's backends are called through the
operators behind it. These return the LSE, and the function itself might quietly choose another backend. At this level
their conventions differ: `flash` aligns a causal mask bottom-right (the function never passes it one with len_q !=
len_kv), `efficient` and `cudnn` align it top-left.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from flashlab.verify.adapter import Adapter
from flashlab.verify.cases import LAYOUTS
from flashlab.verify.domain import Domain
from simulator.errors import Unavailable, unknown

HALF = ("float16", "bfloat16")
WHOLE_ROWS = tuple(name for name in LAYOUTS if name != "strided")
"""The layouts whose last axis is contiguous."""


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported ({error}): pip install {package}") from None


def _operator(name: str) -> Callable[..., Any]:
    return getattr(_module("torch", "torch").ops.aten, name)


def _sdpa() -> Adapter:
    attention = _module("torch", "torch").nn.functional.scaled_dot_product_attention

    def sdpa(q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> Any:
        return attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    # it scales scores after the mask: a scale of 0 makes NaN of -inf
    return Adapter(
        sdpa,
        "torch",
        causal="top-left",
        supports=lambda p: p.scale > 0 or "positive scales",
        name="sdpa",
        domain=Domain(empty=False),
    )


def _flash() -> Adapter:
    op = _operator("_scaled_dot_product_flash_attention")

    def sdpa_flash(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return op(q, k, v, 0.0, causal, False, scale=scale)[:2]

    # this operator's LSE of an empty row is +inf
    domain = Domain(dtype=HALF, head_dim=range(8, 257, 8), empty=False, layouts=WHOLE_ROWS)
    return Adapter(sdpa_flash, "torch", lse="e", name="sdpa-flash", empty_lse=math.inf, domain=domain)


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
        name="cudnn",
        domain=Domain(dtype=HALF, head_dim=range(8, 129, 8), empty=False, layouts=WHOLE_ROWS),
    )


def _efficient() -> Adapter:
    op = _operator("_scaled_dot_product_efficient_attention")

    def sdpa_efficient(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]  # its LSE is padded to more rows

    domain = Domain(head_dim=range(8, 513, 8), groups=1, empty=False)  # rows of whole 16 bytes in every dtype
    return Adapter(sdpa_efficient, "torch", causal="top-left", lse="e", name="sdpa-efficient", domain=domain)


def _fa4() -> Adapter:
    attention = _module("flash_attn.cute", "flash-attn-4").flash_attn_func

    def fa4(q: Any, k: Any, v: Any, causal: bool, scale: float, window: Any = (None, None)) -> Any:
        return attention(q, k, v, softmax_scale=scale, causal=causal, window_size=tuple(window), return_lse=True)[:2]

    domain = Domain(dtype=HALF, head_dim=range(8, 257, 8), empty=False)
    return Adapter(fa4, "torch", layout="bshd", lse="e", name="fa4", domain=domain)


def _flashinfer() -> Adapter:
    prefill = _module("flashinfer", "flashinfer-python").single_prefill_with_kv_cache

    def flashinfer(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse = prefill(q[0], k[0], v[0], causal=causal, sm_scale=scale, return_lse=True)
        return out[None], lse.swapaxes(0, 1)[None]

    domain = Domain(dtype=HALF, head_dim=(64, 128, 256), batch=1, empty=False)
    return Adapter(flashinfer, "torch", layout="bshd", lse="2", name="flashinfer", domain=domain)


OUTSIDERS: dict[str, Callable[[], Adapter]] = {
    "sdpa": _sdpa,
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
