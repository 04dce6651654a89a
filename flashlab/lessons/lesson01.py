"""Lesson 01, standard attention: its exercises and predictions."""

from __future__ import annotations

from random import Random

from flashlab.lessons.exercise import SCALE, Budget, Case, Exercise, Level, attention_truth, far
from flashlab.lessons.lesson00 import product, tiles
from flashlab.lessons.prediction import Prediction
from simulator import DEVICES, Problem, Tile, count
from simulator.config import padded
from simulator.names import DType
from simulator.problem import row_bytes


def scores_cases(draw: Random) -> list[Case]:
    """head_dim_v = len_kv, so that out has the shape of S. No tile of k is square, so that a forgotten `.T` is told.

    One has a scale of its own.
    """
    first = Problem(batch=1, heads=2, len_q=128, head_dim=64, head_dim_v=128, dtype="float32")
    others: list[Problem] = []
    for scale in (SCALE, None, None):
        keys = draw.randint(33, 150)
        others.append(
            Problem(
                batch=draw.choice((1, 2)),
                heads=2,
                len_q=draw.randint(33, 150),
                len_kv=keys,
                head_dim=draw.choice((24, 40, 64)),
                head_dim_v=keys,
                dtype="float32",
                scale=scale,
            )
        )
    return [Case(p, Tile(64, 32) if p is first else tiles(draw), draw.getrandbits(32)) for p in (first, *others)]


LEVELS: tuple[Level, ...] = ((0, 0), (-300, -300), (300, -300), (0, 0))
"""What is added to the scores of the cases: far below 0, and from far above it to far below."""


def attention_cases(draw: Random) -> list[Case]:
    """Attention, causal and not, ragged, with fewer KV heads than heads, and with scores at `LEVELS`.

    There are cases with more keys than queries, and a causal one with fewer: its first queries see no key. The last one is
    `far`.
    """
    first = Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16")
    shapes: tuple[tuple[DType, bool, tuple[int, int]], ...] = (
        ("float16", True, (0, 40)), ("float32", False, (0, 40)), ("float16", True, (-30, -1)),
    )  # fmt: skip
    others = [
        Problem(batch=1, heads=4, kv_heads=draw.choice((1, 2, 4)), len_q=(n := draw.randint(33, 150)),
                len_kv=n + draw.randint(*more), head_dim=draw.choice((24, 40, 64)), dtype=dtype, causal=causal)
        for dtype, causal, more in shapes
    ]  # fmt: skip
    cases = [
        Case(p, Tile(64, 64) if p is first else tiles(draw), draw.getrandbits(32), level=level)
        for p, level in zip((first, *others), LEVELS, strict=True)
    ]
    n = draw.randint(40, 90)
    return [
        *cases,
        far(first.replace(len_q=n, len_kv=n + 9, head_dim=24, dtype="float32", causal=True), Tile(32, 32), draw),
    ]


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    """Query heads in all, and bytes of a head's q, of a head's k, of a head's v."""
    p = problem
    d, dv = row_bytes(p.head_dim, p.itemsize), row_bytes(p.head_dim_v, p.itemsize)
    return p.batch * p.heads, p.len_q * d, p.len_kv * d, p.len_kv * dv


def scores_budget(problem: Problem, tile: Tile) -> Budget:
    heads, q, k, _ = _sizes(problem)
    rows, cols = problem.row_tiles(tile), problem.key_tiles(tile)
    out = heads * problem.len_q * row_bytes(problem.len_kv, problem.itemsize)
    flops = 2 * heads * rows * padded(tile.rows) * cols * padded(tile.cols) * padded(problem.head_dim)
    return Budget({"q": (heads * q * cols, 0), "k": (heads * k * rows, 0), "out": (0, out)}, matmul=flops)


def _matmul_flops(problem: Problem, tile: Tile) -> int:
    """Both products over whole tiles."""
    p = problem
    pairs = p.batch * p.heads * p.row_tiles(tile) * p.key_tiles(tile)
    return 2 * pairs * padded(tile.rows) * padded(tile.cols) * (padded(p.head_dim) + padded(p.head_dim_v))


def _standard_budget(problem: Problem, tile: Tile) -> Budget:
    p = problem
    heads, q, k, v = _sizes(p)
    rows, cols = p.row_tiles(tile), p.key_tiles(tile)
    s, probabilities = p.len_q * row_bytes(p.len_kv, 4), p.len_q * row_bytes(p.len_kv, p.itemsize)
    out = p.len_q * row_bytes(p.head_dim_v, p.itemsize)
    moved = {
        "q": (q * cols, 0),
        "k": (k * rows, 0),
        "s": (s, s),
        "p": (probabilities, probabilities),
        "v": (v * rows, 0),
        "out": (0, out),
    }
    every = {name: (heads * read, heads * written) for name, (read, written) in moved.items()}
    return Budget(every, matmul=_matmul_flops(p, tile), exp=heads * p.len_q * p.len_kv)


def _strip_budget(problem: Problem, tile: Tile) -> Budget:
    p = problem
    heads, q, k, v = _sizes(p)
    rows = p.row_tiles(tile)
    out = p.len_q * row_bytes(p.head_dim_v, p.itemsize)
    moved = {"q": (q, 0), "k": (k * rows, 0), "v": (v * rows, 0), "out": (0, out)}
    every = {name: (heads * read, heads * written) for name, (read, written) in moved.items()}
    flops = 2 * heads * rows * padded(tile.rows) * padded(p.len_kv) * (padded(p.head_dim) + padded(p.head_dim_v))
    return Budget(every, matmul=flops, exp=heads * p.len_q * p.len_kv)


EXERCISES = (
    Exercise(
        name="01.1",
        title="The scores",
        task="`S = scale · Q Kᵀ`, one block for each tile of S. (`out` has the shape of S here.)",
        cases=scores_cases,
        truth=lambda p, q, k, v: product(q, k.swapaxes(-1, -2), p.dtype, p.scale),
        budget=scores_budget,
        hints=(
            "Rows of k are keys: key tile number `block.j` is `block.load(k, block.j, tile.cols)`.",
            "`k_j.T` is its transpose. `block.matmul(…, scale=problem.scale)` scales on the way.",
            "S's tile lies in row tile `block.i`, column tile `block.j`: both go into `block.store`.",
        ),
        slips={
            "q": "Every block loads the tile of q of its row of tiles.",
            "k": "Every block loads the tile of k of its column of tiles, tile.cols keys.",
            "out": "Every element of S is stored once.",
        },
        out_tile=lambda case: (case.tile.rows, case.tile.cols),
        afterwards="Next: of what you moved, S alone grows with the square of the length.",
    ),
    Exercise(
        name="01.2",
        title="Standard attention",
        task="The first launch is given: it leaves S in HBM. Write the softmax, which turns S into P, and the last launch, "
        "`out = P V`. S and P are each written once and read once: this is the N² traffic that the lesson is about.",
        cases=attention_cases,
        truth=attention_truth,
        budget=_standard_budget,
        hints=(
            '`block.fetch(s, block.i, tile.rows, fill=float("-inf"))` has whole rows of S; what a mask hides is -inf there.',
            "`x.max().finite()` is each row's maximum, 0 for a row that sees no key; `.nonzero()` keeps its sum from being 0.",
            "Tile (block.i, j) of p: `block.load(p, block.i, tile.rows, j, tile.cols)`.",
        ),
        slips={
            "s": "The whole row is in registers after one fetch: use it for the maximum, the sum and the quotient.",
            "p": "P is written once by the softmax, and read once by the output launch.",
            "v": "Each row tile reads all of V.",
        },
        afterwards="Next: compare s and p with q, k and v in the table above.",
    ),
    Exercise(
        name="01.3",
        title="Keep S on the chip: the strip",
        task="One launch. A block loads *all* keys, keeps its strip of S (tile.rows × all keys) in registers, and S never goes "
        "to HBM. Right for short sequences; the lesson asks what it needs of SRAM for long ones.",
        cases=attention_cases,
        truth=attention_truth,
        budget=_strip_budget,
        hints=(
            "All of k: `block.load(k, 0, keys)`, tile number 0 of `keys` rows.",
            "The softmax is that of 01.2, with s instead of what was fetched; `block.mask(s, block.i, 0)` comes before.",
            '`.round(problem.dtype)` on the probabilities, then `block.matmul(p, v_all, split=("rows", "none"))`.',
        ),
        slips={
            "k": "All of k once for each row tile.",
            "v": "All of v once for each row tile.",
            "q": "Each tile of q is loaded once: there is one block for it.",
        },
        afterwards="Next: S is gone from HBM. What is left to solve is that K, V and a strip of S must fit on the chip.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

LENGTH, DIM = 4096, 64
STRIP_DEVICE = "a100"
_P = Problem(batch=1, heads=1, len_q=LENGTH, head_dim=DIM, dtype="float16")


def longest_strip(device: str = STRIP_DEVICE) -> int:
    """The most keys, a multiple of 16, whose K and V (head dim 64, float16) fit beside a 64-row tile of Q."""
    limit = DEVICES["a100-40" if device == "a100" else device].sram_per_block
    return (limit - 64 * DIM * 2) // (2 * DIM * 2) // 16 * 16


def _written(length: int) -> int:
    return count("standard", _P.replace(len_q=length), tile=(64, 64)).hbm.write


PREDICTIONS = (
    Prediction(
        name="01.1",
        truth=lambda: {"hbm_peak": count("standard", _P, tile=(64, 64)).hbm.peak},
        slips=lambda: {
            "hbm_peak": {
                "S alone, in elements": LENGTH**2,
                "S alone: P, Q, K, V and out forgotten": LENGTH**2 * 4,
                "S and P alone, which is right to 2 %: Q, K, V and out are there, too": LENGTH**2 * 6,
                "Q, K, V and out only; S and P forgotten": 4 * LENGTH * DIM * 2,
                "P forgotten, or S taken as float16 (it is float32)": LENGTH**2 * 4 + 4 * LENGTH * DIM * 2,
                "S and P both as float32": LENGTH**2 * 8 + 4 * LENGTH * DIM * 2,
                "S and P in elements": LENGTH**2 * 2 + 4 * LENGTH * DIM,
            }
        },
        because="S is 4096² float32, 64 MiB; P 4096² float16, 32 MiB; Q, K, V and out together are 2 MiB.",
    ),
    Prediction(
        name="01.2",
        truth=lambda: {"hbm_write": _written(LENGTH), "when_doubled": _written(2 * LENGTH) / _written(LENGTH)},
        slips=lambda: {
            "hbm_write": {
                "elements, not bytes": 2 * LENGTH**2 + LENGTH * DIM,
                "the output only": LENGTH * DIM * 2,
                "S or P as the only one written": LENGTH**2 * 4,
                "S and P both as float32": LENGTH**2 * 8,
            },
            "when_doubled": {"linear in the length": 2, "cubic in the length": 8},
        },
        because="S (4 bytes) and P (2 bytes) are written once each, N² elements. The output's N·d is lost beside them, "
        "so twice the length means four times the bytes.",
    ),
    Prediction(
        name="01.3",
        truth=lambda: {"keys": longest_strip()},
        slips=lambda: {
            "keys": {
                "double: K alone without V, or elements for bytes": 2 * longest_strip(),
                "192 KB: that is L1 and SRAM together": (192 * 1024 - 64 * DIM * 2) // (2 * DIM * 2),
                "float32 instead of float16": longest_strip() / 2,
                "Q's tile forgotten: it takes 8,192 bytes": DEVICES["a100-40"].sram_per_block
                // (2 * DIM * 2)
                // 16
                * 16,
            }
        },
        because="163 KB are 166,912 bytes; Q's tile takes 8,192 of them, and each key 128 bytes of K and 128 of V.",
    ),
)
