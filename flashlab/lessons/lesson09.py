"""Lesson 09, eight bits: its exercises and predictions."""

from __future__ import annotations

from random import Random

import ml_dtypes
import numpy as np

from flashlab.lessons.exercise import APART, FAR, Budget, Case, Exercise, Level, Truth
from flashlab.lessons.lesson01 import scores_budget, scores_cases
from flashlab.lessons.prediction import Prediction
from flashlab.lessons.rules import own_sums
from simulator import Problem, Tile
from simulator.config import padded
from simulator.dtypes import Array
from simulator.names import DType
from simulator.problem import row_bytes

LARGEST, LARGEST_P, KEYS = 448.0, 32.0, 64
"""Of e4m3; what P is multiplied by; and how many keys share a scale in exercise 09.3."""
NEAR = 3e-5
"""How far, relative, float32 may take a number from where it should be before it is rounded to e4m3."""
UNIT = {"float32": 1e-5, "float16": 2.0**-10}
"""What an element may be off by beside that, relative."""


def eight(x: Array) -> tuple[Array, Array]:
    """x in e4m3 as float64, and how far a number may be off that lies so near to the middle of two that either is right."""

    def rounded(x: Array) -> Array:
        return x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    return rounded(x), np.abs(rounded(x * (1 + NEAR)) - rounded(x * (1 - NEAR)))


def scale_of(x: Array, axes: int | tuple[int, ...]) -> Array:
    """What x is divided by, so that its largest number along the axes becomes 448; where all are 0, 1 / 448."""
    top = np.abs(x).max(axes, keepdims=True)
    return np.where(top > 0, top, 1.0) / LARGEST


# -- exercises ----------------------------------------------------------------------------------------------------


def _rows_cases(draw: Random) -> list[Case]:
    """Numbers that e4m3 holds, far larger ones, far smaller ones beside some that are 0, and none but 0."""
    first = Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float32")

    def other(dtype: DType) -> Problem:
        return first.replace(len_q=draw.randint(65, 200), head_dim=draw.choice((24, 40, 72)), dtype=dtype)

    spreads = (1.0, 3000.0, 0.0001, 0.0)
    return [
        Case(
            p,
            Tile(64, 64) if p is first else Tile(draw.choice((16, 32)), 64),
            draw.getrandbits(32),
            spread,
            blanks=spread < 1,
        )
        for p, spread in zip((first, other("float32"), other("float32"), other("float16")), spreads, strict=True)
    ]


def _in_eight_bits(problem: Problem, q: Array, k: Array, v: Array) -> Truth:
    x = q.astype(np.float64)
    scale = scale_of(x, -1)
    near, slack = eight(x / scale)
    return Truth(near * scale, UNIT[problem.dtype] * np.abs(near * scale) + slack * scale)


def _once(problem: Problem, tile: Tile) -> Budget:
    q = problem.batch * problem.heads * problem.len_q * row_bytes(problem.head_dim, problem.itemsize)
    return Budget({"q": (q, 0), "out": (0, q)})


def _scores(problem: Problem, q: Array, k: Array, v: Array) -> Truth:
    a, b = q.astype(np.float64), k.astype(np.float64).swapaxes(-1, -2)
    of_a, of_b = scale_of(a, -1), scale_of(b, -2)
    (a8, slack_a), (b8, slack_b) = eight(a / of_a), eight(b / of_b)
    loose = slack_a @ np.abs(b8) + np.abs(a8) @ slack_b + UNIT["float32"] * np.abs(a8) @ np.abs(b8)
    scale = problem.scale * of_a * of_b
    return Truth(a8 @ b8 * scale, loose * scale)


LEVELS: tuple[Level, ...] = ((0, 0), (-40, -40), (40, -40), (-40, 40))
"""What is added to the scores: to those of the first key, and to those of the last."""


def _levels_cases(draw: Random) -> list[Case]:
    """Scores q `(rows, keys)` and values v `(keys, dim)`: head_dim = len_kv, in several tiles of keys.

    In the last one they are far below 0, rows apart, and the values are small.
    """

    def shape(rows: int, keys: int, dim: int) -> Problem:
        return Problem(
            batch=1, heads=2, len_q=rows, len_kv=keys, head_dim=keys, head_dim_v=dim, dtype="float32", causal=False
        )

    first = shape(64, 256, 64)
    others = [shape(draw.randint(17, 90), draw.randint(130, 300), draw.choice((24, 40, 64))) for _ in LEVELS[1:]]
    cases = [
        Case(p, Tile(64 if p is first else draw.choice((16, 32)), KEYS), draw.getrandbits(32), 3.0, shift)
        for p, shift in zip((first, *others), LEVELS, strict=True)
    ]
    below = (FAR[1], FAR[1])
    return [
        *cases,
        Case(shape(40, 150, 24), Tile(32, KEYS), draw.getrandbits(32), 0.01, below, apart=APART, blanks=True),
    ]


def _two_levels(problem: Problem, q: Array, k: Array, v: Array) -> Truth:
    """The loop over tiles of keys in float64; `loose` is what acc may be off by, and `off` what l may be."""
    x, values = q.astype(np.float64), v.astype(np.float64)
    rows = (*x.shape[:-1], 1)
    top, total, off = np.full(rows, -np.inf), np.zeros(rows), np.zeros(rows)
    acc, loose = (np.zeros((*x.shape[:-1], values.shape[-1])) for _ in range(2))
    for start in range(0, problem.len_kv, KEYS):
        s, cut = x[..., start : start + KEYS], values[..., start : start + KEYS, :]
        new = np.maximum(top, s.max(-1, keepdims=True))
        alpha, top = np.exp(top - new), new
        p, slack_p = eight(np.exp(s - new) * LARGEST_P)
        scale = scale_of(cut, (-1, -2))
        near, slack_v = eight(cut / scale)
        total, off = total * alpha + p.sum(-1, keepdims=True), off * alpha + slack_p.sum(-1, keepdims=True)
        acc = acc * alpha + p @ near * scale
        terms = slack_p @ np.abs(near) + p @ slack_v + NEAR * p @ np.abs(near)
        loose = loose * alpha + terms * scale
    out = acc / total
    return Truth(out, (loose + np.abs(out) * off) / total + NEAR * np.abs(out))


def _levels_budget(problem: Problem, tile: Tile) -> Budget:
    p = problem
    heads, rows, keys = p.batch * p.heads, p.row_tiles(tile), p.key_tiles(tile)
    q, v, out = (
        p.len_q * row_bytes(p.head_dim, 4),
        p.len_kv * row_bytes(p.head_dim_v, 4),
        p.len_q * row_bytes(p.head_dim_v, 4),
    )
    flops = 2 * heads * rows * keys * padded(tile.rows) * KEYS * padded(p.head_dim_v)
    moved = {"q": (heads * q, 0), "v": (heads * rows * v, 0), "out": (0, heads * out)}
    return Budget(moved, matmul=flops, exp=heads * p.len_q * p.len_kv)


EXERCISES = (
    Exercise(
        name="09.1",
        title="Eight bits and a scale",
        task="Round each row of q to e4m3, with a scale of its own, and write down what the eight bits stand for. The scale "
        "takes the row's largest number, whatever its sign, to 448. The check has rows of numbers near 10,000, near 0.0001, "
        "and rows of zeros.",
        cases=_rows_cases,
        truth=_in_eight_bits,
        budget=_once,
        hints=(
            "Divide by the scale before rounding, multiply by it afterwards.",
            "scale = largest absolute value / 448. In a row of zeros the largest is 0: `.nonzero()` makes it 1.",
            '`(x / scale).round("float8_e4m3fn")` is what the tensor cores would get.',
        ),
        slips={"q": "Each row is read once: the maximum and the quotient come from the same registers."},
        afterwards="Next: what a product of two such rows needs.",
    ),
    Exercise(
        name="09.2",
        title="Scores from eight bits",
        task="Multiply in e4m3. Each row of q has a scale, and each row of k. Both are the same for all terms of a score, so "
        "they can wait until the sum is done: S = scale · (q8 · k8ᵀ) · of_q · of_k. (`out` has the shape of S.)",
        cases=scores_cases,
        truth=_scores,
        budget=scores_budget,
        hints=(
            "`(q_i / of_q).round(e4m3)` is q8; k_j takes the same way, and then `block.put(keys, …)`.",
            "of_q has one value for each row of S, and works as it is. of_k has one for each *column* of S: `of_k.T`.",
        ),
        slips={
            "q": "Every block fetches the tile of q of its row of tiles, once.",
            "k": "Every block fetches the tile of k of its column of tiles, once.",
        },
        out_tile=lambda case: (case.tile.rows, case.tile.cols),
        afterwards="Next: P V, where the sum runs over keys. Why can a row of v have no scale of its own there?",
    ),
    Exercise(
        name="09.3",
        title="Two levels of sums",
        task="q holds scores, v values: `out = softmax(q) v` in e4m3, 64 keys at a time. P is multiplied by 32 and rounded. A "
        "tile of v has one scale, and the next tile has another: so each tile's product is a sum of its own, which joins acc "
        "in float32. ℓ adds up the P that is multiplied, after rounding.",
        cases=_levels_cases,
        truth=_two_levels,
        budget=_levels_budget,
        hints=(
            "Round first, then add up: `l_i` is the sum of the rounded p. The factor 32 is in both, and cancels.",
            "`.max()` has one value for each row; `.T.max()` then has one for the whole tile.",
            "`block.matmul(p, values, split=…)` without `acc=`; then `acc * alpha + products * of_v`.",
        ),
        slips={
            "q": "Each tile of scores is fetched once: the maximum is found on the way.",
            "v": "Each block fetches each tile of v once.",
        },
        rules=(own_sums,),
        afterwards="Next: compare with the steps `softmax` and `output` of flash3_fp8.cu, where T is your `products`.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------


def _numbers() -> Array:
    """The finite numbers above 0 that e4m3 has."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.sort(every[np.isfinite(every) & (every > 0)])


STOPS = 2.0**14
"""Where a sum of ones stops, of which 14 bits are kept: the last one is then worth 2."""
FLOPS, EXPONENTIALS = 8192, 16
"""A cycle and SM, in FP8 (twice those of lesson 08) and on the units for exponentials."""


PREDICTIONS = (
    Prediction(
        name="09.1",
        truth=lambda: {"largest": float(_numbers()[-1]), "from_256": int((_numbers() >= 256).sum())},
        slips=lambda: {
            "largest": {
                "with the top exponent kept for infinities, as in IEEE's formats: but e4m3 has none": 240.0,
                "1.875 · 2⁸: that pattern is NaN": 480.0,
                "that is e5m2": 57344.0,
            },
            "from_256": {
                "the eighth of them, 480, is NaN": 8,
                "all whole numbers: but they lie 32 apart": 193,
                "only the powers of two": 1,
            },
        },
        because="From 256 on the steps are 32: 256, 288, … 448, seven numbers. The eighth, 480, would have the pattern of all "
        "ones, which is NaN.",
    ),
    Prediction(
        name="09.2",
        truth=lambda: {"sum": STOPS},
        slips=lambda: {
            "sum": {
                "all of them: but only 14 bits are kept": 65536.0,
                "13 bits: the leading one counts, too": 2.0**13,
                "15 bits": 2.0**15,
                "float32 would stop there": 2.0**24,
            }
        },
        because="14 bits reach from 16,384 down to 2. A one added to 16,384 lies below the last bit that is kept, and is cut off. "
        "From there on the sum stands still.",
    ),
    Prediction(
        name="09.3",
        truth=lambda: {
            "products": 2 * 2 * 64 * 128 * 128 / FLOPS,
            "exponentials": 64 * 128 / EXPONENTIALS,
        },
        slips=lambda: {
            "products": {
                "as in 16 bits": 2 * 2 * 64 * 128 * 128 / (FLOPS / 2),
                "one product": 2 * 64 * 128 * 128 / FLOPS,
            },
            "exponentials": {
                "twice as fast as well: but P is still computed in float32": 64 * 128 / (2 * EXPONENTIALS)
            },
        },
        because="Twice the rate halves the products: 512 cycles. The exponentials are computed in float32, as before: 512. So at "
        "d = 128 they bind as much as the products do.",
    ),
)
