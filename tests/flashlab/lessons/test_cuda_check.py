"""`fl.check` of a `.cu` file: a verdict for everything that may be in it, in one line, and no exception."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
from flashlab.lessons import kernel_child, kernels, record
from flashlab.lessons.catalogue import KERNEL_EXERCISES
from simulator.errors import Unavailable
from tests.flashlab.lessons.answers import program_of

SOLUTION = KERNEL_EXERCISES["05.1"].solution
HEAD = "__global__ void axpy(const float* x, const float* y, float* out, float a, int n) {"
LINE = "    out[i] = a * x[i] + y[i];\n"

compiler = pytest.mark.compiler
Judge = Callable[..., Any]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    def of(was: str = "", becomes: str = "", seconds: float = 20.0, head: str = "") -> Any:
        assert was in SOLUTION
        path = tmp_path / "mine.cu"
        path.write_text(head + (SOLUTION.replace(was, becomes) if was else becomes), encoding="utf-8")
        verdict = fl.check(path, exercise="05.1", seconds=seconds)
        assert "\n" not in verdict.message
        return verdict

    return of


@compiler
def test_a_loop_without_end_is_a_hang_and_its_line_is_named(judged: Judge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "PATIENCE", 10_000)  # a busy machine is no reason to fail
    verdict = judged(LINE, "    while (y[i] == y[i]) {\n    }\n", seconds=1)
    assert verdict.kind == "hang"
    assert "mine.cu:7" in verdict.message and "still running" in verdict.message
    assert "while" in verdict.message and "more seconds=" in verdict.afterwards


@compiler
def test_what_only_the_clock_has_ended_is_told_as_that(judged: Judge):
    verdict = judged(LINE, "    sleep(60);\n", seconds=0.3, head="#include <unistd.h>\n")
    assert verdict.kind == "no end"
    assert "mine.cu: no end within 1.2 seconds: a slow or busy machine, or a loop without end" in verdict.message


@compiler
def test_a_compile_error_names_line_and_reason(judged: Judge):
    verdict = judged("a * x[i]", "b * x[i]")
    assert verdict.kind == "compile error"
    assert verdict.message.startswith("mine.cu:7") and "was not declared" in verdict.message


@compiler
def test_inline_ptx_is_told(judged: Judge):
    verdict = judged(LINE, '    asm("no.such.instruction;");\n')
    assert verdict.kind == "misuse" and "no.such.instruction" in verdict.message


@compiler
def test_a_crash_of_the_kernel_is_a_finding_with_its_line(judged: Judge):
    verdict = judged(LINE, "    out[i] = *reinterpret_cast<const float*>(8) + i;\n")
    assert verdict.kind in ("misuse", "out of bounds")
    assert "mine.cu:7" in verdict.message and "reinterpret_cast" in verdict.message


@pytest.mark.parametrize(
    ("text", "says"),
    [("// nothing\n", "mine.cu has no __global__ function"), (SOLUTION.replace("axpy", "saxpy"), "mine.cu has saxpy")],
)
def test_a_missing_kernel(judged: Judge, text: str, says: str):
    verdict = judged(becomes=text)
    assert verdict.kind == "missing kernel"
    assert "expected __global__ void axpy(const float* x" in verdict.message and says in verdict.message


@pytest.mark.parametrize(
    "wrong",
    [
        "const float* x, const float* y, float* out, int n",
        "const float* x, const float* y, float* out, float a, float n",
        "float* x, const float* y, float* out, float a, int n",
        "const float* y, const float* x, float* out, float a, int n",
        "const double* x, const float* y, float* out, float a, int n",
        "",
    ],
)
def test_a_wrong_parameter_list(judged: Judge, wrong: str):
    verdict = judged(HEAD, HEAD.replace("const float* x, const float* y, float* out, float a, int n", wrong))
    assert verdict.kind == "parameters"
    assert "axpy takes (const float* x, const float* y, float* out, float a, int n); yours takes" in verdict.message


@pytest.mark.parametrize("cast", ["(float4)x[i]", "(float4)(x[i] + y[i])", "(double2) a"])
def test_a_cast_of_one_number_to_a_vector_is_refused_as_nvcc_does(judged: Judge, cast: str):
    verdict = judged("a * x[i] + y[i]", f"2 + {cast}.x")
    assert verdict.kind == "compile error"
    assert re.match(r"mine.cu:7: error: \(\w+\) is no cast of one number: make_\w+\(…\) makes a", verdict.message)


@pytest.mark.parametrize(
    "sound", ["sizeof(float4) * n", "(float4){1, 2, 3, 4}.x", "f(float4) (x)", "(float)n", "// (float4)x[i]"]
)
def test_what_looks_like_a_cast_to_a_vector_is_none(sound: str):
    assert kernels._cast_to_a_vector(f"int a = 0;\nfloat b = {sound};\n") is None  # pyright: ignore[reportPrivateUsage]


@compiler
@pytest.mark.parametrize("same", ["float const *x,", "const float *__restrict__ x,"])
def test_the_same_parameters_in_another_spelling_pass(judged: Judge, same: str):
    assert judged("const float* x,", same).passed


@compiler
def test_every_finding_is_shown_with_its_line(judged: Judge):
    verdict = judged("  if (i < n)\n    out", "  if (i >= n) out[0] = 1;\n  out")
    shown = repr(verdict)
    assert verdict.kind == "misuse" or verdict.kind == "out of bounds"
    assert verdict.findings
    assert all("mine.cu:" in line and "  |  " in line for line in (verdict.message, *verdict.findings))
    assert all(line in shown for line in verdict.findings)


@compiler
def test_progress_is_kept(judged: Judge):
    assert judged("a * x[i] + y[i]", "a * x[i] + y[i] + 0").passed
    assert record.read()["exercises"]["05.1"] == {"passed": True, "tries": 1}
    (line,) = (line for line in str(fl.progress()).splitlines() if line.startswith("05"))
    assert "exercises 1 of" in line


def test_what_is_no_file_and_what_is_no_program(tmp_path: Path):
    assert "there is none of this name" in fl.check(tmp_path / "none.cu", exercise="05.1").message
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe\x00")
    assert fl.check(tmp_path / "binary.cu", exercise="05.1").kind == "usage"
    own = program_of("@fl.program\ndef mine(m, q, k, v, problem, tile):\n    return m.output('out')\n")
    assert (
        'takes the name of a .cu file, as in fl.check("mine.cu", exercise="05.1")'
        in fl.check(own, exercise="05.1").message
    )
    assert fl.check(tmp_path / "none.cu", exercise="00.1").message == "exercise 00.1 takes a tile program"
    assert "expected one of" in fl.check(tmp_path / "none.cu", exercise="05.99").message


@compiler
def test_the_last_round_of_two_buffers_is_explained(tmp_path: Path):
    """The newest group is then tile j itself, where a learner thinks of tile j + 1."""
    path = tmp_path / "column_sums.cu"
    text = KERNEL_EXERCISES["06.3"].solution
    assert " else copy_commit();" in text
    path.write_text(text.replace(" else copy_commit();", ""), encoding="utf-8")
    verdict = fl.check(path, exercise="06.3")
    assert verdict.kind == "misuse" and "wait forgotten" in verdict.message
    assert "In the last round nothing is left to load" in repr(verdict)


def test_without_a_compiler_a_line_says_so(judged: Judge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    verdict = judged("a * x[i]", "x[i] * a")
    assert verdict.kind == "unavailable"
    assert "compiler" in verdict.message
    assert Unavailable.__name__ not in verdict.message


def test_numbers_from_a_gpu_without_a_compiler_say_what_is_unchecked():
    exercise = KERNEL_EXERCISES["05.1"]
    launch = exercise.launches(kernels.fresh())[0]
    out = launch.truth["out"].out
    result: dict[str, Any] = {"moved": None, "findings": [], "unwritten": {}, "where": "gpu", "arrays": {"out": out}}
    verdict = kernels.judge(exercise, SOLUTION, [launch], [result])
    assert verdict.passed and "bytes and misuse unchecked" in repr(verdict)
    result["arrays"] = {"out": out + 1}
    assert kernels.judge(exercise, SOLUTION, [launch], [result]).kind == "numbers"


def test_a_gpu_s_compile_error_names_the_line_not_a_made_up_file():
    class CompileException(Exception):  # as CuPy's is called
        pass

    log = 'dbd9294c65f6.cubin.cu(7): error: identifier "b" is undefined\n\n1 error detected'
    told = kernel_child.explain(CompileException(log))
    assert told == {"kind": "compile error", "message": 'line (7): error: identifier "b" is undefined'}
