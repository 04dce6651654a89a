"""The cost of a work in the middle of a kernel. Short walks are simulated, and longer ones extrapolated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from simulator.time.engine import SM, UNITS, Actor, Barrier
from simulator.time.launch import Launch, Work

LONGEST_WALK = 12
"""The most key tiles of a walk that is simulated as it is. Each further tile takes as long as the last ones did."""
MOST_MASKED = 24
"""The most tiles through which the mask cuts that are simulated. Each further one takes as long as the last ones did."""
_IN_A_ROW = 3  # how many works are simulated one after the other; the first finds the SM empty


Busy = np.ndarray[Any, np.dtype[np.float64]]


class Cost(NamedTuple):
    """The cost of one work: `cycles` in its slot, `fill` further cycles if it is the slot's first.

    `busy` is for how many cycles each hardware unit of the SM is busy with it.
    """

    cycles: float
    fill: float
    busy: Busy


@dataclass
class Costs:
    """The cost of each kind of work of a launch, with `slots` blocks per SM. A block takes `start` cycles to start."""

    launch: Launch
    slots: int
    start: float
    _known: dict[Work, Cost] = field(default_factory=dict[Work, Cost])

    def of(self, work: Work) -> Cost:
        """The cost of one work, with any number of tiles."""
        if work not in self._known and work.masked > MOST_MASKED:
            further = work.masked - MOST_MASKED
            base, each = self.of(Work(work.tiles - further, MOST_MASKED)), self._masked_tile()
            self._known[work] = Cost(base.cycles + further * each.cycles, base.fill, base.busy + further * each.busy)
        if work not in self._known:
            simulated = work.tiles <= _longest(work)
            self._known[work] = self._simulated(work) if simulated else self._continued(work)
        return self._known[work]

    def _continued(self, work: Work) -> Cost:
        base, tile = self.of(Work(_longest(work), work.masked)), self._tile()
        further = work.tiles - _longest(work)
        return Cost(base.cycles + further * tile.cycles, base.fill, base.busy + further * tile.busy)

    def _tile(self) -> Cost:
        """The cost of one more key tile in a long walk."""
        return self._more(Work(LONGEST_WALK // 2), Work(LONGEST_WALK))

    def _masked_tile(self) -> Cost:
        """The same of a tile that the mask cuts through."""
        return self._more(Work(MOST_MASKED // 2, MOST_MASKED // 2), Work(MOST_MASKED, MOST_MASKED))

    def _more(self, short: Work, long: Work) -> Cost:
        """What the longer work takes more than the shorter one, for each tile."""
        few, many, more = self.of(short), self.of(long), long.tiles - short.tiles
        busy = (many.busy - few.busy) / more
        return Cost(max((many.cycles - few.cycles) / more, float(busy.max()) * self.slots), 0.0, busy)

    def _simulated(self, work: Work) -> Cost:
        """The cost by simulation. If only chance puts warpgroups in step, it is the weighted mean of both cases."""
        apart = self._run(work, self.launch, self.slots)
        if self.launch.in_step is None:
            return apart
        step = self._run(work, replace(self.launch, block=self.launch.in_step(self.slots)), 1)
        chance = self.launch.chance
        cycles, fill = ((1 - chance) * a + chance * b for a, b in zip(apart[:2], step[:2], strict=True))
        return Cost(cycles, fill, apart.busy)

    def _run(self, work: Work, launch: Launch, slots: int) -> Cost:
        sm = run(launch, [[work] * _IN_A_ROW] * slots, self.start)
        ends = sm.works_ended if launch.persistent else sm.blocks_ended
        busy = np.array([sm.busy[name] for name in UNITS]) / (_IN_A_ROW * slots)
        # at least the slot's share of the busiest hardware unit, which may have worked ahead
        cycles = max((ends[-1] - ends[0]) / (_IN_A_ROW - 1), float(busy.max()) * slots)
        return Cost(cycles, max(0.0, ends[0] - cycles), busy)


def _longest(work: Work) -> int:
    return max(LONGEST_WALK, work.masked)


def run(launch: Launch, agendas: Sequence[Sequence[Work]], start: float, *, record: bool = False) -> SM:
    """Simulate one SM, with a list of works for each slot. A block takes `start` cycles to start. Returns the SM."""
    sm = SM(record=record)
    for slot, agenda in enumerate(agendas):
        if launch.persistent:
            block = launch.block(sm, agenda)
            for name, actor in block:
                sm.wake(start, _named(name, slot, len(agendas)), actor)
        else:
            sm.start("", _one_after_another(sm, launch, agenda, start, slot, len(agendas)))
    sm.run()
    return sm


def _one_after_another(sm: SM, launch: Launch, agenda: Sequence[Work], start: float, slot: int, slots: int) -> Actor:
    """A slot of an SM. The next block starts when all actors of the block before have ended."""
    for n, work in enumerate(agenda):
        yield sm.now + start
        block = launch.block(sm, [work])
        ended = sm.barrier(len(block))

        def to_the_end(actor: Actor, ended: Barrier = ended) -> Actor:
            yield from actor
            ended.arrive()

        for name, actor in block:
            sm.start(_named(name, slot, slots), to_the_end(actor))
        yield ended.opening(0)
        sm.block_ends(n)


def _named(actor: str, slot: int, slots: int) -> str:
    return actor if slots == 1 else f"block {slot}: {actor}"
