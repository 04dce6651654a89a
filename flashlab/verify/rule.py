"""The rule: how far a row of the output, and its LSE, may lie from the truth.

With e = out - ref in float64, p the softmax weights and u the rounding unit of the storage dtype (2^-11 float16, 2^-8
bfloat16, 2e-6 for float32, whose sums round as well), every row has to keep

    |e| <= 1.5 u * sqrt(|o|^2 + sum_j p_j^2 |v_j|^2)  +  d * sqrt(sum_j p_j^2 |v_j - o|^2)
    |LSE - ref| <= max(2e-5, d)

with d = 2e-6 * max(1, max_j scale * sum_i |q_i k_ij|) over the keys that the row sees.

The first term is what rounding `out` and P costs a correct kernel: up to 0.8 u where P is rounded before it is
normalised; up to 1.4 u where it is rounded after, for when a row's weights are equal they all err the same way
(`standard` with scale 0 and values that are nearly equal). The norm of a row is a mean: heads narrower than 16 can
exceed it by chance. The second term is what float32 scores may be off by, carried through the softmax; it matters to
float32, and to logits of 1e4, whose spacing in float32 is 1e-3. It takes the sum of |q k|, not |s|, because where large
products cancel their errors stay. A tolerance such as 1e-2 is blind to a dropped key of a long row.

With operands of 8 bits (float8_e4m3fn, the output bfloat16) u = 2^-4 is that of P, and weights below e4m3's smallest step
vanish: 2^-10 max_j p_j * sqrt(sum_j |v_j|^2) is allowed besides. Hopper's tensor cores cut the products of a score to about
14 bits: d = max_j scale * (2^-11 sum_i |q_i k_ij| + 2.5 * 2^-13 sqrt(head_dim) max_i |q_i| max_i |k_ij|). The LSE may be
that of the rounded weights, for `out` is the better for it: log(1 + u) - log(1 - f) more, where
f = min(2^-15 n max_j p_j, 1 - max_j p_j) is what may vanish of the n keys that the row sees; 2^-15 is half a step of a P that is
taken times 2^5. So wide a rule sees little; keys that are dropped, shown or counted twice are for the probes to find, and sums
that lose their small addends for `long_sums`.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import simulator
from simulator import Problem
from simulator.dtypes import Array, numpy_dtype
from simulator.problem import DTYPES, FP8

Align = Literal["bottom-right", "top-left"]

UNIT = {"float32": 2e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8, FP8: 2.0**-4}
"""u of each storage dtype."""
SCORE = dict.fromkeys(DTYPES, 2e-6) | {FP8: 2.0**-11}
"""Error of a score, relative to the sum of its products' sizes."""
CUT = 2.5 * 2.0**-13
"""What an 8-bit score loses besides: its products are cut at 2^-13 of the largest, with signs at random. 4 standard deviations
(0.58 of a cut each), relative to the square root of their number and to the largest."""
ROUNDINGS = 1.5
"""How much of u a row may be off by."""
LOST = 2.0**-10
"""Half of e4m3's smallest step: what rounding may take from a P of at most 1, relative to the row's largest."""
LOST_SUMS = 2.0**-15
"""The same of each addend of the sum of P, where P is taken times 2^5 first."""
SUMS = {"float32": 1e-4, "float16": 2.0**-9, "bfloat16": 2.0**-7, FP8: 2.0**-6}
"""How far the mean of any number of ones may be from 1: a few units of the output, P's roundings averaged out; of 8 bits
what a tensor core loses of the sum of a few hundred products."""
LSE_FLOOR = 2e-5
"""LSEs closer than this are equal."""

TEXT = (
    "per row: |out-ref| <= 1.5u*sqrt(|o|^2 + sum p^2|v|^2) + d*sqrt(sum p^2|v-o|^2), |LSE-ref| <= max(2e-5, d), "
    "u = 2^-11 float16, 2^-8 bfloat16, 2e-6 float32, 2^-4 float8, d = 2e-6*max(1, max scale*sum|q k|); more for float8"
)


@dataclass(frozen=True)
class Expected:
    """The truth in float64, and how far each row of `out` (2-norm) and each LSE may lie from it."""

    out: Array
    lse: Array
    out_tolerance: Array
    lse_tolerance: Array


@dataclass(frozen=True)
class Judgement:
    """The worst row: its error over what the rule allows (`inf` for NaN or inf where a number belongs)."""

    out_ratio: float
    lse_ratio: float
    message: str | None

    @property
    def passed(self) -> bool:
        return self.message is None

    @property
    def worst(self) -> float:
        return max(self.out_ratio, self.lse_ratio)


def bottom_right(problem: Problem, align: Align) -> Problem:
    """The problem, said with a bottom-right mask. Under a top-left one, query i sees the keys 0..i.

    >>> bottom_right(Problem(batch=1, heads=1, len_q=3, len_kv=5, head_dim=8, dtype="float16", causal=True), "top-left").len_kv
    3
    """
    if align == "bottom-right" or not problem.causal or problem.offset == 0:
        return problem
    if problem.offset > 0:  # the keys from len_q on are seen by nobody
        return problem.replace(len_kv=problem.len_q)
    return problem.replace(causal=False, window=(problem.left, -problem.offset))


def reference(
    problem: Problem, q: Array, k: Array, v: Array, *, align: Align = "bottom-right", loop: bool = False
) -> simulator.Reference:
    """`.out` and `.lse` in float64: dense, or (`loop`) by the oracle that shares no mask code with it."""
    p = bottom_right(problem, align)
    oracle = simulator.naive_loop if loop else simulator.naive
    keys = slice(p.kv_length)
    return oracle(q, k[:, :, keys], v[:, :, keys], causal=p.causal, window=p.window, scale=p.scale)


def expect(problem: Problem, q: Array, k: Array, v: Array, *, align: Align = "bottom-right") -> Expected:
    """What a correct kernel returns for these inputs, and how far it may stray."""
    ref = reference(problem, q, k, v, align=align)
    p = bottom_right(problem, align)
    grouped = (p.batch, p.num_kv_heads, p.queries_per_kv)
    queries = q.astype(np.float64).reshape(*grouped, p.len_q, p.head_dim)
    keys, values = (x[:, :, None, : p.kv_length].astype(np.float64) for x in (k, v))
    scores = p.softmax_scale * (queries @ keys.swapaxes(-1, -2))
    visible = np.zeros((p.len_q, p.kv_length), bool)
    for row in range(p.len_q):
        seen = p.visible_keys(row)
        visible[row, seen.start : seen.stop] = True
    sizes = abs(p.softmax_scale) * (np.abs(queries) @ np.abs(keys).swapaxes(-1, -2))
    if p.dtype == FP8:
        largest = np.abs(queries).max(-1, keepdims=True) * np.abs(keys).max(-1)[..., None, :]
        sizes = sizes + CUT / SCORE[FP8] * math.sqrt(p.head_dim) * abs(p.softmax_scale) * largest
    top = np.where(visible, sizes, 0.0).max(axis=-1, initial=0.0)
    lse: Array = ref.lse.reshape(*grouped, p.len_q, 1)
    weights = np.exp(np.where(visible, scores - np.where(np.isneginf(lse), 0.0, lse), -np.inf))
    out = ref.out.reshape(*grouped, p.len_q, p.value_dim)
    squares = weights**2
    own = (out**2).sum(-1)
    spread = (squares * (values**2).sum(-1)[..., None, :]).sum(-1)
    around = np.maximum(0.0, spread - 2 * ((squares @ values) * out).sum(-1) + squares.sum(-1) * own)
    smallest = float(_finfo(p.out_dtype).smallest_subnormal) * math.sqrt(p.value_dim)
    score = SCORE[p.dtype]
    tolerance = (
        ROUNDINGS * UNIT[p.dtype] * np.sqrt(own + spread) + score * np.maximum(1.0, top) * np.sqrt(around) + smallest
    )
    heaviest = weights.max(axis=-1, initial=0.0)
    if p.dtype == FP8:  # of a weight under P's smallest step nothing may be left
        tolerance += LOST * heaviest * np.sqrt((values**2).sum(-1) @ visible.T)
    lse_tolerance = np.maximum(LSE_FLOOR, score * top)
    if p.dtype == FP8:
        vanished = np.minimum(LOST_SUMS * heaviest * visible.sum(axis=-1), 1 - heaviest)
        lse_tolerance += np.log1p(UNIT[FP8]) - np.log1p(-vanished)
    shape = (p.batch, p.heads, p.len_q)
    return Expected(ref.out, ref.lse, tolerance.reshape(shape), lse_tolerance.reshape(shape))


def judge(expected: Expected, out: Array, lse: Array | None) -> Judgement:
    """`out` and `lse` (None: unchecked) against the rule."""
    if out.shape != expected.out.shape:
        return Judgement(math.inf, 0.0, f"out has the shape {out.shape}, expected {expected.out.shape}")
    if lse is not None and lse.shape != expected.lse.shape:
        return Judgement(0.0, math.inf, f"the LSE has the shape {lse.shape}, expected {expected.lse.shape}")
    exact = out.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        ratios = np.linalg.norm(exact - expected.out, axis=-1) / expected.out_tolerance
    ratios = np.where(np.isfinite(exact).all(-1), ratios, np.inf)
    out_ratio, where = _worst(ratios)
    message = f"out of (batch, head, row) {where} is {out_ratio:.3g} x the rule away" if out_ratio > 1 else None
    if math.isinf(out_ratio):
        message = f"out of (batch, head, row) {where} holds NaN or inf"
    lse_ratio = 0.0
    if lse is not None:
        with np.errstate(invalid="ignore"):
            off = np.abs(lse.astype(np.float64) - expected.lse)
        off = np.where(np.isneginf(lse) & np.isneginf(expected.lse), 0.0, np.where(np.isnan(off), np.inf, off))
        lse_ratio, where = _worst(off / expected.lse_tolerance)
        if lse_ratio > 1 and message is None:
            got, want = lse[where], expected.lse[where]
            message = (
                f"LSE of (batch, head, row) {where} is {got:.7g}, expected {want:.7g} ({lse_ratio:.3g} x the rule away)"
            )
    return Judgement(out_ratio, lse_ratio, message)


def _worst(ratios: Array) -> tuple[float, tuple[int, ...]]:
    if not ratios.size:
        return 0.0, ()
    where = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    return float(ratios[where]), tuple(int(n) for n in where)


def _finfo(dtype: str) -> Any:
    if dtype == "bfloat16":
        ml_dtypes: Any = importlib.import_module("ml_dtypes")  # only here: it costs import time
        return ml_dtypes.finfo(numpy_dtype(dtype))
    return np.finfo(numpy_dtype(dtype))
