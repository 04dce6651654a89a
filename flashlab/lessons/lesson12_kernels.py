"""Lesson 12, one token at a time: its exercises whose answers are `.cu` files."""

from __future__ import annotations

from random import Random

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import Truth
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers
from flashlab.lessons.lesson12 import SMS
from flashlab.lessons.prediction import Prediction
from simulator.dtypes import Array

D = 64
"""Columns of 12.4 and 12.5: threads of a block."""


def softmax_parts(s: Array, v: Array) -> tuple[Array, Array, Array]:
    """m, l and the undivided O of rows of scores, in float64: (…,), (…,), (…, columns). v is (…, keys, columns)."""
    m = s.max(-1)
    p = np.exp(s.astype(np.float64) - m[..., None])
    return m.astype(np.float64), p.sum(-1), (p[..., None] * v).sum(-2)


# -- 12.4 ---------------------------------------------------------------------------------------------------------

CHUNK = 64
"""Keys of a chunk of 12.4."""


def _last_merges(draw: Random) -> list[Launch]:
    """Whole chunks; a shorter last one; many; a single one; scores far below 0, which rise and fall."""

    def launch(rows: int, length: int, level: tuple[float, float] = (0.0, 0.0)) -> Launch:
        chunks = -(-length // CHUNK)
        s = numbers(draw, rows, length) + np.linspace(*level, length, dtype=np.float32)
        v = numbers(draw, rows, length, D)
        parts = [softmax_parts(s[:, a : a + CHUNK], v[:, a : a + CHUNK]) for a in range(0, length, CHUNK)]
        m, l, o = (np.stack(part, 1) for part in zip(*parts, strict=True))
        top, total, whole = softmax_parts(s, v)
        size = np.stack(
            [softmax_parts(s[:, a : a + CHUNK], abs(v[:, a : a + CHUNK]))[2] for a in range(0, length, CHUNK)], 1
        )
        all_sizes = softmax_parts(s, abs(v))[2] / total[:, None]
        off = 1e-5 + 3e-7 * np.abs(level).max()  # what an exponent that large may be off
        one = 4 * rows * chunks  # a number for each chunk
        return Launch(
            said=f"s ({rows}, {length}), {chunks} chunks, scores around {level[0]:g}",
            arguments={
                "s": s,
                "v": v,
                "partial": Empty((rows, chunks, D)),
                "partial_m": Empty((rows, chunks)),
                "partial_l": Empty((rows, chunks)),
                "counter": np.zeros(rows, np.int32),
                "out": Empty((rows, D)),
                "lse": Empty((rows,)),
                "len": np.int32(length),
            },
            grid=(chunks, rows),
            block=(D,),
            tile=1,
            truth={
                "partial": Truth(o, off * size),
                "partial_m": Truth(m, 1e-6 * np.abs(m)),
                "partial_l": Truth(l, off * l),
                "counter": Truth(np.zeros(rows), np.zeros(rows)),
                "out": Truth(whole / total[:, None], off * all_sizes),
                "lse": Truth(top + np.log(total), off + 1e-6 * np.abs(top)),
            },
            budget={
                "s": (4 * s.nbytes, 0),  # two warps, twice
                "v": (v.nbytes, 0),
                "partial": (D * one, D * one),
                "partial_m": (2 * one, one),  # two warps read
                "partial_l": (2 * one, one),
                "counter": (0, 4 * rows * chunks + 4 * rows),
                "out": (0, 4 * D * rows),
                "lse": (0, 4 * rows),
            },
        )

    return [
        launch(2, 4 * CHUNK),
        launch(draw.randint(2, 3), CHUNK * draw.randint(2, 4) + draw.randint(1, 50)),
        launch(1, draw.randint(5, 40)),
        launch(2, CHUNK * 3 + draw.randint(1, 60), (-1200.0, -1000.0)),
        launch(2, CHUNK * 3 + draw.randint(1, 60), (-1000.0, -1200.0)),
    ]


# -- 12.5 ---------------------------------------------------------------------------------------------------------


def tree(parts: int) -> list[int]:
    """How many nodes each level of a tree of pairs has, from its leaves to below its root.

    >>> tree(11)
    [11, 6, 3, 2]
    """
    levels = [parts]
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // 2))
    return levels[:-1] or [1]


def _in_pairs(draw: Random) -> list[Launch]:
    """The same parts in other orders, on one SM and on several; then other numbers of parts."""

    def launches(parts: int, orders: list[tuple[str, list[int], int]]) -> list[Launch]:
        s, v = 2 * numbers(draw, parts, 16), numbers(draw, parts, 16, D)
        m, l, o = softmax_parts(s, v)
        _, total, whole = softmax_parts(s.reshape(-1), v.reshape(-1, D))
        size = softmax_parts(s.reshape(-1), abs(v.reshape(-1, D)))[2] / total
        levels = tree(parts)
        nodes, pairs = sum(levels), sum(n // 2 for n in levels)
        return [
            Launch(
                said=f"o ({parts}, {D}), {sms} block{'s' if sms > 1 else ''}, parts come {how}",
                arguments={
                    "o": o.astype(np.float32),
                    "m": m.astype(np.float32),
                    "l": l.astype(np.float32),
                    "order": np.array(order, np.int32),
                    "node_o": np.zeros((nodes, D), np.float32),
                    "node_m": np.zeros(nodes, np.float32),
                    "node_l": np.zeros(nodes, np.float32),
                    "counter": np.zeros(nodes, np.int32),
                    "out": Empty((D,)),
                    "parts": np.int32(parts),
                },
                grid=(sms,),
                block=(D,),
                tile=D,
                truth={"out": Truth(whole / total, 1e-5 * size), "counter": Truth(np.zeros(nodes), np.zeros(nodes))},
                budget={
                    "o": (4 * D * parts, 0),
                    "m": (8 * parts, 0),
                    "l": (8 * parts, 0),
                    "order": (8 * parts, 0),
                    "node_o": (4 * D * pairs, 8 * D * pairs),
                    "node_m": (8 * pairs, 8 * pairs),
                    "node_l": (8 * pairs, 8 * pairs),
                    "counter": (0, 12 * pairs),
                    "out": (0, 4 * D),
                },
                alike=f"{parts} parts",
            )
            for how, order, sms in orders
        ]

    def shuffled(n: int) -> list[int]:
        return draw.sample(range(n), n)

    odd, many = 2 * draw.randint(4, 6) + 1, draw.randint(20, 30)
    return [
        *launches(8, [("in order", [*range(8)], 1), ("from the last one on", [*range(8)][::-1], 1)]),
        *launches(odd, [("shuffled", shuffled(odd), 1), ("in order", [*range(odd)], draw.randint(3, 5))]),
        *launches(many, [("shuffled", shuffled(many), draw.randint(2, 9)), ("shuffled anew", shuffled(many), 1)]),
    ]


# -- 12.6 ---------------------------------------------------------------------------------------------------------

TILE = 64
"""Keys of a tile of 12.6."""


def dealt(lengths: Array, sms: int = SMS, tile: int = TILE) -> Array:
    """Where the share of each SM begins, (sms, 2): the sequence, and the tile in it. One tile comes after another.

    >>> dealt(np.array([100, 0, 300]), sms=3).tolist()
    [[0, 0], [2, 0], [2, 2]]
    """
    ends = np.cumsum(-(-lengths // tile))
    first = np.arange(sms) * ends[-1] // sms
    sequence = (ends[None] <= first[:, None]).sum(1)
    return np.stack([sequence, first - np.append(0, ends)[sequence]], 1)


def shares(lengths: Array, sms: int = SMS, tile: int = TILE) -> Array:
    """How many keys each SM has of such a deal."""
    tiles = [min(tile, n - at) for n in map(int, lengths) for at in range(0, n, tile)]
    bounds = [n * len(tiles) // sms for n in range(sms + 1)]
    return np.array([sum(tiles[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)])


def skewed(draw: Random, sequences: int) -> Array:
    """Lengths as a server has them: many short ones, few that are very long, some of none."""
    lengths = [int(draw.lognormvariate(7.5, 1.4)) for _ in range(sequences - 2)]
    return np.array([*lengths, 0, draw.randint(250_000, 300_000)])[draw.sample(range(sequences), sequences)]


def _deal(draw: Random) -> list[Launch]:
    def launch(lengths: Array) -> Launch:
        due = dealt(lengths).astype(np.float64)
        return Launch(
            said=f"{len(lengths)} sequences, {int(lengths.min()):,} to {int(lengths.max()):,} keys",
            arguments={
                "lengths": lengths.astype(np.int32),
                "sequence": Empty((SMS,), "int32"),
                "tile": Empty((SMS,), "int32"),
                "n": np.int32(len(lengths)),
            },
            grid=(1,),
            block=(256,),
            tile=SMS,
            truth={name: Truth(due[:, n], np.full(SMS, 0.5)) for n, name in enumerate(("sequence", "tile"))},
            budget={"lengths": (4 * len(lengths), 0), "sequence": (0, 4 * SMS), "tile": (0, 4 * SMS)},
        )

    return [
        launch(np.full(256, 4096)),
        launch(skewed(draw, draw.randint(60, 250))),
        launch(np.array([draw.randint(400_000, 500_000)])),
        launch(skewed(draw, draw.randint(3, 30))),
    ]


EXERCISES = (
    KernelExercise(
        name="12.4",
        title="The last block merges",
        task="One launch in place of two. Each block has a chunk of a row's keys and leaves O, m and ℓ in HBM; that's given. Then "
        "it counts: one thread adds 1 to the row's counter. The block that finds all others there merges what all have left, in "
        "the order of the chunks, and stores out and the LSE. The others end. What a block has left must be visible before it "
        "counts: that takes a fence. And the counter must be 0 again at the end, for the next launch.",
        kernel="attend_and_merge",
        parameters="const float* s, const float* v, float* partial, float* partial_m, float* partial_l, int* counter, "
        "float* out, float* lse, int len",
        launches=_last_merges,
        hints=(
            "Each thread has stored something. So each makes a fence, then all meet at a barrier, and only then one counts.",
            "`atomicAdd(&counter[row], 1)` returns what was there before. The last block of `chunks` finds chunks − 1.",
            "Thread 0 alone knows what it returned. It lies in `before`, and a barrier tells the others: that one is given.",
            "The merge is that of 12.3. Divide once, after the loop. Thread 0 stores the LSE, and sets the counter to 0.",
        ),
        slips={
            "counter": "One addition for each block, by one thread, and one store of 0 by the last block.",
            "partial": "A block stores its row once. The last block reads each chunk's row once.",
            "partial_m": "Each warp reads one number for each chunk.",
            "partial_l": "Each warp reads one number for each chunk.",
            "out": "Only the last block stores out, once.",
            "lse": "One thread of the last block stores the LSE.",
            "race": "What one block stores another may read only if a fence and a count lie between.",
        },
        afterwards="Next: this is how flash_decoding spares the second launch: no block waits for another one.",
    ),
    KernelExercise(
        name="12.5",
        title="A merge with equal bits",
        task="Parts come in any order (`order` says in which), to any number of blocks. They are merged pair by pair: part 0 with "
        "1, 2 with 3, then these results, and so on up a tree. A block that has one side leaves it and counts. The first "
        "one stops there. The second one merges both, resets the counter and goes on. The bits of the result must not tell which "
        "that was. The check takes the same parts in several orders, on one block and on many.",
        kernel="merge_in_pairs",
        parameters="const float* o, const float* m, const float* l, const int* order, float* node_o, float* node_m, "
        "float* node_l, int* counter, float* out, int parts",
        launches=_in_pairs,
        hints=(
            "Leave, fence, barrier, count, barrier: as in 12.4. The counter of a pair is its left node's.",
            "A block that finds 1 in the counter is the second one, and `last` stays true. One that finds 0 stops.",
            "`merged(a, b)` and `merged(b, a)` differ in their last bits. The left part is the one with the smaller number.",
            "The block that merges sets the pair's counter to 0. No other will look at it again.",
        ),
        slips={
            "node_o": "Both sides of a pair leave theirs, and the second one reads the other's.",
            "counter": "Two additions for each pair, and one store of 0.",
            "out": "Only the block that has come to the root stores out.",
            "race": "A part is left, then comes a fence, then a barrier, and then the count.",
        },
        afterwards="Next: flash_decoding has this tree, and so a sequence has the same bits in any batch, on any GPU.",
        extra=True,
    ),
    KernelExercise(
        name="12.6",
        title="Uneven work",
        task="A server's sequences have any lengths, and only the device knows them. Deal them to 132 SMs, in tiles of 64 keys. "
        "Lay the tiles of all sequences in a row. SM t begins with tile number t · total / 132, rounded down. Find the sequence "
        "that this tile is in, and which of its tiles it is. One block does it. Nothing is sorted.",
        kernel="deal",
        parameters="const int* lengths, int* sequence, int* tile, int n",
        launches=_deal,
        hints=(
            "The tiles of a length are (length + 63) / 64. A thread beyond the last sequence has 0.",
            "In the prefix sum all threads read, then meet, then add, then meet: two barriers in each round.",
            "The sequence of tile number f is the first i with ends[i] > f. A sequence without keys is skipped by itself.",
            "In its sequence the tile is f − ends[i − 1], or f if i is 0.",
        ),
        slips={
            "lengths": "Each length is read once, by one thread.",
            "race": "Between reading ends[t − step] and writing ends[t] all threads meet, and once more after that.",
        },
        afterwards="Next: paged deals out its runs so, on the device: a CUDA graph follows lengths that no host has seen.",
        extra=True,
    ),
)

PREDICTIONS: tuple[Prediction, ...] = ()
"""The lesson's are beside its tile programs."""
