"""Beside lesson 06: FlashAttention-2 in Triton. Its answer is a `.py` file, which Triton's interpreter runs."""

from __future__ import annotations

from random import Random

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import FAR, Case, Level, Truth, attention_truth_with_lse, far
from flashlab.lessons.kernel_exercise import KernelExercise, Launch
from simulator import Problem, Tile, count

ROWS, COLS, D = 32, 16, 64
"""Queries of a program, keys of a tile, and the head dim."""
LONGEST = 50
"""Lines of code that an answer may have."""


class TritonExercise(KernelExercise):
    """An exercise whose answer is a module with a function of Triton's. Its launches have one number for a grid, and no block."""

    mark = "# solution"
    suffix = ".py"


def _attention(draw: Random) -> list[Launch]:
    """float16, ragged but for the first; scores far below 0, and falling from far above it."""

    def launch(heads: int, len_q: int, len_kv: int, level: Level = (0, 0)) -> Launch:
        p = Problem(batch=1, heads=heads, len_q=len_q, len_kv=len_kv, head_dim=D, dtype="float16")
        case = Case(p, Tile(ROWS, COLS), draw.getrandbits(32), level=level)
        case = far(p.replace(dtype="float32"), case.tile, draw) if level == FAR else case
        p, (q, k, v) = case.problem, case.inputs()
        truth = attention_truth_with_lse(p, q, k, v)
        assert truth.lse is not None and truth.lse_tolerance is not None
        moved = count("flash2", p, tile=case.tile, lse=True).by_tensor
        return Launch(
            said=f"q ({heads}, {len_q}, {D}), k ({heads}, {len_kv}, {D}), {p.dtype}, scores around {level[0]:g}",
            arguments={
                "q": q[0],
                "k": k[0],
                "v": v[0],
                "out": Empty(q[0].shape, q.dtype.name),
                "lse": Empty(q[0].shape[:2]),
                "len_q": np.int32(len_q),
                "len_kv": np.int32(len_kv),
                "scale": np.float32(p.scale),
                **{name: np.int32(n) for name, n in (("ROWS", ROWS), ("COLS", COLS), ("D", D))},
            },
            grid=(heads * p.row_tiles(case.tile),),
            block=(),
            tile=ROWS,
            truth={
                "out": Truth(truth.out[0], truth.tolerance[0], by_row=truth.by_row),
                "lse": Truth(truth.lse[0], truth.lse_tolerance[0]),
            },
            budget={name: (moved[name].hbm_read, moved[name].hbm_write) for name in ("q", "k", "v", "out", "lse")},
        )

    ragged = draw.randint(33, 60), draw.randint(17, 60)
    return [
        launch(2, 64, 64),
        launch(1, *ragged, FAR),
        launch(2, draw.randint(5, 30), draw.randint(33, 47), (300, -300)),
    ]


EXERCISES = (
    TritonExercise(
        name="06.4",
        title="FlashAttention-2 in Triton",
        task=f"The algorithm of 05.5 once more, in at most {LONGEST} lines. A *program* of Triton computes on whole tiles. It has "
        "no threads, no SRAM and no barriers. You say which bytes of memory a tile is: by a tile of pointers, and a "
        "mask of those that may be touched. The budget is that of `flash2`, with tiles of 32 × 16, to the byte.",
        kernel="my_flash2",
        parameters="q, k, v, out, lse, len_q, len_kv, scale, ROWS, COLS, D",
        launches=_attention,
        hints=(
            "`tl.load(pointers, mask, 0.0)` has 0 where the mask is False, and touches nothing there.",
            "(key, column) of this head's K lies at `k + (head * len_kv + key) * D + column`: `[:, None]` and `[None, :]`.",
            '`tl.dot(q_i, k_j.T, input_precision="ieee")` is S without its scale. Behind the last key it must be −inf.',
            "`tl.max(s, 1)` and `tl.sum(p, 1)` are per row. A number a row beside a tile: `m_new[:, None]`.",
            "p goes into the product in the dtype of V: `p.to(v_j.dtype)`.",
        ),
        slips={
            "q": "A program loads its own queries once, and no row past the end.",
            "k": "Each program loads each tile of K once, and no row past the end: the mask says which.",
            "v": "Each program loads each tile of V once, and no row past the end: the mask says which.",
            "out": "out is stored once, after the loop.",
            "lse": "One number for each query that there is.",
        },
        afterwards="Next: flash2_triton is this, with masks, strides and groups of heads, in 46 lines.",
        extra=True,
    ),
)
