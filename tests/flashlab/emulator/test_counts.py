"""What the emulator counts of plain accesses: sectors of HBM and passes over the banks, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.emulator import Moved
from tests.tiers import examples

pytestmark = pytest.mark.compiler

BASICS = Path(__file__).parent / "cuda" / "basics.cu"


def moved(
    kernel: str, grid: Any, block: Any, arguments: dict[str, Any], **options: Any
) -> dict[tuple[str, str], Moved]:
    """What a sound kernel of `basics.cu` moved, by tensor and instruction."""
    ran = fl.emulate_file(BASICS, arguments, kernel=kernel, grid=grid, block=block, **options)
    assert ran.complaints() == []
    rows = {(row.tensor, row.op): row for row in ran.launched.moved}
    assert len(rows) == len(ran.launched.moved)
    return rows


def test_shuffles_are_counted_by_warps(tmp_path: Path) -> None:
    """Five of 32 bits, and one of 64, which is two."""
    path = tmp_path / "shuffles.cu"
    path.write_text(
        "__global__ void shuffles(float* y) {\n"
        "  float x = threadIdx.x;\n"
        "  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffff, x, mask);\n"
        "  y[threadIdx.x] = static_cast<float>(__shfl_sync(0xffffffff, static_cast<double>(x), 0));\n"
        "}\n"
    )
    ran = fl.emulate_file(path, {"y": fl.Empty((96,))}, grid=1, block=96)
    assert ran.passed and ran.launched.shuffles == 3 * (5 + 2)


@examples(12)
@given(n=st.integers(1, 500))
def test_neighbours_share_sectors(n: int) -> None:
    zeros = np.zeros(n, np.float32)
    rows = moved("add", -(-n // 128), 128, {"a": zeros, "b": zeros, "c": fl.Empty((n,)), "n": n})
    warps = [min(32, n - first) for first in range(0, n, 32)]  # lanes inside
    for key in (("a", "ld"), ("b", "ld"), ("c", "st")):
        row = rows[key]
        assert (row.instructions, row.bytes) == (len(warps), 4 * n)
        assert row.sectors == sum(-(-4 * lanes // 32) for lanes in warps)


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (32, 32)])
def test_strides_cost_sectors(stride: int, sectors: int) -> None:
    x = np.zeros(32 * stride, np.float32)
    row = moved("strided", 1, 32, {"x": x, "y": fl.Empty((32,)), "stride": stride})["x", "ld"]
    assert (row.instructions, row.bytes, row.sectors) == (1, 128, sectors)


def test_one_address_is_one_sector_and_one_bank() -> None:
    row = moved("strided", 1, 32, {"x": np.zeros(1, np.float32), "y": fl.Empty((32,)), "stride": 0})["x", "ld"]
    assert (row.bytes, row.sectors) == (4, 1)


def test_vectors_of_four_are_one_instruction() -> None:
    x = np.zeros((64, 4), np.float32)
    rows = moved("scale4", 1, 64, {"x": x, "y": fl.Empty(x.shape), "factor": 1.0, "n": 64})
    for key in (("x", "ld"), ("y", "st")):
        assert (rows[key].instructions, rows[key].bytes, rows[key].sectors) == (2, 1024, 32)


@pytest.mark.alike(1)
@pytest.mark.parametrize(("pad", "conflicts"), [(0, 32), (1, 1)])
def test_padding_ends_bank_conflicts(pad: int, conflicts: int) -> None:
    x = np.zeros((64, 64), np.float32)
    rows = moved(f"transpose<{pad}>", (2, 2), (32, 8), {"in": x, "out": fl.Empty((64, 64)), "rows": 64, "columns": 64})
    warps = 64 * 64 // 32
    assert (rows["tile", "st"].wavefronts, rows["tile", "st"].ideal) == (warps, warps)
    assert (rows["tile", "ld"].wavefronts, rows["tile", "ld"].ideal) == (conflicts * warps, warps)
    assert rows["in", "ld"].sectors == rows["out", "st"].sectors == 4 * warps  # coalesced both ways


def test_a_tile_read_by_rows_and_columns() -> None:
    # a warp is two rows of 16: of `as` it reads two words that all share, of `bs` 16 that two lanes share
    n = 32
    x = np.zeros((n, n), np.float32)
    arguments = {"a": x, "b": x, "c": fl.Empty((n, n)), "m": n, "n": n, "k": n}
    rows = moved("matmul<float>", (2, 2), (16, 16), arguments)
    warps, steps = 4 * 8, 2
    for name, distinct in (("as", 2), ("bs", 16)):
        row = rows[name, "ld"]
        assert row.instructions == warps * steps * 16
        assert row.bytes == row.instructions * distinct * 4
        assert row.wavefronts == row.ideal == row.instructions
        assert rows[name, "st"].bytes == warps * steps * 128
    assert rows["a", "ld"].bytes == rows["b", "ld"].bytes == warps * steps * 128


OVERLAP = """
#define FL_DTYPE 0
#include "memory.cuh"
__global__ void overlap(const float* x, float* y) {
  __shared__ __align__(128) float tile[2][128];
  const int t = threadIdx.x;
  for (int n = 0; n < 2; ++n) {
    if (t < 32) copy_async(static_cast<unsigned>(__cvta_generic_to_shared(&tile[n][4 * t])), x + 128 * n + 4 * t, 16);
    copy_commit();
  }
  copy_wait<PENDING>();
  barrier();
  y[t] = tile[0][t];
  copy_wait<0>();
  barrier();
}
"""


@pytest.mark.alike(1)
@pytest.mark.parametrize(("pending", "overlapped"), [(1, 128), (0, 0)])
def test_reads_beside_a_copy_on_its_way_are_counted(tmp_path: Path, pending: int, overlapped: int) -> None:
    file = tmp_path / "overlap.cu"
    file.write_text(OVERLAP.replace("PENDING", str(pending)), encoding="utf-8")
    arguments = {"x": np.zeros(256, np.float32), "y": fl.Empty((128,))}
    ran = fl.emulate_file(file, arguments, kernel="overlap", grid=1, block=128)
    assert ran.complaints() == []
    (row,) = (row for row in ran.launched.moved if (row.tensor, row.what) == ("tile", "sram.read"))
    assert (row.bytes, row.overlapped) == (512, overlapped)  # only the first warp copies
