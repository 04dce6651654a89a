"""flash2 in Triton on Triton's interpreter: numbers by the rule, HBM's bytes by step and tensor, and seeded bugs found."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.emulator.library import Arena
from flashlab.measure import emulated
from flashlab.measure.workload import Case
from flashlab.run import tritonc
from flashlab.run.emulated import EmulationError
from flashlab.run.interpreter import _Watch  # pyright: ignore[reportPrivateUsage]
from flashlab.triton import source
from flashlab.verify.rule import expect, judge
from simulator.operations.attention import ATTENTION
from tests.flashlab.measure.test_emulated import check_right_and_counted
from tests.tiers import examples

pytestmark = pytest.mark.triton

NAME = "flash2_triton"
DTYPES = ["float32", "float16", "bfloat16"]


def run(p: fl.Problem, inputs: str = "normal", **options: Any) -> fl.Emulation:
    return fl.emulate(NAME, **drawn(p, inputs), lse=True, **p.masks, **options)


def drawn(p: fl.Problem, inputs: str = "normal") -> Any:
    """q, k and v by name."""
    return ATTENTION.draw(p, 0, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@examples(12)
@given(data=st.data())
def test_right_and_counted(dtype: str, data: st.DataObject) -> None:
    check_right_and_counted(NAME, dtype, data)


@pytest.mark.alike("bfloat16")  # which the interpreter alone gets wrong
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_verified(dtype: str) -> None:
    checks = ["key_sets", "hidden_keys", "memory", "odd_scale", "misaligned"]
    report = fl.verify(NAME, "emulator", dtypes=[dtype], checks=checks, examples=0)
    assert report.verdict == "passed", report.failed[:3]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_verified_by_all_checks(dtype: str) -> None:
    report = fl.verify(NAME, "emulator", dtypes=[dtype])
    assert report.verdict == "passed", report.failed[:3]
    assert set(report.never_ran) <= {"soft cap", "sinks", "alibi", "mask", "lengths", "dropout", "kv dtype"}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_default_tiles(dtype: str, head_dim: int) -> None:
    p = fl.Problem(batch=1, heads=1, len_q=150, len_kv=200, head_dim=head_dim, dtype=dtype, causal=True)
    done = run(p)
    assert done.passed, done
    assert judge(expect(p, **drawn(p)), done.out, done.lse).passed
    assert done.launches[0].exp == done.counts.exp
    assert done.launches[0].flops == done.counts.flops.matmul  # for such head dims


def test_it_is_one_of_the_emulators_kernels() -> None:
    p = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=20, len_kv=40, head_dim=32, dtype="float16", causal=True)
    arrays = fl.random_inputs(p)
    out = fl.attention(*arrays, algorithm=NAME, backend="emulator", causal=True)
    again = fl.plan(NAME, p, backend="emulator").run(dict(zip("qkv", arrays, strict=True)))
    assert judge(expect(p, *arrays), out, None).passed and out.tobytes() == again["out"].tobytes()


def test_counters_hold_what_its_source_settles() -> None:
    p = fl.Problem(batch=1, heads=2, len_q=70, head_dim=40, dtype="float16", causal=True)
    report = emulated.run([Case("x", NAME, p)])
    (launch,) = report.launches
    verdicts = {check.what: check.verdict for check in launch.checks}
    assert report.passed
    assert verdicts == {
        **dict.fromkeys(["hbm.read", "hbm.write", "hbm.atomic"], "equal"),
        **dict.fromkeys(["sram.read", "sram.write", "flops.matmul"], "not measured"),
    }


# Seeded bugs


@dataclass(frozen=True)
class Bug:
    """`find`, which occurs once in the kernel, becomes `put`; `by` is what must say so then."""

    mechanism: str
    find: str
    put: str
    by: str = "the rule"


BUGS = [
    Bug("keys past the end are not hidden", " & (key < len_kv)[None, :]", ""),
    Bug("the causal mask is aligned top-left", "offset = len_kv - len_q", "offset = 0 * len_kv"),
    Bug("one future key is seen", "(at <= right)", "(at <= right + 1)"),
    Bug("the window lacks its first key", "(at >= -left)", "(at > -left)"),
    Bug("a tile with one hidden key needs no mask", "first + COLS - 1 >", "first + COLS - 2 >"),
    Bug("a tile with hidden keys on the left needs no mask", "(first < high - left)", "(first < low - left)"),
    Bug("O is not rescaled", "acc * alpha[:, None]", "acc"),
    Bug("l is not rescaled", "l * alpha +", "l +"),
    Bug("V stays that of the first tile", "v_row, first, len_kv", "v_row, first * 0, len_kv"),
    Bug("query heads read the wrong KV head", "// (heads // kv_heads)", "% kv_heads"),
    Bug("the sign of the scale is lost", "sign * s", "s"),
    Bug("the scale 0 hides all", "tl.where(scale == 0, 1.0, tl.abs(scale))", "tl.abs(scale)"),
    Bug("what pads a row of K is used", "tl.where(wanted, tl.load(at, inside, 0.0), 0.0)", "tl.load(at, inside, 0.0)"),
    Bug("an empty row is divided by 0", "tl.where(l > 0, l, 1.0)", "l"),
    Bug("the LSE is one of base 2", "* LN2", "* 1.0"),
    Bug("a mask of -1e4 takes part in the maximum", "-3.4028235e38", "-1e4"),
    Bug("one row past the end is loaded", "(row < length)[:, None]", "(row <= length)[:, None]", "out of bounds"),
    Bug("hidden tiles are loaded", "tl.minimum(len_kv - 1, high + right) + 1, COLS", "len_kv, COLS", "bytes"),
    Bug("every second row of tiles is left out", "(tiles - 1 - place // beside)", "(tiles - 1 - place // beside // 2 * 2)",
        "never written"),
    Bug("heads are written twice", "place % beside)", "place % beside // 2 * 2)", "race between blocks"),
    Bug("the LSE lies one row further", "+ row, (m", "+ row + 1, (m", "never written"),
    Bug("columns past a row's padding are loaded", "(column < triton.cdiv(HEAD_DIM, CHUNK) * CHUNK)", "(column >= 0)", "bytes"),
]  # fmt: skip
"""What is seen of them: wrong numbers, findings by their kind, other bytes than the formula's, bytes that nobody wrote."""

P = fl.Problem(batch=1, heads=2, len_q=40, len_kv=63, head_dim=16, dtype="float16")
PROBLEMS = [
    (P, "normal"),
    (P.replace(causal=True, len_q=90, len_kv=70), "normal"),
    (P.replace(window=(20, 9), heads=4, kv_heads=2, batch=2, len_q=63), "rising"),
    (P.replace(scale=-0.3, causal=True), "large"),
    (P.replace(scale=0.0, head_dim=17), "normal"),
    (P.replace(window=(40, None), len_q=130, len_kv=130), "normal"),
    (P, "lone"),
]
"""With tiles of 32 × 32: tails each way, empty rows, masks on both sides, grouped heads, odd rows, scales, low scores."""


def seen(path: Path | None) -> Iterator[str]:
    """What is seen of a kernel on all problems, one after the other: who looks for something stops where it is found."""
    for p, inputs in PROBLEMS:
        done = run(p, inputs, tile=(32, 32), source=path)
        yield from {finding.kind for finding in done.findings}
        if done.differences:
            yield "bytes"
        if done.unwritten:
            yield "never written"
        if not judge(expect(p, **drawn(p, inputs)), done.out, done.lse).passed:
            yield "the rule"


def test_nothing_is_seen_of_the_kernel_itself() -> None:
    assert list(seen(None)) == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.mechanism.replace(" ", "-"))
def test_a_seeded_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    text = source(NAME).read_text(encoding="utf-8")
    assert text.count(bug.find) == 1, bug.find
    path = tmp_path / "seeded.py"
    path.write_text(text.replace(bug.find, bug.put), encoding="utf-8")
    assert bug.by in seen(path)


# What the interpreter is watched for


def seeded(tmp_path: Path, find: str, put: str) -> Path:
    path = tmp_path / "seeded.py"
    text = source(NAME).read_text(encoding="utf-8")
    path.write_text(text.replace(find, put), encoding="utf-8")
    return path


def test_a_finding_names_lines_step_and_element(tmp_path: Path) -> None:
    path = seeded(tmp_path, "(row < length)[:, None]", "(row <= length)[:, None]")
    done = run(P.replace(heads=1), tile=(32, 32), source=path)
    first = next(finding for finding in done.findings if finding.tensor == "k")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert (first.kind, first.step, first.index) == ("out of bounds", "load_k", "[1, 0, 0, 0]")
    assert "tl.load(" in lines[first.at.number - 1] and "k_j = load(" in lines[first.line.number - 1]
    said = r"seeded\.py:\d+, called at seeded\.py:\d+, step load_k: out of bounds: block \d reads 2 bytes: 2 bytes past"
    assert re.match(said, str(first))
    with pytest.raises(EmulationError, match="out of bounds"):
        done.checked()


def test_an_input_that_is_written_is_named(tmp_path: Path) -> None:
    path = seeded(tmp_path, "tl.store(lse +", "tl.store(q + row, m.to(q_i.dtype), row < 8)\n    tl.store(lse +")
    done = run(P, tile=(32, 32), source=path)
    assert "input written" in {finding.kind for finding in done.findings}


def test_a_launch_out_of_time_is_stopped() -> None:
    done = run(P, time_limit=1e-9)
    (finding,) = done.findings
    assert (finding.kind, finding.message) == ("time limit", "is still running after 1e-09 s of processor time")
    assert done.launches[0].unfinished and done.differences == []


@pytest.mark.parametrize("shape", [(16, 32), (8, 4)])
def test_bfloat16_is_rounded_and_multiplied_as_on_a_gpu(shape: tuple[int, int]) -> None:
    """The interpreter alone cuts off, and multiplies bits."""
    triton = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    with _Watch(source(NAME), Arena(), 0).watching():
        handle = triton.interpreter_builder.create_fp_trunc(triton.TensorHandle(x, tl.float32), tl.bfloat16)
        zero = triton.TensorHandle(np.zeros((shape[0], shape[0]), np.float32), tl.float32)
        transposed = triton.TensorHandle(handle.data.T, tl.bfloat16)
        product = triton.interpreter_builder.create_dot(handle, transposed, zero, None, 0)
    rounded = x.astype(ml_dtypes.bfloat16)
    assert handle.data.tobytes() == rounded.view(np.uint16).tobytes()
    wide = rounded.astype(np.float32)
    np.testing.assert_allclose(product.data, wide @ wide.T, rtol=1e-6)


def test_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tritonc, "package", lambda: SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    )
    with pytest.raises(fl.Unavailable, match="set TRITON_INTERPRET=1 before Triton is imported"):
        run(P)
