"""When ranks compute, send and wait: by hand, with rates that are round numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest

import flashlab as fl
from flashlab.parallel.ledger import Event, Launched, ParallelCounts, Received, Sent
from flashlab.parallel.times import Span

P = fl.Problem(batch=1, heads=4, len_q=4096, head_dim=128, dtype="bfloat16", causal=True)
COUNTS = fl.count("flash2", P)
ROUND: dict[str, Any] = {
    "forward": COUNTS.flops.matmul / 1.0, "backward": 1e30, "reading": 1e30, "launch": 0.0, "link": 10.0, "latency": 0.5,
    "network": 1.0, "network_latency": 2.0,
}  # fmt: skip
"""A launch of `COUNTS` takes a second, 10 bytes take 1.5, and over the network 12."""
LAUNCH = Launched("forward", COUNTS)


def times(*events: list[Event], **changed: Any) -> fl.parallel.ParallelTimeline:
    counts = ParallelCounts("mine", P, "zigzag", tuple(map(tuple, events)))
    return fl.parallel.timeline(counts, fl.parallel.rates("h100", **{**ROUND, **changed}))


def sent(peer: int, nbytes: int = 10) -> Sent:
    return Sent("a", peer, (("k", nbytes),))


def received(peer: int) -> Received:
    return Received("a", peer, (("k", 10),))


def test_a_message_travels_while_products_run():
    found = times([sent(1), LAUNCH], [LAUNCH, received(0), LAUNCH])
    assert sorted(found.spans) == [
        Span(0, "forward", 0.0, 1.0), Span(0, "sends", 0.0, 1.5, 1, "a"),
        Span(1, "forward", 0.0, 1.0), Span(1, "forward", 1.5, 2.5), Span(1, "waits", 1.0, 1.5, 0, "a"),
    ]  # fmt: skip
    assert (found.seconds, found.computes, found.waits) == (2.5, (1.0, 2.0), (0.0, 0.5))
    assert found.waited_for == {(1, 0): 0.5}
    assert found.busy == 1.5 / 2.5


def test_a_rank_sends_and_receives_one_message_at_a_time():
    """Two that one rank sends, and two that one rank receives. Their senders needn't wait for one another."""
    out = times([sent(1), sent(2)], [received(0)], [received(0)])
    assert [(s.begin, s.end) for s in out.spans if s.what == "sends"] == [(0.0, 1.5), (1.5, 3.0)]
    into = times([sent(2)], [sent(2)], [received(0), received(1)])
    assert into.seconds == 3.0


def test_both_ways_of_a_link_are_free_at_once():
    assert times([sent(1), received(1)], [sent(0), received(0)]).seconds == 1.5


def test_a_late_sender_is_waited_for():
    found = times([LAUNCH, LAUNCH, sent(1)], [received(0), LAUNCH])
    assert found.waits == (0.0, 3.5)
    assert found.seconds == 4.5


def test_the_network_between_hosts():
    events: tuple[list[Event], ...] = ([sent(1)], [received(0), sent(2)], [received(1)])
    assert times(*events).seconds == 3.0
    assert times(*events, per_host=2).seconds == 1.5 + 12.0


def test_a_launch_takes_the_longer_of_bytes_and_flops():
    assert times([LAUNCH], launch=0.25).seconds == 1.25
    assert times([LAUNCH], reading=COUNTS.compulsory / 3).seconds == 3.0
    assert times([Launched("backward", COUNTS)], backward=COUNTS.flops.matmul / 2).seconds == 2.0


def test_ranks_without_events():
    found = times([], [])
    assert (found.seconds, found.busy, found.spans) == (0.0, 1.0, ())


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("backward", [False, True])
def test_each_scheme_ends(scheme: str, backward: bool):
    """All events happen, and a rank's own follow one another."""
    counts = fl.parallel.count(scheme, P.replace(heads=8, kv_heads=8), ranks=8, backward=backward)
    found = fl.parallel.timeline(counts, fl.parallel.rates("h100", per_host=4))
    launches = sum(isinstance(e, Launched) for events in counts.events for e in events)
    messages = sum(isinstance(e, Sent) for events in counts.events for e in events)
    assert sum(span.what in ("forward", "backward") for span in found.spans) == launches
    assert sum(span.what == "sends" for span in found.spans) == messages
    for rank in range(8):
        own = sorted(s for s in found.spans if s.rank == rank and s.what != "sends")
        ends = sorted((s.begin, s.end) for s in own)
        assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))


def test_of_contiguous_rows_under_a_causal_mask_the_last_rank_is_busiest():
    """Rank 0 is done after one step. In a zigzag nobody waits, if the link is fast."""
    p = P.replace(len_q=1 << 20)
    contiguous, zigzag = (
        fl.parallel.timeline(fl.parallel.count("ring", p, ranks=4, layout=layout, algorithm="flash3"))
        for layout in ("contiguous", "zigzag")
    )
    assert contiguous.computes[0] < 0.2 * contiguous.computes[3]
    assert zigzag.busy > 0.99
    assert 1.7 < contiguous.seconds / zigzag.seconds < 1.8  # 7 of 16 pairs of chunks are the last rank's: 28/16


def test_rates_are_those_of_data_files():
    """What a rank computes is drawn from docs/results; what the link carries is a line through two stated figures."""
    for device in ("h100", "h200"):
        found = fl.parallel.rates(device)
        assert 5e14 < found.backward < found.forward < 1e15
        assert found.transfer(0, 1, 16_000_000) == pytest.approx(16e6 / 152e9)
        assert found.transfer(0, 1, 128_000_000) == pytest.approx(128e6 / 276e9)
        assert {"bench/flash3", "decoding/flash_decoding", "152 GB/s", "vendor"} <= set(
            re.findall(r"bench/flash3|decoding/flash_decoding|152 GB/s|vendor", found.source)
        )


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: fl.parallel.rates("h10"), "device = 'h10': expected one of h100, h200 (did you mean h100?)"),
        (lambda: fl.parallel.rates("h100", links=3), "rate = 'links': expected one of forward, backward, reading, launch, link, "),
        (lambda: fl.parallel.rates("h100", link=0), "link = 0: expected a number from 1 to 1e+30"),
        (lambda: fl.parallel.rates("h100", latency=-1.0), "latency = -1.0: expected a number from 0 to 1e+06"),
        (lambda: fl.parallel.rates("h100", link=float("nan")), "link = nan: expected a number from 1 to 1e+30"),
        (lambda: fl.parallel.rates("h100", link=True), "link = True: expected a number from 1 to 1e+30"),
        (lambda: fl.parallel.rates("h100", per_host=0), "per_host = 0: expected an integer of at least 1"),
        (lambda: fl.parallel.timeline(3), "counts = 'int': expected what fl.parallel.count or fl.parallel.simulate returns"),  # pyright: ignore
        (lambda: fl.parallel.timeline(fl.parallel.count("heads", P, ranks=1), 3), "rates = 'int': expected fl.parallel.rates"),  # pyright: ignore
    ],
)  # fmt: skip
def test_bad_rates_are_a_line(call: Any, line: str):
    with pytest.raises(fl.UsageError, match=f"^{re.escape(line)}"):
        call()


def test_all_to_all_fills_every_link_at_once():
    """Each rank sends to the next one first, then to the one after it: nobody's end of a link waits."""
    events = [[sent((r + i) % 4) for i in (1, 2, 3)] + [received((r - i) % 4) for i in (1, 2, 3)] for r in range(4)]
    assert times(*events).seconds == 3 * 1.5
    crowded = [[sent(p) for p in range(4) if p != r] + [received(p) for p in range(4) if p != r] for r in range(4)]
    assert times(*crowded).seconds > 3 * 1.5  # all begin with rank 0
