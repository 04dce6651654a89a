"""The problems that the hardware counters are read for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlab.measure.workload import Case
from simulator import CATALOGUE, Problem
from simulator.problem import FP8

__all__ = ["l2_problems", "matrix"]


def matrix(algorithms: Sequence[str]) -> list[Case]:
    """The counter matrix: every algorithm × dtype × mask × shape (aligned, ragged, GQA, len_q ≠ len_kv both ways; where TMA
    loads, also rows that are no whole sectors). Where an algorithm knows them, also a soft cap, sinks, ALiBi, a ragged batch, and
    masks of booleans and bits that show a random half, whose tiles are all mixed, or drafts. Of a backward pass, gradients of the
    LSE and of sinks.
    Where it is for few queries, also such, with many keys."""
    rows = (CATALOGUE[algorithm] for algorithm in algorithms)
    return [
        _case(row.name, label, dtype=dtype, **sizes)
        for row in rows
        for dtype in row.dtypes
        for label, sizes in row.operation.matrix(row.support, dtype, boxes=row.arch is not None).items()
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
    p = CATALOGUE[algorithm].fitted(Problem(**problem))
    lengths = str(p.len_q) if p.len_kv == p.len_q else f"{p.len_q}/{p.len_kv}"
    heads = str(p.heads) if p.kv_heads == p.heads else f"{p.heads}/{p.kv_heads}"
    shape = f"{p.batch}×{heads}×{lengths}×{p.head_dim}"
    return Case(f"{algorithm} {p.dtype} {label} {shape}", algorithm, p)
