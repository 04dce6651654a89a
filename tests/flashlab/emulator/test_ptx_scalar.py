"""Inline PTX of one thread, each instruction against NumPy: integers, bits, floats, conversions, predicates."""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import flashlab as fl
from tests.tiers import examples

pytestmark = pytest.mark.compiler

Array = np.ndarray[Any, Any]
U, S, F, H, B = np.uint32, np.int32, np.float32, np.float16, ml_dtypes.bfloat16


def _each(f: Callable[..., int], *xs: Array) -> Array:
    return np.array([f(*(int(x) for x in row)) & 0xFFFFFFFF for row in zip(*xs, strict=True)], np.uint64).astype(U)


def _pairs(kind: Any, f: Callable[..., Array], *xs: Array) -> Array:
    """Two of 16 bits in a word."""
    return np.ascontiguousarray(f(*(x.view(kind) for x in xs)).astype(kind)).view(U)


def _lop3(table: int) -> Callable[..., int]:
    def f(x: int, y: int, z: int) -> int:
        terms = ((x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z) for i in range(8) if table >> i & 1)
        result = 0
        for term in terms:
            result |= term
        return result

    return f


def _prmt(x: int, y: int, z: int) -> int:
    source = (y << 32 | x).to_bytes(8, "little")
    out = 0
    for i in range(4):
        pick = z >> 4 * i & 15
        byte = source[pick & 7]
        out |= (255 if byte & 128 else 0 if pick & 8 else byte) << 8 * i if pick & 8 else byte << 8 * i
    return out


def _bfe(x: int, y: int, z: int, signed: bool) -> int:
    first, count = y & 255, z & 255
    bits = x >> first & ((1 << count) - 1) if first < 32 else 0
    last = min(31, first + count - 1)
    if signed and count and x >> last & 1:
        width = max(0, min(count, 32 - first))
        bits |= -1 << width
    return bits


def _bfi(x: int, y: int, z: int, w: int) -> int:
    mask = ((1 << w) - 1) << z & 0xFFFFFFFF
    return y & ~mask | x << z & mask


def _to_int(x: Array, low: int, high: int, how: Callable[[Array], Array]) -> Array:
    whole = np.where(np.isnan(x), 0, np.clip(how(x.astype(np.float64)), low, high))
    return whole.astype(np.int64).astype(U)


def _f16x2(high: Array, low: Array) -> Array:
    return high.astype(F).astype(H).view(np.uint16).astype(U) << 16 | low.astype(F).astype(H).view(np.uint16)


def _bf16x2(high: Array, low: Array) -> Array:
    return high.astype(B).view(np.uint16).astype(U) << 16 | low.astype(B).view(np.uint16)


def _eights(kind: Any, largest: float) -> Callable[[Array, Array], Array]:
    def one(x: Array) -> Array:
        return np.clip(x, -largest, largest).astype(kind).view(np.uint8).astype(U)

    return lambda high, low: one(high) << 8 | one(low)


def _mini(kind: str, largest: float, x: Array) -> Array:
    return np.clip(x, -largest, largest).astype(getattr(ml_dtypes, kind)).view(np.uint8).astype(U)


# PTX, where %0 is the result and %1, %2, %3 are words, and what it is in NumPy
INTEGERS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "add.u32 %0, %1, %2;": lambda x, y, z: x + y,
    "sub.s32 %0, %1, %2;": lambda x, y, z: x - y,
    "add.sat.s32 %0, %1, %2;": lambda x, y, z: _each(
        lambda a, b: max(-(2**31), min(2**31 - 1, a + b)), x.view(S), y.view(S)
    ),
    "mul.lo.u32 %0, %1, %2;": lambda x, y, z: x * y,
    "mul.hi.u32 %0, %1, %2;": lambda x, y, z: (x.astype(np.uint64) * y >> np.uint64(32)).astype(U),
    "mul.hi.s32 %0, %1, %2;": lambda x, y, z: (x.view(S).astype(np.int64) * y.view(S) >> 32).astype(U),
    "mad.lo.s32 %0, %1, %2, %3;": lambda x, y, z: x * y + z,
    "mad.hi.u32 %0, %1, %2, %3;": lambda x, y, z: (x.astype(np.uint64) * y >> np.uint64(32)).astype(U) + z,
    "{.reg .u64 w; mul.wide.u32 w, %1, %2; cvt.u32.u64 %0, w; }": lambda x, y, z: x * y,
    "{.reg .b64 w; .reg .b32 l; mul.wide.s32 w, %1, %2; mov.b64 {l, %0}, w;}": lambda x, y, z: (
        x.view(S).astype(np.int64) * y.view(S) >> 32
    ).astype(U),
    "sad.u32 %0, %1, %2, %3;": lambda x, y, z: np.where(x > y, x - y, y - x) + z,
    "min.s32 %0, %1, %2;": lambda x, y, z: np.minimum(x.view(S), y.view(S)).view(U),
    "max.u32 %0, %1, %2;": lambda x, y, z: np.maximum(x, y),
    "abs.s32 %0, %1;": lambda x, y, z: np.abs(x.view(S).astype(np.int64)).astype(U),
    "neg.s32 %0, %1;": lambda x, y, z: -x,
    "and.b32 %0, %1, 0xffff0000;": lambda x, y, z: x & U(0xFFFF0000),
    "or.b32 %0, %1, %2;": lambda x, y, z: x | y,
    "xor.b32 %0, %1, %2;": lambda x, y, z: x ^ y,
    "not.b32 %0, %1;": lambda x, y, z: ~x,
    "shl.b32 %0, %1, %2;": lambda x, y, z: _each(lambda a, b: a << b if b < 32 else 0, x, y),
    "shr.u32 %0, %1, %2;": lambda x, y, z: _each(lambda a, b: a >> min(b, 32), x, y),
    "shr.s32 %0, %1, %2;": lambda x, y, z: _each(lambda a, b: a >> min(b, 31), x.view(S), y),
    "popc.b32 %0, %1;": lambda x, y, z: _each(lambda a: a.bit_count(), x),
    "clz.b32 %0, %1;": lambda x, y, z: _each(lambda a: 32 - a.bit_length(), x),
    "brev.b32 %0, %1;": lambda x, y, z: _each(lambda a: int(f"{a:032b}"[::-1], 2), x),
    "bfind.u32 %0, %1;": lambda x, y, z: _each(lambda a: a.bit_length() - 1, x),
    "bfe.u32 %0, %1, %2, %3;": lambda x, y, z: _each(lambda a, b, c: _bfe(a, b, c, False), x, y, z),
    "bfe.s32 %0, %1, %2, %3;": lambda x, y, z: _each(lambda a, b, c: _bfe(a, b, c, True), x, y, z),
    "bfi.b32 %0, %1, %2, 4, 9;": lambda x, y, z: _each(lambda a, b: _bfi(a, b, 4, 9), x, y),
    "lop3.b32 %0, %1, %2, %3, 0xea;": lambda x, y, z: _each(_lop3(0xEA), x, y, z),
    "lop3.b32 %0, %1, %2, %3, 150;": lambda x, y, z: x ^ y ^ z,
    "prmt.b32 %0, %1, %2, %3;": lambda x, y, z: _each(_prmt, x, y, z),
    "shf.l.wrap.b32 %0, %1, %2, %3;": lambda x, y, z: _each(lambda a, b, c: ((b << 32 | a) << c % 32) >> 32, x, y, z),
    "shf.r.clamp.b32 %0, %1, %2, %3;": lambda x, y, z: _each(lambda a, b, c: (b << 32 | a) >> min(c, 32), x, y, z),
    "{.reg .pred p, q; setp.lt.s32 p|q, %1, %2; selp.b32 %0, 1, %3, p; @q add.u32 %0, %0, 5;}": lambda x, y, z: (
        np.where(x.view(S) < y.view(S), U(1), z + U(5))
    ),
    "{.reg .pred p; setp.ne.b32 p, %1, 0; setp.hi.and.u32 p, %1, %2, p; selp.u32 %0, 1, 0, p;}": lambda x, y, z: (
        (x != 0) & (x > y)
    ).astype(U),
    "{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l};}": lambda x, y, z: x >> U(16) | x << U(16),
    "{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %1; mov.b32 %0, {d, c, b, a};}": lambda x, y, z: x.byteswap(),
    "cvt.s32.s8 %0, %1;": lambda x, y, z: (x & U(255)).astype(np.int64).astype(np.int8).astype(S).view(U),
    "cvt.sat.u8.s32 %0, %1;": lambda x, y, z: np.clip(x.view(S), 0, 255).astype(U),
    "cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;": lambda x, y, z: (
        (z << U(16))
        | (np.clip(x.view(S), -128, 127).astype(np.int8).view(np.uint8).astype(U) << U(8))
        | np.clip(y.view(S), -128, 127).astype(np.int8).view(np.uint8)
    ),
    "dp4a.u32.u32 %0, %1, %2, %3;": lambda x, y, z: (
        (x.view(np.uint8).astype(U) * y.view(np.uint8)).reshape(-1, 4).sum(1).astype(U) + z
    ),
    "dp4a.s32.s32 %0, %1, %2, %3;": lambda x, y, z: (
        (x.view(np.int8).astype(S) * y.view(np.int8)).reshape(-1, 4).sum(1).astype(S).view(U) + z
    ),
    "vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;": lambda x, y, z: (
        np.abs(x.view(np.uint8).astype(S) - y.view(np.uint8)).reshape(-1, 4).sum(1).astype(U) + z
    ),
    "{ .reg .u32 n; mov.u32 n, 0; AGAIN: add.u32 n, n, 1; setp.lt.u32 p, n, 3; @p bra AGAIN; mov.u32 %0, n; }": lambda x, y, z: (
        np.full_like(x, 3)
    ),
    "mov.u32 %0, %%laneid;": lambda x, y, z: (np.arange(len(x)) % 32).astype(U),
    "mov.u32 %0, %%lanemask_lt;": lambda x, y, z: (1 << np.arange(len(x)) % 32).astype(U) - U(1),
}
# the same of floats
FLOATS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "add.f32 %0, %1, %2;": lambda x, y, z: x + y,
    "sub.rn.f32 %0, %1, %2;": lambda x, y, z: x - y,
    "mul.ftz.f32 %0, %1, %2;": lambda x, y, z: x * y,
    "min.f32 %0, %1, %2;": lambda x, y, z: np.fmin(x, y),
    "max.NaN.f32 %0, %1, %2;": lambda x, y, z: np.maximum(x, y),
    "fma.rn.f32 %0, %1, %2, 0f00000000;": lambda x, y, z: (x.astype(np.float64) * y).astype(F),
    "abs.f32 %0, %1;": lambda x, y, z: np.abs(x),
    "neg.f32 %0, %1;": lambda x, y, z: -x,
    "add.rz.f32 %0, %1, %2;": lambda x, y, z: _toward_zero(x.astype(np.float64) + y),
    "mul.sat.f32 %0, %1, %2;": lambda x, y, z: np.clip(x * y, 0, 1),
    "div.rn.f32 %0, %1, %2;": lambda x, y, z: x / y,
    "cvt.rni.f32.f32 %0, %1;": lambda x, y, z: np.rint(x),
    "cvt.rzi.f32.f32 %0, %1;": lambda x, y, z: np.trunc(x),
    "{.reg .f16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h;}": lambda x, y, z: x.astype(H).astype(F),
    "{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {0, h};}": lambda x, y, z: x.astype(B).astype(F),
    "cvt.rna.tf32.f32 %0, %1;": lambda x, y, z: (x.view(U) + U(0x1000) & U(0xFFFFE000)).view(F),
    "{.reg .pred p; setp.gt.f32 p, %1, %2; selp.f32 %0, %1, %2, p;}": lambda x, y, z: np.where(x > y, x, y),
    "{.reg .f64 d; cvt.f64.f32 d, %1; add.f64 d, d, 0d3ff0000000000000; cvt.rn.f32.f64 %0, d;}": lambda x, y, z: (
        x.astype(np.float64) + 1
    ).astype(F),
}
# what can't be compared to the last bit
CLOSE: dict[str, Callable[[Array, Array, Array], Array]] = {
    "ex2.approx.ftz.f32 %0, %1;": lambda x, y, z: np.exp2(x),
    "tanh.approx.f32 %0, %1;": lambda x, y, z: np.tanh(x),
    "{.reg .f32 s; abs.f32 s, %1; lg2.approx.f32 %0, s;}": lambda x, y, z: np.log2(np.abs(x)),
    "rcp.approx.ftz.f32 %0, %1;": lambda x, y, z: 1 / x,
    "{.reg .f32 s; abs.f32 s, %1; rsqrt.approx.f32 %0, s;}": lambda x, y, z: 1 / np.sqrt(np.abs(x)),
    "{.reg .f32 s; abs.f32 s, %1; sqrt.rn.f32 %0, s;}": lambda x, y, z: np.sqrt(np.abs(x)),
    "sin.approx.f32 %0, %1;": lambda x, y, z: np.sin(x),
}
# floats to words
PACKED: dict[str, Callable[[Array, Array, Array], Array]] = {
    "cvt.rn.f16x2.f32 %0, %1, %2;": lambda x, y, z: _f16x2(x, y),
    "cvt.rn.bf16x2.f32 %0, %1, %2;": lambda x, y, z: _bf16x2(x, y),
    "cvt.rn.relu.bf16x2.f32 %0, %1, %2;": lambda x, y, z: _bf16x2(np.maximum(x, 0), np.maximum(y, 0)),
    "{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}": lambda x, y, z: _eights(
        ml_dtypes.float8_e4m3fn, 448
    )(x, y),
    "{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}": lambda x, y, z: _eights(
        ml_dtypes.float8_e5m2, 57344
    )(x, y),
    "{.reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; mov.b32 %0, {b, 0, 0, 0};}": lambda x, y, z: (
        _mini("float4_e2m1fn", 6, x) << 4 | _mini("float4_e2m1fn", 6, y)
    ),
    "{.reg .b16 h; cvt.rn.satfinite.e3m2x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}": lambda x, y, z: (
        _mini("float6_e3m2fn", 28, x) << 8 | _mini("float6_e3m2fn", 28, y)
    ),
    "{.reg .b16 h; cvt.rn.satfinite.e2m3x2.f32 h, %1, %2; cvt.rn.f16x2.e2m3x2 %0, h;}": lambda x, y, z: _f16x2(
        *(np.clip(v, -7.5, 7.5).astype(ml_dtypes.float6_e2m3fn) for v in (x, y))
    ),
    "cvt.rni.s32.f32 %0, %1;": lambda x, y, z: _to_int(x, -(2**31), 2**31 - 1, np.rint),
    "cvt.rzi.u32.f32 %0, %1;": lambda x, y, z: _to_int(x, 0, 2**32 - 1, np.trunc),
    "{.reg .s8 b; cvt.rni.sat.s8.f32 b, %1; cvt.s32.s8 %0, b;}": lambda x, y, z: _to_int(x, -128, 127, np.rint),
    "set.gt.u32.f32 %0, %1, %2;": lambda x, y, z: np.where(x > y, U(0xFFFFFFFF), U(0)),
}
# words of two floats of 16 bits
HALVES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "add.f16x2 %0, %1, %2;": lambda x, y, z: _pairs(H, np.add, x, y),
    "sub.f16x2 %0, %1, %2;": lambda x, y, z: _pairs(H, np.subtract, x, y),
    "mul.bf16x2 %0, %1, %2;": lambda x, y, z: _pairs(B, np.multiply, x, y),
    "max.f16x2 %0, %1, %2;": lambda x, y, z: _pairs(H, np.fmax, x, y),
    "fma.rn.f16x2 %0, %1, %2, %3;": lambda x, y, z: _pairs(H, lambda a, b, c: a.astype(np.float64) * b + c, x, y, z),
    "fma.rn.relu.f16x2 %0, %1, %2, %3;": lambda x, y, z: _pairs(
        H, lambda a, b, c: np.maximum(a.astype(np.float64) * b + c, 0), x, y, z
    ),
    "neg.f16x2 %0, %1;": lambda x, y, z: x ^ U(0x80008000),
    "abs.f16x2 %0, %1;": lambda x, y, z: x & U(0x7FFF7FFF),
    "set.le.u32.f16x2 %0, %1, %2;": lambda x, y, z: np.ascontiguousarray(
        np.where(x.view(H) <= y.view(H), np.uint16(0xFFFF), np.uint16(0))
    ).view(U),
    "{.reg .b16 h, l; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}": lambda x, y, z: (
        (x >> U(16)).astype(np.uint16).view(H).astype(F).view(U)
    ),
}


def _toward_zero(exact: Array) -> Array:
    near = exact.astype(F)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(exact), np.nextafter(near, F(0)), near).astype(F)


def _kernel(name: str, kind: str, out: str, table: dict[str, Any]) -> str:
    letter, result = {"float": "f", "unsigned": "r"}[kind], {"float": "f", "unsigned": "r"}[out]
    lines: list[str] = []
    for i, ptx in enumerate(table):
        text = ptx.replace("{ .reg .u32 n;", "{ .reg .u32 n; .reg .pred p;")
        lines.append(
            f'  asm volatile("{text}" : "={result}"(r) : "{letter}"(a), "{letter}"(b), "{letter}"(c));\n'
            f"  out[{i} * n + i] = r;"
        )
    return (
        f"__global__ void {name}(const {kind}* x, const {kind}* y, const {kind}* z, {out}* out, int n) {{\n"
        f"  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n"
        f"  {kind} a = x[i], b = y[i], c = z[i];\n  {out} r;\n" + "\n".join(lines) + "\n}\n"
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ptx") / "scalar.cu"
    path.write_text(
        _kernel("integers", "unsigned", "unsigned", INTEGERS)
        + _kernel("floats", "float", "float", FLOATS)
        + _kernel("close", "float", "float", CLOSE)
        + _kernel("packed", "float", "unsigned", PACKED)
        + _kernel("halves", "unsigned", "unsigned", HALVES)
    )
    return path


def _run(source: Path, kernel: str, out: Any, rows: int, words: list[Array]) -> Array:
    n = len(words[0])
    arguments = {"x": words[0], "y": words[1], "z": words[2], "out": fl.Empty((rows, n), out), "n": n}
    ran = fl.emulate_file(source, arguments, kernel=kernel, grid=1, block=n)
    assert ran.complaints() == []
    return ran.arrays["out"]


def _same(table: dict[str, Any], got: Array, words: list[Array], close: bool = False) -> None:
    with np.errstate(all="ignore"):
        for row, (ptx, f) in zip(got, table.items(), strict=True):
            expected = f(*words)
            if close:
                np.testing.assert_allclose(row, expected, rtol=2e-6, atol=1e-37, err_msg=ptx)
            elif got.dtype == F:
                assert np.array_equal(row, expected.astype(F), equal_nan=True), (ptx, words, row, expected)
            else:
                assert np.array_equal(row, expected.astype(U)), (ptx, row, expected)


N = 64
SETTINGS = examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDGES = np.array([0, 1, 2, 7, 31, 32, 33, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], U)


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_integers(source: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    words = [np.where(random.random(N) < 0.4, random.choice(EDGES, N), random.integers(0, 2**32, N, U)) for _ in "xyz"]
    words[1] = np.where(random.random(N) < 0.5, words[1] % 40, words[1]).astype(U)
    _same(INTEGERS, _run(source, "integers", "uint32", len(INTEGERS), words), words)


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_floats(source: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    some = np.array([0.5, 1.5, 2.5, -0.5, 1, 448, 464, 0.0625, 57344], F)
    words = [
        np.where(
            random.random(N) < 0.2,
            random.choice(some, N),
            random.standard_normal(N) * 10.0 ** random.integers(-3, 5, N),
        ).astype(F)
        for _ in "xyz"
    ]
    _same(FLOATS, _run(source, "floats", "float32", len(FLOATS), words), words)
    _same(PACKED, _run(source, "packed", "uint32", len(PACKED), words), words)
    small = [(np.clip(x, -50, 50) + F(1e-3) * (x == 0)).astype(F) for x in words]
    _same(CLOSE, _run(source, "close", "float32", len(CLOSE), small), small, close=True)


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_halves(source: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    # floats of 16 bits of one kind are fine ones of the other, too
    words = [(random.standard_normal(2 * N) * 4).astype(H).view(np.uint16) & np.uint16(0xFFF8) for _ in "xyz"]
    words = [np.ascontiguousarray(x).view(U) for x in words]
    _same(HALVES, _run(source, "halves", "uint32", len(HALVES), words), words)
