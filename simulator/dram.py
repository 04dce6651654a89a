"""An estimate of the bytes that reach DRAM, from a model of the L2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.counts import Counts


@dataclass(frozen=True)
class Dram:
    """Bytes read from DRAM: an estimate, and the bounds that always hold from a cold cache."""

    estimate: int
    low: int
    high: int


def estimate(counts: Counts) -> Dram:
    """Placeholder bounds until the model lands."""
    low, high = counts.compulsory_read, counts.hbm.read
    return Dram(low, low, high)
