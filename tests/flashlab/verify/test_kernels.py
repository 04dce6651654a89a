"""Kernels of `.cu` files: arguments and launches that follow from the problem, and findings that are failed checks."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import BuildError, Empty
from flashlab.verify import Case, run_case, verify
from flashlab.verify.expressions import array, calculated
from flashlab.verify.formats import github
from simulator.dtypes import Array
from tests.flashlab.cli.typed import document

SOURCE = Path(__file__).with_name("kernels.cu")
SIZES: Any = {"grid": "cdiv(len_q, 32), batch * heads", "block": 32}
DOMAIN: Any = {"dtype": "float32", "head_dim": (16, 64), "empty": False, "pairs": 1024}
P = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=9, len_kv=70, head_dim=16, dtype="float32", causal=True)


def rows(mistake: int = 0, **domain: Any) -> fl.Adapter:
    kernel = fl.kernel(SOURCE, f"rows<{mistake}>", **SIZES)
    return fl.Adapter(kernel, lse="e", domain=fl.Domain(**DOMAIN | domain))


# what text comes to


def test_expressions() -> None:
    p = P.replace(window=(3, None))
    for text, wanted in (
        ("cdiv(len_q, 4), 2 * heads", (3, 8)),
        ("len_q / 2", 4.5),
        ("len_kv / 2 - -1", 36),
        ("max(len_q, 5) % 4", 1),
        ("causal", True),
        ("window_left, window_right", (3, 0)),
        ("scale * log2(2)", 0.25),
        ("-inf", -math.inf),
    ):
        found = calculated("grid", text, p)
        assert found == wanted and type(found) is type(wanted), text
    assert array("O", "out", p, {"out": ((2, 3), "float16")}) == Empty((2, 3), "float16")
    zeros = array("O", "out:zeros", p, {"out": ((2, 3), "float16")})
    assert zeros.dtype == np.float16 and not zeros.any()
    assert array("m", "int32[heads, 3]:full(batch)", p, {}).tolist() == [[2] * 3] * 4
    assert array("n", "len_q + 1", p, {}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("len_k", "grid = 'len_k': expected one of batch, heads"),
        ("1 +", "grid = '1 +': expected numbers"),
        ("len_q.real", "not len_q.real"),
        ("__import__('os')", "grid = \"__import__('os')\": expected numbers"),
        ("1 / 0", "division by zero"),
        ("cdiv(1)", "missing 1 required positional"),
    ],
)
def test_bad_expressions(text: str, message: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(message)):
        calculated("grid", text, P)


# a right kernel


@pytest.mark.long
@pytest.mark.compiler
def test_a_right_kernel_passes_sixty_checks() -> None:
    """Nothing is said of its arguments: each has a usual name. Every mask that it has a parameter for is checked."""
    report = verify(rows(), examples=20)
    assert report.verdict == "passed", report
    assert (
        report.counts["passed"] >= 60
        and report.backend == "emulator"
        and report.never_ran == ["window", "mask", "lengths"]
    )
    assert "pairs 1024" in report.domain and report.target == "kernels.cu:rows<0>"


@pytest.mark.compiler
def test_a_kernel_is_a_function_with_counts() -> None:
    kernel: Any = rows().fn
    q, k, v = fl.random_inputs(P, seed=0)
    assert np.allclose(kernel(q, k, v, causal=True), fl.naive(q, k, v, causal=True).out, atol=1e-5)
    with pytest.raises(fl.UsageError, match="k.shape"):
        kernel(q, k[..., :8], v)
    run = kernel.run(P, q, k, v)
    assert run.passed and run.launched.total("hbm.write") == 4 * P.batch * P.heads * P.len_q * (P.head_dim + 1)
    assert kernel.run(P).arrays["Q"].shape == q.shape, "random inputs where none are given"


@pytest.mark.compiler
@pytest.mark.long
def test_arguments_of_other_names_and_layouts() -> None:
    """Operands and expressions by name, a template's own head dim, and arrays that a function makes."""

    def paged(p: fl.Problem, q: Array, k: Array, v: Array) -> dict[str, Any]:
        if p.len_kv == 97:
            raise NotImplementedError("97 keys")
        kv = np.stack([x.swapaxes(1, 2) if layout == "bshd" else x for x in (k, v)], axis=3)
        return {"dst": "out", "x": q, "cache": kv, "tokens": p.len_kv, "log2_scale": "scale * log2(2.718281828459045)"}

    one = fl.Domain(
        dtype="float16", head_dim=(32, 64), len_q=1, len_kv=range(1, 257), groups=1, masks="scale", pairs=512
    )
    for layout, check in (("bhsd", "batch"), ("bshd", "rule")):
        said: Any = {"arguments": paged, "grid": lambda p: p.batch * p.heads, "block": "head_dim"}
        kernel = fl.kernel(SOURCE, "decode<{head_dim}>", **said)
        report = verify(fl.Adapter(kernel, layout=layout, domain=one), checks=[check])
        assert report.passed, report
    assert "NotImplementedError: 97 keys" in {row.detail for row in report.rows if row.status == "not run"}
    assert kernel.source() is None, "a local function can't be named"
    small = P.replace(dtype="float16", len_q=1, kv_heads=4, causal=False, head_dim=32)
    assert run_case(fl.Adapter(kernel, layout="bshd"), Case(problem=small)).status == "passed"


# findings


@pytest.mark.alike(1)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("mistake", "said", "line"),
    [
        (2, "out of bounds: thread 8 of block (0, 11, 0) reads 4 bytes: 4 bytes past the end of Q", "return x[i]"),
        (3, "race", "row[threadIdx.x"),
        (4, "out: 24,192 bytes were never written", "template <int MISTAKE>"),
    ],
    ids=["out-of-bounds", "race", "unwritten"],
)
def test_findings_are_failed_checks_with_their_lines(mistake: int, said: str, line: str) -> None:
    """The line is the innermost. What was never written has none: the kernel's own stands for it."""
    report = verify(rows(mistake), checks=["batch"], examples=0)
    row, *_ = report.failed
    assert said in row.detail and (row.place is None) == (mistake == 4)
    file, number = row.place or report.place or ("", 0)
    assert line in Path(file).read_text().splitlines()[number - 1]
    assert f"kernels.cu,line={number},title=flashlab verify%3A batch" in github(report)


@pytest.mark.compiler
def test_a_mistake_is_named_and_the_program_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = verify(rows(1), checks=["rule"], examples=20)
    assert report.failing and "aligned top-left" in report.failing.likely
    printed = io.StringIO()
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(printed):
        exec(report.failing.python, {})
    assert "status='failed'" in printed.getvalue() and "off by" in printed.getvalue()


# bad input


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "rows<7"}, "doesn't compile|can be reached|rows<7"),
        ({"grid": "len"}, "grid = 'len': expected one of batch"),
        ({"arguments": {"Q": "k", "nope": 1}}, "argument = 'nope': expected one of Q, K, V"),
        ({"arguments": {"head_dim": "float32[4]"}}, "head_dim = "),
        ({"arguments": {"out": "float32[3]"}}, "out = array of float32, .3,.: expected as many elements as out has"),
        ({"name": "", "file": "."}, "a CUDA source that can be read"),
        ({"name": ""}, "name = None: expected one of kernels.cu's: rows, decode"),
    ],
)
def test_bad_input_is_one_line_and_no_verdict(change: dict[str, Any], message: str) -> None:
    launch: dict[str, Any] = {"file": SOURCE, "name": "rows<0>", **SIZES, **change}
    with pytest.raises((fl.UsageError, BuildError), match=message):
        verify(fl.Adapter(fl.kernel(**launch), domain=fl.Domain(**DOMAIN | {"head_dim": 64})), checks=["batch"])


@pytest.mark.compiler
def test_a_target_by_name() -> None:
    with pytest.raises(fl.UsageError, match="grid = None: expected blocks per grid"):
        verify(f"{SOURCE}:rows<0>", dtypes=["float32"])
    with pytest.raises(fl.UsageError, match="dtypes = None: expected the kernel's"):
        verify(f"{SOURCE}:rows<0>", **SIZES)
    with pytest.raises(fl.UsageError, match="grid, block = .*expected nothing: only a .cu file is launched"):
        verify("flash2", **SIZES)


@pytest.mark.compiler
def test_a_target_by_name_is_verified() -> None:
    report = verify(f"{SOURCE}:rows<0>", **SIZES, dtypes=["float32"], checks=["odd_scale"])
    assert report.verdict == "passed, LSE unchecked" and report.place is not None
    assert "template <int MISTAKE>" in SOURCE.read_text().splitlines()[report.place[1] - 1]


@pytest.mark.compiler
def test_the_command_line_says_it_all(tmp_path: Path) -> None:
    """Macros, headers and a standard for the compiler; arguments and a launch for the kernel."""
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "mine.h").write_text("#define HALF 0.5f\n")
    source = tmp_path / "mean.cu"
    source.write_text(
        '#include "mine.h"\n'
        "template <typename T> concept Real = sizeof(T) == 4;\n"
        "template <Real T> __global__ void pair(const T* first, T* y, int size) {\n"
        "  y[blockIdx.x * size + threadIdx.x] = WEIGHT * HALF * first[threadIdx.x];\n}\n"
    )
    words = ["verify", f"{source}:pair<float>", "--grid", "batch*heads", "--block", "head_dim", "-D", "WEIGHT=1"]
    words += [
        "-I",
        tmp_path / "headers",
        "--std",
        "c++20",
        "--arg",
        "first=v",
        "--arg",
        "y=out",
        "--arg",
        "size=head_dim",
    ]
    words += ["--dtype", "float32", "--head-dims", "32", "--queries", "1", "--groups", "1", "--pairs", "64"]
    report = document(*words, "--check", "determinism")
    assert report["verdict"] == "passed, LSE unchecked" and report["target"] == "mean.cu:pair<float>"
    assert document(*words, "--check", "batch", "--examples", "0", code=1)["verdict"] == "failed"


def test_a_name_is_text() -> None:
    for name in (np.zeros((2, 2)), 5, b"x"):
        with pytest.raises(fl.UsageError, match=r"^name = .*: expected a kernel's name, or None"):
            fl.kernel(SOURCE, name)  # pyright: ignore[reportArgumentType]
