"""A learner's class under a judge: what it is asked by method, and what is wrong with an answer, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashlab.lessons.class_exercise import Found
from flashlab.lessons.histories import raised
from simulator.dtypes import Array

Slips = Callable[[], Mapping[str, Any]]
"""Makes the wrong values that people arrive at, by what they did."""


class Wrong(Exception):
    """What is wrong with an answer, as `Found`."""

    def __init__(self, kind: str, step: str, message: str, called: str) -> None:
        self.found = Found(kind, f"{step}: {message}", step, (f"{called}  ✘",))


class Asked:
    """An answer, and what a judge calls on it. What is wrong is a `Wrong`, with the method's name and the case's."""

    def __init__(self, answer: Any) -> None:
        self.case, self._made = "", None
        try:
            self._made = answer()
        except Exception as error:
            raise Wrong("crash", "__init__", f"its beginning raises {raised(error, answer)}", "__init__()") from None

    def call(self, step: str, *given: Any) -> Any:
        try:
            with np.errstate(all="ignore"):
                return getattr(self._made, step)(*given)
        except Exception as error:
            raise self.wrong("crash", step, f"it raises {raised(error, self._made)}") from None

    def wrong(self, kind: str, step: str, message: str) -> Wrong:
        return Wrong(kind, step, message, f"{step}, with {self.case}")

    def array(self, step: str, found: Any, due: Array, slips: Slips, close: float = 1e-10) -> None:
        """Hold an array to what is due: to `close` of its largest element. The first slip that gives the same is named."""
        what = type(found).__name__
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":  # pyright: ignore[reportUnknownMemberType]
            raise self.wrong("usage", step, f"it returns {what}, and an array {due.shape} of numbers belongs here")
        mine = np.asarray(found, np.float64)
        if mine.shape == due.shape and near(mine, due, close):
            return
        with np.errstate(all="ignore"):
            looks = slips()
        for said, wrong in looks.items():
            if np.shape(wrong) == mine.shape and near(mine, wrong, 1e-6):
                raise self.wrong("numbers", step, said)
        if mine.shape != due.shape:
            raise self.wrong("numbers", step, f"it returns an array {mine.shape}, and {due.shape} belongs here")
        if np.isnan(mine).any():
            why = "it has NaN: e to a large number overflows, so subtract the row's maximum first"
            raise self.wrong("numbers", step, why)
        off, most = np.abs(mine - due), np.abs(due).max()
        at = np.unravel_index(int(off.argmax()), off.shape)
        why = f"[{', '.join(map(str, at))}] is {mine[at]:.6g}, and should be {due[at]:.6g}"
        if off[at] < 1e-5 * most:
            why = f"it is off by {off[at] / most:.0e} of the largest element: that is float32, and float64 has more"
        raise self.wrong("numbers", step, why)


def near(found: Any, due: Any, close: float) -> bool:
    """Is an array, or a number, within `close` of the largest element of what is due?"""
    a, b = np.asarray(found, np.float64), np.asarray(due, np.float64)
    return bool((np.abs(a - b) <= close * np.abs(b).max(initial=1e-300)).all())


def judged(judge: Callable[[Asked], Found]) -> Callable[[Any], Found]:
    """The judge of a class: `judge` calls what it is given, and raises `Wrong`."""

    def judge_class(answer: Any) -> Found:
        try:
            return judge(Asked(answer))
        except Wrong as wrong:
            return wrong.found

    return judge_class


def softmax(s: Array) -> Array:
    """Of each row, (…, columns)."""
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)
