"""Prints tables and lines for people to stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from flashlab.base.files import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "give_columns", "line", "table"]

_UNLIMITED = 10_000


def line(text: str = "") -> None:
    """Print a line as it is, but for what a terminal would obey: it may have words of a stranger's file."""
    print(printable(text))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table: `left` columns of text, which say what a row is about, then columns of figures.

    Columns of figures without room in the terminal go below, beside the same text. A column without any is left out.
    """
    from rich.table import Table

    title, *columns = map(printable, (title, *columns))
    rows = [[printable(text) for text in row] for row in rows]
    out = console(sys.stdout)
    out.print(title, style="bold", markup=False)
    shown = [i for i in range(len(columns)) if i < left or not rows or any(row[i] for row in rows)]
    for part in _parts(shown, columns, rows, out.width, left):
        printed = Table(header_style="bold", show_edge=False, pad_edge=False)
        for index in part:
            text = index < left
            printed.add_column(
                _escape(columns[index]), justify="left" if text else "right", overflow="fold", no_wrap=not text
            )
        for row in rows:
            printed.add_row(*(_escape(row[index]) for index in part))
        out.print(printed)


def _parts(
    shown: Sequence[int], columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int
) -> Iterator[list[int]]:
    """The columns of each part of a table, so that every part fits into `width`. Each part begins with those of text."""
    from rich.cells import cell_len

    between = len(" │ ")
    needs = {
        i: max(cell_len(word) for text in (columns[i], *(row[i] for row in rows)) for word in text.split("\n"))
        + between
        for i in shown
    }
    about = [i for i in shown if i < left]
    part = list(about)
    for index in shown[len(about) :]:
        if sum(needs[i] for i in (*part, index)) - between > width and len(part) > len(about):
            yield part
            part = list(about)
        part.append(index)
    yield part


def console(stream: TextIO | None) -> Console:
    """A console that writes to this stream (None: it is closed).

    A pipe has no width: lines stay whole there unless COLUMNS sets one.
    """
    from rich.console import Console

    fixed = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    give_columns()
    return Console(file=stream, width=None if fixed else _UNLIMITED, highlight=False)


def give_columns() -> None:
    """Some terminals say that they have no columns. rich then prints nothing at all, and typer's help is printed by it, too."""
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and not int(said):
        os.environ["COLUMNS"] = "80"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
