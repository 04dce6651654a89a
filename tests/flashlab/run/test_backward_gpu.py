"""`fl.attention_backward` on a GPU: numbers by the rule, the same bits where no atomic adds up, every kind of array."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.base.host import from_numpy, to_numpy
from simulator.operations.backward import BACKWARD
from tests.simulator.test_backward import ratios

pytestmark = pytest.mark.gpu

ALGORITHMS = fl.catalogue.with_kernels(BACKWARD)
IN_THEIR_DTYPES = [(name, dtype) for name in ALGORITHMS for dtype in fl.CATALOGUE[name].dtypes]


def gradients(p: fl.Problem, arrays: dict[str, Any], kind: str = "cupy", **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: from_numpy(x, kind, "cuda" if kind == "torch" else None) for name, x in arrays.items()
    }
    found = fl.attention_backward(**given, **p.masks, **options)
    return {name: to_numpy(name, x) for name, x in zip(("dq", "dk", "dv"), found, strict=True)}


@pytest.mark.parametrize(
    ("algorithm", "dtype", "head_dim"),
    [
        (*each, d)
        for each in IN_THEIR_DTYPES
        for d in (40, 64, 96, 128, 192, 256)
        if d in fl.CATALOGUE[each[0]].support.head_dims
    ],
)
def test_the_rule_at_the_default_tile(algorithm: str, dtype: str, head_dim: int) -> None:
    p = fl.Problem(
        batch=2, heads=4, kv_heads=2, len_q=300, len_kv=333, head_dim=head_dim, dtype=dtype, causal=True
    )  # fmt: skip
    arrays: dict[str, Any] = BACKWARD.draw(p, 0)
    assert max(ratios(p, arrays, gradients(p, arrays, algorithm=algorithm)).values()) <= 1


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_other_frameworks(kind: str) -> None:
    pytest.importorskip(kind)
    p = fl.Problem(batch=1, heads=2, len_q=97, head_dim=64, dtype="bfloat16", causal=True)
    arrays: dict[str, Any] = BACKWARD.draw(p, 1)
    assert max(ratios(p, arrays, gradients(p, arrays, kind)).values()) <= 1


def test_the_same_bits_a_thousand_times() -> None:
    """dK and dV, which no atomic adds up; memory that is handed out again is full of NaN."""
    cupy: Any = importlib.import_module("cupy")
    p = fl.Problem(batch=1, heads=8, kv_heads=2, len_q=700, head_dim=64, dtype="float16", causal=True)
    arrays: dict[str, Any] = BACKWARD.draw(p, 2)
    first = gradients(p, arrays)
    given = {name: cupy.asarray(x) for name, x in arrays.items()}
    for _ in range(1000):
        littered = cupy.full(1 << 22, np.nan, np.float32)
        del littered
        _, dk, dv = fl.attention_backward(**given, causal=True)
        assert dk.tobytes() == first["dk"].tobytes() and dv.tobytes() == first["dv"].tobytes()


PLAIN: dict[str, Any] = {"batch": 3, "len_q": 2900, "len_kv": 3000}
SEQUENCES: dict[str, Any] = {"batch": 1, "lengths": [700, 3, (1400, 1500), 0, (0, 40), 129, (700, 90)]}


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (300, 40)}], ids=str)
@pytest.mark.parametrize("lengths", [PLAIN, SEQUENCES], ids=["plain", "sequences"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dq_the_same_a_thousand_times(masks: dict[str, Any], lengths: dict[str, Any], head_dim: int) -> None:
    """In one order, beside other work that makes blocks late; with more blocks than find room at once."""
    cupy: Any = importlib.import_module("cupy")
    p = fl.Problem(heads=8, kv_heads=4, head_dim=head_dim, dtype="float16", **masks, **lengths)
    given = {name: cupy.asarray(x) for name, x in BACKWARD.draw(p, 3).items()}
    first = [x.copy() for x in fl.attention_backward(**given, **p.masks, deterministic=True)]
    beside = cupy.cuda.Stream(non_blocking=True)
    load = cupy.ones((2048, 2048), np.float32)
    for i in range(1000):
        if i % 2:
            with beside:
                load @ load
        again = fl.attention_backward(**given, **p.masks, deterministic=True)
        assert all(bool((x.view("u2") == y.view("u2")).all()) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_sinks_of_sequences(deterministic: bool) -> None:
    p = fl.Problem(heads=8, kv_heads=4, head_dim=64, dtype="bfloat16", causal=True, sinks=True, **SEQUENCES)
    arrays: dict[str, Any] = BACKWARD.draw(p, 4)
    given = {name: from_numpy(x, "cupy", None) for name, x in arrays.items()}
    *_, dsinks = fl.attention_backward(**given, **p.masks, deterministic=deterministic)
    truth = BACKWARD.judge(p, arrays)
    allowed = BACKWARD.bounds(p, arrays, truth)["dsinks"].sum(0)
    assert (abs(to_numpy("dsinks", dsinks) - truth["dsinks"].sum(0)) <= allowed + 1e-6).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_verified(algorithm: str) -> None:
    report = fl.verify(algorithm, backend="gpu")
    assert report.verdict == "passed", report.failed[:3]
