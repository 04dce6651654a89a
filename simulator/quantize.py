"""8-bit operands: quantisation to e4m3 with a scale per tile, and a rotation that spreads outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.algorithms.flash3_fp8 import TILE
from simulator.dtypes import Array, as_numpy, numpy_dtype
from simulator.errors import Said, UsageError
from simulator.operations.attention import problem_of
from simulator.problem import FP8
from simulator.simulate import Scales

__all__ = ["Quantized", "quantize", "rotation"]

LARGEST = 448.0


@dataclass(frozen=True)
class Quantized:
    """What `flash3_fp8` takes: q (batch, heads, len_q, head_dim), k and v (batch, kv_heads, len_kv, head_dim) in e4m3.

    `scales` has one scale for each of their tiles.
    """

    q: Array
    k: Array
    v: Array
    scales: Scales

    def values(self) -> tuple[Array, Array, Array]:
        """The Q, K and V that the operands stand for, float64.

        >>> import flashlab as fl, numpy as np
        >>> p = fl.Problem(batch=1, heads=1, len_q=300, head_dim=64, dtype="float32")
        >>> q, k, v = fl.random_inputs(p)
        >>> bool((np.abs(quantize(q, k, v).values()[1] - k) <= np.abs(k) / 16 + 0.002).all())
        True
        """
        q, k, v = (
            x.astype(np.float64) * np.repeat(scale, rows, axis=-1)[:, :, : x.shape[2], None]
            for x, scale, rows in zip(
                (self.q, self.k, self.v), self.scales, (TILE.rows, TILE.cols, TILE.cols), strict=True
            )
        )
        return q, k, v


def rotation(head_dim: int, seed: int = 0) -> Array:
    """An orthogonal matrix, (head_dim, head_dim) float64, that spreads an outlier over all columns.

    It is a diagonal of random signs times a Hadamard matrix. Raises `UsageError` if `head_dim` isn't a power of two.

    >>> m = rotation(64)
    >>> bool(np.allclose(m @ m.T, np.eye(64)))
    True
    """
    if head_dim & (head_dim - 1):
        raise UsageError("head_dim", head_dim, "a power of two, for a Hadamard matrix")
    hadamard = np.ones((1, 1))
    while hadamard.shape[0] < head_dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], head_dim)
    return signs[:, None] * hadamard / math.sqrt(head_dim)


def quantize(q: Any, k: Any, v: Any, *, blocks: bool = True, rotate: bool = False) -> Quantized:
    """Quantise q, k, v (batch, heads, length, head_dim), of NumPy, CuPy, torch or JAX, to e4m3. The results are NumPy's.

    With `blocks`, each tile of each operand has a scale of its own, else each operand has one. With `rotate`, Q and K
    are multiplied by the same rotation first, which leaves Q Kᵀ as it is. A scale is at least float32's smallest normal
    number: values far below that become 0. Raises `UsageError` for shapes that pose no problem, for NaN and inf, and for
    values that the rotation takes out of float32.
    """
    q, k, v = (np.asarray(as_numpy(name, x), np.float32) for name, x in zip("qkv", (q, k, v), strict=True))
    problem_of(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not np.isfinite(x).all():
            raise UsageError(name, "NaN or inf", "finite values")
    if rotate:
        turn = rotation(q.shape[-1]).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            q, k = q @ turn, k @ turn
        for name, x in (("q", q), ("k", k)):
            if not np.isfinite(x).all():
                raise UsageError(name, Said("values near float32's largest"), "values whose rotation float32 holds")
    (q8, of_q), (k8, of_k), (v8, of_v) = (
        _quantized(x, rows, blocks) for x, rows in ((q, TILE.rows), (k, TILE.cols), (v, TILE.cols))
    )
    return Quantized(q8, k8, v8, Scales(of_q, of_k, of_v))


def _quantized(x: Array, rows: int, blocks: bool) -> tuple[Array, Array]:
    batch, heads, length, dim = x.shape
    tiles = -(-length // rows)
    whole = np.zeros((batch, heads, tiles * rows, dim), np.float32)
    whole[:, :, :length] = x
    cut = whole.reshape(batch, heads, tiles, rows, dim)
    top = np.abs(cut).max(axis=(-1, -2), initial=0.0) if blocks else np.full(cut.shape[:3], np.abs(x).max(initial=0.0))
    # a subnormal scale has few bits, or is 0 where a GPU takes subnormals for it
    scale = (np.maximum(np.where(top > 0, top, 1.0) / LARGEST, np.finfo(np.float32).tiny)).astype(np.float32)
    rounded = (cut / scale[..., None, None]).astype(numpy_dtype(FP8)).reshape(whole.shape)
    return np.ascontiguousarray(rounded[:, :, :length]), scale
