"""CUDA in the strings of Python files: found by reading, then built and run as a `.cu` file. Findings name the file's line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import BuildError
from flashlab.emulator.strings import embedded, names_a_kernel
from flashlab.verify import is_kernel, kernel_named
from simulator.errors import UsageError

KERNEL = 'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] = {value}; }}'


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


DOORS = {
    "raw_kernel": "k = cp.RawKernel('''{code}''', 'k')",
    "raw_kernel_by_name": "CODE = '''{code}'''\nk = cupy.RawKernel(code=CODE, name='k')",
    "raw_module": "class A:\n  CODE = '''{code}'''\n  def f(self):\n    return cp.RawModule(code=self.CODE, options=('-DA=1',))",
    "load_inline": "m = load_inline(name='m', cpp_sources='', cuda_sources=['''{code}'''], functions=['f'])",
    "program": "p = Program('''{code}''', code_type='c++', options=ProgramOptions(std='c++17'))",
    "pycuda": "mod = SourceModule('''{code}''')",
    "function": "def source(n):\n  return f'''{code}'''.replace('@', str(n))\nk = cp.RawKernel(source(4), 'k')",
    "joined": "k = cp.RawKernel('\\n'.join(['#define A 1', '''{code}''']), 'k')",
    "added": "code = '// a\\n'\ncode += '''{code}'''\nk = cp.RawKernel(code, 'k')",
    "percent": "k = cp.RawKernel('''{code} // %(x)d''' % {'x': unknown}, 'k')",
    "template": "k = cp.RawKernel(string.Template('''{code} // $a''').substitute(a=1), 'k')",
    "file": "k = cp.RawKernel(open(os.path.join(os.path.dirname(__file__), 'k.cu')).read(), 'k')",
    "path": "k = cp.RawKernel(Path('k.cu').read_text(), 'k')",
    "import": "from other import CODE\nk = cp.RawKernel(CODE, 'k')",
    "default": "def f(n, what='{code}'):\n  return cp.RawKernel(what, 'k')",
    "alone": "launch('''{code}''', 3)",
    "python_2": "print 'old'\nk = SourceModule('''{code}''')",
}


@pytest.mark.parametrize("door", DOORS)
def test_a_source_is_found_whatever_it_is_given_to(tmp_path: Path, door: str) -> None:
    code = KERNEL.format(name="k", value=1)
    inside = code.replace("{", "{{").replace("}", "}}") if door == "function" else code
    path = written(tmp_path, "raise SystemExit('never run')\n" + DOORS[door].replace("{code}", inside))
    written(tmp_path, code, "k.cu")
    written(tmp_path, f"CODE = '''{code}'''", "other.py")
    (found,) = embedded(path)
    assert code in found.text
    assert found.defined == ("k",)
    assert names_a_kernel(path, "k")


def test_what_only_a_run_would_tell_stands_as_its_name(tmp_path: Path) -> None:
    path = written(
        tmp_path, "k = cp.RawKernel(f'__global__ void k(float* x) {{ x[0] = {size.rows}; }} // {1 + 1}', 'k')"
    )
    (found,) = embedded(path)
    assert found.text == "__global__ void k(float* x) { x[0] = rows; } // 2"


def test_of_several_sources_a_name_picks_one(tmp_path: Path) -> None:
    two = "\n".join(f"{n} = cp.RawKernel('''{KERNEL.format(name=f'k{n}', value=1)}''', 'k{n}')" for n in "ab")
    path = written(tmp_path, two + "\ndef attention(q): ...\n")
    with pytest.raises(UsageError, match=r"one of its 2 CUDA sources behind it, as mine.py:NAME: ka, kb"):
        fl.emulate_file(path, {}, grid=1, block=1)
    with pytest.raises(UsageError, match="one of the kernels in mine.py: ka, kb"):
        fl.emulate_file(f"{path}:kc", {}, grid=1, block=1)
    with pytest.raises(UsageError, match="no string in it has a __global__ function"):
        fl.emulate_file(written(tmp_path, "x = 1", "empty.py"), {}, grid=1, block=1)
    assert [is_kernel(f"{path}:{name}") for name in ("ka", "b", "attention", "kc")] == [True, True, False, False]
    assert not is_kernel("nowhere.py:ka")
    assert kernel_named(f"{path}:kb", {}).declared().name == "kb"


@pytest.mark.compiler
def test_a_finding_names_the_line_of_the_python_file(tmp_path: Path) -> None:
    text = '''import cupy as cp
BLOCK = 64
HEAD = """
__device__ float twice(float x) { return 2 * x; }
"""
twice = cp.RawKernel(HEAD + r"""
extern "C" __global__
void twice_all(const float* x, float* y) {
  // step: load
  const int i = blockIdx.x * %d + threadIdx.x;
  y[i] = twice(x[i]) + OFFSET;
}
""" % BLOCK, "twice_all", options=("-DOFFSET=1", "-Inowhere", "--std=c++11"))
'''
    path = written(tmp_path, text)
    x = np.ones(100, "f4")
    run = fl.emulate_file(path, {"x": x, "y": fl.Empty((100,))}, grid=2, block=64)
    (finding,) = run.launched.findings
    assert (finding.kind, finding.at and finding.at.file, finding.step) == ("out of bounds", str(path), "load")
    right = fl.emulate_file(f"{path}:twice", [np.ones(128, "f4"), fl.Empty((128,))], grid=2, block=64)
    assert right.passed
    assert (right.arrays["y"] == 3).all()
    # both strings are one source, whose lines begin at the first one's
    assert finding.at and finding.at.number == 11, finding


def test_a_docstring_is_no_source(tmp_path: Path) -> None:
    path = written(
        tmp_path, 'def f():\n  """Finds __global__ void k(float* x) { } in a text."""\n  return "__global__ void k("\n'
    )
    assert embedded(path) == ()


@pytest.mark.compiler
def test_a_macro_says_what_only_a_run_would_tell(tmp_path: Path) -> None:
    path = written(
        tmp_path, "def make(dtype):\n  return cp.RawKernel(f'__global__ void k({dtype}* x) {{ x[0] = 1; }}', 'k')\n"
    )
    with pytest.raises(BuildError, match="only a run of mine.py would tell dtype: -D dtype=VALUE"):
        fl.emulate_file(path, [np.zeros(1)], grid=1, block=1)
    assert fl.emulate_file(path, [np.zeros(1)], grid=1, block=1, macros={"dtype": "double"}).arrays["x"] == 1


@pytest.mark.compiler
def test_a_kernel_in_a_string_is_attention(tmp_path: Path) -> None:
    code = """__global__ void mean(const float* V, float* O, int N, int d) {
  float sum = 0;
  for (int i = 0; i < N; ++i) sum += V[blockIdx.x * N * d + i * d + threadIdx.x];
  for (int i = 0; i < N; ++i) O[blockIdx.x * N * d + i * d + threadIdx.x] = sum / N;
}"""
    path = written(tmp_path, f"mean = cp.RawKernel('''{code}''', 'mean')")
    mean = kernel_named(f"{path}:mean", {"grid": "batch * heads", "block": "head_dim"})
    ran = mean.run(fl.Problem(batch=1, heads=2, len_q=8, head_dim=32, dtype="float32"))
    assert ran.passed
    assert ran.launched.total("hbm.read") == 2 * 8 * 32 * 4
