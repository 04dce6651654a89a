"""Lesson 13, pages and a server's day: the exercise that is a tile program, and its predictions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from flashlab.lessons.exercise import SCALE, Budget, Case, Exercise, Truth
from flashlab.lessons.prediction import Prediction
from simulator import Problem, Tile
from simulator.config import padded
from simulator.dtypes import Array
from simulator.operations.paged import PAGED
from simulator.problem import row_bytes


@dataclass(frozen=True)
class PagedCase(Case):
    """A request in pages. Everything that it doesn't own is NaN, or a page that isn't there."""

    def arrays(self) -> dict[str, Array]:
        return PAGED.draw(self.problem, self.seed)


def _paged_cases(draw: Random) -> list[Case]:
    """Pages of 16 keys, of another power of two, of an odd number, and of more keys than a tile: each in a pool of its own."""
    first = Problem(
        batch=1, heads=8, kv_heads=2, len_q=1, len_kv=96, head_dim=64, dtype="float16", page_size=16, pages=20
    )
    odd = draw.choice((5, 7, 11))
    others = [
        (first.replace(len_kv=draw.randint(65, 95), page_size=8, pages=30), Tile(16, 32)),
        (first.replace(heads=6, len_kv=draw.randint(100, 140), page_size=odd, pages=40, scale=SCALE), Tile(16, 32)),
        (first.replace(heads=3, kv_heads=1, len_kv=draw.randint(65, 120), page_size=64, head_dim=40), Tile(16, 16)),
        (first.replace(heads=2, len_kv=draw.randint(3, 15), page_size=1, dtype="float32"), Tile(16, 16)),
    ]
    return [PagedCase(p, tile, draw.getrandbits(32)) for p, tile in ((first, Tile(16, 32)), *others)]


def _paged_truth(problem: Problem, q: Array, k: Array, v: Array, block_table: Array, seq_lens: Array) -> Truth:
    """Attention in float64 to the keys that the table leads to, and the rule of `fl.verify` for every row."""
    given = {"q": q, "k": k, "v": v, "block_table": block_table, "seq_lens": seq_lens}
    right = PAGED.judge(problem, given)
    return Truth(right["out"], PAGED.bounds(problem, given, right)["out"][..., None], by_row=True)


def looked_up(keys: int, page_size: int, cols: int) -> int:
    """Entries of a block table that are read for so many keys, in tiles of `cols`: one for each page that a tile touches.

    >>> looked_up(96, 16, 32), looked_up(96, 64, 16), looked_up(96, 1, 32)
    (6, 6, 96)
    """
    firsts = range(0, keys, cols)
    return sum((min(first + cols, keys) - 1) // page_size - first // page_size + 1 for first in firsts)


def _paged_budget(problem: Problem, tile: Tile) -> Budget:
    """K and V once, and 4 bytes of the table for each page that a tile touches: for each KV head."""
    p, size = problem, row_bytes(problem.head_dim, problem.itemsize)
    blocks = p.kv_heads * -(-p.queries_per_kv // tile.rows)
    tiles = blocks * p.key_tiles(tile)
    moved = {
        "q": (p.heads * size, 0),
        "k": (blocks * p.len_kv * size, 0),
        "v": (blocks * p.len_kv * size, 0),
        "block_table": (4 * blocks * looked_up(p.len_kv, p.page_size or 1, tile.cols), 0),
        "out": (0, p.heads * size),
    }
    flops = 2 * 2 * tiles * padded(tile.rows) * padded(tile.cols) * padded(p.head_dim)
    return Budget(moved, matmul=flops, exp=tiles * tile.rows * tile.cols)


EXERCISES = (
    Exercise(
        name="13.1",
        title="Key n of a request",
        task="Attention for one new token, over K and V in pages. The tile program sees one request, with its line of the "
        "block table. Say where key n lies, look up the pages of each tile, and hide what lies behind the last key. The "
        "bytes of the table are on the budget: 4 for each page that a tile touches, and one look-up serves K and V. All that "
        "this request doesn't own is NaN, so that no mistake stays small. Pages have any size, odd ones too.",
        cases=_paged_cases,
        truth=_paged_truth,
        budget=_paged_budget,
        hints=(
            "With pages of 16, key 35 is row 3 of the request's page number 2. Which operators make 2 and 3 of 35 and 16?",
            "`k, v = (m.paged(pool, block_table, place) for pool in (k, v))`; from there on `block.load(k, j, tile.cols)` "
            "loads a tile as ever.",
            "`block.look_up(k, j, tile.cols)`: V's rows lie in the same pages, so nothing is looked up for V.",
        ),
        slips={
            "block_table": "One look-up for each tile of keys, of as many rows as the tile has. Keys and values lie in the "
            "same rows of the same pages.",
            "k": "Each tile of K is loaded once.",
            "v": "Each tile of V is loaded once.",
        },
        afterwards="Next: this is paged_1, the seed of vLLM's first kernel. It believes each word of the table. Who writes it?",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

PREDICTIONS: tuple[Prediction, ...] = ()
