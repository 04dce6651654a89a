"""Judges results by attention's rule (see `simulator.operations.attention`), for either alignment of causal masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import simulator
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.attention import ATTENTION
from simulator.problem import FP8

Align = Literal["bottom-right", "top-left"]

SUMS = {"float32": 1e-4, "float16": 2.0**-9, "bfloat16": 2.0**-7, FP8: 2.0**-6}
"""How far the mean of any number of ones may be from 1, by dtype. It is a few units in the last place of the output,
since the roundings of P average out. For 8 bits it is what a tensor core loses in the sum of a few hundred products."""
NOTHING = 1e-20
"""A row of zeros may be off by no more. So "off by so many times" would say nothing of it."""
TEXT = (
    "per row: |out-ref| <= 1.5u*sqrt(|o|^2 + sum p^2|v|^2) + d*sqrt(sum p^2|v-o|^2), |LSE-ref| <= max(2e-5, d), "
    "u = 2^-11 float16, 2^-8 bfloat16, 2e-6 float32, 2^-4 float8, d = 2e-6*max(1, max scale*sum|q k|); "
    "sum min(2^-25, p)|v| more for float16's weights below 2^-14 of the largest; more for float8"
)


@dataclass(frozen=True)
class Expected:
    """The truth in float64, and how far a result may be off: per row of `out` (2-norm) and per LSE."""

    out: Array
    lse: Array
    out_tolerance: Array
    lse_tolerance: Array


@dataclass(frozen=True)
class Judgement:
    """The worst row's error over what the rule allows: `inf` for a NaN or inf where a number belongs."""

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
    """The same problem with a bottom-right mask. Under a causal top-left mask, query i sees the keys 0 to i.

    >>> bottom_right(Problem(batch=1, heads=1, len_q=3, len_kv=5, head_dim=8, dtype="float16", causal=True), "top-left").len_kv
    3
    """
    if align == "bottom-right" or not problem.causal or problem.offset == 0:
        return problem
    if problem.offset > 0:  # no query sees the keys from len_q on
        return problem.replace(len_kv=problem.len_q)
    return problem.replace(causal=False, window=(problem.left, -problem.offset))


def reference(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    *,
    align: Align = "bottom-right",
    loop: bool = False,
    **optional: Any,
) -> simulator.Reference:
    """`.out` and `.lse` in float64: by the dense oracle, or with `loop` by the one that shares no mask code with it.

    `optional` are the sinks, ALiBi slopes and the mask of a problem that has them.
    """
    p = bottom_right(problem, align)
    oracle = simulator.naive_loop if loop else simulator.naive
    return oracle(**_of_keys(p.len_kv, q=q, k=k, v=v, **optional), **p.masks)


def _of_keys(keys: int, **arrays: Any) -> dict[str, Any]:
    """Operands by name, of which only the first keys are seen."""
    if keys == arrays["k"].shape[2]:
        return arrays
    part = {"k": np.s_[:, :, :keys], "v": np.s_[:, :, :keys], "mask": np.s_[:, :keys]}
    return {name: x[part[name]] if name in part else x for name, x in arrays.items()}


def expect(
    problem: Problem, q: Array, k: Array, v: Array, *, align: Align = "bottom-right", **optional: Any
) -> Expected:
    """What a correct kernel returns for these inputs, and how far it may be off; arrays as for `reference`."""
    ref = reference(problem, q, k, v, align=align, **optional)
    p = bottom_right(problem, align)
    bounds = ATTENTION.bounds(p, _of_keys(p.len_kv, q=q, k=k, v=v, **optional), ref._asdict())
    return Expected(ref.out, ref.lse, bounds["out"], bounds["lse"])


def judge(expected: Expected, out: Array, lse: Array | None) -> Judgement:
    """Judge `out` and `lse` (None: unchecked) by the rule."""
    if out.shape != expected.out.shape:
        return Judgement(math.inf, 0.0, f"out has the shape {out.shape}, expected {expected.out.shape}")
    if lse is not None and lse.shape != expected.lse.shape:
        return Judgement(0.0, math.inf, f"the LSE has the shape {lse.shape}, expected {expected.lse.shape}")
    exact = out.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        ratios = np.linalg.norm(exact - expected.out, axis=-1) / expected.out_tolerance
    ratios = np.where(np.isfinite(exact).all(-1), ratios, np.inf)
    out_ratio, where = _worst(ratios)
    message = (
        f"out at (batch, head, row) {where} is off by {out_ratio:.3g} x what the rule allows" if out_ratio > 1 else None
    )
    if message and not expected.out[where].any() and expected.out_tolerance[where] <= NOTHING:
        message = (
            f"out at (batch, head, row) {where} must be 0, and has {np.abs(exact[where]).max():.3g}: it sees no key"
        )
    if math.isinf(out_ratio):
        message = f"out at (batch, head, row) {where} holds NaN or inf"
    lse_ratio = 0.0
    if lse is not None:
        with np.errstate(invalid="ignore"):
            off = np.abs(lse.astype(np.float64) - expected.lse)
        off = np.where(np.isneginf(lse) & np.isneginf(expected.lse), 0.0, np.where(np.isnan(off), np.inf, off))
        lse_ratio, where = _worst(off / expected.lse_tolerance)
        if lse_ratio > 1 and message is None:
            got, want = lse[where], expected.lse[where]
            message = f"LSE at (batch, head, row) {where} is {got:.7g}, expected {want:.7g}"
            message += ": it sees no key" if np.isneginf(want) else f": off by {lse_ratio:.3g} x what the rule allows"
    return Judgement(out_ratio, lse_ratio, message)


def _worst(ratios: Array) -> tuple[float, tuple[int, ...]]:
    if not ratios.size:
        return 0.0, ()
    where = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    return float(ratios[where]), tuple(int(n) for n in where)
