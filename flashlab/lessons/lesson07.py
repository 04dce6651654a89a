"""Lesson 07, measuring: its exercises, whose answers are `.cu` files, its predictions, and what was measured on a GPU."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from random import Random
from typing import Any

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import Truth
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers, sums
from flashlab.lessons.prediction import Prediction


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """What was counted and timed on an H200: "device", "summary", "launches" (bytes), "times"; an extract of docs/results.

    >>> measured()["device"]["name"]
    'NVIDIA H200'
    """
    return json.loads(files("flashlab").joinpath("data", "measured.json").read_text(encoding="utf-8"))


def launches_of(case: str) -> list[dict[str, Any]]:
    """The measured launches of a case, in order."""
    return [row for row in measured()["launches"] if row["case"] == case]


def _transpose(draw: Random) -> list[Launch]:
    def launch(rows: int, cols: int) -> Launch:
        x = numbers(draw, rows, cols)
        y = x.astype(np.float64).T
        return Launch(
            said=f"x ({rows}, {cols})",
            arguments={"x": x, "y": Empty(y.shape), "rows": np.int32(rows), "cols": np.int32(cols)},
            grid=(-(-cols // 32), -(-rows // 32)),
            block=(32, 8),
            tile=32,
            truth={"y": Truth(y, np.zeros(y.shape))},
            budget={"x": (x.nbytes, 0), "y": (0, x.nbytes)},
            most={("x", "read", "sectors"): x.nbytes // 32, ("y", "written", "sectors"): x.nbytes // 32},
        )

    low, high = (5, 7), (8, 11)
    return [launch(64, 64), *(launch(*(8 * draw.randint(*n) for n in size)) for size in ((low, high), (high, low)))]


def _twice(draw: Random) -> list[Launch]:
    def launch(n: int) -> Launch:
        x = numbers(draw, n)
        warps, rest = -(-(n // 4) // 32), n % 4
        most = warps + rest
        return Launch(
            said=f"n = {n:,}",
            arguments={"x": x, "y": Empty((n,)), "n": np.int32(n)},
            grid=(-(-n // 512),),
            block=(128,),
            tile=512,
            truth={"y": Truth(2 * x.astype(np.float64), np.zeros(n))},
            budget={"x": (4 * n, 0), "y": (0, 4 * n)},
            most={("x", "read", "instructions"): most, ("y", "written", "instructions"): most},
        )

    return [launch(2048), *(launch(4 * draw.randint(150, 600) + k) for k in (draw.randint(1, 2), 3))]


def _four_rows(draw: Random) -> list[Launch]:
    def launch(rows: int, cols: int) -> Launch:
        a, x = numbers(draw, rows, cols), numbers(draw, cols)
        wide_a, wide_x = a.astype(np.float64), x.astype(np.float64)
        blocks = -(-rows // 4)
        return Launch(
            said=f"A ({rows}, {cols})",
            arguments={"a": a, "x": x, "y": Empty((rows,)), "rows": np.int32(rows), "cols": np.int32(cols)},
            grid=(blocks,),
            block=(32,),
            tile=4,
            truth={"y": sums(wide_a @ wide_x, np.abs(wide_a) @ np.abs(wide_x), cols)},
            budget={"a": (a.nbytes, 0), "x": (4 * cols * blocks, 0), "y": (0, 4 * rows)},
        )

    return [
        launch(16, 128),
        *(launch(4 * draw.randint(2, 6) + draw.randint(1, 3), draw.randint(33, 200)) for _ in range(2)),
    ]


EXERCISES = (
    KernelExercise(
        name="07.1",
        title="Every sector once",
        task="Transpose a matrix. Reading along rows and writing along columns moves the right bytes in eight times "
        "too many sectors. With a "
        "tile in shared memory both sides can go along rows. The budget: each sector once on both sides, and no bank conflicts.",
        kernel="transpose",
        parameters="const float* x, float* y, int rows, int cols",
        launches=_transpose,
        hints=(
            "Read a tile into shared memory with tx along x's columns: neighbouring lanes, neighbouring addresses. "
            "Barrier. Then write "
            "with tx along y's columns.",
            "In the second half the block's place is mirrored: y's row is 32 · blockIdx.x + i, its column 32 · blockIdx.y + tx.",
            "tile[tx][i] walks down a column of the tile. With rows of 32 floats that is one bank; with rows of 33 it "
            "is 32 banks.",
        ),
        slips={
            "sectors": "Neighbouring lanes (tx) must touch neighbouring addresses, when reading and when writing.",
            "conflicts": "Elements below each other lie in the same bank if a row has 32 floats. What if it had 33?",
        },
        afterwards="Next: fewer instructions for the same sectors.",
        conflict_free=True,
    ),
    KernelExercise(
        name="07.2",
        title="Four at a time",
        task="The same bytes in a quarter of the instructions: a lane can load 16 bytes at once, as a float4, if the "
        "address is a multiple of "
        "16. The last elements may not fill one.",
        kernel="twice",
        parameters="const float* x, float* y, int n",
        launches=_twice,
        hints=(
            "`*reinterpret_cast<const float4*>(x + i)` loads x[i] to x[i + 3]; the parts are called v.x, v.y, v.z and v.w.",
            "Storing works the same way: `*reinterpret_cast<float4*>(y + i) = make_float4(…)`.",
            "Where fewer than four are left, a loop from i to n − 1 does them one by one.",
        ),
        slips={"instructions": "A warp's load of float4s moves 512 bytes by one instruction; of floats, 128."},
        afterwards="Next: the same result with fewer bytes.",
    ),
    KernelExercise(
        name="07.3",
        title="Requested bytes, and what they say",
        task="A matrix times a vector. With a warp for each row, x is requested once a row. Let a warp do four rows "
        "at once, and x is requested a quarter as often. (DRAM would hardly notice, since x stays in the L2. The SM does notice "
        "how many requests it makes.)",
        kernel="four_rows",
        parameters="const float* a, const float* x, float* y, int rows, int cols",
        launches=_four_rows,
        hints=(
            "Load x[c] into a variable, before the loop over the four rows.",
            "sum[r] gets a[(first + r) · cols + c] · x[c]; a row past the end must not be read.",
        ),
        slips={
            "x": "One load of x[c] for all four rows, not one for each.",
            "a": "Each element of A is read once, and none past its last row.",
            "y": "Each element of y is written once.",
        },
        afterwards="Next: FlashAttention-2 does just that with K and V. How many rows of Q share one load of them?",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

FLASH2, STANDARD = "flash2 float16 L2 1×32×4096×64", "standard float16 L2 1×4×4096×64"
_TENSOR = 32 * 4096 * 64 * 2


def _dram(case: str, launch: int) -> int:
    return launches_of(case)[launch]["dram_read"]


PREDICTIONS = (
    Prediction(
        name="07.1",
        truth=lambda: {"dram_read": _dram(FLASH2, 0)},
        slips=lambda: {
            "dram_read": {
                "all that is requested: the L2 forgotten": launches_of(FLASH2)[0]["requested"]["hbm.read"],
                "K and V only": 2 * _TENSOR,
                "elements, not bytes": 3 * _TENSOR // 2,
                "one head only": 3 * _TENSOR // 32,
                "written bytes, too": 4 * _TENSOR,
            }
        },
        because="Each byte of Q, K and V comes from DRAM once, within 1 %: 3 × 32 × 4096 × 64 × 2. All re-reads of K "
        "and V end in the L2.",
    ),
    Prediction(
        name="07.2",
        truth=lambda: {"scores": _dram(STANDARD, 0), "softmax": _dram(STANDARD, 1)},
        slips=lambda: {
            "scores": {
                "all that is requested": launches_of(STANDARD)[0]["requested"]["hbm.read"],
                "K only": 4 * 4096 * 64 * 2,
            },
            "softmax": {
                "once: but it is read three times, and doesn't fit": 4 * 4096 * 4096 * 4,
                "S in float16: but it is float32": 4 * 4096 * 4096 * 2,
                "two passes": 2 * 4 * 4096 * 4096 * 4,
            },
        },
        because="Q and K are small, and stay in the L2. S is 268 MB and does not: each of the three passes comes from DRAM.",
    ),
    Prediction(
        name="07.3",
        truth=lambda: {"along_a_row": 4, "down_a_column": 32},
        slips=lambda: {
            "along_a_row": {"one for each lane": 32, "one for the whole warp": 1, "two halves": 2},
            "down_a_column": {"as many as along a row": 4, "bytes, not sectors": 128, "one for each of 8 rows": 8},
        },
        because="32 floats side by side are 128 bytes, 4 sectors. Below each other, each lies in a sector of its own: "
        "1,024 bytes move for "
        "128.",
    ),
)
