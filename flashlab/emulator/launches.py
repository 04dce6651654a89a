"""Reads the launches of a source's host code: which kernel, which instance of a template, over how many blocks and threads.

Nothing is run. What follows from constants is known: numbers, `constexpr` and `const` variables, `dim3`, sums and products,
functions of one `return`. A launch whose grid depends on an argument of the program has a grid of None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashlab.emulator.scan import Piece, Tokens

__all__ = ["Launch", "launches_of"]

Extent = tuple[int, int, int]
_Value = int | float | Extent

_TYPES = frozenset(
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
_MOST_INSTANCES = 64
_DEPTH = 4


@dataclass(frozen=True)
class Launch:
    """A launch: the `kernel` by its name, with the `arguments` of its template as in `<64, float>` (empty: none are given).

    `grid` (blocks) and `block` (threads) are three numbers each, `sram` bytes of dynamic shared memory; None: not constant.
    """

    kernel: str
    arguments: str
    grid: Extent | None
    block: Extent | None
    sram: int | None
    file: str = ""
    line: int = 0

    @property
    def instance(self) -> str:
        """The kernel's name with the arguments of its template."""
        return self.kernel + self.arguments


class _UnknownError(Exception):
    """An expression that isn't constant, or isn't understood."""


def _divided(a: float, b: float) -> float:
    if not b:
        raise _UnknownError
    return int(a / b) if isinstance(a, int) and isinstance(b, int) else a / b


def launches_of(tokens: Tokens, pieces: Sequence[Piece]) -> Iterator[tuple[int, Launch]]:
    """The launches `kernel<args><<<grid, block, sram>>>(…)` of a source with the tokens where they stand.

    Where the host code names an instance of a kernel's template without launching it, as in `auto kernel = k<64>;`, that is
    one, too, of which nothing else is known.
    """
    reader = _Reader(tokens, pieces)
    for piece in pieces:
        if piece.kind == "instantiation":
            yield from reader.instantiation(piece)
        elif piece.kind != "directive":
            yield from reader.launches(piece)
            if piece.host:
                yield from reader.mentions(piece)


class _Reader:
    def __init__(self, tokens: Tokens, pieces: Sequence[Piece]) -> None:
        self.tokens, self.words, self.partner, self.pieces = tokens, tokens.words, tokens.partner, pieces
        self.named: dict[str, list[Piece]] = {}
        for piece in pieces:
            for name in piece.names:
                self.named.setdefault(name, []).append(piece)

    # Where the launches are

    def instantiation(self, piece: Piece) -> Iterator[tuple[int, Launch]]:
        """`template __global__ void k<float>(…);`"""
        for i in range(piece.start, piece.end - 1):
            known = self.named.get(self.words[i], [])
            if self.words[i + 1] == "<" and any(each.kernel for each in known):
                end = self.angle(i + 1, piece.end)
                if arguments := self.arguments(i + 2, end - 1, piece, {}):
                    yield i, Launch(self.words[i], arguments, None, None, None)
                return

    def mentions(self, piece: Piece) -> Iterator[tuple[int, Launch]]:
        for i in range(piece.start, piece.end - 2):
            is_list = self.words[i + 1] == "<" and self.words[i + 2] != "<"
            if is_list and any(each.kernel for each in self.named.get(self.words[i], ())):
                end = self.angle(i + 1, piece.end)
                if end > i + 1 and self.words[end] != "<":
                    for known in self.bindings(piece, _DEPTH):
                        if arguments := self.arguments(i + 2, end - 1, piece, known, at=i):
                            yield i, Launch(self.words[i], arguments, None, None, None)

    def launches(self, piece: Piece) -> Iterator[tuple[int, Launch]]:
        words, starts = self.words, self.tokens.starts
        for i in range(piece.start, piece.end - 3):
            if words[i] == words[i + 1] == words[i + 2] == "<" and starts[i + 2] == starts[i] + 2:
                yield from self.launch(piece, i)

    def launch(self, piece: Piece, i: int) -> Iterator[tuple[int, Launch]]:
        """The launch at `<<<`; several if the function that holds it is a template of which there are several instances."""
        words, first, last = self.words, i - 1, i
        if words[first] == ">":
            depth = 0
            while first > piece.start:
                depth += (words[first] == ">") - (words[first] == "<")
                if not depth:
                    break
                first -= 1
            last, first = first, first - 1
        parts = list(self.parts(i + 3, piece.end))
        place = first
        if first == i - 1 and not any(each.kernel for each in self.named.get(words[first], ())):
            first, last = self.pointed(words[first], piece, i) or (first, i)
        for known in self.bindings(piece, _DEPTH):
            arguments = ""
            if words[last] == "<" and last != i:
                end = self.angle(last, piece.end)
                if not (arguments := self.arguments(last + 1, end - 1, piece, known, at=place)):
                    continue
            grid, block, sram = [self.constant(part, piece, known, i) for part in (*parts, *[None] * 3)[:3]]
            dynamic = 0 if len(parts) < 3 else int(sram) if isinstance(sram, int | float) else None
            yield i, Launch(words[first], arguments, _three(grid), _three(block), dynamic)

    def pointed(self, name: str, piece: Piece, at: int) -> tuple[int, int] | None:
        """The kernel, and the token behind it, that a variable points to: `auto name = &kernel<64>;`."""
        for i in range(at - 1, max(piece.start, piece.body), -1):
            if self.words[i] == name and self.words[i + 1] == "=":
                first = i + 2 + (self.words[i + 2] == "&")
                while self.words[first + 1] == "::":
                    first += 2
                return first, first + 1
        return None

    def parts(self, i: int, end: int) -> Iterator[tuple[int, int]]:
        """The expressions between `<<<` and `>>>`, as tokens from and to."""
        start, words, starts = i, self.words, self.tokens.starts
        while i < end - 2:
            if words[i] == words[i + 1] == words[i + 2] == ">" and starts[i + 2] == starts[i] + 2:
                yield start, i
                return
            if words[i] == ",":
                yield start, i
                start = i + 1
            if words[i] == words[i + 1] and words[i] in "<>":  # a shift
                i += 2
                continue
            if words[i] == "<" and (behind := self.angle(i, end, most=i + 12)) > i:
                i = behind
            else:
                i = self.partner[i] + 1 if words[i] in ("(", "[", "{") else i + 1

    def angle(self, i: int, end: int, most: int | None = None) -> int:
        """The token behind the list of a template at `i`; `i` if it isn't one."""
        depth, j = 0, i
        while j < min(end, most or end):
            if self.words[j] in ("(", "[", "{"):
                j = self.partner[j]
            depth += (self.words[j] == "<") - (self.words[j] == ">")
            if not depth:
                return j + 1
            if self.words[j] in (";", "}"):
                return i
            j += 1
        return i

    # Templates

    def bindings(self, piece: Piece, depth: int) -> list[dict[str, str]]:
        """What the parameters of a host template may stand for: once for each instance of it that the source names."""
        names = self.template_parameters(piece)
        if not names:
            return [{}]
        standard = {
            name: text
            for name, part in names.items()
            if part and (text := self.argument(part, piece, {}, part[0])) is not None
        }
        found: list[dict[str, str]] = []
        for other in self.pieces if depth and piece.names else ():
            if other is piece or (other.kind == "class" and other.names == piece.names):
                continue
            for i in range(other.start, other.end - 2):
                if self.words[i] != piece.names[0] or self.words[i + 1] != "<" or i == other.opening - 1:
                    continue
                end = self.angle(i + 1, other.end)
                for known in self.bindings(other, depth - 1) if other.kind != "instantiation" else [{}]:
                    given = [self.argument(part, other, known, i) for part in self.split(i + 2, end - 1)]
                    bound = {name: text for name, text in zip(names, given, strict=False) if text is not None}
                    if bound and (bound := standard | bound) not in found and len(found) < _MOST_INSTANCES:
                        found.append(bound)
        return found or [standard]

    def template_parameters(self, piece: Piece) -> dict[str, tuple[int, int] | None]:
        """The names of a template's parameters with what they are unless it is said."""
        if self.words[piece.start] != "template" or self.words[piece.start + 1] != "<":
            return {}
        end = self.angle(piece.start + 1, piece.end) - 1
        names: dict[str, tuple[int, int] | None] = {}
        for start, stop in self.split(piece.start + 2, end):
            equals = next((i for i in range(start, stop) if self.words[i] == "="), stop)
            if equals - start > 1:
                names[self.words[equals - 1]] = (equals + 1, stop) if equals < stop else None
        return names

    def split(self, i: int, end: int) -> Iterator[tuple[int, int]]:
        """A template's list at its commas."""
        start = i
        while i < end:
            if self.words[i] == ",":
                yield start, i
                start = i + 1
            behind = self.angle(i, end) if self.words[i] == "<" else i
            i = behind if behind > i else self.partner[i] + 1 if self.words[i] in ("(", "[", "{") else i + 1
        if end > start:
            yield start, end

    def arguments(self, i: int, end: int, piece: Piece, known: Mapping[str, str], at: int = 0) -> str:
        """A template's list with every constant as a number; empty if it holds what isn't known."""
        given = [self.argument(part, piece, known, at or i) for part in self.split(i, end)]
        return "" if None in given else f"<{', '.join(filter(None, given))}>"

    def argument(self, part: tuple[int, int], piece: Piece, known: Mapping[str, str], at: int) -> str | None:
        """An argument of a template as it reads outside of the function: constants as numbers, local names replaced."""
        try:
            value = self.value(part, piece, known, at)
            return str(int(value)) if isinstance(value, int | float) else None
        except (_UnknownError, ArithmeticError, RecursionError):
            words = self.spelled(self.words[part[0] : part[1]], piece, known, at, _DEPTH)
        text = re.sub(r"(?<=\w) (?!\w)|(?<!\w) (?=\w)|(?<=\W) (?=\W)", "", " ".join(words or []))
        return text or None

    def spelled(
        self, words: Sequence[str], piece: Piece, known: Mapping[str, str], at: int, depth: int
    ) -> list[str] | None:
        """Tokens of a type with the function's own names replaced by what they stand for; None if one isn't known."""
        found: list[str] = []
        for i, word in enumerate(words):
            if word in known:
                found.append(known[word])
            elif not word.isidentifier() or word in _TYPES or (i and words[i - 1] in ("::", ".")):
                found.append(word)
            elif (local := self.local(word, piece, at)) is not None:
                if not depth:
                    return None
                start, stop, kind = local
                value = self.spelled(self.words[start:stop], piece, known, start, depth - 1)
                if kind != "using":
                    try:
                        value = [str(int(_plain(self.value((start, stop), piece, known, start))))]
                    except (_UnknownError, ArithmeticError, RecursionError):
                        value = value and ["(", *value, ")"]
                if value is None:
                    return None
                found += value
            elif word in self.named or (i + 1 < len(words) and words[i + 1] == "::"):
                found.append(word)
            else:
                return None
        return found

    def local(self, name: str, piece: Piece, at: int) -> tuple[int, int, str] | None:
        """What a function's own name stands for, as tokens from and to, and whether it is a type's (`using`)."""
        words = self.words
        for i in range(at - 1, max(piece.start, piece.body), -1):
            if words[i] == name and words[i + 1] == "=" and words[i - 1] not in (".", "->"):
                return i + 2, self.stop(i + 2, piece.end), "using" if words[i - 1] == "using" else "variable"
        return None

    # Constants

    def constant(self, part: tuple[int, int] | None, piece: Piece, known: Mapping[str, str], at: int) -> _Value | None:
        try:
            return self.value(part, piece, known, at) if part else None
        except (_UnknownError, ArithmeticError, RecursionError):
            return None

    def value(self, part: tuple[int, int], piece: Piece, known: Mapping[str, str], at: int) -> _Value:
        words = self.words[part[0] : part[1]]
        return _Expression(words, lambda name: self.looked_up(name, piece, known, at), self.called).whole()

    def looked_up(self, name: str, piece: Piece, known: Mapping[str, str], at: int) -> _Value:
        """A name's value before token `at`: of the template, of the function's own variables, of the file's."""
        if name in known:
            return _Expression(_split(known[name]), self.nothing, self.called).whole()
        words = self.words
        for i in range(at - 1, max(piece.start, piece.body), -1):
            if words[i] != name or words[i - 1] in (".", "->"):
                continue
            if words[i + 1] == "=":
                return self.value((i + 2, self.stop(i + 2, at)), piece, known, i)
            if words[i + 1] in ("(", "{") and words[i - 1] in ("dim3", ","):
                inside = self.split(i + 2, self.partner[i + 1])
                return _extent([self.value(part, piece, known, i) for part in inside])
            if words[i + 1] in ("+=", "-=", "*=", "/=", "++", "--") or words[i - 1] in ("++", "--", "&"):
                raise _UnknownError
        for other in self.named.get(name, []):
            if other.kind == "variable" and other.words & {"const", "constexpr"}:
                for i in range(other.start, other.end - 1):
                    if words[i] == name and words[i + 1] in ("=", "{"):
                        return self.value((i + 2, self.stop(i + 2, other.end)), other, {}, other.start + 1)
            if other.kind == "class" and "enum" in other.words:
                for i in range(other.body, other.end - 1):
                    if words[i] == name and words[i + 1] == "=":
                        return self.value((i + 2, self.stop(i + 2, other.end)), other, {}, other.start + 1)
        raise _UnknownError

    def stop(self, i: int, end: int) -> int:
        """The end of an expression or a type."""
        while i < end and self.words[i] not in (";", ",", "}", ")"):
            behind = self.angle(i, end) if self.words[i] == "<" else i
            i = behind if behind > i else self.partner[i] + 1 if self.words[i] in ("(", "[", "{") else i + 1
        return i

    def called(self, name: str, given: Sequence[_Value]) -> _Value:
        """A function of one `return`."""
        for piece in self.named.get(name, []):
            body = piece.body
            if piece.kind != "function" or body < 0 or self.words[body + 1] != "return":
                continue
            names = [self.words[stop - 1] for _, stop in self.split(piece.opening + 1, self.partner[piece.opening])]
            if len(names) == len(given):
                values = dict(zip(names, given, strict=True))
                end = self.words.index(";", body)
                return _Expression(self.words[body + 2 : end], lambda x, v=values: _of(v, x), self.called).whole()
        raise _UnknownError

    @staticmethod
    def nothing(_: str) -> _Value:
        raise _UnknownError


def _plain(value: _Value) -> float:
    if isinstance(value, tuple):
        raise _UnknownError
    return value


def _of(values: Mapping[str, _Value], name: str) -> _Value:
    if name not in values:
        raise _UnknownError
    return values[name]


def _split(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def _extent(parts: Sequence[_Value]) -> Extent:
    numbers = [int(part) for part in parts if isinstance(part, int | float)]
    if len(numbers) != len(parts) or len(parts) > 3:
        raise _UnknownError
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z


def _three(value: _Value | None) -> Extent | None:
    if value is None or isinstance(value, tuple):
        return value
    return int(value), 1, 1


class _Expression:
    """Evaluates the tokens of an expression. Names and calls are asked for."""

    def __init__(
        self, words: Sequence[str], name: Callable[[str], _Value], call: Callable[[str, Sequence[_Value]], _Value]
    ) -> None:
        self.words, self.name, self.call, self.i = [*words, ""], name, call, 0

    def whole(self) -> _Value:
        value = self.choice()
        if self.words[self.i]:
            raise _UnknownError
        return value

    def take(self, word: str) -> None:
        if self.words[self.i] != word:
            raise _UnknownError
        self.i += 1

    def choice(self) -> _Value:
        value = self.level(0)
        if self.words[self.i] != "?":
            return value
        self.i += 1
        yes = self.choice()
        self.take(":")
        no = self.choice()
        return yes if value else no

    def level(self, n: int) -> _Value:
        if n == len(_LEVELS):
            return self.single()
        if n == 2:
            return self.shifted()
        return self.chain(n)

    def shifted(self) -> _Value:
        value = self.chain(2)
        while self.words[self.i : self.i + 2] in (["<", "<"], [">", ">"]):
            left, self.i = self.words[self.i] == "<", self.i + 2
            by = int(_plain(self.chain(2)))
            value = int(_plain(value)) << by if left else int(_plain(value)) >> by
        return value

    def chain(self, n: int) -> _Value:
        value = self.level(n + 1) if n != 1 else self.shifted()
        while (word := self.words[self.i]) in _LEVELS[n] and self.words[self.i + 1] != word:
            self.i += 1
            right = self.level(n + 1) if n != 1 else self.shifted()
            value = _LEVELS[n][word](_plain(value), _plain(right))
        return value

    def single(self) -> _Value:
        word = self.words[self.i]
        self.i += 1
        if word in ("-", "+"):
            return _plain(self.single()) * (-1 if word == "-" else 1)
        if word == "(":
            if self.words[self.i] in _TYPES and self.words[self.i] not in ("true", "false"):
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
                raise _UnknownError
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
            raise _UnknownError
        if self.words[self.i] in ("(", "{"):
            return self.function(word)
        return self.name(word)

    def cast(self, kind: Sequence[str], value: _Value) -> _Value:
        return float(_plain(value)) if {"float", "double"} & set(kind) else int(_plain(value))

    def function(self, word: str) -> _Value:
        close = {"(": ")", "{": "}"}[self.words[self.i]]
        self.i += 1
        given: list[_Value] = []
        while self.words[self.i] != close:
            given.append(self.choice())
            if self.words[self.i] == ",":
                self.i += 1
            elif self.words[self.i] != close:
                raise _UnknownError
        self.i += 1
        if word == "dim3":
            return _extent(given)
        if word in ("int", "unsigned", "size_t", "uint32_t") and len(given) == 1:
            return int(_plain(given[0]))
        if word in ("min", "max") and given:
            return (min if word == "min" else max)(map(_plain, given))
        if word in ("ceil", "ceilf") and len(given) == 1:
            return -int(-_plain(given[0]) // 1)
        return self.call(word, given)


def _number(word: str) -> int | float:
    text = word.replace("'", "")
    try:
        return int(text.rstrip("uUlLzZ"), 0)
    except ValueError:
        try:
            return float(text.rstrip("fFlL"))
        except ValueError:
            raise _UnknownError from None
