"""Faulty functions of every operation are named, and right ones pass. `python -m studies named` has them all on record."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import dropout, mistakes, page_mistakes
from flashlab.verify.adapter import CallableTarget
from flashlab.verify.bench import Bench
from flashlab.verify.cases import Case
from flashlab.verify.foreign import foreign
from flashlab.verify.mistakes import in_a_line
from flashlab.verify.steps import Steps
from studies import named
from studies.faults import FAULTS, Fault, built
from tests.tiers import one_of_each

SMALL: dict[str, dict[str, Any]] = {
    "dense": {"heads": 2, "len_q": 9, "len_kv": 35, "causal": True},
    "tiled": {"heads": 2, "len_q": 9, "len_kv": 75},
    "ragged": {"heads": 2, "lengths": [(3, 4), (2, 5)]},
    "merged": {"heads": 2, "len_q": 3, "len_kv": 12},
    "dropout": {"heads": 2, "len_q": 20, "len_kv": 30, "dropout": 0.25},
}
FEW = {
    ("dense", "keys of the first head"), ("tiled", "rescaled the other way round"),
    ("tiled", "only the last tile's output is divided"),
    ("ragged", "one key of the neighbour"), ("merged", "LSEs added"),
    ("merged", "weights to base 2"), ("dropout", "kept weights not divided"),
    ("dropout", "the LSE of the kept weights"),
}  # fmt: skip


def small(family: str) -> fl.Problem:
    sizes: dict[str, Any] = {"batch": 1, "head_dim": 16, "dtype": "float32", **SMALL[family]}
    return fl.Problem(**sizes)


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if (f.family, f.name) in FEW], ids=lambda f: f"{f.family}-{f.name}"
)
def test_a_mistake_is_named(fault: Fault) -> None:
    p = small(fault.family)
    bench = Bench(CallableTarget(fl.Adapter(fault.fn, lse="e")), ("float32",), False, 0)
    assert named.MEANT[fault.family][fault.name] in mistakes.likely(bench, Case(problem=p))


@pytest.mark.parametrize(
    "name", ["table of the first request", "first key of each page dropped", "page off by one at an edge"]
)
def test_a_mistake_of_pages_is_named(name: str) -> None:
    fault = next(f for f in FAULTS if f.name == name)
    subject = foreign(fl.Adapter(fault.fn, lse="e", operation="paged"), Steps())
    sizes: dict[str, Any] = {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 8}
    p = fl.Problem(**sizes, lengths=[(1, 45), (1, 23), (1, 8)])
    other = fl.Problem(**sizes, lengths=[(2, 30), (2, 60), (2, 3)])
    assert named.MEANT["paged"][name] in page_mistakes.likely(subject, p, [other], 0)


def test_a_right_function_over_pages_passes() -> None:
    report = fl.verify(fl.Adapter(built("paged"), lse="e", operation="paged"), dtypes=["float16"])
    assert report.verdict == "passed", report
    assert {row.check for row in report.rows if row.status == "passed"} == {
        "rule", "determinism", "pages", "requests", "drafts",
    }  # fmt: skip
    assert any("drafts has no convention here" in row.detail for row in report.rows)


@pytest.mark.parametrize("family", ["dense", "tiled", "ragged", "merged", "dropout"])
def test_nothing_is_called_wrong_in_a_right_function(family: str) -> None:
    p = small(family)
    bench = Bench(CallableTarget(fl.Adapter(built(family), lse="e")), ("float32",), False, 0)
    assert mistakes.likely(bench, Case(problem=p)) == ""


def test_dropout_is_checked_or_not_taken() -> None:
    right = built("dropout")
    report = fl.verify(fl.Adapter(right, lse="e"), checks=["dropout"], dtypes=["float16"], examples=0)
    assert report.verdict == "passed" and len(report.rows) == 3, report

    def seedless(q: Any, k: Any, v: Any, causal: bool = False, dropout: float | None = None) -> Any:
        return right(q, k, v, causal=causal, dropout=dropout)

    report = fl.verify(fl.Adapter(seedless, lse="e"), checks=["dropout"], dtypes=["float16"], examples=0)
    assert {row.status for row in report.rows} == {"not run"} and "seed" in report.rows[0].detail

    def forgetful(q: Any, k: Any, v: Any, dropout: float | None = None, seed: int = 0) -> Any:
        return right(q, k, v, dropout=dropout, seed=np.random.default_rng().integers(1 << 30))

    report = fl.verify(fl.Adapter(forgetful, lse="e"), checks=["dropout"], dtypes=["float32"], examples=5)
    assert report.failing is not None and "another call with the same seed" in report.failing.likely
    assert dropout.FEW < 100


def test_mistakes_that_differ_in_a_size() -> None:
    assert in_a_line(["it breaks (tiles of 8 keys)", "it breaks (tiles of 16 keys)"]) == "it breaks"
    assert in_a_line(["it breaks (tiles of 8 keys)", "it bends"]) == "it breaks (tiles of 8 keys); or it bends"
    assert in_a_line(["a", "b", "c"]) == ""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault", one_of_each(FAULTS, lambda f: f.family, lambda f: f"{f.family}-{f.name}".replace(" ", "-"))
)
def test_a_report_calls_nothing_by_a_wrong_name(fault: Fault) -> None:
    found = named.verified(fault)
    assert found["verdict"] == "failed" and found["named"] != "wrong", found


def test_at_least_nine_tenths_are_named_on_record() -> None:
    """And none wrongly: the newest file says so."""
    from flashlab.measure import results

    found = results.latest("faults")
    if found is None:
        pytest.skip("nothing is on record: python -m studies named")
    rows = found.data["rows"]
    assert len(rows) >= 80 and {(row["family"], row["fault"]) for row in rows} == {(f.family, f.name) for f in FAULTS}
    assert sum(row["named"] == "right" for row in rows) >= 0.9 * len(rows)
    assert not any(row["named"] == "wrong" for row in rows) and all(row["verdict"] == "failed" for row in rows)


def test_a_judge_of_ones_own() -> None:
    """It takes the place of float64 attention. One that can't judge is refused before anything is run."""

    def doubled(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return 2 * fl.naive(q, k, v, causal=causal).out

    def theirs(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return doubled(q, k, v, causal).astype(q.dtype)

    quick: dict[str, Any] = {"dtypes": ["float16"], "examples": 0}
    report = fl.verify(theirs, judge=doubled, **quick)
    assert report.verdict == "passed, LSE unchecked"
    assert {row.check for row in report.rows} == {"rule", "memory", "determinism", "misaligned"}
    assert fl.verify(theirs, checks=["rule"], **quick).verdict == "failed"

    def copied(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return q

    def cut(q: Any, k: Any, v: Any) -> Any:
        return q[..., :3]

    wrong = fl.verify(copied, judge=doubled, checks=["rule"], dtypes=["float16"], examples=3)
    assert wrong.failing is not None and wrong.failing.likely == ""
    with pytest.raises(fl.UsageError, match="judge"):
        fl.verify(theirs, judge=cast("Any", 5), **quick)
    with pytest.raises(fl.UsageError, match="judge"):
        fl.verify(theirs, judge=cut, **quick)
    with pytest.raises(fl.UsageError, match="judge"):
        fl.verify("flash2_backward", judge=doubled)
