"""Traces that the player's tests share, made once."""

from __future__ import annotations

from functools import cache
from typing import Any

import flashlab as fl
from tests.simulator.problems import taken_by

LESSON = fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
"""As large as what a lesson steps through."""
SMALL = fl.Problem(batch=1, heads=1, len_q=48, head_dim=16, dtype="float32", causal=True)


def record(program: Any, problem: fl.Problem, tile: tuple[int, int], *, lse: bool = False) -> fl.Trace:
    """The trace of the first head."""
    q, k, v = fl.random_inputs(problem)
    trace = fl.simulate(program, q, k, v, **problem.masks, tile=tile, device="a100", lse=lse, trace=(0, 0)).trace
    assert trace is not None
    return trace


@cache
def lesson(algorithm: str) -> fl.Trace:
    return record(algorithm, taken_by(algorithm, LESSON), (32, 32))


@cache
def small(algorithm: str) -> fl.Trace:
    return record(algorithm, taken_by(algorithm, SMALL), (16, 16))


@cache
def traced(algorithm: str) -> fl.Trace:
    """Of any algorithm, from inputs of its own operation, in four by four tiles or the kernel's own."""
    row = fl.CATALOGUE[algorithm]
    usual = fl.Problem(batch=1, heads=1, len_q=64, head_dim=32, dtype="float16", causal=True)
    problem = row.fitted(taken_by(algorithm, usual))
    tile = (16, 16) if row.support.tile(fl.Tile(16, 16), problem) is None else None
    arrays = row.operation.draw(problem)
    trace = fl.simulate(algorithm, **arrays, **problem.masks, tile=tile, device="h100", trace=(0, 0)).trace
    assert trace is not None
    return trace


@cache
def shown(algorithm: str) -> fl.Trace:
    """What an algorithm shows if nobody asks for anything else, with head dim 32 where it takes that."""
    row = fl.CATALOGUE[algorithm]
    given = row.shown or row.operation.shown
    fields: dict[str, Any] = {"batch": 1, "heads": 2, "head_dim": 32, "dtype": "float16", "causal": True, **given}
    tile = fields.pop("tile", None)
    problem = row.fitted(fl.Problem(**fields))
    arrays = row.operation.draw(problem)
    trace = fl.simulate(algorithm, **arrays, **problem.masks, tile=tile, device="h100", trace=(0, 0)).trace
    assert trace is not None
    return trace


@cache
def long() -> fl.Trace:
    """Ten thousand events."""
    problem = fl.Problem(batch=1, heads=1, len_q=848, head_dim=32, dtype="float16", causal=True)
    trace = record("flash2", problem, (16, 16))
    assert 10_000 <= len(trace.events) < 11_000
    return trace
