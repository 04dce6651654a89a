"""What an algorithm's kernels support. Every refusal comes from here, as one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.config import padded, warps_for
from simulator.devices import Device
from simulator.errors import Said, Unavailable, UsageError
from simulator.names import DType
from simulator.problem import COMMON_MASKS, DTYPES, FP8, Problem, Tile

MOST_KEYS = 1 << 30
"""The longest sequence that a kernel takes: sums of lengths and windows must fit an int."""
LEAST_SOFT_CAP = 1e-30
"""The least soft cap of a kernel: quotients with it must fit a float."""
MOST_BLOCKS = (1 << 31) - 1
"""The most blocks along a grid's first axis."""


def fragments(tile: Tile, problem: Problem) -> str | None:
    """None for a tile of whole fragments, else what is accepted."""
    del problem
    return "multiples of 16, the fragment of a kernel's matrix products" if tile.rows % 16 or tile.cols % 16 else None


def warpgroups(tile: Tile, problem: Problem) -> str | None:
    """None for a tile that gives each of up to three warpgroups 64 rows of Q, else what is accepted."""
    del problem
    if tile.rows in (64, 128, 192) and tile.cols % 16 == 0 and tile.cols <= 256:
        return None
    return "64, 128 or 192 rows, 64 for each warpgroup, and a multiple of 16 columns up to 256"


def few_rows(tile: Tile, problem: Problem) -> str | None:
    """None for a tile of which a warp can hold all rows, and a block of up to eight warps 16 keys each, else what is accepted."""
    most = 16 if problem.head_dim > 128 else 32
    if tile.rows % 8 == 0 and tile.rows <= most and tile.cols % 16 == 0 and tile.cols <= 128:
        return None
    return f"a multiple of 8 rows up to {most}, which each warp holds, and of 16 columns up to 128, 16 for each warp"


def a_lane_per_key(tile: Tile, problem: Problem) -> str | None:
    """None for a tile of `few_rows` in which a warp has a lane for each of its keys, else what is accepted."""
    if tile.cols % 16 == 0 and padded(tile.cols) // warps_for(tile.cols) > 32:
        return "columns of which each warp has at most 32, a lane for each: 16, 32, 48, 64, 96 or 128"
    return few_rows(tile, problem)


def powers_of_two(tile: Tile, problem: Problem) -> str | None:
    """None for a tile that Triton makes of a few warps, else what is accepted."""
    del problem
    sides = (16, 32, 64, 128)
    return None if tile.rows in sides and tile.cols in sides else "sides of 16, 32, 64 or 128: Triton has powers of two"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What an algorithm's kernels support.

    They run from compute capability `least` on, or on the capability `only` alone. `tile(tile, problem)` returns None
    for a tile that they accept, else what they accept. Verification tries `tiles`, where None is the default.
    `masks` are those of `Problem.masks` that tile program, formula and kernels support.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float32")
    >>> fl.CATALOGUE["flash3"].refuses(p, fl.DEVICES["h200"])
    "dtype = 'float32': expected float16 or bfloat16 for flash3: use flash2"
    >>> fl.CATALOGUE["flash2"].refuses(p, fl.DEVICES["h200"]) is None
    True
    """

    dtypes: tuple[DType, ...] = DTYPES
    masks: tuple[str, ...] = COMMON_MASKS
    least: tuple[int, int] = (7, 5)
    only: tuple[int, int] | None = None
    head_dims: range = range(1, 257)
    head_dim_v: int | None = None
    """The head dim of V, where it isn't that of Q and K."""
    few_queries: bool = False
    """Are the kernels for few queries and many keys?"""
    queries: int | None = None
    """The most queries of a sequence, where these kernels are for so many only."""
    same_queries: str | None = None
    """What to do with sequences that have different numbers of queries, where these kernels take as many of each."""
    tile: Callable[[Tile, Problem], str | None] = fragments
    tiles: tuple[Tile | None, ...] = (None,)
    instead: str | None = "flash2"
    """The algorithm to use where these kernels don't run, if there is one."""

    @property
    def eight_bit(self) -> bool:
        """Are the kernels for 8-bit operands? Then tile program and formula take no others."""
        return FP8 in self.dtypes

    def fitted(self, problem: Problem) -> Problem:
        """A problem with no more queries of a sequence than these kernels take."""
        most = self.queries
        if most is None or problem.ragged:
            return problem
        if problem.lengths is None:
            return problem.replace(len_q=min(problem.len_q, most), len_kv=problem.len_kv)
        pairs = [(min(queries, most), keys) for queries, keys in problem.pairs]
        return problem.replace(lengths=pairs, len_kv=problem.len_kv)

    def refusal(
        self, name: str, problem: Problem, device: Device | None = None, tile: Tile | None = None
    ) -> UsageError | Unavailable | None:
        """The error for a problem that the algorithm `name` can't take, or None.

        Without a `device` this is about tile program and formula. With one it is also about the kernels on that device.
        """
        if (problem.dtype == FP8) != self.eight_bit:
            halves = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
            return UsageError("dtype", problem.dtype, f"{FP8 if self.eight_bit else halves} for {name}")
        if self.same_queries and len(queries := {rows for rows, _ in problem.pairs}) > 1:
            accepted = f"as many of each sequence for {name}: {self.same_queries}"
            return UsageError("lengths", Said(f"{min(queries):,} to {max(queries):,} queries"), accepted)
        if self.queries is not None and (asked := max(len(rows) for rows, _ in problem.spans)) > self.queries:
            accepted = f"at most {self.queries} for {name}: {self.instead} takes more"
            return UsageError("len_q", asked, accepted)
        if device is None:
            return None
        return self._of_kernels(name, problem, device) or self._of_tile(tile, problem)

    def _of_kernels(self, name: str, problem: Problem, device: Device) -> UsageError | Unavailable | None:
        p, title = problem, device.title or device.name
        capability = "{}.{}".format(*device.compute_capability)
        if p.head_dim_v != (self.head_dim_v or p.head_dim):
            return UsageError(
                "head_dim of v", p.head_dim_v, f"{p.head_dim}, as q and k have: the kernels know only one"
            )
        if p.head_dim not in self.head_dims:
            return UsageError("head_dim", p.head_dim, f"at most {self.head_dims[-1]} for a kernel")
        for field, length in (("len_q", p.len_q), ("len_kv", p.len_kv)):
            if length > MOST_KEYS:
                return UsageError(field, length, f"at most {MOST_KEYS:,} for a kernel")
        if p.soft_cap is not None and p.soft_cap < LEAST_SOFT_CAP:
            return UsageError("soft_cap", p.soft_cap, f"at least {LEAST_SOFT_CAP:g} for a kernel")
        if device.compute_capability < self.least:
            needed = "{}.{}".format(*self.least)
            return Unavailable(f"{title} has compute capability {capability}: the kernels need {needed} or higher")
        if p.dtype == "bfloat16" and device.compute_capability < (8, 0):
            return UsageError(
                "dtype", p.dtype, f"float32 or float16: {title} has compute capability {capability}, not 8.0"
            )
        if self.only and device.compute_capability != self.only:
            instead = f"{self.instead} in 16 bits" if self.eight_bit else self.instead
            return Unavailable(
                f"{name} needs sm_90a (Hopper: an H100 or H200), but {title} has {capability}: use {instead}"
            )
        if p.dtype not in self.dtypes:
            instead = f": use {self.instead}" if self.instead else ""
            return UsageError("dtype", p.dtype, f"{' or '.join(self.dtypes)} for {name}{instead}")
        return None

    def _of_tile(self, tile: Tile | None, problem: Problem) -> UsageError | None:
        if tile is not None and (accepted := self.tile(tile, problem)):
            return UsageError("tile", str(tile), accepted)
        return None
