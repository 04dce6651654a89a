"""What ranks do, in order: they send, they receive, they launch kernels. Bytes by link and counts by rank follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from simulator.counts import Counts
from simulator.problem import Problem

__all__ = ["Event", "Launched", "Link", "ParallelCounts", "Received", "Sent"]

Sizes = tuple[tuple[str, int], ...]
"""Tensors of a message and their bytes, in the order in which they are sent."""


class Sent(NamedTuple):
    """A rank hands a message to the link, and goes on."""

    step: str
    peer: int
    tensors: Sizes


class Received(NamedTuple):
    """A rank has waited until a message of a peer was there."""

    step: str
    peer: int
    tensors: Sizes


class Launched(NamedTuple):
    """A rank computed attention, or its gradients, of some rows and keys: "forward" or "backward"."""

    step: str
    counts: Counts


Event = Sent | Received | Launched


class Link(NamedTuple):
    """Where bytes passed between two ranks: `what` is "link.sent" or "link.received", as `rank` sees it."""

    rank: int
    peer: int
    step: str
    tensor: str
    what: str


@dataclass(frozen=True)
class ParallelCounts:
    """What each rank sends, receives and computes.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=8, len_q=1_000_000, head_dim=128, dtype="bfloat16", causal=True)
    >>> counts = fl.parallel.count("ring", p, ranks=8)
    >>> counts.sent[0], counts.sent == counts.received, max(counts.flops) / min(counts.flops) < 1.01
    (3584000000, True, True)
    """

    scheme: str
    problem: Problem
    """Of all ranks together."""
    layout: str
    events: tuple[tuple[Event, ...], ...] = field(repr=False)
    """Of each rank, in the order of its program."""

    @property
    def ranks(self) -> int:
        return len(self.events)

    @cached_property
    def links(self) -> dict[Link, int]:
        """The ledger of the links, in bytes."""
        ledger = dict[Link, int]()
        for rank, events in enumerate(self.events):
            for event in events:
                if not isinstance(event, Launched):
                    what = "link.sent" if isinstance(event, Sent) else "link.received"
                    for tensor, nbytes in event.tensors:
                        key = Link(rank, event.peer, event.step, tensor, what)
                        ledger[key] = ledger.get(key, 0) + nbytes
        return ledger

    @cached_property
    def counts(self) -> tuple[tuple[Counts, ...], ...]:
        """The counts of each rank's launches, in their order."""
        return tuple(tuple(e.counts for e in events if isinstance(e, Launched)) for events in self.events)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """The bytes that each rank sends."""
        return self._bytes(Sent)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """The bytes that each rank receives."""
        return self._bytes(Received)

    def _bytes(self, kind: type[Sent] | type[Received]) -> tuple[int, ...]:
        return tuple(
            sum(nbytes for e in events if isinstance(e, kind) for _, nbytes in e.tensors) for events in self.events
        )

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """The FLOPs of each rank's matrix products, padded tiles as they are executed."""
        return tuple(sum(launch.flops.matmul for launch in launches) for launches in self.counts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: totals by rank, and the ledger as rows. The problem isn't among it."""
        return {
            "scheme": self.scheme,
            "layout": self.layout,
            "ranks": [
                {
                    "rank": rank,
                    "sent": self.sent[rank],
                    "received": self.received[rank],
                    "launches": len(launches),
                    "flops_matmul": self.flops[rank],
                    "hbm_read": sum(launch.hbm.read for launch in launches),
                    "hbm_write": sum(launch.hbm.write for launch in launches),
                }
                for rank, launches in enumerate(self.counts)
            ],
            "links": [{**link._asdict(), "bytes": nbytes} for link, nbytes in self.links.items()],
        }
