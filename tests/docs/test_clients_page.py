"""docs/clients.md has the tables and pictures of the newest results, and what it says of them follows from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs._site import clients, figures
from docs._site.blocks import replaced
from flashlab.measure import results
from studies.clients import LIMIT, ROUNDING

TEXT = clients.PAGE.read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    """A picture's words and figures; its curves depend on matplotlib's version."""
    return re.findall(r"<text[^>]*>([^<]*)", svg)


def test_the_page_is_what_the_data_say() -> None:
    assert replaced(TEXT, "clients", clients.blocks()) == TEXT, "run python -m docs._site.clients"
    assert set(re.findall(r"<!-- (\w+): begin", TEXT)) == clients.BLOCKS.keys()


def test_the_pictures_are_what_the_data_say() -> None:
    drawn = clients.pictures()
    assert set(re.findall(r"pictures/(clients_\w+\.svg)", TEXT)) == drawn.keys()
    for name, svg in drawn.items():
        assert texts((clients.PICTURES / name).read_text(encoding="utf-8")) == texts(svg), name


def test_the_bounds_of_the_families() -> None:
    """On a CPU no error is over that of rounding, and each token is eager's. On a GPU mean errors are those of PyTorch's."""
    on_cpu, on_gpu = (clients.found(name) for name in ("families", "families_gpu"))
    assert on_cpu is not None and on_gpu is not None
    for r in on_cpu.data["families"]:
        assert max(r["logits_worst"], r["gradients_worst"]) <= ROUNDING and r["equal"] == r["tokens"] > 0
    beside = {r["family"]: r for r in on_gpu.data["families"] if r["attention"] != "flashlab"}
    for r in on_gpu.data["families"]:
        assert all(r[name] <= LIMIT * beside[r["family"]][name] for name in ("logits_mean", "gradients_mean"))


def test_what_is_not_measured_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clients, "ROOT", tmp_path)
    assert set(clients.blocks().values()) == {"This was not measured yet.\n"} and clients.pictures() == {}


def test_losses_are_drawn() -> None:
    """A line a run, and a name for each attention."""
    runs = [
        {"attention": name, "seed": 0, "losses": [5.0 - i / 100 for i in range(40)]}
        for name in ("flashlab", "sdpa", "sdpa")
    ]
    of = results.Result(Path("a/b/c"), {"kind": "clients", "algorithms": [], "data": {"runs": runs}})
    shown: Any = figures.of(of)
    assert {"flashlab, 1 runs", "sdpa, 2 runs", "training step"} <= set(texts(shown.svg))
    assert shown.rows[1] == ["flashlab", 0, 40, 4.61] and len(shown.rows) == 6
