"""The backward kernels on ragged batches, on the emulator: numbers, bytes, findings. Faults seeded in them are in tests/mutants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.emulator.library import Arena
from flashlab.run import emulated
from simulator.operations.backward import BACKWARD
from simulator.ragged import places
from tests.simulator.test_backward import RAGGED, ratios
from tests.tiers import examples, one_of_each

pytestmark = pytest.mark.compiler

P = fl.Problem(batch=1, heads=4, kv_heads=2, lengths=[1], head_dim=40, dtype="float16")
CASES = [
    (name, tile)
    for name in RAGGED
    for tile in ((32, 16), (64, 32), (32, 80), None)
    if tile is None or not fl.CATALOGUE[name].arch
]


@pytest.mark.alike("('flash2_backward', (32, 16))", "('flash3_backward', None)")
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0]))
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_judge_and_the_formula(case: tuple[str, Any], data: st.DataObject) -> None:
    check_kernel(case, data)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_judge_and_the_formula_more_often(case: tuple[str, Any], data: st.DataObject) -> None:
    check_kernel(case, data)


def check_kernel(case: tuple[str, Any], data: st.DataObject) -> None:
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


FEW = replace(fl.DEVICES["h200"], name="five SMs of an H200", sms=5)
"""More blocks than it has SMs are put in an order."""


def taken(p: fl.Problem) -> list[tuple[int, ...]]:
    """The key tiles as `flash3_backward` takes them: the first row of K and the sequence's first query of each, and how many
    queries it has; empty places are ()."""
    arena = Arena()
    arrays: dict[str, Any] = BACKWARD.draw(p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "Arena", lambda: arena)
        run = fl.emulate("flash3_backward", **arrays, **p.masks, device=FEW, time_limit=20)
    assert run.complaints() == []
    assert run.counts.config is not None and run.counts.config.ordered
    tiles = np.asarray(arena.buffers["order"].data).view(np.int32).reshape(-1, 8).tolist()
    return [(key + first_key, query, queries) if end else () for first_key, end, _, _, key, query, queries, _ in tiles]


def longest_first(p: fl.Problem) -> list[tuple[int, ...]]:
    """The same by sorting. Only the top three bits of a length count, and under a causal mask none of the long ones."""
    found = list[tuple[int, int, tuple[int, ...]]]()
    right, longest = p.len_kv if p.right is None else p.right, max(len(keys) for _, keys in p.spans)
    most = longest if p.right is None else longest // 4
    for (rows, keys), room in zip(p.spans, places(p, 128, "len_kv"), strict=True):
        for first in range(0, 128 * room, 128):
            length, tile = min(len(rows), len(keys) + right - first), (keys.start + first, rows.start, len(rows))
            short = max(0, length.bit_length() - 3)
            empty = first >= len(keys)
            alike = most if length >= most else length >> short << short
            found.append((1 if empty else -alike, len(found), () if empty else tile))
    return [tile for _, _, tile in sorted(found)]


@examples(8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_key_tile_is_taken_once_and_the_longest_first(data: st.DataObject) -> None:
    length, side = st.integers(0, 3) | st.integers(0, 400), st.none() | st.integers(0, 200)
    p = P.replace(
        head_dim=16, heads=1, kv_heads=1, causal=data.draw(st.booleans()),
        lengths=data.draw(st.lists(length | st.tuples(length, length), min_size=4, max_size=8)),
        window=data.draw(st.none() | st.tuples(st.none(), side)),
    )  # fmt: skip
    config = fl.count("flash3_backward", p, device=FEW).config
    assume(config is not None and config.ordered)
    assert taken(p) == longest_first(p)


@pytest.mark.alike("lengths1")
@pytest.mark.parametrize(
    "lengths",
    [
        [(3 + n % 7, 5 + 3 * n) for n in range(34)],  # more sequences than lanes
        [(1, 2900), (2, 1300), 0],  # more key tiles than the first launch has warps
        [128, 128, 256, 0, 384, 20, 21, 20],  # tiles that are alike, and empty places
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_orders_of_many(lengths: list[Any], causal: bool) -> None:
    p = P.replace(head_dim=16, heads=1, kv_heads=1, lengths=lengths, causal=causal)
    assert taken(p) == longest_first(p)


@pytest.mark.alike(1)
@pytest.mark.parametrize("head_dim", [64, 72])
def test_blocks_take_key_tiles_in_the_order(head_dim: int) -> None:
    """Persistent or not: numbers, bytes, findings."""
    p = P.replace(head_dim=head_dim, lengths=[3, 0, (201, 333), 1, 64, (0, 7), 17, (40, 0), (9, 150)], causal=True)
    arrays: dict[str, Any] = BACKWARD.draw(p)
    run = fl.emulate("flash3_backward", **arrays, **p.masks, device=FEW, time_limit=60)
    assert run.counts.config is not None and run.counts.config.ordered
    assert run.counts.launches[1].bytes("hbm.read", "offsets_kv") == 0 < run.counts.tensors["order"].nbytes
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
