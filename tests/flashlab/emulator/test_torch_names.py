"""Names of PyTorch's headers that kernels use, where PyTorch isn't there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

FILE = """
#include <ATen/ATen.h>
#include <ATen/NumericLimits.cuh>
#include <ATen/cuda/DeviceUtils.cuh>
#include <c10/util/complex.h>
using complex_t = c10::complex<float>;
__global__ void all(const float* x, float* y, float* bounds, unsigned short* halves, const float2* z, float2* squares) {
  float sum = x[threadIdx.x];
  for (int o = C10_WARP_SIZE / 2; o; o >>= 1) sum += WARP_SHFL_XOR(sum, o, C10_WARP_SIZE);
  y[threadIdx.x] = sum + WARP_SHFL(x[threadIdx.x], 3) + WARP_SHFL_DOWN(x[threadIdx.x], 1) - doLdg(x + threadIdx.x);
  const complex_t a(z[threadIdx.x].x, z[threadIdx.x].y), b = a * a;
  squares[threadIdx.x] = make_float2(b.real(), b.imag());
  if (threadIdx.x) return;
  bounds[0] = at::numeric_limits<float>::lowest();
  bounds[1] = at::numeric_limits<at::opmath_type<at::Half>>::upper_bound();
  bounds[2] = at::numeric_limits<int>::lower_bound();
  halves[0] = __half_as_ushort(at::numeric_limits<at::Half>::max());
  halves[1] = __half_as_ushort(at::numeric_limits<at::Half>::lower_bound());
}
"""


def test_kernels_find_them(tmp_path: Path) -> None:
    file = tmp_path / "all.cu"
    file.write_text(FILE)
    x = np.arange(32, dtype=np.float32)
    z = (x + 1j * (x - 3)).astype(np.complex64)
    pairs = np.stack([z.real, z.imag], 1)
    out = {
        "y": fl.Empty((32,)),
        "bounds": fl.Empty((3,)),
        "halves": fl.Empty((2,), "uint16"),
        "squares": fl.Empty((32, 2)),
    }
    run = fl.emulate_file(file, {"x": x, "z": pairs, **out}, grid=1, block=32)
    assert run.passed, run.complaints()
    np.testing.assert_array_equal(run.arrays["y"], x.sum() + 3 + np.append(x[1:], 31) - x)
    np.testing.assert_array_equal(
        run.arrays["bounds"], np.array([np.finfo(np.float32).min, np.inf, -(2.0**31)], np.float32)
    )
    assert run.arrays["halves"].view(np.float16).tolist() == [65504, -np.inf]
    np.testing.assert_allclose(run.arrays["squares"][:, 0] + 1j * run.arrays["squares"][:, 1], z * z, rtol=1e-6)


TYPES = """
#include <ATen/ATen.h>
#include <ATen/cuda/Atomic.cuh>
template <typename scalar_t, typename weight_t>
__global__ void scaled(const scalar_t* x, const weight_t* w, float inv, scalar_t* y) {
  y[threadIdx.x] = static_cast<scalar_t>(w[threadIdx.x] * (x[threadIdx.x] - 1.f) * inv);
}
template __global__ void scaled<at::Half, at::Half>(const at::Half*, const at::Half*, float, at::Half*);
__global__ void mixed(const at::Half* x, unsigned short* bits, float* y, c10::complex<float>* z, at::Half* sum) {
  const at::Half h = x[threadIdx.x];
  bits[threadIdx.x] = h.x;
  y[threadIdx.x] = h * 0.5f + (h + h) * 2 + h / 4.0 - 1.f * h;
  if (h > 1.f && h < std::numeric_limits<at::Half>::max()) y[threadIdx.x] += 1000;
  z[threadIdx.x] = z[threadIdx.x] * c10::complex<float>(0, 1) + 1.f;
  gpuAtomicAdd(sum, at::Half(1));
}
"""


def test_half_is_a_type_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "types.cu"
    file.write_text(TYPES)
    x = np.arange(32, dtype=np.float16)
    z = (np.arange(32) + 2j).astype(np.complex64)
    empty = fl.Empty((32,), "float32")
    given = {"x": x, "bits": fl.Empty((32,), "uint16"), "y": empty, "z": z.view("f4"), "sum": np.zeros(1, "f2")}
    run = fl.emulate_file(file, given, kernel="mixed", grid=1, block=32)
    assert run.passed, run
    assert run.arrays["bits"].tolist() == x.view("u2").tolist()
    assert run.arrays["y"].tolist() == (np.arange(32) * 3.75 + 1000 * (np.arange(32) > 1)).tolist()
    assert run.arrays["z"].view("c8").tolist() == (z * 1j + 1).tolist()
    assert run.arrays["sum"] == 32
    given = {"x": x, "w": x, "inv": 0.5, "y": fl.Empty((32,), "float16")}
    run = fl.emulate_file(file, given, kernel="scaled", grid=1, block=32)
    assert run.arrays["y"].tolist() == (x * (x - 1) / 2).tolist()


RANDOM = """
#include <curand_kernel.h>
template <class State>
__device__ void draw(unsigned long long seed, unsigned long long part, unsigned long long from, unsigned* y) {
  State s;
  curand_init(seed, part, from, &s);
  for (int i = 0; i < 3; ++i) y[i] = curand(&s);
  y[3] = __float_as_uint(curand_uniform(&s));
}
__global__ void words(unsigned* y) {
  draw<curandStatePhilox4_32_10_t>(0, 0, 1, y);
  draw<curandStatePhilox4_32_10_t>(1234, 77, 123456789012, y + 4);
  draw<curandState>(0, 1, 0, y + 8);
  curandStatePhilox4_32_10_t s;
  curand_init(5, 3, 2, &s);
  const uint4 four = curand4(&s);
  y[12] = four.x, y[13] = four.y, y[14] = four.z, y[15] = four.w;
}
"""


def test_random_words_are_curands(tmp_path: Path) -> None:
    """What cuRAND's own header (12.9) leaves, compiled for the host."""
    file = tmp_path / "random.cu"
    file.write_text(RANDOM)
    run = fl.emulate_file(file, {"y": fl.Empty((16,), "uint32")}, grid=1, block=1)
    assert run.passed, run
    assert [f"{word:08x}" for word in run.arrays["y"]] == [
        "e169c58d", "bc57ac4c", "9b00dbd8", "3f78e4cd", "df63bf5c", "b7932164", "59eea321", "3d4e148d",
        "ebc63fb7", "75da7152", "555de696", "3ebebaff", "9bd85016", "328c67e4", "539bcffe", "a3c82c13",
    ]  # fmt: skip


CUPY = """
#include <cupy/carray.cuh>
#include <cupy/complex.cuh>
#include <cupy/math_constants.h>
#include <thrust/complex.h>
#include <pycuda-complex.hpp>
extern "C" __global__ void numbers(complex<float>* z, thrust::complex<double>* w, pycuda::complex<float>* v, float16* h) {
  z[0] = z[0] * complex<float>(0, 1);
  w[0] = exp(w[0]) / thrust::abs(w[0]) + CUDART_PI;
  v[0] = conj(v[0]) - 1.f;
  h[0] = __float2half(2.f);
}
"""


def test_complex_numbers_of_cupy_thrust_and_pycuda(tmp_path: Path) -> None:
    file = tmp_path / "cupy.cu"
    file.write_text(CUPY)
    one = 1 + 2j
    given = [np.array([one], kind).view(part) for kind, part in (("c8", "f4"), ("c16", "f8"), ("c8", "f4"))]
    run = fl.emulate_file(file, [*given, np.zeros(1, "f2")], grid=1, block=1)
    assert run.passed, run
    assert run.arrays["z"].view("c8") == one * 1j
    assert abs(run.arrays["w"].view("c16")[0] - (np.exp(one) / abs(one) + np.pi)) < 1e-14
    assert run.arrays["v"].view("c8") == one.conjugate() - 1
    assert run.arrays["h"] == 2
