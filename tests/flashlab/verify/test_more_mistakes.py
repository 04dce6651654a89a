"""Mistakes that only some problems have are named: in masks, ragged batches, sinks and soft caps, and in how numbers are stored."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashlab as fl
from simulator.dtypes import Array
from tests.tiers import one_of_each


def faulty(fault: str) -> Any:
    """Attention by the judge's numbers, with a fault."""

    def run(q: Array, k: Array, v: Array, *, lse: bool = True, **m: Any) -> Any:
        del lse
        rows, keys = q.shape[2], k.shape[2]
        if fault == "sinks twice" and m.get("sinks") is not None:
            m["sinks"] = m["sinks"] + np.float32(np.log(2))
        mask = m.get("mask")
        if mask is not None:
            m |= {
                "inverted": {"mask": ~mask.astype(bool)},
                "causal forgotten": {"causal": False},
                "ignored": {"mask": None},
            }.get(fault, {})
        m = {name: x for name, x in m.items() if x is not None}
        if fault == "top-left, more queries" and m.get("causal") and rows > keys and "window" not in m:
            m = {name: x for name, x in m.items() if name != "causal"} | {"window": (None, rows - keys)}
        lengths = m.get("lengths")
        if lengths and fault in ("all sequences", "next one", "top-left each"):
            return of_sequences(q, k, v, fault, **m)
        if fault == "s tanh" and "soft_cap" in m:
            return with_scores(q, k, v, **m)
        found = fl.naive(q, k, v, **m)
        out, logs = found.out.astype(q.dtype), found.lse.astype(np.float32)
        if fault == "LSE in bfloat16":
            logs = logs.astype(ml_dtypes.bfloat16).astype(np.float32)
        if fault == "out in float16":
            out = out.astype(np.float16).astype(q.dtype)
        return out, logs

    return run


def of_sequences(q: Array, k: Array, v: Array, fault: str, **m: Any) -> Any:
    """Each sequence alone, on other keys than its own, or with its mask aligned otherwise."""
    lengths = m.pop("lengths")
    if fault == "all sequences":
        found = fl.naive(q, k, v, **m)
        return found.out.astype(q.dtype), found.lse.astype(np.float32)
    ends = np.cumsum([(0, 0), *lengths], 0)
    spans = [(slice(a, c), slice(b, d)) for (a, b), (c, d) in zip(ends[:-1], ends[1:], strict=True)]
    parts = list[Any]()
    for n, (rows, keys) in enumerate(spans):
        keys = spans[(n + 1) % len(spans)][1] if fault == "next one" else keys
        own, offset = dict(m), (keys.stop - keys.start) - (rows.stop - rows.start)
        if fault == "top-left each" and own.pop("causal", False):
            own["window"] = (None, -offset) if offset <= 0 else None
            keys = slice(keys.start, keys.stop - offset) if offset > 0 else keys
            own = {"causal": True, **m} if offset >= 0 else own
        parts.append(fl.naive(q[:, :, rows], k[:, :, keys], v[:, :, keys], **own))
    out, logs = (np.concatenate([getattr(x, name) for x in parts], 2) for name in ("out", "lse"))
    return out.astype(q.dtype), logs.astype(np.float32)


def with_scores(q: Array, k: Array, v: Array, soft_cap: float, causal: bool = False, scale: float | None = None) -> Any:
    """The tanh of the soft cap is multiplied with the score."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ np.repeat(k, group, 1).swapaxes(-1, -2))
    s = s * np.tanh(s / soft_cap)
    if causal:
        i, j = np.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2], np.arange(s.shape[-1])
        s = np.where(j <= i, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-1e30)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = e / np.where(total == 0, 1, total) @ np.repeat(v, group, 1)
    return out.astype(np.float32), lse.astype(np.float32)


FAULTS: dict[str, tuple[str, str, str]] = {
    "inverted": ("causal mask scale", "masks", "the mask is inverted: True hides a key"),
    "ignored": ("causal mask scale", "masks", "the mask is ignored"),
    "causal forgotten": ("causal mask scale", "masks", "the causal mask is ignored beside a mask"),
    "all sequences": ("causal scale lengths", "ragged", "each query sees the keys of all sequences"),
    "next one": ("causal scale lengths", "ragged", "each sequence reads the keys of the next one"),
    "sinks twice": ("causal scale sinks", "rule", "the sinks are added twice"),
    "s tanh": ("causal scale soft_cap", "rule", "the soft cap's tanh is multiplied with the score, not with the cap"),
    "top-left, more queries": (
        "causal scale",
        "rule",
        "the causal mask is aligned top-left where there are more queries than keys",
    ),
    "LSE in bfloat16": ("causal scale", "rule", "the LSE is rounded to bfloat16"),
    "out in float16": ("causal scale", "rule", "out is rounded to float16"),
}
"""By fault: what the function takes, the check that finds it, and what is named."""
IN_EACH_RUN = ("inverted", "next one", "LSE in bfloat16")


def report(fault: str, takes: str, check: str) -> Any:
    names = takes.split()
    listed = ", ".join(f"{name}=None" for name in names)
    scope: dict[str, Any] = {"run": faulty(fault)}
    exec(
        f"def kernel(q, k, v, *, {listed}):\n    return run(q, k, v, {', '.join(f'{name}={name}' for name in names)})",
        scope,
    )
    return fl.verify(fl.Adapter(scope["kernel"], lse="e"), dtypes=["float32"], checks=[check], examples=60)


@pytest.mark.parametrize(
    "fault", one_of_each(sorted(FAULTS, key=lambda x: x not in IN_EACH_RUN), lambda x: x if x in IN_EACH_RUN else 0)
)
def test_the_mistake_is_named(fault: str) -> None:
    takes, check, words = FAULTS[fault]
    found = report(fault, takes, check)
    assert found.failing is not None and found.failing.likely == words, (found.failing, str(found))


@pytest.mark.parametrize("check", ["masks", "ragged"])
def test_a_right_one_has_none(check: str) -> None:
    found = report("", FAULTS["inverted" if check == "masks" else "next one"][0], check)
    assert found.passed and found.failing is None, str(found)
