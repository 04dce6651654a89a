"""The check of masks that an array says: rows that see nothing, whole blocks hidden or visible, one visible key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from flashlab.verify.bench import Bench, Trial, fitted, held
from flashlab.verify.cases import EVERY_SCORE, usual
from flashlab.verify.rule import judge
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.pairs import packed_bits

Pattern = Callable[[Problem, np.random.Generator], Array]
"""Makes the mask of a problem, booleans (len_q, len_kv)."""

LENGTHS = (3, (71, 131), 0, (64, 9), (40, 0), (0, 5), 101)
"""Sequences of a ragged batch: their keys, and the bits of their pairs, begin anywhere."""


def half(p: Problem, rng: np.random.Generator) -> Array:
    """A random half of the pairs."""
    return rng.integers(0, 2, (p.len_q, p.len_kv), bool)


def blocks(p: Problem, rng: np.random.Generator) -> Array:
    """Squares of 48 pairs, in turn hidden, visible and half of each: they fill no kernel's tile, but hide and show some."""
    kind = np.add.outer(np.arange(p.len_q) // 48, np.arange(p.len_kv) // 48) % 3
    return np.where(kind == 2, half(p, rng), kind == 1)


def documents(p: Problem, rng: np.random.Generator) -> Array:
    """Queries see the keys of their own document, of any length: whole tiles are hidden, whole tiles visible."""
    ends = np.sort(rng.integers(0, p.len_kv + 1, 2))
    query, key = (np.searchsorted(ends, np.arange(n), "right") for n in (p.len_q, p.len_kv))
    return query[:, None] == key


def empty_rows(p: Problem, rng: np.random.Generator) -> Array:
    """Every third row sees nothing, and neither do the first 70."""
    rows = np.arange(p.len_q)
    return half(p, rng) & ((rows % 3 > 0) & (rows >= 70))[:, None]


def lone_key(p: Problem, rng: np.random.Generator) -> Array:
    """Each row sees one key, another one."""
    return np.arange(p.len_kv) == rng.integers(0, max(1, p.len_kv), (p.len_q, 1))


def nothing(p: Problem, rng: np.random.Generator) -> Array:
    """All pairs are hidden."""
    del rng
    return np.zeros((p.len_q, p.len_kv), bool)


def everything(p: Problem, rng: np.random.Generator) -> Array:
    """All pairs are visible."""
    return ~nothing(p, rng)


def masks(bench: Bench) -> Iterator[Trial]:
    """A mask, by itself and beside all else that hides keys or changes scores, obeys the rule."""
    for dtype in bench.dtypes:
        for word, pattern, changes in (
            ("a random half", half, {"len_kv": 150}),
            ("a random half, causal, GQA, batch 2", half, {"batch": 2, "heads": 4, "kv_heads": 2, "causal": True}),
            ("a random half, window", half, {"len_q": 150, "window": (40, 7)}),
            ("a random half of 1025 keys", half, {"len_q": 2, "len_kv": 1025}),
            ("a random half, one query", half, {"len_q": 1, "len_kv": 113}),
            ("blocks", blocks, {"len_q": 200, "len_kv": 300}),
            ("blocks, causal, more keys", blocks, {"len_q": 150, "len_kv": 260, "causal": True}),
            ("documents", documents, {"len_q": 260, "causal": True}),
            ("empty rows", empty_rows, {"len_q": 200}),
            ("empty rows, soft cap, sinks, ALiBi", empty_rows, {"len_q": 150, **EVERY_SCORE}),
            ("one key a row", lone_key, {"len_kv": 200}),
            ("nothing visible", nothing, {}),
            ("all visible", everything, {"len_kv": 150}),
            ("no keys", half, {"len_q": 5, "len_kv": 0}),
            ("bits, a random half of 150 keys", half, {"mask": "bits", "len_q": 150}),
            ("bits of rows shorter than a byte", half, {"mask": "bits", "len_q": 90, "len_kv": 5}),
            (
                "bits, blocks, causal, GQA, batch 2",
                blocks,
                {"mask": "bits", "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 200, "len_kv": 301, "causal": True},
            ),
            (
                "bits, empty rows, soft cap, sinks, ALiBi",
                empty_rows,
                {"mask": "bits", "len_q": 150, "len_kv": 131, **EVERY_SCORE},
            ),
            ("lists of blocks", half, {"mask": "blocks", "len_q": 300, "len_kv": 700}),
            (
                "lists of blocks of 64 x 192, causal",
                half,
                {"mask": "blocks", "block_size": (64, 192), "len_q": 200, "len_kv": 400, "causal": True},
            ),
            ("sequences, blocks, causal", blocks, {"len_q": None, "lengths": LENGTHS, "causal": True}),
            (
                "bits of sequences, a random half",
                half,
                {"mask": "bits", "len_q": None, "lengths": LENGTHS, "window": (70, 9)},
            ),
            (
                "bits of sequences, one key a row",
                lone_key,
                {"mask": "bits", "len_q": None, "lengths": LENGTHS, "sinks": True},
            ),
        ):
            p = usual(dtype, **{"mask": "dense", **changes})
            yield fitted(bench, word, p, lambda bench, p, pattern=pattern: _masks(bench, p, pattern), lambda p: p.mask)


def _masks(bench: Bench, p: Problem, pattern: Pattern) -> float:
    arrays = bench.draw(p)
    if p.mask != "blocks":  # a random half of these is drawn
        shown = pattern(p, np.random.default_rng(bench.seed))
        arrays["mask"] = shown if p.mask == "dense" else packed_bits(p, shown)
    expected = bench.expect(p, arrays)
    bench.check_oracles(p, arrays, expected)
    result = bench.run(p, arrays)
    return held(judge(expected, result.out, result.lse)).worst
