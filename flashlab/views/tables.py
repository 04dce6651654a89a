"""Prints tables and lines for people to stdout."""

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
    """Print a line as it is."""
    print(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table: `left` columns of text, then columns of figures. Columns without room in the terminal go below."""
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
    """The columns of each part of a table, so that every part fits into `width`. Each part repeats the first column."""
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


def console(stream: TextIO | None) -> Console:
    """A console that writes to this stream (None: it is closed).

    A pipe has no width: lines stay whole there unless COLUMNS sets one.
    """
    from rich.console import Console

    fixed = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    return Console(file=stream, width=None if fixed else _UNLIMITED, highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
