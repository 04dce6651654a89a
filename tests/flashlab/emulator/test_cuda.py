"""Plain kernels, as anybody writes them, on the emulator: right numbers by NumPy's judgement, and no finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.run import nvrtc
from simulator.dtypes import numpy_dtype
from tests.tiers import examples

pytestmark = pytest.mark.compiler

CUDA = Path(__file__).parent / "cuda"
A_FEW = examples(12)


def run(file: str, kernel: str, grid: Any, block: Any, arguments: dict[str, Any], **options: Any) -> fl.FileRun:
    """One kernel of a file of `cuda/`; nothing may be wrong with it."""
    ran = fl.emulate_file(CUDA / file, arguments, kernel=kernel, grid=grid, block=block, **options)
    assert ran.complaints() == []
    return ran


def blocks(n: int, size: int) -> int:
    return max(1, -(-n // size))


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.nvrtc
@pytest.mark.parametrize("path", sorted(set(CUDA.glob("*.cu")) - {CUDA / "wmma.cu"}), ids=lambda path: path.stem)
def test_the_kernels_are_cuda(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what the emulator runs is what NVIDIA's compiler takes; the whole mma.h comes only with nvcc
    monkeypatch.setattr("kernels_cu.source", lambda name: CUDA / f"{name}.cu")  # pyright: ignore
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    nvrtc.compile_kernel(path.stem, ("-DINFINITY=__int_as_float(0x7f800000)",), arch="sm_90")


@A_FEW
@given(n=st.integers(1, 700), block=st.sampled_from([1, 31, 32, 33, 128, 1024]))
def test_add(n: int, block: int) -> None:
    a, b = floats(n), floats(n, seed=1)
    ran = run("basics.cu", "add", blocks(n, block), block, {"a": a, "b": b, "c": fl.Empty((n,)), "n": n})
    assert np.array_equal(ran.arrays["c"], a + b)


@A_FEW
@given(n=st.integers(1, 300), grid=st.integers(1, 4))
def test_vectors_of_four(n: int, grid: int) -> None:
    x = floats(n, 4)
    ran = run("basics.cu", "scale4", grid, 64, {"x": x, "y": fl.Empty((n, 4)), "factor": 1.5, "n": n})
    assert np.array_equal(ran.arrays["y"], x * np.float32(1.5))


@A_FEW
@given(rows=st.integers(1, 80), columns=st.integers(1, 80), pad=st.integers(0, 1))
def test_transpose(rows: int, columns: int, pad: int) -> None:
    x = floats(rows, columns)
    arguments = {"in": x, "out": fl.Empty((columns, rows)), "rows": rows, "columns": columns}
    ran = run("basics.cu", f"transpose<{pad}>", (blocks(columns, 32), blocks(rows, 32)), (32, 8), arguments)
    assert np.array_equal(ran.arrays["out"], x.T)


@A_FEW
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(1, 40),
    kind=st.sampled_from([("float", "f4"), ("half", "f2")]),
)
def test_matmul(m: int, n: int, k: int, kind: tuple[str, str]) -> None:
    name, dtype = kind
    a, b = floats(m, k).astype(dtype), floats(k, n, seed=1).astype(dtype)
    arguments = {"a": a, "b": b, "c": fl.Empty((m, n)), "m": m, "n": n, "k": k}
    ran = run("basics.cu", f"matmul<{name}>", (blocks(n, 16), blocks(m, 16)), (16, 16), arguments)
    assert np.allclose(ran.arrays["c"], a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


@A_FEW
@given(rows=st.integers(1, 5), pairs=st.integers(1, 100))
def test_two_halves_at_a_time(rows: int, pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    x, v = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((rows, 2 * pairs), (2 * pairs,)))
    ran = run("basics.cu", "dot2", rows, 32, {"x": x, "v": v, "out": fl.Empty((rows,), "float16"), "pairs": pairs})
    assert np.array_equal(ran.arrays["out"], x @ v)  # small integers: exact in either order


@A_FEW
@given(n=st.integers(1, 500), block=st.sampled_from([32, 40, 128]))
def test_stencil_with_halo_and_constants(n: int, block: int) -> None:
    x = floats(n)
    arguments = {"x": x, "y": fl.Empty((n,)), "n": n}
    ran = run("basics.cu", "stencil", blocks(n, block), block, arguments, sram=4 * (block + 6))
    want = np.convolve(np.pad(x, 3), [0.5, 1, 2, 4, 2, 1, 0.5], mode="valid")
    assert np.allclose(ran.arrays["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [("float", "f4"), ("double", "f8"), ("unsigned char", "u1"), ("half", "f2")]
)
def test_dynamic_shared_memory_of_any_type(name: str, dtype: str) -> None:
    x = np.arange(4 * 48).reshape(4, 48).astype(dtype)
    ran = run(
        "basics.cu", f"reversed<{name}>", 4, 48, {"x": x, "y": fl.Empty(x.shape, x.dtype.name)}, sram=48 * x.itemsize
    )
    assert np.array_equal(ran.arrays["y"], x[:, ::-1])


@A_FEW
@given(width=st.integers(1, 50), height=st.integers(1, 20))
def test_structs_and_grids_of_two_dimensions(width: int, height: int) -> None:
    points, scale, shift = floats(height, width, 3), floats(3, seed=1), floats(3, seed=2)
    arguments = {
        "in": points,
        "out": fl.Empty(points.shape),
        "map": np.concatenate([scale, shift]),
        "extent": np.array([width, height], np.int32),
    }
    ran = run("basics.cu", "affine", (blocks(width, 16), blocks(height, 4)), (16, 4), arguments)
    assert np.allclose(ran.arrays["out"], points * scale + shift, atol=1e-6)


@A_FEW
@given(n=st.integers(1, 2000), block=st.sampled_from([32, 128, 256]))
def test_sums(n: int, block: int) -> None:
    x = np.random.default_rng(n).integers(-9, 10, n).astype(np.float32)  # exact in any order
    arguments = {"x": x, "out": np.zeros(1, np.float32), "n": n}
    tree = run("reductions.cu", "sum_by_tree", blocks(n, block), block, arguments, sram=4 * block)
    shuffles = run("reductions.cu", "sum_by_shuffles", 1, block, arguments)
    assert tree.arrays["out"] == shuffles.arrays["out"] == x.sum()


@A_FEW
@given(rows=st.integers(1, 4), n=st.integers(1, 400), block=st.sampled_from([32, 128, 256]))
def test_softmax(rows: int, n: int, block: int) -> None:
    x = 5 * floats(rows, n)
    ran = run("reductions.cu", "softmax", rows, block, {"x": x, "y": fl.Empty((rows, n)), "n": n})
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    assert np.allclose(ran.arrays["y"], powers / powers.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-7)
    assert ran.launched.exp == 2 * rows * n


@A_FEW
@given(n=st.integers(1, 3000), grid=st.integers(1, 4))
def test_histogram(n: int, grid: int) -> None:
    x = np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
    ran = run("reductions.cu", "histogram", grid, 96, {"x": x, "counts": np.zeros(256, np.uint32), "n": n})
    assert np.array_equal(ran.arrays["counts"], np.bincount(x, minlength=256))


@A_FEW
@given(n=st.integers(1, 512), block=st.sampled_from([512, 1024]))
def test_scan(n: int, block: int) -> None:
    x = np.random.default_rng(n).integers(-99, 100, n).astype(np.int32)
    arguments = {"x": x, "y": fl.Empty((n,), "int32"), "n": n}
    ran = run("reductions.cu", "scan", 1, block, arguments, sram=8 * block)
    assert np.array_equal(ran.arrays["y"], np.cumsum(x))


def test_votes_matches_and_reductions() -> None:
    x = np.random.default_rng(0).integers(-3, 4, 32).astype(np.int32)
    out = (
        run("reductions.cu", "votes", 1, 32, {"x": x, "out": fl.Empty((8, 32), "uint32")})
        .arrays["out"]
        .astype(np.int64)
    )

    def mask(lanes: Any) -> int:
        return int(sum(1 << lane for lane in np.flatnonzero(lanes)))

    assert (out[0] == mask(x > 0)).all()
    assert out[1].tolist() == [mask(x == v) for v in x]
    assert (out[2] == (2 | bool((x > 2).any()))).all()
    assert (out[3].astype(np.int32) == x.sum()).all()
    assert (out[4] == x.max()).all()
    lanes = np.arange(32)
    assert np.array_equal(out[5].astype(np.int32), x[np.where(lanes % 8 >= 3, lanes - 3, lanes)])
    assert (out[6] == 32).all()
    assert (out[7] == (x > 0).sum()).all()


@A_FEW
@given(tiles=st.integers(1, 6))
def test_copies_in_the_background(tiles: int) -> None:
    x = floats(tiles, 128)
    ran = run("pipeline.cu", "twice", 1, 32, {"x": x, "y": fl.Empty((tiles, 128)), "tiles": tiles})
    assert np.array_equal(ran.arrays["y"], 2 * x[:, ::-1])
    moved = {row.op: row.bytes for row in ran.launched.moved if row.tensor == "x"}
    assert moved == {"ldgsts": x.nbytes}


@A_FEW
@given(n=st.integers(1, 64))
def test_narrow_copies_end_in_zeros(n: int) -> None:
    x = floats(n)
    y = run("pipeline.cu", "narrow", 1, 32, {"x": x, "y": fl.Empty((96,)), "n": n}).arrays["y"]
    whole = np.zeros(64, np.float32)
    whole[:n] = x
    assert np.array_equal(y, np.concatenate([whole[31::-1], whole[63:31:-1], whole[31::-1]]))


@pytest.mark.alike(1)
@pytest.mark.parametrize("grid", [1, 3])
def test_a_lock_is_taken_in_turns(grid: int) -> None:
    arguments = {"lock": np.zeros(1, np.int32), "value": np.zeros(1, np.int32)}
    assert run("pipeline.cu", "locked", grid, 64, arguments).arrays["value"] == 2 * 64 * grid


def test_integers_and_bits() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 2**32, 256, dtype=np.uint32) for _ in range(2))
    x[:6] = [0, 1, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000]  # NaN and the infinities among them
    arguments = {"x": x, "y": y, "out": fl.Empty((13, 256), "uint32"), "n": 256}
    out = run("intrinsics.cu", "bits", 1, 256, arguments).arrays["out"]
    text = [f"{v:032b}" for v in x]
    a, b = x.astype(object), y.astype(object)
    both = [(int(q) << 32) | int(p) for p, q in zip(x, y, strict=True)]
    signed = x.view(np.int32).astype(np.int64), y.view(np.int32).astype(np.int64)
    assert out[0].tolist() == [t.count("1") for t in text]
    assert out[1].tolist() == [len(t) - len(t.lstrip("0")) for t in text]
    assert out[2].tolist() == [t[::-1].find("1") + 1 for t in text]
    assert out[3].tolist() == [int(t[::-1], 2) for t in text]
    assert out[4].tolist() == [int(p) * int(q) >> 32 for p, q in zip(a, b, strict=True)]
    assert np.array_equal(out[5], (signed[0] * signed[1] >> 32).astype(np.uint32))
    bytes_a, bytes_b = x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)
    assert np.array_equal(
        out[6].view(np.uint8).reshape(-1, 4), np.stack([bytes_a[:, 0], bytes_b[:, 0], bytes_a[:, 1], bytes_b[:, 1]], 1)
    )
    assert out[7].tolist() == [(v << 7 >> 32) & 0xFFFFFFFF for v in both]
    assert out[8].tolist() == [(v >> 7) & 0xFFFFFFFF for v in both]
    dots = (bytes_a.view(np.int8).astype(np.int64) * bytes_b.view(np.int8)).sum(axis=1) + 5
    assert np.array_equal(out[9].view(np.int32), dots)
    values = x.view(np.float32).astype(np.float64)
    numbers = np.nan_to_num(values, nan=0.0, posinf=1e300, neginf=-1e300)
    assert np.array_equal(out[10].view(np.int32), np.clip(np.rint(numbers), -(2**31), 2**31 - 1).astype(np.int32))
    assert np.array_equal(out[11], np.clip(np.trunc(numbers), 0, 2**32 - 1).astype(np.uint32))
    assert np.array_equal(out[12].view(np.float32), np.clip(np.nan_to_num(numbers), 0, 1).astype(np.float32))


def test_atomics() -> None:
    n = 5 * 96
    words = np.array([0, n, 0, n, 0xFFFFFFFF, 0, 0, 0, 0, 7, 0], np.uint32)
    arguments = {
        "words": words,
        "wide": np.zeros(1, np.uint64),
        "extremes": np.array([-n, 0], np.int32),
        "sum": np.zeros(1, np.float32),
        "precise": np.zeros(1),
    }
    left = run("intrinsics.cu", "integers", 5, 96, arguments).arrays
    t = np.arange(n)
    assert left["words"].tolist() == [t.sum(), 0, n - 1, 0, 0, 0xFFFFFFFF, np.bitwise_xor.reduce(t), 0, 0, 8, 3]
    assert left["wide"] == n << 32
    assert left["extremes"].tolist() == [0, 1 - n]
    assert (left["sum"], left["precise"]) == (n / 2, n / 4)


def test_the_last_block_adds_up() -> None:
    arguments = {"tickets": fl.Empty((4,), "uint32"), "total": np.zeros(1, np.uint32)}
    for _ in range(2):  # the counter ends where it began
        left = run("reductions.cu", "count_up", 4, 32, arguments).arrays
        assert left["tickets"].tolist() == [1, 2, 3, 4]
        assert left["total"] == 5


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("value", "dtype", "total"),
    [("half", "float16", "float"), ("half", "float16", "half"), ("nv_bfloat16", "bfloat16", "float")],
)
@pytest.mark.parametrize("layout", ["row_major", "col_major"])
def test_tensor_cores(value: str, dtype: str, total: str, layout: str) -> None:
    m, n, k = 32, 64, 48
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, shape).astype(numpy_dtype(dtype)) for shape in ((m, k), (k, n)))
    c = rng.integers(-9, 10, (m, n)).astype(np.float16 if total == "half" else np.float32)
    arguments = {
        "a": a,
        "b": b if layout == "row_major" else np.ascontiguousarray(b.T),
        "c": c,
        "n": n,
        "k": k,
        "scale": 2.0,
    }
    kernel = f"tensor<{value}, {total}, wmma::{layout}>"
    ran = run("wmma.cu", kernel, (n // 32, m // 16), (32, 2), arguments)
    wide = a.astype(np.float32), b.astype(np.float32)
    assert np.array_equal(ran.arrays["c"], (2 * wide[0] @ wide[1] + c).astype(c.dtype))  # small integers: exact
    assert ran.launched.flops == 2 * m * n * k
