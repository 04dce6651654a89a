"""Whole programs on the emulator: host code, launches, copies, streams, and what is found in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import BuildError
from flashlab.emulator.programs import ProgramRun, run_program
from simulator.errors import UsageError
from tests.flashlab.cli.typed import document, one_line, run

pytestmark = pytest.mark.compiler

WHOLE = r"""
#include <cuda_runtime.h>
#include <iostream>
#include <stdexcept>
#include <vector>
#define CHECK(call) do { cudaError_t e = (call); if (e) { printf("%s\n", cudaGetErrorString(e)); exit(9); } } while (0)
#define N 256
__constant__ float factor;
__device__ int calls;
template <class T, int BLOCK>
__global__ void scale(T* x, const T* more, int n) {
  int i = blockIdx.x * BLOCK + threadIdx.x;
  if (i < n) x[i] *= factor + (more ? more[i] : 0);
  if (i == 0) ++calls;
}
template <class T> __global__ void deduced(T* x, T by) { x[threadIdx.x] += by; }
__global__ void dynamic(float* x) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[N - 1 - threadIdx.x];
}
namespace deep { __global__ void set(int* x, int to) { x[threadIdx.x] = to; } }
struct Buffer {
  float* at = nullptr;
  explicit Buffer(size_t n) { CHECK(cudaMalloc(&at, n * sizeof(float))); }
  ~Buffer() { cudaFree(at); }
};
int main(int argc, char** argv) {
  std::vector<float> x(N);
  for (int i = 0; i < N; ++i) x[i] = i;
  Buffer d(N);
  CHECK(cudaMemcpy(d.at, x.data(), N * sizeof(float), cudaMemcpyHostToDevice));
  float two = 2;
  CHECK(cudaMemcpyToSymbol(factor, &two, sizeof two));
  scale<float, 128><<<N / 128, 128>>>(d.at, NULL, N);
  for (int i = 0; i < 3; ++i) deduced<<<1, dim3(N)>>>(d.at, 1.0f);
  CHECK(cudaFuncSetAttribute(dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
  dynamic<<<1, N, 60000>>>(d.at);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(x.data(), d.at, N * sizeof(float), cudaMemcpyDeviceToHost));
  int n = 0, *marks;
  CHECK(cudaMemcpyFromSymbol(&n, calls, sizeof n));
  CHECK(cudaMallocManaged(&marks, 32 * sizeof(int)));
  int seven = 7;
  void* arguments[] = {&marks, &seven};
  CHECK(cudaLaunchKernel((const void*)deep::set, dim3(1), dim3(32), arguments));
  CHECK(cudaDeviceSynchronize());
  try { throw std::runtime_error("caught"); } catch (const std::exception& e) { std::cout << e.what() << " "; }
  int count; cudaDeviceProp about;
  CHECK(cudaGetDeviceCount(&count));
  CHECK(cudaGetDeviceProperties(&about, 0));
  printf("%g %g %d %d %s %d sm_%d%d\n", x[0], x[N - 1], n, marks[31], argc > 1 ? argv[1] : "-", count, about.major, about.minor);
  CHECK(cudaFree(marks));
  return 0;
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def ran(folder: Path, body: str, *words: str, head: str = "", **given: Any) -> ProgramRun:
    """What a `main` with this body does, after a kernel that stores its indices."""
    kernels = "__global__ void store(int* x, int n) { int i = threadIdx.x; if (i < n) x[i] = i; }\n"
    path = folder / "program.cu"
    path.write_text(f"{kernels}{head}int main(int argc, char** argv) {{\n{body}\nreturn 0; }}\n")
    return run_program(path, words, **given)


def test_a_program_runs_with_its_arguments(folder: Path) -> None:
    path = folder / "whole.cu"
    path.write_text(WHOLE)
    done = run_program(path, ["word"])
    assert done.complaints() == [] and done.notes == ()
    assert done.printed == "caught 513 3 1 7 word 1 sm_90\n"
    assert [(x.kernel, x.grid[0], x.block[0], x.sram, x.times) for x in done.launches] == [
        ("scale<float, 128>", 2, 128, 0, 1), ("deduced", 1, 256, 0, 3), ("dynamic", 1, 256, 60000, 1), ("set", 1, 32, 0, 1),
    ]  # fmt: skip
    assert [x.launched.total("hbm.write") for x in done.launches] == [1024, 3072, 1024, 128]
    line = 1 + WHOLE[: WHOLE.index("scale<float, 128><<<")].count("\n")
    assert str(done.launches[0].line) == f"whole.cu:{line}"
    assert done.launches[2].launched.total("sram.write") == 1024


MISUSES = """int *d, h[64] = {0}, *m, *p;
cudaMalloc(&d, sizeof h);
cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost);
cudaMemcpy(d, h, sizeof h, cudaMemcpyDeviceToHost);
cudaMemcpy(d, h, sizeof h + 4, cudaMemcpyHostToDevice);
cudaMemset(h, 0, 4);
cudaMalloc(&p, (size_t)1 << 50);
store<<<1, 64, 50000>>>(d, 64);
store<<<1, 2000>>>(d, 64);
cudaGetLastError();
cudaMallocManaged(&m, sizeof h);
store<<<1, 64>>>(m, 64);
volatile int early = m[3];
cudaDeviceSynchronize();
early = m[3];
cudaStream_t a, b;
cudaStreamCreate(&a); cudaStreamCreate(&b);
store<<<1, 64, 0, a>>>(d, 64);
cudaMemsetAsync(d + 32, 0, 64, b);
cudaEvent_t e; cudaEventCreate(&e); cudaEventRecord(e, b); cudaStreamWaitEvent(a, e, 0);
store<<<1, 64, 0, a>>>(d, 64);
cudaStreamSynchronize(a);
cudaFree(m); cudaFree(m);
cudaFree(h); cudaFreeHost(d);
cudaMemcpy(h, m, 4, cudaMemcpyDeviceToHost);"""


def test_each_misuse_of_the_host_is_found_at_its_line(folder: Path) -> None:
    """And what is right beside it is not: after a synchronisation, and behind an event that the stream waits for."""
    done = ran(folder, MISUSES)
    assert [str(x) for x in done.findings] == [
        "program.cu:6: direction: copies with cudaMemcpyDeviceToHost, but the destination is device memory",
        "program.cu:7: out of bounds: copies to 260 bytes: 4 bytes past the end of d",
        "program.cu:8: direction: fills the host's memory: cudaMemset is for device memory",
        "program.cu:10: launch: store asks for 50,000 bytes of dynamic shared memory, and may have 49,152: "
        "cudaFuncSetAttribute(store, cudaFuncAttributeMaxDynamicSharedMemorySize, …) allows more. Nothing ran",
        "program.cu:11: launch: store asks for blocks of 2,000 threads: 1,024 are the most, so nothing ran",
        "program.cu:15: host race: reads what store in the GPU writes, and the host hasn't waited for it "
        "(cudaDeviceSynchronize) (m, byte 12); the other: program.cu:14",
        "program.cu:21: race between streams: a fill in stream 2 writes what store in stream 1 writes, and neither waits for "
        "the other (d, byte 128); the other: program.cu:20",
        "program.cu:25: use after free: cudaFree of m, which has been freed",
        "program.cu:26: free: cudaFree of memory of the host, which CUDA didn't allocate",
        "program.cu:26: free: cudaFreeHost of device memory: that takes cudaFree",
        "program.cu:27: use after free: copies 4 bytes: m has been freed",
    ]
    assert [str(x) for x in done.notes] == [
        "program.cu:5: uninitialised: copies 256 bytes that nobody wrote",
        "program.cu:9: error unchecked: asks for 1125899906842624 bytes, and fails: out of memory",
        "program.cu:4: not freed: 256 bytes of d are never freed",
    ]
    assert done.status == 0 and not done.passed


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("cudaMalloc(&d, 256); d[1] = 5;", "program.cu:4: device memory on the host: writes 4 bytes of device memory"),
        ("cudaMalloc(&d, 256); cudaFree(d); store<<<1, 64>>>(d, 64);", "program.cu:1: use after free: thread 0 of block 0 writes"),
        ("store<<<1, 64>>>(h, 64);", "program.cu:1: out of bounds: thread 0 of block 0 writes 4 bytes of the host's memory"),
        pytest.param("cudaMalloc(&d, 256); memset(d, 0, 9);", "device memory on the host: writes 9 bytes", marks=pytest.mark.long),
        pytest.param("store<<<1, 64>>>(d, 64);", "thread 0 of block 0 writes 4 bytes at a null", marks=pytest.mark.long),
        pytest.param("cudaMalloc(&d, 256); free(d);", "program.cu:4: free: free() of device memory", marks=pytest.mark.long),
        pytest.param("*d = 3;", "program.cu:4: crash: the program was ended by SIGSEGV", marks=pytest.mark.long),
        pytest.param("abort();", "program.cu:4: crash: the program was ended by SIGABRT", marks=pytest.mark.long),
        pytest.param("exit(3);", "the program ended with status 3", marks=pytest.mark.long),
        pytest.param("h[argc + 63] = 1;", "out of bounds: takes element 64 of an array", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_what_ends_a_program_is_found(folder: Path, body: str, said: str) -> None:
    done = ran(folder, f'int *d = nullptr, h[64] = {{0}};\n{body}\nprintf("%d", h[3]);')
    assert not done.passed and said in done.complaints()[0], done


def test_a_kernels_fault_makes_later_calls_fail(folder: Path) -> None:
    """As on a GPU, where the error sticks."""
    body = """int* d; cudaMalloc(&d, 128); store<<<1, 64>>>(d, 64);
    printf("%s; ", cudaGetErrorString(cudaDeviceSynchronize()));
    printf("%s", cudaGetErrorName(cudaMemset(d, 0, 4)));"""
    done = ran(folder, body)
    assert done.printed == "an illegal memory access was encountered; cudaErrorIllegalAddress"
    assert [x.kind for x in done.launches[0].launched.findings] == ["out of bounds"] and not done.findings


def test_launches_of_a_line_are_added_up(folder: Path) -> None:
    """By the names of arrays, though each launch has arrays of its own; a freed array's name is free again."""
    body = """for (int i = 0; i < 3; ++i) {
    int *one, *two; cudaMalloc(&one, 256); cudaMalloc(&two, 256);
    store<<<1, 64>>>(i < 2 ? one : two, 64); cudaFree(one); cudaFree(two); }"""
    [launch] = ran(folder, body).launches
    assert launch.times == 3 and {x.tensor: x.bytes for x in launch.launched.moved} == {"one": 512, "two": 256}


@pytest.mark.long
def test_streams_that_wait_for_each_other_are_in_order(folder: Path) -> None:
    """The default stream waits for the others, and they for it; a stream that was made non-blocking doesn't."""
    body = """int *d, *h; cudaStream_t a, b; cudaStreamCreate(&a); cudaStreamCreateWithFlags(&b, %s);
    cudaMalloc(&d, 256); cudaMallocHost(&h, 256);
    store<<<1, 64, 0, a>>>(d, 64); store<<<1, 64>>>(d, 64); store<<<1, 64, 0, b>>>(d, 64);
    cudaMemcpyAsync(h, d, 256, cudaMemcpyDeviceToHost, b); %s printf("%%d", h[5]);
    cudaFree(d); cudaFreeHost(h);"""
    assert ran(folder, body % ("cudaStreamDefault", "cudaStreamSynchronize(b);")).complaints() == []
    kinds = [x.kind for x in ran(folder, body % ("cudaStreamNonBlocking", "")).findings]
    assert kinds == ["race between streams", "host race"]


@pytest.mark.long
def test_an_endless_program_is_stopped(folder: Path) -> None:
    done = ran(folder, "volatile int i = 1; while (i) {}", time_limit=0.5)
    assert done.unfinished and "time limit" in done.complaints()[0]
    kernel = "__global__ void wait(volatile int* x) { while (*x == 0) {} }\n"
    body = "int* d; cudaMalloc(&d, 4); cudaMemset(d, 0, 4); wait<<<1, 1>>>(d); return cudaDeviceSynchronize();"
    done = ran(folder, body, head=kernel, time_limit=3)
    assert [x.kind for x in done.launches[0].launched.findings] == ["deadlock"] and done.status == 702 % 256


SOLVE = """#include <cuda_runtime.h>
__global__ void add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
extern "C" void solve(const float* a, const float* b, float* c, int n) {
  add<<<(n + 255) / 256, 256>>>(a, b, c, n);
  cudaDeviceSynchronize();
}
"""


def test_a_function_is_called_with_arrays_in_device_memory(folder: Path) -> None:
    path = folder / "solve.cu"
    path.write_text(SOLVE)
    a, b = np.arange(300, dtype="f4"), np.ones(300, "f4")
    done = run_program(path, call="solve", given={"a": a, "b": b, "c": fl.Empty((300,)), "n": 300})
    assert done.passed and np.array_equal(done.arrays["c"], a + b)
    assert done.launches[0].launched.total("hbm.read") == 2400
    short = run_program(path, call="solve", given={"a": a, "b": b, "c": fl.Empty((300,)), "n": 200})
    assert short.complaints() == ["c: 400 bytes were never written"]
    with pytest.raises(UsageError, match="also b, c, n, as solve has"):
        run_program(path, call="solve", given={"a": a})


def test_the_command(folder: Path, tmp_path: Path) -> None:
    path = folder / "solve.cu"
    path.write_text(SOLVE)
    given = ["--arg", "a=float32[300]", "--arg", "b=float32[300]", "--arg", "c=float32[300]:out", "--arg", "n=300"]
    kept = tmp_path / "kept.npz"
    typed = run("run", path, "--call", "solve", *given, "--out", kept)
    assert "add at solve.cu:7: grid 2, block 256" in typed.stdout and typed.stdout.endswith("passed: no misuse\n")
    assert "native code" in typed.stderr
    with np.load(kept) as arrays:
        assert np.array_equal(arrays["c"], arrays["a"] + arrays["b"])
    told = document("run", path, "--call", "solve", *given[:-1], "n=301", code=1)
    assert not told["passed"] and told["launches"][0]["launch"]["findings"][0]["kind"] == "out of bounds"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere.cu", "file = 'nowhere.cu': expected a CUDA source"),
        ("solve.cu", "expected a program with a main()"),
        ("solve.cu --call slove", "call = 'slove': expected one of solve"),
        ("solve.cu --arg n=1", "--arg = 'n=1': expected nothing without --call"),
        ("solve.cu --call solve -- 3", "arguments = '3': expected nothing with --call"),
        ("solve.cu --call solve --time-limit -1", "time_limit = -1.0: expected seconds"),
    ],
)
def test_bad_input_is_told_in_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str) -> None:
    (folder / "solve.cu").write_text(SOLVE)
    monkeypatch.chdir(folder)
    assert said in one_line("run", *words.split())


def test_what_doesnt_compile_is_told(folder: Path) -> None:
    with pytest.raises(BuildError, match=r"program.cu doesn't compile at program.cu:3.*\n.*-D WIDTH=VALUE"):
        ran(folder, "int x = WIDTH;")


@pytest.mark.long
def test_a_kernel_that_launches_is_not_emulated(folder: Path) -> None:
    head = "__global__ void parent(int* x) { store<<<1, 64>>>(x, 64); }\n"
    done = ran(folder, "int* d; cudaMalloc(&d, 256); parent<<<1, 1>>>(d); cudaFree(d);", head=head)
    assert "not emulated" in done.complaints()[0]
