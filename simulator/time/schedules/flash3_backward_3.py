"""flash3_backward_3: the overlaps of flash3_backward, with one block per key tile, a head after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simulator.config import Config
from simulator.problem import Problem
from simulator.programs.flash3 import PANEL
from simulator.time.engine import SM, Actor
from simulator.time.launch import Launch, Work
from simulator.time.rates import Rates
from simulator.time.schedules.flash2_backward import around
from simulator.time.schedules.flash3_backward import Cycles, Shared, consumers, drifting
from simulator.time.schedules.flash3_backward_2 import producer


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    c = Cycles(problem, config, rates)
    main = drifting("flash3_backward_3", lambda c: partial(_block, c=c), c, problem, config)
    return around("flash3_backward", main, problem, config, rates, panel=PANEL)


def _block(sm: SM, walk: Sequence[Work], c: Cycles) -> list[tuple[str, Actor]]:
    shared = Shared(sm, c)
    return [("producer", producer(sm, walk[0], c, shared)), *consumers(sm, walk, c, shared)]
