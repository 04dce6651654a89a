"""Finds which declarations of a source its kernels use, and blanks the others.

From the kernels that are asked for, every piece whose name is mentioned is *reached*, and what it mentions in turn. The rest is
host code to these kernels. Names are compared as words, without looking up scopes: that may keep a piece too many, never one
too few. By the rules of CUDA a kernel can't use a function that is neither `__device__` nor `constexpr`, nor a variable of the
host that may change; so these are never reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from flashlab.emulator.scan import Piece, Tokens, is_word

_OF_THE_SYSTEM = frozenset(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)) | {"size_t"}
"""Types that sources for a run-time compiler define themselves, and that the host's headers have."""

__all__ = ["hidden", "reached", "rendered"]

_LINES = re.compile(r"^#[ ][^\n]*$|\n", re.MULTILINE)


def hidden(piece: Piece) -> Iterator[Piece]:
    """The functions of a class that the host alone may call: their bodies and all that they mention are no device code."""
    for member in piece.inner:
        if member.kind == "function" and member.body >= 0 and member.host:
            yield member
        else:
            yield from hidden(member)


def mentioned(tokens: Tokens, piece: Piece) -> set[str]:
    """The words of a piece that may be names of others."""
    words = tokens.words
    skipped = [(inner.start, inner.end) for inner in hidden(piece)]
    found: set[str] = set()
    i = piece.start
    while i < piece.end:
        if skipped and i == skipped[0][0]:
            i = skipped.pop(0)[1]
            continue
        word = words[i]
        if is_word(word) and not (
            i and (words[i - 1] in (".", "->") or (words[i - 1] == "::" and words[i - 2] == "std"))
        ):
            found.add(word)
        i += 1
    return found


def reached(tokens: Tokens, pieces: Sequence[Piece], roots: Iterable[Piece], words: Iterable[str] = ()) -> set[int]:
    """The places in `pieces` of the `roots`, and of all that they use; `words` are used besides."""
    by_name: dict[str, list[int]] = {}
    waiting: list[int] = []  # what no word mentions: operators, assertions, directives
    for index, piece in enumerate(pieces):
        if piece.kind == "directive" or (piece.kind == "alias" and _OF_THE_SYSTEM.issuperset(piece.names)):
            continue
        if piece.kind == "assertion" or (piece.kind == "function" and piece.names[0].startswith("operator")):
            if not piece.host:
                waiting.append(index)
        elif piece.kind != "instantiation" and not piece.host and "__global__" not in piece.words:
            for name in piece.names:
                by_name.setdefault(name, []).append(index)
    found: set[int] = {index for index, piece in enumerate(pieces) if piece.kind == "directive"}
    known: set[str] = set()
    asked = set(roots)
    left = [index for index, piece in enumerate(pieces) if piece in asked]
    fresh = set[str](words)
    while True:
        while left or fresh:
            for name in fresh - known:
                known.add(name)
                left += [index for index in by_name.get(name, ()) if index not in found]
            fresh = set[str]()
            if left:
                index = left.pop()
                if index not in found:
                    found.add(index)
                    fresh = mentioned(tokens, pieces[index])
        # an operator belongs to the types of its parameters, an assertion to the constants that it compares
        for index in list(waiting):
            names = _signature(tokens, pieces[index]) & by_name.keys()
            if (
                any(found.issuperset(by_name[name]) for name in names)
                if pieces[index].kind == "function"
                else names <= known
            ):
                waiting.remove(index)
                left.append(index)
            elif pieces[index].kind == "function" and not names:
                waiting.remove(index)
                left.append(index)
        if not left:
            return found


def _signature(tokens: Tokens, piece: Piece) -> set[str]:
    end = piece.body if piece.body >= 0 else piece.end
    return {word for word in tokens.words[piece.start : end] if is_word(word)}


def rendered(
    tokens: Tokens, pieces: Sequence[Piece], kept: set[int], instead: Iterable[tuple[int, int, str]] = ()
) -> str:
    """The text with every piece blanked that isn't kept; lines keep their numbers.

    `instead` are positions in the text, from and to, and what takes their place.
    """
    spans = list(instead)
    for index, piece in enumerate(pieces):
        gone = hidden(piece) if index in kept else [piece]
        spans += [(tokens.starts[each.start], tokens.end(each.end - 1), "") for each in gone if each.end > each.start]
    out: list[str] = []
    at = 0
    for start, end, text in sorted(spans):
        out += [tokens.text[at:start], text, *_LINES.findall(tokens.text, start, end)]
        at = end
    return "".join([*out, tokens.text[at:]])
