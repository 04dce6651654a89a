"""The backward kernels on ragged batches, on the emulator: numbers, bytes, findings. Faults seeded in them are in tests/mutants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.backward import BACKWARD
from tests.simulator.test_backward import RAGGED, ratios
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

P = fl.Problem(batch=1, heads=4, kv_heads=2, lengths=[1], head_dim=40, dtype="float16")
CASES = [
    (name, tile)
    for name in RAGGED
    for tile in ((32, 16), (64, 32), (32, 80), None)
    if tile is None or not fl.CATALOGUE[name].arch
]


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0]))
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_judge_and_the_formula(case: tuple[str, Any], data: st.DataObject) -> None:
    algorithm, tile = case
    # a tile of Hopper's has 128 keys; for some head dims its blocks take tile after tile, for others they don't
    dims = {"flash3_backward": [40, 72], "flash3_backward_wide": [40, 136, 256]}.get(algorithm, [40])
    most, head_dim = 300 if fl.CATALOGUE[algorithm].arch else 100, data.draw(st.sampled_from(dims))
    length, side = st.integers(0, 3) | st.integers(0, most), st.none() | st.integers(0, 60)
    p = P.replace(
        head_dim=head_dim, lengths=data.draw(st.lists(length | st.tuples(length, length), min_size=1, max_size=5)),
        causal=data.draw(st.booleans()), window=data.draw(st.none() | st.tuples(side, side)),
        scale=data.draw(st.sampled_from([None, -0.2])), sinks=data.draw(st.booleans()), dlse=data.draw(st.booleans()),
    )  # fmt: skip
    arrays: dict[str, Any] = BACKWARD.draw(p)
    run = fl.emulate(algorithm, **arrays, **p.masks, tile=tile, time_limit=20)
    assert run.complaints() == []
    assert max(ratios(p, arrays, run.outputs).values()) <= 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("algorithm", RAGGED)
def test_default_tiles(algorithm: str, head_dim: int, dtype: str) -> None:
    if algorithm == "flash3_backward":
        head_dim = min(head_dim, 128)
    if fl.CATALOGUE[algorithm].arch and dtype == "float32":
        dtype = "float16"
    lengths = [3, 0, (201, 333), 1, 64, (0, 7), 17, (40, 0), (9, 150)]
    p = P.replace(head_dim=head_dim, dtype=dtype, causal=True, lengths=lengths)
    arrays: dict[str, Any] = BACKWARD.draw(p)
    run = fl.emulate(algorithm, **arrays, **p.masks, time_limit=60)
    assert run.complaints() == []
    assert max(ratios(p, arrays, run.outputs).values()) <= 1
