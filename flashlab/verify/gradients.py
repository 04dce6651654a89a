"""Probes of a backward pass. Each reads off one thing that the rule's tolerance could hide, or that its judge could share.

A probe takes a subject (`subject.Subject`), a problem and a seed. It raises `Failure`, or returns the worst error over what is
allowed. Where it compares two runs, each may be off by the rule's bound. Gradients that no atomic adds up keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import numpy as np

from flashlab.verify.adapter import Failure
from flashlab.verify.memory import place
from flashlab.verify.subject import Check, Subject
from simulator import Problem
from simulator.dtypes import Array, numpy_dtype
from simulator.operations.attention import ATTENTION, UNIT
from simulator.operations.backward import BACKWARD
from simulator.operations.draws import random_optional
from simulator.operations.pairs import hidden_pairs
from simulator.philox import kept_weights

Arrays = Mapping[str, Array]


def _given(p: Problem, q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
    """The operands for these q, k, v and dout: `out` and `lse` are the float64 judge's, rounded. A gradient of the LSE is 0."""
    storage = numpy_dtype(p.dtype)
    given = {name: x.astype(storage) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))}
    given |= random_optional(p)
    forward = ATTENTION.judge(p, given)
    lse = forward["lse"].astype(np.float32)
    given |= {"dlse": np.zeros_like(lse)} if p.dlse else {}
    return given | {"out": forward["out"].astype(storage), "lse": lse}


def _bounds(subject: Subject, p: Problem, given: Arrays) -> Arrays:
    return subject.expect(p, given)[1]


def _near(name: str, x: Array, y: Array, allowed: Array) -> float:
    """The worst row's distance over what is allowed. Raises `Failure` over 1."""
    distance = np.abs(x.astype(np.float64) - y.astype(np.float64))
    distance = np.linalg.norm(distance, axis=-1) if distance.ndim > allowed.ndim else distance
    ratio = np.where(np.isnan(distance), np.inf, distance) / np.maximum(allowed, 1e-300)
    ratio = np.where(distance == 0, 0.0, ratio)
    if ratio.size and ratio.max() > 1:
        where = tuple(int(n) for n in np.unravel_index(int(ratio.argmax()), ratio.shape))
        raise Failure(f"{name} at {where} differs by {ratio.max():.3g} x what is allowed")
    return float(ratio.max(initial=0.0))


def _same(
    subject: Subject, names: Iterable[str], x: Arrays, y: Arrays, said: str, bounds: Callable[[], Arrays]
) -> None:
    """Raises `Failure` if a gradient isn't the same to the bit. What atomics add up may be off by its bound in each."""
    for name in names:
        if name in subject.atomics:
            _near(f"{name} {said}: it", x[name], y[name], 2 * bounds()[name])
        elif np.asarray(x[name]).tobytes() != np.asarray(y[name]).tobytes():
            raise Failure(f"{name} {said}")


def adjoint(subject: Subject, p: Problem, seed: int) -> float:
    """<dO, J X> = <gradient, X> for a direction X, J of the output and of an LSE with a gradient. J X is a difference of the
    forward in float64, which shares no line with the gradients' judge."""
    given = BACKWARD.draw(p, seed)
    found, allowed = subject.run(p, given), _bounds(subject, p, given)
    exact, z = {name: given[name].astype(np.float64) for name in "qkv"}, _kept(p, given)
    weight = _weights(p, given)
    # `out` was rounded, so D is off by up to u / 2 of its terms' sum
    off = (
        UNIT[p.dtype] / 2 * (np.abs(given["dout"].astype(np.float64)) * np.abs(given["out"].astype(np.float64))).sum(-1)
    )
    shared = weight.keys.reshape(p.batch, p.heads, p.len_q, p.len_kv) * off[..., None] * abs(p.scale)
    size = {name: np.linalg.norm(np.repeat(exact[name], p.queries_per_kv, 1), axis=-1) for name in "kv"}
    extra = {
        "q": (shared @ size["k"][..., None])[..., 0],
        "k": (shared.swapaxes(-1, -2) @ np.linalg.norm(exact["q"], axis=-1)[..., None])[..., 0]
        .reshape(p.batch, p.kv_heads, p.queries_per_kv, p.len_kv)
        .sum(2),
        "v": 0.0,
    }
    if p.sinks:
        exact["sinks"], extra["sinks"] = given["sinks"].astype(np.float64), (weight.sink[..., 0] * off).sum(-1)
    worst, random, h = 0.0, np.random.default_rng((seed, 7)), 1e-5
    for name in [*exact] * 3:  # one direction may happen to be at right angles to an error
        x = cast("Array", random.standard_normal(exact[name].shape))
        ahead, behind = (_forward(p, z, exact | {name: exact[name] + s * h * x}) for s in (1, -1))
        slope = sum(float((given[f"d{of}"] * (ahead[of] - behind[of])).sum()) for of in ahead if f"d{of}" in given) / (
            2 * h
        )
        mine = float((found[f"d{name}"].astype(np.float64) * x).sum())
        # the products of the rows' errors with X have random signs: five standard deviations of their sum
        limit = 5 * float(np.linalg.norm(allowed[f"d{name}"] + extra[name])) + 1e-6 * abs(slope)
        ratio = abs(mine - slope) / max(limit, 1e-300) if mine != slope else 0.0
        if not ratio <= 1:
            raise Failure(f"<d{name}, X> is {mine:.6g}, but the forward's slope along X is {slope:.6g}")
        worst = max(worst, ratio)
    return worst


class _Weights(NamedTuple):
    """P of keys, (batch, heads, len_q, len_kv), and of the sink, with 1 in place of len_kv. The LSE is 0 for rows without any."""

    keys: Array
    sink: Array
    lse: Array


def _weights(p: Problem, x: Arrays) -> _Weights:
    """The weights in float64."""
    x = {name: each.astype(np.float64) for name, each in x.items()}
    sinks = x.get("sinks", np.full(p.heads, -np.inf))[:, None, None]
    scores = p.scale * (x["q"] @ np.repeat(x["k"], p.queries_per_kv, 1).swapaxes(-1, -2))
    scores = p.soft_cap * np.tanh(scores / p.soft_cap) if p.soft_cap else scores
    scores = np.where(hidden_pairs(p), -np.inf, scores)
    top = np.maximum(cast("Array", scores.max(-1, keepdims=True, initial=-np.inf)), sinks)
    top = np.where(np.isneginf(top), 0.0, top)
    keys, sink = np.exp(scores - top), np.exp(sinks - top)
    total = keys.sum(-1, keepdims=True) + sink
    some = np.where(total == 0, 1.0, total)
    return _Weights(keys / some, sink / some, np.where(total == 0, 0.0, np.log(some) + top)[..., 0])


def _kept(p: Problem, given: Arrays) -> Array:
    """Z of dropout, (batch, heads, len_q, len_kv), or 1 without."""
    shape = p.batch, p.heads, p.len_q, p.len_kv
    return kept_weights(p, given["rng_state"]).reshape(shape) if p.dropout else np.ones(shape)


def _forward(p: Problem, z: Array, x: Arrays) -> dict[str, Array]:
    """Attention of arrays of float64, which no storage dtype rounds: `out` and `lse`."""
    weights, _, lse = _weights(p, x)
    return {"out": (weights * z) @ np.repeat(x["v"], p.queries_per_kv, 1), "lse": lse}


def key_sets(subject: Subject, p: Problem, seed: int) -> None:
    """With q = 0, a row that sees n keys has P = 1 / n. With dO one-hot, dV then says which queries see which key: the set of
    pairs, without those that dropout drops, read off exactly, for one query head per KV head at a time."""
    random = np.random.default_rng((seed, 8))
    seen = ~np.broadcast_to(hidden_pairs(p), (p.len_q, p.len_kv))
    k, v = (random.standard_normal((p.batch, p.kv_heads, p.len_kv, p.head_dim)) for _ in "kv")
    q = np.zeros((p.batch, p.heads, p.len_q, p.head_dim))
    for member in {0, p.queries_per_kv - 1}:
        for first in range(0, p.len_q, p.head_dim):
            rows = np.arange(first, min(first + p.head_dim, p.len_q))
            dout = np.zeros(q.shape)
            dout[:, member :: p.queries_per_kv, rows, rows - first] = 1
            given = _given(p, q, k, v, dout)
            found = subject.run(p, given)["dv"].astype(np.float64)
            kept = (seen & (_kept(p, given)[:, member :: p.queries_per_kv] > 0))[:, :, rows]
            wrong = (found[..., : len(rows)] > 0) != kept.swapaxes(-1, -2)
            if wrong.any() or found[..., len(rows) :].any():
                b, h, j, i = (int(n) for n in np.argwhere(wrong)[0]) if wrong.any() else (0, 0, 0, 0)
                verb = "sees" if kept[b, h, i, j] else "doesn't see"
                raise Failure(f"dv at {(b, h, j)}: query {i + first} {verb} key {j}, but dv says otherwise")


def hidden(subject: Subject, p: Problem, seed: int) -> None:
    """Keys that no query sees get 0, as do queries that see no key. What the hidden keys hold must not show."""
    given = BACKWARD.draw(p, seed)
    seen = ~np.broadcast_to(hidden_pairs(p), (p.len_q, p.len_kv))
    unseen, empty = ~seen.any(0), ~seen.any(1)
    found = subject.run(p, given)
    for name, rows in (("dq", empty), ("dk", unseen), ("dv", unseen)):
        if found[name][:, :, rows].any():
            raise Failure(f"{name} isn't 0 where nothing is seen")
    if unseen.any():
        other = {name: x.copy() for name, x in given.items()}
        for name in "kv":
            other[name][:, :, unseen] = 1e4
        _same(
            subject, ("dk", "dv"), found, subject.run(p, other), "changes with keys that no query sees",
            lambda: _bounds(subject, p, given),
        )  # fmt: skip


def equal_keys(subject: Subject, p: Problem, seed: int) -> float:
    """Each row of dS sums to 0, its sink's -P D included. So equal keys, which multiply it by one vector, give dQ = 0, or with a
    sink P D times that vector, but for `out`'s own rounding."""
    drawn = BACKWARD.draw(p, seed)
    k = np.repeat(drawn["k"][:, :, :1], p.len_kv, 2) if p.len_kv else drawn["k"]
    given = _given(p, drawn["q"], k, drawn["v"], drawn["dout"])
    off = (
        UNIT[p.dtype] / 2 * (np.abs(given["dout"].astype(np.float64)) * np.abs(given["out"].astype(np.float64))).sum(-1)
    )
    length = np.linalg.norm(k[:, :, :1].astype(np.float64), axis=-1)
    allowed = _bounds(subject, p, given)["dq"] + abs(p.scale) * off * (
        np.repeat(length, p.queries_per_kv, 1) if p.len_kv else 0
    )
    found = subject.run(p, given)["dq"]
    expected = np.zeros(found.shape)
    if p.sinks and p.len_kv:
        key = np.repeat(k[:, :, :1], p.queries_per_kv, 1).astype(np.float64)
        delta = (given["dout"].astype(np.float64) * given["out"]).sum(-1, keepdims=True)
        bent = np.tanh(p.scale * (given["q"] * key).sum(-1, keepdims=True) / p.soft_cap) if p.soft_cap else 0.0
        expected = p.scale * (1 - bent**2) * _weights(p, given).sink * delta * key
    return _near("dq", found, expected, allowed)


def gqa(subject: Subject, p: Problem, seed: int) -> float:
    """dK and dV of a KV head are the sums of those that its query heads would have with heads of their own."""
    if p.queries_per_kv == 1:
        return 0.0
    given = BACKWARD.draw(p, seed)
    alone, own = p.replace(kv_heads=None), {name: np.repeat(given[name], p.queries_per_kv, 1) for name in "kv"}
    each, found = subject.run(alone, given | own), subject.run(p, given)
    bound, bound_each = _bounds(subject, p, given), _bounds(subject, alone, given | own)
    groups = p.batch, p.kv_heads, p.queries_per_kv
    worst = _near("dq", found["dq"], each["dq"], bound["dq"] + bound_each["dq"])
    for name in ("dk", "dv"):
        summed = each[name].astype(np.float64).reshape(*groups, p.len_kv, -1).sum(2)
        allowed = bound[name] + bound_each[name].reshape(*groups, p.len_kv).sum(2)
        worst = max(worst, _near(name, found[name], summed, allowed))
    return worst


def key_order(subject: Subject, p: Problem, seed: int) -> float:
    """Without a mask, dropout and sequences, keys and values that change places take their gradients with them."""
    if p.right is not None or p.left is not None or p.dropout or p.lengths:
        return 0.0
    given, order = BACKWARD.draw(p, seed), np.random.default_rng((seed, 9)).permutation(p.len_kv)
    moved = given | {name: given[name][:, :, order] for name in "kv"}
    found, other, bound = subject.run(p, given), subject.run(p, moved), _bounds(subject, p, given)
    worst = _near("dq", found["dq"], other["dq"], 2 * bound["dq"])
    for name in ("dk", "dv"):
        worst = max(worst, _near(name, found[name][:, :, order], other[name], 2 * bound[name][:, :, order]))
    return worst


def head_order(subject: Subject, p: Problem, seed: int) -> None:
    """KV heads, with their query heads, and batches that change places take their gradients with them, to the bit. Dropout
    would drop other weights of theirs."""
    if p.dropout:
        return
    given = BACKWARD.draw(p, seed)
    kv_order, batch_order = np.arange(p.kv_heads)[::-1], np.arange(p.batch)[::-1]
    order = (kv_order[:, None] * p.queries_per_kv + np.arange(p.queries_per_kv)).ravel()

    def moved(x: Arrays) -> Iterator[tuple[str, Array]]:
        orders = {"batch": batch_order, "heads": order, "kv_heads": kv_order}
        for name, a in x.items():
            for axis, along in enumerate(BACKWARD.operand(name, p).axes):
                a = a.take(orders[along], axis) if along in orders else a
            yield name, np.ascontiguousarray(a)

    other = dict(moved(given))
    _same(
        subject,
        [operand.name for operand in BACKWARD.written(p)],
        dict(moved(subject.run(p, given))),
        subject.run(p, other),
        "changes with the heads' order",
        lambda: _bounds(subject, p, other),
    )


def sequences(subject: Subject, p: Problem, seed: int) -> float:
    """A sequence of a ragged batch has the gradients that it has alone. What lies in its neighbours' rows changes not a bit."""
    if p.lengths is None:
        return 0.0
    given, names, worst = BACKWARD.draw(p, seed), ("dq", "dk", "dv"), 0.0
    found = subject.run(p, given)
    longest = sorted(range(len(p.spans)), key=lambda s: len(p.spans[s][0]))[-2:]
    for s, garbage in zip(longest, (np.inf, np.nan), strict=False):
        places = {axis: slice(x.start, x.stop) for axis, x in zip(("len_q", "len_kv"), p.spans[s], strict=True)}
        own = {name: BACKWARD.operand(name).cut(x, places) for name, x in given.items()}
        littered = {name: np.full_like(x, garbage) for name, x in given.items()}
        for name, x in own.items():
            BACKWARD.operand(name).cut(littered[name], places)[...] = x
        with np.errstate(invalid="ignore"):
            loud = subject.run(p, littered)
        mine, other = ({name: BACKWARD.operand(name).cut(x[name], places) for name in names} for x in (found, loud))
        one = p.sequences[s].replace(lengths=None)
        alone, bound = subject.run(one, own), _bounds(subject, one, own)
        _same(
            subject, names, mine, other, f"of sequence {s} changes when {garbage} lies in the rows of the others",
            lambda bound=bound: bound,
        )  # fmt: skip
        for name in names:
            _near(name, other[name], mine[name], 2 * bound[name])
            worst = max(worst, _near(name, mine[name], alone[name], 2 * bound[name]))
    return worst


def memory(subject: Subject, p: Problem, seed: int) -> None:
    """Rows between NaNs and in other orders: not a bit of the gradients changes, nor anything around the inputs."""
    given = BACKWARD.draw(p, seed)
    plain = subject.run(p, given)
    if not subject.frame.views:
        return
    for layout in subject.layouts:
        placed = {
            name: place(subject.frame, x, layout if x.ndim == 4 else "plain", np.nan) for name, x in given.items()
        }
        subject.frame.litter(subject.allocates(p))
        found = subject.run_on(p, {name: x.view for name, x in placed.items()})
        for name, x in placed.items():
            if harm := x.harm():
                raise Failure(f"{name}, {layout}: {harm}")
        bounds = _bounds(subject, p, given)
        said = f"changes where its inputs are {layout}"
        _same(subject, ("dk", "dv"), plain, found, said, lambda bounds=bounds: bounds)
        _near("dq", found["dq"], plain["dq"], 2 * bounds["dq"])


CHECKS: Mapping[str, Check] = {
    "adjoint": adjoint,
    "key_sets": key_sets,
    "hidden": hidden,
    "equal_keys": equal_keys,
    "gqa": gqa,
    "key_order": key_order,
    "head_order": head_order,
    "sequences": sequences,
    "memory": memory,
}
"""The probes by name."""
