"""The race of docs/race.md: its data are the simulator's, and in Chromium it says what they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

import flashlab as fl
from docs._site import race
from flashlab.lessons import drawings, show
from flashlab.lessons.drawing import GREY
from flashlab.lessons.race import Race, style
from flashlab.views import plots
from flashlab.views.palette import DARK, KINDS, LIGHT
from tests.flashlab.player.traces import small

STATIC = Path(race.__file__).resolve().parents[1] / "_static"
DATA = race.data()
TRUTH = DATA["row"]["truth"]


def test_bytes_are_those_of_the_formula() -> None:
    for program in DATA["programs"]:
        counts = fl.count(program["name"], race.PROBLEM, tile=race.TILE)
        found: dict[str, int] = {}
        for _, tensor, n in program["moves"]:
            found[tensor] = found.get(tensor, 0) + n
        assert found == {name: n for name, x in counts.by_tensor.items() if (n := x.hbm_read + x.hbm_write)}, program[
            "name"
        ]


def test_the_row_ends_at_the_truth_and_its_maximum_always_rises() -> None:
    scores, values = (np.array(DATA["row"][name]) for name in ("scores", "values"))
    p = np.exp(scores)
    assert p @ values / p.sum() == pytest.approx(TRUTH, abs=1e-5)
    tops = scores.reshape(-1, race.TILE[1]).max(1)
    assert (np.diff(tops) > 0).all()


def test_a_tensor_has_one_colour_in_player_race_drawings_and_plots() -> None:
    """All are the palette's: the variables of the two style sheets, the lanes of a drawing, the bars of a plot."""
    page = fl.player(small("flash2")).html()
    for text in (page, style()):
        for kind in LIGHT:
            wanted = {LIGHT[kind], DARK[kind]}
            assert set(re.findall(rf"--tensor-{kind}: (#[0-9a-f]{{6}});", text)) == wanted
    tensors = {tensor for program in DATA["programs"] for _, tensor, _ in program["moves"]}
    assert DATA["kinds"] == {name: KINDS[name] for name in tensors}
    drawn = drawings.tiles().svg
    assert {fill for fill in re.findall(r'fill="(#\w+)" stroke', drawn) if fill != GREY} == {
        LIGHT[name] for name in ("q", "k", "v", "out")
    }
    counts = fl.count("standard", race.PROBLEM, tile=race.TILE)
    bars = {to_hex(patch.get_facecolor()) for ax in plots.bytes_by_tensor([counts]).axes for patch in ax.patches}
    assert bars == {LIGHT[KINDS[name]] for name in counts.by_tensor}
    parts = {"Q, K, V": [1], "S, P": [2], "out": [3], "read": [4]}
    shown = show.bars(["standard"], parts).svg.lower()
    assert all(LIGHT[name] in shown for name in ("q", "s", "out")) and LIGHT["k"] not in shown


# -- in a browser -------------------------------------------------------------------------------------------------


Opened = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    """`opened(change)` is the page alone, with its script changed; nothing may go wrong on it."""
    amiss: list[str] = []

    def load(change: Callable[[str], str] = str, *, motion: str = "reduce") -> Any:
        script = change((STATIC / "race.js").read_text(encoding="utf-8"))
        html = f"<!doctype html><style>{style()}</style><div id=race class=race></div><script>{race.script()}{script}</script>"
        (tmp_path / "race.html").write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": 360, "height": 800}, reduced_motion=motion)
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.goto((tmp_path / "race.html").as_uri())
        return page

    yield load
    assert amiss == []


def last_row(page: Any) -> str:
    for _ in range(3):
        page.get_by_role("button", name="Next tile").click()
    return page.locator("section", has_text="2. One row").locator("p[aria-live]").inner_text()


@pytest.mark.browser
def test_the_race_ends_at_the_counts(opened: Opened) -> None:
    """By keyboard alone."""
    page = opened()
    page.get_by_role("slider").press("End")
    for program in DATA["programs"]:
        total = sum(n for _, _, n in program["moves"])
        said = page.locator(f"p:has-text('{program['title']}') ~ p.said").first.inner_text()
        assert said.startswith(f"{total:,} bytes, done: q ")
    page.get_by_role("slider").press("Home")
    assert page.locator("p.said").first.inner_text() == "0 bytes"
    page.get_by_role("button", name="One step on").press("Enter")
    step, tensor, n = DATA["programs"][0]["moves"][0]
    assert page.locator("p.said").first.inner_text() == f"{n:,} bytes, step {step}: {tensor} {n:,}"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.browser
def test_the_race_runs_by_itself_once_and_ends_with_a_sentence(opened: Opened) -> None:
    totals = [sum(n for _, _, n in program["moves"]) for program in DATA["programs"]]
    said = f"5 times fewer bytes: FlashAttention-2 asked HBM for {totals[1] / 1024:.0f} KiB, standard attention for "
    assert round(totals[0] / totals[1]) == 5
    still = opened()
    assert still.locator(".verdict").inner_text() == f"{said}{totals[0] / 1024:.0f} KiB."
    assert still.get_by_role("button", name="Play").is_visible()
    page = opened(motion="no-preference")
    page.get_by_role("button", name="Pause").wait_for()
    assert not page.locator(".verdict").is_visible() and page.locator(".track > span").count() > 0
    page.get_by_role("slider").press("ArrowRight")  # a hand on the clock stops it
    assert page.get_by_role("button", name="Play").is_visible()
    page.get_by_role("slider").press("End")
    assert page.locator(".verdict").inner_text().startswith("5 times fewer bytes")


@pytest.mark.browser
def test_a_lessons_frame_has_the_race_alone(browser: Any, tmp_path: Path) -> None:
    q, k, v = fl.random_inputs(race.PROBLEM, seed=0)
    traces = {
        title: fl.simulate(name, q, k, v, tile=race.TILE, trace=(0, 0)).trace for name, title in race.RACERS.items()
    }
    (tmp_path / "frame.html").write_text(f"<!doctype html>{Race(traces).frame()}", encoding="utf-8")  # pyright: ignore
    page = browser.new_page(viewport={"width": 800, "height": 600}, reduced_motion="reduce", color_scheme="light")
    page.goto((tmp_path / "frame.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.get_by_role("slider").press("End")  # a frame of its own process may not be told of reduced motion
    assert frame.locator(".verdict").inner_text().startswith("5 times fewer bytes")
    ground = "getComputedStyle(document.body).backgroundColor"
    inside = page.frames[1]
    assert inside.evaluate(ground) == "rgb(255, 255, 255)"
    page.evaluate("document.querySelector('iframe').contentWindow.postMessage({ theme: 'dark' }, '*')")
    page.wait_for_timeout(100)
    assert inside.evaluate(ground) != "rgb(255, 255, 255)"
    assert inside.evaluate("document.documentElement.scrollHeight - innerHeight") <= 0


def test_a_race_needs_two() -> None:
    with pytest.raises(fl.UsageError, match="two or more"):
        Race({})


@pytest.mark.browser
def test_a_row_ends_at_the_truth_and_a_wrong_update_does_not(opened: Opened) -> None:
    right = f"O / ℓ is {TRUTH:.4f}, and attention in float64 gives {TRUTH:.4f}.".replace("-", "−")
    assert right in last_row(opened())
    assert right not in last_row(opened(lambda script: script.replace("old.o * f", "old.o")))


@pytest.mark.browser
def test_answers_are_judged_by_what_they_compute(opened: Opened) -> None:
    page = opened()
    typed, verdict = page.get_by_label("or type it"), page.get_by_role("status")

    def said(answer: str) -> str:
        typed.fill(answer)
        typed.press("Enter")
        return verdict.inner_text()

    for answer in ("exp(m_old - m_new)", "e^(m_old − m_new)", "exp(m_old)/exp(m_new)", "1 / np.exp(-(m_old-m_new))"):
        assert said(answer).startswith("Right."), answer
    number = f"attention in float64 gives {TRUTH:.4f}".replace("-", "−")
    for answer in ("exp(m_new - m_old)", "1", "m_old / m_new", "exp(-m_new)", "exp(m_old)", "m_old - m_new", "2"):
        assert said(answer).startswith("Not yet. With this factor the row ends at ")
        assert number in verdict.inner_text()
        assert ("should be" in verdict.inner_text()) == (answer == "2")  # the others have a reason of their own
    for answer in ("", "exp(", "alert(1)", "m_old m_new", "document.title"):
        assert "Write with m_old, m_new" in said(answer), answer
    page.get_by_label("exp(m_new - m_old)").check()
    assert "The sign is turned" in verdict.inner_text()
