"""Reads a CUDA source before the compiler does: refuses what can't run here, and finds its kernels and its headers."""

from __future__ import annotations

import re
from pathlib import Path

from simulator.errors import UsageError

__all__ = ["check", "headers_of", "kernels_of", "said_of"]

_COMMENT = r"//[^\n]*|/\*.*?\*/"
_STRING = r'"(?:\\.|[^"\\\n])*"'
_BOUNDS = r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_FOREIGN = re.compile(r"(thrust|cutlass|cute|nv|torch|ATen|c10)/|curand|cublas|cufft|nvtx")
_REFUSED = (
    (re.compile(r"<<<"), "a source without host code: grid and block describe the launch. #ifndef EMULATOR hides it"),
    (re.compile(r"\bint\s+main\s*\("), "a source without a main: grid and block describe the launch"),
)


def check(path: Path, text: str) -> None:
    """Raise `UsageError`, with the line, for what the emulator can't run.

    A source that mentions the macro `EMULATOR` is made for it, so only its includes are checked.
    """
    bare = _blank(_COMMENT, text)
    for match in _INCLUDE.finditer(bare):
        if _FOREIGN.match(match[1]):
            raise UsageError(
                "file",
                _at(path, bare, match.start(1)),
                f"plain CUDA C++ with the headers of the types (cuda_fp16.h, …): {match[1]} isn't known here",
            )
    if re.search(r"\bEMULATOR\b", bare):
        return
    code = _blank(_STRING, bare)
    for pattern, expected in _REFUSED:
        if match := pattern.search(code):
            raise UsageError("file", _at(path, code, match.start()), expected)


def kernels_of(text: str) -> tuple[str, ...]:
    """The names of a source's kernels, without templates.

    >>> kernels_of("extern \\"C\\" __global__ void __launch_bounds__(128) scale(float* x) {}")
    ('scale',)
    """
    bare = re.sub(f"{_COMMENT}|{_BOUNDS}", "", text, flags=re.DOTALL)
    found = re.finditer(r"(template\s*<[^;{]*>\s*)?(?:extern\s*\"C\"\s*)?__global__\s[^;{(]*?(\w+)\s*\(", bare)
    return tuple(dict.fromkeys(match[2] for match in found if not match[1]))


def headers_of(path: Path, text: str) -> dict[Path, str]:
    """The headers beside a source that it includes, directly or through others, with their text."""
    found: dict[Path, str] = {}
    left = [(path.parent, text)]
    while left:
        folder, source = left.pop()
        for match in _INCLUDE.finditer(source):
            header = (folder / match[1]).resolve()
            if header not in found and header.is_file():
                found[header] = header.read_text(encoding="utf-8", errors="replace")
                left.append((header.parent, found[header]))
    return found


def said_of(path: Path, log: str, hidden: tuple[Path, ...]) -> str:
    """What a compiler's log says of the source: at most 40 lines, without the paths of its and the `hidden` folders."""
    if match := re.search(r"^doors:.* error: (.*)$", log, re.MULTILINE):
        return f"no kernel can be reached by that name: {match[1]}"
    rows = [row for row in log.splitlines() if "kernel.cpp" not in row]
    text = "\n".join(rows[:40])
    for folder in (path.parent, *hidden):
        text = text.replace(f"{folder}/", "")
    return text.strip()


def _blank(pattern: str, text: str) -> str:
    """The text with every match blanked; lines keep their numbers."""
    return re.sub(pattern, lambda match: " " + "\n" * match[0].count("\n"), text, flags=re.DOTALL)


def _at(path: Path, text: str, position: int) -> str:
    return f"{path.name}:{text.count(chr(10), 0, position) + 1}"
