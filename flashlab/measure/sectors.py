"""What the counters of TMA show: not the bytes of a box, but the whole sectors of 32 bytes that its rows take.

For each row of a box they show the sectors of HBM that the part inside the array touches, and besides the part outside,
rounded up to whole sectors. A row that lies inside, and starts and ends with a sector, shows its own bytes. A row of 80 bytes
in a box of 128 shows 160. So does a row of 128 bytes that starts 16 bytes into a sector.

The rule was read off single boxes on an H200. It has been exact in every launch of Hopper's kernels measured since: rows outside
the array, rows that start within a sector, parts that are no multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simulator.counts import Box, Counts, LaunchCounts, Spec

__all__ = ["SECTOR", "are_whole", "beside_bytes", "shown"]

SECTOR = 32
"""Bytes of a sector."""


def are_whole(counts: Counts, tensors: Iterable[str]) -> bool:
    """Are the rows of these tensors whole sectors, one behind the other? Then the counters show the bytes of their boxes."""
    return all(
        n % SECTOR == 0
        for name in tensors
        for n in (counts.tensors[name].row_bytes, counts.tensors[name].cols * counts.tensors[name].itemsize)
    )


def shown(counts: Counts, launch: LaunchCounts) -> int:
    """What the counters show of the bytes that a launch reads from HBM. `counts` are those of a run: a formula notes no boxes.

    Each array starts with a sector, and lies as its `Spec` says.
    """
    found = launch.bytes("hbm.read")
    for box, n in launch.boxes.items():
        spec = counts.tensors[box.tensor]
        found += (_of_all_heads(spec, box) - spec.heads * box.rows * box.columns * spec.itemsize) * n // spec.heads
    return found


def beside_bytes(run: Counts | None, index: int) -> int | None:
    """`shown` of the launch of this index, where it isn't the bytes themselves; None elsewhere, or without a run."""
    if run is None:
        return None
    launch = run.launches[index]
    found = shown(run, launch)
    return None if found == launch.bytes("hbm.read") else found


def _of_all_heads(spec: Spec, box: Box) -> int:
    """Bytes that the counters show when a box is loaded once from every head."""
    rows = box.row + np.arange(box.rows)
    planes = spec.planes * spec.rows * np.arange(spec.heads)[:, None]
    first = (planes + rows) * spec.row_bytes + box.column * spec.itemsize
    inside = np.where(rows < spec.rows, np.clip(spec.cols - box.column, 0, box.columns) * spec.itemsize, 0)
    touched = np.where(inside > 0, -(-(first + inside) // SECTOR) - first // SECTOR, 0)
    outside = -(-(box.columns * spec.itemsize - inside) // SECTOR)
    return SECTOR * int((touched + outside).sum())
