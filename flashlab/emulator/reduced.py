"""Writes a published source for a compiler of CUDA: the kernels that are asked for, and what they use.

The emulator's reader tells which declarations a kernel reaches. Their lines stay as the author wrote them, under their own
numbers, with every macro and condition of the file. The other lines are blank. So neither host code nor the libraries that it
needs are in the way, and what the compiler says of a line is about that line of the file. A header that isn't here is empty.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashlab.emulator import reach
from flashlab.emulator.source import Source, above, headers_of, inside, predeclared, read

__all__ = ["Reduced", "write"]

_COMMENT = re.compile(
    r"""(?P<kept> R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+')"""
    r"""| //(?:\\.|[^\\\n])* | /\*.*?\*/""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\\\n]|\\.)*", re.MULTILINE | re.DOTALL)
_EVERYWHERE = re.compile(r"\s*#\s*(?:if|el|end|define|undef)")
"""Directives that stay among lines that go: conditions, which come in pairs, and macros, which others may use."""


@dataclass(frozen=True)
class Reduced:
    """A source as it was written for a compiler: the file, and the options that lead to its headers."""

    path: Path
    options: tuple[str, ...]


def write(source: Source, entries: Sequence[str], folder: Path) -> Reduced:
    """Write the file, with the headers of its repository that it includes, into a folder.

    The file ends with a pointer to each of `entries`, so that a template's instance is compiled. Raises `UsageError` for an
    unknown kernel.
    """
    lines = _Lines(source, source.reached(entries))
    near = [source.path.parent, *above(source.path)]
    text = read(source.path)
    texts = {source.path: text, **headers_of(source.path, text, near)}
    root = Path(os.path.commonpath([path.parent for path in texts]))
    places = {path: folder / "files" / path.relative_to(root) for path in texts}
    for path, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(lines.of(path, texts[path]), encoding="utf-8")
    own = places[source.path]
    head = f'{predeclared(source.tokens, source.pieces)}\n#line 1 "{own.name}"\n'
    own.write_text(f"{head}{own.read_text(encoding='utf-8')}\n{_pointers(source, entries)}", encoding="utf-8")
    # looked at last, as by the emulator: a <unistd.h> of the repository's is for another system, and the compiler may have
    # headers that the emulator lacks
    last = [folder / "files" / place.relative_to(root) for place in near if place.is_relative_to(root)]
    last = [*(place for place in last if place.is_dir()), _stubs(source, folder)]
    return Reduced(own, (f"-I{own.parent}", *(f"-Xcompiler=-idirafter,{place}" for place in last)))


def _stubs(source: Source, folder: Path) -> Path:
    """A folder of empty files for the missing headers."""
    stubs = folder / "a" / "b" / "c" / "d" / "e"  # "../../x.h" must stay inside
    stubs.mkdir(parents=True)
    for name in source.missing:
        stub = Path(os.path.normpath(stubs / name))
        if folder in stub.parents:
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.touch()
    return stubs


def _pointers(source: Source, entries: Sequence[str]) -> str:
    found = '#line 1 "pointers"\n'
    for i, entry in enumerate(entries):
        piece, (_, *arguments) = source.named(entry)[0], entry.partition("<")
        found += inside(piece, f"auto* const flashlab_pointer_{i} = &{piece.names[0]}{''.join(arguments)};")
    return found


class _Lines:
    """Which lines of which file stay, and which go with what the kernels don't reach.

    Of a line that both have a part of, `mixed` holds the words that stay.
    """

    def __init__(self, source: Source, reached: set[int]) -> None:
        self.source = source
        self.kept: dict[Path, set[int]] = defaultdict(set)
        self.gone: dict[Path, set[int]] = defaultdict(set)
        self.mixed: dict[tuple[Path, int], list[str]] = defaultdict(list)
        stretches = list(_stretches(source, reached))
        for start, end, stays in stretches:
            for file, line in self._places(start, end):
                (self.kept if stays else self.gone)[file].add(line)
        for start, end, stays in stretches:
            if stays and any(line in self.gone[file] for file, line in self._places(start, end)):
                for token in range(start, end):
                    self.mixed[self._place(token)].append(source.tokens.words[token])

    def of(self, path: Path, text: str) -> str:
        """A file's text without its comments and the lines that go."""
        kept, gone = self.kept[path], self.gone[path]
        plain = _COMMENT.sub(lambda m: m[0] if m["kept"] else "\n" * m[0].count("\n") or " ", text)
        whole = kept - gone
        for match in _DIRECTIVE.finditer(plain):
            first = plain.count("\n", 0, match.start()) + 1
            if first not in gone or _EVERYWHERE.match(match[0]):
                whole.update(range(first, first + match[0].count("\n") + 1))
        lines = enumerate(plain.split("\n"), 1)
        return "\n".join(line if i in whole else " ".join(self.mixed.get((path, i), ())) for i, line in lines)

    def _places(self, start: int, end: int) -> Iterator[tuple[Path, int]]:
        """The lines of some tokens, all of them in one file, or only those of the first and the last."""
        (file, first), (other, last) = self._place(start), self._place(end - 1)
        yield from ((file, line) for line in (range(first, last + 1) if file == other else (first,)))
        if file != other:
            yield other, last

    def _place(self, token: int) -> tuple[Path, int]:
        file, line = self.source.at(token)
        return _resolved(file), line


@functools.lru_cache(maxsize=256)
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _stretches(source: Source, reached: set[int]) -> Iterator[tuple[int, int, bool]]:
    """All tokens in stretches, from and to, and whether they stay. The braces of namespaces belong to no declaration, and stay."""
    at = 0
    for i, piece in enumerate(source.pieces):
        if piece.start > at:
            yield at, piece.start, True
        at = max(at, piece.start)
        for member in reach.hidden(piece) if i in reached else ():
            yield at, member.start, True
            yield member.start, member.end, False
            at = member.end
        if piece.end > at:
            yield at, piece.end, i in reached
            at = piece.end
    if at < len(source.tokens.words):
        yield at, len(source.tokens.words), True
