"""The checks of operands of 8 bits: K and V quantised, in which every mistake with a scale shows, and our kernels that take all in
8 bits, their scales per tile and their exact LSE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from flashlab.verify.adapter import CallableTarget
from flashlab.verify.bench import Bench, Failure, Trial, fitted, held, near
from flashlab.verify.cases import EMPTY_ROWS, usual
from flashlab.verify.rule import judge
from simulator import Problem
from simulator.algorithms.flash3_fp8 import TILE
from simulator.dtypes import Array
from simulator.problem import CACHES, FP8, SCALES
from simulator.quantize import quantize


def caches(bench: Bench) -> Iterator[Trial]:
    """K and V in 8 bits obey the rule, with scales for any part of them: of all sizes, of 0, and of values that are tiny.

    An outsider's function can't be told of scales.
    """
    if isinstance(bench.target, CallableTarget):
        return
    for dtype in bench.dtypes:
        if dtype not in ("float16", "bfloat16"):
            continue
        for kv_dtype in CACHES:
            few: dict[str, Any] = {"heads": 4, "kv_heads": 2, "len_q": 3, "len_kv": 150, "causal": True}
            forms: list[tuple[str | None, str | None]] = [
                (None, None),
                *((form, form) for form in SCALES[:-1]),
                ("channel", "token"),
            ]
            for of_k, of_v in forms:
                p = usual(dtype, **few, kv_dtype=kv_dtype, k_scale=of_k, v_scale=of_v)
                yield fitted(bench, f"{kv_dtype}, scales of {of_k}, {of_v}", p, _rule, lambda p: p.quantized)
            each: dict[str, Any] = {"kv_dtype": kv_dtype, "k_scale": "token", "v_scale": "token"}
            for word, changes in (
                ("head dim 40, causal, batch 2", {"batch": 2, "head_dim": 40, "len_kv": 300, "causal": True}),
                ("empty rows", EMPTY_ROWS),
                ("one query, head dim 128", {"heads": 8, "kv_heads": 1, "len_q": 1, "len_kv": 601, "head_dim": 128}),
                ("scale below 0", {"scale": -0.2, "len_q": 2}),
            ):
                p = usual(dtype, **changes, **each)
                yield fitted(bench, f"{kv_dtype}, {word}", p, _rule, lambda p: p.quantized)
            for word, form in (("channels", "channel"), ("keys", "token")):
                p = usual(dtype, **few, kv_dtype=kv_dtype, k_scale=form, v_scale="token")
                yield fitted(bench, f"{kv_dtype}, every element of {word}", p, _every_element, lambda p: p.quantized)
        p = usual(dtype, heads=2, len_q=1, len_kv=200, kv_dtype="int8", k_scale="token", v_scale="token")
        yield fitted(bench, "scales of powers of two", p, _powers, lambda p: p.quantized)


def _rule(bench: Bench, p: Problem) -> float:
    worst, rng = 0.0, np.random.default_rng((bench.seed, 6))
    for kind in ("normal", "large", "rising"):
        arrays = bench.draw(p, kind)
        worst = max(worst, _judged(bench, p, arrays))
    arrays = bench.draw(p)  # scales of very different sizes, and some of 0
    for name in ("k_scale", "v_scale"):
        if name in arrays:
            scale: Array = arrays[name]
            least, shape = -14 if name == "v_scale" else -3, scale.shape
            sizes = cast("Array", np.exp2(rng.integers(least, 2, shape)) * (rng.random(shape) > 0.1))
            arrays[name] = (scale * sizes).astype(np.float32)
    return max(worst, _judged(bench, p, arrays))


def _judged(bench: Bench, p: Problem, arrays: dict[str, Any]) -> float:
    expected = bench.expect(p, arrays)
    bench.check_oracles(p, arrays, expected)
    result = bench.run(p, arrays)
    return held(judge(expected, result.out, result.lse)).worst


def _every_element(bench: Bench, p: Problem) -> float:
    """Each of the 256 elements, but NaN, stands for its value."""
    arrays = bench.draw(p)
    for shift, name in enumerate("kv"):
        bits = np.resize(np.arange(256, dtype=np.uint8) + np.uint8(7 * shift), arrays[name].shape)
        if p.kv_dtype != "int8":
            bits = np.where(bits & 0x7F == 0x7F, np.uint8(0), bits)
        arrays[name] = np.ascontiguousarray(bits).view(arrays[name].dtype)
    arrays["q"] = (arrays["q"] * np.float32(0.02)).astype(arrays["q"].dtype)
    return _judged(bench, p, arrays)


def _powers(bench: Bench, p: Problem) -> float:
    """Powers of two move between elements and scales, and change nothing but what rounding explains."""
    arrays, rng = bench.draw(p), np.random.default_rng((bench.seed, 7))
    moved = dict(arrays)
    for name in "kv":
        small: Array = np.clip(arrays[name].astype(np.int16) // 4, -31, 31).astype(np.int8)
        powers = cast("Array", rng.integers(0, 3, small.shape[:-1]))
        arrays = {**arrays, name: small}
        moved = {**moved, name: (small * np.exp2(powers)[..., None]).astype(np.int8)}
        moved[f"{name}_scale"] = (arrays[f"{name}_scale"] / np.exp2(powers)).astype(np.float32)
    expected = bench.expect(p, arrays)
    if not np.allclose(expected.out, bench.expect(p, moved).out, rtol=1e-9, atol=1e-12):
        raise Failure("the oracles disagree about scales: this is the verifier's own fault")
    return near(bench.run(p, arrays), bench.run(p, moved), expected, what="powers of two in the scales")


def _ours(bench: Bench) -> bool:
    row = getattr(bench.target, "row", None)
    return row is not None and row.support.eight_bit


def scaled_operands(bench: Bench) -> Iterator[Trial]:
    """8-bit operands with one scale per tile give the result of the values that they stand for."""
    if not _ours(bench):
        return
    for word, p in (
        ("ragged", usual(FP8, len_q=300, len_kv=411)),
        ("causal, GQA", usual(FP8, heads=4, kv_heads=2, len_q=260, causal=True)),
    ):
        yield Trial(word, p, lambda p=p: _scaled_operands(bench, p))


def _scaled_operands(bench: Bench, p: Problem) -> float:
    sizes, arrays = np.random.default_rng(bench.seed), dict[str, Any]()
    for name, x in bench.draw(p.replace(dtype="float32")).items():  # tiles of very different sizes
        tiles = np.exp(2 * sizes.standard_normal((*x.shape[:2], -(-x.shape[2] // TILE.rows))))
        arrays[name] = x * np.repeat(tiles, TILE.rows, axis=2)[:, :, : x.shape[2], None].astype(np.float32)
    arrays["q"] *= np.float32(0.1)  # smaller logits, so that more than one key has a weight that counts
    eight = quantize(**arrays)
    meant = {name: x.astype(np.float32) for name, x in zip("qkv", eight.values(), strict=True)}
    given = {"q": eight.q, "k": eight.k, "v": eight.v}
    result = bench.run(p, given, tile=(TILE.rows, TILE.cols), scales=eight.scales)
    return held(judge(bench.expect(p, meant), result.out, result.lse)).worst


def exact_lse(bench: Bench) -> Iterator[Trial]:
    """An exact LSE obeys the rule of 16 bits, but for what a score may be off. `out` has the bits that it has without."""
    if not _ours(bench):
        return
    for word, inputs, changes in (
        ("causal, GQA", "normal", {"heads": 4, "kv_heads": 2, "len_q": 130, "causal": True}),
        ("falling", "falling", {"len_kv": 411}),
        ("wide heads, falling", "falling", {"head_dim": 256, "len_kv": 411}),
        ("empty rows", "normal", EMPTY_ROWS),
        ("long rows", "normal", {"heads": 1, "len_q": 3, "len_kv": 2049}),
    ):
        p = usual(FP8, exact_lse=True, **changes)
        yield fitted(bench, word, p, lambda bench, p, inputs=inputs: _exact_lse(bench, p, inputs))


def _exact_lse(bench: Bench, p: Problem, inputs: str) -> float:
    arrays, worst = bench.draw(p, inputs), 0.0
    expected = bench.expect(p, arrays)
    for tile in bench.target.tiles:
        exact, usually = (bench.run(each, arrays, tile=tile) for each in (p, p.replace(exact_lse=False)))
        if exact.out.tobytes() != usually.out.tobytes():
            raise Failure("out has other bits where the LSE is exact")
        worst = max(worst, held(judge(expected, exact.out, exact.lse)).worst)
    return worst
