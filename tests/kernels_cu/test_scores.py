"""The tanh of scores.cuh, executed on the CPU: near the true one, relative to itself, wherever its argument lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from tests.patches import patched
from tests.tiers import examples

pytestmark = pytest.mark.compiler

SOURCE = """
#include "scores.cuh"

extern "C" __global__ void tanhs(const float* x, float* y, float factor, int n) {
  float s[1][4];
  const int first = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  for (int e = 0; e < 4; ++e) s[0][e] = load_global<float>(x + min(first + e, n - 1));
  Tanh::apply(s, factor);
  for (int e = 0; e < 4; ++e)
    if (first + e < n) store_global(y + first + e, s[0][e]);
}
"""
LIMIT = 1e-6
"""What scores.cuh claims."""
MAGNITUDES = np.float32(np.geomspace(1e-37, 1e4, 60_000))
AROUND_SMALL = np.float32(np.linspace(0.19, 0.21, 20_000))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tanh") / "tanh.cu"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def tanhs(source: Path, x: Any, factor: float = 1.0) -> Any:
    x = np.asarray(x, np.float32)
    threads = 32 * -(-x.size // 128)
    given = {"x": x, "y": fl.Empty(x.shape, "float32"), "factor": np.float32(factor), "n": np.int32(x.size)}
    run = fl.emulate_file(source, given, grid=-(-threads // 256), block=256)
    assert run.passed, run.complaints()
    return run.arrays["y"]


def worst(source: Path, x: Any, factor: float = 1.0) -> float:
    """The largest error, relative to the tanh that is meant: that of the product in float32."""
    exact = np.tanh((np.asarray(x, np.float32) * np.float32(factor)).astype(np.float64))
    return float(np.abs(tanhs(source, x, factor) / exact - 1).max())


def test_over_its_range(source: Path) -> None:
    both = np.concatenate([MAGNITUDES, AROUND_SMALL])
    assert worst(source, np.concatenate([both, -both])) <= LIMIT
    assert worst(source, MAGNITUDES[MAGNITUDES > 1e-30], 0.02) <= LIMIT


def test_its_ends(source: Path) -> None:
    found = tanhs(source, [0.0, -0.0, np.inf, -np.inf, 3e38, np.nan])
    assert found[:5].tolist() == [0, 0, 1, -1, 1] and np.isnan(found[5])


@examples(25)
@given(st.lists(st.floats(-60, 60, width=32).filter(lambda x: abs(x) > 1e-30), min_size=1, max_size=150))
def test_small_and_large_scores_in_one_warp(source: Path, x: list[float]) -> None:
    """A warp votes: with one large score all its lanes leave the polynomial alone."""
    assert worst(source, x) <= LIMIT


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SMALL = 0.2f", "SMALL = 0.3f"),
        ("SMALL = 0.2f", "SMALL = 0.01f"),
        ("0.130362406f", "0.1333f"),
        ("copysignf", "max"),
    ],
)
def test_another_tanh_is_seen(tmp_path: Path, old: str, new: str) -> None:
    """A polynomial beyond its range, an exponential near 0, a coefficient of Taylor's, a lost sign."""
    import kernels_cu

    header = (kernels_cu.include_dir() / "scores.cuh").read_text(encoding="utf-8")
    (tmp_path / "scores.cuh").write_text(patched(header, old, new), encoding="utf-8")
    (tmp_path / "tanh.cu").write_text(SOURCE, encoding="utf-8")
    assert worst(tmp_path / "tanh.cu", np.concatenate([AROUND_SMALL, -AROUND_SMALL - 0.3, MAGNITUDES])) > LIMIT
