"""What commands print: one JSON document or tables on stdout; progress and remarks on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

SCHEMA = 1
"""The version of the JSON documents: raised when a key changes its meaning or goes."""

_UNLIMITED = 10_000


def document(content: Mapping[str, Any]) -> None:
    """Print the one JSON document. What JSON has no number for becomes text that `float` reads: "-inf", "nan"."""
    body = content if "schema" in content else {"schema": SCHEMA, **content}
    print(json.dumps(_plain(body), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def line(text: str = "") -> None:
    """A line for people, as it is."""
    print(text)


def remark(text: str) -> None:
    """A line about the run rather than its result: stderr."""
    print(text, file=sys.stderr)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """A table: `left` columns of text, then figures. What is too wide for the terminal goes on below."""
    from rich.table import Table

    console = _console(sys.stdout)
    console.print(title, style="bold", markup=False)
    for part in _parts(columns, rows, console.width):
        printed = Table(header_style="bold")
        for index in part:
            text = index < left
            printed.add_column(columns[index], justify="left" if text else "right", overflow="fold", no_wrap=not text)
        for row in rows:
            printed.add_row(*(_escape(row[index]) for index in part))
        console.print(printed)


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


def track(label: str) -> _Track:
    """Wraps an iterable, as in `compare(..., progress=track("algorithms"))`: a bar if it takes over a second."""
    return _Track(label)


class _Track:
    def __init__(self, label: str) -> None:
        self.label = label

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        console = _console(sys.stderr)
        work = list(items)
        if not console.is_terminal:
            yield from work
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        bar = Progress(*columns, console=console, transient=True)
        task = bar.add_task(self.label, total=len(work))
        with _after_a_second(bar):
            for item in work:
                yield item
                bar.advance(task)


@contextmanager
def busy(label: str) -> Generator[Callable[[object], None]]:
    """A bar without an end while the block runs, if it takes over a second; call what it yields at each step."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(label, total=None)
    with _after_a_second(bar):
        yield lambda _: bar.advance(task)


@contextmanager
def _after_a_second(bar: Progress) -> Generator[None]:
    shown = threading.Timer(1.0, bar.start)
    shown.daemon = True
    shown.start()
    try:
        yield
    finally:
        shown.cancel()
        shown.join()  # it may be starting the bar this very moment
        bar.stop()


def _console(stream: TextIO) -> Console:
    """For a stream as it is now. A pipe has no width: nothing is cut or split there unless COLUMNS says so."""
    from rich.console import Console

    fixed = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, width=None if fixed else _UNLIMITED, highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
