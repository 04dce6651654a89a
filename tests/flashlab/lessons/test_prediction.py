"""`fl.predict`: nothing is shown before an answer, and known slips are recognised."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import record
from flashlab.lessons.catalogue import PREDICTIONS
from flashlab.lessons.prediction import CLOSE, apart


@pytest.mark.parametrize("name", PREDICTIONS)
def test_nothing_is_shown_before_an_answer(name: str):
    truth = PREDICTIONS[name].truth()
    for answer in (fl.predict(name), fl.predict(name, **dict.fromkeys(truth, ...))):
        assert "not answered" in repr(answer)
        assert not any(f"{n:,.0f}" in repr(answer) + answer._repr_html_() for n in truth.values() if n > 10)
    assert record.read()["predictions"] == {}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_truth_is_right(name: str):
    asked = PREDICTIONS[name]
    answer = fl.predict(name, **asked.truth())
    assert answer.right
    assert asked.because in repr(answer) and asked.because.split("&")[0].split("<")[0][:20] in answer._repr_html_()
    assert record.read()["predictions"][name]["right"] is True


@pytest.mark.parametrize(
    ("name", "quantity", "slip"),
    [
        (name, quantity, slip)
        for name, p in PREDICTIONS.items()
        for quantity, slips in p.slips().items()
        for slip in slips
    ],
)
def test_a_slip_is_recognised(name: str, quantity: str, slip: str):
    asked = PREDICTIONS[name]
    wrong = asked.slips()[quantity][slip]
    answer = fl.predict(name, **(dict(asked.truth()) | {quantity: wrong}))
    found = next(q for q in answer.quantities if q.name == quantity)
    assert not found.right
    assert found.slip == slip
    assert found.ratio == f"{wrong / found.truth:.4g}"


def test_slips_can_be_told_from_the_truth_and_each_other():
    for asked in PREDICTIONS.values():
        truth = asked.truth()
        for quantity, slips in asked.slips().items():
            numbers = [truth[quantity], *slips.values()]
            assert all(apart(a, b) > math.log(1 + CLOSE) for i, a in enumerate(numbers) for b in numbers[:i]), (
                asked.name
            )


@pytest.mark.parametrize("value", [math.nan, math.inf, "many", None, True, [1, 2], np.ones(2), np.array(["a"])])
def test_what_is_no_number_is_told_in_a_line(value: object):
    answer = fl.predict("01.1", hbm_peak=value)  # pyright: ignore
    assert "expected a number" in repr(answer)
    assert not answer.quantities


def test_unknown_names_are_told_with_the_nearest():
    assert "expected one of 00.1" in repr(fl.predict("1.1", hbm_peak=1))
    assert "expected one of 00.1" in repr(fl.predict([]))  # pyright: ignore
    assert "did you mean hbm_peak?" in repr(fl.predict("01.1", hbm_peek=1))
    assert "missing" in repr(fl.predict("00.1", hbm_read=1))


@example(5e-324)
@given(st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False)))
def test_any_number_gets_an_answer(n: float):
    answer = fl.predict("01.1", hbm_peak=n)
    assert answer.quantities
    assert repr(answer) and answer._repr_html_()


def test_numpy_numbers_are_numbers():
    assert fl.predict("01.1", hbm_peak=np.int64(PREDICTIONS["01.1"].truth()["hbm_peak"])).right
