"""Models on a GPU, in bfloat16: what they measure there is in their own words."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from typing import Any

import pytest

from studies import clients, families, profiled

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
ASKED: dict[str, Any] = {"tiny": False, "attention": "flashlab,sdpa-flash,math", "seeds": [0], "again": 1, "rounds": 2}


def measured(part: str, **change: Any) -> Any:
    given = Namespace(**ASKED | {"steps": 8, "batch": 2} | change)
    return clients.CLIENTS(part=part, **clients.PARTS[part](import_module("torch"), given))


def test_training_beside_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are at most 1.1 times SDPA's. Parameters and what is kept make most of the peak."""
    monkeypatch.setattr(clients, "SMALL", {"layers": 2, "context": 256, "dropout": 0.0})
    of = measured("train")
    assert [r.attention for r in of.runs] == ["flashlab", "sdpa-flash", "math", "sdpa-flash"]
    for r in of.runs:
        assert r.passed and len(r.losses) == 8 and r.losses[-1] < r.losses[0]
        assert 0.5 * r.formula < r.peak < 3 * r.formula
    assert "between its own runs" in clients.headline(of)


def test_steps_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SHAPES", ((2, 256, 8), (1, 512, 2)))
    of = measured("speed")
    assert {(r.attention, r.context) for r in of.speeds} >= {("flashlab", 256), ("sdpa-flash", 512)}
    assert all(r.tokens_per_s > 0 and r.peak > 0 for r in of.speeds)
    assert clients.table(of) and "at 1 × 512" in clients.headline(of)


def test_a_step_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run for less than a step takes, and ours are among them."""
    monkeypatch.setattr(clients, "PROFILED", ((2, 256, 8),))
    monkeypatch.setattr(profiled, "TOP", 1000)
    of = measured("profile", attention="flashlab,sdpa-flash")
    for r in of.profiles:
        assert 0 < r.gpu_ms <= 1.05 * r.step_ms and r.launches > 50 and 0 < r.forward_us < 1e3 * r.host_ms
        names = [each.kernel for each in r.kernels if "flash" in each.kernel]
        assert names and all(("pytorch_flash" in name) == (r.attention != clients.OURS) for name in names)
    assert "the GPU idle for" in clients.headline(of)


@pytest.mark.transformers
def test_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean errors are at most 1.1 times those of PyTorch's attention in bfloat16, of a family with sinks and one without."""
    monkeypatch.setattr(families, "FAMILIES", {name: families.FAMILIES[name] for name in ("Llama", "gpt-oss")})
    of = measured("families")
    ours = {r.family: r for r in of.families if r.attention == clients.OURS}
    beside = {r.family: r for r in of.families if r.attention != clients.OURS}
    assert ours.keys() == beside.keys() == families.FAMILIES.keys()
    for family, r in ours.items():
        assert r.logits_mean <= clients.LIMIT * beside[family].logits_mean, family
        assert r.gradients_mean <= clients.LIMIT * beside[family].gradients_mean, family
