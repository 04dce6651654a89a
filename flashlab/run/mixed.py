"""A server's step over pages in two launches: the first requests decode, and the rest have any numbers of new tokens."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from flashlab.base import host
from flashlab.run.facade import called
from simulator.errors import Said, UsageError
from simulator.fields import integer
from simulator.operations.paged import PAGED
from simulator.problem import Masks

__all__ = ["of_a_step"]

_BY_REQUEST = ("block_table", "seq_lens")


def of_a_step(given: dict[str, Any], masks: Masks, num_decodes: Any, *, lse: bool, **options: Any) -> tuple[Any, ...]:
    """The output, and with `lse` the LSE, of requests whose queries lie one behind the other. The first `num_decodes` have one
    each.

    `given` are the arrays of `fl.attention` by name, and `options` what it hands on. The launches are queued one behind the other,
    and nothing is waited for: `num_decodes` is the host's number. Raises `UsageError`.
    """
    q, table, begins = (given[name] for name in ("q", "block_table", "cu_seqlens_q"))
    for name, x, axes in (("q", q, 4), ("block_table", table, 2), ("cu_seqlens_q", begins, 1)):
        if len(getattr(x, "shape", ())) != axes:
            shown = Said(f"{tuple(x.shape)}") if hasattr(x, "shape") else type(x).__name__
            raise UsageError(f"{name}.shape" if hasattr(x, "shape") else name, shown, f"an array of {axes} axes")
    n, requests = integer("num_decodes", num_decodes, 0), table.shape[0]
    if n > min(requests, q.shape[2]):
        raise UsageError(
            "num_decodes", n, f"at most {min(requests, q.shape[2]):,}, as many as there are requests and queries"
        )
    if isinstance(begins, np.ndarray) and begins[: n + 1].tolist() != list(range(n + 1)):
        raise UsageError(
            "num_decodes", n, f"fewer: the first {n:,} requests have other numbers of queries than one each"
        )
    if n == 0:
        return called(PAGED, given, masks, algorithm="flash3_paged", lse=lse, **options)
    out = given["out"]
    kind = host.kind_of(q)
    if out is None and kind != "jax":  # both launches write their rows of one array
        out = _module(kind).empty_like(q)
    by_request = [name for name in _BY_REQUEST if getattr(given[name], "shape", ())]
    first = {
        **given, **{name: given[name][:n] for name in by_request}, "q": _as_requests(q[:, :, :n]),
        "cu_seqlens_q": None, "out": None if out is None else _as_requests(out[:, :, :n]),
    }  # fmt: skip
    parts = [_in_a_row(x) for x in called(PAGED, first, masks, algorithm="paged", lse=lse, **options)]
    if n < requests:
        rest: dict[str, Any] = {
            **given, **{name: given[name][n:] for name in by_request}, "q": q[:, :, n:],
            "cu_seqlens_q": begins[n:] - n, "out": None if out is None else out[:, :, n:],
        }  # fmt: skip
        others = called(PAGED, rest, masks, algorithm="flash3_paged", lse=lse, **options)
        parts = [_joined(kind, pair) for pair in zip(parts, others, strict=True)] if out is None else [
            out, *(_joined(kind, pair) for pair in zip(parts[1:], others[1:], strict=True))
        ]  # fmt: skip
    return tuple(parts) if out is None else (out, *parts[1:])


def _as_requests(x: Any) -> Any:
    """Rows (1, heads, n, …) as those of n requests with one each, (n, heads, 1, …)."""
    return x[0].swapaxes(0, 1)[:, :, None]


def _in_a_row(x: Any) -> Any:
    """The reverse."""
    return x[:, :, 0].swapaxes(0, 1)[None]


def _module(kind: str) -> Any:
    return import_module("jax.numpy" if kind == "jax" else kind)


def _joined(kind: str, parts: tuple[Any, ...]) -> Any:
    """Arrays one behind the other along the queries."""
    module = _module(kind)
    return (module.cat if kind == "torch" else module.concatenate)(parts, 2)
