"""Several GPUs: attention whose rows, keys or heads lie on several ranks, and the bytes that pass between them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashlab.parallel import layouts

if TYPE_CHECKING:
    from flashlab.parallel.distributed import (
        all_gather_attention,
        attention,
        decode_attention,
        ring_attention,
        shard,
        ulysses_attention,
        unshard,
    )
    from flashlab.parallel.formulas import count
    from flashlab.parallel.ledger import Link, ParallelCounts
    from flashlab.parallel.rank import Rank, Scheme
    from flashlab.parallel.ranks import ParallelRun, simulate
    from flashlab.parallel.times import ParallelTimeline, Rates, rates, timeline
    from flashlab.parallel.transfers import Interrupted, counted

__all__ = [
    "Interrupted",
    "Link",
    "ParallelCounts",
    "ParallelRun",
    "ParallelTimeline",
    "Rank",
    "Rates",
    "Scheme",
    "all_gather_attention",
    "attention",
    "count",
    "counted",
    "decode_attention",
    "layouts",
    "rates",
    "ring_attention",
    "shard",
    "simulate",
    "timeline",
    "ulysses_attention",
    "unshard",
]

_LAZY = {
    "Interrupted": "flashlab.parallel.transfers",
    "Link": "flashlab.parallel.ledger",
    "ParallelCounts": "flashlab.parallel.ledger",
    "ParallelRun": "flashlab.parallel.ranks",
    "ParallelTimeline": "flashlab.parallel.times",
    "Rank": "flashlab.parallel.rank",
    "Rates": "flashlab.parallel.times",
    "Scheme": "flashlab.parallel.rank",
    "all_gather_attention": "flashlab.parallel.distributed",
    "attention": "flashlab.parallel.distributed",
    "count": "flashlab.parallel.formulas",
    "counted": "flashlab.parallel.transfers",
    "decode_attention": "flashlab.parallel.distributed",
    "rates": "flashlab.parallel.times",
    "ring_attention": "flashlab.parallel.distributed",
    "shard": "flashlab.parallel.distributed",
    "simulate": "flashlab.parallel.ranks",
    "timeline": "flashlab.parallel.times",
    "ulysses_attention": "flashlab.parallel.distributed",
    "unshard": "flashlab.parallel.distributed",
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
