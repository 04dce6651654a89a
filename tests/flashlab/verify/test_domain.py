"""A domain shapes the problems of every check: what comes out lies in it, and narrow kernels are checked as hard as wide ones."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.verify import CHECKS, Case, verify
from flashlab.verify.bench import Bench
from flashlab.verify.cases import random_cases
from flashlab.verify.targets import target_of
from tests.flashlab.verify.candidates import Array, attention
from tests.tiers import one_of_each


def refuses(*wrong: Any) -> None:
    if any(wrong):
        raise RuntimeError("a problem that it isn't for")


# Kernels as other people wrote them: each does one kind of problem, and crashes on any other.


def minimal(q: Array, k: Array, v: Array) -> Any:
    """float32, lengths of 32, as many keys as queries, contiguous: as a kernel of few lines has it."""
    n = q.shape[2]
    refuses(
        q.dtype != np.float32, n % 32, n == 0, k.shape != q.shape, not q.flags.c_contiguous, not k.flags.c_contiguous
    )
    return attention(q, k, v)[0]


def tiled(q: Array, k: Array, v: Array) -> Any:
    """bfloat16, head dim 128, lengths of 64, as many KV heads as heads: a kernel of tensor cores."""
    refuses(q.dtype.name != "bfloat16", q.shape[3] != 128, q.shape[2] % 64, k.shape[2] % 64, k.shape[1] != q.shape[1])
    return attention(q, k, v, keys=64)[0]


def decoding(q: Array, k: Array, v: Array, scale: float) -> Any:
    """One query of each sequence, grouped heads, keys from pages of 16."""
    refuses(q.shape[2] != 1, k.shape[2] == 0)
    tokens = np.arange(k.shape[2])
    page, slot = tokens // 16, tokens % 16
    tail = [(0, 0), (0, 0), (0, -len(tokens) % 16), (0, 0)]
    pools = (np.pad(x, tail).reshape(*x.shape[:2], -1, 16, x.shape[3]) for x in (k, v))
    return attention(q, *(pool[:, :, page, slot] for pool in pools), scale=scale)[0]


NARROW = {
    "minimal": fl.Adapter(
        minimal, domain=fl.Domain(dtype="float32", multiple=32, same_lengths=True, groups=1, layouts="plain")
    ),
    "tiled": fl.Adapter(tiled, domain=fl.Domain(dtype="bfloat16", head_dim=128, multiple=64, groups=1)),
    "decoding": fl.Adapter(decoding, domain=fl.Domain(dtype="float16", len_q=1, empty=False)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_kernel_runs_sixty_checks(name: str) -> None:
    report = verify(NARROW[name], examples=50)
    assert report.verdict == "passed, LSE unchecked", report.failed[:3]
    assert report.counts["passed"] >= 60
    target = target_of(NARROW[name], "simulator")
    cases = [trial.case for trial in CHECKS["rule"](Bench(target, target.dtypes, False, 0)) if trial.case]
    assert len(set(cases)) == len(cases) > 40, "nothing is run twice"
    (search,) = (row for row in report.rows if row.check == "search")
    assert int(search.case.split()[0]) >= 50
    assert report.domain in str(report) and report.domain.startswith("dtype ")


@pytest.mark.parametrize("name", one_of_each(NARROW, lambda _: "one"))
def test_a_bug_in_a_narrow_kernel_is_found_and_shrunk_within_the_domain(name: str) -> None:
    adapter = NARROW[name]

    @functools.wraps(adapter.fn)
    def loses_a_key(q: Array, k: Array, v: Array, **scale: float) -> Any:
        out = adapter.fn(q, k, v, **scale)  # refuses what isn't in the domain
        return attention(q, k[:, :, 1:], v[:, :, 1:], **scale)[0] if k.shape[2] > 64 else out

    broken = fl.Adapter(loses_a_key, domain=adapter.domain)
    report = verify(broken, examples=50, checks=["rule"])
    assert report.failing and "isn't for" not in report.failing.message, report.failing
    (problem,) = re.findall(r"fl\.Problem\([^)]*\)", report.failing.python)
    found = eval(problem, {"fl": fl})
    assert adapter.domain.outside(found) is None and 64 < found.len_kv <= 128


DOMAINS = st.builds(
    fl.Domain,
    dtype=st.none() | st.just("bfloat16") | st.just(("float16", "float32")),
    head_dim=st.none() | st.just(128) | st.just((64, 96)) | st.just(range(8, 257, 8)),
    batch=st.none() | st.just(1) | st.just(range(2, 5)),
    groups=st.none() | st.just(1) | st.just((4, 8)),
    len_q=st.none() | st.just(1) | st.just(range(16, 4097, 16)),
    len_kv=st.none() | st.just(range(16, 4097, 16)),
    multiple=st.sampled_from([1, 8, 64]),
    same_lengths=st.just(False),
    empty=st.none() | st.booleans(),
    causal=st.none() | st.booleans(),
    masks=st.none() | st.just(("causal",)) | st.just(("window", "scale")) | st.just(()),
    layouts=st.none() | st.just("plain"),
    pairs=st.none() | st.integers(1, 4096),
)
CASES = random_cases(["float32", "float16"], longest=300, head_dims=[1, 17, 64, 300], tiles=[None])


@given(DOMAINS, CASES)
def test_what_is_fitted_lies_inside(domain: fl.Domain, case: Case) -> None:
    p = domain.fit(case.problem)
    assert domain.fit(p) == p and domain.outside(p) is None
    assert p == case.problem or domain.outside(case.problem)
    for name in ("dtype", "head_dim", "batch", "len_q", "len_kv"):
        allowed = getattr(domain, name)
        assert allowed is None or getattr(p, name) in allowed, name
    assert domain.groups is None or p.queries_per_kv in domain.groups
    for name, n in (("len_q", p.len_q), ("len_kv", p.len_kv)):
        assert getattr(domain, name) or n % domain.multiple == 0
        assert n or domain.empty or (domain.empty is None and domain.multiple == 1)
    assert domain.causal is None or p.causal == domain.causal
    if domain.masks is not None:
        assert set(p.applied) <= {*domain.masks, *(["causal"] if domain.causal else [])}
    assert domain.layouts is None or domain.fit_case(case).layout == "plain"


@given(CASES)
def test_any_domain_leaves_problems_alone(case: Case) -> None:
    assert fl.Domain().fit(case.problem) is case.problem and not fl.Domain().words


@given(CASES)
def test_equal_lengths(case: Case) -> None:
    domain = fl.Domain(same_lengths=True, multiple=32)
    p = domain.fit(case.problem)
    assert p.len_q == p.len_kv and p.len_q % 32 == 0 and p.len_q >= 32 and domain.fit(p) == p


@given(CASES, st.sampled_from([1, 32]), st.booleans())
def test_few_pairs(case: Case, multiple: int, same: bool) -> None:
    """They bind wherever shorter lengths are in the domain, and long rows stay long."""
    p = fl.Domain(pairs=4096, multiple=multiple, same_lengths=same).fit(case.problem)
    least = p.len_q == p.len_kv == multiple or min(p.len_q, p.len_kv) == 0
    assert p.batch * p.heads * p.len_q * p.len_kv <= 4096 or (
        multiple > 1 and (least or multiple in (p.len_q, p.len_kv))
    )
    long = fl.Problem(batch=1, heads=1, len_q=3, len_kv=1025, head_dim=16, dtype="float32")
    assert fl.Domain(pairs=4096).fit(long) is long and fl.Domain(pairs=1024).fit(long).len_kv == 341


def test_a_kernel_that_is_always_causal_needs_no_keyword() -> None:
    always = fl.Adapter(lambda q, k, v: attention(q, k, v, causal=True), lse="e", domain=fl.Domain(causal=True))
    report = verify(always, dtypes=["float32"], examples=20)
    ran = [row for row in report.rows if row.check == "rule" and row.status != "not run"]
    assert report.verdict == "passed" and all("causal" in row.problem for row in ran)


def test_a_batch_of_one_spells_out_its_keys_one_sequence_after_the_other() -> None:
    domain = fl.Domain(batch=1)
    one = verify(fl.Adapter(attention, lse="e", domain=domain), dtypes=["float32"], checks=["key_sets", "batch"])
    assert one.passed and one.counts == {"passed": 13, "failed": 0, "not run": 2}
    missing = fl.Adapter(lambda q, k, v: attention(q, k[:, :, :96], v[:, :, :96]), lse="e", domain=domain)
    assert len(verify(missing, dtypes=["float32"], checks=["key_sets"]).failed) == 6  # of 70 keys none is lost


def test_a_domain_has_its_own_dtypes() -> None:
    adapter = fl.Adapter(attention, lse="e", domain=fl.Domain(dtype="float16"))
    assert {row.dtype for row in verify(adapter, checks=["gqa"]).rows} == {"float16"}
    with pytest.raises(fl.UsageError, match="dtypes = 'float32': expected one of float16"):
        verify(adapter, dtypes=["float32"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "fp16"}, "dtype = 'fp16'"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"head_dim": ()}, "head_dim = (): expected at least one value"),
        ({"len_q": "1"}, "len_q = '1'"),
        ({"groups": 0}, "groups = 0"),
        ({"multiple": 0}, "multiple = 0: expected an integer of at least 1"),
        ({"masks": "casual"}, "did you mean causal"),
        ({"layouts": "bhsd"}, "layouts = 'bhsd'"),
        ({"causal": "yes"}, "causal = 'yes': expected True or False"),
        ({"same_lengths": None}, "same_lengths = None"),
    ],
)
def test_a_domain_checks_its_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(message)):
        fl.Domain(**wrong)


def test_a_domain_says_what_it_is() -> None:
    domain = fl.Domain(head_dim=[128], multiple=64, len_kv=range(16, 65, 16), masks=())
    assert eval(repr(domain), {"Domain": fl.Domain}) == domain
    assert domain.words == "head_dim 128, len_kv 16 to 64 by 16, multiple 64, masks none"
    with pytest.raises(fl.UsageError, match="domain = 3"):
        fl.Adapter(attention, domain=3)  # pyright: ignore
