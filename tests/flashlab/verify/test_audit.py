"""Tests are put to the test: what a comparison lets pass is said, and the input that would have caught it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.cli import documents
from flashlab.verify import audit
from flashlab.verify.zoo import tiled
from tests.flashlab.cli.typed import document, one_line, run

TEST = """
import theirpackage
import numpy as np


def test_attention():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 32, 16)).astype(np.float32) for _ in range(3))
    s = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 4
    p = np.exp(s)
    out = theirpackage.attention(q, k, v)
    np.testing.assert_allclose(out, p / p.sum(-1, keepdims=True) @ v, rtol=1e-2, atol=1e-2)


def test_that_it_is_called_otherwise():
    with np.testing.assert_raises(TypeError):
        theirpackage.attention(1)


def test_that_fails():
    assert not theirpackage
"""
PACKAGE = """
import numpy as np


def attention(q, k, v, is_causal=False, dropout_p=0.0):
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
FEW = ("scale missing", "ragged tile dropped", "causal ignored", "LSE negated")


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "theirpackage.py").write_text(PACKAGE)
    (tmp_path / "test_theirs.py").write_text(TEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "theirpackage", raising=False)
    monkeypatch.delitem(sys.modules, "test_theirs", raising=False)
    return "test_theirs.py"


def test_a_test_is_run_against_wrong_kernels(theirs: str) -> None:
    found = fl.testing.audit_test(theirs, "theirpackage:attention", select="not fails", faults=FEW)
    assert {row.fault: row.status for row in found.rows} == {
        "scale missing": "caught", "ragged tile dropped": "passes", "causal ignored": "passes", "LSE negated": "not run",
    }  # fmt: skip
    assert all(("1x2x" in row.telling) == (row.status == "passes") for row in found.rows)
    assert not found.passed and "catches 1 of 3" in str(found) and "length 97" in str(found)
    assert not isinstance(sys.modules["theirpackage"].attention, audit.Replacement), "it is back in its place"


def test_a_test_that_fails_first_is_refused(theirs: str) -> None:
    with pytest.raises(fl.UsageError, match="fail with the function itself"):
        fl.testing.audit_test(theirs, "theirpackage:attention", select="fails", faults=FEW)
    with pytest.raises(fl.UsageError, match="they don't ask for it at all"):
        fl.testing.audit_test(theirs, "theirpackage:np.full", select="not fails", faults=FEW)


def test_on_the_command_line(theirs: str) -> None:
    words = (
        "audit-test",
        theirs,
        "--replace",
        "theirpackage:attention",
        "-k",
        "not fails",
        "--fault",
        ",".join(FEW[:2]),
    )
    found = document(*words, code=1)
    documents.AuditTest.model_validate(found)
    assert found["counts"] == {"caught": 1, "passes": 1, "not run": 0}
    assert "catches 1 of 1" in run(*words[:-1], FEW[0]).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "TEST = None: expected a test with --replace, or --rtol and --atol without one"),
        (("test.py",), "--replace = None: expected package:function, which the tests call"),
        (("--rtol", "0.1"), "--atol = None: expected a number: a comparison has both tolerances"),
        (("--rtol", "-1", "--atol", "0"), "--rtol = -1.0: expected a number of at least 0"),
        (("nowhere.py", "--replace", "json:dumps"), "expected a file or a folder of tests that is there"),
    ],
)
def test_bad_usage(words: tuple[str, ...], said: str) -> None:
    assert said in one_line("audit-test", *words)


def test_a_comparison_of_inputs() -> None:
    """A tolerance that nothing exceeds catches what isn't finite alone, and one of 0 catches rounding, too."""
    p = fl.Problem(batch=2, heads=2, len_q=40, head_dim=16, dtype="float16", causal=True)
    wide, none = (fl.testing.audit_inputs(p, rtol=x, atol=x) for x in (1e9, 0.0))
    assert wide.counts["caught"] == 0 and none.counts["passes"] == 0
    assert wide.rows[0].telling and wide.counts["passes"] == len(wide.rows) > 60


@pytest.mark.parametrize("axes", [4, 3, 2])
def test_a_replacement_has_the_functions_conventions(axes: int) -> None:
    """A right kernel in its place returns what the function does, whatever its axes, its alignment and its base."""

    def theirs(
        query: Any, key: Any, value: Any, is_causal: bool = False, *, sm_scale: Any = None, p: float = 0.0
    ) -> Any:
        four = [
            x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x.swapaxes(1, 2) for x in (query, key, value)
        ]
        rows, keys = four[0].shape[2], four[1].shape[2]
        visible = np.tri(rows, keys, dtype=bool)
        found = fl.naive(*four, scale=sm_scale, **({"mask": visible} if is_causal else {}))
        out = found.out.swapaxes(1, 2) if query.ndim == 4 else found.out.reshape(query.shape)
        return out, found.lse.reshape(
            found.lse.shape[4 - query.ndim :] if query.ndim < 4 else found.lse.shape
        ) / np.log(2)

    made = audit.Replacement(theirs, layout="bshd", causal="top-left", lse="2", kernel=tiled())
    rng = np.random.default_rng(0)
    for rows, keys in ((5, 9), (9, 5)):
        shapes = [(2, n, 3, 8)[4 - axes :] if axes == 4 else (3, n, 8)[3 - axes :] for n in (rows, keys, keys)]
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        for found, right in zip(made(q, k, v, True, sm_scale=0.3), theirs(q, k, v, True, sm_scale=0.3), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    assert (made.calls, made.beside) == (2, 0)
    made(q, k, v, p=0.5)
    assert (made.calls, made.beside) == (2, 1), "what the kernels don't know is the function's own"


def test_the_row_rule_alone() -> None:
    p = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=33, len_kv=50, head_dim=32, dtype="bfloat16", causal=True)
    q, k, v = fl.random_inputs(p)
    right = fl.naive(q, k, v, causal=True)
    out, lse = right.out.astype(q.dtype), right.lse.astype(np.float32)
    assert 0 < fl.testing.assert_attention_close(out, q, k, v, lse=lse, causal=True) < 1
    out[0, 1, 7] *= 1.1
    with pytest.raises(AssertionError, match=r"out at \(batch, head, row\) \(0, 1, 7\) is off by"):
        fl.testing.assert_attention_close(out, q, k, v, causal=True)
    with pytest.raises(AssertionError, match="LSE"):
        fl.testing.assert_attention_close(right.out.astype(q.dtype), q, k, v, lse=lse + 1, causal=True)
    top = fl.naive(q, k[:, :, :33], v[:, :, :33], causal=True).out.astype(q.dtype)
    fl.testing.assert_attention_close(top, q, k, v, causal=True, align="top-left")
    with pytest.raises(fl.UsageError, match="dropout"):
        fl.testing.assert_attention_close(out, q, k, v, dropout=0.5)
