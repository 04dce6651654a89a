"""Lesson 10, the capstone: an empty file, a budget in bytes and in passes over the banks, a predicted time, a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from flashlab.lessons.exercise import FAR
from flashlab.lessons.kernel_exercise import KernelExercise, Launch
from flashlab.lessons.lesson05 import BC, BR, D, attention_launch
from flashlab.lessons.prediction import Prediction
from simulator import Problem, Tile, count

L2, FMA, EXP = 36.0, 128, 16
"""Bytes that the L2 gives an SM of an H200 in a clock while all SMs ask (measured), and what its units do in a clock (CUDA C++
Programming Guide, throughput of native arithmetic instructions)."""
ROOM = 1.25
"""What a right answer may take of the passes over the banks that 16-byte loads need."""


@dataclass(frozen=True)
class Forecast:
    """Clocks that one SM of an H200 needs for a launch, at least, by what would keep it busy."""

    memory: float
    sram: float
    arithmetic: float

    @property
    def clocks(self) -> float:
        return max(self.memory, self.sram, self.arithmetic)

    @property
    def score(self) -> int:
        """Of 100, which an answer has that waits for its arithmetic alone.

        >>> Forecast(memory=100, sram=400, arithmetic=200).score
        50
        """
        return round(100 * self.arithmetic / self.clocks)


def keys_loaded(heads: int, len_q: int, len_kv: int) -> int:
    """Keys in the tiles that all blocks visit, those past the end included.

    >>> keys_loaded(1, 128, 128), keys_loaded(2, 60, 70)
    (192, 192)
    """
    last = [min(first + BR, len_q) + len_kv - len_q for first in range(0, len_q, BR)]
    return heads * sum(-(-keys // BC) * BC for keys in last)


def passes(keys: int) -> int:
    """Passes over the banks where K and V go to SRAM and come back 16 bytes at a time.

    Of a load of 16 bytes each half of a warp takes a pass, also where all lanes ask for the same.
    """
    read, written = (BR // 32) * (D // 4) * 2, 4 * D // 128
    return 2 * keys * (read + written)


def forecast(launch: Launch, moved: Sequence[Mapping[str, Any]]) -> Forecast:
    """By sectors of memory, passes over the banks and shuffles, and the arithmetic of the tiles that are visited."""
    scores = BR * _keys(launch)
    sectors = sum(row["sectors"] for row in moved if row["space"] == "hbm")
    sram = sum(row["wavefronts"] for row in moved if row["space"] != "hbm")
    return Forecast(32 * sectors / L2, sram, scores * (2 * D / FMA + 1 / EXP))


def _keys(launch: Launch) -> int:
    return keys_loaded(launch.grid[1], int(launch.arguments["len_q"]), int(launch.arguments["len_kv"]))


def said(launch: Launch, moved: Sequence[Mapping[str, Any]]) -> str:
    """A launch's score, in a line."""
    f = forecast(launch, moved)
    return (
        f"score {f.score} of 100: {f.clocks:,.0f} clocks of an SM (arithmetic {f.arithmetic:,.0f}, SRAM {f.sram:,.0f}, "
        f"memory {f.memory:,.0f})"
    )


def _launches(draw: Random) -> list[Launch]:
    """As many keys as queries, and more; ragged; scores far below 0, and falling from far above it.

    In two of them the last key is the first of its tile. In the last one there would be room for BC more queries.
    """
    chosen = (
        attention_launch(draw, 2, 128, 128, causal=True),
        attention_launch(draw, 2, draw.randint(65, 90), 4 * BC + 1, FAR, causal=True),
        attention_launch(draw, 1, draw.randint(20, BC), 2 * BC + 1, (300, -300), causal=True),
    )
    return [replace(x, passes=int(ROOM * passes(_keys(x)))) for x in chosen]


EXERCISES = (
    KernelExercise(
        name="10.1",
        title="An empty page",
        task="FlashAttention-2 with a causal mask, from nothing. The file has a signature and two braces. The check wants right "
        "numbers at any length, and no race or access out of bounds. It wants the bytes of `flash2` with tiles of 64 × 32, which "
        "skips what the mask hides. And it allows as many passes over the banks of SRAM as 16-byte loads need, and a quarter more; "
        "each shuffle is a pass too. Then it predicts a time, and gives a score.",
        kernel="capstone",
        parameters="const float* q, const float* k, const float* v, float* out, float* lse, int len_q, int len_kv, float scale",
        launches=_launches,
        hints=(
            "Begin with your file of exercise 05.5. Its numbers are right except for the mask.",
            "Which is the last key that the *last* query of the tile sees? A tile of keys that begins after it isn't loaded.",
            "A score is hidden if its key is greater than `row + len_kv - len_q`: −INFINITY.",
            "`float4` in shared memory, in registers, and through `reinterpret_cast<const float4*>`: four numbers a load.",
        ),
        slips={
            "q": "A query is loaded once, before the loop.",
            "k": "Each block loads those tiles of K that its last query sees any of, once each, and no other.",
            "v": "Each block loads those tiles of V that its last query sees any of, once each, and no other.",
            "out": "out is written once, after the loop, and never read.",
            "lse": "One number for each query.",
            "passes": "A warp that reads K a float at a time makes four passes where a float4 makes two; a shuffle brings each "
            "lane a float in one pass, as such a read does. And a round over keys that no query of the tile sees takes as many "
            "as another.",
        },
        afterwards="That was a FlashAttention kernel, from an empty page. Now make one of your own.",
        score=said,
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

FIRST = Problem(batch=1, heads=2, len_q=128, head_dim=D, dtype="float32", causal=True)
"""The first launch of the exercise."""
_ROW = D * 4


def _k_bytes() -> int:
    return count("flash2", FIRST, tile=Tile(BR, BC)).by_tensor["k"].hbm_read


PREDICTIONS = (
    Prediction(
        name="10.1",
        truth=lambda: {"k": _k_bytes(), "passes": passes(keys_loaded(2, 128, 128))},
        slips=lambda: {
            "k": {
                "without the mask": 2 * 2 * 128 * _ROW,
                "once: but there are two tiles of queries, of which each loads what it sees": 2 * 128 * _ROW,
                "one head": _k_bytes() // 2,
                "elements, not bytes": _k_bytes() // 4,
            },
            "passes": {
                "K alone, or one pass for each load: but there is V, and each half of a warp takes a pass": 384
                * (2 * 16 + 1),
                "the reads of K alone: but there is V, and both are written": 384 * 2 * 16,
                "one float at a time": 2 * 384 * (2 * 32 + 1),
            },
        },
        because="The first tile of queries sees keys 0 to 63, the second one all 128: 192 rows of 128 bytes in each of 2 heads. "
        "Of K and of V each row is written in one pass. Two warps read it, 8 times 16 bytes, in two passes each time.",
    ),
)
