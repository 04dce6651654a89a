"""The tiers: what is left out unless asked for, what must not be missing, and that nothing depends on a clock."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.tiers import examples, like_cases_are_long, may_be_meant, one_of_each, quick, those_in

HERE = Path(__file__).parent
CLOCK = re.compile(r"\b(perf_counter|process_time|monotonic|timeit|time\.time)(_ns)?\b")


def test_no_test_reads_a_clock() -> None:
    """A busy machine is no bug: a test bounds calls, bytes or blocks, and tools measure times."""
    clocks = [path.name for path in HERE.rglob("*.py") if CLOCK.search(path.read_text(encoding="utf-8"))]
    tools = ["fuzz.py", "test_long_runs.py"]  # which say how long they took, and run for as long as they are told
    tools += ["test_process.py"]  # whose subject is a stopwatch
    tools += ["forked.py"]  # which ends ranks that hang
    assert sorted(clocks) == sorted([*tools, Path(__file__).name])


def test_the_first_of_each_kind_is_not_long() -> None:
    parameters = one_of_each(["a1", "b1", "a2", "b2", "b3"], lambda case: case[0])
    assert [p.id for p in parameters if not p.marks] == ["a1", "b1"]
    assert {mark.name for p in parameters for mark in p.marks} == {"long"}
    assert quick(parameters) == ["a1", "b1"]


def test_what_is_not_wanted_is_long() -> None:
    parameters = those_in({"a", "c"}, ["a", "b", "c"])
    assert [p.id for p in parameters] == ["a", "b", "c"]
    assert quick(parameters) == ["a", "c"]


class Case(SimpleNamespace):
    """One case of a test."""

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.mark)


def left(ids: list[str], *words: str | int, whole: bool = True) -> list[str]:
    """The cases that `alike` leaves in each `make test`."""
    cases = [Case(nodeid=f"tests/test_x.py::test_y[{each}]", marks=[pytest.mark.alike(*words).mark]) for each in ids]
    like_cases_are_long(cases, whole=whole)
    return [each for each, case in zip(ids, cases, strict=True) if not case.get_closest_marker("long")]


def test_of_like_cases_those_that_a_test_names_are_not_long() -> None:
    ids = ["flash2-1", "flash2_backward-1", "rule, flash2, causal", "flash3-1-0", "flash3-10"]
    assert left(ids, "flash2") == ["flash2-1", "rule, flash2, causal"]
    assert left(ids, "flash3-1", "flash2_backward") == ["flash2_backward-1", "flash3-1-0"]
    assert left(ids, 2) == ids[:2]
    assert left(ids[3:], "flash2", whole=False) == ids[3:], "who names a case gets it"
    with pytest.raises(pytest.UsageError, match=r"test_x.py::test_y: no case is 'flash4': flash2-1, "):
        left(ids, "flash2", "flash4")


def test_what_is_long_already_is_no_first_case() -> None:
    long = Case(nodeid="t::t[a]", marks=[pytest.mark.alike(1).mark, pytest.mark.long.mark])
    first = Case(nodeid="t::t[b]", marks=[pytest.mark.alike(1).mark])
    like_cases_are_long([long, first])
    assert first.get_closest_marker("long") is None


def test_properties_have_a_third_of_their_examples_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tiers.MANY", False)
    assert [examples(n).max_examples for n in (150, 8, 1)] == [50, 3, 1]
    monkeypatch.setattr("tests.tiers.MANY", True)
    assert examples(150, deadline=None).max_examples == 150


class Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers


def collected(markexpr: str = "", *args: str) -> tuple[list[str], int]:
    """The tests that are left, and how many were left out."""
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=markexpr), args=args, hook=hook, stash=pytest.Stash())
    items: Any = [Item(name="short", markers=()), Item(name="long", markers=("long", "compiler"))]
    conftest.pytest_collection_modifyitems(config, items)
    return [item.name for item in items], config.stash.get(conftest.LEFT_OUT, 0)


def test_long_tests_are_left_out_and_counted_unless_they_are_named() -> None:
    assert collected("", "tests") == (["short"], 1)
    assert collected("long") == (["short", "long"], 0)
    assert collected("", "tests/test_x.py::test_long") == (["short", "long"], 0)


@pytest.mark.parametrize(
    ("expression", "text", "may"),
    [
        ("", "", True),
        ("triton and not gpu and not long", "pytest.mark.triton", True),
        ("triton and not gpu and not long", "tritonc, gpu", False),
        ("(torch or transformers) and not triton and not gpu", "mark.torch, mark.triton", True),
        ("(torch or transformers) and not triton and not gpu", "mark.triton", False),
        ("long and not jax", "", True),  # a test may be long without a word of it in its file
        ("not (torch or gpu)", "mark.torch", True),
        ("gpu(memory=1)", "", True),
    ],
)
def test_a_file_without_the_words_of_what_is_asked_for_is_passed_over(expression: str, text: str, may: bool) -> None:
    assert may_be_meant(text, expression, conftest.NEEDS) == may


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("", set()),
        ("all", {"nvrtc", "compiler", "browser"}),
        ("torch,triton", {"torch", "triton"}),
        ("all,jax", {"nvrtc", "compiler", "browser", "jax"}),
    ],
)
def test_what_must_be_here(said: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLAB_REQUIRE", said)
    assert {marker for marker in conftest.NEEDS if conftest.required(marker)} == wanted


def test_what_is_missing_fails_where_it_is_required_and_is_skipped_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = Item(markers=("jax",))
    monkeypatch.setitem(conftest.NEEDS, "jax", lambda: "no JAX")
    monkeypatch.setenv("FLASHLAB_REQUIRE", "all")
    with pytest.raises(pytest.skip.Exception, match="no JAX"):
        conftest.pytest_runtest_setup(item)
    monkeypatch.setenv("FLASHLAB_REQUIRE", "jax")
    with pytest.raises(pytest.fail.Exception, match="FLASHLAB_REQUIRE=jax, but no JAX"):
        conftest.pytest_runtest_setup(item)
