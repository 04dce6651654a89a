"""Makes other libraries' attention ready to be timed: all that can be done ahead is done ahead.

The calls are those that `flashlab verify` judges (`flashlab.verify.outsiders`), with one exception: FlashInfer's call
for one sequence is replaced by its batched call, planned beforehand as an inference engine does it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flashlab.verify.outsiders import outsider
from simulator.catalogue import CATALOGUE
from simulator.errors import unknown

__all__ = ["PEERS", "check", "layout", "prepare"]

PEERS = ("sdpa-flash", "cudnn", "sdpa-efficient", "fa4", "flashinfer")
"""The names that `--against` takes, besides flashlab's algorithms."""


def layout(name: str) -> str:
    """The order of axes that a peer is made for: "bhsd" or "bshd".

    Raises `UsageError` for an unknown peer, and `Unavailable` for one that isn't installed.
    """
    check(name)
    return "bhsd" if name in CATALOGUE else outsider(name).layout


def check(name: str) -> None:
    """Raise `UsageError` for an unknown peer."""
    if name not in PEERS and name not in CATALOGUE:
        raise unknown("against", name, [*PEERS, *CATALOGUE])


def prepare(name: str, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Callable[[], Any]:
    """A function that calls a peer on these torch tensors and returns `out`. All are in the peer's own layout."""
    if name == "flashinfer":
        return _flashinfer(q, k, v, causal, scale)
    if name in CATALOGUE:
        return _ours(name, q, k, v, causal, scale)
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
