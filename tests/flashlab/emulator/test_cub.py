"""CUB's block and warp primitives on the emulator, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

SOURCE = Path(__file__).parent / "libraries" / "cub.cu"
THREADS, ITEMS = 96, 3


def run(kernel: str, arguments: dict[str, Any]) -> dict[str, Any]:
    ran = fl.emulate_file(SOURCE, arguments, kernel=kernel, grid=1, block=THREADS)
    assert ran.complaints() == []
    return dict(ran.arrays)


@pytest.mark.parametrize("valid", [1, 40, 64, 96])
def test_reductions(valid: int) -> None:
    x = np.random.default_rng(0).integers(-50, 50, THREADS).astype("f4")
    y = run("reductions", {"x": x, "y": fl.Empty((6,)), "valid": valid})["y"]
    assert np.array_equal(y, [x.sum(), x[:valid].max(), x.min(), *x.reshape(3, 32).sum(1)])


def test_scans() -> None:
    x = np.random.default_rng(1).integers(-9, 10, THREADS * ITEMS).astype("i4")
    n = len(x)
    y = run("scans", {"x": x[: n - 5], "y": fl.Empty((2 * n + 3 * THREADS,), "int32")})["y"]
    x[n - 5 :] = 0
    assert np.array_equal(y[:n], x.cumsum())
    assert np.array_equal(y[n : 2 * n], x.cumsum() - x)
    first = x[::ITEMS]
    one, most, warp = y[2 * n :].reshape(3, THREADS)
    assert np.array_equal(one, first.cumsum() - first)
    assert np.array_equal(most, np.maximum.accumulate([-100, *first[:-1]]))
    assert np.array_equal(warp, (first.reshape(3, 32).cumsum(1) - first.reshape(3, 32)).ravel())


@pytest.mark.parametrize("descending", [0, 1])
def test_sorts(descending: int) -> None:
    x = np.random.default_rng(2).integers(-40, 40, THREADS * ITEMS).astype("f4") / 8
    got = run(
        "sorts",
        {"x": x, "keys": fl.Empty(x.shape), "values": fl.Empty(x.shape, "int32"), "descending": descending},
    )
    order = np.argsort(-x if descending else x, kind="stable")
    assert np.array_equal(got["keys"], x[order])
    assert np.array_equal(got["values"], order)
