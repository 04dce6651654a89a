"""The checks of attention's weights: which keys a row weighs by how much, and of what changes its scores.

That is a soft cap, ALiBi's bias, which goes by a key's distance, and a sink in each row's denominator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from flashlab.verify.bench import Arrays, Bench, Failure, Result, Trial, fitted, held, near, visible
from flashlab.verify.cases import EMPTY_ROWS, EVERY_SCORE, usual
from flashlab.verify.rule import judge
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.attention import ATTENTION, UNIT


def key_sets(bench: Bench) -> Iterator[Trial]:
    """With q = 0 and one-hot values, `out` shows how much each row attends to each key. The LSE is the log of their number.

    With ALiBi that shows each key's distance, and with sinks how much of a row is its head's sink.
    """
    for dtype in bench.dtypes:
        for word, p in (
            ("no mask", usual(dtype)),
            ("causal", usual(dtype, causal=True)),
            ("causal, more keys", usual(dtype, len_q=70, len_kv=150, causal=True)),
            ("causal, more queries", usual(dtype, len_q=150, len_kv=70, causal=True)),
            ("window", usual(dtype, window=(20, 10))),
            ("causal window, GQA", usual(dtype, heads=4, len_q=131, window=(40, None), causal=True)),
            ("1025 keys", usual(dtype, heads=1, len_q=2, len_kv=1025)),
            ("soft cap", usual(dtype, soft_cap=5.0, causal=True)),
            ("sinks, empty rows", usual(dtype, sinks=True, **EMPTY_ROWS)),
            ("ALiBi", usual(dtype, alibi=True, heads=4, kv_heads=2)),
            ("ALiBi, causal, more keys", usual(dtype, alibi=True, len_q=70, len_kv=150, causal=True)),
            ("ALiBi, window, more queries", usual(dtype, alibi=True, len_q=150, len_kv=70, window=(40, 30))),
            ("ALiBi, sinks, soft cap", usual(dtype, **EVERY_SCORE, heads=3, len_q=40, len_kv=77)),
        ):
            yield fitted(bench, word, p, _key_sets)


def _key_sets(bench: Bench, p: Problem) -> None:
    # a row of `out` shows head_dim keys, so each sequence of the batch shows another chunk of keys
    chunks = -(-p.len_kv // p.head_dim_v)
    p = p.replace(batch=chunks)
    arrays = bench.draw(p)
    q, v = arrays["q"], arrays["v"]
    q[...], v[...] = 0, 0
    for chunk in range(chunks):
        keys = range(chunk * p.head_dim_v, min((chunk + 1) * p.head_dim_v, p.len_kv))
        v[chunk, :, keys, range(len(keys))] = 1
    if p.alibi:  # so small that the farthest key still has a weight
        steps = np.arange(1, p.heads + 1) / p.heads
        arrays["alibi_slopes"] = (6 / max(p.len_q, p.len_kv, 1) * steps).astype(np.float32)
    result = _in_batches(bench, p, arrays)
    spelled = result.out.astype(np.float64).transpose(1, 2, 0, 3).reshape(p.heads, p.len_q, -1)[..., : p.len_kv]
    wanted = visible(p, bench.target)
    for h, i in np.ndindex(spelled.shape[:2]):
        got, want = set(np.flatnonzero(spelled[h, i] != 0).tolist()), set(np.flatnonzero(wanted[i]).tolist())
        if got != want:
            extra, missing = sorted(got - want), sorted(want - got)
            raise Failure(
                f"head {h}, row {i} attends to keys that it must not see: {extra[:5]}, and misses {missing[:5]}"
            )
    expected = bench.expect(p, arrays)
    held(judge(expected, result.out, None))
    logits, truth = _log_sums(p, wanted, arrays)
    weights = np.exp(logits - np.where(np.isneginf(truth), 0.0, truth)[..., None])
    close = weights * (3 * UNIT[p.dtype] + expected.lse_tolerance[0, ..., None]) + 1e-7
    if (off := np.abs(spelled - weights) > close).any():
        h, i, j = np.argwhere(off)[0].tolist()
        raise Failure(f"head {h}, row {i} gives key {j} the weight {spelled[h, i, j]:.4g}, not {weights[h, i, j]:.4g}")
    if result.lse is not None:
        wrong = ~np.isclose(result.lse, truth, rtol=0, atol=2e-5) & ~(np.isneginf(result.lse) & np.isneginf(truth))
        if wrong.any():
            b, h, i = np.argwhere(wrong)[0].tolist()
            said = f"LSE of head {h}, row {i} is {result.lse[b, h, i]:.7g}, not {truth[h, i]:.7g}"
            raise Failure(f"{said}, that of {wanted[i].sum()} keys, all of score 0 before any bias")


def _in_batches(bench: Bench, p: Problem, arrays: Arrays) -> Result:
    """Run all sequences in one call, or one by one where the target takes no such batch."""
    if bench.target.refuses(p) is None:
        return bench.run(p, arrays)
    one = bench.target.domain.fit(p.replace(batch=1))
    size, parts = one.batch, list[Result]()
    for first in range(0, p.batch, size):
        rows = np.arange(first, first + size) % p.batch  # the last call may see some sequences again
        parts.append(bench.run(one, {name: x[rows] if x.ndim == 4 else x for name, x in arrays.items()}))
    lses = [part.lse for part in parts if part.lse is not None]
    out = np.concatenate([part.out for part in parts])[: p.batch]
    return Result(out, np.concatenate(lses)[: p.batch] if lses else None)


def _log_sums(p: Problem, seen: Array, arrays: Arrays) -> tuple[Array, Array]:
    """With q = 0: the logits of the keys that are seen (heads, len_q, len_kv), and what the LSE is (heads, len_q)."""
    distance = np.abs(np.arange(p.len_q)[:, None] + p.len_kv - p.len_q - np.arange(p.len_kv))
    slopes, sinks = (
        arrays.get(name, np.full(p.heads, without)).astype(np.float64)
        for name, without in (("alibi_slopes", 0.0), ("sinks", -math.inf))
    )
    logits = np.where(seen, -slopes[:, None, None] * distance, -np.inf)
    return logits, np.logaddexp(np.logaddexp.reduce(logits, axis=-1, initial=-np.inf), sinks[:, None])


def neutral(bench: Bench) -> Iterator[Trial]:
    """A soft cap far above all scores, sinks of -inf and slopes of 0 change nothing."""
    for dtype in bench.dtypes:
        for word, changes, numbers in (
            ("soft cap of 1e5", {"soft_cap": 1e5, "causal": True}, {}),
            ("sinks of -inf, empty rows", {"sinks": True, **EMPTY_ROWS}, {"sinks": -math.inf}),
            ("sinks of -1e4", {"sinks": True, "heads": 4, "kv_heads": 2}, {"sinks": -1e4}),
            ("slopes of 0", {"alibi": True, "len_kv": 150}, {"alibi_slopes": 0.0}),
        ):
            yield fitted(
                bench,
                word,
                usual(dtype, **changes),
                lambda bench, p, numbers=numbers: _neutral(bench, p, numbers),
                lambda p: bench.does(_plain(p)),
            )


def _plain(p: Problem) -> Problem:
    return p.replace(soft_cap=None, sinks=False, alibi=False)


def _neutral(bench: Bench, p: Problem, numbers: dict[str, float]) -> float:
    arrays, plain = bench.draw(p), bench.draw(_plain(p))
    given = arrays | {name: np.full(p.heads, number, np.float32) for name, number in numbers.items()}
    expected = bench.expect(_plain(p), plain)
    return near(bench.run(p, given), bench.run(_plain(p), plain), expected, what="with it and without")


def extremes(bench: Bench) -> Iterator[Trial]:
    """Soft caps near overflow or far below the scores, sinks of 1e4 and slopes of 1e4 leave no NaN, and obey the rule."""
    for dtype in bench.dtypes:
        for word, changes, inputs, numbers in (
            ("soft cap of 1e-3, logits of 1e4", {"soft_cap": 1e-3, "causal": True}, "large", {}),
            ("soft cap of 1e-30", {"soft_cap": 1e-30}, "normal", {}),
            ("soft cap of 1e30", {"soft_cap": 1e30}, "normal", {}),
            ("sinks of 1e4", {"sinks": True, **EMPTY_ROWS}, "normal", {"sinks": (1e4, -1e4, -math.inf, 80.0)}),
            ("sinks beside logits of 1e4", {"sinks": True}, "large", {"sinks": (1e4, -1e4, 5e3, -math.inf)}),
            ("slopes of 1e4", {"alibi": True, "len_kv": 113}, "normal", {"alibi_slopes": (1e4, 0.0, -0.5, 2.0**-12)}),
        ):
            p = usual(dtype, **{"heads": 4, **changes})
            yield fitted(
                bench, word, p, lambda bench, p, inputs=inputs, numbers=numbers: _extremes(bench, p, inputs, numbers)
            )


def _extremes(bench: Bench, p: Problem, inputs: str, numbers: dict[str, tuple[float, ...]]) -> float:
    arrays = bench.draw(p, inputs) | {
        name: np.resize(np.array(some, np.float32), p.heads) for name, some in numbers.items()
    }
    expected = bench.expect(p, arrays)
    bench.check_oracles(p, arrays, expected)
    result = bench.run(p, arrays)
    return held(judge(expected, result.out, result.lse)).worst


def head_order(bench: Bench) -> Iterator[Trial]:
    """Each head has its own keys, sink and slope: with the heads in another order, so are the results."""
    for dtype in bench.dtypes:
        for word, changes in (("reversed", {}), ("reversed, soft cap, sinks, ALiBi", EVERY_SCORE)):
            p = usual(dtype, batch=2, heads=6, kv_heads=3, len_q=40, len_kv=70, **changes)
            yield fitted(bench, word, p, _head_order, lambda p: p.heads > 1)


def _head_order(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    back = {name: _reversed(name, x) for name, x in arrays.items()}
    a, b = bench.run(p, arrays), bench.run(p, back)
    b = Result(_reversed("out", b.out), None if b.lse is None else _reversed("lse", b.lse))
    if bench.target.bitwise and not a.same_bits(b):
        raise Failure("a head has other bits where the heads are in another order")
    return near(a, b, bench.expect(p, arrays), what="heads in another order")


def _reversed(name: str, x: Array) -> Array:
    """An operand with its heads in the opposite order. So each group of query heads keeps its KV head."""
    axes = ATTENTION.operand(name).axes
    return np.ascontiguousarray(np.flip(x, next(n for n, axis in enumerate(axes) if axis in ("heads", "kv_heads"))))
