"""A count that infers most rows of blocks from a few is the count that runs all of them, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator import machine, representatives
from simulator.block import Block
from simulator.simulate import run_on_shapes
from tests.simulator.problems import ALGORITHMS, ROOMY, scores, taken_by
from tests.tiers import examples


@contextmanager
def always() -> Iterator[None]:
    """Rows are inferred however few there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "MOST_STEPS", 0)
        yield


def counts(program: Any, problem: fl.Problem, tile: fl.Tile) -> tuple[fl.Counts, fl.Counts]:
    """By all rows, and by a few."""
    program = fl.catalogue.get(program).program
    whole = run_on_shapes(program, problem, tile=tile, device=ROOMY)
    with always():
        return whole, run_on_shapes(program, problem, tile=tile, device=ROOMY, infer=True)


def own(
    parity: int = 1,
    at: int | None = None,
    ahead: bool = False,
    nested: bool = False,
    strided: bool = False,
    passes: int = 1,
) -> fl.Program:
    """A program of somebody's own. It does more each `parity`-th time and on walks of `at` tiles on, loads a tile ahead, loops in a
    loop, leaves out every second tile, or goes over K several times."""

    @fl.program
    def mine(m: Any, q: Any, k: Any, v: Any, problem: fl.Problem, tile: fl.Tile) -> Any:
        def visible(i: int) -> range:
            return problem.tiles_of_row(i, tile)[:: 2 if strided else 1]

        out = m.output("out")
        for block in m.launch("mine", rows=problem.row_tiles(tile), warps=4, walk=visible):
            block.step("load_q")
            q_i = block.load(q, block.i, tile.rows)
            for _ in range(passes):
                for n, j in enumerate(block.walk):
                    block.step("load_k")
                    k_j = block.load(k, j + 1 if ahead and j + 1 in block.walk else j, tile.cols)
                    block.step("scores")
                    s = block.matmul(q_i, k_j.T, split=("rows", "none"))
                    if n % parity == 0:
                        block.exp(s)
                    if at is not None and len(block.walk) >= at:
                        block.load(v, j, tile.cols)
                    if nested:
                        for other in block.walk[: n % 5]:
                            block.load(v, other, tile.cols)
            block.step("store_o")
            block.store(out, block.full(tile.rows, problem.head_dim_v, 0.0), block.i, tile.rows)
        return out

    return mine


programs = st.builds(
    own,
    parity=st.integers(1, 3),
    at=st.none() | st.integers(0, 60),
    ahead=st.booleans(),
    nested=st.booleans(),
    strided=st.booleans(),
    passes=st.integers(1, 2),
)
small_tiles = st.builds(fl.Tile, st.integers(3, 12), st.integers(3, 12))
side = st.none() | st.integers(0, 200)
long_problems = st.builds(
    fl.Problem,
    batch=st.integers(1, 2),
    heads=st.just(2),
    kv_heads=st.sampled_from([1, 2]),
    len_q=st.integers(0, 500),
    len_kv=st.none() | st.integers(0, 500),
    head_dim=st.sampled_from([8, 40]),
    dtype=st.just("float16"),
    causal=st.booleans(),
    window=st.none() | st.tuples(side, side),
)


@examples(60)
@given(program=programs, problem=long_problems, tile=small_tiles)
def test_a_few_rows_of_ones_own_program_say_what_all_cost(
    program: fl.Program, problem: fl.Problem, tile: fl.Tile
) -> None:
    whole, few = counts(program, problem, tile)
    assert few == whole and few.by_tensor == whole.by_tensor and few.compulsory == whole.compulsory


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=8)
@given(data=st.data(), problem=long_problems, tile=small_tiles)
def test_a_few_rows_of_a_known_program_say_what_all_cost(
    algorithm: str, data: st.DataObject, problem: fl.Problem, tile: fl.Tile
) -> None:
    whole, few = counts(algorithm, taken_by(algorithm, problem.replace(**data.draw(scores))), tile)
    assert few == whole


def causal(length: int) -> fl.Problem:
    return fl.Problem(batch=1, heads=16, len_q=length, head_dim=64, dtype="float16", causal=True)


@pytest.mark.parametrize(
    ("bug", "program"),
    [
        ("_points", own(at=40)),
        ("_LONGEST_PERIOD", own()),
        ("united", own()),
        ("first", own(at=40)),
    ],
)
def test_a_wrong_inference_is_found(bug: str, program: fl.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few rows are looked at; walks that change unlike are taken as alike; intervals with gaps count whole."""
    wrong: dict[str, Any] = {
        "_points": lambda n: list(range(min(n, 13))),
        "united": lambda ends: ((int(ends[0].min()), int(ends[1].max()) + 1),),
    }
    if bug in wrong:
        monkeypatch.setattr(representatives, bug, wrong[bug])
    elif bug == "_LONGEST_PERIOD":
        monkeypatch.setattr(representatives, "_alike", lambda walks, period: iter([range(len(walks))]))
        monkeypatch.setattr(representatives.Representatives, "_fits", lambda *_: True)
    else:
        monkeypatch.setattr(representatives.Representatives, "_fits", lambda *_: True)
    whole, few = counts(program, causal(997), fl.Tile(8, 8))
    assert few != whole or few.compulsory != whole.compulsory


def steps(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tiles are loaded."""
    loads, load = 0, Block.load

    def counted(self: Block, *given: Any, **named: Any) -> Any:
        nonlocal loads
        loads += 1
        return load(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Block, "load", counted)
        work()
    return loads


@pytest.mark.parametrize("program", [own(), own(parity=2), own(ahead=True, passes=2)])
def test_work_grows_with_the_length_not_with_its_square(program: fl.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (steps(lambda n=n: fl.count(program, causal(n), tile=(16, 16)), monkeypatch) for n in (10_000, 40_000))
    assert few < 10 * 625 * 3 and many < 4.5 * few


def test_a_count_says_that_it_inferred() -> None:
    program, p = own(), causal(5000)
    few, whole = fl.count(program, p, tile=(16, 16)), fl.shape_run(program, p, tile=(16, 16))
    assert few == whole and few.inferred > 200 and whole.inferred == 0
    assert "rows of blocks inferred from others" in repr(few) and "inferred" not in repr(whole)


def test_a_million_tokens_of_ones_own_program() -> None:
    p = causal(1_000_000)
    assert fl.count(fl.catalogue.get("flash2").program, p) == fl.count("flash2", p)
    program = own()
    c = fl.count(program, p, tile=(64, 64))
    tiles = sum(range(1, 15_626))
    assert c.exp == 16 * tiles * 64 * 64 and c.flops.matmul == 2 * 64 * c.exp


def test_more_blocks_than_memory_are_refused() -> None:
    with pytest.raises(fl.UsageError, match="the walks of "):
        fl.count(own(), causal(2**40), tile=(16, 16))
