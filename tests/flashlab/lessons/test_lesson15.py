"""Lesson 15: caches and forms against what the machine counts, judges of classes, and what the text says."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import lesson15_int8
from flashlab.lessons.catalogue import CLASS_EXERCISES, EXERCISES, class_solution, solution
from flashlab.lessons.lesson07 import measured
from flashlab.lessons.lesson15 import CACHES, HEADS, absorbed, cached, crossing, token_bytes, unfolded
from flashlab.lessons.lesson15_forms import CHOICE_SLIPS, DAY, Layer
from flashlab.player.grid import operation_of, roles_of
from simulator import Problem, Tile
from simulator.operations.attention import ATTENTION
from simulator.operations.latent import LATENT, latent_problem
from simulator.operations.paged import PAGED
from tests.flashlab.lessons.answers import class_of
from tests.flashlab.lessons.class_misconceptions import MISCONCEPTIONS as OF_CLASSES
from tests.flashlab.lessons.misconceptions import MISCONCEPTIONS
from tests.tiers import examples

TEXT = (Path(__file__).resolve().parents[3] / "notebooks" / "source" / "15_cost.md").read_text(encoding="utf-8")

# -- one tile, K and V --------------------------------------------------------------------------------------------


@examples(10)
@given(
    heads=st.integers(1, 70),
    len_kv=st.integers(1, 300),
    batch=st.integers(1, 2),
    tile=st.sampled_from([(16, 32), (64, 64)]),
)
def test_the_budget_is_that_of_mla(heads: int, len_kv: int, batch: int, tile: tuple[int, int]):
    """Up to 512 keys, which mla has in one chunk."""
    p = latent_problem(batch=batch, heads=heads, len_kv=len_kv, dtype="float16")
    ours, budget = fl.count("mla", p, tile=tile), EXERCISES["15.2"].budget(p, Tile(*tile))
    assert dict(budget.tensors) == {
        name: (t.hbm_read, t.hbm_write) for name, t in ours.by_tensor.items() if t.hbm_read or t.hbm_write
    }
    assert ours.flops.matmul == budget.matmul


def test_the_solution_attends_as_mla_does():
    arrays: Any = LATENT.draw(latent_problem(heads=20, len_kv=90, dtype="float16"), 3)
    mine, ours = (fl.simulate(x, **arrays, tile=(16, 32)).out for x in (solution("15.2"), "mla"))
    assert mine == pytest.approx(ours, abs=2e-3)


def test_cases_are_far_apart_where_they_say_so():
    """By rows, and below any finite stand-in for −∞. The values are what they were."""
    *_, rising, falling = EXERCISES["15.2"].cases(Random(1))
    for case, first in ((rising, False), (falling, True)):
        q, latent = case.arrays().values()
        s = case.problem.scale * np.einsum("bhqd,bkd->bhqk", q.astype(float), latent[:, 0].astype(float))[0, :, 0]
        assert s.max() < -1e4 and (s.argmax(-1) < 4).all() == first
        assert (np.diff(s.max(-1)) < -300).any() and np.abs(latent[..., :512]).max() < 10


# -- caches and forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHES)
def test_a_tokens_bytes_are_those_that_the_machine_counts(name: str):
    assert cached(name) == CACHES[name].token


@examples(20)
@given(heads=st.integers(1, 64), queries=st.integers(1, 5), keys=st.integers(1, 5000))
def test_both_forms_are_what_the_library_counts(heads: int, queries: int, keys: int):
    """Attention by its operations, and the matrices by the FLOPs of products: of q with A, and of the rows with A and B."""
    rows, made = absorbed(heads, queries, keys), unfolded(heads, queries, keys)
    p = latent_problem(heads=heads, len_q=queries, len_kv=keys)
    plain = Problem(batch=1, heads=heads, len_q=queries, len_kv=keys, head_dim=192, head_dim_v=128, dtype="bfloat16")
    matrices = 2 * heads * 512 * (128 + 128)
    assert rows.flops == LATENT.flops(p) + queries * matrices
    assert made.flops == ATTENTION.flops(plain) + keys * matrices
    read = fl.count("mla", latent_problem(heads=1, len_kv=keys)).by_tensor["latent"].hbm_read
    moved = fl.count("flash2", plain.replace(len_q=1), tile=(64, 64), device="h200").by_tensor
    assert rows.nbytes == read
    assert made.nbytes == read + 2 * (moved["k"].hbm_read + moved["v"].hbm_read)


@pytest.mark.parametrize("device", [None, "h200", "l4"])
def test_from_the_crossing_on_the_absorbed_form_loses(device: Any):
    def cost(form: Any, queries: int) -> float:
        found = form(HEADS, queries, 1 << 20)
        return (
            found.flops
            if device is None
            else found.seconds(fl.DEVICES[device].bandwidth, fl.DEVICES[device].flops("bfloat16"))
        )

    first = next(n for n in range(1, 1000) if cost(absorbed, n) > cost(unfolded, n))
    assert crossing(device) == first


def test_a_fresh_prompt_is_unfolded():
    """Absorbing costs then what unfolding costs, and pairs cost more."""
    assert "So a fresh prompt is unfolded, however short it is." in TEXT
    for n in (1, 10, 1000):
        rows, made = absorbed(HEADS, n, n), unfolded(HEADS, n, n)
        assert made.flops - rows.flops == 2 * HEADS * n * n * (320 - 1088)


def test_the_day_has_requests_for_both_forms_and_no_ties():
    """And each rule of thumb chooses wrongly somewhere."""
    for x in DAY:
        assert abs(x.seconds("absorbed") / x.seconds("unfolded") - 1) > 1e-6, x
    best = [x.best for x in DAY]
    assert min(best.count(form) for form in ("absorbed", "unfolded")) > 100
    for said, rule in CHOICE_SLIPS.items():
        assert [rule(x) for x in DAY] != best, said


@examples(10)
@given(heads=st.integers(1, 3), queries=st.integers(1, 4), tokens=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_layer_unfolded_is_attention(heads: int, queries: int, tokens: int, seed: int):
    layer = Layer.drawn(seed, heads, queries, tokens)
    c, r = layer.rows[:, :512], layer.rows[:, 512:]
    k = np.stack([np.concatenate([c @ a.T, r], axis=1) for a in layer.a])
    v = np.stack([c @ b.T for b in layer.b])
    due = fl.naive(*(x[None].astype(np.float32) for x in (layer.q, k, v)), scale=192**-0.5).out[0]
    assert layer.unfolded() == pytest.approx(due, abs=1e-4)


# -- eight bits ---------------------------------------------------------------------------------------------------


def test_the_solution_keeps_what_the_library_keeps():
    for kept in lesson15_int8.kept().values():
        due = fl.quantize_cache(kept.k[None, None].astype(np.float32), kept.v[None, None].astype(np.float32))
        for x, codes, scales in ((kept.k, due.k, due.k_scale), (kept.v, due.v, due.v_scale)):
            mine = class_solution("15.4")().store(x)
            assert mine[0] == pytest.approx(codes[0, 0], abs=1)  # the library divides in float32
            own = np.abs(x).max(-1) > 0
            assert scales is not None and mine[1][own, 0] == pytest.approx(scales[0, 0][own], rel=1e-6)


def test_codes_that_are_multiplied_one_by_one_are_noted_and_products_are_not():
    codes, noted = np.ones((90, 64), np.int8).view(lesson15_int8.Codes), lesson15_int8.Codes
    q, scales = np.ones((5, 64)), np.ones((90, 1), np.float32)
    for way in (
        lambda: q @ codes.T * scales.T,
        lambda: np.einsum("rd,td->rt", q, codes) * scales.T,
        lambda: np.dot(q, codes.T) * 2.0,
    ):
        noted.unfolded = 0
        way()
        assert not noted.unfolded
    for way in (lambda: codes * scales, lambda: codes.astype(float) * scales, lambda: scales.T * codes.T):
        noted.unfolded = 0
        way()
        assert noted.unfolded == 90 * 64


# -- answers ------------------------------------------------------------------------------------------------------

OTHERS = {
    "15.1": """
class Mine:
    def query(self, q, a):
        out = np.empty((*q.shape[:2], 576))
        out[..., 512:] = q[..., 128:]
        out[..., :512] = np.einsum("hqd,hdc->hqc", q[..., :128], a)
        return out

    def attend(self, x, rows):
        out = []
        for head in x:
            p = np.exp((s := head @ rows.T * 192**-0.5) - s.max(1)[:, None])
            out.append(p @ rows[:, :-64] / p.sum(1)[:, None])
        return np.array(out)

    def output(self, o, b):
        return np.einsum("hqc,hdc->hqd", o, b)
""",
    "15.3": """
class Mine:
    def absorbed(self, heads, queries, keys):
        return 1152.0 * keys, 2176.0 * heads * queries * keys + 262144.0 * heads * queries

    def unfolded(self, heads, queries, keys):
        return keys * (1152.0 + 4 * 320 * heads), heads * (262144.0 * keys + 640.0 * queries * keys)

    def choose(self, heads, queries, keys, bandwidth, rate):
        a, b = self.absorbed(heads, queries, keys), self.unfolded(heads, queries, keys)
        slow = [max(x[0] * rate, x[1] * bandwidth) for x in (a, b)]
        return "unfolded" if slow[1] < slow[0] else "absorbed"
""",
    "15.4": """
class Mine:
    def store(self, x):
        scales = np.maximum(abs(x).max(1), 1e-30).astype(np.float32)[:, None] / np.float32(127)
        return np.clip(np.round(x / scales), -127, 127).astype("int8"), scales

    def attend(self, q, keys, values):
        s = np.einsum("rd,td->rt", q, keys[0]) * keys[1][:, 0] / q.shape[1] ** 0.5
        p = np.exp(s - s.max(1)[:, None])
        return np.dot(p * values[1][:, 0], values[0]) / p.sum(1)[:, None]

    def errors(self, q, k, v):
        one, norm = np.ones((len(k), 1)), np.linalg.norm
        due = self.attend(q, (k, one), (v, one))
        first = norm(self.attend(q, self.store(k), (v, one)) - due) / norm(due)
        return first, norm(self.attend(q, (k, one), self.store(v)) - due) / norm(due)
""",
}
"""Right answers in another form."""


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(name: str):
    verdict = fl.check(class_of(OTHERS[name]), exercise=name)
    assert verdict.passed, repr(verdict)


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    "returned", ["None", "1.5", "'x'", "(None, None)", "np.zeros(3)", "np.array(['a'])", "(1, 2, 3)", "1 / 0"]
)
@pytest.mark.parametrize("name", OTHERS)
def test_nonsense_is_told_in_a_line(name: str, returned: str):
    methods = CLASS_EXERCISES[name].methods
    text = "class Mine:\n" + "".join(
        f"    def {m}(self, {', '.join(p)}):\n        return {returned}\n" for m, p in methods.items()
    )
    verdict = fl.check(class_of(text), exercise=name)
    assert verdict.kind in ("usage", "crash", "numbers") and verdict.step == next(iter(methods)), repr(verdict)
    assert "\n" not in verdict.message and verdict.message


@pytest.mark.usefixtures("without_child")
def test_a_class_that_cannot_be_made_is_told():
    text = CLASS_EXERCISES["15.1"].solution.replace(
        "    def query", "    def __init__(self):\n        1 / 0\n\n    def query", 1
    )
    verdict = fl.check(class_of(text), exercise="15.1")
    assert (verdict.kind, verdict.step) == ("crash", "__init__") and "ZeroDivisionError" in verdict.message


SENTENCES = {
    "15.1": {
        "The query absorbs the head's key matrix A": "a-of-the-first-head",
        "What carries the position absorbs nothing": "position-is-zero",
        "The scores keep their scale": "the-root-of-576",
        "The mean is taken of the c of the rows": "values-are-whole-rows",
        "the head's value matrix B waits until after the sum": "b-isn-t-applied",
        "equal, in float64": "in-float32",
    },
    "15.2": {
        "All heads are rows of a tile": "a-block-for-each-head",
        "so are the queries of a few new tokens": "heads-of-one-query",
        "A tile of latent rows is loaded once": "loads-the-tile-again",
        "with all of its columns it is K": "scores-without-position",
        "with the first 512 it is V": "values-with-position",
        "once for all heads of a tile": "loads-for-each-head",
        "not a byte for V": "loads-v-by-itself",
    },
    "15.3": {
        "each byte that moves": "rows-aren-t-read",
        "all FLOPs, those of A and B included": "absorbing-is-free",
        "a row is read once for all heads and queries": "a-row-for-each-head",
        "each head's keys and values are made once": "made-for-each-query",
        "written, and read": "written-and-never-read",
        "as long as the slower of its bytes and its FLOPs": "both-times-added",
        "on three GPUs": "by-the-queries-alone",
        "compares each choice with the best": "always-absorbed",
    },
    "15.4": {
        "Keep K and V in int8": "codes-of-32-bits",
        "with a float32 scale": "scales-of-64-bits",
        "for each token": "one-scale-for-all",
        "without unfolding them": "unfolds-k",
        "K's scales meet the scores": "scores-without-scales",
        "V's the weights": "v-s-scales-behind-the-sum",
        "with K alone rounded": "k-beside-a-rounded-v",
        "with V alone": "v-beside-a-rounded-k",
    },
}
"""What each task says, and a wrong answer that fails because of it."""


@pytest.mark.parametrize("name", SENTENCES)
def test_each_sentence_of_a_task_has_a_wrong_answer(name: str):
    task = (EXERCISES | CLASS_EXERCISES)[name].task
    known = {wrong.name for wrong in (*MISCONCEPTIONS, *OF_CLASSES) if wrong.exercise == name}
    assert len(known) >= 8
    for sentence, wrong in SENTENCES[name].items():
        assert sentence in task and wrong in known, (sentence, wrong)


# -- what the text says -------------------------------------------------------------------------------------------


def test_the_first_insight_comes_within_a_thousand_words():
    before, found, _ = TEXT.partition("**The smallest cache isn't the fastest one**")
    assert found and len(before.split()) < 1000


def test_the_smallest_cache_is_not_the_fastest():
    """Four queries at once on an H200. With one the row wins, by less than its bytes say."""

    def of(queries: int) -> dict[str, float]:
        return {name: max(cache.nanoseconds(queries)) for name, cache in CACHES.items()}

    assert min(CACHES, key=lambda name: CACHES[name].token) == "one latent row"
    assert min(of(4), key=of(4).__getitem__) == "8 heads, 8 bits"
    row, eight = CACHES["one latent row"], CACHES["8 heads, 8 bits"]
    assert 1.8 < eight.token / row.token < 2 and of(4)["8 heads, 8 bits"] < of(4)["one latent row"] / 2
    assert of(1)["8 heads, 8 bits"] / eight.token * row.token < of(1)["one latent row"] < of(1)["8 heads, 8 bits"]
    assert f"{row.nanoseconds()[0]:.2f} ns" in TEXT


def test_the_93_percent_are_of_another_model_and_of_6_bits():
    row, older = 60 * token_bytes(1, 576), 95 * token_bytes(8)
    assert round(100 * (1 - row * 6 / 16 / older), 1) == 93.3 and "The 93.3 % are there" in TEXT
    assert round(100 * (1 - token_bytes(1, 576) / token_bytes(8))) == 72 and "72 %" in TEXT
    assert 1 - token_bytes(1, 576) / token_bytes(128) > 0.98 and token_bytes(1, 576) > token_bytes(1)


def test_what_the_text_says_of_times_is_what_was_measured():
    peak, shares = fl.DEVICES["h200"].flops("bfloat16"), dict[int, list[tuple[float, float]]]()
    for r in measured()["latent"]["rows"]:
        us = r["microseconds"]
        shares.setdefault(r["heads"], []).append(
            (us["read"] / us["mla_hopper"], r["flops"] / us["mla_hopper"] * 1e6 / peak)
        )
    assert all(0.75 < read < 0.85 and 0.09 < flops < 0.12 for read, flops in shares[16])  # four fifths, a tenth
    read, flops = max(shares[128])
    assert 0.5 < read < 0.6 and 0.59 < flops < 0.65  # little more than half, six tenths
    faster = {
        (where, r["kv_dtype"]): r["microseconds"]["bfloat16"] / r["microseconds"]["paged"]
        for where in ("h100", "h200")
        for r in measured()[f"eight_bits_{where}"]["rows"]
        if r["page_size"] == 16
    }
    assert max(faster.values()) < 1.75 and all(faster["h200", x] < faster["h100", x] for x in ("int8", "float8_e4m3fn"))


def test_what_the_text_says_of_k_and_v():
    data, cache = fl.sample(), class_solution("15.4")()
    q, k, v = (x[0].astype(float) for x in (data.q[:, :, -128:], data.k, data.v))
    times = [a / b for a, b in (cache.errors(q[h], k[h // 2], v[h // 2]) for h in range(4))]
    assert (
        "In three of the four heads **V forgives more**: up to three times. In the last one it's K, by a little."
        in TEXT
    )
    assert min(times[:3]) > 1.5 and 2.9 < max(times) < 3.4 and 0.85 < times[3] < 1
    few, many = (cache.errors(n * q[0], k[0], v[0]) for n in (1, 4))
    assert many[0] > 2 * few[0] and many[1] < 1.2 * few[1]  # "the larger the queries, the more it counts"
    plain = lesson15_int8.kept()["100 tokens"]
    of_k, of_v = cache.errors(*plain)
    assert of_k == pytest.approx(of_v, rel=0.1)  # "on normal random numbers it's a draw"


def test_the_player_knows_what_a_program_of_ones_own_computes():
    """By its inputs. So it shows S over latent rows, and over pages."""
    x: Any = LATENT.draw(latent_problem(heads=2, len_kv=40, dtype="float16"))
    trace = fl.simulate(solution("15.2"), **x, tile=(16, 32), trace=(0, 0)).trace
    assert (
        trace is not None
        and operation_of(trace) is LATENT
        and roles_of(trace, Problem(**trace.problem))["latent"] == "keys"
    )
    p = Problem(batch=1, heads=2, len_q=1, len_kv=40, head_dim=64, dtype="float16")
    of_pages: Any = PAGED.draw(p.replace(page_size=16))
    of_one_piece: Any = ATTENTION.draw(p)
    for name, arrays, due in (("13.1", of_pages, PAGED), ("12.1", of_one_piece, ATTENTION)):
        trace = fl.simulate(solution(name), **arrays, tile=(16, 32), trace=(0, 0)).trace
        assert trace is not None and operation_of(trace) is due
