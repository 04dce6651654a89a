"""Which of many like cases run in each `make test`, and which in `make test-long`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
MANY = os.environ.get("HYPOTHESIS_PROFILE") in ("long", "explore")
"""Whether properties have all their examples."""


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


def examples(n: int, **options: Any) -> settings:
    """A property's settings: so many examples in `make test-long`, and a third of them in each `make test`."""
    return settings(max_examples=n if MANY else -(-n // 3), **options)


def may_be_meant(text: str, expression: str, needs: Container[str]) -> bool:
    """May a marker expression mean a test of a file with this text? What a test `needs` it names, and so does its file.

    >>> [may_be_meant(text, "torch and not gpu", {"torch", "gpu"}) for text in ("pytest.mark.torch", "pytest.mark.gpu")]
    [True, False]
    """
    if not re.fullmatch(r"[\w\s()]*", expression) or re.search(r"\bnot\s*\(", expression):
        return True

    def answer(match: re.Match[str]) -> str:
        negated, word = match.groups()
        if word in ("and", "or"):
            return word
        return str(bool(negated) or word not in needs or re.search(rf"\b{word}\b", text) is not None)

    return bool(eval(re.sub(r"(not\s+)?(\w+)", answer, expression) or "True"))


def like_cases_are_long(items: Iterable[Any], *, whole: bool = True) -> None:
    """Marks as long what `alike` leaves to `make test-long`.

    `@pytest.mark.alike("flash2", "h100")` keeps in each `make test` the cases of a test with one of these words among the parts of
    their ids, `@pytest.mark.alike(2)` the first two. `whole`: all cases were collected, so each word must have one.
    """
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("alike") and not item.get_closest_marker("long"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items() if whole else ():
        kept = cases[0].get_closest_marker("alike").args
        ids = [case.nodeid.partition("[")[2].removesuffix("]") for case in cases]
        if gone := [word for word in kept if not (isinstance(word, int) or any(_has(each, word) for each in ids))]:
            raise pytest.UsageError(f"{name}: no case is {' or '.join(map(repr, gone))}: {', '.join(ids)}")
        for i, (case, each) in enumerate(zip(cases, ids, strict=True)):
            if not any(i < word if isinstance(word, int) else _has(each, word) for word in kept):
                case.add_marker(pytest.mark.long)


def _has(case: str, word: str) -> bool:
    """Parts of an id stand between dashes, or commas."""
    return re.search(rf"(^|-|, ){re.escape(word)}($|-|, )", case) is not None
