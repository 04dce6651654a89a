"""Operands and accumulators that tell one rule of addition from another: chosen ones, and random ones of many kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashlab.measure.accumulation.model import Rule

__all__ = ["EIGHT", "INSTRUCTIONS", "SOURCE", "Cases", "Instruction", "chosen", "drawn"]

Array = np.ndarray[Any, Any]
SOURCE = Path(__file__).with_name("products.cu")


@dataclass(frozen=True)
class Instruction:
    """A kernel of products.cu, compiled with FL_DTYPE = `macro`, its operands' dtype, and the rule by which it adds."""

    entry: str
    macro: int
    dtype: np.dtype[Any]
    rule: Rule

    @property
    def depth(self) -> int:
        """How many products one instruction adds to an accumulator."""
        return 32 // self.dtype.itemsize


E4M3, FLOAT16, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
EIGHT = Rule(kept=13, mantissa=13, together=32, least=-6)
HALF, BRAIN = (Rule(kept=25, mantissa=23, together=16, least=least) for least in (-14, -126))
INSTRUCTIONS = {
    "wgmma e4m3": Instruction("wgmma_e4m3", 1, E4M3, EIGHT),
    "wgmma e4m3, A in registers": Instruction("wgmma_e4m3_registers", 1, E4M3, EIGHT),
    "wgmma float16": Instruction("wgmma_16", 1, FLOAT16, HALF),
    "wgmma bfloat16": Instruction("wgmma_16", 2, BFLOAT16, BRAIN),
    "mma.sync float16": Instruction("mma_16", 1, FLOAT16, HALF),
    "mma.sync bfloat16": Instruction("mma_16", 2, BFLOAT16, BRAIN),
}


@dataclass(frozen=True)
class Cases:
    """Cases of one kind: a and b (n, steps · depth) in the operands' dtype, c (n,) in float32."""

    name: str
    a: Array
    b: Array
    c: Array


Pairs = dict[int, tuple[float, float]]
"""The two factors of a product, by its place in the sum. All other products are 0."""


def chosen(instruction: Instruction) -> Iterator[Cases]:
    """Cases that each ask one question. 2^16 and -2^16 set the scale and cancel. What is left of the smaller addends
    beside them shows how many bits were kept."""
    depth, kept = instruction.depth, instruction.rule.kept
    bits = {E4M3: 3, FLOAT16: 10, BFLOAT16: 7}[instruction.dtype]  # of the mantissa
    last, signs = 16 - kept, (1, -1)  # 2^last is the smallest power of two that is kept
    big: Pairs = {0: (256, 256), 1: (-256, 256)}
    near = range(last - 3, 17)

    def of(name: str, rows: list[tuple[Pairs, float]]) -> Cases:
        a, b = np.zeros((2, len(rows), depth))
        for i, (pairs, _) in enumerate(rows):
            for k, (x, y) in pairs.items():
                a[i, k], b[i, k] = x, y
        return Cases(
            name, a.astype(instruction.dtype), b.astype(instruction.dtype), np.array([c for _, c in rows], np.float32)
        )

    def times(m: float, e: int) -> tuple[float, float]:
        return m * 2.0 ** (e // 2), 2.0 ** (e - e // 2)

    small = [times(s * m, e) for e in near for m in (1.0, 1.5, 1.75) for s in signs]
    yield of("beside a product and the accumulator", [({0: big[0], depth - 1: x}, -(2.0**16)) for x in small])
    yield of("beside two products", [({**big, 2: x}, 0.0) for x in small])
    yield of(
        "the accumulator beside two products",
        [
            (big, s * (1 + 2.0**-m) * 2.0**e)
            for m in range(1, 24)
            for e in (last - 1, last + 4, 8, 16, 20)
            for s in signs
        ],
    )
    yield of(
        "small ones, each lost or all kept",
        [
            ({**big, **{k: times(1.0, e) for k in range(2, 2 + n)}}, 0.0)
            for e in range(last - 3, last + 2)
            for n in (2, 4, 8, depth - 2)
        ],
    )
    yield of(
        "the large ones at any place, the small one at any other",
        [
            ({i: big[0], i + 1: big[1], j: times(1.0, e)}, 0.0)
            for e in (last - 1, last)
            for i in range(0, depth, 2)
            for j in range(depth)
            if j not in (i, i + 1)
        ],
    )
    yield of("beside products from 2 to 4", [({0: (224, 224), 1: (-224, 224), 2: x}, 0.0) for x in small])
    yield of(
        "what remains of the sum",
        [
            ({k: (1 + k * n % 8 / 8, 1 + (k + n) % 8 / 8) for k in range(n)}, s * 2.0**e)
            for n in range(2, depth + 1)
            for e in (-30, 3, 7, 12)
            for s in signs
        ],
    )
    yield of(
        "the accumulator alone, or beside products of 0",
        [
            ({0: factors}, s * (1 + 2.0**-m) * 2.0**e)
            for factors in ((0, 0), (0, 256), (2.0**-6, 2.0**-6))
            for e in (-140, -126, -40, -25, -20, -12, 0, 20, 100)
            for m in range(1, 24, 2)
            for s in signs
        ],
    )
    tiny = 2.0 ** (instruction.rule.least - bits)
    other = -instruction.rule.least - 6  # scales a product to the size that it has in e4m3
    yield of(
        "subnormal operands",
        [
            ({0: (m * tiny, 2.0 ** (other + e)), 1: (-m * tiny, 2.0 ** (other + e)), 2: times(1.0, f)}, 0.0)
            for m in (1, 3, 5, 7)
            for e in (0, 4, 7)
            for f in range(e - kept - 7, min(e - kept, 0))
        ],
    )


def drawn(instruction: Instruction, steps: int, n: int, seed: int) -> Iterator[Cases]:
    """Random cases, `n` of each kind, for chains of `steps` instructions."""
    random = np.random.default_rng(seed)
    shape, dtype = (n, steps * instruction.depth), instruction.dtype

    def normal(spread: int, least: int = 0) -> Array:
        x = random.standard_normal(shape) * np.exp2(random.integers(least - spread, spread + 1, shape))
        return np.clip(x, -448, 448).astype(dtype)  # the largest number of e4m3

    def whole(x: Array) -> Array:
        return x.astype(np.float64)

    def of(name: str, a: Array, b: Array, c: Array) -> Cases:
        return Cases(name, a, b, np.asarray(c, np.float32))

    zero = np.zeros(n)
    a, b = normal(0), normal(0)
    yield of("normal", a, b, zero)
    yield of("normal, accumulator", a, b, random.standard_normal(n) * np.exp2(random.integers(-20, 20, n)))
    a, b = normal(5), normal(5)
    yield of("wide", a, b, zero)
    yield of("wide, accumulator", a, b, random.standard_normal(n) * np.exp2(random.integers(-10, 25, n)))
    yield of("cancelled", a, b, -(whole(a) * whole(b)).sum(axis=1) * (1 + random.standard_normal(n) * 1e-3))
    keep = random.random(shape) < 0.2
    a, b = np.where(keep, whole(normal(8, -4)), 0).astype(dtype), normal(8, -4)
    yield of("few, small", a, b, random.standard_normal(n) * np.exp2(random.integers(-40, 0, n)))
    a, b = np.abs(normal(2)), np.abs(normal(2))
    yield of("positive", a, b, (whole(a) * whole(b)).sum(axis=1) * np.exp2(random.integers(0, 14, n)))
    if dtype == BFLOAT16:
        a, b = (x.astype(dtype) for x in (whole(normal(5)) * 2.0**-62, whole(normal(5)) * 2.0**-64))
        yield of("near the smallest", a, b, random.standard_normal(n) * np.exp2(random.integers(-140, -110, n)))
    if dtype == E4M3:
        a, b = (random.integers(0, 255, shape).astype(np.uint8) for _ in "ab")
        a, b = ((np.where(x % 128 == 127, 0, x)).astype(np.uint8).view(dtype) for x in (a, b))
        yield of("any bits", a, b, random.standard_normal(n) * np.exp2(random.integers(-10, 25, n)))
