"""What a launch of a kernel is, wherever it runs: its grid, its boxes, the structs that it is passed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from flashlab import triton
from flashlab.run import tma
from simulator.algorithm import Algorithm, Kernel
from simulator.counts import Counts, LaunchCounts, Spec
from simulator.errors import UsageError
from simulator.operations.operation import Operation
from simulator.problem import Problem, round_up
from simulator.support import MOST_KEYS

__all__ = [
    "SHAPE",
    "TENSOR",
    "VALUES",
    "At",
    "blocks_of",
    "box_rows",
    "boxed_shape",
    "check_pages",
    "defaults",
    "own_source",
    "passed",
    "shape_struct",
    "source_of",
    "strides_of",
    "triton_parameters",
]

At = tuple[int, tuple[int, ...]]
"""Where an array lies: its pointer, and strides in bytes."""

_TYPES = {"void*": "u8", "long long": "i8", "int": "i4", "float": "f4"}
_IN_TRITON = {"i4": "i32", "f4": "fp32", "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
_UNBOUNDED = MOST_KEYS  # the kernels' "no bound" of a window


def _struct(name: str) -> np.dtype[Any]:
    """A struct of params.cuh. That header alone says what a launch passes."""
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
_AXES = (TENSOR.names or ())[1:]
_CHUNK = 16  # bytes; bases and strides are multiples of it
SHAPE = _struct("Shape")
"""`struct Shape` of the kernels: fields of the problem, under their names, and what `shape_struct` adds."""


def source_of(kernel: Kernel) -> Path:
    """The file that a kernel is in.

    >>> import flashlab as fl
    >>> [source_of(fl.CATALOGUE[name].kernels[-1]).name for name in ("flash2", "flash2_triton")]
    ['flash2.cu', 'flash2_triton.py']
    """
    return (triton if kernel.language == "triton" else kernels_cu).source(kernel.source)


def own_source(row: Algorithm) -> Path | None:
    """The file of an algorithm's kernels. Of several, it is the one of its name, or else the last. None without kernels."""
    if not row.kernels:
        return None
    return source_of(next((kernel for kernel in row.kernels if kernel.source == row.name), row.kernels[-1]))


def blocks_of(kernel: Kernel, counts: Counts, launch: LaunchCounts) -> int:
    """The grid of a launch."""
    assert counts.config is not None
    return counts.config.grid(counts.problem, counts.device, launch.blocks) if kernel.persistent else launch.blocks


def box_rows(kernel: Kernel, counts: Counts) -> dict[str, int]:
    """The arrays that are passed to a kernel as TMA's descriptors, and how many rows their boxes have."""
    p, tile, config = counts.problem, counts.tile, counts.config
    sides = {"rows": tile.rows, "cols": tile.cols, "head_dim": round_up(p.head_dim, tma.ROW_BYTES // p.itemsize)}
    sides["page"] = config.page_box if config else 0
    return {name: sides[side] for name, side in kernel.boxes if sides[side]}


def boxed_shape(spec: Spec, problem: Problem) -> tuple[int, int, int, int]:
    """(batch, heads, rows, columns) of an array that is loaded in boxes. In pages, each page counts as a batch."""
    if problem.page_size is not None and spec.name in ("k", "v", "latent"):
        return spec.rows // problem.page_size, spec.heads, problem.page_size, spec.cols
    return problem.rows_batch, spec.heads // problem.rows_batch, spec.rows, spec.cols


def check_pages(problem: Problem, spec: Spec, strides: Sequence[int]) -> None:
    """Refuses pages that lie further apart than the kernels count. They count where a key lies in 32 bits, in units of
    the largest power of two that divides the strides (bytes, of a page, a head and a key). Raises `UsageError`."""
    pages, _, rows, _ = boxed_shape(spec, problem)
    page, _, row = strides[:3]
    unit = (page | row | 1 << 20) & -(page | row | 1 << 20)
    if abs(page) * (pages - 1) + abs(row) * (rows - 1) >= unit << 31:
        accepted = f"a pool of less than {unit << 31:,} bytes, which 32 bits count in units of {unit}"
        raise UsageError(f"{spec.name}.strides", tuple(strides), accepted)
    if "token" in (problem.k_scale, problem.v_scale) and pages * spec.heads * rows >= 1 << 31:
        raise UsageError("pages", pages, f"less than {(1 << 31) // (spec.heads * rows):,} with a scale for each token")


def passed(kernel: Kernel, counts: Counts) -> tuple[str | None, ...]:
    """What a launch passes to a kernel in CUDA, by name and in order. None is the NULL of an array that the call doesn't have.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=8, head_dim=16, dtype="float16")
    >>> passed(fl.CATALOGUE["flash1"].kernels[0], fl.count("flash1", p))
    ('q', 'k', 'v', 'o', 'l', 'm', 'out', None, 'shape')
    """
    return (*(name if name in counts.tensors else None for name in kernel.arguments), "shape")


def defaults(counts: Counts, operation: Operation) -> dict[str, Any]:
    """What stands for inputs that the caller leaves out, NumPy: full of their defaults. Only those that the kernels take, and
    nothing that is read and written."""
    problem, tile = counts.problem, counts.tile
    return {
        x.name: x.left_out(problem, tile)
        for x in operation.inputs
        if x.default is not None and x.name in counts.tensors and x.when(problem) and x.name not in operation.in_place
    }


def strides_of(spec: Spec, batch: int) -> tuple[int, int, int]:
    """Bytes from one batch, head and row to the next, as `Spec` lays an array out. If heads have planes, from plane to plane."""
    head = spec.rows * spec.row_bytes
    return spec.heads // batch * spec.planes * head, head, spec.row_bytes


def shape_struct(problem: Problem, group: int) -> Any:
    """`struct Shape`, as a NumPy scalar. A length that a problem doesn't have is passed as 0."""
    left, right = (_UNBOUNDED if side is None else min(side, _UNBOUNDED) for side in (problem.left, problem.right))
    sequences = problem.sequences_of_lengths if problem.ragged or problem.varlen else 0
    own = {
        "batch": problem.rows_batch, "left": left, "right": right, "group": group, "sequences": sequences,
        "longest": problem.padded.len_kv,
    }  # fmt: skip
    values = [own[name] if name in own else getattr(problem, name) or 0 for name in SHAPE.names or ()]
    return np.array(tuple(values), SHAPE)[()]


def _cuda_values(counts: Counts, places: Mapping[str, At], shape: Any) -> dict[str | None, Any]:
    """What a kernel in CUDA is passed, by name: a `Tensor` for an array, a pointer for a vector, and the `shape`."""
    found: dict[str | None, Any] = {None: np.uintp(0), "shape": shape}
    for name, (pointer, strides) in places.items():
        alone = counts.tensors[name].by_pointer
        found[name] = np.uintp(pointer) if alone else np.array((pointer, *strides[:3]), TENSOR)[()]
    return found


def _triton_values(counts: Counts, places: Mapping[str, At], shape: Any) -> dict[str | None, Any]:
    """What a kernel in Triton is passed, by its parameters' names, of the types of `triton_parameters`."""
    found: dict[str | None, Any] = {None: np.uintp(0), **{name: shape[name] for name in SHAPE.names or ()}}
    for name, (pointer, strides) in places.items():
        found[name] = np.uintp(pointer)
        width = counts.tensors[name].itemsize
        found |= {f"{name}_{axis}": np.int64(n // width) for axis, n in zip(_AXES, strides, strict=False)}
    return found


VALUES: dict[str, Callable[[Counts, Mapping[str, At], Any], dict[str | None, Any]]] = {
    "cuda": _cuda_values,
    "triton": _triton_values,
}
"""By language: all that a launch may pass, by name, for arrays that lie at these places. None is NULL."""


def triton_parameters(counts: Counts) -> dict[str, tuple[str, int | None]]:
    """The parameters that a kernel in Triton may have: by name their type, and a number that divides the value.

    They are members of `struct Shape`, pointers `q`, and strides `q_batch`, `q_head`, `q_row`, in elements.
    """
    found: dict[str, tuple[str, int | None]] = {
        name: (_IN_TRITON[SHAPE[name].str[1:]], None) for name in SHAPE.names or ()
    }
    for x in counts.tensors.values():
        found[x.name] = _IN_TRITON[x.dtype], None if x.by_pointer else _CHUNK
        if not x.by_pointer:
            found |= {f"{x.name}_{axis}": ("i64", _CHUNK // x.itemsize) for axis in _AXES}
    return found
