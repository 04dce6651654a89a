"""Lesson 12: chunks and shares by brute force, budgets against the library's, the small model, and what the text says."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import kernels
from flashlab.lessons.catalogue import EXERCISES, KERNEL_EXERCISES, solution
from flashlab.lessons.lesson07 import measured
from flashlab.lessons.lesson12 import (
    LONG,
    MULTIPLIED,
    SMS,
    TOKEN,
    VOCABULARY,
    WIDTH,
    chunk_tiles,
    in_chunks,
    kv_bytes,
    microseconds,
    price,
    step_of,
    token,
)
from flashlab.lessons.lesson12_kernels import TILE, dealt, shares, skewed, softmax_parts, tree
from simulator import Problem, Tile

TEXT = (Path(__file__).resolve().parents[3] / "notebooks" / "source" / "12_one_token.md").read_text(encoding="utf-8")


@given(
    batch=st.integers(1, 40),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 20),
    len_kv=st.integers(0, 20_000),
    cols=st.sampled_from([16, 32, 64]),
)
def test_a_chunk_makes_enough_blocks_or_is_as_short_as_its_bytes_allow(
    batch: int, kv_heads: int, group: int, len_kv: int, cols: int
):
    """By the task's words: so many blocks, if only the bytes allow it; and no longer than that takes, but for rounding."""
    tile = Tile(16, cols)
    p = Problem(
        batch=batch, heads=kv_heads * group, kv_heads=kv_heads, len_q=1, len_kv=len_kv, head_dim=64, dtype="float16"
    )
    size, blocks = chunk_tiles(p, tile), batch * kv_heads * -(-group // 16)
    chunks = max(1, -(-p.key_tiles(tile) // size))
    shortest = next(n for n in range(1, 10_000) if n * cols >= 32 * group)
    assert size >= shortest
    assert blocks * chunks >= SMS or size == shortest or blocks >= SMS
    if size > shortest and blocks < SMS:
        fewest = -(-SMS // blocks)
        assert size == max(n for n in range(1, p.key_tiles(tile) + 1) if n * fewest <= p.key_tiles(tile))
    assert price(size * cols, p) <= 1 / 16 * 66 / 64 + 1e-9


@given(group=st.sampled_from([1, 2, 4, 8]), keys=st.integers(1, 4000), dim=st.sampled_from([32, 64, 128]))
def test_on_the_librarys_chunks_the_price_is_the_librarys(group: int, keys: int, dim: int):
    whole = keys * 128  # whole chunks of 128 keys
    p = Problem(batch=1, heads=group, kv_heads=1, len_q=1, len_kv=min(whole, 8192), head_dim=dim, dtype="float16")
    parts = [t for name, t in fl.count("flash_decoding_2", p).by_tensor.items() if name.startswith("partial")]
    assert sum(t.hbm_read + t.hbm_write for t in parts) == pytest.approx(price(128, p) * kv_bytes(p))


def test_where_both_rules_agree_the_budget_is_the_librarys():
    """128 keys a chunk, by 12.3's rule and by the library's."""
    p = Problem(batch=2, heads=16, kv_heads=4, len_q=1, len_kv=2048, head_dim=64, dtype="float16")
    tile = Tile(16, 32)
    assert chunk_tiles(p, tile) == 4
    ours = fl.count("flash_decoding_2", p, tile=tile).by_tensor
    for name, both in EXERCISES["12.3"].budget(p, tile).tensors.items():
        assert both == (ours[name].hbm_read, ours[name].hbm_write), name
    ours = fl.count("flash_decoding_1", p, tile=tile).by_tensor
    for name, both in EXERCISES["12.1"].budget(p, tile).tensors.items():
        assert both == (ours[name].hbm_read, ours[name].hbm_write), name


@given(size=st.integers(1, 40), keys=st.integers(1, 40), seed=st.integers(0, 99))
def test_chunks_in_any_order_are_attention(size: int, keys: int, seed: int):
    p = Problem(batch=1, heads=1, len_q=1, len_kv=keys, head_dim=4, dtype="float32")
    q, k, v = fl.random_inputs(p, seed=seed)
    order = np.random.default_rng(seed).permutation(-(-keys // size))
    found = in_chunks(p, q[0, 0, 0], k[0, 0], v[0, 0], size, list(order))
    assert found == pytest.approx(fl.naive(q, k, v).out[0, 0, 0], abs=1e-5)


def test_parts_of_a_softmax():
    draw = np.random.default_rng(0)
    s, v = draw.standard_normal((3, 7)), draw.standard_normal((3, 7, 2))
    m, l, o = softmax_parts(s, v)
    p = np.exp(s) / np.exp(s).sum(1, keepdims=True)
    assert o / l[:, None] == pytest.approx(np.einsum("rk,rkc->rc", p, v))
    assert m + np.log(l) == pytest.approx(np.log(np.exp(s).sum(1)))


# -- the small model ----------------------------------------------------------------------------------------------


def test_the_model_is_that_of_the_sample():
    """Its parameters are what multiplies, the table of tokens, and two scales in each layer and one at the end."""
    said = fl.sample().note["model"]
    assert "8 layers, width 384, 6 heads, 3 KV heads of 64" in said
    assert f"{MULTIPLIED + WIDTH * VOCABULARY + 17 * WIDTH:,} parameters" in said


@given(new=st.integers(1, 30), known=st.integers(0, 30))
def test_a_steps_pairs_are_those_of_the_mask(new: int, known: int):
    p = Problem(batch=1, heads=1, len_q=new, len_kv=new + known, head_dim=64, dtype="float16", causal=True)
    pairs = sum(len(p.visible_keys(t)) for t in range(new))
    assert step_of(new, known).flops == 2 * MULTIPLIED * new + 4 * 64 * 6 * 8 * pairs


def test_what_the_text_says_of_the_model():
    prefill, one = step_of(1024), step_of(1, known=1023)
    assert "The bytes are the same, and the work is a thousand times less" in TEXT
    assert prefill[:2] == one[:2] and 800 < prefill.flops / one.flops < 1100
    assert "A GPU that could do two hundred does one." in TEXT
    assert round(one.intensity) == 1 and 195 < fl.DEVICES["h200"].ridge("bfloat16") < 215


# -- what was measured --------------------------------------------------------------------------------------------


def test_what_the_text_says_of_times_is_what_was_measured():
    rows = {(x["batch"], x["len_kv"], x["heads"]): x["microseconds"] for x in measured()["decoding"]["rows"]}
    short, long = rows[1, 8192, 32], rows[1, 65_536, 32]
    assert "The longer sequence comes close to your prediction." in TEXT
    assert long["flash_decoding"] < 1.25 * microseconds(LONG)
    assert "The shorter one doesn't, and a kernel that *only reads* doesn't either" in TEXT
    assert short["flash_decoding"] > short["read"] > 1.3 * microseconds(TOKEN)
    assert "a third of the time is neither bytes nor FLOPs" in TEXT
    assert 1 - short["read"] / short["flash_decoding"] == pytest.approx(1 / 3, abs=0.02)
    rungs = {(x["batch"], x["len_kv"]): x["microseconds"] for x in measured()["rungs_of_decoding"]["rows"]}
    assert (
        "With 16 sequences there are 128 blocks, nearly one for each SM, and the very same program is nearly as fast"
        in TEXT
    )
    assert rungs[16, 8192]["read"] / rungs[16, 8192]["flash_decoding_1"] > 0.8
    assert rungs[1, 8192]["read"] / rungs[1, 8192]["flash_decoding_1"] < 0.1
    assert token("flash_decoding_1", TOKEN.replace(batch=16)).launches[0].blocks == 128


def test_a_batch_changes_the_bits_of_12_3_and_not_those_of_the_library():
    p = Problem(batch=16, heads=8, kv_heads=4, len_q=1, len_kv=2048, head_dim=64, dtype="float16")
    x = fl.random_inputs(p, seed=1)
    differ = {
        name: (
            fl.simulate(program, *(a[:1] for a in x), tile=(16, 32)).out[0]
            != fl.simulate(program, *x, tile=(16, 32)).out[0]
        )
        for name, program in (("12.3", solution("12.3")), ("flash_decoding_2", "flash_decoding_2"))
    }
    assert differ["12.3"].any() and not differ["flash_decoding_2"].any()


# -- CUDA ---------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=20), sms=st.integers(1, 40))
def test_tiles_are_dealt_one_after_another(lengths: list[int], sms: int):
    if not any(lengths):
        lengths = [*lengths, 1]
    row = [(i, at // TILE) for i, n in enumerate(lengths) for at in range(0, n, TILE)]
    found = dealt(np.array(lengths), sms)
    assert [tuple(x) for x in found.tolist()] == [row[t * len(row) // sms] for t in range(sms)]
    assert shares(np.array(lengths), sms).sum() == sum(lengths)


@given(seed=st.integers(0, 999), sequences=st.integers(3, 256))
def test_no_sm_has_five_per_cent_more_than_the_mean(seed: int, sequences: int):
    lengths = skewed(Random(seed), sequences)
    keys = shares(lengths)
    assert keys.max() <= 1.05 * keys.mean()
    assert lengths.max() > 5 * keys.mean()  # a block for each sequence would have much more


@given(parts=st.integers(1, 200))
def test_the_tree_has_a_node_for_each_pair(parts: int):
    levels = tree(parts)
    assert parts == 1 or sum(n // 2 for n in levels) == parts - 1  # each merge makes one of two


def test_the_same_parts_come_in_several_orders_to_one_block_and_to_many():
    launches = KERNEL_EXERCISES["12.5"].launches(Random(0))
    by_word = {word: [x for x in launches if x.alike == word] for word in {x.alike for x in launches}}
    for alike in by_word.values():
        first, second = alike
        assert not np.array_equal(first.arguments["order"], second.arguments["order"])
        assert all(np.array_equal(first.arguments[x], second.arguments[x]) for x in "oml")
    assert {len(x.grid) for x in launches} == {1} and len({x.grid for x in launches}) > 2


def test_other_bits_are_told_and_equal_bits_are_not():
    launches = KERNEL_EXERCISES["12.5"].launches(Random(0))[:2]
    out = launches[0].truth["out"].out.astype(np.float32)
    other = out.copy()
    other[3] = np.nextafter(other[3], np.float32(9))

    def judged(*outs: np.ndarray) -> str:
        counter = np.zeros(launches[0].arguments["counter"].shape)
        results: list[dict[str, Any]] = [
            {"findings": [], "moved": None, "where": "gpu", "unwritten": {}, "arrays": {"out": x, "counter": counter}}
            for x in outs
        ]
        verdict = kernels.judge(KERNEL_EXERCISES["12.5"], "", launches, results)
        return f"{verdict.kind} {verdict.message}"

    assert judged(out, out.copy()).startswith("passed")
    said = judged(out, other)
    assert said.startswith("bits out[3], in row tile 0, is ") and "parts come from the last one on" in said


def test_what_is_extra_counts_for_no_progress():
    (line,) = (line for line in str(fl.progress()).splitlines() if line.startswith("12"))
    posed = [x for x in (EXERCISES | KERNEL_EXERCISES).values() if x.lesson == "12"]
    assert len(posed) == 6 and line.endswith("exercises 0 of 4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["12.4", "12.5", "12.6"])
def test_the_solutions_have_right_numbers_and_equal_bits_on_a_gpu(name: str, tmp_path: Path):
    from flashlab.lessons import kernel_child
    from flashlab.run.arrays import cupy

    exercise = KERNEL_EXERCISES[name]
    path = tmp_path / exercise.file
    path.write_text(exercise.solution, encoding="utf-8")
    launches = exercise.launches(Random(0))
    results = [
        kernel_child.UNWATCHED | {"arrays": kernel_child.on_gpu(cupy(), path, exercise.kernel, launch), "where": "gpu"}
        for launch in launches
    ]
    verdict = kernels.judge(exercise, exercise.solution, launches, results)
    assert verdict.passed, repr(verdict)
