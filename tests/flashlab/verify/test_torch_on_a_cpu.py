"""Attention of torch and of Triton, verified without a GPU: the right ones pass, and seeded faults are found."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import flashlab as fl
from flashlab.verify import verify


def module(name: str) -> Any:
    return importlib.import_module(name)


def sdpa(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    attention = module("torch").nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def usual(p: fl.Problem) -> bool | str:
    """With as many queries as keys, and some, torch's masks are ours. (A scale that isn't positive makes NaN of hidden keys.)"""
    return p.len_q == p.len_kv > 0 and p.scale > 0 or "as many queries as keys, and a positive scale"


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_own_attention_passes(dtype: str) -> None:
    report = verify(fl.Adapter(sdpa, "torch", supports=usual), dtypes=[dtype])
    assert report.verdict == "passed, LSE unchecked", report.failed[:3]
    assert sum(row.status == "passed" for row in report.rows) > 5


@pytest.mark.torch
def test_the_built_in_sdpa_passes() -> None:
    report = verify("sdpa", examples=50)
    assert report.verdict == "passed, LSE unchecked", report.failed[:3]
    assert report.counts["passed"] > 200 and report.never_ran == [
        "window",
        "soft cap",
        "sinks",
        "alibi",
        "mask",
        "lengths",
        "dropout",
    ]


@pytest.mark.torch
def test_a_function_without_a_signature_is_told_by_its_own_names() -> None:
    """torch's function refuses `causal`: that says nothing of its numbers."""
    attention = module("torch").nn.functional.scaled_dot_product_attention
    with pytest.raises(fl.UsageError, match="unexpected keyword argument 'causal'.*--arg-names"):
        verify(fl.Adapter(attention, "torch"), dtypes=["float32"])
    domain = fl.Domain(groups=1, empty=False)
    adapter = fl.Adapter(attention, "torch", names={"causal": "is_causal"}, causal="top-left", domain=domain)
    report = verify(adapter, dtypes=["float32"], checks=["rule", "key_sets"])
    assert report.passed and report.counts["passed"] > 50 and "causal" not in report.never_ran


@pytest.mark.torch
def test_a_key_too_few_is_found() -> None:
    def hasty(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return sdpa(q, k[:, :, :-1], v[:, :, :-1], causal, scale)

    assert verify(fl.Adapter(hasty, "torch", supports=usual), dtypes=["float32"], checks=["rule"]).failed


@pytest.mark.torch
def test_the_wrong_convention_is_found() -> None:
    """torch's causal mask is aligned top-left: with more keys than queries it is no bottom-right one."""
    adapter = fl.Adapter(sdpa, "torch", supports=lambda p: p.len_q > 0 and p.len_kv > 0)
    assert verify(adapter, dtypes=["float32"], checks=["rule"]).failed


# Triton


@pytest.fixture
def triton_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Attention in Triton, a block of rows a program and a row of keys at a time, run by Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.import_module("tests.flashlab.verify.triton_kernel").attention


@pytest.mark.triton
@pytest.mark.torch
def test_a_kernel_of_triton_passes(triton_attention: Any) -> None:
    report = verify(fl.Adapter(triton_attention, "torch", lse="e"), dtypes=["float32"], checks=["rule"])
    assert report.verdict == "passed", report.failed[:3]


@pytest.mark.triton
@pytest.mark.torch
def test_a_tail_that_is_not_masked_is_found(triton_attention: Any) -> None:
    def careless(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return triton_attention(q, k, v, causal, scale, masked=False)

    assert verify(fl.Adapter(careless, "torch", lse="e"), dtypes=["float32"], checks=["rule"]).failed
