"""Lesson 11: gradients against finite differences, budgets against the library's, what dropout drops, and what the text says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons.catalogue import EXERCISES, KERNEL_EXERCISES, solution
from flashlab.lessons.lesson07 import measured
from flashlab.lessons.lesson11 import BackwardCase, by_differences, cross_entropy, gradient, gradients, seen_from
from flashlab.lessons.lesson11_kernels import uniform
from simulator import Problem, Tile
from simulator.operations.backward import BACKWARD
from tests.flashlab.lessons.answers import program_of
from tests.tiers import examples


@examples(9)
@given(
    group=st.integers(1, 2),
    len_q=st.integers(1, 6),
    more=st.integers(-3, 5),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_judges_gradients_are_finite_differences_row_by_row(
    group: int, len_q: int, more: int, causal: bool, seed: int
):
    """What an exercise is judged by, given an output and an LSE that are nearly exact, as float32 has them."""
    len_kv = max(1, len_q + more)
    p = Problem(
        batch=1, heads=group, kv_heads=1, len_q=len_q, len_kv=len_kv, head_dim=3, dtype="float32", causal=causal
    )
    arrays = BackwardCase(p, Tile(16, 16), seed).arrays()
    truth = gradients("dq", "dk", "dv")(p, *arrays.values())
    for due in (truth, *truth.also):
        for head in range(due.out.shape[1]):
            for row in range(due.out.shape[2]):
                found = by_differences(p, arrays, due.of.removeprefix("d"), head, row)
                assert found == pytest.approx(due.out[0, head, row], abs=1e-5), (due.of, head, row)


def test_one_gradient_of_a_program_that_has_one():
    p = Problem(batch=1, heads=2, len_q=20, head_dim=8, dtype="float32")
    arrays = BackwardCase(p, Tile(16, 16), 1).arrays()
    for name, answer in (("dv", "11.1"), ("dq", "11.2")):
        due = BACKWARD.judge(p, arrays)[name]
        assert gradient(solution(answer), p, arrays, name) == pytest.approx(due, abs=1e-4)


@given(rows=st.integers(1, 3), cols=st.integers(1, 3), group=st.integers(1, 3), edge=st.sampled_from([32, 64]))
def test_on_whole_tiles_the_budget_is_the_librarys(rows: int, cols: int, group: int, edge: int):
    p = Problem(
        batch=1, heads=group, kv_heads=1, len_q=edge * rows, len_kv=edge * max(rows, cols), head_dim=64, dtype="float16",
        causal=True,
    )  # fmt: skip
    ours = fl.count("flash2_backward", p, tile=(edge, edge)).by_tensor
    budget = EXERCISES["11.3"].budget(p, Tile(edge, edge)).tensors
    for name in ("q", "k", "v", "out", "dout", "dq_sum", "dq", "dk", "dv"):
        t = ours[name]
        assert budget[name] == (t.hbm_read, t.hbm_write + t.hbm_atomic), name


@given(len_q=st.integers(1, 90), len_kv=st.integers(1, 90), rows=st.integers(1, 20), cols=st.integers(1, 20))
def test_tiles_of_queries_that_see_a_tile_of_keys(len_q: int, len_kv: int, rows: int, cols: int):
    p = Problem(batch=1, heads=1, len_q=len_q, len_kv=len_kv, head_dim=8, dtype="float16", causal=True)
    for j, walk in enumerate(seen_from(p, Tile(rows, cols))):
        keys = range(j * cols, min((j + 1) * cols, len_kv))
        seeing = {t // rows for t in range(len_q) for c in keys if c <= t + len_kv - len_q}
        assert seeing == set(walk)


def test_a_program_of_another_operation_is_told_in_a_line():
    text = EXERCISES["11.1"].solution
    verdict = fl.check(program_of(text.replace('(operation="backward")', "")), exercise="11.1")
    assert verdict.kind == "usage" and 'write @fl.program(operation="backward") above it' in verdict.message
    verdict = fl.check(program_of(text), exercise="04.1")
    assert verdict.kind == "usage" and "this asks for one of attention" in verdict.message


def test_an_output_that_is_no_tensor_is_told_with_the_operations_own():
    text = EXERCISES["11.1"].solution.replace("return dv", "return None")
    verdict = fl.check(program_of(text), exercise="11.1")
    assert verdict.kind == "short cut"
    assert "m.output('dq') or m.output('dk') or m.output('dv') is expected" in verdict.message


def test_what_is_extra_counts_for_no_progress():
    (line,) = (line for line in str(fl.progress()).splitlines() if line.startswith("11"))
    posed = [x for x in (EXERCISES | KERNEL_EXERCISES).values() if x.lesson == "11"]
    assert len(posed) == 6 and line.endswith("exercises 0 of 4")


@given(seed=st.integers(0, 2**31 - 1))
def test_the_numbers_of_dropout_are_spread_evenly(seed: int):
    u = uniform(seed, np.arange(20_000))
    assert 0 <= u.min() < u.max() < 1
    counts = np.histogram(u, 10, (0, 1))[0]
    assert abs(counts - 2000).max() < 300
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.05


def test_dropout_is_checked_at_three_tile_sizes_both_ways_round_under_one_seed():
    launches = KERNEL_EXERCISES["11.6"].launches(Random(0))
    assert len({launch.block for launch in launches}) >= 3
    seeds = {(int(x.arguments["seed"]), bool(x.arguments["flipped"])) for x in launches}
    assert {(7, False), (7, True)} <= seeds and len({seed for seed, _ in seeds}) > 1


def test_the_gradient_of_the_small_loss_is_a_finite_difference():
    draw = np.random.default_rng(0)
    logits, targets = draw.standard_normal((4, 3)), np.array([0, 2, 1, 1])
    _, slope = cross_entropy(logits, targets)
    for at in np.ndindex(logits.shape):
        moved = [
            cross_entropy(logits + x * (np.arange(12).reshape(4, 3) == 3 * at[0] + at[1]), targets)[0]
            for x in (1e-5, -1e-5)
        ]
        assert slope[at] == pytest.approx((moved[0] - moved[1]) / 2e-5, abs=1e-8)


def test_what_the_text_says_of_times_is_what_was_measured():
    text = (Path(__file__).resolve().parents[3] / "notebooks" / "source" / "11_way_back.md").read_text(encoding="utf-8")
    found = measured()["way_back"]
    (time,) = (
        x["milliseconds"] for x in found["rows"] if (x["head_dim"], x["length"], x["causal"]) == (128, 4096, False)
    )
    read = 2 * 64 * 4096**2 / (found["yardsticks"]["copy"] * 1e6)
    assert "a fifth of the time goes into S at most, and to be spared it would cost more than twice as much" in text
    assert 2 * read > 2 * time / 5
    assert "With short sequences turns even *save* time." in text
    ratios = {x["length"]: x["in_one_order"] / x["milliseconds"] for x in found["rows"] if x["head_dim"] == 128}
    assert ratios[1024] < 1 < ratios[16384]
