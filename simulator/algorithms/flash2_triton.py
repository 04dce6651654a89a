"""FlashAttention-2 in Triton, forward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from itertools import product

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import FORWARD
from simulator.algorithms.flash2 import ABOUT
from simulator.config import Config, heads_that_share_the_l2, padded, warps_for
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import flash2 as formula
from simulator.problem import Problem, Tile
from simulator.programs.flash2_triton import flash2_triton
from simulator.support import Support, powers_of_two


@flash2_triton.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """Tile, warps and stages, which Triton's compiler is told.

    Each warp has 16 rows. In 16 bits four of them are a warpgroup of Hopper, which multiplies; in float32, which no
    tensor core multiplies, a warp has 8. The default tile is the largest whose registers don't spill, with as many
    stages of K and V as fit.
    """
    d, dv, half = power_of_two(problem.head_dim), power_of_two(problem.head_dim_v), problem.itemsize == 2
    hopper = device.compute_capability == (9, 0)
    if not half:
        default = Tile(64, max(16, min(64, 4096 // d)))
    elif d <= 64 and hopper:
        default = Tile(128, 128)
    else:
        default = Tile(128, 64)
    tiles = [default, Tile(64, 32), Tile(16, 16)] if tile is None else [Tile.parse(tile)]
    needed, most = 0, device.sram_per_block
    for chosen, stages in [*product(tiles, (3, 2)), (tiles[-1], 1)]:
        rows, cols = padded(chosen.rows), padded(chosen.cols)
        needed = (rows * d + stages * cols * (d + dv)) * problem.itemsize
        if needed <= most:
            warps = warps_for(rows if half else 2 * rows, 8)
            return Config(
                tile=chosen,
                warps=warps,
                stages=stages,
                consumers=warps // 4 if half and hopper else 0,
                heads_together=heads_that_share_the_l2(problem, device),
            )
    raise SramOverflow("tile", str(tiles[-1]), needed=needed, limit=most, device=device.name)


def power_of_two(n: int) -> int:
    """The columns of Triton's tiles for a head dim: a power of two, from 16 on."""
    return max(16, 1 << (n - 1).bit_length())


ROW = Algorithm(
    "flash2_triton",
    flash2_triton,
    formula.flash2,
    kernels=(Kernel("flash2_triton", "flash2", FORWARD, language="triton"),),
    support=Support(
        least=(8, 0), tile=powers_of_two, tiles=(None, Tile(16, 32), Tile(64, 64), Tile(128, 32), Tile(64, 128))
    ),
    about=ABOUT,
    follows="flash2",
    lesson="06_reading",
)
