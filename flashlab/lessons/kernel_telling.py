"""Writes into a kernel's source what makes it tell what its threads hold: a call behind each declaration of a variable.

The lines stay where they are. `kernels_cu/emulator/told.h` has what is called.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlab.emulator import scan
from flashlab.emulator.scan import Tokens

ROOM = 1 << 20
"""How many numbers a record may have."""
RECORD = "emu_told"
"""The array that the record is in."""
_NO_TYPES = frozenset(
    "return goto delete throw using typedef case break continue new struct class union enum extern constexpr template "
    "default static_assert else do asm __asm__ public private".split()
)
_QUALIFIERS = frozenset("const volatile static register signed unsigned long short".split())
_NUMBERS = frozenset("signed unsigned long short".split())
_HEADS = frozenset("if while switch".split())
_DEEPEST = 2
"""A variable inside of more loops than that changes too often to be told."""


@dataclass(frozen=True)
class Variable:
    """A variable: its name, the line of its declaration, and whether it is a loop's."""

    name: str
    line: int
    of_loop: bool = False


@dataclass(frozen=True)
class Telling:
    """A source that tells what `variables`, by their numbers in its record, hold."""

    text: str
    variables: tuple[Variable, ...]


def telling(text: str, kernel: str) -> Telling:
    """The source of a kernel that tells what it does.

    >>> told = telling("__global__ void k(int* y) { int i = threadIdx.x; y[i] = i; }", "k")
    >>> told.variables
    (Variable(name='i', line=1, of_loop=False),)
    """
    writer = _Writer(Tokens.of(text))
    for piece in scan.pieces_of(writer.tokens):
        if piece.kind == "function" and piece.body >= 0 and piece.words & {"__global__", "__device__"}:
            if piece.kernel and kernel in piece.names:
                writer.insert(piece.body, f"::emulator::Telling emu_telling({RECORD}, {ROOM});")
            writer.block(piece.body + 1, writer.tokens.partner[piece.body], 0)
    head = f'#include "told.h"\n__device__ double {RECORD}[{ROOM}];\n#line 1\n'
    return Telling(head + writer.text(), tuple(writer.variables))


class _Writer:
    """Walks over the statements of a function."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.words, self.partner = tokens.words, tokens.partner
        self.variables: list[Variable] = []
        self.inserted: list[tuple[int, str]] = []

    def insert(self, token: int, text: str) -> None:
        """A text behind a token."""
        self.inserted.append((self.tokens.end(token), f" {text}"))

    def text(self) -> str:
        text, parts, last = self.tokens.text, list[str](), 0
        for at, more in sorted(
            self.inserted, key=lambda x: x[0]
        ):  # of several at one place, in the order in which they came
            parts += [text[last:at], more]
            last = at
        return "".join([*parts, text[last:]])

    def block(self, i: int, end: int, loops: int) -> None:
        """The statements between two braces, inside of so many loops."""
        depth = loops  # of the statement at i: it grows with each head of a loop that has no braces
        while i < end:
            word = self.words[i]
            if word == "{":
                self.block(i + 1, self.partner[i], depth)
                i, depth = self.partner[i] + 1, loops
            elif word in ("for", "while") and self.words[i + 1] == "(":
                close = self.partner[i + 1]
                if word == "for" and self.words[close + 1] == "{" and depth < _DEEPEST:
                    self.see(self.names(i + 2, close), "l", close + 1)
                i, depth = close + 1, depth + 1
            elif word in _HEADS and "(" in self.words[i + 1 : i + 3]:
                i = self.partner[self.words.index("(", i)] + 1
            elif word in ("else", "do", ";"):
                i, depth = i + 1, depth if word != ";" else loops
            else:
                stop = self.stop(i, end)
                if depth <= _DEEPEST and depth == loops:
                    shared = "__shared__" in self.words[i:stop]
                    self.see(self.names(i, stop), "s" if shared else "r", stop)
                i, depth = stop + 1, loops

    def stop(self, i: int, end: int) -> int:
        """The semicolon that ends a statement."""
        while i < end and self.words[i] != ";":
            i = self.partner[i] + 1 if self.words[i] in ("(", "[", "{") else i + 1
        return min(i, end - 1)

    def see(self, names: list[int], role: str, behind: int) -> None:
        for i in names:
            line = self.tokens.text.count("\n", 0, self.tokens.starts[i]) + 1
            self.insert(behind, f"EMU_SEE({len(self.variables)}, '{role}', {self.words[i]})")
            self.variables.append(Variable(self.words[i], line, role == "l"))

    def names(self, i: int, end: int) -> list[int]:
        """The variables that a statement declares, but for pointers and references."""
        words = self.words
        while i < end and words[i] == "__shared__" or words[i] in ("__align__", "alignas"):
            i = self.partner[i + 1] + 1 if words[i] != "__shared__" else i + 1
        first = i
        while i < end and words[i] in _QUALIFIERS:
            i += 1
        if any(word in _NUMBERS for word in words[first:i]) and words[i] not in ("int", "char", "long"):
            i -= 1  # unsigned n
        if not scan.is_word(words[i]) or words[i] in _NO_TYPES:
            return []
        i += 1
        while i + 1 < end and words[i] == "::":
            i += 2
        found: list[int] = []
        while i < end:
            if scan.is_word(words[i]) and words[i + 1] in ("=", "[", ",", ";", "(", "{") and words[i] not in _NO_TYPES:
                if words[i + 1] == "(" and not found and words[i - 1] == ".":
                    return []
                found.append(i)
            elif words[i] not in ("*", "&"):
                return found
            while i < end and words[i] not in (",", ";"):
                i = self.partner[i] + 1 if words[i] in ("(", "[", "{") else i + 1
            i += 1
        return found
