"""The rungs below flash_decoding and paged on the emulator: what they read, whose bits they have, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.run.emulated import emulate_problem
from simulator.operations.attention import ATTENTION
from simulator.operations.paged import PAGED
from simulator.programs.flash_decoding_2 import chunks

RUNGS = ("flash_decoding_1", "flash_decoding_2", "paged_1")
TOKEN = fl.Problem(batch=1, heads=32, kv_heads=8, len_q=1, len_kv=8192, head_dim=128, dtype="bfloat16")
SMALL = fl.Problem(batch=3, heads=4, kv_heads=2, len_q=1, len_kv=300, head_dim=16, dtype="float16")


def attended(name: str, p: fl.Problem, arrays: Any, **options: Any) -> dict[str, Any]:
    run = emulate_problem(fl.CATALOGUE[name], p, arrays, lse=True, **options)
    assert run.complaints() == []
    return dict(run.outputs)


def bits(outputs: dict[str, Any]) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in outputs.items()}


def right(operation: Any, p: fl.Problem, arrays: Any, found: dict[str, Any]) -> None:
    truth = operation.judge(p, arrays)
    bounds = operation.bounds(p, arrays, truth)
    empty: Any = np.isneginf(truth["lse"])
    assert (np.isneginf(found["lse"]) == empty).all() and (found["out"][empty] == 0).all()
    assert (np.linalg.norm(found["out"].astype(np.float64) - truth["out"], axis=-1) <= bounds["out"]).all()
    assert (np.abs(found["lse"][~empty] - truth["lse"][~empty]) <= bounds["lse"][~empty]).all()


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    """One query, and groups of up to two tiles of rows. Keys fill no chunk, one, some, or more than there are chunks for."""
    kv_heads = draw(st.integers(1, 2))
    return fl.Problem(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.sampled_from([1, 3, 4, 16, 17])),
        kv_heads=kv_heads,
        len_q=1,
        len_kv=draw(st.integers(0, 600) | st.sampled_from([0, 1, 31, 32, 33, 127, 128, 129, 8192, 8193])),
        head_dim=draw(st.sampled_from([16, 40, 136])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, -0.4, 0.0])),
    )


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("name", RUNGS[:2])
@settings(max_examples=12, deadline=None)
@given(p=problems(), kind=st.sampled_from(["normal", "large", "rising"]))
def test_right_and_counted(name: str, p: fl.Problem, kind: str) -> None:
    arrays: Any = ATTENTION.draw(p, 1, kind)
    right(ATTENTION, p, arrays, attended(name, p, arrays))


@pytest.mark.compiler
def test_a_sequence_has_its_bits_in_any_batch() -> None:
    arrays: Any = ATTENTION.draw(SMALL, 2)
    found = attended("flash_decoding_2", SMALL, arrays)
    for chosen in ([1], [2, 0]):
        some = {name: x[chosen] for name, x in arrays.items()}
        again = attended("flash_decoding_2", SMALL.replace(batch=len(chosen)), some, workers=1)
        assert bits(again) == bits({name: x[chosen] for name, x in found.items()})


@pytest.mark.compiler
@pytest.mark.parametrize("size", [7, pytest.param(1, marks=pytest.mark.long), pytest.param(64, marks=pytest.mark.long)])
def test_pages_have_the_bits_of_gathered_keys(size: int) -> None:
    """What no request owns is NaN, or no page."""
    p = fl.Problem(
        batch=3, heads=4, kv_heads=2, lengths=[(1, 150), (1, 0), (1, 33)], head_dim=16, dtype="float16", page_size=size
    )
    arrays: Any = PAGED.draw(p, 1)
    found = attended("paged_1", p, arrays)
    right(PAGED, p, arrays, found)
    for b, (plain, own) in enumerate(PAGED.gathered(p, arrays)):
        alone = attended("flash_decoding_1", plain, own)
        assert bits(alone) == bits({name: x[b : b + 1] for name, x in found.items()})


def test_k_and_v_are_read_once_per_16_heads() -> None:
    kv = 2 * 8 * 8192 * 128 * 2
    for name in RUNGS[:2]:
        for group, times in ((1, 1), (16, 1), (17, 2)):
            c = fl.count(name, TOKEN.replace(heads=8 * group), device="h100").by_tensor
            assert c["k"].hbm_read + c["v"].hbm_read == times * kv
    assert fl.count("flash_decoding_1", TOKEN).launches[0].blocks == 8


def test_chunks_share_all_keys() -> None:
    """At most 64 for a warp of the merge, and one even without keys."""
    tile = fl.Tile(16, 32)
    assert [chunks(TOKEN.replace(len_kv=n), tile) for n in (0, 1, 128, 129, 8192, 8193, 10**6)] == [
        1,
        1,
        1,
        2,
        64,
        52,
        64,
    ]
    c = fl.count("flash_decoding_2", TOKEN, device="h100")
    assert [x.blocks for x in c.launches] == [8 * 64, 32]
    partial = c.by_tensor["partial"]
    assert partial.hbm_read == partial.hbm_write == 32 * 64 * 128 * 4


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"len_q": 2}, "len_q = 2: expected at most 1 for {}: {} takes more"),
        ({"window": (99, 0)}, "window = (99, 0): expected nothing: {} knows causal, scale"),
        ({"soft_cap": 5.0}, "soft_cap = 5.0: expected nothing: {} knows causal, scale"),
        ({"sinks": True}, "sinks = True: expected nothing: {} knows causal, scale"),
        ({"dtype": "float32"}, "dtype = 'float32': expected float16 or bfloat16 for {}: use {}"),
        ({"head_dim": 300}, "head_dim = 300: expected at most 256 for a kernel"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_nothing_else_is_taken(name: str, asked: dict[str, Any], said: str) -> None:
    row = fl.CATALOGUE[name]
    line = row.refuses(row.operation.fitted(TOKEN.replace(**asked)), fl.DEVICES["h100"])
    wanted = said.format(name, row.support.instead)
    assert line is not None and line.startswith(wanted) and "\n" not in line
    assert row.rank == 0, "auto takes no rung"
    assert row.refuses(row.operation.fitted(TOKEN.replace(causal=True)), fl.DEVICES["a100-80"]) is None
