"""Lesson 15, what a cache costs: its exercise that is a tile program, its predictions, and what each form moves and computes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from random import Random
from typing import NamedTuple

from flashlab.lessons.exercise import APART, FAR, SCALE, Budget, Case, Exercise, Truth, levelled
from flashlab.lessons.lesson12 import FALLING, DecodingCase
from flashlab.lessons.prediction import Prediction
from simulator import DEVICES, Problem, Tile, count
from simulator.config import padded
from simulator.dtypes import Array
from simulator.operations.latent import HEAD_DIM, HEAD_DIM_V, LATENT, latent_problem

HEADS, DIM, ROPE = 128, 128, 64
"""Query heads of the lesson's layer, and the numbers of a head: those without a position, and those with one."""


# -- 15.2 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentCase(DecodingCase):
    """A case over latent rows. What bends the scores are numbers with a position: the values don't have them."""

    @property
    def shapes(self) -> str:
        p = self.problem
        return f"q {(p.batch, p.heads, p.len_q, p.head_dim)}, latent {(p.batch, 1, p.len_kv, p.head_dim)}"

    def arrays(self) -> dict[str, Array]:
        p, given = self.problem, LATENT.draw(self.problem, self.seed)
        if any(self.level):
            rows, latent = (given[name][..., ::-1] for name in ("q", "latent"))
            packed = rows.swapaxes(1, 2).reshape(p.batch, 1, -1, HEAD_DIM)  # heads are rows: every other one is apart
            packed, latent = levelled(packed, latent, p.scale, self.level, self.apart)
            rows = packed.reshape(p.batch, p.len_q, p.heads, HEAD_DIM).swapaxes(1, 2)
            given = {"q": rows[..., ::-1].copy(), "latent": latent[..., ::-1].copy()}
        return given


def _latent_cases(draw: Random) -> list[Case]:
    """A full tile of heads; more than one; a few new tokens under a causal mask; scores that are far apart; no key at all."""
    first = latent_problem(heads=16, len_kv=128, dtype="float16")
    more = first.replace(heads=16 + draw.randint(1, 9), batch=2, len_kv=draw.randint(40, 90))
    few = first.replace(heads=draw.choice((3, 5, 7)), len_kv=draw.randint(5, 30), scale=SCALE)
    drafts = first.replace(heads=draw.randint(5, 7), len_q=draw.randint(4, 5), len_kv=draw.randint(40, 70), causal=True)
    some = [(first, Tile(16, 32)), (more, Tile(16, 32)), (few, Tile(32, 16)), (drafts, Tile(16, 16))]
    some.append((few.replace(len_kv=0), Tile(16, 16)))
    far = first.replace(heads=draw.randint(9, 20), len_kv=draw.randint(40, 70), scale=SCALE)
    return [
        *(LatentCase(p, tile, draw.getrandbits(32)) for p, tile in some),
        *(LatentCase(far, Tile(16, 16), draw.getrandbits(32), level=level, apart=APART) for level in (FAR, FALLING)),
    ]


def _latent_truth(problem: Problem, q: Array, latent: Array) -> Truth:
    """Attention to the rows in float64, and the rule of `fl.verify` for every row."""
    given = {"q": q, "latent": latent}
    right = LATENT.judge(problem, given)
    return Truth(right["out"], LATENT.bounds(problem, given, right)["out"][..., None], by_row=True)


def _latent_budget(problem: Problem, tile: Tile) -> Budget:
    """Each latent row once for as many heads as a tile has rows, and nothing for V."""
    p, rows = problem, problem.heads * problem.len_q
    blocks = p.batch * ceil(rows / tile.rows)
    pairs = blocks * p.key_tiles(tile)
    moved = {"q": (p.batch * rows * 2 * HEAD_DIM, 0), "latent": (blocks * p.len_kv * 2 * HEAD_DIM, 0)}
    flops = 2 * pairs * padded(tile.rows) * padded(tile.cols) * (HEAD_DIM + HEAD_DIM_V)
    return Budget(
        {name: both for name, both in moved.items() if any(both)} | {"out": (0, p.batch * rows * 2 * HEAD_DIM_V)},
        matmul=flops,
        exp=pairs * tile.rows * tile.cols,
    )


EXERCISES = (
    Exercise(
        name="15.2",
        title="One tile, K and V",
        task="The queries have absorbed A, and the rows of the cache are the keys of all heads. Write the loop over them. All "
        "heads are rows of a tile, up to tile.rows of them, and so are the queries of a few new tokens. A tile of latent rows "
        "is loaded once: with all of its columns it is K, and with the first 512 it is V. The check counts: 1,152 bytes for a "
        "row of the cache, once for all heads of a tile, and not a byte for V.",
        cases=_latent_cases,
        truth=_latent_truth,
        budget=_latent_budget,
        hints=(
            "`q, rows = m.packed(q), m.packed(out)`, as in 12.1. Three new tokens of seven heads are 21 rows, which fill two "
            "tiles of 16: `-(-q.rows // tile.rows)`.",
            "`k_j = block.load(latent, j, tile.cols)` brings all 576 columns. A score takes them all.",
            "`k_j.columns(0, problem.head_dim_v)` are the first 512 columns of the tile that is there. They are V's tile.",
            "The mask has to know that `group` rows belong to one query: `block.mask(s, block.i, j, group=group)`.",
        ),
        slips={
            "q": "Each row of queries is loaded once.",
            "latent": "A tile of latent rows is loaded once for all rows of the block, and serves as K and as V. A second load "
            "for V doubles what is read, and a block for each head multiplies it.",
            "out": "Each row of out is stored once, after the loop.",
        },
        afterwards="Next: this is what mla.cu does, but for its chunks. With 128 heads a row that was read is used 128 times, and "
        "reading isn't what takes the time any more.",
    ),
)


# -- four caches --------------------------------------------------------------------------------------------------


def token_bytes(kv_heads: int, dim: int = 2 * DIM, bits: int = 16, scales: int = 0) -> int:
    """Bytes of a token in one layer's cache: `kv_heads` times `dim` numbers, and `scales` of float32 for each head.

    >>> token_bytes(128), token_bytes(8), token_bytes(1), token_bytes(1, 576)
    (65536, 4096, 512, 1152)
    """
    return kv_heads * (dim * bits // 8 + 4 * scales)


class Cache(NamedTuple):
    """A cache of the lesson's layer: bytes of a token, and FLOPs of a query of all heads for a token."""

    token: int
    flops: int

    def nanoseconds(self, queries: int = 1, device: str = "h200") -> tuple[float, float]:
        """How long a token takes a GPU at least, by its data sheet: to be read, and to be computed with."""
        gpu = DEVICES[device]
        return self.token / gpu.bandwidth * 1e9, queries * self.flops / gpu.flops("bfloat16") * 1e9


def cached(name: str, keys: int = 4096) -> int:
    """Bytes that a launch of decoding reads of one of the four caches for each key, as the machine counts them.

    >>> cached("one latent row")
    1152
    """
    p = Problem(batch=1, heads=HEADS, kv_heads=8, len_q=1, len_kv=keys, head_dim=DIM, dtype="bfloat16")
    posed = {
        "128 heads": ("flash_decoding", p.replace(kv_heads=HEADS)),
        "8 heads": ("flash_decoding", p),
        "one latent row": ("mla", latent_problem(heads=64, len_kv=keys)),  # as many heads as a tile has rows: one read
        "8 heads, 8 bits": ("flash_decoding", p.replace(kv_dtype="int8", k_scale="token", v_scale="token")),
    }
    moved = count(posed[name][0], posed[name][1], device="h200").by_tensor
    return sum(moved[x].hbm_read for x in ("k", "v", "k_scale", "v_scale", "latent") if x in moved) // keys


_PLAIN = 2 * HEADS * 2 * DIM
CACHES = {
    "128 heads": Cache(token_bytes(HEADS), _PLAIN),
    "8 heads": Cache(token_bytes(8), _PLAIN),
    "one latent row": Cache(token_bytes(1, HEAD_DIM), 2 * HEADS * (HEAD_DIM + HEAD_DIM_V)),
    "8 heads, 8 bits": Cache(token_bytes(8, bits=8, scales=2), _PLAIN),
}
"""The four caches of the puzzle. K and V of 8 bits have a scale each, of float32, for each head of a token."""


# -- two forms ----------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """What a form of latent attention moves of its cache and of what it makes of it, and its FLOPs."""

    nbytes: int
    flops: int

    def seconds(self, bandwidth: float, rate: float) -> float:
        """What the slower of both takes."""
        return max(self.nbytes / bandwidth, self.flops / rate)


def absorbed(heads: int, queries: int, keys: int) -> Form:
    """Rows as they lie, once for all heads; each query absorbs A, and each output gets B.

    >>> absorbed(128, 1, 8192).nbytes // 8192
    1152
    """
    matrices = 2 * DIM * HEAD_DIM_V
    return Form(2 * keys * HEAD_DIM, 2 * heads * queries * (keys * (HEAD_DIM + HEAD_DIM_V) + matrices))


def unfolded(heads: int, queries: int, keys: int) -> Form:
    """Each head's keys and values are made of the rows, written, and read by plain attention.

    >>> unfolded(128, 1, 8192).nbytes // 8192
    164992
    """
    made, matrices = 2 * keys * heads * (2 * DIM + ROPE), 2 * DIM * HEAD_DIM_V
    flops = 2 * heads * keys * (matrices + queries * (2 * DIM + ROPE))
    return Form(2 * keys * HEAD_DIM + 2 * made, flops)


def crossing(device: str | None = None, heads: int = HEADS, keys: int = 1 << 20) -> int:
    """The least number of queries with which the absorbed form loses: by FLOPs alone, or by its time on a GPU.

    >>> crossing(), crossing("h200"), crossing("l4")
    (171, 171, 239)
    """

    def cost(form: Form) -> float:
        return (
            form.flops if device is None else form.seconds(DEVICES[device].bandwidth, DEVICES[device].flops("bfloat16"))
        )

    low, high = 0, 1 << 16  # it wins with few queries, and loses with many
    while high - low > 1:
        queries = (low + high) // 2
        wins = cost(absorbed(heads, queries, keys)) <= cost(unfolded(heads, queries, keys))
        low, high = (queries, high) if wins else (low, queries)
    return high


# -- predictions --------------------------------------------------------------------------------------------------

_ROW, _EIGHT = CACHES["one latent row"], CACHES["8 heads, 8 bits"].token
_PER_HEAD = _ROW.flops / HEADS / _ROW.token
_RIDGE = DEVICES["h200"].ridge("bfloat16")


PREDICTIONS = (
    Prediction(
        name="15.1",
        truth=lambda: {
            "mha": token_bytes(HEADS),
            "gqa": token_bytes(8),
            "mqa": token_bytes(1),
            "mla": token_bytes(1, HEAD_DIM),
        },
        slips=lambda: {
            **{
                name: {
                    "elements, not bytes": token_bytes(heads) // 2,
                    "in 32 bits": 2 * token_bytes(heads),
                }
                for name, heads in (("mha", HEADS), ("gqa", 8), ("mqa", 1))
            },
            "mla": {
                "elements, not bytes": HEAD_DIM,
                "the row as K, and 512 numbers of it once more as V: but V lies inside": 2 * (HEAD_DIM + HEAD_DIM_V),
                "without the 64 numbers that carry the position": 2 * HEAD_DIM_V,
                "for each head: but all heads share the row": 2 * HEAD_DIM * HEADS,
                "K and V, both of 576": 4 * HEAD_DIM,
            },
        },
        because="K and V of a head are 2 · 128 numbers of 2 bytes: 512 bytes, 128 times, 8 times, or once. A latent row has 512 + "
        "64 numbers: 1,152 bytes, for all heads, and its values lie inside. That is 57 times less than with 128 heads.",
    ),
    Prediction(
        name="15.2",
        truth=lambda: {"gqa": _EIGHT, "mla": token_bytes(1, HEAD_DIM, bits=8, scales=1), "saved": 1 - _EIGHT / 4096},
        slips=lambda: {
            "gqa": {
                "without the scales": 2048,
                "K alone": _EIGHT // 2,
                "in 16 bits, with scales": 4096 + 64,
                "one head": _EIGHT // 8,
            },
            "mla": {"in 16 bits": 2 * HEAD_DIM, "a scale for each number": 5 * HEAD_DIM},
            "saved": {
                "half: but the scales take their part": 0.5,
                "what is left, not what is saved": _EIGHT / 4096,
                "per cent: say 0.5 for a half": 100 * (1 - _EIGHT / 4096),
            },
        },
        because="8 heads · 2 · 128 bytes are 2,048, and 16 scales of 4 bytes are 64: 3 % more. A cache of 8 bits isn't quite half "
        "of one of 16. The latent row has one scale for 576 numbers: 580 bytes.",
    ),
    Prediction(
        name="15.3",
        truth=lambda: {"heads": floor(_RIDGE / _PER_HEAD) + 1},
        slips=lambda: {
            "heads": {
                "scores alone, without the output": _RIDGE / (2 * HEAD_DIM / _ROW.token),
                "a multiply-add counted once: but it is two FLOPs": 2 * _RIDGE / _PER_HEAD,
                "an H100's ridge": DEVICES["h100"].ridge("bfloat16") / _PER_HEAD,
                "one: but then a byte gets two FLOPs": 1,
            }
        },
        because="A head does 2 · (576 + 512) FLOPs with the 1,152 bytes of a row: 1.89 for each byte. An H200 can do 206 in the "
        "time of a byte, so 110 heads are enough. With several new tokens count heads times queries.",
    ),
    Prediction(
        name="15.4",
        truth=lambda: {"len_q": crossing()},
        slips=lambda: {
            "len_q": {
                "one: but what is unfolded has to be made first": 1,
                "keys alone are made: but values are, too": DIM * HEAD_DIM_V / 768,
                "the pairs of the absorbed form alone: the other one has pairs as well": 2 * DIM * HEAD_DIM_V / 1088,
                "1,088 and 320 added: but the one is saved, and the other one is paid": 2 * DIM * HEAD_DIM_V / 1408,
                "a multiply-add counted twice on one side": 4 * DIM * HEAD_DIM_V / 768,
            }
        },
        because="To unfold a row takes each head 2 · 128 · 512 multiply-adds: 131,072. Then a query saves 1,088 − 320 = 768 with "
        "it. 171 queries pay for it.",
    ),
)
