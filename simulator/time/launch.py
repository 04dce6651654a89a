"""What a schedule says about a launch: what its blocks do, in which order they start, and how many share an SM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.config import Config
from simulator.devices import Device
from simulator.formulas.walk import walk
from simulator.problem import Problem, Tile
from simulator.time.engine import SM, Actor


class Work(NamedTuple):
    """A block's walk over `tiles` key tiles. The mask cuts through `masked` of them."""

    tiles: int
    masked: int = 0


Runs = Sequence[tuple[Work, int]]
"""Works in the order in which blocks take them, and how many of each in a row."""
Block = Callable[[SM, Sequence[Work]], "list[tuple[str, Actor]]"]
"""`block(sm, works)` returns the actors of one block with their names. They do these works one after the other. The
actors of a persistent block call `sm.work_ends(n)` when work n ends."""


@dataclass(frozen=True)
class Launch:
    """One launch, as the model of time sees it.

    - `order`: parts (runs, how often), in the order in which blocks take them.
    - `slots`: how many blocks an SM has room for.
    - `persistent`: each slot has one block for the whole launch, and block b takes the works b, b + blocks, and so on.
      Otherwise each work has a block of its own.
    - `dynamic`: a persistent block takes the next work that none has taken yet.
    - `in_step(blocks)`: one block in place of all `blocks` of an SM, whose warpgroups do the same at the same time. It
      is None if the kernel arranges turns.
    - `chance`: the share of the time for which warpgroups are in step if nothing arranges turns.
    """

    name: str
    block: Block
    order: Sequence[tuple[Runs, int]]
    slots: int = 1
    persistent: bool = False
    dynamic: bool = False
    in_step: Callable[[int], Block] | None = None
    chance: float = 0.0

    @property
    def works(self) -> int:
        """How many works there are."""
        return sum(times * sum(n for _, n in runs) for runs, times in self.order)

    def taken(self) -> Iterator[Work]:
        """The works, one by one."""
        for runs, times in self.order:
            for _ in range(times if runs else 0):
                for work, n in runs:
                    for _ in range(n):  # which may be over 2^63: `repeat` takes no such number
                        yield work


def resident(config: Config, device: Device, sram: int, registers: int = 0) -> int:
    """How many blocks an SM holds at a time, each with `sram` bytes and 1 KB more.

    SRAM and warps decide, and the registers: 65,536 per SM with `registers` per lane, or the launch bounds if that is
    0.
    """
    by_sram = device.sram_per_sm // (sram + 1024)
    by_registers = 65536 // (registers * 32 * config.warps) if registers else config.blocks_per_sm
    return max(1, min(by_sram, device.max_warps_per_sm // config.warps, by_registers))


def rows_inside(problem: Problem, tile: Tile) -> tuple[float, float]:
    """How many rows of Q, and of K, a tile has within the problem, in the mean. Rows outside are neither loaded nor stored."""
    q, k = max(1, problem.row_tiles(tile)), max(1, problem.key_tiles(tile))
    return min(tile.rows, problem.len_q / q), min(tile.cols, problem.len_kv / k)


def first_touch(problem: Problem, tile: Tile) -> float:
    """The share of the loads of K and V that DRAM serves if the L2 serves all others."""
    loads = walk(problem, tile).pairs * problem.queries_per_kv
    return min(1.0, problem.key_tiles(tile) / loads) if loads else 1.0
