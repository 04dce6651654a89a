"""The counts of a mask that an array says: of the launch that packs it, and of the bits and lists that the next one reads.

What an array hides is data. So this counts a mask whose tiles are all mixed, within what causal mask and window leave.
"""

from __future__ import annotations

from simulator.counts import Book, Spec
from simulator.formulas.walk import Walk, walk
from simulator.problem import Problem, Tile
from simulator.programs.mask import PACKERS, bits_per_row, list_length


def count_packing(book: Book, problem: Problem, tile: Tile, heads_together: int) -> None:
    """The launch `pack_mask` reads what row tiles see of the mask, and writes a bit per pair and an entry per tile, once."""
    p, rows = problem, problem.row_tiles(tile)
    if not p.mask:
        return
    mask = book.tensor(Spec("mask", 1, p.len_q, p.len_kv, "bool", "input"))
    nbytes = tile.rows * bits_per_row(tile) // 8
    planes = (("key_tiles", p.key_tiles(tile)),)
    bits = book.tensor(Spec("mask_bits", 1, rows, nbytes, "uint8", "workspace", axes=planes, flat=True))
    tiles = book.tensor(Spec("mask_tiles", 1, rows, list_length(p, tile), "int32", "workspace", flat=True))
    book.launch("pack_mask", rows, PACKERS, heads_together, 4 * PACKERS)
    visited = walk(p, tile)
    read = tile.rows * _bytes(visited, p, mask)
    if rows:  # the last row tile may be ragged
        last = p.tiles_of_row(rows - 1, tile)
        to_the_end = int(bool(last) and last.stop == p.key_tiles(tile))
        keys = max(0, min(p.len_kv, last.stop * tile.cols) - last.start * tile.cols)
        missing = rows * tile.rows - p.len_q
        read -= missing * _bytes(Walk(len(last), keys, keys, to_the_end), p, mask)
    together = walk(p, Tile(tile.rows, PACKERS * tile.cols)).pairs
    written = 4 * (rows + visited.pairs)
    book.add("load_mask", "mask", hbm_read=read)
    book.add("store_bits", "mask_bits", hbm_write=visited.pairs * bits.row_bytes)
    book.add("list", "kinds", sram_write=together * 4 * PACKERS, sram_read=together * 4 * PACKERS)
    book.add("store_list", "mask_tiles", hbm_write=written)
    book.distinct(mask.name, "read", read)
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


def _bytes(visited: Walk, problem: Problem, mask: Spec) -> int:
    """Bytes of the mask that one row of each row tile has. The last tile of a row has its padding, too."""
    return visited.keys + visited.to_the_end * (mask.row_bytes - problem.len_kv)
