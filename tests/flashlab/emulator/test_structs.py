"""Structs of parameters: their members by name, pointers among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
from simulator.errors import UsageError
from tests.flashlab.cli.typed import run

pytestmark = pytest.mark.compiler

SOURCE = """
struct Shape { int n; float scale; };
struct Base { const float* __restrict__ x; static const int most = 3; };
template <class T> struct Params : Base {
  T* y;
  Shape shape;
  void* nothing;
  bool on;
  int bit : 3;
  __device__ T* out() const { return y; }
 private:
  int hidden;
};
__global__ void scaled(const __grid_constant__ Params<float> p, int extra) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.shape.n && p.on && !p.nothing) p.out()[i] = p.shape.scale * p.x[i] + extra;
}
"""
X = np.arange(40, dtype="f4")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sources") / "structs.cu"
    file.write_text(SOURCE, encoding="utf-8")
    return file


def test_members_are_given_by_name(path: Path) -> None:
    given = {"p.x": X, "p.y": fl.Empty((40,)), "p.shape.n": 40, "p.shape.scale": 0.5, "p.on": True, "extra": 1}
    done = fl.emulate_file(path, given, grid=1, block=64)
    assert done.passed, done
    assert done.arrays["p.y"].tolist() == (X / 2 + 1).tolist()
    assert done.launched.total("hbm.read") == 160
    (finding,) = fl.emulate_file(path, given | {"p.shape.n": 41}, grid=1, block=64).launched.findings
    assert (finding.kind, finding.tensor, finding.index) == ("out of bounds", "p.x", "[40]")


def test_what_isnt_said_is_0_and_what_isnt_there_is_refused(path: Path) -> None:
    assert fl.emulate_file(path, {"p.shape.n": 40, "extra": 1}, grid=1, block=64).passed  # p.on is false
    with pytest.raises(UsageError, match=r"argument = 'p.z': expected .*p\.x"):
        fl.emulate_file(path, {"p.z": X, "extra": 1}, grid=1, block=64)
    with pytest.raises(UsageError, match=r"also p, as scaled has \(p by its members, as p\.x\)"):
        fl.emulate_file(path, {"extra": 1}, grid=1, block=64)
    with pytest.raises(UsageError, match="as a whole, or its members, not both"):
        fl.emulate_file(path, {"p": bytes(48), "p.x": X, "extra": 1}, grid=1, block=64)
    with pytest.raises(UsageError, match="float32, as the kernel has it"):
        fl.emulate_file(path, {"p.x": X.astype("f8"), "extra": 1}, grid=1, block=64)


def test_as_typed(path: Path) -> None:
    words = ["--arg", "p.x=float32[40]", "--arg", "p.y=float32[40]:out", "--arg", "p.shape.n=40", "--arg", "p.on=true"]
    assert "p.y" in run("emulate", path, "--grid", 1, "--block", 64, *words, "--arg", "extra=0").stdout
