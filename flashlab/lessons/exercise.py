"""What an exercise is: problems drawn anew, the truth in float64, a budget of bytes in closed form, hints, a solution.

The solution is a file of its own, `solutions/NN_n.py`. Lines that end in `# solution` are the learner's part: the
skeleton is the file without them, so that the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from random import Random
from typing import ClassVar

import numpy as np

from flashlab.lessons.rules import Rule
from simulator import Counts, Device, Problem, Tile, random_inputs
from simulator.dtypes import Array

MARK = "# solution"
Level = tuple[float, float]
"""What is added to the scores: to those of the first key, and to those of the last."""
FAR: Level = (-13000.0, -12000.0)
"""Below any -10⁴ that stands for −∞, and rising."""
APART, SCALE = 400.0, 0.3
"""So far apart that the exponential of the one is 0 beside the other; and a scale that no head dim has by itself."""


@dataclass(frozen=True)
class Case:
    """A problem to be solved with a tile; its inputs are normal numbers of the given `spread`, drawn from `seed`.

    `shift` is added to the elements of q, for exercises in which q holds the scores, and `level` to the scores q kᵀ: so
    much at the first key, so much at the last, and evenly in between. Far below 0 a maximum that starts at 0 is wrong. Far
    above 0 exponentials without a maximum overflow, and where the level falls the maximum must be that of all tiles. Where it
    rises, a key that a mask hides has a higher score than those that are seen. `apart` is taken from the scores of every other
    query: the maximum of a tile is not that of its rows. With `blanks` every seventh column of q, k and v is 0. With
    `own_tile` the program has to choose the tile by itself, and `tile` is the right choice.
    """

    problem: Problem
    tile: Tile
    seed: int
    spread: float = 1.0
    shift: Level = (0.0, 0.0)
    level: Level = (0.0, 0.0)
    apart: float = 0.0
    blanks: bool = False
    device: str = "h100"
    own_tile: bool = False
    heads_are_rows: ClassVar[bool] = False
    """Are the query heads of a group rows of one tile? Then a block is theirs together."""

    @property
    def shapes(self) -> str:
        """What the program gets, in words."""
        p, keys = self.problem, (self.problem.batch, self.problem.kv_heads, self.problem.len_kv)
        return f"q {(p.batch, p.heads, p.len_q, p.head_dim)}, k {(*keys, p.head_dim)}, v {(*keys, p.head_dim_v)}"

    def inputs(self) -> tuple[Array, Array, Array]:
        """q, k and v, `(batch, heads, length, …)`."""
        q, k, v = (x * x.dtype.type(self.spread) for x in random_inputs(self.problem, self.seed))
        if self.blanks:
            for x in (q, k, v):
                x[..., ::7] = 0
        if any(self.shift):
            q = (q + np.linspace(*self.shift, q.shape[-1]) - self.apart * _every_other(q)[:, None]).astype(q.dtype)
        if any(self.level):
            q, k = levelled(q, k, self.problem.scale, self.level, self.apart)
        return q, k, v

    def arrays(self) -> dict[str, Array]:
        """What the program gets, by name and in its order."""
        return dict(zip("qkv", self.inputs(), strict=True))


def far(problem: Problem, tile: Tile, draw: Random) -> Case:
    """A case at the ends of what scores may be: `FAR`, with rows `APART`, and with a scale that isn't 1 / sqrt(d)."""
    return Case(problem.replace(scale=SCALE), tile, draw.getrandbits(32), level=FAR, apart=APART)


def levelled(q: Array, k: Array, scale: float, level: Level, apart: float = 0.0) -> tuple[Array, Array]:
    """q and k with other first columns, which add the level to the scores, and take `apart` from those of every other query."""
    q, k = q.copy(), k.copy()
    q[..., 0] = np.sqrt(max(map(abs, level)) / scale)
    k[..., 0] = np.linspace(*level, k.shape[-2]) / (scale * q[0, 0, 0, 0].astype(np.float64))
    if apart:
        k[..., 1] = np.sqrt(apart / scale)
        q[..., 1] = -apart * _every_other(q) / (scale * k[0, 0, 0, 1].astype(np.float64))
    return q, k


def _every_other(q: Array) -> Array:
    """0 and 1 by turns, one for each query."""
    return np.resize(np.array([0, 1]), q.shape[-2])


@dataclass(frozen=True)
class Budget:
    """What a correct program moves, tensor by tensor: (bytes read, bytes written), requested of HBM; and its arithmetic.

    `matmul` FLOPs must be equal: fewer means that something was multiplied outside of the machine. `exp` is the least
    number of exponentials, for there are several right ways to count them. `sram` has bytes read from and written to SRAM, of
    the tensors for which that matters.
    """

    tensors: Mapping[str, tuple[int, int]]
    matmul: int = 0
    exp: int = 0
    sram: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True)
class Truth:
    """The right output in float64, and how far from it each element may be, or (`by_row`) the 2-norm of each row.

    `lse` and `lse_tolerance`, `(batch, heads, rows)`, where the exercise asks for the LSE too. `of` is the output's name. Its
    rows are queries, or keys (`of_keys`). `also` has the other outputs, where an exercise asks for several.
    """

    out: Array
    tolerance: Array
    by_row: bool = False
    lse: Array | None = None
    lse_tolerance: Array | None = None
    of: str = "out"
    of_keys: bool = False
    also: tuple[Truth, ...] = ()

    def wrong(self, out: Array) -> Array:
        """Where `out` is too far off, `(batch, heads, rows, cols)`; NaN is."""
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(out.astype(np.float64) - self.out)
            if self.by_row:
                off = np.broadcast_to(np.linalg.norm(off, axis=-1, keepdims=True), off.shape)
            return ~(off <= self.tolerance)

    def wrong_lse(self, lse: Array) -> Array:
        """Which rows' LSE is too far off, `(batch, heads, rows)`; -inf equals -inf."""
        assert self.lse is not None
        with np.errstate(invalid="ignore"):
            return ~((np.abs(lse.astype(np.float64) - self.lse) <= self.lse_tolerance) | (lse == self.lse))


class Solved:
    """What has a solution in a file of its own, whose lines that end in `mark` are the learner's part."""

    name: str
    mark: ClassVar[str] = MARK
    suffix: ClassVar[str] = ".py"

    @property
    def lesson(self) -> str:
        return self.name.split(".")[0]

    @property
    def marked(self) -> str:
        """The solution with its marks."""
        path = files("flashlab.lessons").joinpath("solutions", self.name.replace(".", "_") + self.suffix)
        return path.read_text(encoding="utf-8")

    @property
    def solution(self) -> str:
        return "".join(line.replace(self.mark, "").rstrip() + "\n" for line in self.marked.splitlines())

    @property
    def skeleton(self) -> str:
        """The solution without the marked lines: what the learner starts from."""
        return "".join(line + "\n" for line in self.marked.splitlines() if not line.endswith(self.mark))


@dataclass(frozen=True, kw_only=True)
class Exercise(Solved):
    """One exercise. `cases` draws its problems, the first of them without a ragged edge.

    `truth(problem, q, k, v)` is what `out` must be, `budget(problem, tile)` what may be moved. For another operation than
    attention `truth` takes what its case's `arrays` are. `out_tile` is the shape of the tiles that messages name (None: row
    tiles of the case's tile). `hints` get stronger one by one. What is `extra` counts for nobody's progress.
    """

    name: str
    title: str
    task: str
    cases: Callable[[Random], list[Case]]
    truth: Callable[[Problem, Array, Array, Array], Truth] | Callable[..., Truth]
    budget: Callable[[Problem, Tile], Budget]
    hints: tuple[str, ...]
    afterwards: str
    slips: Mapping[str, str] = field(default_factory=dict[str, str])
    """What it usually means when a tensor's bytes are off: by tensor."""
    tile_slips: Callable[[Problem, Device], Mapping[str, Tile]] = lambda problem, device: {}
    """Where the program has to choose the tile: the wrong ones that people arrive at, by what they did."""
    out_tile: Callable[[Case], tuple[int, int]] | None = None
    rules: tuple[Rule, ...] = ()
    """What the task asks of the order of things, where neither numbers nor bytes tell."""
    extra: bool = False


def elementwise(out: Array, unit: float) -> Truth:
    """A truth whose elements may be off by a few roundings: `unit` relative, with a floor at the row's typical size."""
    size = np.sqrt(np.mean(out**2, axis=-1, keepdims=True)) if out.size else out
    return Truth(out, unit * np.maximum(np.abs(out), size))


def attention_truth(problem: Problem, q: Array, k: Array, v: Array) -> Truth:
    """Attention in float64, and the rule of `fl.verify` for every row."""
    from flashlab.verify.rule import expect

    expected = expect(problem, q, k, v)
    return Truth(expected.out, expected.out_tolerance[..., None], by_row=True)


def attention_truth_with_lse(problem: Problem, q: Array, k: Array, v: Array) -> Truth:
    """The same, and the LSE of each row."""
    from flashlab.verify.rule import expect

    expected = expect(problem, q, k, v)
    tolerance = expected.out_tolerance[..., None]
    return Truth(expected.out, tolerance, by_row=True, lse=expected.lse, lse_tolerance=expected.lse_tolerance)


def counted(counts: Counts) -> Budget:
    """The budget of an algorithm of the library, from its formula."""
    moved = {name: (t.hbm_read, t.hbm_write + t.hbm_atomic) for name, t in counts.by_tensor.items()}
    moved = {name: both for name, both in moved.items() if any(both)}
    return Budget(moved, matmul=counts.flops.matmul, exp=counts.exp // 2)
