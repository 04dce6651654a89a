"""The softmax of a vector in four ways: their configuration, the player's words, and their rows of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import softmax as formula
from simulator.problem import Problem, Tile
from simulator.program import configure_plainly
from simulator.programs.softmax import softmax_merge, softmax_naive, softmax_online, softmax_safe


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """One warp, which takes 128 elements at a time unless another tile is asked for."""
    return configure_plainly(problem, device, (1, 128) if tile is None else tile)


ABOUT = {
    "softmax_naive": {
        "row_sum": "First pass over the row: the sum of exp(x). Over 88, exp overflows in float32.",
        "store": "Second pass: exp(x) again, divided by the sum.",
    },
    "softmax_safe": {
        "row_max": "First pass over the row: its maximum.",
        "row_sum": "Second pass: the sum of exp(x − maximum), which cannot overflow.",
        "store": "Third pass: exp(x − maximum) again, divided by the sum.",
    },
    "softmax_online": {
        "online_pass": "One pass for both: whenever the maximum rises, the sum so far is rescaled to the new one.",
        "store": "Second pass: exp(x − maximum), divided by the sum.",
    },
    "partial": {
        "partial": "A tile finds its own maximum and sum, without any other tile, and writes the pair to HBM.",
    },
    "merge": {
        "merge": "Fetch the pairs of all tiles and merge them, in any order: sums are rescaled to the common maximum.",
        "store": "Divide this tile by the merged sum.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

_PAIRS = (
    (softmax_naive, formula.softmax_naive),
    (softmax_safe, formula.softmax_safe),
    (softmax_online, formula.softmax_online),
    (softmax_merge, formula.softmax_merge),
)
for _program, _ in _PAIRS:
    _program.configured(configure)
ROWS = tuple(Algorithm(program.name, program, of, about=ABOUT) for program, of in _PAIRS)
