"""What commands print: one JSON document or tables on stdout; progress and remarks on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

from flashlab.files import plain
from flashlab.views.tables import console

T = TypeVar("T")

SCHEMA = 1
"""The version of the JSON documents. It rises when a key changes its meaning or is removed."""


def document(content: Mapping[str, Any]) -> None:
    """Print the one JSON document. Infinities and NaN become text that `float` reads: "-inf", "nan"."""
    body = content if "schema" in content else {"schema": SCHEMA, **content}
    print(json.dumps(plain(body), indent=2, allow_nan=False))


def remark(text: str) -> None:
    """Print a line about the run, rather than its result, to stderr."""
    print(text, file=sys.stderr, flush=True)


def track(label: str) -> _Track:
    """Wrap an iterable, as in `compare(..., progress=track("algorithms"))`: a loop of over a second shows a bar."""
    return _Track(label)


class _Track:
    def __init__(self, label: str) -> None:
        self.label = label

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        out = console(sys.stderr)
        work = list(items)
        if not out.is_terminal:
            yield from work
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        bar = Progress(*columns, console=out, transient=True)
        task = bar.add_task(self.label, total=len(work))
        with _after_a_second(bar):
            for item in work:
                yield item
                bar.advance(task)


@contextmanager
def busy(label: str) -> Generator[Callable[[object], None]]:
    """Show a bar of unknown length while the block runs, if that takes over a second. Call what it yields per step."""
    out = console(sys.stderr)
    if not out.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn()
    bar = Progress(*columns, console=out, transient=True)
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
