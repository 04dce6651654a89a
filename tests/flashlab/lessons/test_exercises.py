"""Each exercise: its skeleton is its solution minus the marked lines, its solution passes, misconceptions fail and are told."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import numpy as np
import pytest

import flashlab as fl
from flashlab.lessons import checking
from flashlab.lessons.catalogue import EXERCISES
from flashlab.lessons.child import run
from flashlab.lessons.exercise import MARK
from tests.flashlab.lessons.answers import program_of
from tests.flashlab.lessons.cuda_misconceptions import MISCONCEPTIONS as CUDA_MISCONCEPTIONS
from tests.flashlab.lessons.misconceptions import MISCONCEPTIONS, Misconception, steps_of
from tests.tiers import one_of_each


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_is_the_solution_without_the_marked_lines(name: str):
    exercise = EXERCISES[name]
    skeleton, solution = exercise.skeleton.splitlines(), exercise.solution.splitlines()
    marked = [line for line in exercise.marked.splitlines() if line.endswith(MARK)]
    assert marked
    assert MARK not in exercise.skeleton + exercise.solution
    rest = iter(solution)
    assert all(line in rest for line in skeleton)  # a subsequence: nothing else differs
    assert len(solution) == len(skeleton) + len(marked)
    compile(exercise.skeleton, name, "exec")


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_has_not_begun(name: str):
    assert fl.check(program_of(EXERCISES[name].skeleton), exercise=name).kind == "not started"


@pytest.mark.alike("00.1", "01.2", "03.1", "08.1")
@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name: str):
    verdict = fl.check(program_of(EXERCISES[name].solution), exercise=name)
    assert verdict.passed, repr(verdict)
    assert all(line.equal for line in verdict.budget) and verdict.budget


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 50), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes_whatever_is_drawn(name: str, seeds: range):
    """Numbers and bytes of fifty draws, here in this process: a check must not fail by bad luck."""
    exercise, program = EXERCISES[name], program_of(EXERCISES[name].solution)
    for seed in seeds:
        for case in exercise.cases(Random(seed)):
            result, budget = run(program, case), exercise.budget(case.problem, case.tile)
            truth = exercise.truth(case.problem, *case.arrays().values())
            for due in (truth, *truth.also):
                assert not due.wrong(result["arrays"][due.of]).any(), (seed, case, due.of)
            moved = {name: tuple(n) for name, n in result["tensors"].items() if any(n)}
            assert moved == dict(budget.tensors), (seed, case)
            assert result["matmul"] == budget.matmul
            assert result["exp"] >= budget.exp


@pytest.mark.parametrize("name", EXERCISES)
def test_problems_are_drawn_anew_and_some_are_ragged(name: str):
    first, second = (EXERCISES[name].cases(Random(seed)) for seed in (1, 2))
    assert first != second
    assert first[0].problem == second[0].problem  # the one that is shown
    assert any(case.problem.len_q % case.tile.rows for seed in range(5) for case in EXERCISES[name].cases(Random(seed)))


@pytest.mark.usefixtures("without_child")
@pytest.mark.alike("00.4", "02.1", "04.3", "09.1")
@pytest.mark.parametrize(
    "wrong", one_of_each(MISCONCEPTIONS, lambda wrong: wrong.exercise, lambda wrong: f"{wrong.exercise}-{wrong.name}")
)
def test_a_misconception_fails_and_is_told(wrong: Misconception, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        checking, "fresh", lambda: Random(0)
    )  # whatever is drawn, it fails; which tile is first may differ
    marked = EXERCISES[wrong.exercise].marked
    assert wrong.was in marked
    changed = program_of(marked.replace(wrong.was, wrong.becomes))
    verdict = fl.check(changed, exercise=wrong.exercise)
    assert verdict.kind == wrong.kind, repr(verdict)
    assert re.search(wrong.says, verdict.message), verdict.message
    assert re.search(wrong.why, f"{verdict.message} {verdict.tutor}"), verdict.tutor
    assert re.search(
        r"tile \d+|line \d+|^\w+ (read|written)|block\.(exp|matmul)", verdict.message
    )  # tensor, tile or line
    if verdict.kind in checking.TUTORED and not EXERCISES[wrong.exercise].cases(Random(0))[0].own_tile:
        assert verdict.step in ({wrong.at} if wrong.at else steps_of(marked, wrong.was)), verdict.tutor
        assert verdict.due is not None and verdict.tutor in repr(verdict)


def test_each_misconception_that_is_explained_has_the_reason_that_must_be_named():
    explained = [m for m in MISCONCEPTIONS if m.kind in (*checking.TUTORED, "sram")]
    assert not [(m.exercise, m.name) for m in explained if not m.why]
    no_more_than_what_is_wrong = [m for m in explained if m.why.endswith(" is .* and should be")]
    assert len(no_more_than_what_is_wrong) <= 0.12 * len(explained)


def test_each_exercise_has_three_misconceptions_of_different_names():
    assert len({(m.exercise, m.name) for m in MISCONCEPTIONS}) == len(MISCONCEPTIONS)
    assert min(Counter(m.exercise for m in MISCONCEPTIONS)[name] for name in EXERCISES) >= 3
    assert len(MISCONCEPTIONS) + len(CUDA_MISCONCEPTIONS) >= 120


def test_wrong_numbers_come_with_the_trace_of_the_head_at_fault():
    wrong = program_of(EXERCISES["01.3"].solution.replace("(e / e.sum().nonzero())", "e"))
    verdict = fl.check(wrong, exercise="01.3")
    assert verdict.trace is not None and verdict.due is not None
    assert verdict.trace.events[verdict.at - 1].step == verdict.step == "softmax"
    assert verdict.trace.head == (verdict.place.batch, verdict.place.head)
    assert [event.step for event in verdict.trace.events][:2] == ["scores", "softmax"]
    assert np.isfinite(verdict.trace.events[0].values["s"]).all()
    assert "<iframe" in verdict._repr_html_()
    assert "block.matmul" in "".join(text for _, text in verdict.trace.sources.values())


def test_a_solution_can_be_traced_with_its_lines():
    p = fl.Problem(batch=1, heads=1, len_q=32, head_dim=16, dtype="float16")
    trace = fl.simulate(fl.lessons.solution("04.1"), *fl.random_inputs(p), tile=(16, 16), trace=True).trace
    assert "alpha = block.exp" in "".join(text for _, text in trace.sources.values())
    assert fl.check(fl.lessons.solution("04.1"), exercise="04.1").passed
