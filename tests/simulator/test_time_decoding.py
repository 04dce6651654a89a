"""The model of time of kernels that decode: bounds of the hardware, and what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.measure import results
from simulator.time import rates
from tests.simulator.test_time import breaks
from tests.tiers import examples

RESULTS = Path(__file__).resolve().parents[2] / results.FOLDER
DECODING = tuple(name for name, row in fl.CATALOGUE.items() if row.schedule and row.support.few_queries)


def posed(algorithm: str, batch: int, heads: int, kv_heads: int, len_kv: int, chunk: int | None = None) -> fl.Problem:
    if algorithm.startswith("mla"):
        return fl.latent_problem(batch=batch, heads=heads, len_kv=len_kv, chunk=chunk)
    sizes: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "len_kv": len_kv}
    return fl.Problem(**sizes, len_q=1, head_dim=128, dtype="bfloat16")


@pytest.mark.parametrize("algorithm", DECODING)
@examples(15)
@given(st.integers(1, 300), st.sampled_from([1, 2, 8]), st.sampled_from([1, 4, 16]), st.integers(0, 70_000))
def test_no_prediction_undercuts_the_hardware(algorithm: str, batch: int, kv_heads: int, group: int, len_kv: int):
    p = posed(algorithm, batch, kv_heads * group, kv_heads, len_kv)
    assert breaks(fl.timeline(algorithm, p, device="h200")) is None


def errors(algorithm: str, device: str) -> list[float]:
    """How far predictions are from the newest times, as shares."""
    every = results.find(RESULTS, kind="decoding", algorithm=algorithm, device=device)
    found = [x for x in every if x.subject == algorithm and x.condition is None][-1]
    rows = results.kinds()["decoding"].data(found).rows
    took = [r.microseconds[algorithm] * 1e-6 for r in rows]
    problems = [posed(algorithm, r.batch, r.heads, r.kv_heads, r.len_kv, r.chunk) for r in rows]
    predicted = [fl.timeline(algorithm, p, device=device).seconds for p in problems]  # pyright: ignore
    return [abs(x / y - 1) for x, y in zip(predicted, took, strict=True)]


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("algorithm", DECODING)
def test_what_was_measured_is_predicted(algorithm: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """Within 8 % in the mean. A DRAM with half of its bandwidth would stand out."""
    found = errors(algorithm, device)
    assert sum(found) / len(found) < 0.08 and max(found) < 0.21
    monkeypatch.setattr(rates, "DRAM_SHARE", rates.DRAM_SHARE / 2)
    assert max(errors(algorithm, device)) > 0.3


def test_drawn_shapes_are_predicted():
    """Within 8 % in the mean. Those of few bytes are farther off."""
    found = results.latest("runs", RESULTS, algorithm="flash_decoding", device="h100")
    assert found is not None
    rows = results.kinds()["runs"].data(found).rows
    took = [
        fl.timeline("flash_decoding", posed("flash_decoding", r.batch, r.heads, r.kv_heads, r.len_kv)) for r in rows
    ]
    apart = [abs(t.seconds * 1e6 / r.microseconds[r.chosen] - 1) for t, r in zip(took, rows, strict=True)]
    assert sum(apart) / len(apart) < 0.08 and max(apart) < 0.25


@pytest.mark.parametrize("algorithm", DECODING)
def test_any_length_is_predicted_and_more_keys_take_longer(algorithm: str):
    took = [fl.timeline(algorithm, posed(algorithm, 3, 16, 1, n)).seconds for n in (0, 1, 3000, 2**17, 2**24, 2**30)]
    assert took == sorted(took)


def test_rows_that_see_other_keys_are_refused():
    p = fl.Problem(batch=1, heads=8, kv_heads=1, len_q=9, len_kv=900, head_dim=64, dtype="float16")
    with pytest.raises(fl.UsageError, match="len_q = 9: expected queries of one tile of rows"):
        fl.timeline("flash_decoding", p)
    latent = fl.latent_problem(heads=128, len_q=300, len_kv=900, causal=True)
    with pytest.raises(fl.UsageError, match="len_q = 300: expected queries that see the same tiles of keys"):
        fl.timeline("mla_hopper", latent)
