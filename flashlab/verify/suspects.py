"""What attention comes to with each known mistake in it: the list that the search for a mistake tries.

All are computed in float64, from the weights that they give to each key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from flashlab.verify.rule import Align
from flashlab.verify.scene import Scene, Suspect, between, shown, within_sequences
from simulator import Problem
from simulator.dtypes import Array

__all__ = ["suspects"]

TILES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
"""Keys per tile that mistakes with tiles are tried with."""
PARTS = (2, 3, 4, 8)
"""Numbers of parts that mistakes of a merge are tried with."""
SENTINELS = (-1e4, -65504.0, -1e5, -1e9)
"""Finite values that kernels take for minus infinity."""


def _ragged(c: Scene) -> Iterator[Suspect]:
    """Other keys than those of a sequence, and other ones of it."""
    p = c.problem
    if p.lengths is None or p.alibi:
        return
    i, j = np.arange(p.len_q)[:, None] + p.offset, np.arange(p.len_kv)
    everything = np.ones(c.seen.shape, bool)
    seen = {
        "each query sees the keys of all sequences": everything if p.right is None else j <= i + p.right,
        "each sequence reads the keys of the next one": within_sequences(p, lambda i, j: between(p, i, j), step=1),
        "each sequence reads the keys of the one before": within_sequences(p, lambda i, j: between(p, i, j), step=-1),
        "the last key of each sequence is dropped": within_sequences(
            p, lambda i, j: between(p, i, j) & (j < j.size - 1)
        ),
        "the first key of each sequence is dropped": within_sequences(p, lambda i, j: between(p, i, j) & (j > 0)),
    }
    for words, before, after in (
        ("each sequence has one key of the next one, too", 0, 1),
        ("each sequence has one key of the one before, too", 1, 0),
    ):

        def wider(keys: range, before: int = before, after: int = after) -> range:
            return range(max(0, keys.start - before), min(p.len_kv, keys.stop + after)) if keys else keys

        seen[words] = _of_keys(p, wider)
    seen["a sequence's keys begin where its queries do"] = _of_keys(p, lambda keys: keys, queries=True)
    last = p.spans[-1]
    moved = c.seen.copy()
    moved[last[0].start :] = False
    seen["the last sequence is left out"] = moved
    if p.right is not None or p.left is not None:
        own = "the causal mask" if p.causal else "the window"
        seen[f"{own} of each sequence is aligned top-left"] = within_sequences(
            p, lambda i, j: between(p, i, j), lambda _: 0
        )
        seen[f"{own} is ignored in each sequence"] = within_sequences(p, lambda i, j: np.ones((len(i), len(j)), bool))
        seen[f"{own} is aligned with the whole batch, not with each sequence"] = between(p, i, j) & within_sequences(
            p, lambda i, j: np.ones((len(i), len(j)), bool)
        )
    for words, keys in seen.items():
        yield words, c.softmax(c.masked(c.scores(), keys))


def _of_keys(p: Problem, keys_of: Callable[[range], range], *, queries: bool = False) -> Array:
    """Which keys queries see where a sequence has other keys, of which its last query sees the last. With `queries`, the offsets
    of queries are taken for those of keys."""
    found = np.zeros((p.len_q, p.len_kv), bool)
    for rows, keys in p.spans:
        own = keys_of(range(rows.start, min(rows.start + len(keys), p.len_kv)) if queries else keys)
        i, j = np.arange(len(rows))[:, None] + len(own) - len(rows), np.arange(len(own))
        found[rows.start : rows.stop, own.start : own.stop] = between(p, i, j)
    return found


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
        seen["the causal mask is the other way round: a query sees its own key and later ones"] = (key >= last) & within
        for cols in TILES[1:]:
            words = f"the causal mask hides whole tiles alone ({cols} keys)"
            seen[words] = (key - key % cols <= last) & within
    if p.left is not None or (p.right is not None and not p.causal):
        last = row + p.offset
        left, right = (1 << 40 if side is None else side for side in (p.left, p.right))
        sides = (("", 0, 0), ("left ", 1, 0), ("right ", 0, 1))
        for word, a, b in sides[1:]:
            for step, how in ((1, "one key too wide"), (-1, "one key too narrow")):
                seen[f"the window's {word}side is {how}"] = (key >= last - left - a * step) & (
                    key <= last + right + b * step
                )
        seen["the window's sides are swapped"] = (key >= last - right) & (key <= last + (0 if p.causal else left))
        if p.left is not None and p.right is not None and not p.causal:
            seen["the window's left side is ignored"] = key <= last + right
            seen["the window's right side is ignored"] = key >= last - left
        seen["the window is ignored"] = key <= last if p.causal else np.ones(c.seen.shape, bool)
        if p.offset:
            seen["the window is aligned top-left"] = (key >= row - left) & (key <= row + right)
    seen["the last key is dropped"] = c.seen & (key < p.len_kv - 1)
    seen["the first key is dropped"] = c.seen & (key > 0)
    for cols in TILES[1:]:
        if p.len_kv % cols:
            whole = p.len_kv - p.len_kv % cols
            seen[f"the keys of the last tile are dropped, where it is not full ({cols} keys)"] = c.seen & (key < whole)
        seen[f"the keys of the first tile are dropped ({cols} keys)"] = c.seen & (key >= cols)
        seen[f"the last key of each tile is dropped ({cols} keys)"] = c.seen & (key % cols < cols - 1)
        seen[f"the first key of each tile is dropped ({cols} keys)"] = c.seen & (key % cols > 0)
    given = shown(c.arrays)
    if given is True and p.causal:
        yield "the causal mask is ignored beside a mask", c.truth
    if given is not True:
        own = between(p, row + p.offset, key)
        if p.causal or p.left is not None or p.right is not None:
            also = "the causal mask" if p.causal else "the window"
            yield f"{also} is ignored beside a mask", c.softmax(c.masked(s, given))
            yield f"a query sees what {also} or the mask shows, not what both do", c.softmax(c.masked(s, given | own))
        yield "the mask is inverted: True hides a key", c.softmax(c.masked(s, ~given & own))
        yield "the mask is ignored", c.softmax(c.masked(s, own))
        yield "the mask is transposed", c.softmax(c.masked(s, own & (given.T if p.len_q == p.len_kv else False)))
    for words, keys in seen.items():
        yield words, c.softmax(c.masked(s, np.broadcast_to(keys & given, c.seen.shape)))
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
        # a scale by default and its square look alike there. A problem that says a scale tells them apart
        said = "" if words == "applied twice" else default
        yield f"the scale is {words}{said}", c.softmax(c.masked(c.logits(scale=scale)))


def _heads(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    orders: dict[str, Array] = {}
    if p.queries_per_kv > 1:
        orders["KV heads are interleaved: head h reads KV head h % kv_heads"] = np.arange(p.heads) % p.kv_heads
    if p.heads > 1:
        orders["all heads read KV head 0"] = np.zeros(p.heads, int)
        for words, order in orders.items():
            yield words, c.softmax(c.masked(c.logits(order)), order)
            yield f"{words} (its keys alone)", c.softmax(c.masked(c.logits(order)))
            yield f"{words} (its values alone)", c.softmax(c.masked(c.logits()), order)


def _inputs(c: Scene) -> Iterator[Suspect]:
    """K and V of another sequence of the batch, or in each other's place."""
    k, v = c.arrays["k"], c.arrays["v"]
    others: dict[str, dict[str, Array]] = {}
    if len(k) > 1:
        for words, x, y in (
            ("sequence 0 of the batch", np.repeat(k[:1], len(k), 0), np.repeat(v[:1], len(v), 0)),
            ("the next sequence of the batch", np.roll(k, -1, 0), np.roll(v, -1, 0)),
            ("the sequence before in the batch", np.roll(k, 1, 0), np.roll(v, 1, 0)),
        ):
            others[f"K and V are those of {words}"] = {"k": x, "v": y}
            others[f"K is that of {words}"], others[f"V is that of {words}"] = {"k": x}, {"v": y}
    if k.shape == v.shape:
        others["the scores are made of V, not of K"] = {"k": v}
        others["the values are read from K"] = {"v": k}
        others["K and V are swapped"] = {"k": v, "v": k}
    for words, arrays in others.items():
        other = replace(c, arrays=c.arrays | arrays)
        yield words, other.softmax(other.masked(other.logits()))


def _soft_cap(c: Scene) -> Iterator[Suspect]:
    p, cap = c.problem, c.problem.soft_cap
    if cap is None:
        return
    s, bias = p.scale * c.products(), c.slopes[:, None, None] * np.abs(c.distances())
    wrong = {
        "the soft cap is ignored": s,
        "the soft cap bounds products that aren't scaled yet": p.scale * cap * np.tanh(c.products() / cap),
        "the soft cap's tanh isn't multiplied with the cap": np.tanh(s / cap),
        "the soft cap's tanh is of scores that aren't divided by the cap": cap * np.tanh(s),
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
    sink = c.sinks[:, None, None]
    for keys in (True, False):
        top: Array = s.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isneginf(top), 0.0, top) if keys else np.maximum(top, sink)
        e = np.exp(s - top)
        for words, part in (
            ("the sinks' exponentials aren't relative to the maximum, as those of scores are", np.exp(sink)),
            ("the sinks are added to the sum as they are, without an exponential", sink),
        ):
            total = e.sum(-1, keepdims=True) + part
            yield words, c.weighted(e / np.where(total == 0, 1.0, total), (top + np.log(total))[..., 0])
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
    down: Array = s.max(-2, keepdims=True)
    across = np.exp(s - np.where(np.isneginf(down), 0.0, down))
    column = across.sum(-2, keepdims=True)
    yield (
        "the softmax runs over the queries of a key, not over the keys of a query",
        c.weighted(across / np.where(column == 0, 1.0, column), c.truth.lse),
    )
    for word, at in (("last", -1), ("first", 0)):
        twice = e.copy()
        twice[..., at] *= 2
        more = twice.sum(-1, keepdims=True)
        both = np.where(more == 0, 1.0, more)
        with np.errstate(divide="ignore"):
            log = (base + np.log(more))[..., 0]
        yield f"the {word} key counts twice", c.weighted(twice / both, log)
        yield f"the {word} key counts twice in the sum", c.weighted(e / both, log)
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
                once = then.copy()
                once[..., : starts[first]] = running[..., first - 1 : first]
                part = np.exp(np.where(np.isneginf(s), -np.inf, s) - np.where(np.isneginf(once), 0.0, once))
                yield (
                    f"the accumulator is not rescaled from the {said} tile on (tiles of {cols} keys)",
                    c.weighted(part / safe, c.truth.lse),
                )
        up = late * np.exp(running[..., -1:] - np.where(np.isneginf(then), running[..., -1:], then))
        ups = up.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            log = (base + np.log(ups))[..., 0]
        yield f"what was summed is rescaled upside-down {tiles}", c.weighted(up / np.where(ups == 0, 1.0, ups), log)
        own = np.repeat(np.add.reduceat(late, starts, axis=-1), np.diff(starts, append=p.len_kv), axis=-1)
        each = np.where(own == 0, 0.0, e / np.where(own == 0, 1.0, own))
        yield f"each tile is divided by a sum of its own (tiles of {cols} keys)", c.weighted(each, c.truth.lse)
        final = e[..., starts[-1] :].sum(-1, keepdims=True)
        yield (
            f"out is divided by the sum of the last tile alone (tiles of {cols} keys)",
            c.weighted(e / final, c.truth.lse),
        )
        key = np.arange(p.len_kv)
        before = np.where(key < cols, key, key - cols)
        moved = replace(c, arrays=c.arrays | {"v": c.arrays["v"][:, :, before]})
        yield f"the values of a tile are those of the tile before ({cols} keys)", moved.softmax(s)
        yield f"the sum is not rescaled {tiles}", c.weighted(e / both, wrong)
        yield f"neither accumulator nor sum is rescaled {tiles}", c.weighted(late / both, wrong)


def _parts(c: Scene) -> Iterator[Suspect]:
    """Keys in parts, each with an output and an LSE of its own, that are merged wrongly."""
    p = c.problem
    s = c.masked(c.logits())
    if not s.size or p.sinks:
        return
    for number in PARTS:
        size = -(-p.len_kv // number)
        cuts = [slice(min(n * size, p.len_kv), min((n + 1) * size, p.len_kv)) for n in range(number)]
        tops, sums, own, weighed = list[Array](), list[Array](), np.zeros_like(s), np.zeros_like(s)
        for cut in cuts:
            top: Array = s[..., cut].max(-1, keepdims=True, initial=-np.inf)
            e = np.exp(s[..., cut] - np.where(np.isneginf(top), 0.0, top))
            total = e.sum(-1, keepdims=True)
            weighed[..., cut], own[..., cut] = e, e / np.where(total == 0, 1.0, total)
            tops.append(top[..., 0])
            sums.append(total[..., 0])
        top, total = np.stack(tops, -1), np.stack(sums, -1)
        lse = np.where(total == 0, -np.inf, top + np.log(np.where(total == 0, 1.0, total)))
        yield from _merged(c, f"({number} parts)", cuts, (top, total, lse), own, weighed)


def _merged(
    c: Scene, parts: str, cuts: list[slice], of: tuple[Array, Array, Array], own: Array, weighed: Array
) -> Iterator[Suspect]:
    """Parts merged wrongly. `of` are their maxima, sums and LSEs, (…, parts). `own` are the weights within a part, and
    `weighed` the exponentials before its division."""
    top, total, lse = of

    def spread(x: Array) -> Array:
        return np.repeat(x, [cut.stop - cut.start for cut in cuts], axis=-1)

    def weights(logs: Array, base: float = math.e) -> tuple[Array, Array]:
        """Each part's weight, which aren't divided yet, and their sum's logarithm."""
        most: Array = logs.max(-1, keepdims=True)
        most = np.where(np.isneginf(most), 0.0, most)
        found = base ** (logs - most)
        return found, (most + np.log(found.sum(-1, keepdims=True)))[..., 0]

    def divided(x: Array) -> Array:
        sums = x.sum(-1, keepdims=True)
        return x / np.where(sums == 0, 1.0, sums)

    t, number = c.truth, len(cuts)
    right, log = weights(lse)
    yield f"the parts are averaged, whatever their LSE {parts}", c.weighted(own / number, t.lse)
    yield f"the parts are added, whatever their LSE {parts}", c.weighted(own, t.lse)
    yield f"merged parts aren't divided by the sum of their weights {parts}", c.weighted(own * spread(right), t.lse)
    by_tops, tops = weights(np.where(np.isneginf(lse), -np.inf, top))
    yield f"a part's weight follows from its maximum alone {parts}", c.weighted(own * spread(divided(by_tops)), tops)
    yield (
        f"a part's weight follows from its maximum alone, but for the LSE {parts}",
        c.weighted(own * spread(divided(by_tops)), t.lse),
    )
    for base, said in (
        (2.0, "base 2, and LSEs to base e"),
        (math.e ** math.log2(math.e), "base e, and LSEs to base 2"),
    ):
        other, merged = weights(lse, base)
        yield f"the weights of parts are powers to {said} {parts}", c.weighted(own * spread(divided(other)), merged)
    yield (
        f"parts aren't divided by their own sums before they are weighed {parts}",
        c.weighted(weighed * spread(divided(right)), log),
    )
    yield (
        f"parts are divided by their own sums twice {parts}",
        c.weighted(own * spread(divided(right) / np.where(total == 0, 1.0, total)), log),
    )
    for word, keep in (("last", slice(0, -1)), ("first", slice(1, None))):
        rest = np.full_like(lse, -np.inf)
        rest[..., keep] = lse[..., keep]
        left, merged = weights(rest)
        yield f"the {word} part is left out of the merge {parts}", c.weighted(own * spread(divided(left)), merged)
    if np.isneginf(lse).any():
        zero, merged = weights(np.where(np.isneginf(lse), 0.0, lse))
        yield (
            f"a part that sees no key counts, with an LSE of 0 {parts}",
            c.weighted(own * spread(divided(zero)), merged),
        )
    yield f"the LSE of merged parts is the largest of theirs {parts}", replace(t, lse=lse.max(-1))
    yield f"the LSEs of parts are added {parts}", replace(t, lse=lse.sum(-1))
    yield f"the LSEs of parts are averaged {parts}", replace(t, lse=lse.mean(-1))
    yield f"the LSE of merged parts is that of the last {parts}", replace(t, lse=lse[..., -1])
    yield f"the LSE of merged parts is that of the first {parts}", replace(t, lse=lse[..., 0])


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


_PLAIN = (_masks, _scales, _heads, _inputs, _soft_cap, _sinks, _alibi, _sums, _parts, _lses)
_OF_RAGGED = (_ragged, _scales, _heads, _soft_cap, _sinks, _lses)


def suspects(c: Scene) -> Iterator[Suspect]:
    """Each known mistake by its words, and what a case comes to with it."""
    for kind in _PLAIN if c.problem.lengths is None else _OF_RAGGED:
        yield from kind(c)
