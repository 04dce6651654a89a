"""Formulas that are evaluated for many sequences at once say what they say of each one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import simulator.problem
from simulator.catalogue import CATALOGUE
from simulator.counts import Counts
from simulator.lanes import (
    Diverged,
    OneByOne,
    highest,
    lanes_of,
    largest,
    least,
    lowest,
    most,
    summed_over,
    total,
    ways,
)
from simulator.problem import Problem

RAGGED = [
    name
    for name, row in CATALOGUE.items()
    if (row.operation.in_pages and not row.operation.in_place)
    or ("lengths" in row.support.masks and not row.operation.shares_prefix)
]
LATENT = {"heads": 16, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "scale": 0.1}


def drawn(name: str, seed: int, sequences: int = 40, longest: int = 3000, **features: Any) -> Problem:
    """A batch of different sequences. All have as many queries where the algorithm wants that."""
    rng, row = random.Random(seed), CATALOGUE[name]
    alike = row.support.same_queries or row.operation.in_pages
    n = (1 if row.support.queries == 1 else rng.choice([1, 7, 40])) if alike else None
    lengths = [
        (rng.choice([0, rng.randrange(longest)]) if n is None else n, rng.randrange(longest)) for _ in range(sequences)
    ]
    shape = LATENT if name.startswith("mla") else {"heads": 4, "kv_heads": 2, "head_dim": rng.choice([64, 128])}
    pages = {"batch": sequences, "page_size": rng.choice([16, 24, 64])} if row.operation.in_pages else {"batch": 1}
    masks = [{}, {"causal": True}, {"window": (500, 3)}, {"window": (None, 9)}]
    mask = rng.choice([each for each in masks if {*each} <= {*row.support.masks}])
    return Problem(**shape, **pages, **mask, **features, dtype="float16", lengths=lengths)


def one_by_one(monkeypatch: pytest.MonkeyPatch, name: str, problem: Problem) -> Counts:
    with monkeypatch.context() as patch:
        patch.setattr(simulator.problem, "_FEW", 10**9)
        return fl.count(name, problem, device="h200")


@pytest.mark.parametrize("name", RAGGED)
def test_sequences_that_are_counted_together_are_counted_as_each_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    for seed in range(4):
        problem = drawn(name, seed)
        together, each = fl.count(name, problem, device="h200"), one_by_one(monkeypatch, name, problem)
        assert together == each
        assert (together.dram.low, together.dram.high) == (each.dram.low, each.dram.high)
        assert together.dram.estimate == pytest.approx(each.dram.estimate, rel=0.1)  # the model looks at a few of them


@pytest.mark.parametrize("mask", ["dense", "bits"])
@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_so_are_sequences_with_a_mask_of_data(name: str, mask: Any, monkeypatch: pytest.MonkeyPatch):
    for seed in range(3):
        problem = drawn(name, seed, longest=[5, 400, 2000][seed], mask=mask)
        assert fl.count(name, problem, device="h200") == one_by_one(monkeypatch, name, problem)


@pytest.mark.parametrize("name", [pytest.param("flash2", marks=pytest.mark.long), "flash2_backward", "mla"])
def test_a_few_sequences_say_what_of_all_comes_from_dram(name: str, monkeypatch: pytest.MonkeyPatch):
    """Short ones fit into the L2, and of long ones most is fetched again."""
    rng = random.Random(1)
    queries = 7 if name == "mla" else None
    lengths = [(queries or n, n) for n in (int(10 ** rng.uniform(2, 6)) for _ in range(40))]
    shape: dict[str, Any] = LATENT if name == "mla" else {"heads": 8, "head_dim": 128}
    problem = Problem(batch=1, **shape, dtype="float16", causal=True, lengths=lengths)
    found, each = fl.count(name, problem).dram, one_by_one(monkeypatch, name, problem).dram
    assert found.estimate == pytest.approx(each.estimate, rel=0.05)


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash3_backward", "flash_decoding", "paged", "mla_hopper"])
def test_no_sum_leaves_64_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    """FLOPs of 10⁹ queries and keys are more than 2⁶³, and so may be the sum of many that are fewer."""
    few = CATALOGUE[name].support.same_queries or CATALOGUE[name].operation.in_pages
    for longest in (10**9, 10**5):
        lengths = [(1 if few else longest - i, longest - i) for i in range(20)]
        base = drawn(name, 0, sequences=20).replace(causal=False, window=None)
        problem = base.replace(lengths=lengths, **({"batch": 20, "len_q": None} if base.page_size else {}))
        counted = fl.count(name, problem, device="h200")
        assert counted == one_by_one(monkeypatch, name, problem)
        assert few or longest < 10**9 or counted.flops.matmul > 2**63


def test_lanes_part_where_they_disagree_and_nowhere_else():
    asked = list[int]()

    def formula(lanes: np.ndarray[Any, Any]) -> int:
        asked.append(len(lanes))
        n = lanes_of(lanes)
        if n > 5:
            return n * 2
        return 100 if n == 0 else n

    found = {
        int(n): x
        for lanes, answer in ways(np.arange(9), formula)
        for n, x in zip(lanes, np.broadcast_to(answer, len(lanes)), strict=True)
    }
    assert found == {0: 100, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 12, 7: 14, 8: 16}
    assert asked[0] == 9 and sum(n == 1 for n in asked) == 1


def test_what_wants_a_plain_number_gets_one_lane_at_a_time():
    def formula(lanes: np.ndarray[Any, Any]) -> int:
        return sum(range(lanes_of(lanes))) if len(lanes) > 1 else sum(range(int(lanes[0])))

    assert [answer for _, answer in ways(np.array([3, 5]), formula)] == [3, 10]
    for plain in (int, float, hash, range):
        with pytest.raises(OneByOne):
            plain(lanes_of([1, 2]))


def test_numbers_of_lanes():
    n, rows = lanes_of([3, 5]), np.array([[1, 2], [7, 0]])
    with pytest.raises(Diverged):
        max(n, 4)
    assert (least(n, 4).tolist(), most(4, n).tolist(), least(2, 3), most(2, 3)) == ([3, 4], [4, 5], 2, 3)
    assert (largest(n), largest(7), summed_over(n > 3, np.array([1, 9]))) == (5, 7, 9)
    assert summed_over(lanes_of([2**61, 1]), np.array([8, 1])) == 2**64 + 1
    assert [x(rows).tolist() for x in (total, lowest, highest)] == [[8, 2], [1, 0], [7, 2]]
    assert [x(rows[:, 0]) for x in (total, lowest, highest)] == [8, 1, 7]
