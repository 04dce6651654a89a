"""Seeded bugs in flash3_paged's kernel: in whose rows a block takes, where keys lie, what is handed over, and what is masked. The
emulator runs them."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

KERNEL, REQUESTS = "kernels_cu/flash3_paged.cu", "kernels_cu/include/requests.cuh"

CASES: dict[str, dict[str, Any]] = {
    "append": {"heads": 2, "kv_heads": 1, "lengths": [(70, 200), (70, 90)], "page_size": 20, "causal": True},
    "boxes": {"heads": 4, "kv_heads": 2, "lengths": [(70, 200), (70, 90)], "page_size": 16, "causal": True},
    "large pages": {"heads": 1, "lengths": [(70, 400)], "page_size": 128},
    "steep boxes": {"heads": 1, "lengths": [(40, 300)], "page_size": 16, "scale": 1.5},
    "wide boxes": {"heads": 1, "lengths": [(40, 150)], "page_size": 32, "head_dim": 96},
    "96 columns": {"lengths": [(40, 100)], "heads": 2, "page_size": 7, "head_dim": 96, "causal": True},
    "odd pages": {"heads": 2, "kv_heads": 2, "lengths": [(40, 170), (40, 75)], "page_size": 7, "pages": 60},
    "steep": {"heads": 1, "lengths": [(40, 300)], "page_size": 20, "scale": 1.5},
    "sinks": {
        "heads": 2,
        "kv_heads": 1,
        "lengths": [(70, 200), (70, 3)],
        "page_size": 16,
        "causal": True,
        "sinks": True,
    },
    "window": {"heads": 1, "lengths": [(70, 290)], "page_size": 20, "window": (80, 0)},
    "hidden rows": {"heads": 1, "lengths": [(70, 5), (70, 0)], "page_size": 16, "causal": True},
    "many requests": {"heads": 1, "lengths": [(2, 3 + 5 * (n % 7)) for n in range(35)], "page_size": 4},
    "varlen": {
        "heads": 8,
        "kv_heads": 4,
        "lengths": [(70, 200), (1, 90), (0, 30), *[(64, 64)] * 30, (3, 5)],
        "page_size": 16,
        "causal": True,
        "varlen": True,
        "head_dim": 16,
    },
    "many tiles": {"heads": 4, "kv_heads": 4, "lengths": [(600, 64)] * 4, "page_size": 64, "head_dim": 16},
}
"""Of "many tiles" some blocks have two. Tiles have 64 rows and 64 keys: pages of 20 or 7 are copied, those of 16 or 128 come in
boxes."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, head dim 64, more pages and a longer table than requests need."""
    sizes: dict[str, Any] = {"dtype": "float16", "head_dim": 64, **CASES[case]}
    p = fl.Problem(batch=len(sizes["lengths"]), **sizes)
    return p.replace(pages=p.pages + 2, len_kv=p.len_kv + 40)


def mutant(mechanism: str, old: str, new: str, check: str, case: str = "append", **where: Any) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes", "zeros" or "rule" (wrong numbers)."""
    at: dict[str, Any] = {"file": KERNEL, "algorithm": "flash3_paged", **where}
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, **at)


def requests(mechanism: str, old: str, new: str, check: str, case: str = "append") -> KernelMutant:
    return mutant(mechanism, old, new, check, case, file=REQUESTS)


KERNELS = [
    mutant("no sink", "sink = of_head<SINKS>(sinks, work.head, -INF);", "sink = -INF;", "rule", "sinks"),
    mutant("the sink of the first head", "of_head<SINKS>(sinks, work.head, -INF)", "of_head<SINKS>(sinks, 0, -INF)", "rule",
           "sinks"),
    mutant("what a sink shrinks isn't shrunk", "sum > 0 ? alpha * reciprocal(sum)", "sum > 0 ? reciprocal(sum)", "rule", "sinks"),
    # where keys lie
    requests("pages in the order of the pool", "pages.of[i] = load_global<int>(line + key / page_size)",
             "pages.of[i] = key / page_size", "rule"),
    requests("places in pages of another size", "(key + lane_id()) % page_size", "(key + lane_id()) % 8", "rule", "odd pages"),
    requests("the block table's line of the first request", "static_cast<long long>(request) * shape.table_pages", "0", "rule"),
    requests("entries beyond the length", "key >= 0 && key < keys", "key >= 0", "bytes"),
    requests("both warps the same keys", "(warp_id() % 2 + 2 * i) * ROWS", "2 * i * ROWS", "misuse"),
    requests("stale rows behind the last key", "page_size), keys - key)", "page_size), ROWS)", "bytes"),
    requests("a row's place for its page", "pages.of[i], (key + lane_id()) % page_size", "pages.of[i], pages.of[i]", "rule"),
    requests("rows below without the swizzle", "(address ^ chunks % 8 * CHUNK_BYTES)", "address", "rule", "96 columns"),
    mutant("values of the page ahead", "v, kv, j, here,", "v, kv, j, next,", "rule", step="load_v"),
    mutant("keys in the place of values", "v, kv, j, here,", "k, kv, j, here,", "rule", step="load_v"),
    mutant("all heads the keys of the first", "k, kv, j, here,", "k, 0, j, here,", "rule", "odd pages", step="load_k"),
    # where boxes lie
    requests("boxes in the order of the pool", "pages.page = load_global<int>(line + key / page_size)",
             "pages.page = key / page_size", "rule", "boxes"),
    requests("the entries behind the last key's", "min(j * BC + lane_id() * PAGE_BOX, keys - 1)", "j * BC + lane_id() * PAGE_BOX",
             "bytes", "boxes"),
    requests("a box's page that of the next", "j * BC + lane_id() * PAGE_BOX, keys", "j * BC + (lane_id() + 1) * PAGE_BOX, keys",
             "rule", "boxes"),
    requests("the first part of each large page", "if (BOXES == 1) pages.row = key % page_size;", "", "rule", "large pages"),
    requests("all boxes in the place of the first", "tile.panel(i) + first * 128", "tile.panel(i)", "misuse", "boxes"),
    requests("all panels from the first column", "pages.row, i * TileT::PANEL_COLUMNS", "pages.row, 0", "rule", "wide boxes"),
    requests("boxes of the first head", "pages.page, head, pages.row", "pages.page, 0, pages.row", "rule", "boxes"),
    requests("a tile told when it is asked for", "mbarrier_arrive_expect(full, TileT::BYTES)", "mbarrier_arrive(full)", "misuse",
             "boxes"),
    mutant("values behind the last key as they are",
           "clear_rows<CONSUMERS>(sram.v(v_ring.slot), own.len_kv - last_key, CLEARED);", "", "rule", "boxes", step="load_v"),
    mutant("values cleared before they have come",
           "last_key + BC > own.len_kv) { … mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);", "", "misuse", "boxes",
           step="load_v"),
    mutant("the last key's values cleared, too", "own.len_kv - last_key, CLEARED", "own.len_kv - last_key - 1, CLEARED", "bytes",
           "boxes", step="load_v"),
    mutant("a box over keys that are read", "mbarrier_wait(sram.k_empty(ring.slot), ring.parity ^ 1);", "", "misuse", "steep boxes",
           step="load_k"),
    # whose rows
    requests("one length for all", "load_global<int>(lengths + request)", "load_global<int>(lengths)", "rule"),
    requests("requests in another order than their lengths", "return {shuffle(request, lane) *",
             "return {(rank / 32 * 32 + rank % 32 - nobody) *", "rule", "many requests"),
    requests("two requests of one rank", "other > length || (other == length && lane < lane_id())", "other > length", "rule",
             "many requests"),
    requests("requests that nobody has", "own.head / shape.heads + nobody, request", "own.head / shape.heads, request", "misuse",
             "many requests"),
    requests("rows aligned with the first key", "own.row_tile * BR - q, keys, q}", "own.row_tile * BR, keys, 0}", "rule"),
    requests("queries of another row tile", "work.q = told.q,", "work.q = told.q - 1,", "rule"),
    mutant("the queries of the first head", "q, work.batch, work.head, work.q", "q, work.batch, 0, work.q", "rule",
           step="load_q"),
    mutant("a row tile that nobody takes", "gridDim.x + uniform(number)", "gridDim.x + 1 + uniform(number)", "misuse", "many tiles",
           step="load_q"),
    requests("another request's queries", "q = request.end - keys;", "q = request.end - keys + 1;", "rule", "varlen"),
    requests("the first request has all queries", "sequence_at(shape, begins, own.row_tile)",
             "Sequence{0, 0, shape.len_q}", "bytes",
             "varlen"),
    requests("the pages of another request", "return {request.number * shape.heads", "return {0 * shape.heads", "rule", "varlen"),
    requests("the length of another request", "length_of(request.number)", "length_of(0)", "rule", "varlen"),
    requests("empty places are taken", "told.is_there() && told.is_empty()", "false", "bytes", "varlen"),
    requests("an empty place ends a block", "if (!DYNAMIC) return", "return", "misuse", "varlen"),
    requests("a place after an empty one that isn't drawn", "if (lane_id() == 0) next = draw_from(drawn, last());", "",
             "misuse", "varlen"),
    requests("the batch of a request", "VARLEN ? 0 : work.sequence", "work.sequence", "misuse", "varlen"),
    mutant("rows of the next request", "if (VARLEN && work.first_row + BR > own.len_q)", "if (false)",
             "bytes", "varlen", step="load_q"),
    mutant("the last row cleared, too", "own.len_q - work.first_row, CLEARED", "own.len_q - work.first_row - 1, CLEARED", "bytes",
           "varlen", step="load_q"),
    requests("a counter that goes on", "return row_tiles() * shape.batch * shape.heads - 1;",
             "return row_tiles() * shape.batch * shape.heads;", "misuse", "many tiles"),
    # what is handed over
    mutant("K's slot free before its product is done", "wgmma_wait<1>();", "release(sram.k_empty(k_ring.slot));", "misuse",
           step="scores"),
    mutant("V's slot free before its product is done", "wgmma_wait<0>();", "", "misuse", "steep", step="output"),
    mutant("a slot filled while it is read", "mbarrier_wait(sram.k_empty(ring.slot), ring.parity ^ 1);", "", "misuse", "steep",
           step="load_k"),
    requests("copies that nobody waited for", "copy_wait<AFTER>();", "", "misuse"),
    requests("a tile told when the one before it is there", "if (under_way != 0) arrived<0>();",
             "if (under_way != 0) arrived<1>();", "misuse"),
    requests("copies that the tensor cores don't see", "fence_async();", "", "misuse"),
    requests("copies of other lanes not waited for", "copy_wait<AFTER>(); … warp_barrier();", "", "misuse"),
    requests("a tile there when half of it is", "open<PRODUCERS / 2>(sram)", "open<1>(sram)", "misuse"),
    requests("work told before all have heard", "PRODUCERS - 1 + 4 * CONSUMERS", "4 * CONSUMERS", "misuse", "many tiles"),
    # what is masked, and the softmax
    mutant("the last tile unmasked", "softmax.mask(s, own, lane_row, work.tiles.last, full);", "", "rule", "odd pages",
           step="mask"),
    mutant("a tile masked as the one before", "softmax.mask(s, own, lane_row, j, full);",
           "softmax.mask(s, own, lane_row, j - 1, full);", "rule", "window", step="mask"),
    mutant("a window's edge one key off", "const Shape own = work.alone(shape);",
           "Shape own = work.alone(shape); own.left -= 1;", "rule", "window", step="load_q"),
    mutant("outputs that aren't rescaled", "if (!RESCALE_LATE && risen) rescale(o, alpha);", "", "rule", "steep", step="rescale"),
    mutant("a scale of 1", "Softmax softmax(shape);", "Shape plain = shape; plain.scale = 1; Softmax softmax(plain);", "rule"),
    mutant("an LSE without its sum", "store_lse(lse, shape, work, row, softmax.m[half], sum);",
           "store_lse(lse, shape, work, row, softmax.m[half], 1);", "rule", step="store_lse"),
    mutant("a sum of 0 inverted", "sum > 0 ? alpha * reciprocal(sum) : 0", "reciprocal(sum)", "rule", "hidden rows",
           step="normalize"),
    mutant("sums of one lane alone", "quad_sum(softmax.l[half])", "softmax.l[half]", "rule", step="normalize"),
]  # fmt: skip
