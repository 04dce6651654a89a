"""Lesson 11, the way back: its exercises whose answers are `.cu` files."""

from __future__ import annotations

from random import Random

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import Case, Truth, far
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers, sums
from flashlab.lessons.lesson11 import backward, gradients
from flashlab.lessons.prediction import Prediction
from simulator import Problem, Tile
from simulator.dtypes import Array

BC, BR, D = 64, 32, 32
"""Keys of a block of 11.4, one for each thread; queries of a tile in SRAM; the head dim."""


def _key_tile(draw: Random) -> list[Launch]:
    """Numbers by the rule of `fl.verify`; bytes: K, V, dK and dV once, Q, dO, LSE and D once for each tile of keys."""

    def launch(case: Case) -> Launch:
        p, arrays = case.problem, backward(case).arrays()
        truth = gradients("dk", "dv")(p, *arrays.values())
        given = {name: np.ascontiguousarray(x[0], dtype=np.float32) for name, x in arrays.items()}
        exact = {name: given[name].astype(np.float64) for name in ("dout", "out")}
        delta = (exact["dout"] * exact["out"]).sum(-1).astype(np.float32)
        keys, blocks = given["k"].nbytes, p.key_tiles(Tile(BR, BC))
        queries = {name: (blocks * given[name].nbytes, 0) for name in ("q", "dout", "lse")}
        whole = {name: 2 * read // 128 for name, (read, _) in queries.items() if name != "lse"}
        return Launch(
            said=f"q ({p.heads}, {p.len_q}, {D}), k ({p.kv_heads}, {p.len_kv}, {D}), scores around {case.level[0]:g}, "
            f"scale {p.scale:.3g}",
            arguments={
                **{name: given[name] for name in ("q", "k", "v", "dout", "lse")},
                "delta": delta,
                "dk": Empty(given["k"].shape),
                "dv": Empty(given["v"].shape),
                "len_q": np.int32(p.len_q),
                "len_kv": np.int32(p.len_kv),
                "group": np.int32(p.queries_per_kv),
                "scale": np.float32(p.scale),
            },
            grid=(blocks, p.kv_heads),
            block=(BC,),
            tile=BC,
            truth={x.of: Truth(x.out[0], x.tolerance[0], by_row=True) for x in (truth, *truth.also)},
            budget=queries
            | {"delta": queries["lse"], "k": (keys, 0), "v": (keys, 0), "dk": (0, keys), "dv": (0, keys)},
            most={(name, "read", "instructions"): most for name, most in whole.items()},
        )

    first = Problem(batch=1, heads=2, kv_heads=1, len_q=64, head_dim=D, dtype="float32")
    ragged = first.replace(len_q=draw.randint(33, 60), len_kv=BC + draw.randint(1, 30))
    tile = Tile(BR, BC)
    short = first.replace(heads=4, kv_heads=2, len_q=draw.randint(10, 31), len_kv=draw.randint(20, 60))
    cases = [Case(p, tile, draw.getrandbits(32)) for p in (first, ragged)]
    return [launch(case) for case in (*cases, far(short, tile, draw))]


WARPS = 4
"""Rows of a block of 11.5, one for each warp."""


def _row_dots(draw: Random) -> list[Launch]:
    def launch(rows: int, cols: int) -> Launch:
        out, dout = numbers(draw, rows, cols), numbers(draw, rows, cols)
        products, blocks = out.astype(np.float64) * dout, -(-rows // WARPS)
        return Launch(
            said=f"out ({rows}, {cols})",
            arguments={
                "out": out,
                "dout": dout,
                "delta": Empty((rows,)),
                "rows": np.int32(rows),
                "cols": np.int32(cols),
            },
            grid=(blocks,),
            block=(32 * WARPS,),
            tile=WARPS,
            truth={"delta": sums(products.sum(1), np.abs(products).sum(1), cols)},
            budget={"out": (out.nbytes, 0), "dout": (dout.nbytes, 0), "delta": (0, 4 * rows)},
            most={
                (name, "read", what): most for name in ("out", "dout") for what, most in _by_warps(rows, cols).items()
            },
            passes=5 * WARPS * blocks,  # five shuffles for each row
        )

    return [
        launch(8, 128),
        *(launch(4 * draw.randint(2, 5) + draw.randint(1, 3), draw.randint(33, 200)) for _ in range(2)),
    ]


def _by_warps(rows: int, cols: int) -> dict[str, int]:
    """Instructions and sectors of 32 bytes where a warp loads a row of floats, 32 of them in a row at a time."""
    firsts = [row * cols + c for row in range(rows) for c in range(0, cols, 32)]
    ends = [min(first + 32, first // cols * cols + cols) for first in firsts]
    sectors = sum((end - 1) // 8 - first // 8 + 1 for first, end in zip(firsts, ends, strict=True))
    return {"instructions": len(firsts), "sectors": sectors}


def uniform(seed: int, place: Array) -> Array:
    """A number from 0 to 1 for each place, float32: the function `uniform` of exercise 11.6, in NumPy.

    >>> uniform(7, np.arange(3)).round(3).tolist() == uniform(7, np.arange(3)).round(3).tolist()
    True
    """
    with np.errstate(over="ignore"):
        x = np.asarray(place, np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
        x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _drop(draw: Random) -> list[Launch]:
    """Three tile sizes, and queries as rows and as columns. The last one has another seed."""

    def launch(seed: int, shape: tuple[int, int, int], tile: tuple[int, int], *, flipped: bool, keep: float) -> Launch:
        heads, len_q, len_kv = shape
        z = uniform(seed, np.arange(heads * len_q * len_kv)).reshape(shape) < np.float32(keep)
        p = np.abs(numbers(draw, *shape))
        kept = np.where(z, p.astype(np.float64) / np.float32(keep), 0)
        if flipped:
            p, kept = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (p, kept))
        rows, cols = p.shape[1:]
        return Launch(
            said=f"p {p.shape}, tiles of {tile[0]} x {tile[1]}, seed {seed}" + (", keys as rows" if flipped else ""),
            arguments={
                "p": p,
                "z": Empty(p.shape),
                "rows": np.int32(rows),
                "cols": np.int32(cols),
                "flipped": np.int32(flipped),
                "seed": np.int32(seed),
                "keep": np.float32(keep),
            },
            grid=(-(-cols // tile[1]), -(-rows // tile[0]), heads),
            block=(tile[1], tile[0]),
            tile=tile[0],
            truth={"z": Truth(kept, 1e-6 * kept)},
            budget={"p": (p.nbytes, 0), "z": (0, p.nbytes)},
        )

    seed, shape = 7, (2, draw.randint(9, 15), draw.randint(17, 31))
    return [
        launch(seed, (2, 8, 32), (4, 32), flipped=False, keep=0.9),
        launch(seed, shape, (8, 16), flipped=True, keep=0.5),
        launch(draw.randint(10, 10**9), shape, (2, 32), flipped=False, keep=draw.choice((0.75, 0.8))),
        launch(draw.randint(10, 10**9), shape, (4, 32), flipped=True, keep=0.9),
    ]


EXERCISES = (
    KernelExercise(
        name="11.4",
        title="dK and dV of a tile of keys, in CUDA",
        task="The heart of 11.3, for a tile of 64 keys, without a mask: each thread owns a key, with its row of K, V, dK and dV in "
        "registers. The block walks over tiles of 32 queries, of all query heads of its group. It loads their Q, dO, LSE and D "
        "together into shared memory. No race, and each byte of the budget: K, V, dK and dV once, all else once for each block.",
        kernel="dk_dv",
        parameters="const float* q, const float* k, const float* v, const float* dout, const float* lse, const float* delta, "
        "float* dk, float* dv, int len_q, int len_kv, int group, float scale",
        launches=_key_tile,
        hints=(
            "Two barriers in each round: before the tiles are overwritten, and after they are loaded. As in 05.4.",
            "A query past the end: its LSE is +INFINITY, so that p = exp(s − ∞) = 0, and its rows of Q and dO are 0.",
            "s and dp are dot products with row r. p[r] = expf(s · scale − lse_tile[r]), ds[r] = p[r] · (dp − delta_tile[r]).",
            "The scale belongs to S and to dK, and not to dV. dK gets it once, at the store.",
        ),
        slips={
            "q": "64 threads load a tile of Q together, once for each head of the group: not each thread for itself.",
            "dout": "64 threads load a tile of dO together, once for each head of the group.",
            "lse": "32 threads load a number each, once for each tile of queries.",
            "delta": "32 threads load a number each, once for each tile of queries.",
            "k": "A thread loads the row of its own key once, before both loops.",
            "v": "A thread loads the row of its own key once, before both loops.",
            "dk": "dK is stored once, after both loops: the sum over the group is taken in registers.",
            "dv": "dV is stored once, after both loops: the sum over the group is taken in registers.",
            "instructions": "All threads load a tile together, neighbours neighbouring numbers: 32 of them are one instruction.",
        },
        afterwards="Next: flash2_backward.cu does this with tensor cores, and S transposed, for the same reason as you.",
    ),
    KernelExercise(
        name="11.5",
        title="D = rowsum(dO ∘ O)",
        task="A warp has a row. Each lane multiplies every 32nd element of dO with that of O, and adds up. Then the lanes add "
        "theirs by shuffles, five of them, and one lane stores the sum.",
        kernel="row_dots",
        parameters="const float* out, const float* dout, float* delta, int rows, int cols",
        launches=_row_dots,
        hints=(
            "Warp `threadIdx.x / 32` of the block has the row; its lane is `threadIdx.x % 32`. A row past the end has no work.",
            "`for (int c = lane; c < cols; c += 32)`: neighbours read neighbours, so that 32 elements are one instruction.",
            "`sum += __shfl_xor_sync(0xffffffff, sum, mask)` for mask = 16, 8, 4, 2, 1; then lane 0 stores.",
        ),
        slips={
            "out": "Each element is loaded once, by one lane.",
            "dout": "Each element is loaded once, by one lane.",
            "delta": "One lane stores the sum, once.",
            "instructions": "The lanes of a warp read neighbours: then 32 elements are one instruction.",
            "sectors": "The lanes of a warp read neighbours: then 32 elements lie in four or five sectors.",
            "passes": "Five shuffles for each row. A pass is a shuffle, or what 32 lanes read or write in shared memory at a time.",
        },
        afterwards="Next: 2 bytes read for each FLOP. This launch waits for memory, whatever its arithmetic.",
        extra=True,
    ),
    KernelExercise(
        name="11.6",
        title="Dropout without a mask",
        task="z = p / keep where a weight is kept, and 0 where it is dropped. Whether it is kept must follow from seed, head, "
        "query and key alone. `uniform(seed, place)` gives a number from 0 to 1, and less than `keep` means kept. The place is "
        "(head · len_q + query) · len_kv + key. The forward pass has queries as rows. The backward pass has keys as rows "
        "(`flipped`) and other tiles, and must find the same mask. Nothing of it is stored.",
        kernel="drop",
        parameters="const float* p, float* z, int rows, int cols, int flipped, int seed, float keep",
        launches=_drop,
        hints=(
            "Row and column of a thread's weight, in the whole matrix: `blockIdx.y * blockDim.y + threadIdx.y`, and x likewise.",
            "`flipped` says that a row is a key. Then the query is the column, there are `cols` queries, and `rows` keys.",
            "Two indices: one of the weight in p as it lies, and one of its place. They are equal only where nothing is flipped.",
        ),
        slips={
            "p": "Each weight is loaded once.",
            "z": "Each weight is stored once. A mask that is stored is a tensor too much.",
            "race": "Two threads store the same weight: a column past the end is the next row's.",
        },
        afterwards="Next: the library takes Philox, whose bits pass harder tests, and makes 16 weights' bytes at a time.",
        extra=True,
    ),
)

PREDICTIONS: tuple[Prediction, ...] = ()
"""The lesson's are beside its tile programs."""
