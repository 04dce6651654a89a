"""The player of the pages: what it shows is what the day says, in a browser; and the command that writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Costs, Model
from flashlab.serve.day import Day, serve
from flashlab.serve.page import page
from flashlab.serve.scheduler import Scheduler
from flashlab.serve.traces import Arrival, demo
from tests.flashlab.cli.typed import document, one_line, run


@pytest.fixture(scope="module")
def day() -> Day:
    limits: Any = {"max_num_seqs": 12, "max_num_batched_tokens": 64}
    return serve(
        demo(), Scheduler(KVCacheManager(32, 8), **limits), Costs(Model(layers=2), 8), trace="demo", changes=True
    )


def test_the_page_loads_nothing_and_cannot_be_broken_out_of(day: Day) -> None:
    from dataclasses import replace

    text = page(replace(day, trace="</script><b>x", source="</script>"))
    assert "http:" not in text and "https:" not in text and "</script><b>" not in text
    assert len(re.findall("</script>", text)) == 2
    assert len(text) < 100_000


def test_a_day_without_changes_is_refused() -> None:
    plain = serve([Arrival(0.0, 5, 1)], Scheduler(KVCacheManager(4, 4)), Costs(Model(layers=1), 4))
    with pytest.raises(fl.UsageError, match="changes=True"):
        page(plain)


@pytest.mark.browser
def test_each_step_shows_whose_the_pages_are(day: Day, browser: Any, tmp_path: Path) -> None:
    """By way of every step, and of some back, on a screen and on a phone, without a message in the console."""
    path = tmp_path / "pages.html"
    path.write_text(page(day), encoding="utf-8")
    for width in (1400, 390):
        tab = browser.new_page(viewport={"width": width, "height": 900})
        messages = list[str]()
        tab.on("console", lambda message, to=messages: to.append(message.text))
        tab.on("pageerror", lambda error, to=messages: to.append(str(error)))
        tab.goto(path.as_uri())
        tab.click("#first")
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowLeft")
        shown = list[list[str]]()
        owners = dict[int, tuple[int, int]]()
        steps = day.steps if width == 1400 else day.steps[:3]
        for n, step in enumerate(steps):
            owners |= {change.block: (change.owner, change.owners) for change in step.changes}
            cells = tab.eval_on_selector_all("#pool li", "all => all.map((cell) => cell.textContent)")
            wanted = ["∅"]
            for block in range(1, 32):
                who, many = owners.get(block, (-1, 0))
                wanted.append("" if who < 0 else f"{who}×{many}" if many > 1 else str(who))
            assert cells == wanted, n
            shown.append(cells)
            assert tab.inner_text("#counter") == f"step {n + 1} of {len(day.steps)}"
            assert f"compute {step.tokens} tokens" in tab.inner_text("#said") or step.requests == 1 or step.tokens == 1
            tab.click("#next")
        if width == 1400:
            for n in (len(steps) - 2, len(steps) - 3, len(steps) - 4):
                tab.click("#back")
                assert tab.eval_on_selector_all("#pool li", "all => all.map((cell) => cell.textContent)") == shown[n]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert messages == []
        tab.close()


@pytest.mark.browser
@pytest.mark.alike("light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(day: Day, browser: Any, tmp_path: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    path = tmp_path / "pages.html"
    path.write_text(page(day), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme, bypass_csp=True)
    tab.goto(path.as_uri())
    found = Axe().run(tab)
    assert found.violations_count == 0, found.generate_report()
    tab.close()


# -- the command


def test_the_demo_has_real_numbers_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is asked for: its numbers are the simulator's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    found = document("serve", "--demo")
    assert found["backend"] == "simulator" and found["summary"]["requests"] == 40
    assert found["summary"]["reused"] > 0 and found["summary"]["preempted"] > 0
    assert (tmp_path / "serve.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_counted_day_as_tables_json_and_a_picture(tmp_path: Path) -> None:
    words = ("serve", "lognormal:alpaca", "--requests", 5, "--rate", 5000, "--layers", 2)
    said = run(*words, "--plot", tmp_path / "day.png").stdout
    assert "tokens computed" in said and "rate: decoding/flash_decoding_h100" in said and "with pages of 16" in said
    assert (tmp_path / "day.png").read_bytes()[:4] == b"\x89PNG"
    found = document(*words)
    assert found["summary"]["answer_tokens"] == sum(one["answer"] for one in found["requests"])
    assert f"{found['summary']['steps']:,}" in said


def test_a_trace_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    path.write_text("\n".join(json.dumps({**line, "timestamp": 1000 * n}) for n in range(3)))
    found = document("serve", path, "--pages", 64, "--device", "h200")
    assert found["device"] == "h200" and [one["reused"] for one in found["requests"]] == [0, 592, 592]
    assert found["trace"] == str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "TRACE = None: expected a trace, or --demo without one"),
        (("lognormal:alpaca", "--demo"), "TRACE = 'lognormal:alpaca': expected a trace, or --demo without one"),
        (("nowhere.csv",), "TRACE = 'nowhere.csv': expected a file that can be read"),
        (("lognormal:alpaca", "--pages", 1), "--pages = 1: expected an integer of at least 2"),
        (("lognormal:alpaca", "--page-size", 0), "--page-size = 0: expected an integer of at least 1"),
        (("lognormal:alpaca", "--policy", "best"), "--policy = 'best': expected one of fcfs, shortest"),
        (("lognormal:alpaca", "--backend", "cpu"), "--backend = 'cpu': expected one of counted, simulator"),
        (("lognormal:alpaca", "--device", "a100"), "--device = 'a100': expected one of h100, h200"),
        (("lognormal:alpaca", "--heads", 7), "--kv-heads = 8: expected"),
        (("lognormal:alpaca", "--pages", 3), "expected at most 33: the pool has no more"),
        (("lognormal:alpaca", "--watermark", 2), "--watermark = 2.0: expected a share of the pool"),
        (("lognormal:alpaca", "--html", "day.txt.png"), "--html"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    words: tuple[object, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.txt.png").write_text("mine")
    assert said in one_line("serve", *words)
