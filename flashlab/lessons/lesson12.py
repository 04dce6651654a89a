"""Lesson 12, one token at a time: its exercises that are tile programs, its predictions, and what a token moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np

from flashlab.lessons.exercise import (
    APART,
    FAR,
    SCALE,
    Budget,
    Case,
    Exercise,
    Level,
    attention_truth,
    attention_truth_with_lse,
    levelled,
)
from flashlab.lessons.prediction import Prediction
from simulator import DEVICES, Counts, Problem, Tile, count, random_inputs
from simulator.config import padded
from simulator.dtypes import Array
from simulator.problem import row_bytes

SMS = 132
"""Of an H100 or an H200: so many blocks 12.3 wants at least."""
KEYS_PER_HEAD = 32
"""For each query head of a group, in a chunk of 12.3 at least."""
FALLING: Level = (FAR[1], FAR[0])
"""Scores far below 0, whose maximum comes first."""


@dataclass(frozen=True)
class DecodingCase(Case):
    """A case whose queries' heads are rows: scores are `apart` from head to head of a group, and not from query to query."""

    heads_are_rows: ClassVar[bool] = True

    def inputs(self) -> tuple[Array, Array, Array]:
        p = self.problem
        q, k, v = random_inputs(p, self.seed)
        if any(self.level):
            rows = q.reshape(p.batch, p.kv_heads, p.queries_per_kv, p.head_dim)
            rows, k = levelled(rows, k, p.scale, self.level, self.apart)
            q = rows.reshape(q.shape)
        return q, k, v


def _far(problem: Problem, tile: Tile, draw: Random) -> DecodingCase:
    """Scores far below 0 and rising, heads apart, and a scale that isn't 1 / sqrt(d)."""
    return DecodingCase(problem.replace(scale=SCALE), tile, draw.getrandbits(32), level=FAR, apart=APART)


# -- 12.1 ---------------------------------------------------------------------------------------------------------


def _group_cases(draw: Random) -> list[Case]:
    """Groups of four and of an odd number; one that fills more than a tile; one head each; scores that are far apart."""
    first = Problem(batch=1, heads=8, kv_heads=2, len_q=1, len_kv=256, head_dim=64, dtype="float16")
    odd, kv_heads = draw.choice((3, 5, 7)), draw.randint(2, 3)
    wide = 16 + draw.randint(1, 9)
    ragged = first.replace(
        batch=2, heads=odd * kv_heads, kv_heads=kv_heads, len_kv=draw.randint(70, 200), head_dim=40, causal=True
    )
    cases = [
        (first, Tile(16, 64)),
        (ragged, Tile(8, 32)),
        (first.replace(heads=wide * 2, len_kv=draw.randint(40, 90)), Tile(16, 32)),
        (first.replace(heads=3, kv_heads=3, len_kv=draw.randint(20, 60), dtype="float32"), Tile(16, 16)),
    ]
    last = first.replace(heads=12, len_kv=draw.randint(70, 120), head_dim=24, dtype="float32")
    return [*(DecodingCase(p, tile, draw.getrandbits(32)) for p, tile in cases), _far(last, Tile(16, 32), draw)]


def _row_tiles(p: Problem, tile: Tile) -> int:
    """How many tiles the query heads of a group fill."""
    return -(-p.queries_per_kv // tile.rows)


def _walked(p: Problem, tile: Tile, pairs: int, keys: int, queries: int) -> tuple[dict[str, tuple[int, int]], Budget]:
    """What walks over keys move and compute: so many pairs of tiles, rows of K and V, and rows of Q."""
    d, dv = row_bytes(p.head_dim, p.itemsize), row_bytes(p.head_dim_v, p.itemsize)
    moved = {"q": (queries * d, 0)} | ({"k": (keys * d, 0), "v": (keys * dv, 0)} if keys else {})
    products = padded(tile.rows) * padded(tile.cols) * (padded(p.head_dim) + padded(p.head_dim_v))
    return moved, Budget({}, matmul=2 * pairs * products, exp=pairs * tile.rows * tile.cols)


def _group_budget(problem: Problem, tile: Tile) -> Budget:
    """K and V once for each row tile of a group: once, up to as many heads as a tile has rows."""
    p = problem
    blocks, heads = p.batch * p.kv_heads * _row_tiles(p, tile), p.batch * p.heads
    moved, work = _walked(p, tile, blocks * p.key_tiles(tile), blocks * p.len_kv, heads)
    return replace(work, tensors=moved | {"out": (0, heads * row_bytes(p.head_dim_v, p.itemsize))})


# -- 12.2 ---------------------------------------------------------------------------------------------------------


def _half_cases(draw: Random) -> list[Case]:
    """Two full halves; ragged ones; a half without keys; rows that a mask leaves half, or nothing at all; no key at all."""
    first = Problem(batch=1, heads=2, len_q=32, len_kv=256, head_dim=64, dtype="float16")
    few = first.replace(len_q=draw.randint(3, 12), len_kv=draw.randint(5, 30), head_dim=40)
    masked = first.replace(len_q=(n := draw.randint(40, 70)), len_kv=n - draw.randint(5, 20), causal=True)
    one = first.replace(len_q=1, len_kv=draw.randint(70, 150), dtype="float32", scale=SCALE)
    far = one.replace(len_q=draw.randint(5, 20), head_dim=24)
    short = far.replace(len_kv=draw.randint(5, 16))  # its second half is empty, and the LSE of the first is far below 0
    return [
        Case(first, Tile(16, 64), draw.getrandbits(32)),
        Case(few, Tile(16, 32), draw.getrandbits(32)),
        Case(masked, Tile(16, 16), draw.getrandbits(32)),
        Case(one, Tile(16, 16), draw.getrandbits(32)),
        Case(one.replace(len_kv=0), Tile(16, 16), draw.getrandbits(32)),
        Case(far, Tile(16, 16), draw.getrandbits(32), level=FAR, apart=APART),
        Case(far, Tile(16, 16), draw.getrandbits(32), level=FALLING, apart=APART),
        Case(short, Tile(16, 16), draw.getrandbits(32), level=FAR, apart=APART),
    ]


def _half_budget(problem: Problem, tile: Tile) -> Budget:
    """The halves read Q twice, and K and V as FlashAttention-2 does. What they leave is written once and read once."""
    p = problem
    blocks, queries = p.batch * p.heads * p.row_tiles(tile), p.batch * p.heads * p.len_q
    moved, work = _walked(p, tile, blocks * p.key_tiles(tile), blocks * p.len_kv, 2 * queries)
    left = 2 * queries * row_bytes(p.head_dim_v, 4), 2 * queries * 4
    moved |= {"partial": (left[0], left[0]), "partial_lse": (left[1], left[1])}
    moved |= {"out": (0, queries * row_bytes(p.head_dim_v, p.itemsize)), "lse": (0, 4 * queries)}
    return replace(work, tensors=moved)


# -- 12.3 ---------------------------------------------------------------------------------------------------------


def chunk_tiles(problem: Problem, tile: Tile) -> int:
    """How many tiles of keys a chunk of 12.3 has: `SMS` blocks, or more, but `KEYS_PER_HEAD` keys for each head of a group.

    >>> token = Problem(batch=1, heads=32, kv_heads=8, len_q=1, len_kv=8192, head_dim=128, dtype="float16")
    >>> [chunk_tiles(token.replace(batch=n), Tile(16, 32)) for n in (1, 4, 64)]
    [15, 51, 256]
    """
    p = problem
    needed = -(-SMS // (p.batch * p.kv_heads * _row_tiles(p, tile)))
    return max(-(-KEYS_PER_HEAD * p.queries_per_kv // tile.cols), p.key_tiles(tile) // needed)


def _split_cases(draw: Random) -> list[Case]:
    """Few blocks and many; chunks that the bytes make longer; a last chunk that is shorter; no key at all; far scores."""
    first = Problem(batch=2, heads=32, kv_heads=16, len_q=1, len_kv=640, head_dim=32, dtype="float16")
    long = first.replace(batch=1, heads=12, kv_heads=12, len_kv=16 * draw.randint(50, 70) + draw.randint(1, 15))
    many = first.replace(batch=9, heads=16, len_kv=draw.randint(100, 150), head_dim=24)
    group = first.replace(batch=1, heads=20, kv_heads=4, len_kv=draw.randint(500, 900), head_dim=40)
    wide = first.replace(
        batch=3, heads=9 * 11, kv_heads=11, len_kv=64 * draw.randint(10, 11) - draw.randint(0, 31), head_dim=16
    )
    far = first.replace(batch=1, heads=40, kv_heads=20, len_kv=draw.randint(700, 900), dtype="float32")
    cases = [
        (first, Tile(16, 32)),
        (long, Tile(16, 16)),
        (many, Tile(16, 16)),
        (group, Tile(16, 64)),
        (wide, Tile(8, 32)),
        (first.replace(batch=1, len_kv=0), Tile(16, 16)),
    ]
    others = _far(far, Tile(16, 16), draw), replace(_far(far, Tile(16, 16), draw), level=FALLING)
    return [*(DecodingCase(p, tile, draw.getrandbits(32)) for p, tile in cases), *others]


def _split_budget(problem: Problem, tile: Tile) -> Budget:
    """K and V once; of each chunk of each head O, m and l in float32, written once and read once."""
    p, heads = problem, problem.batch * problem.heads
    chunks = max(1, -(-p.key_tiles(tile) // chunk_tiles(p, tile)))
    blocks = p.batch * p.kv_heads * _row_tiles(p, tile)
    moved, work = _walked(p, tile, blocks * p.key_tiles(tile), blocks * p.len_kv, chunks * heads)
    o, number = heads * chunks * row_bytes(p.head_dim_v, 4), heads * chunks * 4
    moved |= {"partial": (o, o), "partial_m": (number, number), "partial_l": (number, number)}
    return replace(work, tensors=moved | {"out": (0, heads * row_bytes(p.head_dim_v, p.itemsize))})


EXERCISES = (
    Exercise(
        name="12.1",
        title="The heads of a group as rows",
        task="One new token: each query head has one query. Query heads that share a KV head ask for the same keys. So make them "
        "rows of one tile: a block has a KV head and up to tile.rows heads of its group, and walks over all keys. K and V are "
        "then loaded once for all of these rows. The arithmetic is that of 04.1, and each row has its own maximum.",
        cases=_group_cases,
        truth=attention_truth,
        budget=_group_budget,
        hints=(
            "`q, rows = m.packed(q), m.packed(out)`: row g is query head g of the group. The launch gets `of=q`, the packed one.",
            "A group of 20 heads fills two tiles of 16 rows: `-(-problem.queries_per_kv // tile.rows)` rounds up.",
            "In the loop nothing knows that rows are heads. It is the loop of 04.1, with `block.load(k, j, tile.cols)`.",
            "The results go to the packed handle, `block.store(rows, …)`. What is returned is out itself.",
        ),
        slips={
            "q": "Each head's query is loaded once, by the block of its KV head.",
            "k": "A tile of K is loaded once for all heads of a group that are rows of the block. A block for each query head "
            "loads it as often as the group has heads.",
            "v": "A tile of V is loaded once for all heads of a group that are rows of the block.",
            "out": "Each head's row is stored once, after the loop.",
        },
        afterwards="Next: K and V are read once now. But there are only as many blocks as KV heads.",
    ),
    Exercise(
        name="12.2",
        title="Merge two partial results",
        task="The keys are cut into two halves. For each row a block has seen one half, and left the output O of that half, "
        "divided by its own sum, and its LSE. Write the launch that makes one result of both: out, and the LSE over all keys. "
        "A half may be empty: then its O is 0 and its LSE −∞. If both are, so is the result: no NaN anywhere. Each partial "
        "result is read once.",
        cases=_half_cases,
        truth=attention_truth_with_lse,
        budget=_half_budget,
        hints=(
            "e^LSE is the sum of a half's exponentials. So a half weighs e^LSE beside the other.",
            "e^LSE overflows. Subtract the larger LSE from both first; if both are −∞, `.finite()` makes that 0.",
            "Each O was divided already. The weighted mean is (O_a a + O_b b) / (a + b). Divide once, by `.nonzero()`.",
            "The LSE of both is the larger one, plus `block.log` of the sum of both weights.",
        ),
        slips={
            "partial": "The merge reads the O of each half once, and writes none.",
            "partial_lse": "The merge reads the LSE of each half once.",
            "q": "The merge needs no query: an LSE has all of what the scores said.",
            "k": "The merge needs no key: an LSE has all of what the scores said.",
            "out": "Each row of out is stored once.",
            "lse": "Each row's LSE is stored once.",
        },
        afterwards="Next: two halves, or five hundred chunks. Merging two results gives a result, which can be merged again.",
    ),
    Exercise(
        name="12.3",
        title="Split the keys",
        task="Now as many chunks as the GPU needs. `chunk_tiles` chooses: as few chunks as make at least 132 blocks, all "
        "sequences and KV heads together, a chunk's length being rounded down. But a chunk has at least 32 keys for each head "
        "of its group, rounded up to whole tiles, even if that leaves fewer blocks. A block leaves O, m and ℓ of its chunk, "
        "undivided. The second launch has a block for each head, which merges its chunks in order, and divides once. The "
        "budget: K and V once, each partial number written once and read once.",
        cases=_split_cases,
        truth=attention_truth,
        budget=_split_budget,
        hints=(
            "One chunk makes problem.batch · problem.kv_heads · (tiles of the group's heads) blocks. 132 over that, rounded up, "
            "is the number of chunks.",
            "Chunk c has the tiles c · size to (c + 1) · size, and the last one ends with the keys: `min(…, keys)`.",
            "`m.packed(o_of).at(chunk=block.j)` takes the block's rows. In the merge `o_of.at(chunk=c)` has one head's row.",
            "The merge is 04.1's update with another side in place of a tile: alpha for what is there, beta for what comes.",
        ),
        slips={
            "q": "Each chunk loads the queries of its group once. Is the number of chunks the right one?",
            "k": "Each tile of K belongs to one chunk, whose block loads it once.",
            "v": "Each tile of V belongs to one chunk, whose block loads it once.",
            "partial": "One row for each head and chunk, written once and read once. Is the number of chunks the right one?",
            "partial_m": "One number for each head and chunk, written once and read once.",
            "partial_l": "One number for each head and chunk, written once and read once.",
            "out": "Each head's row is stored once, by the second launch.",
        },
        afterwards="Next: the second launch begins when the last block of the first one has ended. It needn't.",
    ),
)


# -- the small model ----------------------------------------------------------------------------------------------

LAYERS, WIDTH, HIDDEN, VOCABULARY = 8, 384, 1024, 1024
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 64
"""Of the small model whose layer `fl.sample` has."""
MULTIPLIED = LAYERS * (2 * WIDTH * HEADS * HEAD_DIM + 2 * WIDTH * KV_HEADS * HEAD_DIM + 3 * WIDTH * HIDDEN) + (
    WIDTH * VOCABULARY
)
"""Its weights that each token is multiplied by: all but the table of tokens and the scales of the norms."""
A_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
"""Bytes of a token in its KV cache, in 16 bits: K and V of each KV head of each layer."""


class Step(NamedTuple):
    """What the small model needs for a step: bytes of its weights and of its cache, and FLOPs."""

    weights: int
    cache: int
    flops: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / (self.weights + self.cache)


def step_of(new: int, known: int = 0, sequences: int = 1) -> Step:
    """A step of the small model with so many new tokens of each sequence, after `known` ones. All in 16 bits, each byte once.

    >>> step_of(1, known=1023).weights == step_of(1024).weights
    True
    """
    pairs = new * known + new * (new + 1) // 2  # a new token sees all that are known, and those before it
    flops = 2 * MULTIPLIED * new + 4 * HEADS * HEAD_DIM * LAYERS * pairs
    return Step(2 * MULTIPLIED, A_TOKEN * (known + new) * sequences, flops * sequences)


# -- what a token's attention moves -------------------------------------------------------------------------------

TOKEN = Problem(batch=1, heads=32, kv_heads=8, len_q=1, len_kv=8192, head_dim=128, dtype="bfloat16")
"""One new token: 32 query heads that share 8 KV heads, after 8,192 tokens. It was measured."""
LONG = TOKEN.replace(len_kv=65_536)


def kv_bytes(problem: Problem) -> int:
    """K and V, once."""
    p = problem
    return p.batch * p.kv_heads * p.len_kv * sum(row_bytes(d, p.itemsize) for d in (p.head_dim, p.head_dim_v))


def token(name: str, problem: Problem = TOKEN) -> Counts:
    """What an algorithm moves for a token.

    >>> [token(name).launches[0].blocks for name in ("flash2", "flash_decoding_1")]
    [32, 8]
    """
    return count(name, problem, device="h200")


def microseconds(problem: Problem) -> float:
    """How long an H200 takes at least to read K and V, by its data sheet."""
    return kv_bytes(problem) / DEVICES["h200"].bandwidth * 1e6


def price(chunk: int, problem: Problem = TOKEN) -> float:
    """What partial results cost, as a part of K and V: O, m and l of each head of a group, written and read, for each chunk.

    >>> f"{price(128):.2%}"
    '6.35%'
    """
    p = problem
    numbers = p.queries_per_kv * (p.head_dim_v + 2)
    return 2 * 4 * numbers / (chunk * sum(row_bytes(d, p.itemsize) for d in (p.head_dim, p.head_dim_v)))


def in_chunks(problem: Problem, q: Array, k: Array, v: Array, size: int, order: Sequence[int] | None = None) -> Array:
    """The output of one query of one head in chunks of so many keys, each merged with what came before: float32, (head_dim,).

    q (head_dim,), k and v (keys, head_dim). `order` says which chunk comes when; None, that of the keys.
    """
    chunks = [slice(a, a + size) for a in range(0, len(k), size)]
    m, l, o = np.float32(-np.inf), np.float32(0), np.zeros(v.shape[-1], np.float32)
    for n in order if order is not None else range(len(chunks)):
        s = (k[chunks[n]].astype(np.float32) @ q.astype(np.float32)) * np.float32(problem.scale)
        top = np.maximum(m, s.max())
        p, alpha = np.exp(s - top), np.exp(m - top)
        m, l, o = top, l * alpha + p.sum(), o * alpha + p @ v[chunks[n]].astype(np.float32)
    return o / l


# -- predictions --------------------------------------------------------------------------------------------------

_K = kv_bytes(TOKEN) // 2

PREDICTIONS = (
    Prediction(
        name="12.1",
        truth=lambda: {
            "k_by_head": token("flash2").by_tensor["k"].hbm_read,
            "k_by_group": token("flash_decoding_1").by_tensor["k"].hbm_read,
            "sms": token("flash_decoding_1").launches[0].blocks,
        },
        slips=lambda: {
            "k_by_head": {
                "once: but each of 32 query heads has a block, which reads the K of its KV head": _K,
                "elements, not bytes": 2 * _K,
                "K and V": 8 * _K,
                "one head only": _K // 8,
            },
            "k_by_group": {
                "once for each query head: but four of them are rows of one block": 4 * _K,
                "elements, not bytes": _K // 2,
                "K and V": 2 * _K,
                "one head only": _K // 8,
            },
            "sms": {
                "all of them: but there are only as many blocks as KV heads": SMS,
                "a block for each query head: that was before": 32,
                "one: there is one query, but it has eight KV heads": 1,
            },
        },
        because="With a block for each query head K goes by four times, and with one for each KV head once. But that leaves "
        "eight blocks: of 132 SMs, 124 do nothing. Fewer bytes, and fewer hands to carry them.",
    ),
    Prediction(
        name="12.2",
        truth=lambda: {"us_8k": microseconds(TOKEN), "us_64k": microseconds(LONG)},
        slips=lambda: {
            "us_8k": {
                "K alone, or elements and not bytes": microseconds(TOKEN) / 2,
                "K and V for each query head": 4 * microseconds(TOKEN),
                "milliseconds": microseconds(TOKEN) / 1e3,
            },
            "us_64k": {
                "K alone, or elements and not bytes": microseconds(LONG) / 2,
                "K and V for each query head": 4 * microseconds(LONG),
                "the same as for 8k": microseconds(TOKEN),
                "milliseconds": microseconds(LONG) / 1e3,
            },
        },
        because="2 · 8 heads · 8,192 keys · 128 · 2 bytes are 33.6 MB, and the data sheet says 4.8 TB/s. Eight times the keys are "
        "eight times the bytes.",
    ),
    Prediction(
        name="12.3",
        truth=lambda: {f"at_{chunk}": price(chunk) for chunk in (64, 512, 4096)},
        slips=lambda: {
            f"at_{chunk}": {
                "written only, or in 16 bits: but the merge reads it, too, and it is float32": price(chunk) / 2,
                "for one head: but each head of the group has a row": price(chunk) / 4,
                "per cent: say 0.5 for a half": price(chunk) * 100,
            }
            for chunk in (64, 512, 4096)
        },
        because="A chunk of c keys has 4 · 128 · c bytes of K and V together. It leaves 130 floats for each of four heads, written "
        "once and read once: 8 · 130 · 4. That's nearly 2 · 4 / c.",
    ),
)
