"""flash3_paged on the emulator: each byte is the formula's, and the bits are flash3's on the gathered keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.run.emulated import emulate_problem
from flashlab.verify.pages import repaged
from simulator.operations.paged import PAGED
from tests.flashlab.emulator.test_paged import bits, nhd
from tests.simulator.test_paged import within
from tests.tiers import examples

pytestmark = pytest.mark.compiler
ROW = fl.CATALOGUE["flash3_paged"]
TILE = (64, 64)
MANY: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float16", "page_size": 5}


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    kv_heads, len_q = draw(st.integers(1, 2)), draw(st.sampled_from([1, 63, 70, 129]))
    keys = st.integers(0, 300) | st.sampled_from([0, 1, 63, 64, 65])
    lengths = draw(st.lists(keys, min_size=1, max_size=3))
    p = fl.Problem(
        batch=len(lengths),
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        lengths=[(len_q, n) for n in lengths],
        head_dim=64,
        dtype="float16",
        page_size=draw(st.integers(1, 256) | st.sampled_from([1, 16, 64, 256])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 150), st.none() | st.integers(0, 5))),
    )
    return p.replace(pages=p.pages + draw(st.integers(0, 3)), len_kv=p.len_kv + draw(st.integers(0, 200)))


def attended(p: fl.Problem, arrays: Any, tile: Any = TILE, **options: Any) -> dict[str, Any]:
    run = emulate_problem(ROW, p, arrays, lse=True, tile=tile, **options)
    assert run.complaints() == []
    return dict(run.outputs)


def gathered(p: fl.Problem, arrays: Any) -> dict[str, Any]:
    """What flash3 makes of the requests, one by one."""
    requests: Any = PAGED.gathered(p, arrays)
    each = [
        fl.emulate("flash3", **own, **plain.masks, lse=True, tile=TILE).checked().outputs for plain, own in requests
    ]
    return {name: np.concatenate([one[name] for one in each]) for name in ("out", "lse")}


@examples(8)
@given(problems(), st.booleans(), st.integers(0, 9))
def test_right_and_counted_and_the_bits_of_gathered_keys(p: fl.Problem, swapped: bool, seed: int) -> None:
    """What no request owns is NaN, or no page. The emulator sees what is read outside the pool."""
    arrays: Any = PAGED.draw(p, seed)
    found = attended(p, nhd(arrays) if swapped else arrays)
    assert within(found, p, arrays)
    assert bits(found) == bits(gathered(p, arrays))


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(problems(), st.data())
def test_neither_pages_nor_other_requests_change_a_bit(p: fl.Problem, data: st.DataObject) -> None:
    arrays: Any = PAGED.draw(p, 2)
    found = attended(p, arrays)
    order = data.draw(st.permutations(range(p.batch)))
    other, moved = repaged(p, arrays, order, data.draw(st.integers(1, 256)), 7)
    again = attended(other, moved, workers=data.draw(st.integers(1, 4)))
    assert bits(again) == bits({name: x[list(order)] for name, x in found.items()})


@pytest.mark.long
def test_more_requests_than_are_sorted_together() -> None:
    """More row tiles than blocks, too, and lengths that repeat."""
    lengths = [(3, int(n)) for n in np.random.default_rng(3).integers(0, 40, 70)]
    p = fl.Problem(batch=70, lengths=lengths, **MANY)
    arrays: Any = PAGED.draw(p, 1)
    c = fl.count("flash3_paged", p, tile=TILE)
    assert c.launches[0].blocks > c.device.sms
    assert within(attended(p, arrays), p, arrays)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [19, 40, 72, 128, 144, 200, 256])
@pytest.mark.parametrize("tile", [(64, 16), (64, 128), (128, 64)])
def test_head_dims_and_tiles(head_dim: int, tile: Any) -> None:
    lengths = [(140, 200), (140, 333)]
    p = fl.Problem(
        batch=2, heads=2, kv_heads=1, lengths=lengths, head_dim=head_dim, dtype="float16", page_size=3, window=(150, 9)
    )
    arrays: Any = PAGED.draw(p, 1)
    assert within(attended(p, arrays, tile), p, arrays)


@pytest.mark.long
@pytest.mark.parametrize("scale", [None, 0.0, -0.5])
def test_a_soft_cap_and_scales(scale: float | None) -> None:
    lengths = [(70, 200), (70, 33)]
    p = fl.Problem(batch=2, lengths=lengths, **MANY, causal=True, soft_cap=5.0, scale=scale)
    arrays: Any = PAGED.draw(p, 1)
    assert within(attended(p, arrays), p, arrays)


@pytest.mark.long
def test_the_call() -> None:
    p = fl.Problem(batch=2, lengths=[(70, 90), (70, 133)], **MANY, causal=True)
    arrays: Any = PAGED.draw(p, 1)
    call: dict[str, Any] = {name: arrays[name] for name in ("q", "k", "v", "block_table", "seq_lens")}
    masks: dict[str, Any] = {"causal": True, "backend": "emulator", "lse": True}
    out, lse = fl.attention(**call, **masks, algorithm="flash3_paged")
    assert within({"out": out, "lse": lse}, p, arrays)
    planned = fl.plan("flash3_paged", p, backend="emulator").run(**call)["out"]
    assert planned.tobytes() == out.tobytes()


@pytest.mark.long
def test_verified() -> None:
    report = fl.verify("flash3_paged", backend="emulator", dtypes=["float16"], tile=TILE)
    assert report.passed and all(
        row.status == "passed" or row.detail.startswith("drafts = True") for row in report.rows
    )
    assert {row.check for row in report.rows} == {"rule", "determinism", "pages", "requests"}
