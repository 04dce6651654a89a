"""Cooperative groups on the emulator, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

SOURCE = Path(__file__).parent / "libraries" / "groups.cu"


def run(kernel: str, grid: Any, block: Any, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    ran = fl.emulate_file(SOURCE, arguments, kernel=kernel, grid=grid, block=block, **options)
    assert ran.complaints() == []
    return dict(ran.arrays)


def test_tiles_of_blocks() -> None:
    x = np.random.default_rng(0).integers(0, 100, (3, 96)).astype("f4")
    y = run("sums", 3, 96, {"x": x, "y": fl.Empty((3, 2))})["y"]
    assert np.array_equal(y, np.repeat(x.sum(1, keepdims=True), 2, 1))


def test_lanes_of_groups() -> None:
    v = np.random.default_rng(1).integers(0, 100, 64).astype("i4")
    t = np.arange(64)
    y = run("lanes", 1, (32, 2), {"x": v, "y": fl.Empty((14, 64), "int32")})["y"]
    four, warps = v.reshape(-1, 4), v.reshape(2, 32)
    each = np.repeat
    assert np.array_equal(y[0], each(four[:, 2], 4))
    assert np.array_equal(y[1], np.where(t % 4 == 3, v, np.roll(v, -1)))
    assert np.array_equal(y[2], four[:, ::-1].ravel())
    assert np.array_equal(y[3], each((four > 90).any(1) + 2 * (four > 10).all(1), 4))
    assert np.array_equal(y[4], each((four % 2 * [1, 2, 4, 8]).sum(1), 4))
    assert np.array_equal(y[5], t % 32 // 4 + 800)
    assert np.array_equal(y[6], t % 16 + 1600)
    assert np.array_equal(y[7], each(warps.max(1), 32))
    assert np.array_equal(y[8], four.cumsum(1).ravel())
    assert np.array_equal(y[9], (warps.cumsum(1) - warps).ravel())
    assert np.array_equal(y[10], each(warps.argmax(1) + [0, 32], 32))
    threes = warps % 3 == 0
    last = 31 - threes[:, ::-1].argmax(1, keepdims=True)
    expected = threes.cumsum(1) - 1 + 100 * threes.sum(1, keepdims=True) + 10000 * last
    assert np.array_equal(y[11], np.where(threes, expected, -1).ravel())
    same = warps[:, :, None] % 3 == warps[:, None, :] % 3
    assert np.array_equal(y[12], (same * warps[:, None]).sum(2).ravel() + 30000)
    masks = (same * (1 << np.arange(32))).sum(2).astype("u4").view("i4")
    assert np.array_equal(y[13], masks.ravel())


@pytest.mark.parametrize("n", [256, 90])
def test_copies_of_groups(n: int) -> None:
    x = np.arange(n, dtype="f4")
    y = run("copies", 1, 64, {"x": x, "y": fl.Empty((n,)), "n": n}, sram=4 * n)["y"]
    assert np.array_equal(y, x[::-1])


def test_the_whole_grid_cannot_wait() -> None:
    ran = fl.emulate_file(SOURCE, {"y": fl.Empty((2,))}, kernel="whole_grid", grid=2, block=1)
    assert {x.kind for x in ran.launched.findings} == {"not emulated"}
    assert "grid.sync()" in str(ran.launched.findings[0])
