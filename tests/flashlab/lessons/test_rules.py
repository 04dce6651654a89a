"""What is noted of a program beside its numbers and bytes: the order of what it does, and the registers that it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons.child import run
from flashlab.lessons.exercise import Case
from flashlab.lessons.rules import Did, divides_at_the_end, own_sums, rows_and_none, v_lags_k
from tests.flashlab.lessons.answers import program_of

CELL = """
@fl.program
def mine(m, q, k, v, problem, tile):
    out = m.output("out")
    for block in m.launch("mine", rows=problem.row_tiles(tile), warps=4):
        x = block.fetch(q, block.i, tile.rows)
        MORE
        block.store(out, x, block.i, tile.rows)
    return out
"""
CASE = Case(fl.Problem(batch=1, heads=2, len_q=48, head_dim=16, dtype="float32"), fl.Tile(16, 16), 0)
TILE = 16 * 16 * 4


def held(more: str) -> int:
    return run(program_of(CELL.replace("MORE", more)), CASE)["registers"]


@given(n=st.integers(1, 30))
def test_a_tile_takes_registers_until_it_is_used_for_the_last_time(n: int):
    assert held(f"for c in range({n}): x = x * 2.0") == TILE  # in place
    assert held(f"kept = [x * 2.0 for c in range({n})]") == TILE  # nobody needs them again
    assert held(f"kept = [x * 2.0 for c in range({n})]\n        for y in kept: x = x + y") == (n + 1) * TILE


def order(tiles: int) -> list[str]:
    """V lags K by one: k0 k1 v0 k2 v1 … v."""
    return ["k", *(["k", "v"] * (tiles - 1)), "v"] if tiles else []


def did(what: str, names: list[str], block: int = 0) -> list[Did]:
    return [Did(block, what, f"{what} {n}", of=name) for n, name in enumerate(names)]


@pytest.mark.parametrize("what", ["load", "product"])
@given(tiles=st.lists(st.integers(0, 6), min_size=1, max_size=4), data=st.data())
def test_v_lags_k_in_each_block(what: str, tiles: list[int], data: st.DataObject):
    right = [x for n, count in enumerate(tiles) for x in did(what, order(count), n)]
    assert v_lags_k(right) == ""
    if max(tiles) < 2:
        return
    block = data.draw(st.sampled_from([n for n, count in enumerate(tiles) if count > 1]))
    names = order(tiles[block])
    at = data.draw(st.sampled_from([n for n, name in enumerate(names[:-1]) if name == "v"]))
    names[at - 1], names[at] = names[at], names[at - 1]  # before the K that it lags
    wrong = [x for n, count in enumerate(tiles) for x in did(what, names if n == block else order(count), n)]
    assert "V is to lag K by one" in v_lags_k(wrong)


def test_a_division_before_the_last_product_of_its_block():
    product, division = Did(0, "product", "here", of="v"), Did(0, "division", "there")
    assert divides_at_the_end([product, product, division]) == ""
    assert divides_at_the_end([product, division, product._replace(block=1)]) == ""
    assert "a division there" in divides_at_the_end([product, division, product])


def test_products_that_an_exercise_does_not_ask_for():
    product = Did(0, "product", "here", of="values", dtype="float8_e4m3fn", split=["rows", "none"])
    assert own_sums([product]) == rows_and_none([product]) == ""
    assert "acc=" in own_sums([product._replace(acc=True)])
    assert own_sums([product._replace(acc=True, dtype="float16")]) == ""
    assert "split=('none', 'rows')" in rows_and_none([product._replace(split=["none", "rows"])])
