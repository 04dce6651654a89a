"""The counts of a mask that an array says: of the launch that packs it, and of the bits and lists that the next one reads.

What an array hides is data. So this counts a mask whose tiles are all mixed, within what causal mask and window leave.
"""

from __future__ import annotations

from math import gcd, lcm

import numpy as np

from simulator.counts import Book, Spec
from simulator.dtypes import Array
from simulator.formulas.walk import Walk, ends_of_row, tiles_of_rows, walk, weighted_rows
from simulator.lanes import least, most
from simulator.operations.pairs import mask_operand
from simulator.problem import Problem, Tile
from simulator.programs.mask import PACKERS, bits_per_row, by_rows, bytes_of_bits, check_tile, list_length


def count_packing(book: Book, problem: Problem, tile: Tile, heads_together: int) -> None:
    """The launch `pack_mask` reads what row tiles see of the mask, and writes a bit per pair and an entry per tile, once."""
    p, rows = problem, problem.row_tiles(tile)
    if not p.mask:
        return
    check_tile(p, tile)
    mask = book.tensors[mask_operand(p)]
    nbytes = tile.rows * bits_per_row(tile) // 8
    planes = (("key_tiles", p.key_tiles(tile)),)
    bits = book.tensor(Spec("mask_bits", 1, rows, nbytes, "uint8", "workspace", axes=planes, flat=True))
    tiles = book.tensor(Spec("mask_tiles", 1, rows, list_length(p, tile), "int32", "workspace", flat=True))
    book.launch("pack_mask", rows, PACKERS, heads_together, 4 * PACKERS, shared=True)
    visited, seeing = walk(p, tile), walk(p, Tile(tile.rows, most(1, p.len_kv))).pairs
    if p.mask == "bits":
        read, distinct = _bits(p, tile)
    elif p.mask == "blocks":
        read, distinct = _lists(p, seeing, visited)
    else:
        read = distinct = _booleans(p, tile, visited, mask)
    if "offsets_mask" in book.tensors:
        book.add("load_mask", "offsets_mask", hbm_read=8 * seeing * PACKERS)
        book.distinct("offsets_mask", "read", 8 * (seeing > 0))
    together = walk(p, Tile(tile.rows, PACKERS * tile.cols)).pairs
    written = 4 * (rows + visited.pairs)
    book.add("load_mask", mask.name, hbm_read=read)
    book.add("store_bits", "mask_bits", hbm_write=visited.pairs * bits.row_bytes)
    book.add("list", "kinds", sram_write=together * 4 * PACKERS, sram_read=together * 4 * PACKERS)
    book.add("store_list", "mask_tiles", hbm_write=written)
    book.distinct(mask.name, "read", distinct)
    book.distinct(bits.name, "write", visited.pairs * bits.row_bytes)
    book.distinct(tiles.name, "write", written)


def count_masked(book: Book, problem: Problem, tile: Tile, *, readers: int) -> None:
    """What the launch behind it reads: each warp of a block its rows' bits, each of `readers` its row tile's list."""
    p, rows = problem, problem.row_tiles(tile)
    if not p.mask:
        return
    heads, pairs, nbytes = p.batch * p.heads, walk(p, tile).pairs, book.tensors["mask_bits"].row_bytes
    book.add("load_q", "mask_tiles", hbm_read=heads * rows * 4 * readers)
    book.add("load_k", "mask_tiles", hbm_read=heads * pairs * 4 * readers)
    book.add("mask", "mask_bits", hbm_read=heads * pairs * nbytes)
    book.distinct("mask_tiles", "read", 4 * (rows + pairs))
    book.distinct("mask_bits", "read", pairs * nbytes)


def _booleans(problem: Problem, tile: Tile, visited: Walk, mask: Spec) -> int:
    """Bytes of booleans that are read. Where rows lie padded, the last tile of a row has its padding, too."""
    p, rows = problem, problem.row_tiles(tile)
    padding = 0 if by_rows(p) else mask.row_bytes - p.len_kv

    def of_a_row(visited: Walk) -> int:
        return visited.keys + visited.to_the_end * padding

    if not rows:
        return 0
    start, stop = ends_of_row(p, rows - 1, tile)  # of the last row tile, which may be ragged
    to_the_end = (start < stop) * (stop == p.key_tiles(tile))
    keys = most(0, least(p.len_kv, stop * tile.cols) - start * tile.cols)
    missing = rows * tile.rows - p.len_q
    return tile.rows * of_a_row(visited) - missing * of_a_row(Walk(stop - start, keys, keys, to_the_end))


def _lists(problem: Problem, seeing: int, visited: Walk) -> tuple[int, int]:
    """Bytes of lists of blocks that are read, of which all are visible, and how many different ones. `seeing` row tiles see a key.

    Each warp of those reads how many there are, and of each tile the one that packs it all of them.
    """
    p, number = problem, problem.block_list - 1
    reached = walk(p, Tile(p.block.rows, max(1, p.len_kv))).pairs
    return 4 * (PACKERS * seeing + number * visited.pairs), 4 * reached * (1 + number)


def _bits(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Bytes of bits that are read, row by row of each tile, and how many different ones.

    A row r of the n keys begins with bit r n. Where a tile's sides are multiples of 8, each of its tiles begins in a byte as the
    row does. So a row reads cols / 8 bytes of each tile, and one more where r n isn't a multiple of 8: it is `split` there.
    Of a ragged last tile it reads up to the row's end. Rows that lie one behind the other may share a byte, which counts
    once among the different ones.
    """
    p, (br, bc), rows = problem, tile, problem.row_tiles(tile)
    if br % 8 or bc % 8:
        return _bits_of_any_tile(p, tile)
    if not rows or not p.len_kv:
        return 0, 0
    n, tiles = p.len_kv, p.key_tiles(tile)
    repeats = 1 + (n % 8 > 0) + 2 * (n % 4 > 0) + 4 * (n % 2 > 0)  # after so many rows one begins with a byte again

    def split(low: int, high: int) -> int:
        """How many of the rows from `low` on begin within a byte."""
        high = most(low, high)
        return high - low - (-(-high // repeats) + -low // repeats)

    def from_tile(j: int) -> int:
        """The first row of those that see key tile j - 1, or a later one."""
        return 0 if p.right is None else br * most(0, least(rows, ((j - 1) * bc - p.offset - p.right) // br))

    to_the_end, first, stop = from_tile(tiles), *ends_of_row(p, rows - 1, tile)
    last, pairs = (rows - 1) * br, walk(p, tile).pairs
    whole = (br * pairs - (rows * br - p.len_q) * (stop - first)) * bc // 8
    whole += -(-p.len_q * n // 8) + -to_the_end * n // 8 - (p.len_q - to_the_end) * tiles * bc // 8
    read = whole + pairs * split(0, br) - (stop - first) * (split(0, br) - split(last, p.len_q))

    # rows that begin with key 0, behind one whose last byte they begin in
    begin_in_0 = p.len_q if p.left is None else least(p.len_q, br * -(-(bc + p.left - p.offset) // br))
    shared = split(to_the_end, begin_in_0)
    missing = n - (tiles - 1) * bc  # with fewer than 8 keys, the last but one tile may end in that byte, too
    before, behind = least(begin_in_0, from_tile(most(1, tiles - 1))), least(begin_in_0, to_the_end)
    for r in range(8):
        shared += (r * n % 8 > missing) * (-((r - behind) // 8) + (r - before) // 8)
    return read, whole + split(from_tile(1), p.len_q) - shared


def _bits_of_any_tile(problem: Problem, tile: Tile) -> tuple[int, int]:
    """The same for any tile: where in a byte a row of a tile begins repeats after 8 key tiles and 8 row tiles, or sooner."""
    p, (br, bc) = problem, tile
    period = lcm(8 * bc // gcd(8 * bc, br), 8 // gcd(8, br * p.len_kv))
    few = weighted_rows(p, tile, period)
    row = few.rows[:, None] * br + np.arange(br, dtype=np.int64)
    low, high, read = _bytes_of_rows(p, tile, row)
    before = _bytes_of_rows(p, tile, row - 1)[1]
    return few.sum(read.sum(axis=1)), few.sum(np.maximum(0, high - np.maximum(low, before)).sum(axis=1))


def _bytes_of_rows(problem: Problem, tile: Tile, row: Array) -> tuple[Array, Array, Array]:
    """Of each row of pairs: the first byte in which it has a visible tile's bit, the one behind the last, and how many bytes are
    read of all its tiles. All are 0 of a row that sees no key, or doesn't exist."""
    p, bc, tiles = problem, tile.cols, problem.key_tiles(tile)
    first, stop = tiles_of_rows(p, tile, row // tile.rows)
    seen = (first < stop) & (row >= 0) & (row < p.len_q)
    first, stop, begin = np.where(seen, first, 0), np.where(seen, stop, 0), row * p.len_kv
    whole, read = np.minimum(stop, tiles - 1), np.zeros_like(row)
    for n in range(8):
        number = np.maximum(0, -(-(whole - n) // 8) - -(-(first - n) // 8))  # of whole tiles j with j % 8 = n
        low, high = bytes_of_bits(begin + n * bc, bc)
        read += number * (high - low)
    low, high = bytes_of_bits(begin + (tiles - 1) * bc, p.len_kv - (tiles - 1) * bc)
    read += np.where(stop == tiles, high - low, 0)
    low, high = bytes_of_bits(begin + first * bc, np.minimum(stop * bc, p.len_kv) - first * bc)
    return np.where(seen, low, 0), np.where(seen, high, 0), np.where(seen, read, 0)
