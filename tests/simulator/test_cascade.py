"""A shared prefix: the judge against plain attention, the program against the judge, the formula, what sharing saves, what is
refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.verify.cases import describe
from flashlab.views import figures
from simulator.operations.cascade import CASCADE
from tests.simulator.test_latent import within
from tests.tiers import examples

TILES = st.sampled_from([None, (16, 32), (32, 64), (16, 16), (5, 7)])


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    """Some requests with few queries, and up to three chunks of keys on either side, or none. They may have own keys of different
    numbers, and windows."""
    keys = st.integers(0, 90) | st.sampled_from([0, 1, 511, 512, 513, 1030, 2049])
    side = st.none() | st.integers(0, 150) | st.sampled_from([600, 2100])
    kv_heads, batch, len_q = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 9]))
    own: dict[str, Any] = {"len_q": len_q, "len_kv": draw(keys)}
    if draw(st.booleans()):
        each = [draw(keys) for _ in range(batch)]
        own = {"lengths": [(len_q, n) for n in each], "len_kv": max(each) + draw(st.sampled_from([0, 0, 1, 600]))}
    return fl.Problem(
        batch=batch, heads=kv_heads * draw(st.sampled_from([1, 2, 5])), kv_heads=kv_heads, **own, len_prefix=draw(keys),
        head_dim=draw(st.sampled_from([16, 19, 64])), dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()), window=draw(st.none() | st.tuples(side, side)),
        scale=draw(st.sampled_from([None, 0.05, -0.3])), sinks=draw(st.booleans()),
    )  # fmt: skip


def run_of(p: fl.Problem, arrays: Any, **options: Any) -> fl.Run:
    masks: dict[str, Any] = {"causal": p.causal, "window": p.window, "scale": p.scale}
    return fl.simulate("cascade", **arrays, **masks, lse=True, device="h200", **options)


@settings(max_examples=6, deadline=None)
@given(problems(), TILES)
def test_program_judge_and_formula_agree(p: fl.Problem, tile: Any) -> None:
    arrays: Any = CASCADE.draw(p, 1)
    run = run_of(p, arrays, tile=tile)
    assert within(CASCADE, run.outputs, p, arrays)
    assert run.counts == fl.count("cascade", p, tile=tile, device="h200", lse=True)
    formula: Any = fl.CATALOGUE["cascade"].formula
    fl.check_formula("cascade", formula, p, tile=tile, device="h200")


@examples(12)
@given(problems())
def test_the_judge_is_plain_attention_over_both_sides(p: fl.Problem) -> None:
    """Request by request, over keys one behind the other, where queries aren't more than own keys."""
    lengths = None if p.lengths is None else [(p.len_q, max(n, p.len_q)) for n in p.seq_lens]
    p = p.replace(sinks=False, dtype="float32", len_kv=max(p.len_kv, p.len_q), len_q=p.len_q, lengths=lengths)
    arrays: Any = CASCADE.draw(p, 1)
    truth = CASCADE.judge(p, arrays)
    for b, n in enumerate(p.seq_lens):
        k, v = (np.concatenate([arrays[f"{name}_prefix"], arrays[name][b : b + 1, :, :n]], 2) for name in "kv")
        plain = fl.naive_loop(arrays["q"][b : b + 1], k, v, causal=p.causal, window=p.window, scale=p.scale)
        assert np.abs(plain.out - truth["out"][b]).max(initial=0) < 1e-12
        assert np.abs(plain.lse - truth["lse"][b]).max(initial=0) < 1e-9


def test_both_sides_merge_as_fl_merge_merges() -> None:
    p = fl.Problem(batch=3, heads=4, kv_heads=2, len_q=2, len_kv=5, len_prefix=40, head_dim=16, dtype="float32")
    arrays: Any = CASCADE.draw(p, 1)
    sides = [fl.naive(arrays["q"], *[np.repeat(arrays[f"{name}_prefix"], 3, 0) for name in "kv"]),
             fl.naive(arrays["q"], arrays["k"], arrays["v"])]  # fmt: skip
    merged = fl.merge([side.out for side in sides], [side.lse for side in sides])
    truth = CASCADE.judge(p, arrays)
    for found, name in zip(merged, ("out", "lse"), strict=True):
        assert np.abs(found - truth[name]).max() < 1e-12


SERVED = fl.Problem(
    batch=64, heads=32, kv_heads=8, len_q=1, len_kv=256, len_prefix=32_768, head_dim=128, dtype="bfloat16"
)


def test_the_prefix_is_read_once_for_128_rows() -> None:
    """32 requests of four heads a group are 128 rows."""
    prefix = 8 * 32_768 * 128 * 2
    for batch, tiles in ((1, 1), (32, 1), (33, 2), (64, 2)):
        c = fl.count("cascade", SERVED.replace(batch=batch), device="h200")
        assert c.by_tensor["k_prefix"].hbm_read == c.by_tensor["v_prefix"].hbm_read == tiles * prefix
        assert c.by_tensor["k"].hbm_read == batch * 8 * 256 * 128 * 2
    apart = fl.count("flash_decoding", SERVED.replace(len_prefix=None, len_kv=32_768 + 256), device="h200")
    assert apart.by_tensor["k"].hbm_read == 64 * (prefix + 8 * 256 * 128 * 2)


def test_a_window_reads_no_more_of_the_prefix_than_it_reaches() -> None:
    """Of requests of different lengths a tile begins with the first key that any of them sees, which is that of the shortest."""
    p = SERVED.replace(batch=32, window=(4095, 0))
    row, key = 128 * 2, 32_768 + 256 - 4096
    assert key % 64 == 0
    count = fl.count("cascade", p, device="h200")
    assert count.by_tensor["k_prefix"].hbm_read == 8 * (32_768 - key) * row
    assert (
        count.by_tensor["partial"].hbm_write == 32 * 32 * (2 + 1) * 128 * 4
    )  # of two chunks of the prefix, and of own keys
    lengths = [(1, 64 * n) for n in range(1, 33)]
    mixed = fl.count("cascade", p.replace(len_kv=None, lengths=lengths), device="h200").by_tensor
    assert mixed["k_prefix"].hbm_read == 8 * (4096 - 64) * row
    assert mixed["k"].hbm_read == 8 * sum(n for _, n in lengths) * row
    short = fl.count("cascade", p.replace(window=(99, 0)), device="h200").by_tensor
    assert short["k_prefix"].hbm_read == short["v_prefix"].hbm_read == 0
    assert short["k"].hbm_read == 32 * 8 * 128 * row  # the window, in whole tiles


def test_rows_that_are_no_requests_are_not_read() -> None:
    p = fl.Problem(
        batch=3, heads=2, lengths=[(1, 5), (1, 0), (1, 70)], len_kv=600, len_prefix=20, head_dim=16, dtype="float16"
    )
    arrays: Any = CASCADE.draw(p, 1)
    assert np.isnan(arrays["k"][0, :, 5:]).all() and np.isnan(arrays["v"][1]).all()
    run = run_of(p, arrays)
    other = {**arrays, **{name: np.nan_to_num(arrays[name], nan=7) for name in "kv"}}
    assert run.out.tobytes() == run_of(p, other).out.tobytes()
    assert run.counts.by_tensor["k"].hbm_read == 2 * 75 * 32
    assert run.counts.problem.seq_lens == (5, 0, 70)


def test_lengths_may_be_said_twice_but_not_differently() -> None:
    p = fl.Problem(batch=2, heads=2, lengths=[(1, 5), (1, 9)], len_prefix=20, head_dim=16, dtype="float16")
    arrays: Any = CASCADE.draw(p, 1)
    rest = {name: x for name, x in arrays.items() if name != "seq_lens"}
    run = fl.simulate("cascade", **rest, lengths=p.lengths)
    assert run.out.tobytes() == fl.simulate("cascade", **arrays).out.tobytes()
    with pytest.raises(fl.UsageError, match="seq_lens = .*, as lengths say: it may be left out"):
        fl.simulate("cascade", **arrays, lengths=[(1, 5), (1, 8)])
    with pytest.raises(fl.UsageError, match="lengths"):
        fl.simulate("cascade", **arrays, lengths=[-1, 10])


def test_own_lengths_that_are_alike_are_as_without_them() -> None:
    p = fl.Problem(batch=3, heads=2, len_q=2, len_kv=70, len_prefix=40, head_dim=16, dtype="float16", causal=True)
    arrays: Any = CASCADE.draw(p, 1)
    given = {**arrays, "seq_lens": np.full(3, 70, np.int32)}
    assert run_of(p, arrays).out.tobytes() == run_of(p, given).out.tobytes()


def test_columns_of_a_tile_follow_the_head_dim_alone() -> None:
    for device in ("a100", "l4", "h200"):
        for head_dim, cols in ((64, 64), (128, 64), (256, 32)):
            tiles = {
                fl.count("cascade", SERVED.replace(batch=n, head_dim=head_dim), device=device).tile for n in (1, 9, 64)
            }
            assert {tile.cols for tile in tiles} == {cols}


SMALL = fl.Problem(batch=2, heads=2, len_q=1, len_kv=9, len_prefix=20, head_dim=16, dtype="float16")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"k_prefix": np.zeros((2, 20, 16), np.float16)}, "k_prefix.shape = (2, 20, 16): expected (1, kv_heads, len_prefix,"),
        ({"k_prefix": np.zeros((2, 2, 20, 16), np.float16)}, "k_prefix.shape = (2, 2, 20, 16): expected (1, 2, 20, 16)"),
        ({"v_prefix": np.zeros((1, 2, 21, 16), np.float16)}, "v_prefix.shape = (1, 2, 21, 16): expected (1, 2, 20, 16)"),
        ({"v": np.zeros((1, 2, 9, 16), np.float16)}, "v.shape = (1, 2, 9, 16): expected (2, 2, 9, 16)"),
        ({"k": np.zeros((2, 2, 9, 16), np.float32)}, "k.dtype = 'float32': expected float16, as q has"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks.shape = (3,): expected (2,)"),
        ({"seq_lens": np.zeros(3, np.int32)}, "seq_lens.shape = (3,): expected (2,), its axes are batch"),
        ({"seq_lens": np.zeros(2, np.int64)}, "seq_lens.dtype = 'int64': expected int32"),
        ({"seq_lens": np.int32([9, 10])}, "seq_lens[1] = 10: expected an integer from 0 to 9: k has room for so many keys"),
        ({"seq_lens": np.int32([-1, 9])}, "seq_lens[0] = -1: expected an integer from 0 to 9"),
        ({"sinks": np.float32([0, np.nan])}, "sinks[1] = nan: expected finite numbers up to 1e+30"),
    ],
)  # fmt: skip
def test_wrong_arrays_get_one_line(changes: dict[str, Any], line: str) -> None:
    arrays: Any = {**CASCADE.draw(SMALL), **changes}
    with pytest.raises(fl.UsageError, match=re.escape(line)):
        fl.simulate("cascade", **arrays)


@pytest.mark.parametrize(
    ("algorithm", "problem", "line"),
    [
        ("cascade", SMALL.replace(len_prefix=None), "len_prefix = None: expected keys that all requests share, for cascade"),
        ("flash2", SMALL, "len_prefix = 20: expected None, or cascade for a shared prefix, for flash2"),
        ("cascade", SMALL.replace(alibi=True), "alibi = True: expected nothing: cascade knows causal, window, scale, soft_cap"),
    ],
)  # fmt: skip
def test_wrong_problems_get_one_line(algorithm: str, problem: fl.Problem, line: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(line)):
        fl.count(algorithm, problem)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"page_size": 4}, "len_prefix = 20: expected None with a page_size"),
        ({"lengths": [(1, 9)]}, "lengths = 1 requests: expected 2, the batch"),
        ({"lengths": [(1, 9), (2, 9)]}, "lengths[1] = (2, 9): expected len_q = 1 queries, as all requests have, and up to"),
        ({"lengths": [(1, 9), (1, 10)]}, "lengths[1] = (1, 10): expected len_q = 1 queries, as all requests have, and up to"),
    ],
)  # fmt: skip
def test_wrong_sizes_of_requests_get_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(line)):
        SMALL.replace(**changes)


def test_kernels_say_what_they_take() -> None:
    row = fl.CATALOGUE["cascade"]
    assert "the kernels need 8.0 or higher" in str(row.refuses(SMALL, fl.DEVICES["t4"]))
    assert row.refuses(SMALL, fl.DEVICES["h200"], fl.Tile(48, 32)) == (
        "tile = '48x32': expected 16, 32, 64 or 128 rows, and 16, 32 or 64 columns, up to 64 with this head dim"
    )


def test_a_problem_in_words_has_its_shared_keys() -> None:
    p = fl.Problem(batch=2, heads=4, len_q=1, len_kv=7, head_dim=64, dtype="float16", len_prefix=9000)
    assert figures.problem(p) == "2 × 4 heads × 1 × 64, float16, 7 keys, 9,000 shared keys"
    assert describe(p) == "2x4x1x7x64 float16 prefix 9000"
