"""Seeded bugs in mla's kernel: in its scores, its shared tile, its exchange between warps, its tree, its pages. The emulator runs
them."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

KERNEL = "kernels_cu/mla.cu"
TREE, UNITS, SCORES, PARTIAL = (f"kernels_cu/include/{name}.cuh" for name in ("tree", "units", "scores", "partial"))

CASES: dict[str, dict[str, Any]] = {
    "one tile": {"heads": 5, "len_kv": 30},
    "tiles": {"heads": 5, "len_q": 2, "len_kv": 90, "causal": True},
    "chunks": {"heads": 3, "len_kv": 1030},
    "row tiles": {"heads": 20, "len_kv": 530},
    "hidden rows": {"heads": 2, "len_q": 20, "len_kv": 7, "causal": True},
    "sinks": {"batch": 2, "heads": 3, "len_q": 2, "len_kv": 30, "sinks": True, "soft_cap": 2.0},
    "sinks of chunks": {"batch": 2, "heads": 3, "len_kv": 1030, "sinks": True},
    "units": {"batch": 2, "heads": 20, "len_q": 110, "len_kv": 7, "causal": True},
    "sequences": {"heads": 3, "lengths": [(2, 50), (2, 0), (2, 75)], "causal": True},
    "pages": {"batch": 2, "heads": 3, "lengths": [(2, 50), (2, 75)], "page_size": 7, "pages": 30, "causal": True},
}
"""With tiles of 32 keys: two warps, and chunks of 512 keys."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, one query where it doesn't say otherwise."""
    sizes: dict[str, Any] = {"dtype": "float16", **CASES[case]}
    return fl.latent_problem(**sizes)


def mutant(mechanism: str, old: str, new: str, check: str, case: str = "tiles", **where: Any) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes", "zeros" (counters left above 0) or "rule" (wrong numbers)."""
    at: dict[str, Any] = {"file": KERNEL, "algorithm": "mla", **where}
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, **at)


def paged(mechanism: str, old: str, new: str, check: str, **where: Any) -> KernelMutant:
    return mutant(mechanism, old, new, check, "pages", algorithm="mla_paged", **where)


KERNELS = [
    mutant("values that begin with the RoPE part", "load_b_columns(tile, key, 8 * n, warp_id() * WARP_COLUMNS)",
           "load_b_columns(tile, key, 8 * n, HEAD_DIM - VALUE_DIM + warp_id() * WARP_COLUMNS)", "rule", step="output"),
    mutant("the scale of 576 numbers", "fabsf(shape.scale) :", "rsqrtf(576.f) :", "rule", file=SCORES),
    mutant("the RoPE columns left out", "d < HEAD_DIM;", "d < VALUE_DIM;", "rule", step="scores"),
    mutant("a latent tile loaded twice, as K and as V", "copies.load(j + 1);", "copies.load(j + 1); copies.load(j + 1);", "bytes",
           step="load_latent"),
    mutant("the tile before serves as V", "load_b_columns(tile, key", "load_b_columns(sram.latent((j + 1) % STAGES), key", "misuse",
           step="output"),
    mutant("a tile not waited for", "copy_wait<0>();", "copy_wait<1>();", "misuse", step="load_q"),
    mutant("a tile over one that others read", "barrier(); copies.load(j + 1);", "copies.load(j + 1);", "misuse",
           step="load_latent"),
    mutant("maxima read before all are there", "barrier(); float alpha", "float alpha", "misuse", step="softmax"),
    mutant("P read before it is there", "sram.p(), 16 * row_warp(), 0, key_warp() * WARP_KEYS, s); barrier();",
           "sram.p(), 16 * row_warp(), 0, key_warp() * WARP_KEYS, s);", "misuse", step="softmax"),
    mutant("each warp its own maximum", "for (int w = 0; w < KEY_WARPS; ++w) top",
           "for (int w = key_warp(); w <= key_warp(); ++w) top", "rule", step="softmax"),
    mutant("sums of one warp", "x.l[i][half] += load_shared<float>", "x.l[i][half] = load_shared<float>", "rule", step="join"),
    mutant("sums that aren't rescaled", "m[half] = top, l[half] *= alpha[i][half];", "m[half] = top;", "rule", step="softmax"),
    mutant("outputs that aren't rescaled", "x.o[i][n][e] *= alpha[i][e / 2];", "x.o[i][n][e] *= 1;", "rule", step="rescale"),
    mutant("each row its own query", "j * BC + key_warp() * WARP_KEYS, 2 * (opaque(lane_id()) % 4), group",
           "j * BC + key_warp() * WARP_KEYS, 2 * (opaque(lane_id()) % 4), 1", "rule", step="mask"),
    mutant("masked without the warp's own keys", "j * BC + key_warp() * WARP_KEYS, 2 *", "j * BC, 2 *", "rule", step="mask"),
    mutant("heads and queries of a row exchanged", "row_address(q, unit.batch, packed % group, packed / group)",
           "row_address(q, unit.batch, packed / 2, packed % 2)", "rule"),
    mutant("all heads the queries of the first", "row_address(q, unit.batch, packed % group,",
           "row_address(q, unit.batch, 0,", "rule"),
    mutant("columns of one warp written by all", "out_row(inside ? row : 0) + warp_id() * WARP_COLUMNS * ELEMENT_BYTES",
           "out_row(inside ? row : 0)", "misuse"),
    mutant("rows beyond the end stored", "inside ? WARP_COLUMNS * ELEMENT_BYTES : 0);", "WARP_COLUMNS * ELEMENT_BYTES);", "misuse"),
    mutant("the LSE to the base 2", "(m + log2_approx(l)) * LN2",
           "(m + log2_approx(l))", "rule", file=PARTIAL),
    mutant("a sum of 0 inverted", "factor = l > 0 ? alpha * reciprocal(l) : 0", "factor = reciprocal(l)", "rule",
           "hidden rows"),
    mutant("no sink in a unit", "inside ? sink_of(row) : -INF", "-INF", "rule", "sinks"),
    mutant("the sink of the first head", "(first_row + row) % group", "0", "rule", "sinks"),
    mutant("sinks of rows that aren't there", "inside ? sink_of(row) : -INF", "sink_of(row)", "bytes", "sinks"),
    mutant("no sink in a merge", "factor = join_sink(m, l, sink_of(row));", "", "rule", "sinks of chunks"),
    mutant("no soft cap", "Tanh::apply(s, shape.scale / shape.soft_cap);", ";", "rule", "sinks"),
    mutant("sums over those that others still read", "barrier(); if (place.has_keys())", "if (place.has_keys())",
           "misuse", "units"),
    mutant("the last one too early", "siblings.last - siblings.first);", "siblings.last - siblings.first - 1);", "zeros", "chunks",
           file=PARTIAL),
    mutant("row tiles with one counter", "(counter * units.row_tiles + unit.row_tile)", "(counter * units.row_tiles)", "misuse",
           "row tiles", file=PARTIAL),
    mutant("a part that isn't there merged", "child + n <= siblings.last", "child + n <= siblings.last + 1", "misuse", "chunks"),
    mutant("a part of no keys merged as if it had some", "float m = LOWEST, l = 0;", "float m = 0, l = 1;", "rule", "chunks",
           step="merge"),
    mutant("siblings' sums not weighed", "left ? weighed(this->l, own, other_l, other)", "left ? weighed(this->l, 1, other_l, 1)",
           "rule", "chunks", file=TREE),
    mutant("the rows of the first sequence", "0 : request, 0, first_key)", "0 : request, 0, 0)", "rule",
           "sequences"),
    mutant("the LSEs of the first sequence", "units.batches + unit.batch) * units.batch", "units.batches) * units.batch", "misuse",
           "sequences", file=TREE),
    paged("stale rows of the last page read", "WHOLE || row < left ? CHUNK_BYTES : 0", "CHUNK_BYTES", "bytes"),
    paged("pages of the first request", "static_cast<long long>(request) * batch.table_pages", "0", "rule"),
    paged("pages of the tile before", "copy_commit(); look_up(j + 1);", "copy_commit(); if (j % 2 == 0) look_up(j + 1);", "rule"),
    paged("places in pages of another size", "key(j) % page_size", "key(j) % 8", "rule"),
    paged("entries beyond the length", "&& key(j) < keys", "", "bytes"),
    paged("one length for all", "length_of(lengths, request_at(unit.own_place), batches)", "length_of(lengths, 1, batches)",
          "misuse", file=UNITS),
]  # fmt: skip
