"""Seeded bugs in flash_decoding's kernel: in its split, its tree, its counters. The emulator runs them."""

from __future__ import annotations

from typing import Any

import flashlab as fl
from tests.mutants.backward import KernelMutant

KERNEL = "kernels_cu/flash_decoding.cu"
MASK, MEMORY, TREE = (f"kernels_cu/include/{name}.cuh" for name in ("mask", "memory", "tree"))

CASES: dict[str, dict[str, Any]] = {
    "one chunk": {"heads": 4, "kv_heads": 2, "len_q": 2, "len_kv": 50},
    "chunks": {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 3, "len_kv": 500, "head_dim": 40, "causal": True},
    "two levels": {"heads": 4, "kv_heads": 2, "len_q": 1, "len_kv": 2200, "head_dim": 16},
    "row tiles": {"heads": 6, "kv_heads": 2, "len_q": 20, "len_kv": 420, "head_dim": 16, "window": (130, 0)},
    "fewer chunks": {"heads": 1, "len_q": 200, "head_dim": 16, "causal": True},
    "hidden rows": {"heads": 2, "len_q": 30, "len_kv": 10, "causal": True},
    "a negative scale": {"heads": 2, "len_q": 1, "len_kv": 300, "scale": -0.2, "causal": True},
}
"""With tiles of 32 keys, chunks have 128."""


def problem(case: str) -> fl.Problem:
    """A case as a problem: float16, one batch, head dim 64 where it doesn't say otherwise."""
    sizes: dict[str, Any] = {"batch": 1, "head_dim": 64, "dtype": "float16", **CASES[case]}
    return fl.Problem(**sizes)


def mutant(mechanism: str, old: str, new: str, check: str, case: str = "chunks", **where: Any) -> KernelMutant:
    """`check` is what must find it: "misuse", "bytes", "zeros" (counters left above 0) or "rule" (wrong numbers)."""
    at: dict[str, Any] = {"file": KERNEL, "algorithm": "flash_decoding", **where}
    return KernelMutant(mechanism=mechanism, old=old, new=new, check=check, case=case, **at)


KERNELS = [
    mutant("no fence before the counter", "__threadfence(); const unsigned before", "const unsigned before", "misuse",
           file=MEMORY),
    mutant("no barrier before the counter", "barrier();", "", "misuse", step="arrive"),
    mutant("a counter that isn't set back", "atomicInc(static_cast<unsigned*>(counter), last);",
           "atomicAdd(static_cast<unsigned*>(counter), 1u);", "zeros", file=MEMORY),
    mutant("the last block one too late", "siblings.last - siblings.first)", "siblings.last - siblings.first + 1)", "misuse",
           step="arrive"),
    mutant("the last block one too early", "siblings.last - siblings.first)", "siblings.last - siblings.first - 1)", "zeros",
           step="arrive"),
    mutant("row tiles with one counter", "counter * here.row_tiles + here.row_tile", "counter", "misuse", "row tiles",
           step="arrive"),
    mutant("nodes of the second level in the places of the first", "place + room, counter", "place, counter", "misuse",
           "two levels", file=TREE),
    mutant("one child left out", "row < rows && child >= siblings.first && child <= siblings.last) tops[n]",
           "row < rows && child >= siblings.first && child < siblings.last) tops[n]", "rule", step="merge"),
    mutant("children's outputs not weighed", "weighed(x.o, a, y.o, b)", "weighed(x.o, 1, y.o, 1)", "rule", file=TREE),
    mutant("partial LSEs to the base 2", "(x.m + log2_approx(x.l)) * LN2", "(x.m + log2_approx(x.l))", "rule", file=TREE),
    mutant("warps' outputs not weighed", "load_shared<float4>(outputs.at(w, row, column)), weights[w])",
           "load_shared<float4>(outputs.at(w, row, column)), 1)", "rule", step="join"),
    mutant("the sums of one warp", "x.l += weights[w] *", "x.l = weights[w] *", "rule", step="join"),
    mutant("heads and queries of a row exchanged", "(first_row + row) % group", "(first_row + row) / group % group", "misuse",
           "row tiles", step="join"),
    mutant("masked by the packed row", "(opaque(row) + 8 * half) / heads", "(opaque(row) + 8 * half)", "rule", file=MASK),
    mutant("masked without the warp's own keys", "j * BC + warp_id() * WARP_KEYS", "j * BC", "rule", "a negative scale",
           step="mask"),
    mutant("keys of the warp before", "j * WARPS + warp_id(), keys", "j * WARPS + (warp_id() ^ 1), keys", "rule",
           "a negative scale", step="load_q"),
    mutant("Q not waited for", "copy_wait<STAGES - 1>();", "", "misuse", step="load_q"),
    mutant("a tile not waited for", "copy_wait<STAGES == 1 ? 0 : STAGES - 2>();", "copy_wait<STAGES - 1>();", "misuse",
           step="load_k"),
    mutant("lanes that don't meet before a tile is loaded over", "warp_barrier(); load_ahead(", "load_ahead(", "misuse",
           step="load_k"),
    mutant("outputs over the ring that others still read", "copy_wait<0>(); … barrier();", "", "misuse", step="join"),
    mutant("outputs read before all are written", "o[i][n][2 * half + 1])); … barrier();", "", "misuse", step="join"),
    mutant("blocks that have no chunk work on", "if (place.chunk > place.last_chunk) return;", "", "bytes", "fewer chunks",
           step="load_q"),
    mutant("rows beyond the end stored", "if (row >= rows) continue;", "", "misuse", step="normalize"),
    mutant("the maximum of an empty node subtracted", "maximum == -INF ? 0 : maximum", "maximum", "rule", "row tiles",
           file="kernels_cu/include/elements.cuh"),
    mutant("the scale's sign forgotten", "scores.flip(s[i]);", "", "rule", "a negative scale", step="mask"),
]  # fmt: skip
