"""When ranks compute, send and wait: what they do in order, at stated rates.

A launch takes its FLOPs over a rate or its bytes over a rate, whichever is longer, and a fixed time. A message takes a latency and
its bytes over a rate; a rank sends one at a time and receives one at a time, both while it computes. Merging parts, rounding and
adding up are left out, and so is what transfers and kernels take from one another.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flashlab.parallel.ledger import Launched, ParallelCounts, Sent
from simulator.counts import Counts
from simulator.errors import UsageError, unknown
from simulator.fields import integer

__all__ = ["ParallelTimeline", "Rates", "Span", "rates", "timeline"]

_NCCL = ((16e6, 152e9), (128e6, 276e9))
"""Bytes of a message, and the bytes per second that NCCL's send and receive reached each way."""
_LINK_SOURCE = (
    "link: the line through 152 GB/s for 16 MB and 276 GB/s for 128 MB each way, NCCL's send and receive between two H100s of a "
    "host with 18 NVLinks each, 28 November 2026 (1 MB took 100 µs, which is more than the line says)"
)
_NETWORK_SOURCE = "network: 400 Gb/s a GPU, its vendor's figure, and the link's latency, which nobody measured"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a rank computes and reads and a link carries per second. Bytes and FLOPs per second, and seconds.

    With `per_host`, ranks beyond their own host reach each other by the network. `source` says where the figures are from.

    >>> import flashlab as fl
    >>> fl.parallel.rates("h100", link=450e9, latency=5e-6).link
    450000000000.0
    """

    forward: float
    backward: float
    reading: float
    launch: float
    link: float
    latency: float
    network: float
    network_latency: float
    per_host: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.per_host is not None:
            integer("per_host", self.per_host, 1)
        for name, value in asdict(self).items():
            if name in ("per_host", "source"):
                continue
            low, high = (0, 1e6) if name in ("launch", "latency", "network_latency") else (1, 1e30)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise UsageError(name, value, f"a number from {low} to {high:g}")

    def seconds(self, launch: Launched) -> float:
        """How long a launch takes."""
        counts: Counts = launch.counts
        rate = self.forward if launch.step == "forward" else self.backward
        return self.launch + max(counts.flops.matmul / rate, counts.compulsory / self.reading)

    def transfer(self, rank: int, peer: int, nbytes: int) -> float:
        """How long a message takes."""
        if self.per_host is None or rank // self.per_host == peer // self.per_host:
            return self.latency + nbytes / self.link
        return self.network_latency + nbytes / self.network


@cache
def _known() -> dict[str, Rates]:
    path = Path(__file__).resolve().parents[1] / "data" / "measured.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    (few, slow), (many, fast) = _NCCL
    link = (many - few) / (many / fast - few / slow)
    latency = few / slow - few / link
    known = dict[str, Rates]()
    for device, computing in found["computing"].items():
        reading = found["reading"][device]
        known[device] = Rates(
            forward=computing["forward"],
            backward=computing["backward"],
            reading=reading["bytes_per_second"],
            launch=reading["seconds_per_launch"],
            link=link,
            latency=latency,
            network=50e9,
            network_latency=latency,
            source=f"computing: {computing['source']}; reading: {reading['source']}; {_LINK_SOURCE}; {_NETWORK_SOURCE}",
        )
    return known


def rates(device: str = "h100", **changed: Any) -> Rates:
    """The rates of a GPU that was measured, with some of one's own. Raises `UsageError`.

    >>> import flashlab as fl
    >>> f"{fl.parallel.rates('h100').latency * 1e6:.0f} µs", fl.parallel.rates("h100", per_host=8).per_host
    ('54 µs', 8)
    """
    if not isinstance(device, str) or device not in _known():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown("device", device, _known())
    names = asdict(_known()[device])
    for name in changed:
        if name not in names:
            raise unknown("rate", name, names)
    return Rates(**{**names, **changed})


class Span(NamedTuple):
    """What a rank did from `begin` to `end`, in seconds. It waited for a peer, or sent to one; else `peer` is None."""

    rank: int
    what: Literal["forward", "backward", "waits", "sends"]
    begin: float
    end: float
    peer: int | None = None
    step: str = ""


@dataclass(frozen=True)
class ParallelTimeline:
    """The predicted times of all ranks.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=8, len_q=65536, head_dim=128, dtype="bfloat16", causal=True)
    >>> zigzag, contiguous = (
    ...     fl.parallel.timeline(fl.parallel.count("ring", p, ranks=4, layout=name)) for name in ("zigzag", "contiguous")
    ... )
    >>> zigzag.seconds < 0.7 * contiguous.seconds  # where the last rank has most to do
    True
    """

    counts: ParallelCounts
    rates: Rates
    spans: tuple[Span, ...] = field(repr=False)

    @cached_property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def computes(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return self._by_rank("forward", "backward")

    @cached_property
    def waits(self) -> tuple[float, ...]:
        """How long each rank waits for messages."""
        return self._by_rank("waits")

    def _by_rank(self, *what: str) -> tuple[float, ...]:
        total = [0.0] * self.counts.ranks
        for span in self.spans:
            if span.what in what:
                total[span.rank] += span.end - span.begin
        return tuple(total)

    @cached_property
    def waited_for(self) -> dict[tuple[int, int], float]:
        """Who waits for whom, and how long: seconds by (rank, peer), the longest first."""
        found = defaultdict[tuple[int, int], float](float)
        for span in self.spans:
            if span.what == "waits" and span.peer is not None:
                found[span.rank, span.peer] += span.end - span.begin
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def busy(self) -> float:
        """The share of the time in which ranks compute: their mean."""
        return sum(self.computes) / len(self.computes) / self.seconds if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: seconds. The rates aren't among it."""
        return {
            "seconds": self.seconds,
            "busy": self.busy,
            "computes": list(self.computes),
            "waits": list(self.waits),
            "waited_for": [{"rank": r, "peer": p, "seconds": s} for (r, p), s in self.waited_for.items()],
            "spans": [span._asdict() for span in self.spans],
        }


def timeline(counts: ParallelCounts, rates: Rates | None = None) -> ParallelTimeline:
    """When each rank computes, sends and waits. `rates` are those of an H100, if left out.

    What is first in time goes first. A message leaves when it is sent and its sender's end of the link is free. It has come when
    it is through its receiver's end, too, which takes one message after the other. Raises `UsageError`.
    """
    if not isinstance(counts, ParallelCounts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("counts", type(counts).__name__, "what fl.parallel.count or fl.parallel.simulate returns")
    at = rates if rates is not None else _known()["h100"]
    if not isinstance(at, Rates):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("rates", type(at).__name__, "fl.parallel.rates(…)")
    n = counts.ranks
    out, into, spans = [0.0] * n, [0.0] * n, list[Span]()
    mail = defaultdict[tuple[int, int], deque[float]](deque)
    asleep, next_event = dict[tuple[int, int], float](), [0] * n
    ready = [(0.0, rank, rank) for rank in range(n)]  # what is ready at one time takes turns
    turn = count(n)
    known = dict[int, float]()  # ranks share counts
    while ready:
        now, _, rank = heappop(ready)
        if next_event[rank] == len(counts.events[rank]):
            continue
        event = counts.events[rank][next_event[rank]]
        if isinstance(event, Launched):
            took = known.get(id(event.counts))
            if took is None:
                took = known[id(event.counts)] = at.seconds(event)
            spans.append(Span(rank, _way(event), now, now + took))
            now += took
        elif isinstance(event, Sent):
            begin = max(now, out[rank])
            took = at.transfer(rank, event.peer, sum(nbytes for _, nbytes in event.tensors))
            out[rank], into[event.peer] = begin + took, max(begin, into[event.peer]) + took
            spans.append(Span(rank, "sends", begin, begin + took, event.peer, event.step))
            mail[rank, event.peer].append(into[event.peer])
            if (slept := asleep.pop((event.peer, rank), None)) is not None:
                heappush(ready, (slept, next(turn), event.peer))
        else:
            if not mail[event.peer, rank]:
                asleep[rank, event.peer] = now
                continue
            came = mail[event.peer, rank].popleft()
            if came > now:
                spans.append(Span(rank, "waits", now, came, event.peer, event.step))
                now = came
        next_event[rank] += 1
        heappush(ready, (now, next(turn), rank))
    return ParallelTimeline(counts, at, tuple(spans))


def _way(event: Launched) -> Literal["forward", "backward"]:
    return "forward" if event.step == "forward" else "backward"
