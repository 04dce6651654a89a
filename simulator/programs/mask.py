"""A mask that an array says: a launch packs it once for all heads. Row tiles then walk only over key tiles that they see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.block import Block
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.machine import Machine
from simulator.operations.pairs import mask_operand, shown_pairs, visible_pairs
from simulator.problem import Problem, Tile, Visits, round_up
from simulator.registers import Registers
from simulator.tensors import HbmTensor

PACKERS = 16
"""Warps of a block that packs. Each takes a key tile."""


def bits_per_row(tile: Tile) -> int:
    """Bits in which a row of a tile lies: whole words of 64 keys."""
    return round_up(tile.cols, 64)


def list_length(problem: Problem, tile: Tile) -> int:
    """Integers of a row tile's list: its length, and an entry for each key tile; a multiple of 16 bytes."""
    return round_up(1 + problem.key_tiles(tile), 4)


class PackedMask:
    """What the launch `pack_mask` leaves in HBM for the next launch.

    `bits` has a bit for each pair of each tile. `tiles` lists for each row tile the key tiles that it sees, ascending, as
    2 j + 1 where the bits are needed, and as 2 j where all pairs are visible. `walk(i)` is what the list of row tile i
    says. On shapes alone all tiles that causal mask and window leave are mixed.
    """

    def __init__(self, m: Machine, tile: Tile, *, backwards: bool = False) -> None:
        p, name = m.problem, mask_operand(m.problem)
        check_tile(p, tile)
        self._backwards, self._tile = backwards, tile
        mask = m.optional(name)
        begins = m.optional("offsets_mask") if p.mask == "bits" and p.lengths is not None else None
        self._problem, self._kinds = p, tile_kinds(p, tile, m.values[name]) if m.data else None
        self._shown = shown_pairs(p, m.values[name]) if m.data else None
        self._listed = m.values[name][0, 0, 0, :, 0] if m.data and p.mask == "blocks" else None
        nbytes, length = tile.rows * bits_per_row(tile) // 8, list_length(p, tile)
        planes = {"key_tiles": p.key_tiles(tile)}
        self.bits = m.workspace("mask_bits", nbytes, "uint8", rows=p.row_tiles(tile), of=mask, axes=planes, flat=True)
        self.tiles = m.workspace("mask_tiles", length, "int32", rows=p.row_tiles(tile), of=mask, flat=True)
        for block in m.launch("pack_mask", rows=p.row_tiles(tile), warps=PACKERS, walk=self._ascending, of=mask):
            i, seen, listed = block.i, _visits(block), 0
            block.step("load_mask")
            if begins is not None and seen.around:
                block.fetch(begins, 0, 1, warps=PACKERS)
            if p.mask == "blocks" and seen.around:  # each warp asks how many blocks are visible
                block.request(mask, [(row, row + 1, 0, 4) for row in self._row_blocks(block)], warps=PACKERS)
            kinds = block.alloc("kinds", PACKERS, dtype="int32")
            for together in chunks(seen):
                for j in together:
                    block.step("load_mask")
                    x = self._load_rows(block, mask, j) if by_rows(p) else block.fetch(mask, i, tile.rows, j, tile.cols)
                    block.step("pack")
                    packed = block.pack(x, i, j, tile.cols)
                    block.step("store_bits")
                    block.store(self.bits.at(key_tiles=j), packed, i, 1)
                block.step("list")
                block.put(kinds, column(m, block, [entry(seen, j) for j in together], PACKERS))
                block.get(kinds)
                block.step("store_list")
                for j in filter(seen.__contains__, together):
                    listed += 1
                    block.store(self.tiles, column(m, block, [entry(seen, j)]), i, 1, listed, 1)
            block.step("store_list")
            block.store(self.tiles, column(m, block, [listed]), i, 1, 0, 1)

    def walk(self, i: int) -> Visits:
        """The key tiles that row tile i sees."""
        seen = self._ascending(i)
        return Visits(seen.around[::-1], seen.tiles[::-1], seen.mixed) if self._backwards else seen

    def _ascending(self, i: int) -> Visits:
        around = self._problem.tiles_of_row(i, self._tile)
        if self._kinds is None:
            return Visits(around, tuple(around), frozenset(around))
        some, every = self._kinds
        tiles = tuple(j for j in around if some[i, j])
        return Visits(around, tiles, frozenset(j for j in tiles if not every[i, j]))

    def _row_blocks(self, block: Block) -> list[int]:
        """The row of the mask's blocks that each row tile lies in."""
        return [i * self._tile.rows // self._problem.block.rows for i in _row_tiles(block)]

    def _load_rows(self, block: Block, mask: HbmTensor, j: int) -> Registers:
        """Key tile j of a mask that is read row by row: the bytes of a row's booleans, or those that hold its bits.

        A mask of blocks is read as whole lists, each of a row of blocks.
        """
        p, (rows, cols), found = self._problem, self._tile, list[Array]()
        start, stop = j * cols, min((j + 1) * cols, p.len_kv)
        if p.mask == "blocks":
            number = p.block_list - 1
            for row in self._row_blocks(block):
                length = number if self._listed is None else int(self._listed[row])
                block.request(mask, [(row, row + 1, 4, 4 + 4 * length)] if length else [])
        for tile in _row_tiles(block):
            first, end = tile * rows, min((tile + 1) * rows, p.len_q)
            if p.mask == "bits":
                low, high = bytes_of_bits(np.arange(first, end) * p.len_kv + start, stop - start)
                block.request(mask, [(int(a), int(b), 0, 1) for a, b in zip(low, high, strict=True)])
            elif p.mask == "dense":
                block.request(mask, [(first, end, start, stop)])
            if self._shown is not None:
                found.append(np.pad(self._shown[first:end, start:stop], ((0, rows - (end - first)), (0, 0))))
        values = np.stack(found)[None, None, None].astype(np.float32) if found else None
        return Registers(block, rows, stop - start, values)

    def begin(self, block: Block, warps: int) -> None:
        """Each of `warps` warps requests the length of its row tile's list."""
        block.fetch(self.tiles, block.i, 1, 0, 1, warps=warps)

    def visit(self, block: Block, j: int, warps: int) -> None:
        """Each of `warps` warps requests the list's entry for key tile j."""
        place = 1 + sorted(_visits(block).tiles).index(j)
        block.fetch(self.tiles, block.i, 1, place, 1, warps=warps)

    def hide(self, block: Block, s: Registers, j: int) -> Registers:
        """Tile j of S with -inf for hidden pairs. The warps split the bits of a mixed tile, and of others need none."""
        mixed = j in _visits(block).mixed
        return block.hide(s, block.fetch(self.bits.at(key_tiles=j), block.i, 1)) if mixed else s


def pack_mask(m: Machine, tile: Tile, *, backwards: bool = False) -> PackedMask | None:
    """The problem's mask, packed by a launch of its own, or None without one. Walks go `backwards` if the kernel's do."""
    return PackedMask(m, tile, backwards=backwards) if m.problem.mask else None


def by_rows(problem: Problem) -> bool:
    """Is a mask read row by row? Bits, and the booleans of a sequence, needn't begin where 16 bytes do, and lists are rows."""
    return problem.mask != "dense" or problem.lengths is not None


def check_tile(problem: Problem, tile: Tile) -> None:
    """Raises `UsageError` for a tile that would lie in several blocks of a mask of blocks."""
    rows, cols = problem.block
    if problem.mask == "blocks" and (rows % tile.rows or cols % tile.cols):
        raise UsageError("tile", str(tile), f"sides that divide those of a block of the mask, {rows} x {cols}")


def bytes_of_bits(first: Array, bits: int | Array) -> tuple[Array, Array]:
    """The first byte that holds some of `bits` bits, and the byte after the last. Bit `first` is the first of at least one."""
    return first // 8, -(-(first + bits) // 8)


def tile_kinds(problem: Problem, tile: Tile, mask: Array) -> tuple[Array, Array]:
    """For each (row tile, key tile): is some pair visible, and is every pair that the tile may hold?

    Keys beyond the last one are hidden pairs. Rows beyond the last one count for nothing.
    """
    p, rows, keys = problem, problem.row_tiles(tile), problem.key_tiles(tile)
    visible = visible_pairs(p, {mask_operand(p): mask})
    pad = (0, rows * tile.rows - p.len_q), (0, keys * tile.cols - p.len_kv)
    shape = rows, tile.rows, keys, tile.cols
    some = np.logical_or.reduce(np.pad(visible, pad).reshape(shape), (1, 3))
    outside = np.pad(np.zeros((p.len_q, 1), bool), (pad[0], (0, 0)), constant_values=True)
    every = np.logical_and.reduce((np.pad(visible, pad) | outside).reshape(shape), (1, 3))
    return some, every


def _row_tiles(block: Block) -> list[int]:
    """The row tiles of the blocks in lockstep."""
    return [int(i) for i in np.atleast_1d(block.i)]


def _visits(block: Block) -> Visits:
    assert isinstance(block.walk, Visits)
    return block.walk


def chunks(seen: Visits) -> list[list[int]]:
    """The key tiles around a walk, as a block packs them, some at a time: 0 to 15, 16 to 31, and so on."""
    numbers = dict.fromkeys(j // PACKERS for j in seen.around)
    return [[j for j in seen.around if j // PACKERS == number] for number in numbers]


def entry(seen: Visits, j: int) -> int:
    """The entry of key tile j in a list. It is -1 for a tile that is wholly hidden, which no list has."""
    return 2 * j + (j in seen.mixed) if j in seen.tiles else -1


def column(m: Machine, block: Block, numbers: Sequence[int], rows: int = 1) -> Registers:
    """Numbers as a tile of one column, with 0 below them."""
    data = np.zeros((1, 1, 1, 1, rows, 1), np.float32)
    data[..., : len(numbers), 0] = numbers
    return Registers(block, rows, 1, data if m.data else None)
