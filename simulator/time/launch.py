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


Block = Callable[[SM, Sequence[Work]], "list[tuple[str, Actor]]"]
"""The actors of one block that does these works one after the other; each calls `sm.mark(n)` as it ends work n."""


@dataclass(frozen=True)
class Launch:
    """`order`: runs of equal units in the order in which blocks take them; a unit is the works that one block does in a row,
    one unless tiles are paired. `slots`: blocks an SM holds. `persistent`: one block a slot, which takes every so-many-th unit.
    `flops`: tensor-core FLOPs of one work, by its key tiles."""

    name: str
    block: Block
    order: Sequence[tuple[tuple[Work, ...], int]]
    slots: int = 1
    persistent: bool = False


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


def resident(config: Config, device: Device, sram: int) -> int:
    """Blocks that an SM holds at a time: by SRAM (each takes 1 KB more), warps, and what the registers leave room for."""
    by_sram = device.sram_per_sm // (sram + 1024)
    return max(1, min(by_sram, device.max_warps_per_sm // config.warps, config.blocks_per_sm))


def first_touch(problem: Problem, tile: Tile) -> float:
    """The share of the loads of K and V that DRAM serves, if the L2 serves all the others."""
    loads = sum(len(problem.tiles_of_row(i, tile)) for i in range(problem.row_tiles(tile))) * problem.queries_per_kv
    return min(1.0, problem.key_tiles(tile) / loads) if loads else 1.0
