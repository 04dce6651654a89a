"""What a finding says: the line that did it first, then its call; who else took part; of what kind it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import Finding, build

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


LOCALS = """\
__global__ void accumulates(const float* x, float* y, int n) {
  float sums[4][4];  // unset
  for (int k = 0; k < n; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] += x[4 * k + i] * x[4 * k + j];
  for (int i = 0; i < 16; ++i) y[i] = sums[i / 4][i % 4];
}
__global__ void counts(const int* x, int* y, int n) {
  int count;  // unset
  for (int i = 0; i < n; ++i) count += x[i] > 0;
  y[threadIdx.x] = count;
}
__global__ void same_branch_twice(const float* x, float* y, int n) {
  float value, fragment[8];
  if (threadIdx.x < n) value = x[threadIdx.x];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 8; ++i) fragment[i] = x[i + k];
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = value;
  if (n) y[n + threadIdx.x] = fragment[threadIdx.x % 8];
}
"""


@pytest.mark.parametrize(("kernel", "name", "kind"), [("accumulates", "sums", "f4"), ("counts", "count", "i4")])
def test_a_local_that_nobody_set_is_named_at_its_declaration(folder: Path, kernel: str, name: str, kind: str) -> None:
    path = written(folder, "locals", LOCALS)
    (finding,) = found(path, {"x": np.ones(64, kind), "y": np.zeros(64, kind), "n": 8}, kernel=kernel, block=1)
    assert finding.kind == "uninitialised" and f"reads the local variable '{name}'" in finding.message
    assert finding.at is not None
    assert (
        LOCALS.splitlines()[finding.at.number - 1].endswith("// unset")
        and name in LOCALS.splitlines()[finding.at.number - 1]
    )


def test_a_warning_that_the_run_disproves_is_no_finding(folder: Path) -> None:
    """g++ warns of `value`: it doesn't see that the same threads take both branches."""
    path = written(folder, "locals", LOCALS)
    given = {"x": np.ones(64, "f4"), "y": np.zeros(64, "f4"), "n": 20}
    assert build(path, arch=900, entries=["same_branch_twice"]).unset
    assert found(path, given, kernel="same_branch_twice") == ()
