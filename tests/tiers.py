"""Which of many like cases run in each `make test`, and which in `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
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
