"""Lines of a learner's text: which one a program is at, and whether anybody has written any."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from types import TracebackType


def line_of_hang(folder: Path, file: str) -> int | None:
    """The learner's innermost line in what faulthandler wrote."""
    text = (folder / "where.txt").read_text(encoding="utf-8") if (folder / "where.txt").exists() else ""
    for line in text.splitlines():
        if f'"{file}", line ' in line:
            return int(line.split(", line ")[1].split()[0])
    return None


def at_line(line: int | None, file: str) -> str:
    """A line of a learner's file, in words; "" without one."""
    if not line:
        return ""
    code = linecache.getline(file, line).strip()
    return f", in line {line}" + (f": {textwrap.shorten(code, 90)}" if code else "")


def line_of(traceback: TracebackType | None, file: str) -> int | None:
    """The innermost line of a file that an exception came through."""
    lines = list[int]()
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    return lines[-1] if lines else None


def squeezed(text: str) -> str:
    """Code without empty lines, spaces at the ends, and the call of `fl.check` below it."""
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("fl.check("))
