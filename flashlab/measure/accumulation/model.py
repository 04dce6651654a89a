"""How tensor cores add the products of one instruction to the accumulator, as rules that a GPU can be held to.

By `Rule`, each product is exact. All addends, including the accumulator, are truncated towards zero, `kept` bits below
the leading bit of the largest addend. A product's leading bit is taken to be where the exponents of its factors put
it. The truncated addends are summed exactly. The sum is then truncated too, to `mantissa` bits behind its leading bit.

Fasi et al. (PeerJ Computer Science 7, e330) and Li et al. (arXiv 2403.00232) found on earlier tensor cores that
addends are aligned and truncated. Rules for Hopper's are in Xie et al. (arXiv 2511.10909) and Khattak and Mikaitis
(arXiv 2512.07004). DeepSeek-V3 (arXiv 2412.19437) speaks of about 14 bits. Every other rule that is defined here is
refuted by measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

__all__ = ["Rule", "alternatives"]

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
