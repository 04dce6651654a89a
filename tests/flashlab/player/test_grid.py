"""The grid of S: what each launch visits, leaves out and misses, against the mask written out element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.player.grid import Cell, Grid, Scores, grids
from tests.flashlab.player.traces import SMALL, record
from tests.tiers import examples

TILES = st.sampled_from([(16, 16), (16, 32), (32, 16)])


@st.composite
def problems(draw: Any) -> fl.Problem:
    causal = draw(st.booleans())
    sides = st.none() | st.integers(0, 40)
    return fl.Problem(
        batch=1,
        heads=1,
        len_q=draw(st.integers(1, 70)),
        len_kv=draw(st.integers(1, 70)),
        head_dim=16,
        dtype="float32",
        causal=causal,
        window=draw(st.none() | st.tuples(sides, sides)),
    )


def seen(problem: fl.Problem) -> np.ndarray:
    """The mask as a matrix of len_q x len_kv, from its definition."""
    row, key = np.ogrid[: problem.len_q, : problem.len_kv]
    ahead = key - (row + problem.len_kv - problem.len_q)  # 0 is the key that the query is aligned with
    left, right = problem.window or (None, None)
    visible = np.ones((problem.len_q, problem.len_kv), bool)
    if problem.causal:
        visible &= ahead <= 0
    if right is not None:
        visible &= ahead <= right
    if left is not None:
        visible &= ahead >= -left
    return visible


def visible_cells(problem: fl.Problem, grid: Grid) -> np.ndarray:
    mask = seen(problem)
    return np.array(
        [
            [mask[i : i + grid.height, j : j + grid.width].any() for j in range(0, problem.len_kv, grid.width)]
            for i in range(0, problem.len_q, grid.height)
        ]
    )


def played(trace: fl.Trace) -> list[tuple[str, Grid | None, list[np.ndarray]]]:
    """By launch: its name, its grid, and the states after each of its events."""
    found, changes = grids(trace, Scores.of(trace))
    launches: list[tuple[str, Grid | None, list[np.ndarray]]] = []
    for event, changed in zip(trace.events, changes, strict=True):
        if not launches or launches[-1][0] != event.launch:
            grid = found[len(launches)]
            launches.append((event.launch, grid, []))
        _, grid, states = launches[-1]
        if grid is None:
            assert not changed
            continue
        now = states[-1].copy() if states else np.zeros((grid.rows, grid.cols), int)
        for cell, state in changed:
            now[divmod(cell, grid.cols)] = state
        states.append(now)
    return launches


@examples(60)
@given(problems(), TILES)
def test_flash2_visits_what_the_mask_leaves(problem: fl.Problem, tile: tuple[int, int]) -> None:
    trace = record("flash2", problem, tile)
    for _, grid, states in played(trace):
        if grid is None:
            assert not seen(problem).any()
            continue
        expected = np.where(visible_cells(problem, grid), Cell.DONE, Cell.SKIPPED)
        assert (states[-1] == expected).all()
        for now in states:
            assert ((now == Cell.WORK) | (now == Cell.LOADED)).sum() <= 1


@examples(40)
@given(problems(), TILES)
def test_flash1_visits_everything(problem: fl.Problem, tile: tuple[int, int]) -> None:
    ((_, grid, states),) = played(record("flash1", problem, tile))
    assert grid == Grid(-(-problem.len_q // tile[0]), -(-problem.len_kv // tile[1]), *tile)
    assert (states[-1] == Cell.DONE).all()
    assert not any((now == Cell.SKIPPED).any() for now in states)


@examples(30)
@given(problems(), TILES)
def test_standard_has_a_grid_for_each_launch(problem: fl.Problem, tile: tuple[int, int]) -> None:
    scores, softmax, output = played(record("standard", problem, tile))
    for _, _, states in (scores, softmax, output):
        assert set(np.unique(states[-1])) <= {Cell.DONE, Cell.WORK}
    assert (output[2][-1] == Cell.DONE).all()
    assert softmax[1] is not None and softmax[1].height in (4, tile[0])


def test_states_follow_the_steps() -> None:
    trace = record("flash2", SMALL, (16, 16))
    ((_, _, states),) = played(trace)
    steps = [(event.step, Cell(states[n][event.block[0], 0])) for n, event in enumerate(trace.events)]
    first = [state for step, state in steps[:10]]
    assert [step for step, _ in steps[:10]] == [
        "load_q", "load_k", "scores", "mask", "softmax", "rescale", "load_v", "output", "normalize", "store_o",
    ]  # fmt: skip
    assert first == [Cell.NOT_YET, Cell.LOADED, *[Cell.WORK] * 6, Cell.DONE, Cell.DONE]


@fl.program
def forgets_a_tile(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
    """A seeded bug: the last key tile that a row sees is left out. The loop over the keys is one step."""
    out = m.output("out")
    for block in m.launch(
        "forgets", rows=problem.row_tiles(tile), warps=1, walk=lambda i: problem.tiles_of_row(i, tile)
    ):
        block.step("all")
        q_i = block.load(q, block.i, tile.rows)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk[:-1]:
            s = block.matmul(q_i, block.load(k, j, tile.cols).T, split=("rows", "none"))
            acc = block.matmul(s, block.load(v, j, tile.cols), split=("rows", "none"), acc=acc)
        block.store(out, acc, block.i, tile.rows)
    return out


@fl.program
def no_scores(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
    """Out = V: never multiplies a query with a key; and names no step."""
    out = m.output("out")
    for block in m.launch("copy", rows=problem.row_tiles(tile), warps=1):
        block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
    return out


def test_a_tile_that_a_program_forgets_is_missed() -> None:
    ((_, _, states),) = played(record(forgets_a_tile, SMALL, (16, 16)))
    # the first row of tiles touches nothing, the others all but the diagonal
    assert states[-1].tolist() == [
        [Cell.MISSED, Cell.SKIPPED, Cell.SKIPPED],
        [Cell.DONE, Cell.MISSED, Cell.SKIPPED],
        [Cell.WORK, Cell.WORK, Cell.MISSED],  # in the last event itself
    ]


def test_a_program_without_scores_has_no_grid_and_its_steps_no_name() -> None:
    trace = record(no_scores, SMALL, (16, 16))
    assert [(event.step, event.block[0], len(event.transfers)) for event in trace.events] == [
        ("", 0, 2),
        ("", 1, 2),
        ("", 2, 2),
    ]
    assert [grid for _, grid, _ in played(trace)] == [None]


def test_one_cell_stands_for_many_tiles_where_there_are_too_many() -> None:
    problem = fl.Problem(batch=1, heads=1, len_q=600, head_dim=16, dtype="float32")
    softmax = played(record("standard", problem, (64, 64)))[1][1]
    assert softmax is not None and softmax.rows <= 128 and softmax.height == 8
