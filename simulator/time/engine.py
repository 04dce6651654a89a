"""The discrete-event core: units that serve one operation at a time, barriers, and actors that use both.

An actor is a generator: a warpgroup, the four warps of a block, or a producer. It yields a time until which it sleeps,
or an opening of a `Barrier` for which it waits. Units serve operations in the order in which they are issued. So the
end of an operation is known at once. An actor that yields this time waits for the operation. An actor that goes on has
issued it asynchronously. All times are in cycles of the SM.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

UNITS = ("copy", "sram", "tensor", "exp", "alu")
"""The units of an SM: its way to the L2, shared memory's port, the tensor cores, the exponential units (MUFU), and the
FMA and ALU lanes."""


class Event(NamedTuple):
    """An operation on a unit: the actor that issued it, its name, and when it ran (cycles)."""

    actor: str
    unit: str
    name: str
    start: float
    end: float


class Barrier:
    """A barrier that opens when `count` arrivals have come, and then starts anew, as mbarriers and named barriers do.

    `phase` is how often it has opened. An actor that waits for opening n passes once `phase` is over n.
    """

    def __init__(self, sm: SM, count: int) -> None:
        self.sm, self.count, self.missing, self.phase = sm, count, count, 0
        self._waiting: list[tuple[int, str, Actor]] = []

    @property
    def waiting(self) -> list[str]:
        """The actors that wait for it, by name."""
        return [name for _, name, _ in self._waiting]

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase + 1
            passing = [w for w in self._waiting if w[0] < self.phase]
            self._waiting = [w for w in self._waiting if w[0] >= self.phase]
            for _, name, actor in passing:
                self.sm.wake(self.sm.now, name, actor)

    def arrive_at(self, time: float) -> None:
        """Arrive at a time in the future, as a copy does."""
        self.sm.wake(time, "", self._arrival())

    def _arrival(self) -> Actor:
        self.arrive()
        return
        yield  # a generator, like every actor

    def opening(self, n: int) -> Waiting:
        """What an actor yields to wait for opening n. The first opening is 0."""
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
    """One SM: the time now, when each unit is free again, for how long it was busy, and what ran."""

    record: bool = False
    now: float = 0.0
    actor: str = ""
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))
    events: list[Event] = field(default_factory=list[Event])
    works_ended: list[float] = field(default_factory=list[float])
    blocks_ended: list[float] = field(default_factory=list[float])
    barriers: list[Barrier] = field(default_factory=list[Barrier])
    _queue: list[tuple[float, int, str, Actor]] = field(default_factory=list[tuple[float, int, str, Actor]])
    _order: int = 0

    def start(self, name: str, actor: Actor) -> None:
        """Let an actor run from now on."""
        self.wake(self.now, name, actor)

    def wake(self, time: float, name: str, actor: Actor) -> None:
        self._order += 1  # equal times: first come, first served
        heapq.heappush(self._queue, (time, self._order, name, actor))

    def use(self, unit: str, cycles: float, name: str, *, after: float = 0.0) -> float:
        """Issue an operation of `cycles` on a unit, which begins at `after` or later. Returns when it ends."""
        if cycles <= 0:
            return max(self.now, after)
        start = max(self.now, after, self.free[unit])
        end = self.free[unit] = start + cycles
        self.busy[unit] += cycles
        if self.record:
            self.events.append(Event(self.actor, unit, name, start, end))
        return end

    def work_ends(self, n: int) -> None:
        """Work n of a persistent block has ended for the actor that calls this."""
        _latest(self.works_ended, n, self.now)

    def block_ends(self, n: int) -> None:
        """The n-th block of a slot has ended."""
        _latest(self.blocks_ended, n, self.now)

    def barrier(self, count: int = 1) -> Barrier:
        self.barriers.append(Barrier(self, count))
        return self.barriers[-1]

    def run(self) -> float:
        """Run until all actors have ended and all units are free. Returns when that is.

        Raises `RuntimeError` if actors are left that wait for a barrier: the schedule has a deadlock.
        """
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
        stuck = sorted({name for barrier in self.barriers for name in barrier.waiting})
        if stuck:
            raise RuntimeError(f"deadlock: {', '.join(stuck)} wait for a barrier that doesn't open")
        return max(self.now, *self.free.values())


def _latest(times: list[float], n: int, now: float) -> None:
    times += [0.0] * (n + 1 - len(times))
    times[n] = max(times[n], now)
