"""The kernels of the backward pass, executed on the CPU: numbers by the rule, bytes by step and tensor, no misuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.measure.problems import matrix
from simulator.operations.backward import BACKWARD
from tests.flashlab.measure.test_emulated import check_matrix
from tests.simulator.test_backward import ratios
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

ALGORITHMS = fl.catalogue.with_kernels(BACKWARD)
RUNGS = fl.catalogue.ladder("flash3_backward", "flash2_backward")[1:-1]
IN_THEIR_DTYPES = [(name, dtype) for name in ALGORITHMS for dtype in fl.CATALOGUE[name].dtypes]
TILES = [(32, 16), (32, 64), (64, 64), (16, 48)]
"""One warp or a grid of up to eight, of which the last ones across have fewer columns at odd head dims."""


@st.composite
def problems(draw: st.DrawFn, dtype: str, dims: tuple[int, ...] = (40,)) -> fl.Problem:
    """Few keys and queries, but several tiles each way; every mask, GQA, odd head dims, no rows."""
    kv_heads = draw(st.sampled_from([1, 2]))
    side = st.none() | st.integers(0, 60)
    return fl.Problem(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        len_q=draw(st.integers(0, 140) | st.sampled_from([1, 96, 97, 128])),
        len_kv=draw(st.integers(0, 140) | st.sampled_from([1, 48, 64, 97])),
        head_dim=draw(st.sampled_from(dims)),
        dtype=dtype,
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(side, side)),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
    )


def fitting(algorithm: str, p: fl.Problem, tile: tuple[int, int], device: str = "h100") -> tuple[int, int] | None:
    """The tile, or None where the kernel has only one."""
    return tile if fl.CATALOGUE[algorithm].refuses(p, fl.Device.named(device), fl.Tile(*tile)) is None else None


def checked(algorithm: str, p: fl.Problem, seed: int = 0, **options: Any) -> fl.Emulation:
    arrays: dict[str, Any] = BACKWARD.draw(p, seed)
    run = fl.emulate(algorithm, **arrays, **p.masks, **options)
    assert run.complaints() == []
    assert max(ratios(p, arrays, run.outputs).values()) <= 1
    return run


@pytest.mark.alike("flash2_backward", "flash3_backward", "flash3_backward_2")
@pytest.mark.parametrize("pair", one_of_each(IN_THEIR_DTYPES, lambda pair: pair[0], "-".join))
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_right_and_counted(pair: tuple[str, str], data: st.DataObject) -> None:
    algorithm, dtype = pair
    p = data.draw(problems(dtype))
    checked(algorithm, p, data.draw(st.integers(0, 3)), tile=fitting(algorithm, p, (32, 16)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("algorithm", "dtype"), IN_THEIR_DTYPES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_right_and_counted_far_and_wide(algorithm: str, dtype: str, data: st.DataObject) -> None:
    p = data.draw(problems(dtype, (16, 33, 40, 48, 80)))
    # a T4 has no bfloat16, and little SRAM
    devices = ["h100", "a100"] if dtype == "bfloat16" or p.head_dim > 40 else ["h100", "t4"]
    device = data.draw(
        st.sampled_from([d for d in devices if fl.CATALOGUE[algorithm].refuses(p, fl.Device.named(d)) is None])
    )
    tile = data.draw(st.sampled_from([t for t in TILES if device != "t4" or dtype != "float32" or max(t) < 64]))
    checked(algorithm, p, data.draw(st.integers(0, 3)), tile=fitting(algorithm, p, tile, device), device=device)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "dtype", "head_dim"),
    [
        (*each, d)
        for each in IN_THEIR_DTYPES
        for d in (64, 96, 128, 160, 192, 256)
        if d in fl.CATALOGUE[each[0]].support.head_dims
    ],
)
def test_at_the_default_tile(algorithm: str, dtype: str, head_dim: int) -> None:
    p = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=150, len_kv=170, head_dim=head_dim, dtype=dtype, causal=True)
    checked(algorithm, p)


@pytest.mark.alike("flash1_backward", "flash2_backward_deterministic")
@pytest.mark.parametrize("algorithm", one_of_each(ALGORITHMS, lambda name: "a rung" if name in RUNGS else name))
def test_nothing_bypasses_the_primitives(algorithm: str) -> None:
    p = fl.Problem(batch=1, heads=2, len_q=50, len_kv=70, head_dim=40, dtype="float16", causal=True)
    run = checked(algorithm, p, tile=fitting(algorithm, p, (32, 16)), watch=True)
    assert [launch.plain for launch in run.launches] == [0] * len(run.launches)


@pytest.mark.alike("standard_backward", "flash3_backward_3", "flash3_backward_wide", "flash3_backward_deterministic")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 70), (40, 0), (1, 33), (31, 17)])
def test_nothing_or_little_to_do(algorithm: str, len_q: int, len_kv: int) -> None:
    p = fl.Problem(batch=1, heads=2, len_q=len_q, len_kv=len_kv, head_dim=40, dtype="float16")
    checked(algorithm, p, tile=fitting(algorithm, p, (32, 16)))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_of_the_counter_matrix(algorithm: str) -> None:
    ragged = [c for c in matrix([algorithm]) if "float16 ragged" in c.name]
    check_matrix(ragged)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_counter_matrix(algorithm: str) -> None:
    check_matrix(matrix([algorithm]))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_logits_of_ten_thousand(algorithm: str) -> None:
    """LSEs of ±1e4: exponentials of hidden keys and of keys beyond the end may not become infinite times 0."""
    p = fl.Problem(batch=1, heads=1, len_q=37, len_kv=41, head_dim=16, dtype="float16", causal=True)
    arrays: dict[str, Any] = fl.catalogue.get("flash2").operation.draw(
        p, 0, "lone"
    )  # every logit about -1e6 times scale
    drawn = BACKWARD.draw(p, 0)
    forward = fl.naive(**arrays, causal=True)
    given: dict[str, Any] = {
        **drawn,
        **arrays,
        "out": forward.out.astype(np.float16),
        "lse": forward.lse.astype(np.float32),
    }
    assert np.isfinite(given["lse"]).all() and given["lse"].min() < -1e3
    run = fl.emulate(algorithm, **given, causal=True, tile=fitting(algorithm, p, (32, 16)))
    assert run.complaints() == []
    assert max(ratios(p, given, run.outputs).values()) <= 1


@pytest.mark.long
def test_reductions_fill_whole_sectors() -> None:
    """From sm_90 on a lane adds four floats by one instruction, and two lanes a sector of 32 bytes; before, one float each."""
    p = fl.Problem(batch=1, heads=1, len_q=32, head_dim=32, dtype="float16")
    for device, instructions in (("h100", 8), ("a100", 32)):
        run = checked("flash2_backward", p, tile=(32, 32), device=device)
        (row,) = (row for launch in run.launches for row in launch.moved if row.op == "red")
        assert (row.bytes, row.instructions, row.sectors) == (32 * 32 * 4, instructions, instructions * 16)
