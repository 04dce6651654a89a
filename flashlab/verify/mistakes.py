"""The likely mistake behind a failure, found by trying: attention with each known mistake, beside what the kernel returned.

A mistake is named if the result is within the rule of attention with exactly that mistake, on the failing case and on
larger ones. All of them are computed here in float64, from the weights that they give to each key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashlab.verify.bench import Bench, Result, visible
from flashlab.verify.cases import Case
from flashlab.verify.rule import Align, Expected, judge
from simulator import Problem
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Unavailable
from simulator.operations.attention import ROUNDINGS, SCORE, UNIT

TILES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
"""Keys per tile that mistakes with tiles are tried with."""
SENTINELS = (-1e4, -65504.0, -1e5, -1e9)
"""Finite values that kernels take for minus infinity."""
OVERFLOWS, VANISHES, SMALL = 88.7, -104.0, -87.0
"""exp of more is infinite in float32, exp of less is 0, and exp of less than the last has lost bits."""
MOST_PAIRS = 1 << 21
"""The most (query, key) pairs, over batch and heads, of a case that mistakes are tried on."""


@dataclass(frozen=True)
class Scene:
    """A case, and attention on it in float64: all that a mistake is made of. Scores are (batch, heads, len_q, len_kv)."""

    problem: Problem
    align: Align
    arrays: dict[str, Array]
    seen: Array
    truth: Expected

    @classmethod
    def of(cls, bench: Bench, case: Case) -> Scene:
        p, arrays = case.problem, case.arrays()
        exact = {name: x.astype(np.float64) for name, x in arrays.items()}
        truth = bench.expect(p, arrays)
        if p.lengths is not None:
            return cls(p, bench.target.align, exact, within_sequences(p, lambda i, j: _between(p, i, j)), truth)
        return cls(p, bench.target.align, exact, visible(p, bench.target) & _shown(exact), truth)

    def heads(self, order: Array | None = None) -> tuple[Array, Array]:
        """K and V with one head per query head; `order` says which."""
        if order is None:
            order = np.arange(self.problem.heads) // self.problem.queries_per_kv
        return self.arrays["k"][:, order], self.arrays["v"][:, order]

    @property
    def sinks(self) -> Array:
        """The sink of each head, or none."""
        return self.arrays.get("sinks", np.full(self.problem.heads, -np.inf))

    @property
    def slopes(self) -> Array:
        """The ALiBi slope of each head, or 0."""
        return self.arrays.get("alibi_slopes", np.zeros(self.problem.heads))

    def scores(self, order: Array | None = None, scale: float | None = None) -> Array:
        """The scores before any bias: scaled and, if the problem has a cap, bounded."""
        s = (self.problem.scale if scale is None else scale) * self.products(order)
        return s if self.problem.soft_cap is None else self.problem.soft_cap * np.tanh(s / self.problem.soft_cap)

    def products(self, order: Array | None = None) -> Array:
        """q k^T."""
        return self.arrays["q"] @ self.heads(order)[0].swapaxes(-1, -2)

    def distances(self, offset: int | None = None) -> Array:
        """How far a key lies behind the one that its query is aligned with: (len_q, len_kv). Later keys are below 0."""
        p = self.problem
        rows = np.arange(p.len_q)[:, None] + (p.offset if offset is None else offset)
        return rows - np.arange(p.len_kv)

    def logits(self, order: Array | None = None, scale: float | None = None) -> Array:
        """The scores and ALiBi's bias."""
        return self.scores(order, scale) - self.slopes[:, None, None] * np.abs(self.distances())

    def softmax(self, s: Array, order: Array | None = None, extra: int = 0, sinks: Array | None = None) -> Expected:
        """What softmax(s) V comes to. Beside the keys, `extra` ones have a score and a value of 0, and `sinks` join."""
        sink = (self.sinks if sinks is None else sinks)[:, None, None]
        top: Array = np.maximum(s.max(-1, keepdims=True, initial=0.0 if extra else -np.inf), sink)
        base = np.where(np.isneginf(top), 0.0, top)
        e = np.exp(s - base)
        total = e.sum(-1, keepdims=True) + (extra * np.exp(-top) if extra else 0.0) + np.exp(sink - base)
        with np.errstate(divide="ignore"):
            return self.weighted(e / np.where(total == 0, 1.0, total), (top + np.log(total))[..., 0], order)

    def weighted(self, weights: Array, lse: Array, order: Array | None = None) -> Expected:
        """What these weights of the keys come to, with the rule's tolerances."""
        p, (k, v) = self.problem, self.heads(order)
        sizes = abs(p.scale) * (np.abs(self.arrays["q"]) @ np.abs(k).swapaxes(-1, -2))
        d = SCORE[p.dtype] * np.maximum(1.0, np.where(self.seen, sizes, 0.0).max(-1, initial=0.0))
        out = weights @ v
        spread = (weights**2) @ (v**2).sum(-1)[..., None]
        tolerance = (ROUNDINGS * UNIT[p.dtype] + d) * np.sqrt((out**2).sum(-1) + spread[..., 0]) + 1e-30
        return Expected(out, lse, tolerance, np.maximum(d, self.truth.lse_tolerance))

    def masked(self, s: Array, seen: Array | None = None) -> Array:
        return np.where(self.seen if seen is None else seen, s, -np.inf)


def _shown(arrays: dict[str, Array]) -> Any:
    """The pairs that a dense mask shows, or all."""
    return arrays["mask"] != 0 if "mask" in arrays else True


def _between(p: Problem, i: Array, j: Array) -> Array:
    """Is key j within the masks of the query that is aligned with key i?"""
    wide = 1 << 40
    left, right = (wide if side is None else side for side in (p.left, p.right))
    return (j >= i - left) & (j <= i + right)


def within_sequences(
    p: Problem,
    sees: Callable[[Array, Array], Array],
    aligned: Callable[[int], int] = lambda offset: offset,
    step: int = 0,
) -> Array:
    """Which keys queries see, booleans (len_q, len_kv), where each sequence sees its own, or those of the one `step` later. `sees`
    is told the key that a query is aligned with, and the key."""
    found = np.zeros((p.len_q, p.len_kv), bool)
    for n, (rows, _) in enumerate(p.spans):
        keys = p.spans[(n + step) % len(p.spans)][1]
        i = np.arange(len(rows))[:, None] + aligned(len(keys) - len(rows))
        found[rows.start : rows.stop, keys.start : keys.stop] = sees(i, np.arange(len(keys)))
    return found


Suspect = tuple[str, Expected]


def _ragged(c: Scene) -> Iterator[Suspect]:
    """Other keys than those of a sequence, and other ones of it."""
    p = c.problem
    if p.lengths is None or p.alibi:
        return
    i, j = np.arange(p.len_q)[:, None] + p.offset, np.arange(p.len_kv)
    everything = np.ones(c.seen.shape, bool)
    seen = {
        "each query sees the keys of all sequences": everything if p.right is None else j <= i + p.right,
        "each sequence reads the keys of the next one": within_sequences(p, lambda i, j: _between(p, i, j), step=1),
        "each sequence reads the keys of the one before": within_sequences(p, lambda i, j: _between(p, i, j), step=-1),
        "the last key of each sequence is dropped": within_sequences(
            p, lambda i, j: _between(p, i, j) & (j < j.size - 1)
        ),
        "the first key of each sequence is dropped": within_sequences(p, lambda i, j: _between(p, i, j) & (j > 0)),
    }
    last = p.spans[-1]
    moved = c.seen.copy()
    moved[last[0].start :] = False
    seen["the last sequence is left out"] = moved
    if p.right is not None or p.left is not None:
        own = "the causal mask" if p.causal else "the window"
        seen[f"{own} of each sequence is aligned top-left"] = within_sequences(
            p, lambda i, j: _between(p, i, j), lambda _: 0
        )
        seen[f"{own} is ignored in each sequence"] = within_sequences(p, lambda i, j: np.ones((len(i), len(j)), bool))
        seen[f"{own} is aligned with the whole batch, not with each sequence"] = _between(p, i, j) & within_sequences(
            p, lambda i, j: np.ones((len(i), len(j)), bool)
        )
    for words, keys in seen.items():
        yield words, c.softmax(c.masked(c.scores(), keys))


def _masks(c: Scene) -> Iterator[Suspect]:
    """Other keys than those that a row should see."""
    p, s = c.problem, c.logits()
    key, row = np.arange(p.len_kv), np.arange(p.len_q)[:, None]
    aligned = {"bottom-right": row + p.offset, "top-left": row}
    seen: dict[str, Array] = {}
    if p.causal:
        other: Align = "top-left" if c.align == "bottom-right" else "bottom-right"
        last = aligned[c.align]
        within = np.ones(c.seen.shape, bool) if p.left is None else key >= last - p.left
        seen[f'the causal mask is aligned {other} (if that is meant: causal="{other}")'] = key <= aligned[other]
        more, fewer = "more queries than keys", "fewer queries than keys"
        for words, applies in ((more, p.offset < 0), (fewer, p.offset > 0)):
            seen[f"the causal mask is aligned {other} where there are {words}"] = key <= (
                aligned[other] if applies else last
            )
        seen["the causal mask is ignored"] = within
        seen["a causal row misses its last key: < where <= belongs"] = (key < last) & within
        seen["a causal row sees one key too many"] = (key <= last + 1) & within
    if p.left is not None or (p.right is not None and not p.causal):
        last = row + p.offset
        left, right = (1 << 40 if side is None else side for side in (p.left, p.right))
        sides = (("", 0, 0), ("left ", 1, 0), ("right ", 0, 1))
        for word, a, b in sides[1:]:
            for step, how in ((1, "one key too wide"), (-1, "one key too narrow")):
                seen[f"the window's {word}side is {how}"] = (key >= last - left - a * step) & (
                    key <= last + right + b * step
                )
        seen["the window is ignored"] = key <= last if p.causal else np.ones(c.seen.shape, bool)
        if p.offset:
            seen["the window is aligned top-left"] = (key >= row - left) & (key <= row + right)
    seen["the last key is dropped"] = c.seen & (key < p.len_kv - 1)
    seen["the first key is dropped"] = c.seen & (key > 0)
    for cols in TILES[1:]:
        if p.len_kv % cols:
            whole = p.len_kv - p.len_kv % cols
            seen[f"the keys of the last tile are dropped, where it is not full ({cols} keys)"] = c.seen & (key < whole)
    shown = _shown(c.arrays)
    if shown is True and p.causal:
        yield "the causal mask is ignored beside a mask", c.truth
    if shown is not True:
        own = _between(p, row + p.offset, key)
        if p.causal or p.left is not None or p.right is not None:
            also = "the causal mask" if p.causal else "the window"
            yield f"{also} is ignored beside a mask", c.softmax(c.masked(s, shown))
        yield "the mask is inverted: True hides a key", c.softmax(c.masked(s, ~shown & own))
        yield "the mask is ignored", c.softmax(c.masked(s, own))
        yield "the mask is transposed", c.softmax(c.masked(s, own & (shown.T if p.len_q == p.len_kv else False)))
    for words, keys in seen.items():
        yield words, c.softmax(c.masked(s, np.broadcast_to(keys & shown, c.seen.shape)))
    for value in SENTINELS:  # rows that see no key look alike with all of them
        yield "hidden scores are finite, such as -1e4, instead of -inf", c.softmax(np.where(c.seen, s, value))
    if c.seen.all():
        for cols in TILES[1:]:
            if extra := -p.len_kv % cols:
                yield f"padded keys count, up to a multiple of {cols}", c.softmax(s, extra=extra)


def _scales(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    padded = 1 << (p.head_dim - 1).bit_length()
    scales = {
        "1/sqrt(head_dim)": 1 / math.sqrt(p.head_dim),
        "1/head_dim": 1 / p.head_dim,
        "1: it is missing": 1.0,
        "sqrt(head_dim)": math.sqrt(p.head_dim),
        "1/sqrt of a padded head dim": 1 / math.sqrt(padded),
        "applied twice": p.scale**2,
        "times log2(e), although exp is to base e": p.scale / math.log(2),
        "without its log2(e), although exp is to base 2": p.scale * math.log(2),
        "negated": -p.scale,
    }
    default = " by default" if "scale" not in p.given else ""
    for words, scale in scales.items():
        yield f"the scale is {words}{default}", c.softmax(c.masked(c.logits(scale=scale)))


def _heads(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    if p.queries_per_kv > 1:
        orders = {"KV heads are interleaved: head h reads KV head h % kv_heads": np.arange(p.heads) % p.kv_heads}
        orders["all heads read KV head 0"] = np.zeros(p.heads, int)
        for words, order in orders.items():
            yield words, c.softmax(c.masked(c.logits(order)), order)


def _soft_cap(c: Scene) -> Iterator[Suspect]:
    p, cap = c.problem, c.problem.soft_cap
    if cap is None:
        return
    s, bias = p.scale * c.products(), c.slopes[:, None, None] * np.abs(c.distances())
    wrong = {
        "the soft cap is ignored": s,
        "the soft cap bounds products that aren't scaled yet": p.scale * cap * np.tanh(c.products() / cap),
        "the soft cap's tanh isn't multiplied with the cap": np.tanh(s / cap),
        "the soft cap's tanh is multiplied with the score, not with the cap": s * np.tanh(s / cap),
        "the soft cap cuts scores off, without a tanh": np.clip(s, -cap, cap),
    }
    for words, scores in wrong.items():
        yield words, c.softmax(c.masked(scores - bias))
    yield "the soft cap is applied after ALiBi's bias", c.softmax(c.masked(cap * np.tanh((s - bias) / cap)))
    yield "the soft cap is applied after the mask", c.softmax(np.where(c.seen, c.logits(), -cap))


def _sinks(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    if not p.sinks:
        return
    s, none = c.masked(c.logits()), np.full(p.heads, -np.inf)
    sinks = {
        "the sinks are ignored": none,
        "the sinks are added twice": c.sinks + math.log(2),
        "the sinks are scaled like scores": p.scale * c.sinks,
        "the sinks are taken to base 2, without their log2(e)": c.sinks * math.log(2),
        "each head has the sink of another: that of its KV head": c.sinks[np.arange(p.heads) // p.queries_per_kv],
        "all heads have the sink of head 0": np.full(p.heads, c.sinks[0]),
    }
    for words, numbers in sinks.items():
        yield words, c.softmax(s, sinks=numbers)
    without = c.softmax(s, sinks=none)
    yield "the LSE lacks the sinks, which `out` has", replace(c.truth, lse=without.lse)
    yield "the LSE has the sinks, which `out` lacks", replace(without, lse=c.truth.lse)


def _alibi(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    if not p.alibi:
        return
    away, slopes = c.distances(), c.slopes[:, None, None]
    one_kv = c.slopes[np.arange(p.heads) // p.queries_per_kv][:, None, None]
    biases = {
        "ALiBi is ignored": np.zeros_like(slopes),
        "ALiBi's bias is added, not subtracted": -slopes * np.abs(away),
        "ALiBi's distances are aligned top-left": slopes * np.abs(c.distances(0)),
        "ALiBi's distances to later keys are negative": slopes * away,
        "ALiBi's bias is scaled like scores": p.scale * slopes * np.abs(away),
        "ALiBi's bias is taken to base 2, without its log2(e)": math.log(2) * slopes * np.abs(away),
        "each head has the slope of another: that of its KV head": one_kv * np.abs(away),
        "all heads have the slope of head 0": slopes[0] * np.abs(away),
    }
    for words, bias in biases.items():
        yield words, c.softmax(c.masked(c.scores() - bias))


def _sums(c: Scene) -> Iterator[Suspect]:
    """Sums over tiles that forget what their softmax was relative to."""
    p = c.problem
    s = c.masked(c.logits())
    if not s.size or p.sinks:  # with a sink, each of these has variants of its own
        return
    top: Array = s.max(-1, keepdims=True)
    base = np.where(np.isneginf(top), 0.0, top)
    e = np.exp(s - base)
    total = e.sum(-1, keepdims=True)
    safe = np.where(total == 0, 1.0, total)
    yield "out is not divided by the sum", c.weighted(e, c.truth.lse)
    for cols in TILES:
        if cols >= p.len_kv:
            break
        starts = np.arange(0, p.len_kv, cols)
        running = np.maximum.accumulate(np.maximum.reduceat(s, starts, axis=-1), axis=-1)
        then: Array = np.repeat(running, np.diff(starts, append=p.len_kv), axis=-1)
        late = np.exp(np.where(np.isneginf(s), -np.inf, s) - np.where(np.isneginf(then), 0.0, then))
        sums = late.sum(-1, keepdims=True)
        both = np.where(sums == 0, 1.0, sums)
        with np.errstate(divide="ignore"):
            wrong = (base + np.log(sums))[..., 0]
        tiles = f"when the maximum moves (tiles of {cols} keys)"
        yield f"the accumulator is not rescaled {tiles}", c.weighted(late / safe, c.truth.lse)
        for first, said in ((2, "third"), (3, "fourth")):
            if first < len(starts):  # what lies before is relative to one maximum
                then[..., : starts[first]] = running[..., first - 1 : first]
                part = np.exp(np.where(np.isneginf(s), -np.inf, s) - np.where(np.isneginf(then), 0.0, then))
                yield (
                    f"the accumulator is not rescaled from the {said} tile on (tiles of {cols} keys)",
                    c.weighted(part / safe, c.truth.lse),
                )
        yield f"the sum is not rescaled {tiles}", c.weighted(e / both, wrong)
        yield f"neither accumulator nor sum is rescaled {tiles}", c.weighted(late / both, wrong)


def _lses(c: Scene) -> Iterator[Suspect]:
    """The LSE of another convention, beside the right output."""
    t = c.truth
    s = c.masked(c.logits())
    top: Array = s.max(-1, initial=-np.inf)
    unscaled = c.softmax(c.masked(c.logits(scale=1.0))).lse
    with np.errstate(invalid="ignore", over="ignore"):
        log = t.lse - top
        lses = {
            'the LSE is to base 2 (if that is meant: lse="2")': t.lse / math.log(2),
            'the LSE is to base e (if that is meant: lse="e")': t.lse * math.log(2),
            "the LSE is negated": -t.lse,
            "the LSE lacks the maximum": log,
            "the LSE is the maximum alone": top,
            "the LSE has the sign of its logarithm wrong": top - log,
            "the LSE is upside-down: the logarithm is subtracted from nothing": -log,
            "the LSE is the sum, without a logarithm": np.exp(log),
            "the LSE is of scores without their scale": np.where(np.isneginf(top), -np.inf, unscaled),
            "the LSE adds the maximum to the base-2 logarithm": top + log / math.log(2),
        }  # fmt: skip
    for words, lse in lses.items():
        yield words, replace(t, lse=np.where(np.isneginf(t.lse), -np.inf, lse))


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
        yield "a row that sees no key must be 0, with an LSE of -inf; here it is something else"
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


def _matching(bench: Bench, case: Case, *, failing: bool) -> dict[str, bool] | None:
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
    if failing and right:
        return None
    found = dict[str, bool]()
    empty = np.isneginf(c.truth.lse)
    for words, expected in _suspects(c):
        # what a row without keys has is a matter of its own
        lse = None if result.lse is None else np.where(empty, np.float32(-np.inf), result.lse)
        expected = replace(expected, lse=np.where(empty, -np.inf, expected.lse))
        found[words] = judge(expected, result.out, lse).passed or found.get(words, False)
    return found if right else found | dict.fromkeys(_by_rows(c, result), True) | {"": False}


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


_ROWS = {
    *(f"{name} is rounded to {short}" for name in ("out", "the LSE") for short in ("float16", "bfloat16")),
    "a row that sees no key must be 0, with an LSE of -inf; here it is something else",
    "the maximum is not subtracted before exp",
    "the running maximum starts at 0, not at -inf",
}


def _suspects(c: Scene) -> Iterator[Suspect]:
    for kind in (
        (_ragged,)
        if c.problem.lengths is not None
        else (_masks, _scales, _heads, _soft_cap, _sinks, _alibi, _sums, _lses)
    ):
        yield from kind(c)


def likely(bench: Bench, case: Case, others: Sequence[Case] = ()) -> str:
    """The mistake that explains a failing case and the `others`, or nothing. At most two are named, with an "or".

    A mask of bits or blocks is explained by nothing. In a ragged batch mistakes are in which keys a sequence sees.
    """
    if case.problem.mask not in (None, "dense"):
        return ""
    with np.errstate(all="ignore"):
        found = {words for words, fits in (_matching(bench, case, failing=True) or {}).items() if fits}
        for other in (*others, *_larger(bench, case)):
            if found and (more := _matching(bench, other, failing=False)) is not None:
                found = {words for words in found if more.get(words, "" not in more)}
    order: dict[str, Any] = dict.fromkeys(words for words, _ in _suspects(Scene.of(bench, case)))
    named = [words for words in (*order, *sorted(_ROWS)) if words in found and not _narrower(words, found)]
    return "; or ".join(named) if len(named) <= 2 else ""


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
    if p.mask is not None:
        yield bench.target.domain.fit_case(
            replace(case, problem=p.replace(mask=None, len_q=p.len_q + 7, len_kv=p.len_kv + 41))
        )
    for rows, keys in ((7, 41), (75, 22)):
        heads = {"heads": 4 * p.queries_per_kv, "kv_heads": 4}
        changes: dict[str, Any] = {"len_q": p.len_q + rows, "len_kv": p.len_kv + keys, "head_dim": max(p.head_dim, 48)}
        yield bench.target.domain.fit_case(replace(case, problem=p.replace(**changes, **heads)))
