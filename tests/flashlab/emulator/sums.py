"""How tensor cores add: the rule that an H200's sums follow bit for bit, other rules, and the recorded cases that tell them apart.

By `Rule`, each product is exact. All addends, including the accumulator, are truncated towards zero, `kept` bits below
the leading bit of the largest addend. A product's leading bit is taken to be where the exponents of its factors put
it. The truncated addends are summed exactly. The sum is then truncated too, to `mantissa` bits behind its leading bit.

Fasi et al. (PeerJ Computer Science 7, e330) and Li et al. (arXiv 2403.00232) found on earlier tensor cores that
addends are aligned and truncated. Rules for Hopper's are in Xie et al. (arXiv 2511.10909) and Khattak and Mikaitis
(arXiv 2512.07004). DeepSeek-V3 (arXiv 2412.19437) speaks of about 14 bits. Every other rule that is defined here is
refuted by measurements.

A result of kind `accumulation` has the cases. A kernel of products.cu runs them on the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashlab.emulator import Arena, build

Array = np.ndarray[Any, Any]
NOTHING = -10_000
"""The exponent of 0, below any other."""


@dataclass(frozen=True)
class Rule:
    """`kept` bits remain below the leading bit of the largest addend, and `mantissa` bits of the sum. `together`
    products are added at a time. `least` is the exponent of the operands' smallest normal number, which subnormal
    numbers have too."""

    kept: int
    mantissa: int
    together: int
    least: int

    def added(self, a: Array, b: Array, c: Array) -> Array:
        """c + the sum over k of a_k b_k, in float32 (n,).

        a and b are (n, depth), of any floating-point dtype and finite; c is float32 (n,).
        """
        a, b = a.astype(np.float64), b.astype(np.float64)
        for first in range(0, a.shape[1], self.together):
            c = self._step(a[:, first : first + self.together], b[:, first : first + self.together], c)
        return c

    def _step(self, a: Array, b: Array, c: Array) -> Array:
        addends = np.column_stack([a * b, c.astype(np.float64)])
        top = np.column_stack([self.sizes(a, b), exponent(addends[:, -1], -126)]).max(axis=1)
        unit = np.exp2(np.maximum(top, -126) - self.kept)
        total = self.summed(addends / unit[:, None]) * unit
        last = np.exp2(np.maximum(exponent(total, -126), -126) - self.mantissa)
        return (self.cut(total / last) * last).astype(np.float32)

    def sizes(self, a: Array, b: Array) -> Array:
        """The exponents that the products a * b are aligned by."""
        return exponent(a, self.least) + exponent(b, self.least)

    def summed(self, units: Array) -> Array:
        """The sum (n,) of addends (n, depth), in units of the last bit that is kept."""
        return self.cut(units).sum(axis=1)

    def cut(self, x: Array) -> Array:
        """Numbers truncated to integers."""
        return np.trunc(x)


def exponent(x: Array, least: int) -> Array:
    """The exponent of each number's leading bit: at least `least`, and `NOTHING` for 0."""
    return np.where(x == 0, NOTHING, np.maximum(np.frexp(x)[1] - 1, least))


class _Nearest(Rule):
    def cut(self, x: Array) -> Array:
        return np.rint(x)


class _SumCut(Rule):
    def summed(self, units: Array) -> Array:
        return self.cut(units.sum(axis=1))


class _OwnExponents(Rule):
    def sizes(self, a: Array, b: Array) -> Array:
        return exponent(a * b, 2 * self.least)


class _ZerosCount(Rule):
    def sizes(self, a: Array, b: Array) -> Array:
        return np.maximum(exponent(a, self.least), self.least) + np.maximum(exponent(b, self.least), self.least)


class _Normalized(Rule):
    def sizes(self, a: Array, b: Array) -> Array:
        return exponent(a, NOTHING) + exponent(b, NOTHING)


def alternatives(rule: Rule) -> Mapping[str, Rule]:
    """Rules that differ from this one in one respect, by that respect."""
    numbers = (rule.kept, rule.mantissa, rule.together, rule.least)
    return {
        "one bit fewer kept": replace(rule, kept=rule.kept - 1),
        "one bit more kept": replace(rule, kept=rule.kept + 1),
        "one bit fewer of the sum": replace(rule, mantissa=rule.mantissa - 1),
        "one bit more of the sum": replace(rule, mantissa=rule.mantissa + 1),
        "half as many at once": replace(rule, together=rule.together // 2),
        "rounded to the nearest": _Nearest(*numbers),
        "the sum cut off, not each addend": _SumCut(*numbers),
        "products aligned by their own exponents": _OwnExponents(*numbers),
        "products that are 0 aligned, too": _ZerosCount(*numbers),
        "subnormal operands normalised": _Normalized(*numbers),
        "float32 sums, one after the other": _Nearest(kept=50, mantissa=23, together=1, least=rule.least),
    }


# -- instructions and cases -------------------------------------------------------------------------------------------

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


def recorded(data: Mapping[str, Any]) -> Iterator[tuple[Instruction, Cases, Array]]:
    """The instructions, cases and GPU's sums in the data of a result of kind `accumulation`."""
    for row in data["recorded"]:
        instruction = INSTRUCTIONS[row["instruction"]]
        a, b, c, d = zip(*(line.split() for line in row["cases"]), strict=True)
        x, y = (np.array([list(bytes.fromhex(t)) for t in ts], np.uint8).view(instruction.dtype) for ts in (a, b))
        before, after = (np.array([int(t, 16) for t in ts], np.uint32).view(np.float32) for ts in (c, d))
        yield instruction, Cases(row["name"], x, y, before), after


def different(kind: Cases, d: Array, got: Array) -> list[str]:
    """One line per case in which `got` and the GPU's sum `d` differ in a bit."""
    where = np.flatnonzero(d.view(np.uint32) != got.view(np.uint32))
    return [f"{kind.name}, {i}: {float(got[i]).hex()} for {float(d[i]).hex()}" for i in where]


# -- on the emulator --------------------------------------------------------------------------------------------------

SIDE, STEP, THREADS = 64, 32, 128  # cases per block, bytes of an operand's row, threads per block
SRAM = 2 * SIDE * 128


def emulated(instruction: Instruction, cases: Cases) -> Array:
    """The sums (n,) from the emulator, which must find no misuse."""
    a, b, c = _blocks(cases)
    arena = Arena()
    arena.put("a", a)
    arena.put("b", b)
    arena.put("c", c)
    d = arena.put("d", c, written=False)
    arguments = [np.uintp(arena.pointer(name)).tobytes() for name in "abcd"] + [np.int32(a.shape[1]).tobytes()]
    library = build(SOURCE, (f"-DFL_DTYPE={instruction.macro}",), watch=False)
    launched = library.launch(instruction.entry, (len(a),), (THREADS,), arguments, arena, sram=SRAM, time_limit=60)
    assert not launched.findings, launched.findings[0]
    return d.reshape(-1)[: len(cases.c)]


def _blocks(cases: Cases) -> tuple[Array, Array, Array]:
    """The cases as products.cu takes them: a and b as bytes (blocks, steps, 64, 32), c as float32 (blocks, 64)."""
    n = len(cases.c)
    blocks = -(-n // SIDE)
    c = np.zeros(blocks * SIDE, np.float32)
    c[:n] = cases.c
    return _operand(cases.a, blocks), _operand(cases.b, blocks), c.reshape(blocks, SIDE)


def _operand(x: Array, blocks: int) -> Array:
    rows = np.ascontiguousarray(x).view(np.uint8)
    whole = np.zeros((blocks * SIDE, rows.shape[1]), np.uint8)
    whole[: len(rows)] = rows
    return np.ascontiguousarray(whole.reshape(blocks, SIDE, -1, STEP).swapaxes(1, 2))
