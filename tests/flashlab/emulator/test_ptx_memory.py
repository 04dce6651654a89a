"""Inline PTX of memory and of threads together, against NumPy; what is wrong is found as with the primitives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

SOURCE = Path(__file__).parent / "ptx" / "memory.cu"
U = np.uint32


def run(kernel: str, arguments: dict[str, Any], **options: Any) -> fl.FileRun:
    return fl.emulate_file(SOURCE, arguments, kernel=kernel, grid=1, block=32, **options)


def test_moves() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, (32, 8), U)
    ran = run("moves", {"x": x, "y": fl.Empty(x.shape, "uint32")})
    assert ran.complaints() == []
    expected = x.copy()
    expected[:, 7] = x[:, 7].astype(np.uint8).astype(np.int8).astype(np.int32).view(U)
    assert np.array_equal(ran.arrays["y"], expected[::-1])
    assert ran.launched.total("hbm.read") == 32 * (16 + 8 + 2 + 2 + 1)
    assert (
        ran.launched.total("hbm.write") == ran.launched.total("sram.read") == ran.launched.total("sram.write") == 1024
    )


def test_variables_of_the_file() -> None:
    ran = run("tables", {"y": fl.Empty((32,))})
    assert ran.complaints() == []
    assert np.array_equal(ran.arrays["y"], 2 * np.arange(31, -1, -1, dtype="f4"))


def test_lanes() -> None:
    a = np.random.default_rng(1).integers(0, 200, 32).astype(U)
    t = np.arange(32)
    ran = run("lanes", {"x": a, "y": fl.Empty((12, 32), "uint32")})
    assert ran.complaints() == []
    ballot = sum(1 << int(i) for i in t[a > 100])
    expected = [
        a[t ^ 5],
        a[np.where(t < 3, t, t - 3)],
        t >= 3,
        a[np.where(t % 8 == 7, t, t + 1)],  # segments of 8
        a[t // 4 * 4 + 2],  # segments of 4
        0 * t + ballot,
        0 * t + (7 if ballot else 8),
        [sum(1 << int(j) for j in t[a % 4 == x % 4]) for x in a],
        0 * t + a.max(),
        (0 * t + (20 - a.astype("f4")).min()).astype("f4").view(U),
        t == 0,
        0 * t + 0xFFFFFFFF,
    ]
    for i, row in enumerate(expected):
        assert np.array_equal(ran.arrays["y"][i], np.asarray(row).astype(U)), i


def test_atomics() -> None:
    zero = {"sums": np.zeros(4, "i4"), "total": np.zeros(1, "f4"), "pair": np.zeros(2, "f2"), "counter": np.zeros(1, U)}
    ran = run("atomics", {**zero, "most": np.zeros(1, "u8"), "y": fl.Empty((32,), "int32")})
    assert ran.complaints() == []
    assert list(ran.arrays["sums"]) == [240, 256, 21, 1]
    assert (ran.arrays["total"][0], list(ran.arrays["pair"])) == (16, [32, 64])
    assert (ran.arrays["counter"][0], ran.arrays["most"][0]) == (32 % 5, 31 << 40)
    assert ran.arrays["y"].all()


def test_copies_in_the_background() -> None:
    x = np.arange(1, 257, dtype="f4")
    ran = run("copies", {"x": x, "y": fl.Empty((160,))})
    assert ran.complaints() == []
    t = np.arange(32)
    assert np.array_equal(ran.arrays["y"][:32], x[4 * t] + x[4 * ((t + 1) % 32)] + x[4 * (31 - t)])
    expected = x[128:].reshape(32, 4).copy()
    expected[t % 3 == 0, :2] = 0
    expected[t % 3 == 1, 1] = 0
    expected[t % 2 == 1, 2:] = 0
    assert np.array_equal(ran.arrays["y"][32:].reshape(32, 4), expected)


@pytest.mark.parametrize("n", [4, 512, 1300])
def test_bytes_by_the_copy_engine(n: int) -> None:
    x = np.arange(n, dtype="i4")
    ran = run("bulk", {"x": x, "y": fl.Empty((n,), "int32"), "n": n}, sram=4 * n)
    assert ran.complaints() == []
    assert np.array_equal(ran.arrays["y"], x + 1)
    boxes = {(row.space, row.op): row.bytes for row in ran.launched.moved if row.boxes}
    assert boxes == {
        ("hbm", "tma_ld"): 4 * n,
        ("sram", "tma_ld"): 4 * n,
        ("sram", "tma_st"): 4 * n,
        ("hbm", "tma_st"): 4 * n,
    }


@pytest.mark.parametrize(
    ("which", "kind", "mark"),
    [
        (0, "wait forgotten", "which == 0"),
        (1, "race", "which == 1"),
        (2, "out of bounds", "which == 2"),
        (3, "misaligned", "which == 3"),
    ],
)
def test_faults(which: int, kind: str, mark: str) -> None:
    ran = run("faults", {"x": np.zeros(128, "f4"), "y": fl.Empty((32,)), "which": which})
    line = 1 + next(i for i, text in enumerate(SOURCE.read_text().splitlines()) if mark in text)
    assert (kind, line) in {(x.kind, x.line.number) for x in ran.launched.findings if x.line}


@pytest.mark.parametrize(("fence", "forgotten"), [(0, True), (1, False), (2, False)])
def test_a_proxy_fence_between_blocks(fence: int, forgotten: bool) -> None:
    arguments = {
        "x": fl.Empty((32,), "int32"),
        "y": fl.Empty((32,), "int32"),
        "flag": np.zeros(1, np.int32),
        "fence": fence,
    }
    ran = fl.emulate_file(SOURCE, arguments, kernel="passed_on", grid=2, block=32)
    assert [finding.kind for finding in ran.launched.findings] == ["proxy fence forgotten"] * forgotten
    assert np.array_equal(ran.arrays["y"], np.arange(7, 39))
