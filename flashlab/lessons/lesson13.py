"""Lesson 13, pages and a server's day: the exercise that is a tile program, and its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from flashlab.lessons.exercise import SCALE, Budget, Case, Exercise, Truth
from flashlab.lessons.prediction import Prediction
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Model
from flashlab.serve.requests import Request
from flashlab.serve.traces import read
from simulator import Problem, Tile, count
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
        afterwards="Next: this is paged_1, the seed of vLLM's first kernel. It believes each word of the table. So the table had "
        "better be right.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

MAXIMUM = 2048
"""Tokens that a request may have, prompt and answer."""
_DRAW = 126
"""Of all draws one in which rules of thumb hold within 1 %, so that a prediction made in one's head can be right."""
_HALF = "half a page: but one that is full wastes nothing, so it is half of 15"
_TOKEN = Model().token_bytes


def lengths(requests: int = 100) -> list[int]:
    """Tokens of some requests at their end, prompt and answer, like those of ShareGPT.

    >>> sum(lengths()) / 100
    495.23
    """
    return [one.prompt + one.answer for one in read("lognormal:sharegpt", requests=requests, seed=_DRAW)]


def wasted(tokens: Sequence[int], page_size: int) -> float:
    """Rows that hold no token, for a request on the mean, in pages.

    >>> wasted([1, 16, 17], 16)
    10.0
    """
    return fmean(-n % page_size for n in tokens)


def sharing(requests: int, prefix: int, own: int, page_size: int) -> tuple[int, int]:
    """Entries of all tables, and blocks, of requests that begin with the same tokens and go on with some of their own.

    >>> sharing(2, 8, 3, 4)
    (6, 4)
    """
    manager = KVCacheManager(requests * -(-(prefix + own) // page_size) + 2, page_size, watermark=0)
    for n in range(requests):
        request = Request(f"r{n}", [*range(prefix), *range(10**6 * (n + 1), 10**6 * (n + 1) + own)])
        _, found = manager.get_computed_blocks(request)
        manager.allocate_slots(request, prefix + own - found)
        manager.commit(request)
    tables = sum(len(table.table) for table in manager.owned.values())
    return tables, manager.num_blocks - 1 - manager.num_free_blocks


LONG = Problem(batch=1, heads=32, kv_heads=8, len_q=1, len_kv=4096, head_dim=128, dtype="bfloat16", page_size=16)
"""A request of 4,096 tokens in pages of 16, in one layer of a model of eight billion parameters."""


def _table() -> dict[str, float]:
    table = count("paged_1", LONG, device="h100").by_tensor["block_table"]
    return {"line": 4 * LONG.table_pages, "read": table.hbm_read}


def _saved() -> dict[str, float]:
    tables, blocks = sharing(40, 1000, 20, 64)
    return {"pages": tables - blocks, "gigabytes": (tables - blocks) * 64 * _TOKEN / 1e9}


PREDICTIONS = (
    Prediction(
        name="13.1",
        truth=lambda: {
            "room": MAXIMUM - fmean(lengths()),
            "pages_16": wasted(lengths(), 16),
            "pages_64": wasted(lengths(), 64),
            "pages_256": wasted(lengths(), 256),
        },
        slips=lambda: {
            "room": {
                "what is used: the rest of the room is wasted": fmean(lengths()),
                "the whole room": MAXIMUM,
                "half a room, as if lengths were spread evenly": MAXIMUM / 2,
            },
            **{
                f"pages_{size}": {
                    **({_HALF: 8, "a row less than a page, which is the most": 15} if size == 16 else {}),
                    "a whole page": size,
                    "nothing, as if pages were of one token": 0,
                }
                for size in (16, 64, 256)
            },
        },
        because="A room is for the longest, and requests have 495 tokens on the mean: three quarters of it stay empty. Of pages "
        "only the last one isn't full. It has 0 to 15 empty rows, all about as often: 7.5 on the mean.",
    ),
    Prediction(
        name="13.2",
        truth=_table,
        slips=lambda: {
            "line": {
                "4 bytes for each token: but an entry is for a page": 4 * 4096,
                "entries, not bytes": 256,
                "8 bytes an entry: but it is int32": 8 * 256,
            },
            "read": {
                "once: but each of the 8 KV heads has a block that reads it": 4 * 256,
                "for each of the 32 query heads: but those of a group share a block": 32 * 4 * 256,
                "for K and V each: but their pages are the same": 2 * 8 * 4 * 256,
            },
        },
        because="4,096 tokens are 256 pages, 4 bytes each. A block for each of 8 KV heads reads the line once. K and V of the "
        "request are 16.8 MB in this layer, so the table is a 2,000th of what is read.",
    ),
    Prediction(
        name="13.3",
        truth=_saved,
        slips=lambda: {
            "pages": {
                "for all 40: but somebody has to have them": 40 * 15,
                "16 pages: but the last one isn't full, and its rest is each request's own": 39 * 16,
                "16 pages, for all 40": 40 * 16,
                "tokens, not pages": 39 * 1000,
            },
            "gigabytes": {
                "1,000 tokens: but 40 of them are in a page that isn't full": 39 * 1000 * _TOKEN / 1e9,
                "one layer only": 39 * 15 * 64 * _TOKEN / 32 / 1e9,
                "in GiB": 39 * 15 * 64 * _TOKEN / 2**30,
            },
        },
        because="1,000 tokens fill 15 pages of 64, and 40 tokens are left: their page is each request's own. 39 of 40 requests "
        "spare themselves 15 pages, of 64 · 131,072 bytes each.",
    ),
)
