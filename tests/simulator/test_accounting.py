"""What docs/accounting.md says is what the formulas count: `accounting` is that page, and knows none of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator import CATALOGUE, Counts, Device, Problem, SramOverflow, Tile
from simulator.names import DType
from tests.simulator import accounting
from tests.tiers import examples

DERIVED = accounting.DERIVED
FEW_SMS = Device.named("h200").replace(sms=5)
DEVICES = [FEW_SMS, Device.named("h100"), Device.named("a100")]
EXP = ("flash_decoding", "paged", "mla", "mla_paged")
Case = tuple[Problem, Tile | None, Device, bool]

few_of_them, many = (
    st.integers(0, 3) | st.integers(0, 150),
    st.integers(0, 40) | st.integers(0, 1500) | st.integers(1000, 3000),
)
side = st.none() | st.integers(0, 60) | st.integers(0, 900)
OPTIONS: dict[str, list[Any]] = {
    "sinks": [True, False], "alibi": [True, False], "dropout": [0.1, None], "dlse": [True, False], "varlen": [True, False],
    "drafts": [True, False],
    "chunk": [None, 64, 128, 1984], "mask": [None, None, "dense", "bits", "blocks"],
}  # fmt: skip


@st.composite
def written(draw: st.DrawFn, name: str) -> Problem:
    """A problem of an algorithm that writes pools."""
    dtype, tokens, size = (
        draw(st.sampled_from(CATALOGUE[name].dtypes)),
        draw(st.integers(0, 150)),
        draw(st.integers(1, 40)),
    )
    dims = {"head_dim": draw(st.integers(1, 130)), "head_dim_v": draw(st.none() | st.integers(1, 130))}
    cache: dict[str, Any] = {
        "kv_dtype": draw(st.sampled_from(["int8", "float8_e4m3fn"])),
        "k_scale": "token",
        "v_scale": "token",
    }
    has = cache if dtype != "float32" and draw(st.booleans()) else {}
    p = Problem(
        batch=1,
        heads=6,
        kv_heads=draw(st.sampled_from([1, 2, 6])),
        len_q=tokens,
        dtype=dtype,
        page_size=size,
        **dims,
        **has,
    )
    return CATALOGUE[name].fitted(p.replace(len_kv=draw(st.integers(0, tokens)), pages=p.pages))


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    """A problem of the algorithm, with any of what it takes. A tile of those that are verified, a small one, or the default."""
    row = CATALOGUE[name]
    operation, support = row.operation, row.support
    device, lse = draw(st.sampled_from(DEVICES)), draw(st.booleans())
    if operation.name == "softmax":
        dtype: DType = draw(st.sampled_from(["float32", "float16"]))
        return Problem(batch=1, heads=1, len_q=1, head_dim=draw(st.integers(1, 2000)), dtype=dtype), None, device, False
    if operation.in_place:
        return draw(written(name)), None, device, False
    latent, requests = "mla" in name, operation.in_pages or operation.shares_prefix
    few = support.few_queries or requests or latent
    length, lengths = many if few else few_of_them, st.integers(0, 6) if few and name != "flash3_paged" else few_of_them
    group, kv_heads = (
        draw(st.sampled_from([1, 2, 3, *([5, 8, 16, 32] if few else [])])),
        1 if latent else draw(st.integers(1, 2)),
    )
    has = {option: draw(st.sampled_from(values)) for option, values in OPTIONS.items() if option in support.masks}
    has |= {"causal": draw(st.booleans())}
    if "window" in support.masks:
        has["window"] = draw(st.none() | st.tuples(side, side))
    dtype = draw(st.sampled_from(support.dtypes))
    if "kv_dtype" in support.masks and dtype != "float32" and draw(st.booleans()):
        has["kv_dtype"] = draw(st.sampled_from(["int8", "float8_e4m3fn"]))
        has["k_scale"] = draw(st.sampled_from([None, "tensor", "head", "channel", "token"]))
        has["v_scale"] = draw(st.sampled_from([None, "tensor", "head", "token"]))
    queries = draw(lengths) + bool(has.get("drafts"))
    sizes: dict[str, Any] = {"batch": draw(st.integers(1, 3)), "len_q": queries, "len_kv": draw(length)}
    if "lengths" in support.masks and draw(st.booleans()):
        each = draw(st.lists(length, min_size=1, max_size=40 if name == "flash3_paged" else 6))
        pairs = [(queries if few and not has.get("varlen") else draw(lengths), keys) for keys in each]
        sizes = {"batch": len(pairs) if requests else 1, "lengths": pairs}
        sizes |= {"len_kv": max(each) + draw(st.sampled_from([0, 300]))} if requests else {}
        has |= {
            "dropout": None,
            "mask": None if has.get("mask") == "blocks" else has.get("mask"),
        }  # as no ragged batch has
    if has.get("mask") == "blocks":
        has["block_size"] = draw(st.sampled_from([(128, 128), (64, 64), (192, 64)]))
    if operation.in_pages:
        has["page_size"] = draw(st.sampled_from([1, 7, 16, 64, 100, 128, 256]))
    if operation.shares_prefix:
        has["len_prefix"] = draw(many)
    dims = {
        "head_dim": draw(st.sampled_from([5, 16, 40, 64, 100, 128])),
        "head_dim_v": draw(st.sampled_from([None, 8, 36, 72])),
    }
    if latent:
        dims = {"head_dim": 576, "head_dim_v": 512, "scale": 0.07}
    p = support.fitted(Problem(heads=kv_heads * group, kv_heads=kv_heads, dtype=dtype, **sizes, **has, **dims))
    small = [] if has.get("mask") == "blocks" else [Tile(16, 16), Tile(32, 48), Tile(64, 32)]
    return p, draw(st.sampled_from([*support.tiles, None, *small])), device, lse


def compare(name: str, case: Case) -> accounting.Book | None:
    """Holds the page against the formula, and returns what the page says, or None where no tile is for this problem."""
    p, tile, device, lse = case
    assert CATALOGUE[name].refusal(p) is None
    try:
        counts = fl.count(name, p, tile=tile, device=device, lse=lse)
    except SramOverflow:
        return None
    except fl.UsageError as error:
        assert "sides that divide those of a block of the mask" in str(error)
        return None
    return hold(name, counts, accounting.Book(p, counts.config, lse, device, name))


def hold(name: str, counts: Counts, book: accounting.Book) -> accounting.Book:
    DERIVED[name](book)
    found = Counter[tuple[str, str]]()
    for launch in counts.launches:
        for entry, n in launch.ledger.items():
            if entry.what.startswith("hbm."):
                found[entry.tensor, entry.what] += n
    assert dict(book.bytes) == dict(found)
    if name in EXP:
        assert book.exp == counts.exp
        planes = counts.tensors["partial"].planes if "partial" in counts.tensors else 0
        assert book.places == planes
    return book


def test_every_algorithm_is_derived_and_stands_on_the_page() -> None:
    assert set(DERIVED) == set(CATALOGUE)
    source = Path(accounting.__file__).read_text(encoding="utf-8")
    assert [line for line in source.splitlines() if line.startswith(("from simulator", "import simulator"))] == [
        "from simulator import Device, Problem"
    ]
    page = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text(encoding="utf-8")
    table = page.split("## What each algorithm requests")[1]
    for name in CATALOGUE:
        short = name[name.rindex("_") :] if "_" in name else name
        assert f"`{name}`" in table or f"`{short}`" in table, name


@pytest.mark.parametrize("name", DERIVED)
@examples(20)
@given(data=st.data())
def test_bytes_are_what_the_page_says(name: str, data: st.DataObject) -> None:
    compare(name, data.draw(cases(name)))


@pytest.mark.long
@pytest.mark.parametrize("name", DERIVED)
@settings(max_examples=600)
@given(data=st.data())
def test_bytes_of_many_problems_are_what_the_page_says(name: str, data: st.DataObject) -> None:
    compare(name, data.draw(cases(name)))


ONE: dict[str, Any] = {"batch": 1, "dtype": "bfloat16", "head_dim": 128}
CORNERS: dict[str, tuple[str, dict[str, Any], Tile | None, tuple[str, str]]] = {
    "rows are drawn": ("flash3", {"heads": 2, "len_q": 300, "causal": True}, None, ("drawn", "hbm.atomic")),
    "no keys, one round": ("flash1", {"heads": 2, "len_q": 70, "len_kv": 0}, None, ("q", "hbm.read")),
    "no keys, one round backward": ("flash1_backward", {"heads": 2, "len_q": 70, "len_kv": 0}, None, ("dout", "hbm.read")),
    "a tree of three levels": ("flash_decoding", {"heads": 2, "len_q": 3, "len_kv": 70_000}, Tile(8, 16), ("partial", "hbm.read")),
    "a window at the end of a chunk": (
        "paged", {"heads": 4, "kv_heads": 1, "len_q": 3, "len_kv": 5000, "window": (2047, 3), "page_size": 16, "sinks": True},
        Tile(8, 16), ("partial", "hbm.write"),
    ),
    "requests that are sorted": (
        "flash3_paged", {"heads": 2, "lengths": [(130, 10 * n) for n in range(70)], "page_size": 64, "batch": 70}, None,
        ("seq_lens", "hbm.read"),
    ),
    "heads in parts": ("flash3_backward", {"heads": 8, "kv_heads": 2, "len_q": 4096}, None, ("dk_parts", "hbm.write")),
    "key tiles in an order": ("flash3_backward", {"heads": 40, "lengths": [500, 4000, 0]}, None, ("order", "hbm.read")),
    "sinks without queries": (
        "flash2_backward", {"heads": 2, "lengths": [(0, 9), (7, 3)], "sinks": True}, None, ("dsinks", "hbm.write"),
    ),
    "a window over a prefix": (
        "cascade",
        {"heads": 4, "kv_heads": 1, "lengths": [(2, 700), (2, 30), (2, 0)], "len_prefix": 5000, "window": (900, 0), "batch": 3},
        None, ("seq_lens", "hbm.read"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CORNERS)
def test_corners(what: str) -> None:
    """Rare cases, each with the tensor that shows it."""
    name, changes, tile, (tensor, way) = CORNERS[what]
    p = Problem(**{**ONE, **changes})
    book = compare(name, (p, tile, Device.named("h200"), True))
    assert book is not None and book.bytes[tensor, way] > 0


@pytest.mark.parametrize("name", ["flash2", "flash3"])
@examples(25)
@given(
    form=st.sampled_from(["dense", "bits", "blocks"]), lengths=st.lists(st.tuples(few_of_them, few_of_them), max_size=3),
    rows=few_of_them, keys=few_of_them, causal=st.booleans(), window=st.none() | st.tuples(side, side), seed=st.integers(0, 999),
)  # fmt: skip
def test_what_a_mask_of_data_leaves(
    name: str, form: str, lengths: list[tuple[int, int]], rows: int, keys: int, causal: bool, window: Any, seed: int
) -> None:
    """Tiles are hidden, visible or mixed by the array, the causal mask, the window and the end of the keys together."""
    random = np.random.default_rng(seed)
    sizes: dict[str, Any] = {"len_q": rows, "len_kv": keys}
    if lengths and form != "blocks":
        sizes = {"lengths": lengths}
    block = {"block_size": (64, 32)} if form == "blocks" else {}
    p = Problem(
        batch=1, heads=2, head_dim=16, dtype="float16", mask=form, causal=causal, window=window, **sizes, **block
    )
    cell = random.integers(0, 3, (-(-p.len_q // 16), -(-p.len_kv // 16)))  # hidden, visible, and either
    cell = np.kron(cell, np.ones((16, 16), int))[: p.len_q, : p.len_kv]
    mask = (cell == 1) | ((cell == 2) & (random.random(cell.shape) < 0.5))
    arrays: dict[str, Any] = dict(zip("qkv", fl.random_inputs(p), strict=True))
    listed, spans = None, p.spans
    if form == "dense":
        arrays["mask"] = mask
    elif form == "bits":
        packed = [
            np.packbits(mask[a.start : a.stop, b.start : b.stop].reshape(-1), bitorder="little") for a, b in spans
        ]
        arrays["mask"] = np.concatenate(packed)
    else:
        seen = random.random((p.row_blocks, p.block_list - 1)) < 0.5
        listed = np.zeros((p.row_blocks, p.block_list), np.int32)
        for line, visible in zip(listed, seen, strict=True):
            line[0], line[1 : 1 + visible.sum()] = visible.sum(), np.flatnonzero(visible)
        arrays["block_mask"] = listed
        mask = np.kron(seen, np.ones((64, 32), bool))[: p.len_q, : p.len_kv]
    more = {"block_size": p.block_size} if form == "blocks" else {}
    run = fl.simulate(name, **arrays, **{**p.masks, **more}, tile=(64, 32), device=FEW_SMS)
    assert run.counts.problem == p
    shown = [mask[a.start : a.stop, b.start : b.stop] for a, b in spans]
    hold(name, run.counts, accounting.Book(p, run.counts.config, False, FEW_SMS, name, shown, listed))
