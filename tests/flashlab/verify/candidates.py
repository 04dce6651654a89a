"""Plain NumPy attention as a kernel computes it, to hold the harness against: correct, in every storage dtype, with an LSE."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    keys: int = 32,
) -> tuple[Array, Array]:
    """Online softmax over tiles of `keys`, float32 sums, P rounded to the storage dtype before P V."""
    batch, heads, rows, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    group, cols, dtype = heads // k.shape[1], k.shape[2], q.dtype
    k, v = (np.repeat(x, group, axis=1).astype(np.float32) for x in (k, v))
    m = np.full((batch, heads, rows, 1), -np.inf, np.float32)
    l, acc = np.zeros_like(m), np.zeros((batch, heads, rows, v.shape[-1]), np.float32)
    aligned = np.arange(rows)[:, None] + cols - rows
    left, right = window or (None, None)
    right = 0 if causal else right
    for start in range(0, cols, keys):
        tile = slice(start, min(start + keys, cols))
        key = np.arange(tile.start, tile.stop)
        s = np.float32(scale) * (q.astype(np.float32) @ k[:, :, tile].swapaxes(-1, -2))
        if soft_cap:
            s = np.float32(soft_cap) * np.tanh(s / np.float32(soft_cap))
        if alibi_slopes is not None:
            s = s - alibi_slopes[:, None, None] * np.abs(aligned - key).astype(np.float32)
        hidden = np.zeros((rows, len(key)), bool)
        if right is not None:
            hidden |= key > aligned + right
        if left is not None:
            hidden |= key < aligned - left
        if mask is not None:
            hidden |= ~mask[:, tile]
        s = np.where(hidden, np.float32(-np.inf), s)
        m_new = np.maximum(m, s.max(-1, keepdims=True))
        base = np.where(np.isneginf(m_new), np.float32(0), m_new)
        p, alpha = np.exp(s - base), np.exp(m - base)
        l = l * alpha + p.sum(-1, keepdims=True)
        acc = acc * alpha + p.astype(dtype).astype(np.float32) @ v[:, :, tile]
        m = m_new
    if sinks is not None:
        m_new = np.maximum(m, sinks[:, None, None])
        base = np.where(np.isneginf(m_new), np.float32(0), m_new)
        alpha = np.exp(m - base)
        m, l, acc = m_new, l * alpha + np.exp(sinks[:, None, None] - base), acc * alpha
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[..., 0]
    return (acc / np.where(l == 0, np.float32(1), l)).astype(dtype), lse
