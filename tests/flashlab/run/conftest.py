"""The fake GPU and its frameworks, for tests that need no real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flashlab.run.arrays import dense
from simulator.dtypes import numpy_dtype
from tests.flashlab.run.fake import DTYPES, FakeCupy, Tensor, installed


@pytest.fixture
def torch(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch whose current stream is the one of handle 1234; `allocated` are the bytes of what came from it."""
    allocated: list[int] = []

    def empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: object) -> Tensor:
        made = cupy.empty(shape, numpy_dtype(dtype.removeprefix("torch.")))
        assert stride == dense(shape)
        allocated.append(cupy.log[-1])
        return Tensor(made)

    module = SimpleNamespace(
        empty_strided=empty_strided,
        allocated=allocated,
        Tensor=Tensor,
        device=lambda *named: named,
        is_grad_enabled=lambda: True,
        is_autocast_enabled={"cuda": False, "cpu": False}.get,
        compiler=SimpleNamespace(is_compiling=lambda: False),
        autograd=SimpleNamespace(forward_ad=SimpleNamespace(_current_level=-1)),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _: 1234, _are_functorch_transforms_active=lambda: False),
        **{name: f"torch.{name}" for name in (*DTYPES.values(), "float8_e4m3fn", "uint8")},
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with installed(FakeCupy()) as module:
        yield module
