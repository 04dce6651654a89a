# ruff: noqa: E501  (an edit is a line of source, which stays one line)
"""Faulty attention functions, written from the definition of each operation, before anybody looked at what the verifier can name.

Each family is a right function and a list of faults in it: a name, and an edit of its source. `python -m studies named` verifies
them all, and records which of them the report names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fault:
    """One wrong function: `edits` are the (old, new) that make it of its family's source."""

    family: str
    name: str
    edits: tuple[tuple[str, str], ...]

    @property
    def fn(self) -> Callable[..., Any]:
        """The faulty function."""
        return built(self.family, *self.edits)


def built(family: str, *edits: tuple[str, str]) -> Callable[..., Any]:
    """The function of a family's source after these edits."""
    source = SOURCES[family]
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} stands {source.count(old)} times in {family}")
        source = source.replace(old, new)
    found: dict[str, Any] = {"np": np, "re": re}
    exec(compile(source, f"<{family}>", "exec"), found)
    return found["attention"]


DENSE = """
def attention(q, k, v, causal=False, window=None, scale=None, soft_cap=None, sinks=None, alibi_slopes=None, mask=None):
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    len_q, len_kv, dim = q.shape[2], k.shape[2], q.shape[3]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    factor = dim ** -0.5 if scale is None else scale
    s = q @ k.swapaxes(2, 3) * np.float32(factor)
    if soft_cap is not None:
        s = soft_cap * np.tanh(s / soft_cap)
    i, j = np.arange(len_q)[:, None] + len_kv - len_q, np.arange(len_kv)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * np.abs(i - j)
    seen = np.ones((len_q, len_kv), bool)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        left, right = window
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j <= i + right)
    if mask is not None:
        seen = seen & mask
    s = np.where(seen, s, -np.inf)
    top = s.max(3, initial=-np.inf, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    top = np.where(np.isneginf(top), 0, top).astype(np.float32)
    p = np.exp(s - top)
    total = p.sum(3, keepdims=True)
    empty = total == 0
    if sinks is not None:
        empty = empty & np.isneginf(sinks[:, None, None])
        total = total + np.exp(sinks[:, None, None] - top)
    out = p @ v / np.where(empty, 1, total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return out.astype(dtype), lse.astype(np.float32)
"""

TILED = """
def attention(q, k, v, causal=False, scale=None, sinks=None):
    dtype, group, cols = q.dtype, q.shape[1] // k.shape[1], 32
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    len_q, len_kv, dim = q.shape[2], k.shape[2], q.shape[3]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = np.float32(dim ** -0.5 if scale is None else scale)
    i = np.arange(len_q)[:, None] + len_kv - len_q
    top = np.full((*q.shape[:3], 1), -np.inf, np.float32)
    total, acc = np.zeros_like(top), np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    if sinks is not None:
        top = np.zeros_like(top) + sinks[:, None, None].astype(np.float32)
        total = total + 1
    for tile, first in enumerate(range(0, len_kv, cols)):
        last = min(first + cols, len_kv)
        s = q @ k[:, :, first:last].swapaxes(2, 3) * scale
        if causal:
            s = np.where(np.arange(first, last) <= i, s, -np.inf)
        new = np.maximum(top, s.max(3, keepdims=True))
        safe = np.where(np.isneginf(new), 0, new)
        p, shrink = np.exp(s - safe), np.exp(top - safe)
        total = total * shrink + p.sum(3, keepdims=True)
        acc = acc * shrink + p @ v[:, :, first:last]
        top = new
    out = acc / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return out.astype(dtype), lse
"""

RAGGED = """
def attention(q, k, v, causal=False, scale=None, lengths=None):
    lengths = [(q.shape[2], k.shape[2])] if lengths is None else [(n, n) if isinstance(n, int) else n for n in lengths]
    batches, heads, group, dim = q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[3]
    scale = np.float32(dim ** -0.5 if scale is None else scale)
    out, lse = np.zeros((*q.shape[:3], v.shape[3]), q.dtype), np.full(q.shape[:3], -np.inf, np.float32)
    for b in range(batches):
        row = key = 0
        for number, (len_q, len_kv) in enumerate(lengths):
            rows, keys = slice(row, row + len_q), slice(key, key + len_kv)
            row, key = row + len_q, key + len_kv
            if len_q == 0 or len_kv == 0:
                continue
            own_q = q[b, :, rows].astype(np.float32)
            own_k, own_v = (np.repeat(x[b, :, keys].astype(np.float32), group, 0) for x in (k, v))
            s = own_q @ own_k.swapaxes(1, 2) * scale
            if causal:
                offset = own_k.shape[1] - len_q
                s = np.where(np.arange(own_k.shape[1]) <= np.arange(len_q)[:, None] + offset, s, -np.inf)
            top = s.max(2, initial=-np.inf, keepdims=True)
            safe = np.where(np.isneginf(top), 0, top).astype(np.float32)
            p = np.exp(s - safe)
            total = p.sum(2, keepdims=True)
            out[b, :, rows] = p @ own_v / np.where(total == 0, 1, total)
            with np.errstate(divide="ignore"):
                lse[b, :, rows] = (safe + np.log(total))[..., 0]
    return out, lse
"""

MERGED = """
def part(q, k, v, scale):
    s = q @ k.swapaxes(2, 3) * scale
    top = s.max(3, initial=-np.inf, keepdims=True)
    safe = np.where(np.isneginf(top), 0, top).astype(np.float32)
    p = np.exp(s - safe)
    total = p.sum(3, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(total == 0, 1, total), safe + np.log(total)


def attention(q, k, v, scale=None):
    dtype, group, dim, parts = q.dtype, q.shape[1] // k.shape[1], q.shape[3], 2
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = np.float32(dim ** -0.5 if scale is None else scale)
    size = -(-k.shape[2] // parts)
    cuts = [slice(n * size, min((n + 1) * size, k.shape[2])) for n in range(parts)]
    found = [part(q, k[:, :, cut], v[:, :, cut], scale) for cut in cuts]
    top = np.maximum.reduce([lse for _, lse in found])
    safe = np.where(np.isneginf(top), 0, top)
    weights = [np.exp(lse - safe) for _, lse in found]
    total = sum(weights)
    out = sum(out * weight for (out, _), weight in zip(found, weights)) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return out.astype(dtype), (safe + np.log(total))[..., 0].astype(np.float32)
"""

BACKWARD = """
def attention(dout, q, k, v, out, lse, causal=False, window=None, scale=None, soft_cap=None):
    dtype, heads, kv_heads = q.dtype, q.shape[1], k.shape[1]
    group = heads // kv_heads
    dout, q, k, v, out = (x.astype(np.float32) for x in (dout, q, k, v, out))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    len_q, len_kv, dim = q.shape[2], k.shape[2], q.shape[3]
    factor = np.float32(dim ** -0.5 if scale is None else scale)
    s = q @ k.swapaxes(2, 3) * factor
    slope = np.ones_like(s)
    if soft_cap is not None:
        bent = np.tanh(s / soft_cap)
        s, slope = soft_cap * bent, 1 - bent * bent
    i, j = np.arange(len_q)[:, None] + len_kv - len_q, np.arange(len_kv)
    seen = np.ones((len_q, len_kv), bool)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        left, right = window
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j <= i + right)
    log = np.where(np.isneginf(lse), 0, lse)[..., None]
    p = np.where(seen, np.exp(np.where(seen, s - log, 0)), 0)
    dp = dout @ v.swapaxes(2, 3)
    delta = (dout * out).sum(3, keepdims=True)
    ds = p * (dp - delta) * slope
    dq = ds @ k * factor
    dk = ds.swapaxes(2, 3) @ q * factor
    dv = p.swapaxes(2, 3) @ dout
    dk, dv = (x.reshape(x.shape[0], kv_heads, group, len_kv, x.shape[3]).sum(2) for x in (dk, dv))
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)
"""

PAGED = """
def attention(q, k, v, block_table, seq_lens, causal=False, window=None, scale=None):
    dtype, group, size, dim = q.dtype, q.shape[1] // k.shape[1], k.shape[2], q.shape[3]
    factor = np.float32(dim ** -0.5 if scale is None else scale)
    out, lse = np.zeros((*q.shape[:3], v.shape[3]), dtype), np.full(q.shape[:3], -np.inf, np.float32)
    for b in range(len(seq_lens)):
        n, len_q = int(seq_lens[b]), q.shape[2]
        keys = np.arange(n)
        pages, slots = block_table[b, keys // size], keys % size
        own_k = np.repeat(k[pages, :, slots].swapaxes(0, 1).astype(np.float32), group, 0)
        own_v = np.repeat(v[pages, :, slots].swapaxes(0, 1).astype(np.float32), group, 0)
        s = q[b].astype(np.float32) @ own_k.swapaxes(1, 2) * factor
        i, j = np.arange(len_q)[:, None] + n - len_q, keys
        if causal:
            s = np.where(j <= i, s, -np.inf)
        if window is not None:
            left, right = window
            s = s if left is None else np.where(j >= i - left, s, -np.inf)
            s = s if right is None else np.where(j <= i + right, s, -np.inf)
        top = s.max(2, initial=-np.inf, keepdims=True)
        safe = np.where(np.isneginf(top), 0, top).astype(np.float32)
        p = np.exp(s - safe)
        total = p.sum(2, keepdims=True)
        out[b] = p @ own_v / np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            lse[b] = (safe + np.log(total))[..., 0]
    return out, lse
"""

DROPOUT = """
def attention(q, k, v, causal=False, scale=None, dropout=None, seed=0):
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    len_q, len_kv, dim = q.shape[2], k.shape[2], q.shape[3]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = q @ k.swapaxes(2, 3) * np.float32(dim ** -0.5 if scale is None else scale)
    if causal:
        s = np.where(np.arange(len_kv) <= np.arange(len_q)[:, None] + len_kv - len_q, s, -np.inf)
    rate = 0.0 if dropout is None else dropout
    kept = np.random.default_rng(seed).random(s.shape) >= rate
    top = s.max(3, initial=-np.inf, keepdims=True)
    safe = np.where(np.isneginf(top), 0, top).astype(np.float32)
    p = np.exp(s - safe)
    total = p.sum(3, keepdims=True)
    p = p * kept / np.float32(1 - rate)
    out = p @ v / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (safe + np.log(total))[..., 0]
    return out.astype(dtype), lse.astype(np.float32)
"""

SOURCES = {
    "dense": DENSE, "tiled": TILED, "ragged": RAGGED, "merged": MERGED, "backward": BACKWARD, "paged": PAGED,
    "dropout": DROPOUT,
}  # fmt: skip

_FAULTS: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "dense": {
        "no scale": (("factor = dim ** -0.5 if scale is None else scale", "factor = 1"),),
        "scaled by the head dim": (("dim ** -0.5", "1 / dim"),),
        "its own scale whatever is asked": (("dim ** -0.5 if scale is None else scale", "dim ** -0.5"),),
        "the scale twice": (("* np.float32(factor)", "* np.float32(factor * factor)"),),
        "soft cap multiplied outside only": (("np.tanh(s / soft_cap)", "np.tanh(s)"),),
        "soft cap not multiplied back": (("soft_cap * np.tanh", "np.tanh"),),
        "soft cap before the scale": (
            ("* np.float32(factor)", ""),
            ("    i, j = np", "    s = s * np.float32(factor)\n    i, j = np"),
        ),
        "soft cap cuts instead of bending": (
            ("soft_cap * np.tanh(s / soft_cap)", "np.clip(s, -soft_cap, soft_cap)"),
        ),
        "soft cap ignored": (("if soft_cap is not None", "if False"),),
        "alibi with the wrong sign": (("s - alibi_slopes", "s + alibi_slopes"),),
        "alibi ignored": (("if alibi_slopes is not None", "if False"),),
        "alibi signed": (("np.abs(i - j)", "(i - j)"),),
        "alibi from the top left": (("np.abs(i - j)", "np.abs(i - len_kv + len_q - j)"),),
        "alibi scaled like the scores": (("np.abs(i - j)", "np.abs(i - j) * np.float32(factor)"),),
        "alibi slopes of the first head": (("alibi_slopes[:, None, None]", "alibi_slopes[0]"),),
        "causal ignored": (("if causal:", "if False:"),),
        "causal hides the diagonal": (("(j <= i)\n    if window", "(j < i)\n    if window"),),
        "causal shows one more": (("(j <= i)\n    if window", "(j <= i + 1)\n    if window"),),
        "causal from the top left": (("(j <= i)\n    if window", "(j <= i - len_kv + len_q)\n    if window"),),
        "causal the other way round": (("(j <= i)\n    if window", "(j >= i)\n    if window"),),
        "window ignored": (("if window is not None", "if False"),),
        "window one short on the left": (("j >= i - left", "j > i - left"),),
        "window one long on the right": (("j <= i + right)", "j <= i + right + 1)"),),
        "window's sides swapped": (("left, right = window", "right, left = window"),),
        "window from the top left": (
            ("j >= i - left", "j >= i - len_kv + len_q - left"),
            ("j <= i + right", "j <= i - len_kv + len_q + right"),
        ),
        "mask ignored": (("if mask is not None", "if False"),),
        "mask inverted": (("seen & mask", "seen & ~mask"),),
        "mask instead of causal": (("seen & mask", "mask"),),
        "mask shows what either shows": (("seen & mask", "(seen | mask) if causal else mask"),),
        "sinks ignored": (("if sinks is not None:\n        top", "sinks = None\n    if sinks is not None:\n        top"),),
        "sinks counted twice": (("total + np.exp", "total + 2 * np.exp"),),
        "sink without the maximum": (("np.exp(sinks[:, None, None] - top)", "np.exp(sinks[:, None, None])"),),
        "sink added without exp": (("np.exp(sinks[:, None, None] - top)", "sinks[:, None, None]"),),
        "sink of the first head": (("np.exp(sinks[:, None, None] - top)", "np.exp(sinks[0] - top)"),),
        "sink left out of the LSE": (
            ("lse = (top + np.log(total))[..., 0]", "lse = (top + np.log(p.sum(3, keepdims=True)))[..., 0]"),
        ),
        "sink left out of the output": (("np.where(empty, 1, total)", "np.where(empty, 1, p.sum(3, keepdims=True))"),),
        "no division": (("p @ v / np.where(empty, 1, total)", "p @ v"),),
        "no maximum": (("p = np.exp(s - top)", "top = 0 * top\n    p = np.exp(s)"),),
        "LSE without the maximum": (("(top + np.log(total))", "np.log(total)"),),
        "LSE to base 2": (("(top + np.log(total))", "((top + np.log(total)) / np.log(2))"),),
        "LSE is the maximum": (("(top + np.log(total))", "top"),),
        "LSE negative": (("(top + np.log(total))", "-(top + np.log(total))"),),
        "LSE rounded to half": (("lse.astype(np.float32)", "lse.astype(np.float16).astype(np.float32)"),),
        "heads interleaved": (
            ("np.repeat(k, group, 1), np.repeat(v, group, 1)", "np.tile(k, (1, group, 1, 1)), np.tile(v, (1, group, 1, 1))"),
        ),
        "keys of the first head": (("np.repeat(k, group, 1),", "np.repeat(k[:, :1], q.shape[1], 1),"),),
        "sequence 0 for all": (("np.repeat(k, group, 1),", "np.repeat(k[:1].repeat(len(k), 0), group, 1),"),),
        "values in place of keys": (("s = q @ k.swapaxes", "s = q @ v.swapaxes"),),
        "empty rows are the mean of v": (
            ("s = np.where(seen, s, -np.inf)", "s = np.where(seen, s, np.float32(-1e30))"),
        ),
    },
    "tiled": {
        "output not rescaled": (("acc = acc * shrink + p", "acc = acc + p"),),
        "sum not rescaled": (("total = total * shrink + p", "total = total + p"),),
        "rescaled the other way round": (("np.exp(top - safe)", "np.exp(np.where(np.isneginf(top), 0, safe - top))"),),
        "last ragged tile dropped": (("range(0, len_kv, cols)", "range(0, len_kv - len_kv % cols, cols)"),),
        "first tile dropped": (("range(0, len_kv, cols)", "range(cols, len_kv, cols)"),),
        "last key of each tile dropped": (
            ("p, shrink = np.exp(s - safe)", "s[..., cols - 1 :] = -np.inf\n        p, shrink = np.exp(s - safe)"),
        ),
        "last key counted twice": (
            ("total * shrink + p.sum(3, keepdims=True)", "total * shrink + p.sum(3, keepdims=True) + (p[..., -1:] if last == len_kv else 0)"),
        ),
        "only the last tile's output is divided": (("acc / np.where(total == 0, 1, total)", "acc / p.sum(3, keepdims=True)"),),
        "padding counted as scores of 0": (
            ("total = total * shrink + p.sum(3, keepdims=True)", "total = total * shrink + p.sum(3, keepdims=True) + (first + cols - last) * np.exp(-safe)"),
        ),
        "values of the tile before": (("p @ v[:, :, first:last]", "p @ v[:, :, max(0, first - cols) : max(0, first - cols) + last - first]"),),
        "accumulator in half": (("acc = acc * shrink + p @ v[:, :, first:last]", "acc = (acc * shrink + p @ v[:, :, first:last]).astype(np.float16).astype(np.float32)"),),
        "causal per tile": (("np.arange(first, last) <= i", "first <= i"),),
    },
    "ragged": {
        "lengths ignored": (("if lengths is None else [(n, n) if isinstance(n, int) else n for n in lengths]", ""),),
        "one key of the neighbour": (("slice(key, key + len_kv)", "slice(key, key + len_kv + 1)"),),
        "the last key of each sequence is lost": (("slice(key, key + len_kv)", "slice(key, key + len_kv - 1)"),),
        "keys begin where queries do": (("slice(key, key + len_kv)", "slice(row, row + len_kv)"),),
        "last sequence not done": (("if len_q == 0 or len_kv == 0:", "if len_q == 0 or len_kv == 0 or (number and number == len(lengths) - 1):"),),
        "causal by place in the batch": (
            ("np.arange(len_q)[:, None] + offset", "np.arange(len_q)[:, None] + (rows.start - keys.start)"),
        ),
        "keys of the sequence before": (
            ("rows, keys = slice(row, row + len_q), slice(key, key + len_kv)",
             "rows, keys = slice(row, row + len_q), slice(max(0, key - lengths[number - 1][1]) if number else 0, max(0, key - lengths[number - 1][1]) + len_kv if number else len_kv)"),
        ),
    },
    "merged": {
        "parts averaged": (("out * weight for (out, _), weight in zip(found, weights)) / np.where(total == 0, 1, total)", "out for out, _ in found) / parts"),),
        "parts added": (("/ np.where(total == 0, 1, total)\n    with np.errstate(divide=\"ignore\"):\n        return out.astype", "\n    with np.errstate(divide=\"ignore\"):\n        return out.astype"),),
        "weights by the maximum": (("total = p.sum(3, keepdims=True)\n    with np.errstate(divide=\"ignore\"):\n        return p @ v / np.where(total == 0, 1, total), safe + np.log(total)", "total = p.sum(3, keepdims=True)\n    return p @ v / np.where(total == 0, 1, total), top"),),
        "second part lost": (("total = sum(weights)", "weights[1] = 0 * weights[1]\n    total = sum(weights)"),),
        "LSE of the larger part": (("(safe + np.log(total))[..., 0].astype", "safe[..., 0].astype"),),
        "LSEs added": (("(safe + np.log(total))[..., 0].astype", "sum(lse for _, lse in found)[..., 0].astype"),),
        "weights to base 2": (("np.exp(lse - safe)", "np.exp2(lse - safe)"),),
        "parts not divided before they are weighed": (("return p @ v / np.where(total == 0, 1, total), safe", "return p @ v, safe"),),
    },
    "backward": {
        "no delta": (("(dp - delta)", "dp"),),
        "delta from dout alone": (("(dout * out).sum", "dout.sum"),),
        "delta added": (("(dp - delta)", "(dp + delta)"),),
        "dq without the scale": (("dq = ds @ k * factor", "dq = ds @ k"),),
        "dk with the scale twice": (("dk = ds.swapaxes(2, 3) @ q * factor", "dk = ds.swapaxes(2, 3) @ q * factor**2"),),
        "first head of a group alone": (("len_kv, x.shape[3]).sum(2)", "len_kv, x.shape[3])[:, :, 0]"),),
        "mean over the group": (("len_kv, x.shape[3]).sum(2)", "len_kv, x.shape[3]).mean(2)"),),
        "dk and dv swapped": (("dk.astype(dtype), dv.astype(dtype)", "dv.astype(dtype), dk.astype(dtype)"),),
        "soft cap's slope forgotten": (("s, slope = soft_cap * bent, 1 - bent * bent", "s = soft_cap * bent"),),
        "causal ignored": (("if causal:", "if False:"),),
        "dv from ds": (("dv = p.swapaxes", "dv = ds.swapaxes"),),
        "window's left side ignored": (("if left is not None", "if False"),),
    },
    "paged": {
        "page off by one at an edge": (("block_table[b, keys // size]", "block_table[b, np.minimum((keys + 1) // size, (n - 1) // size)]"),),
        "first key of each page dropped": (("top = s.max(2", "s[..., slots == 0] = -np.inf\n        top = s.max(2"),),
        "table of the first request": (("block_table[b, keys", "block_table[0, keys"),),
        "pages in the pool's order": (("block_table[b, keys // size]", "np.sort(block_table[b, : -(-n // size)])[keys // size]"),),
        "last page whole": (("n, len_q = int(seq_lens[b]), q.shape[2]", "n, len_q = -(-int(seq_lens[b]) // size) * size, q.shape[2]"),),
        "values of the next slot": (("own_v = np.repeat(v[pages, :, slots]", "own_v = np.repeat(v[pages, :, np.minimum(slots + 1, np.minimum(size, n - keys + slots) - 1)]"),),
        "last page left out": (("n, len_q = int(seq_lens[b]), q.shape[2]", "n, len_q = int(seq_lens[b]) // size * size, q.shape[2]"),),
        "length of the longest request": (("n, len_q = int(seq_lens[b])", "n, len_q = int(seq_lens.max())"), ("block_table[b, keys // size]", "np.minimum(block_table[b, keys // size], len(k) - 1)")),
        "newest token left out": (("n, len_q = int(seq_lens[b]), q.shape[2]", "n, len_q = max(0, int(seq_lens[b]) - 1), q.shape[2]"),),
        "causal from the top left": (("if causal:\n            s = np.where(j <= i,", "if causal:\n            s = np.where(j <= i - n + len_q,"),),
    },
    "dropout": {
        "kept weights not divided": (("p * kept / np.float32(1 - rate)", "p * kept"),),
        "the LSE of the kept weights": (("total = p.sum(3, keepdims=True)\n    p = p * kept / np.float32(1 - rate)", "p = p * kept / np.float32(1 - rate)\n    total = p.sum(3, keepdims=True)"),),
        "the share dropped is kept": ((">= rate", "< (rate or 1)"), ("np.float32(1 - rate)", "np.float32(1 - rate if rate else 1)")),
        "dropout ignored": (("rate = 0.0 if dropout is None else dropout", "rate = 0.0"),),
        "every head drops the same": (("random(s.shape)", "random(s.shape[2:])"),),
    },
}  # fmt: skip

FAULTS = tuple(Fault(family, name, edits) for family, faults in _FAULTS.items() for name, edits in faults.items())
"""All faults, family by family."""
