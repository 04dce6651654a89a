"""flash3_3: the overlaps of flash3, with one block per row tile, in the order of the rows."""

from __future__ import annotations

from functools import partial

from simulator.config import Config
from simulator.problem import Problem
from simulator.time.launch import Launch
from simulator.time.order import in_order
from simulator.time.rates import Rates
from simulator.time.schedules.flash3 import Cycles, overlapped


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    order = [(in_order(problem, config.tile), problem.batch * problem.heads)]
    return [Launch("flash3_3", partial(overlapped, c=Cycles(problem, config, rates)), order)]
