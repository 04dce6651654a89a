"""Dropout: the random bytes, the mask that follows from them, both judges, tile programs and their counts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.attention import ATTENTION
from simulator.philox import is_kept, kept_weights, philox4x32, random_bytes

VECTORS = [
    # tests/kat_vectors of Random123 (Salmon et al., D. E. Shaw Research): rounds, counter, key, result
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
STATE = st.integers(-(2**63), 2**63 - 1)


def problem(**changes: Any) -> fl.Problem:
    plain: dict[str, Any] = {"batch": 1, "heads": 1, "len_q": 40, "head_dim": 16, "dtype": "float32", "dropout": 0.3}
    return fl.Problem(**{**plain, **changes})


def draw(p: fl.Problem, seed: int) -> dict[str, Any]:
    return dict(ATTENTION.draw(p, seed))


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), VECTORS)
def test_philox_is_random123s(rounds: int, counter: str, key: str, result: str):
    a, b, c, d = (np.array([int(word, 16)], np.uint64) for word in counter.split())
    first, second = (int(word, 16) for word in key.split())
    words = philox4x32((a, b, c, d), (first, second), rounds)
    assert " ".join(f"{int(word[0]):08x}" for word in words) == result


@given(
    seed=STATE, offset=STATE, head=st.integers(0, 2**31 - 1), row=st.integers(0, 2**30), column=st.integers(0, 2**30),
    rate=st.floats(0.01, 0.99),
)  # fmt: skip
def test_a_pairs_mask_is_the_definition_wherever_it_lies(
    seed: int, offset: int, head: int, row: int, column: int, rate: float
):
    """The arrays of a tile around the pair say of it what the definition in plain integers says."""
    state, p = np.array([seed, offset]), problem(dropout=rate)
    rows, columns = row + np.arange(3), column + np.arange(18)
    found = random_bytes(state, np.array([head, head + 1]), rows, columns) < p.kept
    for h, i, j in ((0, 0, 0), (1, 2, 17), (0, 1, 9)):
        assert found[h, i, j] == is_kept(p, state, head + h, int(rows[i]), int(columns[j]))


@given(
    kept=st.integers(1, 255),
    len_q=st.integers(0, 40),
    len_kv=st.integers(0, 70),
    causal=st.booleans(),
    seed=STATE,
)
def test_judges_agree(kept: int, len_q: int, len_kv: int, causal: bool, seed: int):
    p = problem(heads=2, len_q=len_q, len_kv=len_kv, causal=causal, dropout=1 - kept / 256)
    assert p.kept == kept
    arrays = draw(p, 1) | {"rng_state": np.array([seed, 5])}
    by_arrays, by_loop = fl.naive(**arrays, **p.masks), fl.naive_loop(**arrays, **p.masks)
    np.testing.assert_allclose(by_arrays.out, by_loop.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_arrays.lse, by_loop.lse, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(by_arrays.lse, fl.naive(*(arrays[name] for name in "qkv"), causal=causal).lse)


@pytest.mark.parametrize("rate", [0.002, 0.1, 0.25, 0.5, 0.9, 0.998])
def test_nothing_is_biased(rate: float):
    """Z is 1 on the average. The number of kept weights is binomial, so 5 standard deviations bound what chance may do."""
    p = problem(batch=2, heads=4, len_q=256, len_kv=256, dropout=rate)
    z = kept_weights(p, np.array([12345, 678]))
    share, n = p.kept / 256, z.size
    assert abs(np.count_nonzero(z) - n * share) < 5 * np.sqrt(n * share * (1 - share))
    assert abs(z.mean() - 1) < 5 * np.sqrt((1 - share) / share / n)
    assert set(np.unique(z).tolist()) == {0.0, 256 / p.kept}


def test_every_byte_value_is_as_frequent():
    """All 16 places of a patch, by themselves: no place takes another's byte or a part of it."""
    found = random_bytes(np.array([3, 4]), np.arange(4), np.arange(256), np.arange(256))
    for i in range(16):
        for j in range(16):
            own = found[:, i::16, j::16].ravel()
            expected = len(own) / 256
            chi = ((np.bincount(own, minlength=256) - expected) ** 2 / expected).sum()
            assert chi < 255 + 5 * np.sqrt(2 * 255), (i, j)


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("change", [1, 2**32, -(2**63)])
def test_seed_and_offset_change_the_mask(word: int, change: int):
    """Their high halves, too. Other masks agree about as often as chance lets them."""
    p = problem(len_q=64, len_kv=64, dropout=0.5)
    state = np.array([7, 9])
    other = state.copy()
    other[word] ^= change
    agree = (kept_weights(p, state) == kept_weights(p, other)).mean()
    assert abs(agree - 0.5) < 5 * 0.5 / 64


def test_heads_have_masks_of_their_own():
    z = kept_weights(problem(batch=2, heads=4, kv_heads=2, len_q=64, len_kv=64, dropout=0.5), np.array([7, 9]))
    heads = z.reshape(8, 64, 64)
    for a in range(8):
        for b in range(a):
            assert abs((heads[a] == heads[b]).mean() - 0.5) < 5 * 0.5 / 64
        assert abs((heads[a] == heads[a].T).mean() - 0.5) < 5 * 0.5 / 64
    # the offset counts heads on, so a call of one head can stand for any of them
    alone = kept_weights(problem(len_q=64, len_kv=64, dropout=0.5), np.array([7, 9 + 5]))
    np.testing.assert_array_equal(alone[0, 0, 0], heads[5])


def test_more_rows_and_keys_leave_the_mask():
    state = np.array([-1, 2**40])
    few = kept_weights(problem(len_q=19, len_kv=35), state)
    many = kept_weights(problem(len_q=64, len_kv=100), state)
    np.testing.assert_array_equal(few, many[..., :19, :35])


@pytest.mark.parametrize("algorithm", ["flash2", "standard", "flash3"])
@given(
    changes=st.fixed_dictionaries({
        "batch": st.integers(1, 2), "heads": st.sampled_from([2, 4]), "kv_heads": st.sampled_from([1, 2]),
        "len_q": st.integers(0, 50), "len_kv": st.integers(0, 50), "causal": st.booleans(),
        "dropout": st.sampled_from([0.1, 0.5, 0.9]), "dtype": st.sampled_from(["float16", "float32"]),
    }),
    tile=st.sampled_from([(16, 16), (32, 48), (64, 32), (17, 5)]),
)  # fmt: skip
def test_tile_programs_drop_what_the_judge_drops(algorithm: str, changes: dict[str, Any], tile: tuple[int, int]):
    """To the rule, at any tile; counts on data, on shapes and in closed form are equal. The LSE is that of all weights."""
    p = problem(**changes)
    arrays = draw(p, 3)
    run = fl.simulate(algorithm, **arrays, tile=tile, lse=True, **p.masks)
    truth = ATTENTION.judge(p, arrays)
    bounds = ATTENTION.bounds(p, arrays, truth)
    assert (np.linalg.norm(run.out.astype(float) - truth["out"], axis=-1) <= bounds["out"]).all()
    assert run.lse is not None
    seen = np.isfinite(truth["lse"])
    assert (np.abs(run.lse[seen] - truth["lse"][seen]) <= bounds["lse"][seen]).all() and np.isneginf(
        run.lse[~seen]
    ).all()
    assert run.counts == fl.shape_run(algorithm, p, tile=tile, lse=True) == fl.count(algorithm, p, tile=tile, lse=True)


def one_hot(p: fl.Problem) -> dict[str, Any]:
    """Equal scores and one-hot values: `out` is P * Z. A key beyond the head dim is not shown."""
    arrays = draw(p, 5)
    arrays["q"][...] = arrays["v"][...] = 0
    for key in range(min(p.len_kv, p.head_dim)):
        arrays["v"][..., key, key] = 1
    return arrays


@pytest.mark.parametrize("algorithm", ["flash2", "standard", "flash3"])
def test_one_hot_values_read_the_mask_off(algorithm: str):
    p = problem(batch=2, heads=4, kv_heads=2, len_q=70, len_kv=64, head_dim=64, dtype="float16")
    arrays = one_hot(p)
    wanted = kept_weights(p, arrays["rng_state"]).reshape(2, 4, 70, 64) > 0
    for tile in ((16, 16), (64, 32), (32, 48)):
        assert ((fl.simulate(algorithm, **arrays, tile=tile, **p.masks).out != 0) == wanted).all()


def test_a_trace_of_a_head_has_its_mask():
    p = problem(batch=2, heads=2)
    arrays = draw(p, 1)
    last = fl.simulate("flash2", **arrays, trace=(1, 1), tile=(16, 16), **p.masks).trace
    alone: dict[str, Any] = {name: x[1:, 1:] if x.ndim == 4 else x + [0, 3] for name, x in arrays.items()}
    own = fl.simulate("flash2", **alone, trace=True, tile=(16, 16), **p.masks).trace
    first = fl.simulate(
        "flash2",
        **{name: x[1:, 1:] if x.ndim == 4 else x for name, x in arrays.items()},
        trace=True,
        tile=(16, 16),
        **p.masks,
    ).trace
    assert last is not None and own is not None and last.to_dict()["events"] == own.to_dict()["events"]
    assert first is not None and first.to_dict()["events"] != own.to_dict()["events"]


def test_a_state_that_is_left_out_is_the_same_in_every_part():
    """Large calls are shared out over threads, which must not begin with head 0 each."""
    p = problem(batch=2, heads=1, len_q=1100, len_kv=1000, dtype="float32")
    q, k, v = fl.random_inputs(p)
    whole = fl.simulate("flash2", q, k, v, **p.masks).out
    np.testing.assert_array_equal(whole, fl.simulate("flash2", q, k, v, rng_state=np.zeros(2, np.int64), **p.masks).out)


@pytest.mark.parametrize(
    ("rate", "accepted"),
    [
        (-0.1, "a finite number of at least 0; 0 or None is none"),
        (1.0, "0 or None for none, or a number from 0.002 to 0.998, so that 1 to 255 of 256 are kept"),
        (0.001, "0 or None for none, or a number from 0.002 to 0.998, so that 1 to 255 of 256 are kept"),
        (True, "a finite number of at least 0; 0 or None is none"),
    ],
)
def test_rates_that_are_refused(rate: Any, accepted: str):
    with pytest.raises(fl.UsageError) as error:
        problem(dropout=rate)
    assert str(error.value) == f"dropout = {rate!r}: expected {accepted}"


def test_what_is_refused_says_why():
    p = problem(dtype="float16")
    assert (
        fl.CATALOGUE["flash3_3"].refuses(p) == "dropout = 0.3: expected nothing: flash3_3 knows causal, window, scale"
    )
    with pytest.raises(fl.UsageError, match=r"^dropout = 0\.3: expected None with lengths$"):
        problem(len_q=None, lengths=[10, 20])
    q, k, v = fl.random_inputs(p)
    for state, said in (
        (np.zeros(2, np.int32), r"^rng_state\.dtype = 'int32': expected int64$"),
        (np.zeros(3, np.int64), r"^rng_state\.shape = \(3,\): expected \(2,\), its axes are rng_words$"),
    ):
        with pytest.raises(fl.UsageError, match=said):
            fl.simulate("flash2", q, k, v, rng_state=state, **p.masks)
    with pytest.raises(fl.UsageError, match="^rng_state = .*: expected nothing: .* has no rng_state$"):
        fl.simulate("flash2", q, k, v, rng_state=np.zeros(2, np.int64))
    assert problem(dropout=0) == problem(dropout=None)
