"""The rungs below FlashAttention-3: their configurations, and their rows. All move the same bytes, and differ in what runs beside
what."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel, Schedule
from simulator.algorithms.common import FORWARD
from simulator.algorithms.flash3 import ABOUT, BOXES, HOPPER, configure_rung
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import flash3 as formula
from simulator.problem import Problem, Tile
from simulator.program import Program
from simulator.programs.flash3_1 import flash3_1
from simulator.programs.flash3_2 import flash3_2
from simulator.programs.flash3_3 import flash3_3
from simulator.time.schedules import flash3_1 as schedule_1
from simulator.time.schedules import flash3_2 as schedule_2
from simulator.time.schedules import flash3_3 as schedule_3


@flash3_1.configured
def configure_alone(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The tile by head dim, and one block per row tile, in which all warpgroups load."""
    default = Tile(128, 128 if 64 < problem.head_dim <= 128 else 64)
    return configure_rung(problem, device, tile, default, producers=0)


@flash3_2.configured
@flash3_3.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The tile by head dim, and one block per row tile."""
    default = Tile(128, 64) if problem.head_dim > 128 else Tile(192 if problem.head_dim <= 64 else 128, 128)
    return configure_rung(problem, device, tile, default)


def rung(program: Program, schedule: Schedule, follows: str) -> Algorithm:
    """The row of a rung."""
    name = program.name
    return Algorithm(
        name,
        program,
        formula.flash3,
        schedule=schedule,
        kernels=(Kernel(name, name, FORWARD, BOXES, "sm_90a"),),
        support=HOPPER,
        about={name: ABOUT},
        follows=follows,
        lesson="08_hopper",
    )


ROWS = (
    rung(flash3_1, schedule_1.launches, "flash2"),
    rung(flash3_2, schedule_2.launches, "flash3_1"),
    rung(flash3_3, schedule_3.launches, "flash3_2"),
)
