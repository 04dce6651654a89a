"""Figures carry their tables, are drawn the same each time, and explorers work with and without widgets."""

from __future__ import annotations

import pytest

import flashlab as fl
from flashlab.lessons import show


def figures() -> list[show.Shown]:
    return [
        show.lines({"tokens": [1, 2, 4]}, {"a": [1, 2.5, None], "b": [3, 4, 5]}),
        show.lines({"n": [1, 2]}, {"a": [1024, 2048]}, log=False, nbytes=True),
        show.bars(["x", "y"], {"read": [1, 2], "written": [3, 4]}),
        show.roofline(fl.DEVICES["t4"], "float16", {"sum": 0.1, "product": 1000.0}),
    ]


def test_a_figure_is_the_same_each_time_it_is_drawn():
    for one, two in zip(figures(), figures(), strict=True):
        assert one.svg == two.svg
        assert one._repr_mimebundle_() == two._repr_mimebundle_()


def test_a_figure_carries_its_table():
    for figure in figures():
        bundle = figure._repr_mimebundle_()
        assert bundle["image/svg+xml"].lstrip().startswith("<?xml")
        assert bundle[show.TABLE]["rows"] and len(bundle[show.TABLE]["columns"]) == len(bundle[show.TABLE]["rows"][0])
        assert "matplotlib" not in bundle["image/svg+xml"].lower() or "v3" not in bundle["image/svg+xml"]


def test_an_explorer_has_a_slider_for_each_choice_and_starts_in_the_middle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHLAB_STATIC", raising=False)

    def draw(n: int, device: str) -> show.Shown:
        print(f"<{n} on {device}>")
        return show.bars([device], {"read": [n]})

    box = show.explore(draw, n=[1, 2, 3], device=["t4", "h100"])
    first, second, page = box.children
    assert "&lt;2 on h100&gt;" in page.value
    assert page.value.count("data:image/svg+xml;base64,") == 1
    assert "<summary>As a table</summary>" in page.value
    before, first.value = page.value, 3
    assert "&lt;3 on h100&gt;" in page.value
    assert page.value.split("base64,")[1] != before.split("base64,")[1]
    second.value = "t4"
    assert "&lt;3 on t4&gt;" in page.value


def test_an_explorer_shows_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHLAB_STATIC", raising=False)
    *_, page = show.explore(lambda n: f"{n} & more", n=[1]).children
    assert page.value == "<pre>1 &amp; more</pre>"


def test_a_page_has_the_middle_of_an_explorer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FLASHLAB_STATIC", "1")
    assert show.explore(lambda n, device: (n, device), n=[1, 20_000, 3], device=["t4", "h100"]) == (20_000, "h100")
    assert capsys.readouterr().out == "[n = 20,000, device = h100; in Jupyter there are sliders here]\n"


def test_a_page_has_the_bytes_that_the_player_would_show(monkeypatch: pytest.MonkeyPatch):
    p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16")
    traces = [
        fl.simulate(name, *fl.random_inputs(p), tile=(16, 16), trace=True).trace for name in ("standard", "flash2")
    ]
    monkeypatch.setenv("FLASHLAB_STATIC", "1")
    table = show.step_through(*traces)
    for column, name in enumerate(("standard", "flash2"), 1):
        c = fl.count(name, p, tile=(16, 16))
        last = [row[column] for row in table.rows if row[column] is not None][-1]
        assert last <= c.hbm.read + c.hbm.write
    assert (
        table.rows[-1][1]
        == fl.count("standard", p, tile=(16, 16)).hbm.read + fl.count("standard", p, tile=(16, 16)).hbm.write
    )
    monkeypatch.delenv("FLASHLAB_STATIC")
    assert "<iframe" in show.step_through(*traces)._repr_html_()
