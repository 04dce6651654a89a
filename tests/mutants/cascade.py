"""Seeded bugs in cascade's kernels: in what a tile of rows of many requests is, in its two sides, in the merge. The emulator runs
them."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

KERNEL, PLACES = "kernels_cu/cascade.cu", "kernels_cu/include/cascade.cuh"

CASES: dict[str, dict[str, Any]] = {
    "requests": {"batch": 3, "len_kv": 20, "len_prefix": 45},
    "causal": {"batch": 3, "len_q": 3, "len_kv": 20, "len_prefix": 70, "causal": True},
    "chunks": {"batch": 2, "len_kv": 520, "len_prefix": 2060},
    "full tiles": {"batch": 35, "len_q": 2, "len_kv": 20, "len_prefix": 70},
    "full tiles of own queries": {"batch": 2, "len_q": 50, "len_kv": 20, "len_prefix": 70},
    "row tiles": {"batch": 9, "len_q": 2, "len_kv": 9, "len_prefix": 20},
    "soft cap": {"batch": 2, "len_kv": 20, "len_prefix": 45, "soft_cap": 2.0},
    "sinks": {"batch": 2, "len_kv": 20, "len_prefix": 45, "sinks": True},
    "no own keys": {"batch": 2, "len_kv": 0, "len_prefix": 20},
    "no keys": {"batch": 2, "len_kv": 0, "len_prefix": 0},
    "hidden rows": {"batch": 2, "len_q": 9, "len_kv": 3, "len_prefix": 20, "causal": True},
    "window": {"batch": 3, "len_q": 2, "len_kv": 20, "len_prefix": 2100, "window": (50, 0)},
    "own lengths": {"batch": 3, "lengths": [(1, 5), (1, 0), (1, 530)], "len_prefix": 45},
    "own lengths, window": {"batch": 3, "lengths": [(2, 5), (2, 30), (2, 60)], "len_prefix": 70, "window": (45, 0)},
    "many lengths, window": {"batch": 40, "lengths": [(1, n) for n in range(40)], "len_prefix": 70, "window": (45, 0)},
    "own window": {"batch": 2, "len_kv": 1100, "len_prefix": 20, "window": (200, 0)},
}
"""Two KV heads of two heads each."""

TILES = {"full tiles": (128, 32), "full tiles of own queries": (128, 32), "many lengths, window": (128, 32)}
"""The tiles of cases whose tiles don't have 32 rows and 32 keys. Of 128 rows a warp has 32, else 16."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, one query where it doesn't say otherwise."""
    queries = {} if "lengths" in CASES[case] else {"len_q": 1}
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, **queries, "head_dim": 16, "dtype": "float16", **CASES[case]}
    return fl.Problem(**sizes)


def mutant(mechanism: str, old: str, new: str, check: str, case: str = "requests", **where: Any) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes", "rule" (wrong numbers) or "requests" (bits that change with others)."""
    at: dict[str, Any] = {"file": KERNEL, "algorithm": "cascade", **where}
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, **at)


KERNELS = [
    mutant("the prefix read for each request", "k_loader.load(k_tile(tiles.first), own.len_kv - tiles.first * BC);",
           "for (int n = 1; n < shape.batch; ++n) "
           "k_loader.template copy<false>(k_tile(tiles.first), own.len_kv - tiles.first * BC); "
           "k_loader.load(k_tile(tiles.first), own.len_kv - tiles.first * BC);", "bytes", step="load_k"),
    mutant("the prefix's parts left out of the merge", "first = has.begin; first < has.end",
           "first = parts.of_prefix; first < has.end", "rule"),
    mutant("the prefix's LSE dropped", "is_there ? load_global<float>(partial_lse + at) : -INF",
           "first + n < parts.of_prefix ? 0 : is_there ? load_global<float>(partial_lse + at) : -INF", "rule", step="load_part"),
    mutant("parts added up without weights", "alpha = exp2_approx(m - top), beta = exp2_approx(weight[n] * LOG2E - top)",
           "alpha = 1, beta = weight[n] > -INF ? 1 : 0", "rule", step="merge"),
    mutant("what was merged isn't rescaled", "weighed(o[turn], alpha, x[n][turn], beta)", "weighed(o[turn], 1, x[n][turn], beta)",
           "rule", step="merge"),
    mutant("another request's queries", "const int token = batch * own_len_q", "const int token = own_len_q", "rule", file=PLACES),
    mutant("the same query of all requests", "token % len_q};", "0};", "rule", "causal", file=PLACES),
    mutant("heads of a group exchanged", "kv_head * group + (first_row + row) % group", "kv_head * group", "misuse", file=PLACES),
    mutant("another request's own keys", "row_address(k, place.batch, place.kv_head, first_key)",
           "row_address(k, 0, place.kv_head, first_key)", "rule"),
    mutant("all KV heads the first", "chunk = rest - heads * chunks, kv_head = heads % shape.kv_heads",
           "chunk = rest - heads * chunks, kv_head = 0 * heads", "misuse", file=PLACES),
    mutant("the causal mask on the prefix", "own.left = own.right = 1 << 30;", "", "rule", "causal", file=PLACES),
    mutant("no causal mask on own keys", "j > last_full ||", "false ||", "rule", "causal", step="mask"),
    mutant("each row its own query", "2 * (opaque(lane_id()) % 4), place.group)", "2 * (opaque(lane_id()) % 4), 1)", "rule",
           "causal", step="mask"),
    mutant("only the first request's queries at the prefix", "own.batch = 1, own.len_q = shape.batch * shape.len_q,",
           "own.batch = 1, own.len_q = shape.len_q,", "misuse", file=PLACES),
    mutant("stale rows beyond the last key", "k_loader.load(k_tile(tiles.first), own.len_kv - tiles.first * BC);",
           "k_loader.load(k_tile(tiles.first), BC);", "bytes", step="load_k"),
    mutant("rows outside of the tile stored", "const bool inside = row < place.rows;", "const bool inside = true;", "misuse",
           step="store_part"),
    mutant("parts of a chunk over one another", "first_part + place.chunk, to.query", "first_part, to.query", "misuse", "chunks"),
    mutant("own parts over the prefix's", "shape, own, parts.of_prefix, chunks", "shape, own, 0, chunks", "misuse"),
    mutant("a part of no keys that weighs", "(m[i][half] + log2_approx(sum)) * LN2);",
           "sum > 0 ? (m[i][half] + log2_approx(sum)) * LN2 : 0);", "rule", "no own keys", step="store_part"),
    mutant("a sum of 0 inverted", "sum > 0 ? reciprocal(sum) : 0", "reciprocal(sum)", "rule", "hidden rows", step="store_part"),
    mutant("the merge of nothing inverts 0", "l > 0 ? alpha * reciprocal(l) : 0", "alpha * reciprocal(l)", "rule", "no keys",
           step="normalize"),
    mutant("no soft cap", "Tanh::apply(s[i], shape.scale / shape.soft_cap);", ";", "rule", "soft cap"),
    mutant("the sink counted twice", "factor = l > 0 ?",
           "again = join_sink(m, l, of_head<SINKS>(sinks, head, -INF)), factor = l > 0 ?",
           "rule", "sinks", step="normalize"),
    mutant("the sink of another head", "of_head<SINKS>(sinks, head, -INF)", "of_head<SINKS>(sinks, 0, -INF)", "rule", "sinks",
           step="normalize"),
    mutant("what a sink shrinks isn't shrunk", "l > 0 ? alpha * reciprocal(l)", "l > 0 ? reciprocal(l)", "rule", "sinks",
           step="normalize"),
    mutant("the LSE to the base 2", "query, (m + log2_approx(l)) * LN2);", "query, m + log2_approx(l));", "rule", step="store_lse"),
    mutant("a tile not waited for", "copy_wait<0>();", "copy_wait<1>();", "misuse", step="load_q"),
    mutant("a tile over one that others read", "barrier(); if (j < tiles.last)", "if (j < tiles.last)", "misuse", "causal",
           step="load_k"),
    mutant("the values of the tile before", "load_b_columns(v_tile(j), key", "load_b_columns(v_tile(j + 1), key", "misuse",
           step="output"),
    mutant("the sum isn't rescaled", "l[i][0] *= alpha[i][0], l[i][1] *= alpha[i][1];", "", "rule", "causal", step="rescale"),
    mutant("16 rows with the queries of others", "load_a(q_rows, 16 * i, d)", "load_a(q_rows, 0, d)", "rule", "full tiles",
           step="scores"),
    mutant("16 rows written over others", "row = warp_row + 16 * i + lane_id()", "row = warp_row + lane_id()", "misuse",
           "full tiles", step="store_part"),
    mutant("own queries for twice as many warps", "attend<SUFFIX_ROWS, SUFFIX_WARP_ROWS, false>", "attend<SUFFIX_ROWS, 16, false>",
           "misuse", "full tiles of own queries"),
    mutant("chunks of the prefix as long as own ones", "PREFIX ? PREFIX_TILES : SUFFIX_TILES", "SUFFIX_TILES", "rule", "chunks"),
    mutant("two rows with one maximum", "c * quad_max(top)", "c * quad_max(fmaxf(top, shuffle_xor(top, 8)))", "requests",
           step="softmax"),
    mutant("a window's first tile isn't masked", "WINDOW && j < first_full", "false", "rule", "own window", step="mask"),
    mutant("keys of the prefix before a window", "if constexpr (COUNTS_BACK) hide_before", "if constexpr (false) hide_before",
           "rule", "window", step="mask"),
    mutant("two rows with one window", "8 * n + e % 2 < first[e / 2]", "8 * n + e % 2 < first[0]", "rule",
           "many lengths, window", file=PLACES),
    mutant("all queries of a request with one window", "first_of_prefix(shape, keys, row.query)", "first_of_prefix(shape, keys, 0)",
           "rule", "window", file=PLACES),
    mutant("all requests with the first one's window", "shuffle(own[n], place % 32)", "shuffle(own[n], 0)", "rule",
           "own lengths, window", file=PLACES),
    mutant("windows of 32 requests", "if (place / 32 == n) keys = there;", "if (n == 0) keys = there;", "rule",
           "many lengths, window", file=PLACES),
    mutant("tiles of the prefix before any window", "tiles.first = max(tiles.first, begin.first / BC);", "", "bytes", "window"),
    mutant("a tile from the last window on", "tiles.first = max(tiles.first, begin.first / BC);",
           "tiles.first = max(tiles.first, begin.last / BC);", "rule", "own lengths, window"),
    mutant("parts of chunks that no row sees", "if (UNEVEN && tiles.last < tiles.first) return;", "", "bytes", "window"),
    mutant("parts merged that nobody wrote", "first < shape.len_prefix ? first / (PREFIX_TILES * BC) :",
           "first < shape.len_prefix ? 0 :", "misuse", "window", file=PLACES),
    mutant("own parts before a window merged", "of_prefix + seen.first / (SUFFIX_TILES * BC), end}", "of_prefix, end}", "misuse",
           "own window", file=PLACES),
    mutant("the last own part left out", "seen.last / (SUFFIX_TILES * BC) + 1 : 0)", "seen.last / (SUFFIX_TILES * BC) : 0)", "rule",
           "own lengths", file=PLACES),
    mutant("a request without own keys merges some", "(seen.first <= seen.last ? seen.last / (SUFFIX_TILES * BC) + 1 : 0)",
           "seen.last / (SUFFIX_TILES * BC) + 1", "misuse", "own lengths", file=PLACES),
    mutant("as many own keys as there is room for", "if constexpr (LENGTHS) own.len_kv =", "if constexpr (false) own.len_kv =",
           "bytes", "own lengths", file=PLACES),
    mutant("another request's length", "load_global<int>(seq_lens + request)", "load_global<int>(seq_lens)", "rule", "own lengths",
           file=PLACES),
    mutant("windows count back from the room's end", "(own - shape.len_q + query)", "(shape.len_kv - shape.len_q + query)", "rule",
           "own lengths, window", file=PLACES),
    mutant("all tiles the first rows", "first_row = (blockIdx.x - rest * row_tiles) * tile_rows", "first_row = 0 * tile_rows",
           "misuse", "row tiles", file=PLACES),
]  # fmt: skip
