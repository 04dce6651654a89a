"""How a kernel runs a problem on a device: tile, warps, stages, what stays in registers, the order of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.problem import Problem, Tile, round_up


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a kernel; tile program, formula and CUDA launch all run this one.

    `warps` a block, `stages` of the K and V ring, `q_in_registers`: Q leaves SRAM once, not once a key tile;
    `heads_together`: (batch, head) pairs whose blocks run side by side before the next ones start. `blocks_per_sm`: the
    most that the kernel's registers leave room for (its launch bounds). `consumers`: warpgroups that multiply, each of which
    reads operands for itself as elsewhere a warp does (0: the warps multiply). `persistent`: one block an SM, which takes
    row tiles one after the other, with `pairs` two at a time, from the end and from the start of a head. `constants`: what
    the kernel is compiled with besides, as macros: (("SPLITS", 4),).

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=8, len_q=4096, head_dim=64, dtype="float16")
    >>> fl.count("flash2", p).config.warps
    4
    """

    tile: Tile
    warps: int
    stages: int = 1
    q_in_registers: bool = False
    heads_together: int = 1
    blocks_per_sm: int = 16
    consumers: int = 0
    persistent: bool = False
    pairs: bool = False
    constants: tuple[tuple[str, int], ...] = ()

    def grid(self, problem: Problem, device: Device, blocks: int) -> int:
        """Blocks of the launch that does the work of `blocks` row tiles (all heads' together).

        >>> import flashlab as fl
        >>> p = fl.Problem(batch=1, heads=8, len_q=4096, head_dim=64, dtype="float16", causal=True)
        >>> fl.count("flash3", p).config.grid(p, fl.DEVICES["h100"], 176)
        88
        """
        if self.pairs:
            blocks = problem.batch * problem.heads * -(-problem.row_tiles(self.tile) // 2)
        return min(blocks, device.sms) if self.persistent else blocks


def padded(n: int) -> int:
    """Rows, columns or head dim as the fragments (16 x 8 x 16) pad them."""
    return round_up(n, 16)


def warps_for_rows(rows: int, most: int = 4) -> int:
    """Warps that split `rows` by whole fragments of 16 rows, `most` at the most."""
    fragments = padded(rows) // 16
    return next(w for w in range(min(most, fragments), 0, -1) if fragments % w == 0)


def choose(
    candidates: Iterable[Tile | tuple[int, int]],
    tile: Tile | tuple[int, int] | str | None,
    device: Device,
    sram: Callable[[Tile], int],
) -> Tile:
    """The tile asked for, else the first candidate whose SRAM (bytes a block) fits the device.

    Raises `SramOverflow` if the tile asked for does not fit, or none of the candidates does.
    """
    asked = [] if tile is None else [Tile.parse(tile)]
    last = Tile(1, 1)
    for last in asked or [Tile(*pair) for pair in candidates]:
        if sram(last) <= device.sram_per_block:
            return last
    raise SramOverflow("tile", str(last), needed=sram(last), limit=device.sram_per_block, device=device.name)


def heads_that_share_the_l2(problem: Problem, device: Device) -> int:
    """How many (batch, head) pairs to run side by side so that their K and V stay in the L2.

    A third of the L2: what every SM reads is kept once in each of its two halves (measured on an H200: re-reads by all
    SMs are served up to about half of the 60 MB), and Q and out pass through as well. All groups are of one size, so that
    none is left to start its long rows alone.
    """
    kv = problem.len_kv * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    kv_heads = problem.batch * problem.kv_heads
    most = max(1, min(kv_heads, device.l2 // 3 // max(1, kv)))
    return problem.queries_per_kv * next(n for n in range(most, 0, -1) if kv_heads % n == 0)
