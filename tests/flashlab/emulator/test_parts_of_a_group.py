"""flash3_backward where key tiles are few, so that a block has a part of a group's heads: numbers, bytes, findings, the same bits.

Faults seeded in it are in tests/mutants.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.backward import BACKWARD
from tests.mutants.test_backward import part_of_an_h200
from tests.simulator.test_backward import ratios

pytestmark = pytest.mark.compiler

P = fl.Problem(batch=1, heads=4, kv_heads=1, len_q=400, len_kv=150, head_dim=40, dtype="float16", causal=True)


def emulated(p: fl.Problem, arrays: dict[str, Any], sms: int = 132, **options: Any) -> Any:
    """A run without complaints, whose numbers keep to the rule."""
    run = fl.emulate("flash3_backward", **arrays, **p.masks, device=part_of_an_h200(sms), time_limit=60, **options)
    assert run.complaints() == []
    assert max(ratios(p, arrays, run.outputs).values()) <= 1
    return run


@pytest.mark.alike("40")
@pytest.mark.parametrize("head_dim", [40, 72])
def test_blocks_in_any_order_give_the_same_bits(head_dim: int) -> None:
    """Up to head dim 64, twelve parts of key tiles are drawn by ten blocks. For wider heads each has a block of its own."""
    p = P.replace(batch=2, len_q=300, len_kv=260, head_dim=head_dim)
    arrays: dict[str, Any] = BACKWARD.draw(p)
    runs = [emulated(p, arrays, 10, workers=workers) for workers in (1, 2)]
    assert [run.counts.config.parts for run in runs] == [2, 2]
    for name in ("dk", "dv"):
        assert len({run.outputs[name].tobytes() for run in runs}) == 1


@pytest.mark.long
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_parts_of_a_group(data: st.DataObject) -> None:
    side, length = st.none() | st.integers(0, 150), st.integers(0, 3) | st.integers(0, 400)
    kv_heads, group = data.draw(st.sampled_from([(1, 2), (1, 3), (2, 2), (2, 4), (1, 8)]))
    lengths = st.lists(length | st.tuples(length, length), min_size=1, max_size=4)
    sizes: dict[str, Any] = {"lengths": data.draw(lengths)}
    if data.draw(st.booleans()):
        sizes = {"batch": data.draw(st.integers(1, 2)), "len_q": data.draw(length), "len_kv": data.draw(length)}
        sizes["dropout"] = data.draw(st.sampled_from([None, 0.25]))
    p = fl.Problem(
        **{"batch": 1, **sizes}, heads=kv_heads * group, kv_heads=kv_heads, causal=data.draw(st.booleans()),
        head_dim=data.draw(st.sampled_from([19, 40, 64, 72, 128])), dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        window=data.draw(st.none() | st.tuples(side, side)), sinks=data.draw(st.booleans()), dlse=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([None, -0.2])),
    )  # fmt: skip
    emulated(p, BACKWARD.draw(p), data.draw(st.sampled_from([3, 7, 132])))
