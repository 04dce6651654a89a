"""Work in threads that an interrupt ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

_LOOK = 0.1  # seconds: an interrupt that comes just before a thread begins to wait doesn't wake it


def together(work: Sequence[Callable[[], T]], stop: Callable[[], object], threads: int | None = None) -> list[T]:
    """What each piece of work returns. So many `threads` (None: one for each piece) share it out.

    An interrupt, or what one piece raises, calls `stop`, which has to end the pieces that run. It is raised when they have
    ended.

    >>> together([lambda: 1, lambda: 2], stop=lambda: None)
    [1, 2]
    """
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
