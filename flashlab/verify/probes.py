"""The checks of attention, by name. Each yields trials. These raise `Failure`, or return their error over the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import simulator
from flashlab.verify.adapter import Refused, SimulatorTarget
from flashlab.verify.bench import Bench, Failure, Result, Trial, fitted, held, near, visible
from flashlab.verify.cases import Case, edges, make_inputs
from flashlab.verify.rule import SUMS, judge, reference
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.attention import LARGEST_FP8, to_storage
from simulator.problem import FP8
from simulator.programs.flash3_fp8 import TILE
from simulator.quantize import quantize

Check = Callable[[Bench], Iterator[Trial]]

MOST_SCORES = 1 << 21
"""The most (query, key) pairs per head for which `long_sums` asks."""


def _problem(dtype: str, **changes: Any) -> Problem:
    return Problem(batch=1, heads=2, len_q=97, head_dim=64, dtype=dtype).replace(**changes)


def rule(bench: Bench) -> Iterator[Trial]:
    """Every row of every edge case obeys the rule against float64."""
    dims = (16, 32, 40, 64, 72, 96, 111, 128, 256)
    for dtype in bench.dtypes:
        taken: set[Case] = set()
        for word, edge in edges(dtype, full=bench.full, head_dims=None if bench.full else dims[1:]):
            wanted = replace(edge, seed=bench.seed)
            case = bench.target.domain.another(wanted, taken)
            if case is not None:
                taken.add(case)
                shaped = "" if case == wanted else ", shaped"
                yield Trial(word + shaped, case.problem, lambda case=case: bench.judge_case(case), case)


def key_sets(bench: Bench) -> Iterator[Trial]:
    """With q = 0 and one-hot values, `out` shows which keys each row attends to. The LSE is the log of their number."""
    for dtype in bench.dtypes:
        for word, p in (
            ("no mask", _problem(dtype)),
            ("causal", _problem(dtype, causal=True)),
            ("causal, more keys", _problem(dtype, len_q=70, len_kv=150, causal=True)),
            ("causal, more queries", _problem(dtype, len_q=150, len_kv=70, causal=True)),
            ("window", _problem(dtype, window=(20, 10))),
            ("causal window, GQA", _problem(dtype, heads=4, len_q=131, window=(40, None), causal=True)),
            ("1025 keys", _problem(dtype, heads=1, len_q=2, len_kv=1025)),
        ):
            yield fitted(bench, word, p, _key_sets)


def _key_sets(bench: Bench, p: Problem) -> None:
    # a row of `out` shows head_dim keys, so each sequence of the batch shows another chunk of keys
    chunks = -(-p.len_kv // p.head_dim_v)
    p = p.replace(batch=chunks)
    q, k, v = make_inputs(p, seed=bench.seed)
    q[...], v[...] = 0, 0
    for chunk in range(chunks):
        keys = range(chunk * p.head_dim_v, min((chunk + 1) * p.head_dim_v, p.len_kv))
        v[chunk, :, keys, range(len(keys))] = 1
    result = _in_batches(bench, p, q, k, v)
    spelled = result.out.astype(np.float64).transpose(1, 2, 0, 3).reshape(p.heads, p.len_q, -1)[..., : p.len_kv]
    wanted = visible(p, bench.target)
    counts = wanted.sum(-1)
    for h, i in np.ndindex(spelled.shape[:2]):
        got, want = set(np.flatnonzero(spelled[h, i] != 0).tolist()), set(np.flatnonzero(wanted[i]).tolist())
        if got != want:
            extra, missing = sorted(got - want), sorted(want - got)
            raise Failure(
                f"head {h}, row {i} attends to keys that it must not see: {extra[:5]}, and misses {missing[:5]}"
            )
    expected = bench.expect(p, q, k, v)
    held(judge(expected, result.out, None))
    if result.lse is not None:
        with np.errstate(divide="ignore"):
            truth = np.broadcast_to(np.log(counts), result.lse.shape)
        wrong = ~np.isclose(result.lse, truth, rtol=0, atol=2e-5) & ~(np.isneginf(result.lse) & np.isneginf(truth))
        if wrong.any():
            b, h, i = np.argwhere(wrong)[0].tolist()
            raise Failure(
                f"LSE of head {h}, row {i} is {result.lse[b, h, i]:.7g}, not log({counts[i]}) = {truth[b, h, i]:.7g}"
            )


def _in_batches(bench: Bench, p: Problem, q: Array, k: Array, v: Array) -> Result:
    """Run all sequences in one call, or one by one where the target takes no such batch."""
    if bench.target.refuses(p) is None:
        return bench.run(p, q, k, v)
    one = bench.target.domain.fit(p.replace(batch=1))
    size, parts = one.batch, list[Result]()
    for first in range(0, p.batch, size):
        rows = np.arange(first, first + size) % p.batch  # the last call may see some sequences again
        parts.append(bench.run(one, q[rows], k[rows], v[rows]))
    lses = [part.lse for part in parts if part.lse is not None]
    out = np.concatenate([part.out for part in parts])[: p.batch]
    return Result(out, np.concatenate(lses)[: p.batch] if lses else None)


def hidden_keys(bench: Bench) -> Iterator[Trial]:
    """Keys and values that a row cannot see must not change it by one bit, even when they become very large."""
    for dtype in bench.dtypes:
        for word, p in (
            ("causal", _problem(dtype, causal=True)),
            ("window", _problem(dtype, len_q=80, len_kv=120, window=(30, 5))),
        ):
            yield fitted(bench, word, p, _hidden_keys, lambda p: not visible(p, bench.target).all())


def _hidden_keys(bench: Bench, p: Problem) -> None:
    q, k, v = make_inputs(p, seed=bench.seed)
    plain, seen = bench.run(p, q, k, v), visible(p, bench.target)
    for row in sorted({0, p.len_q // 3, p.len_q - 1}):
        loud_k, loud_v = k.copy(), v.copy()
        loud = min(1e4, LARGEST_FP8) if p.dtype == FP8 else 1e4
        loud_k[:, :, ~seen[row]], loud_v[:, :, ~seen[row]] = loud, -loud
        changed = bench.run(p, q, loud_k, loud_v)
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
            ("guard bands", "plain", _problem(dtype, len_q=113, causal=True)),
            ("odd head dim", "plain", _problem(dtype, head_dim=111, len_q=50, len_kv=77)),
            ("padded rows", "padded", _problem(dtype, head_dim=40, len_q=77, len_kv=50)),
            (
                "padded rows, odd head dim, GQA",
                "padded",
                _problem(dtype, heads=4, kv_heads=2, head_dim=111, len_q=33, causal=True),
            ),
            ("empty rows", "plain", _problem(dtype, len_q=100, len_kv=37, causal=True)),
        ):
            layouts = bench.target.domain.layouts
            layout = layout if layouts is None or layout in layouts else "plain"
            yield fitted(bench, word, p, lambda bench, p, layout=layout: _memory(bench, p, layout))


def _memory(bench: Bench, p: Problem, layout: str) -> None:
    arrays, target = make_inputs(p, seed=bench.seed), bench.target
    if not target.frame.views:
        raise Refused(f"{target.frame.name} owns its memory")
    clean = bench.run(p, *arrays, layout=layout, garbage=0.0)
    for garbage in (math.nan, math.inf):
        for out in (False, True) if target.takes_out else (False,):
            target.frame.litter(target.footprint(p))
            dirty = bench.run(p, *arrays, layout=layout, garbage=garbage, out=out)
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
            case = bench.target.domain.fit_case(
                Case(problem=_problem(dtype, scale=scale, causal=True), seed=bench.seed)
            )
            if case.problem.scale != scale:  # the rows that such a scale would have are `rule`'s
                continue
            yield Trial(word, case.problem, lambda case=case: bench.judge_case(case), case)


def permutation(bench: Bench) -> Iterator[Trial]:
    """The result stays the same when keys and values are permuted together."""
    for dtype in bench.dtypes:
        p = _problem(dtype, len_kv=150)
        yield fitted(bench, "no mask", p, _permutation, lambda p: not p.causal and p.len_kv > 1)


def _permutation(bench: Bench, p: Problem) -> float:
    q, k, v = make_inputs(p, seed=bench.seed)
    order = np.random.default_rng(bench.seed).permutation(p.len_kv)
    a, b = bench.run(p, q, k, v), bench.run(p, q, k[:, :, order], v[:, :, order])
    return near(a, b, bench.expect(p, q, k, v), what="keys and values permuted")


def split(bench: Bench) -> Iterator[Trial]:
    """Attention over two parts of the keys, merged by their LSEs, is attention over all of them."""
    for dtype in bench.dtypes:
        for cut in (32, 71):
            wanted = _problem(dtype, len_kv=113)
            cut = bench.target.domain.fit(wanted.replace(len_kv=cut)).len_kv
            yield fitted(
                bench,
                f"cut at {cut}",
                wanted,
                lambda bench, p, cut=cut: _split(bench, p, cut),
                lambda p, cut=cut: not p.causal and all(bench.does(part) for part in _parts(p, cut)),
            )


def _parts(p: Problem, cut: int) -> list[Problem]:
    return [p.replace(len_kv=n) for n in (cut, max(0, p.len_kv - cut))]


def _split(bench: Bench, p: Problem, cut: int) -> float:
    q, k, v = make_inputs(p, "biased", seed=bench.seed)
    whole, expected = bench.run(p, q, k, v), bench.expect(p, q, k, v)
    if whole.lse is None:  # a program may return none, too
        raise Refused("without an LSE, parts can't be merged")
    merged, lses = np.zeros(whole.out.shape), list[Array]()
    allowed = expected.out_tolerance.copy()
    parts = [(k[:, :, :cut], v[:, :, :cut]), (k[:, :, cut:], v[:, :, cut:])]
    for keys, values in parts:
        one = p.replace(len_kv=keys.shape[2])
        part, truth = bench.run(one, q, keys, values), bench.expect(one, q, keys, values)
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
            p = _problem(dtype, batch=2, heads=heads, kv_heads=kv_heads, len_q=40, len_kv=70, causal=True)
            yield fitted(bench, f"{heads}:{kv_heads}", p, _gqa, lambda p: _both_kinds_of_heads(bench, p))


def _both_kinds_of_heads(bench: Bench, p: Problem) -> bool:
    return p.queries_per_kv > 1 and bench.does(p.replace(kv_heads=None))


def _gqa(bench: Bench, p: Problem) -> float:
    q, k, v = make_inputs(p, seed=bench.seed)
    grouped = bench.run(p, q, k, v)
    repeated = bench.run(p.replace(kv_heads=None), q, *(np.repeat(x, p.queries_per_kv, axis=1) for x in (k, v)))
    return near(grouped, repeated, bench.expect(p, q, k, v), what="K and V repeated for each head")


def prefix(bench: Bench) -> Iterator[Trial]:
    """Under a causal mask, row i equals full attention of that query over the first i + 1 keys."""
    for dtype in bench.dtypes:
        p = _problem(dtype, len_q=130, causal=True)
        yield fitted(bench, "causal", p, _prefix, lambda p: _has_prefixes(bench, p))


def _row_alone(p: Problem, i: int) -> Problem:
    return p.replace(len_q=1, len_kv=i + 1, causal=False)


def _has_prefixes(bench: Bench, p: Problem) -> bool:
    return p.causal and p.len_q == p.len_kv > 129 and bench.does(_row_alone(p, 1))


def _prefix(bench: Bench, p: Problem) -> float:
    q, k, v = make_inputs(p, seed=bench.seed)
    causal, worst = bench.run(p, q, k, v), 0.0
    for i in (0, 1, 15, 16, 63, 64, 65, 129):
        one = _row_alone(p, i)
        arrays = q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
        row = Result(causal.out[:, :, i : i + 1], None if causal.lse is None else causal.lse[:, :, i : i + 1])
        worst = max(
            worst, near(row, bench.run(one, *arrays), bench.expect(one, *arrays), what=f"row {i} against {i + 1} keys")
        )
    return worst


def batch(bench: Bench) -> Iterator[Trial]:
    """A sequence gives the same result alone and in a batch: the same bits for our kernels, by the rule for others."""
    for dtype in bench.dtypes:
        p = _problem(dtype, batch=3, heads=4, kv_heads=2, causal=True)
        yield fitted(bench, "of 3", p, _batch, lambda p: p.batch > 1 and bench.does(p.replace(batch=1)))


def _batch(bench: Bench, p: Problem) -> float:
    arrays = make_inputs(p, seed=bench.seed)
    together, worst = bench.run(p, *arrays), 0.0
    for b in range(p.batch):
        alone = tuple(x[b : b + 1] for x in arrays)
        one = p.replace(batch=1)
        a = Result(together.out[b : b + 1], None if together.lse is None else together.lse[b : b + 1])
        c = bench.run(one, *alone)
        if bench.target.bitwise and not a.same_bits(c):
            raise Failure(f"sequence {b} has other bits alone than in a batch of {p.batch}")
        worst = max(worst, near(a, c, bench.expect(one, *alone), what=f"sequence {b} alone and in a batch"))
    return worst


def determinism(bench: Bench) -> Iterator[Trial]:
    """Every run gives the same bits."""
    for dtype in bench.dtypes:
        for word, changes in (("no mask", {"len_q": 239}), ("causal", {"len_q": 130, "causal": True})):
            p = _problem(dtype, heads=4, kv_heads=2, **changes)
            yield fitted(bench, word, p, _determinism)


def _determinism(bench: Bench, p: Problem) -> None:
    arrays = make_inputs(p, seed=bench.seed)
    first = bench.run(p, *arrays)
    for n in range(2, 5):
        if not bench.run(p, *arrays).same_bits(first):
            raise Failure(f"run {n} differs from run 1")


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
            p = bench.target.domain.fit(_problem(dtype, heads=1, len_q=16, len_kv=keys))
            if p.len_q * p.len_kv > MOST_SCORES:  # as many queries as keys: both sums must stay affordable
                p = bench.target.domain.fit(p.replace(len_q=1024, len_kv=1024))
            yield Trial(word, p, lambda p=p, q_size=q_size, part=part: _long_sums(bench, p, q_size, part))


def _long_sums(bench: Bench, p: Problem, q_size: float, part: int) -> float:
    q, k, v = make_inputs(p, seed=bench.seed)
    q, keys, off = (q.astype(np.float32) * q_size).astype(q.dtype), p.len_kv // part, 0.0
    for first in range(0, p.len_kv, keys):
        v[:] = 0
        v[:, :, first : first + keys] = 1
        share = reference(p, q, k, v).out
        off = max(off, float(np.abs(bench.run(p, q, k, v).out.astype(np.float64) / share - 1).max()) / SUMS[p.dtype])
    if not off <= 1:
        limit = f"{SUMS[p.dtype]:.2g}, the most that the sum may lose"
        raise Failure(f"the sum over {keys:,} of {p.len_kv:,} keys is off by {off:.3g} x {limit}")
    return off


def scaled_operands(bench: Bench) -> Iterator[Trial]:
    """8-bit operands with one scale per tile give the result of the values that they stand for."""
    row = getattr(bench.target, "row", None)
    if row is None or not row.support.eight_bit:
        return
    for word, p in (
        ("ragged", _problem(FP8, len_q=300, len_kv=411)),
        ("causal, GQA", _problem(FP8, heads=4, kv_heads=2, len_q=260, causal=True)),
    ):
        yield Trial(word, p, lambda p=p: _scaled_operands(bench, p))


def _scaled_operands(bench: Bench, p: Problem) -> float:
    sizes, arrays = np.random.default_rng(bench.seed), list[Array]()
    for x in make_inputs(p.replace(dtype="float32"), seed=bench.seed):  # tiles of very different sizes
        tiles = np.exp(2 * sizes.standard_normal((*x.shape[:2], -(-x.shape[2] // TILE.rows))))
        arrays.append(x * np.repeat(tiles, TILE.rows, axis=2)[:, :, : x.shape[2], None].astype(np.float32))
    arrays[0] *= np.float32(0.1)  # smaller logits, so that more than one key has a weight that counts
    eight = quantize(arrays[0], arrays[1], arrays[2])
    meant = [x.astype(np.float32) for x in eight.values()]
    result = bench.run(p, eight.q, eight.k, eight.v, tile=(TILE.rows, TILE.cols), scales=eight.scales)
    return held(judge(bench.expect(p, *meant), result.out, result.lse)).worst


def byte_counts(bench: Bench) -> Iterator[Trial]:
    """On the simulator, the run on data, the run on shapes and the formula (if there is one) count the same bytes."""
    target = bench.target
    if not isinstance(target, SimulatorTarget):
        return
    for dtype in bench.dtypes:
        for word, p, tile in (
            ("causal", _problem(dtype, causal=True), None),
            ("ragged, GQA", _problem(dtype, heads=4, kv_heads=2, len_q=33, len_kv=70, head_dim=40), (32, 16)),
            ("window", _problem(dtype, len_q=70, window=(20, 3)), (16, 32)),
        ):
            yield Trial(word, p, lambda p=p, tile=tile: _byte_counts(target, p, tile))


def _byte_counts(target: SimulatorTarget, p: Problem, tile: tuple[int, int] | None) -> None:
    q, k, v = make_inputs(p)
    where: dict[str, Any] = {"tile": target.tile or tile, "device": target.device, "lse": True}
    run = simulator.simulate(target.algorithm, q, k, v, **p.masks, **where)
    ways = {
        "shapes": simulator.shape_run(target.algorithm, p, **where),
        "formula": simulator.count(target.algorithm, p, **where),
    }
    for name, counts in ways.items():
        if counts.launches != run.counts.launches:
            raise Failure(f"the {name} count {_difference(run.counts, counts)}")


def _difference(a: Any, b: Any) -> str:
    for x, y in zip(a.launches, b.launches, strict=False):
        for entry in sorted({*x.ledger, *y.ledger}):
            if x.ledger.get(entry, 0) != y.ledger.get(entry, 0):
                where = f"launch {x.name}, step {entry.step}: {entry.what} of {entry.tensor}"
                return f"{y.ledger.get(entry, 0):,} bytes, the run on data {x.ledger.get(entry, 0):,} ({where})"
    return "launches, SRAM or FLOPs otherwise than the run on data does"


def huge(bench: Bench) -> Iterator[Trial]:
    """On a GPU, tensors of over 2^31 elements: rows at both ends and in the middle obey the rule. Full mode only."""
    target = bench.target
    if not bench.full or not target.frame.views or target.frame.name == "numpy":
        return
    dtype = next((d for d in bench.dtypes if d != "float32"), None)
    if dtype is None:
        return
    for word, changes in (
        ("q and out", {"heads": 1100, "kv_heads": 1, "len_q": 16400, "len_kv": 64, "head_dim": 128}),
        ("k and v", {"heads": 1100, "len_q": 1, "len_kv": 16400, "head_dim": 128}),
        ("scores", {"heads": 1, "len_q": 47104, "head_dim": 64, "causal": True}),
    ):
        p = _problem(dtype, **changes)
        yield Trial(word, p, lambda p=p: _huge(bench, p))


def _huge(bench: Bench, p: Problem) -> float:
    """Judge some rows of a huge problem. Its heads repeat a few random ones, gathered on the device."""
    frame, rng = bench.target.frame, np.random.default_rng(bench.seed)
    views, different = list[Any](), 5
    for heads, length in ((p.heads, p.len_q), (p.kv_heads, p.len_kv), (p.kv_heads, p.len_kv)):
        few = to_storage(rng.standard_normal((1, min(heads, different), length, p.head_dim)), p.dtype)
        views.append(
            frame.pick(frame.put(few.reshape(-1)).reshape(few.shape), [h % few.shape[1] for h in range(heads)])
        )
    out, lse = bench.call(p, *views)
    worst = 0.0
    for h in sorted({0, p.heads // 2, p.heads - 1}):
        kv = h // p.queries_per_kv
        k, v = (frame.get(x[:, kv : kv + 1]) for x in views[1:])
        for start in sorted({0, p.len_q // 2, max(0, p.len_q - 16)}):
            rows = slice(start, min(start + 16, p.len_q))
            last = p.len_kv if not p.causal else p.len_kv - p.len_q + rows.stop
            part = p.replace(heads=1, kv_heads=1, len_q=rows.stop - start, len_kv=last)
            expected = bench.expect(part, frame.get(views[0][:, h : h + 1, rows]), k[:, :, :last], v[:, :, :last])
            got = frame.get(out[:, h : h + 1, rows]), None if lse is None else frame.get(lse[:, h : h + 1, rows])
            worst = max(worst, held(judge(expected, *got)).worst)
    return worst


def misaligned(bench: Bench) -> Iterator[Trial]:
    """Arrays may begin one element past an aligned address. This check is last: after a fault, later ones fail too."""
    for dtype in bench.dtypes:
        layouts = bench.target.domain.layouts
        if layouts is not None and "misaligned" not in layouts:
            return
        p = bench.target.domain.fit(_problem(dtype, batch=2, heads=4, kv_heads=2, len_q=65, causal=True))
        case = Case(problem=p, layout="misaligned", seed=bench.seed)
        yield Trial("the rule", p, lambda case=case: bench.judge_case(case), case)
        odd = _problem(dtype, head_dim=72, len_q=33)
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
    "determinism": determinism,
    "long_sums": long_sums,
    "scaled_operands": scaled_operands,
    "byte_counts": byte_counts,
    "huge": huge,
    "misaligned": misaligned,
}
"""The checks by name, in the order in which they run. A search by Hypothesis comes before the last."""
