"""Verifies a target in a process of its own, and in another one where that ends."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlab.base.apart import Ended, call_apart
from flashlab.verify.report import Report, Row
from flashlab.verify.steps import Journal, note, read
from simulator.errors import Said, UsageError

if TYPE_CHECKING:
    from flashlab.verify import Options

__all__ = ["verify_apart"]


def verify_apart(
    name: str, load: Callable[[], Any], options: Options, *, seconds: float = math.inf, memory: int | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Report:  # fmt: skip
    """What `verify` says of the target that `load` returns in a child process, which is restarted when it ends.

    A check in which it ended has failed. A call of the target may take `seconds`; the child may use `memory` bytes of
    address space. What it prints goes to stderr when it has ended. `name` is the target's, for errors. Raises what `load`
    and `verify` raise.
    """
    from flashlab.base.scratch import scratch  # only where there is a child

    begun = time.perf_counter()
    with scratch() as folder:
        journal = Journal(folder, seconds)
        rows = _Rows(folder / "rows.pickle", on_row)
        while True:
            try:
                done = call_apart(_verified, folder, seconds, load, options, memory=memory, poll=rows.show)
            except Ended as ended:
                print(ended.printed, end="", file=sys.stderr)
                if not journal.end(str(ended)):
                    raise UsageError("target", Said(name), f"a target that can be loaded: {ended}") from None
                continue
            rows.show()
            print(done.printed, end="", file=sys.stderr)
            return replace(done.value, seconds=time.perf_counter() - begun)


def _verified(folder: Path, seconds: float, load: Callable[[], Any], options: Options) -> Report:
    """In the child: it begins anew, and so do its rows."""
    from flashlab.verify import verified

    rows = folder / "rows.pickle"
    rows.write_bytes(b"")
    return verified(load(), options, lambda row: note(rows, row), Journal(folder, seconds))


class _Rows:
    """The rows that the child has noted, each shown once."""

    def __init__(self, file: Path, on_row: Callable[[Row], None] | None) -> None:
        self.file, self.on_row = file, on_row
        self.size, self.shown = 0, 0

    def show(self) -> None:
        size = self.file.stat().st_size if self.file.exists() else 0
        if self.on_row is None or size == self.size:
            return
        self.size, rows = size, read(self.file)
        for row in rows[self.shown :]:
            self.on_row(row)
        self.shown = max(self.shown, len(rows))
