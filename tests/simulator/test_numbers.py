"""Tile programs against naive attention in float64; the two judges against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.verify.general import judged
from simulator import Problem, Tile
from simulator.dtypes import round_to
from simulator.operations.attention import ATTENTION
from tests.simulator.problems import ALGORITHMS, FP8, ROOMY, kernel_tiles, problems, scores, taken_by, tiles
from tests.tiers import examples

U = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8, FP8: 2**-4}
ROUNDED_SUM = -np.log(1 - U[FP8])
"""How far an LSE may be off that is the sum of P in 8 bits."""


def largest_score(q: Any, k: Any) -> float:
    """A bound on max |q . k|, by Cauchy and Schwarz."""
    return float(np.prod([np.linalg.norm(x.astype(np.float64), axis=-1).max(initial=0.0) for x in (q, k)]))


@examples(80)
@given(problem=problems(longest=60, scores=scores), seed=st.integers(0, 5))
def test_the_two_oracles_agree(problem: Problem, seed: int) -> None:
    data = {**ATTENTION.draw(problem, seed), **problem.masks}
    dense, loop = fl.naive(**data), fl.naive_loop(**data)
    np.testing.assert_allclose(dense.out, loop.out, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(dense.lse, loop.lse, rtol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(40)
@given(problem=problems(longest=100, scores=scores), tile=tiles | kernel_tiles, seed=st.integers(0, 5))
def test_programs_equal_naive(algorithm: str, problem: Problem, tile: Tile, seed: int) -> None:
    """The row rule of `flashlab.verify`, written out once more: |e| <= u sqrt(|o|^2 + sum p^2 |v|^2)."""
    problem = taken_by(algorithm, problem)
    arrays = ATTENTION.draw(problem, seed)
    q, k, v = (arrays[name] for name in "qkv")
    run = fl.simulate(algorithm, **arrays, **problem.masks, tile=tile, device=ROOMY, lse=True)
    ref = fl.naive(**arrays, **problem.masks)
    assert run.out.dtype.name == problem.out_dtype
    assert run.lse is not None
    error = np.linalg.norm(run.out.astype(np.float64) - ref.out, axis=-1)
    size = np.abs(v.astype(np.float64)).max(initial=0.0) * np.sqrt(problem.head_dim_v)
    # in float32 an error of s is an error of p, relative to it: the score-error term of the rule
    u = U[problem.dtype] + (4e-7 * problem.scale * largest_score(q, k) if problem.dtype == "float32" else 0)
    assert (error <= u * (np.linalg.norm(ref.out, axis=-1) + size) + 1e-30).all()
    empty = np.isneginf(ref.lse)
    assert (np.isneginf(run.lse) == empty).all()
    assert (run.out[empty] == 0).all()
    # scores of 50 are off by a few units of float32, 4e-6 each; of 8 bits the sum is that of the rounded P
    atol = ROUNDED_SUM if problem.dtype == FP8 else 3e-5
    np.testing.assert_allclose(run.lse[~empty], ref.lse[~empty], atol=atol, rtol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        name
        for name in ALGORITHMS
        if FP8 not in fl.CATALOGUE[name].dtypes and fl.CATALOGUE[name].support.queries is None
    ],
)
def test_large_logits_and_hidden_nan(algorithm: str) -> None:
    """Logits of 1e4 don't overflow, one key with a large negative logit counts, and what the mask hides can't matter."""
    p = Problem(batch=1, heads=1, len_q=40, head_dim=16, dtype="float32", causal=True)
    q, k, v = fl.random_inputs(p)
    run = fl.simulate(algorithm, 1e2 * q, 1e2 * k, v, causal=True, tile=(16, 16))
    np.testing.assert_allclose(run.out, fl.naive(1e2 * q, 1e2 * k, v, causal=True).out, atol=2e-2)
    lonely = fl.simulate(algorithm, np.full_like(q, 1e3), np.full_like(k, -1e3), v, causal=True, tile=(16, 16))
    np.testing.assert_array_equal(lonely.out[0, 0, 0], v[0, 0, 0])
    k[0, 0, 39] = np.nan
    hidden = fl.simulate(algorithm, q, k, v, causal=True, tile=(16, 16)).out[:, :, :39]
    assert np.isfinite(hidden).all()


def test_inputs_are_never_changed_and_views_pass() -> None:
    p = Problem(batch=2, heads=3, len_q=33, head_dim=24, dtype="float16")
    for name in ALGORITHMS:
        q, k, v = fl.random_inputs(taken_by(name, p))
        kept = [x.copy() for x in (q, k, v)]
        strided = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
        np.testing.assert_array_equal(fl.simulate(name, *strided).out, fl.simulate(name, q, k, v).out)
        for x, before in zip((q, k, v), kept, strict=True):
            np.testing.assert_array_equal(x, before)


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=40))
def test_rounding_to_float16_is_ieee(values: list[float]) -> None:
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(round_to(x, "float16"), x.astype(np.float16).astype(np.float32))


def test_rounding_of_every_float16_midpoint() -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    half = np.sort(half[np.isfinite(half) & (np.abs(half) < 60)])
    middle = (half[:-1] + half[1:]) / 2
    for x in (half, middle, np.nextafter(middle, np.float32(99)), np.nextafter(middle, np.float32(-99))):
        np.testing.assert_array_equal(round_to(x, "float16"), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["softmax_naive", "softmax_safe", "softmax_online", "softmax_merge"])
@examples(40)
@given(n=st.integers(1, 300), tile=st.integers(9, 130), seed=st.integers(0, 9))
def test_vector_softmax(name: str, n: int, tile: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    e = np.exp(x.astype(np.float64) - x.max())
    run = fl.softmax(name, x, tile=tile)
    np.testing.assert_allclose(run.out, e / e.sum(), rtol=2e-5)
    assert run.counts == fl.count(name, length=n, tile=(1, tile))


def test_naive_softmax_overflows_where_safe_does_not() -> None:
    x = np.array([100.0, 0.0], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(fl.softmax("softmax_naive", x).out[0])
    assert fl.softmax("softmax_safe", x).out[0] == 1


@examples(30)
@given(problem=problems(longest=100), tile=kernel_tiles, exact_lse=st.booleans(), seed=st.integers(0, 5))
def test_scales_multiply_their_tiles(problem: Problem, tile: Tile, exact_lse: bool, seed: int) -> None:
    """8-bit operands with a scale a tile: attention of what they stand for, as if they had been given in float32.

    An exact LSE is that of 16 bits. It costs operations, and no bytes.
    """
    p = problem.replace(dtype=FP8, exact_lse=exact_lse)
    q, k, v = fl.random_inputs(p, seed=seed)
    random = np.random.default_rng(seed)
    tiles = {"q": p.row_tiles(tile), "k": p.key_tiles(tile), "v": p.key_tiles(tile)}
    scales = fl.Scales(
        *(
            random.uniform(0.5, 2, (*x.shape[:2], n)).astype(np.float32)
            for x, n in zip((q, k, v), tiles.values(), strict=True)
        )
    )
    run = fl.simulate("flash3_fp8", q, k, v, **p.masks, tile=tile, device=ROOMY, lse=True, scales=scales)
    meant = [
        x.astype(np.float32) * np.repeat(scale, rows, axis=-1)[:, :, : x.shape[2], None]
        for x, scale, rows in zip((q, k, v), scales, (tile.rows, tile.cols, tile.cols), strict=True)
    ]
    ref = fl.naive(*meant, **p.masks)
    size = np.abs(meant[2]).max(initial=0.0) * np.sqrt(p.head_dim_v)
    error = np.linalg.norm(run.out.astype(np.float64) - ref.out, axis=-1)
    assert (error <= U[FP8] * (np.linalg.norm(ref.out, axis=-1) + size) + 1e-30).all()
    seen = ~np.isneginf(ref.lse)
    assert run.lse is not None
    np.testing.assert_allclose(run.lse[seen], ref.lse[seen], atol=3e-5 if exact_lse else ROUNDED_SUM)
    usual = fl.count("flash3_fp8", p.replace(exact_lse=False), tile=tile, device=ROOMY, lse=True)
    assert run.counts == fl.count("flash3_fp8", p, tile=tile, device=ROOMY, lse=True)
    assert (run.counts.hbm, run.counts.sram, run.counts.exp) == (usual.hbm, usual.sram, usual.exp)
    assert run.counts.flops.other >= usual.flops.other
    assert not (exact_lse and seen.any()) or run.counts.flops.other > usual.flops.other


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("algorithm", "changes", "given"),
    [
        ("standard", {"scale": -1e30}, {}),
        ("flash1", {"scale": 1e30}, {}),
        ("flash2", {"scale": 1e30}, {}),
        ("flash2", {"alibi": True, "window": (100, 0)}, {"alibi_slopes": 1e30}),
        ("flash2", {"sinks": True, "soft_cap": 1e30}, {"sinks": -1e30}),
        ("flash_decoding", {"scale": -1e30}, {}),
        *(
            ("flash_decoding", {"kv_dtype": "int8", "k_scale": form, "v_scale": "token", "scale": scale}, scales)
            for form in ("tensor", "head", "token", "channel")
            for scale, scales in ((None, {"k_scale": 1e30, "v_scale": 1e30}), (1e20, {"k_scale": 1e10}))
        ),
    ],
)
def test_the_largest_factors_of_scores_give_numbers(
    algorithm: str, changes: dict[str, Any], given: dict[str, float]
) -> None:
    """Within float32, as everything that is larger is refused."""
    p = Problem(batch=1, heads=2, len_q=8, len_kv=150, head_dim=64, dtype="bfloat16").replace(**changes)
    arrays = ATTENTION.draw(p)
    arrays |= {name: np.full_like(arrays[name], value) for name, value in given.items()}
    run = fl.plan(algorithm, p, backend="simulator", lse=True).run(arrays)
    assert judged(fl.CATALOGUE[algorithm], p, arrays, run) <= 1


def test_the_largest_scales_of_tiles_give_numbers() -> None:
    p = Problem(batch=1, heads=2, len_q=8, len_kv=150, head_dim=64, dtype=FP8, scale=100.0)
    scales = [np.full((1, 2, n), value, np.float32) for n, value in ((1, 9e13), (2, 9e13), (2, -1e30))]
    run = fl.simulate("flash3_fp8", *fl.random_inputs(p), scale=p.scale, scales=fl.Scales(*scales))
    assert np.isfinite(run.out.astype(np.float32)).all()
    scales[1] *= 2
    with pytest.raises(
        fl.UsageError, match=r"^scales\.k\[0, 0, 0\] = 17999\d+\.0: expected a positive number, up to 1e\+14$"
    ):
        fl.simulate("flash3_fp8", *fl.random_inputs(p), scale=p.scale, scales=fl.Scales(*scales))
    named = {f"{name}_scale": scale for name, scale in zip("qkv", scales, strict=True)}
    arrays = dict(zip("qkv", fl.random_inputs(p), strict=True))
    with pytest.raises(fl.UsageError, match=r"^k_scale\[0, 0, 0\] = "):
        fl.plan("flash3_fp8", p, backend="simulator").run(arrays | named)


@pytest.mark.parametrize(("name", "value"), [("q", 0.0), ("q", -1.0), ("k", np.nan)])
def test_scales_of_scores_are_positive(name: str, value: float) -> None:
    p = Problem(batch=1, heads=2, len_q=200, head_dim=16, dtype=FP8)
    scales = {each: np.ones((1, 2, 2), np.float32) for each in "qkv"}
    scales["v"][:] = -1
    run = fl.simulate("flash3_fp8", *fl.random_inputs(p), scales=fl.Scales(**scales))
    assert np.isfinite(run.out.astype(np.float32)).all()
    scales[name][0, 1, 1] = value
    with pytest.raises(fl.UsageError, match=rf"^scales\.{name}\[0, 1, 1\] = {value}: expected a positive"):
        fl.simulate("flash3_fp8", *fl.random_inputs(p), scales=fl.Scales(**scales))


@pytest.mark.parametrize("wrong", [{"tiles": 3}, {"dtype": "float64"}, {"problem": "float16"}])
def test_scales_that_dont_fit_are_refused(wrong: dict[str, Any]) -> None:
    p = Problem(batch=1, heads=2, len_q=200, head_dim=16, dtype=wrong.get("problem", FP8))
    ones = np.ones((1, 2, wrong.get("tiles", 2)), wrong.get("dtype", "float32"))
    with pytest.raises(fl.UsageError, match=r"^scales"):
        fl.simulate(
            "flash2" if "problem" in wrong else "flash3_fp8", *fl.random_inputs(p), scales=fl.Scales(*[ones] * 3)
        )


@given(
    x=st.lists(st.just(-np.inf) | st.floats(-50, 50, width=32), min_size=1, max_size=40),
    tile=st.integers(1, 9),
    name=st.sampled_from(["softmax_safe", "softmax_online", "softmax_merge"]),
)
def test_softmax_of_masked_scores(x: list[float], tile: int, name: str) -> None:
    """Masked scores are -inf, whole tiles of them too, wherever they stand."""
    x[-1] = max(x[-1], 0.0)  # a row that sees nothing has no softmax
    values = np.array(x, np.float64)
    exact = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
    np.testing.assert_allclose(fl.softmax(name, values.astype(np.float32), tile=tile).out, exact, rtol=1e-5, atol=1e-30)
