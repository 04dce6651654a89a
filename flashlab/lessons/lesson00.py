"""Lesson 00, the memory hierarchy: its exercises and predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from flashlab.lessons.exercise import Budget, Case, Exercise, Truth, elementwise
from flashlab.lessons.prediction import Prediction
from flashlab.lessons.rules import rows_and_none
from simulator import Problem, Tile
from simulator.config import padded
from simulator.dtypes import Array
from simulator.names import DType
from simulator.problem import ITEMSIZE, row_bytes

UNIT = {"float32": 4e-6, "float16": 2.0**-9}
"""What an element of a few roundings may be off by, relative to its row's size."""


def tiles(draw: Random) -> Tile:
    return Tile(draw.choice((16, 32, 64)), draw.choice((16, 32, 64)))


def _rows_of(draw: Random) -> list[Case]:
    """q, k, v of one shape: what works element by element or row by row.

    In one case the numbers are so small that LayerNorm's 1e-5 decides, and in two the mean is far above the spread.
    """
    first = Problem(batch=1, heads=1, len_q=256, head_dim=128, dtype="float16")
    dtypes: tuple[DType, ...] = (draw.choice(("float32", "float16")), "float32", "float16")
    others = [
        Problem(
            batch=draw.choice((1, 2)),
            heads=draw.choice((1, 3)),
            len_q=draw.randint(65, 200),
            head_dim=draw.choice((24, 40, 72, 100)),
            dtype=dtype,
        )
        for dtype in dtypes
    ]
    drawn = ((1.0, 0.0), (0.01, 0.0), (1.0, 1000.0), (1.0, 100.0))
    return [
        Case(p, Tile(64, 64) if p is first else tiles(draw), draw.getrandbits(32), spread, (mean, mean))
        for p, (spread, mean) in zip((first, *others), drawn, strict=True)
    ]


def _products(draw: Random) -> list[Case]:
    """q `(M, K)` and v `(K, N)`: head_dim = len_kv = K, head_dim_v = N. Once K is the longer one, once N."""

    def shape(m: int, k: int, n: int, dtype: DType) -> Problem:
        return Problem(batch=1, heads=1, len_q=m, len_kv=k, head_dim=k, head_dim_v=n, dtype=dtype)

    first = shape(128, 128, 128, "float16")
    others = [
        shape(draw.randint(33, 130), draw.randint(*k), draw.randint(*n), draw.choice(("float32", "float16")))
        for k, n in (((97, 130), (33, 64)), ((33, 64), (97, 130)), ((33, 130), (33, 130)))
    ]
    return [Case(p, Tile(64, 64) if p is first else tiles(draw), draw.getrandbits(32)) for p in (first, *others)]


def _added(q: Array, k: Array) -> Array:
    return q.astype(np.float64) + k.astype(np.float64)


def layer_norm(x: Array) -> Array:
    """Each row less its mean, over its standard deviation, in float64."""
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def of_normal(x: Array, unit: float, f: Callable[[Array], Array] = lambda x: x) -> Truth:
    """f of a LayerNorm of x, an f no steeper than about 1. What float32 loses of a mean far above the spread, it may lose."""
    wide = x.astype(np.float64)
    truth = elementwise(f(layer_norm(wide)), unit)
    lost = 2.0**-20 * np.abs(wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    return replace(truth, tolerance=truth.tolerance + lost)


def gelu(x: Array) -> Array:
    """x / (1 + exp(-1.702 x)): the sigmoid form of arXiv 1606.08415, section 2."""
    return x / (1 + np.exp(-1.702 * x))


def product(a: Array, b: Array, dtype: str, scale: float = 1.0) -> Truth:
    """scale a b in float64; off by float32's sums and one rounding."""
    a, b = a.astype(np.float64) * scale, b.astype(np.float64)
    return Truth(a @ b, 4e-6 * (np.abs(a) @ np.abs(b)) + (UNIT[dtype] / 2 if dtype != "float32" else 0) * np.abs(a @ b))


def _matrix(problem: Problem, name: str) -> int:
    """Bytes of q, k, v or out, all heads."""
    p = problem
    rows, cols = {"q": (p.len_q, p.head_dim), "k": (p.len_kv, p.head_dim), "out": (p.len_q, p.head_dim_v)}[name]
    return p.batch * p.heads * rows * row_bytes(cols, p.itemsize)


def _sum_budget(problem: Problem, tile: Tile) -> Budget:
    del tile
    moved = {"q": (_matrix(problem, "q"), 0), "k": (_matrix(problem, "k"), 0), "out": (0, _matrix(problem, "out"))}
    return Budget(moved)


def _norm_budget(problem: Problem, tile: Tile) -> Budget:
    del tile
    return Budget({"q": (_matrix(problem, "q"), 0), "out": (0, _matrix(problem, "out"))})


def _fused_budget(problem: Problem, tile: Tile) -> Budget:
    rows = problem.row_tiles(tile) * tile.rows
    return Budget(_sum_budget(problem, tile).tensors, exp=problem.batch * problem.heads * rows * problem.head_dim)


def _matmul_budget(problem: Problem, tile: Tile) -> Budget:
    """A is requested once for each column of tiles, B once for each row of tiles."""
    p = problem
    row_tiles, col_tiles, steps = p.row_tiles(tile), -(-p.head_dim_v // tile.cols), -(-p.head_dim // 32)
    a, b = p.len_q * row_bytes(p.head_dim, p.itemsize), p.head_dim * row_bytes(p.head_dim_v, p.itemsize)
    flops = 2 * row_tiles * padded(tile.rows) * col_tiles * padded(tile.cols) * steps * 32
    return Budget({"q": (a * col_tiles, 0), "v": (b * row_tiles, 0), "out": (0, _matrix(p, "out"))}, matmul=flops)


EXERCISES = (
    Exercise(
        name="00.1",
        title="The sum of two arrays",
        task="Write `out = q + k`. Each block takes one tile of rows: it fetches that tile of q and of k into registers, "
        "adds, and stores the sum. Every element is read once and written once: that is the budget.",
        cases=_rows_of,
        truth=lambda p, q, k, v: elementwise(_added(q, k), UNIT[p.dtype]),
        budget=_sum_budget,
        hints=(
            "`block.fetch(q, block.i, tile.rows)` reads the row tile number `block.i` of q. The same call reads k's.",
            "Registers are added with `+`. `block.store(out, registers, block.i, tile.rows)` writes them.",
        ),
        slips={"k": "k is the second operand: every element of it has to be fetched, once."},
        afterwards="Next: what does it cost per element? 2 bytes in twice, 2 bytes out, for one addition.",
    ),
    Exercise(
        name="00.2",
        title="LayerNorm",
        task="Each row less its mean, divided by the square root of its variance + 1e-5. Statistics need the whole row, "
        "but the row is in registers after *one* read: nothing need be read a second time.",
        cases=_rows_of,
        truth=lambda p, q, k, v: of_normal(q, UNIT[p.dtype]),
        budget=_norm_budget,
        hints=(
            "`x.sum()` is one value a row; divided by `q.cols` it is the mean. `x - mean` subtracts it from every element.",
            "The variance is the mean of the squares of `x - mean`, not of `x`. The mean of `x * x` less `mean * mean` is the same "
            "on paper only: for numbers around 1,000 a float32 has lost nearly all of it.",
            "`block.elementwise(np.sqrt, variance + 1e-5)` is the root; then divide, and store.",
        ),
        slips={"q": "Once a row is in registers, it can be used again without another fetch."},
        afterwards="Next: it moves as much as a copy would. All of its arithmetic hides behind the memory.",
    ),
    Exercise(
        name="00.3",
        title="Three in one: a fused kernel",
        task="`out = gelu(layer_norm(q + k))` in one launch. As three launches it would write and read two arrays in between; "
        "fused, what is in between never leaves the registers. The budget is that of the sum alone.",
        cases=_rows_of,
        truth=lambda p, q, k, v: of_normal(_added(q, k), UNIT[p.dtype], gelu),
        budget=_fused_budget,
        hints=(
            "Start from the sum of 00.1; keep it in a variable instead of storing it, and go on as in 00.2.",
            "gelu(x) is `x / (1.0 + block.exp(x * -1.702))`: registers and numbers take part in `+ - * /`, on either side.",
        ),
        slips={"out": "Store once, at the very end."},
        afterwards="Next: fusing saved four of seven passes over memory, and not one FLOP. FlashAttention is this idea, "
        "carried through where it is harder.",
    ),
    Exercise(
        name="00.4",
        title="A tiled matrix product",
        task="`out = q @ v`, with q of M × K and v of K × N elements. A block owns one tile of out and walks along K in steps "
        "of 32: it loads a tile of q and one of v to SRAM, where its warps share them, and adds their product to acc.",
        cases=_products,
        truth=lambda p, q, k, v: product(q, v, p.dtype),
        budget=_matmul_budget,
        hints=(
            "`block.load(tensor, i, rows, j, cols)` loads the tile in row `i` and column `j` of a grid of rows × cols tiles.",
            "Of q it is row tile `block.i`, column `step` (32 wide); of v row `step` (32 high), column tile `block.j`.",
            '`acc = block.matmul(a, b, split=("rows", "none"), acc=acc)`; without `acc=acc` the old sum is lost.',
        ),
        slips={
            "q": "Each tile of q is loaded once by each block of its row of tiles: N / tile.cols times in all.",
            "v": "Each tile of v is loaded once by each block of its column of tiles: M / tile.rows times in all.",
            "out": "A block stores its tile of out once, after the walk.",
        },
        out_tile=lambda case: (case.tile.rows, case.tile.cols),
        rules=(rows_and_none,),
        afterwards="Next: double both sides of the tile, and the bytes halve. What stops you is the size of SRAM, and "
        "of the registers (lesson 04).",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

ROWS, WIDTH = 4096, 1024
"""The arrays of predictions 00.1 and 00.2, float16."""
SIDE, EDGE = 4096, 64
"""Matrices and tiles of prediction 00.3, float16."""
_ARRAY = ROWS * WIDTH * ITEMSIZE["float16"]


def _matmul_read() -> int:
    problem = Problem(batch=1, heads=1, len_q=SIDE, len_kv=SIDE, head_dim=SIDE, head_dim_v=SIDE, dtype="float16")
    return sum(read for read, _ in _matmul_budget(problem, Tile(EDGE, EDGE)).tensors.values())


def _sum_moves() -> dict[str, int]:
    problem = Problem(batch=1, heads=1, len_q=ROWS, head_dim=WIDTH, dtype="float16")
    moved = _sum_budget(problem, Tile(64, 64)).tensors.values()
    return {"hbm_read": sum(read for read, _ in moved), "hbm_write": sum(written for _, written in moved)}


PREDICTIONS = (
    Prediction(
        name="00.1",
        truth=_sum_moves,
        slips=lambda: {
            "hbm_read": {
                "half of it: elements for bytes, or one of the two operands forgotten": _ARRAY,
                "float32 instead of float16": 4 * _ARRAY,
                "reads and writes together": 3 * _ARRAY,
                "1,000s for 1,024s: 4096 · 1024 is more than 4 million": 2 * 2 * 4_000_000,
            },
            "hbm_write": {
                "1,000s for 1,024s: 4096 · 1024 is more than 4 million": 2 * 4_000_000,
                "elements, not bytes": ROWS * WIDTH,
                "float32 instead of float16": 2 * _ARRAY,
            },
        },
        because="Two arrays in, one out, 2 bytes an element. No kernel can do with less: these bytes are compulsory.",
    ),
    Prediction(
        name="00.2",
        truth=lambda: {"three_kernels": 7 * _ARRAY, "fused": 3 * _ARRAY},
        slips=lambda: {
            "three_kernels": {
                "what lies in between is written, but not read back": 5 * _ARRAY,
                "the second operand of the sum forgotten": 6 * _ARRAY,
                "LayerNorm reads its row twice": 8 * _ARRAY,
                "elements, not bytes": 7 * ROWS * WIDTH,
            },
            "fused": {"elements, not bytes": 3 * ROWS * WIDTH, "one operand forgotten": 2 * _ARRAY},
        },
        because="Sum: 2 reads, 1 write. LayerNorm and GELU: 1 and 1 each. That is 7 passes over an array; fused it is 3.",
    ),
    Prediction(
        name="00.3",
        truth=lambda: {"hbm_read": _matmul_read()},
        slips=lambda: {
            "hbm_read": {
                "each operand read once (that is the compulsory traffic)": 2 * SIDE * SIDE * 2,
                "half: elements for bytes, or one operand only": _matmul_read() / 2,
                "no tiles: two operands for every multiply-add": 2 * SIDE**3 * 2,
            }
        },
        because="Each of the 64 columns of tiles reads all of A, each of the 64 rows all of B: 64 + 64 matrices of 32 MiB.",
    ),
)
