"""Lesson 05, CUDA from nothing: its exercises, whose answers are `.cu` files, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import FAR, Case, Level, Truth, attention_truth_with_lse, far
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers, sums
from flashlab.lessons.prediction import Prediction
from simulator import Problem, Tile, count

BR, BC, D = 64, 32, 32
"""The tile of the learner's flash2, and its head dim."""


TREE = 4 + (2 + 6) * 3 + 1
"""Passes over the banks in a tree of 128 parts: four warps write them, two warps and then one in 6 rounds read twice and write
once, and the sum is read."""


def _axpy(draw: Random) -> list[Launch]:
    def launch(n: int, block: int) -> Launch:
        x, y, a = numbers(draw, n), numbers(draw, n), np.float32(draw.uniform(0.5, 3))
        out = float(a) * x.astype(np.float64) + y
        return Launch(
            said=f"n = {n:,}, blocks of {block} threads",
            arguments={"x": x, "y": y, "out": Empty((n,)), "a": a, "n": np.int32(n)},
            grid=(-(-n // block),),
            block=(block,),
            tile=block,
            truth={"out": Truth(out, 1e-6 * (np.abs(out) + np.abs(y)))},
            budget={"x": (4 * n, 0), "y": (4 * n, 0), "out": (0, 4 * n)},
            most={("out", "written", "instructions"): -(-n // 32)},
        )

    return [
        launch(1000, 128),
        *(launch(64 * draw.randint(3, 12) + 4 * draw.randint(0, 15) + 3, draw.choice((64, 256))) for _ in range(2)),
    ]


def _row_sum(draw: Random) -> list[Launch]:
    def launch(rows: int, cols: int) -> Launch:
        x = numbers(draw, rows, cols)
        wide = x.astype(np.float64)
        return Launch(
            said=f"x ({rows}, {cols})",
            arguments={"x": x, "sums": Empty((rows,)), "cols": np.int32(cols)},
            grid=(rows,),
            block=(128,),
            tile=1,
            truth={"sums": sums(wide.sum(1), np.abs(wide).sum(1), cols)},
            budget={"x": (x.nbytes, 0), "sums": (0, 4 * rows)},
            passes=2 * rows * TREE,
        )

    return [launch(3, 256), *(launch(draw.randint(2, 5), draw.randint(129, 500)) for _ in range(2))]


def _row_softmax(draw: Random) -> list[Launch]:
    def launch(rows: int, cols: int, spread: float, shift: float) -> Launch:
        x = numbers(draw, rows, cols) * np.float32(spread) + np.float32(shift)
        e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
        y = e / e.sum(1, keepdims=True)
        return Launch(
            said=f"x ({rows}, {cols}), around {shift:g}",
            arguments={"x": x, "y": Empty(x.shape), "rows": np.int32(rows), "cols": np.int32(cols)},
            grid=(-(-rows // 4),),
            block=(128,),
            tile=4,
            truth={"y": Truth(y, 2e-5 * y + 1e-8)},
            budget={"x": (x.nbytes, 0), "y": (0, x.nbytes)},
            passes=rows * 2 * (5 + 1),  # maximum and sum take five shuffles each, and one more to hand the result out
        )

    return [
        launch(8, 256, 1, 0),
        launch(draw.randint(5, 7), draw.randint(33, 250), 3, 200),
        launch(draw.randint(5, 7), draw.randint(33, 250), 3, FAR[1]),
    ]


def attention_launch(
    draw: Random, heads: int, len_q: int, len_kv: int, level: Level = (0, 0), *, causal: bool = False
) -> Launch:
    """Attention on drawn numbers, with the bytes of `flash2` in tiles of 64 x 32 as its budget; `level` is of the scores.

    Where that is `FAR` the rows are `APART`, and the scale is another one: see `far`.
    """
    problem = Problem(batch=1, heads=heads, len_q=len_q, len_kv=len_kv, head_dim=D, dtype="float32", causal=causal)
    case = Case(problem, Tile(BR, BC), draw.getrandbits(32), level=level)
    if level == FAR:
        case = far(problem, case.tile, draw)
    problem, (q, k, v) = case.problem, case.inputs()
    truth = attention_truth_with_lse(problem, q, k, v)
    assert truth.lse is not None and truth.lse_tolerance is not None
    lse = Truth(truth.lse[0], truth.lse_tolerance[0] if truth.lse_tolerance.ndim == 3 else truth.lse_tolerance)
    moved = count("flash2", problem, tile=Tile(BR, BC), lse=True).by_tensor
    return Launch(
        said=f"q ({heads}, {len_q}, {D}), k ({heads}, {len_kv}, {D}), scores around {level[0]:g}, scale {problem.scale:.3g}",
        arguments={
            "q": q[0],
            "k": k[0],
            "v": v[0],
            "out": Empty(q[0].shape),
            "lse": Empty(q[0].shape[:2]),
            "len_q": np.int32(len_q),
            "len_kv": np.int32(len_kv),
            "scale": np.float32(problem.scale),
        },
        grid=(-(-len_q // BR), heads),
        block=(BR,),
        tile=BR,
        truth={"out": Truth(truth.out[0], truth.tolerance[0], by_row=truth.by_row), "lse": lse},
        budget={name: (moved[name].hbm_read, moved[name].hbm_write) for name in ("q", "k", "v", "out", "lse")},
    )


def _together(launch: Launch) -> Launch:
    """A launch in which whole warps load K and V: a number a lane, and as many instructions are to spare."""
    most = {(name, "read", "instructions"): 2 * launch.budget[name][0] // 128 for name in ("k", "v")}
    return replace(launch, most=most)


def _attention(draw: Random) -> list[Launch]:
    ragged = attention_launch(draw, 2, draw.randint(65, 90), 96 + draw.randint(1, 31), FAR)
    short = draw.randint(20, 60), draw.randint(3, 31)
    drawn = attention_launch(draw, 1, 64, 64), ragged, attention_launch(draw, 1, *short, (300, -300))
    return [_together(x) for x in drawn]


def _scores_lse(draw: Random) -> list[Launch]:
    """The same without V and the output."""

    def without(x: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in x.items() if name not in ("v", "out")}

    return [
        replace(x, arguments=without(x.arguments), truth=without(x.truth), budget=without(x.budget))
        for x in _attention(draw)
    ]


def _divides_in_the_loop(text: str) -> tuple[int, str] | None:
    """The first line in a loop over tiles of keys that divides by l, and why that is wrong."""
    from flashlab.emulator.scan import Tokens  # it brings the emulator

    tokens = Tokens.of(text)
    words, partner = tokens.words, tokens.partner
    for i, word in enumerate(words):
        if word != "for" or "len_kv" not in words[i : partner.get(i + 1, i)]:
            continue
        first = partner[i + 1] + 1
        for n in range(first, partner.get(first, first)):
            if words[n] in ("/", "/=") and words[n + 1] == "l":
                line = text.count("\n", 0, tokens.starts[n]) + 1
                return line, "divides by l in each round: out is divided once, after the last tile"
    return None


EXERCISES = (
    KernelExercise(
        name="05.1",
        title="One thread, one element",
        task="`out[i] = a · x[i] + y[i]`. Each thread computes one element: find out which, and beware of the threads "
        "for which there "
        "is none.",
        kernel="axpy",
        parameters="const float* x, const float* y, float* out, float a, int n",
        launches=_axpy,
        hints=(
            "Before this block there are blockIdx.x blocks of blockDim.x threads each; in it there are threadIdx.x "
            "threads before "
            "this one.",
            "1,000 elements in blocks of 128: 8 blocks, 1,024 threads. The last 24 must neither load nor store: `if (i < n)`.",
        ),
        slips={
            "x": "Each element of x is loaded once, by one thread.",
            "y": "Each element of y is loaded once, by one thread.",
            "out": "out is written once, and never read: keep intermediate results in a variable.",
            "instructions": "Each thread computes one element: then 32 of them are one instruction of their warp.",
        },
        afterwards="Next: threads that need each other's results.",
    ),
    KernelExercise(
        name="05.2",
        title="The missing barriers",
        task="This kernel sums rows. Each thread sums every 128th element; then 128 parts are added in a tree, in "
        "shared memory. It has "
        "a bug: threads read what others have not written yet. On a GPU it may give the right sums for weeks. Mend it.",
        kernel="row_sum",
        parameters="const float* x, float* sums, int cols",
        launches=_row_sum,
        hints=(
            "A warp may be far ahead of another. Between a write of one thread and a read of another there has to be a barrier.",
            "Two places: before the loop (parts are written, then read), and at the end of each round of it.",
            "If some threads never reach a barrier, nothing defines what it does: it must stand outside `if (t < half)`.",
        ),
        slips={
            "sums": "One thread writes the sum, once.",
            "passes": "Where one thread adds all parts the others wait: in a tree half of them are added at a time.",
        },
        afterwards="Next: within a warp there is a way without shared memory, and without barriers.",
    ),
    KernelExercise(
        name="05.3",
        title="A row softmax with shuffles",
        task="One warp owns a row; each of its lanes holds up to 8 elements of it in registers. Maximum and sum run "
        "over the whole row, so "
        "lanes must exchange theirs: by shuffles. Every element is read once.",
        kernel="row_softmax",
        parameters="const float* x, float* y, int rows, int cols",
        launches=_row_softmax,
        hints=(
            "`__shfl_xor_sync(0xffffffff, top, mask)` gives you the value of `top` that the lane with number (yours "
            "XOR mask) holds.",
            "With mask = 16, 8, 4, 2, 1, and a maximum after each, all 32 lanes have the maximum of all 32.",
            "Then exponentials of v[i] − top into v[i], their sum over i, and the same five shuffles with + in place of fmaxf.",
        ),
        slips={
            "x": "Each element is loaded once, into v; what is in registers needn't be loaded again.",
            "passes": "The lanes exchange theirs by shuffles, five for the maximum and five for the sum. A pass is a shuffle, or "
            "what 32 lanes read or write in shared memory at a time.",
        },
        afterwards="Next: the same, over tiles of keys.",
    ),
    KernelExercise(
        name="05.4",
        title="Tiles of K in shared memory: the LSE",
        task="Half of FlashAttention-2: each thread owns a query and walks over tiles of keys, which the block loads "
        "together into shared "
        "memory. m and l are updated online, as in lesson 02. Two barriers are missing, the scaling with the end of "
        "the keys, and "
        "the update of l.",
        kernel="scores_lse",
        parameters="const float* q, const float* k, float* lse, int len_q, int len_kv, float scale",
        launches=_scores_lse,
        hints=(
            "One barrier between loading a tile and using it; one between using it and loading the next into the same place.",
            "The last tile may be longer than the keys: a score past the end must be −INFINITY, so that its exponential is 0.",
            "l belongs to the old maximum m. For the new one: `l *= expf(m - m_new)`, then add exp(s[c] − m_new) for each c.",
        ),
        slips={
            "q": "A query is loaded once, before the loop.",
            "k": "Each block loads each tile of K once: 64 threads together, not each for itself.",
            "lse": "One number for each query.",
        },
        afterwards="Next: V, and the output.",
    ),
    KernelExercise(
        name="05.5",
        title="Your own FlashAttention-2",
        task="Now all of it: load the tile of V, rescale what was summed before, add p · V, and store the output, "
        "divided once, and the LSE. "
        "The budget is the one of `flash2` in lesson 04, with tiles of 64 × 32, to the byte.",
        kernel="my_flash2",
        parameters="const float* q, const float* k, const float* v, float* out, float* lse, int len_q, int len_kv, float scale",
        launches=_attention,
        hints=(
            "V's tile is loaded as K's is. Rows past the end must be 0, not left as they were: 0 × NaN is NaN.",
            "alpha = exp(m − m_new) rescales l *and* all D elements of acc.",
            "p = exp(s[c] − m_new); l gets p, acc[d] gets p · v_tile[c][d]. After the loop out is acc / l, and lse is "
            "m + log(l).",
        ),
        slips={
            "v": "Each block loads each tile of V once.",
            "k": "Each block loads each tile of K once.",
            "out": "out is written once, after the loop, and never read.",
            "lse": "One number for each query.",
            "instructions": "All threads load a tile together, neighbours neighbouring numbers: 32 of them are one instruction.",
        },
        rule=_divides_in_the_loop,
        afterwards="You have written FlashAttention-2 in CUDA. Next: what a fast one does differently.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

LENGTH, HEADS = 4096, 8
_P = Problem(batch=1, heads=HEADS, len_q=LENGTH, head_dim=D, dtype="float32")


def _k_bytes() -> int:
    return count("flash2", _P, tile=(BR, BC)).by_tensor["k"].hbm_read


PREDICTIONS = (
    Prediction(
        name="05.1",
        truth=lambda: {"blocks": 8, "idle_threads": 24},
        slips=lambda: {
            "blocks": {"rounded down: the last 104 elements would have no thread": 7, "threads, not blocks": 1024},
            "idle_threads": {
                "those of the last block that have work": 104,
                "a whole block": 128,
                "none: but 8 blocks have more threads than there are elements": 0,
            },
        },
        because="⌈1000 / 128⌉ = 8 blocks are 1,024 threads; 24 of the last block find no element.",
    ),
    Prediction(
        name="05.2",
        truth=lambda: {"shuffles": 5, "rounds": 7},
        slips=lambda: {
            "shuffles": {"one for each lane": 32, "one for each other lane": 31, "half the lanes": 16},
            "rounds": {
                "one for each part": 128,
                "one for each warp": 4,
                "one too many: the last leaves half a number": 8,
            },
        },
        because="Each exchange doubles the number of lanes whose maximum a lane knows: 2, 4, 8, 16, 32. A tree of 128 "
        "parts takes 7 rounds, and a barrier in each; shuffles wait for their lanes by themselves.",
    ),
    Prediction(
        name="05.3",
        truth=lambda: {"k": _k_bytes(), "sram": 2 * BC * D * 4},
        slips=lambda: {
            "k": {
                "every thread loads K for itself": _k_bytes() * BR,
                "K once: but each block loads it": HEADS * LENGTH * D * 4,
                "one head only": _k_bytes() // HEADS,
                "elements, not bytes": _k_bytes() // 4,
            },
            "sram": {
                "K's tile only": BC * D * 4,
                "elements, not bytes": 2 * BC * D,
                "Q's tile too": (BR + 2 * BC) * D * 4,
            },
        },
        because="64 blocks a head, each loads all of that head's K: 64 × 8 × 4096 × 32 × 4 bytes. In shared memory "
        "there is one tile of K "
        "and one of V; Q, O, m and l are in registers.",
    ),
)
