"""What looks right and isn't: indices that wrap, lanes that happen to be together, parts of arrays that belong to nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import Poisoned
from flashlab.emulator.build import is_ready
from simulator.errors import UsageError
from tests.flashlab.cli.typed import run

pytestmark = pytest.mark.compiler

# What follows `finds` is found at that line, what follows `notes` is a note there, and a line without a word has neither.
SOURCE = """\
__global__ void direct(const float* x, float* y, int row, int stride) {
  y[threadIdx.x] = x[row * stride + threadIdx.x];  // finds: overflow
}
__device__ int offset(int row, int stride) {
  int sum = row;
  sum *= stride;  // finds: overflow
  return sum;
}
__global__ void called(const float* x, float* y, int row, int stride) {
  const float* from = x + offset(row, stride);
  y[threadIdx.x] = from[threadIdx.x];
}
__device__ float at(const float* x, int i) { return x[i]; }
__global__ void handed(const float* x, float* y, int row, int stride) {
  const int base = row * stride;  // finds: overflow
  y[threadIdx.x] = at(x, base);
}
__global__ void wide(const float* x, float* y, int row, int stride) {
  y[threadIdx.x] = x[((long long)row * stride + threadIdx.x) % 70000];
}
__global__ void hashed(const float* x, float* y, int row, int stride) {
  int hash = row * stride;  // notes: overflow
  y[threadIdx.x] = x[threadIdx.x] + hash;
}
__global__ void unsigned_hash(const float* x, float* y, unsigned row, unsigned stride) {
  y[threadIdx.x] = x[(row * stride + threadIdx.x) % 64];
}
__global__ void active(const float* x, float* y, int row, int stride) {
  float sum = x[threadIdx.x];
  const unsigned lanes = __activemask();
  sum += __shfl_xor_sync(lanes, sum, 1);  // notes: active mask
  y[threadIdx.x] = sum;
}
__global__ void whole(const float* x, float* y, int row, int stride) {
  float sum = x[threadIdx.x];
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  y[threadIdx.x] = sum;
}
__global__ void table(const float* x, float* y, int row, int stride) {
  __shared__ float s[4];
  for (int i = 0; i < 4; ++i)
    s[i] = 2 * x[i];  // notes: same value
  y[threadIdx.x] = s[threadIdx.x % 4];
}
__global__ void own_table(const float* x, float* y, int row, int stride) {
  __shared__ float s[4];
  s[threadIdx.x % 4] = x[threadIdx.x % 8];  // finds: race
  y[threadIdx.x] = s[threadIdx.x % 4];
}
__global__ void stored_before(const float* x, float* y, int row, int stride) {
  __shared__ float s[32];
  if (threadIdx.x == 1) s[0] = x[0];
  __syncthreads();
  if (threadIdx.x == 0)
    s[0] = x[0];
  y[threadIdx.x] = s[0];  // finds: race
}
"""
KERNELS = [line.split("void ")[1].split("(")[0] for line in SOURCE.splitlines() if line.startswith("__global__")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sources") / "indices.cu"
    file.write_text(SOURCE, encoding="utf-8")
    return file


def said(kernel: str, word: str) -> set[tuple[int, str]]:
    """The lines and kinds that the source says of a kernel, and of the functions before it."""
    found: set[tuple[int, str]] = set()
    waiting: set[tuple[int, str]] = set()
    function = ""
    for number, line in enumerate(SOURCE.splitlines(), 1):
        if line.startswith("__"):
            function = line.split("(")[0].split()[-1]
            waiting = waiting if line.startswith("__global__") else set()
        if f"// {word}: " in line:
            (found if function == kernel else waiting).add((number, line.partition(f"// {word}: ")[2]))
        if line.startswith("__global__") and function == kernel:
            found |= waiting
        if line == "}" and function in KERNELS:
            waiting = set()
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_said_of_a_kernel_stands_at_its_lines(path: Path, kernel: str) -> None:
    x = np.ones(70000, "f4")
    x[:8] = np.arange(8)
    arguments: dict[str, Any] = {"x": x, "y": fl.Empty((32,)), "row": 65537, "stride": 65536}
    run = fl.emulate_file(path, arguments, kernel=kernel, grid=1, block=32, time_limit=10)
    for word, all_said in (("finds", run.launched.findings), ("notes", run.launched.notes)):
        assert {(x.at.number, x.kind) for x in all_said if x.at} == said(kernel, word), run


def test_an_overflow_says_what_was_computed(path: Path) -> None:
    arguments = {"x": np.ones(70000, "f4"), "y": fl.Empty((32,)), "row": 65537, "stride": 65536}
    run = fl.emulate_file(path, arguments, kernel="direct", grid=1, block=32)
    assert "computes 65537 * 65536, which no 'int' holds (32 times)" in run.complaints()[0]


def test_far_out_of_bounds_names_the_array_of_the_pointer(tmp_path: Path) -> None:
    path = tmp_path / "far.cu"
    path.write_text("__global__ void k(const float* x, float* y, long long at) { y[threadIdx.x] = x[at]; }")
    for at in (2147518464, -2147518464):
        run = fl.emulate_file(path, {"x": np.ones(8, "f4"), "y": fl.Empty((32,)), "at": at}, grid=1, block=32)
        (finding,) = run.launched.findings
        assert (finding.kind, finding.tensor, finding.offset) == ("out of bounds", "x", 4 * at)


POOL = "__global__ void k(float* pool, float* y, int n) { for (int i = 0; i < n; ++i) y[i] = pool[i]; }"


def test_a_part_that_belongs_to_nobody_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "pool.cu"
    path.write_text(POOL)
    pool = Poisoned(np.ones((4, 16), "f4"), [(32, 48)])

    def run(n: int, **arrays: Any) -> fl.FileRun:
        return fl.emulate_file(path, {"pool": pool, "y": np.zeros(64, "f4"), "n": n, **arrays}, grid=1, block=1)

    assert run(32).passed
    (finding,) = run(33).launched.findings
    assert (finding.kind, finding.index, finding.tensor) == ("poison", "[2, 0]", "pool")
    (finding,) = run(10, y=Poisoned(np.zeros(64, "f4"), [(9, 10)])).launched.findings
    assert (finding.kind, finding.message) == ("poison", "writes what belongs to nobody")
    with pytest.raises(UsageError, match="pairs from:to within the array's 64 elements"):
        Poisoned(np.ones((4, 16), "f4"), [(60, 65)])


def test_some_blocks_are_spread_over_the_grid(tmp_path: Path) -> None:
    path = tmp_path / "some.cu"
    path.write_text("__global__ void k(int* y) { y[blockIdx.x] = gridDim.x; }")
    run = fl.emulate_file(path, {"y": np.zeros(100, "i4")}, grid=100, block=1, blocks=4)
    assert np.flatnonzero(run.arrays["y"]).tolist() == [0, 33, 66, 99]
    assert run.arrays["y"][99] == 100
    assert run.launched.total("hbm.write") == 16
    assert "4 of 100 blocks ran" in " ".join(run.notes)
    partly = fl.emulate_file(path, {"y": fl.Empty((100,), "int32")}, grid=100, block=1, blocks=4)
    assert partly.passed  # what other blocks write isn't missed
    with pytest.raises(UsageError, match="blocks"):
        fl.emulate_file(path, {"y": np.zeros(100, "i4")}, grid=100, block=1, blocks=0)


def test_as_typed(tmp_path: Path) -> None:
    path = tmp_path / "pool.cu"
    path.write_text(POOL)
    words = ["emulate", path, "--grid", 8, "--block", 1, "--blocks", 2, "--arg", "y=float32[64]:zeros", "--arg", "n=33"]
    text = run("emulate", *words[1:], "--arg", "pool=float32[4,16]:zeros:poison(0:2,32:48)", code=1).stdout
    assert "2 of 8 blocks ran: counts and findings are theirs alone" in text
    assert "pool.cu:1: poison: thread 0 of block 0 reads what belongs to nobody (pool[0, 0] in HBM)" in text
    for wrong in ("pool=float32[4,16]:poison(2)", "pool=float32[4,16]:poison(60:65)", "pool=3:poison(0:1)"):
        assert "--arg pool" in run(*words, "--arg", wrong, code=2).stderr


def test_the_first_build_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool.cu"
    path.write_text(POOL)
    fl.emulate_file(path, {"pool": np.zeros(4, "f4"), "y": np.zeros(4, "f4"), "n": 4}, grid=1, block=1)
    assert is_ready()
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "empty"))
    assert not is_ready()
