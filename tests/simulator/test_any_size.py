"""Counting takes as much work at 10⁹ tokens as at 10⁶, and equal sequences are counted once."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import api
from simulator.catalogue import CATALOGUE
from simulator.formulas.walk import tiles_of_rows, weighted_rows
from simulator.operations.softmax import SOFTMAX
from simulator.problem import Problem, Tile
from tests.simulator.test_lanes import RAGGED, drawn

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (1000, 0)},
    {"window": (None, 1000)},
    {"mask": "dense"},
    {"mask": "bits"},
    {"mask": "bits", "causal": True},
    {"mask": "blocks"},
    {"mask": "blocks", "window": (1000, 1000)},
]
ALGORITHMS = [name for name, row in CATALOGUE.items() if row.operation is not SOFTMAX]
MOST_CALLS, MOST_BYTES = 10_000, 16 << 20


def counted(name: str, tokens: int, mask: dict[str, Any]) -> Problem | None:
    """A problem of an algorithm with so many queries, or so many keys of one query where it is for few. None: it knows no such
    mask."""
    row = CATALOGUE[name]
    first = next(iter(row.operation.shapes.values()))
    for lengths in ({"len_q": tokens, "len_kv": tokens}, {"len_q": 1, "len_kv": tokens}):
        try:
            asked = {"batch": 1, "head_dim": 64, "scale": 0.1, "dtype": row.dtypes[-1], **first, **lengths, **mask}
            problem = Problem(**asked)
            fl.count(name, problem)
        except fl.UsageError:
            continue
        return problem
    return None


def work(call: Callable[[], object]) -> tuple[int, int]:
    """How many functions of Python a call enters, and how many bytes it holds at most."""
    calls = 0

    def entered(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, held


def test_each_algorithm_is_counted_at_any_size_under_each_mask():
    taken = 0
    for name in ALGORITHMS:
        for mask in MASKS:
            if (large := counted(name, 10**9, mask)) is not None:
                taken += 1
                calls, held = work(lambda name=name, large=large: fl.count(name, large))
                assert calls < MOST_CALLS and held < MOST_BYTES, f"{name}, {mask}: {calls:,} calls, {held:,} bytes"
    assert taken > 120


@pytest.mark.parametrize(
    "name", ["flash2", "flash3", "flash3_backward", "flash_decoding", "paged", "flash3_paged", "mla_paged"]
)
def test_equal_sequences_are_counted_once(name: str, monkeypatch: pytest.MonkeyPatch):
    evaluated: list[Problem] = []

    class Book(api.Book):
        def __init__(self, algorithm: str, problem: Problem, *others: Any) -> None:
            evaluated.append(problem)
            super().__init__(algorithm, problem, *others)

    monkeypatch.setattr(api, "Book", Book)
    operation, n = CATALOGUE[name].operation, 10**5
    latent = (
        {"heads": 16, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "scale": 0.1}
        if name.startswith("mla")
        else {"heads": 2, "head_dim": 64}
    )
    shape: dict[str, Any] = {"batch": n, "page_size": 16} if operation.in_pages else {"batch": 1}
    problem = Problem(**latent, **shape, dtype="float16", lengths=[(4, 100), (4, 777)] * (n // 2))
    whole = fl.count(name, problem)
    assert len(evaluated) <= 3  # each of two lengths, and the longest once more for what all have together
    few = fl.count(
        name, problem.replace(lengths=[(4, 100), (4, 777)], batch=shape["batch"] and 2 if operation.in_pages else 1)
    )
    assert whole.flops.matmul == n // 2 * few.flops.matmul


def test_the_work_of_a_count_follows_the_different_lengths_and_not_the_sequences():
    def calls(sequences: int) -> int:
        lengths = [1 + i % 50 for i in range(sequences)]
        problem = Problem(batch=1, heads=2, lengths=lengths, head_dim=64, dtype="float16", causal=True)
        return work(lambda: fl.count("flash2", problem))[0]

    assert calls(10_000) < 1.2 * calls(1000)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        *((name, {}) for name in RAGGED),
        *((name, {"mask": x}) for name in ("flash2", "flash3") for x in ("dense", "bits")),
    ],
)
def test_the_work_of_a_count_doesnt_follow_different_sequences_either(name: str, features: dict[str, Any]):
    def calls(sequences: int) -> int:
        problem = drawn(name, 0, sequences, 10 * sequences, **features)
        return work(lambda: fl.count(name, problem, device="h200"))[0]

    assert calls(10_000) < 1.5 * calls(1000) < MOST_CALLS


@pytest.mark.parametrize("name", ["paged", "mla_hopper", "flash2_backward"])
def test_nor_does_the_estimate_of_dram(name: str):
    def calls(sequences: int) -> int:
        counts = fl.count(name, drawn(name, 0, sequences, 3000), device="h200")
        return work(lambda: counts.dram)[0]

    assert calls(10_000) < 1.5 * calls(1000) < 2 * MOST_CALLS


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (500, 3)}])
def test_the_work_of_a_count_doesnt_follow_different_requests_behind_a_prefix(mask: dict[str, Any]):
    def calls(requests: int) -> int:
        lengths = [(3, 7 * i) for i in range(requests)]
        shape: dict[str, Any] = {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "dtype": "float16",
            "len_prefix": 3000,
            **mask,
        }
        problem = Problem(batch=requests, lengths=lengths, **shape)
        return work(lambda: fl.count("cascade", problem))[0]

    assert calls(10_000) < 1.5 * calls(1000) < MOST_CALLS


@given(
    st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 130), st.integers(1, 130), st.booleans(),
    st.none() | st.tuples(st.none() | st.integers(0, 3000), st.none() | st.integers(0, 3000)),
)  # fmt: skip
def test_a_few_row_tiles_stand_for_all(
    len_q: int, len_kv: int, rows: int, cols: int, causal: bool, window: tuple[int | None, int | None] | None
):
    p = Problem(batch=1, heads=1, len_q=len_q, len_kv=len_kv, head_dim=8, dtype="float16", causal=causal, window=window)
    tile, page = Tile(rows, cols), 3 * cols

    def number(first: np.ndarray[Any, Any], stop: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What grows by the same every 3 * cols row tiles: keys, pages of three tiles, and whether there are several tiles."""
        keys = np.minimum(stop * cols, len_kv) - first * cols
        return keys + 1000 * (-(-stop * cols // page) - first * cols // page) + 10**6 * (stop - first > 1)

    every = np.arange(p.row_tiles(tile))
    few = weighted_rows(p, tile, period=3 * cols)
    assert few.sum(number(*tiles_of_rows(p, tile, few.rows))) == int(number(*tiles_of_rows(p, tile, every)).sum())
    first, stop = tiles_of_rows(p, tile, every)
    assert [range(a, b) for a, b in zip(first, stop, strict=True)] == [p.tiles_of_row(i, tile) for i in every.tolist()]
