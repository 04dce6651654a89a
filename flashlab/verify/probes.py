"""The checks of attention, by name. Each yields trials. These raise `Failure`, or return their error over the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from flashlab.verify.adapter import Refused
from flashlab.verify.bench import (
    Bench,
    Failure,
    Result,
    Trial,
    fitted,
    held,
    keeps_scores,
    near,
    no_such_problem,
    pairs_of,
    visible,
)  # fmt: skip
from flashlab.verify.cases import EMPTY_ROWS, EVERY_SCORE, Case, edges, said, usual
from flashlab.verify.dropout import dropout
from flashlab.verify.eight_bit import caches, exact_lse, scaled_operands
from flashlab.verify.masks import masks
from flashlab.verify.memory import Placed
from flashlab.verify.ragged import SHORT, ragged
from flashlab.verify.rule import SUMS, judge, reference
from flashlab.verify.scores import extremes, head_order, key_sets, neutral
from flashlab.verify.targets import SimulatorTarget
from simulator import Problem
from simulator.dtypes import Array
from simulator.names import DType
from simulator.operations.attention import ATTENTION
from simulator.operations.draws import LARGEST_FP8, to_storage
from simulator.problem import FP8

Check = Callable[[Bench], Iterator[Trial]]

QUICK = ("rule", "key_sets", "hidden_keys", "memory", "determinism", "reuse")
"""The checks of a quick verification: those that cost little, beside the rule."""
QUICK_PAIRS = 1 << 16
"""The most (query, key) pairs, over batch and heads, of a problem of the rule in a quick verification."""
MOST_SCORES = 1 << 21
"""The most (query, key) pairs per head for which `long_sums` asks."""


def rule(bench: Bench) -> Iterator[Trial]:
    """Every row of every edge case obeys the rule against float64."""
    dims = (16, 32, 40, 64, 72, 96, 111, 128, 256)
    for dtype in bench.dtypes:
        taken: set[Case] = set()
        for word, edge in edges(dtype, full=bench.full, head_dims=None if bench.full else dims[1:]):
            wanted = replace(edge, seed=bench.seed)
            case = bench.target.domain.another(wanted, taken)
            if case is not None and not keeps_scores(case.problem, wanted.problem):
                yield Trial(word, wanted.problem, no_such_problem)
            elif case is not None and not (bench.quick and pairs_of(case.problem) > QUICK_PAIRS):
                taken.add(case)
                label = said(word, wanted.problem, case.problem)
                yield Trial(label, case.problem, lambda case=case: bench.judge_case(case), case)


def hidden_keys(bench: Bench) -> Iterator[Trial]:
    """Keys and values that a row cannot see must not change it by one bit, even when they become very large."""
    for dtype in bench.dtypes:
        for word, p in (
            ("causal", usual(dtype, causal=True)),
            ("window", usual(dtype, len_q=80, len_kv=120, window=(30, 5))),
            ("soft cap, sinks, ALiBi", usual(dtype, **EVERY_SCORE, causal=True)),
        ):
            yield fitted(bench, word, p, _hidden_keys, lambda p: not visible(p, bench.target).all())


def _hidden_keys(bench: Bench, p: Problem) -> None:
    arrays = bench.draw(p)
    plain, seen = bench.run(p, arrays), visible(p, bench.target)
    for row in sorted({0, p.len_q // 3, p.len_q - 1}):
        loud_k, loud_v = arrays["k"].copy(), arrays["v"].copy()
        loud = min(1e4, LARGEST_FP8) if p.dtype == FP8 else 1e4
        loud_k[:, :, ~seen[row]], loud_v[:, :, ~seen[row]] = loud, -loud
        changed = bench.run(p, {**arrays, "k": loud_k, "v": loud_v})
        pick = (slice(None), slice(None), slice(row, row + 1))
        part = [Result(r.out[pick], None if r.lse is None else r.lse[pick]) for r in (plain, changed)]
        if not part[0].same_bits(part[1]):
            raise Failure(f"row {row} changes when keys and values change that it cannot see")


def memory(bench: Bench) -> Iterator[Trial]:
    """NaN and inf in padding, around arrays, in workspace and output change no bit, and the kernel overwrites none."""
    if bench.target.watched:
        return
    for dtype in bench.dtypes:
        for word, layout, p in (
            ("guard bands", "plain", usual(dtype, len_q=113, causal=True)),
            ("odd head dim", "plain", usual(dtype, head_dim=111, len_q=50, len_kv=77)),
            ("padded rows", "padded", usual(dtype, head_dim=40, len_q=77, len_kv=50)),
            (
                "padded rows, odd head dim, GQA",
                "padded",
                usual(dtype, heads=4, kv_heads=2, head_dim=111, len_q=33, causal=True),
            ),
            ("empty rows", "plain", usual(dtype, **EMPTY_ROWS)),
            ("numbers per head", "plain", usual(dtype, **EVERY_SCORE, heads=6, kv_heads=3, causal=True)),
        ):
            layouts = bench.target.domain.layouts
            layout = layout if layouts is None or layout in layouts else "plain"
            yield fitted(bench, word, p, lambda bench, p, layout=layout: _memory(bench, p, layout))


def _memory(bench: Bench, p: Problem, layout: str) -> None:
    arrays, target = bench.draw(p), bench.target
    if not target.frame.views:
        raise Refused(f"{target.frame.name} owns its memory")
    clean = bench.run(p, arrays, layout=layout, garbage=0.0)
    for garbage in (math.nan, math.inf):
        for out in (False, True) if target.takes_out else (False,):
            target.frame.litter(target.footprint(p))
            dirty = bench.run(p, arrays, layout=layout, garbage=garbage, out=out)
            if not dirty.same_bits(clean):
                where = (
                    "around the arrays, in the output or the workspace"
                    if out
                    else "around the arrays or in the workspace"
                )
                raise Failure(f"{garbage} {where} changes the result")


def odd_scale(bench: Bench) -> Iterator[Trial]:
    """A scale of 0 gives the plain mean of the values. With a scale below 0, the least score weighs most."""
    for dtype in bench.dtypes:
        for word, scale in (("0", 0.0), ("below 0", -0.125)):
            case = bench.target.domain.fit_case(Case(problem=usual(dtype, scale=scale, causal=True), seed=bench.seed))
            if case.problem.scale != scale:  # the rows that such a scale would have are `rule`'s
                continue
            yield Trial(word, case.problem, lambda case=case: bench.judge_case(case), case)


def permutation(bench: Bench) -> Iterator[Trial]:
    """The result stays the same when keys and values are permuted together."""
    for dtype in bench.dtypes:
        for word, changes in (("no mask", {}), ("soft cap, sinks", {"soft_cap": 5.0, "sinks": True})):
            p = usual(dtype, len_kv=150, **changes)
            yield fitted(bench, word, p, _permutation, lambda p: not p.causal and p.len_kv > 1)


def _permutation(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    order = np.random.default_rng(bench.seed).permutation(p.len_kv)
    a, b = bench.run(p, arrays), bench.run(p, {**arrays, **{name: arrays[name][:, :, order] for name in "kv"}})
    return near(a, b, bench.expect(p, arrays), what="keys and values permuted")


def split(bench: Bench) -> Iterator[Trial]:
    """Attention over two parts of the keys, merged by their LSEs, is attention over all of them. One part has the sinks."""
    for dtype in bench.dtypes:
        for cut, word, changes in (
            (32, "", {}),
            (71, "", {}),
            (71, ", soft cap, sinks", {"soft_cap": 5.0, "sinks": True}),
        ):
            wanted = usual(dtype, len_kv=113, **changes)
            cut = bench.target.domain.fit(wanted.replace(len_kv=cut)).len_kv
            yield fitted(
                bench,
                f"cut at {cut}{word}",
                wanted,
                lambda bench, p, cut=cut: _split(bench, p, cut),
                lambda p, cut=cut: not p.causal and all(bench.does(part) for part in _parts(p, cut)),
            )


def _parts(p: Problem, cut: int) -> list[Problem]:
    return [p.replace(len_kv=n) for n in (cut, max(0, p.len_kv - cut))]


def _split(bench: Bench, p: Problem, cut: int) -> float:
    arrays = bench.draw(p, "biased")
    whole, expected = bench.run(p, arrays), bench.expect(p, arrays)
    if whole.lse is None:  # a program may return none, too
        raise Refused("without an LSE, parts can't be merged")
    merged, lses = np.zeros(whole.out.shape), list[Array]()
    allowed = expected.out_tolerance.copy()
    parts = [{**arrays, **{name: arrays[name][:, :, keys] for name in "kv"}} for keys in (slice(cut), slice(cut, None))]
    if p.sinks:
        parts[1]["sinks"] = np.full_like(arrays["sinks"], -np.inf)
    for each in parts:
        one = p.replace(len_kv=each["k"].shape[2])
        part, truth = bench.run(one, each), bench.expect(one, each)
        assert part.lse is not None
        weight = np.exp(part.lse.astype(np.float64) - expected.lse)
        merged += weight[..., None] * part.out.astype(np.float64)
        size = np.linalg.norm(truth.out, axis=-1)
        allowed += np.exp(truth.lse - expected.lse) * (truth.out_tolerance + truth.lse_tolerance * size)
        lses.append(part.lse.astype(np.float64))
    worst = float((np.linalg.norm(merged - whole.out.astype(np.float64), axis=-1) / allowed).max())
    if not worst <= 1:
        raise Failure(f"the parts, merged, differ from the whole by {worst:.3g} x what rounding explains")
    off = float((np.abs(np.logaddexp(*lses) - whole.lse) / (2 * expected.lse_tolerance)).max())
    if not off <= 1:
        raise Failure(f"the parts' LSEs, merged, differ from the whole's by {off:.3g} x what rounding explains")
    return max(worst, off)


def gqa(bench: Bench) -> Iterator[Trial]:
    """Grouped heads give the same result as ordinary heads with K and V repeated."""
    for dtype in bench.dtypes:
        for heads, kv_heads in ((8, 2), (7, 1), (6, 3)):
            p = usual(dtype, batch=2, heads=heads, kv_heads=kv_heads, len_q=40, len_kv=70, causal=True)
            yield fitted(bench, f"{heads}:{kv_heads}", p, _gqa, lambda p: _both_kinds_of_heads(bench, p))
        p = usual(dtype, **EVERY_SCORE, heads=6, kv_heads=2, len_q=40, len_kv=70)
        yield fitted(bench, "6:2, soft cap, sinks, ALiBi", p, _gqa, lambda p: _both_kinds_of_heads(bench, p))


def _both_kinds_of_heads(bench: Bench, p: Problem) -> bool:
    return p.queries_per_kv > 1 and bench.does(p.replace(kv_heads=None))


def _gqa(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    own = {name: np.repeat(arrays[name], p.queries_per_kv, axis=1) for name in "kv"}
    grouped, repeated = bench.run(p, arrays), bench.run(p.replace(kv_heads=None), {**arrays, **own})
    return near(grouped, repeated, bench.expect(p, arrays), what="K and V repeated for each head")


def prefix(bench: Bench) -> Iterator[Trial]:
    """Under a causal mask, row i equals full attention of that query over the first i + 1 keys."""
    for dtype in bench.dtypes:
        for word, changes in (("causal", {}), ("causal, soft cap, sinks, ALiBi", EVERY_SCORE)):
            p = usual(dtype, len_q=130, causal=True, **changes)
            yield fitted(bench, word, p, _prefix, lambda p: _has_prefixes(bench, p))


def _row_alone(p: Problem, i: int) -> Problem:
    return p.replace(len_q=1, len_kv=i + 1, causal=False)


def _has_prefixes(bench: Bench, p: Problem) -> bool:
    return p.causal and p.len_q == p.len_kv > 129 and bench.does(_row_alone(p, 1))


def _prefix(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    causal, worst = bench.run(p, arrays), 0.0
    for i in (0, 1, 15, 16, 63, 64, 65, 129):
        one, this = _row_alone(p, i), (slice(None), slice(None), slice(i, i + 1))
        alone = {**arrays, "q": arrays["q"][this], **{name: arrays[name][:, :, : i + 1] for name in "kv"}}
        row = Result(causal.out[this], None if causal.lse is None else causal.lse[this])
        off = near(row, bench.run(one, alone), bench.expect(one, alone), what=f"row {i} against {i + 1} keys")
        worst = max(worst, off)
    return worst


def batch(bench: Bench) -> Iterator[Trial]:
    """A sequence gives the same result alone and in a batch: the same bits for our kernels, by the rule for others."""
    for dtype in bench.dtypes:
        for word, changes in (("of 3", {}), ("of 3, soft cap, sinks, ALiBi", EVERY_SCORE)):
            p = usual(dtype, batch=3, heads=4, kv_heads=2, causal=True, **changes)
            yield fitted(bench, word, p, _batch, lambda p: p.batch > 1 and bench.does(p.replace(batch=1)))


def _batch(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    together, worst = bench.run(p, arrays), 0.0
    for b in range(p.batch):
        alone = {name: ATTENTION.operand(name).part(x, {"batch": b}) for name, x in arrays.items()}
        one = p.replace(batch=1)
        a = Result(together.out[b : b + 1], None if together.lse is None else together.lse[b : b + 1])
        c = bench.run(one, alone)
        if bench.target.bitwise and not a.same_bits(c):
            raise Failure(f"sequence {b} has other bits alone than in a batch of {p.batch}")
        worst = max(worst, near(a, c, bench.expect(one, alone), what=f"sequence {b} alone and in a batch"))
    return worst


def determinism(bench: Bench) -> Iterator[Trial]:
    """Every run gives the same bits."""
    for dtype in bench.dtypes:
        for word, changes in (
            ("no mask", {"len_q": 239}),
            ("causal", {"len_q": 130, "causal": True}),
            ("soft cap, sinks, ALiBi", EVERY_SCORE),
        ):
            p = usual(dtype, heads=4, kv_heads=2, **changes)
            yield fitted(bench, word, p, _determinism)


def _determinism(bench: Bench, p: Problem) -> None:
    arrays = bench.draw(p)
    first = bench.run(p, arrays)
    for n in range(2, 5):
        if not bench.run(p, arrays).same_bits(first):
            raise Failure(f"run {n} differs from run 1")


def reuse(bench: Bench) -> Iterator[Trial]:
    """Other values in the same memory give other results. Each obeys the rule, and the first values give the first result."""
    for dtype in bench.dtypes:
        p = usual(dtype, heads=4, kv_heads=2, len_q=40, causal=True)
        yield fitted(bench, "other values in the same memory", p, _reuse)


def _reuse(bench: Bench, p: Problem) -> float:
    if not bench.target.frame.views:
        raise Refused(f"{bench.target.frame.name} owns its memory")
    within, worst = dict[str, Placed](), 0.0
    for more in (0, 1, 2, 0):
        arrays = ATTENTION.draw(p, bench.seed + more)
        result = bench.run(p, arrays, within=within)
        worst = max(worst, held(judge(bench.expect(p, arrays), result.out, result.lse)).worst)
    return worst


def long_sums(bench: Bench) -> Iterator[Trial]:
    """Sums over many keys must not lose their small addends.

    If all values are 1, so is the output, however many keys there are. If only half of the values are 1, the output is
    the share that their keys have of the weights. An accumulator of b bits stops growing after about 2^b keys, which
    inputs around 0 hide. Equal values hide it too, if the sum of the weights loses as much. The half shows it then: its
    sum loses less, so the half gets more than its share.
    """
    for dtype in bench.dtypes:
        for word, q_size, part in (("equal weights", 0.0, 1), ("normal weights", 1.0, 1), ("half of V", 1.0, 2)):
            keys = 65536 if bench.full else 8192
            p = bench.target.domain.fit(usual(dtype, heads=1, len_q=16, len_kv=keys))
            if p.len_q * p.len_kv > MOST_SCORES:  # as many queries as keys: both sums must stay affordable
                p = bench.target.domain.fit(p.replace(len_q=1024, len_kv=1024))
            yield Trial(word, p, lambda p=p, q_size=q_size, part=part: _long_sums(bench, p, q_size, part))


def _long_sums(bench: Bench, p: Problem, q_size: float, part: int) -> float:
    arrays = bench.draw(p)
    arrays["q"], keys, off = to_storage(arrays["q"].astype(np.float32) * q_size, p.dtype), p.len_kv // part, 0.0
    for first in range(0, p.len_kv, keys):
        arrays["v"][:] = 0
        arrays["v"][:, :, first : first + keys] = 1
        share = reference(p, **arrays).out
        off = max(off, float(np.abs(bench.run(p, arrays).out.astype(np.float64) / share - 1).max()) / SUMS[p.dtype])
    if not off <= 1:
        limit = f"{SUMS[p.dtype]:.2g}, the most that the sum may lose"
        raise Failure(f"the sum over {keys:,} of {p.len_kv:,} keys is off by {off:.3g} x {limit}")
    return off


def byte_counts(bench: Bench) -> Iterator[Trial]:
    """On the simulator, the run on data, the run on shapes and the formula (if there is one) count the same bytes."""
    target = bench.target
    if not isinstance(target, SimulatorTarget):
        return
    for dtype in bench.dtypes:
        for word, p, tile in (
            ("causal", usual(dtype, causal=True), None),
            ("ragged, GQA", usual(dtype, heads=4, kv_heads=2, len_q=33, len_kv=70, head_dim=40), (32, 16)),
            ("window", usual(dtype, len_q=70, window=(20, 3)), (16, 32)),
            ("soft cap, sinks, ALiBi", usual(dtype, **EVERY_SCORE, len_q=70, causal=True), (32, 16)),
            ("ragged batch", usual(dtype, len_q=None, lengths=SHORT, causal=True), (32, 16)),
        ):
            yield Trial(word, p, lambda p=p, tile=tile: target.check_bytes(p, tile))


def huge(bench: Bench) -> Iterator[Trial]:
    """On a GPU, tensors of over 2^31 elements: rows at both ends and in the middle obey the rule. Full mode only."""
    target = bench.target
    if not bench.full or not target.frame.views or target.frame.name == "numpy":
        return
    dtype: DType | None = next((d for d in bench.dtypes if d != "float32"), None)
    if dtype is None:
        return
    for word, changes in (
        ("q and out", {"heads": 1100, "kv_heads": 1, "len_q": 16400, "len_kv": 64, "head_dim": 128}),
        ("k and v", {"heads": 1100, "len_q": 1, "len_kv": 16400, "head_dim": 128}),
        ("scores", {"heads": 1, "len_q": 47104, "head_dim": 64, "causal": True}),
    ):
        p = usual(dtype, **changes)
        yield Trial(word, p, lambda p=p: _huge(bench, p))


def _huge(bench: Bench, p: Problem) -> float:
    """Judge some rows of a huge problem. Its heads repeat a few random ones, gathered on the device."""
    frame, rng = bench.target.frame, np.random.default_rng(bench.seed)
    views, different = dict[str, Any](), 5
    for operand in ATTENTION.required:
        _, heads, length, dim = operand.shape(p)
        few = to_storage(rng.standard_normal((1, min(heads, different), length, dim)), p.dtype)
        many = frame.pick(frame.put(few.reshape(-1)).reshape(few.shape), [h % few.shape[1] for h in range(heads)])
        views[operand.name] = many
    out, lse = bench.call(p, views)
    worst = 0.0
    for h in sorted({0, p.heads // 2, p.heads - 1}):
        kv = h // p.queries_per_kv
        k, v = (frame.get(views[name][:, kv : kv + 1]) for name in "kv")
        for start in sorted({0, p.len_q // 2, max(0, p.len_q - 16)}):
            rows = slice(start, min(start + 16, p.len_q))
            last = p.len_kv if not p.causal else p.len_kv - p.len_q + rows.stop
            part = p.replace(heads=1, kv_heads=1, len_q=rows.stop - start, len_kv=last)
            seen = {"q": frame.get(views["q"][:, h : h + 1, rows]), "k": k[:, :, :last], "v": v[:, :, :last]}
            expected = bench.expect(part, seen)
            got = frame.get(out[:, h : h + 1, rows]), None if lse is None else frame.get(lse[:, h : h + 1, rows])
            worst = max(worst, held(judge(expected, *got)).worst)
    return worst


def misaligned(bench: Bench) -> Iterator[Trial]:
    """Arrays may begin one element past an aligned address. This check is last: after a fault, later ones fail too."""
    for dtype in bench.dtypes:
        layouts = bench.target.domain.layouts
        if layouts is not None and "misaligned" not in layouts:
            return
        p = bench.target.domain.fit(usual(dtype, batch=2, heads=4, kv_heads=2, len_q=65, causal=True))
        case = Case(problem=p, layout="misaligned", seed=bench.seed)
        yield Trial("the rule", p, lambda case=case: bench.judge_case(case), case)
        several = usual(dtype, **EVERY_SCORE, len_q=65)
        yield fitted(bench, "memory, numbers per head", several, lambda bench, p: _memory(bench, p, "misaligned"))
        odd = usual(dtype, head_dim=72, len_q=33)
        yield fitted(bench, "memory", odd, lambda bench, p: _memory(bench, p, "misaligned"))


CHECKS: dict[str, Check] = {
    "rule": rule,
    "key_sets": key_sets,
    "hidden_keys": hidden_keys,
    "memory": memory,
    "odd_scale": odd_scale,
    "permutation": permutation,
    "split": split,
    "gqa": gqa,
    "prefix": prefix,
    "batch": batch,
    "ragged": ragged,
    "neutral": neutral,
    "extremes": extremes,
    "masks": masks,
    "dropout": dropout,
    "caches": caches,
    "head_order": head_order,
    "determinism": determinism,
    "reuse": reuse,
    "long_sums": long_sums,
    "scaled_operands": scaled_operands,
    "exact_lse": exact_lse,
    "byte_counts": byte_counts,
    "huge": huge,
    "misaligned": misaligned,
}
"""The checks by name, in the order in which they run. A search by Hypothesis comes before the last."""
