"""Bars for what takes long, on a terminal's stderr or in a notebook. Elsewhere, as in a pipe, nothing is shown."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from flashlab.views.tables import console
from simulator.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = ["Progress", "busy", "remark", "track", "wrapping"]

T = TypeVar("T")

Progress = bool | Callable[[Iterable[Any]], Iterable[Any]]
"""Whether a loop shows a bar, or what wraps its items, as `tqdm.tqdm` would."""


def wrapping(progress: Progress, label: str) -> Callable[[Iterable[T]], Iterable[T]]:
    """What wraps a loop's items. `label` says what they are. Raises `UsageError`.

    >>> list(wrapping(False, "cells")([1, 2]))
    [1, 2]
    >>> wrapping("yes", "cells")
    Traceback (most recent call last):
        ...
    simulator.errors.UsageError: progress = 'yes': expected True, False, or a function that wraps an iterable
    """
    if isinstance(progress, bool):
        return track(label) if progress else iter
    if not callable(progress):
        raise UsageError("progress", progress, "True, False, or a function that wraps an iterable")
    return progress


def track(label: str) -> Track:
    """Wrap an iterable, as in `compare(..., progress=track("algorithms"))`: a loop of over a second shows a bar."""
    return Track(label)


class Track:
    """What `track` makes."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        work = list(items)
        with _bar(self.label, len(work)) as tick:
            for item in work:
                yield item
                tick(item)


@contextmanager
def busy(label: str) -> Generator[Callable[[object], None]]:
    """Show a bar of unknown length while the block runs, if that takes over a second. Call what it yields per step."""
    with _bar(label, None) as tick:
        yield tick


@contextmanager
def remark(text: str) -> Generator[None]:
    """Say something on stderr if the block runs for over a second: what is refused at once ends with its one line."""
    with _after_a_second(lambda: text and print(text, file=sys.stderr, flush=True)):
        yield


@contextmanager
def _bar(label: str, total: int | None) -> Generator[Callable[[object], None]]:
    out, notebook = console(sys.stderr), _in_a_notebook()
    if not out.is_terminal and not notebook:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    done: ProgressColumn = TextColumn("{task.completed:.0f}") if total is None else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), done, TimeElapsedColumn()
    bar = Progress(*columns, console=Console() if notebook else out, transient=True)
    task = bar.add_task(label, total=total)
    if notebook:  # whose cell is its own thread's to write
        bar.start()
    try:
        with nullcontext() if notebook else _after_a_second(bar.start):
            yield lambda _: bar.advance(task)
    finally:
        bar.stop()


def _in_a_notebook() -> bool:
    """Does this run in Jupyter, with the widgets that a bar needs there?"""
    if "ipykernel" not in sys.modules or find_spec("ipywidgets") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter


@contextmanager
def _after_a_second(show: Callable[[], object]) -> Generator[None]:
    shown = threading.Timer(1.0, show)
    shown.daemon = True
    shown.start()
    try:
        yield
    finally:
        shown.cancel()
        shown.join()  # it may be showing it this very moment
