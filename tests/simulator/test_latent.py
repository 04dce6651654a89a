"""Latent attention: the judge against the heads before absorption, the program against the judge, the formula, what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.latent import LATENT, PAGED_LATENT
from simulator.operations.operation import Operation

TILES = st.sampled_from([None, (16, 32), (16, 64), (32, 32), (5, 7)])


@st.composite
def problems(draw: st.DrawFn, *, in_pages: bool) -> fl.Problem:
    """Some heads and queries, and up to four chunks of 512 keys; in pages, requests of any lengths."""
    n, len_q = st.integers(0, 200) | st.integers(500, 1700), draw(st.sampled_from([1, 1, 2, 9]))
    masks: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(st.integers(0, 700), st.none() | st.integers(0, 5))),
        "scale": draw(st.sampled_from([None, 0.05, -0.03, 1.0])),
        "chunk": draw(st.sampled_from([None, None, 64, 320, 1024, 4096])),
    }
    common: dict[str, Any] = {
        "heads": draw(st.integers(1, 40)),
        "dtype": draw(st.sampled_from(["float16", "bfloat16"])),
    }
    if not in_pages and draw(st.booleans()):
        keys = draw(st.lists(n, min_size=1, max_size=3))
        return fl.latent_problem(lengths=[(len_q, each) for each in keys], **common, **masks)
    if not in_pages:
        return fl.latent_problem(batch=draw(st.integers(1, 2)), len_q=len_q, len_kv=draw(n), **common, **masks)
    lengths = [(len_q, keys) for keys in draw(st.lists(n, min_size=1, max_size=3))]
    size = draw(st.sampled_from([1, 3, 16, 64, 256]))
    p = fl.latent_problem(batch=len(lengths), lengths=lengths, page_size=size, **common, **masks)
    return p.replace(pages=p.pages + draw(st.integers(0, 3)), len_kv=p.len_kv + draw(st.integers(0, 200)))


def within(operation: Operation, found: Any, problem: fl.Problem, arrays: Any) -> bool:
    """Does every row keep the rule?"""
    truth = operation.judge(problem, arrays)
    bounds = operation.bounds(problem, arrays, truth)
    out: Any = np.linalg.norm(found["out"].astype(np.float64) - truth["out"], axis=-1) <= bounds["out"]
    with np.errstate(invalid="ignore"):
        off: Any = np.abs(found["lse"] - truth["lse"])
        lse: Any = (found["lse"] == truth["lse"]) | (off <= bounds["lse"])
    return bool(out.all() and lse.all())


def test_the_absorbed_form_is_the_heads_own_attention() -> None:
    """Keys A c and values B c of 128 numbers a head, RoPE of 64 beside: multiplied out, and absorbed."""
    rng, heads, n = np.random.default_rng(0), 3, 40
    c, rope = rng.normal(size=(n, 512)), rng.normal(size=(n, 64))
    a, b = rng.normal(size=(2, heads, 128, 512)) / 20
    q, q_rope = rng.normal(size=(heads, 128)), rng.normal(size=(heads, 64))
    keys = np.concatenate([c @ a.swapaxes(1, 2), np.broadcast_to(rope, (heads, n, 64))], -1)
    plain = fl.naive(
        np.concatenate([q, q_rope], -1)[None, :, None].astype(np.float32), keys[None].astype(np.float32),
        (c @ b.swapaxes(1, 2))[None].astype(np.float32),
    )  # fmt: skip
    absorbed = np.concatenate([np.einsum("hd,hdc->hc", q, a), q_rope], -1)[None, :, None]
    p = fl.latent_problem(heads=heads, len_kv=n, dtype="float16")
    arrays: Any = {"q": absorbed, "latent": np.concatenate([c, rope], -1)[None, None]}
    found = LATENT.judge(p.replace(dtype="float32"), {name: x.astype(np.float32) for name, x in arrays.items()})
    out = np.einsum("hqc,hdc->hqd", found["out"][0], b)
    assert np.abs(out - plain.out[0]).max() < 1e-4
    assert np.abs(found["lse"] - plain.lse).max() < 1e-4


@pytest.mark.parametrize(
    "name",
    ["mla", "mla_hopper", *(pytest.param(name, marks=pytest.mark.long) for name in ("mla_paged", "mla_hopper_paged"))],
)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_program_judge_and_formula_agree(name: str, data: st.DataObject) -> None:
    row: Any = fl.CATALOGUE[name]
    p, tile = data.draw(problems(in_pages=row.operation.in_pages)), data.draw(TILES)
    arrays = row.operation.draw(p, 1)
    masks: Any = {"causal": p.causal, "window": p.window, "scale": p.scale}
    masks |= {} if p.page_size else {"lengths": p.lengths}
    run = fl.simulate(name, **arrays, **masks, tile=tile, device="h200", lse=True)
    assert within(row.operation, run.outputs, p, arrays)
    assert run.counts == fl.count(name, run.counts.problem, tile=tile, device="h200", lse=True)
    fl.check_formula(name, row.formula, p, tile=tile, device="h200")


def test_pages_change_no_bit() -> None:
    p = fl.latent_problem(batch=2, heads=3, lengths=[(2, 600), (2, 40)], page_size=7, causal=True, dtype="float16")
    arrays: Any = PAGED_LATENT.draw(p, 1)
    run = fl.simulate("mla_paged", **arrays, causal=True, lse=True)
    gathered: Any = PAGED_LATENT.gathered(p, arrays)
    for b, (_, own) in enumerate(gathered):
        alone = fl.simulate("mla", **own, causal=True, lse=True)
        assert alone.out.tobytes() == run.out[b].tobytes()


@pytest.mark.parametrize("name", ["mla_paged", "mla_hopper_paged"])
def test_the_first_request_may_be_short(name: str) -> None:
    """It has no partial results then, and others have."""
    p = fl.latent_problem(batch=2, heads=2, lengths=[(1, 64), (1, 1030)], page_size=64, dtype="float16")
    run = fl.simulate(name, **PAGED_LATENT.draw(p, 1), device="h200", lse=True)
    assert run.counts == fl.count(name, run.counts.problem, device="h200", lse=True)


@pytest.mark.parametrize("name", ["mla", "mla_hopper"])
def test_partial_results_go_with_the_chunks(name: str) -> None:
    """Half as many for chunks twice as long, and none where a chunk has all keys. The cache is read once in any."""
    p = fl.latent_problem(batch=3, heads=16, len_kv=4096)
    found = {
        chunk: fl.count(name, p.replace(chunk=chunk), device="h200").by_tensor for chunk in (512, 1024, 2048, 4096)
    }
    each = 4 * 3 * 16 * 512
    assert {chunk: t["partial"].hbm_write if "partial" in t else 0 for chunk, t in found.items()} == {
        512: 8 * each, 1024: 4 * each, 2048: 2 * each, 4096: 0,
    }  # fmt: skip
    assert {t["latent"].hbm_read for t in found.values()} == {3 * 4096 * 1152}


@pytest.mark.parametrize("name", ["mla_paged", "mla_hopper_paged"])
def test_bits_depend_on_the_chunk_and_on_no_other_request(name: str) -> None:
    lengths = [(1, 700), (1, 64), (1, 400)]
    p = fl.latent_problem(batch=3, heads=2, lengths=lengths, page_size=16, dtype="float16")
    arrays: Any = PAGED_LATENT.draw(p, 1)
    outs = {chunk: fl.simulate(name, **arrays, device="h200", chunk=chunk).out for chunk in (None, 64, 256)}
    assert len({out[0].tobytes() for out in outs.values()}) == 3
    for chunk, out in outs.items():
        alone = {**arrays, **{x: arrays[x][:1] for x in ("q", "block_table", "seq_lens")}}
        assert fl.simulate(name, **alone, device="h200", chunk=chunk).out[0].tobytes() == out[0].tobytes()


def test_a_latent_row_is_read_once_for_64_heads() -> None:
    p = fl.latent_problem(heads=64, len_kv=4096)
    c = fl.count("mla", p, device="h200")
    assert c.by_tensor["latent"].hbm_read == 4096 * 1152
    assert c.flops.matmul == 2 * 64 * 4096 * (576 + 512)
    assert fl.count("mla", p.replace(heads=128), device="h200").by_tensor["latent"].hbm_read == 2 * 4096 * 1152
    # by 192 numbers of keys and 128 of values per head, as before absorption
    unfolded = fl.Problem(batch=1, heads=64, len_q=1, len_kv=4096, head_dim=192, head_dim_v=128, dtype="bfloat16")
    own = fl.count("flash2", unfolded, device="h200").by_tensor
    assert own["k"].hbm_read + own["v"].hbm_read == 64 * 4096 * 2 * (192 + 128)


def test_the_default_scale_is_the_heads_own() -> None:
    p = fl.latent_problem(heads=2, len_kv=9, dtype="float16")
    assert p.scale == pytest.approx(192**-0.5)
    arrays: Any = LATENT.draw(p)
    assert LATENT.problem(arrays) == p
    assert LATENT.problem(arrays, scale=0.1).scale == 0.1


SMALL = fl.latent_problem(heads=2, len_kv=9, dtype="float16")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"q": np.zeros((1, 2, 1, 512), np.float16)}, "q.shape = (1, 2, 1, 512): expected (batch, heads, len_q, 576)"),
        ({"latent": np.zeros((9, 576), np.float16)}, "latent.shape = (9, 576): expected (batch, 1, len_kv, 576)"),
        ({"latent": np.zeros((1, 2, 9, 576), np.float16)}, "latent.shape = (1, 2, 9, 576): expected (batch, 1, len_kv, 576)"),
        ({"latent": np.zeros((2, 1, 9, 576), np.float16)}, "latent.shape = (2, 1, 9, 576): expected batch 1, as q has"),
        ({"latent": np.zeros((1, 1, 9, 576), np.float32)}, "latent.dtype = 'float32': expected float16, as q has"),
    ],
)  # fmt: skip
def test_wrong_arrays_get_one_line(changes: dict[str, Any], line: str) -> None:
    arrays: Any = {**LATENT.draw(SMALL), **changes}
    with pytest.raises(fl.UsageError, match=re.escape(line)):
        fl.simulate("mla", **arrays)


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (SMALL.replace(head_dim=64), "head_dim = 64: expected 576 for latent attention: see fl.latent_problem"),
        (SMALL.replace(kv_heads=2), "kv_heads = 2: expected 1 for latent attention"),
        (SMALL.replace(scale=None), "scale = None: expected a number, 1/sqrt(192) for a head of 128 + 64"),
        (SMALL.replace(page_size=4), "page_size = 4: expected None, or paged for pages, for mla"),
        (
            SMALL.replace(alibi=True),
            "alibi = True: expected nothing: mla knows causal, window, scale, soft_cap, sinks, lengths, chunk",
        ),
    ],
)
def test_wrong_problems_get_one_line(problem: fl.Problem, line: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(line)):
        fl.count("mla", problem)


def test_kernels_say_what_they_take() -> None:
    row = fl.CATALOGUE["mla"]
    said = [
        row.refuses(SMALL, fl.DEVICES[device], fl.Tile.parse(tile))
        for device, tile in (("t4", "16x32"), ("h200", "48x32"))
    ]
    assert said[0] is not None
    assert "compute capability 7.5: the kernels need 8.0 or higher" in said[0]
    assert said[1] == (
        "tile = '48x32': expected 16, 32 or 64 rows and 32 or 64 columns: a block's warps hold an output of 512 columns"
    )
