"""No wrong answer passes, whatever is drawn. Most of them were written before anybody looked at the checks."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from flashlab.lessons import kernel_child, kernels
from flashlab.lessons.catalogue import EXERCISES, KERNEL_EXERCISES
from tests.flashlab.lessons.answers import verdict_here
from tests.flashlab.lessons.wrong_answers import WRONG_ANSWERS, WrongAnswer
from tests.tiers import those_in

HOLES = [
    WrongAnswer("00.2", "(centred * centred).sum() / q.cols", "(x * x).sum() / q.cols - mean * mean"),
    WrongAnswer("01.1", "scale=problem.scale", "scale=q.cols**-0.5"),
    WrongAnswer("01.2", "x.max().finite()", "x.max().T.max().finite()"),
    WrongAnswer("02.1", 'float("-inf")', "-1e4"),
    WrongAnswer("03.3", "(4 * problem.head_dim) // 16 * 16", "(4 * problem.head_dim) // 8 * 8"),
    WrongAnswer("04.1", 'float("-inf")', "-1e4"),
    WrongAnswer("04.2", "last_key // tile.cols + 1", "-(-last_key // tile.cols)"),
    WrongAnswer("08.3", "block.walk[0]", "0"),
    WrongAnswer("09.1", "np.abs, x).max().nonzero()", "np.abs, x).nonzero().max()"),
    WrongAnswer("10.1", "len_kv - len_q + 1;", "len_kv - len_q;"),
]
"""What once passed, one of each kind: these run in each `make test`."""
TILE, CUDA = ([w for w in WRONG_ANSWERS if w.exercise in posed] for posed in (EXERCISES, KERNEL_EXERCISES))


def named(wrong: WrongAnswer) -> str:
    return f"{wrong.exercise}-{WRONG_ANSWERS.index(wrong)}"


def test_there_are_150_and_some_of_each_exercise():
    assert len(set(WRONG_ANSWERS)) == len(WRONG_ANSWERS) >= 150
    assert {w.exercise for w in WRONG_ANSWERS} == {*EXERCISES, *KERNEL_EXERCISES}
    assert set(HOLES) <= set(WRONG_ANSWERS)


@pytest.mark.parametrize("wrong", those_in(HOLES, TILE, named))
def test_a_wrong_program_does_not_pass(wrong: WrongAnswer, tmp_path: Path):
    exercise = EXERCISES[wrong.exercise]
    assert wrong.was in exercise.solution
    for seed in range(3):
        text = exercise.solution.replace(wrong.was, wrong.becomes)
        assert not verdict_here(text, exercise, exercise.cases(Random(seed)), tmp_path).passed, seed


@pytest.mark.compiler
@pytest.mark.parametrize("wrong", those_in(HOLES, CUDA, named))
def test_a_wrong_kernel_does_not_pass(wrong: WrongAnswer, tmp_path: Path):
    exercise = KERNEL_EXERCISES[wrong.exercise]
    assert wrong.was in exercise.solution
    path, text = tmp_path / exercise.file, exercise.solution.replace(wrong.was, wrong.becomes)
    path.write_text(text, encoding="utf-8")
    for seed in range(2):
        launches, results = exercise.launches(Random(seed)), list[dict[str, Any]]()
        for launch in launches:
            results.append(kernel_child.run(path, exercise.kernel, launch, 240))
            if not kernels.judge(exercise, text, launches, results).passed:
                break
        else:
            pytest.fail(f"passed, seed {seed}")
