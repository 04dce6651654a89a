"""Evaluates constant expressions of C++ from their tokens, as far as launches have them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

__all__ = ["TYPES", "Extent", "Unknown", "Value", "evaluated", "extent", "plain", "words_of"]

Extent = tuple[int, int, int]
Value = int | float | Extent
"""A number, or what a dim3 holds."""

TYPES = frozenset(
    "void bool char short int long unsigned signed float double half half2 __half __half2 __nv_bfloat16 nv_bfloat16 bfloat16 "
    "__nv_bfloat162 nv_bfloat162 float2 float3 float4 int2 int3 int4 uint2 uint4 double2 char4 uchar4 uint8_t "
    "int8_t uint16_t int16_t uint32_t int32_t uint64_t int64_t size_t const true false cuda std "
    "uint uchar __nv_fp8_e4m3 __nv_fp8_e5m2 decltype typename sizeof template".split()
)
_SIZES = {
    "char": 1, "bool": 1, "int8_t": 1, "uint8_t": 1, "short": 2, "half": 2, "__half": 2, "__nv_bfloat16": 2, "nv_bfloat16": 2,
    "int": 4, "float": 4, "unsigned": 4, "int32_t": 4, "uint32_t": 4, "half2": 4, "double": 8, "long": 8, "size_t": 8,
    "float2": 8, "float4": 16, "int4": 16, "uint4": 16,
}  # fmt: skip
_LEVELS: Sequence[Mapping[str, Callable[[float, float], float]]] = (
    {"==": operator.eq, "!=": operator.ne}, {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"+": operator.add, "-": operator.sub}, {"*": operator.mul, "/": lambda a, b: _divided(a, b), "%": operator.mod},
)  # fmt: skip


class Unknown(Exception):
    """An expression that isn't constant, or isn't understood."""


def _divided(a: float, b: float) -> float:
    if not b:
        raise Unknown
    return int(a / b) if isinstance(a, int) and isinstance(b, int) else a / b


def plain(value: Value) -> float:
    """A number. Raises `Unknown` for a dim3."""
    if isinstance(value, tuple):
        raise Unknown
    return value


def words_of(text: str) -> list[str]:
    """The tokens of a text."""
    return re.findall(r"\w+|\S", text)


def extent(parts: Sequence[Value]) -> Extent:
    """A dim3 of one to three numbers. Raises `Unknown` for others."""
    numbers = [int(part) for part in parts if isinstance(part, int | float)]
    if len(numbers) != len(parts) or len(parts) > 3:
        raise Unknown
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z


def evaluated(
    words: Sequence[str], name: Callable[[str], Value], call: Callable[[str, Sequence[Value]], Value]
) -> Value:
    """The value of an expression. `name` is asked for names, `call` for calls of functions. Raises `Unknown`."""
    return _Expression(words, name, call).whole()


class _Expression:
    """Evaluates the tokens of an expression. Names and calls are asked for."""

    def __init__(
        self, words: Sequence[str], name: Callable[[str], Value], call: Callable[[str, Sequence[Value]], Value]
    ) -> None:
        self.words, self.name, self.call, self.i = [*words, ""], name, call, 0

    def whole(self) -> Value:
        value = self.choice()
        if self.words[self.i]:
            raise Unknown
        return value

    def take(self, word: str) -> None:
        if self.words[self.i] != word:
            raise Unknown
        self.i += 1

    def choice(self) -> Value:
        value = self.level(0)
        if self.words[self.i] != "?":
            return value
        self.i += 1
        yes = self.choice()
        self.take(":")
        no = self.choice()
        return yes if value else no

    def level(self, n: int) -> Value:
        if n == len(_LEVELS):
            return self.single()
        if n == 2:
            return self.shifted()
        return self.chain(n)

    def shifted(self) -> Value:
        value = self.chain(2)
        while self.words[self.i : self.i + 2] in (["<", "<"], [">", ">"]):
            left, self.i = self.words[self.i] == "<", self.i + 2
            by = int(plain(self.chain(2)))
            value = int(plain(value)) << by if left else int(plain(value)) >> by
        return value

    def chain(self, n: int) -> Value:
        value = self.level(n + 1) if n != 1 else self.shifted()
        while (word := self.words[self.i]) in _LEVELS[n] and self.words[self.i + 1] != word:
            self.i += 1
            right = self.level(n + 1) if n != 1 else self.shifted()
            value = _LEVELS[n][word](plain(value), plain(right))
        return value

    def single(self) -> Value:
        word = self.words[self.i]
        self.i += 1
        if word in ("-", "+"):
            return plain(self.single()) * (-1 if word == "-" else 1)
        if word == "(":
            if self.words[self.i] in TYPES and self.words[self.i] not in ("true", "false"):
                inside = self.words[self.i : self.words.index(")", self.i)]
                self.i += len(inside) + 1
                return self.cast(inside, self.single())
            value = self.choice()
            self.take(")")
            return value
        if word[:1].isdigit() or word[:1] == ".":
            return _number(word)
        if word in ("true", "false"):
            return int(word == "true")
        if word == "sizeof":
            self.take("(")
            kind = self.words[self.i]
            end = self.words.index(")", self.i)
            if kind not in _SIZES:
                raise Unknown
            self.i = end + 1
            return _SIZES[kind]
        if word == "static_cast":
            self.take("<")
            end = self.words.index(">", self.i)
            inside, self.i = self.words[self.i : end], end + 1
            return self.cast(inside, self.single())
        while self.words[self.i] == "::":
            word, self.i = self.words[self.i + 1], self.i + 2
        if not word.isidentifier():
            raise Unknown
        if self.words[self.i] in ("(", "{"):
            return self.function(word)
        return self.name(word)

    def cast(self, kind: Sequence[str], value: Value) -> Value:
        return float(plain(value)) if {"float", "double"} & set(kind) else int(plain(value))

    def function(self, word: str) -> Value:
        close = {"(": ")", "{": "}"}[self.words[self.i]]
        self.i += 1
        given: list[Value] = []
        while self.words[self.i] != close:
            given.append(self.choice())
            if self.words[self.i] == ",":
                self.i += 1
            elif self.words[self.i] != close:
                raise Unknown
        self.i += 1
        if word == "dim3":
            return extent(given)
        if word in ("int", "unsigned", "size_t", "uint32_t") and len(given) == 1:
            return int(plain(given[0]))
        if word in ("min", "max") and given:
            return (min if word == "min" else max)(map(plain, given))
        if word in ("ceil", "ceilf") and len(given) == 1:
            return -int(-plain(given[0]) // 1)
        return self.call(word, given)


def _number(word: str) -> int | float:
    text = word.replace("'", "")
    try:
        return int(text.rstrip("uUlLzZ"), 0)
    except ValueError:
        try:
            return float(text.rstrip("fFlL"))
        except ValueError:
            raise Unknown from None
