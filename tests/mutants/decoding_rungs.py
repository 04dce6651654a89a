"""Seeded bugs in the rungs below flash_decoding and paged: in their heads, their walk, their merge, their pages."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

RUNGS = "kernels_cu/include/decoding_rungs.cuh"

CASES: dict[str, dict[str, Any]] = {
    "keys": {"batch": 2, "heads": 6, "kv_heads": 2, "len_q": 1, "len_kv": 300, "head_dim": 40},
    "many heads": {"heads": 40, "kv_heads": 2, "len_q": 1, "len_kv": 70, "head_dim": 16},
    "no keys": {"heads": 4, "kv_heads": 2, "len_q": 1, "len_kv": 0, "head_dim": 16},
    "long": {"heads": 2, "kv_heads": 1, "len_q": 1, "len_kv": 8300, "head_dim": 16},
    "wide heads": {"heads": 2, "kv_heads": 1, "len_q": 1, "len_kv": 150, "head_dim": 200},
    "requests": {
        "batch": 3, "heads": 6, "kv_heads": 2, "lengths": [(1, 200), (1, 0), (1, 75)], "head_dim": 40, "page_size": 7,
    },
    "one request": {"batch": 1, "heads": 2, "lengths": [(1, 45)], "head_dim": 16, "page_size": 16},
}  # fmt: skip
"""Groups of 3 heads, and of 20: two tiles of rows. With tiles of 32 keys a chunk has 128 of "keys", and 160 of "long"."""
TAKES = {
    "flash_decoding_1": ("keys", "many heads", "no keys"),
    "flash_decoding_2": ("keys", "many heads", "no keys", "long", "wide heads"),
    "paged_1": ("requests", "one request"),
}
"""The cases of each rung."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, one batch where it doesn't say otherwise."""
    return fl.Problem(**{"batch": 1, "dtype": "float16", **CASES[case]})


def mutants(algorithm: str, usual: str, *made: tuple[Any, ...]) -> list[KernelMutant]:
    """Each as (mechanism, old, new, check), and what differs from the usual case and from the rung's own file."""
    own: dict[str, Any] = {"algorithm": algorithm, "file": f"kernels_cu/{algorithm}.cu", "case": usual}
    names = ("mechanism", "old", "new", "check")
    return [KernelMutant(**{**own, **dict(zip(names, each, strict=False)), **dict(*each[4:])}) for each in made]


KERNELS = [
    *mutants(
        "flash_decoding_1", "keys",
        ("the keys of the first KV head", "row_address(k, heads.batch, heads.kv_head, 0)", "row_address(k, heads.batch, 0, 0)",
         "rule"),
        ("the values of the first sequence", "row_address(v, heads.batch, heads.kv_head, 0)", "row_address(v, 0, heads.kv_head, 0)",
         "rule"),
        ("no mask behind the last key", "if (shape.len_kv - j * BC < BC) hide_beyond(s, shape.len_kv - j * BC);", "", "rule"),
        ("one key too many", "e % 2 >= keys)", "e % 2 > keys)", "rule", {"file": RUNGS}),
        ("groups that overlap", "first = kv_head * group + first_row", "first = kv_head + first_row", "misuse", {"file": RUNGS}),
        ("heads of a group as if they were groups", "first_row = place % row_tiles * BR", "first_row = place % row_tiles", "misuse",
         {"file": RUNGS, "case": "many heads"}),
        ("rows of other groups written", "const bool inside = row < heads.rows;", "const bool inside = true;", "misuse"),
        ("all heads with the first one's query", "heads.first, 0), q.head, heads.rows", "heads.first, 0), 0, heads.rows", "rule"),
        ("the LSE to the base 2", "(softmax.m[half] + log2_approx(sum)) * LN2", "softmax.m[half] + log2_approx(sum)", "rule"),
        ("powers of 2 in place of e", "shape.scale * LOG2E", "shape.scale", "rule"),
        ("a tile not waited for", "copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();", "misuse"),
        ("other lanes' copies not waited for", "barrier();", "", "misuse"),
        ("a ring with a slot too few", "QTile::BYTES + j % STAGES", "QTile::BYTES + j % (STAGES - 1)", "misuse", {"file": RUNGS}),
        ("the sum isn't rescaled", "m[half] = top, l[half] *= alpha[half];", "m[half] = top;", "rule", {"file": RUNGS}),
        ("O isn't rescaled", "rescale(o, alpha);", "", "rule"),
        ("two rows with one maximum", "s[n][e] - m[e / 2]", "s[n][e] - m[0]", "rule", {"file": RUNGS, "case": "many heads"}),
        ("nothing divided by nothing", "sum > 0 ? reciprocal(sum) : 0", "reciprocal(sum)", "rule", {"case": "no keys"}),
        ("a lane's part of a sum", "sum = quad_sum(softmax.l[half])", "sum = softmax.l[half]", "rule"),
    ),
    *mutants(
        "flash_decoding_2", "keys",
        ("the merge divides twice", "column < columns ? factor : 0", "column < columns ? factor * factor : 0", "rule"),
        ("chunks added up without weights", "alpha = exp2_approx(m - top), beta = exp2_approx(m_n - top)",
         "alpha = m > LOWEST ? 1 : 0, beta = 1", "rule"),
        ("the sum of a chunk isn't weighed", "weighed(l, alpha, l_n, beta)", "weighed(l, alpha, l_n, 1)", "rule"),
        ("what was merged isn't rescaled", "weighed(o[turn], alpha,", "weighed(o[turn], 1,", "rule"),
        ("the maximum of the last chunk", "m = top, l =", "m = m_n, l =", "rule"),
        ("the merged LSE to the base 2", "(m + log2_approx(l)) * LN2", "m + log2_approx(l)", "rule"),
        ("a chunk without keys that divides", "l > 0 ? reciprocal(l) : 0", "reciprocal(l)", "rule", {"case": "no keys"}),
        ("a chunk without keys that weighs", "store_global(partial_l + at, sum)", "store_global(partial_l + at, fmaxf(sum, 1))",
         "rule", {"case": "no keys"}),
        ("the last chunk left out", "chunk < chunks.count; ++chunk", "chunk < max(1, chunks.count - 1); ++chunk", "rule"),
        ("chunks that overlap", "first = chunk * chunks.size, end", "first = max(0, chunk * chunks.size - 1), end", "bytes"),
        ("keys that each chunk begins with", "row_address(k, heads.batch, heads.kv_head, first * BC)",
         "row_address(k, heads.batch, heads.kv_head, 0)", "rule"),
        ("parts of chunks over one another", "chunks.count + chunk; const float sum", "chunks.count; const float sum", "misuse"),
        ("a lane's part of a chunk's sum", "sum = quad_sum(softmax.l[half])", "sum = softmax.l[half]", "rule"),
        ("a part of the first row", "row = lane_id() / 4 + 8 * half, columns", "row = lane_id() / 4, columns", "misuse",
         {"case": "many heads"}),
        ("columns from 128 on left out", "TURNS = ceil_div(HEAD_DIM, 128)", "TURNS = 1", "misuse", {"case": "wide heads"}),
        ("chunks of four tiles, however many", "size(max(LEAST_TILES, ceil_div(tiles, MOST_CHUNKS)))", "size(LEAST_TILES)",
         "misuse", {"case": "long"}),
    ),
    *mutants(
        "paged_1", "requests",
        ("the page of a tile's first key", "table + key / page_size", "table + j * BC / page_size", "rule"),
        ("the pages of the first request", "static_cast<long long>(heads.batch) * shape.table_pages", "0", "rule"),
        ("the length of the first request", "load_global<int>(seq_lens + heads.batch)", "load_global<int>(seq_lens)", "misuse"),
        ("no mask in the last page", "if (keys - j * BC < BC) hide_beyond(s, keys - j * BC);", "", "rule"),
        ("a key's place in its tile, not in its page", "place = key % page_size", "place = lane_id() % shape.page_size",
         "rule"),
        ("the rest of the last page read", "k_loader.row_of(page, place), keys - j * BC)", "k_loader.row_of(page, place), BC)",
         "bytes", {"case": "one request"}),
        ("pages behind the last key looked up", "inside = lane_id() < BC && key < keys", "inside = lane_id() < BC", "bytes"),
        ("the values of the first KV head", "row_address(v, 0, heads.kv_head, 0)", "row_address(v, 0, 0, 0)", "rule"),
        ("pages of the request's number", "shape.table_pages;", "shape.page_size;", "rule"),
        ("all keys of the table", "min(max(load_global<int>(seq_lens + heads.batch), 0), shape.len_kv)",
         "max(load_global<int>(seq_lens + heads.batch), shape.len_kv)", "misuse"),
    ),
]  # fmt: skip
