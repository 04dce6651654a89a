"""The counts of Flash-Decoding in closed form, for many row tiles at a time. Decoding has one or a few."""

from __future__ import annotations

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding import CHILDREN, TILES_PER_CHUNK, Splits, sram_bytes


def flash_decoding(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per KV head, with n keys in chunks of c, G heads of one query: it reads 2nd of K and V, and n/c Gd of Q.

    Each chunk writes G(d + 1) float32 of a partial result, which is read once, and counts up by 4 bytes. Nodes above the chunks
    do the same, 1/16 as many at each level.
    """
    p, es, t, s, w = problem, problem.itemsize, book.tensors, Splits(problem, tile), config.warps
    heads, rows, cols = p.batch * p.kv_heads, padded(tile.rows), padded(tile.cols)
    d, dv = padded(p.head_dim), padded(p.head_dim_v)
    q_tile, k_tile, v_tile = rows * d * es, cols * d * es, cols * dv * es
    pairs = heads * sum(int((stop - first).sum()) for _, first, stop in s.spans())
    partial = Spec(
        "partial", heads, s.rows, p.head_dim_v, "float32", "workspace", axes=(("parts", sum(s.room)),), flat=True
    )
    if s.room:
        book.tensor(partial)
        parts, nodes = (("parts", sum(s.room)),), (("nodes", s.counters),)
        book.tensor(Spec("partial_lse", heads, s.rows, 1, "float32", "workspace", vector=True, axes=parts))
        book.tensor(Spec("arrivals", heads, s.row_tiles, 1, "int32", "workspace", vector=True, axes=nodes, zeros=True))
    if lse:
        book.tensor(Spec("lse", p.batch * p.heads, p.len_q, 1, "float32", "output", vector=True))
    peak = sram_bytes(p, tile, w, config.stages if pairs else 0)
    book.launch("flash_decoding", s.row_tiles * s.most * heads, w, config.heads_together, peak)

    blocks = merges = merging = 0
    seen = list[tuple[int, int]]()
    for inside, begin, stop in s.spans():
        if (stop > begin).any():
            seen.append((int(begin[stop > begin].min()), int(stop.max())))
        first, last = begin // TILES_PER_CHUNK, np.maximum(stop - 1, 0) // TILES_PER_CHUNK
        working = last - first + 1
        blocks += heads * int(working.sum())
        book.add("load_q", "q", hbm_read=heads * int((working * inside).sum()) * t["q"].row_bytes)
        keys = heads * int((np.minimum(stop * tile.cols, p.len_kv) - begin * tile.cols).sum())
        for step, name in (("load_k", "k"), ("load_v", "v")):
            book.add(step, name, hbm_read=keys * t[name].row_bytes)
        while (first < last).any():
            split = first < last
            inside, children = inside[split], (last - first + 1)[split]
            first, last = first[split] // CHILDREN, last[split] // CHILDREN
            parents = heads * int((last - first + 1).sum())
            for name, nbytes in (("partial", partial.row_bytes), ("partial_lse", 4)):
                moved = heads * int((children * inside).sum()) * nbytes
                book.add("store_partial", name, hbm_write=moved)
                book.add("merge", name, hbm_read=moved)
                for way in ("read", "write"):
                    book.distinct(name, way, moved)
            arrived = heads * int(children.sum())
            book.add("arrive", "arrivals", hbm_atomic=4 * arrived)
            for way in ("read", "write"):
                book.distinct("arrivals", way, 4 * parents)
            merges += arrived - parents
            merging += parents

    book.add("load_q", "q", sram_write=blocks * q_tile)
    if config.q_in_registers:
        book.add("load_q", "q", sram_read=blocks * w * q_tile)
    else:
        book.add("scores", "q", sram_read=pairs * w * q_tile)
    for name, load, use, size in (("k", "load_k", "scores", k_tile), ("v", "load_v", "output", v_tile)):
        book.add(load, name, sram_write=pairs * size)
        book.add(use, name, sram_read=pairs * size)
        if seen:
            distinct = (
                min(max(stop for _, stop in seen) * tile.cols, p.len_kv) - min(begin for begin, _ in seen) * tile.cols
            )
            book.distinct(name, "read", heads * distinct * t[name].row_bytes)
    for name, size in (("m_warps", 4 * rows), ("l_warps", 4 * rows), ("o_warps", 4 * rows * dv)):
        book.add("join", name, sram_write=blocks * w * size, sram_read=blocks * w * size)
    written = [("store_o", "out"), *([("store_lse", "lse")] if lse else [])]
    for step, name in written:
        book.add(step, name, hbm_write=t[name].nbytes)
        book.distinct(name, "write", t[name].nbytes)
    book.distinct("q", "read", t["q"].nbytes)

    square, column, output = tile.rows * tile.cols, tile.rows, tile.rows * p.head_dim_v
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=pairs * 2 * rows * cols * (d + dv),
        other=pairs * (passes * square + 4 * column + output)
        + (blocks + merging) * (output + 2 * column)
        + merges * (3 * output + 6 * column),
        exp=pairs * (square + column) + merges * 2 * column,
    )
