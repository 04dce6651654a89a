"""Texture objects on the emulator, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import Texture
from simulator.errors import UsageError

SOURCE = Path(__file__).parent / "libraries" / "textures.cu"
Array = np.ndarray[Any, Any]
Address = Literal["clamp", "border", "wrap", "mirror"]


def places(i: Array, n: int, address: str) -> tuple[Array, Array]:
    """The places of indices in an axis of n, and whether there is anything."""
    if address == "wrap":
        return i % n, np.ones(i.shape, bool)
    if address == "mirror":
        return np.minimum(i % (2 * n), 2 * n - 1 - i % (2 * n)), np.ones(i.shape, bool)
    return np.clip(i, 0, n - 1), (i >= 0) & (i < n) | (address == "clamp")


@pytest.mark.alike(2)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("linear", "normalized", "address"),
    [(False, False, "clamp"), (True, False, "border"), (True, True, "wrap"), (False, True, "mirror")],
)
def test_by_place(linear: bool, normalized: bool, address: Address) -> None:
    random = np.random.default_rng(0)
    image = random.standard_normal((6, 9)).astype("f4")
    at = random.uniform(-4, 14, (200, 2)).astype("f4")
    if normalized:
        at /= np.array([9, 6], "f4")
    texture = Texture(image, linear=linear, normalized=normalized, address=address)
    ran = fl.emulate_file(
        SOURCE, {"t": texture, "at": at, "y": fl.Empty((200,)), "n": 200}, kernel="by_place", grid=2, block=128
    )
    assert ran.complaints() == []
    x, y = (at * np.array([9, 6], "f4") if normalized else at).T - (0.5 if linear else 0)
    weights = [np.rint((v - np.floor(v)) * 256) / 256 if linear else 0 * v for v in (x, y)]
    expected = np.zeros(200)
    for right in range(1 + linear):
        for down in range(1 + linear):
            i, there = places(np.floor(x).astype(int) + right, 9, address)
            j, also = places(np.floor(y).astype(int) + down, 6, address)
            part = abs(1 - right - weights[0]) * abs(1 - down - weights[1])
            expected += part * np.where(there & also, image[j, i], 0)
    np.testing.assert_allclose(ran.arrays["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.compiler
def test_by_index() -> None:
    x = np.random.default_rng(0).integers(0, 256, (30, 4), np.uint8)
    texture = Texture(x, channels=4, as_floats=True)
    ran = fl.emulate_file(SOURCE, {"t": texture, "y": fl.Empty((32, 4)), "n": 32}, kernel="by_index", grid=1, block=32)
    assert ran.complaints() == []
    assert np.array_equal(ran.arrays["y"][1:-1], x / np.float32(255))
    assert not ran.arrays["y"][[0, -1]].any()
    assert ran.launched.total("hbm.read") == 120


@pytest.mark.compiler
@pytest.mark.parametrize("linear", [False, True])
def test_layers_are_read_one_by_one(linear: bool) -> None:
    """Nothing is filtered between them, and those past the ends are the first and the last."""
    x = np.random.default_rng(1).standard_normal((3, 4, 5)).astype("f4")
    layers = np.arange(-1, 5)
    given = {"images": Texture(x, linear=linear), "rows": Texture(x[:, 2], linear=linear), "y": fl.Empty((2, 6))}
    ran = fl.emulate_file(SOURCE, given, kernel="layers", grid=1, block=6)
    assert ran.complaints() == []
    image = x[layers.clip(0, 2)]
    pixel = image[:, 2:4, 1:3].mean((1, 2)) if linear else image[:, 3, 2]
    assert np.allclose(ran.arrays["y"], [pixel, image[:, 2, 1:3].mean(1) if linear else image[:, 2, 2]], atol=1e-6)


@pytest.mark.parametrize(
    ("array", "options", "said"),
    [
        (np.zeros((2, 3)), {}, "float64"),
        (np.zeros((2, 3), "f4"), {"channels": 3}, "channels = 3"),
        (np.zeros((2, 3), "f4"), {"channels": 2}, "(2, 3)"),
        (np.zeros((2, 3), "f4"), {"address": "wrap"}, "normalized"),
        (np.zeros(0, "f4"), {}, "(0,)"),
    ],
)
def test_what_is_no_texture(array: Array, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Texture(array, **options)
    assert said in str(caught.value)
