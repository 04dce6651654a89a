"""The table of docs/flash3.md that says what soft caps, sinks, ALiBi, windows and masks cost, from the newest results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashlab.measure import results

Row = Mapping[str, Any]
DIMS = (64, 128, 256)
PEERS = {"flex": "FlexAttention", "cudnn": "cuDNN"}
"""The kernels of others that say a feature, by their columns in the data. They are timed at one head dim."""


def table(runs: Sequence[results.Result]) -> tuple[list[str], list[list[str]]]:
    """The header and rows: each feature's time over the plain kernel's by head dim, and others' times over the feature's.

    A later run's rows of a feature take the place of an earlier one's.
    """
    found: dict[str, list[Row]] = {}
    for of in runs:
        for name in dict.fromkeys(row["feature"] for row in of.data["rows"]):
            found[name] = [row for row in of.data["rows"] if row["feature"] == name]
    rows = [
        [
            name,
            *(_range(row["ratio"] for row in cells if row["head_dim"] == dim) for dim in DIMS),
            *(_range(row[peer] / row["milliseconds"] for row in cells if row[peer]) for peer in PEERS),
        ]
        for name, cells in found.items()
    ]
    return [
        "feature",
        *(f"× plain, {dim}" for dim in DIMS),
        *(f"{title}, × its time" for title in PEERS.values()),
    ], rows


def _range(numbers: Iterable[float]) -> str:
    """The least and the largest of some ratios."""
    found = [f"{x:.2f}" for x in sorted(numbers)]
    return "" if not found else found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
