"""HBM bytes of every algorithm, tensor by tensor, from docs/accounting.md alone.

What is below is that page again, as sums that a reader could do by hand: all of its algorithms, so it is long. It knows problems
and configurations (tile, warps, chunks), and neither formulas nor tile programs. Names are the page's words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from simulator import Device, Problem

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
READ, WRITE, ATOMIC = "hbm.read", "hbm.write", "hbm.atomic"


def up(n: int, to: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // to) * to


def row(columns: int, dtype: str) -> int:
    """Bytes of a row, padded to 16."""
    return up(columns * SIZES[dtype], 16)


@dataclass(frozen=True)
class One:
    """A sequence or a request, or `times` of them that are alike: its queries and keys, and what each query sees."""

    queries: int
    keys: int
    left: int | None
    right: int | None
    times: int = 1
    data: Any = None
    """Of a mask that an array says: which pairs it shows. None: some of each tile, and not all."""

    def sees(self, query: int) -> range:
        """The keys that causal mask and window leave to a query: it is aligned with key query + keys - queries."""
        at = query + self.keys - self.queries
        start = 0 if self.left is None else max(0, at - self.left)
        stop = self.keys if self.right is None else min(self.keys, at + self.right + 1)
        return range(start, max(start, stop))

    def turned(self) -> One:
        """Keys in the place of queries."""
        return One(self.keys, self.queries, self.right, self.left, self.times)

    def visits(self, rows: range, cols: int) -> list[int]:
        """The key tiles of so many columns that some of these queries see."""
        return sorted({j for query in rows for j in tiles_of(self.sees(query), cols)})


def tiles_of(keys: range, cols: int) -> range:
    return range(keys.start // cols, (keys.stop - 1) // cols + 1) if keys else range(0)


def split(n: int, size: int) -> list[range]:
    """n rows in tiles of so many."""
    return [range(first, min(first + size, n)) for first in range(0, n, size)]


@dataclass
class Book:
    """What is counted of a problem with a configuration."""

    p: Problem
    c: Any
    lse: bool
    device: Device
    name: str
    shown: list[Any] = field(default_factory=list[Any])
    """Of each sequence which pairs its mask shows."""
    listed: Any = None
    """The array `block_mask`, if there is one."""
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    exp: int = 0
    places: int = 0
    """Of partial results that a row of each sequence has room for."""

    def __post_init__(self) -> None:
        p, c = self.p, self.c
        self.br, self.bc, self.w, self.m = c.tile.rows, c.tile.cols, c.warps, 4 * c.consumers
        self.group = p.heads // p.kv_heads
        self.constants = dict(c.constants)
        q, k, v = row(p.head_dim, p.dtype), row(p.head_dim, p.kv_dtype), row(p.head_dim_v, p.kv_dtype)
        self.rows = {"q": q, "dq": q, "dk": k, "k": k, "latent": k, "v": v, "dv": v}
        self.rows |= dict.fromkeys(
            ("out", "dout"), row(p.head_dim_v, "bfloat16" if p.dtype.startswith("float8") else p.dtype)
        )
        self.boxes = {name: up(n, 128) for name, n in self.rows.items()}

    def add(self, tensor: str, what: str, nbytes: int) -> None:
        if nbytes:
            self.bytes[tensor, what] += nbytes

    def read(self, tensor: str, nbytes: int) -> None:
        self.add(tensor, READ, nbytes)

    def write(self, tensor: str, nbytes: int) -> None:
        self.add(tensor, WRITE, nbytes)

    @property
    def ones(self) -> list[One]:
        """The sequences or requests of the problem, each by itself; a plain problem is one, `batch` times."""
        p = self.p
        left, right = p.window or (None, None)
        right = 0 if p.causal else right
        if p.page_size:
            return [One(queries, keys, left, right) for queries, keys in p.pairs]
        if not p.ragged:
            return [One(p.len_q, p.len_kv, left, right, p.batch, self.shown[0] if self.shown else None)]
        shown = self.shown or [None] * len(p.lengths or ())
        return [One(*each, left, right, 1, data) for each, data in zip(p.lengths or (), shown, strict=True)]


# -- forward -------------------------------------------------------------------------------------------------------


def standard(b: Book) -> None:
    p, heads, kv_tiles = b.p, b.p.batch * b.p.heads, ceil(b.p.len_kv / b.bc)
    tiles = ceil(p.len_q / b.br)
    s, weights = heads * p.len_q * row(p.len_kv, "float32"), heads * p.len_q * row(p.len_kv, p.dtype)
    b.read("q", heads * kv_tiles * p.len_q * b.rows["q"])
    b.read("k", heads * tiles * p.len_kv * b.rows["k"])
    b.write("s", s)
    b.read("s", s * (2 if b.name == "online_softmax" else 3))
    state(b, heads * ceil(p.len_q / 4), 4)
    b.write("p", weights)
    b.write("lse", 4 * heads * p.len_q * b.lse)
    b.read("p", weights)
    b.read("v", heads * tiles * p.len_kv * b.rows["v"])
    b.write("out", heads * p.len_q * b.rows["out"])


def state(b: Book, blocks: int, warps: int) -> None:
    b.read("rng_state", 16 * warps * blocks * bool(b.p.dropout))


def flash1(b: Book) -> None:
    p, heads = b.p, b.p.batch * b.p.heads
    if not p.len_q:
        return
    rounds, o = max(1, ceil(p.len_kv / b.bc)), row(p.head_dim_v, "float32")
    for name in "kv":
        b.read(name, heads * p.len_kv * b.rows[name])
    b.read("q", heads * rounds * p.len_q * b.rows["q"])
    b.read("o", heads * rounds * p.len_q * o)
    b.write("o", heads * rounds * p.len_q * o)  # the first one, and those of all rounds but the last
    b.write("out", heads * p.len_q * b.rows["out"])
    for name in "lm":
        b.read(name, heads * rounds * p.len_q * 4)
        b.write(name, heads * (rounds + 1) * p.len_q * 4)
    b.write("lse", 4 * heads * p.len_q * b.lse)


def flash2(b: Book) -> None:
    forward(b, boxes=False, warps=b.w, asking=b.w)


def flash3(b: Book) -> None:
    forward(b, boxes=True, warps=b.m, asking=b.m + 1)


def forward(b: Book, *, boxes: bool, warps: int, asking: int) -> None:
    p = b.p
    for one in b.ones:
        heads, mask = one.times * p.heads, pack_mask(b, one)
        for i, rows in enumerate(split(one.queries, b.br)):
            q = b.br * b.boxes["q"] if boxes else len(rows) * b.rows["q"]
            b.read("q", heads * q)
            for name, has in (("alibi_slopes", p.alibi), ("sinks", p.sinks)):
                b.read(name, heads * 4 * warps * has)
            state(b, heads, warps)
            b.add("drawn", ATOMIC, 4 * heads * b.c.dynamic)
            seen = mask[i] if p.mask else dict.fromkeys(one.visits(rows, b.bc), False)
            b.read("mask_tiles", heads * 4 * asking * (1 + len(seen)) if p.mask else 0)
            for j, mixed in seen.items():
                keys = min(one.keys, (j + 1) * b.bc) - j * b.bc
                for name in "kv":
                    b.read(name, heads * (b.bc * b.boxes[name] if boxes else keys * b.rows[name]))
                b.read("mask_bits", heads * bits(b) * mixed)
            b.write("out", heads * len(rows) * b.rows["out"])
            b.write("lse", heads * len(rows) * 4)
    look(b, "offsets_q", "offsets_kv", [one.queries for one in b.ones], b.br, asking * p.heads)
    if p.mask:
        look(b, "offsets_q", "offsets_kv", [one.queries for one in b.ones], b.br, 16)


def bits(b: Book) -> int:
    """Bytes of a tile in `mask_bits`."""
    return up(b.br * up(b.bc, 64) // 8, 16)


def pack_mask(b: Book, one: One) -> list[dict[int, bool]]:
    """For each row tile, which key tiles it sees, and which of them are mixed."""
    p, found = b.p, list[dict[int, bool]]()
    if not p.mask:
        return found
    for rows in split(one.queries, b.br):
        around = one.visits(rows, b.bc)
        kinds = {j: kind(b, one, rows, j) for j in around}
        found.append({j: kinds[j] == "mixed" for j in around if kinds[j] != "hidden"})
        b.read("offsets_mask", 8 * 16 * bool(around) * (p.mask == "bits" and p.ragged))
        listed = ceil(one.keys / p.block.cols) if p.mask == "blocks" else 0
        if b.listed is not None:
            listed = int(b.listed[rows.start // p.block.rows, 0])
        b.read("block_mask", 4 * 16 * bool(around) * (p.mask == "blocks"))
        for j in around:
            keys = range(j * b.bc, min(one.keys, (j + 1) * b.bc))
            if p.mask == "blocks":
                b.read("block_mask", 4 * listed)
            elif p.mask == "bits":
                b.read(
                    "mask",
                    sum((i * one.keys + keys.stop - 1) // 8 - (i * one.keys + keys.start) // 8 + 1 for i in rows),
                )
            else:
                padding = up(one.keys, 16) - one.keys if keys.stop == one.keys and not p.ragged else 0
                b.read("mask", len(rows) * (len(keys) + padding))
            b.write("mask_bits", bits(b))
        b.write("mask_tiles", 4 * (1 + len(found[-1])))
    return found


def kind(b: Book, one: One, rows: range, j: int) -> str:
    """Is a tile hidden, visible or mixed? That is said of what array, causal mask and window leave, of whole columns."""
    if one.data is None:
        return "mixed"
    visible = [j * b.bc <= key < (j + 1) * b.bc and bool(one.data[i, key]) for i in rows for key in one.sees(i)]
    return "hidden" if not any(visible) else "visible" if sum(visible) == len(rows) * b.bc else "mixed"


def flash3_fp8(b: Book) -> None:
    p = b.p
    if not p.len_q:
        return
    b.read("v", p.batch * p.kv_heads * p.len_kv * b.rows["v"])
    b.write("v_t", p.batch * p.kv_heads * p.head_dim_v * up(p.len_kv, 16))
    (one,) = b.ones
    heads = p.batch * p.heads
    for rows in split(one.queries, b.br):
        b.read("q", heads * b.br * b.boxes["q"])
        b.read("q_scale", heads * 4 * b.m)
        b.add("drawn", ATOMIC, 4 * heads * b.c.dynamic)
        visits = len(one.visits(rows, b.bc))
        b.read("k", heads * visits * b.bc * b.boxes["k"])
        b.read("v_t", heads * visits * up(p.head_dim_v, 128) * up(b.bc, 128))
        for name in ("k_scale", "v_scale"):
            b.read(name, heads * visits * 4 * b.m)
        b.write("out", heads * len(rows) * b.rows["out"])
        b.write("lse", heads * len(rows) * 4)


# -- few queries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A row tile of packed rows, the run, and the key tiles that it visits there."""

    rows: range
    queries: range
    run: int
    visits: list[int]


def packed_tiles(b: Book, one: One) -> Iterator[tuple[range, range]]:
    """The packed rows of each row tile, and the queries that these are."""
    for rows in split(one.queries * b.group, b.br):
        yield rows, range(rows.start // b.group, (rows.stop - 1) // b.group + 1)


def units(b: Book, one: One, run_tiles: int) -> Iterator[list[Unit]]:
    """The units of each row tile, of runs of so many key tiles."""
    for rows, queries in packed_tiles(b, one):
        visits = one.visits(queries, b.bc)
        runs = sorted({j // run_tiles for j in visits}) or [0]
        yield [Unit(rows, queries, n, [j for j in visits if j // run_tiles == n]) for n in runs]


def most_runs(b: Book, one: One, chunk_tiles: int, run: int) -> int:
    """As many runs as a row tile can see, wherever it lies."""
    keys = chunk_tiles * b.bc
    every = max(1, ceil(one.keys / keys))
    chunks = every
    if one.left is not None and one.right is not None:
        queries = min(one.queries, (b.br - 2) // b.group + 2)
        chunks = min(every, (one.left + one.right + queries + keys - 2) // keys + 1)
    return min((chunks - 2 + run) // run + 1, ceil(every / run))


def walk_through(b: Book, chunk_tiles: int, run: int) -> None:
    """Blocks that deal out the units of all sequences go through their lengths."""
    p = b.p
    tiles = [ceil(one.queries * b.group / b.br) * most_runs(b, one, chunk_tiles, run) for one in b.ones]
    blocks = min(b.device.sms, p.kv_heads * sum(tiles))
    name, nbytes = ("offsets_kv", 8) if p.ragged else ("seq_lens", 4)
    b.read(name, nbytes * len(b.ones) * b.c.walks * blocks)


def decode(b: Book) -> None:
    p, run = b.p, b.constants["RUN"]
    for one in b.ones:
        heads = one.times * p.kv_heads
        for tile in units(b, one, 4 * run):
            for unit in tile:
                keys = read_unit(b, one, unit, heads, ("k", "v"), shares=b.w)
                chunks = len({j // 4 for j in unit.visits})
                b.exp += heads * b.br * (chunks + 2 * max(0, chunks - 1))
                if unit.visits:
                    scales(b, heads, keys)
                drafted = unit.visits and unit.visits[-1] >= max(0, one.keys - one.queries) // b.bc
                b.read("draft_mask", heads * 4 * b.w * len(unit.queries) * bool(p.drafts and drafted))
            tree(b, tile, heads)
            b.read("sinks", heads * 4 * len(tile[0].rows) * p.sinks)
            b.exp += heads * 2 * b.br * p.sinks
            finish(b, heads * len(tile[0].rows))
    b.places = sum(room(b, 4, run))
    if p.lengths is not None or p.page_size:
        walk_through(b, 4, run)


def rung(b: Book) -> None:
    for one in b.ones:
        heads, tiles = one.times * b.p.kv_heads, ceil(one.keys / b.bc)
        chunks = max(1, ceil(tiles / max(4, ceil(tiles / 64)))) if b.name == "flash_decoding_2" else 1
        for rows, _ in packed_tiles(b, one):
            b.read("q", heads * chunks * len(rows) * b.rows["q"])
            for name in "kv":
                b.read(name, heads * one.keys * b.rows[name])
            for name, nbytes in partials(b) if b.name == "flash_decoding_2" else []:
                b.write(name, heads * chunks * len(rows) * nbytes)
                b.read(name, heads * chunks * len(rows) * nbytes)
            if b.p.page_size:
                b.read("block_table", heads * 4 * sum(pages(b, one, j, 1) for j in range(tiles)))
                b.read("seq_lens", heads * 4)
            finish(b, heads * len(rows))


def read_unit(b: Book, one: One, unit: Unit, heads: int, names: tuple[str, ...], *, shares: int) -> int:
    """Rows of Q and of the key tiles, and their pages. Returns the keys."""
    if unit.visits:
        b.read("q", heads * len(unit.rows) * b.rows["q"])
    b.exp += heads * len(unit.visits) * (b.br * b.bc + b.br)
    keys = sum(min(one.keys, (j + 1) * b.bc) - j * b.bc for j in unit.visits)
    for name in names:
        b.read(name, heads * keys * b.rows[name])
    b.read("block_table", heads * 4 * sum(pages(b, one, j, shares) for j in unit.visits))
    return keys


def pages(b: Book, one: One, j: int, shares: int) -> int:
    """Entries of the block table that are read for a key tile."""
    size = b.p.page_size
    if not size:
        return 0
    share = b.c.page_box or ceil(up(b.bc, 16) / shares)
    stop = min(one.keys, (j + 1) * b.bc)
    firsts = range(j * b.bc, stop, share)
    return sum((min(first + share, stop) - 1) // size - first // size + 1 for first in firsts)


def scales(b: Book, heads: int, keys: int) -> None:
    """Of a unit that sees so many keys."""
    p = b.p
    for name, form in (("k_scale", p.k_scale), ("v_scale", p.v_scale)):
        each = {None: 0, "tensor": 4 * b.w, "head": 4 * b.w, "channel": 4 * p.head_dim, "token": 4 * keys}[form]
        b.read(name, heads * each)


def tree(b: Book, tile: list[Unit], heads: int) -> None:
    """A node writes what its rows have, which is read once, and counts up. Up to 32 have a parent."""
    nodes = {unit.run for unit in tile}
    while len(nodes) > 1:
        for name, nbytes in partials(b):
            moved = heads * len(nodes) * len(tile[0].rows) * nbytes
            b.write(name, moved)
            b.read(name, moved)
        b.add("arrivals", ATOMIC, heads * len(nodes) * 4 * b.w)
        parents = {n // 32 for n in nodes}
        b.exp += heads * 2 * b.br * (len(nodes) - len(parents))
        nodes = parents


def room(b: Book, chunk_tiles: int, run: int) -> list[int]:
    """Places for the nodes of each level, of a row tile of the longest sequence."""
    ones = b.ones
    keys = b.p.len_kv if b.p.page_size else max(one.keys for one in ones)
    longest = replace(ones[0], queries=max(one.queries for one in ones), keys=keys)
    found, n = list[int](), most_runs(b, longest, chunk_tiles, run)
    every = ceil(keys / (chunk_tiles * b.bc * run)) if n > 1 else 1
    while every > 1:
        found.append(n)
        n, every = (n - 2) // 32 + 2, ceil(every / 32)
    return found


def partials(b: Book) -> list[tuple[str, int]]:
    return [("partial", row(b.p.head_dim_v, "float32")), ("partial_m", 4), ("partial_l", 4)]


def finish(b: Book, rows: int) -> None:
    b.write("out", rows * b.rows["out"])
    b.write("lse", 4 * rows * b.lse)


def heads_of(rows: int, group: int) -> int:
    """For 8 rows together each of their heads once."""
    return sum(min(n, group) for n in (len(x) for x in split(rows, 8)))


def mla(b: Book) -> None:
    chunk = max(1, (b.p.chunk or 512) // b.bc)
    for one in b.ones:
        for tile in units(b, one, chunk):
            rows = len(tile[0].rows)
            for unit in tile:
                read_unit(b, one, unit, one.times, ("latent",), shares=b.w)
            tree(b, tile, one.times)
            sinks = b.w * heads_of(rows, b.group) if len(tile) == 1 else rows
            b.read("sinks", one.times * 4 * sinks * b.p.sinks)
            b.exp += one.times * 2 * b.br * b.p.sinks
            finish(b, one.times * rows)
    b.places = sum(room(b, chunk, 1))
    if b.c.walks:
        walk_through(b, chunk, 1)


def mla_hopper(b: Book) -> None:
    p, chunk = b.p, max(1, (b.p.chunk or 1024) // b.bc)
    whole = p.page_size is None or b.c.page_box > 0
    merges = b.c.walks > 0 or p.len_kv > chunk * b.bc
    for one in b.ones:
        for tile in units(b, one, chunk):
            rows = one.times * len(tile[0].rows)
            for unit in tile:
                read_unit(b, one, unit, one.times, () if whole else ("latent",), shares=2)
                b.read("latent", one.times * len(unit.visits) * b.bc * b.boxes["latent"] * whole)
            if len(tile) == 1:
                b.read("sinks", 4 * one.times * heads_of(len(tile[0].rows), b.group) * p.sinks)
            else:
                for name, nbytes in partials(b):
                    b.write(name, rows * len(tile) * nbytes)
                    b.read(name, rows * len(tile) * nbytes * (1 if name == "partial" else 4))
                b.read("sinks", 4 * 4 * rows * p.sinks)
            finish(b, rows)
    if b.c.walks:
        walk_through(b, chunk, 1)
        if merges:
            name, nbytes = ("offsets_kv", 8) if p.ragged else ("seq_lens", 4)
            b.read(name, nbytes * 4 * sum(one.queries for one in b.ones) * b.group)


def flash3_paged(b: Book) -> None:
    p, boxes = b.p, b.c.page_box > 0
    if not p.len_q:
        return
    for one in b.ones:
        for rows in split(one.queries, b.br):
            b.read("q", p.heads * b.br * b.boxes["q"])
            b.read("sinks", p.heads * 4 * b.m * p.sinks)
            b.add("drawn", ATOMIC, 4 * p.heads * b.c.dynamic)
            for j in one.visits(rows, b.bc):
                keys = min(one.keys, (j + 1) * b.bc) - j * b.bc
                for name in "kv":
                    b.read(name, p.heads * (b.bc * b.boxes[name] if boxes else keys * b.rows[name]))
                    b.read("block_table", p.heads * 4 * pages(b, one, j, 2 if b.bc <= 64 else 4))
            b.write("out", p.heads * len(rows) * b.rows["out"])
            b.write("lse", p.heads * len(rows) * 4)
    if p.varlen:
        empty = sum(places([n for n, _ in p.pairs], b.br)) - sum(ceil(n / b.br) for n, _ in p.pairs)
        b.add("drawn", ATOMIC, 4 * p.heads * b.c.dynamic * empty)
        look(b, "cu_seqlens_q", None, [n for n, _ in p.pairs], b.br, p.heads)
        b.read("seq_lens", 4 * p.heads * sum(places([n for n, _ in p.pairs], b.br)))
        return
    n = len(b.ones)
    sorted_together = [n % 32] * (n % 32) + [32] * (n - n % 32)  # of each request, among how many it is sorted
    b.read("seq_lens", 4 * p.heads * ceil(p.len_q / b.br) * sum(sorted_together))


def append_kv(b: Book) -> None:
    p = b.p
    b.read("slot_mapping", p.kv_heads * p.len_q * 8)
    for name, columns in (("k", p.head_dim), ("v", p.head_dim_v)):
        rows = p.kv_heads * p.len_kv * bool(p.len_q)
        b.read(name, rows * row(columns, p.dtype))
        b.write(f"{name}_pool", rows * row(columns, p.kv_dtype))
        b.write(f"{name}_scale", rows * 4 * bool(p.k_scale))


def copy_pages(b: Book) -> None:
    p = b.p
    b.read("pairs", p.kv_heads * p.len_q * b.w * 8)
    for name, columns in (("k", p.head_dim), ("v", p.head_dim_v)):
        rows = p.kv_heads * p.len_q * p.page_size
        for way in (READ, WRITE):
            b.add(f"{name}_pool", way, rows * row(columns, p.kv_dtype))
            b.add(f"{name}_scale", way, rows * 4 * bool(p.k_scale))


def cascade(b: Book) -> None:
    p = b.p
    if not p.len_q:
        return
    left, right = p.window or (None, None)
    right = 0 if p.causal else right
    own, uneven = p.lengths is not None, p.lengths is not None or left is not None
    requests = [One(p.len_q, n, left, right) for n in p.seq_lens]
    prefix, suffix = (max(1, keys // b.bc) * b.bc for keys in (2048, 512))  # keys of a chunk

    def first_key(one: One, query: int) -> int:
        """The first key of the prefix that a query sees."""
        at = p.len_prefix + one.keys - one.queries + query
        return 0 if left is None else min(max(0, at - left), p.len_prefix)

    def warps_of(side: str, rows: int) -> int:
        return rows // b.constants[f"{side}_WARP_ROWS"]

    def part(rows: range, sees: range, keys: int, names: str) -> None:
        """A block of one KV head: what its rows see of the keys of its chunk."""
        visits = tiles_of(sees, b.bc)
        inside = sum(min(keys, (j + 1) * b.bc) - j * b.bc for j in visits)
        if visits:
            b.read("q", p.kv_heads * len(rows) * b.rows["q"])
        for name in "kv":
            b.read(name + names, p.kv_heads * inside * b.rows[name])
        if visits or not uneven:
            b.write("partial", p.kv_heads * len(rows) * row(p.head_dim_v, "float32"))
            b.write("partial_lse", p.kv_heads * len(rows) * 4)

    of_request = p.len_q * b.group
    for rows in split(p.batch * of_request, b.br):
        queries = {divmod(r // b.group, p.len_q) for r in rows}
        sees = range(min(first_key(requests[r], i) for r, i in queries), p.len_prefix)
        asked = len({r for r, _ in queries}) * 4 * (warps_of("PREFIX", b.br)) * (own and left is not None)
        for chunk in split(p.len_prefix, prefix):
            b.read("seq_lens", p.kv_heads * asked)
            part(rows, range(max(sees.start, chunk.start), chunk.stop), p.len_prefix, "_prefix")
    rows_of_tile = b.constants["SUFFIX_ROWS"]
    for one in requests:
        for rows in split(of_request, rows_of_tile):
            keys = [one.sees(i) for i in range(rows.start // b.group, (rows.stop - 1) // b.group + 1)]
            seen = [x for x in keys if x]
            sees = range(min((x.start for x in seen), default=0), max((x.stop for x in seen), default=0))
            for first in range(0, max(1, p.len_kv), suffix):
                b.read("seq_lens", p.kv_heads * 4 * warps_of("SUFFIX", rows_of_tile) * own)
                part(rows, range(max(sees.start, first), min(sees.stop, first + suffix)), one.keys, "")
        for i in range(p.len_q):
            chunks = ceil(p.len_prefix / prefix) + max(1, ceil(p.len_kv / suffix))
            if uneven:
                chunks = len(tiles_of(range(first_key(one, i), p.len_prefix), prefix)) + len(
                    tiles_of(one.sees(i), suffix)
                )
            b.read("partial", p.heads * chunks * row(p.head_dim_v, "float32"))
            b.read("partial_lse", p.heads * chunks * 4)
            b.read("sinks", p.heads * 4 * p.sinks)
            b.read("seq_lens", p.heads * 4 * own)
            finish(b, p.heads)


# -- backward ------------------------------------------------------------------------------------------------------


def standard_backward(b: Book) -> None:
    p, heads, kv_heads = b.p, b.p.batch * b.p.heads, b.p.batch * b.p.kv_heads
    tiles, key_tiles = ceil(p.len_q / b.br), ceil(p.len_kv / b.bc)
    square, ds = heads * p.len_q * row(p.len_kv, "float32"), heads * p.len_q * row(p.len_kv, p.dtype)
    rows, keys = heads * p.len_q, heads * p.len_kv
    b.read("q", 2 * key_tiles * rows * b.rows["q"])  # for P and for dK
    b.read("lse", key_tiles * rows * 4)
    b.read("k", 2 * tiles * keys * b.rows["k"])  # for P and for dQ
    b.read("v", tiles * keys * b.rows["v"])
    b.read("dout", (2 * key_tiles + 1) * rows * b.rows["dout"])  # for dV, dP and D
    b.read("out", rows * b.rows["out"])
    b.read("dlse", 4 * rows * p.dlse)
    state(b, kv_heads * key_tiles, b.w)
    state(b, heads * ceil(p.len_q / 4), 4)
    for name, nbytes, reads in (("p", square, 2), ("dp", square, 1), ("ds", ds, 2)):
        b.write(name, nbytes)
        b.read(name, reads * nbytes)
    gradients(b)


def gradients(b: Book) -> None:
    p = b.p
    b.write("dq", p.batch * p.heads * p.len_q * b.rows["dq"])
    for name in ("dk", "dv"):
        b.write(name, p.batch * p.kv_heads * p.len_kv * b.rows[name])


def flash1_backward(b: Book) -> None:
    p, heads, kv_heads = b.p, b.p.batch * b.p.heads, b.p.batch * b.p.kv_heads
    rounds, rows = max(1, ceil(p.len_kv / b.bc)), heads * p.len_q
    state(b, kv_heads, b.w)
    for name in "kv":
        b.read(name, kv_heads * p.len_kv * b.rows[name])
        b.write("d" + name, kv_heads * p.len_kv * b.rows[name])  # the zeros
    for name in ("q", "dout", "out"):
        b.read(name, rounds * rows * b.rows[name])
    b.read("lse", b.constants["KEY_WARPS"] * rounds * rows * 4)
    b.read("dlse", rounds * rows * 4 * p.dlse)
    for what in (READ, WRITE):
        b.add("dq_sum", what, rounds * rows * row(p.head_dim, "float32"))
    gradients(b)


def backward(b: Book, padded: int, main: Callable[[One, int], None], *, sums: bool = True) -> None:
    """Delta, the `main` launch of a sequence with so many KV heads, convert, sinks. Columns of the sums of dQ are `padded`."""
    p = b.p
    for one in b.ones:
        heads = one.times * p.heads
        for name in ("dout", "out"):
            b.read(name, heads * one.queries * b.rows[name])
        b.read("dlse", heads * one.queries * 4 * p.dlse)
        b.write("delta", heads * one.queries * 4)
        whole = heads * up(one.queries, b.br) * up(p.head_dim, padded) * 4
        for what in (READ, WRITE):
            b.add("dq_sum", what, whole * sums)
        main(one, one.times * p.kv_heads)
        sinks(b, one)
    gradients(b)
    if sums:
        for _ in ("delta", "convert"):
            look(b, "offsets_q", None, [one.queries for one in b.ones], b.br, 4 * p.heads)


def sinks(b: Book, one: One) -> None:
    heads = one.times * b.p.heads * b.p.sinks
    b.read("sinks", heads * 4 * bool(one.queries))
    for name in ("lse", "delta"):
        b.read(name, heads * one.queries * 4)
    b.write("dsinks", heads * 4)
    b.read("offsets_q", heads * 8 * b.p.ragged)


def visited_rows(one: One, j: int, br: int, bc: int) -> list[range]:
    """The row tiles that see key tile j."""
    turned = one.turned()
    return [split(one.queries, br)[i] for i in turned.visits(split(one.keys, bc)[j], br)]


def flash2_backward(b: Book) -> None:
    p, times = b.p, b.constants["KEY_WARPS"]
    in_turn = b.name == "flash2_backward_deterministic"

    def main(one: One, kv_heads: int) -> None:
        for j, keys in enumerate(split(one.keys, b.bc)):
            for name in "kv":
                b.read(name, kv_heads * len(keys) * b.rows[name])
            state(b, kv_heads, b.w)
            b.read("number", kv_heads * 4 * b.w * in_turn)
            b.write("number", kv_heads * 4 * in_turn)
            b.add("drawn", ATOMIC, kv_heads * 4 * in_turn)
            for rows in visited_rows(one, j, b.br, b.bc):
                heads = kv_heads * b.group
                for name in ("q", "dout"):
                    b.read(name, heads * len(rows) * b.rows[name])
                for name in ("lse", "delta"):
                    b.read(name, heads * times * len(rows) * 4)
                b.add("dq_sum", ATOMIC, heads * b.br * up(p.head_dim, 16) * 4)
                b.read("turns", heads * 4 * in_turn)
                b.add("turns", ATOMIC, heads * 4 * in_turn)

    backward(b, 16, main)
    look(b, "offsets_kv", "offsets_q", [one.keys for one in b.ones], b.bc, b.w * p.kv_heads)


def flash3_backward(b: Book) -> None:
    p, parts = b.p, b.constants.get("PARTS", 1)
    in_turn = b.name == "flash3_backward_deterministic"
    wide = up(p.head_dim, 64) * 4

    def main(one: One, kv_heads: int) -> None:
        heads = kv_heads * b.group
        order = [visited_rows(one, j, b.br, b.bc) for j in range(ceil(one.keys / b.bc))]
        for j, keys in enumerate(split(one.keys, b.bc)):
            for name in "kv":
                b.read(name, kv_heads * parts * b.bc * b.boxes[name])
            state(b, kv_heads * parts, b.m)
            if not p.ragged:
                b.add("drawn", ATOMIC, kv_heads * parts * 4 * b.c.dynamic)
            for rows in order[j]:
                for name in ("q", "dout"):
                    b.read(name, heads * b.br * b.boxes[name])
                for name in ("lse", "delta"):
                    b.read(name, heads * len(rows) * 4)
                if not in_turn:
                    b.add("dq_sum", ATOMIC, heads * b.br * wide)
                    continue
                b.read("turns", heads * 4)
                b.add("turns", ATOMIC, heads * 4)
                first, last = (not any(rows in x for x in some) for some in (order[:j], order[j + 1 :]))
                if last:
                    b.read("dq_sum", 0 if first else heads * b.br * wide)
                else:
                    b.add("dq_sum", WRITE if first else ATOMIC, heads * b.br * wide)
            for name, dim in (("dk", p.head_dim), ("dv", p.head_dim_v)):
                for what in (READ, WRITE):
                    b.add(f"{name}_parts", what, kv_heads * parts * len(keys) * row(dim, "float32") * (parts > 1))
        b.write("turns", heads * ceil(one.queries / b.br) * 4 * in_turn)

    backward(b, 64, main, sums=not in_turn)
    blocks = p.kv_heads * parts
    keys = [one.keys for one in b.ones]
    if "ORDERED" not in b.constants:
        look(b, "offsets_kv", "offsets_q", keys, b.bc, blocks)
    elif p.ragged:
        room = places(keys, b.bc)
        look(b, "offsets_kv", None, keys, b.bc, 1)
        b.read("offsets_q", sum(room) * 4 * 2 * (len(room) + 1))
        b.read("offsets_kv", sum(room) * 4 * 2 * len(room))
        b.write("order", 32 * sum(room))
        b.read("order", 32 * sum(room) * blocks)
    if p.ragged:
        b.add("drawn", ATOMIC, 4 * blocks * sum(places(keys, b.bc)) * b.c.dynamic)


def flash3_backward_wide(b: Book) -> None:
    p = b.p

    def main(one: One, kv_heads: int) -> None:
        heads = kv_heads * b.group
        for j in range(ceil(one.keys / b.bc)):
            for name in "kv":
                b.read(name, kv_heads * b.bc * b.boxes[name])
            for rows in visited_rows(one, j, b.bc, b.bc):
                for name in ("q", "dout"):
                    b.read(name, heads * b.bc * b.boxes[name])
                for name in ("lse", "delta"):
                    b.read(name, heads * len(rows) * 4)
        for rows in split(one.queries, b.br):
            for name in ("q", "dout"):
                b.read(name, heads * b.br * b.boxes[name])
            for name in ("lse", "delta"):
                b.read(name, heads * len(rows) * 4)
            for name in "kv":
                b.read(name, heads * len(one.visits(rows, b.bc)) * b.bc * b.boxes[name])

    backward(b, 64, main, sums=False)
    look(b, "offsets_kv", "offsets_q", [one.keys for one in b.ones], b.bc, p.kv_heads)
    look(b, "offsets_q", "offsets_kv", [one.queries for one in b.ones], b.br, p.heads)


# -- sequences -----------------------------------------------------------------------------------------------------


def places(lengths: list[int], size: int) -> list[int]:
    """How many blocks each sequence has in each head."""
    ends = list(accumulate(lengths, initial=0))
    return [end // size - begin // size + 1 for begin, end in pairwise(ends)] if ends[-1] else []


def look(b: Book, searched: str, then: str | None, lengths: list[int], size: int, warps: int) -> None:
    """Blocks look for their sequence by halves, so many `warps` in all heads."""
    if not (b.p.ragged or b.p.varlen):
        return
    for s, n in enumerate(places(lengths, size)):
        low, high = 0, len(lengths)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if middle <= s else (low, middle)
            b.read(searched, 4 * n * warps)
        if then:
            b.read(then, 8 * n * warps)


# -- the softmax of a vector ---------------------------------------------------------------------------------------


def softmax(b: Book) -> None:
    x, tiles = row(b.p.head_dim, b.p.dtype), ceil(b.p.head_dim / b.bc)
    b.read("x", x * (3 if b.name == "softmax_safe" else 2))
    b.write("out", x)
    if b.name == "softmax_merge":
        for name in "ml":
            b.write(name, 4 * tiles)
            b.read(name, 4 * tiles * tiles)


DERIVED: dict[str, Callable[[Book], None]] = {
    "standard": standard, "online_softmax": standard, "flash1": flash1, "flash2": flash2, "flash2_triton": flash2,
    **dict.fromkeys(("flash3_1", "flash3_2", "flash3_3", "flash3"), flash3), "flash3_fp8": flash3_fp8,
    **dict.fromkeys(("flash_decoding_1", "flash_decoding_2", "paged_1"), rung),
    "flash_decoding": decode, "paged": decode, "flash3_paged": flash3_paged, "mla": mla, "mla_paged": mla,
    "mla_hopper": mla_hopper, "mla_hopper_paged": mla_hopper, "cascade": cascade,
    "append_kv": append_kv, "copy_pages": copy_pages, "standard_backward": standard_backward,
    "flash1_backward": flash1_backward, "flash2_backward": flash2_backward, "flash2_backward_deterministic": flash2_backward,
    **dict.fromkeys((f"flash3_backward{rung}" for rung in ("_1", "_2", "_3", "", "_deterministic")), flash3_backward),
    "flash3_backward_wide": flash3_backward_wide,
    **dict.fromkeys(("softmax_naive", "softmax_safe", "softmax_online", "softmax_merge"), softmax),
}  # fmt: skip
