"""What an outsider's function is told, what it may refuse, and when a verdict says that too little ran."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import Case, run_case, verify
from tests.flashlab.verify.candidates import Array, attention
from tests.tiers import one_of_each

SCORES = ["soft cap", "sinks", "alibi"]
"""What these functions know nothing of."""


def fails(fn: Any, **options: Any) -> fl.Report:
    report = verify(fl.Adapter(fn, lse="e"), dtypes=["float32"], examples=20, **options)
    assert report.verdict == "failed"
    return report


# what it is told


def scales_by_1_over_d(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
    return attention(q, k, v, causal=causal, scale=1 / q.shape[-1] if scale is None else scale)


def test_the_default_scale_is_run() -> None:
    """It is right whenever it is told the scale."""
    report = fails(scales_by_1_over_d, checks=["rule"])
    assert {row.case for row in report.rows if row.status == "passed"} >= {"scale 0.3", "the default scale, said"}


def test_a_told_scale_that_is_ignored_is_found() -> None:
    def ignores(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        return attention(q, k, v, causal=causal)

    assert "scale 0.3" in {row.case for row in fails(ignores, checks=["rule"]).failed}


def test_a_scale_without_a_default_is_always_told() -> None:
    def needs(q: Array, k: Array, v: Array, scale: float, causal: bool) -> Any:
        assert math.isfinite(scale)
        return attention(q, k, v, causal=causal, scale=scale)

    assert verify(fl.Adapter(needs, lse="e"), dtypes=["float32"], examples=20).passed


def test_keywords_have_other_names() -> None:
    def theirs(q: Array, k: Array, v: Array, hide_future: bool = False, factor: float | None = None) -> Any:
        return attention(q, k, v, causal=hide_future, scale=factor)

    named = fl.Adapter(theirs, lse="e", names={"causal": "hide_future", "scale": "factor"})
    report = verify(named, dtypes=["float32"], checks=["rule", "prefix"])
    assert report.verdict == "passed" and report.never_ran == SCORES and "causal" in report.rows[1].problem
    assert "causal" in verify(fl.Adapter(theirs, lse="e"), dtypes=["float32"], checks=["prefix"]).never_ran


@pytest.mark.long
def test_what_changes_the_scores_has_other_names_too() -> None:
    """Other libraries' names, a name that the adapter says, and sinks that the function can't do without."""

    def theirs(
        q: Array, k: Array, v: Array, s_aux: Array, is_causal: bool = False, slopes: Any = None, softcap: float = 0
    ):
        return attention(q, k, v, causal=is_causal, sinks=s_aux, alibi_slopes=slopes, soft_cap=softcap)

    named = fl.Adapter(theirs, lse="e", names={"alibi": "slopes"})
    report = verify(named, dtypes=["float16"], examples=20)
    assert report.verdict == "passed" and report.never_ran == ["window", "mask", "lengths"], report
    not_run = {row.detail for row in report.rows if row.status == "not run"}
    assert not_run <= {f"the function takes no {name}" for name in ("window", "mask", "lengths")}
    assert "alibi" in verify(fl.Adapter(theirs, lse="e"), dtypes=["float16"], checks=["rule"]).never_ran


def test_any_keywords_are_no_word_for_sinks() -> None:
    """What passes anything on is told of the masks that every kernel knows, and of no more."""
    report = verify(
        fl.Adapter(lambda q, k, v, **more: attention(q, k, v, **more), lse="e"), dtypes=["float16"], examples=9
    )
    assert report.verdict == "passed" and report.never_ran == [*SCORES, "mask", "lengths", "dropout"]
    told = fl.Adapter(lambda q, k, v, **more: attention(q, k, v, **more), lse="e", names={"sinks": "sinks"})
    assert verify(told, dtypes=["float16"], checks=["rule"]).never_ran == ["soft cap", "alibi"]


def test_alibi_has_no_top_left_convention() -> None:
    report = verify(fl.Adapter(attention, lse="e", causal="top-left"), dtypes=["float16"], checks=["key_sets"])
    assert report.failed and "alibi has no top-left convention here" in {row.detail for row in report.rows}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"casual": "causal"},
            "names = 'casual': expected one of causal, window, scale, soft_cap, sinks, alibi, mask, block_size, lengths, partial, dropout, exact_lse, chunk, lse, seed (did you mean causal?)",  # noqa: E501
        ),
        (
            {"causal": "is_causal"},
            "names = 'is_causal': expected one of q, k, v, causal, scale, window, soft_cap, sinks",
        ),
        ("causal", "names = 'causal': expected a dictionary"),
    ],
)
def test_names_are_checked(names: Any, message: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(message)):
        fl.Adapter(attention, names=names)


# what it refuses


@pytest.mark.parametrize("target", ["json:dumps", "math:sqrt", "builtins:len"])
def test_a_function_of_other_arguments_is_bad_input(target: str) -> None:
    with pytest.raises(fl.UsageError, match=f"target = {target}: expected a function that takes") as error:
        verify(target)
    assert "\n" not in str(error.value)


def test_a_wrapper_that_hides_its_arguments_is_probed_too() -> None:
    def inner(q: Array, k: Array, v: Array, is_causal: bool = False) -> Any:
        return attention(q, k, v, causal=is_causal)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    with pytest.raises(fl.UsageError, match="unexpected keyword argument 'causal'"):
        verify(wrapper)


def test_a_function_that_lacks_its_lse_is_bad_input() -> None:
    with pytest.raises(fl.UsageError, match="lse = 'e'"):
        verify(fl.Adapter(lambda q, k, v: q, lse="e"))


@pytest.mark.alike("ValueError", "SystemExit")
@pytest.mark.parametrize("error", [ValueError, AssertionError, TypeError, IndexError, SystemExit])
def test_whatever_it_raises_is_a_failed_check(error: type[BaseException]) -> None:
    def ragged(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        if q.shape[2] % 16:
            raise error("lengths of 16")
        return attention(q, k, v, causal=causal, scale=scale)

    report = fails(ragged, checks=["rule"])
    assert f"raised {error.__name__}: lengths of 16" in {row.detail for row in report.failed}
    reasons = {row.detail for row in report.rows if row.status == "not run"}
    assert reasons == {f"the function takes no {name}" for name in ("window", "soft_cap", "sinks", "alibi_slopes")}


def test_not_implemented_is_not_run() -> None:
    def without(q: Array, k: Array, v: Array, window: Any = None) -> Any:
        if window:
            raise NotImplementedError("windows are next week's")
        return attention(q, k, v)

    report = verify(fl.Adapter(without, lse="e"), dtypes=["float32"], checks=["rule"])
    assert report.passed and report.never_ran == ["window", *SCORES]
    assert "windows are next week's" in str(report)


# what ran


def test_a_handful_of_rows_is_no_pass() -> None:
    """`supports` with a slip in it: what it lets through is right, and says little."""
    hidden = fl.Adapter(attention, lse="e", supports=lambda p: p.len_q == 128)
    report = verify(hidden, dtypes=["float32"], examples=20)
    assert 0 < report.counts["passed"] < report.counts["not run"]
    assert report.verdict == "too little ran" and not report.passed
    assert f"too little ran ({report.counts['passed']} of {len(report.rows)} checks ran)" in str(report)


def test_the_verdict_says_how_much_ran() -> None:
    report = verify(fl.Adapter(lambda q, k, v: attention(q, k, v)[0]), dtypes=["float32"], examples=20)
    ran = len(report.rows) - report.counts["not run"]
    assert report.headline.endswith(f"passed, LSE unchecked ({ran} of {len(report.rows)} checks ran)")
    assert report.never_ran == ["causal", "window", *SCORES, "mask", "lengths", "dropout"]


def test_without_an_lse_no_split_is_claimed() -> None:
    report = verify(fl.Adapter(lambda q, k, v: attention(q, k, v)[0]), dtypes=["float32"], checks=["split"])
    assert report.verdict == "nothing run" and "without an LSE" in report.rows[0].detail


# how long and how wide


def drops_a_key(row: slice) -> Any:
    def fn(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        if row.start is None or k.shape[2] <= row.start:
            return attention(q, k, v, causal=causal, scale=scale)
        return attention(q, k[:, :, 1:], v[:, :, 1:], causal=causal, scale=scale)

    return fn


@pytest.mark.alike("1000-bfloat16")
@pytest.mark.parametrize(
    "case",
    one_of_each(
        itertools.product([250, 1000, 2000], ["bfloat16", "float32"]),
        lambda case: case[0],
        lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_a_key_lost_from_long_rows_is_found(case: tuple[int, str]) -> None:
    longer, dtype = case
    fn = drops_a_key(slice(longer, None))
    report = verify(fl.Adapter(fn, lse="e"), dtypes=[dtype], checks=["rule"], examples=0)
    assert report.verdict == "failed" and all("long row" in row.case or "513" in row.case for row in report.failed)


def test_a_causal_diagonal_that_is_wrong_from_row_500_on_is_found() -> None:
    def late(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        out, lse = attention(q, k, v, causal=causal, scale=scale)
        if causal:
            wrong = attention(q, k, v, scale=scale, window=(None, 1))
            out[:, :, 500:], lse[:, :, 500:] = wrong[0][:, :, 500:], wrong[1][:, :, 500:]
        return out, lse

    assert [row.case for row in fails(late, checks=["rule"]).failed] == ["513 causal rows"]


def test_heads_beyond_32_are_run() -> None:
    def few(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        out, lse = attention(q, k, v, causal=causal, scale=scale)
        out[:, 32:] = 0
        return out, lse

    assert {row.case for row in fails(few, checks=["rule"]).failed} == {"40 heads", "GQA 40:8"}


def test_a_case_says_whether_the_scale_is_told() -> None:
    problem = fl.Problem(batch=1, heads=1, len_q=5, head_dim=16, dtype="float32")
    told = [Case(problem=problem.replace(scale=scale)) for scale in (None, 0.25)]
    adapter = fl.Adapter(scales_by_1_over_d, lse="e")
    assert [run_case(adapter, case).status for case in told] == ["failed", "passed"]
    assert np.isclose(problem.scale, 0.25)


def test_the_first_contact_finds_the_mistake_and_not_the_conventions() -> None:
    """A plain NumPy function that knows no grouped heads and forgot the maximum: its smallest failing case shows that."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        with np.errstate(all="ignore"):
            p = np.exp(q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2) / q.shape[-1] ** 0.5)
            return p / p.sum(-1, keepdims=True) @ v.astype(np.float32)

    found = fl.verify(attention, checks=["gqa", "rule", "search"], dtypes=["float16"], examples=60)
    assert [kind.kind.name for kind in found.raised] == ["grouped heads"]
    assert found.failing is not None and found.failing.likely == "the maximum is not subtracted before exp"
    assert "holds NaN" in found.failing.message and "kv_heads" not in found.failing.python
    labels = {row.case for row in found.rows if row.status != "not run"}
    assert labels and not any("causal" in label for label in labels)  # it takes none
