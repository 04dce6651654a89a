"""Makes other libraries' attention ready to be timed: all that can be done ahead is done ahead.

The calls are those that `flashlab verify` judges (`flashlab.verify.outsiders`), with four exceptions. FlashInfer's call for one
sequence is replaced by its batched call, planned beforehand as an inference engine does it. FlexAttention's functions are
compiled beforehand (`flex`). The call of FlashAttention-3's wheel for JAX is made ready beforehand (`fa3_wheel`). A build of
FlashAttention-3's source is called, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flashlab.measure import fa3_wheel, flex
from flashlab.verify.outsiders import outsider
from simulator import Problem
from simulator.catalogue import CATALOGUE
from simulator.errors import Unavailable, unknown

__all__ = ["PEERS", "check", "layout", "prepare"]

PEERS = ("sdpa-flash", "cudnn", "sdpa-efficient", "fa3", "fa3-wheel", "fa4", "flex", "flashinfer")
"""The names that `--against` takes, besides flashlab's algorithms."""


def layout(name: str) -> str:
    """The order of axes that a peer is made for: "bhsd" or "bshd".

    Raises `UsageError` for an unknown peer, and `Unavailable` for one that isn't installed.
    """
    check(name)
    if name == "fa3":
        _fa3_built()
    elif name != "flex" and name not in CATALOGUE:
        return outsider(name).layout
    return "bshd" if name == "fa3" else "bhsd"


def check(name: str) -> None:
    """Raise `UsageError` for an unknown peer."""
    if name not in PEERS and name not in CATALOGUE:
        raise unknown("against", name, [*PEERS, *CATALOGUE])


def prepare(name: str, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Callable[[], Any]:
    """A function that calls a peer on these torch tensors and returns `out`. All are in the peer's own layout."""
    if name in CATALOGUE:
        return _ours(name, q, k, v, causal, scale)
    if name in _OWN:
        return _OWN[name](q, k, v, causal, scale)
    fn = outsider(name).fn

    def call() -> Any:
        return fn(q, k, v, causal=causal, scale=scale)[0]

    return call


def _ours(name: str, q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    attention, out = (
        importlib.import_module("flashlab.run.call").attention,
        importlib.import_module("torch").empty_like(q),
    )

    def call() -> Any:
        return attention(q, k, v, algorithm=name, causal=causal, scale=scale, out=out)

    return call


def _flex(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    batch, heads, len_q, head_dim = q.shape
    dtype: Any = str(q.dtype).removeprefix("torch.")
    p = Problem(
        batch=batch, heads=heads, kv_heads=k.shape[1], len_q=len_q, len_kv=k.shape[2], head_dim=head_dim,
        dtype=dtype, causal=causal, scale=scale,
    )  # fmt: skip
    return flex.prepare(p, {"q": q, "k": k, "v": v}, {})


def _fa3_built() -> Callable[..., Any]:
    try:
        return importlib.import_module("flash_attn_interface").flash_attn_func
    except ImportError as error:
        raise Unavailable(
            f"flash_attn_interface cannot be imported ({error}): build the folder hopper of "
            "github.com/Dao-AILab/flash-attention, or take fa3-wheel"
        ) from None


def _fa3(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Callable[[], Any]:
    attention = _fa3_built()

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


_OWN: dict[str, Callable[[Any, Any, Any, bool, float], Callable[[], Any]]] = {
    "flashinfer": _flashinfer,
    "flex": _flex,
    "fa3": _fa3,
    "fa3-wheel": _fa3_wheel,
}
"""The peers whose call is another one than that of `outsiders`."""
