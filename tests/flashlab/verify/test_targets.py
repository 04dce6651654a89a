"""What `verify` takes, what it says of it, and how it says it."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import OUTSIDERS, Case, Report, run_case, verify
from flashlab.verify.memory import FRAMES, frame_named, place
from tests.flashlab.verify.candidates import Array, attention
from tests.tiers import one_of_each

ALGORITHMS = list(fl.catalogue.of())


OURS = [(name, dtype) for name in reversed(ALGORITHMS) for dtype in fl.CATALOGUE[name].dtypes]


@pytest.mark.long
@pytest.mark.parametrize("case", one_of_each(OURS, lambda case: fl.CATALOGUE[case[0]].dtypes, "-".join))
def test_our_algorithms_pass_on_the_simulator(case: tuple[str, str]) -> None:
    algorithm, dtype = case
    report = fl.verify(algorithm, dtypes=[dtype])
    assert report.verdict == "passed", report.failed[:3]


@pytest.mark.long
def test_a_verification_that_isnt_full_is_little_work() -> None:
    """Calls of the kernel in one dtype, and the scores that they ask for: it must stay a matter of seconds."""
    asked: list[int] = []

    def counted(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
        asked.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return attention(q, k, v, **options)

    every = {name: name for name in ("soft_cap", "sinks")} | {"alibi": "alibi_slopes"}
    assert verify(fl.Adapter(counted, lse="e", names=every), dtypes=["float32"]).passed
    assert len(asked) <= 550 and sum(asked) <= 25e6 and max(asked) <= 1.5e6, (len(asked), sum(asked), max(asked))


def test_a_program_of_ones_own_is_verified() -> None:
    @fl.program
    def first_value(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("first_value", rows=problem.row_tiles(tile), warps=4):
            block.step("all")
            block.store(out, block.fetch(v, 0, 1) + block.full(tile.rows, v.cols, 0.0), block.i, tile.rows)
        return out

    report = fl.verify(first_value, checks=["rule"], dtypes=["float16"])
    assert report.verdict == "failed" and report.target == "first_value"
    assert {row.case for row in report.rows if row.status == "passed"} >= {"one key"}
    assert report.failing and "target = ..." in report.failing.python


def test_without_an_lse_it_is_never_plainly_passed() -> None:
    report = verify(
        fl.Adapter(lambda q, k, v, scale=None, causal=False: attention(q, k, v, scale=scale, causal=causal)[0]),
        dtypes=["float32"],
        examples=20,
    )
    assert report.passed and report.verdict == "passed, LSE unchecked"
    assert report.to_dict()["verdict"] == "passed, LSE unchecked" and "passed, LSE unchecked" in report.to_markdown()


def test_other_conventions_are_no_bugs() -> None:
    def other(q: Array, k: Array, v: Array, is_causal: bool, softmax_scale: float) -> tuple[Array, Array]:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        window = None
        if is_causal:  # top-left: query i sees the keys 0..i
            k, v = (x[:, :, : q.shape[2]] for x in (k, v))
            window = (None, max(0, q.shape[2] - k.shape[2]))
        out, lse = attention(q, k, v, scale=softmax_scale, window=window)
        return out.swapaxes(1, 2), np.where(np.isneginf(lse), np.inf, lse / np.log(2)).astype(np.float32)

    good = fl.Adapter(other, layout="bshd", causal="top-left", lse="2", empty_lse=math.inf)
    report = verify(good, dtypes=["float16"], examples=30)
    assert report.verdict == "passed", report.failed[:3]
    assert any(row.status == "not run" and "window" in row.detail for row in report.rows)
    for wrong in ({"causal": "bottom-right"}, {"lse": "e"}, {"layout": "bhsd"}):
        conventions = {"layout": "bshd", "causal": "top-left", "lse": "2", "empty_lse": math.inf} | wrong
        assert verify(fl.Adapter(other, **conventions), dtypes=["float16"], checks=["key_sets"]).verdict == "failed", (
            wrong
        )  # pyright: ignore


def test_what_is_not_supported_is_not_run() -> None:
    def strict(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("no GQA")
        return attention(q, k, v, scale=scale)

    report = verify(fl.Adapter(strict, lse="e"), dtypes=["float16"], examples=50)
    assert report.verdict == "passed" and {"causal", "window"} <= set(report.never_ran)
    reasons = {row.detail for row in report.rows if row.status == "not run"}
    assert {"the function takes no causal", "the function takes no window"} <= reasons
    assert any(reason.startswith("NotImplementedError: no GQA") for reason in reasons)
    assert any(row.check == "memory" and row.status == "passed" for row in report.rows)


def test_the_adapter_says_what_is_supported() -> None:
    eights = fl.Adapter(attention, supports=lambda p: None if p.head_dim % 8 == 0 else "head dims in eights")
    report = verify(eights, dtypes=["float16"], checks=["memory"])
    assert {row.detail for row in report.rows if row.status == "not run"} == {"head dims in eights"}


@pytest.mark.parametrize("no", [False, np.bool_(False), 0])
def test_whatever_is_false_is_a_no(no: Any) -> None:
    assert (
        verify(fl.Adapter(attention, supports=lambda _: no), dtypes=["float16"], checks=["memory"]).verdict
        == "nothing run"
    )


def test_a_kernel_that_is_wrong_now_and_then() -> None:
    """A race: the report says how often the smallest failing case fails, and the search ends."""
    calls = itertools.count(1)

    def now_and_then(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return attention(q, k, v, causal=causal)[0] * (1.5 if next(calls) % 7 == 0 else 1)

    report = verify(now_and_then, dtypes=["float16"], checks=["rule", "search"], examples=20)
    assert report.verdict == "failed" and report.failing is not None
    assert re.search("; run 10 times more, the same case failed [12] times$", report.failing.message)


def test_a_crash_is_a_failure() -> None:
    def crashes(q: Array, k: Array, v: Array, **_: Any) -> Array:
        raise RuntimeError("illegal\nmemory access")

    report = verify(crashes, checks=["determinism"], dtypes=["float16"])
    assert report.verdict == "failed" and report.failed[0].detail == "raised RuntimeError: illegal memory access"


def test_nothing_run_is_not_passed() -> None:
    report = verify(fl.Adapter(attention, supports=lambda p: False), checks=["rule"], dtypes=["float16"])
    assert report.verdict == "nothing run" and not report.passed


def test_a_function_is_named_by_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel_under_test.py").write_text(
        "import numpy as np\ndef attention(q, k, v): return np.zeros_like(q)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    report = verify("kernel_under_test:attention", dtypes=["float32"], checks=["rule", "search"])
    assert report.verdict == "failed" and report.failing
    row = _run(report.failing.python)
    assert row.startswith("Row(check='rule'") and "failed" in row
    sys.modules.pop("kernel_under_test")


def test_the_smallest_failing_case_is_a_program() -> None:
    report = verify("flash2", checks=["rule"], dtypes=["float16"], tile=(16, 16))
    assert report.failing is None
    case = Case(problem=fl.Problem(batch=1, heads=1, len_q=5, head_dim=16, dtype="float16"))
    assert run_case("flash2", case, tile=(16, 16)).status == "passed"


def _run(source: str) -> str:
    out = io.StringIO()
    exec(source, {"print": lambda x: out.write(repr(x))})
    return out.getvalue()


def report_of(**changes: Any) -> Report:
    return verify("flash2", dtypes=["float16"], checks=["key_sets", "gqa"], **changes)


def test_the_report_as_data_is_json() -> None:
    data = json.loads(json.dumps(report_of().to_dict(), allow_nan=False))
    assert data["schema"] == 1 and data["passed"] and data["lse_checked"] and len(data["rows"]) == 17
    assert data["counts"] == {"passed": 17, "failed": 0, "not run": 0}


def test_an_infinite_error_is_json_too() -> None:
    report = verify(lambda q, k, v: q * np.nan, checks=["rule"], dtypes=["float16"], examples=0)
    assert "inf" in json.dumps(report.to_dict(), allow_nan=False) or report.failed


def test_the_report_prints() -> None:
    out = io.StringIO()
    report_of().print(out)
    assert re.search(r"key_sets\W+13\W+0\W+0", out.getvalue()) and "flash2 on simulator: passed" in out.getvalue()


def test_rows_are_heard_of() -> None:
    heard: list[Any] = []
    report = report_of(on_row=heard.append)
    assert heard == list(report.rows)


def test_the_same_seed_the_same_report() -> None:
    def plain(report: Report) -> Any:
        return [(row.case, row.problem, row.worst) for row in report.rows]

    once, again = (verify("flash2", dtypes=["float32"], checks=["rule", "search"], seed=7, examples=10) for _ in "ab")
    assert plain(once) == plain(again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "flash9"}, "did you mean flash"),
        ({"target": "flash2", "backend": "cuda"}, "backend = 'cuda'"),
        ({"target": "flash2", "checks": ["key_set"]}, "did you mean key_sets"),
        ({"target": "flash2", "dtypes": ["fp16"]}, "dtypes = 'fp16'"),
        ({"target": "flash2", "dtypes": []}, "at least one"),
        ({"target": "no_such_package:attention"}, "package:function"),
        ({"target": "math:no_such_function"}, "package:function"),
        ({"target": attention, "framework": "tensorflow"}, "framework = 'tensorflow'"),
        ({"target": fl.program(lambda m, q, k, v, problem, tile: None), "backend": "gpu"}, "backend = 'gpu'"),
        ({"target": "flash2", "device": "h1000"}, "device = 'h1000'"),
        ({"target": "flash2", "seed": -1}, "seed = -1: expected an integer of at least 0"),
        ({"target": "flash2", "seed": "a"}, "seed = 'a'"),
        ({"target": "flash2", "tile": (0, 0)}, "tile = (0, 0)"),
        ({"target": "flash2", "tile": (2048, 2048)}, "tile = '2048x2048': expected a smaller tile"),
        (
            {"target": "flash3", "tile": (100, 100), "backend": "emulator"},
            "tile = '100x100': expected 64, 128 or 192 rows",
        ),
        ({"target": "flash2", "examples": 1.5}, "examples = 1.5"),
        ({"target": "flash2", "dtypes": 5}, "dtypes = 5: expected a name, or a list of names"),
        ({"target": "flash2", "checks": 5}, "checks = 5: expected a name, or a list of names"),
        ({"target": "flash2", "checks": "key_set"}, "checks = 'key_set'"),
        ({"target": "softmax_safe", "full": True}, "full = True: expected False"),
        ({"target": "softmax_safe", "examples": 5}, "examples = 5: expected None or 0"),
        ({"target": "softmax_safe", "framework": "tensorflow"}, "framework = 'tensorflow'"),
        ({"target": "softmax_safe", "dtypes": ["fp16"]}, "dtypes = 'fp16'"),
        ({"target": "softmax_safe", "dtypes": ["float8_e4m3fn"]}, "dtypes = 'float8_e4m3fn'"),
        ({"target": "softmax_safe", "dtypes": []}, "at least one"),
        ({"target": "softmax_safe", "device": "h1000"}, "device = 'h1000'"),
        ({"target": "softmax_safe", "device": "h100", "backend": "gpu"}, "device = 'h100'"),
        ({"target": "softmax_safe", "tile": "wide"}, "tile = 'wide'"),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(message)) as error:
        verify(**arguments)
    assert "\n" not in str(error.value)


def test_another_operation_gets_arrays_of_the_framework_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Array] = []

    class Noted(FRAMES["numpy"]):
        def put(self, values: Array) -> Any:
            given.append(values)
            return super().put(values)

    monkeypatch.setitem(FRAMES, "jax", Noted)
    report = verify("softmax_safe", framework="jax", dtypes="float16", checks=["determinism"])
    assert report.passed and {row.dtype for row in report.rows} == {"float16"}
    assert len(given) == 2 * len(report.rows)  # one input, two runs


@pytest.mark.parametrize("wrong", [{"layout": "hbsd"}, {"causal": "left"}, {"lse": "10"}, {"fn": 3}])
def test_an_adapter_checks_its_conventions(wrong: dict[str, Any]) -> None:
    with pytest.raises(fl.UsageError, match=next(iter(wrong))):
        fl.Adapter(**({"fn": attention} | wrong))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_a_gpu_is_asked_for_in_one_line() -> None:
    with pytest.raises(fl.Unavailable, match="pip install"):
        verify("flash2", "gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_our_kernels_pass_on_the_gpu(algorithm: str) -> None:
    report = verify(algorithm, "gpu")
    assert report.verdict == "passed", report.failed[:3]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "framework", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_arrays_of_other_frameworks(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes the whole GPU
    report = verify("flash2", "gpu", dtypes=["bfloat16"], framework=framework)
    assert report.verdict == "passed", report.failed[:3]


@pytest.mark.parametrize("name", OUTSIDERS)
def test_outsiders_that_are_not_installed_say_how_to_get_them(name: str) -> None:
    packages = {
        "fa4": "flash_attn", "fa3": "flash_attn_interface", "fa3-wheel": "flash_attn3_jax_lib", "flashinfer": "flashinfer",
    }  # fmt: skip
    package = packages.get(name.removesuffix("-backward"), "torch")
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(fl.Unavailable, match="pip install") as error:
        verify(name)
    assert "\n" not in str(error.value)


NEEDED = {"cupy": [pytest.mark.gpu], "torch": [pytest.mark.torch], "jax": [pytest.mark.jax]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDED.get(name, [])) for name in FRAMES])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["plain", "bshd", "padded", "misaligned", "strided"])
def test_arrays_are_placed_as_said(name: str, dtype: str, layout: str) -> None:
    frame = frame_named(name)
    x = fl.random_inputs(fl.Problem(batch=2, heads=3, len_q=5, head_dim=7, dtype=dtype), 0)[0]
    placed = place(frame, x, layout, math.nan)
    assert np.array_equal(np.asarray(frame.get(placed.view)), x) and placed.harm() is None


def test_harm_is_seen() -> None:
    frame = frame_named("numpy")
    x = np.ones((1, 1, 3, 5), np.float32)
    placed = place(frame, x, "padded", math.nan)
    placed.view[0, 0, 1, 2] = 3
    assert placed.harm() == "it was changed" and placed.harm(written=True) is None
    placed.buffer[-1] = 0
    assert placed.harm(written=True) == "memory outside of it was written"


def test_verify_is_called_by_either_name() -> None:
    """`flashlab.verify` is a package too: importing from it must not hide the function."""
    import flashlab.verify as module

    assert module("flash2", dtypes=["float16"], checks=["gqa"]).passed  # pyright: ignore
    assert fl.verify("flash2", dtypes=["float16"], checks=["gqa"]).passed
