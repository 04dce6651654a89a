# ruff: noqa: E501  (a table)
"""The exercise in Triton: refused in a line where Triton isn't, and judged by numbers, bytes and misuse where it is."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

import flashlab as fl
from flashlab.lessons import kernels, tritons
from flashlab.lessons.catalogue import TRITON_EXERCISES
from flashlab.lessons.lesson06_triton import LONGEST
from flashlab.lessons.lesson07 import measured
from flashlab.lessons.verdict import Verdict
from flashlab.triton import source

EXERCISE = TRITON_EXERCISES["06.4"]

MISCONCEPTIONS = [
    ("no-mask-behind-the-last-key", "        s = tl.where((key < len_kv)[None, :], s, float(\"-inf\"))  # solution\n", "", "numbers", r"out\[\d+, \d+, \d+\], in row tile 0"),
    ("loads-past-the-end", "tl.load(k + place, (key < len_kv)[:, None], 0.0)", "tl.load(k + place)", "out of bounds", r"my_flash2\.py:\d+, step load_k: out of bounds"),
    ("no-scale", ' * scale  # solution', '  # solution', "numbers", r"out\[0, 0, 0\]|out\[0, 0, \d+\]"),
    ("no-maximum", "tl.maximum(m, tl.max(s, 1))", "tl.zeros((ROWS,), tl.float32)", "numbers", r"out\[\d+, \d+, \d+\]"),
    ("maximum-of-the-whole-tile", "tl.max(s, 1)", "tl.max(s)", "numbers", r"out\[\d+, \d+, \d+\]"),
    ("output-is-not-rescaled", "acc * alpha[:, None], m_new", "acc, m_new", "numbers", r"out\[0, 0, \d+\]"),
    ("rescales-upside-down", "tl.exp(m - m_new)", "tl.exp(m_new - m)", "numbers", r"out\[0, 0, 0\], in row tile 0, is nan"),
    ("never-divides", "(acc / l[:, None])", "acc", "numbers", r"out\[0, 0, 0\]"),
    ("lse-in-base-2", "m + tl.log(l)", "m + tl.log2(l)", "numbers", r"lse\[0, 0\]"),
    ("k-of-the-first-head", "(head * len_kv + key)", "(key)", "numbers", r"out\[1, 0, 0\]"),
    ("stores-past-the-end", "m + tl.log(l), row < len_q)", "m + tl.log(l))", "out of bounds", r"my_flash2\.py:\d+, step store: out of bounds|race between blocks"),
    ("v-twice", "        v_j = tl.load(v + place, (key < len_kv)[:, None], 0.0)  # solution\n", "        v_j = tl.load(v + place, (key < len_kv)[:, None], 0.0)\n        v_j = tl.load(v + place, (key < len_kv)[:, None], 0.0)\n", "bytes", r"v read: you moved .*2 times the budget"),
    ("keeps-the-sum-of-the-last-tile", "l * alpha + tl.sum(p, 1)", "tl.sum(p, 1)", "numbers", r"out\[0, 0, 0\]"),
]  # fmt: skip


def written(folder: Path, text: str) -> Path:
    path = folder / EXERCISE.file
    path.write_text(text, encoding="utf-8")
    return path


def test_the_skeleton_is_the_solution_without_the_marked_lines(tmp_path: Path):
    rest = iter(EXERCISE.solution.splitlines())
    assert all(line in rest for line in EXERCISE.skeleton.splitlines())
    assert EXERCISE.mark not in EXERCISE.solution
    assert fl.check(written(tmp_path, EXERCISE.skeleton), exercise="06.4").kind == "not started"


def test_without_triton_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tritons, "find_spec", {}.get)
    verdict = fl.check(written(tmp_path, EXERCISE.solution), exercise="06.4")
    assert repr(verdict) == f"06.4  Not here: {tritons.HERE}"


@pytest.mark.parametrize(
    ("was", "becomes", "kind", "says"),
    [
        ("def my_flash2(", "def mine(", "missing kernel", r"expected a function my_flash2\(q, k, .*has mine"),
        ("len_q, len_kv, scale", "len_kv, len_q, scale", "parameters", r"my_flash2 takes \(q, k, .*; yours takes"),
        ("tiles = tl.cdiv(len_q, ROWS)", "tiles = ", "compile error", r"my_flash2\.py:8: invalid syntax"),
        (
            "    tiles = ",
            "    x = 0\n" * LONGEST + "    tiles = ",
            "asked",
            r"\d+ lines of code, and this asks for 50 at most",
        ),
    ],
)
def test_a_file_that_need_not_run_is_told_in_a_line(was: str, becomes: str, kind: str, says: str, tmp_path: Path):
    assert was in EXERCISE.solution
    verdict = fl.check(written(tmp_path, EXERCISE.solution.replace(was, becomes)), exercise="06.4")
    assert verdict.kind == kind and re.search(says, verdict.message), verdict


@pytest.mark.parametrize(("answer", "exercise"), [("mine.cu", "06.4"), ("mine.py", "06.1"), ("mine.py", "04.1")])
def test_an_answer_of_another_kind_is_told(answer: str, exercise: str):
    verdict = fl.check(answer, exercise=exercise)
    assert verdict.kind == "usage" and f"exercise {exercise} takes " in verdict.message


def test_the_claim_is_answered_by_what_was_measured():
    text = (Path(__file__).resolve().parents[3] / "notebooks" / "source" / "06_reading.md").read_text(encoding="utf-8")
    assert "It isn't merely within 2 ×: it is faster throughout." in text
    ratios = [row["ratio"] for row in measured()["triton"]["rows"] if row["peer"] == "sdpa-flash"]
    assert len(ratios) == 24 and min(ratios) > 1
    lines = source("flash2_triton").read_text(encoding="utf-8").splitlines()
    body = lines[lines.index("@triton.jit") :]
    assert len([line for line in body if line.strip() and not line.strip().startswith("#")]) < 50


# -- by Triton's interpreter --------------------------------------------------------------------------------------


def judged(text: str, folder: Path, seed: int = 0) -> Verdict:
    """The verdict on a text, run here in this process: of its first launch that fails, or of the last."""
    from flashlab.lessons import triton_child

    path, launches = written(folder, text), EXERCISE.launches(Random(seed))
    verdict = Verdict("06.4", "usage")
    for launch in launches:
        result = triton_child.run(path, EXERCISE.kernel, launch, 60)
        verdict = kernels.judge(EXERCISE, text, [launch], [result])
        if not verdict.passed:
            break
    return verdict


@pytest.mark.triton
def test_the_solution_passes(tmp_path: Path):
    verdict = fl.check(written(tmp_path, EXERCISE.solution), exercise="06.4")
    assert verdict.passed and all(line.equal for line in verdict.budget) and "by Triton's interpreter" in verdict.sram


@pytest.mark.triton
@pytest.mark.parametrize("seed", range(3))
def test_the_solution_passes_whatever_is_drawn(seed: int, tmp_path: Path):
    assert judged(EXERCISE.solution, tmp_path, seed).passed


@pytest.mark.triton
@pytest.mark.parametrize(("was", "becomes", "kind", "says"), [pytest.param(*x[1:], id=x[0]) for x in MISCONCEPTIONS])
def test_a_misconception_fails_and_is_told(was: str, becomes: str, kind: str, says: str, tmp_path: Path):
    assert was in EXERCISE.marked
    verdict = judged(EXERCISE.marked.replace(was, becomes), tmp_path)
    assert verdict.kind == kind and re.search(says, verdict.message), repr(verdict)


@pytest.mark.triton
def test_what_a_line_raises_is_told_with_its_line(tmp_path: Path):
    text = EXERCISE.solution.replace("tl.sum(p, 1)", "tl.summe(p, 1)")
    verdict = fl.check(written(tmp_path, text), exercise="06.4")
    line = next(n for n, each in enumerate(text.splitlines(), 1) if "summe" in each)
    assert verdict.kind == "crash" and f"my_flash2.py:{line}: AttributeError" in verdict.message, verdict
