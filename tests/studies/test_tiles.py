"""The tile that flash3 chooses is held to the tiles that were measured on an H200."""

from __future__ import annotations

from typing import Any, cast

from simulator import count
from studies.timed import TILES, by_cell, candidates, tile_cells
from tests.flashlab.measure.test_results import RESULTS, results

SLACK = 1.03
"""A choice may take so many times as long as the best tile: runs differ by about as much."""


def rows() -> list[Any]:
    found = results.latest("tiles", RESULTS, algorithm="flash3", device="h200")
    assert found is not None
    return list(TILES.data(found).rows)


def slower(cell: list[Any], tile: tuple[int, int]) -> float:
    """How many times as long a tile takes as the best one of its cell."""
    return next(row.ratio for row in cell if row.tile == tile) / min(row.ratio for row in cell)


def choices() -> dict[tuple[Any, ...], float]:
    """By cell, how many times as long the tile that flash3 chooses takes as the best one."""
    problems = {(c.dtype, c.head_dim, c.causal, c.length, c.shape): c.problem for c in tile_cells()}
    tiles = {cell: count("flash3", p, device="h200").tile for cell, p in problems.items()}
    return {cell: slower(found, cast("tuple[int, int]", tuple(tiles[cell]))) for cell, found in by_cell(rows()).items()}


def test_no_choice_is_far_from_the_best_tile() -> None:
    far = {cell: round(ratio, 3) for cell, ratio in choices().items() if ratio > SLACK}
    assert far == {}


def test_another_rule_would_be_found() -> None:
    """One tile for all, as the widest that fits at any head dim, is far from the best in many cells."""
    assert sum(slower(found, (128, 64)) > SLACK for found in by_cell(rows()).values()) > len(tile_cells()) / 2


def test_every_cell_has_every_tile_that_it_should() -> None:
    found = by_cell(rows())
    assert len(found) == len(tile_cells())
    for (_, head_dim, *_), cell in found.items():
        assert {(128, 64), (128, 80)} <= {row.tile for row in cell} & {tuple(tile) for tile in candidates(head_dim)}
        assert sum(row.chosen for row in cell) == 1


def test_what_is_said_of_them() -> None:
    cell: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 64, "length": 1024, "shape": None, "rounds": 11}
    mine = [
        {**cell, "causal": causal, "tile": tile, "chosen": chosen, "milliseconds": took, "ratio": ratio}
        for causal, tile, chosen, took, ratio in (
            (True, (128, 128), True, 2.0, 1.0),
            (True, (192, 128), False, 1.8, 0.9),
            (False, (192, 128), True, 1.0, 1.0),
        )
    ]
    data = TILES.schema.model_validate({"algorithm": "flash3", "rows": mine})
    said = TILES.headline(data)
    assert said.startswith("flash3: in 1 of 2 cells") and "0.90 of its time" in said
    assert "| 128 × 128 | 2.000 | 192 × 128 | 0.900 |" in TILES.table(data)
