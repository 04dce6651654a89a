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

TILES = st.sampled_from([None, (16, 32), (32, 64), (16, 16), (5, 7)])


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    """Some requests with few queries, and up to three chunks of keys on either side, or none."""
    keys = st.integers(0, 90) | st.sampled_from([0, 1, 511, 512, 513, 1030, 2049])
    kv_heads = draw(st.integers(1, 2))
    return fl.Problem(
        batch=draw(st.integers(1, 5)), heads=kv_heads * draw(st.sampled_from([1, 2, 5])), kv_heads=kv_heads,
        len_q=draw(st.sampled_from([1, 1, 2, 9])), len_kv=draw(keys), len_prefix=draw(keys),
        head_dim=draw(st.sampled_from([16, 19, 64])), dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()), scale=draw(st.sampled_from([None, 0.05, -0.3])), sinks=draw(st.booleans()),
    )  # fmt: skip


def run_of(p: fl.Problem, arrays: Any, **options: Any) -> fl.Run:
    return fl.simulate("cascade", **arrays, causal=p.causal, scale=p.scale, lse=True, device="h200", **options)


@settings(max_examples=6, deadline=None)
@given(problems(), TILES)
def test_program_judge_and_formula_agree(p: fl.Problem, tile: Any) -> None:
    arrays: Any = CASCADE.draw(p, 1)
    run = run_of(p, arrays, tile=tile)
    assert within(CASCADE, run.outputs, p, arrays)
    assert run.counts == fl.count("cascade", p, tile=tile, device="h200", lse=True)
    formula: Any = fl.CATALOGUE["cascade"].formula
    fl.check_formula("cascade", formula, p, tile=tile, device="h200")


@settings(max_examples=12, deadline=None)
@given(problems())
def test_the_judge_is_plain_attention_over_both_sides(p: fl.Problem) -> None:
    """Request by request, over keys one behind the other, where queries aren't more than own keys."""
    p = p.replace(sinks=False, dtype="float32", len_kv=max(p.len_kv, p.len_q))
    arrays: Any = CASCADE.draw(p, 1)
    truth = CASCADE.judge(p, arrays)
    for b in range(p.batch):
        k, v = (np.concatenate([arrays[f"{name}_prefix"], arrays[name][b : b + 1]], 2) for name in "kv")
        plain = fl.naive(arrays["q"][b : b + 1], k, v, causal=p.causal, scale=p.scale)
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
        ("cascade", SMALL.replace(window=(3, 0)), "window = (3, 0): expected nothing: cascade knows causal, scale, soft_cap"),
        ("cascade", SMALL.replace(alibi=True), "alibi = True: expected nothing: cascade knows causal, scale, soft_cap, sinks"),
    ],
)  # fmt: skip
def test_wrong_problems_get_one_line(algorithm: str, problem: fl.Problem, line: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(line)):
        fl.count(algorithm, problem)


def test_a_prefix_has_no_pages_and_no_lengths() -> None:
    for other in ({"page_size": 4}, {"lengths": [(1, 9), (1, 9)], "batch": 1}):
        changes: dict[str, Any] = {"len_q": None, "len_kv": None, **other}
        with pytest.raises(
            fl.UsageError, match=re.escape("len_prefix = 20: expected None with lengths or a page_size")
        ):
            SMALL.replace(**({"len_q": 1} | changes if "page_size" in other else changes))


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
