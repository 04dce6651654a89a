"""FlashAttention-2, backward, the same bits in every run: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel, nowhere
from simulator.algorithms import flash2_backward as unordered
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import flash2_backward_deterministic as formula
from simulator.problem import Problem, Tile
from simulator.programs.flash2_backward_deterministic import flash2_backward_deterministic
from simulator.time.schedules import flash2_backward_deterministic as schedule

_MAIN = {
    "draw": "Draw the next key tile of the KV head (or of a sequence there) from a counter. Blocks with lower numbers have begun.",
    **unordered.ABOUT["flash2_backward"],
    "dq": "dS K belongs to dQ of these queries. Wait until the key tiles before have added theirs, add this one, and count up.",
}


ABOUT = {name: steps for name, steps in unordered.ABOUT.items() if name != "flash2_backward"} | {
    "flash2_backward_deterministic": _MAIN
}
"""What each step of each launch is for, in a sentence or two: the player's words."""


@flash2_backward_deterministic.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """That of `flash2_backward`, with an order in which blocks add to dQ."""
    config = unordered.configure(problem, device, tile)
    return replace(config, constants=(*config.constants, ("DETERMINISTIC", 1)))


ROW = Algorithm(
    "flash2_backward_deterministic",
    flash2_backward_deterministic,
    formula.flash2_backward_deterministic,
    schedule=schedule.launches,
    kernels=(
        unordered.DELTA,
        Kernel(
            "flash2_backward",
            "flash2_backward_deterministic",
            (*unordered.ARGUMENTS, "drawn", "number", "turns"),
            waits=True,
        ),
        unordered.CONVERT,
        unordered.SINKS,
    ),
    support=replace(unordered.ROW.support, instead="flash2_backward"),
    about=ABOUT,
    follows="flash2_backward",
    rank=2,
    pays=nowhere,  # but where each run is to give the same bits, which doesn't ask
)
