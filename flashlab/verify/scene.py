"""A case as the search for a mistake sees it: attention on it in float64, from the weights of each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlab.verify.bench import Bench, visible
from flashlab.verify.cases import Case
from flashlab.verify.rule import Align, Expected
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.attention import ROUNDINGS, SCORE, UNIT

__all__ = ["Scene", "Suspect", "between", "shown", "within_sequences"]


@dataclass(frozen=True)
class Scene:
    """A case, and attention on it in float64: all that a mistake is made of. Scores are (batch, heads, len_q, len_kv)."""

    problem: Problem
    align: Align
    arrays: dict[str, Array]
    seen: Array
    truth: Expected

    @classmethod
    def of(cls, bench: Bench, case: Case) -> Scene:
        p, arrays = case.problem, case.arrays()
        exact = {name: x.astype(np.float64) for name, x in arrays.items()}
        truth = bench.expect(p, arrays)
        if p.lengths is not None:
            return cls(p, bench.target.align, exact, within_sequences(p, lambda i, j: between(p, i, j)), truth)
        return cls(p, bench.target.align, exact, visible(p, bench.target) & shown(exact), truth)

    def heads(self, order: Array | None = None) -> tuple[Array, Array]:
        """K and V with one head per query head; `order` says which."""
        if order is None:
            order = np.arange(self.problem.heads) // self.problem.queries_per_kv
        return self.arrays["k"][:, order], self.arrays["v"][:, order]

    @property
    def sinks(self) -> Array:
        """The sink of each head, or none."""
        return self.arrays.get("sinks", np.full(self.problem.heads, -np.inf))

    @property
    def slopes(self) -> Array:
        """The ALiBi slope of each head, or 0."""
        return self.arrays.get("alibi_slopes", np.zeros(self.problem.heads))

    def scores(self, order: Array | None = None, scale: float | None = None) -> Array:
        """The scores before any bias: scaled and, if the problem has a cap, bounded."""
        s = (self.problem.scale if scale is None else scale) * self.products(order)
        return s if self.problem.soft_cap is None else self.problem.soft_cap * np.tanh(s / self.problem.soft_cap)

    def products(self, order: Array | None = None) -> Array:
        """q k^T."""
        return self.arrays["q"] @ self.heads(order)[0].swapaxes(-1, -2)

    def distances(self, offset: int | None = None) -> Array:
        """How far a key lies behind the one that its query is aligned with: (len_q, len_kv). Later keys are below 0."""
        p = self.problem
        rows = np.arange(p.len_q)[:, None] + (p.offset if offset is None else offset)
        return rows - np.arange(p.len_kv)

    def logits(self, order: Array | None = None, scale: float | None = None) -> Array:
        """The scores and ALiBi's bias."""
        return self.scores(order, scale) - self.slopes[:, None, None] * np.abs(self.distances())

    def softmax(self, s: Array, order: Array | None = None, extra: int = 0, sinks: Array | None = None) -> Expected:
        """What softmax(s) V comes to. Beside the keys, `extra` ones have a score and a value of 0, and `sinks` join."""
        sink = (self.sinks if sinks is None else sinks)[:, None, None]
        top: Array = np.maximum(s.max(-1, keepdims=True, initial=0.0 if extra else -np.inf), sink)
        base = np.where(np.isneginf(top), 0.0, top)
        e = np.exp(s - base)
        total = e.sum(-1, keepdims=True) + (extra * np.exp(-top) if extra else 0.0) + np.exp(sink - base)
        with np.errstate(divide="ignore"):
            return self.weighted(e / np.where(total == 0, 1.0, total), (top + np.log(total))[..., 0], order)

    def weighted(self, weights: Array, lse: Array, order: Array | None = None) -> Expected:
        """What these weights of the keys come to, with the rule's tolerances."""
        p, (k, v) = self.problem, self.heads(order)
        sizes = abs(p.scale) * (np.abs(self.arrays["q"]) @ np.abs(k).swapaxes(-1, -2))
        d = SCORE[p.dtype] * np.maximum(1.0, np.where(self.seen, sizes, 0.0).max(-1, initial=0.0))
        out = weights @ v
        spread = (weights**2) @ (v**2).sum(-1)[..., None]
        tolerance = (ROUNDINGS * UNIT[p.dtype] + d) * np.sqrt((out**2).sum(-1) + spread[..., 0]) + 1e-30
        return Expected(out, lse, tolerance, np.maximum(d, self.truth.lse_tolerance))

    def masked(self, s: Array, seen: Array | None = None) -> Array:
        return np.where(self.seen if seen is None else seen, s, -np.inf)


def shown(arrays: dict[str, Array]) -> Any:
    """The pairs that a dense mask shows, or all."""
    return arrays["mask"] != 0 if "mask" in arrays else True


def between(p: Problem, i: Array, j: Array) -> Array:
    """Is key j within the masks of the query that is aligned with key i?"""
    wide = 1 << 40
    left, right = (wide if side is None else side for side in (p.left, p.right))
    return (j >= i - left) & (j <= i + right)


def within_sequences(
    p: Problem,
    sees: Callable[[Array, Array], Array],
    aligned: Callable[[int], int] = lambda offset: offset,
    step: int = 0,
) -> Array:
    """Which keys queries see, booleans (len_q, len_kv), where each sequence sees its own, or those of the one `step` later. `sees`
    is told the key that a query is aligned with, and the key."""
    found = np.zeros((p.len_q, p.len_kv), bool)
    for n, (rows, _) in enumerate(p.spans):
        keys = p.spans[(n + step) % len(p.spans)][1]
        i = np.arange(len(rows))[:, None] + aligned(len(keys) - len(rows))
        found[rows.start : rows.stop, keys.start : keys.stop] = sees(i, np.arange(len(keys)))
    return found


Suspect = tuple[str, Expected]
