"""Lesson 13: its exercise whose answer is a `.cu` file."""

from __future__ import annotations

from random import Random

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import Truth
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers
from flashlab.lessons.lesson13 import looked_up
from flashlab.lessons.prediction import Prediction
from simulator.dtypes import Array
from simulator.operations.paged import STRAY

TILE, D = 32, 32
"""Keys of a block, one for each lane; and the head dim."""


def pages_of(draw: Random, lengths: list[int], page_size: int, *, shared: int = 0) -> tuple[Array, Array]:
    """A pool, `(pages, page_size, D)`, and the block table of requests of these lengths, in pages of any order.

    The first `shared` pages of all requests are the same. What nobody has is NaN, and the rest of a line names no page.
    """
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts) + 3
    pages = draw.sample(range(total), total)
    table = np.full((len(lengths), max(counts) + 1), STRAY, np.int32)
    pool = numbers(draw, total, page_size, D)
    owned = np.zeros((total, page_size), bool)
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        for i in range(count):
            table[b, i] = table[0, i] if b and i < shared else pages.pop()
            owned[table[b, i], : min(page_size, n - i * page_size)] = True
    pool[~owned] = np.nan
    return pool, table


def _gather(draw: Random) -> list[Launch]:
    """Pages of 16, of an odd number, of one key, and of more keys than a tile. Some requests share pages, and one has no key."""

    def launch(lengths: list[int], page_size: int, shared: int = 0) -> Launch:
        pool, table = pages_of(draw, lengths, page_size, shared=shared)
        firsts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = [pool[table[b, n // page_size], n % page_size] for b, keys in enumerate(lengths) for n in range(keys)]
        tiles, keys = -(-max(lengths) // TILE), sum(lengths)
        found = np.array(rows, np.float64)
        looked = sum(looked_up(n, page_size, TILE) for n in lengths)
        moved = keys * D * 4
        return Launch(
            said=f"{len(lengths)} requests of {', '.join(map(str, lengths))} keys, pages of {page_size}",
            arguments={
                "pool": pool,
                "table": table,
                "firsts": firsts,
                "out": Empty((keys, D)),
                "page_size": np.int32(page_size),
                "table_pages": np.int32(table.shape[1]),
            },
            grid=(tiles, len(lengths)),
            block=(TILE,),
            tile=TILE,
            truth={"out": Truth(found, np.zeros_like(found))},
            budget={
                "pool": (moved, 0),
                "table": (4 * looked, 0),
                "firsts": (8 * tiles * len(lengths), 0),
                "out": (0, moved),
            },
            most={("pool", "read", "sectors"): moved // 32, ("out", "written", "sectors"): moved // 32},
        )

    return [
        launch([64, 32], 16),
        launch([draw.randint(33, 63), draw.randint(33, 60)], 8, shared=2),
        launch([draw.randint(40, 70), 0, draw.randint(1, 30)], draw.choice((5, 7, 11))),
        launch([draw.randint(65, 90)], 64),
        launch([draw.randint(5, 31), draw.randint(1, 4)], 1),
    ]


EXERCISES = (
    KernelExercise(
        name="13.4",
        title="A gather through the table, in CUDA",
        task="Bring the keys of all requests out of their pages. A warp has 32 keys. Each lane looks up one of them: its entry of "
        "the table, and from it the row of the pool. Then all lanes together copy row after row, 128 bytes at a time. An entry "
        "is 4 bytes for each page that a tile touches, and no more: lanes whose keys lie in the same page ask for the same entry "
        "in the same instruction, which counts once. Behind a request's last key neither table nor pool may be touched.",
        kernel="gather",
        parameters="const float* pool, const int* table, const int* firsts, float* out, int page_size, int table_pages",
        launches=_gather,
        hints=(
            "Line `request` of the table begins at `request * table_pages`. Its entry `key / page_size` is the page.",
            "Row `key % page_size` of that page is row `page * page_size + key % page_size` of the pool.",
            "`__shfl_sync(0xffffffff, row, n)` is what lane n has in its `row`. Every lane has to call it.",
            "`pool[from * D + lane]`: 32 neighbours, one instruction, 128 bytes.",
        ),
        slips={
            "table": "Each lane asks once for the entry of its own key, and only if there is such a key. The others are told the "
            "row by a shuffle.",
            "pool": "Each row of a key is loaded once, and none behind the last key.",
            "out": "Each row is stored once.",
            "sectors": "All lanes copy one row together: 32 neighbours are 4 sectors.",
        },
        afterwards="Next: paged_1.cu looks up its pages just so, some tiles ahead, and copies to shared memory. With "
        "many pages `from * D` leaves 32 bits behind: there it is a long long.",
    ),
)

PREDICTIONS: tuple[Prediction, ...] = ()
"""The lesson's are beside its tile program."""
