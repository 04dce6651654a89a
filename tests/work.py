"""How much work a call does, in what a busy machine doesn't change: function calls, and bytes that are held at once."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable


def calls(do: Callable[[], object]) -> int:
    """Function calls, of Python's own functions and of those in C. The garbage collector waits: it comes when it
    likes, and Hypothesis has it call two functions each time."""
    n = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal n
        n += event in ("call", "c_call")

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
