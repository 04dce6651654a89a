"""Answers as learners give them: the text of a cell, run."""

from __future__ import annotations

import itertools
import json
import linecache
from pathlib import Path
from typing import Any

import numpy as np

import flashlab as fl
from flashlab.lessons import checking, child
from flashlab.lessons.exercise import Case, Exercise
from flashlab.lessons.verdict import Verdict

_cells = itertools.count()


def program_of(text: str, **names: Any) -> Any:
    """Run the text as a notebook does a cell, and return the tile program in it."""
    return next(x for x in reversed(_cell(text, names).values()) if isinstance(x, fl.Program))


def class_of(text: str) -> Any:
    """The same, for a class, or for a function where there is no class."""
    found = [x for x in _cell(text, {}).values() if getattr(x, "__module__", "") == "__main__"]
    return next((x for x in reversed(found) if isinstance(x, type)), found[-1])


def _cell(text: str, names: dict[str, Any]) -> dict[str, Any]:
    file = f"<cell {next(_cells)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "__main__", "fl": fl, "np": np, **names}
    exec(compile(text, file, "exec"), namespace)
    return namespace


def verdict_here(text: str, exercise: Exercise, cases: list[Case], folder: Path) -> Verdict:
    """The verdict on an answer as `fl.check` gives it, in this process: of its first case that fails, or of the last."""
    program, verdict = program_of(text), Verdict(exercise.name, "usage")
    for n, case in enumerate(cases):
        try:
            with np.errstate(all="ignore"):
                result = child.run(program, case)
        except BaseException as error:
            why = child.explain(error, program.body.__code__.co_filename)
            return Verdict(exercise.name, why["kind"], why["message"])
        for name, x in result.pop("arrays").items():
            np.save(folder / f"{name}{n}.npy", x)
        (folder / f"case{n}.json").write_text(json.dumps(result), encoding="utf-8")
        verdict = checking._judged_case(exercise, case, folder, n, "")  # pyright: ignore[reportPrivateUsage]
        if not verdict.passed:
            return verdict
    return verdict
