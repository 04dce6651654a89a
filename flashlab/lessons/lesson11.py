"""Lesson 11, the way back: its exercises, tile programs and `.cu` files, its predictions, and gradients by differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random

import numpy as np

from flashlab.base.host import Empty
from flashlab.lessons.exercise import Budget, Case, Exercise, Truth, far
from flashlab.lessons.kernel_exercise import KernelExercise, Launch, numbers, sums
from flashlab.lessons.lesson00 import tiles
from flashlab.lessons.lesson01 import attention_cases
from flashlab.lessons.prediction import Prediction
from simulator import Counts, Problem, Tile, count
from simulator.config import padded
from simulator.dtypes import Array, numpy_dtype
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.problem import row_bytes

STEP = 1e-4
"""By how much `by_differences` moves an element: the error of the difference is of the order of its square."""


@dataclass(frozen=True)
class BackwardCase(Case):
    """A problem of the backward pass: dO is normal, `out` and `lse` are what the forward pass returns."""

    def arrays(self) -> dict[str, Array]:
        p = self.problem
        found = super().arrays()
        forward = ATTENTION.judge(p, found)
        dout = np.random.default_rng(self.seed).standard_normal(forward["out"].shape)
        return found | {
            "out": forward["out"].astype(numpy_dtype(p.out_dtype)),
            "lse": forward["lse"].astype(np.float32),
            "dout": dout.astype(numpy_dtype(p.out_dtype)),
        }


def _backward(case: Case) -> BackwardCase:
    return BackwardCase(**{each.name: getattr(case, each.name) for each in fields(case)})


def by_differences(problem: Problem, arrays: dict[str, Array], name: str, head: int, row: int, step: float = STEP) -> Array:
    """The gradient of one row of q, k or v by central differences in float64: (head_dim,).

    The loss is the sum of dO * O. `arrays` has q, k, v and dout. Nothing of the backward pass is used: each element of the row
    is moved up and down, and the forward pass runs twice.

    >>> p = Problem(batch=1, heads=1, len_q=3, head_dim=2, dtype="float32")
    >>> arrays = BACKWARD.draw(p)
    >>> bool(np.allclose(by_differences(p, arrays, "k", 0, 1), BACKWARD.judge(p, arrays)["dk"][0, 0, 1], atol=1e-5))
    True
    """
    wide = {x: arrays[x].astype(np.float64) for x in "qkv"}
    dout, found = arrays["dout"].astype(np.float64), np.zeros(wide[name].shape[-1])
    for column in range(len(found)):
        losses: list[float] = []
        for moved in (step, -step):
            x = wide[name].copy()
            x[0, head, row, column] += moved
            losses.append(float((ATTENTION.judge(problem, wide | {name: x})["out"] * dout).sum()))
        found[column] = (losses[0] - losses[1]) / (2 * step)
    return found


# -- 11.1 to 11.3: tile programs ----------------------------------------------------------------------------------


def _gradients(*names: str) -> Callable[..., Truth]:
    """The right gradients of these names, for the given output and LSE, and the rule of `fl.verify` for every row."""

    def truth(problem: Problem, *arrays: Array) -> Truth:
        given = dict(zip(("q", "k", "v", "out", "lse", "dout"), arrays, strict=True))
        with np.errstate(over="ignore", invalid="ignore"):
            right = BACKWARD.judge(problem, given)
            bounds = BACKWARD.bounds(problem, given, right)
        first, *others = (
            Truth(right[name], bounds[name][..., None], by_row=True, of=name, of_keys=name != "dq") for name in names
        )
        return replace(first, also=tuple(others))

    return truth


def _whole_cases(draw: Random) -> list[Case]:
    """All tiles are visited. A head has keys of its own."""
    cases = attention_cases(draw)
    return [_backward(replace(c, problem=c.problem.replace(kv_heads=c.problem.heads))) for c in cases]


def _grouped_cases(draw: Random) -> list[Case]:
    """Causal, with groups of heads: as many keys as queries, one more, many more, and fewer.

    With one key more, the first query that sees a tile of keys is the last one of its own tile. With as many, it is the first.
    """
    first = Problem(batch=1, heads=4, kv_heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
    ragged, n = 32 * draw.randint(2, 4) + draw.randint(1, 30), draw.randint(60, 120)
    others = [
        (first.replace(len_q=(full := 32 * draw.randint(3, 5)), len_kv=full + 1, head_dim=40), Tile(32, 32)),
        (first.replace(heads=3, kv_heads=1, len_q=ragged, len_kv=ragged + draw.randint(33, 80)), Tile(16, 64)),
        (first.replace(len_q=n, len_kv=n - draw.randint(16, 40), dtype="float32"), Tile(64, tiles(draw).cols)),
    ]
    last = first.replace(len_q=draw.randint(40, 70), len_kv=96, head_dim=24, dtype="float32")
    cases = [Case(p, tile, draw.getrandbits(32)) for p, tile in [(first, Tile(64, 64)), *others]]
    return [_backward(case) for case in (*cases, far(last, Tile(32, 32), draw))]


def _sizes(p: Problem) -> tuple[int, int]:
    """Bytes of a row of q, k, dq, dk, and of a row of v, out, dout, dv."""
    return row_bytes(p.head_dim, p.itemsize), row_bytes(p.head_dim_v, p.itemsize)


def _flops(p: Problem, tile: Tile, pairs: int, products: tuple[int, int]) -> int:
    """Of so many pairs of tiles: products over the columns of K, and over those of V."""
    columns = products[0] * padded(p.head_dim) + products[1] * padded(p.head_dim_v)
    return 2 * pairs * padded(tile.rows) * padded(tile.cols) * columns


def _dv_budget(problem: Problem, tile: Tile) -> Budget:
    """Each tile of keys asks for every row of Q, dO and the LSE, once."""
    p, (d, dv), heads = problem, _sizes(problem), problem.batch * problem.heads
    cols = p.key_tiles(tile)
    queries = heads * cols * p.len_q
    moved = {"q": (queries * d, 0), "k": (heads * p.len_kv * d, 0), "lse": (4 * queries, 0)}
    moved |= {"dout": (queries * dv, 0), "dv": (0, heads * p.len_kv * dv)}
    pairs = heads * cols * p.row_tiles(tile)
    return Budget(moved, matmul=_flops(p, tile, pairs, (1, 1)), exp=pairs * tile.rows * tile.cols)


def _dq_budget(problem: Problem, tile: Tile) -> Budget:
    """Each tile of queries asks for every row of K and V, once."""
    p, (d, dv), heads = problem, _sizes(problem), problem.batch * problem.heads
    rows, queries = p.row_tiles(tile), heads * p.len_q
    keys = heads * rows * p.len_kv
    moved = {"q": (queries * d, 0), "k": (keys * d, 0), "v": (keys * dv, 0), "out": (queries * dv, 0)}
    moved |= {"lse": (4 * queries, 0), "dout": (queries * dv, 0), "dq": (0, queries * d)}
    pairs = heads * rows * p.key_tiles(tile)
    return Budget(moved, matmul=_flops(p, tile, pairs, (2, 1)), exp=pairs * tile.rows * tile.cols)


def seen_from(problem: Problem, tile: Tile) -> list[range]:
    """For each tile of keys, the tiles of queries that see some of it.

    >>> p = Problem(batch=1, heads=1, len_q=64, head_dim=8, dtype="float16", causal=True)
    >>> seen_from(p, Tile(16, 32))
    [range(0, 4), range(2, 4)]
    """
    p = problem
    first = [max(0, j * tile.cols - p.offset) if p.causal else 0 for j in range(p.key_tiles(tile))]
    return [range(query // tile.rows, p.row_tiles(tile)) for query in first]


def _all_budget(problem: Problem, tile: Tile) -> Budget:
    """A block asks for the queries that see its keys, of each head of the group, and adds to their dQ, 4 bytes an element."""
    p, (d, dv), heads = problem, _sizes(problem), problem.batch * problem.heads
    walks = seen_from(p, tile)
    visited = heads * sum(p.len_q - walk.start * tile.rows for walk in walks if walk)  # rows of queries, by all blocks
    queries, keys, row = heads * p.len_q, p.batch * p.kv_heads * p.len_kv, row_bytes(p.head_dim, 4)
    moved = {
        "q": (visited * d, 0),
        "k": (keys * d, 0),
        "v": (keys * dv, 0),
        "out": (queries * dv, 0),
        "lse": (4 * visited, 0),
        "dout": ((queries + visited) * dv, 0),
        "delta": (4 * visited, 4 * queries),
        "dq_sum": (queries * row, (queries + visited) * row),
        "dq": (0, queries * d),
        "dk": (0, keys * d),
        "dv": (0, keys * dv),
    }
    pairs = heads * sum(map(len, walks))
    return Budget(moved, matmul=_flops(p, tile, pairs, (3, 2)), exp=pairs * tile.rows * tile.cols)


EXERCISES = (
    Exercise(
        name="11.1",
        title="P from S and the LSE, and dV",
        task="dV = Pᵀ dO. Each row of P is e^(S − LSE): with the LSE there is no maximum to look for and no sum to take. A block "
        "owns a tile of keys. It loads each tile of Q and dO once, and keeps its dV in registers. P is rounded, as in the forward "
        "pass. A query that sees no key has the LSE −∞; `.finite()` makes it 0, so that its weights become e^(−∞) = 0.",
        cases=_whole_cases,
        truth=_gradients("dv"),
        budget=_dv_budget,
        hints=(
            "S transposed is `block.matmul(k_j, q_i.T, split=split, scale=problem.scale)`: tile.cols rows, tile.rows columns.",
            "`block.fetch(lse, i, tile.rows)` has a number for each row. Here queries are columns, so lay it across: `.T`.",
            "`p.round(problem.dtype)` times dO's tile, with `acc=dv_j`: the sum over all tiles of queries stays in registers.",
        ),
        slips={
            "k": "K_j is loaded once, before the loop over i.",
            "q": "Each block loads each tile of Q once.",
            "dout": "Each block loads each tile of dO once.",
            "lse": "The LSE of a tile of queries: one number for each, fetched where its Q is used.",
            "dv": "dV_j is stored once, after the loop: until then it is a sum in registers.",
        },
        afterwards="Next: the forward pass kept one number for each query, and that was enough to have all of P again.",
    ),
    Exercise(
        name="11.2",
        title="dS = P ∘ (dP − D), and dQ",
        task="dP = dO Vᵀ, and dS = P ∘ (dP − D). D is a number for each query: the sum of P ∘ dP over *all* keys. That looks like a "
        "pass over the keys before the pass over the keys. It isn't one: D is also the sum of dO ∘ O over the head dim, and O is "
        "there. So K and V are loaded once for each tile of queries; the budget has no byte for a second pass. dQ = scale · dS K.",
        cases=_whole_cases,
        truth=_gradients("dq"),
        budget=_dq_budget,
        hints=(
            "D needs two tiles that belong to the block's own queries: dO, which is in SRAM already, and O, which only D needs.",
            "`x.sum()` is the sum of each row. `ds = p * (dp - d_i)`: a number for each row is taken from all of its columns.",
            "`ds.round(problem.dtype)` times K_j, with `acc=dq_i`. The scale is a factor of all dQ: once, at the end.",
        ),
        slips={
            "k": "Each block loads each tile of K once. A second pass for D isn't needed: O knows.",
            "v": "Each block loads each tile of V once. A second pass for D isn't needed: O knows.",
            "out": "Each row of O is fetched once, for D.",
            "dout": "dO's tile is loaded once, and serves D and dP.",
            "dq": "dQ_i is stored once, after the loop.",
        },
        afterwards="Next: no atomics here, and each P is computed for dQ alone. 11.3 computes it once for all three gradients.",
    ),
    Exercise(
        name="11.3",
        title="Keys outside, queries inside",
        task="All of the main launch, under a causal mask. A block owns a tile of K and V, walks over the tiles of queries that see "
        "some of it, for each query head of its group, and computes P and dS *once* for three gradients. dK and dV stay in "
        "registers, summed over the group. dQ is spread over blocks: each adds its part to dq_sum in HBM, in float32. The budget "
        "has all of it, the bytes of the atomic additions too. (D and the zeros of dq_sum come before, and dQ is rounded after: "
        "that's given.)",
        cases=_grouped_cases,
        truth=_gradients("dv", "dk", "dq"),
        budget=_all_budget,
        hints=(
            "Key c is seen by the queries from c − (problem.len_kv − problem.len_q) on. Of a tile, key j · tile.cols is seen first.",
            "S, mask and P are those of 11.1. dP is V_j times dO_i transposed, and d_i lies across like the LSE.",
            "dV gets P times dO_i, dK gets dS times Q_i: both `acc=`, both over all heads of the group, stored once.",
            "`block.put(ds_shared, ds)`, then `ds_shared.T` times K_j is this block's part of dQ_i: `block.atomic_add` it.",
        ),
        slips={
            "k": "K_j is loaded once, before both loops.",
            "v": "V_j is loaded once, before both loops.",
            "q": "A block loads the tiles of Q that see some of its keys, once for each head of its group, and no others.",
            "dout": "D's launch reads dO once. A block of the main launch loads it where it loads Q.",
            "dq_sum": "Set to 0 once, added to once for each pair of tiles that is visited, read once. An addition counts as written.",
            "lse": "A number for each query that the block visits.",
            "delta": "A number for each query that the block visits. It was written once.",
            "dk": "dK_j is stored once: the sum over the heads of the group is taken in registers.",
            "dv": "dV_j is stored once: the sum over the heads of the group is taken in registers.",
        },
        afterwards="Next: this is what trains models today. Its one shared place is dq_sum, and who adds first there is chance.",
    ),
)


# -- 11.4 to 11.6: CUDA -------------------------------------------------------------------------------------------

BC, BR, D = 64, 32, 32
"""Keys of a block of 11.4, one for each thread; queries of a tile in SRAM; the head dim."""


def _key_tile(draw: Random) -> list[Launch]:
    """Numbers by the rule of `fl.verify`; bytes: K, V, dK and dV once, Q, dO, LSE and D once for each tile of keys."""

    def launch(case: Case) -> Launch:
        p, arrays = case.problem, _backward(case).arrays()
        truth = _gradients("dk", "dv")(p, *arrays.values())
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
    ragged = first.replace(heads=3, len_q=draw.randint(33, 60), len_kv=BC + draw.randint(1, 30))
    tile = Tile(BR, BC)
    lone = first.replace(kv_heads=2, len_q=draw.randint(10, 31), len_kv=draw.randint(20, 60))
    cases = [Case(p, tile, draw.getrandbits(32)) for p in (first, ragged)]
    return [launch(case) for case in (*cases, far(lone, tile, draw))]


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
            most={(name, "read", "instructions"): rows * -(-cols // 32) for name in ("out", "dout")},
            passes=5 * WARPS * blocks,  # five shuffles for each row
        )

    return [launch(8, 128), *(launch(4 * draw.randint(2, 5) + draw.randint(1, 3), draw.randint(33, 200)) for _ in range(2))]


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


KERNEL_EXERCISES = (
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
            "s is k_row · q_tile[r] times scale, p = expf(s − lse_tile[r]), dp is v_row · do_tile[r], ds = p · (dp − delta_tile[r]).",
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
        task="A warp has a row. Each lane multiplies every 32nd element of dO with that of O, and adds up. Then the lanes add theirs "
        "by shuffles, five of them, and one lane stores the sum.",
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
            "passes": "Five shuffles for each row. A pass is a shuffle, or what 32 lanes read or write in shared memory at a time.",
        },
        afterwards="Next: 2 bytes read for each FLOP. This launch waits for memory, whatever its arithmetic.",
        extra=True,
    ),
    KernelExercise(
        name="11.6",
        title="Dropout without a mask",
        task="z = p / keep where a weight is kept, and 0 where it is dropped. Whether it is kept must follow from seed, head, query "
        "and key alone: `uniform(seed, place)` gives a number from 0 to 1, and less than `keep` means kept. The place is (head · "
        "len_q + query) · len_kv + key. The forward pass has queries as rows. The backward pass has keys as rows (`flipped`), and "
        "other tiles, and must find the same mask. Nothing of it is stored.",
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
        },
        afterwards="Next: the library takes Philox, whose bits pass harder tests, and makes 16 weights' bytes at a time.",
        extra=True,
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

WAY_BACK = Problem(batch=1, heads=16, len_q=4096, head_dim=128, dtype="float16")
_TILE = Tile(64, 128)
_MATRIX = 16 * 4096 * 128
"""Elements of Q, of all heads; of S there are 32 times as many."""


def way_back(name: str) -> Counts:
    """What a backward pass moves and holds: 16 heads of 4,096 tokens, head dim 128.

    >>> way_back("flash2_backward").hbm.atomic
    1073741824
    """
    return count(name, WAY_BACK, device="h200")


def moved_by(name: str) -> int:
    """Bytes read, written and added by atomics."""
    hbm = way_back(name).hbm
    return hbm.read + hbm.write + hbm.atomic


_SQUARE = 32 * _MATRIX

PREDICTIONS = (
    Prediction(
        name="11.1",
        truth=lambda: {
            "standard": moved_by("standard_backward"),
            "flash2": moved_by("flash2_backward"),
            "standard_holds": way_back("standard_backward").hbm.peak,
            "flash2_holds": way_back("flash2_backward").hbm.peak,
        },
        slips=lambda: {
            "standard": {
                "the tables alone: but each tile of a table also loads its tiles of Q, K, V or dO": 26 * _SQUARE // 4 + _SQUARE // 2,
                "the operands once": 10 * _MATRIX,
                "one head only": moved_by("standard_backward") / 16,
            },
            "flash2": {
                "without the atomic additions to dQ": moved_by("flash2_backward") - way_back("flash2_backward").hbm.atomic,
                "each operand once: but every tile of keys reads Q and dO": 16 * _MATRIX,
                "one head only": moved_by("flash2_backward") / 16,
            },
            "standard_holds": {
                "P alone": 4 * _SQUARE,
                "P and dP: but dS is there, too": 8 * _SQUARE,
                "one head only": way_back("standard_backward").hbm.peak / 16,
                "all three in 16 bits: but P and dP are float32": 6 * _SQUARE,
            },
            "flash2_holds": {
                "the eight matrices: but dQ's sum is float32, and one more": 16 * _MATRIX,
                "a table of scores: but there is none": 4 * _SQUARE,
                "elements, not bytes": 8 * _MATRIX,
            },
        },
        because="The textbook writes P, dP and dS (10 bytes a score) and reads P and dS twice. FlashAttention-2 has none of them: it "
        "reads Q and dO once for each of 32 tiles of keys, and adds dQ to memory as often. It holds eight matrices, LSE, D, and "
        "one sum in float32.",
    ),
    Prediction(
        name="11.2",
        truth=lambda: {
            "times": way_back("flash2_backward").by_tensor["q"].hbm_read // (2 * _MATRIX),
            "q": way_back("flash2_backward").by_tensor["q"].hbm_read,
        },
        slips=lambda: {
            "times": {
                "once: that is what happens to K": 1,
                "tiles of 64: those are the queries": 4096 // _TILE.rows,
                "once for each key": 4096,
                "the heads": 16,
            },
            "q": {
                "once": 2 * _MATRIX,
                "elements, not bytes": 32 * _MATRIX,
                "tiles of 64: those are the queries": 64 * 2 * _MATRIX,
                "one head only": 32 * 2 * _MATRIX // 16,
            },
        },
        because="Keys are outside: 4,096 / 128 = 32 blocks for each head, and each walks over all of Q. K and V are read once. In "
        "the forward pass it was the other way round.",
    ),
    Prediction(
        name="11.3",
        truth=lambda: {"atomic": way_back("flash2_backward").hbm.atomic},
        slips=lambda: {
            "atomic": {
                "once: but each of the 32 blocks of a head has a part of each row": 4 * _MATRIX,
                "float16: but the sum is float32": 2 * 32 * _MATRIX,
                "elements, not bytes": 32 * _MATRIX,
                "read and written: but an atomic addition is one message": 8 * 32 * _MATRIX,
                "one head only": 4 * 32 * _MATRIX // 16,
            },
        },
        because="Each of the 32 blocks of a head adds a part to all of dQ, 4 bytes an element: 32 · 16 · 4096 · 128 · 4. That's nearly "
        "half of all that the launch moves.",
    ),
)
