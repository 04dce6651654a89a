"""Several GPUs: attention whose rows, keys or heads lie on several ranks, and the bytes that pass between them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flashlab.parallel import layouts

__all__ = ["Link", "ParallelCounts", "ParallelRun", "Rank", "Scheme", "count", "layouts", "simulate"]

_LAZY = {
    "Link": "flashlab.parallel.ledger",
    "ParallelCounts": "flashlab.parallel.ledger",
    "ParallelRun": "flashlab.parallel.ranks",
    "Rank": "flashlab.parallel.rank",
    "Scheme": "flashlab.parallel.rank",
    "count": "flashlab.parallel.formulas",
    "simulate": "flashlab.parallel.ranks",
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
