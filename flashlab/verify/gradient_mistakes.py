"""The likely mistake behind wrong gradients, found by trying: a backward pass with each known mistake, beside what was returned.

As for the forward pass (`mistakes`), a mistake is named if the gradients are those of exactly that mistake, on the failing case and
on others. All are computed here in float64, from formulas that are written anew, with one thing changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlab.verify.adapter import Failure
from flashlab.verify.mistakes import in_a_line
from flashlab.verify.subject import Subject, worst
from simulator import Problem
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Unavailable
from simulator.operations.attention import UNIT
from simulator.operations.backward import BACKWARD, ROUNDINGS, of_sequences
from simulator.philox import kept_weights

__all__ = ["likely"]

TILES = (8, 16, 32, 48, 64, 96, 128)
"""Keys per tile that mistakes with tiles are tried with."""
Gradients = Mapping[str, Array]
Suspect = tuple[str, Gradients]
Sees = Callable[[Array, Array, int], Any]
"""Does query i of a sequence see its key j? It is told i, j, and how many keys more than queries the sequence has."""


@dataclass(frozen=True)
class Scene:
    """A problem, its operands in float64, and the right gradients with their bounds."""

    problem: Problem
    x: Gradients
    truth: Gradients
    bounds: Gradients

    @property
    def delta(self) -> Array:
        """D, (batch, heads, len_q)."""
        return (self.x["dout"] * self.x["out"]).sum(-1) - self.x.get("dlse", 0.0)

    def sees(self, sees: Sees) -> Array:
        """Which keys queries see by a rule for each sequence: booleans (len_q, len_kv)."""
        found = np.zeros((self.problem.len_q, self.problem.len_kv), bool)
        for rows, keys in self.problem.spans:
            i, j = np.arange(len(rows))[:, None], np.arange(len(keys))
            found[rows.start : rows.stop, keys.start : keys.stop] = sees(i, j, len(keys) - len(rows))
        return found

    def mask(self, left: int | None, right: int | None, aligned: Callable[[int], int] = lambda offset: offset) -> Array:
        """The keys within a window around the one that a query is aligned with."""
        wide = 1 << 40
        a, b = (wide if side is None else side for side in (left, right))
        return self.sees(lambda i, j, offset: (j >= i + aligned(offset) - a) & (j <= i + aligned(offset) + b))

    def gradients(
        self, *, seen: Array | None = None, scale: float | None = None, base: Array | None = None, delta: Any = None,
        slope: Callable[[Array], Any] = lambda bent: 1 - bent**2, capped: bool = True, order: Array | None = None,
        drops: str = "vp", kept: float = 1.0, whole: Callable[[Array, Array], Array] | None = None,
    ) -> dict[str, Array]:  # fmt: skip
        """The gradients, with something changed: the keys that are seen, the scale of scores, what their exponentials are relative
        to, D, the soft cap's derivative by its tanh, the KV head of each head, where weights are dropped (of V, of P), and dS as it
        follows from P and dP - D. dS is there, too, and dk and dv of each query head."""
        p, x = self.problem, self.x
        order = np.arange(p.heads) // p.queries_per_kv if order is None else order
        seen, scale = self.mask(p.left, p.right) if seen is None else seen, p.scale if scale is None else scale
        k, v = x["k"][:, order], x["v"][:, order]
        s = scale * (x["q"] @ k.swapaxes(-1, -2))
        bent = np.tanh(s / p.soft_cap) if p.soft_cap and capped else np.zeros(())
        s = p.soft_cap * bent if p.soft_cap and capped else s
        base = x["lse"] if base is None else base
        weights = np.exp(np.where(seen, s, -np.inf) - np.where(np.isneginf(base), 0.0, base)[..., None])
        z: Any = 1.0
        if p.dropout:
            z = kept * kept_weights(p, self.x["rng_state"].astype(np.int64)).reshape(weights.shape)
        dp = (x["dout"] @ v.swapaxes(-1, -2)) * (z if "p" in drops else 1.0)
        rest = dp - (self.delta if delta is None else np.asarray(delta))[..., None]
        ds = slope(bent) * (weights * rest if whole is None else whole(weights, rest))
        dk, dv = (
            p.scale * (ds.swapaxes(-1, -2) @ x["q"]),
            (weights * (z if "v" in drops else 1.0)).swapaxes(-1, -2) @ x["dout"],
        )
        each = {"dq": p.scale * (ds @ k), "ds": ds, "each dk": dk, "each dv": dv}
        each |= {"dk": self.summed(dk, order), "dv": self.summed(dv, order)}
        if p.sinks:
            sunk = np.exp(x["sinks"][:, None] - np.where(np.isneginf(base), 0.0, base))
            each["dsinks"] = -of_sequences(
                p, sunk * (self.delta if delta is None else np.broadcast_to(delta, sunk.shape))
            )
        return each

    def summed(self, each: Array, order: Array | None = None) -> Array:
        """The sums over the query heads of each KV head, of an array (batch, heads, ...)."""
        p = self.problem
        order = np.arange(p.heads) // p.queries_per_kv if order is None else order
        return np.stack([each[:, order == h].sum(1) for h in range(p.kv_heads)], 1)

    def right(self, **changed: Array) -> dict[str, Array]:
        """The right gradients, but for those that are given."""
        return {**self.truth, **changed}


def _deltas(c: Scene) -> Iterator[Suspect]:
    x, d = c.x, c.delta
    wrong: dict[str, Any] = {
        "D is missing: dS is P dP, without the sum of dO O": np.zeros(d.shape),
        "D is the sum of dO alone": x["dout"].sum(-1),
        "D is the sum of O alone": x["out"].sum(-1),
        "D is added to dP, not subtracted": -d,
        "D is divided by the head dim": d / c.problem.head_dim,
        "D is scaled like scores": c.problem.scale * d,
        "D is that of the head before": np.roll(d, 1, 1),
        "D is that of the row before": np.roll(d, 1, 2),
    }
    if "dlse" in x:
        wrong["the gradient of the LSE is ignored"] = d + x["dlse"]
        wrong["the gradient of the LSE has the wrong sign"] = d + 2 * x["dlse"]
    for words, delta in wrong.items():
        yield words, c.gradients(delta=delta)
    yield (
        "dS is dP - D: it isn't multiplied by P",
        c.gradients(whole=lambda weights, rest: np.where(weights > 0, rest, 0.0)),
    )


def _scales(c: Scene) -> Iterator[Suspect]:
    p, t = c.problem, c.truth
    for names in (("dq",), ("dk",), ("dq", "dk")):
        said, verb = " and ".join(names), "have" if len(names) > 1 else "has"
        lack = "lack" if len(names) > 1 else "lacks"
        for words, factor in (
            (f"{said} {lack} the scale", 1 / p.scale if p.scale else None),
            (f"{said} {verb} the scale twice", p.scale),
            (f"{said} {verb} the wrong sign", -1.0),
            (f"{said} {lack} ln 2, or {verb} it twice: exp is to base 2", 1 / math.log(2)),
            (f"{said} {verb} ln 2 where exp is to base e", math.log(2)),
        ):
            if factor is not None:
                yield words, c.right(**{name: factor * t[name] for name in names})
    scores = {
        "1: it is missing": 1.0,
        "1/sqrt(head_dim), whatever was asked for": 1 / math.sqrt(p.head_dim),
        "1/head_dim": 1 / p.head_dim,
        "applied twice": p.scale**2,
    }
    for words, scale in scores.items():
        yield f"the scale of the recomputed scores is {words}", c.gradients(scale=scale)


def _bases(c: Scene) -> Iterator[Suspect]:
    lse = c.x["lse"]
    bases = {
        "the LSE is taken to base 2, and is to base e": lse * math.log(2),
        "the LSE is taken to base e, and is multiplied by log2(e)": lse / math.log(2),
        "the LSE isn't subtracted: P is exp(S)": np.zeros(lse.shape),
        "the LSE is added, not subtracted": -lse,
        "the LSE is that of the row before": np.roll(lse, 1, 2),
        "the LSE is that of the head before": np.roll(lse, 1, 1),
    }
    for words, base in bases.items():
        yield words, c.gradients(base=base)


def _groups(c: Scene) -> Iterator[Suspect]:
    p, t = c.problem, c.truth
    size = p.queries_per_kv
    if size > 1:
        found = c.gradients()
        shape = p.batch, p.kv_heads, size, p.len_kv, -1
        for names in (("dk",), ("dv",), ("dk", "dv")):
            said = " and ".join(names)
            each = {name: found[f"each {name}"].reshape(shape) for name in names}
            of = "are those" if len(names) > 1 else "is that"
            summed = f"{said} {'are' if len(names) > 1 else 'is'}"
            yield (
                f"{summed} not summed over the group: {of} of its first head",
                c.right(**{n: x[:, :, 0] for n, x in each.items()}),
            )
            yield (
                f"{summed} not summed over the group: {of} of its last head",
                c.right(**{n: x[:, :, -1] for n, x in each.items()}),
            )
            yield f"{summed} averaged over the group, not summed", c.right(**{name: t[name] / size for name in names})
        order = np.arange(p.heads) % p.kv_heads
        yield "KV heads are interleaved: head h reads KV head h % kv_heads", c.gradients(order=order)
        yield "all heads read KV head 0", c.gradients(order=np.zeros(p.heads, int))


def _swaps(c: Scene) -> Iterator[Suspect]:
    p, t = c.problem, c.truth
    yield "dk and dv are swapped", c.right(dk=t["dv"], dv=t["dk"])
    if t["dq"].shape == t["dk"].shape:
        yield "dq and dk are swapped", c.right(dq=t["dk"], dk=t["dq"])
        yield "dq and dv are swapped", c.right(dq=t["dv"], dv=t["dq"])
    for name in t:
        yield f"{name} is 0, or was never written", c.right(**{name: np.zeros(t[name].shape)})
    ds = c.gradients()["ds"]
    yield "dv is made of dS, not of P", c.right(dv=c.summed(ds.swapaxes(-1, -2) @ c.x["dout"]))
    if p.len_q == p.len_kv:
        yield "dk is made of dS, which isn't transposed", c.right(dk=p.scale * c.summed(ds @ c.x["q"]))
    if "dsinks" in t:
        yield "dsinks has the wrong sign", c.right(dsinks=-t["dsinks"])


def _soft_cap(c: Scene) -> Iterator[Suspect]:
    if c.problem.soft_cap:
        yield "the soft cap's derivative is missing", c.gradients(slope=lambda bent: np.ones(bent.shape))
        yield "the soft cap's derivative is 1 - tanh, without the square", c.gradients(slope=lambda bent: 1 - bent)
        yield "the soft cap's derivative is 1 + tanh^2", c.gradients(slope=lambda bent: 1 + bent**2)
        yield "the soft cap's derivative is tanh^2", c.gradients(slope=lambda bent: bent**2)
        yield "the soft cap is ignored", c.gradients(capped=False)


def _sinks(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    if p.sinks:
        without = c.x["lse"] + np.log1p(-np.minimum(np.exp(c.x["sinks"][:, None] - c.x["lse"]), 1 - 1e-12))
        yield "P is relative to an LSE that lacks the sinks", c.gradients(base=without)
        yield "dsinks lacks P: it is the sum of D", c.right(dsinks=-of_sequences(p, c.delta))
        yield "dsinks is averaged over the rows, not summed", c.right(dsinks=c.truth["dsinks"] / max(p.len_q, 1))


def _dropout(c: Scene) -> Iterator[Suspect]:
    if c.problem.dropout:
        yield "dropout is ignored", c.gradients(drops="")
        yield "dv is made of all weights, also of those that dropout drops", c.gradients(drops="p")
        yield "dP isn't dropped", c.gradients(drops="v")
        yield "what dropout keeps isn't divided by the rate that is kept", c.gradients(kept=c.problem.kept / 256)


def _masks(c: Scene) -> Iterator[Suspect]:
    p = c.problem
    left, right = p.left, p.right
    seen: dict[str, Array] = {}
    if p.causal:
        seen["the causal mask is aligned top-left"] = c.mask(left, 0, lambda _: 0)
        seen["the causal mask is ignored"] = c.mask(left, None)
        seen["a causal row misses its last key: < where <= belongs"] = c.mask(left, -1)
        seen["a causal row sees one key too many"] = c.mask(left, 1)
        seen["the causal mask is the other way round: a query sees its own key and later ones"] = c.mask(0, None)
    if left is not None:
        seen["the window's left side is one key too wide"] = c.mask(left + 1, right)
        seen["the window's left side is one key too narrow"] = c.mask(left - 1, right)
    if right is not None and not p.causal:
        seen["the window's right side is one key too wide"] = c.mask(left, right + 1)
        seen["the window's right side is one key too narrow"] = c.mask(left, right - 1)
    if left is not None or (right is not None and not p.causal):
        seen["the window is ignored"] = c.mask(None, 0 if p.causal else None)
        if left is not None and right is not None:
            seen["the window's left side is ignored"] = c.mask(None, right)
            if not p.causal:
                seen["the window's right side is ignored"] = c.mask(left, None)
                seen["the window's sides are swapped"] = c.mask(right, left)
        seen["the window is aligned top-left"] = c.mask(left, right, lambda _: 0)
    within = c.mask(left, right)
    if p.lengths is not None:
        i, j = np.arange(p.len_q)[:, None], np.arange(p.len_kv)
        everything = np.ones(within.shape, bool)
        seen["each query sees the keys of all sequences"] = everything if right is None else j <= i + p.offset + right
        for words, step in (("next", 1), ("previous", -1)):
            spans = [(rows, p.spans[(n + step) % len(p.spans)][1]) for n, (rows, _) in enumerate(p.spans)]
            other = np.zeros(within.shape, bool)
            for rows, keys in spans:
                a, b = np.arange(len(rows))[:, None], np.arange(len(keys))
                other[rows.start : rows.stop, keys.start : keys.stop] = (
                    np.ones((len(rows), len(keys)), bool) if right is None else b <= a + len(keys) - len(rows) + right
                )
            seen[f"each sequence reads the keys of the {words} one"] = other
    seen["the last key is left out"] = within & c.sees(lambda i, j, offset: j < max(j.size - 1, 0))
    seen["the first key is left out"] = within & c.sees(lambda i, j, offset: j > 0)
    for cols in TILES:
        whole = within & c.sees(lambda i, j, offset, n=cols: j < j.size - j.size % n)
        said = f"the keys of the last tile are left out, where it is not full ({cols} keys)"
        seen[said] = whole
        yield (
            f"dq lacks the last tile's keys, where it is not full ({cols} keys)",
            c.right(dq=c.gradients(seen=whole)["dq"]),
        )
    for words, keys in seen.items():
        if (keys != within).any():
            yield words, c.gradients(seen=keys)


def _suspects(c: Scene) -> Iterator[Suspect]:
    for kind in (_deltas, _scales, _bases, _groups, _swaps, _soft_cap, _sinks, _dropout, _masks):
        yield from kind(c)


def _by_rows(c: Scene, found: Gradients) -> Iterator[str]:
    """Mistakes that show in which rows are wrong, and in how a number is stored."""
    p = c.problem
    within = c.mask(p.left, p.right)
    wrong = {
        name: ~(np.linalg.norm(found[name] - x, axis=-1) <= c.bounds[name])
        for name, x in c.truth.items()
        if x.ndim == 4
    }
    if not any(x.any() for x in wrong.values()):
        return
    empty, unseen = ~within.any(1), ~within.any(0)
    for names, rows, said in (
        (("dq",), empty, "dq of a query that sees no key must be 0"),
        (("dk", "dv"), unseen, "dk and dv of a key that no query sees must be 0"),
    ):
        elsewhere = any(x.any() for name, x in wrong.items() if name not in names)
        if not elsewhere and rows.any() and all((wrong[name] <= rows).all() for name in names):
            yield f"{said}; here it is something else"
    if p.dtype != "float32":
        return
    for short in ("float16", "bfloat16"):
        named = [
            name
            for name, bad in wrong.items()
            if bad.any()
            and np.array_equal(found[name], found[name].astype(np.float32).astype(numpy_dtype(short)).astype(float))
        ]
        bad = [name for name, x in wrong.items() if x.any()]
        off = {
            n: np.abs(found[n] - c.truth[n]) <= 1.01 * UNIT[short] * np.maximum(np.abs(c.truth[n]), 1e-3) for n in named
        }
        if named and named == bad and all(x.all() for x in off.values()):
            yield f"{' and '.join(named)} {'are' if len(named) > 1 else 'is'} rounded to {short}"


def _allowed(c: Scene, of: Gradients) -> dict[str, Array]:
    """How far gradients with a mistake may be off: the rule's bound, in the measure in which they are larger than right ones."""
    found: dict[str, Array] = {}
    for name, bound in c.bounds.items():
        size = np.linalg.norm(of[name], axis=-1) if of[name].ndim > bound.ndim else np.abs(of[name])
        grown = max(1.0, float(np.linalg.norm(of[name])) / max(float(np.linalg.norm(c.truth[name])), 1e-30))
        found[name] = 2 * bound * min(grown, 1e6) + 2 * ROUNDINGS * UNIT[c.problem.dtype] * size
    return found


def _matching(subject: Subject, p: Problem, seed: int, *, failing: bool) -> dict[str, bool] | None:
    """Whether each mistake explains the gradients of a problem, in order. None if it says nothing."""
    arrays = BACKWARD.draw(p, seed)
    try:
        if subject.refuses(p) or p.len_q * p.len_kv * p.heads * p.batch > MOST_PAIRS:
            return None
        found = {name: np.asarray(x, np.float64) for name, x in subject.run(p, arrays).items()}
        truth, bounds = subject.expect(p, arrays)
    except Unavailable:
        raise
    except (Exception, SystemExit):  # it raises or refuses: that says nothing of its numbers
        return None
    c = Scene(p, {name: x.astype(np.float64) for name, x in arrays.items()}, truth, bounds)
    if any(name in found and found[name].shape != x.shape for name, x in truth.items()):
        return {}

    def fits(of: Gradients, allowed: Gradients) -> bool:
        wanted = {name: of[name] for name in truth if name in found}
        try:
            worst(BACKWARD, (wanted, allowed), found)
        except Failure:
            return False
        return True

    right = fits(truth, bounds)
    if failing and right:
        return None
    with np.errstate(all="ignore"):
        tried = {words: fits(of, _allowed(c, of)) for words, of in _suspects(c)}
        return tried if right else tried | dict.fromkeys(_by_rows(c, found), True) | {"": False}


MOST_PAIRS = 1 << 19
"""The most (query, key) pairs, over batch and heads, of a problem that mistakes are tried on."""


def likely(subject: Subject, failing: Problem, others: Sequence[Problem], seed: int) -> str:
    """The mistake that explains a problem that fails and all of the `others`, or nothing. At most two are named, with an "or"."""
    named = [words for words, fits in (_matching(subject, failing, seed, failing=True) or {}).items() if fits]
    for p in (*others, *_larger(subject, failing)):
        if named and (more := _matching(subject, p, seed, failing=False)) is not None:
            # what makes no difference isn't tried where all is right; where something is wrong, it doesn't explain it
            named = [words for words in named if more.get(words, "" not in more)]
    return in_a_line(named)


def _larger(subject: Subject, p: Problem) -> Iterator[Problem]:
    """Problems of the same kind with more rows, keys, heads and columns, in which fewer mistakes look alike."""
    if p.lengths is not None:
        yield subject.fit(
            p.replace(lengths=[*p.lengths, (9, 41), (40, 23)], len_q=None, len_kv=None, head_dim=max(p.head_dim, 48))
        )
        return
    for rows, keys, group in ((7, 41, 3), (75, 22, 2)):
        heads = {"heads": 4 * group if p.queries_per_kv > 1 else 4, "kv_heads": 4}
        sizes: dict[str, Any] = {"len_q": p.len_q + rows, "len_kv": p.len_kv + keys, "head_dim": max(p.head_dim, 48)}
        yield subject.fit(p.replace(batch=2, **sizes, **heads))
