"""flash_decoding on the emulator: long sequences, whose chunks meet in a tree, the same bits whatever surrounds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator.operations.attention import ATTENTION
from simulator.problem import Tile
from simulator.programs.flash_decoding import CHILDREN, Splits

pytestmark = pytest.mark.compiler


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    """Few queries, and keys of up to four chunks of 256, or with small tiles of two levels of the tree."""
    kv_heads = draw(st.integers(1, 2))
    return fl.Problem(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 8])),
        kv_heads=kv_heads,
        len_q=draw(st.integers(1, 9)),
        len_kv=draw(st.integers(0, 1100) | st.sampled_from([1, 63, 64, 65, 255, 256, 257, 1024, 1025])),
        head_dim=draw(st.sampled_from([16, 40])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 600), st.none() | st.integers(0, 5))),
    )


def attended(p: fl.Problem, arrays: Any, **options: Any) -> tuple[Any, Any]:
    run = fl.emulate("flash_decoding", **arrays, **p.masks, lse=True, **options)
    assert run.complaints() == []
    return run.out, run.lse


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(problems(), st.sampled_from([None, (16, 16), (32, 32)]), st.sampled_from(["normal", "large", "rising"]))
def test_right_and_counted(p: fl.Problem, tile: Any, kind: str) -> None:
    arrays: Any = ATTENTION.draw(p, 1, kind)
    out, lse = attended(p, arrays, tile=tile)
    truth = ATTENTION.judge(p, arrays)
    bounds = ATTENTION.bounds(p, arrays, truth)
    empty: Any = np.isneginf(truth["lse"])
    assert (np.isneginf(lse) == empty).all() and (out[empty] == 0).all()
    assert (np.linalg.norm(out.astype(np.float64) - truth["out"], axis=-1) <= bounds["out"]).all()
    assert (np.abs(lse[~empty] - truth["lse"][~empty]) <= bounds["lse"][~empty]).all()


@pytest.mark.alike(1)
@pytest.mark.parametrize("tile", [(8, 16), (16, 48), (24, 64)])
def test_rows_that_warps_share_unevenly(tile: tuple[int, int]) -> None:
    """Of 16 rows three warps merge six, five and five. Of 24 there are three fragments."""
    p = fl.Problem(batch=1, heads=tile[0], kv_heads=1, len_q=1, len_kv=100, head_dim=16, dtype="float16")
    arrays: Any = ATTENTION.draw(p, 1)
    out, _ = attended(p, arrays, tile=tile)
    truth = ATTENTION.judge(p, arrays)
    off = np.linalg.norm(out.astype(np.float64) - truth["out"], axis=-1)
    assert (off <= ATTENTION.bounds(p, arrays, truth)["out"]).all()


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(problems(), st.data())
def test_neither_batch_nor_order_nor_cores_change_a_bit(p: fl.Problem, data: st.DataObject) -> None:
    p = p.replace(batch=3)
    arrays: Any = ATTENTION.draw(p, 2)
    out, lse = attended(p, arrays, tile=(16, 16))
    order = data.draw(st.permutations(range(3)))
    for chosen in ([order[0]], order):
        some = {name: x[chosen] for name, x in arrays.items()}
        again = attended(p.replace(batch=len(chosen)), some, tile=(16, 16), workers=data.draw(st.integers(1, 4)))
        assert again[0].tobytes() == out[chosen].tobytes() and again[1].tobytes() == lse[chosen].tobytes()


KEYS = st.lists(st.integers(0, 700) | st.sampled_from([0, 1, 63, 64, 65]), min_size=1, max_size=5)


@settings(max_examples=2, deadline=None)
@given(problems().map(lambda p: p.replace(head_dim=16, dtype="float16")), KEYS, st.data())  # built once
def test_sequences_have_the_bits_that_they_have_alone(p: fl.Problem, keys: list[int], data: st.DataObject) -> None:
    check_alone(p, keys, data)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(problems(), KEYS, st.data())
def test_more_sequences_have_the_bits_that_they_have_alone(p: fl.Problem, keys: list[int], data: st.DataObject) -> None:
    check_alone(p, keys, data)


def check_alone(p: fl.Problem, keys: list[int], data: st.DataObject) -> None:
    """NaN in the rows of its neighbours changes no bit of a sequence."""
    quantized = {"kv_dtype": "int8", "k_scale": "token", "v_scale": "token"} if data.draw(st.booleans()) else {}
    p = p.replace(batch=1, len_q=None, len_kv=None, lengths=[(p.len_q, n) for n in keys], **quantized)
    arrays: Any = ATTENTION.draw(p, 2)
    out, lse = attended(p, arrays, tile=(16, 16), workers=data.draw(st.integers(1, 3)))
    loud = data.draw(st.integers(0, len(keys) - 1))
    littered = {name: x.copy() for name, x in arrays.items()}
    for s, (rows, own) in enumerate(p.spans):
        where = {"len_q": slice(rows.start, rows.stop), "len_kv": slice(own.start, own.stop)}
        if s == loud:
            littered["q"][:, :, where["len_q"]] = np.nan
            if not quantized:
                littered["k"][:, :, where["len_kv"]] = littered["v"][:, :, where["len_kv"]] = np.nan
        one = p.sequences[s].replace(lengths=None)
        alone = attended(
            one, {name: ATTENTION.operand(name, p).cut(x, where) for name, x in arrays.items()}, tile=(16, 16)
        )
        assert alone[0].tobytes() == out[:, :, where["len_q"]].tobytes()
        assert alone[1].tobytes() == lse[:, :, where["len_q"]].tobytes()
    with np.errstate(invalid="ignore"):
        found = attended(p, littered, tile=(16, 16))
    others = np.repeat([s != loud for s in range(len(keys))], len(p.spans[0][0]))
    assert found[0][:, :, others].tobytes() == out[:, :, others].tobytes()
    assert found[1][:, :, others].tobytes() == lse[:, :, others].tobytes()


@pytest.mark.long
@pytest.mark.parametrize("later", [1, 64, 900])
def test_the_grid_changes_no_bit(later: int) -> None:
    """The first keys alone are seen, in a short sequence and in a longer one, whose grid has more chunks and more levels."""
    p = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=1, len_kv=200, head_dim=16, dtype="float16")
    arrays: Any = ATTENTION.draw(p, 3)
    alone = attended(p, arrays, tile=(16, 16))
    # the last query of several sees the keys after the first ones too; the first query doesn't
    long = p.replace(len_q=later + 1, len_kv=200 + later, causal=True)
    drawn: Any = ATTENTION.draw(long, 4)
    drawn["q"][:, :, :1] = arrays["q"]
    for name in "kv":
        drawn[name][:, :, :200] = arrays[name]
    out, lse = attended(long, drawn, tile=(16, 16))
    assert out[:, :, :1].tobytes() == alone[0].tobytes() and lse[:, :, :1].tobytes() == alone[1].tobytes()


def test_partial_results_are_those_of_merge() -> None:
    """The tree of the kernel is that of `fl.merge`, but for the last bits."""
    p = fl.Problem(batch=1, heads=4, kv_heads=1, len_q=1, len_kv=3000, head_dim=16, dtype="float16")
    q, k, v = fl.random_inputs(p, 5)
    cuts = [slice(i, i + 64) for i in range(0, 3000, 64)]
    parts = [
        attended(p.replace(len_kv=len(range(3000)[cut])), {"q": q, "k": k[:, :, cut], "v": v[:, :, cut]}, tile=(16, 16))
        for cut in cuts
    ]
    out, lse = fl.merge([part[0].astype(np.float32) for part in parts], [part[1] for part in parts])
    whole = attended(p, {"q": q, "k": k, "v": v}, tile=(16, 16))
    np.testing.assert_allclose(out, whole[0].astype(np.float32), atol=2e-4)
    np.testing.assert_allclose(lse, whole[1], atol=1e-5)


def test_keys_are_read_once_for_all_heads_and_queries() -> None:
    p = fl.Problem(batch=2, heads=16, kv_heads=2, len_q=2, len_kv=5000, head_dim=128, dtype="bfloat16", causal=True)
    c = fl.count("flash_decoding", p, device="h200")
    assert c.by_tensor["k"].hbm_read == c.by_tensor["v"].hbm_read == 2 * 2 * 5000 * 256
    more = fl.count("flash_decoding", p.replace(len_q=4), device="h200").by_tensor  # two tiles of 16 rows
    assert more["k"].hbm_read == more["v"].hbm_read == 2 * c.by_tensor["k"].hbm_read
    chunks = -(-5000 // 512)  # of four tiles of 128 keys; so few blocks that each has one
    assert c.config is not None and dict(c.config.constants)["RUN"] == 1
    assert c.by_tensor["partial"].hbm_read == c.by_tensor["partial"].hbm_write == 4 * 16 * chunks * 512
    assert c.hbm.atomic == 4 * 4 * chunks * 4, "four warps count up for each chunk and head"


def test_runs_leave_no_partial_results_of_their_chunks() -> None:
    """With enough heads, a block has whole sequences, and nothing but inputs and outputs goes through HBM."""
    p = fl.Problem(batch=64, heads=32, kv_heads=8, len_q=1, len_kv=4096, head_dim=128, dtype="bfloat16")
    c = fl.count("flash_decoding", p, device="h200")
    assert c.hbm.read + c.hbm.write == 2 * 64 * (2 * 8 * 4096 + 2 * 32) * 128 and c.hbm.atomic == 0
    fewer = fl.count("flash_decoding", p.replace(batch=4), device="h200")  # 256 chunks, and 132 SMs: runs of two
    assert fewer.by_tensor["partial"].hbm_write == 4 * 8 * 4 * 4 * 512


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 3000),
    st.none() | st.tuples(st.integers(0, 900), st.integers(0, 9)),
    st.sampled_from([1, 2, 8]),
)
def test_the_places_of_the_tree_are_its_nodes(group: int, len_q: int, len_kv: int, window: Any, run: int) -> None:
    """Every node has a place of its own, and each parent a counter that all of its children know."""
    p = fl.Problem(
        batch=1,
        heads=group,
        kv_heads=1,
        len_q=len_q,
        len_kv=len_kv,
        head_dim=16,
        dtype="float16",
        causal=True,
        window=window,
    )
    s = Splits(p, Tile(16, 16), run)
    for i, (inside, first, stop) in enumerate(
        zip(*(np.concatenate(x) for x in zip(*s.spans(), strict=True)), strict=True)
    ):
        assert (list(s.tiles(i)), inside) == (list(range(first, stop)), min(16, s.rows - 16 * i))
        units = [s.chunks_of(i, j) for j in range(s.runs)]
        assert [chunk for unit in units for chunk in unit] == list(s.chunks(i) or range(1))
        assert sum(len(s.walk(i, j)) for j in range(s.runs)) == len(s.tiles(i))
        places, counters = dict[int, Any](), dict[int, set[int]]()
        for unit in filter(None, units):
            for level, node in enumerate(s.upward(i, unit[-1])):
                at = level, unit[-1] // run // CHILDREN**level
                assert places.setdefault(node.place, at) == at and node.place < sum(s.room)
                counters.setdefault(node.counter, set()).add(node.place)
                assert node.counter < s.counters and set(node.siblings.values()) >= counters[node.counter]
