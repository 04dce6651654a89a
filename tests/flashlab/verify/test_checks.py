"""Every check passes a correct kernel and fails under a bug of its own: callables that do what a tile program cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import CHECKS, verify
from simulator.problem import DTYPES
from tests.flashlab.verify.candidates import Array, attention
from tests.tiers import one_of_each

Attention = Callable[..., tuple[Array, Array]]
ADAPTER = {"framework": "numpy", "lse": "e"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", one_of_each(DTYPES, lambda dtype: dtype == "float32"))
def test_a_correct_kernel_passes_everything(dtype: str) -> None:
    report = verify(fl.Adapter(attention, **ADAPTER, bitwise=True), dtypes=[dtype])
    assert report.verdict == "passed" and not report.failed, report
    assert set(report.checks) == {*CHECKS, "search"} - {
        "byte_counts",
        "caches",
        "dropout",
        "exact_lse",
        "huge",
        "scaled_operands",
    }
    assert report.failing is None


def scales_q_in_place(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    options["scale"], factor = 1.0, options["scale"]
    q *= np.asarray(factor, q.dtype)
    return attention(q, k, v, **options)


def writes_past_the_end(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    np.lib.stride_tricks.as_strided(k, (k.shape[0] + 1, *k.shape[1:]), k.strides)[-1, 0, 0, 0] = 0
    return attention(q, k, v, **options)


def adds_a_row_past_the_end(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Reads one row more of V, times 0: right unless there is a NaN."""
    out, lse = attention(q, k, v, **options)
    past = np.lib.stride_tricks.as_strided(v[-1:, -1:], (1, 1, v.shape[2] + 1, v.shape[3]), v.strides)[:, :, -1:]
    return out + (0 * past).astype(out.dtype), lse


def reads_the_buffer_as_if_contiguous(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    k = np.lib.stride_tricks.as_strided(k, k.shape, np.empty(k.shape, k.dtype).strides)
    return attention(q, k, v, **options)


_calls = iter(range(10**9))


def sums_in_another_order_every_time(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    return attention(q, k, v, keys=16 + 16 * (next(_calls) % 2), **options)


def tiles_by_the_size_of_the_batch(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    return attention(q, k, v, keys=16 * q.shape[0], **options)


def knows_where_a_key_stands(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    slope = (1 + np.arange(k.shape[2]) * 1e-3).astype(k.dtype)
    return attention(q, k * slope[:, None], v, **options)


def loses_the_scale_of_the_lse(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, lse = attention(q, k, v, **options)
    return out, lse + np.float32(0.01)


def deals_out_the_heads(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    order = np.arange(q.shape[1]) % k.shape[1]
    return attention(q, k[:, order], v[:, order], **options)


def sees_one_key_too_many(q: Array, k: Array, v: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
    return attention(q, k, v, scale=scale, window=(None, 1) if causal else None)


def forgets_empty_rows(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, lse = attention(q, k, v, **options)
    return np.where(np.isneginf(lse)[..., None], np.nan, out).astype(out.dtype), lse


def adds_up_in_16_bits(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Right but for the accumulator, which from 2,048 on can't count by ones."""
    out, lse = attention(q, k, v, **options)
    if k.shape[2] < 2048:
        return out, lse
    weights = np.exp(options["scale"] * (q @ k.swapaxes(-1, -2)).astype(np.float32) - lse[..., None]) * k.shape[2]
    acc = np.zeros_like(out)
    for key in range(k.shape[2]):
        acc += weights[..., key : key + 1].astype(q.dtype) * v[:, :, key : key + 1]
    return (acc.astype(np.float32) / k.shape[2]).astype(q.dtype), lse


def takes_empty_tiles_for_visible(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    mask: Any = None,
) -> tuple[Array, Array]:
    """Right but where a mask hides 16 keys from 16 queries altogether."""
    if mask is None:
        return attention(q, k, v, causal=causal, scale=scale, window=window)
    rows, cols = (-(-n // 16) for n in mask.shape)
    padded = np.zeros((16 * rows, 16 * cols), bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    empty = ~padded.reshape(rows, 16, cols, 16).any((1, 3))
    padded |= np.kron(empty, np.ones((16, 16), bool))
    mask = padded[: mask.shape[0], : mask.shape[1]]
    return attention(q, k, v, causal=causal, scale=scale, window=window, mask=mask)


def keeps_the_cap_in_16_bits(q: Array, k: Array, v: Array, *, soft_cap: float | None = None, **options: Any) -> Any:
    with np.errstate(all="ignore"):
        return attention(q, k, v, soft_cap=None if soft_cap is None else float(np.float16(soft_cap)), **options)


def adds_the_sink_as_it_is(q: Array, k: Array, v: Array, *, sinks: Array | None = None, **options: Any) -> Any:
    """exp(sink) joins a sum that isn't relative to a maximum: too large for float32 from 89 on."""
    out, lse = attention(q, k, v, **options)
    if sinks is None:
        return out, lse
    with np.errstate(all="ignore"):
        total = np.exp(lse) + np.exp(sinks)[:, None]
        share = np.exp(lse) / np.where(total == 0, np.float32(1), total)
        return (out * share[..., None]).astype(out.dtype), np.log(total)


def takes_the_slope_of_its_neighbour(q: Array, k: Array, v: Array, *, alibi_slopes: Any = None, **options: Any) -> Any:
    slopes = None if alibi_slopes is None else np.roll(alibi_slopes, 1)
    return attention(q, k, v, alibi_slopes=slopes, **options)


@pytest.mark.parametrize(
    ("fn", "check"),
    [
        (scales_q_in_place, "memory"),
        (writes_past_the_end, "memory"),
        (adds_a_row_past_the_end, "memory"),
        (reads_the_buffer_as_if_contiguous, "rule"),
        (sums_in_another_order_every_time, "determinism"),
        (tiles_by_the_size_of_the_batch, "batch"),
        (knows_where_a_key_stands, "permutation"),
        (loses_the_scale_of_the_lse, "split"),
        (deals_out_the_heads, "gqa"),
        (sees_one_key_too_many, "prefix"),
        (sees_one_key_too_many, "key_sets"),
        (sees_one_key_too_many, "hidden_keys"),
        (forgets_empty_rows, "rule"),
        (forgets_empty_rows, "search"),
        (adds_up_in_16_bits, "long_sums"),
        (takes_empty_tiles_for_visible, "masks"),
        (keeps_the_cap_in_16_bits, "neutral"),
        (adds_the_sink_as_it_is, "extremes"),
        (takes_the_slope_of_its_neighbour, "head_order"),
    ],
)
def test_each_check_fails_under_its_bug(fn: Attention, check: str) -> None:
    report = verify(fl.Adapter(fn, **ADAPTER, bitwise=True), checks=[check], dtypes=["float16"])
    assert report.verdict == "failed"
    assert not any("raised" in row.detail for row in report.failed), report.failed[0].detail


def test_the_search_shrinks() -> None:
    """Rows without keys first appear with two queries of one key."""
    report = verify(fl.Adapter(forgets_empty_rows, **ADAPTER), checks=["search"], dtypes=["float32"])
    (row,) = report.failed
    assert row.problem in ("1x1x1x0x16 float32", "1x1x2x1x16 float32 causal"), row.problem


def test_a_failing_edge_is_shrunk_too() -> None:
    report = verify(fl.Adapter(forgets_empty_rows, **ADAPTER), checks=["rule"], dtypes=["float32"])
    assert report.failing and "heads=1, len_q=1, len_kv=0, head_dim=1, dtype='float32'" in report.failing.python


def test_bits_may_differ_where_the_adapter_says_so() -> None:
    assert verify(fl.Adapter(tiles_by_the_size_of_the_batch, **ADAPTER), checks=["batch"]).verdict == "passed"
