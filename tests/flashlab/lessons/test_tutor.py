# ruff: noqa: E501  (a table)
"""The tutor: right programs do not differ from the solution, however written, and small mistakes are explained."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlab.lessons.catalogue import EXERCISES
from flashlab.lessons.tutor import Difference, compare
from tests.flashlab.lessons.answers import program_of

STEPPED = [name for name in EXERCISES if name not in ("03.3", "08.2")]
"""The exercises in which the tile is given."""


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def difference(name: str, *changes: tuple[str, str], case: int = 0) -> Difference | None:
    text = EXERCISES[name].solution
    for was, becomes in changes:
        assert was in text
        text = text.replace(was, becomes)
    return compare(program_of(text), name, EXERCISES[name].cases(Random(0))[case], (0, 0))[0]


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", STEPPED)
def test_the_solution_does_not_differ_from_itself(name: str, seed: int):
    for case in EXERCISES[name].cases(Random(seed)):
        assert compare(program_of(EXERCISES[name].solution), name, case, (0, 0))[0] is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("04.1", [("m_new", "highest"), ("alpha", "old_factor")]),
        ("04.1", [("acc = acc * alpha", "keep = alpha"), ("acc=acc)", "acc=acc * keep)")]),
        ("04.1", [("l_i = l_i * alpha + p.sum()", "l_i = p.sum() + alpha * l_i")]),
        ("02.2", [("total * block.exp(top - new_top)", "block.exp(-(new_top - top)) * total")]),
        ("00.2", [("centred * centred", "(x - mean) * (x - mean)")]),
    ],
)
def test_another_way_of_writing_it_is_no_difference(name: str, changes: list[tuple[str, str]]):
    assert difference(name, *changes) is None


@pytest.mark.parametrize(
    ("name", "was", "becomes", "case", "says"),
    [
        ("04.1", "            acc = acc * alpha\n", "", 0, "step `update`, row tile 0, j = 1, row 0: acc was not multiplied by alpha = 0."),
        ("04.1", "l_i * alpha + p.sum()", "l_i + p.sum()", 0, "what l_i had before was not multiplied by alpha = 0."),
        ("04.1", "l_i * alpha + p.sum()", "p.sum()", 0, "l_i is the sum of p alone: the tiles before are forgotten"),
        ("04.1", "block.maximum(m_i, s.max())", "s.max()", 0, "m_new is the maximum of s alone"),
        ("04.1", "acc / l_i.nonzero()", "acc", 0, "step `store`, row tile 0, j = 1, row 0: what is stored to out was not divided by l_i"),
        ("04.1", "v_j, split=split, acc=acc)", "v_j, split=split)", 0, "what acc had before is lost"),
        ("04.1", "(tile.rows, 1, float(\"-inf\"))", "(tile.rows, 1, 0.0)", 0, "m_i starts at 0 and not at -inf"),
        ("01.2", "x - x.max().finite()", "x", 0, "e is exp(x) itself: no maximum was subtracted"),
        ("01.3", "        s = block.mask(s, block.i, 0)\n", "", 1, "s has values where the mask hides the key"),
        ("01.1", ", scale=problem.scale", "", 0, "s is 8 times what it should be, throughout"),
        ("00.1", "block.fetch(k, block.i, tile.rows)", "block.fetch(k, 0, tile.rows)", 0, "step `load`, row tile 1: the solution loads rows 64 to 127 and columns 0 to 127 of k; yours loads rows 0 to 63"),
        ("04.2", "last_key // tile.cols + 1", "last_key // tile.cols", 0, "launch `flash2`, row tile 0: yours walks over no tile, the solution over tile 0 alone"),
        ("04.3", "split=(\"rows\", \"none\"), scale", "split=(\"none\", \"rows\"), scale", 0, "yours reads 8,192 bytes of k from SRAM, the solution 32,768"),
        ("08.1", "tile.rows // 64", "tile.rows // 16", 0, "yours has 32 warps, which read an operand that they share 8 times, the solution 8 warps"),
    ],
)  # fmt: skip
def test_a_small_mistake_is_explained(name: str, was: str, becomes: str, case: int, says: str):
    found = difference(name, (was, becomes), case=case)
    assert found is not None and says in found.words, found


def test_the_player_s_solution_gives_no_line_away():
    case = EXERCISES["04.1"].cases(Random(0))[0]
    _, _, due = compare(program_of(EXERCISES["04.1"].solution), "04.1", case, (0, 0))
    text = "".join(text for _, text in due.sources.values())
    assert "alpha = block.exp" not in text and 'block.step("update")' in text
    assert text.count("# …") == EXERCISES["04.1"].marked.count("# solution")
