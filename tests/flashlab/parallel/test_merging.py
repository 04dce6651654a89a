"""The kernel that merges a partial output into another, on the emulator: against `fl.merge`, on rows that lie apart."""

from __future__ import annotations

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run import nvrtc
from simulator.dtypes import Array, numpy_dtype

DTYPES = {"float16": 1, "bfloat16": 2}
SOURCE = kernels_cu.include_dir().parents[1] / "flashlab" / "parallel" / "merge.cu"
B, H, ROWS, APART, D = 2, 3, 5, 9, 24


def bits(x: Array) -> Array:
    return x.view(np.uint8)


@pytest.mark.compiler
@pytest.mark.parametrize(("dtype", "own_float"), [("bfloat16", 0), ("bfloat16", 1), ("float16", 0)])
def test_a_part_joins_in_place(dtype: str, own_float: int) -> None:
    random = np.random.default_rng(0)
    storage = numpy_dtype(dtype)
    whole = random.standard_normal((B, H, APART, D)).astype(np.float32 if own_float else storage)
    logs, part_lse = (random.standard_normal(shape).astype(np.float32) for shape in ((B, H, APART), (B, H, ROWS)))
    part = random.standard_normal((B, H, ROWS, D)).astype(storage)
    logs[0, 1, APART - ROWS :] = -np.inf  # rows that saw no key
    part_lse[0, 1, 2:] = -np.inf
    whole[0, 1, APART - ROWS :], part[0, 1, 2:] = 0, 0
    own, log = np.ascontiguousarray(whole), np.ascontiguousarray(logs)
    skipped = APART - ROWS
    run = fl.emulate_file(
        SOURCE,
        {
            "own": bits(own).reshape(-1)[skipped * D * own.itemsize :], "part": bits(part).reshape(-1),
            "own_lse": log.reshape(-1)[skipped:], "part_lse": part_lse, "lse": fl.Empty(part_lse.shape),
            "own_batch": H * APART * D, "own_head": APART * D, "own_row": D, "lse_batch": H * APART, "lse_head": APART,
            "heads": H, "rows": ROWS, "columns": D, "all_rows": B * H * ROWS,
        },
        grid=-(-B * H * ROWS * D // 8 // 64), block=64, macros={"FL_DTYPE": DTYPES[dtype], "OWN_FLOAT": own_float},
        includes=[kernels_cu.include_dir()],
    )  # fmt: skip
    assert run.complaints() == []
    right, right_lse = fl.merge(
        [whole[:, :, skipped:].astype(np.float32), part.astype(np.float32)], [logs[:, :, skipped:], part_lse]
    )
    found = bits(whole).copy().reshape(-1)
    found[skipped * D * own.itemsize :] = run.arrays["own"]
    found = found.view(whole.dtype).reshape(whole.shape)
    np.testing.assert_array_equal(found[:, :, :skipped], whole[:, :, :skipped])  # rows that don't join stay
    one = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(
        found[:, :, skipped:].astype(np.float32), right, rtol=1e-6 if own_float else 1.01 * one, atol=1e-6
    )
    np.testing.assert_allclose(run.arrays["lse"], right_lse, atol=1e-6)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_it_compiles_without_spills(arch: str) -> None:
    for dtype in ("float16", "bfloat16") if arch != "sm_75" else ("float16",):
        for own_float in (0, 1):
            options = [
                *nvrtc.OPTIONS, f"-DFL_DTYPE={DTYPES[dtype]}", f"-DOWN_FLOAT={own_float}", f"-arch={arch}",
                f"-I{kernels_cu.include_dir()}", "--ptxas-options=-v", "--ptxas-options=-warn-spills",
            ]  # fmt: skip
            compiled = nvrtc._compile_text(nvrtc._nvrtc(), SOURCE.read_bytes(), "merge.cu", options, ptx=False)  # pyright: ignore
            assert not compiled.warnings and not compiled.spills
