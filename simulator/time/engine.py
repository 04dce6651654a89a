"""The discrete-event core: units that serve one operation at a time, barriers, and actors that use both.

An actor is a generator: a warpgroup, four warps, or a producer. It yields a time to sleep until, or a `Barrier` to wait
for. Units serve operations in the order in which they are asked, so that when an operation ends is known as soon as it is
issued: an actor that goes on meanwhile has issued it asynchronously, one that yields the time waits for it. All times are
cycles of the SM.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

UNITS = ("copy", "sram", "tensor", "exp", "alu")
"""Of an SM: its way to the L2, the shared memory's port, the tensor cores, the exponentials (MUFU), the FMA and ALU lanes."""


class Event(NamedTuple):
    """An operation on a unit: who asked for it, what it was, when it ran (cycles)."""

    actor: str
    unit: str
    name: str
    start: float
    end: float


class Barrier:
    """Opens, once, when `count` arrivals have come; then starts anew, as mbarriers and named barriers do.

    `phase` counts how often it has opened: who waits for opening n passes if `phase` is over n.
    """

    def __init__(self, sm: SM, count: int) -> None:
        self.sm, self.count, self.missing, self.phase = sm, count, count, 0
        self._waiting: list[tuple[int, str, Actor]] = []

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase + 1
            passing = [w for w in self._waiting if w[0] < self.phase]
            self._waiting = [w for w in self._waiting if w[0] >= self.phase]
            for _, name, actor in passing:
                self.sm.wake(self.sm.now, name, actor)

    def arrive_at(self, time: float) -> None:
        """An arrival in the future: a copy that will have come."""
        self.sm.wake(time, "", self._arrival())

    def _arrival(self) -> Actor:
        self.arrive()
        return
        yield  # a generator, like every actor

    def opening(self, n: int) -> Waiting:
        """What an actor yields to pass after opening n (0 the first)."""
        return Waiting(self, n)

    def wait(self, n: int, name: str, actor: Actor) -> None:
        if self.phase > n:
            self.sm.wake(self.sm.now, name, actor)
        else:
            self._waiting.append((n, name, actor))


class Waiting(NamedTuple):
    barrier: Barrier
    opening: int


Actor = Generator["float | Waiting", None, None]


@dataclass
class SM:
    """One SM: the clock, when each unit is free again, how long it was busy, and what ran."""

    record: bool = False
    now: float = 0.0
    actor: str = ""
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))
    events: list[Event] = field(default_factory=list[Event])
    marks: list[float] = field(default_factory=list[float])
    _queue: list[tuple[float, int, str, Actor]] = field(default_factory=list[tuple[float, int, str, Actor]])
    _order: int = 0

    def start(self, name: str, actor: Actor) -> None:
        """Let an actor run from now on."""
        self.wake(self.now, name, actor)

    def wake(self, time: float, name: str, actor: Actor) -> None:
        self._order += 1  # equal times: first come, first served
        heapq.heappush(self._queue, (time, self._order, name, actor))

    def use(self, unit: str, cycles: float, name: str, *, after: float = 0.0) -> float:
        """Have a unit do an operation, not before `after`; returns when it ends."""
        if cycles <= 0:
            return max(self.now, after)
        start = max(self.now, after, self.free[unit])
        end = self.free[unit] = start + cycles
        self.busy[unit] += cycles
        if self.record:
            self.events.append(Event(self.actor, unit, name, start, end))
        return end

    def mark(self, n: int) -> None:
        """Work n of a block has ended, as far as the actor that says so is concerned."""
        self.marks += [0.0] * (n + 1 - len(self.marks))
        self.marks[n] = max(self.marks[n], self.now)

    def barrier(self, count: int = 1) -> Barrier:
        return Barrier(self, count)

    def run(self) -> float:
        """Until nobody has anything to do any more; returns when that is. Raises `RuntimeError` on a deadlock."""
        while self._queue:
            time, _, name, actor = heapq.heappop(self._queue)
            self.now, self.actor = max(self.now, time), name
            for wish in actor:
                if isinstance(wish, Waiting):
                    if wish.barrier.phase > wish.opening:
                        continue
                    wish.barrier.wait(wish.opening, name, actor)
                    break
                if wish > self.now:
                    self.wake(wish, name, actor)
                    break
        return max(self.now, *self.free.values())
