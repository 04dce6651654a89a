"""wmma's shapes and types beyond half 16 x 16 x 16, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.dtypes import numpy_dtype

pytestmark = pytest.mark.compiler

SOURCE = Path(__file__).parent / "libraries" / "wmma_shapes.cu"
CASES: dict[str, tuple[int, int, int, str, str, bool]] = {
    # kernel: M, N, K, the factors' and the sums' types, B by rows
    "half_32_8": (32, 8, 16, "float16", "float32", True),
    "half_8_32": (8, 32, 16, "float16", "float16", False),
    "bfloat_8_32": (8, 32, 16, "bfloat16", "float32", True),
    "signed_16_16": (16, 16, 16, "int8", "int32", False),
    "unsigned_32_8": (32, 8, 16, "uint8", "int32", True),
    "tf32_16_16": (16, 16, 8, "float32", "float32", False),
    "double_8_8": (8, 8, 4, "float64", "float64", True),
}


@pytest.mark.alike("half_8_32", "double_8_8")
@pytest.mark.parametrize("kernel", CASES)
def test_shapes(kernel: str) -> None:
    m, n, k, factor, total, by_rows = CASES[kernel]
    random = np.random.default_rng(0)

    def draw(kind: str, *shape: int) -> np.ndarray[Any, Any]:
        return random.integers(0 if kind == "uint8" else -9, 10, shape).astype(
            kind if "int" in kind else numpy_dtype(kind)
        )

    a, b, c = draw(factor, m, k), draw(factor, k, n), draw(total, m, n)
    given = {"a": a, "b": b if by_rows else np.ascontiguousarray(b.T), "c": c}
    ran = fl.emulate_file(SOURCE, given, kernel=kernel, grid=1, block=32)
    assert ran.complaints() == []
    expected = a.astype("f8") @ b.astype("f8") + c.astype("f8")
    assert np.array_equal(ran.arrays["c"].astype("f8"), expected)
    assert ran.launched.flops == 2 * m * n * k
