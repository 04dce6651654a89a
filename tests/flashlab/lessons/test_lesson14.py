"""Lesson 14: mistakes are told by the step and by the reason, other right answers pass, and the text says what is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.lessons.catalogue import CLASS_EXERCISES
from flashlab.lessons.class_exercise import ClassExercise
from flashlab.lessons.lesson14 import EXERCISES, PREDICTIONS, hides, sends
from flashlab.lessons.prediction import CLOSE
from tests.flashlab.lessons.answers import class_of
from tests.flashlab.lessons.rank_misconceptions import MISCONCEPTIONS, Misconception
from tests.tiers import one_of_each

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def of(wrong: Misconception) -> str:
    """The text of an answer with a mistake."""
    text = BY_NAME[wrong.exercise].marked
    for was, becomes in zip(wrong.was.split("§"), wrong.becomes.split("§"), strict=True):
        assert was in text, was
        text = text.replace(was, becomes) if was else text
    return text


@pytest.mark.parametrize(
    "wrong",
    one_of_each(MISCONCEPTIONS, lambda each: (each.exercise, each.step), lambda each: f"{each.exercise}-{each.name}"),
)
def test_a_mistake_is_told_by_step_and_reason(wrong: Misconception):
    with np.errstate(all="ignore"):
        found = BY_NAME[wrong.exercise].judge(class_of(of(wrong)))
    assert (found.kind, found.step) == (wrong.kind, wrong.step), found
    assert re.search(wrong.why, found.message), found.message
    assert "\n" not in found.message


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_each_exercise_knows_eight_mistakes_and_what_each_means(exercise: ClassExercise):
    own = [each for each in MISCONCEPTIONS if each.exercise == exercise.name]
    assert len({each.name for each in own}) == len(own) >= 8
    assert {each.step for each in own} == set(exercise.slips)
    assert len(exercise.hints) >= 4


@pytest.mark.usefixtures("without_child")
def test_a_check_of_a_function_says_what_it_means():
    text = CLASS_EXERCISES["14.1"].marked.replace("of=whose", "of=rank.index")
    said = repr(fl.check(class_of(text), exercise="14.1"))
    assert "it is said to be rank 0's" in said and CLASS_EXERCISES["14.1"].slips["attend"] in said
    passed = repr(fl.check(class_of(CLASS_EXERCISES["14.3"].solution), exercise="14.3"))
    assert re.search(r"link dk, dv sent +28,672 of +28,672  equal", passed) and "times that of one GPU" in passed


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("class A:\n    pass\n", "takes a function of (rank), and this is a class"),
        ("def f():\n    pass\n", "f takes (), and is called as f(rank)"),
    ],
)
def test_what_is_no_function_of_a_rank_is_told_in_a_line(answer: str, says: str):
    verdict = fl.check(class_of(answer), exercise="14.1")
    assert verdict.kind == "usage" and says in verdict.message and "\n" not in verdict.message
    assert "takes a function of (rank): the thing itself" in fl.check("ring.py", exercise="14.1").message
    assert "the library's own" in fl.check(fl.parallel.simulate, exercise="14.1").message


# -- other answers that are right ---------------------------------------------------------------------------------


def test_another_right_ring_passes():
    """Merged step by step, in arrays of one's own, with a message of one array."""

    def my_ring(rank: Any) -> Any:
        both = np.stack([rank.k, rank.v])
        out = lse = None
        for step in range(rank.ranks):
            if step + 1 < rank.ranks:
                rank.send(rank.right, f"step {step}", kv=both)
            part = rank.attend(both[0], both[1], of=(rank.index - step) % rank.ranks)
            out, lse = part if out is None else fl.merge([out, part[0]], [lse, part[1]])
            if step + 1 < rank.ranks:
                both = yield rank.receive(rank.left)
        return out, lse

    assert BY_NAME["14.1"].judge(my_ring).kind == "passed"


def test_a_way_back_in_another_order_passes():
    """It gets the next K and V before it computes, sends both sums as one array, and leaves out what it sees nothing of."""

    def mine(rank: Any) -> Any:
        n, dq, home, kv = rank.ranks, np.zeros(rank.q.shape, np.float32), None, np.stack([rank.k, rank.v])
        for step in range(n):
            now, of = kv, (rank.index - step) % n
            if step < n - 1:
                rank.send(rank.right, step, kv=kv)
            sums = np.zeros(kv.shape, np.float32)
            if not (rank.problem.causal and rank.layout == "contiguous" and of > rank.index):
                part, *mine = rank.attend_back(*now, of=of)
                dq, sums = dq + part, np.stack(mine)
            if step == 0:
                home = sums
            else:
                if step > 1:
                    sums = sums + (yield rank.receive(rank.left))
                rank.send(rank.right, step, sums=sums)
            if step < n - 1:
                kv = yield rank.receive(rank.left)
        if n > 1:
            home = home + (yield rank.receive(rank.left))
        return dq, *home

    found = BY_NAME["14.3"].judge(mine)
    assert found.kind == "passed", found


def test_a_striped_cache_by_exchange_passes():
    def mine(rank: Any) -> Any:
        heads = rank.q.shape[1]
        queries = yield from rank.exchange("queries", lambda peer: {"q": rank.q})
        out, lse = rank.attention(np.concatenate(queries, axis=1), rank.k, rank.v)

        def give(peer: int) -> Any:
            own = slice(peer * heads, (peer + 1) * heads)
            return {"lse": lse[:, own], "out": out[:, own]}

        lses, outs = zip(*(yield from rank.exchange("outputs", give)), strict=True)
        top = np.max(lses, axis=0)
        weights = np.exp(np.stack(lses) - top)
        total = sum(w[..., None] * x for w, x in zip(weights, outs, strict=True))
        return total / weights.sum(0)[..., None], top + np.log(weights.sum(0))

    found = BY_NAME["14.4"].judge(mine)
    assert found.kind == "passed", found


def test_the_mistakes_of_a_schedule_take_longer_than_the_solution():
    """Of several schedules with right numbers, in milliseconds as the timeline says."""
    said = {}
    for each in MISCONCEPTIONS:
        if each.step == "waits":
            said[each.name] = float(BY_NAME["14.5"].judge(class_of(of(each))).message.partition(" ms")[0])
    assert said == {
        "a-plain-ring": 22, "across-first": 10.5, "everybody-to-everybody": 22, "all-of-them-first": 29,
        "across-in-the-end": 11, "computes-before-it-hands-on": 9,
    }  # fmt: skip


@pytest.mark.parametrize("nonsense", [None, 5, "ring", np.zeros(3), object(), dict])
@pytest.mark.parametrize("name", BY_NAME)
def test_nonsense_is_told(name: str, nonsense: Any):
    verdict = fl.check(nonsense, exercise=name)
    assert not verdict.passed and verdict.message


def test_predictions_have_slips_that_are_wrong():
    """Each slip is another number than the truth by more than counts as right, and no two are alike."""
    for prediction in PREDICTIONS:
        truth = prediction.truth()
        for name, slips in prediction.slips().items():
            values = [truth[name], *slips.values()]
            assert len(slips) >= 4
            for i, one in enumerate(values):
                assert all(abs(one - other) > CLOSE * one for other in values[i + 1 :]), (name, values)


def test_what_ranks_send_by_hand():
    """32 heads or 8 of K and V, 16,384 rows a rank, 128 elements of 2 bytes, seven other ranks."""
    row = 16_384 * 128 * 2
    assert [sends(scheme, 8) for scheme in ("ring", "ulysses")] == [7 * 16 * row, 7 * (4 + 1 + 1 + 4) * row]
    assert [sends(scheme, 2) for scheme in ("ring", "ulysses")] == [7 * 4 * row, 7 * (4 + 1 + 1 + 4) * row]


def test_from_which_length_on_the_link_hides_by_hand():
    """n rows a rank: 2 products of n by n / 2 pairs for 32 heads, against K and V of n keys of 8 heads."""
    rows = (2 * 8 * 128 * 2 / 300e9) / (2 * 2 * 128 * 32 / 2 / 800e12)
    assert hides(causal=True) == pytest.approx(8 * rows) == pytest.approx(2 * hides(causal=False))
