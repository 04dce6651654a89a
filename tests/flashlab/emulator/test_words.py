"""Arithmetic on the parts of a word, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

SOURCE = Path(__file__).parent / "libraries" / "words.cu"
Array = np.ndarray[Any, Any]


def each(kind: str, f: Callable[[Array, Array], Array], *, saturate: bool = False) -> Callable[[Array, Array], Array]:
    """f of the parts, in 64 bits, wrapped or kept in the range of their type."""

    def of_words(x: Array, y: Array) -> Array:
        z = f(x.view(kind).astype("i8"), y.view(kind).astype("i8"))
        if saturate:
            z = np.clip(z, np.iinfo(kind).min, np.iinfo(kind).max)
        return np.ascontiguousarray(z.astype(kind)).view("u4")

    return of_words


def summed(kind: str, parts: int) -> Callable[[Array, Array], Array]:
    return lambda x, y: abs(x.view(kind).astype("i8") - y.view(kind)).reshape(-1, parts).sum(1).astype("u4")


def dot(kind: str, small: str, first: int) -> Callable[[Array, Array], Array]:
    def of_words(x: Array, y: Array) -> Array:
        bytes_ = y.view(small).reshape(-1, 4)[:, first : first + 2].astype("i8")
        return ((x.view(kind).reshape(-1, 2).astype("i8") * bytes_).sum(1) + 7).astype("u4")

    return of_words


EXPECTED = [
    each("u1", lambda a, b: a + b), each("i1", lambda a, b: a + b, saturate=True), each("u2", lambda a, b: a + b, saturate=True),
    each("u2", lambda a, b: a - b), each("i1", lambda a, b: a - b, saturate=True), each("u1", lambda a, b: a - b, saturate=True),
    each("i1", lambda a, b: abs(a), saturate=True), each("i2", lambda a, b: -a), each("u1", lambda a, b: abs(a - b)),
    each("u1", lambda a, b: (a + b + 1) // 2), each("i1", np.maximum), each("u2", np.minimum),
    each("u1", lambda a, b: -1 * (a == b)),
    each("i2", lambda a, b: -1 * (a > b)), each("u1", lambda a, b: (a < b) * 1), each("u1", lambda a, b: -1 * (a != b)),
    summed("u1", 4), summed("i2", 2), dot("i2", "i1", 0), dot("u2", "u1", 2),
]  # fmt: skip


def test_words() -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 1 << 32, (2, 256), np.uint32)
    y[::2] = x[::2] ^ (random.integers(0, 2, (128, 4), np.uint8) * np.uint8(255)).view("u4")[:, 0]  # some parts alike
    x[:4] = [0x80808080, 0x7F7F7F7F, 0xFFFFFFFF, 0]
    ran = fl.emulate_file(
        SOURCE, {"x": x, "y": y, "z": fl.Empty((len(EXPECTED), 256), "uint32"), "n": len(EXPECTED)}, grid=1, block=256
    )
    assert ran.complaints() == []
    for i, f in enumerate(EXPECTED):
        assert np.array_equal(ran.arrays["z"][i], f(x, y)), i
