"""K and V in pages: the judge against a loop, the program against the judge, the formula, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.attention import naive_loop
from simulator.operations.paged import PAGED, STRAY
from tests.tiers import examples

TILES = st.sampled_from([None, (16, 16), (5, 7), (16, 48)])
SMALL: dict[str, Any] = {"batch": 2, "heads": 2, "head_dim": 16, "dtype": "float16", "page_size": 4}


def small(**changes: Any) -> fl.Problem:
    return fl.Problem(**{**SMALL, **changes})


@st.composite
def problems(draw: st.DrawFn, longest: int = 300) -> fl.Problem:
    """Requests of any lengths in pages of any size, with more room than they need in the pool and in the table."""
    kv_heads, len_q = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 9, 32]))
    lengths = draw(st.lists(st.integers(0, longest) | st.just(0), min_size=1, max_size=4))
    p = fl.Problem(
        batch=len(lengths),
        heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        lengths=[(len_q, n) for n in lengths],
        head_dim=draw(st.sampled_from([8, 16, 19])),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        page_size=draw(st.sampled_from([1, 2, 3, 16, 64, 100, 256])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 200), st.none() | st.integers(0, 5))),
        drafts=draw(st.booleans()),
    )
    return p.replace(pages=p.pages + draw(st.integers(0, 3)), len_kv=p.len_kv + draw(st.integers(0, 200)))


def within(found: dict[str, Any], problem: fl.Problem, arrays: Any) -> bool:
    truth = PAGED.judge(problem, arrays)
    bounds = PAGED.bounds(problem, arrays, truth)
    out: Any = np.linalg.norm(found["out"].astype(np.float64) - truth["out"], axis=-1) <= bounds["out"]
    with np.errstate(invalid="ignore"):
        off: Any = np.abs(found["lse"] - truth["lse"])
        lse: Any = (found["lse"] == truth["lse"]) | (off <= bounds["lse"])
    return bool(out.all() and lse.all())


@examples(25)
@given(problems(longest=40), st.integers(0, 9))
def test_the_judge_finds_each_key_where_a_loop_finds_it(p: fl.Problem, seed: int) -> None:
    arrays: Any = PAGED.draw(p, seed)
    truth, size = PAGED.judge(p, arrays), p.page_size or 1
    for b, n in enumerate(p.seq_lens):
        own = np.empty((2, 1, p.kv_heads, n, p.head_dim), arrays["k"].dtype)
        for key in range(n):
            page = arrays["block_table"][b, key // size]
            own[:, 0, :, key] = [arrays[name][page, :, key % size] for name in "kv"]
        shown = np.ones((p.len_q, n), bool)
        for i, draft in np.ndindex((p.len_q, p.len_q) if p.drafts else (0, 0)):
            if (key := n - p.len_q + draft) >= 0:
                shown[i, key] = int(arrays["draft_mask"][b, i]) >> draft & 1
        alone = naive_loop(arrays["q"][b : b + 1], *own, causal=p.causal, window=p.window, mask=shown)
        np.testing.assert_allclose(truth["out"][b : b + 1], alone.out, atol=1e-12)
        np.testing.assert_allclose(truth["lse"][b : b + 1], alone.lse, atol=1e-12)


@examples(25)
@given(problems(), TILES, st.sampled_from(["h100", "t4"]), st.integers(0, 9))
def test_the_program_is_right_and_counts_what_the_formula_does(
    p: fl.Problem, tile: Any, device: Any, seed: int
) -> None:
    """All that no request owns is NaN, so what it reads of that shows."""
    arrays: Any = PAGED.draw(p, seed)
    masks: dict[str, Any] = {"causal": p.causal, "window": p.window}
    run = fl.simulate("paged", **arrays, **masks, tile=tile, device=device, lse=True)
    assert run.counts == fl.count("paged", run.counts.problem, tile=tile, device=device, lse=True)
    formula: Any = fl.CATALOGUE["paged"].formula
    fl.check_formula("paged", formula, p, tile=tile, device=device)
    assert within(dict(run.outputs), p, arrays)


@examples(15)
@given(problems(longest=120), st.integers(0, 9))
def test_pages_change_no_bit(p: fl.Problem, seed: int) -> None:
    """It is flash_decoding on the gathered keys, whatever the other requests are."""
    p = p.replace(drafts=False)
    arrays: Any = PAGED.draw(p, seed)
    run = fl.simulate("paged", **arrays, **p.masks, tile=(16, 16), lse=True)
    gathered: Any = PAGED.gathered(p, arrays)
    for b, (plain, own) in enumerate(gathered):
        alone = fl.simulate("flash_decoding", **own, **plain.masks, tile=(16, 16), lse=True)
        assert alone.out.tobytes() == run.out[b : b + 1].tobytes()
        assert run.lse is not None and alone.lse is not None
        assert alone.lse.tobytes() == run.lse[b : b + 1].tobytes()


def test_what_is_read() -> None:
    """K and V once, an entry of the table per page, and the lengths twice by every walk of every block: four warps compute, and
    four merge."""
    p = fl.Problem(
        batch=2, heads=8, kv_heads=2, lengths=[(1, 1000), (1, 40)], head_dim=128, dtype="bfloat16", page_size=16
    )
    c = fl.count("paged", p, device="h200")
    assert c.by_tensor["k"].hbm_read == c.by_tensor["v"].hbm_read == 2 * 1040 * 256
    assert c.by_tensor["block_table"].hbm_read == 4 * 2 * (63 + 3), "no page lies in two warps' keys"
    blocks = c.launches[0].blocks
    assert c.config is not None and blocks == 2 * (2 + 1)
    assert c.by_tensor["seq_lens"].hbm_read == 4 * 2 * 2 * 2 * 4 * blocks
    keys = fl.count("paged", p.replace(page_size=1, pages=None), device="h200")
    assert keys.by_tensor["block_table"].hbm_read == 4 * 2 * 1040
    assert c.hbm.peak > c.tensors["k"].nbytes * 2 == 2 * (63 + 3) * 16 * 2 * 256


def test_what_is_read_of_a_mask_of_drafts() -> None:
    """Each warp that computes reads a word for each query of its row tile, in each run whose keys have a draft."""
    p = small(batch=1, heads=8, kv_heads=2, lengths=[(7, 300)], drafts=True)  # the drafts lie in one chunk of 64
    words = fl.count("paged", p, tile=(16, 16)).by_tensor["draft_mask"].hbm_read
    assert words == 4 * 2 * (4 + 3)  # bytes, KV heads; row tiles of 4 queries and of 3, for one warp
    apart = fl.count("paged", p.replace(lengths=[(7, 322)], len_kv=322, pages=None), tile=(16, 16))
    run = dict(apart.config.constants)["RUN"] if apart.config else 0
    assert apart.by_tensor["draft_mask"].hbm_read == (words if run > 1 and 320 // 64 % run else 2 * words)
    none = fl.count("paged", p.replace(drafts=False), tile=(16, 16))
    assert {
        x: n for x, n in fl.count("paged", p, tile=(16, 16)).by_tensor.items() if x != "draft_mask"
    } == none.by_tensor


def test_equal_problems_are_equal() -> None:
    said = small(lengths=[(1, 30), (1, 9)])
    assert said == said.replace(len_q=1, len_kv=30, pages=11) and hash(said) == hash(said.replace(pages=11))
    assert (said.len_q, said.len_kv, said.pages, said.table_pages) == (1, 30, 8 + 3, 8)
    assert small(len_q=1, len_kv=30).pages == 16
    assert said.replace(page_size=None, pages=None, lengths=None, len_q=1, len_kv=30).pages == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 0}, "page_size = 0: expected an integer of at least 1"),
    ({"len_q": None}, "len_q = None: expected an integer of at least 0, or lengths"),
    ({"page_size": None, "pages": 3}, "pages = 3: expected None without a page_size"),
    ({"lengths": [(1, 8)]}, "lengths = 1 requests: expected 2, the batch"),
    ({"lengths": [(1, 8), (2, 8)]}, "lengths[1] = (2, 8): expected len_q = 1 queries, as all requests have"),
    (
        {"lengths": [(1, 8), (1, 31)]},
        "lengths[1] = (1, 31): expected len_q = 1 queries, as all requests have, and up to",
    ),
    ({"page_size": None, "drafts": True}, "drafts = True: expected False without a page_size"),
    ({"len_q": 33, "drafts": True}, "len_q = 33: expected at most 32 with drafts: a word has as many bits"),
    ({"batch": 2**21}, "batch = 2097152: expected at most 1,048,576 requests with a page_size"),
]


@pytest.mark.parametrize(("changes", "line"), BAD)
def test_a_problem_that_cannot_be_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(fl.UsageError) as refused:
        small(**{"len_q": 1, "len_kv": 30, **changes})
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def given_arrays() -> dict[str, Any]:
    return PAGED.draw(small(lengths=[(1, 30), (1, 9)]))


def changed(name: str, place: Any, value: int) -> dict[str, Any]:
    arrays = given_arrays()
    arrays[name][place] = value
    return arrays


WRONG: list[tuple[dict[str, Any], str]] = [
    (changed("block_table", (1, 2), 11), "block_table[1, 2] = 11: expected a page of the pool, from 0 to 10"),
    (changed("block_table", (0, 7), -1), "block_table[0, 7] = -1: expected a page of the pool, from 0 to 10"),
    (changed("seq_lens", 1, 33), "seq_lens[1] = 33: expected an integer from 0 to 32: the block table"),
    (changed("seq_lens", 0, -1), "seq_lens[0] = -1: expected an integer from 0 to 32"),
    (changed("seq_lens", 1, 31), f"block_table[1, 3] = {STRAY}: expected a page of the pool"),
    ({"lengths": [(1, 30), (1, 10)]}, "seq_lens[1] = 9: expected 10, as lengths say"),
    ({"block_table": None}, "block_table = None: expected an array: paged attention takes q, k, v, block_table"),
    ({"block_table": np.zeros((2, 8), np.int64)}, "block_table.dtype = 'int64': expected int32"),
    ({"block_table": np.zeros((3, 8), np.int32)}, "block_table.shape = (3, 8): expected (2, 8), its axes are batch"),
    ({"block_table": np.zeros(8, np.int32)}, "block_table.shape = (8,): expected (batch, pages per request)"),
    ({"seq_lens": np.zeros(2, np.int64)}, "seq_lens.dtype = 'int64': expected int32"),
    ({"seq_lens": np.zeros(3, np.int32)}, "seq_lens.shape = (3,): expected (2,)"),
    ({"k": np.zeros((11, 2, 0, 16), np.float16)}, "k.shape = (11, 2, 0, 16): expected pages of at least one key"),
    ({"v": np.zeros((10, 2, 4, 16), np.float16)}, "v.shape = (10, 2, 4, 16): expected (11, 2, 4, 16)"),
    ({"q": np.zeros((2, 2, 16), np.float16)}, "q.shape = (2, 2, 16): expected (batch, heads, len_q, head_dim)"),
    ({"k": np.zeros((11, 2, 4, 16), np.float32)}, "k.dtype = 'float32': expected float16, as q has"),
    (
        {"draft_mask": np.zeros((2, 2), np.uint32)},
        "draft_mask.shape = (2, 2): expected (2, 1), its axes are batch, len_q",
    ),
    ({"draft_mask": np.zeros((2, 1), bool)}, "draft_mask.dtype = 'bool': expected uint32"),
    (
        {"q": np.zeros((2, 2, 33, 16), np.float16), "draft_mask": np.zeros((2, 33), np.uint32)},
        "len_q = 33: expected at most 32",
    ),
]


@pytest.mark.parametrize(("changes", "line"), WRONG, ids=[re.sub(r"\W+", " ", line)[:40] for _, line in WRONG])
def test_bad_arrays_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    arrays = {**given_arrays(), **changes}
    for call in (fl.simulate, fl.emulate):
        with pytest.raises(fl.UsageError) as refused:
            call("paged", **arrays)
        assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_who_knows_no_pages_refuses_them_and_paged_needs_them() -> None:
    paged = small(len_q=1, len_kv=30)
    in_pages = [name for name, row in fl.CATALOGUE.items() if row.operation.in_pages]
    for name in fl.CATALOGUE:
        if name not in (*in_pages, "cascade", *fl.catalogue.of(fl.CATALOGUE["softmax_safe"].operation)):
            with pytest.raises(fl.UsageError, match="page_size = 4: expected None, or paged for pages"):
                fl.count(name, paged)
    with pytest.raises(
        fl.UsageError, match="page_size = None: expected keys per page, as K and V lie in pages, for paged"
    ):
        fl.count("paged", paged.replace(page_size=None, pages=None))
    with pytest.raises(
        fl.UsageError,
        match="alibi = True: expected nothing: paged knows causal, window, scale, soft_cap, sinks, lengths",
    ):
        fl.count("paged", paged.replace(alibi=True))
    with pytest.raises(fl.UsageError, match="tile = '16x80': expected columns of which each warp has at most 32"):
        fl.plan("paged", paged, backend="emulator", tile=(16, 80))


def test_a_trace_is_that_of_the_gathered_request() -> None:
    p = small(lengths=[(1, 30), (1, 90)])
    arrays: Any = PAGED.draw(p)
    trace = fl.simulate("paged", **arrays, lengths=p.lengths, trace=(1, 1), tile=(8, 16)).trace
    gathered: Any = PAGED.gathered(p, arrays)
    _, own = gathered[1]
    plain = fl.simulate("flash_decoding", **own, trace=(0, 1), tile=(8, 16)).trace
    assert trace is not None and plain is not None
    assert [event.step for event in trace.events] == [event.step for event in plain.events]
