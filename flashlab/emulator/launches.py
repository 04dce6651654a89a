"""Reads the launches of a source's host code: which kernel, which instance of a template, over how many blocks and threads.

Nothing is run. What follows from constants is known: numbers, `constexpr` and `const` variables, `dim3`, sums and products,
functions of one `return`. A launch whose grid depends on an argument of the program has a grid of None.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashlab.emulator.constants import TYPES, Extent, Unknown, Value, evaluated, extent, plain, words_of
from flashlab.emulator.scan import Piece, Tokens

__all__ = ["Launch", "launches_of"]


_MOST_INSTANCES = 64
_DEPTH = 4
_DIMENSIONS = frozenset("xyz")
_QUALIFIERS = frozenset("const static volatile __restrict __restrict__ constexpr auto".split())


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
        self.places: dict[str, list[int]] = {}
        for i, word in enumerate(tokens.words):
            self.places.setdefault(word, []).append(i)
        self.starts = [piece.start for piece in pieces]
        self.bound: dict[tuple[Piece, int], list[dict[str, str]]] = {}

    def piece_at(self, token: int) -> Piece | None:
        index = bisect_right(self.starts, token) - 1
        return self.pieces[index] if index >= 0 and token < self.pieces[index].end else None

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
        words = self.words
        for i in range(piece.start, piece.end - 3):
            if words[i] == words[i + 1] == words[i + 2] == "<":
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
        kernel = next((each for each in self.named.get(words[first], ()) if each.kernel), None)
        for known in self.bindings(piece, _DEPTH):
            arguments = ""
            if kernel and kernel.template:
                end = self.angle(last, piece.end) if words[last] == "<" and last != i else last
                bound = self.instance(kernel, (last + 1, end - 1), self.called_at(i, piece), piece, known, place)
                names = list(self.template_parameters(kernel))
                if [name for name in names if name not in bound]:
                    continue
                while names and self.standard(kernel).get(names[-1]) == bound[names[-1]]:
                    names.pop()
                arguments = f"<{', '.join(bound[name] for name in names)}>"
            grid, block, sram = [self.constant(part, piece, known, i) for part in (*parts, *[None] * 3)[:3]]
            dynamic = 0 if len(parts) < 3 else int(sram) if isinstance(sram, int | float) else None
            yield i, Launch(words[first], arguments, _three(grid), _three(block), dynamic)

    def called_at(self, i: int, piece: Piece) -> int:
        """The bracket of the arguments behind `<<<…>>>`."""
        *_, (_, stop) = [(i, i), *self.parts(i + 3, piece.end)]
        return stop + 3

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
        start, words = i, self.words
        while i < end - 2:
            if words[i] == words[i + 1] == words[i + 2] == ">":
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
        key = piece, depth
        if key not in self.bound:
            self.bound[key] = [{}]  # for a function that calls itself
            self.bound[key] = list(self.instances(piece, depth)) or [self.standard(piece)]
        return self.bound[key]

    def instances(self, piece: Piece, depth: int) -> Iterator[dict[str, str]]:
        names = self.template_parameters(piece)
        if not names:
            yield {}
            return
        seen: list[dict[str, str]] = []
        for i in self.places.get(piece.names[0], ()) if depth and piece.names else ():
            other = self.piece_at(i)
            if not other or other is piece or i == other.opening - 1 or self.words[i + 1] not in ("<", "("):
                continue
            for known in self.bindings(other, depth - 1) if other.kind != "instantiation" else [{}]:
                end = self.angle(i + 1, other.end) if self.words[i + 1] == "<" else i + 1
                bound = self.instance(piece, (i + 2, end - 1), end, other, known, i)
                if bound and bound not in seen and len(seen) < _MOST_INSTANCES:
                    seen.append(bound)
                    yield bound

    def instance(
        self, piece: Piece, given: tuple[int, int], call: int, caller: Piece, known: Mapping[str, str], at: int
    ) -> dict[str, str]:
        """A template's parameters: as given in a list, as the arguments of the call tell, or as they are unless said."""
        listed = [self.argument(part, caller, known, at) for part in self.split(*given)]
        bound = {name: x for name, x in zip(self.template_parameters(piece), listed, strict=False) if x is not None}
        if self.words[call : call + 1] == ["("] and piece.opening >= 0:  # of a class, it would be a constructor's
            bound = self.deduced(piece, call, caller, known, at) | bound
        return self.standard(piece) | bound

    def standard(self, piece: Piece) -> dict[str, str]:
        """The parameters of a template that are something unless it is said."""
        named = self.template_parameters(piece).items()
        found = {name: self.argument(part, piece, {}, part[0]) for name, part in named if part}
        return {name: text for name, text in found.items() if text is not None}

    def deduced(self, piece: Piece, call: int, caller: Piece, known: Mapping[str, str], at: int) -> dict[str, str]:
        """What the types of a call's arguments say of a template's parameters, where a parameter is `T`, `T*` or the like."""
        names, found = self.template_parameters(piece), dict[str, str]()
        wanted = self.split(piece.opening + 1, self.partner[piece.opening])
        for (start, stop), argument in zip(wanted, self.split(call + 1, self.partner[call]), strict=False):
            words = [word for word in self.words[start:stop] if word in names or word in ("*", "<", "=")]
            if not words or words[0] not in names or any(word not in names and word != "*" for word in words):
                continue
            kind = self.type_of(argument, caller, known, at)
            if kind and kind.count("*") >= len(words) - 1:
                bare = [word for word in kind if word != "*"] + ["*"] * (kind.count("*") - len(words) + 1)
                found.setdefault(words[0], " ".join(bare))
        return found

    def type_of(self, part: tuple[int, int], piece: Piece, known: Mapping[str, str], at: int) -> list[str]:
        """The type of an argument, as its cast, its `data_ptr<T>()` or its declaration has it; empty if it isn't known."""
        words = self.words
        start, stop = part
        if words[start].endswith("_cast") and words[start + 1] == "<":
            kind = words[start + 2 : self.angle(start + 1, stop) - 1]
        elif "data_ptr" in words[start:stop] and words[stop - 3] == ">":
            kind = [*words[words.index("data_ptr", start) + 2 : stop - 3], "*"]
        elif words[start] == "(" and words[self.partner[start] - 1] == "*":
            kind = words[start + 1 : self.partner[start]]
        else:
            kind = self.declared(words[start + (words[start] == "&")], piece, at)
        spelled = self.spelled([word for word in kind if word not in _QUALIFIERS], piece, known, at, _DEPTH)
        return spelled or []

    def declared(self, name: str, piece: Piece, at: int) -> list[str]:
        """The type with which a function declares a name: `const T* name`."""
        for i in range(at - 1, piece.start, -1):
            if self.words[i] == name and self.words[i + 1] in ("=", ";", ",", ")", "[") and i > piece.opening:
                first = i
                while self.words[first - 1] not in ("(", ")", ",", ";", "{", "}", "=", "return", "+", "-", "&"):
                    first -= 1
                kind = [word for word in self.words[first:i] if word not in _QUALIFIERS]
                if kind:
                    return [*kind, "*"] if self.words[i + 1] == "[" else kind
        return []

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
        except (Unknown, ArithmeticError, RecursionError):
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
            elif not word.isidentifier() or word in TYPES or (i and words[i - 1] in ("::", ".")):
                found.append(word)
            elif (local := self.local(word, piece, at)) is not None:
                if not depth:
                    return None
                start, stop, kind = local
                value = self.spelled(self.words[start:stop], piece, known, start, depth - 1)
                if kind != "using":
                    try:
                        value = [str(int(plain(self.value((start, stop), piece, known, start))))]
                    except (Unknown, ArithmeticError, RecursionError):
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

    def constant(self, part: tuple[int, int] | None, piece: Piece, known: Mapping[str, str], at: int) -> Value | None:
        try:
            return self.value(part, piece, known, at) if part else None
        except (Unknown, ArithmeticError, RecursionError):
            return None

    def value(self, part: tuple[int, int], piece: Piece, known: Mapping[str, str], at: int) -> Value:
        words = self.words[part[0] : part[1]]
        return evaluated(words, lambda name: self.looked_up(name, piece, known, at), self.called)

    def looked_up(self, name: str, piece: Piece, known: Mapping[str, str], at: int) -> Value:
        """A name's value before token `at`: of the template, of the function's own variables, of the file's."""
        if name in known:
            return evaluated(words_of(known[name]), self.nothing, self.called)
        words = self.words
        members: dict[str, Value] = {}  # of a dim3, set one by one
        for i in range(at - 1, max(piece.start, piece.body), -1):
            if words[i] != name or words[i - 1] in (".", "->"):
                continue
            if words[i + 1] == "." and words[i + 2] in _DIMENSIONS and words[i + 3] == "=":
                if words[i + 2] in members:  # in two branches, perhaps
                    raise Unknown
                members[words[i + 2]] = self.value((i + 4, self.stop(i + 4, at)), piece, known, i)
                continue
            if words[i + 1] in (";", ",") and words[i - 1] in ("dim3", ",") and members:
                return _with_members((1, 1, 1), members)
            if words[i + 1] == "=":
                return _with_members(self.value((i + 2, self.stop(i + 2, at)), piece, known, i), members)
            if words[i + 1] in ("(", "{") and words[i - 1] in ("dim3", ","):
                inside = self.split(i + 2, self.partner[i + 1])
                return _with_members(extent([self.value(part, piece, known, i) for part in inside]), members)
            if words[i + 1] in ("+=", "-=", "*=", "/=", "++", "--") or words[i - 1] in ("++", "--", "&"):
                raise Unknown
        for other in self.named.get(name, []):
            if other.kind == "variable" and other.words & {"const", "constexpr"}:
                for i in range(other.start, other.end - 1):
                    if words[i] == name and words[i + 1] in ("=", "{"):
                        return self.value((i + 2, self.stop(i + 2, other.end)), other, {}, other.start + 1)
            if other.kind == "class" and "enum" in other.words:
                for i in range(other.body, other.end - 1):
                    if words[i] == name and words[i + 1] == "=":
                        return self.value((i + 2, self.stop(i + 2, other.end)), other, {}, other.start + 1)
        raise Unknown

    def stop(self, i: int, end: int) -> int:
        """The end of an expression or a type."""
        while i < end and self.words[i] not in (";", ",", "}", ")"):
            behind = self.angle(i, end) if self.words[i] == "<" else i
            i = behind if behind > i else self.partner[i] + 1 if self.words[i] in ("(", "[", "{") else i + 1
        return i

    def called(self, name: str, given: Sequence[Value]) -> Value:
        """A function of one `return`."""
        for piece in self.named.get(name, []):
            body = piece.body
            if piece.kind != "function" or body < 0 or self.words[body + 1] != "return":
                continue
            names = [self.words[stop - 1] for _, stop in self.split(piece.opening + 1, self.partner[piece.opening])]
            if len(names) == len(given):
                values = dict(zip(names, given, strict=True))
                end = self.words.index(";", body)
                return evaluated(self.words[body + 2 : end], lambda x, v=values: _of(v, x), self.called)
        raise Unknown

    @staticmethod
    def nothing(_: str) -> Value:
        raise Unknown


def _with_members(whole: Value, members: Mapping[str, Value]) -> Value:
    """A dim3 with some of its members set."""
    if not members:
        return whole
    x, y, z = whole if isinstance(whole, tuple) else (int(whole), 1, 1)
    sizes = {"x": x, "y": y, "z": z} | {name: int(plain(value)) for name, value in members.items()}
    return sizes["x"], sizes["y"], sizes["z"]


def _three(value: Value | None) -> Extent | None:
    if value is None or isinstance(value, tuple):
        return value
    return int(value), 1, 1


def _of(values: Mapping[str, Value], name: str) -> Value:
    if name not in values:
        raise Unknown
    return values[name]
