"""Predict, then see: the answer is shown only to who has given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from numbers import Real
from types import EllipsisType
from typing import Any

from simulator import UsageError
from simulator.errors import unknown

CLOSE = 0.02
"""Answers this near, relative, count as right: a prediction is made in one's head."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A question with numbers for answers.

    `truth()` runs the experiment; `slips()` has, for each quantity, the wrong numbers that people arrive at and what they
    did. `because` is said once an answer is in.
    """

    name: str
    truth: Callable[[], Mapping[str, float]]
    slips: Callable[[], Mapping[str, Mapping[str, float]]]
    because: str


@dataclass(frozen=True)
class Quantity:
    """One number predicted: yours, the measured one, and the slip that yours looks like."""

    name: str
    yours: float
    truth: float
    slip: str | None

    @property
    def right(self) -> bool:
        return math.isclose(self.yours, self.truth, rel_tol=CLOSE)

    @property
    def ratio(self) -> str:
        return f"{self.yours / self.truth:.4g}" if self.truth else "–"

    @property
    def verdict(self) -> str:
        if self.right:
            return "right"
        return f"looks like: {self.slip}" if self.slip else "no slip that is known here"


@dataclass(frozen=True)
class Answer:
    """What `fl.predict` gives back; it shows itself. `quantities` is empty if nothing was answered."""

    name: str
    quantities: tuple[Quantity, ...] = ()
    because: str = ""
    problem: str = ""

    @property
    def right(self) -> bool:
        return bool(self.quantities) and all(q.right for q in self.quantities)

    def __repr__(self) -> str:
        if not self.quantities:
            return f"{self.name}  {self.problem or 'not answered: replace ... by your number, and run the cell again'}"
        lines = [
            f"{self.name}  {q.name}: you said {_plain(q.yours)}, it is {_plain(q.truth)} (ratio {q.ratio}): {q.verdict}"
            for q in self.quantities
        ]
        return "\n".join([*lines, self.because])

    def _repr_html_(self) -> str:
        if not self.quantities:
            return f"<p>{escape(repr(self))}</p>"
        head = "<tr><th></th><th>you said</th><th>it is</th><th>ratio</th><th></th></tr>"
        rows = "".join(
            f"<tr><td>{escape(q.name)}</td><td>{_plain(q.yours)}</td><td>{_plain(q.truth)}</td><td>{q.ratio}</td>"
            f"<td>{'✔' if q.right else '✘'} {escape(q.verdict)}</td></tr>"
            for q in self.quantities
        )
        return f"<p><b>{escape(self.name)}</b></p><table>{head}{rows}</table><p>{escape(self.because)}</p>"


def predict(name: str, **answers: float | EllipsisType) -> Answer:
    """Answer a lesson's question before the experiment; `...` leaves it open. Shows what is true, and by which slip you missed it.

    It displays and does not raise. Answers are kept for `fl.progress()`.

    >>> import os; os.environ["FLASHLAB_HOME"] = os.getcwd()
    >>> import flashlab as fl
    >>> fl.predict("01.1", hbm_peak=...)
    01.1  not answered: replace ... by your number, and run the cell again
    >>> fl.predict("01.1", hbm_peak=4096**2).quantities[0].slip
    'S alone, in elements'
    """
    from flashlab.lessons import record
    from flashlab.lessons.catalogue import PREDICTIONS

    if not isinstance(name, str) or name not in PREDICTIONS:  # pyright: ignore[reportUnnecessaryIsInstance]
        return Answer(str(name), problem=str(unknown("prediction", name, PREDICTIONS)))
    if not answers or any(value is ... for value in answers.values()):
        return Answer(name)
    asked = PREDICTIONS[name]
    truth = asked.truth()
    try:
        given = _checked(answers, truth)
    except UsageError as error:
        return Answer(name, problem=str(error))
    slips = asked.slips()
    quantities = tuple(Quantity(n, y, truth[n], _slip(y, slips.get(n, {}))) for n, y in given.items())
    answer = Answer(name, quantities, asked.because)
    record.note("predictions", name, answer=given, right=answer.right)
    return answer


def _checked(answers: Mapping[str, Any], truth: Mapping[str, float]) -> dict[str, float]:
    for name, value in answers.items():
        if name not in truth:
            raise unknown("quantity", name, truth)
        try:
            ok = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
        except OverflowError:
            ok = False
        if not ok:
            raise UsageError(name, value, "a number, or ... for no answer yet")
    if missing := [name for name in truth if name not in answers]:
        raise UsageError(missing[0], "missing", "a number for each of " + ", ".join(truth))
    return {name: float(value) if float(value) != int(value) else int(value) for name, value in answers.items()}


def _slip(value: float, slips: Mapping[str, float]) -> str | None:
    """The known wrong number nearest to an answer, if it is near."""
    near = [(apart(value, wrong), name) for name, wrong in slips.items()]
    return min(near)[1] if near and min(near)[0] <= math.log(1 + CLOSE) else None


def apart(a: float, b: float) -> float:
    """How far two numbers are apart, as the logarithm of their ratio; 0 is near to itself alone.

    >>> apart(0, 0), apart(0, 1), round(apart(1, 1.02), 4)
    (0.0, inf, 0.0198)
    """
    if a == b:
        return 0.0
    return abs(math.log(a) - math.log(b)) if min(a, b) > 0 else math.inf


def _plain(n: float) -> str:
    return f"{n:,.0f}" if float(n) == int(n) else f"{n:,.4g}"
