"""Lesson 02, softmax: its exercises and predictions."""

from __future__ import annotations

import math
from random import Random

import numpy as np

from flashlab.lessons.exercise import APART, FAR, Budget, Case, Exercise, Level, Truth, elementwise
from flashlab.lessons.lesson00 import UNIT, tiles
from flashlab.lessons.prediction import Prediction
from flashlab.lessons.rules import divides_at_the_end
from simulator import Problem, Tile, count
from simulator.config import padded
from simulator.dtypes import Array
from simulator.names import DType
from simulator.problem import row_bytes

SPREAD = 60.0
"""Scores so large that exp overflows, in float16 and float32, unless the maximum is subtracted."""
SHIFTS: tuple[Level, ...] = ((0, 0), (-600, -600), (600, -600), (0, 0))
"""What is added to the scores of the cases: far below 0, and from far above it to far below."""
LONG, TOO_LONG = Tile(64, 64), (1060, 1300)
"""A tile, and how many scores its rows have where they would fill more than an SM's 256 KB of registers."""


def _rows_cases(draw: Random) -> list[Case]:
    """Rows of q; the maxima come late in some, early in others. The last ones are too long for a block's registers, and `FAR`."""
    first = Problem(batch=1, heads=1, len_q=64, len_kv=0, head_dim=512, head_dim_v=512, dtype="float32")
    others: list[Problem] = []
    for _ in range(3):
        length = draw.randint(130, 400)
        others.append(first.replace(heads=2, len_q=draw.randint(17, 90), head_dim=length, head_dim_v=length))
    length = draw.randint(*TOO_LONG)
    long = first.replace(len_q=LONG.rows, head_dim=length, head_dim_v=length)
    return [
        *(
            Case(p, Tile(16, 128) if p is first else tiles(draw), draw.getrandbits(32), SPREAD, shift)
            for p, shift in zip((first, *others), SHIFTS, strict=True)
        ),
        Case(long, LONG, draw.getrandbits(32), SPREAD, FAR, apart=APART),
    ]


def _mean_cases(draw: Random) -> list[Case]:
    """Scores q `(rows, keys)` and values v `(keys, dim)`: head_dim = len_kv. The last rows are as in `_rows_cases`."""

    def shape(rows: int, keys: int, dim: int, dtype: DType) -> Problem:
        return Problem(batch=1, heads=2, len_q=rows, len_kv=keys, head_dim=keys, head_dim_v=dim, dtype=dtype)

    first = shape(64, 256, 64, "float32")
    others = [
        shape(draw.randint(17, 90), draw.randint(70, 300), draw.choice((24, 40, 64)), dtype)
        for dtype in ("float32", "float16", "float16")
    ]
    long = shape(LONG.rows, draw.randint(*TOO_LONG), 24, "float32").replace(heads=1)
    return [
        *(
            Case(p, Tile(64, 64) if p is first else tiles(draw), draw.getrandbits(32), 3.0, shift)
            for p, shift in zip((first, *others), SHIFTS, strict=True)
        ),
        Case(long, LONG, draw.getrandbits(32), 3.0, FAR, apart=APART),
    ]


def softmax(x: Array) -> Array:
    """Each row's softmax in float64."""
    x = x.astype(np.float64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _mean(problem: Problem, q: Array, k: Array, v: Array) -> Truth:
    """softmax(q) v; each weight may be rounded, so a row is off by as much as its terms are large."""
    weights, values = softmax(q), v.astype(np.float64)
    out = weights @ values
    terms = np.sqrt((weights**2) @ (values**2)) + np.abs(out)
    return Truth(out, UNIT[problem.dtype] * terms + 1e-6 * weights @ np.abs(values))


def _row_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of q, and of out."""
    heads = problem.batch * problem.heads * problem.len_q
    return heads * row_bytes(problem.head_dim, problem.itemsize), heads * row_bytes(
        problem.head_dim_v, problem.itemsize
    )


def _passes(reads: int, problem: Problem, exponentials: int) -> Budget:
    q, out = _row_bytes(problem)
    elements = problem.batch * problem.heads * problem.len_q * problem.head_dim
    return Budget({"q": (reads * q, 0), "out": (0, out)}, exp=exponentials * elements)


def _mean_budget(problem: Problem, tile: Tile) -> Budget:
    p = problem
    q, out = _row_bytes(p)
    heads, rows = p.batch * p.heads, p.row_tiles(tile)
    v = heads * rows * p.len_kv * row_bytes(p.head_dim_v, p.itemsize)
    pairs = heads * rows * p.key_tiles(tile)
    flops = 2 * pairs * padded(tile.rows) * padded(tile.cols) * padded(p.head_dim_v)
    return Budget({"q": (q, 0), "v": (v, 0), "out": (0, out)}, matmul=flops, exp=heads * p.len_q * p.len_kv)


def _column_tiles(case: Case) -> tuple[int, int]:
    return case.tile.rows, case.tile.cols


EXERCISES = (
    Exercise(
        name="02.1",
        title="Safe softmax",
        task="The rows of q are longer than a block wants to hold, so it takes them `tile.cols` columns at a time, in three "
        "passes: the maximum, the sum of the exponentials, the quotient. The check's numbers go up to a few hundred, and down to "
        "−13,000.",
        cases=_rows_cases,
        truth=lambda p, q, k, v: elementwise(softmax(q), 2e-5),
        budget=lambda p, tile: _passes(3, p, 2),
        hints=(
            "`block.maximum(a, b)` is the larger, element by element; `x.max()` the maximum of each row.",
            "The sum's exponent is `x - top`, which is never above 0.",
            "`block.store(out, registers, block.i, tile.rows, c, tile.cols)` writes column tile c.",
        ),
        slips={"q": "Three passes read q three times; nothing else is read."},
        out_tile=_column_tiles,
        afterwards="Next: three reads and a write for every element. 02.2 does with two reads.",
    ),
    Exercise(
        name="02.2",
        title="Online softmax",
        task="Find maximum and sum in one pass: whenever the maximum rises, what was summed up so far is multiplied by "
        "exp(old maximum − new maximum). Two reads and one write an element.",
        cases=_rows_cases,
        truth=lambda p, q, k, v: elementwise(softmax(q), 2e-5),
        budget=lambda p, tile: _passes(2, p, 2),
        hints=(
            "Three lines: the new maximum from `top` and `x.max()`; the new total; then `top = new_top`.",
            "The old total was a sum of exp(x − top). To make it one of exp(x − new_top), multiply by exp(top − new_top).",
            "At the start top is −inf and exp(−inf) = 0, so the first tile needs no special case.",
        ),
        slips={"q": "Two passes read q twice."},
        out_tile=_column_tiles,
        afterwards="Next: the second pass is there only because the softmax itself has to be written. Attention needs its "
        "product with V alone: 02.3.",
    ),
    Exercise(
        name="02.3",
        title="The weighted mean in one pass",
        task="`out = softmax(q) @ v`, reading each score once. Beside maximum and sum, the running output `acc` is rescaled. "
        "This loop is FlashAttention's inner loop; only Q Kᵀ is missing.",
        cases=_mean_cases,
        truth=_mean,
        budget=_mean_budget,
        hints=(
            "`alpha = block.exp(top - new_top)` is what everything summed up so far has to be multiplied by.",
            "Both `total` and `acc` are such sums; then add `e.sum()` to the one, `e @ v_j` to the other.",
            '`block.matmul(e.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)`; divide by total at the end, once.',
        ),
        slips={"q": "One pass: each score is loaded once.", "v": "Each block walks over all of v once."},
        rules=(divides_at_the_end,),
        afterwards="Next: you have written (m, ℓ, O). Lesson 03 puts Q Kᵀ in front of it.",
    ),
)


PREDICTIONS = (
    Prediction(
        name="02.1",
        truth=lambda: {
            "float16": math.log(float(np.finfo(np.float16).max)),
            "float32": math.log(float(np.finfo(np.float32).max)),
        },
        slips=lambda: {
            "float16": {"the exponent of 2, not of e": 16.0, "the largest number itself": 65504.0},
            "float32": {
                "the exponent of 2, not of e": 128.0,
                "the largest number itself": float(np.finfo(np.float32).max),
            },
        },
        because="float16 ends at 65,504 = e^11.09, float32 at 3.4e38 = e^88.72. A score of 12 is nothing special in attention.",
    ),
    Prediction(
        name="02.2",
        truth=lambda: {
            "safe": count("softmax_safe", length=1 << 20, dtype="float32").hbm.read,
            "online": count("softmax_online", length=1 << 20, dtype="float32").hbm.read,
        },
        slips=lambda: {
            "safe": {
                "elements, not bytes": 3 << 20,
                "the write counted as a read": 16 << 20,
                "maximum and sum read together": 8 << 20,
                "one pass": 4 << 20,
            },
            "online": {
                "elements, not bytes": 2 << 20,
                "the write counted as a read": 12 << 20,
                "the quotient needs no second pass": 4 << 20,
            },
        },
        because="Three passes against two, 4 bytes an element. Both write 4 MiB.",
    ),
    Prediction(
        name="02.3",
        truth=lambda: {"total": 2.0},
        slips=lambda: {
            "total": {
                "the right sum, 1 + e^-10: but this program does not rescale": 1 + math.exp(-10),
                "relative to 0: sums of the exponentials themselves": 1 + math.exp(10),
            }
        },
        because="Each tile sums up relative to its own maximum: 1 for the tile {0}, 1 for the tile {10}. Added as they are, they "
        "make 2; the right sum, relative to 10, is 1 + e^-10 = 1.0000454.",
    ),
)
