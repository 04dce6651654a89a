"""The rule: correct kernels pass it, in every dtype; what lies outside of it fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.verify.cases import Case, random_cases
from flashlab.verify.rule import bottom_right, expect, judge, reference
from simulator.operations.attention import ATTENTION, ROUNDINGS, UNIT
from simulator.problem import SCORES
from tests.flashlab.verify.candidates import attention

DTYPES = ["float32", "float16", "bfloat16"]


def problem(**changes: Any) -> fl.Problem:
    return fl.Problem(batch=1, heads=2, len_q=97, head_dim=64, dtype="float16").replace(**changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [16, 97])
def test_a_correct_kernel_passes(dtype: str, keys: int) -> None:
    p = problem(dtype=dtype, causal=True)
    arrays = fl.random_inputs(p)
    judged = judge(expect(p, *arrays), *attention(*arrays, causal=True, scale=p.scale, keys=keys))
    assert judged.passed and 0.02 < judged.worst < 0.8, judged


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_is_rounded_once_and_p_once(dtype: str) -> None:
    """u is the unit that out and P round by: the correct result, rounded, comes near the rule's limit but never over it."""
    p = problem(dtype=dtype, len_q=1, len_kv=1)
    q, k, v = fl.random_inputs(p)
    expected = expect(p, q, k, v)
    # one key: out is v exactly, and p = 1, so the rule allows sqrt(2) * ROUNDINGS * u of |v|
    size = np.linalg.norm(v.astype(np.float64), axis=-1)
    assert np.allclose(expected.out_tolerance, 2**0.5 * ROUNDINGS * UNIT[dtype] * size, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_lost_key_of_many_fails(dtype: str) -> None:
    p = problem(dtype=dtype, len_kv=1000, scale=0.02)
    q, k, v = fl.random_inputs(p)
    out, lse = attention(q, k[:, :, 1:], v[:, :, 1:], scale=p.scale)
    expected = expect(p, q, k, v)
    assert np.allclose(out.astype(float), expected.out, atol=1e-2, rtol=1e-2), "the usual tolerance does not see it"
    assert not judge(expected, out, lse).passed
    assert "LSE" in (judge(expected, expected.out, lse).message or "")


@pytest.mark.parametrize(("nats", "passes"), [(-92.0, True), (-60.0, False)])
def test_a_weight_that_the_exponential_flushes_may_vanish(nats: float, passes: bool) -> None:
    """Below 2^-126 of the row's largest, which is a sink here, though bfloat16 holds such numbers."""
    p = problem(dtype="bfloat16", len_q=1, len_kv=1, sinks=True, scale=0.0)
    arrays = ATTENTION.draw(p) | {"sinks": np.full(2, -nats, np.float32)}
    truth = ATTENTION.judge(p, arrays)
    assert (
        np.any(truth["out"])
        and (np.linalg.norm(truth["out"], axis=-1) < ATTENTION.bounds(p, arrays, truth)["out"]).all() == passes
    )


@pytest.mark.parametrize("keys", [1, 100, 4096, 65536])
def test_an_lse_of_8_bits_may_be_that_of_the_rounded_weights(keys: int) -> None:
    """One weight, and others so small beside it that nothing is left of them where P is taken times 2^5 and rounded: their sum
    may be missing, and half a step of e4m3 besides, but not more."""
    p = fl.Problem(
        batch=1, heads=1, len_q=1, len_kv=keys, head_dim=16, dtype="float8_e4m3fn", scale=-np.log(0.999 * 2.0**-15)
    )
    q, k, v = fl.random_inputs(p)
    q[:], k[:], v[:] = 0, 0, 1
    q[..., 0], k[:, :, 1:, 0] = 1, -1
    rounded = (32 * np.exp(p.scale * k[0, 0, :, 0].astype(float))).astype(k.dtype).astype(float) / 32
    assert rounded.sum() == 1
    expected = expect(p, q, k, v)
    assert judge(expected, expected.out, np.zeros((1, 1, 1), np.float32)).passed
    step = np.log1p(UNIT[p.dtype])
    assert judge(expected, expected.out, np.full((1, 1, 1), -0.9 * step, np.float32)).passed
    assert "LSE" in (judge(expected, expected.out, np.full((1, 1, 1), -1.5 * step, np.float32)).message or "")


def test_nan_and_shape_are_said() -> None:
    p = problem()
    expected = expect(p, *fl.random_inputs(p))
    broken = expected.out.copy()
    broken[0, 1, 5, 3] = np.nan
    assert judge(expected, broken, None).message == "out at (batch, head, row) (0, 1, 5) holds NaN or inf"
    assert "shape" in (judge(expected, broken[:, :1], None).message or "")


@pytest.mark.parametrize("wrong", [np.inf, np.nan, 0.0, -1e30])
def test_the_lse_of_an_empty_row_is_minus_infinity(wrong: float) -> None:
    p = problem(len_q=3, len_kv=1, causal=True)
    expected = expect(p, *fl.random_inputs(p))
    assert judge(expected, expected.out, expected.lse).passed
    lse = expected.lse.copy()
    lse[0, 0, 0] = wrong
    assert not judge(expected, expected.out, lse).passed


@given(st.integers(0, 12), st.integers(0, 12))
def test_a_top_left_mask_is_a_bottom_right_problem(len_q: int, len_kv: int) -> None:
    p = problem(len_q=len_q, len_kv=len_kv, causal=True)
    same = bottom_right(p, "top-left")
    for row in range(len_q):
        assert list(same.visible_keys(row)) == list(range(min(row + 1, len_kv)))


@given(random_cases(DTYPES, longest=40, head_dims=[1, 17], tiles=[None], scores=[(), SCORES]))
def test_the_oracles_agree(case: Case) -> None:
    arrays = case.arrays()
    dense, loop = (reference(case.problem, **arrays, loop=loop) for loop in (False, True))
    close = 1e-12 * float(np.maximum(1, expect(case.problem, **arrays).lse_tolerance / 2e-6).max(initial=1))
    assert np.allclose(dense.out, loop.out, rtol=close, atol=close)
    assert np.allclose(dense.lse, loop.lse, rtol=close, atol=close)


def test_case_source_makes_the_case() -> None:
    case = Case(
        problem=problem(causal=True, window=(3, None), len_kv=5), inputs="lone", layout="bshd", tile=(16, 32), seed=4
    )
    assert eval(case.source, {"fl": fl, "Case": Case}) == case


def test_unknown_inputs_and_layouts_are_refused() -> None:
    with pytest.raises(fl.UsageError, match="did you mean rising"):
        Case(problem=problem(), inputs="risin")
    with pytest.raises(fl.UsageError, match="layout = 'bhds'"):
        Case(problem=problem(), layout="bhds")
