"""A tiled attention in NumPy, as a kernel has it, and the mechanisms by which such kernels go wrong: one `Fault` each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import ml_dtypes
import numpy as np

from simulator.dtypes import Array

KEYS, ROWS = 32, 16
"""Keys and rows of a tile."""

Masked = Literal[
    "causal top-left", "causal ignored", "causal one too many", "causal one too few", "causal strict at tile edges",
    "causal skips a tile too early", "causal off from row 300 on", "window left too wide", "window left too narrow",
    "window right too wide", "window ignored", "window top-left", "window exclusive", "sentinel -1e4", "sentinel 0",
    "mask before the scale", "mask multiplies",
]  # fmt: skip
Tiled = Literal[
    "last key dropped", "first key dropped", "ragged tile dropped", "padded keys count", "last tile of 1 dropped",
    "tile counted twice", "stale tail of V", "last row tile dropped", "keys beyond 1024 dropped", "rows beyond 128 wrap",
    "tiles in swapped order of V", "one key counted twice in long rows",
]  # fmt: skip
Summed = Literal[
    "no maximum", "maximum from 0", "maximum of the tile alone", "accumulator not rescaled", "sum not rescaled",
    "nothing rescaled", "rescaled by the new maximum", "rescaled twice", "rescale skipped from tile 3 on",
    "not normalised", "normalised per tile", "sum of rounded P in 8 bits", "sum in storage", "accumulator in storage",
    "P in 8 bits", "S in storage", "exp in storage", "epsilon in the sum", "exp by a short series",
    "exp clamped at -10", "maximum of float16",
]  # fmt: skip
Headed = Literal[
    "heads interleaved", "one KV head for all", "KV head off by one in the last group", "heads beyond 32 are 0",
    "batch 0 for all", "KV of the next batch", "heads swapped in out",
]  # fmt: skip
Scaled = Literal[
    "scale 1/d by default", "scale missing", "scale ignored", "scale of a padded head dim", "scale rounded to storage",
    "scale absolute", "scale applied to Q in storage", "zero scale taken for none",
]  # fmt: skip
Stored = Literal[
    "head dim tail dropped in S", "head dim tail dropped in out", "out truncated, not rounded", "last element of a row not written",
    "reads K as if contiguous", "writes the scale into Q", "NaN in empty rows", "mean in empty rows", "LSE 0 in empty rows",
    "len_q of 1 unmasked", "out of the previous call", "uninitialised accumulator where no tile runs", "depends on the run",
]  # fmt: skip
Logged = Literal[
    "LSE to base 2", "LSE without the maximum", "LSE is the maximum", "LSE is the sum", "LSE negated", "LSE in storage",
    "LSE of unscaled scores", "LSE of the last tile", "LSE 0.1 % off", "LSE shifted by a row",
]  # fmt: skip
Fault = Masked | Tiled | Summed | Headed | Scaled | Stored | Logged

KINDS: dict[str, tuple[Any, ...]] = {
    name: get_args(kind)
    for name, kind in {
        "masks": Masked, "tiles": Tiled, "sums": Summed, "heads": Headed, "scales": Scaled, "memory": Stored, "LSE": Logged,
    }.items()
}  # fmt: skip


def tiled(fault: Fault | None = None) -> Callable[..., tuple[Array, Array]]:
    """The kernel with one fault (None: without). It keeps what its fault needs from call to call."""
    held: dict[Any, Any] = {"calls": 0}

    def kernel(
        q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None, window: Any = None
    ) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            return _run(fault, held, q, k, v, causal, scale, window)

    return kernel


def _scale(fault: Fault | None, dim: int, scale: float | None, storage: Any) -> float:
    if fault == "scale 1/d by default" and scale is None:
        return 1 / dim
    if fault == "scale missing" and scale is None:
        return 1.0
    if fault == "scale of a padded head dim" and scale is None:
        return float((1 << (dim - 1).bit_length()) ** -0.5)
    own = float(dim**-0.5)
    scale = own if fault == "scale ignored" or scale is None else scale
    if fault == "zero scale taken for none" and not scale:
        return own
    if fault == "scale rounded to storage":
        return float(np.asarray(scale, "float16"))
    return abs(scale) if fault == "scale absolute" else scale


def _order(fault: Fault | None, heads: int, kv_heads: int) -> Array:
    order = np.arange(heads) // (heads // kv_heads)
    if fault == "heads interleaved":
        return np.arange(heads) % kv_heads
    if fault == "one KV head for all":
        return order * 0
    if fault == "KV head off by one in the last group" and kv_heads > 1:
        return np.where(order == kv_heads - 1, kv_heads - 2, order)
    return order


def _seen(fault: Fault | None, rows: int, cols: int, causal: bool, window: Any) -> Array:
    """Which keys each row sees: (rows, cols)."""
    i, j = np.arange(rows)[:, None], np.arange(cols)
    at = i + cols - rows
    left, right = window or (None, None)
    seen = np.ones((rows, cols), bool)
    if causal and fault != "causal ignored":
        edge = i if fault == "causal top-left" else at
        edge = edge + {"causal one too many": 1, "causal one too few": -1}.get(fault or "", 0)
        if fault == "causal strict at tile edges":
            edge = np.where(edge % KEYS == KEYS - 1, edge - 1, edge)
        if fault == "causal skips a tile too early":
            edge = np.where((edge >= KEYS) & (edge % KEYS == 0), edge - 1, edge)
        if fault == "causal off from row 300 on":
            edge = np.where(i >= 300, edge - 1, edge)
        seen &= j <= edge
    if fault == "len_q of 1 unmasked" and rows == 1:
        return np.ones((rows, cols), bool)
    if fault == "window ignored":
        return seen
    around = i if fault == "window top-left" else at
    if left is not None:
        left += {"window left too wide": 1, "window left too narrow": -1}.get(fault or "", 0)
        seen &= (j > around - left) if fault == "window exclusive" else (j >= around - left)
    if right is not None and not causal:
        seen &= j <= around + right + (fault == "window right too wide")
    return seen


def _run(
    fault: Fault | None,
    held: dict[Any, Any],
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float | None,
    window: Any,
) -> tuple[Array, Array]:
    storage, (_, heads, rows, dim), (kv_heads, cols) = q.dtype, q.shape, k.shape[1:3]
    held["calls"] += 1
    factor = _scale(fault, dim, scale, storage)
    order = _order(fault, heads, kv_heads)
    if fault == "reads K as if contiguous":
        k = np.lib.stride_tricks.as_strided(k, k.shape, np.empty(k.shape, k.dtype).strides)
    if fault == "writes the scale into Q":
        q *= np.asarray(factor, storage)
        factor = 1.0
    queries, keys, values = q.astype(np.float32), k[:, order].astype(np.float32), v[:, order].astype(np.float32)
    if fault == "batch 0 for all":
        keys, values = np.broadcast_to(keys[:1], keys.shape), np.broadcast_to(values[:1], values.shape)
    if fault == "KV of the next batch":
        keys = np.roll(keys, 1, axis=0)
    if fault == "scale applied to Q in storage":
        queries, factor = (queries * np.float32(factor * 1.4427)).astype(storage).astype(np.float32), 1 / 1.4427
    if fault == "head dim tail dropped in S" and dim % 16:
        queries[..., dim - dim % 16 :] = 0
    seen = _seen(fault, rows, cols, causal, window)
    if fault == "last key dropped":
        seen[:, -1:] = False
    if fault == "first key dropped":
        seen[:, :1] = False
    if fault == "ragged tile dropped" and cols % KEYS:
        seen[:, cols - cols % KEYS :] = False
    if fault == "last tile of 1 dropped" and cols % KEYS == 1 and cols > 1:
        seen[:, -1:] = False
    if fault == "keys beyond 1024 dropped":
        seen[:, 1024:] = False
    if fault == "padded keys count" and not causal and window is None and cols:
        tail = [(0, 0), (0, 0), (0, -cols % KEYS), (0, 0)]
        keys, values = np.pad(keys, tail), np.pad(values, tail)
        seen = np.pad(seen, [(0, 0), (0, -cols % KEYS)], constant_values=True)
    s = queries @ keys.swapaxes(-1, -2)
    raw = s
    if fault == "mask before the scale":
        s = np.float32(factor) * np.where(seen, s, np.float32(-1e4))
    else:
        s = np.float32(factor) * s
        hidden = {"sentinel -1e4": -1e4, "sentinel 0": 0.0}.get(fault or "", -np.inf)
        s = s * seen if fault == "mask multiplies" else np.where(seen, s, np.float32(hidden))
    if fault == "S in storage":
        s = s.astype(storage).astype(np.float32)
    out, lse = _softmax(fault, s, values, storage)
    if fault == "LSE of unscaled scores":
        lse = _softmax(None, np.where(seen, raw, np.float32(-np.inf)), values, storage)[1]
    return _stored(fault, held, out, lse, seen, values, storage)


def _exp(fault: Fault | None, x: Array, storage: Any) -> Array:
    if fault == "exp in storage":
        return np.exp(x.astype("float16")).astype(np.float32)
    if fault == "exp clamped at -10":
        return np.where(np.isneginf(x), 0, np.exp(np.maximum(x, -10))).astype(np.float32)
    if fault == "exp by a short series":
        y = x * np.float32(1.442695)
        whole, part = np.floor(y), y - np.floor(y)
        two_to = np.maximum(np.nan_to_num(whole, neginf=-150), -150).astype(int)
        series = np.ldexp(1 + part * (0.6565 + part * 0.3435), two_to)
        return np.where(np.isneginf(x), 0, series).astype(np.float32)
    return np.exp(x)


def _softmax(fault: Fault | None, s: Array, values: Array, storage: Any) -> tuple[Array, Array]:
    """Online softmax over tiles of keys: (out, lse) in float32."""
    shape, cols = s.shape[:-1], s.shape[-1]
    m = np.full((*shape, 1), 0 if fault in ("maximum from 0", "no maximum") else -np.inf, np.float32)
    l = np.zeros_like(m)
    acc = np.zeros((*shape, values.shape[-1]), np.float32)
    last = m
    for t, start in enumerate(range(0, cols, KEYS)):
        part, v_t = s[..., start : start + KEYS], values[:, :, start : start + KEYS]
        if fault == "tiles in swapped order of V" and t % 2 and 2 * KEYS <= cols:
            v_t = values[:, :, cols - v_t.shape[2] :]
        if fault == "stale tail of V" and t and v_t.shape[2] < KEYS:
            v_t = values[:, :, start - KEYS : start - KEYS + v_t.shape[2]]
        m_new = np.maximum(m, part.max(-1, keepdims=True))
        if fault == "no maximum":
            m_new = m
        if fault == "maximum of the tile alone":
            m_new = part.max(-1, keepdims=True)
        if fault == "maximum of float16":
            m_new = m_new.astype("float16").astype(np.float32)
        base = np.where(np.isneginf(m_new), np.float32(0), m_new)
        p, alpha = _exp(fault, part - base, storage), np.exp(m - base)
        if fault == "rescaled by the new maximum":
            alpha = np.where(np.isneginf(m), 0, np.exp(-np.abs(m - base) * 0.99)).astype(np.float32)
        if fault == "rescaled twice":
            alpha = alpha * alpha
        if fault == "maximum of the tile alone":
            alpha = np.minimum(alpha, 1)
        skipped = fault == "rescale skipped from tile 3 on" and t >= 3
        one = np.float32(1)
        a_acc = one if skipped or fault in ("accumulator not rescaled", "nothing rescaled") else alpha
        a_l = one if fault in ("sum not rescaled", "nothing rescaled") else alpha
        counted = p.astype("float8_e4m3fn").astype(np.float32) if fault == "sum of rounded P in 8 bits" else p
        l = l * a_l + counted.sum(-1, keepdims=True)
        if fault == "tile counted twice" and t == 1:
            l = l + counted.sum(-1, keepdims=True)
        if fault == "one key counted twice in long rows" and start <= 700 < start + KEYS:
            l = l + p[..., :1]
        weights = p.astype("float8_e4m3fn" if fault == "P in 8 bits" else storage).astype(np.float32)
        if fault == "normalised per tile":
            weights = weights / np.maximum(p.sum(-1, keepdims=True), 1e-30)
        acc = acc * a_acc + weights @ v_t
        if fault == "sum in storage":
            l = l.astype(_narrow(storage)).astype(np.float32)
        if fault == "accumulator in storage":
            acc = acc.astype(_narrow(storage)).astype(np.float32)
        m, last = m_new, part
    if fault == "LSE of the last tile" and cols:
        l_last = np.exp(last - np.where(np.isneginf(m), 0, m)).sum(-1, keepdims=True)
        return _divided(fault, acc, l), (m + np.log(l_last))[..., 0]
    if fault == "uninitialised accumulator where no tile runs":
        acc = np.where(l == 0, np.float32(7), acc)
    log = {
        "LSE to base 2": np.log2(l) + m * 1.442695,
        "LSE without the maximum": np.log(l),
        "LSE is the maximum": m,
        "LSE is the sum": l,
        "LSE negated": -(m + np.log(l)),
    }
    lse = np.where(l == 0, -np.inf, log.get(fault or "", m + np.log(l)))
    return _divided(fault, acc, l), lse[..., 0].astype(np.float32)


def _narrow(storage: Any) -> Any:
    return "float16" if storage == np.float32 else storage


def _divided(fault: Fault | None, acc: Array, l: Array) -> Array:
    if fault in ("not normalised", "normalised per tile"):
        return acc
    if fault == "epsilon in the sum":
        return acc / (l + np.float32(1e-2))
    return acc / l if fault == "NaN in empty rows" else acc / np.where(l == 0, np.float32(1), l)


def _stored(
    fault: Fault | None, held: dict[Any, Any], out: Array, lse: Array, seen: Array, values: Array, storage: Any
) -> tuple[Array, Array]:
    rows, dim = out.shape[2:]
    empty = np.isneginf(lse)
    if fault == "mean in empty rows" and values.shape[2]:
        out = np.where(empty[..., None], values.mean(2, keepdims=True), out)
    if fault == "LSE 0 in empty rows":
        lse = np.where(empty, 0, lse)
    if fault == "LSE in storage":
        lse = lse.astype(_narrow(storage))
    if fault == "LSE 0.1 % off":
        lse = lse * np.float32(1.001)
    if fault == "LSE shifted by a row":
        lse = np.roll(lse, 1, axis=-1)
    if fault == "last row tile dropped" and rows % ROWS and rows > ROWS:
        out[:, :, rows - rows % ROWS :] = 0
    if fault == "rows beyond 128 wrap":
        out[:, :, 128:] = out[:, :, : max(0, rows - 128)][:, :, :128].repeat(-(-rows // 128), 2)[
            :, :, : max(0, rows - 128)
        ]
    if fault == "heads beyond 32 are 0":
        out[:, 32:] = 0
    if fault == "heads swapped in out" and out.shape[1] % 4 == 0:
        out = out[:, np.arange(out.shape[1]) ^ 1]
    if fault == "head dim tail dropped in out" and dim % 16:
        out[..., dim - dim % 16 :] = 0
    if fault == "last element of a row not written":
        out[..., -1:] = 0
    if fault == "depends on the run":
        out = out * np.float32(1 + (held["calls"] % 2) * 2.0**-9)
    if fault == "out truncated, not rounded":
        exact, stored = out, out.astype(storage)
        away = np.abs(stored.astype(np.float32)) > np.abs(exact)
        toward = (stored.astype(np.float32) * (1 - 2.0 * float(cast("Any", ml_dtypes.finfo(storage)).eps))).astype(
            storage
        )
        return np.where(away, toward, stored), lse.astype(np.float32)
    if fault == "out of the previous call":
        last = held.get(out.shape)
        held[out.shape] = out.copy()
        out = out if last is None else last
    return out.astype(storage), lse.astype(np.float32)
