"""Work in threads that an interrupt ends. A browser's Python has none, so there the work is done piece by piece."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

_LOOK = 0.1  # seconds: an interrupt that comes just before a thread begins to wait doesn't wake it


def workers() -> int:
    """How many threads are worth their start: one for each core, and a single one in a browser, which starts none."""
    return 1 if sys.platform == "emscripten" else os.cpu_count() or 1


def together(work: Sequence[Callable[[], T]], stop: Callable[[], object], threads: int | None = None) -> list[T]:
    """What each piece of work returns. So many `threads` (None: one for each piece) share it out. A single one is the caller's.

    An interrupt, or what one piece raises, calls `stop`, which has to end the pieces that run. It is raised when they have
    ended.

    >>> together([lambda: 1, lambda: 2], stop=lambda: None)
    [1, 2]
    """
    if threads == 1:
        return [piece() for piece in work]
    with ThreadPoolExecutor(threads or max(1, len(work))) as pool:
        try:
            # in a copy of the caller's context, so that its np.errstate holds in all threads
            waiting = futures = [pool.submit(copy_context().run, piece) for piece in work]
            while waiting:
                done, waiting = wait(waiting, _LOOK, FIRST_EXCEPTION)
                for future in done:
                    future.result()
            return [future.result() for future in futures]
        except BaseException:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
