"""cascade on the emulator: right, each byte the formula's, and the bits of a request alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.run.emulated import emulate_problem
from flashlab.verify.shared import some_of
from simulator.operations.cascade import CASCADE
from tests.simulator.test_cascade import problems
from tests.simulator.test_latent import within

pytestmark = pytest.mark.compiler


def attended(p: fl.Problem, arrays: Any, **options: Any) -> dict[str, Any]:
    run = emulate_problem(fl.CATALOGUE["cascade"], p, arrays, lse=True, **options)
    assert run.complaints() == []
    return dict(run.outputs)


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(problems(), st.sampled_from([None, (16, 32), (32, 64)]), st.integers(0, 9))
def test_right_and_counted_and_the_bits_of_requests_alone(p: fl.Problem, tile: Any, seed: int) -> None:
    arrays: Any = CASCADE.draw(p, seed)
    found = attended(p, arrays, tile=tile)
    assert within(CASCADE, found, p, arrays)
    last = p.batch - 1
    alone = attended(*some_of(p, arrays, [last]), tile=tile)
    for name, x in found.items():
        assert x[last:].tobytes() == alone[name].tobytes()


@pytest.mark.long
def test_taller_tiles_change_no_bit() -> None:
    """More requests make taller tiles by default, of up to 128 rows."""
    p = fl.Problem(
        batch=9, heads=10, kv_heads=1, len_q=2, len_kv=30, len_prefix=600, head_dim=16, dtype="float16", causal=True
    )
    arrays: Any = CASCADE.draw(p, 1)
    whole = attended(p, arrays)
    for order in ([0], [8], [3, 1]):
        other = attended(*some_of(p, arrays, order))
        assert other["out"].tobytes() == whole["out"][order].tobytes()


def test_the_call_takes_numpy_on_the_emulator() -> None:
    p = fl.Problem(
        batch=2, heads=2, kv_heads=1, len_q=2, len_kv=9, len_prefix=30, head_dim=16, dtype="float16", causal=True
    )
    arrays: Any = CASCADE.draw(p, 1)
    out, lse = fl.cascade(**arrays, causal=True, lse=True, backend="emulator", tile=(32, 32))
    assert within(CASCADE, {"out": out, "lse": lse}, p, arrays)


def test_the_call_takes_own_lengths_and_a_window() -> None:
    p = fl.Problem(
        batch=2,
        heads=2,
        kv_heads=1,
        lengths=[(2, 9), (2, 3)],
        len_prefix=30,
        head_dim=16,
        dtype="float16",
        window=(20, 0),
    )
    arrays: Any = CASCADE.draw(p, 1)
    out, lse = fl.cascade(**arrays, window=(20, 0), lse=True, backend="emulator", tile=(32, 32))
    assert within(CASCADE, {"out": out, "lse": lse}, p, arrays)
