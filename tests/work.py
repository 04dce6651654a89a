"""How much work a call does, in what a busy machine doesn't change: function calls, and bytes that are held at once."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def calls(do: Callable[[], object], by: str = "") -> int:
    """Function calls, of Python's own functions and of those in C; with `by`, only those that a file makes whose path has it.
    The garbage collector waits: it comes when it likes, and Hypothesis has it call two functions each time."""
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n
        caller = frame if event == "c_call" else frame.f_back
        n += event in ("call", "c_call") and caller is not None and by in caller.f_code.co_filename

    before = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return n


def peak_bytes(do: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy hold at once, beyond those held before."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
