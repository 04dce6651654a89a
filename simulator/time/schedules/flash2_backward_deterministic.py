"""flash2_backward_deterministic: flash2_backward, whose blocks ask for their turn, wait until additions arrive, and pass it on.

How long a block waits for its turn behind blocks of other SMs isn't modelled.
"""

from __future__ import annotations

from simulator.config import Config
from simulator.problem import Problem
from simulator.time.launch import Launch
from simulator.time.rates import Rates
from simulator.time.schedules.flash2_backward import around, main


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    in_turn = main("flash2_backward_deterministic", problem, config, rates, in_turn=True)
    return around("flash2_backward", in_turn, problem, config, rates)
