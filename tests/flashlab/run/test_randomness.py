"""Seed and offset as callers say them: forward and backward on the emulator, and one line for what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl

P = fl.Problem(batch=1, heads=2, len_q=40, head_dim=32, dtype="float16", causal=True)
Q, K, V = fl.random_inputs(P)
STATE = np.array([5, 9])
BAD: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.2}, "seed = None: expected an integer with dropout, or rng_state: equal seeds and offsets drop the same"),
    ({"seed": 3}, "seed = 3: expected None without dropout"),
    ({"offset": 3}, "offset = 3: expected 0 without dropout"),
    ({"rng_state": STATE}, "rng_state = 'ndarray': expected None without dropout"),
    ({"dropout": 0.2, "seed": 1.5}, "seed = 1.5: expected an integer from -2^63 to 2^63 - 1"),
    ({"dropout": 0.2, "seed": True}, "seed = True: expected an integer from -2^63 to 2^63 - 1"),
    ({"dropout": 0.2, "seed": 2**63}, f"seed = {2**63}: expected an integer from -2^63 to 2^63 - 1"),
    ({"dropout": 0.2, "seed": 1, "offset": "2"}, "offset = '2': expected an integer from -2^63 to 2^63 - 1"),
    ({"dropout": 0.2, "seed": 1, "rng_state": STATE}, "seed = 1: expected None with rng_state, which has seed and offset"),
    ({"dropout": 0.2, "offset": 1, "rng_state": STATE}, "offset = 1: expected 0 with rng_state, which has seed and offset"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.compiler
def test_both_passes_drop_the_same() -> None:
    """The gradient of a sum over `out` is that of the same mask: by numbers, by an array, and by the judge."""
    options: dict[str, Any] = {"causal": True, "dropout": 0.2, "backend": "emulator"}
    out, lse = fl.attention(Q, K, V, lse=True, seed=5, offset=9, **options)
    by_array = fl.attention(Q, K, V, rng_state=STATE, **options)
    np.testing.assert_array_equal(out, by_array)
    exact = fl.naive(Q, K, V, causal=True, dropout=0.2, rng_state=STATE)
    assert np.abs(out - exact.out).max() < 5e-3
    dout = np.ones_like(out)
    numbers = fl.attention_backward(dout, Q, K, V, out, lse, seed=5, offset=9, **options)
    array = fl.attention_backward(dout, Q, K, V, out, lse, rng_state=STATE, **options)
    for x, y in zip(numbers, array, strict=True):
        np.testing.assert_array_equal(x, y)
    # <dO, out> is linear in V, so <dV, V> is that sum
    np.testing.assert_allclose((numbers[2].astype(float) * V).sum(), exact.out.sum(), rtol=5e-3)
    other = fl.attention_backward(dout, Q, K, V, out, lse, seed=5, offset=11, **options)
    assert (numbers[2] != other[2]).any()


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line for _, line in BAD])
def test_bad_input_gets_one_line(change: dict[str, Any], line: str) -> None:
    lse = np.zeros((1, 2, 40), np.float32)
    for call in (
        lambda **said: fl.attention(Q, K, V, **said),
        lambda **said: fl.attention_backward(Q, Q, K, V, Q, lse, **said),
    ):
        with pytest.raises(fl.UsageError) as refused:
            call(backend="emulator", **change)
        assert str(refused.value) == line


def test_who_drops_nothing_says_so() -> None:
    options: dict[str, Any] = {"dropout": 0.2, "seed": 1, "backend": "emulator"}
    with pytest.raises(fl.UsageError, match=r"^dropout = 0\.2: expected nothing: flash3_3 knows causal, "):
        fl.attention(Q, K, V, algorithm="flash3_3", **options)
