"""flash2_backward_deterministic: flash2_backward with turns. How long a block waits for those of other SMs isn't modelled."""

from __future__ import annotations

from simulator.config import Config
from simulator.problem import Problem
from simulator.time.launch import Launch
from simulator.time.rates import Rates
from simulator.time.schedules.flash2_backward import around, main


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    return around(
        "flash2_backward", main("flash2_backward_deterministic", problem, config, rates), problem, config, rates
    )
