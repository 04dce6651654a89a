"""The problems that the hardware counters are read for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from flashlab.measure.workload import Case
from simulator import CATALOGUE, Problem
from simulator.algorithms import mla, mla_hopper
from simulator.operations.backward import BACKWARD
from simulator.problem import FEATURES, FP8, SCORES
from simulator.support import a_lane_per_key, few_rows

__all__ = ["l2_problems", "matrix"]


def matrix(algorithms: Sequence[str]) -> list[Case]:
    """The counter matrix: every algorithm × dtype × mask × shape (aligned, ragged, GQA, len_q ≠ len_kv both ways; where TMA
    loads, also rows that are no whole sectors). Where an algorithm knows them, also a soft cap, sinks, ALiBi, a ragged batch, and
    masks of booleans and bits that show a random half, whose tiles are all mixed, or drafts. Of a backward pass, gradients of the
    LSE and of sinks.
    Where it is for few queries, also such, with many keys."""
    shapes: dict[str, dict[str, int]] = {
        "aligned": {"batch": 1, "heads": 4, "len_q": 512, "head_dim": 64},
        "ragged": {"batch": 1, "heads": 2, "len_q": 239, "head_dim": 40},
        "gqa": {"batch": 2, "heads": 8, "kv_heads": 2, "len_q": 509, "head_dim": 64},
        "fewer-queries": {"batch": 1, "heads": 3, "len_q": 113, "len_kv": 799, "head_dim": 128},
        "more-queries": {"batch": 1, "heads": 3, "kv_heads": 1, "len_q": 421, "len_kv": 97, "head_dim": 64},
    }
    # The counters of TMA show whole sectors of 32 bytes. So there are rows that are whole sectors and rows that aren't (odd),
    # each in boxes that lie inside their array and in boxes that reach outside.
    boxed = {
        "ragged": {**shapes["ragged"], "head_dim": 48},
        "odd-rows": {"batch": 1, "heads": 2, "len_q": 384, "head_dim": 40},
        "odd-rows-outside": shapes["ragged"],
    }
    # Of 8-bit operands rows of a head dim may be odd and, for V lies transposed, rows of keys padded to 16.
    odd_keys = {"batch": 1, "heads": 2, "len_q": 256, "head_dim": 128}
    boxed_bytes = {
        "ragged": {**shapes["ragged"], "len_q": 250, "head_dim": 96},
        "more-queries": {**shapes["more-queries"], "len_kv": 121},
        "odd-rows": {"batch": 1, "heads": 2, "len_q": 384, "head_dim": 80},
        "odd-rows-outside": shapes["ragged"],
        "odd-keys-outside": shapes["more-queries"],
        "odd-keys": {**odd_keys, "len_kv": 2000},
        "odd-keys-of-a-part": {**odd_keys, "len_kv": 1000},
        "even-keys": {**odd_keys, "len_kv": 2008},
    }
    scored: dict[str, dict[str, Any]] = {
        "soft-cap full": {**shapes["aligned"], "soft_cap": 5.0},
        "sinks causal": {**shapes["gqa"], "sinks": True, "causal": True},
        "alibi causal": {**shapes["fewer-queries"], "alibi": True, "causal": True},
        "soft-cap sinks alibi causal": {
            **shapes["more-queries"], "soft_cap": 5.0, "sinks": True, "alibi": True, "causal": True,
        },
    }  # fmt: skip
    # Of few queries, with keys in several chunks, on one level of the tree and on two.
    few: dict[str, dict[str, Any]] = {
        "a-query": {"batch": 2, "heads": 8, "kv_heads": 2, "len_q": 1, "len_kv": 2999, "head_dim": 128},
        "some-queries": {"batch": 1, "heads": 6, "kv_heads": 2, "len_q": 5, "len_kv": 9000, "head_dim": 40},
        "wide-heads": {"batch": 1, "heads": 16, "kv_heads": 4, "len_q": 1, "len_kv": 1500, "head_dim": 256},
    }
    # Requests with a prefix in several chunks, for one tile of rows and for two.
    shared: dict[str, dict[str, Any]] = {
        f"{name} {word}": {"head_dim": 64, "kv_heads": 2, **shape, "causal": causal}
        for (word, causal), (name, shape) in product(
            {"full": False, "causal": True}.items(),
            {
                "a-query": {"batch": 9, "heads": 8, "len_q": 1, "len_kv": 300, "len_prefix": 2999, "head_dim": 128},
                "some-queries": {"batch": 7, "heads": 8, "len_q": 5, "len_kv": 700, "len_prefix": 1024, "sinks": True},
                "soft-cap": {"batch": 2, "heads": 8, "len_q": 2, "len_kv": 300, "len_prefix": 1024, "soft_cap": 5.0},
                "wide-heads": {"batch": 3, "heads": 4, "len_q": 2, "len_kv": 99, "len_prefix": 600, "head_dim": 256},
                "odd-rows": {"batch": 3, "heads": 6, "len_q": 1, "len_kv": 0, "len_prefix": 799, "head_dim": 40},
                "no-prefix": {"batch": 3, "heads": 2, "len_q": 3, "len_kv": 600, "len_prefix": 0},
                "window": {"batch": 7, "heads": 8, "len_q": 3, "len_kv": 90, "len_prefix": 4500, "window": (900, 1)},
                "own-lengths": {
                    "batch": 5,
                    "heads": 8,
                    "lengths": [(2, n) for n in (700, 0, 1, 513, 90)],
                    "len_kv": 1100,
                    "len_prefix": 2999,
                },
                "own-lengths window": {
                    "batch": 40,
                    "heads": 8,
                    "lengths": [(1, 37 * n) for n in range(40)],
                    "len_prefix": 2999,
                    "window": (800, 0),
                },
            }.items(),
        )
    }
    lengths = [239, (113, 799), 0, (1, 64), (421, 97), (0, 30), 509]
    sequences: dict[str, dict[str, Any]] = {
        f"sequences {word}": {
            "batch": 1,
            "heads": 4,
            "kv_heads": 2,
            "lengths": lengths,
            "head_dim": 64,
            "causal": causal,
        }
        for word, causal in (("full", False), ("causal", True))
    }

    # Of few queries, where sequences have as many each.
    even: dict[str, dict[str, Any]] = {
        f"sequences {word}": {
            "batch": 1, "heads": 8, "kv_heads": 2, "lengths": [(2, n) for n in (2999, 0, 1, 700)], "head_dim": 64, "causal": causal,
        }
        for word, causal in (("full", False), ("causal", True))
    }  # fmt: skip

    # With gradients of the LSE and of sinks, where a backward pass knows them.
    graded: dict[str, dict[str, Any]] = {
        "dlse causal": {**shapes["fewer-queries"], "causal": True, "dlse": True},
        "sinks dlse causal": {**shapes["gqa"], "causal": True, "dlse": True, "sinks": True},
        "sinks sequences causal": {**sequences["sequences causal"], "sinks": True},
        "soft-cap causal": {**shapes["gqa"], "causal": True, "soft_cap": 5.0},
    }

    requests = {"head_dim": 64, "heads": 8, "kv_heads": 2, "batch": 4, "lengths": [(2, n) for n in (2999, 0, 1, 700)]}
    pages: dict[str, dict[str, Any]] = {
        f"requests page {n} {word}": {**requests, "page_size": n, "causal": causal}
        for n, (word, causal) in product((1, 16, 100), {"full": False, "causal": True}.items())
    }
    drafted: dict[str, dict[str, Any]] = {
        "drafts": {**requests, "lengths": [(7, n) for n in (2999, 0, 3, 519)], "page_size": 16, "drafts": True},
        "32 drafts window": {
            **requests, "lengths": [(32, n) for n in (2999, 0, 20, 527)], "page_size": 100, "drafts": True, "window": (900, 0),
        },
    }  # fmt: skip
    caches: dict[str, dict[str, Any]] = {
        f"{dtype} {of_k} {of_v}": {"kv_dtype": dtype, "k_scale": of_k, "v_scale": of_v}
        for dtype, of_k, of_v in (
            ("int8", "token", "token"),
            ("float8_e4m3fn", "head", "head"),
            ("int8", "channel", "tensor"),
        )
    }
    masks: dict[str, dict[str, Any]] = {
        "mask full": {**shapes["aligned"], "mask": "dense"},
        "mask causal": {**shapes["gqa"], "mask": "dense", "causal": True},
        "mask sequences full": {**sequences["sequences full"], "mask": "dense"},
        "bits full": {**shapes["ragged"], "mask": "bits"},
        "bits causal": {**shapes["fewer-queries"], "mask": "bits", "causal": True},
        "bits sequences causal": {**sequences["sequences causal"], "mask": "bits"},
    }

    def labelled(algorithm: str, dtype: str) -> dict[str, dict[str, Any]]:
        row = CATALOGUE[algorithm]
        if row.operation.shares_prefix:
            return shared
        paged = row.operation.in_pages
        own = shapes | (boxed_bytes if row.support.eight_bit else boxed if row.arch else {})
        own |= few if row.support.tile in (few_rows, a_lane_per_key, mla.accepts, mla_hopper.accepts) else {}
        masked: dict[str, dict[str, Any]] = {
            f"{name} {word}": {**shape, "causal": causal}
            for (word, causal), (name, shape) in product({"full": False, "causal": True}.items(), own.items())
        }
        known = set(row.support.masks)
        masked |= scored if set(SCORES) <= known else {}
        masked |= pages if paged else even if row.support.same_queries else sequences if "lengths" in known else {}
        masked |= drafted if "drafts" in known else {}
        if (
            row.operation is not BACKWARD and {"soft_cap", "sinks"} <= known and "alibi" not in known
        ):  # those that serve
            served = pages["requests page 16 causal"] if paged else few["some-queries"]
            masked |= {"sinks": {**served, "sinks": True}, "soft-cap sinks": {**served, "soft_cap": 5.0, "sinks": True}}
        if "chunk" in known:
            split = pages["requests page 16 causal"] if paged else few["a-query"]
            masked |= {"short-chunks": {**split, "chunk": 192}, "whole-chunks": {**split, "chunk": 4096}}
        if "kv_dtype" in known and dtype != "float32":
            few_of = pages["requests page 16 causal"] if paged else few["a-query"]
            masked |= {label: {**few_of, **quantized} for label, quantized in caches.items()}
        if row.operation is BACKWARD:
            masked |= {label: p for label, p in graded.items() if known.issuperset(set(p) & set(FEATURES))}
        return masked | (masks if "mask" in known else {})

    return [
        _case(algorithm, label, dtype=dtype, **problem)
        for algorithm in algorithms
        for dtype in CATALOGUE[algorithm].dtypes
        for label, problem in labelled(algorithm, dtype).items()
    ]


def l2_problems() -> list[Case]:
    """Problems that hold the L2 model to account: in those called shared, all SMs share over 30 MB of K and V.

    The model's constants were set on the problems called neither fresh, short nor blind. Those three were measured after their
    estimates had been committed.
    """
    one = {"batch": 1, "heads": 1}
    return [
        _case("flash2", "L2", batch=1, heads=8, len_q=4096, head_dim=128, dtype="bfloat16", causal=False),
        _case("flash2", "L2", batch=1, heads=32, len_q=4096, head_dim=64, dtype="float16", causal=True),
        _case("flash1", "L2", batch=2, heads=32, len_q=2048, head_dim=64, dtype="float16", causal=False),
        _case("standard", "L2", batch=1, heads=4, len_q=4096, head_dim=64, dtype="float16", causal=False),
        _case("flash2", "L2", batch=4, heads=16, kv_heads=2, len_q=8192, head_dim=64, dtype="float16", causal=False),
        _case("flash2", "L2 shared", **one, len_q=65536, head_dim=128, dtype="bfloat16", causal=False),
        _case("flash2", "L2 shared", **one, len_q=32768, len_kv=98304, head_dim=128, dtype="bfloat16", causal=False),
        _case("flash2", "L2 shared", **one, len_q=16384, len_kv=40960, head_dim=128, dtype="float32", causal=False),
        _case("flash2", "L2 shared", **one, len_q=32768, len_kv=163840, head_dim=64, dtype="float16", causal=False),
        _case("flash2", "L2 shared", **one, len_q=81920, head_dim=128, dtype="float16", causal=True),
        _case("flash2", "L2 shared", batch=1, heads=8, kv_heads=1, len_q=8192, len_kv=131072, head_dim=64,
              dtype="float16", causal=False),
        _case("flash2", "L2", batch=1, heads=16, kv_heads=4, len_q=16384, head_dim=128, dtype="float16", causal=True),
        _case("flash1", "L2", batch=1, heads=48, len_q=2048, head_dim=64, dtype="bfloat16", causal=False),
        _case("flash1", "L2", batch=1, heads=16, len_q=4096, head_dim=128, dtype="float16", causal=True),
        _case("standard", "L2", batch=1, heads=2, len_q=8192, head_dim=64, dtype="float16", causal=True),
        _case("online_softmax", "L2", batch=1, heads=8, len_q=2048, head_dim=128, dtype="bfloat16", causal=False),
        _case("flash2", "L2 shared", **one, len_q=131072, head_dim=64, dtype="bfloat16", causal=False),
        _case("flash2", "L2 shared", **one, len_q=131072, head_dim=64, dtype="float16", causal=True),
        _case("flash2", "L2 shared", batch=1, heads=2, len_q=65536, head_dim=128, dtype="float16", causal=False),
        _case("flash2", "L2 shared", batch=1, heads=4, kv_heads=1, len_q=32768, len_kv=65536, head_dim=128,
              dtype="bfloat16", causal=True),
        _case("flash2", "L2 shared", **one, len_q=24576, len_kv=131072, head_dim=96, dtype="bfloat16", causal=True),
        _case("flash1", "L2 fresh", batch=1, heads=56, len_q=2048, head_dim=64, dtype="float16", causal=False),
        _case("online_softmax", "L2 fresh", batch=1, heads=3, len_q=4992, head_dim=64, dtype="float16", causal=True),
        _case("flash2", "L2 shared fresh", batch=1, heads=3, len_q=40000, len_kv=131072, head_dim=64,
              dtype="float16", causal=False),
        _case("flash2", "L2 shared fresh", batch=1, heads=4, kv_heads=2, len_q=40960, len_kv=81920, head_dim=128,
              dtype="bfloat16", causal=True),
        *(
            _case("flash3", "L2 walks", **shape, head_dim=dim, dtype="bfloat16", causal=causal)
            for causal, dim, shape in (
                (True, 64, {"batch": 1, "heads": 4, "len_q": 131072}),
                (True, 64, {**one, "len_q": 300000}),
                (True, 128, {**one, "len_q": 131072}),
                (True, 128, {"batch": 1, "heads": 8, "kv_heads": 2, "len_q": 65536}),
                (False, 64, {**one, "len_q": 131072}),
                (False, 128, {**one, "len_q": 81920}),
                (False, 128, {"batch": 1, "heads": 4, "kv_heads": 1, "len_q": 16384, "len_kv": 131072}),
                (True, 256, {**one, "len_q": 49152}),
            )
        ),
        *(
            _case("flash3_fp8", "L2 walks", batch=1, heads=heads, len_q=n, head_dim=128, dtype=FP8, causal=causal)
            for heads, n, causal in ((2, 131072, True), (1, 131072, False), (8, 32768, True))
        ),
        *(
            _case(algorithm, "L2 short", batch=batch, heads=32, kv_heads=4, len_q=rows, len_kv=n, head_dim=128,
                  dtype="float16", causal=causal)
            for algorithm, batch, rows, n, causal in (
                ("flash2", 4, 16, 32768, True), ("flash2", 1, 1, 131072, False), ("flash2", 8, 64, 8192, False),
                ("flash3", 4, 16, 32768, True), ("flash3", 2, 128, 65536, False),
            )
        ),
        *(
            _case("flash3", "L2 blind", **shape, head_dim=dim, dtype="bfloat16", **mask)
            for dim, mask, shape in (
                (64, {"causal": True}, {"batch": 1, "heads": 2, "len_q": 200000}),
                (64, {"causal": True}, {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 120000}),
                (64, {"causal": False}, {"batch": 1, "heads": 3, "len_q": 140000}),
                (128, {"causal": True}, {"batch": 1, "heads": 2, "len_q": 98304}),
                (128, {"causal": True}, {"batch": 1, "heads": 4, "kv_heads": 1, "len_q": 98304}),
                (128, {"causal": True}, {**one, "len_q": 40000, "len_kv": 100000}),
                (128, {"causal": False}, {"batch": 1, "heads": 2, "len_q": 65536}),
                (128, {"causal": False}, {"batch": 1, "heads": 8, "kv_heads": 2, "len_q": 24576, "len_kv": 90112}),
                (128, {"window": (32768, 0)}, {**one, "len_q": 131072}),
                (256, {"causal": True}, {"batch": 1, "heads": 2, "len_q": 40960}),
                (256, {"causal": False}, {**one, "len_q": 36864}),
            )
        ),
        *(
            _case("flash3_fp8", "L2 blind", batch=1, heads=heads, len_q=n, head_dim=128, dtype=FP8, causal=causal)
            for heads, n, causal in ((1, 180000, True), (3, 140000, True), (2, 148000, False))
        ),
        *(
            _case("flash2", "L2 blind", **shape, dtype="float16", causal=causal)
            for causal, shape in (
                (True, {**one, "len_q": 98304, "head_dim": 128}),
                (True, {"batch": 1, "heads": 3, "len_q": 100000, "head_dim": 64}),
                (False, {"batch": 1, "heads": 8, "kv_heads": 4, "len_q": 40000, "len_kv": 65536, "head_dim": 64}),
            )
        ),
    ]  # fmt: skip


def _case(algorithm: str, label: str, **problem: Any) -> Case:
    p = CATALOGUE[algorithm].operation.fitted(Problem(**problem))
    lengths = str(p.len_q) if p.len_kv == p.len_q else f"{p.len_q}/{p.len_kv}"
    heads = str(p.heads) if p.kv_heads == p.heads else f"{p.heads}/{p.kv_heads}"
    shape = f"{p.batch}×{heads}×{lengths}×{p.head_dim}"
    return Case(f"{algorithm} {p.dtype} {label} {shape}", algorithm, p)
