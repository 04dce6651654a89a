"""Seeded bugs in flash_decoding's kernel: in its split, its tree, its counters, its pages. The emulator runs them."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

KERNEL = "kernels_cu/flash_decoding.cu"
MASK, MEMORY, TREE, PAGES, CACHE, DIVISOR, DRAFTS = (
    f"kernels_cu/include/{name}.cuh" for name in ("mask", "memory", "tree", "pages", "cache", "divisor", "drafts")
)
LOADER = "kernels_cu/include/page_loader.cuh"
_QUANTIZED: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 2, "len_kv": 300, "head_dim": 32}

CASES: dict[str, dict[str, Any]] = {
    "one chunk": {"heads": 4, "kv_heads": 2, "len_q": 2, "len_kv": 50},
    "chunks": {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 3, "len_kv": 500, "head_dim": 40, "causal": True},
    "two levels": {"heads": 4, "kv_heads": 2, "len_q": 1, "len_kv": 4300, "head_dim": 16},
    "row tiles": {"heads": 6, "kv_heads": 2, "len_q": 20, "len_kv": 420, "head_dim": 16, "window": (130, 0)},
    "fewer chunks": {"heads": 1, "len_q": 200, "head_dim": 16, "causal": True},
    "hidden rows": {"heads": 2, "len_q": 30, "len_kv": 10, "causal": True},
    "runs": {"batch": 4, "heads": 132, "kv_heads": 132, "len_q": 1, "len_kv": 500, "head_dim": 16},
    "units": {"batch": 3, "heads": 50, "kv_heads": 50, "len_q": 1, "len_kv": 600, "head_dim": 16},
    "short units": {"batch": 5, "heads": 100, "kv_heads": 100, "len_q": 1, "len_kv": 30, "head_dim": 256},
    "causal runs": {"heads": 125, "kv_heads": 125, "len_q": 300, "len_kv": 500, "head_dim": 16, "causal": True},
    "a negative scale": {"heads": 2, "len_q": 1, "len_kv": 300, "scale": -0.2, "causal": True},
    "pages": {
        "batch": 2, "heads": 4, "kv_heads": 2, "lengths": [(2, 300), (2, 290)], "page_size": 7, "pages": 90, "causal": True,
    },
    "requests": {"batch": 40, "heads": 2, "lengths": [(1, 37 * n % 140) for n in range(40)], "head_dim": 16, "page_size": 5},
    "many requests": {
        "batch": 40, "heads": 4, "lengths": [(1, 37 * n % 300) for n in range(40)], "head_dim": 16, "page_size": 16, "len_kv": 400,
    },
    "int8": {**_QUANTIZED, "kv_dtype": "int8", "k_scale": "token", "v_scale": "token"},
    "e4m3": {**_QUANTIZED, "kv_dtype": "float8_e4m3fn", "k_scale": "head", "v_scale": "head"},
    "channels": {**_QUANTIZED, "kv_dtype": "int8", "k_scale": "channel", "v_scale": "tensor", "dtype": "bfloat16"},
    "quantized pages": {
        "batch": 2, "heads": 4, "kv_heads": 2, "lengths": [(2, 300), (2, 290)], "page_size": 7, "pages": 90, "head_dim": 32,
        "kv_dtype": "int8", "k_scale": "token", "v_scale": "token",
    },
    "drafts": {
        "batch": 2, "heads": 8, "kv_heads": 2, "lengths": [(5, 300), (5, 131)], "page_size": 7, "pages": 90, "head_dim": 16,
        "drafts": True,
    },
}  # fmt: skip
"""With tiles of 32 keys, chunks have 128. Of "drafts" some lie in two chunks, and some in a tile without a key beyond the last."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, one batch, head dim 64 where it doesn't say otherwise."""
    sizes: dict[str, Any] = {"batch": 1, "head_dim": 64, "dtype": "float16", **CASES[case]}
    return fl.Problem(**sizes)


def mutant(mechanism: str, old: str, new: str, check: str, case: str = "chunks", **where: Any) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes", "zeros" (counters left above 0) or "rule" (wrong numbers)."""
    at: dict[str, Any] = {"file": KERNEL, "algorithm": "flash_decoding", **where}
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, **at)


def paged(mechanism: str, old: str, new: str, check: str, case: str = "pages", **where: Any) -> KernelMutant:
    return mutant(mechanism, old, new, check, case, algorithm="paged", **where)


KERNELS = [
    mutant("no fence before the counter", "__threadfence(); const unsigned before", "const unsigned before", "misuse",
           file=MEMORY),
    mutant("lanes that don't meet before the counter", "bool last = false; warp_barrier();", "bool last = false;", "misuse",
           "two levels", step="arrive"),
    mutant("lanes that don't meet after the counter", "if (!any_lane(last)) return; warp_barrier();",
           "if (!any_lane(last)) return;", "misuse", step="arrive"),
    mutant("a counter that isn't set back", "atomicInc(static_cast<unsigned*>(counter), last);",
           "atomicAdd(static_cast<unsigned*>(counter), 1u);", "zeros", file=MEMORY),
    mutant("the last one too late", "siblings.last - siblings.first);", "siblings.last - siblings.first + 1);", "misuse",
           step="arrive"),
    mutant("the last one too early", "siblings.last - siblings.first);", "siblings.last - siblings.first - 1);", "zeros",
           step="arrive"),
    mutant("row tiles with one counter", "(counter * units.row_tiles + unit.row_tile)", "(counter * units.row_tiles)",
           "misuse", "row tiles", step="arrive"),
    mutant("warps with one counter", "2 * WARPS + warp_id(),", "2 * WARPS,", "misuse", step="arrive"),
    mutant("nodes of the second level in the places of the first", "place + room, counter", "place, counter", "misuse",
           "two levels", file=TREE),
    mutant("one child left out", "child + n <= siblings.last", "child + n < siblings.last", "rule"),
    mutant("a child's output not weighed", "both.o[turn] = weighed(x.o[turn], a, y.o[turn], b)",
           "both.o[turn] = weighed(x.o[turn], a, y.o[turn], 1)", "rule", "runs", file=TREE),
    mutant("a run's sums not weighed", "both.l = weighed(x.l, a, y.l, b)", "both.l = x.l + y.l", "rule", "runs", file=TREE),
    mutant("siblings' sums not weighed", "left ? weighed(this->l, own, other_l, other)", "left ? weighed(this->l, 1, other_l, 1)",
           "rule", file=TREE),
    mutant("weights of the wrong level", "shuffle(of_level[K - 1], 2 * n << (K - 1))", "shuffle(of_level[0], 2 * n << (K - 1))",
           "rule", file=TREE),
    mutant("the two halves exchanged", "weights.whole(sides[0], sides[1])", "weights.whole(sides[1], sides[0])", "rule",
           "two levels", step="merge"),
    mutant("a neighbour that waits is forgotten", "if (is_left && has_right) waiting[level][i] = x, waits = true;",
           "if (is_left && has_right) waits = true;", "rule", "runs", step="merge_run"),
    mutant("a unit's last chunk waits for one that isn't its own", "has_right = (node + 1) << level <= place.chunks.last",
           "has_right = true", "misuse", "causal runs", step="merge_run"),
    mutant("the LSE to the base 2", "(x.m + log2_approx(x.l)) * LN2", "(x.m + log2_approx(x.l))", "rule", step="store_lse"),
    mutant("warps' outputs relative to their own maxima", "weight = factor[i][half] * base;", "weight = base;", "rule",
           step="join"),
    mutant("warps' sums relative to their own maxima", "l[i][half] * factor[i][half]", "l[i][half]", "rule", step="join"),
    mutant("the sums of one warp", "x.l += load_shared<float>(sram.l_of(w, row))", "x.l = load_shared<float>(sram.l_of(w, row))",
           "rule", step="join"),
    mutant("heads and queries of a row exchanged", "head = unit.kv_head * units.group + packed % units.group",
           "head = unit.kv_head * units.group + query % units.group", "misuse", "row tiles"),
    mutant("masked by the packed row", "(opaque(row) + 8 * half) / heads", "(opaque(row) + 8 * half)", "rule", file=MASK),
    mutant("masked without the warp's own keys", "row, j * BC + warp_id() * WARP_KEYS", "row, j * BC", "rule",
           "a negative scale", step="mask"),
    mutant("keys of the warp before", "const int own = walk.j * WARPS + warp_id()",
           "const int own = walk.j * WARPS + (warp_id() ^ 1)", "rule", "a negative scale"),
    mutant("Q not waited for", "copy_wait<STAGES - 1>(); named_barrier_sync(JOINING, THREADS);", "", "misuse",
           step="load_q"),
    mutant("Q of the next unit over one that others read", "constexpr int Q_SLOTS = STAGES + 1;", "constexpr int Q_SLOTS = 1;",
           "misuse", "short units"),
    mutant("a tile not waited for", "copy_wait<STAGES - 1>(); warp_barrier();", "copy_wait<STAGES>(); warp_barrier();", "misuse",
           step="load_k"),
    mutant("keys read before other lanes' copies are there", "copy_wait<STAGES - 1>(); warp_barrier();", "copy_wait<STAGES - 1>();",
           "misuse", step="load_k"),
    mutant("maxima read before all are there", "named_barrier_sync(JOINING, THREADS); float factor", "float factor", "misuse",
           step="join"),
    mutant("outputs over those that others still read", "named_barrier_sync(FREE, 2 * THREADS);",
           "named_barrier_arrive(FREE, 2 * THREADS);", "misuse", "runs", step="join"),
    mutant("rows beyond the end stored", "if (row >= place.rows) continue;", "", "misuse"),
    mutant("runs that aren't there", "min(last_chunk, run * RUN + RUN - 1)}", "run * RUN + RUN - 1}", "bytes", "fewer chunks",
           file=TREE),
    mutant("a unit left out", "if (unit.run >= runs) unit.run -= runs, ++unit.kv_head;",
           "if (unit.run > runs) unit.run -= runs, ++unit.kv_head;", "misuse", "units", file=TREE),
    paged("the rest of a page read", "r < rows ? min(", "r < ROWS ? min(", "bytes", file=LOADER),
    paged("each lane's own row for all chunks", "shuffle(own, r)", "own", "rule", file=LOADER),
    paged("rows by the pages of the tile behind", "const int page = pages[0]", "const int page = pages[1]", "rule"),
    paged("places in pages of another size", "key % page_size", "key % 8", "rule"),
    paged("a divisor's factor one too small", "/ by + 1)", "/ by)", "rule", file=DIVISOR),
    paged("a remainder of another number", "n - n / divisor *", "n - (n - 1) / divisor *", "misuse", file=DIVISOR),
    paged("a head of which only the first run has come", "tried * runs <= n", "(tried - 1) * runs < n", "misuse", file=PAGES),
    paged("heads from one on", "tried < kv_heads &&", "tried <= kv_heads - 2 &&", "misuse", file=PAGES),
    paged("the first request's pages", "static_cast<long long>(walk.unit.batch) * shape.table_pages", "0", "rule"),
    paged("the first head's rows of a page", "walk.unit.batch, walk.unit.kv_head, 0); }", "walk.unit.batch, 0, 0); }", "rule"),
    paged("entries beyond the length", "&& key < walk.unit.keys", "", "bytes"),
    paged("entries of lanes without a key", "lane_id() < WARP_KEYS &&", "", "bytes"),
    paged("the room of the table for the length", "length_of(lengths, request, batches)", "batch.len_kv", "misuse", "many requests",
          file=PAGES),
    paged("one length for all", "length_of(lengths, request, batches)", "length_of(lengths, 1, batches)", "misuse", "requests",
          file=PAGES),
    paged("masked as in the longest request", "const Shape& shape = units.alone(unit); Keys full",
          "const Shape& shape = shapes; Keys full", "rule", step="load_q"),
    paged("a prefix sum of 16 lanes", "step < 32", "step < 16", "misuse", "requests", file=PAGES),
    paged("units of the requests before counted again", "unit.number -= shuffle(unit.before_next, 31);", "", "misuse", "requests",
          file=PAGES),
    paged("the unit behind", "ballot(unit.number < unit.before_next)", "ballot(unit.number <= unit.before_next)", "misuse",
          "requests", file=PAGES),
    paged("runs of the longest request", "unit.runs = ::most_runs(alone_with(unit.keys), group)",
          "unit.runs = ::most_runs(batch, group)", "misuse", "many requests", file=PAGES),
    paged("units between those of the blocks", "unit.number += gridDim.x;", "unit.number += gridDim.x + 1;", "misuse",
          "many requests", file=PAGES),
    mutant("int8's sign forgotten", "(x ^ 0x00800080u)", "x", "rule", "int8", file=CACHE),
    mutant("int8 too large by one", "0xe480e480u", "0xe47fe47fu", "rule", "int8", file=CACHE),
    mutant("e4m3 too small by a power of two", "0x5c005c00u", "0x58005800u", "rule", "e4m3", file=CACHE),
    mutant("e4m3's sign lost", "(x & 0x80008000u) | (x >> (FL_DTYPE == 2 ? 4 : 1) & MAGNITUDES)",
           "x >> (FL_DTYPE == 2 ? 4 : 1) & MAGNITUDES", "rule", "e4m3", file=CACHE),
    mutant("columns of V exchanged", "even_elements(w[0]), even_elements(w[1]), odd_elements(w[0]), odd_elements(w[1])",
           "odd_elements(w[0]), odd_elements(w[1]), even_elements(w[0]), even_elements(w[1])", "rule", "int8", file=CACHE),
    mutant("Q in the order of 16 bits", "__byte_perm(four.x, four.y, 0x5410)", "four.x", "rule", "int8", file=CACHE),
    mutant("scales of other keys", "row * shape.len_kv + own * WARP_KEYS", "row * shape.len_kv + (own ^ 1) * WARP_KEYS", "rule",
           "int8"),
    mutant("scales of another head's keys", "static_cast<long long>(unit.batch) * shape.kv_heads + unit.kv_head",
           "static_cast<long long>(unit.batch) * shape.kv_heads", "rule", "int8"),
    mutant("scales of K for V", "weigh_columns(s, o, base, sram.v_scale(stage))", "weigh_columns(s, o, base, sram.k_scale(stage))",
           "rule", "int8", step="output"),
    mutant("V's scales before the maximum", "if constexpr (K_SCALE == TOKEN) scale_columns(s, sram.k_scale(stage));",
           "scale_columns(s, sram.k_scale(stage)), scale_columns(s, sram.v_scale(stage));", "rule", "int8", step="scores"),
    mutant("columns' scales exchanged", "*= e % 2 ? scale.y : scale.x", "*= e % 2 ? scale.x : scale.y", "rule", "int8", file=CACHE),
    mutant("O relative to a smaller scale", "o[i][n][e] *= shrink", "o[i][n][e] *= 1", "rule", "int8", file=CACHE),
    mutant("O that stays relative to V's scales", "weight = factor[i][half] * base;", "weight = factor[i][half];", "rule", "int8",
           step="join"),
    mutant("scales of all stages in one place", "(stage * BC + warp_id() * WARP_KEYS) * 4; } DEVICE unsigned v_scale",
           "warp_id() * WARP_KEYS * 4; } DEVICE unsigned v_scale", "misuse", "int8"),
    mutant("scales beyond the end", "from + key, key < inside)", "from + key, key < KEYS)", "bytes", "int8", file=CACHE),
    mutant("the first head's scale", "(OF == HEAD ? kv_head : 0)", "0", "rule", "e4m3", file=CACHE),
    mutant("K's scale of a head for V", "scale_of<V_SCALE>(scales.of_v,", "scale_of<V_SCALE>(scales.of_k,", "rule", "e4m3"),
    mutant("K's scale of a head left out", "return c * (scale > 0 ? scale : 0x1p-60f);", "return c;", "rule", "e4m3", file=CACHE),
    mutant("the first head's channels", "of_k + walk.unit.kv_head * shape.head_dim + i", "of_k + i", "rule", "channels"),
    mutant("channels' scales dropped", "rest.x *= r < 2 ? scale.x : scale.y, rest.y *= r < 2 ? scale.z : scale.w;", "", "rule",
           "channels", file=CACHE),
    mutant("the second channel's scale for the third", "rest.y *= r < 2 ? scale.z", "rest.y *= r < 2 ? scale.y", "rule",
           "channels", file=CACHE),
    mutant("queries rounded once", "FL_DTYPE == 2 ? 3 : 2", "1", "bytes", "channels", file=CACHE),
    mutant("a part of the queries twice", "rest.x -= held.x,", "rest.x -= 0,", "rule", "channels", file=CACHE),
    paged("scales of the first head's keys", "static_cast<long long>(page) * shape.kv_heads + unit.kv_head",
          "static_cast<long long>(page) * shape.kv_heads", "rule", "quantized pages"),
    paged("scales from where the page begins", "+ place - lane_id()", "- lane_id()", "rule", "quantized pages"),
    paged("scales of the page before", "row * shape.page_size + place", "(row - 1) * shape.page_size + place",
          "misuse", "quantized pages"),
    paged("words of the first request", "draft_mask + unit.batch * shape.len_q + query", "draft_mask + query", "rule", "drafts"),
    paged("a word for each row", "query = (place.first_row + lane_id()) / units.group;", "query = place.first_row + lane_id();",
          "misuse", "drafts"),
    paged("words of the first row tile", "(place.first_row + lane_id()) / units.group", "lane_id() / units.group", "rule",
          "drafts"),
    paged("words of rows that aren't there", "if (lane_id() < place.rows) drafts.word", "drafts.word", "misuse", "drafts"),
    paged("words where no key is a draft", "if (DRAFTS && place.tiles_of(place.chunks.last).last >= first_draft_tile(shape))",
          "if (DRAFTS)", "bytes", "drafts"),
    paged("no words where the first tile with drafts is the last", "place.tiles_of(place.chunks.last).last >= first_draft_tile",
          "place.tiles_of(place.chunks.last).last > first_draft_tile", "rule", "drafts"),
    paged("a tile with drafts that needs no mask", "first_draft_tile(shape) - 1)", "first_draft_tile(shape))", "rule", "drafts"),
    paged("drafts of the keys of another warp", "16 * i, j * BC + warp_id() * WARP_KEYS, 2 * (lane_id()",
          "16 * i, j * BC + (warp_id() ^ 1) * WARP_KEYS, 2 * (lane_id()", "rule", "drafts"),
    paged("the upper row's word for the lower one", "first_row + 8 * half + lane_id() / 4", "first_row + lane_id() / 4", "rule",
          "drafts", file=DRAFTS),
    paged("earlier keys hidden", "<< 32) | 0xffffffffu)", "<< 32))", "rule", "drafts", file=DRAFTS),
    paged("bits counted from the last key", "key - (shape.len_kv - shape.len_q)", "key - shape.len_kv", "rule", "drafts",
          file=DRAFTS),
    paged("the first lane's columns for all", "columns >> lane_column >>", "columns >>", "rule", "drafts", file=DRAFTS),
    mutant("the scale's sign forgotten", "scores.flip(s[i]);", "", "rule", "a negative scale", step="mask"),
]  # fmt: skip
