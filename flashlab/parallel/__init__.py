"""Several GPUs: attention whose rows, keys or heads lie on several ranks, and the bytes that pass between them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flashlab.parallel import layouts

__all__ = [
    "Link",
    "ParallelCounts",
    "ParallelRun",
    "ParallelTimeline",
    "Rank",
    "Rates",
    "Scheme",
    "count",
    "layouts",
    "rates",
    "simulate",
    "timeline",
]

_LAZY = {
    "Link": "flashlab.parallel.ledger",
    "ParallelCounts": "flashlab.parallel.ledger",
    "ParallelRun": "flashlab.parallel.ranks",
    "ParallelTimeline": "flashlab.parallel.times",
    "Rank": "flashlab.parallel.rank",
    "Rates": "flashlab.parallel.times",
    "Scheme": "flashlab.parallel.rank",
    "count": "flashlab.parallel.formulas",
    "rates": "flashlab.parallel.times",
    "simulate": "flashlab.parallel.ranks",
    "timeline": "flashlab.parallel.times",
}
"""Public names, and the modules that they come from. A module is imported when it is asked for: some need torch."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'flashlab.parallel' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
