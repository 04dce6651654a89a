"""The softmax of a vector: exp(x) / sum(exp(x)). There are no heads or masks. The vector is the problem's one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.fields import integer
from simulator.names import DType
from simulator.operations.operation import Arrays, Operand, Operation, storage_dtypes
from simulator.problem import DTYPES, Problem

_UNIT = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_HALF_STEP = 2.0**-25
"""Of float16's subnormals: a smaller output may vanish."""


def vector_problem(length: int, dtype: DType) -> Problem:
    """The problem of the softmax of a vector of `length` elements. Raises `UsageError` for a length under 1.

    >>> vector_problem(1024, "float32").head_dim
    1024
    """
    return Problem(batch=1, heads=1, len_q=1, head_dim=integer("length", length, 1), dtype=dtype)


class Softmax(Operation):
    """The softmax of a vector. In HBM, x and out are one row of `head_dim` elements."""

    name = "softmax"
    inputs = (Operand(name="x", axes=("len_q", "head_dim")),)
    outputs = (Operand(name="out", axes=("len_q", "head_dim"), dtype="out"),)
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        f"{n} elements": {"len_q": 1, "head_dim": n} for n in (1, 7, 64, 1000)
    }

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        x = arrays["x"]
        dtype = storage_dtypes(arrays, ("x",), f"one of {', '.join(DTYPES)}")
        if len(x.shape) != 2 or x.shape[0] != 1:
            raise UsageError("x.shape", tuple(x.shape), "one row, (1, length)")
        return vector_problem(x.shape[1], dtype)

    def fitted(self, problem: Problem) -> Problem:
        """The vector whose length is the problem's head dim."""
        return vector_problem(problem.head_dim, problem.dtype)

    def refusal(self, problem: Problem, by: str) -> UsageError | None:
        if problem == self.fitted(problem):
            return None
        vector = f"one row of {problem.head_dim:,} elements, fl.count({by!r}, length={problem.head_dim}, dtype={problem.dtype!r})"
        return UsageError("problem", problem, f"{vector}: {by} is the softmax of a vector")

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        x = np.asarray(arrays["x"], np.float64)
        e = np.exp(x - x.max(-1, keepdims=True))
        return {"out": e / e.sum(-1, keepdims=True)}

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        """The bound on the 2-norm of the row's error, for the output's rounding and float32 differences and sums."""
        rounded = _UNIT[problem.dtype] * truth["out"]
        if problem.dtype == "float16":
            rounded = np.maximum(rounded, np.minimum(_HALF_STEP, truth["out"]))
        spread = np.abs(np.asarray(arrays["x"], np.float64)).max(-1, initial=1.0)
        differences = 2e-6 * np.maximum(1.0, spread) * np.linalg.norm(truth["out"], axis=-1)
        return {"out": np.linalg.norm(rounded, axis=-1) + differences}

    def flops(self, problem: Problem) -> int:
        """4 per element: a maximum, a difference, a sum and a quotient."""
        return 4 * problem.head_dim


SOFTMAX = Softmax()
