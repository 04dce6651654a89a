"""Runs a kernel of somebody's file in a process of its own, for native code can end whatever process it runs in.

That is for accidents. It is no sandbox: the file's code can do what any program of this user can.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from flashlab.emulator.files import FileRun
from flashlab.emulator.library import Finding, Launched
from flashlab.lessons.process import run_child
from simulator.errors import UsageError

__all__ = ["MEMORY", "emulate_apart", "main"]

MEMORY = 64 << 30
"""Bytes of address space. Most of it is the lanes' stacks, 576 KB each, of which little is ever touched."""

_SLACK = 60.0
"""Seconds beside the launch: it is run up to three times more, and compiled, for a local variable that nobody set."""


def emulate_apart(path: Path | str, arguments: Mapping[str, Any], **given: Any) -> FileRun:
    """What `emulate_file` does with the same arguments, in a child process with limits of time and memory.

    If the child dies, that is a finding of the kind "crash" without a line. What the kernel prints is printed when it
    has ended. Raises what `emulate_file` raises.
    """
    limit = given.get("time_limit", 60)
    seconds = 4 * limit + _SLACK if limit else 1e9
    with TemporaryDirectory(prefix="flashlab-") as name:
        folder = Path(name)
        (folder / "job.pickle").write_bytes(pickle.dumps((Path(path).absolute(), dict(arguments), _absolute(given))))
        outcome = run_child(folder, seconds, __name__)
        print((folder / "printed.txt").read_text(encoding="utf-8", errors="replace"), end="")
        answer = folder / "answer.pickle"
        if outcome.kind == "done" and answer.exists():
            result: Any = pickle.loads(answer.read_bytes())
            if isinstance(result, UsageError) and result.value == str(Path(path).absolute()):
                raise UsageError(result.argument, str(path), result.accepted)  # as the user wrote it
            if isinstance(result, Exception):
                raise result
            return cast(FileRun, result)
    return _crashed(str(given.get("kernel") or Path(path).name), outcome.message)


def _absolute(given: Mapping[str, Any]) -> dict[str, Any]:
    """The child works in another folder."""
    return {**given, "includes": [Path(folder).absolute() for folder in given.get("includes", ())]}


def _crashed(kernel: str, message: str) -> FileRun:
    nowhere: Any = {
        "line": None,
        "via": (),
        "step": "",
        "block": (0, 0, 0),
        "thread": (0, 0, 0),
        "space": "",
        "tensor": "",
    }
    finding = Finding("crash", f"the kernel's code ended it: {message}", **nowhere, offset=0, bytes=0, times=1)
    return FileRun({}, Launched(kernel, (), (finding,), 0, 0, 0, 0, stopped=True), {})


def main(folder: Path) -> None:
    """The child: it runs the job in a folder and leaves the answer there."""
    from flashlab.emulator.files import emulate_file

    _limit()
    path, arguments, given = pickle.loads((folder / "job.pickle").read_bytes())  # the parent's own, of this very moment
    (folder / "where.txt").touch()
    (folder / "ready").touch()
    try:
        answer: Any = emulate_file(path, arguments, **given)
    except Exception as error:
        answer = error
    (folder / "answer.pickle").write_bytes(pickle.dumps(answer))
    (folder / "done.json").write_text("{}", encoding="utf-8")


def _limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
