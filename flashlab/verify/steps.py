"""The steps of a verification, in each of which the target may end the process that it runs in, and the alarm that ends it."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeVar

from flashlab.base.process import LOOK, Stopwatch

__all__ = ["MOST_ENDS", "WHERE", "Alarm", "Ended", "Steps", "line_of"]

T = TypeVar("T")
Place = tuple[str, int]

MOST_ENDS = 5
"""How often the process may end. After that nothing more is run."""
WHERE = "where.txt"
"""The file in which an alarm writes what was running."""


class Ended(Exception):
    """The process ended in this step. The message says how, and `place` is the line that it was in, if that is known."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message, place)
        self.message, self.place = message, place


class Steps:
    """The steps of a verification in this process. `over` says why nothing more is run, if so."""

    over = ""

    def step(self, body: Callable[[], T]) -> T:
        """What `body` returns. Raises `Ended`, and `Refused` if nothing more is run."""
        return body()

    @contextmanager
    def call(self) -> Generator[None]:
        """Around each call of the target."""
        yield


class Alarm:
    """It ends the process in which a call takes more than so many `seconds` of its own time (`process.Stopwatch`). What was
    running then stands in a file of the folder."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.where, self.seconds = folder / WHERE, seconds

    @contextmanager
    def call(self) -> Generator[None]:
        if math.isinf(self.seconds):
            yield
            return
        with self.where.open("w", encoding="utf-8") as where:
            over = threading.Event()
            alarm = threading.Thread(target=self._put_off, args=(where, over), daemon=True)
            self._arm(where, self.seconds)
            alarm.start()
            try:
                yield
            finally:
                over.set()
                alarm.join()
                faulthandler.cancel_dump_traceback_later()

    def _put_off(self, where: TextIO, over: threading.Event) -> None:
        """The alarm goes by the clock, also where native code lets no other thread run. Here it is put off while the call is
        given no time: a busy machine is no finding."""
        watch = Stopwatch(os.getpid())
        while not over.wait(LOOK):
            self._arm(where, self.seconds - watch.seconds)

    @staticmethod
    def _arm(where: TextIO, seconds: float) -> None:
        late = 2 * LOOK if seconds > 0 else 0
        faulthandler.dump_traceback_later(max(seconds + late, 1e-3), exit=True, file=where)


def line_of(traceback: str) -> Place | None:
    """Where the target's function is, in what faulthandler wrote (innermost frame first): what `candidate` has called."""
    own = re.escape(str(Path(__file__).with_name("candidate.py")))
    found = re.search(rf'File "(.*)", line (\d+) in .*\n  File "{own}", line \d+ in called\n', traceback)
    return (found[1], int(found[2])) if found else None
