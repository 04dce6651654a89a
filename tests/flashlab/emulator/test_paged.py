"""paged on the emulator: each byte is the formula's, and the bits are flash_decoding's on the gathered keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
import kernels_cu
from flashlab.run.choose import fastest
from flashlab.run.emulated import emulate_problem
from flashlab.verify.pages import repaged
from simulator.operations.paged import PAGED, STRAY
from tests.mutants.decoding import KERNELS
from tests.simulator.test_paged import within

pytestmark = pytest.mark.compiler
ROW = fl.CATALOGUE["paged"]


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    """Few queries, and requests of up to four chunks of 256 keys, or with small tiles of two levels of the tree."""
    kv_heads, len_q = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 9]))
    lengths = draw(
        st.lists(st.integers(0, 1100) | st.sampled_from([0, 1, 63, 64, 65, 256, 257]), min_size=1, max_size=4)
    )
    p = fl.Problem(
        batch=len(lengths),
        heads=kv_heads * draw(st.sampled_from([1, 2, 8])),
        kv_heads=kv_heads,
        lengths=[(len_q, n) for n in lengths],
        head_dim=draw(st.sampled_from([16, 40])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        page_size=draw(st.integers(1, 256) | st.sampled_from([1, 16, 64, 256])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 600), st.none() | st.integers(0, 5))),
        drafts=draw(st.sampled_from([False, False, True])),
    )
    return p.replace(pages=p.pages + draw(st.integers(0, 3)), len_kv=p.len_kv + draw(st.integers(0, 500)))


def built_once(p: fl.Problem) -> fl.Problem:
    """The same as far as compiling goes: kernels are built once for many."""
    return p.replace(head_dim=16, dtype="float16")


def attended(p: fl.Problem, arrays: Any, **options: Any) -> dict[str, Any]:
    run = emulate_problem(ROW, p, arrays, lse=True, **options)
    assert run.complaints() == []
    return dict(run.outputs)


def gathered(p: fl.Problem, arrays: Any, tile: Any) -> dict[str, Any]:
    """What flash_decoding makes of the requests, one by one."""
    requests: Any = PAGED.gathered(p, arrays)
    each = [
        fl.emulate("flash_decoding", **own, **plain.masks, lse=True, tile=tile).checked().outputs
        for plain, own in requests
    ]
    return {name: np.concatenate([one[name] for one in each]) for name in ("out", "lse")}


def bits(outputs: dict[str, Any]) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in outputs.items()}


def nhd(arrays: Any) -> Any:
    """The pools as views of memory in which a page's keys lie one behind the other, all heads of each."""
    return {
        name: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if name in "kv" else x for name, x in arrays.items()
    }


GIVEN: Any = (problems(), st.sampled_from([None, (16, 16), (32, 32)]), st.booleans(), st.integers(0, 9))


@settings(max_examples=2, deadline=None)
@given(problems().map(built_once), st.just((16, 16)), *GIVEN[2:])
def test_right_and_counted_and_the_bits_of_gathered_keys(p: fl.Problem, tile: Any, swapped: bool, seed: int) -> None:
    check_right(p, tile, swapped, seed)


@pytest.mark.long
@settings(max_examples=9, deadline=None)
@given(*GIVEN)
def test_right_and_counted_far_and_wide(p: fl.Problem, tile: Any, swapped: bool, seed: int) -> None:
    check_right(p, tile, swapped, seed)


def check_right(p: fl.Problem, tile: Any, swapped: bool, seed: int) -> None:
    """What no request owns is NaN, or no page. The emulator sees what is read outside the pool."""
    arrays: Any = PAGED.draw(p, seed)
    found = attended(p, nhd(arrays) if swapped else arrays, tile=tile)
    assert within(found, p, arrays)
    if not p.drafts:  # whose mask flash_decoding doesn't take
        assert bits(found) == bits(gathered(p, arrays, tile))


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(problems(), st.data())
def test_neither_pages_nor_other_requests_change_a_bit(p: fl.Problem, data: st.DataObject) -> None:
    arrays: Any = PAGED.draw(p, 2)
    found = attended(p, arrays, tile=(16, 16))
    order = data.draw(st.permutations(range(p.batch)))
    other, moved = repaged(p, arrays, order, data.draw(st.integers(1, 256)), 7)
    other = other.replace(len_kv=p.len_kv + 300)  # a longer table, with more room in the workspaces
    lines = np.full((p.batch, other.table_pages), STRAY, np.int32)
    lines[:, : moved["block_table"].shape[1]] = moved["block_table"]
    moved["block_table"] = lines
    again = attended(other, moved, tile=(16, 16), workers=data.draw(st.integers(1, 4)))
    assert bits(again) == bits({name: x[list(order)] for name, x in found.items()})


@pytest.mark.long
def test_more_requests_than_lanes_and_more_units_than_blocks() -> None:
    lengths = [(1, int(n)) for n in np.random.default_rng(3).integers(0, 400, 70)]
    p = fl.Problem(batch=70, heads=12, kv_heads=4, lengths=lengths, head_dim=16, dtype="float16", page_size=5)
    arrays: Any = PAGED.draw(p, 1)
    c = fl.count("paged", p, tile=(16, 16))
    assert c.launches[0].blocks > 5 * c.device.sms
    assert bits(attended(p, arrays, tile=(16, 16))) == bits(gathered(p, arrays, (16, 16)))


def test_lengths_are_read_from_memory() -> None:
    """A plan for all that the table holds serves any lengths: they are an operand."""
    p = fl.Problem(batch=3, heads=4, kv_heads=2, len_q=1, len_kv=640, head_dim=16, dtype="float16", page_size=16)
    plan, lens = fl.plan("paged", p, backend="emulator", tile=(16, 16)), np.array([600, 7, 0], np.int32)
    long: Any = PAGED.draw(p, 1)
    short_ones: Any = {**long, "seq_lens": lens}
    counted = fl.emulate("paged", **short_ones, tile=(16, 16))
    assert counted.passed and counted.counts.problem.seq_lens == (600, 7, 0)
    short = plan.run({**long, "seq_lens": lens})["out"]
    wanted = p.replace(lengths=[(1, int(n)) for n in lens], pages=p.pages)
    assert short.tobytes() == attended(wanted, {**long, "seq_lens": lens}, tile=(16, 16))["out"].tobytes()
    assert short.tobytes() != plan.run(**long)["out"].tobytes()


def test_the_call() -> None:
    """Lengths as an array and as numbers, pools as views, and what the call doesn't take."""
    p = fl.Problem(
        batch=2, heads=4, kv_heads=2, lengths=[(2, 90), (2, 33)], head_dim=16, dtype="float16", page_size=8, causal=True
    )
    arrays: Any = PAGED.draw(p, 1)
    table, lens = arrays["block_table"], arrays["seq_lens"]
    q, k, v = (nhd(arrays)[name] for name in "qkv")
    out, lse = fl.attention(q, k, v, block_table=table, seq_lens=lens, causal=True, lse=True, backend="emulator")
    assert within({"out": out, "lse": lse}, p, arrays)
    again = fl.attention(
        q, k, v, block_table=table, lengths=p.lengths, causal=True, backend="emulator", algorithm="paged"
    )
    assert again.tobytes() == out.tobytes()
    target = np.zeros_like(out)
    written = fl.attention(q, k, v, block_table=table, seq_lens=lens, causal=True, backend="emulator", out=target)
    assert written is target
    assert target.tobytes() == out.tobytes()
    sinks = np.array([2.0, -np.inf, 0.0, 5.0], np.float32)
    bent = p.replace(sinks=True, soft_cap=3.0)
    out, lse = fl.attention(
        q, k, v, block_table=table, seq_lens=lens, causal=True, sinks=sinks, soft_cap=3.0, lse=True, backend="emulator"
    )
    assert within({"out": out, "lse": lse}, bent, {**arrays, "sinks": sinks})
    for wrong, line in (
        (
            {"sinks": np.array([0, np.nan, 0, 0], np.float32)},
            "sinks[1] = nan: expected finite numbers up to 1e+30, or -inf",
        ),
        ({"out": out[:1]}, "out.shape = "),
        ({"out": out.astype(np.float32)}, "out.dtype = 'float32': expected float16"),
        ({"out": q}, "out = 'memory shared with q': expected an array apart from the inputs"),
        ({"algorithm": "flash_decoding"}, "algorithm = 'flash_decoding': expected one of auto, paged"),
        ({"block_table": None}, "block_table = None: expected an array"),
        ({"seed": 3}, "seed = 3: expected"),
        ({"device": "h1000"}, "device = 'h1000': expected"),
    ):
        call: dict[str, Any] = {"block_table": table, "seq_lens": lens, "backend": "emulator", **wrong}
        with pytest.raises(fl.UsageError) as refused:
            fl.attention(q, k, v, **call)
        assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_the_call_with_drafts() -> None:
    """Words of either sign, a mask that takes no bits beyond the queries', and what the call doesn't take."""
    p = fl.Problem(
        batch=2, heads=4, kv_heads=2, lengths=[(5, 90), (5, 3)], head_dim=16, dtype="float16", page_size=8, drafts=True
    )
    arrays: Any = PAGED.draw(p, 1)
    words = arrays.pop("draft_mask")
    out, lse = fl.attention(**arrays, draft_mask=words, lse=True, backend="emulator", algorithm="auto")
    assert within({"out": out, "lse": lse}, p, {**arrays, "draft_mask": words})
    again = fl.attention(**arrays, draft_mask=(words & 31).view(np.int32), backend="emulator")
    signed = fl.simulate("paged", **arrays, draft_mask=words.view(np.int32))
    assert (
        again.tobytes() == out.tobytes() and (signed.out == fl.simulate("paged", **arrays, draft_mask=words).out).all()
    )
    for wrong, line in (
        ({"draft_mask": words[:1]}, "draft_mask.shape = (1, 5): expected (2, 5)"),
        ({"draft_mask": words > 0}, "draft_mask.dtype = 'bool': expected uint32"),
        ({"mask": words}, "mask = ndarray: expected None with a block_table"),
        (
            {"draft_mask": words, "block_table": None, "seq_lens": None},
            "draft_mask = ndarray: expected None without a block_",
        ),
        (
            {"draft_mask": words, "algorithm": "flash3_paged"},
            "drafts = True: expected nothing: flash3_paged knows causal",
        ),
    ):
        with pytest.raises(fl.UsageError) as refused:
            fl.attention(**{**arrays, "backend": "emulator", **wrong})
        assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_auto_goes_to_the_kernel_that_takes_drafts() -> None:
    sizes: dict[str, Any] = {"batch": 16, "heads": 64, "kv_heads": 8, "len_q": 32, "len_kv": 8192, "head_dim": 128}
    p = fl.Problem(**sizes, dtype="bfloat16", page_size=16)
    assert [fastest(PAGED, p.replace(drafts=on), fl.DEVICES["h100"]) for on in (False, True)] == [
        "flash3_paged",
        "paged",
    ]


@pytest.mark.long
def test_verified() -> None:
    report = fl.verify("paged", backend="emulator", dtypes=["float16"], tile=(16, 16))
    assert report.passed and all(row.status == "passed" for row in report.rows)
    assert {row.check for row in report.rows} == {"rule", "determinism", "pages", "requests", "drafts"}


FAULTS = {
    "pages": ("places in pages of another size", "rows of the tile behind"),
    "requests": ("the first request's pages", "one length for all"),
    "drafts": ("earlier keys hidden", "the first lane's keys for all"),
}


@pytest.mark.long
@pytest.mark.parametrize(("check", "mechanism"), [(check, each) for check, them in FAULTS.items() for each in them])
def test_a_probe_finds_its_fault(check: str, mechanism: str, tmp_path: Path) -> None:
    mutant = next(each for each in KERNELS if each.mechanism == mechanism)
    with kernels_cu.sources_in(mutant.written(tmp_path)):
        report = fl.verify("paged", backend="emulator", dtypes=["float16"], checks=[check], tile=(16, 16))
    assert not report.passed
