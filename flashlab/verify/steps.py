"""The steps of a verification, in each of which the target's code may end the process.

In a process of its own (`apart`), what each step came to is kept in a folder. If the process ends, the next one begins
anew: it reads what was kept instead of doing it once more, up to the step in which the other one ended.
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import re
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from flashlab.base.process import LOOK, Stopwatch
from flashlab.verify.adapter import Refused

__all__ = ["MOST_ENDS", "Ended", "Journal", "Steps"]

T = TypeVar("T")
Place = tuple[str, int]

MOST_ENDS = 5
"""How often the process may end. After that nothing more is run."""


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


class Journal(Steps):
    """The steps in a process of their own, kept in a folder. A call of the target may take so many `seconds` of its
    own time (`process.Stopwatch`)."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.kept, self.begun, self.where = folder / "steps.pickle", folder / "begun", folder / "where.txt"
        self.seconds = seconds
        self.before = deque(read(self.kept))
        if sum(isinstance(each, Ended) for each in self.before) >= MOST_ENDS:
            self.over = f"its process had ended {MOST_ENDS} times"

    def step(self, body: Callable[[], T]) -> T:
        if self.before:
            known = self.before.popleft()
            if isinstance(known, Ended):
                raise known
            return known
        if self.over:
            raise Refused(self.over)
        self.begun.touch()
        result = body()
        note(self.kept, result)
        self.begun.unlink()
        return result

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

    def end(self, message: str) -> bool:
        """The process has ended, as the message says. Keep it as what its last step came to; false if it was in none."""
        if not self.begun.exists():
            return False
        text = self.where.read_text(encoding="utf-8", errors="replace") if self.where.exists() else ""
        if text:
            message = f"a call was still running after {self.seconds:g} seconds"
        whole = read(self.kept)  # it may have ended while it wrote
        self.kept.write_bytes(b"".join(map(pickle.dumps, [*whole, Ended(message, _line_of(text))])))
        self.begun.unlink()
        self.where.unlink(missing_ok=True)
        return True


def note(file: Path, value: Any) -> None:
    """Add a value to those in a file."""
    with file.open("ab") as sink:
        sink.write(pickle.dumps(value))


def read(file: Path) -> list[Any]:
    """The values that were noted in a file."""
    found: list[Any] = []
    with suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), file.open("rb") as source:
        while True:
            found.append(pickle.load(source))
    return found


def _line_of(traceback: str) -> Place | None:
    """Where the target's function is, in what faulthandler wrote (innermost frame first): what `adapter` has called."""
    own = re.escape(str(Path(__file__).with_name("adapter.py")))
    found = re.search(rf'File "(.*)", line (\d+) in .*\n  File "{own}", line \d+ in results\n', traceback)
    return (found[1], int(found[2])) if found else None
