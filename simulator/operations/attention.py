"""Attention: softmax(scale Q K^T + mask) V. Its operands, two judges that share no line, and the rule for its errors.

A soft cap bounds the scores, ALiBi adds a bias to them, and a sink adds an exponential to each row's denominator: see
`Problem`. A sink weighs no value. The sequences of a ragged batch lie one behind the other in the rows of one batch, and
`offsets_q` and `offsets_kv` say where each begins.

In the rule, e = out - ref in float64, p are the softmax weights, and u is the rounding unit of the storage dtype: 2^-11
for float16, 2^-8 for bfloat16, and 2e-6 for float32, whose sums round as well. Each row has to keep

    |e| <= 1.5 u * sqrt(|o|^2 + sum_j p_j^2 |v_j|^2)  +  d * sqrt(sum_j p_j^2 |v_j - o|^2)
    |LSE - ref| <= max(2e-5, d)

with d = 2e-6 * max(1, max_j scale * sum_i |q_i k_ij|) over the keys that the row sees, times head_dim / 256 where heads are wider
than 256. A soft cap multiplies this size of
a score by its derivative, 1 - tanh^2, and adds the capped score. ALiBi adds its bias. A sink counts as a key whose score it
is and whose value is 0; one of -inf, which is none, doesn't count.

The first term is what a correct kernel loses by rounding `out` and P. It is up to 0.8 u if P is rounded before it is
normalised. It is up to 1.4 u if P is rounded afterwards: equal weights of a row then all err the same way (`standard`
with scale 0 and values that are nearly equal). The norm of a row is a mean, so heads narrower than 16 can exceed it by
chance.

A weight below 2^-126 of a row's largest, its sink's included, may vanish, as the GPU's exponential flushes it: `out` may be off
by as much of the values. Where a sink is far above the scores, that is more than a step of `out`.

In float16, P underflows long before that. Below 2^-14 its steps are 2^-24, so rounding moves a weight by up to
r_j = min(2^-25, p_j), which is more than u p_j, and one below 2^-25 vanishes. This holds for P after it is normalised. It also
holds for P relative to a maximum of the keys so far: its weight in `out` is P exp(m_then - m) / l, and neither factor is over 1.

- Of weights below 2^-14 of the row's largest, its sink's included, all errors are added up: |e| may be larger by
  sum_j r_j |v_j|. This is what is left where one key is far above the others.
- Larger weights are below 2^-14 only once they are normalised, in rows of thousands of keys. There the errors are roundings like
  others. In the first term, r_j then stands for u p_j, and |sum_j (r_j - u p_j) v_j| joins u |o|. (Added up, they would hide a
  dropped key.)

Dropout multiplies P, and so r_j, by z_j. Beside a cache of 8 bits P is float16 whatever Q is. If each key has a scale of its own,
a weight is multiplied with its value's over the largest first, and all of this is for the product.

The second term is the error of float32 scores, carried through the softmax. It matters in float32, and for logits of
1e4, whose spacing in float32 is 1e-3. It takes the sum of |q k|, not |s|: if large products cancel, their errors stay.
A tolerance such as 1e-2 would be blind to a dropped key of a long row.

Dropout weighs each value by z_j, which is 0 or 256 / kept. So the first term has p_j z_j v_j, the second p_j (z_j v_j - o).
The LSE is that of all keys.

With 8-bit operands (float8_e4m3fn, with a bfloat16 output) three things change:

- u = 2^-4 is that of P. Weights below e4m3's smallest step vanish, so `out` may also be off by
  2^-10 max_j p_j * sqrt(sum_j |v_j|^2). Of those that vanish even where P is multiplied by 2^5 first, all may be missing, from
  `out` and from l: it may be off by sum_j r_j (|v_j| + |o|) / (1 - sum_j r_j), where r_j = min(2^-15 max_j p_j, p_j) for weights
  below 2^-11 of the row's largest.
- Hopper's tensor cores cut the products of a score to about 14 bits. So
  d = max_j scale * (2^-11 sum_i |q_i k_ij| + 2.5 * 2^-13 sqrt(head_dim) max_i |q_i| max_i |k_ij|).
- The LSE may be that of the rounded weights, because this makes `out` better. It may then also be off by
  log(1 + u) - log(1 - f). Here f = min(2^-15 n max_j p_j, 1 - max_j p_j) is how much of the weight of the n keys that
  the row sees may vanish, and 2^-15 is half a step of a P that is multiplied by 2^5.

So wide a rule sees little. The probes find keys that are dropped, shown or counted twice, and `long_sums` finds sums
that lose their small addends.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Unpack, cast

import numpy as np

from simulator.dtypes import Array, as_numpy, numpy_dtype
from simulator.errors import UsageError, dtype_name, unknown
from simulator.fields import LARGEST_FACTOR
from simulator.memory import check_memory
from simulator.operations.caches import AXES, check_scales, dequantized, dtypes_of, quantized, scale_fields, scales_of
from simulator.operations.draws import of_kind, random_optional, to_storage
from simulator.operations.operation import Arrays, Operand, Operation
from simulator.operations.pairs import distances, mask_operand, shown_pairs, visible_pairs
from simulator.philox import is_kept, kept_weights
from simulator.problem import (
    COMMON_MASKS,
    DTYPES,
    FP8,
    ITEMSIZE,
    MASKS,
    OF_CACHES,
    SCORES,
    Masks,
    Problem,
    Tile,
    spell_masks,
)

UNIT = {"float32": 2e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8, FP8: 2.0**-4}
"""u of each storage dtype."""
SCORE = dict.fromkeys(DTYPES, 2e-6) | {FP8: 2.0**-11}
"""The error of a score, relative to the sum of its products' absolute values."""
LONG_SUM = 256
"""Scores of longer sums may err by more, in proportion."""
CUT = 2.5 * 2.0**-13
"""The further error of an 8-bit score, relative to the largest product and the square root of their number. Products
are cut at 2^-13 of the largest, with random signs. 2.5 is about 4 standard deviations, each 0.58 of a cut."""
ROUNDINGS = 1.5
"""By how many u a row may be off."""
FLUSHED = 2.0**-126
"""Weights below this of the row's largest may vanish."""
LOST = 2.0**-10
"""Half of e4m3's smallest step: what a P of at most 1 may lose by rounding, relative to the row's largest."""
LOST_SUMS = 2.0**-15
"""The same where P is multiplied by 2^5 first."""
LEAST_NORMAL = {"float16": 2.0**-14, FP8: 2.0**-11}
"""Smaller weights have fewer bits, by the dtype that they are rounded to. Of e4m3 too, P is multiplied by 2^5 first."""
LSE_FLOOR = 2e-5
"""LSEs that are closer than this count as equal."""


def problem_of(
    q: Any,
    k: Any,
    v: Any,
    *,
    sinks: Any = None,
    alibi_slopes: Any = None,
    mask: Any = None,
    block_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **masks: Unpack[Masks],
) -> Problem:
    """The problem that arrays `(batch, heads, length, head_dim)` pose, from their `.shape` and `.dtype` alone.

    With `sinks`, `alibi_slopes`, `mask`, `block_mask`, `k_scale` or `v_scale` it has them. Raises a `UsageError` that names the
    array or the mask at fault.
    """
    for name in masks:
        if name not in MASKS:
            raise unknown("keyword", name, MASKS)
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if len(getattr(x, "shape", ())) != 4:
            shown = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
            raise UsageError(f"{name}.shape", shown, "(batch, heads, length, head_dim)")
    dtype, kv_dtype = dtypes_of(named, f"one of {', '.join(DTYPES)}, or {FP8} for flash3_fp8")
    (batch, heads, len_q, dim), (kb, kv_heads, len_kv, kd), (vb, vh, vl, dim_v) = (tuple(x.shape) for x in (q, k, v))
    if (kb, kd) != (batch, dim):
        raise UsageError("k.shape", tuple(k.shape), f"batch {batch} and head_dim {dim}, as q has")
    if (vb, vh, vl) != (kb, kv_heads, len_kv):
        raise UsageError("v.shape", tuple(v.shape), f"batch, heads and length {(kb, kv_heads, len_kv)}, as k has")
    return Problem(
        batch=batch, heads=heads, kv_heads=kv_heads, len_q=len_q, len_kv=len_kv, head_dim=dim, head_dim_v=dim_v,
        dtype=dtype, sinks=sinks is not None, alibi=alibi_slopes is not None,
        mask=form_of(mask, block_mask), **scale_fields(dtype, kv_dtype, {"k_scale": k_scale, "v_scale": v_scale}), **masks,
    )  # fmt: skip


def form_of(mask: Any, block_mask: Any = None) -> str | None:
    """The form in which an array says which keys a query sees: one of `MASK_FORMS`, or None. Raises `UsageError` for any other."""
    if block_mask is not None:
        accepted = "int32 (row_blocks, 1 + key_blocks), as fl.block_mask makes them"
        if mask is not None:
            raise UsageError("block_mask", "given", "None beside a mask")
        if not hasattr(block_mask, "shape"):
            raise UsageError("block_mask", type(block_mask).__name__, f"an array of {accepted}")
        if dtype_name(block_mask) != "int32":
            raise UsageError("block_mask.dtype", dtype_name(block_mask), accepted)
        if len(block_mask.shape) != 2:
            raise UsageError("block_mask.shape", tuple(block_mask.shape), accepted)
        return "blocks"
    if mask is None:
        return None
    accepted = (
        "bool (len_q, len_kv), True where a key is visible, or uint8 with eight of them in a byte, one behind the other"
    )
    if not hasattr(mask, "shape"):
        raise UsageError("mask", type(mask).__name__, f"an array of {accepted}")
    dtype = dtype_name(mask)
    if dtype not in ("bool", "uint8"):
        hint = "; an additive bias isn't taken" if dtype in ITEMSIZE else ""
        raise UsageError("mask.dtype", dtype, f"{accepted}{hint}")
    if len(mask.shape) == 1 and dtype == "uint8":
        return "bits"
    if len(mask.shape) != 2:
        raise UsageError("mask.shape", tuple(mask.shape), accepted)
    return "dense"


class Reference(NamedTuple):
    """`out` (batch, heads, len_q, head_dim_v) and `lse` (batch, heads, len_q), both float64; -inf for an empty row.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=2, head_dim=4, dtype="float32")
    >>> fl.naive(*fl.random_inputs(p)).lse.shape
    (1, 1, 2)
    """

    out: Array
    lse: Array


@spell_masks
def naive(
    q: Any, k: Any, v: Any, *, sinks: Any = None, alibi_slopes: Any = None, mask: Any = None, block_mask: Any = None,
    rng_state: Any = None, k_scale: Any = None, v_scale: Any = None, **masks: Unpack[Masks],
) -> Reference:  # fmt: skip
    """softmax(scale Q K^T + mask) V in float64, dense. This is the judge of every number here.

    q `(batch, heads, len_q, head_dim)`, k and v `(batch, kv_heads, len_kv, …)` are arrays of NumPy, CuPy, torch or JAX,
    of any storage dtype; `sinks` and `alibi_slopes` are `(heads,)`, float32; `mask` is `(len_q, len_kv)`, True where a key
    is visible, or uint8 with a bit for each pair (`Problem`); `block_mask` are lists of blocks (`fl.block_mask`);
    `rng_state` is the seed and the offset of dropout, int64 (left out: 0, 0). k and v of float8_e4m3fn or int8, beside q of 16
    bits, are multiplied with `k_scale` and `v_scale` (`fl.quantize_cache`). The results are NumPy's. Masks are
    aligned bottom-right. With `lengths`, the rows of a batch of 1 are sequences of these lengths, one behind the other. A row
    that sees no key gets output 0 and LSE -inf, or its sink. Raises `UsageError` for arrays that pose no problem.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=2, head_dim=4, dtype="float32", causal=True)
    >>> q, k, v = fl.random_inputs(p, seed=0)
    >>> bool(np.allclose(fl.naive(q, k, v, causal=True).out[0, 0, 0], v[0, 0, 0]))
    True
    """
    q, k, v = (as_numpy(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    p, given = _judged(
        q, k, v, masks, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask, block_mask=block_mask, rng_state=rng_state,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    check_memory("naive attention, whole rows in float64", _bytes_of_naive(p))
    of_head = {
        name: given[name].astype(np.float64).reshape(p.kv_heads, -1, 1, 1)
        for name in ("sinks", "alibi_slopes")
        if name in given
    }
    grouped = np.asarray(q, np.float64).reshape(p.batch, p.kv_heads, p.queries_per_kv, p.len_q, p.head_dim)
    keys, values = (dequantized(p, {**given, "k": k, "v": v}, name)[:, :, None] for name in "kv")
    with np.errstate(invalid="ignore"):
        s = p.scale * (grouped @ keys.swapaxes(-1, -2))
        if p.soft_cap:
            s = p.soft_cap * np.tanh(s / p.soft_cap)
        if p.alibi:
            s = s - of_head["alibi_slopes"] * distances(p)
    np.putmask(s, np.broadcast_to(~visible_pairs(p, given), s.shape), -np.inf)
    top: Array = s.max(-1, keepdims=True, initial=-np.inf)
    if p.sinks:
        top = np.maximum(top, of_head["sinks"])
    e: Array = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    if p.sinks:
        total = total + np.exp(of_head["sinks"] - np.where(np.isneginf(top), 0, top))
    weights = e / np.where(total == 0, 1, total)
    if p.dropout:
        weights = weights * kept_weights(p, given["rng_state"])
    # a hidden key's value must not matter, not even if it is NaN (0 x NaN is NaN)
    out = _weighted_sum(weights, values)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    shape = p.batch, p.heads, p.len_q
    return Reference(out.reshape(*shape, p.head_dim_v), lse.reshape(shape))


KNOWN = (*COMMON_MASKS, *SCORES, "mask", "block_size", "lengths", "partial", "dropout", *OF_CACHES, "exact_lse")
"""What the judges reckon with."""


def _judged(q: Array, k: Array, v: Array, masks: Masks, **optional: Any) -> tuple[Problem, dict[str, Array]]:
    """The problem, unless the judges would leave out one of its features, and its arrays beside q, k and v."""
    given = {name: as_numpy(name, x) for name, x in optional.items() if x is not None}
    problem = problem_of(q, k, v, **{name: x for name, x in given.items() if name in POSED}, **masks)
    if (error := problem.unknown_mask(KNOWN, "naive attention")) is not None:
        raise error
    ATTENTION.check(problem, given)
    if problem.dropout:
        given.setdefault("rng_state", ATTENTION.operand("rng_state").left_out(problem))
    return problem, given


def _weighted_sum(weights: Array, values: Array) -> Array:
    finite = np.isfinite(values)
    if finite.all():
        return weights @ values
    total = weights @ np.where(finite, values, 0.0)
    for key in np.flatnonzero(~finite.all((0, 1, 2, 4))):
        weight, value = weights[..., key : key + 1], values[..., key : key + 1, :]
        with np.errstate(invalid="ignore"):
            total += np.where((weight == 0) | finite[..., key : key + 1, :], 0.0, weight * value)
    return total


def _bytes_of_naive(problem: Problem) -> int:
    """The most bytes that `naive` holds: three arrays of scores at a time, and its operands, in float64."""
    p = problem
    pairs, rows = p.batch * p.heads * p.len_q * p.len_kv, p.batch * p.heads * p.len_q
    keys = p.batch * p.kv_heads * p.len_kv
    return 8 * (3 * pairs + rows * (p.head_dim + 2 * p.head_dim_v) + keys * (p.head_dim + p.head_dim_v))


@spell_masks
def naive_loop(
    q: Any, k: Any, v: Any, *, sinks: Any = None, alibi_slopes: Any = None, mask: Any = None, block_mask: Any = None,
    rng_state: Any = None, k_scale: Any = None, v_scale: Any = None, **masks: Unpack[Masks],
) -> Reference:  # fmt: skip
    """The same as `naive`, by a loop over queries that picks out each query's keys. It shares no mask code.

    Arrays, results and errors are those of `naive`.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=3, len_kv=5, head_dim=4, dtype="float32", causal=True)
    >>> data = fl.random_inputs(p, seed=0)
    >>> bool(np.allclose(fl.naive(*data, causal=True).out, fl.naive_loop(*data, causal=True).out))
    True
    """
    q, k, v = (as_numpy(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    p, given = _judged(
        q, k, v, masks, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask, block_mask=block_mask, rng_state=rng_state,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    queries = q.astype(np.float64)
    keys_of, values_of = (
        _dequantized(p.k_scale, k, given.get("k_scale")),
        _dequantized(p.v_scale, v, given.get("v_scale")),
    )
    out = np.zeros((p.batch, p.heads, p.len_q, p.head_dim_v))
    lse = np.full((p.batch, p.heads, p.len_q), -np.inf)
    for b, h, i in np.ndindex(lse.shape):
        rows, keys = next(span for span in p.spans if i in span[0])
        last_seen = keys.stop - rows.stop + i
        stop = keys.stop if p.right is None else max(keys.start, min(keys.stop, last_seen + p.right + 1))
        start = keys.start if p.left is None else max(keys.start, last_seen - p.left)
        if p.sinks:
            lse[b, h, i] = given["sinks"][h]
        seen = [j for j in range(start, stop) if not p.mask or _is_shown(p, given[mask_operand(p)], i, j)]
        if not seen:
            continue
        kv = h // p.queries_per_kv
        logits = p.scale * (keys_of[b, kv, seen] @ queries[b, h, i])
        if p.soft_cap:
            logits = [p.soft_cap * math.tanh(logit / p.soft_cap) for logit in logits]
        if p.alibi:
            slope = float(given["alibi_slopes"][h])
            logits = [logit - slope * abs(last_seen - j) for j, logit in zip(seen, logits, strict=True)]
        lse[b, h, i] = np.logaddexp.reduce(logits, initial=lse[b, h, i])
        weights = np.exp(np.asarray(logits) - lse[b, h, i])
        if p.dropout:
            weights *= [is_kept(p, given["rng_state"], b * p.heads + h, i, j) * 256 / p.kept for j in seen]
        out[b, h, i] = weights @ values_of[b, kv, seen]
    return Reference(out, lse)


def _dequantized(form: str | None, x: Array, scale: Array | None) -> Array:
    """K or V in float64, each key's row multiplied with its scale: a number, or one for each channel."""
    wide = x.astype(np.float64)
    if form is None or scale is None:
        return wide
    scale = scale.astype(np.float64)
    for b, h, j in np.ndindex(x.shape[:3]):
        wide[b, h, j] *= scale[{"tensor": (0,), "head": (h,), "channel": (h,), "token": (b, h, j)}[form]]
    return wide


def _is_shown(problem: Problem, mask: Array, i: int, j: int) -> bool:
    """Does the array `mask` show key j to query i of the same sequence?"""
    if problem.mask == "dense":
        return bool(mask[i, j])
    if problem.mask == "blocks":
        number, *blocks = mask[i // problem.block.rows]
        return j // problem.block.cols in blocks[:number]
    before = 0
    for rows, keys in problem.spans:
        if i < rows.stop:
            bit = (i - rows.start) * len(keys) + j - keys.start
            return bool(mask[before + bit // 8] & 1 << bit % 8)
        before += math.ceil(len(rows) * len(keys) / 8)
    raise IndexError(i)


POSED = ("sinks", "alibi_slopes", "mask", "block_mask", "k_scale", "v_scale")
"""The inputs of attention that a problem has only where the caller passes them."""
OPTIONAL = (*POSED, "rng_state")
"""What the judges take beside q, k and v."""


class Attention(Operation):
    """The forward pass. 8-bit operands have a scale for each of the kernel's tiles."""

    name = "attention"
    inputs = (
        Operand(name="q", axes=("batch", "heads", "len_q", "head_dim")),
        Operand(name="k", axes=("batch", "kv_heads", "len_kv", "head_dim"), dtype="kv"),
        Operand(name="v", axes=("batch", "kv_heads", "len_kv", "head_dim_v"), dtype="kv"),
        *(
            Operand(name=f"{name}_scale", axes=("batch", heads, tiles), dtype="float32", when=lambda p: p.dtype == FP8, default=1.0)
            for name, heads, tiles in (("q", "heads", "row_tiles"), ("k", "kv_heads", "key_tiles"), ("v", "kv_heads", "key_tiles"))
        ),
        *scales_of("k", AXES["token"]),
        *scales_of("v", AXES["token"]),
        Operand(name="sinks", axes=("heads",), dtype="float32", when=lambda p: p.sinks, default=-math.inf),
        Operand(name="alibi_slopes", axes=("heads",), dtype="float32", when=lambda p: p.alibi, default=0.0),
        Operand(name="rng_state", axes=("rng_words",), dtype="int64", when=lambda p: p.dropout is not None, default=0),
        Operand(name="offsets_q", axes=("offsets",), dtype="int32", when=lambda p: p.lengths is not None,
                default=lambda p: [0, *(rows.stop for rows, _ in p.spans)]),
        Operand(name="offsets_kv", axes=("offsets",), dtype="int32", when=lambda p: p.lengths is not None,
                default=lambda p: [0, *(keys.stop for _, keys in p.spans)]),
        Operand(name="mask", axes=("len_q", "len_kv"), dtype="bool", when=lambda p: p.mask == "dense", default=True),
        Operand(name="mask", axes=("bit_bytes",), dtype="uint8", when=lambda p: p.mask == "bits", default=255),
        Operand(name="block_mask", axes=("row_blocks", "block_list"), dtype="int32", when=lambda p: p.mask == "blocks",
                default=lambda p: [p.block_list - 1, *range(p.block_list - 1)]),
        Operand(name="offsets_mask", axes=("offsets",), dtype="int64", when=lambda p: p.mask == "bits" and p.lengths is not None,
                default=lambda p: [0, *(bits.stop for bits in p.bit_spans)]),
    )  # fmt: skip
    outputs = (
        Operand(name="out", axes=("batch", "heads", "len_q", "head_dim_v"), dtype="out"),
        Operand(name="lse", axes=("batch", "heads", "len_q"), dtype="float32", asked=True),
    )
    kinds: ClassVar[Mapping[str, str]] = {
        "normal": "standard normal",
        "large": "logits up to 1e4, both signs",
        "lone": "equal keys, logits of -1e6: a finite sentinel for masked scores outweighs them",
        "rising": "logits that rise along the keys: the running maximum moves in every tile",
        "falling": "logits that fall along the keys: later tiles hardly count",
        "ahead": "one key, of value 0, whose logit is 10 to 20 above the others': float16 has few bits of their weights, or none",
        "biased": "values around 8: the normalisation shows",
        "outliers": "N(0, 1) and, one in a thousand, N(0, 100)",
    }

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        optional = {name: arrays.get(name) for name in POSED}
        return problem_of(arrays["q"], arrays["k"], arrays["v"], **optional, **masks)

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation. What NumPy's optional arrays hold is looked at, too."""
        if problem.mask == "bits" and "mask" in arrays and tuple(arrays["mask"].shape) != (n := problem.bit_bytes,):
            words = (
                f"{problem.len_q:,} x {problem.len_kv:,} pairs" if problem.lengths is None else "pair of each sequence"
            )
            raise UsageError(
                "mask.shape", tuple(arrays["mask"].shape), f"({n},), a bit for each of {words}, in whole bytes"
            )
        super().check(problem, arrays, tile)
        check_optional(problem, arrays)

    def idle(self, problem: Problem) -> bool:
        return not problem.len_q

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        normal = super().draw(problem.replace(dtype="float32", kv_dtype=None, k_scale=None, v_scale=None), seed, kind)
        drawn = of_kind(problem, kind, np.random.default_rng((seed, 1)), **normal)
        optional = random_optional(problem, seed)
        if problem.quantized:
            for name in "kv":
                drawn[name], scale = quantized(drawn[name], problem.kv_dtype, getattr(problem, f"{name}_scale"))
                optional |= {} if scale is None else {f"{name}_scale": scale}
        else:
            drawn |= {name: to_storage(drawn[name], problem.dtype) for name in "kv"}
        return {**drawn, "q": to_storage(drawn["q"], problem.dtype)} | optional

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        given = {name: arrays[name] for name in ("q", "k", "v", *OPTIONAL) if name in arrays}
        return naive(**given, **problem.masks)._asdict()

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        """The bounds of the module's rule, both (batch, heads, len_q).

        That of `out` is for the 2-norm of each row's error, that of `lse` for each element's.
        """
        p = problem
        q, keys, values = arrays["q"], dequantized(p, arrays, "k"), dequantized(p, arrays, "v")
        grouped = (p.batch, p.kv_heads, p.queries_per_kv)
        queries = q.astype(np.float64).reshape(*grouped, p.len_q, p.head_dim)
        keys, values = (x[:, :, None, : p.len_kv] for x in (keys, values))
        scores = p.scale * (queries @ keys.swapaxes(-1, -2))
        visible = np.zeros((p.len_q, p.len_kv), bool)
        for row in range(p.len_q):
            seen = p.visible_keys(row)
            visible[row, seen.start : seen.stop] = True
        if p.mask:
            visible &= shown_pairs(p, arrays[mask_operand(p)])
        sizes = abs(p.scale) * (np.abs(queries) @ np.abs(keys).swapaxes(-1, -2))
        if p.soft_cap:
            bent = np.tanh(scores / p.soft_cap)
            scores, sizes = p.soft_cap * bent, sizes * (1 - bent**2) + p.soft_cap * np.abs(bent)
        if p.alibi:
            bias = arrays["alibi_slopes"].astype(np.float64).reshape(p.kv_heads, -1, 1, 1) * distances(p)
            scores, sizes = scores - bias, sizes + np.abs(bias)
        if p.dtype == FP8:
            largest = np.abs(queries).max(-1, keepdims=True) * np.abs(keys).max(-1)[..., None, :]
            sizes = sizes + CUT / SCORE[FP8] * math.sqrt(p.head_dim) * abs(p.scale) * largest
        top = np.where(visible, sizes, 0.0).max(axis=-1, initial=0.0)
        lse: Array = truth["lse"].reshape(*grouped, p.len_q, 1)
        base = np.where(np.isneginf(lse), 0.0, lse)
        weights = np.exp(np.where(visible, scores - base, -np.inf))
        out = truth["out"].reshape(*grouped, p.len_q, p.head_dim_v)
        z = kept_weights(p, arrays["rng_state"]) if p.dropout else 1.0
        kept, sizes_of_v = weights * z, np.sqrt((values**2).sum(-1))
        own = (out**2).sum(-1)
        spread = (kept**2 * sizes_of_v[..., None, :] ** 2).sum(-1)
        around = np.maximum(0.0, spread - 2 * (((weights * kept) @ values) * out).sum(-1) + (weights**2).sum(-1) * own)
        largest = heaviest = weights.max(axis=-1, initial=0.0)
        if p.sinks:
            sinks = arrays["sinks"].astype(np.float64).reshape(p.kv_heads, -1, 1)
            sunk = np.exp(sinks - base[..., 0])
            top = np.maximum(top, np.where(np.isneginf(sinks), 0.0, np.abs(sinks)))
            around, largest = around + sunk**2 * own, np.maximum(heaviest, sunk)
        lost = np.zeros(())
        if (least := LEAST_NORMAL.get(p.operand_dtype)) is not None:
            least, largest = least * _beside_the_largest(p, arrays), largest[..., None]
            half_step = UNIT[p.operand_dtype] * least * (largest if p.dtype == FP8 else 1)
            moved, faint = z * np.minimum(half_step, weights), weights < least * largest
            of_faint = np.where(faint, moved, 0.0)
            lost = (of_faint @ sizes_of_v[..., None])[..., 0]
            if p.dtype == FP8:  # l lacks them, too
                lost = (lost + of_faint.sum(-1) * np.sqrt(own)) / (1 - of_faint.sum(-1))
            beyond = np.where(faint, 0.0, np.maximum(0.0, moved / UNIT[p.dtype] - kept))
            own = own + ((beyond @ values) ** 2).sum(-1)
            spread = ((kept + beyond) ** 2 * sizes_of_v[..., None, :] ** 2).sum(-1)
        smallest = float(_finfo(p.out_dtype).smallest_subnormal) * math.sqrt(p.head_dim_v)
        flushed = FLUSHED * (sizes_of_v @ visible.T)
        score = SCORE[p.dtype] * max(1.0, p.head_dim / LONG_SUM)
        tolerance = (
            ROUNDINGS * UNIT[p.dtype] * np.sqrt(own + spread)
            + score * np.maximum(1.0, top) * np.sqrt(around)
            + lost
            + smallest
            + flushed
        )
        if p.dtype == FP8:  # a weight below P's smallest step may vanish
            tolerance += LOST * heaviest * np.sqrt(sizes_of_v**2 @ visible.T)
        lse_tolerance = np.maximum(LSE_FLOOR, score * top)
        if p.dtype == FP8 and not p.exact_lse:
            vanished = np.minimum(LOST_SUMS * heaviest * visible.sum(axis=-1), 1 - heaviest)
            lse_tolerance += np.log1p(UNIT[FP8]) - np.log1p(-vanished)
        shape = (p.batch, p.heads, p.len_q)
        return {"out": tolerance.reshape(shape), "lse": lse_tolerance.reshape(shape)}

    def flops(self, problem: Problem) -> int:
        """2 len_q len_kv (head_dim + head_dim_v) per head and sequence, halved if causal."""
        p = problem
        return 2 * p.batch * p.heads * p.len_q * p.len_kv * (p.head_dim + p.head_dim_v) // (2 if p.causal else 1)


def _beside_the_largest(problem: Problem, arrays: Arrays) -> Array:
    """Of values with a scale each, the largest scale of their sequence over theirs, (batch, kv_heads, 1, 1, len_kv); else 1."""
    if problem.v_scale != "token" or "v_scale" not in arrays:
        return np.ones(())
    scale = arrays["v_scale"].astype(np.float64)
    ratio = np.ones_like(scale)
    for _, keys in problem.spans:
        own = scale[..., keys.start : keys.stop]
        top = own.max(-1, keepdims=True, initial=0.0)
        np.divide(top, own, out=ratio[..., keys.start : keys.stop], where=own > 0)
    return ratio[:, :, None, None]


def check_sinks(arrays: Mapping[str, Any]) -> None:
    """Looks at NumPy's sinks and slopes, because one of NaN would spread over all rows of its head. As an exponent to the base 2 a
    sink must be a number of float32, too, and so must a slope times a distance. Raises `UsageError`."""
    accepted = f"finite numbers up to {LARGEST_FACTOR:g}"
    for name in ("sinks", "alibi_slopes"):
        x: Any = arrays.get(name)
        if not isinstance(x, np.ndarray):  # to look at values on a GPU would wait for the GPU
            continue
        numbers = np.asarray(x, np.float32)
        wrong = ~(np.abs(numbers) <= LARGEST_FACTOR)
        if name == "sinks":
            wrong &= ~np.isneginf(numbers)
        if wrong.any():
            at = int(np.argmax(wrong))
            none = ", or -inf for a head without one" if name == "sinks" else ""
            raise UsageError(f"{name}[{at}]", float(numbers[at]), accepted + none)


def check_optional(problem: Problem, arrays: Mapping[str, Any]) -> None:
    """Looks at NumPy's sinks and slopes, and at NumPy's offsets, which must be those of the lengths. Raises `UsageError`."""
    check_sinks(arrays)
    check_scales(problem, arrays)
    if isinstance(lists := arrays.get("block_mask"), np.ndarray):
        _check_lists(cast("Array", lists))
    for name in ("offsets_q", "offsets_kv", "offsets_mask"):
        x = arrays.get(name)
        if isinstance(x, np.ndarray) and (wrong := x != ATTENTION.operand(name).left_out(problem)).any():
            at = int(np.argmax(wrong))
            raise UsageError(f"{name}[{at}]", int(x[at]), "what the lengths say: it may be left out")


def _check_lists(lists: Array) -> None:
    """Raises `UsageError` for a number of blocks that there aren't, and for one that is none or is listed twice."""
    blocks, accepted = lists.shape[1] - 1, "a key block, {}"
    lengths: Array = lists[:, 0]
    for row in np.flatnonzero((lengths < 0) | (lengths > blocks)):
        raise UsageError(f"block_mask[{row}, 0]", int(lengths[row]), f"how many key blocks are visible, 0 to {blocks}")
    places: Any = np.arange(int(blocks))
    listed: Any = np.less(places, lengths[:, None])
    rows, columns = np.nonzero(listed)
    entries: Array = lists[rows, columns + 1].astype(np.int64)
    for at in np.flatnonzero((entries < 0) | (entries >= blocks)):
        name = f"block_mask[{rows[at]}, {columns[at] + 1}]"
        raise UsageError(name, int(entries[at]), accepted.format(f"0 to {blocks - 1}"))
    places = rows * blocks + entries
    order = np.argsort(places, kind="stable")
    for again in np.flatnonzero(places[order][1:] == places[order][:-1]):
        at = order[again + 1]
        name = f"block_mask[{rows[at]}, {columns[at] + 1}]"
        raise UsageError(name, int(entries[at]), accepted.format("which the row hasn't listed before"))


def _finfo(dtype: str) -> Any:
    if dtype == "bfloat16":
        ml_dtypes: Any = importlib.import_module("ml_dtypes")  # imported here only, because the import takes time
        return ml_dtypes.finfo(numpy_dtype(dtype))
    return np.finfo(numpy_dtype(dtype))


ATTENTION = Attention()


def random_inputs(problem: Problem, seed: int = 0) -> tuple[Any, Any, Any]:
    """Standard normal q, k, v for a problem, as NumPy arrays rounded to its dtype (ml_dtypes has bfloat16).

    >>> import flashlab as fl
    >>> q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=4, kv_heads=2, len_q=8, head_dim=16, dtype="float16"), seed=0)
    >>> q.shape, k.shape, q.dtype.name
    ((1, 4, 8, 16), (1, 2, 8, 16), 'float16')
    """
    if Problem.checked(problem).page_size is not None:
        raise UsageError("page_size", problem.page_size, "None: the operation of paged draws pages")
    if problem.len_prefix is not None:
        raise UsageError("len_prefix", problem.len_prefix, "None: the operation of cascade draws prefixes")
    drawn = ATTENTION.draw(problem, seed)
    return drawn["q"], drawn["k"], drawn["v"]
