"""docs/triton.md says what was measured, and the claim that it makes holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs._site import triton
from docs._site.blocks import replaced
from docs._site.timed import ratios_to
from flashlab.triton import source
from tests.flashlab.triton.test_source import code

DEVICE = {"device": {"name": "NVIDIA H200"}}


def result(path: str, **data: Any) -> Any:
    return SimpleNamespace(older=(), path=triton.PAGE.parent / "results" / path, content=DEVICE, data=data)


def test_the_page_is_drawn_from_the_results() -> None:
    text = triton.PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, "triton", triton.blocks()), "run python -m docs._site.triton"


def test_it_says_how_long_the_kernel_is() -> None:
    lines = len(code(source("flash2_triton").read_text(encoding="utf-8")))
    assert f"[{lines} lines of\nTriton]" in triton.PAGE.read_text(encoding="utf-8")


def test_it_comes_within_a_factor_of_two_of_sdpa() -> None:
    of = triton.newest("bench")
    if of is None:
        pytest.skip("flash2_triton was not timed yet")
    assert min(ratios_to(of, "sdpa-flash")) >= 0.5


def test_counts_are_summed_by_dtype() -> None:
    def launch(dtype: str, **counts: tuple[int, int | None]) -> dict[str, Any]:
        rows = [{"what": what, "formula": f, "measured": m, "verdict": "equal" if f == m else "the compiler's"}
                for what, (f, m) in counts.items()]  # fmt: skip
        return {"problem": {"dtype": dtype}, "rows": rows}

    launches = [
        launch("float16", **{"hbm.read": (10, 10), "sram.read": (100, 30)}),
        launch("bfloat16", **{"hbm.read": (10, 11), "sram.read": (100, 20)}),
        launch("float32", **{"hbm.read": (7, 7), "sram.read": (4, None)}),
    ]
    said = triton.counted(result("counters/x.json", launches=launches))
    assert "NVIDIA H200: 2 of 3 counts of HBM's bytes are the formula's ([data](results/counters/x.json))" in said
    assert "| sram.read, 16 bits | 200 | 50 | 0.250 |" in said and "| sram.read, float32 | 0 | 0 | – |" in said


def test_times_are_told_by_cell() -> None:
    cell = {"dtype": "bfloat16", "head_dim": 64, "causal": True, "length": 4096}
    rows = [
        {**cell, "peer": None, "tflops": 401.4},
        {**cell, "peer": "sdpa-flash", "ratio": 1.2},
        {**cell, "length": 1024, "peer": None, "tflops": 300},
        {**cell, "length": 1024, "peer": "sdpa-flash", "ratio": 1.0},
    ]
    said = triton.timed(result("bench/y.json", rows=rows), triton.PEERS)
    assert "1.00 to 1.20 × as fast as SDPA's flash (median 1.10 ×) ([data](results/bench/y.json))" in said
    assert "| bfloat16 × 64 | causal | 4,096 | 401 | 1.20 × | – |" in said


def test_what_was_not_measured_is_said() -> None:
    assert triton.counted(None) == triton.timed(None, triton.PEERS) == "This was not measured yet.\n"
    assert Path(triton.PAGE).name == "triton.md"
