"""When a kernel is done: blocks simulated on one SM, scheduled over all, held against DRAM and the power limit."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from simulator import catalogue
from simulator.api import count
from simulator.counts import Counts
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.problem import Problem
from simulator.simulate import TileLike
from simulator.time import rates as figures
from simulator.time.costs import Costs, run
from simulator.time.engine import UNITS, Event
from simulator.time.launch import Launch, Work
from simulator.time.rates import Rates
from simulator.time.schedule import deal, finish


@dataclass(frozen=True)
class LaunchTime:
    name: str
    seconds: float
    cycles: float
    utilisation: dict[str, float]
    bound: str
    floors: dict[str, float]
    slots: int
    balance: float


@dataclass(frozen=True)
class Timeline:
    algorithm: str
    problem: Problem
    device: Device
    launches: tuple[LaunchTime, ...]

    @property
    def seconds(self) -> float:
        return sum(launch.seconds for launch in self.launches)


def timeline(algorithm: str, problem: Problem, tile: TileLike = None, device: Device | str = "h100") -> Timeline:
    device = Device.named(device)
    row = catalogue.get(algorithm)
    config = row.program.configure(problem, device, tile)
    rates = Rates(device, problem.dtype)
    module = importlib.import_module(f"simulator.time.kernels.{row.name}")
    counts = count(algorithm, problem, tile=tile, device=device)
    return Timeline(
        row.name,
        problem,
        device,
        tuple(_time(launch, rates, counts, i) for i, launch in enumerate(module.launches(problem, config, rates))),
    )


def _time(launch: Launch, rates: Rates, counts: Counts, i: int) -> LaunchTime:
    sms = rates.device.sms
    total = sum(n for _, n in launch.order)
    slots = min(launch.slots, -(-total // sms))
    costs = Costs(launch, slots)
    busy = np.zeros(len(UNITS))
    runs = []
    for unit, n in launch.order:
        cost = costs.of(unit)
        busy += n * cost.busy
        runs.append((cost.cycles, n))
    if launch.persistent:
        each = [c for c, n in runs for _ in range(n)]
        cycles = deal(each, slots * sms) + costs.of(launch.order[0][0]).fill
    else:
        cycles = finish(runs, slots * sms)
    work = sum(c * n for c, n in runs) / (slots * sms)
    seconds = cycles / rates.clock
    c = counts.launches[i]
    dram = sum(counts.distinct(c, way) for way in ("read", "write"))
    floors = {"DRAM": dram / rates.device.bandwidth}
    return LaunchTime(
        launch.name,
        max(seconds, floors["DRAM"]) + figures.LAUNCH,
        cycles,
        dict(zip(UNITS, (busy / (cycles * sms)).round(3).tolist())),
        "",
        floors,
        slots,
        work / cycles,
    )
