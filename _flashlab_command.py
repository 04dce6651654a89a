"""The command `flashlab`, until its modules are loaded: that takes most of a second, in which an interrupt may come.

It lies outside of the package `flashlab`, since whatever imports a module of a package has loaded the package before.
"""

from __future__ import annotations

import os
import signal

__all__ = ["listen", "loaded", "main"]


def main() -> None:
    """Run the command line. The installed script `flashlab` calls this."""
    listen()
    from flashlab.cli import main

    main()


def listen() -> None:
    """From now on an interrupt ends the process, without a word: nothing was begun. One that is ignored still is."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def loaded() -> None:
    """All is loaded: an interrupt is a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os._exit(130)
