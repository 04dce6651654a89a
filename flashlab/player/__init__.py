"""The player: one HTML page that steps through a trace, in a file or inline in a notebook."""

from __future__ import annotations

import html
from os import PathLike
from pathlib import Path
from typing import Any

from flashlab.base.files import path_of, replace_file
from simulator.errors import UsageError
from simulator.simulate import Run
from simulator.trace import Trace

__all__ = ["INLINE_LIMIT", "LIMIT", "Player", "player"]

LIMIT = 1_000_000
"""The largest page in a file, in bytes. A larger one keeps fewer values."""
INLINE_LIMIT = 300_000
"""The largest page inline in a notebook, in bytes."""
_FRAME_HEIGHT = 760


def player(
    trace: Trace | Run, other: Trace | Run | None = None, *, step: int = 1, kernel: str | PathLike[str] | None = None
) -> Player:
    """A player of a trace (or of the run that recorded one), or of two traces side by side.

    Jupyter and VS Code show it by themselves. `.save("flash2.html")` writes the page: one file that needs no server and
    loads nothing. The page opens at `step`, counted from 1. `kernel` is the .cu to show beside the tile program of
    `trace`: an algorithm's name or a path. The default is the algorithm's own, and none for a program of your own.
    Raises `UsageError` for a run without a trace, a step that the traces lack, or an unknown kernel.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16", causal=True)
    >>> one, two = (
    ...     fl.simulate(name, *fl.random_inputs(p), causal=True, tile=(16, 16), trace=(0, 0)).trace
    ...     for name in ("standard", "flash2")
    ... )
    >>> fl.player(two).save("flash2.html").name
    'flash2.html'
    >>> fl.player(one, two)
    <player of standard (196 steps) and flash2 (86 steps)>
    """
    traces = [_trace("trace", trace)] if other is None else [_trace("trace", trace), _trace("other", other)]
    last = max(len(each.events) for each in traces)
    if not isinstance(step, int) or not 1 <= step <= last:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("step", step, f"an integer from 1 to {last}")
    return Player(traces, step=step, kernel=None if kernel is None else path_of("kernel", kernel))


def _trace(argument: str, given: Any) -> Trace:
    trace = given.trace if isinstance(given, Run) else given
    if not isinstance(trace, Trace):
        shown = "a run without a trace" if isinstance(given, Run) else given
        raise UsageError(argument, shown, "a trace, as in fl.simulate(..., trace=(0, 0)).trace")
    if not trace.events:
        raise UsageError(argument, trace, "a trace with at least one step")
    return trace


class Player:
    """A page that steps through one trace or two; see `player`.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16")
    >>> page = fl.player(fl.simulate("flash2", *fl.random_inputs(p), trace=(0, 0)).trace).html()
    >>> page.startswith("<!doctype html>"), "http://" in page or "https://" in page
    (True, False)
    """

    def __init__(self, traces: list[Trace], *, step: int, kernel: Path | None) -> None:
        self.traces, self.step, self.kernel = traces, step, kernel
        from flashlab.player.page import Part  # only where there is a page to make

        self._parts = [Part(trace, None if n else kernel) for n, trace in enumerate(traces)]

    def html(self) -> str:
        """The page as text. If it would exceed `LIMIT` bytes, it keeps fewer values of register tiles and says so."""
        from flashlab.player.page import build

        return build(self._parts, step=self.step, limit=LIMIT, cut=False)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page to a file, and replace one that is there."""
        return replace_file(path, self.html())

    def frame(self) -> str:
        """What a notebook shows: the page in an iframe that may only run its script, at most `INLINE_LIMIT` bytes."""
        from flashlab.player.page import attribute, build

        names = " and ".join(trace.algorithm for trace in self.traces)
        before = (
            f'<iframe title="{html.escape(f"{names}, step by step")}" sandbox="allow-scripts" width="100%" '
            f'height="{_FRAME_HEIGHT}" style="border: 0; width: 100%; height: {_FRAME_HEIGHT}px" srcdoc="'
        )
        after = '"></iframe>'
        room = INLINE_LIMIT - len((before + after).encode())
        return before + attribute(build(self._parts, step=self.step, limit=room, cut=True, escaped=True)) + after

    _repr_html_ = frame

    def __repr__(self) -> str:
        return f"<player of {' and '.join(f'{t.algorithm} ({len(t.events):,} steps)' for t in self.traces)}>"
