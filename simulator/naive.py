"""The judges: naive attention in float64, written twice with no shared line."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.dtypes import Array, numpy_dtype
from simulator.problem import Problem
from simulator.simulate import Window, problem_of


class Reference(NamedTuple):
    """`out` (batch, heads, len_q, head_dim_v) and `lse` (batch, heads, len_q), both float64; -inf for an empty row.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=2, head_dim=4, dtype="float32")
    >>> fl.naive(*fl.random_inputs(p)).lse.shape
    (1, 1, 2)
    """

    out: Array
    lse: Array


def naive(
    q: Array, k: Array, v: Array, *, causal: bool = False, window: Window = None, scale: float | None = None
) -> Reference:
    """softmax(scale Q K^T + mask) V in float64, dense; the judge of every number here.

    q `(batch, heads, len_q, head_dim)`, k and v `(batch, kv_heads, len_kv, …)`, NumPy, any of the storage dtypes. Masks
    are aligned bottom-right; a row that sees no key gets output 0 and LSE -inf. Raises `UsageError`.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=2, head_dim=4, dtype="float32", causal=True)
    >>> q, k, v = fl.random_inputs(p, seed=0)
    >>> bool(np.allclose(fl.naive(q, k, v, causal=True).out[0, 0, 0], v[0, 0, 0]))
    True
    """
    p = problem_of(q, k, v, causal=causal, window=window, scale=scale)
    grouped = np.asarray(q, np.float64).reshape(p.batch, p.num_kv_heads, p.queries_per_kv, p.len_q, p.head_dim)
    keys, values = np.asarray(k, np.float64)[:, :, None], np.asarray(v, np.float64)[:, :, None]
    with np.errstate(invalid="ignore"):
        s = p.softmax_scale * (grouped @ keys.swapaxes(-1, -2))
    distance = np.arange(p.kv_length) - (np.arange(p.len_q)[:, None] + p.offset)
    hidden = np.zeros(distance.shape, bool)
    if p.right is not None:
        hidden = np.logical_or(hidden, distance > p.right)
    if p.left is not None:
        hidden = np.logical_or(hidden, -distance > p.left)
    np.putmask(s, np.broadcast_to(hidden, s.shape), -np.inf)
    top: Array = s.max(-1, keepdims=True, initial=-np.inf)
    e: Array = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    # a hidden key's value must not matter, not even a NaN: 0 x NaN would
    out = _weighted_sum(e / np.where(total == 0, 1, total), values)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    shape = p.batch, p.heads, p.len_q
    return Reference(out.reshape(*shape, p.value_dim), lse.reshape(shape))


def _weighted_sum(weights: Array, values: Array) -> Array:
    if np.isfinite(values).all():
        return weights @ values
    terms = np.where(weights[..., None] == 0, 0.0, weights[..., None] * values[..., None, :, :])
    return terms.sum(-2)


def naive_loop(
    q: Array, k: Array, v: Array, *, causal: bool = False, window: Window = None, scale: float | None = None
) -> Reference:
    """The same by a loop over queries that picks each query's keys by a slice: an oracle that shares no mask code.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=3, len_kv=5, head_dim=4, dtype="float32", causal=True)
    >>> data = fl.random_inputs(p, seed=0)
    >>> bool(np.allclose(fl.naive(*data, causal=True).out, fl.naive_loop(*data, causal=True).out))
    True
    """
    p = problem_of(q, k, v, causal=causal, window=window, scale=scale)
    out = np.zeros((p.batch, p.heads, p.len_q, p.value_dim))
    lse = np.full((p.batch, p.heads, p.len_q), -np.inf)
    for b, h, i in np.ndindex(lse.shape):
        last_seen = p.kv_length - p.len_q + i
        stop = p.kv_length if p.right is None else max(0, min(p.kv_length, last_seen + p.right + 1))
        start = 0 if p.left is None else max(0, last_seen - p.left)
        if start >= stop:
            continue
        kv = h // p.queries_per_kv
        logits = p.softmax_scale * (k[b, kv, start:stop].astype(np.float64) @ q[b, h, i].astype(np.float64))
        lse[b, h, i] = np.logaddexp.reduce(logits)
        out[b, h, i] = np.exp(logits - lse[b, h, i]) @ v[b, kv, start:stop].astype(np.float64)
    return Reference(out, lse)


def random_inputs(problem: Problem, seed: int = 0) -> tuple[Any, Any, Any]:
    """Standard normal q, k, v of a problem, rounded to its dtype (NumPy; bfloat16 through ml_dtypes).

    >>> import flashlab as fl
    >>> q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=4, kv_heads=2, len_q=8, head_dim=16, dtype="float16"), seed=0)
    >>> q.shape, k.shape, q.dtype.name
    ((1, 4, 8, 16), (1, 2, 8, 16), 'float16')
    """
    p, rng = problem, np.random.default_rng(seed)
    shapes = (
        (p.batch, p.heads, p.len_q, p.head_dim),
        (p.batch, p.num_kv_heads, p.kv_length, p.head_dim),
        (p.batch, p.num_kv_heads, p.kv_length, p.value_dim),
    )
    q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(p.dtype)) for shape in shapes)
    return q, k, v
