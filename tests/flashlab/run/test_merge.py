"""Merging attention over parts of the keys, held to attention over all of them, and to a float64 judge of the merge alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.base.host import from_numpy, kind_of, to_numpy
from simulator.dtypes import numpy_dtype
from simulator.operations.attention import ATTENTION
from tests.simulator.problems import problems

Array = np.ndarray[Any, Any]
KINDS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("jax", marks=pytest.mark.jax),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


def random_parts(seed: int, n: int, dtype: str = "float32", empty: float = 0.3) -> tuple[list[Array], list[Array]]:
    """Partial results: LSEs of any size, some of -inf, with rubbish for an output there."""
    random = np.random.default_rng(seed)
    lses = [random.normal(0, 20, (2, 3, 5)).astype(np.float32) for _ in range(n)]
    outs = [random.normal(0, 1, (2, 3, 5, 8)).astype(np.float32) for _ in range(n)]
    for out, lse in zip(outs, lses, strict=True):
        lse[random.random(lse.shape) < empty] = -np.inf
        out[np.isneginf(lse)] = np.nan
    return [out.astype(numpy_dtype(dtype)) for out in outs], lses


def judged(outs: list[Array], lses: list[Array]) -> tuple[Array, Array]:
    """The merge in float64, all parts at once."""
    logs: Any = np.stack([lse.astype(np.float64) for lse in lses])
    top = logs.max(0)
    weights = np.exp(logs - np.where(np.isneginf(top), 0, top))
    outputs: Any = np.stack(outs).astype(np.float64)
    values: Any = np.where(np.isneginf(logs)[..., None], 0, outputs)
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        return (weights[..., None] * values).sum(0) / np.where(total, total, 1)[..., None], top + np.log(total)


def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@given(st.integers(0, 99), st.integers(1, 9), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_against_float64(seed: int, n: int, dtype: str) -> None:
    outs, lses = random_parts(seed, n, dtype)
    out, lse = fl.merge(outs, lses)
    truth, log = judged(outs, lses)
    assert out.dtype == outs[0].dtype and lse.dtype == np.float32
    unit = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), truth, rtol=unit, atol=unit)
    np.testing.assert_allclose(lse, log, rtol=1e-6, atol=1e-5)
    assert not np.isnan(out.astype(np.float32)).any()


@given(problems(longest=40), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 9))
def test_parts_of_the_keys_are_attention_over_all(problem: fl.Problem, cuts: list[int], seed: int) -> None:
    p = problem.replace(causal=False, window=None)
    drawn: Any = ATTENTION.draw(p, seed)
    places = [0, *sorted(min(cut, p.len_kv) for cut in cuts), p.len_kv]
    parts = [
        fl.naive(drawn["q"], *(drawn[x][:, :, a:b] for x in "kv"), scale=p.scale)
        for a, b in zip(places, places[1:], strict=False)
    ]
    out, lse = fl.merge([part.out for part in parts], [part.lse for part in parts])
    whole = fl.naive(**drawn, scale=p.scale)
    np.testing.assert_allclose(out, whole.out, atol=1e-11)
    np.testing.assert_allclose(lse, whole.lse, atol=1e-11)


@given(st.integers(0, 99), st.integers(1, 9), st.integers(0, 9))
def test_parts_without_keys_at_the_end_change_no_bit(seed: int, n: int, more: int) -> None:
    outs, lses = random_parts(seed, n)
    outs[0][0, 0, 0] = -0.0
    nothing = [np.full_like(outs[0], np.nan)] * more, [np.full_like(lses[0], -np.inf)] * more
    assert same(fl.merge(outs, lses), fl.merge([*outs, *nothing[0]], [*lses, *nothing[1]]))


@given(st.integers(0, 99), st.integers(2, 9), st.data())
def test_it_is_associative_but_for_rounding(seed: int, n: int, data: st.DataObject) -> None:
    outs, lses = random_parts(seed, n)
    cut = data.draw(st.integers(1, n - 1))
    first, second = fl.merge(outs[:cut], lses[:cut]), fl.merge(outs[cut:], lses[cut:])
    whole, halves = fl.merge(outs, lses), fl.merge(*zip(first, second, strict=True))
    np.testing.assert_allclose(whole[0], halves[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(whole[1], halves[1], rtol=1e-6, atol=1e-5)


def test_one_part_is_itself_and_parts_may_lie_in_one_array() -> None:
    outs, lses = random_parts(1, 8, empty=0)
    assert same(fl.merge(outs[:1], lses[:1]), (outs[0], lses[0]))
    stacked: Any = np.stack(outs), np.stack(lses)
    assert same(fl.merge(outs, lses), fl.merge(*stacked))


def test_huge_and_tiny_lses_neither_overflow_nor_vanish() -> None:
    outs = [np.full((1, 1, 1, 4), x, np.float32) for x in (1, 3)]
    for top in (1e4, -1e4, 3e38, -3e38):
        out, lse = fl.merge(outs, [np.full((1, 1, 1), top, np.float32)] * 2)
        assert (out == 2).all() and np.isclose(lse, top + np.log(2)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_comes_back_and_inputs_stay(kind: str) -> None:
    outs, lses = random_parts(3, 5, "float16")
    before = [x.tobytes() for x in (*outs, *lses)]
    there = [from_numpy(x.copy(), kind) for x in outs], [from_numpy(x.copy(), kind) for x in lses]
    found = fl.merge(*there)
    assert [kind_of(x) for x in found] == [kind, kind]
    out, lse = (to_numpy("x", x) for x in found)
    assert out.dtype == np.float16 and lse.dtype == np.float32
    expected = fl.merge(outs, lses)
    np.testing.assert_allclose(out.astype(float), expected[0].astype(float), rtol=2e-3)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)
    assert [to_numpy("x", x).tobytes() for part in there for x in part] == before


OUT, LSE = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "line"),
    [
        ([], [], "outs = no parts: expected at least one"),
        ([OUT], [], "lses = 0 parts: expected 1, as many as outs has"),
        ([OUT, OUT[:1]], [LSE, LSE], r"outs\[1\].shape = \(1, 3, 4\): expected \(2, 3, 4\)"),
        ([OUT, OUT], [LSE, LSE.T], r"lses\[1\].shape = \(3, 2\): expected \(2, 3\)"),
        ([OUT, OUT.astype(np.float16)], [LSE, LSE], r"outs\[1\].dtype = 'float16': expected"),
        ([OUT], [LSE.astype(np.float16)], r"lses\[0\].dtype = 'float16': expected float32 or float64"),
        ([OUT.astype(np.int32)], [LSE], r"outs\[0\].dtype = 'int32'"),
        ([[1.0]], [LSE], r"outs\[0\] = 'list': expected an array of numpy, cupy, torch, jax"),
        ([OUT, OUT], [LSE, 3.0], r"lses\[1\] = 'float'"),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(outs: Any, lses: Any, line: str) -> None:
    with pytest.raises(fl.UsageError, match=line):
        fl.merge(outs, lses)


@pytest.mark.torch
def test_a_sparse_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    out, lse = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5)
    with pytest.raises(fl.UsageError, match=r"outs\[1\] = a sparse tensor: expected a dense one"):
        fl.merge([out, out.to_sparse()], [lse, lse])
    with pytest.raises(fl.UsageError, match=r"lses\[0\] = a sparse tensor: expected a dense one"):
        fl.merge([out, out], [lse.to_sparse(), lse])
