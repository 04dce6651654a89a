"""Check a learner's kernel in Triton: run it in a child process by Triton's interpreter, judge it here."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from flashlab.base.process import ONE_THREAD
from flashlab.lessons.kernels import fresh, run_apart, text_of
from flashlab.lessons.lesson06_triton import LONGEST, TritonExercise
from flashlab.lessons.verdict import Verdict

CHILD = "flashlab.lessons.triton_child"
HERE = "Triton isn't here, and its interpreter runs this exercise, without a GPU: pip install triton, on Linux"


def check(path: Path, exercise: TritonExercise, seconds: float) -> Verdict:
    """Judge a file by an exercise, on launches drawn anew. Raises nothing."""
    text, refusal = text_of(path, exercise)
    if refusal := refusal or _refusal(text, path, exercise):
        return refusal
    if find_spec("triton") is None:
        return Verdict(exercise.name, "unavailable", HERE)
    environment = {**ONE_THREAD, "TRITON_INTERPRET": "1"}
    verdict = run_apart(path, text, exercise, exercise.launches(fresh()), seconds, CHILD, environment)
    return replace(verdict, sram=verdict.sram.replace("run on the emulator", "run by Triton's interpreter"))


def _refusal(text: str, path: Path, exercise: TritonExercise) -> Verdict | None:
    """Why a text need not be run."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        return Verdict(exercise.name, "compile error", f"{path.name}:{error.lineno}: {error.msg}")
    found = {x.name: [arg.arg for arg in x.args.args] for x in body if isinstance(x, ast.FunctionDef)}
    if exercise.kernel not in found:
        has = "has " + ", ".join(found) if found else "has no function"
        message = f"expected a function {exercise.kernel}({exercise.parameters}), and {path.name} {has}"
        return Verdict(exercise.name, "missing kernel", message)
    if (yours := ", ".join(found[exercise.kernel])) != exercise.parameters:
        return Verdict(
            exercise.name, "parameters", f"{exercise.kernel} takes ({exercise.parameters}); yours takes ({yours})"
        )
    lines = sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())
    if lines > LONGEST:
        return Verdict(
            exercise.name, "asked", f"{path.name}: {lines} lines of code, and this asks for {LONGEST} at most"
        )
    return None
