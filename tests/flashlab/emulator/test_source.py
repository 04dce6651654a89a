"""A published file as it is: host code, launches, headers that aren't here, kernels of every provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import BuildError
from flashlab.emulator.build import survey

pytestmark = pytest.mark.compiler

PUBLISHED = """\ufeff
#include <torch/extension.h>
#include <cublas_v2.h>
#include <vector>
#include "../common/nowhere.h"
#define N 64
#define MAKE(NAME, OP) __global__ void NAME(float* x, int n) { x[threadIdx.x] = 3 OP n; }
using namespace torch::indexing;

__constant__ float weights[4] = {1, 2, 3, 4};
__device__ int counter;
static cublasHandle_t handle;
struct Host { torch::Tensor t; std::vector<float> v; };
struct Params {
  int n;
  explicit Params(torch::Tensor t) : n(t.size(0)) {}
  __device__ int twice() const { return 2 * n; }
};

namespace space { namespace {
__device__ float weighted(float x) { return x * weights[threadIdx.x % 4]; }
float weighted(torch::Tensor t) { cublasCreate(&handle); return t.sum(); }

__global__ void scale(const float* x, float* y, const Params p) {
  // step: scale
  y[threadIdx.x] = weighted(x[threadIdx.x]) + p.twice();
  atomicAdd(&counter, 1);
}
} }
MAKE(added, +)
MAKE(taken, -)
template <int M, class T = float> __global__ void filled(T* y) { y[threadIdx.x] = M; }
union Bits { float4 four; float one[4]; };
__global__ void unused(float* x) {}

int main(int argc, char** argv) {
  dim3 grid(1), block(N / 2 * 2, 1);
  space::scale<<<grid, block>>>(nullptr, nullptr, Params(torch::Tensor()));
  filled<N><<<argc, N>>>(nullptr);
  added<<<1, 32>>>(nullptr, 1);
  added<<<1, N>>>(nullptr, 1);
  cublasDestroy(handle);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("main", &main); }
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "published.cu"
    path.write_text(PUBLISHED, encoding="utf-8")
    return path


X = np.arange(64, dtype=np.float32)


def refused(path: Path, arguments: dict[str, Any], **options: Any) -> str:
    with pytest.raises(fl.UsageError) as error:
        fl.emulate_file(path, arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_kernel_among_host_code(published: Path) -> None:
    given = {"x": X, "y": fl.Empty((64,)), "p": np.int32(5).tobytes()}
    run = fl.emulate_file(published, given, kernel="space::scale")
    assert run.passed, run
    np.testing.assert_array_equal(run.arrays["y"], X * np.tile([1, 2, 3, 4], 16) + 10)
    assert run.notes == ("grid 1, block 64: as launched at published.cu:38",)
    assert {row.step for row in run.launched.moved} == {"scale"}


def test_variables_in_the_gpus_memory(published: Path) -> None:
    given = {"x": X, "y": fl.Empty((64,)), "p": np.int32(0).tobytes()}
    ones = np.ones(4, np.float32)
    for _ in range(2):  # each run begins anew
        run = fl.emulate_file(published, given, kernel="scale", symbols={"weights": ones, "counter": 7})
        np.testing.assert_array_equal(run.arrays["y"], X)
        assert run.symbols["counter"].tolist() == [71] and run.symbols["weights"].tolist() == [1] * 4
    assert fl.emulate_file(published, given, kernel="scale").symbols["weights"].tolist() == [1, 2, 3, 4]
    wrong = {"weight": 1, "weights": ones[:2], "counter": 1.5}
    said = ("did you mean weights?", "weights = '8 bytes': expected 16", "counter = '1.5': expected a whole number")
    for (name, value), line in zip(wrong.items(), said, strict=True):
        assert line in refused(published, given, kernel="scale", symbols={name: value})


def test_kernels_by_their_names(published: Path) -> None:
    y = {"y": fl.Empty((64,))}
    assert (fl.emulate_file(published, y, kernel="filled", grid=1).arrays["y"] == 64).all()  # the one that is launched
    assert (fl.emulate_file(published, y, kernel="filled<N / 2>", grid=1, block=64).arrays["y"] == 32).all()
    x = {"x": fl.Empty((64,)), "n": 1}
    assert (fl.emulate_file(published, x, kernel="taken", grid=1, block=64).arrays["x"] == 2).all()
    assert "block = None: expected threads per block: the file launches added with 32 and 64" in refused(
        published, x, kernel="added"
    )
    assert "grid = None: expected blocks per grid, as in 8 or 8,2" in refused(published, x, kernel="taken")
    line = refused(published, x)
    assert line.endswith(
        "space::scale, added, taken, unused, filled<…> (this template's instances in the file: filled<64>)"
    )


def test_one_bad_kernel_does_not_spoil_the_others(tmp_path: Path) -> None:
    """Plain kernels of a file share a library; where one can't be built, each has its own."""
    path = tmp_path / "two.cu"
    path.write_text("__global__ void bad(int* x) { nothing(); }\n__global__ void good(int* x) { *x = 2; }\n")
    x = {"x": fl.Empty((1,), "int32")}
    assert fl.emulate_file(path, x, kernel="good", grid=1, block=1).arrays["x"] == [2]
    with pytest.raises(BuildError, match="two.cu:1, in bad"):
        fl.emulate_file(path, x, kernel="bad", grid=1, block=1)


def test_the_types_of_cufft(tmp_path: Path) -> None:
    path = tmp_path / "spectrum.cu"
    path.write_text("""
#include <cufftXt.h>
__global__ void scaled(cufftComplex* z, cufftReal by) { z[threadIdx.x] = {by * z[threadIdx.x].x, by * z[threadIdx.x].y}; }
""")
    z = np.arange(8, dtype="c8").view("f4").reshape(8, 2)
    run = fl.emulate_file(path, {"z": z, "by": 3.0}, grid=1, block=8)
    assert run.passed and np.array_equal(run.arrays["z"], 3 * z)


def test_an_unknown_type_of_a_parameter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "unknown.cu"
    path.write_text("#include <missing.h>\n__global__ void k(Missing* state, int* x) { *x = 1; }\n")
    with pytest.raises(BuildError) as error:
        fl.emulate_file(path, {}, grid=1, block=1)
    head, hint, *_ = str(error.value).splitlines()
    assert head == "unknown.cu doesn't compile at unknown.cu:2, in k:"
    assert hint == "Missing comes perhaps from <missing.h>, which isn't here"
    assert "declared void" not in str(error.value).partition("error: ")[2].splitlines()[0]


def test_what_is_not_plain_cpp(tmp_path: Path) -> None:
    """Inline PTX, also of a macro and in a header's host code; a keyword that the system's headers use as a word."""
    path = tmp_path / "ptx.cu"
    path.write_text("""
#include <memory>
typedef unsigned long long uint64_t;
#define NULL_ (INT_MAX - INT_MAX)
#define MOVE(TO, FROM) asm volatile("mov.b32 %0, %1;\\n" : "=r"(TO) : "r"(FROM))
__device__ __noinline__ int twice(int x) { return 2 * x; }
void host() { asm("hlt"); }
union Bits { float4 four; float one[4]; };
__global__ void k(int* x) {
  __shared__ alignas(alignof(float4)) int y[1];
  static_assert(alignof(decltype(y)) == 4 && sizeof(uint64_t) == 8);
  MOVE(*y, twice(4) + NULL_);
  asm("add.s32 %0, %0,\\n\\t"
      "%1;" : "+r"(*y) : "r"(5));
  *x = *y;
  x[1] = 1;
}
""")
    run = fl.emulate_file(path, {"x": np.zeros(1, np.int32)}, grid=1, block=1)
    assert run.arrays["x"] == [13]
    assert [str(finding.line) for finding in run.launched.findings] == ["ptx.cu:16"]  # behind asm of two lines


def test_the_survey(published: Path) -> None:
    found = survey(published)
    assert [kernel.name for kernel in found.kernels] == ["space::scale", "added", "taken", "filled", "unused"]
    assert found.kernel("scale").parameters == ("x", "y", "p") and found.kernel("scale").line == 24
    assert found.instances("filled") == ["filled<64>"]


def test_all_plain_kernels_of_a_file_share_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "two.cu"
    path.write_text("__global__ void a(int* x) { *x = 1; }\n__global__ void b(int* x) { *x = 2; }\n")
    assert fl.emulate_file(path, {"x": fl.Empty((1,), "int32")}, kernel="a", grid=1, block=1).arrays["x"] == [1]
    monkeypatch.setattr("subprocess.run", None)  # nothing more is compiled
    assert fl.emulate_file(path, {"x": fl.Empty((1,), "int32")}, kernel="b", grid=1, block=1).arrays["x"] == [2]


def test_headers_near_and_far(tmp_path: Path) -> None:
    """Kernels of a header, of a folder that is given, of one further up in the repository."""
    (tmp_path / ".git").mkdir()
    for folder, name, value in (("include", "up.cuh", 1), ("given", "given.cuh", 2), ("src/kernels", "beside.cuh", 4)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(f"__device__ inline int {name[:-4]}() {{ return {value}; }}\n")
    kernel = "namespace lib { template <int N> __global__ void put(int* x) { *x = N * (up() + given() + beside()); } }"
    (tmp_path / "src" / "kernels" / "kernel.cuh").write_text(kernel)
    path = tmp_path / "src" / "kernels" / "main.cu"
    path.write_text(
        '#include "up.cuh"\n#include <given.cuh>\n#include "beside.cuh"\n#include "kernel.cuh"\n'
        "void run() { lib::put<3><<<1, 1>>>(x); }\n"
    )
    run = fl.emulate_file(path, {"x": fl.Empty((1,), "int32")}, includes=[tmp_path / "given"])
    assert run.launched.kernel == "lib::put<3>" and run.arrays["x"] == [21]
    (tmp_path / "include" / "up.cuh").write_text("__device__ inline int up() { return 5; }\n")
    assert fl.emulate_file(path, {"x": fl.Empty((1,), "int32")}, includes=[tmp_path / "given"]).arrays["x"] == [33]
    assert "includes = " in refused(path, {}, includes=[tmp_path / "nowhere"])


def test_a_missing_name_may_be_found_by_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A macro of the file's build, and a header that lies elsewhere in the repository."""
    (tmp_path / ".git").mkdir()
    for folder in ("src/k", "src/shared/of_all"):
        (tmp_path / folder).mkdir(parents=True)
    path = tmp_path / "src" / "k" / "k.cu"
    path.write_text(
        '#include "of_all/types.h"\n__global__ void k(float* x) { *x = _N_; }\n__global__ void of(Word* x) { *x = 1; }\n'
    )
    (tmp_path / "src" / "shared" / "of_all" / "types.h").write_text("using Word = int;\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildError, match="_N_ may be a macro of the file's build: -D _N_=VALUE"):
        fl.emulate_file(path, {"x": X}, kernel="k", grid=1, block=1)
    with pytest.raises(BuildError, match="from <of_all/types.h>, which lies in src/shared: -I src/shared"):
        fl.emulate_file(path, {"x": np.zeros(1, np.int32)}, kernel="of", grid=1, block=1)
    run = fl.emulate_file(path, {"x": np.zeros(1, np.int32)}, kernel="of", grid=1, block=1, includes=["src/shared"])
    assert run.arrays["x"] == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "__device__ float far(float);\n__global__ void k(float* x) { *x = far(1); }",
            "far(float) is declared, but neither",
        ),
        ("#include <nowhere.h>\n__global__ void k(float* x) {\n  *x = NOWHERE;\n}", "comes perhaps from <nowhere.h>"),
        (
            "float h(float x) { return x; }\n__global__ void k(float* x) { *x = h(1); }",
            "h is host code, which no kernel",
        ),
        ("__global__ void k(float* x) {\n  k<<<1, 1>>>(x);\n}", "no.cu:2: a kernel that launches another"),
        ("#if 1\n__global__ void k(float* x) {}\n", "no.cu can't be preprocessed:\nno.cu:1: error: unterminated #if"),
    ],
)
def test_what_cannot_be_built_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "no.cu").write_text(text)
    with pytest.raises(BuildError) as error:
        fl.emulate_file(tmp_path / "no.cu", {"x": X}, grid=1, block=1)
    lines = str(error.value).splitlines()
    assert said in str(error.value) and lines[0].startswith("no.cu") and len(lines) < 20
    assert "kernel.cpp" not in str(error.value) and str(tmp_path) not in str(error.value)


def test_the_standard(tmp_path: Path) -> None:
    path = tmp_path / "std.cu"
    path.write_text("__global__ void k(long* x) { *x = __cplusplus; }")
    x = {"x": fl.Empty((1,), "int64")}
    found = {std: int(fl.emulate_file(path, x, grid=1, block=1, std=std).arrays["x"][0]) for std in ("c++17", "c++20")}
    assert found["c++17"] == 201703 and found["c++20"] > 201703
    assert "std = 'c++11': expected one of c++14, c++17, c++20" in refused(path, x, grid=1, block=1, std="c++11")


def test_clusters_of_several_blocks_are_refused(tmp_path: Path) -> None:
    """Each block would do the whole cluster's work, or a part of it."""
    text = "".join(
        f"__global__ void __cluster_dims__({dims}) {name}(float* x) {{ x[threadIdx.x] = 1; }}\n"
        for name, dims in (("one", "1, 1, 1"), ("two", "2, 1, 1"), ("some", "SIZE"))
    )
    (tmp_path / "k.cu").write_text("constexpr int SIZE = 1;\n" + text, encoding="utf-8")

    def run(kernel: str) -> fl.FileRun:
        return fl.emulate_file(tmp_path / "k.cu", {"x": fl.Empty((32,))}, kernel=kernel, grid=2, block=32)

    assert run("one").arrays["x"].sum() == 32
    for name in ("two", "some"):
        with pytest.raises(fl.UsageError, match=f"kernel = '{name}': expected a kernel without clusters"):
            run(name)
