"""Exercises whose answer is a `.cu` file: launches drawn anew, the truth in float64, a budget of bytes by tensor.

A solution is a file of its own, `solutions/NN_n.cu`. Lines that end in `// solution` are the learner's part: the skeleton is
the file without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import numpy as np

from flashlab.lessons.exercise import Solved, Truth
from simulator.dtypes import Array

MARK = "// solution"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch that an answer has to get right.

    `arguments` are by parameter, in the kernel's order: arrays, `fl.Empty` for what it fills, NumPy scalars. `truth` is by
    output, `budget` by tensor: (bytes read, bytes written), requested of HBM, which must be equal. `most` limits what is
    counted beside bytes: by (tensor, "read" or "written", "sectors" or "instructions"). `tile` is the number of rows (or of
    elements) that messages call a tile.
    """

    said: str
    arguments: Mapping[str, Any]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    truth: Mapping[str, Truth]
    budget: Mapping[str, tuple[int, int]]
    tile: int
    most: Mapping[tuple[str, str, str], int] = field(default_factory=dict[tuple[str, str, str], int])
    overlapped: Mapping[str, int] = field(default_factory=dict[str, int])
    """By array in SRAM: the bytes that must be read while a copy is on its way, at least."""
    passes: int | None = None
    """Over the banks of SRAM, of all accesses and shuffles together, at most."""
    matmul: int = 0
    """FLOPs that tensor cores have to do, at least."""
    alike: str = ""
    """Launches of the same word have the same data. Their outputs must be equal, bit by bit."""


@dataclass(frozen=True, kw_only=True)
class KernelExercise(Solved):
    """One exercise: `parameters` is the kernel's list of parameters in C, `file` what the learner's file is called.

    With `conflict_free` every access to SRAM must take as few passes over the banks as its bytes need. `slips` say by tensor
    what it usually means when its bytes are off, and by the kind of a finding, or of what there is too much of. `hints` get
    stronger one by one. `score` says of a right answer how good it is, by its launch and by what it moved. `rule` finds in its
    text what the task forbids where no count tells: the line, and what is wrong with it. What is `extra` counts for nobody's
    progress.
    """

    name: str
    title: str
    task: str
    kernel: str
    parameters: str
    launches: Callable[[Random], list[Launch]]
    hints: tuple[str, ...]
    afterwards: str
    slips: Mapping[str, str] = field(default_factory=dict[str, str])
    conflict_free: bool = False
    score: Callable[[Launch, Sequence[Mapping[str, Any]]], str] | None = None
    rule: Callable[[str], tuple[int, str] | None] | None = None
    extra: bool = False
    mark: ClassVar[str] = MARK
    suffix: ClassVar[str] = ".cu"

    @property
    def file(self) -> str:
        return f"{self.kernel}{self.suffix}"


def sums(out: Array, size: Array, terms: int) -> Truth:
    """A truth that is a sum of `terms` in float32, whose absolute values add up to `size`."""
    return Truth(out, (2e-7 * np.sqrt(terms) + 1e-6) * size + 1e-30)


def numbers(draw: Random, *shape: int) -> Array:
    """Normal numbers in float32."""
    return np.random.default_rng(draw.getrandbits(32)).standard_normal(shape, dtype=np.float32)
