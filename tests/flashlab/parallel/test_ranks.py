"""Attention on ranks is that of one rank, and what ranks send, receive and launch is what the formulas say."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.parallel import Link, Scheme
from flashlab.parallel.ledger import Launched, Received, Sent
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from tests.tiers import examples

parallel = fl.parallel
SCHEMES = ("ring", "all_gather", "ulysses", "heads")
LAYOUTS = ("contiguous", "zigzag")


def worst(found: dict[str, Any], right: dict[str, Any], bounds: dict[str, Any]) -> float:
    """The largest error of any output, relative to the rule's bound for its row."""
    shares = [0.0]
    for name, x in found.items():
        error = np.abs(x.astype(np.float64) - right[name])
        norm = np.linalg.norm(error, axis=-1) if error.ndim > bounds[name].ndim else error
        shares.append(float((norm / bounds[name]).max(initial=0.0)))
    return max(shares)


def errors(run: Any, q: Any, k: Any, v: Any, dout: Any | None = None) -> tuple[float, float]:
    """How far the outputs and the gradients are from float64, as shares of what the rule allows one GPU."""
    p = run.problem
    arrays = {"q": q, "k": k, "v": v}
    forward = {"out": run.out, "lse": run.lse}
    truth = ATTENTION.judge(p, arrays)
    of_out = worst(forward, truth, ATTENTION.bounds(p, arrays, truth))
    if dout is None:
        return of_out, 0.0
    given = arrays | forward | {"dout": dout}  # for the output that was passed back, as the rule has it
    right = BACKWARD.judge(p, given)
    return of_out, worst({"dq": run.dq, "dk": run.dk, "dv": run.dv}, right, BACKWARD.bounds(p, given, right))


def posed(ranks: int, scheme: str, **more: Any) -> fl.Problem:
    fields = {
        "heads": 8,
        "kv_heads": 8 if scheme == "heads" else 2,
        "len_q": 16 * ranks,
        "head_dim": 24,
        "dtype": "float16",
    }
    return fl.Problem(**{"batch": 1, **fields, **more})


def random(p: fl.Problem) -> tuple[Any, Any, Any, Any]:
    q, k, v = fl.random_inputs(p, seed=1)
    dout = np.random.default_rng(2).standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    return q, k, v, dout


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_compute_what_one_does(scheme: str, ranks: int, layout: str, causal: bool):
    """Within the rule that one GPU keeps. Bytes and launches are the formula's, each event of each rank."""
    p = posed(ranks, scheme, causal=causal, dtype="bfloat16" if ranks == 4 else "float32")
    q, k, v, dout = random(p)
    run = parallel.simulate(scheme, q, k, v, dout=dout, ranks=ranks, layout=layout, causal=causal)
    of_out, of_gradients = errors(run, q, k, v, dout)
    assert of_out <= 1
    assert of_gradients <= 1
    counted = parallel.count(scheme, p, ranks=ranks, layout=layout, backward=True)
    assert run.events == counted.events and run.links == counted.links and run.counts == counted.counts
    assert (run.out.dtype, run.lse.dtype, run.dk.dtype) == (q.dtype, np.float32, k.dtype)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A scheme, ranks and a layout, with a problem that they can share."""
    scheme = draw(st.sampled_from((*SCHEMES, "dcp")))
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    group, kv = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, ranks, 2 * ranks]))
    kv = 2 * ranks if scheme == "heads" and kv == 1 else kv
    heads = kv * group * (ranks if kv == 1 else 1)
    rows = draw(st.integers(0 if ranks < 3 else 1, 5)) * 2 * ranks
    causal = draw(st.booleans()) if scheme != "dcp" else False
    keys = rows if causal else draw(st.integers(1, 4)) * 2 * ranks
    if scheme == "dcp":
        rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 60))
    p = fl.Problem(
        batch=draw(st.integers(1, 2)), heads=heads, kv_heads=kv, len_q=rows, len_kv=keys, head_dim=draw(st.sampled_from([16, 20])),
        head_dim_v=None, dtype=draw(st.sampled_from(["float32", "float16"])), causal=causal,
        scale=draw(st.sampled_from([None, 0.3])), soft_cap=draw(st.sampled_from([None, 2.0])),
    )  # fmt: skip
    return {
        "scheme": scheme, "problem": p, "ranks": ranks, "layout": draw(st.sampled_from(LAYOUTS)),
        "interleave": draw(st.sampled_from([1, 4])),
    }  # fmt: skip


@examples(60, deadline=None)
@given(problems())
def test_a_program_is_its_formula(case: dict[str, Any]):
    """Forwards and back: each event of each rank. What one sends the other receives, and each output keeps the rule."""
    scheme, p = case.pop("scheme"), case.pop("problem")
    q, k, v, dout = random(p)
    back = {} if scheme == "dcp" else {"dout": dout}
    run = parallel.simulate(scheme, q, k, v, **case, **back, **p.masks)
    counted = parallel.count(scheme, p, **case, backward=bool(back))
    assert run.events == counted.events
    assert max(errors(run, q, k, v, back.get("dout"))) <= 1
    held_together(run.links)


def held_together(links: dict[Link, int]) -> None:
    """Each byte that a rank sends its peer receives, in the same step, of the same tensor."""
    sent = {link for link in links if link.what == "link.sent"}
    for link in sent:
        assert links[Link(link.peer, link.rank, link.step, link.tensor, "link.received")] == links[link]
    assert len(links) == 2 * len(sent) and all(link.rank != link.peer for link in links)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_under_a_causal_zigzag_all_ranks_work_alike(scheme: str):
    """Within 1 %, forwards and back, at any number of ranks. Contiguous rows are the contrast."""
    for ranks in (2, 4, 8, 64):
        p = posed(ranks, scheme, heads=64, kv_heads=64, len_q=ranks * 4096, head_dim=128, causal=True)
        for layout in LAYOUTS:
            flops = parallel.count(scheme, p, ranks=ranks, layout=layout, backward=True).flops
            uneven = layout == "contiguous" and scheme in ("ring", "all_gather")
            assert max(flops) > 1.4 * min(flops) if uneven else max(flops) <= 1.01 * min(flops)


def test_bytes_are_those_of_arithmetic():
    """By hand, from the sizes alone: batch 2, 8 heads, 2 of K and V, 64 tokens, 4 ranks, head dims 24 and 16, bfloat16."""
    p = fl.Problem(batch=2, heads=8, kv_heads=2, len_q=64, head_dim=24, head_dim_v=16, dtype="bfloat16", causal=True)
    block = 2 * 2 * 16 * (24 + 16)  # elements of K and V of a rank
    to_each = 2 * 2 * 16 * 24 + 2 * 1 * 16 * (24 + 16)  # elements of two heads of Q and one of K and V: it is repeated
    back_from_each = 2 * 2 * 16 * 16
    for scheme, elements in (
        ("ring", 3 * block),
        ("all_gather", 3 * block),
        ("ulysses", 3 * (to_each + back_from_each)),
    ):
        assert set(parallel.count(scheme, p, ranks=4).sent) == {2 * elements}, scheme
    back = parallel.count("ring", p, ranks=4, backward=True).sent[0] - 2 * 3 * block
    assert back == 2 * 3 * block + 4 * 3 * block  # K and V make three hops, and so do their gradients, in float32
    assert parallel.count("heads", p.replace(kv_heads=4), ranks=4).links == {}


def test_a_million_tokens_on_64_ranks():
    """No data: each scheme's ledger has an entry per message, and totals are those of arithmetic."""
    p = fl.Problem(batch=1, heads=64, kv_heads=8, len_q=64 * 15_626, head_dim=128, dtype="bfloat16", causal=True)
    for scheme, entries in (("ring", 63 * 2), ("all_gather", 63 * 2), ("ulysses", 63 * 4)):
        counted = parallel.count(scheme, p, ranks=64)
        assert len(counted.links) == 64 * 2 * entries
        assert counted.sent == counted.received
    assert parallel.count("ring", p, ranks=64).sent[0] == 63 * 2 * 8 * 15_626 * 128 * 2


@pytest.mark.parametrize("interleave", [1, 16])
def test_decoding_with_a_striped_cache(interleave: int):
    p = fl.Problem(batch=2, heads=8, kv_heads=2, len_q=1, len_kv=301, head_dim=32, dtype="float16")
    q, k, v, _ = random(p)
    run = parallel.simulate("dcp", q, k, v, ranks=4, interleave=interleave, causal=True)
    assert errors(run, q, k, v)[0] <= 1
    counted = parallel.count("dcp", p.replace(causal=True), ranks=4, interleave=interleave)
    assert run.events == counted.events
    of_a_head = (
        2 * 2 * (32 * 2 + 32 * 2 + 4)
    )  # a head of two requests: its query, its output, its LSE; twice for two heads
    assert set(run.sent) == {3 * of_a_head}


@pytest.mark.parametrize("lengths", [None, [(1, 301), (1, 2), (1, 0)]], ids=["alike", "ragged"])
def test_over_pages_each_rank_has_its_own_table_and_lengths(lengths: Any):
    """A rank may have no key of a request, and no page. Rows that nobody owns are NaN, so whoever reads one is seen."""
    p = fl.Problem(batch=3, heads=8, kv_heads=2, len_q=1, len_kv=301, head_dim=32, dtype="float16")
    q, k, v, _ = random(p)
    pages: dict[str, Any] = {"ranks": 4, "algorithm": "paged", "interleave": 2}
    run = parallel.simulate("dcp", q, k, v, **pages, page_size=16, lengths=lengths)
    assert run.events == parallel.count("dcp", p.replace(page_size=16, lengths=lengths), **pages).events
    tables = [launches[0].problem.seq_lens for launches in run.counts]
    for b, n in enumerate([301] * 3 if lengths is None else [301, 2, 0]):
        assert sum(lens[b] for lens in tables) == n
        alone = fl.naive(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        np.testing.assert_allclose(run.out[b : b + 1].astype(float), alone.out, atol=2e-3)
        np.testing.assert_allclose(run.lse[b : b + 1], alone.lse, atol=1e-4)


@pytest.mark.parametrize("scheme", [*SCHEMES, "dcp"])
def test_each_run_gives_the_same_bits_and_changes_nothing(scheme: str):
    p = posed(4, scheme, causal=scheme != "dcp")
    q, k, v, dout = random(p)
    kept = [x.copy() for x in (q, k, v, dout)]
    named: dict[str, Any] = {"ranks": 4, "causal": p.causal} | ({} if scheme == "dcp" else {"dout": dout})
    first, second = (parallel.simulate(scheme, q, k, v, **named) for _ in range(2))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert np.array_equal(getattr(first, name), getattr(second, name)) or getattr(first, name) is None
    assert all(np.array_equal(x, y) for x, y in zip(kept, (q, k, v, dout), strict=True))


def test_bits_of_a_ring_depend_on_no_rank_s_place():
    """Parts merge in the order of the keys, whichever came first: rows dealt to other ranks have the same bits."""
    p = posed(4, "ring", len_q=128)
    q, k, v, _ = random(p)
    whole = parallel.simulate("ring", q, k, v, ranks=4, layout="contiguous").out
    turned = np.roll(q, 32, axis=2)
    assert np.array_equal(
        np.roll(parallel.simulate("ring", turned, k, v, ranks=4, layout="contiguous").out, -32, 2), whole
    )


def test_other_algorithms_compute_the_parts():
    p = posed(2, "ring", head_dim=64, len_q=256, causal=True)
    q, k, v, dout = random(p)
    for algorithm in ("flash3", "standard"):
        back = {"dout": dout} if algorithm == "flash3" else {}
        run = parallel.simulate("ring", q, k, v, **back, ranks=2, algorithm=algorithm, causal=True)
        assert max(errors(run, q, k, v, back.get("dout"))) <= 1
        assert run.events == parallel.count("ring", p, ranks=2, algorithm=algorithm, backward=bool(back)).events


# -- schemes of one's own -----------------------------------------------------------------------------------------


def my_ring(rank: Any) -> Any:
    """A ring as a learner may write it, with one merge a step."""
    k, v = rank.k, rank.v
    out, lse = rank.attend(k, v, of=rank.index)
    for i in range(1, rank.ranks):
        rank.send(rank.right, i, k=k, v=v)
        k, v = yield rank.receive(rank.left)
        part = rank.attend(k, v, of=(rank.index - i) % rank.ranks)
        out, lse = fl.merge([out, part[0]], [lse, part[1]])
    return out, lse


def test_a_scheme_of_ones_own():
    p = posed(4, "ring", causal=True, dtype="float32")
    q, k, v, _ = random(p)
    run = parallel.simulate(my_ring, q, k, v, ranks=4, causal=True)
    assert errors(run, q, k, v)[0] <= 1
    assert run.sent == parallel.count("ring", p, ranks=4).sent
    assert run.links[Link(2, 3, "1", "k", "link.sent")] == 2 * 16 * 24 * 4
    assert {type(event) for event in run.events[0]} == {Sent, Received, Launched}


def forgets_to_send(rank: Any) -> Any:
    if rank.index:
        rank.send(rank.right, 0, k=rank.k)
    yield rank.receive(rank.left)


def sends_too_much(rank: Any) -> Any:
    rank.send(rank.right, 7, k=rank.k, v=rank.v)
    return rank.attend(rank.k, rank.v, of=rank.index)


def waits_for_nobody(rank: Any) -> Any:
    yield rank.receive(rank.ranks)


def yields_a_rank(rank: Any) -> Any:
    yield rank.left


def sends_a_list(rank: Any) -> Any:
    rank.send(rank.right, 0, k=[1.0])


def sends_beyond(rank: Any) -> Any:
    rank.send(rank.ranks, 0, k=rank.k)


def sends_nothing(rank: Any) -> Any:
    rank.send(rank.right, 0)


def returns_less(rank: Any) -> Any:
    return rank.attend(rank.k, rank.v, of=rank.index)[0]


def returns_other_rows(rank: Any) -> Any:
    out, lse = rank.attend(rank.k, rank.v, of=rank.index)
    return out[:, :, 1:], lse[:, :, 1:]


@pytest.mark.parametrize(
    ("scheme", "line"),
    [
        (forgets_to_send, "forgets_to_send = waits for ever (rank 1 for rank 0): expected a send for each receive"),
        (sends_too_much, "sends_too_much = k, v of rank 0, step 7, to rank 1: nobody receives it: expected a receive for each send"),  # noqa: E501
        (waits_for_nobody, "yield of waits_for_nobody, rank 0 = Wanted(peer=4): expected rank.receive(peer)"),
        (yields_a_rank, "yield of yields_a_rank, rank 0 = 3: expected rank.receive(peer)"),
        (sends_a_list, "k = 'list': expected an array of NumPy, to send to rank 1"),
        (sends_beyond, "peer = 4: expected a rank from 0 to 3"),
        (sends_nothing, "tensors = none: expected an array at least, to send to rank 1"),
        (returns_less, "return value of returns_less, rank 0 = array of float16, (1, 8, 16, 24): expected out (1, 8, 16, 24), lse (1, 8, 16)"),  # noqa: E501
        (returns_other_rows, "return value of returns_other_rows, rank 0 = (array of float16, (1, 8, 15, 24), array of float32, (1, 8, 15)): expected out (1, 8, 16, 24), lse (1, 8, 16)"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_wrong_scheme_is_told_in_a_line(scheme: Any, line: str):
    q, k, v, _ = random(posed(4, "ring"))
    with pytest.raises(fl.UsageError, match=f"^{re.escape(line)}$"):
        parallel.simulate(scheme, q, k, v, ranks=4)


Q, K, V, DOUT = random(posed(4, "ring", causal=True))
GOOD: dict[str, Any] = {"scheme": "ring", "q": Q, "k": K, "v": V, "ranks": 4}


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ({"scheme": "rings"}, "scheme = 'rings': expected one of ring, all_gather, ulysses, heads, dcp (did you mean ring?)"),
        ({"scheme": 3}, "scheme = 3: expected one of ring, all_gather, ulysses, heads, dcp"),
        ({"ranks": 0}, "ranks = 0: expected an integer of at least 1"),
        ({"ranks": 4096}, "ranks = 4096: expected an integer from 1 to 1,024"),
        ({"ranks": 5}, "len_q = 64: expected a multiple of 10: zigzag deals 10 chunks to 5 ranks"),
        ({"layout": "zig"}, "layout = 'zig': expected one of contiguous, zigzag (did you mean zigzag?)"),
        ({"scheme": "ulysses", "ranks": 16, "layout": "contiguous"}, "heads = 8: expected a multiple of ranks = 16 for ulysses"),
        ({"scheme": "heads"}, "kv_heads = 2: expected a multiple of ranks = 4 for heads"),
        ({"scheme": "dcp", "causal": True}, "causal = True: expected False with several queries: keys of dcp don't lie in one piece"),  # noqa: E501
        ({"scheme": "dcp", "dout": DOUT}, "dout = given: expected None: dcp has a forward pass only"),
        ({"scheme": my_ring, "dout": DOUT}, "dout = given: expected None: my_ring has a forward pass only"),
        ({"dout": DOUT[:, :1]}, "dout = array of float16, (1, 1, 64, 24): expected an array of float16, (1, 8, 64, 24)"),
        ({"window": (3, 0)}, "window = (3, 0): expected nothing: of what bends scores, ranks know causal, scale and soft_cap"),
        ({"lengths": [30, 34]}, "lengths = ((30, 30), (34, 34)): expected nothing: of what bends scores, ranks know causal, scale and soft_cap"),  # noqa: E501
        ({"page_size": 16}, "page_size = 16: expected None: pages are for dcp, and no scheme shares a prefix"),
        ({"interleave": 0}, "interleave = 0: expected an integer of at least 1"),
        ({"k": K[:, :, :32], "v": V[:, :, :32], "causal": True}, "len_kv = 32: expected 64, as many as queries, for a causal ring"),
        ({"scheme": "dcp", "q": Q[:, :, :1], "algorithm": "paged", "page_size": 2**34}, None),  # memory
        ({"algorithm": "flash9"}, None),
        ({"algorithm": "flash_decoding", "dout": DOUT}, None),
        ({"casual": True}, None),
        ({"v": V[:, :, :3]}, None),
    ],
)  # fmt: skip
def test_bad_input_is_a_line(bad: dict[str, Any], line: str | None):
    with pytest.raises(fl.UsageError, match="." if line is None else f"^{re.escape(line)}$") as caught:
        parallel.simulate(**{**GOOD, **bad})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ({"scheme": Scheme("ring", my_ring)}, "scheme = ring, one of your own: expected one of ring, all_gather, ulysses, heads, dcp: they have formulas"),  # noqa: E501
        ({"problem": 3}, None),
        ({"backward": 1}, None),
        ({"device": "h1"}, None),
        ({"problem": posed(4, "ring", dropout=0.1)}, "dropout = 0.1: expected nothing: of what bends scores, ranks know causal, scale and soft_cap"),  # noqa: E501
        ({"problem": posed(4, "ring", sinks=True)}, "sinks = True: expected nothing: of what bends scores, ranks know causal, scale and soft_cap"),  # noqa: E501
        ({"problem": posed(4, "ring", len_prefix=8)}, "len_prefix = 8: expected None: pages are for dcp, and no scheme shares a prefix"),  # noqa: E501
    ],
)  # fmt: skip
def test_bad_counts_are_a_line(bad: dict[str, Any], line: str | None):
    with pytest.raises(fl.UsageError, match="." if line is None else f"^{re.escape(line)}$") as caught:
        parallel.count(**{"scheme": "ring", "problem": posed(4, "ring"), "ranks": 4, **bad})
    assert "\n" not in str(caught.value)


def test_totals_and_rows_for_json():
    run = parallel.simulate("ring", Q, K, V, dout=DOUT, ranks=4, causal=True)
    told = run.to_dict()
    assert sum(row["bytes"] for row in told["links"] if row["what"] == "link.sent") == sum(run.sent)
    assert [row["flops_matmul"] for row in told["ranks"]] == list(run.flops)
    assert sum(row["hbm_read"] for row in told["ranks"]) == sum(c.hbm.read for each in run.counts for c in each)
