"""Cooperative groups on the emulator, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.emulator import FileRun

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


# The whole grid


def rounds(mistake: int, blocks: int, threads: int, count: int, **options: Any) -> FileRun:
    x = np.random.default_rng(blocks).integers(0, 10, blocks * threads).astype("f4")
    arguments = {"x": x, "y": fl.Empty(x.shape), "n": x.size, "count": count}
    return fl.emulate_file(SOURCE, arguments, kernel=f"rounds<{mistake}>", grid=blocks, block=threads, **options)


@given(st.integers(1, 7), st.integers(1, 70), st.integers(1, 4), st.integers(1, 3))
def test_the_whole_grid_waits(blocks: int, threads: int, count: int, workers: int) -> None:
    ran = rounds(0, blocks, threads, count, workers=workers)
    x = np.random.default_rng(blocks).integers(0, 10, blocks * threads).astype("f4")
    for _ in range(count):
        x = np.roll(x, 1) + np.roll(x, -1)
    assert ran.complaints() == []
    assert np.array_equal(ran.arrays["y" if count % 2 else "x"], x)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("mistake", [1, 2])
def test_without_the_grids_barrier_it_is_a_race(mistake: int, workers: int) -> None:
    """A barrier of the block or a fence in its place orders no blocks."""
    findings = rounds(mistake, 3, 64, 3, workers=workers).launched.findings
    reads = 1 + next(n for n, line in enumerate(SOURCE.read_text().splitlines()) if line.endswith("// reads"))
    races = [x for x in findings if x.kind == "race between blocks"]
    assert races and {x.at.number for x in races if x.at} == {reads}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_read_behind_the_grids_barrier_is_remembered_beside_those_before_it(workers: int) -> None:
    given = {"x": np.zeros(4, "f4").view("f4,f4,f4,f4"), "y": np.zeros(6, "f4")}
    ran = fl.emulate_file(SOURCE, given, kernel="readers", grid=6, block=1, workers=workers)
    assert [x.kind for x in ran.launched.findings] == ["race between blocks"]


def test_a_block_that_does_not_come_to_the_grids_barrier() -> None:
    (finding,) = rounds(3, 3, 32, 2).launched.findings
    assert finding.kind == "deadlock" and finding.line is not None
    assert SOURCE.read_text().splitlines()[finding.line.number - 1].endswith("grid.sync();")
    assert str(finding).endswith("waits in grid.sync() for block 1, which has ended")


def test_a_block_that_waits_for_ever_before_the_grids_barrier() -> None:
    ran = fl.emulate_file(SOURCE, {"flag": np.zeros(1, "i4")}, kernel="stuck", grid=3, block=32, time_limit=0.5)
    assert ran.launched.stopped and {x.kind for x in ran.launched.findings} <= {"deadlock", "time limit"}


def test_sram_outlives_the_grids_barrier() -> None:
    x = np.random.default_rng(2).integers(0, 100, (5, 64)).astype("f4")
    y = run("middle", 5, 64, {"x": x, "parts": fl.Empty((5,)), "y": fl.Empty(x.shape)})["y"]
    assert np.array_equal(y, np.broadcast_to((x.sum() + x.sum(1))[:, None], x.shape))


def test_a_grid_of_more_blocks_than_run_at_once() -> None:
    (finding,) = rounds(0, 40, 1024, 1, workers=1).launched.findings
    assert finding.kind == "not emulated"
    assert str(finding).endswith("is in grid.sync() of 40 blocks, and of this size 24 at a time is the most")
