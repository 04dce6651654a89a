"""Quantised K and V: the judges, the program and the formula agree, for scales of anything, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.attention import ATTENTION
from simulator.operations.paged import PAGED
from simulator.problem import CACHES, SCALES
from tests.tiers import examples

TILES = st.sampled_from([None, (16, 16), (5, 7), (16, 48)])
SMALL: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "len_q": 2,
    "len_kv": 30,
    "head_dim": 16,
    "dtype": "float16",
}


@st.composite
def problems(draw: st.DrawFn, *, paged: bool = False) -> fl.Problem:
    kv_heads, n = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 40, 150]))
    pages: dict[str, Any] = (
        {"page_size": draw(st.sampled_from([1, 7, 16])), "lengths": [(2, n), (2, 33)]} if paged else {}
    )
    return fl.Problem(
        batch=2,
        heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        len_q=2,
        head_dim=draw(st.sampled_from([8, 19, 40])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()),
        kv_dtype=draw(st.sampled_from(CACHES)),
        k_scale=draw(st.none() | st.sampled_from(SCALES)),
        v_scale=draw(st.none() | st.sampled_from(SCALES[:-1])),
        scale=draw(st.sampled_from([None, 1.0, -0.3])),
        **({"len_kv": n} if not paged else pages),
    )


def within(found: dict[str, Any], truth: dict[str, Any], bounds: dict[str, Any]) -> bool:
    out: Any = np.linalg.norm(found["out"].astype(np.float64) - truth["out"], axis=-1) <= bounds["out"]
    with np.errstate(invalid="ignore"):
        off: Any = np.abs(found["lse"] - truth["lse"])
        lse: Any = (found["lse"] == truth["lse"]) | (off <= bounds["lse"])
    return bool(out.all() and lse.all())


@examples(20)
@given(problems(), TILES, st.integers(0, 9))
def test_the_program_is_right_and_counts_what_the_formula_does(p: fl.Problem, tile: Any, seed: int) -> None:
    arrays: Any = ATTENTION.draw(p, seed)
    run = fl.simulate("flash_decoding", **arrays, **p.masks, tile=tile, lse=True)
    assert run.counts == fl.count("flash_decoding", p, tile=tile, lse=True)
    truth, loop = ATTENTION.judge(p, arrays), fl.naive_loop(**arrays, **p.masks)
    np.testing.assert_allclose(truth["out"], loop.out, atol=1e-11)
    assert within(dict(run.outputs), truth, ATTENTION.bounds(p, arrays, truth))


@examples(15)
@given(problems(paged=True), TILES, st.integers(0, 9))
def test_pages_change_no_bit(p: fl.Problem, tile: Any, seed: int) -> None:
    """Scales of keys that no request owns are NaN, and their elements the least."""
    arrays: Any = PAGED.draw(p, seed)
    run = fl.simulate("paged", **arrays, **p.masks, tile=tile, lse=True)
    assert run.counts == fl.count("paged", run.counts.problem, tile=tile, lse=True)
    gathered: Any = PAGED.gathered(p, arrays)
    for b, (plain, own) in enumerate(gathered):
        alone = fl.simulate("flash_decoding", **own, **plain.masks, tile=tile or run.counts.tile, lse=True)
        assert alone.out.tobytes() == run.out[b : b + 1].tobytes()


def test_quantising_halves_what_is_read() -> None:
    p = fl.Problem(batch=2, heads=8, kv_heads=2, len_q=1, len_kv=1000, head_dim=128, dtype="bfloat16")
    plain, keys = fl.count("flash_decoding", p), 2 * 2 * 1000
    for form, of_a_unit in (("token", None), ("head", 4 * 4), ("channel", 4 * 128)):
        c = fl.count("flash_decoding", p.replace(kv_dtype="int8", k_scale=form))
        assert c.by_tensor["k"].hbm_read == plain.by_tensor["k"].hbm_read // 2 == keys * 128
        read = 4 * keys if of_a_unit is None else of_a_unit * c.launches[0].blocks
        assert c.by_tensor["k_scale"].hbm_read == read, form


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("form", SCALES)
def test_quantised_values_are_near(dtype: str, form: str) -> None:
    """Half a step of int8 of the largest value that the scale spans; half of e4m3's mantissa of the value itself."""
    _, k, v = fl.random_inputs(fl.Problem(**{**SMALL, "dtype": "float32"}))
    cache = fl.quantize_cache(k, v, dtype, k_scale=form)
    step = np.abs(k).max() / 127 / 2 if dtype == "int8" else np.abs(k) / 16 + np.abs(k).max() / 448 * 2.0**-10
    assert (np.abs(cache.values()[0] - k) <= step * 1.0001).all()


def test_a_problem_says_what_arrays_say() -> None:
    p = fl.Problem(**SMALL, kv_dtype="int8", k_scale="channel", v_scale="token")
    arrays: Any = ATTENTION.draw(p)
    assert arrays["k_scale"].shape == (2, 16) and arrays["v_scale"].shape == (2, 2, 30)
    assert ATTENTION.problem(arrays) == p and p.words == ["kv dtype int8", "k scale channel", "v scale token"]
    only = fl.Problem(**{**SMALL, "kv_heads": 1}, kv_dtype="int8", k_scale="head")
    assert only == only.replace(k_scale="tensor") and hash(only) == hash(only.replace(k_scale="tensor"))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kv_dtype": "float32"}, "kv_dtype = 'float32': expected float16, or of 16-bit queries float8_e4m3fn or int8"),
    ({"kv_dtype": "int8", "dtype": "float32"}, "kv_dtype = 'int8': expected float32, or of 16-bit queries"),
    ({"k_scale": "head"}, "k_scale = 'head': expected None for K and V of float16"),
    ({"kv_dtype": "int8", "v_scale": "channel"}, "v_scale = 'channel': expected one of tensor, head, token"),
]


@pytest.mark.parametrize(("changes", "line"), BAD)
def test_a_problem_that_cannot_be_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(fl.UsageError) as refused:
        fl.Problem(**{**SMALL, **changes})
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def given_arrays(**changes: Any) -> dict[str, Any]:
    p = fl.Problem(**SMALL, kv_dtype="int8", k_scale="token", v_scale="head")
    return {**ATTENTION.draw(p), **changes}


def with_value(value: float) -> Any:
    scale = given_arrays()["k_scale"]
    scale[1, 0, 3] = value
    return scale


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"k_scale": with_value(np.nan)}, "k_scale[1, 0, 3] = nan: expected a finite number of at least 0, up to 1e+30"),
    (
        {"k_scale": with_value(2e38)},
        "k_scale[1, 0, 3] = 1.9999999360571385e+38: expected a finite number of at least 0, up to 1e+30",
    ),
    ({"k_scale": with_value(-1.0)}, "k_scale[1, 0, 3] = -1.0: expected a finite number of at least 0, up to 1e+30"),
    (
        {"v_scale": np.array([1, np.inf], np.float32)},
        "v_scale[1] = inf: expected a finite number of at least 0, up to 1e+30",
    ),
    ({"k_scale": np.ones((2, 2, 31), np.float32)}, "k_scale.shape = (2, 2, 31): expected (2, 2, 30), its axes are"),
    ({"v_scale": np.ones((2, 16), np.float32)}, "v_scale.shape = (2, 16): expected an array (1,), (kv_heads,) or one"),
    ({"v_scale": np.ones(3, np.float32)}, "v_scale.shape = (3,): expected (2,), its axes are kv_heads"),
    ({"k_scale": np.ones(2, np.float64)}, "k_scale.dtype = 'float64': expected float32"),
    ({"v": np.ones((2, 2, 30, 16), np.float16)}, "v.dtype = 'float16': expected int8, as k has"),
    ({"q": np.ones((2, 4, 2, 16), np.float32)}, "k.dtype = 'int8': expected float32, as q has"),
    (
        {"k": np.ones((2, 2, 30, 16), np.int32)},
        "k.dtype = 'int32': expected float16, as q has, or float8_e4m3fn or int8",
    ),
    (
        {name: np.ones((2, 2, 30, 16), np.float16) for name in "kv"},
        "k_scale = 'given': expected None for K and V of float16",
    ),
]


@pytest.mark.parametrize(("changes", "line"), WRONG, ids=[line[:30] for _, line in WRONG])
def test_bad_arrays_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    for call in (fl.simulate, fl.emulate):
        with pytest.raises(fl.UsageError) as refused:
            call("flash_decoding", **given_arrays(**changes))
        assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "x",
    [
        np.array(["a"]), np.ones((1, 2, 3, 4), np.int8), np.ones((1, 2, 3, 4), complex),
        np.zeros((1, 2, 3, 4), "V2"), np.zeros((1, 2, 3, 4), [("a", "f2")]),
    ],
)  # fmt: skip
def test_what_has_no_fractions_is_not_quantised(x: Any) -> None:
    with pytest.raises(fl.UsageError, match=r"v\.dtype = '\w+': expected a floating dtype"):
        fl.quantize_cache(np.ones((1, 2, 3, 4), np.float16), x)


def test_who_knows_no_quantised_cache_refuses_it() -> None:
    p = fl.Problem(**SMALL, kv_dtype="int8")
    for name in ("standard", "flash2", "flash3"):
        with pytest.raises(
            fl.UsageError, match=r"kv_dtype = 'int8': expected nothing: \w+ knows causal, window, scale"
        ):
            fl.count(name, p)


def test_keys_and_values_that_do_not_belong_together() -> None:
    k = np.ones((1, 2, 5, 4), np.float16)
    assert fl.quantize_cache(k, k[..., :3]).v.shape == (1, 2, 5, 3)
    with pytest.raises(fl.UsageError, match=r"v.shape = \(1, 2, 3, 4\): expected \(1, 2, 5, head_dim\), as k has"):
        fl.quantize_cache(k, k[:, :, :3])


def test_a_type_is_no_name_of_a_dtype() -> None:
    """Who knows NumPy writes it first."""
    k: Any = np.ones((1, 2, 5, 4), np.float16)
    with pytest.raises(fl.UsageError, match="dtype = <class 'numpy.int8'>: expected one of "):
        fl.quantize_cache(k, k, np.int8)  # pyright: ignore[reportArgumentType]
