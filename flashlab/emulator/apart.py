"""Runs a kernel of somebody's file, or somebody's script, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from flashlab.base.apart import Ended, call_apart
from flashlab.emulator.files import FileRun, emulate_file
from flashlab.emulator.library import Finding, Launched
from flashlab.emulator.scripts import ScriptRun, run_script

__all__ = ["MEMORY", "emulate_apart", "patience", "run_script_apart"]

MEMORY = 64 << 30
"""Bytes of address space. Most of it is the lanes' stacks, 576 KB each, of which little is ever touched."""

_SLACK = 60.0
"""Seconds beside the launch: it is run up to three times more, and compiled, for a local variable that nobody set."""

_NOWHERE: Mapping[str, Any] = {
    "line": None, "via": (), "step": "", "block": (0, 0, 0), "thread": None, "space": "", "tensor": "", "offset": 0,
    "bytes": 0, "times": 1,
}  # fmt: skip


def patience(time_limit: float) -> float:
    """How long a launch with a limit of time may take in all; 0 is no limit."""
    return 4 * time_limit + _SLACK if time_limit else float("inf")


def emulate_apart(path: Path | str, arguments: Mapping[str, Any], **given: Any) -> FileRun:
    """What `emulate_file` does with the same arguments, in a child process with limits of time and memory.

    If the child dies, that is a finding of the kind "crash" without a line; if it took too long, of the kind "time limit". What
    the kernel prints is printed when it has ended. Raises what `emulate_file` raises.
    """
    seconds = patience(given.get("time_limit", 60))
    try:
        answer = call_apart(emulate_file, path, dict(arguments), seconds=seconds, memory=MEMORY, **given)
    except Ended as ended:
        print(ended.printed, end="")
        kind, what = ("time limit", str(ended)) if ended.late else ("crash", f"the kernel's code ended it: {ended}")
        finding = Finding(kind, what, **_NOWHERE)
        name = str(given.get("kernel") or Path(path).name)
        return FileRun({}, Launched(name, (), (finding,), 0, 0, 0, 0, stopped=True), {})
    print(answer.printed, end="")
    return cast(FileRun, answer.value)


def run_script_apart(path: Path | str, **given: Any) -> ScriptRun:
    """What `run_script` does with the same arguments, in a child process with limits of time and memory.

    If the child dies, that is the script's error. Raises what `run_script` raises.
    """
    try:
        answer = call_apart(run_script, path, seconds=patience(given.get("time_limit", 60)), memory=MEMORY, **given)
    except Ended as ended:
        print(ended.printed, end="")
        return ScriptRun((), str(ended))
    print(answer.printed, end="")
    return cast(ScriptRun, answer.value)
