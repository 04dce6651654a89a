"""Calls a function in a process of its own, for native code can end whatever process it runs in.

That is for accidents. It is no sandbox: the code can do what any program of this user can.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.base.process import run_child

__all__ = ["Answer", "Ended", "call_apart"]

_FLOOD = 16 << 20
"""Bytes that it may print: every thread of a kernel may have its line."""


@dataclass(frozen=True)
class Answer:
    """What a function returned in another process, and what that process printed."""

    value: Any
    printed: str


class Ended(Exception):
    """The process ended before the function returned. The message says how; `printed` is what it had printed.

    Or it was `late`, and was ended: then nobody knows what it would have come to.
    """

    def __init__(self, message: str, printed: str, late: bool = False) -> None:
        super().__init__(message)
        self.printed, self.late = printed, late


def call_apart(
    function: Callable[..., Any], *arguments: Any, seconds: float = math.inf, memory: int | None = None,
    poll: Callable[[], object] = lambda: None, **named: Any,
) -> Answer:  # fmt: skip
    """Call a function in a child process, in the same folder and with the same modules in reach.

    It may run for `seconds` of its own time (`process.Stopwatch`), and use `memory` bytes of address space. `poll` is called
    from time to time in the meantime. Raises what the function raises, and `Ended`. Nothing that the child has started is left.
    """
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]  # only for a child: it costs import time

    from flashlab.base.scratch import scratch

    dumped: bytes = cloudpickle.dumps((function, arguments, named))  # pyright: ignore[reportUnknownMemberType]
    job = {"folder": str(Path.cwd()), "path": sys.path, "memory": memory, "call": dumped}
    with scratch() as folder:
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        outcome = run_child(folder, seconds, "flashlab.base.apart_child", {}, own_time=True, flood=_FLOOD, poll=poll)
        answer, printed = (
            folder / "answer.pickle",
            (folder / "printed.txt").read_text(encoding="utf-8", errors="replace"),
        )
        if outcome.kind != "done" or not answer.exists():
            raise Ended(outcome.message, printed[:_FLOOD], late=outcome.kind == "no end")
        kind, value = pickle.loads(answer.read_bytes())
        if kind == "raised":
            raise value
        return Answer(value, printed)
