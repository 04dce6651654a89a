"""cuda::atomic, cuda::barrier and cuda::pipeline on the emulator, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

SOURCE = Path(__file__).parent / "libraries" / "scopes.cu"


def run(kernel: str, grid: int, block: int, arguments: dict[str, Any]) -> dict[str, Any]:
    ran = fl.emulate_file(SOURCE, arguments, kernel=kernel, grid=grid, block=block)
    assert ran.complaints() == []
    return dict(ran.arrays)


def test_atomics() -> None:
    x = np.random.default_rng(0).standard_normal(3 * 64).astype("f4")
    got = run("atomics", 3, 64, {"sums": np.zeros(3, "i4"), "most": np.full(1, -9, "f4"), "x": x})
    assert list(got["sums"]) == [3 * 63 * 32, 7, 2**31 - 1]
    assert got["most"][0] == x.max()


@pytest.mark.alike(1)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pipelines_of_a_block(stages: int) -> None:
    x = np.arange(5 * 128, dtype="f4")
    got = run(f"pipelined<{stages}>", 1, 64, {"x": x, "y": fl.Empty(x.shape), "tiles": 5})
    assert np.array_equal(got["y"], x.reshape(5, 128)[:, ::-1].ravel())


def test_pipelines_of_a_thread() -> None:
    x = np.arange(128 * 4, dtype="f4").reshape(128, 4)
    assert np.array_equal(run("alone", 1, 64, {"x": x, "y": fl.Empty(x.shape)})["y"], x)


def test_barriers() -> None:
    x = np.random.default_rng(0).integers(0, 1000, 256).astype("i4")
    got = run("barriers", 1, 64, {"x": x, "y": fl.Empty((64,), "int32")})["y"]
    assert np.array_equal(got, x[::-1][:64] + x[63::-1])
