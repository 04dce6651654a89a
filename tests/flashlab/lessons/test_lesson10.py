"""The capstone: its score follows from what was counted, and a better answer has a better one."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import kernel_child, kernels
from flashlab.lessons.catalogue import KERNEL_EXERCISES
from flashlab.lessons.lesson05 import BC, BR, D
from flashlab.lessons.lesson10 import FMA, L2, Forecast, forecast, keys_loaded, passes
from flashlab.measure import results
from simulator import Tile, count

ROOT = Path(__file__).resolve().parents[3]
CAPSTONE = KERNEL_EXERCISES["10.1"]
BETTER = Path(__file__).with_name("capstone_shared.cu")


@given(st.integers(1, 3), st.integers(1, 300), st.integers(0, 200))
def test_tiles_that_are_visited_hold_the_keys_of_the_budget(heads: int, len_q: int, more: int):
    """The formula of flash2 knows the mask; here it is written down anew."""
    p = fl.Problem(batch=1, heads=heads, len_q=len_q, len_kv=len_q + more, head_dim=D, dtype="float32", causal=True)
    moved = count("flash2", p, tile=Tile(BR, BC)).by_tensor["k"].hbm_read // (4 * D)
    blocks = heads * -(-len_q // BR)
    assert moved <= keys_loaded(heads, len_q, len_q + more) < moved + BC * blocks


@given(*[st.floats(1, 1e6)] * 3)
def test_a_score_is_100_where_arithmetic_binds_and_less_elsewhere(memory: float, sram: float, arithmetic: float):
    f = Forecast(memory, sram, arithmetic)
    waits = max(memory, sram) / arithmetic
    assert f.score == 100 if waits <= 1 else f.score <= 100
    assert waits < 1.006 or f.score < 100
    assert Forecast(memory, 2 * f.clocks, arithmetic).score <= f.score


def test_the_rates_are_those_that_were_measured():
    found = results.latest("rates", ROOT / results.FOLDER)
    assert found is not None
    rates = {row["what"]: row["value"] for row in found.data["rows"]}
    assert L2 == pytest.approx(rates["l2_bandwidth_of_all"], rel=0.03)
    assert rates["shared_bandwidth"] == pytest.approx(128, rel=0.01)
    assert FMA == pytest.approx(rates["multiply_add"], rel=0.12)


@pytest.mark.alike(1)
@pytest.mark.compiler
@pytest.mark.parametrize(("answer", "least", "most"), [("solution", 44, 60), ("better", 90, 100)])
def test_sharing_what_comes_out_of_sram_is_worth_its_score(answer: str, least: int, most: int, tmp_path: Path):
    text = CAPSTONE.solution if answer == "solution" else BETTER.read_text(encoding="utf-8")
    path = tmp_path / CAPSTONE.file
    path.write_text(text, encoding="utf-8")
    launches = CAPSTONE.launches(Random(3))
    found = [kernel_child.run(path, CAPSTONE.kernel, launch, 240.0) for launch in launches]
    verdict = kernels.judge(CAPSTONE, text, launches, found)
    assert verdict.passed, repr(verdict)
    assert least <= forecast(launches[0], found[0]["moved"]).score <= most
    score = re.search(r"score (\d+) of 100", verdict.sram)
    assert score and int(score[1]) == forecast(launches[0], found[0]["moved"]).score


def test_the_budget_of_passes_is_that_of_loads_of_16_bytes():
    """Of the first launch, by hand: 384 rows of K and of V, written in a pass each, read by two warps in 8 times 2."""
    assert passes(keys_loaded(2, 128, 128)) == 2 * 384 * (1 + 2 * 8 * 2)
