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


@pytest.mark.alike("00.1", "01.1", "02.2", "04.1", "09.1")
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
        ("04.1", "block.maximum(m_i, s.max())", "s.max()", 2, "m_new is the maximum of s alone"),
        ("04.1", "acc / l_i.nonzero()", "acc", 0, "step `store`, row tile 0, j = 1, row 0: what is stored to out was not divided by l_i"),
        ("04.1", "v_j, split=split, acc=acc)", "v_j, split=split)", 0, "what acc had before is lost"),
        ("04.1", "(tile.rows, 1, float(\"-inf\"))", "(tile.rows, 1, 0.0)", 1, "m_i starts at 0 and not at -inf"),
        ("01.2", "x - x.max().finite()", "x", 2, "e is exp(x) itself: no maximum was subtracted"),
        ("01.3", "        s = block.mask(s, block.i, 0)\n", "", 1, "s has values where the mask hides the key"),
        ("01.1", ", scale=problem.scale", "", 0, "s is 8 times what it should be, throughout"),
        ("00.1", "block.fetch(k, block.i, tile.rows)", "block.fetch(k, 0, tile.rows)", 0, "step `load`, row tile 1: the solution loads rows 64 to 127 and columns 0 to 127 of k; yours loads rows 0 to 63"),
        ("04.2", "last_key // tile.cols + 1", "last_key // tile.cols", 0, "launch `flash2`, row tile 0: yours walks over no tile, the solution over tile 0 alone"),
        ("04.3", "split=(\"rows\", \"none\"), scale", "split=(\"none\", \"rows\"), scale", 0, "yours reads 8,192 bytes of k from SRAM, the solution 32,768"),
        ("08.1", "tile.rows // 64", "tile.rows // 16", 0, "yours has 32 warps, which read an operand that they share 8 times, the solution 8 warps, which read an operand that they share twice"),
        ("03.2", "block.store(out if j == last else o, o_i,", "block.store(o, o_i,", 0, "step `store`, row tile 0, i = 0, j = 1: the solution stores rows 0 to 63 and columns 0 to 63 of out; yours stores them to o"),
        ("04.1", "m_i + block.log(l_i)", "block.log(l_i)", 0, "what is stored to lse lacks m_i"),
        ("04.1", "m_i + block.log(l_i)", "block.log(l_i) / float(np.log(2)) + m_i", 0, "step `store`, row tile 0, j = 1, row 0: what is stored to lse has a logarithm to base 2 beside m_i"),
        ("04.1", "acc = acc * alpha", "acc = acc * alpha * alpha", 0, "acc was multiplied by alpha = 0.708 once too often"),
        ("02.3", "acc=acc)", "acc=acc) / total", 0, "acc was divided by total = 2.38 here, and the solution does that elsewhere"),
        ("04.1", "p.sum()", "p.round(problem.dtype).sum()", 0, "l_i adds up p after it was rounded to float16"),
        ("03.1", "block.exp(s - m_new.finite())", "block.exp(s - m_i.finite())", 0, "p is exp(s - m_i): another maximum belongs there"),
        ("02.3", "block.maximum(top, s.max())", "block.maximum(top, s.max().T.max())", 4, "new_top is the largest of all rows"),
        ("02.1", "block.maximum(top, x.max())", "x.max()", 0, "step `row_max`, row tile 0, row 0: top is the maximum of x alone"),
        ("00.3", "block.exp(normal * -1.702)", "block.exp(normal * -1.0)", 0, "step `gelu`, row tile 0, row 0: y is"),
        ("09.1", "block.elementwise(np.abs, x).max()", "x.max()", 0, "step `quantise`"),
        ("09.1", "block.elementwise(np.abs, x).max()", "x.max()", 0, "scale comes from the maximum of x, and should come from that of its absolute values"),
        ("09.1", "(x / scale).round", "(x / scale * 2.0).round", 0, "eight is no number (NaN): a number beyond 448, e4m3's largest"),
        ("09.1", ".nonzero()", "", 3, "row 0 of x is all zeros, and so is scale: .nonzero() has 1 in place of 0"),
        ("02.2", "block.exp(top - new_top)", "block.exp(new_top - top)", 0, "0 times infinity (is an exponent's sign right?)"),
    ],
)  # fmt: skip
def test_a_small_mistake_is_explained(name: str, was: str, becomes: str, case: int, says: str):
    found = difference(name, (was, becomes), case=case)
    assert found is not None and says in found.words, found


@pytest.mark.parametrize(
    ("name", "form", "mistake", "says"),
    [  # O is divided at the store, or kept divided all the time
        ("03.2", [("                o_i = o_i / l_new.nonzero()\n", ""), ("else o, o_i,", "else o, o_i / l_new.nonzero(),")],
         ("block.store(out if j == last else o,", "block.store(o,"), "of out; yours stores them to o"),
        ("04.1", [("split=split, acc=acc)", "split=split, acc=acc) / l_i.nonzero()"), ("acc = acc * alpha", "acc = acc * l_old * alpha"),
                  ("l_i = l_i * alpha", "l_old = l_i; l_i = l_i * alpha"), ("acc / l_i.nonzero()", "acc")],
         ("m_i + block.log(l_i)", "block.log(l_i)"), "what is stored to lse lacks m_i"),
        ("00.3", [("y = normal", "x = x; z = normal"), ("block.store(out, y", "block.store(out, z")],
         ("normal * -1.702", "normal * 1.702"), "step `store`"),
    ],
)  # fmt: skip
def test_another_form_is_not_taken_for_the_mistake(
    name: str, form: list[tuple[str, str]], mistake: tuple[str, str], says: str
):
    assert difference(name, *form) is None
    found = difference(name, *form, mistake)
    assert found is not None and says in found.words, found


def test_what_is_moved_in_another_step_is_no_difference():
    early = [
        ("            v_j = block.load(v, j, tile.cols)\n", ""),
        (
            "            k_j = block.load(k, j, tile.cols)\n",
            "            k_j = block.load(k, j, tile.cols); v_j = block.load(v, j, tile.cols)\n",
        ),
    ]
    assert difference("04.1", *early) is None
    found = difference("04.1", *early, ("m_i + block.log(l_i)", "block.log(l_i)"))
    assert found is not None and "what is stored to lse lacks m_i" in found.words, found
    again = "q_i = block.load(q, block.i, tile.rows); "
    found = difference("04.1", *early, ("k_j = block.load(k,", again + "k_j = block.load(k,"))
    assert found is not None and "of q, 3 times in all, and the solution once" in found.words, found


def test_where_the_numbers_are_right_only_what_is_moved_differs():
    text = EXERCISES["03.2"].solution
    for was, becomes in [
        ("                o_i = o_i / l_new.nonzero()\n", ""),
        ("else o, o_i,", "else o, o_i / l_new.nonzero(),"),
        ("# line 8: Q", "v_j = block.load(v, j, tile.cols)  # Q"),
    ]:
        assert was in text
        text = text.replace(was, becomes)
    found = compare(program_of(text), "03.2", EXERCISES["03.2"].cases(Random(0))[0], (0, 0), values=False)[0]
    assert found is not None and found.step == "load_q_o" and "of v, 3 times in all" in found.words, found


def test_the_player_s_solution_gives_no_line_away():
    case = EXERCISES["04.1"].cases(Random(0))[0]
    _, _, due = compare(program_of(EXERCISES["04.1"].solution), "04.1", case, (0, 0))
    text = "".join(text for _, text in due.sources.values())
    assert "alpha = block.exp" not in text and 'block.step("update")' in text
    assert text.count("# …") == EXERCISES["04.1"].marked.count("# solution")
