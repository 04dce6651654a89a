"""Lesson 06, reading flash2.cu: its exercises, whose answers are `.cu` files, and predictions."""

from __future__ import annotations

from random import Random

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import Truth
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers, sums
from flashlab.lessons.prediction import Prediction


def _fragments(draw: Random) -> list[Launch]:
    def launch(len_q: int, len_kv: int) -> Launch:
        q, k = (numbers(draw, n, 64).astype(np.float16) for n in (len_q, len_kv))
        wide_q, wide_k = q.astype(np.float64), k.astype(np.float64)
        return Launch(
            said=f"q ({len_q}, 64), k ({len_kv}, 64)",
            arguments={"q": q, "k": k, "s": Empty((len_q, len_kv)), "len_q": np.int32(len_q), "len_kv": np.int32(len_kv)},
            grid=(1,), block=(32,), tile=16, truth={"s": sums(wide_q @ wide_k.T, np.abs(wide_q) @ np.abs(wide_k).T, 64)},
            budget={"q": (q.nbytes, 0), "k": (k.nbytes, 0), "s": (0, 4 * len_q * len_kv)}, matmul=2 * 16 * 16 * 64,
        )  # fmt: skip

    return [launch(16, 16), *(launch(draw.randint(3, 15), draw.randint(3, 15)) for _ in range(2))]


def _swizzle(draw: Random) -> list[Launch]:
    def launch(rows: int) -> Launch:
        x = numbers(draw, rows, 8, 4)
        y = x.astype(np.float64).transpose(1, 0, 2)
        return Launch(
            said=f"x ({rows}, 8) chunks",
            arguments={"x": x, "y": Empty(y.shape), "rows": np.int32(rows)},
            grid=(1,),
            block=(128,),
            tile=8,
            truth={"y": Truth(y, np.zeros(y.shape))},
            budget={"x": (x.nbytes, 0), "y": (0, x.nbytes)},
        )

    return [launch(64), *(launch(draw.randint(9, 63)) for _ in range(2))]


def _column_sums(draw: Random) -> list[Launch]:
    def launch(rows: int) -> Launch:
        x = numbers(draw, rows, 128)
        wide = x.astype(np.float64)
        return Launch(
            said=f"x ({rows}, 128)",
            arguments={"x": x, "y": Empty((128,)), "rows": np.int32(rows)},
            grid=(1,),
            block=(128,),
            tile=1,
            truth={"y": sums(wide.sum(0), np.abs(wide).sum(0), rows)},
            budget={"x": (x.nbytes, 0), "y": (0, 512)},
            overlapped={"tile": 128 * 4 * 8 * max(0, rows // 8 - 1)},  # beside the copy of each next tile that is whole
        )

    return [launch(40), launch(8 * draw.randint(3, 9) + draw.randint(1, 7)), launch(draw.randint(1, 7))]


EXERCISES = (
    KernelExercise(
        name="06.1",
        title="Who holds what",
        task="One warp multiplies two tiles with tensor cores, by the same functions that flash2.cu uses. The product "
        "comes out spread over "
        "the lanes: each holds eight numbers of it. Write the product, and find out which elements of S are yours.",
        kernel="fragments",
        parameters="const __half* q, const __half* k, float* s, int len_q, int len_kv",
        launches=_fragments,
        hints=(
            "For S = Q Kᵀ, a row of K is a *column* of the right operand: that is what `load_b_rows(k_tile, 0, d)` loads.",
            "`mma(c[0], c[1], a, b)` adds the product of 16 × 16 by 16 × 16 to both halves.",
            "With g = lane / 4 and t = lane % 4: c[n][0] and c[n][1] are in row g, c[n][2] and c[n][3] in row g + 8; "
            "their columns "
            "are 8n + 2t and 8n + 2t + 1.",
        ),
        slips={
            "s": "Each element of S is stored once, by the lane that holds it.",
            "arithmetic": "The product is to come from the tensor cores: `mma`, on fragments of both tiles.",
        },
        afterwards="Next: in this layout four neighbouring lanes hold a row. So a row's maximum takes two shuffles, not five.",
    ),
    KernelExercise(
        name="06.2",
        title="A swizzle",
        task="A tile of 64 rows of 128 bytes is written row by row, and read column by column. As it stands, eight "
        "lanes that read the same "
        "chunk of eight rows meet in the same banks. Find a rule for the chunks' places that makes both ways free of conflicts, "
        "without a byte more of shared memory.",
        kernel="swizzle",
        parameters="const float4* x, float4* y, int rows",
        launches=_swizzle,
        hints=(
            "Each row fills all 32 banks: the banks of a chunk depend on its place in the row alone.",
            "So chunk c of eight neighbouring rows must lie at eight different places in their rows.",
            "Rotate by the row, `(chunk + row) % 8`, or take the XOR, `chunk ^ row % 8`: both are permutations of 0 … 7.",
        ),
        slips={
            "conflicts": "Eight lanes with the same chunk of eight rows must find it at eight different places of the row."
        },
        afterwards="Next: find this line in kernels_cu/include/tile.cuh.",
        conflict_free=True,
    ),
    KernelExercise(
        name="06.3",
        title="Two buffers",
        task="Sum columns, tile by tile. While a tile is summed, the next one is on its way: copies go on in the "
        "background (cp.async), "
        "into the other of two places. What is missing is the order: start, wait, and two barriers.",
        kernel="column_sums",
        parameters="const float* x, float* y, int rows",
        launches=_column_sums,
        hints=(
            "`copy_wait<1>()` waits until at most one group of copies, the newest, is still on its way.",
            "After the last tile there is nothing to load. But then the newest group is tile j itself; an empty group "
            "in its place, "
            "`copy_commit()` alone, keeps the count right.",
            "copy_wait waits for this thread's own copies. For those of the others there has to be a barrier after "
            "it; and one after the sum, before any thread copies into that place again.",
        ),
        slips={
            "x": "Each tile is copied once.",
            "y": "Each thread writes its sum once.",
            "wait forgotten": "`copy_wait<1>()` leaves the newest group of copies on its way, whichever that is. In the last round "
            "nothing is left to load: unless an empty group is committed, the newest one is tile j itself.",
            "overlap": "Begin to load tile j + 1 before tile j is summed, and wait for tile j alone: one group may be on its way.",
        },
        afterwards="Next: find the three lines in flash2.cu, and the barrier that it does without.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

PREDICTIONS = (
    Prediction(
        name="06.1",
        truth=lambda: {"numbers_of_a_lane": 64, "shuffles": 2},
        slips=lambda: {
            "numbers_of_a_lane": {
                "those of one fragment": 4,
                "of one warp, all lanes": 2048,
                "of the block's tile, over a warp's lanes": 256,
            },
            "shuffles": {"a whole warp's reduction": 5, "one for each other lane of the quad": 3},
        },
        because="16 × 128 numbers over 32 lanes are 64. A row is in the hands of four lanes: two shuffles, with masks 1 and 2.",
    ),
    Prediction(
        name="06.2",
        truth=lambda: {"plain": 8, "swizzled": 1},
        slips=lambda: {
            "plain": {"one for each lane": 32, "two rows a pass": 4, "one for each two rows of 64": 16},
            "swizzled": {"half of the plain ones": 4, "one for each pair of lanes": 2},
        },
        because="Rows of 128 bytes fill all 32 banks, so one chunk of eight rows lies eight times in the same four "
        "banks: eight passes. "
        "Eight chunks at eight places fill all banks once: one pass.",
    ),
    Prediction(
        name="06.3",
        truth=lambda: {"one_stage": 16384 + 2 * 16384, "two_stages": 16384 + 4 * 16384},
        slips=lambda: {
            "one_stage": {"K and V, without Q": 32768, "elements, not bytes": 24576},
            "two_stages": {
                "everything twice, Q too": 2 * 49152,
                "K twice, V once": 65536,
                "elements, not bytes": 40960,
            },
        },
        because="A tile of 128 × 64 halves is 16 KB. Q has one place; K and V have one or two each: 48 or 80 KB of "
        "the 227 KB that a block "
        "of an H100 may use.",
    ),
)
