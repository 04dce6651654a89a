"""flash3_fp8: flash3's schedule with operands of a byte: half the bytes in, twice the products a clock, as many exponentials.

No row of the catalogue, as a `Problem` has no 8-bit dtype: its `dtype` is the output's here. Quantisation isn't timed.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.config import Config, heads_that_share_the_l2
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.problem import Problem, Tile, round_up
from simulator.programs import flash3 as program
from simulator.time.kernels import flash3
from simulator.time.kernels.flash3 import Cycles
from simulator.time.launch import Launch
from simulator.time.rates import Rates


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As the launcher of the kernel does: three warpgroups up to head dim 128 where the sequence is long enough for their tile."""
    if problem.itemsize != 2:
        raise UsageError("dtype", problem.dtype, "float16 or bfloat16, of the output of flash3_fp8")
    long = problem.head_dim <= 128 and problem.kv_length > 4096
    chosen = Tile(192, 96) if long else Tile(128, 128)
    if tile is not None:
        chosen = Tile.parse(tile)
    config = program.configure(problem, device, Tile(chosen.rows, chosen.cols // 2))
    return replace(config, tile=chosen, heads_together=heads_that_share_the_l2(problem, device))


def launches(problem: Problem, config: Config, rates: Rates) -> list[Launch]:
    """flash3's launch, and the distinct bytes that it moves."""
    p = problem
    moved = (p.batch * p.heads * p.len_q * (p.head_dim + 2 * p.value_dim + 4)
             + p.batch * p.num_kv_heads * p.kv_length * (p.head_dim + p.value_dim))  # fmt: skip
    launch = flash3.launch("flash3_fp8", problem, config, _Cycles(problem, config, rates))
    return [replace(launch, moved=moved)]


class _Cycles(Cycles):
    def __init__(self, problem: Problem, config: Config, rates: Rates) -> None:
        super().__init__(problem, config, rates)
        cols = config.tile.cols
        self.q, self.k, self.v = (
            self.q / 2,
            self.k / 2,
            self.v / 2 * round_up(cols, 128) / cols,
        )  # V in whole panels of keys
        self.scores, self.output = self.scores / 2, self.output / 2
