"""Who is timed beside a kernel: flashlab's own algorithms and other libraries' attention, by the names that `--against` takes.

The calls are those that `flashlab verify` judges (`flashlab.verify.outsiders`), but where there is one that does more ahead
(`flashlab.integrations.peers.ahead`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flashlab.integrations.peers.ahead import AHEAD, fa3_built
from flashlab.verify.outsiders import outsider
from simulator.catalogue import CATALOGUE
from simulator.errors import unknown

__all__ = ["PEERS", "check", "layout", "prepare"]

PEERS = ("sdpa-flash", "cudnn", "sdpa-efficient", "fa3", "fa3-wheel", "fa4", "flex", "flashinfer")
"""The names that `--against` takes, besides flashlab's algorithms."""


def layout(name: str) -> str:
    """The order of axes that a peer is made for: "bhsd" or "bshd".

    Raises `UsageError` for an unknown peer, and `Unavailable` for one that isn't installed.
    """
    check(name)
    if name == "fa3":
        fa3_built()
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
    if name in AHEAD:
        return AHEAD[name](q, k, v, causal, scale)
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
