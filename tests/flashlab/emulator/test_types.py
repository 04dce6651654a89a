"""The emulator's small floats, bit for bit those of NumPy and ml_dtypes, on all their bit patterns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

FILE = Path(__file__).parent / "cuda" / "types.cu"
BITS = np.arange(65536, dtype=np.uint16)
FORMATS = {
    "half": np.float16,
    "bfloat": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def run(kernel: str, n: int, arguments: dict[str, Any]) -> dict[str, Any]:
    ran = fl.emulate_file(FILE, arguments, kernel=kernel, grid=-(-n // 256), block=256)
    assert not ran.launched.findings
    return dict(ran.arrays)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Equal to the bit, but any NaN is as good as another."""
    assert a.dtype == b.dtype
    wide = a.astype(np.float32), b.astype(np.float32)
    return bool(
        (
            (np.isnan(wide[0]) & np.isnan(wide[1]))
            | ((wide[0] == wide[1]) & (np.signbit(wide[0]) == np.signbit(wide[1])))
        ).all()
    )


def hard_cases() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Every upper half of a float, with lower halves on, beside and far from where a rounding is decided."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((BITS.astype(np.uint32)[:, None] << 16) | lower).reshape(-1).view(np.float32)


def test_to_float() -> None:
    outputs = {name: fl.Empty((65536,)) for name in FORMATS}
    left = run("to_float", 65536, {"bits": BITS, **outputs})
    for name, dtype in FORMATS.items():
        wide = np.dtype(dtype).itemsize
        bits = BITS if wide == 2 else BITS.astype(np.uint8)
        assert same(left[name], bits.view(dtype).astype(np.float32)), name


def test_from_float() -> None:
    x = hard_cases()
    n = len(x)
    outputs = {name: fl.Empty((n,), f"uint{8 * np.dtype(dtype).itemsize}") for name, dtype in FORMATS.items()}
    left = run("from_float", n, {"x": x, **outputs, "n": n})
    for name, dtype in FORMATS.items():
        # the formats of 8 bits saturate with CUDA's types, infinities too; with ml_dtypes they don't
        greatest = {"e4m3": 448.0, "e5m2": 57344.0}[name] if np.dtype(dtype).itemsize == 1 else np.inf
        with np.errstate(over="ignore", invalid="ignore"):
            want = np.clip(x, -greatest, greatest).astype(dtype)
        assert same(left[name].view(dtype), want), name


def test_directed_roundings() -> None:
    x = hard_cases()
    x = x[np.isfinite(x)]
    n = len(x)
    zero, up, down = run("directed", n, {"x": x, "out": fl.Empty((3, n), "float16"), "n": n})["out"]
    with np.errstate(over="ignore"):
        near = x.astype(np.float16)
    wide = near.astype(np.float32)
    over, under = np.nextafter(near, np.float16(np.inf)), np.nextafter(near, np.float16(-np.inf))
    assert np.array_equal(up, np.where(wide < x, over, near))
    assert np.array_equal(down, np.where(wide > x, under, near))
    assert np.array_equal(zero, np.where(x > 0, down, up))  # pyright: ignore


@pytest.mark.alike(1)
@pytest.mark.parametrize(("name", "dtype"), [("half", np.float16), ("nv_bfloat16", ml_dtypes.bfloat16)])
def test_arithmetic(name: str, dtype: Any) -> None:
    # every pattern as the first operand; what it meets is random, or near it, so that differences cancel
    rng = np.random.default_rng(0)
    others = [rng.integers(0, 65536, 65536).astype(np.uint16), BITS ^ rng.integers(0, 4, 65536).astype(np.uint16)]
    a, b = np.tile(BITS, 2), np.concatenate(others)
    c = rng.integers(0, 65536, len(a)).astype(np.uint16)
    if dtype is np.float16:  # a tie that the last addend breaks, far below
        tie = np.array([1 + 2**-10, 1.5, 2**-24], np.float16).view(np.uint16)
        a[-1], b[-1], c[-1] = tie
    reach = 28 if dtype is np.float16 else 20  # factors between product and addend with which float64 is exact
    n = len(a)
    x, y, z = (bits.view(dtype) for bits in (a, b, c))
    arguments = {
        "a": x,
        "b": y,
        "c": z,
        "out": fl.Empty((8, n), np.dtype(dtype).name),
        "flags": fl.Empty((n,), "uint8"),
        "n": n,
    }
    left = run(f"arithmetic<{name}>", n, arguments)
    # float64 sums and products of such operands are exact enough to be rounded once more, all but fma's
    with np.errstate(all="ignore"):
        p, q, r = (v.astype(np.float64) for v in (x, y, z))

        def rounded(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
            return values.astype(np.float32).astype(dtype) if dtype is not np.float16 else values.astype(dtype)

        sums = rounded(p + q)
        wanted = [sums, rounded(p - q), rounded(p * q), rounded(p / q), None, rounded(np.sqrt(p)),
                  rounded(sums.astype(np.float64) * q), np.abs(x)]  # fmt: skip
        for i, want in enumerate(wanted):
            if want is not None:
                assert same(left["out"][i], want), f"row {i}"
        sure = np.isfinite(p * q + r) & ((p * q == 0) | (r == 0) | (np.abs(np.log2(np.abs(p * q / r))) < reach))
        assert sure.sum() > n / 20
        assert same(left["out"][4][sure], rounded(p * q + r)[sure])
    want = (p < q) | (p == q) << 1 | (p >= q) << 2 | (p != q) << 3 | np.isnan(p) << 4
    # __hne and != differ on NaN: the intrinsic is ordered
    unordered = np.isnan(p) | np.isnan(q)
    assert np.array_equal(left["flags"], np.where(unordered, want & ~8, want))  # pyright: ignore


@pytest.mark.alike(1)
@pytest.mark.parametrize("names", [("half", "half2", np.float16), ("nv_bfloat16", "nv_bfloat162", ml_dtypes.bfloat16)])
def test_pairs_do_the_same_twice(names: tuple[str, str, Any]) -> None:
    one, pair, dtype = names
    a, b, c = (np.random.default_rng(i).permutation(BITS).view(dtype) for i in range(3))
    arguments = {"a": a, "b": b, "c": c, "differences": np.zeros(1, np.uint32), "n": len(a) // 2}
    assert run(f"pairs<{one}, {pair}>", len(a) // 2, arguments)["differences"] == 0


VECTORS = """
#include <cuda_fp16.h>
union Bits { float4 four; half2 two[4]; float one[4]; };
struct Pair { int n; float2 both; };
__device__ Bits doubled(Bits x) { for (float& one : x.one) one *= 2; return x; }
__global__ void vectors(const float4* x, float4* y, float2* z) {
  Bits bits, copy;
  bits.four = x[threadIdx.x];
  copy = doubled(bits);
  y[threadIdx.x] = copy.four;
  float4 sum = x[threadIdx.x];
  sum.x += sum.y;
  sum.z = sum.x > 0 ? sum.w : sum.z;
  y[threadIdx.x + 32] = sum;
  Pair pair{1, {sum.x, sum.y}}, other = pair;
  z[threadIdx.x] = other.both;
}
"""


def test_vectors_are_trivial_and_move_in_one_piece(tmp_path: Path) -> None:
    """A union may hold a float4, and still every float4 is one access."""
    (tmp_path / "vectors.cu").write_text(VECTORS)
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    given = {"x": x, "y": fl.Empty((64, 4)), "z": fl.Empty((32, 2))}
    run = fl.emulate_file(tmp_path / "vectors.cu", given, grid=1, block=32)
    assert run.passed, run
    sums = x.copy()
    sums[:, 0] += x[:, 1]
    sums[:, 2] = np.where(sums[:, 0] > 0, x[:, 3], x[:, 2])
    np.testing.assert_array_equal(run.arrays["y"], np.concatenate([2 * x, sums]))
    np.testing.assert_array_equal(run.arrays["z"], sums[:, :2])
    moved = {(row.tensor, row.op): (row.instructions, row.bytes) for row in run.launched.moved}
    assert (
        moved == {("x", "ld"): (2, 1024), ("y", "st"): (2, 1024), ("z", "st"): (1, 256)} and run.launched.plain == 160
    )
