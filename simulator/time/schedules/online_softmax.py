"""online_softmax: `standard` with a middle launch of two passes over S: maximum and sum together, then P."""

from __future__ import annotations

from simulator.config import Config
from simulator.problem import Problem
from simulator.time.launch import Launch
from simulator.time.rates import Rates
from simulator.time.schedules.standard import Pass, output, scores, softmax


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    passes = (Pass(alu=4, exp=True), Pass(alu=3, exp=True, stores=True))
    middle = softmax("online_softmax", passes, problem, rates)
    return [scores(problem, config, rates), middle, output(problem, config, rates)]
