"""What a finding says: the line that did it first, then its call; who else took part; of what kind it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import Finding

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.cu"
    path.write_text(text, encoding="utf-8")
    return path


def found(path: Path, arguments: dict[str, Any], **options: Any) -> tuple[Finding, ...]:
    given: dict[str, Any] = {"grid": 1, "block": 32, "time_limit": 10, **options}
    return fl.emulate_file(path, arguments, **given).launched.findings


CALLS = """\
__device__ float second(const float* x, int i) {
  return x[i + 1];
}
__device__ float first(const float* x) {
  return second(x, threadIdx.x);
}
__global__ void k(const float* x, float* y) {
  y[threadIdx.x] = first(x);
}
"""


def test_the_innermost_line_comes_first_then_the_call(folder: Path) -> None:
    path = written(folder, "calls", CALLS)
    (finding,) = found(path, {"x": np.zeros(32, "f4"), "y": fl.Empty((32,))})
    assert str(finding).startswith("calls.cu:2, called at calls.cu:8: out of bounds: thread 31 of block 0 reads")
    assert (finding.at, finding.line) == ((str(path), 2), (str(path), 8))
    assert [line.number for line in finding.via] == [2, 5]


def test_so_does_that_of_the_other_party(folder: Path) -> None:
    text = """\
__device__ void put(float* x) { x[0] = threadIdx.x; }
__device__ float get(float* x) { return x[0]; }
__global__ void k(float* y) {
  __shared__ float s[1];
  if (threadIdx.x == 7)
    put(s);
  y[threadIdx.x] =
    get(s);
}
"""
    races = [x for x in found(written(folder, "other", text), {"y": fl.Empty((32,))}) if x.kind == "race"]
    assert any("; the other: thread 7 at other.cu:1, called at other.cu:6" in str(x) for x in races), races
