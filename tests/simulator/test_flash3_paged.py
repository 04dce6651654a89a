"""flash3_paged: the program against the judge, the formula against the program, what is read, and where "auto" takes it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.run import choose, devices
from simulator.operations.paged import PAGED
from tests.simulator.test_paged import within
from tests.tiers import examples

MASKS = "causal", "window", "soft_cap"
LARGE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


@st.composite
def problems(draw: st.DrawFn) -> fl.Problem:
    """Many queries of each request, and any number of keys; sometimes more requests than are sorted together."""
    kv_heads, len_q = draw(st.integers(1, 2)), draw(st.sampled_from([1, 64, 129, 200]))
    keys = st.integers(0, 400) | st.sampled_from([0, 1, 127, 128, 129])
    few = draw(st.booleans())
    lengths = draw(st.lists(keys, min_size=1 if few else 33, max_size=3 if few else 40))
    p = fl.Problem(
        batch=len(lengths),
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        lengths=[(len_q if few else 3, n) for n in lengths],
        head_dim=draw(st.sampled_from([16, 19, 72, 200])),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        page_size=draw(st.sampled_from([1, 3, 16, 64, 100, 256])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 200), st.none() | st.integers(0, 5))),
        soft_cap=draw(st.sampled_from([None, None, 20.0])),
    )
    return p.replace(pages=p.pages + draw(st.integers(0, 3)), len_kv=p.len_kv + draw(st.integers(0, 200)))


@examples(20)
@given(problems(), st.sampled_from([None, (64, 64), (64, 16), (5, 7)]), st.sampled_from(["h100", "l4"]))
def test_the_program_is_right_and_counts_what_the_formula_does(p: fl.Problem, tile: Any, device: Any) -> None:
    """All that no request owns is NaN, so what it reads of that shows."""
    arrays: Any = PAGED.draw(p, 1)
    masks: Any = {name: getattr(p, name) for name in MASKS}
    run = fl.simulate("flash3_paged", **arrays, **masks, tile=tile, device=device, lse=True)
    assert run.counts == fl.count("flash3_paged", run.counts.problem, tile=tile, device=device, lse=True)
    formula: Any = fl.CATALOGUE["flash3_paged"].formula
    fl.check_formula("flash3_paged", formula, p, tile=tile, device=device)
    assert within(dict(run.outputs), p, arrays)


def test_what_is_read() -> None:
    """Whole boxes of K and V for each row tile, or valid rows where pages don't fill a tile. An entry for each box, or for each
    page of a share, once for K and once for V. And 32 lengths."""
    p = fl.Problem(batch=35, lengths=[(256, 1000)] * 35, page_size=16, **LARGE)
    c = fl.count("flash3_paged", p, device="h200")
    tiles = 35 * 32 * 2
    assert c.by_tensor["k"].hbm_read == c.by_tensor["v"].hbm_read == tiles * 1024 * 256
    cleared = c.by_tensor["v"].sram_write - c.by_tensor["k"].sram_write
    assert cleared == tiles * 24 * 256
    assert c.by_tensor["block_table"].hbm_read == tiles * 2 * 4 * 63
    keys = fl.count("flash3_paged", p.replace(page_size=1, pages=None), device="h200")
    assert keys.by_tensor["block_table"].hbm_read == tiles * 2 * 4 * 1000
    assert keys.by_tensor["k"].hbm_read == keys.by_tensor["v"].hbm_read == tiles * 1000 * 256
    large = fl.count("flash3_paged", p.replace(page_size=256, pages=None), device="h200")
    assert large.by_tensor["block_table"].hbm_read == tiles * 2 * 4 * 8  # an entry for each tile
    assert c.by_tensor["seq_lens"].hbm_read == tiles // 35 * 4 * (3 * 3 + 32 * 32)
    assert c.by_tensor["drawn"].hbm_atomic == 4 * tiles and c.tensors["drawn"].nbytes == 4
    config = c.config
    assert config is not None and config.grid(p, c.device, tiles) == 132
    assert c.by_tensor["work"].sram_write == 16 * (tiles + 132)
    wide = fl.count("flash3_paged", p.replace(head_dim=256), device="h200")
    assert "drawn" not in wide.tensors and wide.by_tensor["work"].sram_write == 16 * tiles


@pytest.mark.parametrize(
    ("name", "arch", "changes"),
    [
        ("flash3_paged", "compute_90", {}),
        ("flash3_paged", "compute_90", {"len_q": 128, "batch": 4}),
        ("flash3_paged", "compute_90", {"len_q": 128, "soft_cap": 30.0, "sinks": True}),
        ("paged", "compute_90", {"len_q": 1, "soft_cap": 30.0, "sinks": True}),
        ("paged", "compute_90", {"len_q": 1}),
        ("flash3_paged", "compute_90", {"len_q": 128, "batch": 1}),
        ("paged", "compute_90", {"len_q": 64, "batch": 1}),
        ("paged", "compute_90", {"len_q": 16}),
        ("paged", "compute_90", {"len_q": 8, "batch": 1}),
        ("paged", "compute_80", {}),
        ("paged", "compute_90", {"dtype": "float32"}),
        ("paged", "compute_90", {"kv_dtype": "int8"}),
    ],
)
def test_auto_takes_it_for_many_queries_on_hopper(name: str, arch: str, changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"batch": 16, "len_q": 512, "len_kv": 8192, "page_size": 16, **LARGE, **changes}
    p = fl.Problem(**sizes)
    assert choose.fastest(PAGED, p, devices.gpu_device(arch)) == name


def test_what_it_refuses() -> None:
    p = fl.Problem(batch=2, len_q=512, len_kv=8192, page_size=16, **LARGE)
    row = fl.CATALOGUE["flash3_paged"]
    assert row.refuses(p, fl.DEVICES["h200"]) is None
    for wrong, device, line in (
        ({}, "l4", "flash3_paged needs sm_90a (Hopper: an H100 or H200)"),
        ({"dtype": "float32"}, "h100", "dtype = 'float32': expected float16 or bfloat16 for flash3_paged: use paged"),
        ({"kv_dtype": "int8"}, "h100", "kv_dtype = 'int8': expected nothing: flash3_paged knows"),
        ({"head_dim": 300}, "h100", "head_dim = 300: expected at most 256"),
    ):
        refused = row.refuses(p.replace(**wrong), fl.DEVICES[device])
        assert refused is not None and refused.startswith(line)
    for tile in (fl.Tile(192, 64), fl.Tile(128, 144), fl.Tile(128, 40)):
        assert "64 or 128 rows" in str(row.refuses(p, fl.DEVICES["h100"], tile))
