"""Random inputs of attention: kinds of q, k and v, and the inputs that callers may leave out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from simulator.dtypes import Array, numpy_dtype
from simulator.operations.pairs import block_lists
from simulator.problem import FP8, Problem

LARGEST_FP8 = 448.0
"""The largest float8_e4m3fn, which has no infinity."""


def of_kind(problem: Problem, kind: str, rng: np.random.Generator, *, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Normal q, k and v, changed to a kind of `Attention.kinds`."""
    p = problem
    drawn: dict[str, Any] = {"q": q, "k": k, "v": v}
    if kind == "large":
        products = q.astype(np.float64) @ np.repeat(k, p.queries_per_kv, axis=1).swapaxes(-1, -2)
        top = float(np.abs(products).max(initial=0.0)) * abs(p.scale)
        factor = math.sqrt(1e4 / top) if top else 1.0  # q and k each take half of it, so that 16 bits hold both
        drawn["q"], drawn["k"] = q * factor, k * factor
    elif kind == "lone":
        size = math.sqrt(1e6 / (p.head_dim * abs(p.scale))) if p.scale else 1.0
        drawn["q"], drawn["k"] = np.full_like(q, math.copysign(size, p.scale)), np.full_like(k, -size)
    elif kind in ("rising", "falling"):
        along = np.linspace(0, 30, p.len_kv) if kind == "rising" else np.linspace(30, 0, p.len_kv)
        q[..., 0] = 4.0
        k[..., 0] = along / (4.0 * p.scale) if p.scale else along
    elif kind == "ahead":
        ahead = slice(p.len_kv // 3, p.len_kv // 3 + 1)  # neither in the first tile nor in the last
        along = np.linspace(5, -5, p.len_kv)
        along[ahead], v[..., ahead, :] = 15, 0
        q[..., -1] = 8.0
        k[..., -1] = along / (8.0 * p.scale) if p.scale else along
    elif kind == "biased":
        drawn["v"] = v + 8.0
    elif kind == "outliers":
        return {name: outliers(x, rng) for name, x in drawn.items()}
    return drawn


def random_optional(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """The inputs beside q, k and v that a problem has.

    Sinks lie among the logits of a row's LSE. Slopes are as ALiBi's paper has them: powers of 2^(-8 / heads). A mask shows
    a random half of the pairs. Seed and offset of dropout are any, and a gradient of the LSE is normal.
    """
    p, drawn = problem, dict[str, Array]()
    if p.sinks:
        drawn["sinks"] = np.random.default_rng((seed, 2)).normal(3.0, 2.0, p.heads).astype(np.float32)
    if p.alibi:
        drawn["alibi_slopes"] = np.exp2(-8.0 * np.arange(1, p.heads + 1) / p.heads).astype(np.float32)
    if p.mask == "dense":
        drawn["mask"] = np.random.default_rng((seed, 3)).integers(0, 2, (p.len_q, p.len_kv), bool)
    elif p.mask == "bits":
        drawn["mask"] = np.random.default_rng((seed, 3)).integers(0, 256, p.bit_bytes, np.uint8)
    elif p.mask == "blocks":
        drawn["block_mask"] = block_lists(
            np.random.default_rng((seed, 3)).integers(0, 2, (p.row_blocks, p.block_list - 1), bool)
        )
    if p.dropout:
        drawn["rng_state"] = np.random.default_rng((seed, 4)).integers(-(2**63), 2**63, 2, np.int64, endpoint=False)
    if p.dlse:
        drawn["dlse"] = np.random.default_rng((seed, 5)).standard_normal((p.batch, p.heads, p.len_q), np.float32)
    return drawn


def outliers(x: Array, rng: np.random.Generator) -> Array:
    """x, with N(0, 100) added to one element in a thousand."""
    shape: tuple[int, ...] = x.shape
    few: Array = rng.random(shape) < 1e-3
    return x + 10.0 * rng.standard_normal(shape) * few


def to_storage(x: Array, dtype: str) -> Array:
    """x rounded to a storage dtype. For 8 bits, values beyond the largest become the largest."""
    return (np.clip(x, -LARGEST_FP8, LARGEST_FP8) if dtype == FP8 else x).astype(numpy_dtype(dtype))
