"""Inline PTX of matrices against NumPy: mma.sync in its shapes, ldmatrix and its kin, wgmma by descriptors of every swizzle.

The layouts are written out as the PTX ISA has them: which element a lane's register holds, and where a descriptor's operand
lies in SRAM (canonical layouts).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import flashlab as fl

pytestmark = pytest.mark.compiler

Array = np.ndarray[Any, Any]
U = np.uint32


class Element(NamedTuple):
    """An element of a matrix: its bits, its NumPy type, the values that a test draws."""

    bits: int
    dtype: Any
    low: int
    high: int


ELEMENTS = {
    "f16": Element(16, np.float16, -8, 8),
    "bf16": Element(16, ml_dtypes.bfloat16, -8, 8),
    "tf32": Element(32, np.float32, -100, 100),
    "f64": Element(64, np.float64, -100, 100),
    "s8": Element(8, np.int8, -128, 127),
    "u8": Element(8, np.uint8, 0, 255),
    "s4": Element(4, np.int8, -8, 7),
    "u4": Element(4, np.uint8, 0, 15),
    "e4m3": Element(8, ml_dtypes.float8_e4m3fn, -8, 8),
    "e5m2": Element(8, ml_dtypes.float8_e5m2, -4, 4),
    "f32": Element(32, np.float32, -100, 100),
    "s32": Element(32, np.int32, -100, 100),
}


def draw(random: np.random.Generator, element: str, *shape: int) -> Array:
    e = ELEMENTS[element]
    return random.integers(e.low, e.high, shape, endpoint=True).astype(np.float32).astype(e.dtype)


def registers(values: Array, element: str) -> Array:
    """Elements (lanes, n) packed into registers, the first in the lowest bits."""
    bits = ELEMENTS[element].bits
    if bits == 4:
        nibbles = values.view(np.uint8) & 15
        values = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
    return np.ascontiguousarray(values).view(np.float64 if bits == 64 else U)


# Products of a warp

SHAPES = [
    # rows, depth, D, A, B
    (16, 8, "f32", "f16", "f16"),
    (16, 8, "f16", "f16", "f16"),
    (16, 16, "f16", "f16", "f16"),
    (16, 16, "f32", "bf16", "bf16"),
    (16, 8, "f32", "bf16", "bf16"),
    (16, 4, "f32", "tf32", "tf32"),
    (16, 8, "f32", "tf32", "tf32"),
    (16, 16, "s32", "s8", "s8"),
    (16, 32, "s32", "s8", "u8"),
    (8, 16, "s32", "u8", "s8"),
    (16, 64, "s32", "s4", "u4"),
    (8, 32, "s32", "u4", "s4"),
    (16, 32, "f32", "e4m3", "e5m2"),
    (16, 16, "f16", "e5m2", "e5m2"),
    (8, 4, "f64", "f64", "f64"),
    (16, 8, "f64", "f64", "f64"),
]


def _mma(index: int, rows: int, depth: int, d: str, a: str, b: str) -> str:
    bits = ELEMENTS[a].bits
    counts = [rows * 8 // 32 // (2 if d == "f16" else 1), rows * depth * bits // 1024, 8 * depth * bits // 1024]
    if bits == 64:
        counts[1:] = [rows * depth // 32, 8 * depth // 32]
    kind, letter = ("double", "d") if bits == 64 else ("unsigned", "r")
    sum_kind, sum_letter = {"f32": ("float", "f"), "f64": ("double", "d")}.get(d, ("unsigned", "r"))
    names = iter(range(100))
    of_d, of_a, of_b = ("{" + ", ".join(f"%{next(names)}" for _ in range(n)) + "}" for n in counts)
    outs = ", ".join(f'"+{sum_letter}"(c[threadIdx.x * {counts[0]} + {i}])' for i in range(counts[0]))
    ins = ", ".join(
        f'"{letter}"({x}[threadIdx.x * {n} + {i}])' for x, n in zip("ab", counts[1:], strict=True) for i in range(n)
    )
    name = f"mma.sync.aligned.m{rows}n8k{depth}.row.col.{d}.{a}.{b}.{d}"
    return (
        f"__global__ void mma{index}(const {kind}* a, const {kind}* b, {sum_kind}* c) {{\n"
        f'  asm volatile("{name} "\n "{of_d}, {of_a}, {of_b}, {of_d};\\n"\n : {outs}\n : {ins});\n}}\n'
    )


QUADS = """
__global__ void quads(const uint2* a, const uint2* b, float* c) {
  float* x = c + 8 * threadIdx.x;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
    "{%0,%1,%2,%3,%4,%5,%6,%7};"
    : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])
    : "r"(a[threadIdx.x].x), "r"(a[threadIdx.x].y), "r"(b[threadIdx.x].x), "r"(b[threadIdx.x].y));
}
"""


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ptx") / "products.cu"
    path.write_text("".join(_mma(i, *shape) for i, shape in enumerate(SHAPES)) + QUADS)
    return path


@pytest.mark.parametrize(("index", "shape"), [*enumerate(SHAPES)], ids=lambda x: str(x).replace(" ", ""))
def test_products_of_a_warp(products: Path, index: int, shape: tuple[int, int, str, str, str]) -> None:
    rows, depth, d, a_type, b_type = shape
    random = np.random.default_rng(index)
    a, b, c = draw(random, a_type, rows, depth), draw(random, b_type, depth, 8), draw(random, d, rows, 8)
    lane = np.arange(32)[:, None]
    group, thread = lane >> 2, lane % 4
    each = max(1, 32 // ELEMENTS[a_type].bits)  # elements of a register
    i = np.arange(rows * depth // 32)[None]
    register = i // each
    a_rows = group + 8 * (register % (rows // 8))
    a_columns = thread * each + i % each + 4 * each * (register // (rows // 8))
    j = np.arange(depth * 8 // 32)[None]
    b_rows = thread * each + j % each + 4 * each * (j // each)
    k = np.arange(rows * 8 // 32)[None]
    c_rows, c_columns = group + 8 * (k // 2), thread * 2 + k % 2
    sums = registers(c[c_rows, c_columns], d) if d != "s32" else c[c_rows, c_columns].view(U)
    ran = fl.emulate_file(
        products,
        {
            "a": registers(a[a_rows, a_columns], a_type),
            "b": registers(b[b_rows, group + 0 * b_rows], b_type),
            "c": sums.view(np.float32) if d == "f32" else sums,
        },
        kernel=f"mma{index}", grid=1, block=32,
    )  # fmt: skip
    assert ran.complaints() == []
    got = np.ascontiguousarray(ran.arrays["c"]).view(ELEMENTS[d].dtype)
    wide = np.float64 if d != "s32" else np.int64
    expected = (a.astype(wide) @ b.astype(wide) + c.astype(wide)).astype(ELEMENTS[d].dtype)
    assert np.array_equal(got, expected[c_rows, c_columns])
    assert ran.launched.flops == 2 * rows * 8 * depth


def test_four_products_of_quads(products: Path) -> None:
    random = np.random.default_rng(0)
    a, b = draw(random, "f16", 4, 8, 4), draw(random, "f16", 4, 4, 8)
    c = draw(random, "f32", 4, 8, 8)
    lane = np.arange(32)
    pair, place = lane % 16 // 4, lane % 4 + 4 * (lane >= 16)
    i = np.arange(8)
    row = (lane[:, None] & 1) + (i & 2) + 4 * (lane[:, None] >= 16)
    column = (i & 4) + (lane[:, None] & 2) + (i & 1)
    arguments = {
        "a": np.ascontiguousarray(a[pair, place]).view(U),
        "b": np.ascontiguousarray(b[pair, :, place]).view(U),
        "c": np.ascontiguousarray(c[pair[:, None], row, column]),
    }
    ran = fl.emulate_file(products, arguments, kernel="quads", grid=1, block=32)
    assert ran.complaints() == []
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    assert np.array_equal(ran.arrays["c"], expected[pair[:, None], row, column])


# Matrices of 8 x 8

TILES = """
__global__ void tiles(const unsigned short* x, unsigned short* y, int transposed) {
  __shared__ __align__(16) unsigned short from[32 * 24], to[32 * 24];
  int lane = threadIdx.x;
  for (int i = lane; i < 32 * 24; i += 32) from[i] = x[i], to[i] = 0;
  __syncthreads();
  unsigned in = (unsigned)__cvta_generic_to_shared(from + lane * 24), out = (unsigned)__cvta_generic_to_shared(to + lane * 24);
  unsigned r[4];
  if (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(in));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(out), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.b16 {%0}, [%1];" : "=r"(r[0]) : "l"(from + lane % 8 * 24));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared::cta.b16 {%0, %1}, [%2 + 16];" : "=r"(r[1]), "=r"(r[2]) : "r"(in));
    asm volatile("{ .reg .b32 t; ldmatrix.sync.aligned.x1.trans.m8n8.shared.b16 {t}, [%1]; "
                 "movmatrix.sync.aligned.m8n8.trans.b16 %0, t; }" : "=r"(r[3]) : "r"(in));
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(out), "r"(r[0]) : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0 + 16], {%1, %2};"
                 :: "r"(out), "r"(r[1]), "r"(r[2]) : "memory");
    out += 32;
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(out), "r"(r[3]) : "memory");
  }
  __syncthreads();
  for (int i = lane; i < 32 * 24; i += 32) y[i] = to[i];
}
"""


@pytest.mark.parametrize("transposed", [0, 1])
def test_matrices_of_eight(tmp_path: Path, transposed: int) -> None:
    (tmp_path / "tiles.cu").write_text(TILES)
    x = np.arange(32 * 24, dtype=np.uint16).reshape(32, 24)
    ran = fl.emulate_file(
        tmp_path / "tiles.cu", {"x": x, "y": fl.Empty(x.shape, "uint16"), "transposed": transposed},
        kernel="tiles", grid=1, block=32,
    )  # fmt: skip
    assert ran.complaints() == []
    y = np.zeros_like(x)
    if transposed:
        for m in range(0, 32, 8):
            y[m : m + 8, :8] = x[m : m + 8, :8].T
    else:
        y[:8, :8] = x[:8, :8]
        y[:8, 16:] = x[:8, :8]
        for m in (0, 8):
            y[m : m + 8, 8:16] = x[m : m + 8, 8:16].T
    assert np.array_equal(ran.arrays["y"], y)
    loads = sum(row.bytes for row in ran.launched.moved if row.op == "ldsm")
    assert loads == (512 if transposed else 128 + 256 + 128)


# Products of a warpgroup

GROUPS = {
    # name: D, A, B, A's and B's rows lie across the summed dimension, A in registers
    "plain": ("f32", "f16", "f16", 0, 0, False),
    "both": ("f32", "bf16", "bf16", 1, 1, False),
    "halves": ("f16", "f16", "f16", 0, 1, False),
    "tf32": ("f32", "tf32", "tf32", 0, 0, False),
    "bytes": ("s32", "s8", "u8", 0, 0, False),
    "eights": ("f32", "e5m2", "e4m3", 0, 0, False),
    "registers": ("f32", "f16", "f16", 0, 0, True),
}
COLUMNS = 24


def _wgmma(name: str, d: str, a: str, b: str, a_columns: int, b_columns: int, in_registers: bool) -> str:
    count = COLUMNS // (4 if d == "f16" else 2)
    letter, kind = ("f", "float") if d == "f32" else ("r", "unsigned")
    depth = 256 // ELEMENTS[a].bits
    majors = {1: f", {b_columns}" if in_registers else f", {a_columns}, {b_columns}"}.get(ELEMENTS[a].bits // 16, "")
    signs = ", 1, 1" if d != "s32" else ""
    to = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"+{letter}"(c[{i}])' for i in range(count))
    source = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if in_registers else f"%{count}"
    last = count + (4 if in_registers else 1)
    ins = ", ".join(f'"r"(r[{i}])' for i in range(4)) if in_registers else '"l"(da)'
    return f"""
__global__ void {name}(const uint4* x, const uint4* y, const {kind}* before, {kind}* after,
                       unsigned long long a, unsigned long long b, const unsigned* given) {{
  extern __shared__ __align__(1024) unsigned char sram[];
  uint4 *p = (uint4*)sram, *q = p + 1024;
  for (int i = threadIdx.x; i < 1024; i += 128) p[i] = x[i], q[i] = y[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  {kind} c[{count}];
  for (int i = 0; i < {count}; ++i) c[i] = before[threadIdx.x * {count} + i];
  unsigned r[4];
  for (int i = 0; i < 4; ++i) r[i] = given[4 * threadIdx.x + i];
  unsigned long long da = a + ((unsigned)__cvta_generic_to_shared(p) >> 4), db = b + ((unsigned)__cvta_generic_to_shared(q) >> 4);
  asm volatile("wgmma.fence.sync.aligned;\\n" ::: "memory");
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{last + 1}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{COLUMNS}k{depth}.{d}.{a}.{b} {{{to}}}, {source}, %{last}, p{signs}{majors};\\n}}\\n"
    : {outs} : {ins}, "l"(db), "r"(1));
  asm volatile("wgmma.commit_group.sync.aligned;\\n" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned %0;\\n" :: "n"(0) : "memory");
  for (int i = 0; i < {count}; ++i) after[threadIdx.x * {count} + i] = c[i];
}}
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ptx") / "groups.cu"
    path.write_text("".join(_wgmma(name, *row) for name, row in GROUPS.items()))
    return path


def laid_out(matrix: Array, span: int, start: int, across: int) -> tuple[Array, int]:
    """An operand (rows, depth) in 16 KB of SRAM, and its descriptor at address 0: `span` is the swizzle's width in bytes."""
    rows, depth = matrix.shape
    nbytes = matrix.itemsize
    row, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    leading, stride = (2048, 1024 if span else 128) if across else (2048, 8 * (span or 16))
    if across:
        if span:
            offset = row * nbytes // span * leading + row * nbytes % span + k % 8 * span + k // 8 * stride
        else:
            offset = row // 8 * stride + row % 8 * nbytes + k % 8 * 16 + k // 8 * leading
    elif span:
        offset = row // 8 * stride + row % 8 * span + k * nbytes
    else:
        offset = row // 8 * stride + row % 8 * 16 + k * nbytes // 16 * leading + k * nbytes % 16
    offset = offset + start
    if span:
        offset ^= (offset >> 7 & (span // 16 - 1)) << 4
    memory = np.zeros(16384, np.uint8)
    for byte in range(nbytes):
        memory[offset + byte] = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, depth, nbytes)[:, :, byte]
    swizzle = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    return memory, start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("name", GROUPS)
def test_products_of_a_warpgroup(groups: Path, name: str, span: int) -> None:
    d, a_type, b_type, a_across, b_across, in_registers = GROUPS[name]
    depth = 256 // ELEMENTS[a_type].bits
    random = np.random.default_rng(span)
    a, b = draw(random, a_type, 64, depth), draw(random, b_type, COLUMNS, depth)
    c = draw(random, "s32" if d == "s32" else "f16", 64, COLUMNS).astype(ELEMENTS[d].dtype)
    x, da = laid_out(a, span, span // 2 if not a_across else 0, a_across)
    y, db = laid_out(b, span, span // 2 if not b_across else 0, b_across)
    thread = np.arange(128)[:, None]
    i = np.arange(COLUMNS // 2)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 4 // 2)
    column = i // 4 * 8 + 2 * (thread % 4) + i % 2
    before = np.ascontiguousarray(c[row, column])
    before = before if d == "f32" else before.view(U)
    given = np.zeros((128, 4), U)
    if in_registers:
        j = np.arange(8)[None]
        rows = thread // 32 * 16 + thread % 32 // 4 + 8 * (j // 2 % 2)
        given = np.ascontiguousarray(a[rows, 2 * (thread % 4) + j % 2 + 8 * (j // 4)]).view(U)
    arguments = {
        "x": x.view(U).reshape(-1, 4), "y": y.view(U).reshape(-1, 4), "before": before,
        "after": fl.Empty(before.shape, str(before.dtype)), "a": da, "b": db, "given": given,
    }  # fmt: skip
    ran = fl.emulate_file(groups, arguments, kernel=name, grid=1, block=128, sram=32768)
    assert ran.complaints() == []
    wide = np.int64 if d == "s32" else np.float64
    expected = (a.astype(wide) @ b.astype(wide).T + c.astype(wide)).astype(ELEMENTS[d].dtype)
    got = np.ascontiguousarray(ran.arrays["after"]).view(ELEMENTS[d].dtype)
    assert np.array_equal(got, expected[row, column])
