"""Lesson 13: where keys lie, a manager against the model without pages, copies, and what the text says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons.catalogue import EXERCISES, solution
from simulator import Problem, Tile
from simulator.operations.paged import PAGED
from tests.tiers import examples

# -- key n of a request -------------------------------------------------------------------------------------------


@examples(12)
@given(
    keys=st.integers(1, 130), page_size=st.integers(1, 70), cols=st.sampled_from([16, 32]), group=st.integers(1, 16),
    kv_heads=st.integers(1, 2),
)  # fmt: skip
def test_the_budget_is_that_of_the_librarys_first_rung(keys: int, page_size: int, cols: int, group: int, kv_heads: int):
    p = Problem(
        batch=1, heads=group * kv_heads, kv_heads=kv_heads, len_q=1, len_kv=keys, head_dim=64, dtype="float16",
        page_size=page_size,
    )  # fmt: skip
    ours = fl.count("paged_1", p, tile=(16, cols))
    budget = EXERCISES["13.1"].budget(p, Tile(16, cols))
    moved = {name: (t.hbm_read, t.hbm_write) for name, t in ours.by_tensor.items() if name != "seq_lens"}
    assert moved == dict(budget.tensors)
    assert ours.flops.matmul == budget.matmul


def test_the_solution_attends_as_the_library_does():
    p = Problem(batch=1, heads=8, kv_heads=2, len_q=1, len_kv=200, head_dim=64, dtype="float16", page_size=16, pages=40)
    arrays = PAGED.draw(p, 5)
    mine, ours = (fl.simulate(x, **arrays, tile=(16, 32)).out for x in (solution("13.1"), "paged_1"))
    assert mine == pytest.approx(ours, abs=2e-3)
