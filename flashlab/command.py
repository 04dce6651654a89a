"""The command `flashlab`. By the time that this module is loaded, the package listens for interrupts (`base.interrupts`)."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line. The installed script `flashlab` calls this."""
    from flashlab.cli import main

    main()
