"""Lesson 11, the way back: its exercises that are tile programs, its predictions, and gradients by differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import cast

import numpy as np

from flashlab.lessons.exercise import SCALE, Budget, Case, Exercise, Truth, far
from flashlab.lessons.lesson00 import tiles
from flashlab.lessons.lesson01 import attention_cases
from flashlab.lessons.prediction import Prediction
from simulator import Counts, Device, Machine, Problem, Program, Tile, count
from simulator.config import padded
from simulator.dtypes import Array, numpy_dtype
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.operations.pairs import hidden_pairs
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
        dout = cast(Array, np.random.default_rng(self.seed).standard_normal(forward["out"].shape))
        return found | {
            "out": forward["out"].astype(numpy_dtype(p.out_dtype)),
            "lse": forward["lse"].astype(np.float32),
            "dout": dout.astype(numpy_dtype(p.out_dtype)),
        }


def backward(case: Case) -> BackwardCase:
    """The backward pass of a case."""
    return BackwardCase(**{each.name: getattr(case, each.name) for each in fields(case)})


def by_differences(
    problem: Problem, arrays: Mapping[str, Array], name: str, head: int, row: int, step: float = STEP
) -> Array:
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
            losses.append(_loss(problem, dout, **(wide | {name: x})))
        found[column] = (losses[0] - losses[1]) / (2 * step)
    return found


def _loss(problem: Problem, dout: Array, q: Array, k: Array, v: Array) -> float:
    """The sum of dO * O: attention forwards, plainly, in float64."""
    group, hidden = problem.queries_per_kv, hidden_pairs(problem)
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.where(hidden, -np.inf, problem.scale * (q @ k.swapaxes(-1, -2)))
    top: Array = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
    out = p @ v / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return float((out * dout).sum())


def gradient(program: Program, problem: Problem, arrays: Mapping[str, Array], name: str) -> Array:
    """One output of a program of the backward pass, in tiles of 16 x 16. Others it may leave out, unlike in `fl.simulate`."""
    device = Device.named("h100")
    config = program.configure(problem, device, Tile(16, 16))
    machine = Machine(program.name, BACKWARD, problem, config, device, data=arrays)
    program(machine, *machine.inputs, problem, config.tile)
    return machine.result(name)


def next_token_loss(out: Array, tokens: Array, steps: int = 30) -> tuple[tuple[float, float], Array]:
    """A small loss on the outputs of some heads (1, heads, length, head_dim), and its gradient dO of the same shape, float64.

    A linear read-out W guesses each next token from the heads' outputs, softmax(out W). It is trained for a few steps. The loss
    is the sum over all tokens, in nats: its mean per token before and after is returned. dO is the gradient by `out` afterwards.
    """
    x = np.moveaxis(out[0], 0, 1).reshape(out.shape[2], -1).astype(np.float64)
    rms = np.sqrt((x**2).mean())
    x, targets = x[:-1] / rms, np.unique(tokens, return_inverse=True)[1][1:]
    weights = np.zeros((x.shape[1], targets.max() + 1))
    before, slope = after, _ = cross_entropy(x @ weights, targets)
    for _ in range(steps):
        weights -= x.T @ slope / len(targets)
        after, slope = cross_entropy(x @ weights, targets)
    dout = np.zeros((out.shape[2], x.shape[1]))
    dout[:-1] = slope @ weights.T / rms
    dout = np.moveaxis(dout.reshape(out.shape[2], out.shape[1], -1), 1, 0)[None]
    return (before / len(targets), after / len(targets)), dout


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """The sum over all rows of -log softmax(logits)[target], and its gradient by the logits."""
    top, rows = logits.max(1, keepdims=True), np.arange(len(targets))
    p = np.exp(logits - top)
    p /= p.sum(1, keepdims=True)
    loss = float(-np.log(p[rows, targets]).sum())
    p[rows, targets] -= 1
    return loss, p


# -- exercises ----------------------------------------------------------------------------------------------------


def gradients(*names: str) -> Callable[..., Truth]:
    """The right gradients of these names, for the given output and LSE, and the rule of `fl.verify` for every row."""

    def truth(problem: Problem, *arrays: Array) -> Truth:
        given: dict[str, Array] = dict(zip(("q", "k", "v", "out", "lse", "dout"), arrays, strict=True))
        with np.errstate(over="ignore", invalid="ignore"):
            right = BACKWARD.judge(problem, given)
            bounds = BACKWARD.bounds(problem, given, right)
        first, *others = (
            Truth(right[name], bounds[name][..., None], by_row=True, of=name, of_keys=name != "dq") for name in names
        )
        return replace(first, also=tuple(others))

    return truth


def _whole_cases(draw: Random) -> list[Case]:
    """All tiles are visited. A head has keys of its own. In float32 the scale isn't that of the head dim."""
    cases = [replace(c, problem=c.problem.replace(kv_heads=c.problem.heads)) for c in attention_cases(draw)]
    return [
        backward(replace(c, problem=c.problem.replace(scale=SCALE)) if c.problem.dtype == "float32" else c)
        for c in cases
    ]


def _grouped_cases(draw: Random) -> list[Case]:
    """Causal, with groups of heads: as many keys as queries, one more, many more, and fewer.

    With one key more, the first query that sees a tile of keys is the last one of its own tile. With as many, it is the first.
    """
    first = Problem(batch=1, heads=4, kv_heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
    ragged, n = 32 * draw.randint(2, 4) + draw.randint(1, 30), draw.randint(60, 120)
    others = [
        (first.replace(len_q=(full := 32 * draw.randint(3, 5)), len_kv=full + 1, head_dim=40), Tile(32, 32)),
        (first.replace(heads=3, kv_heads=1, len_q=ragged, len_kv=ragged + draw.randint(33, 80)), Tile(16, 64)),
        (first.replace(len_q=n, len_kv=n - draw.randint(16, 40), dtype="float32"), Tile(16, tiles(draw).cols)),
    ]
    last = first.replace(len_q=draw.randint(40, 70), len_kv=96, head_dim=24, dtype="float32")
    cases = [Case(p, tile, draw.getrandbits(32)) for p, tile in [(first, Tile(64, 64)), *others]]
    return [backward(case) for case in (*cases, far(last, Tile(32, 32), draw))]


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
        truth=gradients("dv"),
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
        task="dP = dO Vᵀ, and dS = P ∘ (dP − D). D is a number for each query: the sum of P ∘ dP over *all* keys. That looks like "
        "a pass over the keys before the pass over the keys. It isn't one: D is also the sum of dO ∘ O over the head dim, and O is "
        "there. So K and V are loaded once for each tile of queries; the budget has no byte for a second pass. dQ = scale · dS K.",
        cases=_whole_cases,
        truth=gradients("dq"),
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
        task="All of the main launch, under a causal mask. A block owns a tile of K and V, walks over the tiles of queries that "
        "see some of it, for each query head of its group, and computes P and dS *once* for three gradients. dK and dV stay in "
        "registers, summed over the group. dQ is spread over blocks: each adds its part to dq_sum in HBM, in float32. The budget "
        "has all of it, the bytes of the atomic additions too. (D and the zeros of dq_sum come before, and dQ is rounded after: "
        "that's given.)",
        cases=_grouped_cases,
        truth=gradients("dv", "dk", "dq"),
        budget=_all_budget,
        hints=(
            "Key c is seen by the queries from c − (problem.len_kv − problem.len_q) on. Of a tile, j · tile.cols is seen first.",
            "S, mask and P are those of 11.1. dP is V_j times dO_i transposed, and d_i lies across like the LSE.",
            "dV gets P times dO_i, dK gets dS times Q_i: both `acc=`, both over all heads of the group, stored once.",
            "`block.put(ds_shared, ds)`, then `ds_shared.T` times K_j is this block's part of dQ_i: `block.atomic_add` it.",
        ),
        slips={
            "k": "K_j is loaded once, before both loops.",
            "v": "V_j is loaded once, before both loops.",
            "q": "A block loads the tiles of Q that see some of its keys, once for each head of its group, and no others.",
            "dout": "D's launch reads dO once. A block of the main launch loads it where it loads Q.",
            "dq_sum": "Set to 0 once, added to once for each pair of tiles that is visited, read once. Additions count as written.",
            "lse": "A number for each query that the block visits.",
            "delta": "A number for each query that the block visits. It was written once.",
            "dk": "dK_j is stored once: the sum over the heads of the group is taken in registers.",
            "dv": "dV_j is stored once: the sum over the heads of the group is taken in registers.",
        },
        afterwards="Next: this is what trains models today. Its one shared place is dq_sum, and who adds first there is chance.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

WAY_BACK = Problem(batch=1, heads=16, len_q=4096, head_dim=128, dtype="float16")
_TILE = Tile(64, 128)
_MATRIX = 16 * 4096 * 128
"""Elements of Q, of all heads."""
_SQUARE = 32 * _MATRIX
"""Scores, of all heads."""


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
                "the tables alone: but each tile of a table also loads its tiles of Q, K, V or dO": 26 * _SQUARE,
                "the operands once": 10 * _MATRIX,
                "one head only": moved_by("standard_backward") / 16,
            },
            "flash2": {
                "without the atomic additions to dQ": moved_by("flash2_backward")
                - way_back("flash2_backward").hbm.atomic,
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
        because="The textbook writes P, dP and dS (10 bytes a score) and reads P and dS twice. FlashAttention-2 has none of them: "
        "it reads Q and dO once for each of 32 tiles of keys, and adds dQ to memory as often. It holds eight matrices, LSE, D, and "
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
        because="Each of the 32 blocks of a head adds a part to all of dQ, 4 bytes an element: 32 · 16 · 4096 · 128 · 4. That's "
        "nearly half of all that the launch moves.",
    ),
)
