"""What a launch of a kernel is, wherever it runs: its grid, its boxes, the structs that it is passed."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlab.run import tma
from simulator import catalogue
from simulator.counts import Counts, LaunchCounts, Spec
from simulator.dtypes import numpy_dtype
from simulator.operations.operation import Operation
from simulator.problem import Problem, round_up
from simulator.support import MOST_KEYS

__all__ = [
    "SHAPE",
    "TENSOR",
    "blocks_of",
    "box_rows",
    "defaults",
    "shape_struct",
    "strides_of",
]

TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
"""`struct Tensor` of the kernels."""

_INTS = ("batch", "heads", "kv_heads", "len_q", "len_kv", "head_dim", "left", "right", "group")
SHAPE = np.dtype([*((name, "i4") for name in _INTS), ("scale", "f4")])
"""`struct Shape` of the kernels."""

_UNBOUNDED = MOST_KEYS  # the kernels' "no bound" of a window


def blocks_of(kernel: catalogue.Kernel, counts: Counts, launch: LaunchCounts) -> int:
    """The grid of a launch."""
    assert counts.config is not None
    return counts.config.grid(counts.problem, counts.device, launch.blocks) if kernel.persistent else launch.blocks


def box_rows(kernel: catalogue.Kernel, counts: Counts) -> dict[str, int]:
    """The arrays that a kernel gets TMA's descriptors of, and how many rows their boxes have."""
    p, tile = counts.problem, counts.tile
    sides = {"rows": tile.rows, "cols": tile.cols, "head_dim": round_up(p.head_dim, tma.ROW_BYTES // p.itemsize)}
    return {name: sides[side] for name, side in kernel.boxes}


def defaults(counts: Counts, operation: Operation) -> dict[str, Any]:
    """What stands for inputs that the caller leaves out, NumPy: full of their defaults. Only those that the kernels take."""
    problem, tile = counts.problem, counts.tile
    return {
        x.name: np.full(x.shape(problem, tile), x.default, numpy_dtype(x.dtype_in(problem)))
        for x in operation.inputs
        if x.default is not None and x.name in counts.tensors
    }


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
