"""Check a learner's class, or function: run its judge in a child process, and show what it found."""

from __future__ import annotations

import inspect
import json
import linecache
import os
import pickle
import sys
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from flashlab.base.process import run_child
from flashlab.base.scratch import scratch
from flashlab.lessons.class_exercise import ClassExercise
from flashlab.lessons.lines import at_line, squeezed
from flashlab.lessons.verdict import PATIENCE, TAMPERED, UNREADABLE, Line, Verdict, stopped, unsent

CHILD = "flashlab.lessons.class_child"


def check(answer: Any, exercise: ClassExercise, seconds: float) -> Verdict:
    """Judge a class, or a function, by an exercise. Raises nothing."""
    if message := _refusal(answer, exercise):
        return Verdict(exercise.name, "usage", message)
    file = next(iter(_functions(answer).values())).__code__.co_filename
    if squeezed("".join(linecache.getlines(file))) == squeezed(exercise.skeleton):
        return Verdict(exercise.name, "not started", "fill in what is missing, run its cell, then this one again")
    job: dict[str, Any] = {
        "file": file,
        "lines": linecache.getlines(file),
        "exercise": exercise.name,
        "seconds": seconds,
        "path": [os.path.abspath(entry) for entry in sys.path],
    }
    with scratch() as folder:
        try:
            job["answer"] = cloudpickle.dumps(answer)  # pyright: ignore[reportUnknownMemberType]
        except Exception as error:
            return unsent(exercise.name, error)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        outcome = run_child(folder, PATIENCE * seconds, CHILD)
        if (ended := stopped(exercise.name, outcome, folder, file, seconds)) is not None:
            return ended
        try:
            found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
            return _of(found, exercise, file, outcome.printed)
        except UNREADABLE:
            return Verdict(exercise.name, "exit", TAMPERED, printed=outcome.printed)


def _of(found: dict[str, Any], exercise: ClassExercise, file: str, printed: str) -> Verdict:
    """What the child found, as a verdict."""
    passed = found["kind"] == "passed"
    step = found.get("step", "")
    slip = exercise.slips.get(step) or exercise.slips.get(found["kind"], "")
    return Verdict(
        exercise.name,
        found["kind"],
        found["message"] + at_line(found.get("line"), file),
        tuple(Line(*line, right=passed) for line in found.get("budget", ())),
        found.get("problem", ""),
        sram=found.get("said", ""),
        afterwards=exercise.afterwards if passed else slip,
        printed=printed,
        findings=tuple(found.get("told", ())),
        step=step,
    )


def _functions(answer: Any) -> dict[str, Any]:
    """The functions of a class that are its own, by name; or the function itself."""
    if inspect.isfunction(answer):
        return {answer.__name__: answer}
    own = cast("dict[str, Any]", vars(answer))
    return {name: x for name, x in own.items() if inspect.isfunction(x)}


def _refusal(answer: Any, exercise: ClassExercise) -> str:
    """Why an answer can't be judged at all."""
    if not (inspect.isfunction if exercise.function else inspect.isclass)(answer):
        own = type(answer).__module__ == "__main__"
        made = f": hand over {type(answer).__name__} itself, without brackets" if own else ""
        this = "a class" if inspect.isclass(answer) else type(answer).__name__
        return f"exercise {exercise.name} takes {exercise.asked}, and this is {this}{made}"
    if answer.__module__.startswith("flashlab."):
        return f"{answer.__name__} is the library's own: the exercise is to write one"
    asked = {answer.__name__: exercise.function} if exercise.function else exercise.methods
    for name, parameters in asked.items():
        method, called = _functions(answer).get(name), f"{name}({', '.join(parameters)})"
        if method is None:
            return f"{answer.__name__} has no method {called}"
        try:
            inspect.signature(method).bind(*[None] * (not exercise.function), *parameters)
        except TypeError:
            whole = name if exercise.function else f"{answer.__name__}.{name}"
            return f"{whole} takes {inspect.signature(method)}, and is called as {called}"
    return ""
