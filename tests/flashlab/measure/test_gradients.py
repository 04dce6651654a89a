"""The benchmark judges a backward pass in some rows: right ones pass, and one wrong row of any gradient doesn't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.measure import speed
from flashlab.measure.gradients import errors
from simulator.operations.backward import BACKWARD

PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"batch": 2, "heads": 2, "len_q": 90},
    "GQA, more keys": {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 60, "len_kv": 90},
    "GQA, sequences": {"batch": 1, "heads": 4, "kv_heads": 2, "lengths": [33, 50, 70]},
}


def drawn(causal: bool, which: str = "plain") -> tuple[fl.Problem, dict[str, Any], dict[str, Any]]:
    p = fl.Problem(**PROBLEMS[which], head_dim=16, dtype="bfloat16", causal=causal)
    given: dict[str, Any] = BACKWARD.draw(p, 0)
    return p, given, {name: x.astype(np.float64) for name, x in BACKWARD.judge(p, given).items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", PROBLEMS)
def test_right_gradients_pass(causal: bool, which: str) -> None:
    p, given, found = drawn(causal, which)
    each = list(errors(p, given, found))
    assert max(each) < 1e-6
    sequences = 2 if p.ragged else 1
    assert len(each) == sequences * 2 * 2 * (4 if causal else 1)  # queries and keys, of two heads, in pieces


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize(("head", "row"), [((0, 0), 0), ((1, 1), -1)])
@pytest.mark.parametrize("which", PROBLEMS)
def test_a_wrong_row_does_not(causal: bool, name: str, head: tuple[int, int], row: int, which: str) -> None:
    p, given, found = drawn(causal, which)
    head = (head[0] * (p.batch - 1), head[1] * (found[name].shape[1] - 1))
    found[name][(*head, row)] += 0.5
    assert max(errors(p, given, found)) > 1
    found[name][(*head, row)] = np.nan
    assert max(errors(p, given, found)) == np.inf


def test_the_flops_are_those_of_the_operation() -> None:
    report = speed.BenchReport("flash2_backward", "none", (), (), ())
    assert report.to_dict()["flops"].startswith("10 * length^2")
    assert speed.BenchReport("flash2", "none", (), (), ()).to_dict()["flops"].startswith("4 * length^2")
