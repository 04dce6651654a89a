"""The problems on which kernels are counted and sanitised, by description: an operation's own are made of these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from simulator.problem import SCORES, WIDTH
from simulator.support import Support

Sizes = Mapping[str, Any]
"""The fields of a problem, but for its dtype."""
Problems = Mapping[str, Sizes]
"""Problems by their descriptions."""

# Of the counter matrix: aligned, ragged, GQA, and other numbers of queries than of keys, both ways.
ALIGNED: Sizes = {"batch": 1, "heads": 4, "len_q": 512, "head_dim": 64}
RAGGED: Sizes = {"batch": 1, "heads": 2, "len_q": 239, "head_dim": 40}
GQA: Sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "len_q": 509, "head_dim": 64}
FEWER: Sizes = {"batch": 1, "heads": 3, "len_q": 113, "len_kv": 799, "head_dim": 128}
MORE: Sizes = {"batch": 1, "heads": 3, "kv_heads": 1, "len_q": 421, "len_kv": 97, "head_dim": 64}
SHAPES = {"aligned": ALIGNED, "ragged": RAGGED, "gqa": GQA, "fewer-queries": FEWER, "more-queries": MORE}
# The counters of TMA show whole sectors of 32 bytes. So there are rows that are whole sectors and rows that aren't (odd),
# each in boxes that lie inside their array and in boxes that reach outside.
BOXED: Problems = {
    "ragged": {**RAGGED, "head_dim": 48},
    "odd-rows": {"batch": 1, "heads": 2, "len_q": 384, "head_dim": 40},
    "odd-rows-outside": RAGGED,
}
# Of 8-bit operands rows of a head dim may be odd and, for V lies transposed, rows of keys padded to 16.
_ODD_KEYS: Sizes = {"batch": 1, "heads": 2, "len_q": 256, "head_dim": 128}
BOXED_BYTES: Problems = {
    "ragged": {**RAGGED, "len_q": 250, "head_dim": 96},
    "more-queries": {**MORE, "len_kv": 121},
    "odd-rows": {"batch": 1, "heads": 2, "len_q": 384, "head_dim": 80},
    "odd-rows-outside": RAGGED,
    "odd-keys-outside": MORE,
    "odd-keys": {**_ODD_KEYS, "len_kv": 2000},
    "odd-keys-of-a-part": {**_ODD_KEYS, "len_kv": 1000},
    "even-keys": {**_ODD_KEYS, "len_kv": 2008},
}
# Of few queries, with keys in several chunks, on one level of the tree and on two.
A_QUERY: Sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "len_q": 1, "len_kv": 2999, "head_dim": 128}
SOME_QUERIES: Sizes = {"batch": 1, "heads": 6, "kv_heads": 2, "len_q": 5, "len_kv": 9000, "head_dim": 40}
FEW: Problems = {
    "a-query": A_QUERY,
    "some-queries": SOME_QUERIES,
    "wide-heads": {"batch": 1, "heads": 16, "kv_heads": 4, "len_q": 1, "len_kv": 1500, "head_dim": 256},
}
SCORED: Problems = {
    "soft-cap full": {**ALIGNED, "soft_cap": 5.0},
    "sinks causal": {**GQA, "sinks": True, "causal": True},
    "alibi causal": {**FEWER, "alibi": True, "causal": True},
    "soft-cap sinks alibi causal": {**MORE, "soft_cap": 5.0, "sinks": True, "alibi": True, "causal": True},
}
_QUANTIZED: Problems = {
    f"{dtype} {of_k} {of_v}": {"kv_dtype": dtype, "k_scale": of_k, "v_scale": of_v}
    for dtype, of_k, of_v in (
        ("int8", "token", "token"),
        ("float8_e4m3fn", "head", "head"),
        ("int8", "channel", "tensor"),
    )
}


def posed(problems: Problems, dtype: str) -> Iterator[tuple[str, Sizes]]:
    """Those that can be posed in a storage dtype: K and V of 8 bits need one of 16.

    >>> [name for name, _ in posed({"plain": {}, "int8": {"kv_dtype": "int8"}}, "float32")]
    ['plain']
    """
    return ((name, sizes) for name, sizes in problems.items() if "kv_dtype" not in sizes or WIDTH[dtype] == 2)


def crossed(problems: Problems) -> dict[str, Sizes]:
    """Each problem without a causal mask, and each with one."""
    words = {"full": False, "causal": True}
    return {
        f"{name} {word}": {**sizes, "causal": causal}
        for word, causal in words.items()
        for name, sizes in problems.items()
    }


def shaped(support: Support, boxes: bool) -> dict[str, Sizes]:
    """Problems of many shapes; if TMA brings `boxes`, also with rows that are no whole sectors; and what bends scores."""
    own: Problems = {
        **SHAPES,
        **(BOXED_BYTES if support.eight_bit else BOXED if boxes else {}),
        **(FEW if support.few_queries else {}),
    }
    return {**crossed(own), **(SCORED if set(SCORES) <= set(support.masks) else {})}


def served(known: Collection[str], dtype: str, some: Sizes, one: Sizes) -> dict[str, Sizes]:
    """What only kernels that serve know, added to `some` queries or to `one`."""
    found: dict[str, Sizes] = {}
    if {"soft_cap", "sinks"}.issubset(known) and "alibi" not in known:
        found |= {"sinks": {**some, "sinks": True}, "soft-cap sinks": {**some, "soft_cap": 5.0, "sinks": True}}
    if "chunk" in known:
        found |= {"short-chunks": {**one, "chunk": 192}, "whole-chunks": {**one, "chunk": 4096}}
    if "kv_dtype" in known and dtype != "float32":
        found |= {label: {**one, **cache} for label, cache in _QUANTIZED.items()}
    return found


_LENGTHS = [239, (113, 799), 0, (1, 64), (421, 97), (0, 30), 509]
SEQUENCES = crossed({"sequences": {"batch": 1, "heads": 4, "kv_heads": 2, "lengths": _LENGTHS, "head_dim": 64}})
_EVEN = [(2, n) for n in (2999, 0, 1, 700)]
EVEN = crossed({"sequences": {"batch": 1, "heads": 8, "kv_heads": 2, "lengths": _EVEN, "head_dim": 64}})
"""Of few queries, where sequences have as many each."""
MASKED: Problems = {
    "mask full": {**ALIGNED, "mask": "dense"},
    "mask causal": {**GQA, "mask": "dense", "causal": True},
    "mask sequences full": {**SEQUENCES["sequences full"], "mask": "dense"},
    "bits full": {**RAGGED, "mask": "bits"},
    "bits causal": {**FEWER, "mask": "bits", "causal": True},
    "bits sequences causal": {**SEQUENCES["sequences causal"], "mask": "bits"},
}
"""Masks that show a random half, so that all tiles are mixed."""

_RAGGED: Sizes = {"heads": 2, "len_q": 97, "head_dim": 40, "causal": True}
_FEWER: Sizes = {"heads": 1, "len_q": 33, "len_kv": 239, "head_dim": 128, "causal": True}
_EMPTY: Sizes = {"heads": 1, "len_q": 150, "len_kv": 17, "head_dim": 64, "causal": True}
_SEQUENCES: Sizes = {
    "heads": 2, "lengths": [70, 0, (3, 97), (0, 5), (65, 130)], "head_dim": 64, "causal": True,
}  # fmt: skip
SHORT = [(3, n) for n in (700, 0, 2, 97, 16)]
"""Lengths of requests that have as many queries each."""
UNSEQUENCED: Problems = {
    "ragged causal": _RAGGED,
    "GQA, window": {"heads": 4, "kv_heads": 2, "len_q": 130, "head_dim": 64, "window": (33, 5)},
    "fewer queries": _FEWER,
    "empty rows": _EMPTY,
    "soft cap": {**_RAGGED, "soft_cap": 5.0},
    "short chunks": {**_FEWER, "chunk": 64},
    "soft cap, sinks, ALiBi": {**_RAGGED, "soft_cap": 5.0, "sinks": True, "alibi": True},
    "sinks, empty rows": {**_EMPTY, "sinks": True},
}
"""Small problems for the sanitizers, with ragged edges, masks, GQA and empty rows."""
SMALL: Problems = {
    **UNSEQUENCED,
    "sequences": _SEQUENCES,
    "sequences, sinks": {**_SEQUENCES, "sinks": True},
    "sequences, few queries": {**_SEQUENCES, "heads": 4, "kv_heads": 2, "lengths": SHORT},
    # whole rows of 16 bytes: nobody writes their padding, but it is read with the rest
    "mask": {**_FEWER, "len_kv": 240, "mask": "dense"},
    "bits": {**_RAGGED, "mask": "bits"},
    "blocks": {**_FEWER, "mask": "blocks"},
    "mask, sequences": {**_SEQUENCES, "mask": "dense"},
    "bits, sequences": {**_SEQUENCES, "mask": "bits"},
}
