"""Finds the lines of a source that compute indices of arrays.

A signed integer that wraps is a misuse there, even if the index lands inside the array. Elsewhere, as in a hash, it may be meant.
Names are followed as words: what stands in brackets, or is added to a pointer, is an index; what is assigned to a name that
stands in an index is one, too; so is an argument of a function that makes an index of it, and what such a function returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flashlab.emulator.scan import Piece, Tokens, is_word, parameters
from flashlab.emulator.source import Source

__all__ = ["index_lines"]

_ASSIGNS = frozenset(("=", "+=", "-=", "*="))
_NO_NAMES = frozenset(
    "int long unsigned short char float double const auto size_t sizeof static_cast return if for".split()
)


def index_lines(source: Source, entries: Sequence[str]) -> list[tuple[str, int]]:
    """The lines (file, number) on which the kernels of `entries`, and what they use, compute indices."""
    functions = [function for i in source.reached(entries) for function in _functions(source.pieces[i])]
    found = _Indices(source.tokens, functions).tokens()
    return sorted({source.at(token) for token in found})


def _functions(piece: Piece) -> Iterator[Piece]:
    """The functions with a body in a piece: itself, or the members of a class."""
    if piece.kind == "function" and piece.body >= 0:
        yield piece
    for inner in piece.inner:
        yield from _functions(inner)


class _Indices:
    def __init__(self, tokens: Tokens, functions: Sequence[Piece]) -> None:
        self.words, self.partner = tokens.words, tokens.partner
        self.functions = functions
        self.named: dict[str, list[Piece]] = {}
        for function in functions:
            self.named.setdefault(function.names[0], []).append(function)
        self.parameters = {function: parameters(tokens, function) for function in functions}
        self.found: set[int] = set()
        self.names: dict[Piece, set[str]] = {function: set() for function in functions}
        self.returned: set[str] = set()

    def tokens(self) -> set[int]:
        """The tokens of all expressions of indices."""
        for function in self.functions:
            for start, stop in self.accesses(function):
                self.take(function, start, stop)
        before = -1
        while before != (before := self.size()):
            for function in self.functions:
                self.spread(function)
        return self.found

    def size(self) -> int:
        return len(self.found) + len(self.returned) + sum(map(len, self.names.values()))

    def take(self, function: Piece, start: int, stop: int) -> None:
        """These tokens compute an index."""
        self.found.update(range(start, stop))
        for i in range(start, stop):
            word = self.words[i]
            if is_word(word) and word not in _NO_NAMES:
                called = self.words[i + 1] == "(" and word in self.named
                (self.returned if called else self.names[function]).add(word)

    def accesses(self, function: Piece) -> Iterator[tuple[int, int]]:
        """What stands in brackets, and what is added to a pointer."""
        pointers = set(self.pointers(function))
        for i in range(function.body, function.end):
            word = self.words[i]
            if word == "[":
                yield i + 1, self.partner[i]
            elif word in pointers and self.words[i + 1] in ("+", "-", "+=", "-="):
                yield i + 2, self.end(i + 2, function.end)
            elif word in pointers and self.words[i - 1] == "+":
                yield self.start(i - 1, function.body), i - 1

    def pointers(self, function: Piece) -> Iterator[str]:
        """The names that a function declares with a star, as parameters or at the start of a statement."""
        words = self.words
        for i in range(function.opening + 1, function.end - 1):
            if words[i] != "*":
                continue
            first = i
            while is_word(words[first - 1]) or words[first - 1] in ("::", "*"):
                first -= 1
            if i < function.body or (first < i and words[first - 1] in (";", "{", "}", "(")):
                behind = i + 1
                while words[behind] in ("const", "volatile", "__restrict__", "__restrict", "*"):
                    behind += 1
                if is_word(words[behind]):
                    yield words[behind]

    def end(self, i: int, end: int) -> int:
        """Where the expression ends that begins at a token."""
        while i < end and self.words[i] not in (";", ",", ")", "]", "}"):
            i = self.partner[i] + 1 if self.words[i] in ("(", "[", "{") else i + 1
        return i

    def start(self, i: int, start: int) -> int:
        """Where the expression begins that ends before a token."""
        while i > start and self.words[i - 1] not in (";", ",", "(", "[", "{", "}", *_ASSIGNS):
            i = self.partner[i - 1] if self.words[i - 1] in (")", "]") else i - 1
        return i

    def spread(self, function: Piece) -> None:
        """Takes what is assigned to the names of indices, and what is handed to functions that make indices of it."""
        words, names = self.words, self.names[function]
        for i in range(function.body, function.end - 1):
            word = words[i]
            if word in names and words[i + 1] in _ASSIGNS:
                self.take(function, i + 2, self.end(i + 2, function.end))
            elif word == "return" and function.names[0] in self.returned:
                self.take(function, i + 1, self.end(i + 1, function.end))
            elif word in self.named and words[i + 1] == "(":
                parts = list(self.parts(i + 2, self.partner[i + 1]))
                for called in self.named[word]:
                    for name, (start, stop) in zip(self.parameters[called], parts, strict=False):
                        if name in self.names[called]:
                            self.take(function, start, stop)

    def parts(self, i: int, end: int) -> Iterable[tuple[int, int]]:
        """The arguments of a call."""
        while i < end:
            stop = self.end(i, end)
            yield i, stop
            i = stop + 1
