"""What a check of any operation sees: a subject that runs problems, and by how much its outputs may be off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlab.verify.adapter import Failure
from flashlab.verify.memory import Frame
from flashlab.verify.rule import NOTHING
from simulator import Problem
from simulator.dtypes import Array, as_numpy
from simulator.operations.operation import Operation

__all__ = ["Check", "Expected", "Subject", "worst"]

Expected = tuple[Mapping[str, Array], Mapping[str, Array]]
"""The right outputs by name, and how far each row of them may be off."""
Check = Callable[["Subject", Problem, int], float | None]
"""It takes a subject, a problem and a seed. It raises `Failure`, or may return the worst error over what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the checks see of anything that does an operation.

    `frame` makes the arrays that it is given. `atomics` are the outputs that atomics add up. `layouts` are those beside the
    contiguous one in which it takes arrays.
    """

    name: str
    operation: Operation
    backend: str
    frame: Frame
    atomics: Collection[str] = ()
    layouts: Collection[str] = ("padded", "bshd", "misaligned")

    def refuses(self, problem: Problem) -> str | None:
        """Why the problem is not run, or None. Raises `Unavailable` where the device runs none of the kernels."""
        raise NotImplementedError

    def fit(self, problem: Problem) -> Problem:
        """The nearest problem of sizes that it takes."""
        return problem

    def expect(self, problem: Problem, arrays: Mapping[str, Array]) -> Expected:
        """The right outputs for these inputs, and how far it may be off."""
        truth = self.operation.judge(problem, arrays)
        return truth, self.operation.bounds(problem, arrays, truth)

    def run(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run the problem and return its outputs as NumPy arrays. Raises `Failure` if an input was changed."""
        given = {name: self.frame.put(x) for name, x in arrays.items()}
        outputs = self.run_on(problem, given)
        for name, x in given.items():
            if name not in self.operation.in_place and as_numpy(name, x).tobytes() != arrays[name].tobytes():
                raise Failure(f"{name}: it was changed")
        return outputs

    def run_on(self, problem: Problem, given: Mapping[str, Any]) -> dict[str, Array]:
        """The same for arrays of the frame, as they lie."""
        raise NotImplementedError

    def allocates(self, problem: Problem) -> Iterable[int]:
        """The bytes of what a call allocates and does not fill at once."""
        raise NotImplementedError


def worst(operation: Operation, expected: Expected, outputs: Mapping[str, Array]) -> float:
    """The worst error over what is allowed. Where bounds are per row, the error is the row's 2-norm.

    Raises `Failure` over 1, and for an output that is missing or has another shape.
    """
    (truth, bounds), most = expected, 0.0
    for name, exact in truth.items():
        if name not in outputs:
            if operation.operand(name).asked:  # and it wasn't
                continue
            raise Failure(f"{name} is missing")
        got = np.asarray(outputs[name], np.float64)
        if got.shape != exact.shape:
            raise Failure(f"{name} has the shape {got.shape}, expected {exact.shape}")
        with np.errstate(invalid="ignore"):
            error = np.where(got == exact, 0.0, np.abs(got - exact))  # equal infinities have no difference
        if bounds[name].ndim < error.ndim:
            error = np.linalg.norm(error, axis=-1)
        ratio = np.where(np.isnan(error), np.inf, error) / np.maximum(
            bounds[name], 1e-300
        )  # a bound of 0 wants equality
        if ratio.size and ratio.max() > 1:
            where = tuple(int(n) for n in np.unravel_index(int(ratio.argmax()), ratio.shape))
            if not np.isfinite(got[where]).all():
                raise Failure(f"{name} at {where} holds NaN or inf")
            if not exact[where].any() and bounds[name][where] <= NOTHING:
                raise Failure(f"{name} at {where} must be 0, and has {np.abs(got[where]).max():.3g}")
            raise Failure(f"{name} at {where} is off by {ratio.max():.3g} x its bound")
        most = max(most, float(ratio.max(initial=0.0)))
    return most
