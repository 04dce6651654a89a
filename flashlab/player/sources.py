"""Finds the lines of each step: from its `block.step` on in the tile program, from its `// step:` marks in the kernel.

A kernel in Triton has `# step:` marks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from simulator import catalogue
from simulator.errors import UsageError
from simulator.trace import Trace

__all__ = ["Kernel", "Mark", "kernels_of", "marks", "step_lines"]

_MARK = re.compile(r"\s*(//|#) step: (\w+)(?: \((.+)\))?\s*$")
_STEP = re.compile(r"\.step\(")
_EMPTY = re.compile(r"[\s{};)]*((//|# ).*)?")
_END = {"//": re.compile(r"}"), "#": re.compile(r"\S")}
"""Where a function ends, by the sign of a comment."""


class Mark(NamedTuple):
    """Lines `first` to `last` of a step (from 1, both included). `tag` is what the mark has in parentheses."""

    first: int
    last: int
    tag: str


class Kernel(NamedTuple):
    """The file of a kernel, and the marks of each step in it."""

    name: str
    text: str
    marks: dict[str, list[Mark]]


def step_lines(text: str, first_line: int, line: int) -> tuple[int, int]:
    """The first and the last line of a step that begins at `line`, where `text` begins at `first_line`.

    The step ends before the next one, or where its loop or branch ends.

    >>> step_lines("for j in walk:\\n    block.step('a')\\n    x = 1\\n    block.step('b')\\n    y = 2\\nreturn y", 10, 11)
    (11, 12)
    """
    lines = text.splitlines()
    start = line - first_line
    if not 0 <= start < len(lines):
        return line, line
    depth, end = _indent(lines[start]), start
    for at in range(start + 1, len(lines)):
        if _STEP.search(lines[at]) or (lines[at].strip() and _indent(lines[at]) < depth):
            break
        if lines[at].strip():
            end = at
    if end > start and _opens_a_step(lines, end):
        end -= 1
    return line, first_line + end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _opens_a_step(lines: list[str], at: int) -> bool:
    """True for a `for` or `if` whose first line begins a step: it belongs to that step."""
    return lines[at].rstrip().endswith(":") and at + 1 < len(lines) and bool(_STEP.search(lines[at + 1]))


def marks(text: str) -> dict[str, list[Mark]]:
    """The marked lines of a kernel, by step. A mark covers the code up to the next mark or the end of its function.

    >>> marks("// step: a\\nx();\\n\\n// step: b (ahead)\\ny();\\n}\\n")
    {'a': [Mark(first=1, last=2, tag='')], 'b': [Mark(first=4, last=5, tag='ahead')]}
    """
    lines = text.splitlines()
    found: defaultdict[str, list[Mark]] = defaultdict(list)
    for at, line in enumerate(lines):
        if not (mark := _MARK.match(line)):
            continue
        end = at + 1
        while end < len(lines) and not _MARK.match(lines[end]) and not _END[mark[1]].match(lines[end]):
            end += 1
        while end > at + 1 and (_EMPTY.fullmatch(lines[end - 1]) or _leads_to_a_mark(lines, end - 1)):
            end -= 1
        found[mark[2]].append(Mark(at + 1, end, mark[3] or ""))
    return dict(found)


def _leads_to_a_mark(lines: list[str], at: int) -> bool:
    """True for an `if (...) {` or a `for ...:` right above a mark: it belongs to the mark's step."""
    return lines[at].rstrip().endswith(("{", ":")) and at + 1 < len(lines) and bool(_MARK.match(lines[at + 1]))


def kernels_of(trace: Trace, kernel: str | Path | None) -> dict[str, Kernel]:
    """The file of each launch's kernel: `kernel` (an algorithm's name or a path) for all, or the algorithm's own."""
    from flashlab.run import abi  # only where a page is made

    launches = list(dict.fromkeys(event.launch for event in trace.events))
    if kernel is not None:
        found = _kernel(_path(kernel))
        return dict.fromkeys(launches, found)
    row = catalogue.CATALOGUE.get(trace.algorithm)
    paths = {each.entry: abi.source_of(each) for each in row.kernels} if row else {}
    files = {path: _kernel(path) for path in set(paths.values())}
    return {launch: files[paths[launch]] for launch in launches if launch in paths}


def _path(kernel: str | Path) -> Path:
    from flashlab.run import abi

    try:
        row = catalogue.CATALOGUE.get(str(kernel))
        path = row and abi.own_source(row) or Path(kernel)
        there = path.suffix in (".cu", ".cuh", ".py") and path.is_file()
    except (TypeError, ValueError, OSError):
        there, path = False, Path()
    if not there:
        raise UsageError("kernel", str(kernel), f"a .cu file, or one of {', '.join(catalogue.with_kernels())}")
    return path


def _kernel(path: Path) -> Kernel:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("kernel", str(path), f"a CUDA source that can be read ({type(error).__name__})") from None
    return Kernel(path.name, text, marks(text))
