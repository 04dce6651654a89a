"""Seeded bugs in mla_hopper's kernel: in what its warpgroups hand over to each other, its copies, its scores, its tree, its pages.
The emulator runs them."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

KERNEL = "kernels_cu/mla_hopper.cu"
LAYOUT, BOXES, PAGE_BOXES, PAGE_ROWS, TOTAL = (
    f"kernels_cu/include/{name}.cuh"
    for name in ("latent", "latent_boxes", "latent_page_boxes", "latent_page_rows", "total")
)

CASES: dict[str, dict[str, Any]] = {
    "one tile": {"heads": 5, "len_kv": 30},
    "tiles": {"heads": 5, "len_q": 2, "len_kv": 190, "causal": True},
    "steep": {"heads": 5, "len_kv": 300, "scale": 1.0},
    "chunks": {"heads": 3, "len_kv": 1100},
    "row tiles": {"batch": 2, "heads": 70, "len_kv": 1030},
    "many chunks": {"heads": 60, "len_kv": 34000, "scale": 0.5},
    "window": {"heads": 16, "len_q": 9, "len_kv": 1040, "window": (8, 0)},
    "hidden rows": {"heads": 2, "len_q": 20, "len_kv": 7, "causal": True},
    "sinks": {"batch": 2, "heads": 3, "len_q": 2, "len_kv": 100, "sinks": True, "soft_cap": 2.0},
    "sinks of chunks": {"batch": 2, "heads": 3, "len_kv": 1100, "sinks": True},
    "units": {"batch": 140, "heads": 2, "len_kv": 70},
    "long requests": {"batch": 2, "heads": 2, "lengths": [(1, 1100), (1, 90)], "page_size": 64, "pages": 30},
    "sequences": {"heads": 3, "lengths": [(2, 50), (2, 0), (2, 1100)], "causal": True},
    "pages": {"batch": 2, "heads": 3, "lengths": [(2, 50), (2, 175)], "page_size": 7, "pages": 40, "causal": True},
    "boxes": {"batch": 2, "heads": 3, "lengths": [(2, 50), (2, 175)], "page_size": 16, "pages": 20, "causal": True},
    "large pages": {"batch": 2, "heads": 3, "lengths": [(1, 50), (1, 175)], "page_size": 128, "pages": 5},
}
"""Of "units" some blocks have two. Chunks have 1,024 keys."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, one query where it doesn't say otherwise."""
    sizes: dict[str, Any] = {"dtype": "float16", **CASES[case]}
    return fl.latent_problem(**sizes)


def mutant(mechanism: str, old: str, new: str, check: str, case: str = "tiles", **where: Any) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes" or "rule" (wrong numbers)."""
    at: dict[str, Any] = {"file": KERNEL, "algorithm": "mla_hopper", **where}
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, **at)


def paged(mechanism: str, old: str, new: str, check: str, case: str = "pages", **where: Any) -> KernelMutant:
    return mutant(mechanism, old, new, check, case, algorithm="mla_hopper_paged", **where)


KERNELS = [
    mutant("a quarter of the columns without scores", "multiply(s, set_of(1, 0));", "", "rule", step="scores"),
    mutant("columns multiplied before they are there", "mbarrier_wait(sram.full(ring.slot, columns), ring.parity); wgmma_fence();",
           "wgmma_fence();", "misuse"),
    mutant("scores read before they are there", "wgmma_wait<0>();", "", "misuse", step="scores"),
    mutant("a slot filled while the output reads it", "wgmma_wait<0>();", "", "misuse", step="output"),
    mutant("the first product's columns free while it reads them", "wgmma_wait<1>();", "", "misuse", step="output"),
    mutant("both warpgroups the values of the first", "half_of_columns() * PRODUCTS + n", "n", "rule", step="output"),
    mutant("a slot free for one warp's sake", "mbarrier_init(sram.empty(slot, columns), 4)",
           "mbarrier_init(sram.empty(slot, columns), 1)", "misuse", file=LAYOUT),
    mutant("P overwritten while others read it", "mbarrier_init(sram.p_empty(), OUTPUT_WARPS)", "mbarrier_init(sram.p_empty(), 1)",
           "misuse", file=LAYOUT),
    mutant("P read before it is there", "mbarrier_init(sram.p_full(), 4)", "mbarrier_init(sram.p_full(), 1)", "misuse",
           file=LAYOUT),
    mutant("P free before it is read", "unsigned p[P_STEPS][4];", "unsigned p[P_STEPS][4]; release(sram.p_empty());", "misuse",
           step="output"),
    mutant("outputs that aren't rescaled", "[e] *= alpha[e / 2];", "[e] *= 1;", "rule", "steep", step="rescale"),
    mutant("sums that aren't rescaled", "m[half] = top, l[half] *= alpha[half];", "m[half] = top;", "rule", "steep",
           step="softmax"),
    mutant("a maximum that lags far behind", "top > m[half] + TAU", "top > m[half] + 30 * TAU", "rule", "steep", step="softmax"),
    mutant("a maximum of the lane alone", "product(c, quad_max(top))", "product(c, top)", "rule", step="softmax"),
    mutant("each row its own query", "2 * (opaque(lane_id()) % 4), here.group", "2 * (opaque(lane_id()) % 4), 1", "rule",
           step="mask"),
    mutant("masked as if it were the tile before", "j * BC, 2 *", "(j - 1) * BC, 2 *", "rule", step="mask"),
    mutant("all heads the queries of the first", "row_address(q, here.unit.batch, packed % here.group,",
           "row_address(q, here.unit.batch, 0,", "rule", step="load_q"),
    mutant("queries that the tensor cores don't see", "fence_async();", "", "misuse", step="load_q"),
    mutant("queries of other warps not waited for", "fence_async(); named_barrier_sync(QUERIES, WARPGROUP);", "fence_async();",
           "misuse", step="load_q"),
    mutant("boxes of the tile before", "unit.first_key + j * BC,", "unit.first_key + (j > 0 ? j - 1 : 0) * BC,", "rule",
           file=BOXES),
    mutant("fewer bytes expected than come", "if (elected()) { mbarrier_arrive_expect(sram.full(ring.slot, columns), "
           "panels_of(columns) *", "if (elected()) { mbarrier_arrive_expect(sram.full(ring.slot, columns),", "misuse", file=BOXES),
    mutant("a tile loaded twice, as K and as V", "latent.load(here.unit, keys, tiles, j, ring);",
           "latent.load(here.unit, keys, tiles, j, ring), ring.advance(), "
           "latent.load(here.unit, keys, tiles, j, ring);",
           "bytes"),
    mutant("a sum of 0 inverted", "l[half] > 0 ? reciprocal(l[half]) : 0", "reciprocal(l[half])", "rule", "hidden rows"),
    mutant("sums of one lane alone", "whole[2] = {l[0] = quad_sum(l[0]), l[1] = quad_sum(l[1])};",
           "whole[2] = {l[0], l[1]};", "rule", step="share_sum"),
    mutant("columns of one warpgroup written by both", "first_column = half_of_columns() * HALF;", "first_column = 0;", "misuse"),
    mutant("rows beyond the end stored", "inside ? PRODUCT * ELEMENT_BYTES : 0", "PRODUCT * ELEMENT_BYTES", "misuse"),
    mutant("partial rows beyond the end stored", "if (own_row(half) >= place.rows) continue;", "", "misuse", "chunks",
           step="store_partial"),
    mutant("the queries of a block's first unit for all", "if (place.has_keys()) load_queries(here, place);",
           "if (here.unit.batch < 132) load_queries(here, place);", "bytes", "units"),
    mutant("a chunk left out", "if (k + n < chunks) x[n]", "if (k + n < chunks - 1) x[n]", "rule", "chunks", file=TOTAL),
    mutant("chunks that aren't weighed", "weight = exp2_approx(own_m - top);", "weight = 1;", "rule", "chunks", file=TOTAL),
    mutant("sums of the chunks before not weighed", "l = l * alpha + warp_sum", "l = l + warp_sum", "rule", "many chunks",
           file=TOTAL),
    mutant("parts of the first request", "static_cast<long long>(request) * most_runs(batch, heads)", "0", "rule", "row tiles",
           step="merge"),
    mutant("a row merged that one unit had", "if (chunks == 1) return;", "", "rule", "window", step="merge"),
    mutant("columns that a neighbour keeps", "odd ? x.x : x.z", "odd ? x.z : x.x", "rule", "chunks", file=TOTAL),
    mutant("columns as lanes have them", "(warp_id() * 128 + first_of_neighbours())", "(warp_id() * 128 + lane_id() * 4)", "rule",
           "chunks", step="store_o"),
    mutant("the first of many chunks again", "if (k > first) ask(k);", "", "rule", "many chunks", file=TOTAL),
    mutant("no sink in a unit", "whole[half] += exp2_approx(sink * LOG2E - m[half]);", "", "rule", "sinks"),
    mutant("a unit's sink that the LSE doesn't know", "join_sink(m[half], l[half], sink);", "", "rule", "sinks"),
    mutant("the sink of the first head", "(first_row + row) % group", "0", "rule", "sinks"),
    mutant("sinks of rows that aren't there", "own_row(half) < place.rows ? here.sink_of(own_row(half)) : -INF",
           "here.sink_of(own_row(half))", "bytes", "sinks"),
    mutant("a sink in each chunk", "SINKS && is_whole(place)", "SINKS", "bytes", "sinks of chunks"),
    mutant("no sink in a merge", "of_head<SINKS>(sinks, head, -INF)", "-INF", "rule", "sinks of chunks"),
    mutant("what a sink shrinks isn't shrunk", "? alpha * reciprocal(total.l)", "? reciprocal(total.l)", "rule", "sinks of chunks"),
    mutant("no soft cap", "Tanh::apply(s, shape.scale / shape.soft_cap);", ";", "rule", "sinks"),
    mutant("each warp writes the LSE", "threadIdx.x == 0 && lse", "lane_id() == 0 && lse", "bytes", "chunks", step="store_lse"),
    mutant("chunks of a row, not of its tile", "first_row = row / BR * BR", "first_row = row", "misuse", "window"),
    mutant("the boxes of the first sequence", "unit.first_key + j * BC,", "j * BC,", "rule", "sequences", file=BOXES),
    mutant("rows of the next sequence", "clear_rows<1>(sram.latent(ring.slot), shape.len_kv - j * BC, QUERIES);", "", "bytes",
           "sequences"),
    mutant("where a sequence ends as its length", "load_global<int>(offset + 1) - load_global<int>(offset)",
           "load_global<int>(offset + 1)", "bytes", "sequences"),
    paged("stale rows of the last page read", "WHOLE || row < left ? CHUNK_BYTES : 0", "CHUNK_BYTES", "bytes", file=PAGE_ROWS),
    paged("pages of the first request", "if (key < keys) page = load_global<int>(table + static_cast<long long>(unit.batch)",
          "if (key < keys) page = load_global<int>(table + static_cast<long long>(0)", "rule", file=PAGE_ROWS),
    paged("places in pages of another size", "page * latent.batch + key % page_size", "page * latent.batch + key % 8", "rule",
          file=PAGE_ROWS),
    paged("entries beyond the length", "if (key < keys) page =", "page =", "bytes", file=PAGE_ROWS),
    paged("copies that nobody waited for", "copy_wait<PENDING>();", "", "misuse", file=PAGE_ROWS),
    paged("copies that the tensor cores don't see", "fence_async();", "", "misuse", file=PAGE_ROWS),
    paged("rows of one warp alone", "mbarrier_init(sram.full(slot, columns), BOXES ? 1 : SLOT_WARPS)",
          "mbarrier_init(sram.full(slot, columns), 1)", "misuse", file=LAYOUT),
    paged("one length for all", "load_global<int>(lengths + request), 0)", "load_global<int>(lengths), 0)", "misuse",
          "long requests", step="merge"),
    paged("both warps the same rows", "warp_id() % SLOT_WARPS * ROWS", "0", "misuse", file=PAGE_ROWS),
    paged("boxes of the first request", "pages = load_global<int>(table + static_cast<long long>(unit.batch)",
          "pages = load_global<int>(table + static_cast<long long>(0)", "rule", "boxes", file=PAGE_BOXES),
    paged("every box the first page", "page = shuffle(own, box);", "page = shuffle(own, 0);", "rule", "boxes", file=PAGE_BOXES),
    paged("every tile the pages of the first", "if (j < tiles.last) look_up(unit, keys, j + 1);", "", "rule", "boxes",
          file=PAGE_BOXES),
    paged("entries behind the last key's", "key = min(j * BC + lane_id() * PAGE_BOX, keys - 1);",
          "key = j * BC + lane_id() * PAGE_BOX;", "misuse", "boxes", file=PAGE_BOXES),
    paged("boxes over one another", "+ box * PAGE_BOX * 128,", ",", "rule", "boxes", file=PAGE_BOXES),
    paged("always the first part of a page", "OF_TILE == 1 ? j * BC % page_size : 0", "0", "rule", "large pages", file=PAGE_BOXES),
    paged("what lies behind the last key", "clear_rows<1>(sram.latent(ring.slot), shape.len_kv - j * BC, QUERIES);", "", "rule",
          "boxes"),
    paged("boxes cleared before they are there", "mbarrier_wait(sram.full(ring.slot, columns), ring.parity); clear_rows",
          "clear_rows", "misuse", "boxes"),
]  # fmt: skip
