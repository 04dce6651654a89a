"""What operations that write into a pool of pages share: the pools, their scales, and that every bit is right or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError
from simulator.operations.caches import scales_of
from simulator.operations.operation import Arrays, Operation
from simulator.operations.paged import Pool, PoolOfScales
from simulator.operations.problems import Sizes
from simulator.problem import CACHES, Problem

TOKENS = ("pages", "kv_heads", "page_size")
POOLS = (
    Pool(name="k_pool", axes=(*TOKENS, "head_dim"), dtype="kv"),
    Pool(name="v_pool", axes=(*TOKENS, "head_dim_v"), dtype="kv"),
)
SCALES = tuple(
    scale for name in "kv" for scale in scales_of(name, TOKENS, PoolOfScales) if "pages" in scale.axes
)  # fmt: skip
"""A scale for each key and each value of a pool of 8 bits."""
QUANTIZED: Mapping[str, Sizes] = {
    dtype: {"kv_dtype": dtype, "k_scale": "token", "v_scale": "token"} for dtype in CACHES
}
LABELS = {"float8_e4m3fn": "e4m3", "int8": "int8"}


def pool_sizes(arrays: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Pages, heads, page size, head dim, and that of V, of `k_pool` and `v_pool`. Raises `UsageError`."""
    for name in ("k_pool", "v_pool"):
        if len(getattr(arrays[name], "shape", ())) != 4:
            shown = tuple(arrays[name].shape) if hasattr(arrays[name], "shape") else type(arrays[name]).__name__
            raise UsageError(f"{name}.shape", shown, "(pages, kv_heads, page_size, head_dim)")
    (pages, heads, size, dim), of_v = (tuple(arrays[f"{name}_pool"].shape) for name in "kv")
    if size < 1:
        raise UsageError("k_pool.shape", (pages, heads, size, dim), "pages of at least one key")
    if of_v[:3] != (pages, heads, size):
        raise UsageError("v_pool.shape", of_v, f"pages, heads and page size {(pages, heads, size)}, as k_pool has")
    return pages, heads, size, dim, of_v[3]


def codes(problem: Problem, found: Mapping[str, Array], random: np.random.Generator) -> dict[str, Array]:
    """Pools of whole numbers, in place of those that are `found`, if they have 8 bits."""
    if not problem.quantized:
        return {}
    dtype = numpy_dtype(problem.kv_dtype)
    whole = {x.name: random.integers(-100, 101, found[x.name].shape, np.int32) for x in POOLS}
    return {name: x.astype(np.float32).astype(dtype) for name, x in whole.items()}


def scales(problem: Problem, random: np.random.Generator) -> dict[str, Array]:
    """A number for each scale that a problem has."""
    return {x.name: random.random(x.shape(problem)).astype(np.float32) for x in SCALES if x.when(problem)}


class Writing(Operation):
    """An operation whose outputs are the pools, and their scales if there are any. It moves bytes, and computes nothing."""

    in_pages = True
    outputs = (*POOLS, *SCALES)

    def idle(self, problem: Problem) -> bool:
        return not problem.len_q

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        """0 everywhere: each element is one that is copied, or rounded once, as the judge does."""
        return {name: np.zeros(x.shape[:3]) for name, x in truth.items()}

    def flops(self, problem: Problem) -> int:
        """None by convention."""
        return 0
