"""A Python script with CuPy kernels, run with a stand-in for CuPy: its memory as it lies, its numbers as their bytes are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator.scripts import run_script
from simulator.errors import UsageError
from tests.flashlab.cli.typed import run

pytestmark = pytest.mark.compiler

HEAD = '''
import sys
import cupy as cp
import numpy as np
twice = cp.RawKernel(r"""
extern "C" __global__
void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
extern "C" __global__ void scale(float* y, float s) { y[threadIdx.x] *= s; }
template <class T> __global__ void fill(T* y, T value) { y[threadIdx.x] = value; }
""", "twice")
x = cp.arange(12, dtype=cp.float32).reshape(3, 4)
y = cp.zeros((3, 4), dtype=cp.float32)
'''


def ran(folder: Path, text: str) -> tuple[fl.FileRun, ...]:
    path = folder / "script.py"
    path.write_text(HEAD + text, encoding="utf-8")
    done = run_script(path)
    assert done.error is None
    return done.launches


def test_a_script_runs_and_judges_itself(tmp_path: Path) -> None:
    launches = ran(
        tmp_path,
        "twice((1,), (32,), (x, y, 12))\nassert (y == 2 * x).all() and y.get().sum() == 132\n"
        "assert type(cp.asnumpy(y)) is np.ndarray and float(cp.random.rand(3, dtype=cp.float32).max()) < 1\n"
        "mod = cp.RawModule(code=twice.code, name_expressions=['fill<float>'])\n"
        "mod.get_function('fill<float>')(1, 12, (y, cp.float32(3)))\nassert (y == 3).all()\n"
        "with cp.cuda.Stream(): cp.cuda.Device().synchronize()\n"
        "try: twice((1,), (32,), (np.zeros(3), y, 12))\nexcept TypeError as e: assert 'numpy.ndarray' in str(e)\n",
    )
    assert [launch.passed for launch in launches] == [True, True]
    assert not any(launch.notes for launch in launches)
    assert "cupy" not in sys.modules or hasattr(sys.modules["cupy"], "_core")  # the stand-in is gone


def test_a_view_is_read_as_it_lies(tmp_path: Path) -> None:
    (launch,) = ran(tmp_path, "twice((1,), (32,), (x.T, y, 12))\nassert (y == 2 * x).all()  # not of x.T\n")
    assert launch.passed
    assert launch.notes[0].startswith(
        "x isn't contiguous (shape (4, 3), strides (4, 16) bytes): the kernel gets its memory"
    )


def test_a_broadcast_array_ends_where_its_memory_does(tmp_path: Path) -> None:
    (launch,) = ran(tmp_path, "twice((1,), (32,), (cp.broadcast_to(cp.zeros(4, cp.float32), (3, 4)), y, 12))\n")
    (finding,) = launch.launched.findings
    assert (finding.kind, finding.tensor, finding.at and finding.at.number) == ("out of bounds", "x", 9)


def test_views_of_one_memory_share_it(tmp_path: Path) -> None:
    (launch,) = ran(tmp_path, "twice((1,), (4,), (x[0], x[1], 4))\nassert (x[1] == 2 * x[0]).all() and x[2, 3] == 11\n")
    assert launch.passed


def test_numbers_and_arrays_of_another_type_are_noted(tmp_path: Path) -> None:
    text = (
        "k = cp.RawKernel(twice.code, 'scale')\ny[...] = 1\nk((1,), (12,), (y, 2.0))\nassert (y == 0).all()\n"
        "twice((1,), (4,), (cp.zeros(12), y, 4))\n"
    )
    scaled, wide = ran(tmp_path, text)
    assert scaled.notes == ("s is passed as float64, and the kernel reads its first 4 bytes as float32",)
    assert wide.notes == ("x is an array of float64, and the kernel reads float32",)


def test_a_number_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + "twice((1,), (4,), (x, y, np.int16(4)))\n", encoding="utf-8")
    assert run_script(path).error == "UsageError: n = '2 bytes': expected 4: the kernel reads as many"
    with pytest.raises(UsageError, match="a Python script"):
        run_script(tmp_path / "nowhere.py")


def test_a_copy_in_order_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text("__global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }")
    x = np.arange(12, dtype="f4").reshape(3, 4)
    done = fl.emulate_file(path, {"x": x.T, "y": fl.Empty((12,))}, grid=1, block=12)
    assert done.arrays["y"].tolist() == x.T.reshape(-1).tolist()
    assert done.notes == (
        "x isn't contiguous (shape (4, 3), strides (4, 16) bytes): its values were copied in order; CuPy's RawKernel passes the "
        "memory as it lies",
    )
    assert not fl.emulate_file(path, [x, fl.Empty((12,))], grid=1, block=12).notes


def test_as_typed(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + "print('its own words')\ntwice((1,), (32,), (x, y, 32))\n", encoding="utf-8")
    text = run("emulate", path, "--run", code=1).stdout
    assert "its own words" in text
    assert "script.py:9: out of bounds: thread 12 of block 0 reads 4 bytes" in text
    said = json.loads(run("emulate", path, "--run", "--json", code=1).stdout)
    assert (said["passed"], len(said["launches"]), said["error"]) == (False, 1, None)
    assert "--run" in run("emulate", "flash2", "--run", code=2).stderr
    assert "--grid" in run("emulate", path, "--run", "--grid", 1, code=2).stderr
    path.write_text("import cupy\ncupy.ElementwiseKernel('', '', '', 'x')\n", encoding="utf-8")
    assert (
        "the script failed: NotImplementedError: cupy.ElementwiseKernel isn't emulated"
        in run("emulate", path, "--run", code=1).stdout
    )
