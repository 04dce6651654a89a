"""What an algorithm's file says of a launch: what its blocks do, in which order they start, and how many share an SM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.config import Config
from simulator.devices import Device
from simulator.problem import Problem, Tile
from simulator.time.engine import SM, Actor


class Work(NamedTuple):
    """What a block has to do: a walk of so many key tiles, of which the mask cuts through some."""

    tiles: int
    masked: int = 0


Unit = tuple[Work, ...]
"""The works that one block does in a row before it looks for more: one, or two where row tiles are paired."""
Block = Callable[[SM, Sequence[Work]], "list[tuple[str, Actor]]"]
"""The actors of one block, by name, that do these works one after the other; those of a persistent block call `sm.work_ends(n)` as
work n ends."""


@dataclass(frozen=True)
class Launch:
    """`order`: runs of equal units in the order in which blocks take them. `slots`: blocks that an SM has room for. `persistent`:
    one block a slot for the whole launch, block b taking units b, b + blocks, …; else a block a unit.

    `in_step`, of the blocks of an SM that do the same at the same time, as one; `chance`: how often, where nothing arranges it."""

    name: str
    block: Block
    order: Sequence[tuple[Unit, int]]
    slots: int = 1
    persistent: bool = False
    in_step: Callable[[int], Block] | None = None
    chance: float = 0.0


def works(problem: Problem, tile: Tile) -> list[Work]:
    """The walk of each row tile of a head, in the order of the rows."""
    return [_work(problem, tile, i) for i in range(problem.row_tiles(tile))]


def _work(problem: Problem, tile: Tile, i: int) -> Work:
    tiles = problem.tiles_of_row(i, tile)
    first = i * tile.rows
    last = min(first + tile.rows, problem.len_q) - 1
    seen_by_all = range(problem.keys_of_rows(last, last).start, problem.keys_of_rows(first, first).stop)
    full = range(-(-seen_by_all.start // tile.cols), max(0, seen_by_all.stop) // tile.cols)
    return Work(len(tiles), len(tiles) - min(len(tiles), len(full)))


def resident(config: Config, device: Device, sram: int, registers: int = 0) -> int:
    """Blocks that an SM holds at a time: by SRAM (each takes 1 KB more), warps, what its launch bounds say, and registers a
    lane, if given (65,536 an SM)."""
    by_sram = device.sram_per_sm // (sram + 1024)
    by_registers = 65536 // (registers * 32 * config.warps) if registers else config.blocks_per_sm
    return max(1, min(by_sram, device.max_warps_per_sm // config.warps, by_registers))


def first_touch(problem: Problem, tile: Tile) -> float:
    """The share of the loads of K and V that DRAM serves, if the L2 serves all the others."""
    loads = sum(len(problem.tiles_of_row(i, tile)) for i in range(problem.row_tiles(tile))) * problem.queries_per_kv
    return min(1.0, problem.key_tiles(tile) / loads) if loads else 1.0
