"""The backward pass of attention: dQ, dK and dV from dO, by recomputation from Q, K, V, the output and its LSE.

With S = scale Q K^T, P = softmax(S), D_i = sum_c dO_ic O_ic: dV = P^T dO, dP = dO V^T, dS = P * (dP - D),
dQ = scale dS K, dK = scale dS^T Q (FlashAttention, arXiv 2205.14135, section B.2). With dropout Z, dV = (P * Z)^T dO and
dP = (dO V^T) * Z. The rest stays: O has Z, so D has it too. A soft cap takes dS times its derivative, 1 - tanh^2.
A sink is a key whose value is 0, and whose P is exp(sink - LSE): dsink = -sum_i P_i D_i, over the rows of a batch and head, or of a
sequence and head of a ragged batch.
The LSE's derivative by a score is P. So where the loss depends on the LSE, its gradient is taken from D: D_i - dLSE_i.

The rule for its errors is per row, against float64 with the same output and LSE as the kernel's. u is that of the
forward's rule:

    |e(dV_j)| <= 1.2 u * sqrt(|dV_j|^2 + sum_i P_ij^2 |dO_i|^2)                 + (e^d - 1) * sum_i P_ij |dO_i|
    |e(dK_j)| <= 1.2 u * sqrt(|dK_j|^2 + scale^2 sum_i dS_ij^2 |q_i|^2)         + (e^d - 1) * scale * sum_i G_ij |q_i|
    |e(dsink)| <= sum_i (e^d_i - 1) P_i (|D_i| + |dLSE_i|), where d_i = 2e-6 * max(1, |sink|, |LSE_i|)
    |e(dQ_i)| <= 1.2 u * sqrt(|dQ_i|^2 + scale^2 sum_j dS_ij^2 |k_j|^2)         + (e^d - 1) * scale * sum_j G_ij |k_j|

Here G_ij = P_ij (|dP_ij| + |D_i| + |dLSE_i|), where dP and D are sums of absolute values. dS is the difference of the two: if they
cancel, their errors stay. With dropout, dV's line has P_ij Z_ij for P_ij. With a soft cap, d has the sizes of the forward's rule,
and G also the error of 1 - tanh^2. d = 2e-6 * max(1, max_j scale * sum_c |q_ic k_jc|)
is how far float32 scores and the natural LSE may be off, as in the forward's rule. P = exp(S - LSE) is off by a factor of
e^d then: that is 1 + d, unless logits reach 1e5. The factor 1.2 was calibrated on the CPU:
correct kernels reach 1.10 (dQ in float16), and the mildest wrong one reaches 1.33 (dS from the rounded P). Each rounded P and
dS, and each element of a gradient, may also lose half a subnormal step, 2^-25 in float16: in sums of dS times the scale, where
that is over 1. P below 2^-126 may vanish, as the GPU's exponential flushes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from simulator.dtypes import Array, numpy_dtype
from simulator.operations.attention import ATTENTION, SCORE, UNIT, check_optional
from simulator.operations.operation import Arrays, Operand, Operation
from simulator.operations.pairs import hidden_pairs
from simulator.operations.problems import FEWER, GQA, SEQUENCES, Problems, Sizes, shaped
from simulator.philox import kept_weights
from simulator.problem import FEATURES, Problem, Tile
from simulator.support import Support

ROUNDINGS = 1.2
"""By how many u a row may be off."""
FLUSHED = 2.0**-126
"""The least normal float32, and the least normal bfloat16."""
_GRADED: Problems = {
    "dlse causal": {**FEWER, "causal": True, "dlse": True},
    "sinks dlse causal": {**GQA, "causal": True, "dlse": True, "sinks": True},
    "sinks sequences causal": {**SEQUENCES["sequences causal"], "sinks": True},
    "soft-cap causal": {**GQA, "causal": True, "soft_cap": 5.0},
}
"""With gradients of the LSE and of sinks, where a backward pass knows them."""


class Backward(Operation):
    """The gradients of attention. `out` and `lse` are the forward pass's outputs, in the dtypes that it returns."""

    name = "backward"
    probes = "gradients"
    products = (3, 2)  # S, dK and dQ; dP and dV
    # what some kinds of the forward's test, a running maximum and P relative to it, the backward pass doesn't have
    kinds: ClassVar[Mapping[str, str]] = {
        kind: said for kind, said in ATTENTION.kinds.items() if kind not in ("rising", "falling", "ahead")
    }
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **Operation.shapes,
        "an odd head dim": {"heads": 2, "len_q": 40, "head_dim": 19},
        "a negative scale, causal": {"heads": 1, "len_q": 70, "scale": -0.2, "causal": True},
        "no queries": {"heads": 2, "len_q": 0, "len_kv": 40},
        "no keys": {"heads": 2, "len_q": 40, "len_kv": 0},
        "a query less than a tile, a key more": {"heads": 1, "len_q": 63, "len_kv": 129},
        "a query more than a tile, a key less": {"heads": 1, "len_q": 65, "len_kv": 127, "causal": True},
        "dropout, causal, GQA, batch 2": {
            "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 40, "len_kv": 70, "causal": True, "dropout": 0.25,
        },
        "sequences, causal, GQA": {
            "heads": 4, "kv_heads": 2, "lengths": [3, (71, 131), 2, (0, 9), (40, 0), (31, 12)], "causal": True,
        },
        "a soft cap, causal, GQA": {"heads": 4, "kv_heads": 2, "len_q": 70, "len_kv": 90, "soft_cap": 3.0, "causal": True},
        "a gradient of the LSE": {"heads": 2, "len_q": 70, "dlse": True},
        "a gradient of the LSE, causal, GQA, rows without keys": {
            "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 90, "len_kv": 60, "causal": True, "dlse": True,
        },
        "dropout, several tiles": {"heads": 1, "len_q": 150, "len_kv": 170, "dropout": 0.25},
        "a gradient of the LSE, dropout": {"heads": 2, "len_q": 50, "dropout": 0.25, "dlse": True},
        "sinks, causal, GQA, batch 2, rows without keys": {
            "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 90, "len_kv": 60, "causal": True, "sinks": True,
        },
        "sinks, a gradient of the LSE": {"heads": 3, "len_q": 300, "len_kv": 40, "sinks": True, "dlse": True},
        "sinks, sequences, causal, GQA": {
            "heads": 4, "kv_heads": 2, "lengths": [(300, 40), 3, (0, 9), (71, 131), (40, 0), 1], "causal": True, "sinks": True,
        },
        "a group's heads, few keys, causal, batch 2": {
            "batch": 2, "heads": 4, "kv_heads": 1, "len_q": 140, "len_kv": 150, "causal": True,
        },
        "a group's heads, few keys, sequences": {"heads": 8, "kv_heads": 2, "lengths": [3, (150, 140), (0, 9), (141, 40)]},
        "dK and dV unrounded, causal, GQA, an odd head dim": {
            "heads": 4, "kv_heads": 2, "len_q": 70, "len_kv": 150, "head_dim": 39, "causal": True, "partial": True,
        },
        "keys that no query sees": {"heads": 2, "kv_heads": 1, "len_q": 30, "len_kv": 200, "window": (10, 0)},
    }  # fmt: skip
    inputs = (
        *ATTENTION.required,
        Operand(name="out", axes=("batch", "heads", "len_q", "head_dim_v"), dtype="out"),
        Operand(name="lse", axes=("batch", "heads", "len_q"), dtype="float32"),
        Operand(name="dout", axes=("batch", "heads", "len_q", "head_dim_v"), dtype="out"),
        Operand(name="dlse", axes=("batch", "heads", "len_q"), dtype="float32", when=lambda p: p.dlse, default=0.0),
        *(ATTENTION.operand(name) for name in ("sinks", "rng_state", "offsets_q", "offsets_kv")),
    )
    outputs = (
        *(
            Operand(name=f"d{operand.name}", axes=operand.axes, dtype="storage" if operand.name == "q" else "sums")
            for operand in ATTENTION.required
        ),
        Operand(name="dsinks", axes=("batch", "heads"), dtype="float32", when=lambda p: p.sinks and not p.ragged),
        Operand(
            name="dsinks", axes=("sequences_of_lengths", "heads"), dtype="float32", when=lambda p: p.sinks and p.ragged
        ),
    )

    def matrix(self, support: Support, dtype: str, *, boxes: bool) -> dict[str, Sizes]:
        known = set(support.masks)
        return {
            **shaped(support, boxes),
            **(SEQUENCES if "lengths" in known else {}),
            **{label: sizes for label, sizes in _GRADED.items() if known.issuperset(set(sizes) & set(FEATURES))},
        }

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        return ATTENTION.problem(arrays, **masks).replace(dlse="dlse" in arrays)

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        super().check(problem, arrays, tile)
        check_optional(problem, arrays)

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """q, k and v of a kind, as attention draws them, normal dout and dlse. `out` and `lse` are its judge's, rounded."""
        drawn = super().draw(problem, seed, kind) | ATTENTION.draw(problem, seed, kind)
        forward = ATTENTION.judge(problem, drawn)
        drawn["out"] = forward["out"].astype(numpy_dtype(problem.out_dtype))
        drawn["lse"] = forward["lse"].astype(np.float32)
        return drawn

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        """The gradients dq, dk and dv in float64, for the given `out` and `lse`."""
        t = _Terms(problem, arrays)
        dq = t.p.scale * (t.ds @ t.k)
        dk = t.p.scale * (t.ds.swapaxes(-1, -2) @ t.q).sum(2)
        dv = (t.kept.swapaxes(-1, -2) @ t.dout).sum(2)
        found = {"dq": dq.reshape(arrays["q"].shape), "dk": dk, "dv": dv}
        return found | ({"dsinks": -of_sequences(problem, t.sunk * t.delta)} if problem.sinks else {})

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        """The bounds of the module's rule, for each row of dq, dk and dv."""
        t, p, u = _Terms(problem, arrays), problem, UNIT[problem.dtype]
        sizes = abs(p.scale) * (np.abs(t.q) @ np.abs(t.k).swapaxes(-1, -2))
        bent = np.zeros(())
        if p.soft_cap:  # it may be off by as much as tanh is, and as the score inside of it
            tanh = np.sqrt(1 - t.slope)
            bent = 2 * SCORE[p.dtype] * tanh * (tanh + t.slope * sizes / p.soft_cap)
            sizes = t.slope * sizes + p.soft_cap * tanh
        top = np.where(t.weights > 0, sizes, 0.0).max(-1, initial=0.0)
        d = _factor(SCORE[p.dtype] * np.maximum(1.0, top))[..., None]
        products = t.z * (np.abs(t.dout) @ np.abs(t.v).swapaxes(-1, -2))
        whole = products + (np.abs(t.dout) * np.abs(t.out)).sum(-1, keepdims=True) + np.abs(t.dlse)
        off = d * t.weights + FLUSHED
        gross = abs(p.scale) * (off + bent * t.weights) * whole
        step = {"float16": 2.0**-25}.get(p.dtype, FLUSHED)
        # of dS, from which a kernel may leave out 256 / kept and the scale until the end
        kept_step = step * 256 / p.kept * max(1.0, abs(p.scale))
        ds, norm = (
            abs(p.scale) * t.ds,
            {name: np.linalg.norm(getattr(t, name), axis=-1)[..., None] for name in ("q", "k", "dout")},
        )

        def bound(name: str, spread: Array, extra: Array) -> Array:
            return (
                ROUNDINGS * u * np.sqrt((truth[name] ** 2).sum(-1) + spread)
                + extra
                + step * truth[name].shape[-1] ** 0.5
            )

        def keys(terms: Array, others: Array) -> Array:
            """For each key, the sum over all queries of the KV head's group."""
            return (terms.swapaxes(-1, -2) @ others)[..., 0].sum(2)

        queries = p.batch, p.heads, p.len_q
        of_sinks: dict[str, Array] = {}
        if p.sinks:
            sizes_of = (np.abs(t.dout) * np.abs(t.out)).sum(-1) + np.abs(t.dlse[..., 0])
            logits = np.maximum(np.abs(t.sinks), np.abs(np.where(np.isneginf(t.lse), 0.0, t.lse)))
            off_of = _factor(SCORE[p.dtype] * np.maximum(1.0, np.where(t.sunk > 0, logits, 0.0)))
            terms = off_of * (t.sunk + FLUSHED)
            of_sinks = {"dsinks": of_sequences(p, terms * sizes_of.reshape(queries))}
        return of_sinks | {
            "dq": bound(
                "dq", (ds**2 @ norm["k"] ** 2).reshape(queries), ((gross + kept_step) @ norm["k"]).reshape(queries)
            ),
            "dk": bound("dk", keys(ds**2, norm["q"] ** 2), keys(gross + kept_step, norm["q"])),
            "dv": bound("dv", keys(t.kept**2, norm["dout"] ** 2), keys(t.z * (off + step), norm["dout"])),
        }

    def flops(self, problem: Problem) -> int:
        """2.5 times the forward's: it has five products of that size instead of two."""
        return ATTENTION.flops(problem) * 5 // 2


def _factor(d: Array) -> Array:
    """How far exp(x) is off where x is off by d, relative to it. Beyond e^100 no bound says anything."""
    return np.expm1(np.minimum(d, 100.0))


def of_sequences(problem: Problem, x: Array) -> Array:
    """The sums over the rows of x (batch, heads, len_q), for each batch and head; of a ragged batch for each sequence and head."""
    return np.concatenate([x[:, :, rows.start : rows.stop].sum(-1) for rows, _ in problem.spans])


class _Terms:
    """The terms of the formulas in float64, with the axes (batch, kv_heads, query_in_group, rows, columns)."""

    def __init__(self, problem: Problem, arrays: Arrays) -> None:
        self.p = p = problem
        lead = p.batch, p.kv_heads, p.queries_per_kv
        self.q, self.out, self.dout = (
            np.asarray(arrays[name], np.float64).reshape(*lead, p.len_q, dim)
            for name, dim in (("q", p.head_dim), ("out", p.head_dim_v), ("dout", p.head_dim_v))
        )
        self.k, self.v = (np.asarray(arrays[name], np.float64)[:, :, None] for name in ("k", "v"))
        lse = np.asarray(arrays["lse"], np.float64).reshape(*lead, p.len_q, 1)
        scores = p.scale * (self.q @ self.k.swapaxes(-1, -2))
        bent = np.tanh(scores / p.soft_cap) if p.soft_cap else np.zeros(())
        scores = p.soft_cap * bent if p.soft_cap else scores
        self.slope: Array = 1 - bent**2
        scores = np.where(hidden_pairs(p), -np.inf, scores)
        self.weights: Array = np.exp(scores - np.where(np.isneginf(lse), 0.0, lse))
        self.dlse: Array = np.asarray(arrays.get("dlse", np.zeros(lse.shape)), np.float64).reshape(lse.shape)
        delta = (self.dout * self.out).sum(-1, keepdims=True) - self.dlse
        queries = p.batch, p.heads, p.len_q
        self.delta: Array = delta.reshape(queries)
        self.lse: Array = lse.reshape(queries)
        self.sinks: Array = np.asarray(arrays.get("sinks", np.full(p.heads, -np.inf)), np.float64)[:, None]
        self.sunk: Array = np.exp(self.sinks - np.where(np.isneginf(self.lse), 0.0, self.lse))
        state = arrays.get("rng_state", np.zeros(2, np.int64))
        self.z = kept_weights(p, state) if p.dropout else np.ones(())
        self.kept: Array = self.weights * self.z
        self.ds: Array = self.slope * self.weights * ((self.dout @ self.v.swapaxes(-1, -2)) * self.z - delta)


BACKWARD = Backward()
