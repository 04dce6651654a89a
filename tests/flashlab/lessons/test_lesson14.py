"""Lesson 14: solutions pass, and what people get wrong is told, by the step and by the reason."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.lessons.lesson14 import EXERCISES, PREDICTIONS, RankExercise, sends
from flashlab.lessons.prediction import CLOSE
from tests.flashlab.lessons.rank_misconceptions import MISCONCEPTIONS, Misconception

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def answer(text: str) -> Any:
    """What a learner's cell defines."""
    names: dict[str, Any] = {"fl": fl, "np": np}
    exec(compile(text, "<cell>", "exec"), names)
    return next(thing for name, thing in names.items() if name.startswith(("my_", "My")))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_the_solution_passes_and_the_skeleton_doesn_t(exercise: RankExercise):
    assert exercise.check(answer(exercise.solution)).passed
    assert not exercise.check(answer(exercise.skeleton)).passed
    assert exercise.skeleton.count("\n") < exercise.solution.count("\n") - 3
    assert len(exercise.hints) >= 4


@pytest.mark.parametrize("wrong", MISCONCEPTIONS, ids=lambda each: f"{each.exercise} {each.name}")
def test_a_mistake_is_told_by_step_and_reason(wrong: Misconception):
    exercise = BY_NAME[wrong.exercise]
    text = exercise.marked
    for was, becomes in zip(wrong.was.split("§"), wrong.becomes.split("§"), strict=True):
        assert text.count(was) == (1 if was else len(text) + 1), was
        text = text.replace(was, becomes) if was else text
    verdict = exercise.check(answer(text))
    assert (verdict.kind, verdict.step) == (wrong.kind, wrong.step), verdict
    assert re.search(wrong.why, verdict.message), verdict.message
    assert "\n" not in verdict.message and verdict.afterwards


@pytest.mark.parametrize("name", BY_NAME)
def test_each_exercise_knows_eight_mistakes(name: str):
    own = [each for each in MISCONCEPTIONS if each.exercise == name]
    assert len({each.name for each in own}) == len(own) >= 8


def test_each_step_has_a_slip():
    for exercise in EXERCISES:
        named = {each.step for each in MISCONCEPTIONS if each.exercise == exercise.name}
        assert named <= set(exercise.slips), exercise.name


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

    assert BY_NAME["14.1"].check(my_ring).passed


@pytest.mark.parametrize("nonsense", [None, 5, "ring", np.zeros(3), object(), dict])
@pytest.mark.parametrize("name", BY_NAME)
def test_nonsense_is_told(name: str, nonsense: Any):
    verdict = BY_NAME[name].check(nonsense)
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
