"""Which of many like cases run in each `make test`, and which in `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def one_of_each(cases: Iterable[T], kind: Callable[[T], Hashable], name: Callable[[T], str] = str) -> list[Any]:
    """The cases as parameters: the first of each kind runs in each `make test`, the others are long."""
    seen: set[Hashable] = set()
    parameters: list[Any] = []
    for case in cases:
        parameters.append(pytest.param(case, id=name(case), marks=[pytest.mark.long] if kind(case) in seen else []))
        seen.add(kind(case))
    return parameters


def quick(parameters: Iterable[Any]) -> list[Any]:
    """The cases among parameters that aren't long."""
    return [parameter.values[0] for parameter in parameters if not parameter.marks]


def those_in(wanted: Container[T], cases: Iterable[T], name: Callable[[T], str] = str) -> list[Any]:
    """The cases as parameters: those that are wanted run in each `make test`, the others are long."""
    return [pytest.param(case, id=name(case), marks=[] if case in wanted else [pytest.mark.long]) for case in cases]
