"""Lesson 14: mistakes are told by the step and by the reason, other right answers pass, and the text says what is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.lessons import several
from flashlab.lessons.catalogue import CLASS_EXERCISES
from flashlab.lessons.class_exercise import ClassExercise
from flashlab.lessons.lesson07 import measured
from flashlab.lessons.lesson14 import CARRIES, COMPUTES, EXERCISES, PREDICTIONS, RANKS, SHARED, hides, sends
from flashlab.lessons.lesson14_ranks import two_hosts
from flashlab.lessons.prediction import CLOSE
from flashlab.parallel.rank import Rank
from tests.flashlab.lessons.answers import class_of
from tests.flashlab.lessons.rank_misconceptions import MISCONCEPTIONS, Misconception
from tests.tiers import one_of_each

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
TEXT = (Path(__file__).resolve().parents[3] / "notebooks" / "source" / "14_several_gpus.md").read_text(encoding="utf-8")


def of(wrong: Misconception) -> str:
    """The text of an answer with a mistake."""
    text = BY_NAME[wrong.exercise].marked
    for was, becomes in zip(wrong.was.split("§"), wrong.becomes.split("§"), strict=True):
        assert was in text, was
        text = text.replace(was, becomes) if was else text
    return text


@pytest.mark.parametrize(
    "wrong",
    one_of_each(MISCONCEPTIONS, lambda each: (each.exercise, each.step), lambda each: f"{each.exercise}-{each.name}"),
)
def test_a_mistake_is_told_by_step_and_reason(wrong: Misconception):
    with np.errstate(all="ignore"):
        found = BY_NAME[wrong.exercise].judge(class_of(of(wrong)))
    assert (found.kind, found.step) == (wrong.kind, wrong.step), found
    assert re.search(wrong.why, found.message), found.message
    assert "\n" not in found.message


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_each_exercise_knows_eight_mistakes_and_what_each_means(exercise: ClassExercise):
    own = [each for each in MISCONCEPTIONS if each.exercise == exercise.name]
    assert len({each.name for each in own}) == len(own) >= 8
    assert {each.step for each in own} == set(exercise.slips)
    assert len(exercise.hints) >= 4


@pytest.mark.usefixtures("without_child")
def test_a_check_of_a_function_says_what_it_means():
    text = CLASS_EXERCISES["14.1"].marked.replace("of=whose", "of=rank.index")
    said = repr(fl.check(class_of(text), exercise="14.1"))
    assert "it is said to be rank 0's" in said and CLASS_EXERCISES["14.1"].slips["attend"] in said
    passed = repr(fl.check(class_of(CLASS_EXERCISES["14.3"].solution), exercise="14.3"))
    assert re.search(r"link dk, dv sent +28,672 of +28,672  equal", passed) and "times that of one GPU" in passed


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("class A:\n    pass\n", "takes a function of (rank), and this is a class"),
        ("def f():\n    pass\n", "f takes (), and is called as f(rank)"),
    ],
)
def test_what_is_no_function_of_a_rank_is_told_in_a_line(answer: str, says: str):
    verdict = fl.check(class_of(answer), exercise="14.1")
    assert verdict.kind == "usage" and says in verdict.message and "\n" not in verdict.message
    assert "takes a function of (rank): the thing itself" in fl.check("ring.py", exercise="14.1").message
    assert "the library's own" in fl.check(fl.parallel.simulate, exercise="14.1").message


# -- other answers that are right ---------------------------------------------------------------------------------


def test_another_right_ring_passes():
    """Merged step by step, in arrays of one's own, with a message of one array."""

    def my_ring(rank: Any) -> Any:
        both = np.stack([rank.k, rank.v])
        out = lse = None
        for step in range(rank.ranks):
            if step + 1 < rank.ranks:
                rank.send(rank.right, f"step {step}", kv=both)
            part = rank.attend(both[0], both[1], of=(rank.index - step) % rank.ranks)
            out, lse = part if out is None else fl.merge([out, part[0]], [lse, part[1]])
            if step + 1 < rank.ranks:
                both = yield rank.receive(rank.left)
        return out, lse

    assert BY_NAME["14.1"].judge(my_ring).kind == "passed"


def test_a_way_back_in_another_order_passes():
    """It gets the next K and V before it computes, sends both sums as one array, and leaves out what it sees nothing of."""

    def mine(rank: Any) -> Any:
        n, dq, home, kv = rank.ranks, np.zeros(rank.q.shape, np.float32), None, np.stack([rank.k, rank.v])
        for step in range(n):
            now, of = kv, (rank.index - step) % n
            if step < n - 1:
                rank.send(rank.right, step, kv=kv)
            sums = np.zeros(kv.shape, np.float32)
            if not (rank.problem.causal and rank.layout == "contiguous" and of > rank.index):
                part, *mine = rank.attend_back(*now, of=of)
                dq, sums = dq + part, np.stack(mine)
            if step == 0:
                home = sums
            else:
                if step > 1:
                    sums = sums + (yield rank.receive(rank.left))
                rank.send(rank.right, step, sums=sums)
            if step < n - 1:
                kv = yield rank.receive(rank.left)
        if n > 1:
            home = home + (yield rank.receive(rank.left))
        return dq, *home

    found = BY_NAME["14.3"].judge(mine)
    assert found.kind == "passed", found


def test_a_striped_cache_by_exchange_passes():
    def mine(rank: Any) -> Any:
        heads = rank.q.shape[1]
        queries = yield from rank.exchange("queries", lambda peer: {"q": rank.q})
        out, lse = rank.attention(np.concatenate(queries, axis=1), rank.k, rank.v)

        def give(peer: int) -> Any:
            own = slice(peer * heads, (peer + 1) * heads)
            return {"lse": lse[:, own], "out": out[:, own]}

        lses, outs = zip(*(yield from rank.exchange("outputs", give)), strict=True)
        top = np.max(lses, axis=0)
        weights = np.exp(np.stack(lses) - top)
        total = sum(w[..., None] * x for w, x in zip(weights, outs, strict=True))
        return total / weights.sum(0)[..., None], top + np.log(weights.sum(0))

    found = BY_NAME["14.4"].judge(mine)
    assert found.kind == "passed", found


def test_the_mistakes_of_a_schedule_take_longer_than_the_solution():
    """Of several schedules with right numbers, in milliseconds as the timeline says."""
    said = {}
    for each in MISCONCEPTIONS:
        if each.step == "waits":
            said[each.name] = float(BY_NAME["14.5"].judge(class_of(of(each))).message.partition(" ms")[0])
    assert said == {
        "a-plain-ring": 22, "across-first": 10.5, "everybody-to-everybody": 22, "all-of-them-first": 29,
        "across-in-the-end": 11, "computes-before-it-hands-on": 9,
    }  # fmt: skip


@pytest.mark.parametrize("nonsense", [None, 5, "ring", np.zeros(3), object(), dict])
@pytest.mark.parametrize("name", BY_NAME)
def test_nonsense_is_told(name: str, nonsense: Any):
    verdict = fl.check(nonsense, exercise=name)
    assert not verdict.passed and verdict.message


def test_predictions_have_slips_that_are_wrong():
    """Each slip is another number than the truth by more than counts as right, and no two are alike."""
    for prediction in PREDICTIONS:
        truth = prediction.truth()
        for name, slips in prediction.slips().items():
            values = [truth[name], *slips.values()]
            assert len(slips) >= 4
            for i, one in enumerate(values):
                assert all(abs(one - other) > CLOSE * one for other in values[i + 1 :]), (name, values)


def test_what_ranks_send_by_hand():
    """32 heads or 8 of K and V, 16,384 rows a rank, 128 elements of 2 bytes, seven other ranks."""
    row = 16_384 * 128 * 2
    assert [sends(scheme, 8) for scheme in ("ring", "ulysses")] == [7 * 16 * row, 7 * (4 + 1 + 1 + 4) * row]
    assert [sends(scheme, 2) for scheme in ("ring", "ulysses")] == [7 * 4 * row, 7 * (4 + 1 + 1 + 4) * row]


def test_from_which_length_on_the_link_hides_by_hand():
    """n rows a rank: 2 products of n by n / 2 pairs for 32 heads, against K and V of n keys of 8 heads."""
    rows = (2 * 8 * 128 * 2 / 300e9) / (2 * 2 * 128 * 32 / 2 / 800e12)
    assert hides(causal=True) == pytest.approx(8 * rows) == pytest.approx(2 * hides(causal=False))


# -- what the text says -------------------------------------------------------------------------------------------


def test_the_first_insight_comes_within_a_thousand_words():
    assert len(TEXT.partition("This is the first insight")[0].split()) < 1000


def test_four_ranks_with_contiguous_rows_do_nothing_for_four_tenths_of_the_time():
    counts = fl.parallel.count("ring", several.LONG, ranks=4, layout="contiguous")
    assert 0.38 < 1 - fl.parallel.timeline(counts).busy < 0.45 and "four tenths of what you paid for" in TEXT
    assert several.LONG.len_q == 32_768 and "32,768 tokens" in TEXT


def test_a_link_is_a_tenth_of_hbm_and_a_network_a_sixtieth():
    rates = fl.parallel.rates("h100")
    assert 2_900e9 < rates.reading < 3_200e9 and "3,000 GB per second" in TEXT
    assert 45e-6 < rates.latency < 60e-6 and "a latency of some 50 µs" in TEXT
    assert 9 < rates.reading / rates.link < 11 and 55 < rates.reading / rates.network < 65
    hosts = two_hosts()
    assert round(hosts.link / hosts.network) == 6 == round(rates.link / rates.network)


def test_the_claims_are_those_of_the_files():
    data = measured()["parallel"]
    speed = {(row["contender"], row["length"]): row for row in data["speed"] if not row["backward"]}
    faster = {n: row["ms"] / speed["ring", n]["ms"] for (who, n), row in speed.items() if who == "one GPU"}
    assert faster[16_384] < 1.5 and faster[131_072] > 1.85  # "less than one and a half", "nearly"
    assert all(row["predicted"] < row["ms"] for row in speed.values() if row["predicted"] is not None)
    decode = {(row["contender"], row["keys"]): row["ms"] for row in data["decode"]}
    share = {key: decode[f"one GPU{key[0]}", key[1]] / decode[f"ranks{key[0]}", key[1]]
             for key in ((how, n) for how in ("", ", in a graph") for n in (131_072, 1_048_576))}  # fmt: skip
    assert 0.5 < decode["ranks", 131_072] < 0.6 and share["", 131_072] < 1 < share[", in a graph", 131_072] < 1.3
    assert min(share[how, 1_048_576] for how in ("", ", in a graph")) > 1.7


def test_the_way_back_sends_three_times_what_the_way_there_sends():
    p = fl.Problem(batch=1, heads=8, kv_heads=2, len_q=65_536, head_dim=128, dtype="float16", causal=True)
    there, both = (fl.parallel.count("ring", p, ranks=4, backward=back) for back in (False, True))
    assert both.sent[0] == 4 * there.sent[0]
    assert both.flops[0] / there.flops[0] == pytest.approx(3.5, rel=0.01)  # 2.5 on the way back
    assert "sends three times" in BY_NAME["14.3"].afterwards and "2.5 times" in BY_NAME["14.3"].afterwards


def test_a_question_s_numbers_are_the_prediction_s():
    assert (SHARED.len_q, SHARED.heads, SHARED.kv_heads, SHARED.head_dim, RANKS) == (131_072, 32, 8, 128, 8)
    assert "800 TFLOP/s, and a link carries 300 GB/s" in TEXT and (COMPUTES, CARRIES) == (800e12, 300e9)


def test_a_way_back_without_attend_back_passes():
    """A rank's other calls are as good: each launch by hand."""

    class ByHand:
        def __init__(self, rank: Any) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Any:
            return getattr(self.rank, name)

        def attend_back(self, k: Any, v: Any, of: int) -> Any:
            return Rank.attend_back(self.rank.rank, k, v, of)  # which nobody notes

    solution = class_of(CLASS_EXERCISES["14.3"].solution)

    def mine(rank: Any) -> Any:
        return (yield from solution(ByHand(rank)))

    found = BY_NAME["14.3"].judge(mine)
    assert found.kind == "passed", found


def test_another_kind_of_product_is_told():
    text = CLASS_EXERCISES["14.4"].solution.replace(
        "rank.attention(np.concatenate(queries, axis=1), rank.k, rank.v)",
        "rank.attend(rank.k, rank.v, of=rank.index)",
    )
    found = BY_NAME["14.4"].judge(class_of(text))
    assert found.kind != "passed" and found.step in BY_NAME["14.4"].slips, found
