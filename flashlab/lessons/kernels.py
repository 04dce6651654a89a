"""Where checks of CUDA files plug in."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flashlab.lessons.verdict import Verdict


def check(path: Path, exercise: str) -> Verdict:
    """Judge a learner's `.cu` file by an exercise: `flashlab.emulator.check_exercise(path, exercise)` does it.

    Until there is an emulator, the verdict says so in one line.
    """
    if not path.is_file():
        return Verdict(exercise, "usage", f"file = {str(path)!r}: expected a .cu file, and there is none of this name")
    if find_spec("flashlab.emulator") is None:
        return Verdict(
            exercise, "unavailable", "CUDA files are checked on the CPU emulator, which is not part of this version"
        )
    emulator = import_module("flashlab.emulator")
    judge = getattr(emulator, "check_exercise", None)
    if judge is None:
        return Verdict(exercise, "unavailable", "the emulator of this version has no exercises yet")
    return judge(path, exercise)
