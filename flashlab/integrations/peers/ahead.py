"""Calls of other libraries, made ready to be timed: all that can be done ahead is done ahead.

FlashInfer's call for one sequence is replaced by its batched call, planned beforehand as an inference engine does it.
FlexAttention's functions are compiled beforehand (`flex`). The call of FlashAttention-3's wheel for JAX is made ready beforehand
(`fa3_wheel`). A build of FlashAttention-3's source is called, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from flashlab.integrations.peers import fa3_wheel, flex
from simulator import Problem
from simulator.errors import Unavailable

__all__ = ["AHEAD", "fa3_built"]


def _flex(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    batch, heads, len_q, head_dim = q.shape
    dtype: Any = str(q.dtype).removeprefix("torch.")
    p = Problem(
        batch=batch, heads=heads, kv_heads=k.shape[1], len_q=len_q, len_kv=k.shape[2], head_dim=head_dim,
        dtype=dtype, causal=causal, scale=scale,
    )  # fmt: skip
    return flex.prepare(p, {"q": q, "k": k, "v": v}, {})


def fa3_built() -> Callable[..., Any]:
    """The function of that build. Raises `Unavailable` where there is none."""
    try:
        return importlib.import_module("flash_attn_interface").flash_attn_func
    except ImportError as error:
        raise Unavailable(
            f"flash_attn_interface cannot be imported ({error}): build the folder hopper of "
            "github.com/Dao-AILab/flash-attention, or take fa3-wheel"
        ) from None


def _fa3(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    attention = fa3_built()

    def call() -> Any:
        found: Any = attention(q, k, v, softmax_scale=scale, causal=causal)
        return found if hasattr(found, "dtype") else found[0]  # some return the LSE, too

    return call


def _fa3_wheel(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    run = fa3_wheel.prepare(q, k, v, causal, scale)

    def call() -> Any:
        return run()[0]

    return call


def _flashinfer(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    library, torch = importlib.import_module("flashinfer"), importlib.import_module("torch")
    batch, length, heads, dim = q.shape
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(starts, starts, heads, k.shape[2], dim, causal=causal, sm_scale=scale, q_data_type=q.dtype)
    rows = [x.reshape(-1, x.shape[2], dim) for x in (q, k, v)]

    def call() -> Any:
        return wrapper.run(*rows).reshape(q.shape)

    return call


AHEAD: Mapping[str, Callable[[Any, Any, Any, bool, float], Callable[[], Any]]] = {
    "flashinfer": _flashinfer,
    "flex": _flex,
    "fa3": _fa3,
    "fa3-wheel": _fa3_wheel,
}
"""What makes a peer's call on q, k, v, causal and scale, by its name. It returns `out`."""
