"""What a launch of a kernel is, wherever it runs: what it can't do, its grid, its boxes, the structs that it is passed."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlab.run import tma
from simulator import catalogue
from simulator.config import Config
from simulator.counts import Counts, LaunchCounts, Spec
from simulator.devices import Device
from simulator.errors import Unavailable, UsageError
from simulator.problem import FP8, Problem, round_up
from simulator.programs.flash3_fp8 import TILES as FP8_TILES

__all__ = [
    "SHAPE", "TENSOR", "blocks_of", "box_rows", "check_hopper", "check_problem", "check_tile", "shape_struct", "strides_of",
    "unit_scales",
]  # fmt: skip

TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
"""`struct Tensor` of the kernels."""

_INTS = ("batch", "heads", "kv_heads", "len_q", "len_kv", "head_dim", "left", "right", "group")
SHAPE = np.dtype([*((name, "i4") for name in _INTS), ("scale", "f4")])
"""`struct Shape` of the kernels."""

_UNBOUNDED = 1 << 30  # the kernels' "no bound" of a window; lengths go no further, so that sums fit an int
_MOST_HEAD_DIM = 256


def check_problem(problem: Problem, device: Device) -> None:
    """Refuses what the kernels can't do, or a GPU can't."""
    if problem.head_dim_v != problem.head_dim:
        raise UsageError(
            "head_dim of v", problem.head_dim_v, f"{problem.head_dim}, as q and k have: the kernels know one"
        )
    if problem.head_dim > _MOST_HEAD_DIM:
        raise UsageError("head_dim", problem.head_dim, f"at most {_MOST_HEAD_DIM} for a kernel")
    for name, length in (("len_q", problem.len_q), ("len_kv", problem.len_kv)):
        if length > _UNBOUNDED:
            raise UsageError(name, length, f"at most {_UNBOUNDED:,} for a kernel")
    title, capability = device.title or device.name, "{}.{}".format(*device.compute_capability)
    if device.compute_capability < (7, 5):
        raise Unavailable(f"{title} has compute capability {capability}: the kernels need a GPU of 7.5 or higher")
    if problem.dtype == "bfloat16" and device.compute_capability < (8, 0):
        raise UsageError(
            "dtype", "bfloat16", f"float32 or float16: {title} has compute capability {capability}, not 8.0"
        )


def check_hopper(name: str, problem: Problem, device: Device) -> None:
    """Refuses what a kernel made for Hopper can't do."""
    title = device.title or device.name
    if device.compute_capability != (9, 0):
        capability = "{}.{}".format(*device.compute_capability)
        instead = "flash2 in 16 bits" if problem.dtype == FP8 else "flash2"
        raise Unavailable(f"{name} needs sm_90a (Hopper: an H100 or H200), {title} has {capability}: use {instead}")
    if problem.itemsize > 2:
        raise UsageError("dtype", problem.dtype, f"float16 or bfloat16 for {name}: use flash2")


def check_tile(config: Config, problem: Problem) -> None:
    """Refuses a tile that isn't made of whole fragments."""
    tile = config.tile
    if problem.dtype == FP8 and tile not in FP8_TILES:
        raise UsageError("tile", str(tile), f"one of {', '.join(map(str, FP8_TILES))} for {FP8}")
    if config.consumers and (tile.rows not in (64, 128, 192) or tile.cols % 16 or tile.cols > 256):
        raise UsageError(
            "tile", str(tile), "64, 128 or 192 rows, 64 for each warpgroup, and a multiple of 16 columns up to 256"
        )
    if tile.rows % 16 or tile.cols % 16:
        raise UsageError("tile", str(tile), "multiples of 16, the fragment of a kernel's matrix products")


def blocks_of(kernel: catalogue.Kernel, counts: Counts, launch: LaunchCounts) -> int:
    """The grid of a launch: of those that take TMA's boxes the blocks may be persistent."""
    assert counts.config is not None
    return counts.config.grid(counts.problem, counts.device, launch.blocks) if kernel.boxes else launch.blocks


def box_rows(kernel: catalogue.Kernel, counts: Counts) -> dict[str, int]:
    """The arrays that a kernel gets TMA's descriptors of, and how many rows their boxes have."""
    p, tile = counts.problem, counts.tile
    sides = {"rows": tile.rows, "cols": tile.cols, "head_dim": round_up(p.head_dim, tma.ROW_BYTES // p.itemsize)}
    return {name: sides[side] for name, side in kernel.boxes}


def unit_scales(counts: Counts) -> dict[str, Any]:
    """Scales of 1 for the 8-bit inputs of a problem, NumPy; of other problems none."""
    return {
        spec.name: np.ones((spec.heads, spec.rows), np.float32)
        for spec in counts.tensors.values() if spec.role == "input" and spec.vector
    }  # fmt: skip


def strides_of(spec: Spec, batch: int) -> tuple[int, int, int]:
    """Bytes from one batch, head and row to the next, as `Spec` lays an array out."""
    head = spec.rows * spec.row_bytes
    return spec.heads // batch * head, head, spec.row_bytes


def shape_struct(problem: Problem, group: int) -> Any:
    """`struct Shape`, as a NumPy scalar."""
    p = problem
    left, right = (_UNBOUNDED if side is None else min(side, _UNBOUNDED) for side in (p.left, p.right))
    heads = p.batch, p.heads, p.kv_heads
    return np.array((*heads, p.len_q, p.len_kv, p.head_dim, left, right, group, p.scale), SHAPE)[()]
