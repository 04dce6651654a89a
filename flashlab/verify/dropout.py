"""The check of dropout: which weights are kept is read off bit by bit, and what is left obeys the rule.

Which weights an outsider's function drops is its own affair. Its values are one-hot here, so that they say which those are. It
has to drop as many as it was told, the same ones for the same seed and others for another. Kept weights are divided by the
share that is kept, and the LSE is that of all weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flashlab.verify.adapter import CallableTarget
from flashlab.verify.bench import Bench, Failure, Trial, fitted, held, visible
from flashlab.verify.cases import EVERY_SCORE, usual
from flashlab.verify.rule import Expected, judge
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.attention import ROUNDINGS, SCORE, UNIT
from simulator.philox import kept_weights


def dropout(bench: Bench) -> Iterator[Trial]:
    """Exactly the weights that seed, offset, head, row and column say are dropped, at every tile; the LSE has all of them. Of an
    outsider's function: as many as it is told."""
    if isinstance(bench.target, CallableTarget):
        yield from _elsewhere(bench)
        return
    for dtype in bench.dtypes:
        for word, changes in (
            ("which are kept", {"len_q": 70, "len_kv": 64}),
            ("which are kept, causal, GQA, batch 2",
             {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 50, "len_kv": 61, "causal": True}),
            ("which are kept, one in 256", {"len_q": 150, "len_kv": 64, "dropout": 0.996}),
            ("which are kept, several tiles of keys", {"len_q": 40, "len_kv": 128, "head_dim": 128}),
            ("which are kept, one query", {"heads": 3, "len_q": 1, "len_kv": 60}),
        ):  # fmt: skip
            p = usual(dtype, **{"dropout": 0.25, **changes})
            yield fitted(bench, word, p, _which, lambda p: p.dropout and p.len_kv <= p.head_dim_v)
        for word, changes in (
            ("normal, causal", {"dropout": 0.1, "causal": True}),
            ("long rows, GQA", {"dropout": 0.5, "heads": 4, "kv_heads": 2, "len_q": 20, "len_kv": 513}),
            ("window, more queries", {"dropout": 0.25, "len_q": 150, "len_kv": 70, "window": (40, 30)}),
            ("soft cap, sinks, ALiBi", {"dropout": 0.25, "len_kv": 150, **EVERY_SCORE}),
            ("a mask", {"dropout": 0.25, "len_kv": 150, "mask": "dense"}),
        ):
            yield fitted(bench, word, usual(dtype, **changes), _rule, lambda p: p.dropout)


def _which(bench: Bench, p: Problem) -> None:
    arrays = bench.draw(p)
    arrays["q"][...] = arrays["v"][...] = 0
    arrays["rng_state"][1] |= (1 << 32) - 1  # heads carry into its upper half
    keys = np.arange(p.len_kv)
    arrays["v"][:, :, keys, keys] = 1
    seen = np.broadcast_to(visible(p, bench.target), (p.batch, p.heads, p.len_q, p.len_kv))
    z = kept_weights(p, arrays["rng_state"]).reshape(seen.shape)
    number = seen.sum(-1, keepdims=True)
    wanted = seen * z / np.maximum(1, number)
    bench.check_oracles(p, arrays, bench.expect(p, arrays))
    for tile in bench.target.tiles:
        result = bench.run(p, arrays, tile=tile)
        got = result.out[..., : p.len_kv].astype(np.float64)
        if (wrong := (got != 0) != (wanted != 0)).any():
            b, h, i, j = np.argwhere(wrong)[0].tolist()
            verb = "keeps" if got[b, h, i, j] else "drops"
            raise Failure(
                f"batch {b}, head {h}: row {i} {verb} key {j}, and {int(wrong.sum())} weights are wrong in all"
            )
        if (off := np.abs(got - wanted) > 3 * UNIT[p.dtype] * wanted).any():
            b, h, i, j = np.argwhere(off)[0].tolist()
            said = f"batch {b}, head {h}, row {i} gives key {j} the weight"
            raise Failure(f"{said} {got[b, h, i, j]:.5g}, not {wanted[b, h, i, j]:.5g}")
        if result.lse is not None:
            with np.errstate(divide="ignore"):
                logs = np.log(number[..., 0])
            if not np.isclose(result.lse, logs, rtol=0, atol=2e-5).all():
                raise Failure("the LSE isn't that of all weights")


def _rule(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    expected = bench.expect(p, arrays)
    bench.check_oracles(p, arrays, expected)
    result = bench.run(p, arrays)
    return held(judge(expected, result.out, result.lse)).worst


def _elsewhere(bench: Bench) -> Iterator[Trial]:
    """Trials for a function that draws numbers of its own."""
    for dtype in bench.dtypes:
        for word, changes in (
            ("a quarter", {"dropout": 0.25}),
            ("causal, GQA, batch 2",
             {"dropout": 0.5, "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 50, "len_kv": 61, "causal": True}),
            ("long rows", {"dropout": 0.125, "len_q": 20, "len_kv": 300}),
        ):  # fmt: skip
            yield fitted(bench, word, usual(dtype, **changes), obeyed, lambda p: p.dropout)


@dataclass(frozen=True)
class Drops:
    """What was read off a function: the keys that are seen and the weights that are kept, booleans (batch, heads, len_q,
    len_kv); what a kept one of n weights is, times n; and the LSEs where all scores are 0, or None."""

    seen: Array
    kept: Array
    factor: float
    lse: Array | None


def read_off(bench: Bench, p: Problem, arrays: Mapping[str, Array]) -> Drops:
    """Run a function with a score of 0 for all keys and one-hot values, some keys at a time."""
    rows, logs = np.zeros((p.batch, p.heads, p.len_q, p.len_kv)), None
    for first in range(0, p.len_kv, p.head_dim_v):
        given = {**arrays, "q": np.zeros_like(arrays["q"]), "v": np.zeros_like(arrays["v"])}
        keys = np.arange(first, min(first + p.head_dim_v, p.len_kv))
        given["v"][:, :, keys, keys - first] = 1
        result = bench.run(p, given)
        rows[..., keys] = result.out[..., : keys.size].astype(np.float64)
        logs = result.lse
    seen = np.broadcast_to(visible(p, bench.target), rows.shape)
    times = (rows * seen.sum(-1, keepdims=True))[seen & (rows != 0)]
    return Drops(seen, rows != 0, float(np.median(times)) if times.size else 0.0, logs)


def obeyed(bench: Bench, p: Problem) -> float:
    """Hold a function to what dropout is. Returns the worst error over the rule, and raises `Failure`."""
    rate, arrays = float(p.dropout or 0), {**bench.draw(p)}
    drops = read_off(bench, p, arrays)
    seen, kept = drops.seen, drops.kept
    if (kept & ~seen).any():
        raise Failure("a hidden key has a weight")
    number = int(seen.sum())
    share, wide = kept.sum() / max(1, number), 6 * math.sqrt(rate * (1 - rate) / max(1, number)) + 1 / max(1, number)
    if number and abs(share - (1 - rate)) > wide:
        raise Failure(f"{share:.1%} of the weights are kept, where dropout = {rate:g} keeps {1 - rate:.1%}")
    if kept.any() and abs(drops.factor * (1 - rate) - 1) > 4 * UNIT[p.dtype]:
        raise Failure(
            f"a kept weight is {drops.factor:.4g} times what it is without dropout, expected 1 / (1 - dropout)"
        )
    if (read_off(bench, p, arrays).kept != kept).any():
        raise Failure("another call with the same seed drops other weights")
    other = {**arrays, "rng_state": arrays["rng_state"] + np.asarray(1, arrays["rng_state"].dtype)}
    if number >= FEW and (read_off(bench, p, other).kept == kept).all():
        raise Failure("another seed drops the same weights")
    for name, axis in (("heads", 1), ("sequences", 0), ("rows", 2)):
        n = min(kept.shape[axis], 2)
        both = seen.take(range(n), axis).all(axis)
        a, b = (kept.take(i, axis)[both] for i in (0, n - 1))
        if n > 1 and both.sum() >= FEW and (a == b).all():
            raise Failure(f"all {name} drop the same weights")
    result, expected = bench.run(p, arrays), expected_of(bench, p, arrays, kept)
    return held(judge(expected, result.out, result.lse)).worst


FEW = 40
"""So many weights aren't dropped alike by chance."""


def expected_of(bench: Bench, p: Problem, arrays: Mapping[str, Array], kept: Array) -> Expected:
    """Attention in which just these weights are kept, and how far a function may be off."""
    whole = bench.expect(p.replace(dropout=None), {name: x for name, x in arrays.items() if name != "rng_state"})
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    group = np.arange(p.heads) // p.queries_per_kv
    k, v = k[:, group], v[:, group]
    s = np.where(visible(p, bench.target), p.scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    weights = np.exp(s - np.where(np.isneginf(whole.lse), 0.0, whole.lse)[..., None])
    dropped = np.where(kept, weights, 0.0) / (1 - float(p.dropout or 0))
    out, squares = dropped @ v, (dropped**2) @ (v**2).sum(-1)[..., None]
    sizes = np.where(np.isinf(s), 0.0, abs(p.scale) * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))).max(-1, initial=0.0)
    off = ROUNDINGS * UNIT[p.dtype] + SCORE[p.dtype] * np.maximum(1.0, sizes)
    tolerance = off * np.sqrt((out**2).sum(-1) + squares[..., 0]) + 1e-30
    if p.dtype == "float16":  # small weights lose up to half a step
        tolerance = tolerance + (np.minimum(2.0**-25, dropped) @ np.linalg.norm(v, axis=-1)[..., None])[..., 0]
    return Expected(out, whole.lse, tolerance, whole.lse_tolerance)


def likely(bench: Bench, p: Problem) -> str:
    """The mistake in a function's dropout, if it is known."""
    rate, arrays = float(p.dropout or 0), {**bench.draw(p)}
    drops = read_off(bench, p, arrays)
    seen, kept = drops.seen, drops.kept
    number = int(seen.sum())
    if number < FEW:
        return ""
    share, wide = kept.sum() / number, 6 * math.sqrt(rate * (1 - rate) / number)
    close = 4 * UNIT[p.dtype]
    if (kept == seen).all() and abs(drops.factor - 1) < close:
        return "dropout is ignored"
    if abs(share - rate) <= wide < abs(share - (1 - rate)):
        return "dropout is taken for the share that is kept"
    if abs(share - (1 - rate)) > wide:
        return ""
    counts = seen.sum(-1)
    logs = drops.lse
    if logs is not None and (counts != kept.sum(-1)).any():
        with np.errstate(divide="ignore"):
            of_kept = np.log(kept.sum(-1)) - math.log(1 - rate), np.log(kept.sum(-1))
        if any(np.isclose(logs, x, rtol=0, atol=1e-3).all() for x in of_kept):
            return "weights are dropped before the sum: the softmax and its LSE are those of the kept weights"
    if abs(drops.factor - 1) < close:
        return "kept weights aren't divided by the share that is kept"
    if abs(drops.factor - (1 - rate)) < close:
        return "kept weights are multiplied by the share that is kept, not divided"
    if abs(drops.factor * rate - 1) < close:
        return "kept weights are divided by the share that is dropped"
    try:
        obeyed(bench, p)
    except Failure as failure:
        for said in ("all heads", "all sequences", "all rows", "another call", "another seed"):
            if str(failure).startswith(said):
                return str(failure)
    return ""
