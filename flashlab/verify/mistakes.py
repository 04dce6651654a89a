"""The likely mistake behind a failure, found by trying: attention with each known mistake, beside what the kernel returned.

A mistake is named if the result is within the rule of attention with exactly that mistake, on the failing case and on
larger ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashlab.verify import dropout
from flashlab.verify.adapter import CallableTarget
from flashlab.verify.bench import Bench, Result
from flashlab.verify.cases import Case
from flashlab.verify.rule import Expected, judge
from flashlab.verify.scene import Scene
from flashlab.verify.suspects import suspects
from simulator import Problem
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Unavailable
from simulator.operations.attention import UNIT

OVERFLOWS, VANISHES, SMALL = 88.7, -104.0, -87.0
"""exp of more is infinite in float32, exp of less is 0, and exp of less than the last has lost bits."""
_EMPTY = "a row that sees no key must be 0, with an LSE of -inf; here it is something else"
MOST_PAIRS = 1 << 21
"""The most (query, key) pairs, over batch and heads, of a case that mistakes are tried on."""


def _by_rows(c: Scene, result: Result) -> Iterator[str]:
    """Mistakes that show in which rows are wrong, whatever is in them."""
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.linalg.norm(result.out.astype(np.float64) - c.truth.out, axis=-1)
        wrong = ~(off <= c.truth.out_tolerance)
        if result.lse is not None:
            close = np.abs(result.lse.astype(np.float64) - c.truth.lse) <= c.truth.lse_tolerance
            wrong |= ~(close | (np.isneginf(result.lse) & np.isneginf(c.truth.lse)))
    empty = np.isneginf(c.truth.lse)
    if not wrong.any():
        return
    yield from _rounded(c, result)
    if (wrong == empty).all():
        yield _EMPTY
        return
    s = c.masked(c.logits())
    top: Array = s.max(-1, initial=-np.inf)
    over, under, small = top > OVERFLOWS, (top < VANISHES) & ~empty, (top < SMALL) & ~empty
    for words, sure, perhaps in (
        ("the maximum is not subtracted before exp", over | under, over | small | (top > OVERFLOWS - 12)),
        ("the running maximum starts at 0, not at -inf", under, small),
    ):
        if sure.any() and (sure <= wrong).all() and (wrong <= perhaps).all():
            yield words


def _matching(bench: Bench, case: Case) -> dict[str, bool] | None:
    """Whether each mistake explains a case. Where it is right, those that make no difference aren't all there; where it isn't, ""
    is. None if it says nothing: it is too large, or it is not run."""
    p = case.problem
    if p.batch * p.heads * p.len_q * p.len_kv > MOST_PAIRS or not bench.does(p):
        return None
    try:
        result = bench.run(p, case.arrays(), layout=case.layout, tile=case.tile)
    except Unavailable:
        raise
    except (Exception, SystemExit):  # it raises, refuses, or writes where it must not: that says nothing of its numbers
        return None
    c = Scene.of(bench, case)
    if result.out.shape != c.truth.out.shape or (result.lse is not None and result.lse.shape != c.truth.lse.shape):
        return {"": False}
    right = judge(c.truth, result.out, result.lse).passed
    found = dict[str, bool]()
    empty = np.isneginf(c.truth.lse)
    for words, expected in suspects(c):
        # what a row without keys has is a matter of its own
        lse = None if result.lse is None else np.where(empty, np.float32(-np.inf), result.lse)
        expected = replace(expected, lse=np.where(empty, -np.inf, expected.lse))
        found[words] = found.get(words, False) or _fits(expected, result.out, lse)
    return found if right else found | dict.fromkeys(_by_rows(c, result), True) | {"": False}


def _fits(expected: Expected, out: Array, lse: Array | None) -> bool:
    """Is a result within the rule of this truth? A row for which both have no number is no difference, if there are others."""
    lost = np.asarray(~np.isfinite(expected.out).all(-1))
    if lost.any() and not lost.all() and np.array_equal(lost, ~np.isfinite(out.astype(np.float64)).all(-1)):
        truth = np.where(lost[..., None], 0.0, expected.out)
        expected = replace(expected, out=truth, out_tolerance=np.where(lost, 1.0, expected.out_tolerance))
        out = np.where(lost[..., None], 0, out)
    return judge(expected, out, lse).passed


def _rounded(c: Scene, result: Result) -> Iterator[str]:
    """Numbers that are stored in 16 bits on their way, where the rest is right."""
    with np.errstate(invalid="ignore", over="ignore"):
        out = result.out.astype(np.float64)
        fine = np.linalg.norm(out - c.truth.out, axis=-1) <= c.truth.out_tolerance
        lse = None if result.lse is None else result.lse.astype(np.float64)
        known = ~np.isneginf(c.truth.lse)
        off = np.zeros(known.shape) if lse is None else np.where(known, np.abs(lse - c.truth.lse), 0.0)
        for short in ("float16", "bfloat16"):
            unit = 1.01 * UNIT[short]
            if lse is not None and fine.all() and _stored(result.lse, short):
                if (off <= unit * np.abs(np.where(known, c.truth.lse, 0.0)) + c.truth.lse_tolerance).all():
                    yield f"the LSE is rounded to {short}"
            if c.problem.dtype == "float32" and (off <= c.truth.lse_tolerance).all() and _stored(result.out, short):
                if (np.abs(out - c.truth.out) <= unit * np.maximum(np.abs(c.truth.out), 1e-3)).all():
                    yield f"out is rounded to {short}"


def _stored(x: Any, dtype: str) -> bool:
    """Has it no number that this dtype hasn't?"""
    return np.array_equal(x, x.astype(numpy_dtype(dtype)).astype(x.dtype), equal_nan=True)


def likely(bench: Bench, case: Case, others: Sequence[Case] = ()) -> str:
    """The mistake that explains a failing case and the `others`, or nothing. At most two are named, with an "or".

    A mask of bits or blocks is explained by nothing. In a ragged batch mistakes are in which keys a sequence sees.
    """
    if case.problem.mask not in (None, "dense"):
        return ""
    if case.problem.dropout:
        if not isinstance(bench.target, CallableTarget):
            return ""
        return next((words for each in (case, *others) if (words := dropout.likely(bench, each.problem))), "")
    cases = [case, *others, *_larger(bench, case)]
    # rows without keys, and sinks, say little of sums: a plainer or a larger case says more
    plainer = [replace(case, problem=case.problem.replace(sinks=False))] if case.problem.sinks else []
    plainer += [each for one in plainer for each in _larger(bench, one)]
    matched = dict[str, dict[str, bool] | None]()
    for known in (cases, plainer):
        of_empty = [each for each in known if (_matched(bench, each, matched) or {}).get(_EMPTY)]
        for start in (*(each for each in known if each not in of_empty), *of_empty):
            if named := _named(bench, start, known, matched):
                return in_a_line(named)
    return ""


_SIZE = re.compile(r" \((tiles of )?\d+ (keys|parts)\)$")
"""How words end that say a number of keys or parts."""


def in_a_line(named: Sequence[str]) -> str:
    """At most two mistakes in a line, or nothing. Where several differ only in a size, none is said."""
    plain = dict[str, list[str]]()
    for words in named:
        plain.setdefault(_SIZE.sub("", words), []).append(words)
    found = [words[0] if len(words) == 1 else base for base, words in plain.items()]
    return "; or ".join(found) if len(found) <= 2 else ""


def _matched(bench: Bench, case: Case, known: dict[str, dict[str, bool] | None]) -> dict[str, bool] | None:
    """`_matching`, once per case."""
    if case.source not in known:
        with np.errstate(all="ignore"):
            known[case.source] = _matching(bench, case)
    return known[case.source]


def _named(bench: Bench, case: Case, others: Sequence[Case], matched: dict[str, dict[str, bool] | None]) -> list[str]:
    """The mistakes that explain a failing case and all of the others, in order."""
    first = _matched(bench, case, matched)
    if first is None or "" not in first:
        return []
    found = {words for words, fits in first.items() if fits}
    for other in others:
        more = _matched(bench, other, matched) if found else None
        if more is not None and (not more.get(_EMPTY) or _EMPTY in found):
            found = {words for words in found if _explains(words, more)}
    return [words for words in first if words in found and not _narrower(words, found)]


def _explains(words: str, more: dict[str, bool]) -> bool:
    """Does a mistake explain another case? Where that is right, one that isn't tried makes no difference."""
    right, plain = "" not in more, words.removesuffix(" by default")
    return more.get(words, right or (plain != words and more.get(plain, False)))


def _narrower(words: str, found: set[str]) -> bool:
    """Is a mistake part of a plainer one that explains as much?"""
    plain, where, _ = words.partition(" where there are ")
    return bool(where) and any(other != words and other.startswith(f"{plain} (") for other in found)


def _larger(bench: Bench, case: Case) -> Iterator[Case]:
    """Cases of the same kind with more rows, keys and elements, so that fewer mistakes look alike."""
    p = case.problem
    if p.lengths is not None:
        more = p.replace(
            lengths=[*p.lengths, (9, 41), (40, 23), (30, 30)], len_q=None, len_kv=None, head_dim=max(p.head_dim, 48)
        )
        yield bench.target.domain.fit_case(replace(case, problem=more))
        return
    for changes in _sharper(p):
        yield bench.target.domain.fit_case(
            replace(case, problem=p.replace(**changes, len_q=p.len_q + 7, len_kv=p.len_kv + 9))
        )
    if p.mask is not None:
        yield bench.target.domain.fit_case(
            replace(case, problem=p.replace(mask=None, len_q=p.len_q + 7, len_kv=p.len_kv + 41))
        )
    for rows, keys in ((7, 41), (75, 22)):
        heads = {"heads": 4 * p.queries_per_kv, "kv_heads": 4}
        changes: dict[str, Any] = {"len_q": p.len_q + rows, "len_kv": p.len_kv + keys, "head_dim": max(p.head_dim, 48)}
        yield bench.target.domain.fit_case(replace(case, problem=p.replace(**changes, **heads)))


def _sharper(p: Problem) -> Iterator[dict[str, Any]]:
    """What tells mistakes apart that look alike: a cap that is near the scores, a scale of one's own."""
    if p.soft_cap is not None:
        yield {"soft_cap": 0.5}
    if "scale" not in p.given:
        yield {"scale": 0.3}
