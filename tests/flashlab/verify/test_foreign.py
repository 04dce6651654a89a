"""Backward passes from elsewhere: right ones pass, and a seeded mistake is found by the check that is meant for it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import run_case, verify
from flashlab.verify.cases import Case
from simulator.dtypes import Array

CHECKS = ["rule", "determinism", "adjoint", "key_sets", "hidden", "equal_keys", "head_order", "memory"]


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool = False, scale: float | None = None,
    window: Any = None, mistake: str = "",
) -> tuple[Array, ...]:  # fmt: skip
    """The formulas in float32, with P and dS rounded as kernels round them; or with a mistake."""
    storage, group = q.dtype, q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    (b, heads, rows, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    spread = np.tile if mistake == "heads dealt in turn" else lambda x, n: np.repeat(x, n[1], 1)
    k32, v32 = (spread(x.astype(np.float32), (1, group, 1, 1)) for x in (k, v))
    q32, dout32, out32 = (x.astype(np.float32) for x in (q, dout, out))
    place = np.arange(keys) - np.arange(rows)[:, None] - (0 if mistake == "top-left" else keys - rows)
    left, right = (np.inf if side is None else side for side in window or (None, None))
    right = (0 if causal else right) + (mistake == "a key too many")
    hidden = (place > right) | (place < -left) | np.isneginf(lse)[..., None]
    exp = np.exp2 if mistake == "the LSE's base" else np.exp
    s = np.where(hidden, -np.inf, scale * (q32 @ k32.swapaxes(-1, -2)))
    p = exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    rounded = p.astype(storage).astype(np.float32)
    delta = (dout32 * out32).sum(-1, keepdims=True) * (mistake != "no D")
    ds = (rounded if mistake == "dS from rounded P" else p) * (dout32 @ v32.swapaxes(-1, -2) - delta)
    ds = ds.astype(storage).astype(np.float32)
    dq, dk, dv = scale * (ds @ k32), ds.swapaxes(-1, -2) @ q32, rounded.swapaxes(-1, -2) @ dout32
    dk = dk if mistake == "no scale" else scale * dk
    dk, dv = (x.reshape(b, kv_heads, group, keys, dim).sum(2) for x in (dk, dv))
    if mistake == "noise":
        dq = dq * (1 + np.random.default_rng().uniform(0, 1e-3))
    if mistake == "writes":
        q[..., :1] = 0
    if mistake == "reads what lies behind":
        dv = dv + 0 * np.lib.stride_tricks.as_strided(v, (1,), offset(v))[0] if v.size else dv
    return tuple(x.astype(storage) for x in (dq, dk, dv))


def offset(x: Array) -> tuple[int]:
    return (x.itemsize,)


def adapter(fn: Any = backward, **more: Any) -> fl.Adapter:
    return fl.Adapter(fn, operation="backward", **more)


def with_mistake(mistake: str) -> fl.Adapter:
    def wrong(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool = False, scale: Any = None, window: Any = None
    ) -> Any:  # fmt: skip
        return backward(dout, q, k, v, out, lse, causal, scale, window, mistake)

    return adapter(wrong)


def test_a_right_one_passes() -> None:
    report = verify(adapter(), dtypes=["float16"])
    assert report.verdict == "passed", report
    assert report.never_ran == ["soft cap", "sinks", "lengths", "dlse", "dropout"]


if __name__ == "__main__":
    import time
    for d in ("float16", "bfloat16", "float32"):
        t=time.time(); print(verify(adapter(), dtypes=[d]), time.time()-t)
    for m in ("heads dealt in turn","top-left","a key too many","the LSE's base","no D","dS from rounded P","no scale","noise","writes"):
        r=verify(with_mistake(m), dtypes=["float16"]); print(m, {c: [x.detail for x in r.failed if x.check==c][:1] for c in r.checks if any(x.check==c for x in r.failed)})
