"""Exercises whose answer is a class, or a function: they are held to a judge of their own, which calls them over and over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashlab.lessons.exercise import Solved

Bytes = tuple[str, str, int, int] | tuple[str, str, int, int, str]
"""A line against the budget: what, "read", "written" or "sent", the bytes that were moved and that may be, and where (HBM)."""


@dataclass(frozen=True)
class Found:
    """What a judge says of an answer: plain data. `kind` is one of the verdicts'. `step` is the method, or step, of the mistake.

    `told` has a line for each operation of the history that breaks it; `said` is about an answer that holds, and `problem` about
    what its `budget` is for.
    """

    kind: str
    message: str
    step: str = ""
    told: tuple[str, ...] = ()
    said: str = ""
    budget: tuple[Bytes, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ClassExercise(Solved):
    """One exercise: `methods` are those that the class has to have, with their parameters. Or the answer is a `function` of some.

    `judge(answer)` holds it to what is asked, with the same calls in each check. `hints` get stronger one by one. What is `extra`
    counts for nobody's progress.
    """

    name: str
    title: str
    task: str
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    function: tuple[str, ...] = ()
    judge: Callable[[Any], Found]
    hints: tuple[str, ...]
    afterwards: str
    slips: Mapping[str, str] = field(default_factory=dict[str, str])
    """What it usually means when something goes wrong in a method or step, by its name, or in a kind of verdict."""
    extra: bool = False

    @property
    def asked(self) -> str:
        """What an answer has to be, in words."""
        if self.function:
            return f"a function of ({', '.join(self.function)})"
        return "a class with " + "; ".join(f"{name}({', '.join(of)})" for name, of in self.methods.items())
