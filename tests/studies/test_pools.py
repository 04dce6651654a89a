"""How fast pools are written: the cells move what they say, and the table has what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from studies import pools
from studies.timed import Asked


@pytest.mark.parametrize("algorithm", pools.POOLS.algorithms)
def test_cells_move_what_they_say(algorithm: str) -> None:
    cells = pools.POOLS.cells(algorithm, Asked())
    assert len(cells) == len(pools.CACHES) * len(pools.SIZES)
    for cell in cells:
        assert pools.moved(algorithm, cell.problem(algorithm)) == pytest.approx(cell.megabytes * 1e6, rel=0.03)
    assert {cell.megabytes for cell in pools.POOLS.cells(algorithm, Asked(only=["64"]))} == {64}


def test_the_table_of_mixed_steps_has_what_was_measured() -> None:
    of = pools.STEPS[0]
    row: dict[str, Any] = {
        **of.model_dump(), "ratio": 1.02, "one_launch": 1.9, "rounds": 15,
        "microseconds": {"step": 510.0, "chunk": 100.0, "decodes": 400.0, "one launch": 950.0},
    }  # fmt: skip
    found = pools.MIXED.schema.model_validate({"rows": [row]})
    assert pools.MIXED.headline(found) == "512 new tokens and 63 decodes: 1.02 × the sum of both launches"
    assert pools.MIXED.table(found).splitlines()[2] == "| 512 | 63 | 4,096 | 510.0 | 100.0 | 400.0 | 1.020 | 1.900 |"


def test_a_table_has_what_was_measured() -> None:
    row: dict[str, Any] = {
        "kv_dtype": "int8", "megabytes": 64, "algorithm": "append_kv", "nbytes": 60_000_000, "milliseconds": 0.03,
        "copy_milliseconds": 0.027, "ratio": 0.9, "quartiles": (0.8, 1.0), "rounds": 11,
    }  # fmt: skip
    rows = [
        row,
        row | {"ratio": 0.95},
        row | {"megabytes": 4, "ratio": 0.2},
        row | {"algorithm": "copy_pages", "ratio": 1.0},
    ]
    of = pools.POOLS.schema.model_validate({"page_size": 16, "heads": 8, "head_dim": 128, "rows": rows})
    assert pools.POOLS.headline(of) == (
        "append_kv: at least 0.90 of a plain copy's rate from 64 MB on; "
        "copy_pages: at least 1.00 of a plain copy's rate from 64 MB on"
    )
    assert pools.POOLS.table(of).splitlines()[2] == "| append_kv | int8 | 64 | 0.0300 | 0.0270 | 2,000 | 0.90 |"
