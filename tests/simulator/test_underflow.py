"""Where P underflows, right kernels keep the rule, and wrong ones don't. Elsewhere the rule is as tight as without that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.verify.general import judged
from simulator import Problem
from simulator.dtypes import Array, numpy_dtype
from simulator.operations import attention
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.operations.cascade import CASCADE
from simulator.operations.latent import LATENT, PAGED_LATENT
from simulator.operations.operation import Operation
from simulator.operations.paged import PAGED
from simulator.operations.softmax import SOFTMAX
from tests.tiers import examples

HALF = [row for row in fl.CATALOGUE.values() if "float16" in row.dtypes]
FORWARD = [row.name for row in HALF if row.operation not in (BACKWARD, SOFTMAX) and not row.operation.in_place]
PLAIN = [row.name for row in HALF if row.operation is ATTENTION]
GRADIENTS = [row.name for row in HALF if row.operation is BACKWARD]
DIM = 16
PAGE = 16


class Keys(NamedTuple):
    """The scores (len_kv,) of keys, in nats, and their values (len_kv, head_dim_v)."""

    scores: Array
    values: Array

    def arrays(self, operation: Operation, dtype: str = "float16", queries: int = 3) -> dict[str, Array]:
        """The keys as an operation takes them, with queries that see the same scores. The scale is 1."""
        n, dim = len(self.scores), self.values.shape[1]
        latent = operation in (LATENT, PAGED_LATENT)
        width = 576 if latent else dim
        k, v = np.zeros((1, 1, n, width)), self.values[None, None]
        if latent:  # a row is key and value: what isn't value, of RoPE, has the score
            k[..., :dim] = v
        at = width - 1 if latent else 0
        k[..., at] = self.scores
        q = np.zeros((1, 1, queries, width))
        q[..., at] = 1
        found = {"q": q, "latent": k} if latent else {"q": q, "k": k, "v": v}
        found = {name: x.astype(numpy_dtype(dtype)) for name, x in found.items()}
        if operation.in_pages:
            pages = -(-n // PAGE)
            for name in PAGED_LATENT.pools if latent else PAGED.pools:
                pool = np.full((1, pages * PAGE, width), np.nan, found[name].dtype)
                pool[:, :n] = found[name][0]
                found[name] = pool.reshape(1, pages, PAGE, width).swapaxes(0, 1).copy()
            found |= {"block_table": np.arange(pages, dtype=np.int32)[None], "seq_lens": np.array([n], np.int32)}
        if operation is CASCADE:
            for name in "kv":
                found[f"{name}_prefix"], found[name] = found[name][:, :, : n // 2], found[name][:, :, n // 2 :]
        return found


@st.composite
def far_behind(draw: st.DrawFn, dim: int = DIM) -> Keys:
    """Some keys are ahead of all others, by more than float16's normal numbers span. The others have a few levels, of scores and
    of values that may cancel or not."""
    n, seed = draw(st.integers(2, 200)), draw(st.integers(0, 1 << 20))
    random = np.random.default_rng(seed)
    ahead = min(n, draw(st.sampled_from([1, 1, 2, n // 2 + 1])))
    levels = np.array(draw(st.lists(st.floats(9.75, 24), min_size=1, max_size=4)))
    size = np.array([draw(st.sampled_from([0.0, 0.01, 1.0, -1.0, 100.0, -100.0])) for _ in levels])
    of_level = random.integers(0, len(levels), n)
    if draw(st.booleans()):
        of_level.sort()
    scores, values = -levels[of_level], random.standard_normal((n, dim))
    if draw(st.booleans()):
        values[:] = values[0]
    values *= size[of_level, None]
    if draw(st.booleans()):
        scores += random.standard_normal(n)
    places = draw(st.sampled_from([np.arange(ahead), n - 1 - np.arange(ahead), random.permutation(n)[:ahead]]))
    scores[places] = -np.abs(random.standard_normal(ahead)) if ahead > 1 else 0.0
    values[places] = draw(st.sampled_from([0.0, 1e-3])) * random.standard_normal((ahead, dim))
    return Keys(scores + draw(st.sampled_from([0.0, 20.0])), values)


def ratio(name: str, arrays: dict[str, Array], **masks: Any) -> float:
    """The worst error of an algorithm over its bound. Raises `Failure` over 1."""
    row = fl.CATALOGUE[name]
    problem = row.operation.settled(row.operation.problem(arrays, **masks), arrays)
    run = fl.plan(name, problem, backend="simulator", lse=True)
    return judged(row, problem, arrays, run.run(arrays))


@pytest.mark.parametrize("name", FORWARD)
def test_one_key_far_ahead(name: str) -> None:
    """exp(-18) is less than 2^-25, half of float16's smallest number, so nothing of the other key's weight is left in P. (There
    are two of both, so that a prefix and what follows have one.)"""
    operation, queries = fl.CATALOGUE[name].operation, fl.CATALOGUE[name].support.queries or 3
    dim = 512 if operation in (LATENT, PAGED_LATENT) else DIM
    keys = Keys(np.array([18.0, 0.0] * 2), np.repeat([[0.0], [100.0]] * 2, dim, 1))
    ratio(name, keys.arrays(operation, queries=queries), scale=1.0)


@pytest.mark.parametrize("name", FORWARD)
@examples(40)
@given(data=st.data())
def test_no_right_kernel_is_rejected(name: str, data: st.DataObject) -> None:
    row = fl.CATALOGUE[name]
    latent = row.operation in (LATENT, PAGED_LATENT)
    keys = data.draw(far_behind(dim=512 if latent else DIM))
    masks: dict[str, Any] = {"scale": 1.0, "causal": data.draw(st.booleans())}
    arrays = keys.arrays(row.operation, queries=row.support.queries or 3)
    if data.draw(st.booleans()) and "sinks" in row.support.masks:
        arrays["sinks"] = np.array([data.draw(st.floats(-10, 30))], np.float32)
    if data.draw(st.booleans()) and "alibi" in row.support.masks:
        arrays["alibi_slopes"] = np.array([data.draw(st.floats(0, 0.5))], np.float32)
    if data.draw(st.booleans()) and "dropout" in row.support.masks:
        masks["dropout"] = data.draw(st.sampled_from([0.1, 0.5, 0.9, 0.99]))
        arrays["rng_state"] = np.array([data.draw(st.integers(0, 99)), 0])
    ratio(name, arrays, **masks)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("v_scale", ["tensor", "head", "token"])
@examples(25)
@given(keys=far_behind(), spread=st.floats(0, 4), kv_dtype=st.sampled_from(["int8", "float8_e4m3fn"]))
def test_beside_a_cache_of_8_bits_p_is_float16(
    dtype: str, v_scale: str, keys: Keys, spread: float, kv_dtype: str
) -> None:
    """Whatever Q is."""
    arrays = keys.arrays(ATTENTION, dtype)
    far = 10 ** (spread * np.random.default_rng(0).uniform(-1, 1, (len(keys.scores), 1)))
    v = arrays["v"].astype(np.float32) * far
    cache = fl.quantize_cache(arrays["k"], v, kv_dtype, v_scale=v_scale)
    ratio("flash_decoding", arrays | cache._asdict(), scale=1.0)


def test_a_values_scale_over_the_largest_makes_p_smaller() -> None:
    """The second key doesn't count, but for its value, a million times as large."""
    values = np.random.default_rng(0).standard_normal((2, DIM)) * [[1e-4], [100.0]]
    arrays = Keys(np.array([0.0, -24.0]), values).arrays(ATTENTION)
    ratio("flash_decoding", arrays | fl.quantize_cache(arrays["k"], values[None, None])._asdict(), scale=1.0)


@pytest.mark.parametrize("name", PLAIN[:2])
def test_equal_weights_of_a_long_row(name: str) -> None:
    """1 / 49,152 is 341.33 of float16's smallest steps, and every weight is rounded by a third of one."""
    values = np.abs(np.random.default_rng(0).standard_normal(DIM)) * np.ones((3 << 14, 1))
    ratio(name, Keys(np.zeros(3 << 14), values).arrays(ATTENTION), scale=1.0)


@pytest.mark.parametrize("of_others", [96.0, 0.0])
def test_e4m3_loses_thousands_of_keys(of_others: float) -> None:
    """They vanish from `out` and from l, though together they are a third of the row."""
    scores, values = np.full(30_000, -11.0), np.full((30_000, DIM), of_others)
    scores[-1], values[-1] = 0, 96 - of_others
    ratio("flash3_fp8", Keys(scores, values).arrays(ATTENTION, "float8_e4m3fn"), scale=1.0)


def gradients(seed: int, behind: float, dropout: float | None, scale: float, **changes: Any) -> dict[str, Array]:
    """Inputs of a backward pass whose rows see one key far ahead of the others."""
    p = Problem(
        batch=1, heads=1, len_q=40, len_kv=70, head_dim=64, dtype="float16", dropout=dropout, scale=scale, **changes
    )
    random = np.random.default_rng(seed)
    q, k, v, dout = (random.standard_normal((1, 1, n, 64)) for n in (40, 70, 70, 40))
    along = random.standard_normal(64)
    along /= np.linalg.norm(along)
    scores = np.full(70, -behind)
    scores[random.integers(70)] = 0
    q *= min(1, 0.2 / scale)
    q += (4 - q @ along)[..., None] * along
    k += (scores / (4 * scale) - k @ along)[..., None] * along
    v, dout = v * 10 ** random.uniform(-3, 1), dout * 10 ** random.uniform(-4, 0)
    arrays = {name: x.astype(np.float16) for name, x in {"q": q, "k": k, "v": v}.items()}
    arrays |= {"rng_state": np.array([seed, 0])} if dropout else {}
    forward = ATTENTION.judge(p, arrays)
    given = {"out": forward["out"].astype(np.float16), "lse": forward["lse"].astype(np.float32)}
    return arrays | given | {"dout": dout.astype(np.float16)}


@pytest.mark.parametrize("name", GRADIENTS)
@examples(15)
@given(
    seed=st.integers(0, 999), behind=st.floats(0, 24), dropout=st.sampled_from([None, 0.5, 0.9]),
    scale=st.sampled_from([0.125, 0.01, 1.0, 16.0]), causal=st.booleans(),
)  # fmt: skip
def test_no_right_backward_pass_is_rejected(
    name: str, seed: int, behind: float, dropout: float | None, scale: float, causal: bool
) -> None:
    """P and dS underflow. What dS loses is multiplied with the scale, and with what dropout leaves out until the end."""
    dropout = dropout if "dropout" in fl.CATALOGUE[name].support.masks else None
    arrays = gradients(seed, behind, dropout, scale, causal=causal)
    ratio(name, arrays, scale=scale, dropout=dropout, causal=causal)


def test_a_softmax_of_many_elements() -> None:
    x = np.random.default_rng(0).standard_normal((1, 1 << 16)).astype(np.float16)
    ratio("softmax_safe", {"x": x})


@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_dropout_and_alibi_of_normal_inputs(name: str) -> None:
    """A large weight may be dropped, and small ones are left."""
    for seed in range(12):
        p = Problem(batch=1, heads=2, len_q=64, head_dim=64, dtype="float16", alibi=True, dropout=0.9)
        slopes = np.random.default_rng(seed).uniform(0, 0.5, 2).astype(np.float32)
        ratio(name, ATTENTION.draw(p, seed) | {"alibi_slopes": slopes}, dropout=0.9)


def ordinary() -> Iterator[Problem]:
    plain = Problem(batch=1, heads=2, len_q=8, len_kv=97, head_dim=64, dtype="float16")
    for n in (97, 512, 2049, 4096):
        yield plain.replace(len_kv=n)
    yield plain.replace(len_q=600, len_kv=600, causal=True, heads=4, kv_heads=2)
    yield plain.replace(len_kv=600, sinks=True, soft_cap=5.0)
    yield plain.replace(len_kv=600, dropout=0.1)
    yield plain.replace(len_kv=600, head_dim=256)
    yield plain.replace(len_kv=600, kv_dtype="int8", k_scale="token", v_scale="token")
    yield plain.replace(len_kv=600, dtype="bfloat16", kv_dtype="int8", k_scale="token", v_scale="token")
    yield plain.replace(len_kv=2049, dtype="float8_e4m3fn")


@pytest.mark.parametrize("problem", list(ordinary()), ids=str)
def test_of_normal_inputs_the_rule_is_as_tight_as_without(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of up to 4,096 keys, the term for P's underflow changes the bound by less than 1 %."""
    arrays = ATTENTION.draw(problem, 0)
    truth = ATTENTION.judge(problem, arrays)
    with_term = ATTENTION.bounds(problem, arrays, truth)
    monkeypatch.setattr(attention, "LEAST_NORMAL", {})
    without = ATTENTION.bounds(problem, arrays, truth)
    assert (with_term["lse"] == without["lse"]).all()
    assert (without["out"] <= with_term["out"]).all()
    assert (with_term["out"] < 1.01 * without["out"]).all()


def exceeds(keys: Keys, weights: Array) -> float:
    """By how many times the rule an output of other weights is off."""
    arrays = keys.arrays(ATTENTION)
    problem = ATTENTION.problem(arrays, scale=1.0)
    truth = ATTENTION.judge(problem, arrays)
    out = weights @ arrays["v"][0, 0].astype(np.float64)
    return float(np.linalg.norm(out - truth["out"][0, 0, 0]) / ATTENTION.bounds(problem, arrays, truth)["out"][0, 0, 0])


def test_what_loses_more_than_float16_does_is_found() -> None:
    """Subnormal numbers flushed to 0, and weights below 2^-20: of one key ahead, and of others that it leaves to `out`."""
    random = np.random.default_rng(0)
    scores = np.append(0.0, -random.uniform(10, 13, 100)).astype(np.float16).astype(np.float64)
    keys = Keys(scores, np.append(np.zeros((1, DIM)), random.standard_normal((100, DIM)), 0))
    p = np.exp(scores)
    half = p.astype(np.float16).astype(np.float64)
    assert exceeds(keys, half / p.sum()) <= 1
    assert exceeds(keys, np.where(half < 2**-14, 0, half) / p.sum()) > 5
    assert exceeds(keys, np.where(half < 2**-17, 0, half) / p.sum()) > 1


@pytest.mark.parametrize("n", [1000, 8192])
def test_a_dropped_key_of_a_long_row_is_found(n: int) -> None:
    """Though the weights of most of 8,192 keys, once they are normalised, are no normal numbers of float16."""
    random = np.random.default_rng(0)
    scores = random.standard_normal(n).astype(np.float16).astype(np.float64)
    keys, p = Keys(scores, random.standard_normal((n, 64))), np.exp(scores)
    p /= p.sum()
    dropped = np.argsort(p)[n // 2]
    assert exceeds(keys, np.where(np.arange(n) == dropped, 0, p)) > 1
