"""What a launch of a kernel is, wherever it runs: its grid, its boxes, the structs that it is passed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import kernels_cu
from flashlab.run import tma
from simulator import catalogue
from simulator.counts import Counts, LaunchCounts, Spec
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

_TYPES = {"void*": "u8", "long long": "i8", "int": "i4", "float": "f4"}
_UNBOUNDED = MOST_KEYS  # the kernels' "no bound" of a window


def _struct(name: str) -> np.dtype[Any]:
    """A struct of params.cuh, which is the one place that says what a launch passes."""
    text = (kernels_cu.include_dir() / "params.cuh").read_text(encoding="utf-8")
    declared = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert declared, name
    members: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, re.sub(r"//.*", "", declared[1]).split(";"))):
        kind, _, first = line.partition(",")[0].rpartition(" ")
        members += [(member.strip(), _TYPES[kind]) for member in [first, *line.split(",")[1:]]]
    return np.dtype(members, align=True)


TENSOR = _struct("Tensor")
"""`struct Tensor` of the kernels."""
SHAPE = _struct("Shape")
"""`struct Shape` of the kernels: fields of the problem, under their names, and what `shape_struct` adds."""


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
        x.name: x.left_out(problem, tile)
        for x in operation.inputs
        if x.default is not None and x.name in counts.tensors
    }


def strides_of(spec: Spec, batch: int) -> tuple[int, int, int]:
    """Bytes from one batch, head and row to the next, as `Spec` lays an array out."""
    head = spec.rows * spec.row_bytes
    return spec.heads // batch * head, head, spec.row_bytes


def shape_struct(problem: Problem, group: int) -> Any:
    """`struct Shape`, as a NumPy scalar. What a problem has none of is passed as 0."""
    left, right = (_UNBOUNDED if side is None else min(side, _UNBOUNDED) for side in (problem.left, problem.right))
    sequences = 0 if problem.lengths is None else len(problem.spans)
    own = {"left": left, "right": right, "group": group, "sequences": sequences}
    values = [own[name] if name in own else getattr(problem, name) or 0 for name in SHAPE.names or ()]
    return np.array(tuple(values), SHAPE)[()]
