"""The report on a backward pass names the mistake in it: in NumPy, float32, with one thing wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import Case, run_case
from simulator.dtypes import Array
from tests.tiers import one_of_each

LN2 = np.float32(np.log(2))


def backward(fault: str) -> Callable[..., Any]:
    """A backward pass with a fault. Its formulas are those of a kernel: P from the LSE, D from dO and O."""

    def run(dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool = False, scale: float | None = None,
            window: Any = None, soft_cap: float | None = None, dlse: Array | None = None) -> Any:  # fmt: skip
        dtype, (batch, heads, len_q, width), (kv_heads, len_kv) = q.dtype, q.shape, k.shape[1:3]
        dout, q, k, v, out = (x.astype(np.float32) for x in (dout, q, k, v, out))
        group = heads // kv_heads
        order = np.arange(heads) % kv_heads if fault == "interleaved" else np.arange(heads) // group
        factor = width**-0.5 if scale is None or fault == "scale of its own" else scale
        s = factor * (q @ k[:, order].swapaxes(-1, -2))
        bent = np.tanh(s / soft_cap) if soft_cap else np.zeros((), np.float32)
        s = soft_cap * bent if soft_cap else s
        offset = len_kv - len_q
        i, j = np.arange(len_q)[:, None] + offset, np.arange(len_kv)
        seen = np.ones((len_q, len_kv), bool)
        if causal and fault != "not causal":
            seen &= j <= i - offset * (fault == "top-left") - (fault == "<")
        if window is not None:
            left, right = window
            seen &= (j >= i - left - (fault == "wide")) if left is not None else True
            seen &= (j <= i + right + (fault == "wide right")) if right is not None else True
        with np.errstate(all="ignore"):
            base = np.where(np.isneginf(lse), 0, lse)[..., None] * (LN2 if fault == "base 2" else 1)
            p = np.where(seen, np.exp(s - base), 0).astype(np.float32)
        d = (dout * out).sum(-1, keepdims=True)
        d = d if dlse is None or fault == "no dlse" else d - dlse[..., None]
        d = {"no D": 0 * d, "D of dO": dout.sum(-1, keepdims=True), "D added": -d}.get(fault, d)
        ds = p * (dout @ v[:, order].swapaxes(-1, -2) - d)
        ds = ds if fault == "no derivative" else ds * (1 - bent**2)
        scale = width**-0.5 if scale is None else scale
        dq = ds @ k[:, order] * {"dq unscaled": 1, "scaled twice": scale**2}.get(fault, scale)
        dk = ds.swapaxes(-1, -2) @ q * {"dk unscaled": 1, "scaled twice": scale**2}.get(fault, scale)
        dv = (ds if fault == "dv of dS" else p).swapaxes(-1, -2) @ dout

        def summed(x: Array, name: str) -> Array:
            found = np.stack([x[:, order == h] for h in range(kv_heads)], 1)
            if fault == f"{name} of one head":
                return found[:, :, 0]
            return found.mean(2) if fault == f"{name} averaged" else found.sum(2)

        dk, dv = summed(dk, "dk"), summed(dv, "dv")
        if fault == "swapped":
            dk, dv = dv, dk
        if fault == "NaN":
            dq = np.where(np.isneginf(lse)[..., None], np.nan, dq)
        if fault == "rounded":
            dk = dk.astype(np.float16).astype(np.float32)
        del batch
        return tuple(x.astype(dtype) for x in (dq, dk, dv))

    return run


FAULTS = {
    "no D": "D is missing", "D of dO": "D is the sum of dO alone", "D added": "D is added to dP",
    "dq unscaled": "dq lacks the scale", "dk unscaled": "dk lacks the scale", "scaled twice": "dq and dk have the scale twice",
    "dk of one head": "dk is not summed over the group", "dv of one head": "dv is not summed over the group",
    "dk averaged": "dk is averaged over the group", "base 2": "the LSE is taken to base 2", "swapped": "dk and dv are swapped",
    "top-left": "the causal mask is aligned top-left", "not causal": "the causal mask is ignored",
    "<": "a causal row misses its last key", "wide": "the window's left side is one key too wide",
    "wide right": "the window's right side is one key too wide", "no derivative": "the soft cap's derivative is missing",
    "no dlse": "the gradient of the LSE is ignored", "interleaved": "KV heads are interleaved",
    "dv of dS": "dv is made of dS, not of P",
    "NaN": "dq of a query that sees no key must be 0", "rounded": "dk is rounded to float16",
    "scale of its own": "the scale of the recomputed scores is 1/sqrt(head_dim)",
}  # fmt: skip
"""By fault: how what is named begins."""
IN_EACH_RUN = ("no D", "dk averaged", "wide")


def report(fault: str, dtype: str = "float32") -> Any:
    adapter = fl.Adapter(backward(fault), operation="backward", domain=fl.Domain(pairs=4000))
    return fl.verify(adapter, dtypes=[dtype], checks=["rule"])


@pytest.mark.parametrize(
    "fault", one_of_each(sorted(FAULTS, key=lambda x: x not in IN_EACH_RUN), lambda x: x if x in IN_EACH_RUN else 0)
)
def test_the_mistake_is_named(fault: str) -> None:
    found = report(fault)
    assert found.failing is not None and found.failing.likely.startswith(FAULTS[fault]), found.failing
    assert "; or " not in found.failing.likely


@pytest.mark.long
@pytest.mark.parametrize("fault", ["no D", "dk averaged", "wide", "base 2"])
def test_in_sixteen_bits_too(fault: str) -> None:
    found = report(fault, "bfloat16")
    assert found.failing is not None and found.failing.likely.startswith(FAULTS[fault])


def test_a_right_one_has_none() -> None:
    assert report("").passed and report("").failing is None


def test_the_smallest_case_runs_again() -> None:
    """It is small, and the program that is printed says the same of it."""
    found = report("D added")
    assert found.failing is not None
    case = eval(
        found.failing.python.splitlines()[-1].partition("run_case(target, ")[2].partition(", check=")[0],
        {"Case": Case, "fl": fl},
    )
    p = case.problem
    assert p.len_q * p.len_kv * p.heads <= 4 and p.head_dim == 8
    row = run_case(fl.Adapter(backward("D added"), operation="backward"), case)
    assert row.status == "failed" and row.detail in found.failing.message
    assert run_case(fl.Adapter(backward(""), operation="backward"), case).status == "passed"


def test_a_mistake_that_nobody_knows_is_not_named() -> None:
    right = backward("")

    def odd(*given: Array, causal: bool = False) -> Any:
        dq, dk, dv = right(*given, causal=causal)
        return dq + np.float32(0.1) * np.sin(np.arange(dq.shape[-1], dtype=np.float32)), dk, dv

    found = fl.verify(fl.Adapter(odd, operation="backward"), dtypes=["float32"], checks=["rule"])
    assert found.failing is not None and found.failing.likely == ""


def test_two_mistakes_at_once_are_not_taken_for_one() -> None:
    twice = backward("no D")

    def both(*given: Array, causal: bool = False) -> Any:
        dq, dk, dv = twice(*given, causal=causal)
        return dq, dk, -dv

    found = fl.verify(fl.Adapter(both, operation="backward"), dtypes=["float32"], checks=["rule"])
    assert found.failing is not None and found.failing.likely == ""


def test_what_must_be_0_is_said_so() -> None:
    """Of a row without keys "off by 1e+30 times" would say nothing, nor would it of NaN."""
    right = backward("")

    def filled(*given: Array, causal: bool = False) -> Any:
        dq, dk, dv = right(*given, causal=causal)
        return np.where(np.isneginf(given[5])[..., None], np.float32(3), dq), dk, dv

    found = fl.verify(fl.Adapter(filled, operation="backward"), dtypes=["float32"], checks=["rule"])
    assert found.failing is not None and "dq at (0, 0, 0) must be 0, and has 3" in found.failing.message
    assert found.failing.likely == "dq of a query that sees no key must be 0; here it is something else"
    assert "dq at (0, 0, 0) holds NaN or inf" in (report("NaN").failing or found.failing).message


def test_a_row_of_attention_that_must_be_0_is_said_so() -> None:
    def filled(q: Array, k: Array, v: Array, causal: bool = False) -> Any:
        out, lse = fl.naive(q, k, v, causal=causal)
        return np.where(np.isneginf(lse)[..., None], 1.0, out).astype(q.dtype), lse.astype(np.float32)

    found = fl.verify(fl.Adapter(filled, lse="e"), dtypes=["float32"], checks=["rule"])
    assert found.failing is not None
    assert "out at (batch, head, row) (0, 0, 0) must be 0, and has 1: it sees no key" in found.failing.message
