"""Each exercise in CUDA: skeleton = solution minus marked lines, the solution passes, misconceptions fail and are told."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

import flashlab as fl
from flashlab.base.process import Outcome
from flashlab.emulator import Empty
from flashlab.lessons import kernel_child, kernels
from flashlab.lessons.catalogue import KERNEL_EXERCISES
from flashlab.lessons.kernel_exercise import MARK, Launch
from tests.flashlab.lessons.cuda_misconceptions import MISCONCEPTIONS
from tests.flashlab.lessons.misconceptions import Misconception
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

PATIENCE = 240.0
"""Seconds that a check may take here: none of these kernels hangs, and a busy machine is no misconception."""


@pytest.fixture
def without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check runs in this process: a child takes a second to begin. test_cuda_check.py is about children."""

    def run_here(folder: Path, *_: object) -> Outcome:
        kernel_child.main(folder)
        return Outcome("done", "", "")

    monkeypatch.setattr(kernels, "run_child", run_here)
    monkeypatch.setattr(kernel_child, "_limit", lambda _: None)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / KERNEL_EXERCISES[name].file
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_the_skeleton_is_the_solution_without_the_marked_lines(name: str):
    exercise = KERNEL_EXERCISES[name]
    skeleton, solution = exercise.skeleton.splitlines(), exercise.solution.splitlines()
    marked = [line for line in exercise.marked.splitlines() if line.endswith(MARK)]
    assert marked
    assert MARK not in exercise.skeleton + exercise.solution
    rest = iter(solution)
    assert all(line in rest for line in skeleton)  # a subsequence: nothing else differs
    assert len(solution) == len(skeleton) + len(marked)
    assert re.search(rf"__global__ void {exercise.kernel}\(", exercise.skeleton)


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_the_skeleton_has_not_begun(name: str, tmp_path: Path):
    assert fl.check(written(tmp_path, name, KERNEL_EXERCISES[name].skeleton), exercise=name).kind == "not started"


@pytest.mark.alike("05.1", "06.2", "07.3", "10.1")
@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_the_solution_passes(name: str, tmp_path: Path):
    path = written(tmp_path, name, KERNEL_EXERCISES[name].solution)
    for _ in range(2):
        verdict = fl.check(path, exercise=name, seconds=PATIENCE)
        assert verdict.passed, repr(verdict)
        assert all(line.equal for line in verdict.budget) and verdict.budget


@pytest.mark.alike("05.2", "05.3", "05.4", "05.5", "06.1", "06.3", "07.1", "07.2")
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 10), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_the_solution_passes_whatever_is_drawn(name: str, seeds: range, tmp_path: Path):
    """Ten draws, emulated here in this process: a check must not fail by bad luck."""
    exercise = KERNEL_EXERCISES[name]
    path = written(tmp_path, name, exercise.solution)
    for seed in seeds:
        launches = exercise.launches(Random(seed))
        results = [kernel_child.run(path, exercise.kernel, launch, PATIENCE) for launch in launches]
        verdict = kernels.judge(exercise, exercise.solution, launches, results)
        assert verdict.passed, (seed, repr(verdict))


@pytest.mark.usefixtures("without_child")
@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("name", "was", "becomes"),
    [
        pytest.param("05.1", "if (i < n)\n", "if (i >= n) return;\n", marks=pytest.mark.long),
        ("05.3", "for (int mask = 16; mask > 0; mask /= 2) sum", "for (int mask = 1; mask < 32; mask *= 2) sum"),
        pytest.param("05.5", "acc[d] / l;", "acc[d] * (1 / l);", marks=pytest.mark.long),
        ("06.2", "(chunk ^ row % 8)", "(chunk + row) % CHUNKS"),
        pytest.param(
            "06.3", "if (j + 1 < tiles) load(j + 1); else copy_commit();", "load(j + 1);", marks=pytest.mark.long
        ),
        ("07.1", "tile[32][33]", "tile[32][37]"),
    ],
)
def test_another_right_answer_passes(name: str, was: str, becomes: str, tmp_path: Path):
    assert was in KERNEL_EXERCISES[name].solution
    path = written(tmp_path, name, KERNEL_EXERCISES[name].solution.replace(was, becomes))
    verdict = fl.check(path, exercise=name, seconds=PATIENCE)
    assert verdict.passed, repr(verdict)


@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_launches_are_drawn_anew_and_the_first_is_the_same(name: str):
    first, second = (KERNEL_EXERCISES[name].launches(Random(seed)) for seed in (1, 2))
    assert [x.said for x in first] != [x.said for x in second]
    assert first[0].said == second[0].said
    assert any(any(size % launch.block[0] for size in shape_of(launch)) for launch in first)  # ragged


def shape_of(launch: Launch) -> list[int]:
    """The sizes of everything, but of the last axis, which may be a fixed one."""
    arrays = [value for value in launch.arguments.values() if isinstance(value, Empty | np.ndarray)]
    return [n for value in arrays for n in (value.shape[:-1] or value.shape)]


@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_arguments_are_the_kernel_s_parameters(name: str):
    exercise = KERNEL_EXERCISES[name]
    for launch in exercise.launches(Random(0)):
        assert list(launch.arguments) == [part.split()[-1].strip("*") for part in exercise.parameters.split(",")]
        for part, value in zip(exercise.parameters.split(","), launch.arguments.values(), strict=True):
            kinds = {"int": np.int32, "float": np.float32}
            assert ("*" in part) == isinstance(value, np.ndarray | Empty)
            assert "*" in part or isinstance(value, kinds[part.split()[0]])
        filled = {n for n, value in launch.arguments.items() if isinstance(value, Empty)}
        counters = {n for n in launch.truth if isinstance(launch.arguments[n], np.ndarray)}  # they end as they began
        assert set(launch.truth) == filled | counters


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    "wrong",
    one_of_each(MISCONCEPTIONS, lambda wrong: wrong.exercise[:2], lambda wrong: f"{wrong.exercise}-{wrong.name}"),
)
def test_a_misconception_fails_and_is_told(wrong: Misconception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "fresh", lambda: Random(0))
    monkeypatch.setattr(kernels, "TUTORED", ())  # test_kernel_tutor.py has the tutor
    marked = KERNEL_EXERCISES[wrong.exercise].marked
    assert wrong.was in marked
    path = written(tmp_path, wrong.exercise, marked.replace(wrong.was, wrong.becomes))
    verdict = fl.check(path, exercise=wrong.exercise, seconds=PATIENCE)
    assert verdict.kind == wrong.kind, repr(verdict)
    assert re.search(wrong.says, verdict.message), verdict.message
    assert "\n" not in verdict.message
    assert re.search(r"tile \d+|\.cu:\d+|^\w+ (read|written|shuffled)|^mma", verdict.message)  # tensor, tile or line


def test_each_exercise_has_three_misconceptions_of_different_names():
    assert len({(m.exercise, m.name) for m in MISCONCEPTIONS}) == len(MISCONCEPTIONS)
    assert min(Counter(m.exercise for m in MISCONCEPTIONS)[name] for name in KERNEL_EXERCISES) >= 3
