"""Interrupts of the command `flashlab` until its modules are loaded. That takes most of a second.

The package imports this module before any other, so it needs next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["listen", "loaded"]


def listen() -> None:
    """In a process of the command an interrupt ends it from now on, without a word: nothing was begun. One that is ignored still
    is. A process that imports the package as a library isn't touched."""
    ours = sys.orig_argv[1:3] == ["-m", "flashlab"] or os.path.basename(sys.argv[0]) in ("flashlab", "flashlab.exe")
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def loaded() -> None:
    """All is loaded: an interrupt is a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os._exit(130)


listen()
