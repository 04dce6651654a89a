"""A failing report names the mistake that was made, and names none where it does not know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import run_case, verify
from flashlab.verify.zoo import Fault, tiled
from tests.flashlab.verify.candidates import Array, attention
from tests.tiers import one_of_each

Kernel = Callable[..., Any]


def told(causal: bool = False, scale: float | None = None, window: Any = None) -> dict[str, Any]:
    return {"causal": causal, "scale": scale, "window": window}


def of(wrong: Callable[[Array, Array, Array, dict[str, Any]], Any]) -> Kernel:
    """A kernel that takes every mask, from one that is wrong in a way of its own."""

    def kernel(
        q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None, window: Any = None
    ) -> Any:
        return wrong(q, k, v, told(causal, scale, window))

    return kernel


def top_left(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    if not m["causal"] or m["window"]:
        return attention(q, k, v, **m)
    rows, keys = q.shape[2], k.shape[2]
    if keys > rows:
        k, v = k[:, :, :rows], v[:, :, :rows]
    return attention(q, k, v, scale=m["scale"], window=(None, max(0, rows - keys)))


def lse_of(change: Callable[[Array, Array], Array]) -> Kernel:
    def wrong(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
        out, lse = attention(q, k, v, **m)
        kv = np.repeat(k, q.shape[1] // k.shape[1], axis=1).astype(np.float32)
        scale = q.shape[-1] ** -0.5 if m["scale"] is None else m["scale"]
        s = scale * (q.astype(np.float32) @ kv.swapaxes(-1, -2))
        with np.errstate(all="ignore"):
            return out, np.where(np.isneginf(lse), lse, change(lse, s.max(-1, initial=-np.inf))).astype(np.float32)

    return of(wrong)


def scaled(by: Callable[[int], float]) -> Kernel:
    return of(lambda q, k, v, m: attention(q, k, v, **m | {"scale": m["scale"] or by(q.shape[-1])}))


def wider(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    causal, window = m["causal"], (m["window"] or (None, None))
    return attention(q, k, v, scale=m["scale"], window=(window[0], 1) if causal else m["window"])


def narrower(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    return attention(q, k[:, :, :-1], v[:, :, :-1], **m) if m["causal"] and not m["window"] else attention(q, k, v, **m)


def without_the_last_key(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    return attention(q, k, v, **m) if m["causal"] or m["window"] else attention(q, k[:, :, :-1], v[:, :, :-1], **m)


def padded(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    if m["causal"] or m["window"]:
        return attention(q, k, v, **m)
    tail = [(0, 0), (0, 0), (0, -k.shape[2] % 32), (0, 0)]
    return attention(q, np.pad(k, tail), np.pad(v, tail), **m)


def interleaved(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    order = np.arange(q.shape[1]) % k.shape[1]
    return attention(q, k[:, order], v[:, order], **m)


def nan_in_empty_rows(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    out, lse = attention(q, k, v, **m)
    return np.where(np.isneginf(lse)[..., None], np.nan, out).astype(out.dtype), lse


MISTAKES: dict[str, tuple[Kernel, str]] = {
    "top-left": (of(top_left), 'the causal mask is aligned top-left (if that is meant: causal="top-left")'),
    "one key too many": (of(wider), "a causal row sees one key too many"),
    "one key fewer": (of(narrower), "a causal row misses its last key: < where <= belongs"),
    "no mask": (of(lambda q, k, v, m: attention(q, k, v, **m | {"causal": False})), "the causal mask is ignored"),
    "window ignored": (of(lambda q, k, v, m: attention(q, k, v, **m | {"window": None})), "the window is ignored"),
    "last key": (of(without_the_last_key), "the last key is dropped"),
    "padding": (of(padded), "padded keys count, up to a multiple of 32"),
    "1/d": (scaled(lambda d: 1 / d), "the scale is 1/head_dim by default"),
    "scale missing": (scaled(lambda d: 1.0), "the scale is 1: it is missing by default"),
    "scale ignored": (of(lambda q, k, v, m: attention(q, k, v, **m | {"scale": None})), "the scale is 1/sqrt(head_dim)"),
    "padded head dim": (scaled(lambda d: (1 << (d - 1).bit_length()) ** -0.5), "1/sqrt of a padded head dim by default"),
    "heads": (of(interleaved), "KV heads are interleaved: head h reads KV head h % kv_heads"),
    "base 2": (lse_of(lambda lse, top: lse / np.log(2)), 'the LSE is to base 2 (if that is meant: lse="2")'),
    "negated": (lse_of(lambda lse, top: -lse), "the LSE is negated"),
    "empty rows": (of(nan_in_empty_rows), "a row that sees no key must be 0, with an LSE of -inf"),
}  # fmt: skip
BY_TILES: dict[Fault, str] = {
    "no maximum": "the maximum is not subtracted before exp",
    "maximum from 0": "the running maximum starts at 0, not at -inf",
    "accumulator not rescaled": "the accumulator is not rescaled when the maximum moves (tiles of 32 keys)",
    "sum not rescaled": "the sum is not rescaled when the maximum moves (tiles of 32 keys)",
    "nothing rescaled": "neither accumulator nor sum is rescaled when the maximum moves (tiles of 32 keys)",
    "not normalised": "out is not divided by the sum",
    "LSE without the maximum": "the LSE lacks the maximum",
    "LSE is the maximum": "the LSE is the maximum alone",
    "LSE is the sum": "the LSE is the sum, without a logarithm",
    "sentinel -1e4": "hidden scores are finite, such as -1e4, instead of -inf",
}


def scored(wrong: Callable[[Array, Array, Array, dict[str, Any]], Any]) -> Kernel:
    """The same for a kernel that takes all that changes the scores, too."""

    def kernel(
        q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None, window: Any = None,
        soft_cap: float | None = None, sinks: Any = None, alibi_slopes: Any = None,
    ) -> Any:  # fmt: skip
        numbers = {"soft_cap": soft_cap, "sinks": sinks, "alibi_slopes": alibi_slopes}
        return wrong(q, k, v, told(causal, scale, window) | numbers)

    return kernel


def without(name: str) -> Kernel:
    return scored(lambda q, k, v, m: attention(q, k, v, **m | {name: None}))


def of_the_kv_head(name: str) -> Kernel:
    def wrong(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
        group = q.shape[1] // k.shape[1]
        own = None if m[name] is None else m[name][np.arange(q.shape[1]) // group]
        return attention(q, k, v, **m | {name: own})

    return scored(wrong)


def sinks_in_one_of_two(of: str) -> Kernel:
    def wrong(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
        whole, plain = attention(q, k, v, **m), attention(q, k, v, **m | {"sinks": None})
        return (whole[0], plain[1]) if of == "out" else (plain[0], whole[1])

    return scored(wrong)


def times(name: str, factor: float) -> Kernel:
    def wrong(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
        return attention(q, k, v, **m | {name: None if m[name] is None else m[name] * np.float32(factor)})

    return scored(wrong)


def capped_without_scale(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
    """cap * tanh(product / cap) * scale, which is a cap of cap * scale behind the scale."""
    scale = q.shape[-1] ** -0.5 if m["scale"] is None else m["scale"]
    return attention(q, k, v, **m | {"soft_cap": m["soft_cap"] and abs(m["soft_cap"] * scale)})


OF_SCORES: dict[str, tuple[Kernel, str]] = {
    "cap ignored": (without("soft_cap"), "the soft cap is ignored"),
    "cap before the scale": (scored(capped_without_scale), "the soft cap bounds products that aren't scaled yet"),
    "sinks ignored": (without("sinks"), "the sinks are ignored"),
    "LSE without sinks": (sinks_in_one_of_two("out"), "the LSE lacks the sinks, which `out` has"),
    "out without sinks": (sinks_in_one_of_two("lse"), "the LSE has the sinks, which `out` lacks"),
    "sinks to base 2": (times("sinks", math.log(2)), "the sinks are taken to base 2, without their log2(e)"),
    "sink of the KV head": (of_the_kv_head("sinks"), "each head has the sink of another: that of its KV head"),
    "ALiBi ignored": (without("alibi_slopes"), "ALiBi is ignored"),
    "bias added": (times("alibi_slopes", -1), "ALiBi's bias is added, not subtracted"),
    "bias to base 2": (times("alibi_slopes", math.log(2)), "ALiBi's bias is taken to base 2, without its log2(e)"),
    "slope of the KV head": (of_the_kv_head("alibi_slopes"), "each head has the slope of another: that of its KV head"),
}
MISTAKES |= OF_SCORES
ALL = [*MISTAKES, *BY_TILES]
IN_EACH_RUN = (
    "top-left",
    "1/d",
    "base 2",
    "heads",
    "accumulator not rescaled",
    "no maximum",
    "LSE without sinks",
    "bias added",
)


@pytest.mark.alike("heads", "one key too many", "base 2", "accumulator not rescaled", "LSE without sinks")
@pytest.mark.parametrize(
    "name", one_of_each(sorted(ALL, key=lambda x: x not in IN_EACH_RUN), lambda x: x if x in IN_EACH_RUN else 0)
)
@pytest.mark.parametrize("dtype", ["float32"])
def test_the_mistake_is_named(name: str, dtype: str) -> None:
    fn, words = MISTAKES[name] if name in MISTAKES else (tiled(name), BY_TILES[name])  # pyright: ignore
    report = verify(fl.Adapter(fn, lse="e"), dtypes=[dtype], checks=["rule", "odd_scale"])
    assert report.failing, name
    assert words in report.failing.likely, (report.failing.likely, report.failing.python)
    assert "\n" not in report.failing.likely and words in str(report)


def test_without_an_lse_mistakes_are_named_too() -> None:
    fn = MISTAKES["heads"][0]

    def no_lse(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        return fn(q, k, v, causal=causal, scale=scale)[0]

    report = verify(fl.Adapter(no_lse), dtypes=["bfloat16"], checks=["gqa"])
    assert report.failing and report.failing.likely.startswith("KV heads are interleaved")


def test_a_mistake_that_nobody_knows_is_not_named() -> None:
    def odd(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Any:
        out, lse = attention(q, k, v, causal=causal, scale=scale)
        return (out + np.sin(np.arange(out.shape[-1])) / 10).astype(out.dtype), lse

    report = verify(fl.Adapter(odd, lse="e"), dtypes=["float32"], checks=["rule"])
    assert report.failing and report.failing.likely == "" and "ikely" not in str(report)


def test_two_mistakes_at_once_are_not_taken_for_one() -> None:
    def twice(q: Array, k: Array, v: Array, m: dict[str, Any]) -> Any:
        out, lse = interleaved(q, k, v, m | {"scale": m["scale"] or 1 / q.shape[-1]})
        return out, lse / np.float32(np.log(2))

    report = verify(fl.Adapter(of(twice), lse="e"), dtypes=["float32"], checks=["gqa", "split"])
    assert report.failed and (not report.failing or not report.failing.likely)


def test_the_smallest_case_is_one_line_that_runs() -> None:
    report = verify(fl.Adapter(top_left_kernel, lse="e"), dtypes=["float32"], checks=["rule"])
    assert report.failing
    *_, line = report.failing.python.splitlines()
    names = {
        "fl": fl,
        "Case": fl.verify.__globals__["Case"],
        "load": fl.verify.__globals__["load"],
        "run_case": run_case,
    }
    row = eval(line.removeprefix("print(").removesuffix(")"), names)
    assert row.status == "failed"


def top_left_kernel(
    q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None, window: Any = None
) -> Any:
    return top_left(q, k, v, told(causal, scale, window))


def test_a_kernel_that_raises_has_no_likely_mistake() -> None:
    def fragile(q: Array, k: Array, v: Array, scale: float | None = None) -> Any:
        return (
            k.max(2, keepdims=True)[:, :, :1] + q if k.shape[1] == q.shape[1] else 1 / 0
        )  # of no keys there is no maximum

    report = verify(fragile, dtypes=["float32"], checks=["rule", "search"], examples=20)
    assert report.failing and report.failing.likely == ""
