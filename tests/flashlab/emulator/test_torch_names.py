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
