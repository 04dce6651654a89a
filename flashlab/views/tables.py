"""Tables and lines for people, on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "line", "table"]

_UNLIMITED = 10_000


def line(text: str = "") -> None:
    """A line for people, as it is."""
    print(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """A table: `left` columns of text, then figures. What is too wide for the terminal goes on below."""
    from rich.table import Table

    out = console(sys.stdout)
    out.print(title, style="bold", markup=False)
    for part in _parts(columns, rows, out.width):
        printed = Table(header_style="bold")
        for index in part:
            text = index < left
            printed.add_column(columns[index], justify="left" if text else "right", overflow="fold", no_wrap=not text)
        for row in rows:
            printed.add_row(*(_escape(row[index]) for index in part))
        out.print(printed)


def _parts(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[list[int]]:
    """Which columns fit side by side."""
    from rich.cells import cell_len

    needs = [
        max([cell_len(word) for text in (name, *(row[i] for row in rows)) for word in text.split("\n")]) + 3
        for i, name in enumerate(columns)
    ]
    part, used = [0], needs[0] + 1
    for index, need in list(enumerate(needs))[1:]:
        if used + need > width and len(part) > 1:
            yield part
            part, used = [0], needs[0] + 1
        part.append(index)
        used += need
    yield part


def console(stream: TextIO) -> Console:
    """For a stream as it is now. A pipe has no width: nothing is cut or split there unless COLUMNS says so."""
    from rich.console import Console

    fixed = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, width=None if fixed else _UNLIMITED, highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
