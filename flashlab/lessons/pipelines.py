"""Drawings of what is in flight while something else is computed, from the model of time.

A copy is in flight from when its bytes begin to pass until they have arrived, by the latencies of the model. A slot is in
use from the first to the last product that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from flashlab.lessons.drawing import BLUE, GREEN, INK, ORANGE, WIDTH, Drawing, box, legend, text
from simulator import Problem, timeline
from simulator.time.engine import Event
from simulator.time.prediction import Timeline
from simulator.time.rates import BOX_DRAM_LATENCY, DRAM_LATENCY, L2_LATENCY

Span = tuple[float, float]
COPIED, READ = {"load_k": "K", "load_v": "V"}, {"load_k": "scores", "load_v": "output"}
STAGES, TILES, LEFT = 2, 4, 92
FLASH2 = Problem(batch=1, heads=13, len_q=1024, head_dim=64, dtype="float16")
"""One block on each SM of an A100, so that a timeline shows one block."""
HOPPER = Problem(batch=1, heads=16, len_q=4096, head_dim=128, dtype="bfloat16")


def cp_async() -> Drawing:
    """The two slots of K and V in flash2: the next tile is on its way while this one is computed."""
    shown = timeline("flash2", FLASH2, device="a100")

    def arrives(copies: Sequence[Event], n: int) -> float:
        return copies[n].end + (L2_LATENCY if n else DRAM_LATENCY)

    return ring("cp.async: two slots in turn, and a wait of all warps for each tile", shown, arrives)


def tma() -> Drawing:
    """The ring of flash3_2: a producer asks for a tile as soon as its slot is empty."""
    shown = timeline("flash3_2", HOPPER, device="h200")

    def arrives(copies: Sequence[Event], n: int) -> float:
        return copies[n].end + BOX_DRAM_LATENCY

    return ring("TMA: a producer fills each slot as soon as its consumers leave it", shown, arrives)


def ring(title: str, shown: Timeline, arrives: Callable[[Sequence[Event], int], float]) -> Drawing:
    """The slots of K and V and the units over the first tiles of a block, in cycles."""
    flights, uses = dict[tuple[str, int], Span](), dict[tuple[str, int], Span]()
    for copy, product in READ.items():
        copies = [event for event in shown.events if event.name == copy]
        for n in range(TILES):
            flights[copy, n] = copies[n].start, arrives(copies, n)
            uses[copy, n] = used(shown.events, product, n, len(copies))
    start, end = min(span[0] for span in flights.values()), max(span[1] for span in uses.values())
    chart, shapes = Chart(start, end, LEFT), list[str]()
    for row, (copy, letter) in enumerate(COPIED.items()):
        for slot in range(STAGES):
            y = 40 + 30 * (STAGES * row + slot)
            shapes.append(text(6, y + 17, f"{letter}, slot {slot}"))
            for n in range(slot, TILES, STAGES):
                shapes += [chart.bar(flights[copy, n], y, ORANGE), chart.bar(uses[copy, n], y, BLUE)]
                shapes.append(chart.label(flights[copy, n], y, f"{letter}{n}"))
    works = {"products": ("tensor",), "softmax": ("exp", "alu")}
    for row, (name, units) in enumerate(works.items()):
        y = 172 + 30 * row
        shapes.append(text(6, y + 17, name))
        shapes += [chart.bar(span, y, GREEN) for span in merged(spans(shown.events, units), start, end)]
    busy = merged(spans(shown.events, ("tensor", "exp", "alu")), start, end)
    away = merged(flights.values(), start, end)
    figures: dict[str, float] = {
        "cycles shown": round(end - start),
        "cycles with a copy in flight": round(length(away)),
        "of them beside products or softmax": round(length(away) - length(outside(away, busy))),
    }
    shapes += [
        text(6, 22, f"{shown.algorithm} on one SM of {shown.device.title}"),
        *legend(LEFT, 254, {"in flight": ORANGE, "read by products": BLUE}),
        text(LEFT, 276, f"{end - start:,.0f} cycles, by the model of time"),
    ]
    return Drawing(title, 290, shapes, figures)


def ping_pong() -> Drawing:
    """Two consumers of flash3 take turns: one multiplies while the other is in its softmax."""
    return consumers(
        "Ping-pong: two consumers take turns at the tensor cores", timeline("flash3", HOPPER, device="h200")
    )


def consumers(title: str, shown: Timeline) -> Drawing:
    """Products and softmax of both consumers over some tiles of a walk, in cycles."""
    tiles = sum(event.name == "load_k" for event in shown.events)
    start, end = (used(shown.events, "output", n, tiles)[1] for n in (1, 1 + TILES))
    chart, shapes = Chart(start, end, LEFT), list[str]()
    for n, actor in enumerate(("consumer 0", "consumer 1")):
        y = 40 + 76 * n
        own = [event for event in shown.events if event.actor == actor]
        shapes += [text(6, y + 17, actor), text(6, y + 43, "its softmax")]
        for name, fill in (("scores", BLUE), ("output", GREEN)):
            products = [(event.start, event.end) for event in own if (event.unit, event.name) == ("tensor", name)]
            shapes += [chart.bar(span, y, fill) for span in merged(products, start, end)]
        softmax = spans([event for event in own if event.name == "softmax"], ("exp", "alu"))
        shapes += [chart.bar(span, y + 26, ORANGE) for span in merged(softmax, start, end)]
    y, busy = 196, merged(spans(shown.events, ("tensor",)), start, end)
    shapes += [text(6, y + 17, "tensor cores"), *(chart.bar(span, y, INK) for span in busy)]
    hands = [event.actor for event in shown.events if event.unit == "tensor" and start <= event.start < end]
    figures: dict[str, float] = {
        "cycles shown": round(end - start),
        "cycles in which the tensor cores work": round(length(busy)),
        "times that they pass from one consumer to the other": sum(a != b for a, b in pairwise(hands)),
    }
    shapes += [
        text(6, 22, f"{shown.algorithm} on one SM of {shown.device.title}"),
        *legend(LEFT, 250, {"Q Kᵀ": BLUE, "P V": GREEN, "softmax": ORANGE}),
        text(
            LEFT,
            272,
            f"{end - start:,.0f} cycles, {length(busy) / (end - start):.0%} of them with products",
        ),
    ]
    return Drawing(title, 290, shapes, figures)


class Chart(NamedTuple):
    """A range of cycles, drawn from `left` to the right edge."""

    start: float
    end: float
    left: float

    def x(self, cycle: float) -> float:
        return self.left + (WIDTH - 12 - self.left) * (cycle - self.start) / (self.end - self.start)

    def bar(self, span: Span, y: float, fill: str) -> str:
        return box(self.x(span[0]), y, self.x(span[1]) - self.x(span[0]), 24, fill)

    def label(self, span: Span, y: float, said: str) -> str:
        return text((self.x(span[0]) + self.x(span[1])) / 2, y + 17, said, "middle", "white")


def used(events: Iterable[Event], product: str, tile: int, tiles: int) -> Span:
    """From the first to the last product of a kind of one of the tiles. An actor takes equally many for each, in order."""
    of_actor = defaultdict[str, list[Event]](list)
    for event in events:
        if (event.unit, event.name) == ("tensor", product):
            of_actor[event.actor].append(event)
    parts = list[Event]()
    for found in of_actor.values():
        each = len(found) // tiles
        parts += found[tile * each : (tile + 1) * each]
    return min(event.start for event in parts), max(event.end for event in parts)


def spans(events: Iterable[Event], units: Sequence[str]) -> list[Span]:
    """When one of these units works."""
    return [(event.start, event.end) for event in events if event.unit in units]


def merged(found: Iterable[Span], start: float, end: float) -> list[Span]:
    """Spans of time within a range, as few as possible: those that meet are one.

    >>> merged([(4, 6), (0, 2), (1, 3), (8, 20)], 1, 10)
    [(1, 3), (4, 6), (8, 10)]
    """
    joined = list[Span]()
    for first, last in sorted((max(a, start), min(b, end)) for a, b in found):
        if last <= first:
            continue
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


def outside(these: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of merged spans lies in none of the others.

    >>> outside([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    left = list[Span]()
    for first, last in these:
        for a, b in others:
            if a < last and b > first:
                if a > first:
                    left.append((first, a))
                first = b
        if first < last:
            left.append((first, last))
    return left


def length(found: Iterable[Span]) -> float:
    """The cycles of merged spans together."""
    return sum(last - first for first, last in found)
