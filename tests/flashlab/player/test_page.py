"""The page in Chromium: every control, every panel, by mouse and by keyboard, without a network."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from tests.flashlab.player.test_pack import hostile
from tests.flashlab.player.traces import LESSON, lesson, long, record, shown, small, traced
from tests.tiers import one_of_each, those_in

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
ROOT = Path(__file__).resolve().parents[3]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Players in files, by name."""
    folder = tmp_path_factory.mktemp("players")
    fl.player(lesson("flash2")).save(folder / "one.html")
    fl.player(lesson("standard"), lesson("flash2")).save(folder / "two.html")
    fl.player(long()).save(folder / "long.html")
    fl.player(traced("flash2_backward")).save(folder / "backward.html")
    fl.player(hostile(), small("flash1")).save(folder / "hostile.html")
    (folder / "notebook.html").write_text(
        "<!doctype html><title>notebook</title><div class='jp-OutputArea'>"
        + fl.player(lesson("flash2"), step=5).frame()
        + "</div>",
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def opened(browser: Any, pages: Path) -> Iterator[Open]:
    """`opened(name, hash)` is a page that is ready. At the end of the test: no errors, and nothing else was requested."""
    contexts: list[Any] = []
    errors: list[str] = []
    requests: list[str] = []

    def load(name: str, hash: str = "", *, width: int = 1600, height: int = 1000, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
        page.route(re.compile("^(?!file:)"), lambda route: route.abort())
        page.goto((pages / f"{name}.html").as_uri() + hash)
        if name != "notebook":
            page.wait_for_selector("main[data-ready]")
        return page

    load.errors, load.requests = errors, requests  # pyright: ignore[reportFunctionMemberAccess]
    yield load
    for context in contexts:
        context.close()
    assert errors == []
    assert {url.split("#")[0] for url in requests if not url.startswith("about:")} <= {
        path.as_uri() for path in pages.glob("*.html")
    }


def until(page: Any, condition: str, seconds: float = 10) -> None:
    """Wait for a condition; Playwright's own way needs eval, which the page's policy forbids."""
    for _ in range(int(seconds * 50)):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never: {condition}")


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def at(page: Any) -> int:
    """The step on show, from 1."""
    return int(page.locator("input[type=range]").input_value())


def story(page: Any) -> str:
    return page.locator(".story").first.inner_text()


def counted(page: Any, view: int = 0) -> dict[str, list[int]]:
    """The table of byte counters: what it says for each tensor, changes left out."""
    rows = page.locator(".counters").nth(view).locator("tbody tr")
    return {
        row.locator("th").inner_text(): [int(text.replace(",", "")) for text in row.locator(".total").all_inner_texts()]
        for row in rows.all()
    }


# -- what is on show --------------------------------------------------------------------------------------------------


def test_a_step_is_told_in_words(opened: Open) -> None:
    trace = lesson("flash2")
    n = next(n for n, event in enumerate(trace.events) if event.step == "load_k" and event.block == (2, 0))
    text = story(opened("one", f"#step={n + 1}"))
    assert "load_k" in text and f"step {n + 1} of {len(trace.events)}" in text and "block 2" in text
    assert "fetch the next tile of keys" in text
    assert re.search(r"Loads from HBM into SRAM: k rows 0–31 \(4,096 bytes\)", text)
    text = story(opened("one", f"#step={n + 2}"))
    assert re.search(r"Reads from SRAM: q \(4,096 bytes\) and k \(8,192 bytes\)", text)  # k by both warps
    assert re.search(r"Computes in registers: s \(32 × 32\)", text)


def test_both_sources_show_the_lines_of_the_step(opened: Open) -> None:
    n = next(n for n, event in enumerate(lesson("flash2").events) if event.step == "load_v")
    page = opened("one", f"#step={n + 1}")
    program, kernel = page.locator(".listing").all()
    marked = program.locator(".line.on").all_inner_texts()
    assert 'block.step("load_v")' in marked[0] and "v_j = block.load(v" in marked[1] and len(marked) == 2
    assert "v_j = block.load" in program.locator(".line.move").inner_text()
    assert "// step: load_v" in kernel.locator(".line.on").first.inner_text()
    assert "(prefetch" in kernel.locator(".line.also").first.inner_text()
    assert "flash2.cu" in kernel.inner_text()
    for listing in (program, kernel):  # in sight within the listing
        assert listing.locator(".line.on").first.evaluate(
            "line => { const box = line.closest('pre').getBoundingClientRect(), at = line.getBoundingClientRect();"
            "return at.top >= box.top && at.bottom <= box.bottom }"
        )


@pytest.mark.parametrize(("view", "algorithm"), [(0, "standard"), (1, "flash2")])
def test_the_counters_end_at_the_formulas_counts(opened: Open, view: int, algorithm: str) -> None:
    page = opened("two", "#step=100000")
    counts = fl.count(algorithm, LESSON.replace(heads=1), tile=(32, 32), device="a100")
    shown = counted(page, view)
    assert shown.pop("all") == [counts.hbm.read, counts.hbm.write, counts.sram.read, counts.sram.write]
    assert shown == {name: [t.hbm_read, t.hbm_write, t.sram_read, t.sram_write] for name, t in counts.by_tensor.items()}


def test_the_counters_say_what_the_step_adds(opened: Open) -> None:
    trace = lesson("flash2")
    page = opened("one")
    before = counted(page)["all"]
    for n in range(1, 12):
        button(page, "One step on").click()
        moved = [0, 0, 0, 0]
        for transfer in trace.events[n].transfers:
            for kind, nbytes in transfer.nbytes.items():
                moved[["hbm.read", "hbm.write", "sram.read", "sram.write"].index(kind)] += nbytes
        now = counted(page)["all"]
        assert np.subtract(now, before).tolist() == moved
        added = page.locator(".counters .sum .added").all_inner_texts()
        assert [int(text.replace(",", "").removeprefix("+") or 0) for text in added] == moved
        before = now


def test_m_l_and_the_accumulator_are_the_traces(opened: Open) -> None:
    """At the last `rescale` of row tile 2: values, and arrows where they rose or fell."""
    trace = lesson("flash2")
    n = max(n for n, event in enumerate(trace.events) if event.step == "rescale" and event.block == (2, 0))
    new = trace.events[n].values
    old = {
        name: next(e.values[name] for e in reversed(trace.events[:n]) if name in e.values)
        for name in ("m_i", "l_i", "acc")
    }
    page = opened("one", f"#step={n + 1}")
    table = page.locator(".values table")
    head = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    assert head[1:3] == ["m_i", "l_i"] and "acc[0]" in head
    rows = table.locator("tbody tr").all()
    assert len(rows) == 16
    for r in (0, 7, 15):
        assert rows[r].locator("th").inner_text() == str(64 + r)
        cells = rows[r].locator("td").all_inner_texts()
        for name, column in (("m_i", 0), ("l_i", 0), ("acc", 1)):
            place = head.index(name if name != "acc" else "acc[1]") - 1
            shown = cells[place].replace("−", "-")
            now, was = float(new[name][r, column]), float(old[name][r, column])
            assert float(shown.lstrip("▲▼")) == pytest.approx(now, rel=2e-3)
            assert (shown[0] == "▲", shown[0] == "▼") == (now > was, now < was)


def test_values_of_other_rows_are_gone(opened: Open, pages: Path) -> None:
    """flash1 is one block that goes from row tile to row tile: what was computed for the last one is no longer there."""
    trace = lesson("flash1")
    fl.player(trace).save(pages / "flash1.html")
    first, second, *_ = (n for n, event in enumerate(trace.events, 1) if event.step == "load_q")
    page = opened("flash1", f"#step={second - 1}")
    heads = page.locator(".values thead th").all_inner_texts()
    assert {"m_i", "l_i", "l_new"} <= set(heads) and page.locator(".values .map").count() > 1
    button(page, "One step on").click()
    assert "Nothing computed yet" in page.locator(".values").inner_text()
    assert page.locator(".values tbody tr").count() == 0
    button(page, "One step on").click()
    assert page.locator(".values tbody th").first.inner_text() == "32"  # the first query of the next tile


def test_what_belongs_to_keys_stays_while_queries_come_and_go(opened: Open) -> None:
    """A block of the backward pass adds up dK and dV over all tiles of queries."""
    trace = traced("flash2_backward")
    last = max(n for n, event in enumerate(trace.events) if "dk_j" in event.values and event.block == (1, 0))
    page = opened("backward", f"#step={last + 1}")
    table = page.locator(".values")
    assert {"dk_j", "dv_j", "p"} <= set(table.locator(".map code").all_inner_texts())
    table.get_by_role("button", name="dk_j").click()
    assert table.locator("thead th").first.inner_text() == "key"
    assert table.locator("tbody th").first.inner_text() == "16"
    shown = table.locator("tbody tr").first.locator("td").first.inner_text().lstrip("▲▼").replace("−", "-")
    assert float(shown) == pytest.approx(float(trace.events[last].values["dk_j"][0, 0]), rel=1e-3)


FOLD = """() => [...document.querySelectorAll('.values')].map(panel => [...panel.querySelectorAll('thead th, .map')]
  .filter(each => each.getBoundingClientRect().bottom < innerHeight).map(each => each.textContent))"""


@pytest.mark.parametrize(("name", "hash"), [("one", "#step=40"), ("two", "#step=200&clock=bytes")])
def test_m_l_and_the_accumulator_are_in_sight_on_a_laptop(opened: Open, name: str, hash: str) -> None:
    seen = opened(name, hash, width=1366, height=768).evaluate(FOLD)[-1]
    assert {"m_i", "l_i"} <= set(seen)
    assert any(text.startswith("acc") for text in seen)


def test_what_lies_below_the_fold_is_not_in_sight(opened: Open) -> None:
    assert opened("one", "#step=40", width=1366, height=300).evaluate(FOLD) == [[]]


def test_two_stand_side_by_side_in_a_frame_of_a_lesson(opened: Open) -> None:
    page = opened("two", width=736, height=760)
    left, right = (view.bounding_box() for view in page.locator(".view").all())
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]


@pytest.mark.parametrize("name", ["one", "two"])
def test_code_goes_on_below_where_a_line_is_too_long(opened: Open, name: str) -> None:
    page = opened(name, "#step=47", width=900)
    assert page.evaluate("() => [...document.querySelectorAll('pre')].every(e => e.scrollWidth <= e.clientWidth)")
    page.evaluate("() => document.querySelectorAll('.line').forEach(e => e.style.setProperty('white-space', 'pre'))")
    assert page.evaluate("() => [...document.querySelectorAll('pre')].some(e => e.scrollWidth > e.clientWidth)")


def test_the_table_of_values_can_be_moved_and_pinned(opened: Open) -> None:
    n = next(n for n, event in enumerate(lesson("flash2").events) if event.step == "output")
    page = opened("one", f"#step={n + 1}")
    heads = page.locator(".values thead th.matrix")
    assert heads.first.inner_text() == "acc[0]"
    shown = heads.count()
    button(page, "later columns").click()
    assert heads.first.inner_text() == f"acc[{shown}]"
    button(page, "later rows").click()
    assert page.locator(".values tbody th").first.inner_text() == "16"
    assert button(page, "later rows").is_disabled()
    page.locator(".map", has_text="s").filter(has=page.locator("code", has_text=re.compile("^s$"))).click()
    assert heads.first.inner_text().startswith("s[")
    button(page, "Previous step of this name")  # stays pinned on other steps
    button(page, "One step on").click()
    assert heads.first.inner_text().startswith("s[")


def test_the_table_of_values_says_how_many_columns_it_shows(opened: Open) -> None:
    """It has as many as there is room for, at any width, and doesn't scroll."""
    n = next(n for n, event in enumerate(lesson("flash2").events) if event.step == "scores")
    found = set[int]()
    for width in (700, 1400, 1680):
        page = opened("one", f"#step={n + 1}", width=width)
        heads = page.locator(".values thead th.matrix").count()
        found.add(heads)
        assert f"columns 0–{heads - 1} of 32" in page.locator(".values .pagers").inner_text()
        assert (
            page.evaluate("(box => box.scrollWidth - box.clientWidth)(document.querySelector('.values .scroll'))") <= 1
        )
    assert len(found) > 1


WALK = """() => {
  const slider = document.querySelector("input[type=range]"), canvas = document.querySelector(".scores .grid canvas");
  const steps = [];
  for (let step = 1; step <= Number(slider.max); step++) {
    slider.value = step;
    slider.dispatchEvent(new Event("input"));
    const shown = !canvas.hidden && canvas.width && canvas.height;
    const image = shown && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const pixels = shown ? new Uint32Array(image.data.buffer) : [];
    steps.push([
      document.querySelector(".step-name").textContent, new Set(pixels).size, canvas.getAttribute("aria-label"),
      document.querySelector(".pool .note")?.textContent ?? "", document.querySelector(".scores .grid .note").textContent,
    ]);
  }
  return steps;
}"""


@pytest.mark.parametrize(
    "algorithm", those_in({"flash3_paged", "cascade"}, ["paged", "flash3_paged", "mla_paged", "cascade"])
)
def test_the_centre_is_never_blank(algorithm: str, opened: Open, pages: Path) -> None:
    """S is there in every step; with it the pool, of which every page of the request is read, and the partial results."""
    trace = shown(algorithm)
    fl.player(trace).save(pages / f"{algorithm}.html")
    steps = opened(algorithm, width=1400).evaluate(WALK)
    assert [name for name, *_ in steps] == [event.step for event in trace.events]
    assert min(colours for _, colours, *_ in steps) > 3
    assert all("in progress" in label for name, _, label, *_ in steps if name == "scores")
    read = {int(page) for *_, pool, _ in steps if pool.startswith("Reads") for page in re.findall(r"\d+", pool)}
    assert read == set(trace.pages[0] if trace.pages else [])
    if algorithm != "flash3_paged":
        n = len({each.plane for event in trace.events for each in event.transfers} - {None})
        merges = [said for name, *_, said in steps if name in ("merge", "load_part")]
        assert steps[0][4] == f"{n} partial results: none yet." and any("read now" in said for said in merges)


def test_the_grid_of_s_as_a_table(opened: Open) -> None:
    trace = lesson("flash2")
    n = next(n for n, event in enumerate(trace.events) if event.block == (2, 0) and event.step == "scores") + 1
    page = opened("one", f"#step={n}")
    page.locator(".scores summary").click()
    page.locator(".scores tbody tr").first.wait_for()
    head = page.locator(".scores thead th").all_inner_texts()
    rows = [row.locator("th,td").all_inner_texts() for row in page.locator(".scores tbody tr").all()]
    assert head == ["queries", "not yet", "in progress", "done", "skipped"]
    assert rows == [
        ["0–31", "–", "–", "0", "1–3"],
        ["32–63", "–", "–", "0–1", "2–3"],
        ["64–95", "1–2", "0", "–", "3"],
        ["96–127", "0–3", "–", "–", "–"],
    ]
    assert (
        page.locator(".scores canvas")
        .first.get_attribute("aria-label")
        .endswith("6 not yet, 1 in progress, 3 done, 6 skipped")
    )
    button(page, "Next block").click()
    assert page.locator(".scores tbody tr").nth(2).locator("td").all_inner_texts()[-2:] == ["0–2", "3"]


def test_states_differ_by_more_than_colour(opened: Open) -> None:
    """The legend's swatches, in black and white, are six different pictures."""
    page = opened("one")
    pictures = page.evaluate(
        """() => { const canvas = document.createElement("canvas"); document.body.append(canvas); const seen = [];
        const ground = (name) => /^cell-(?!line|faint|frame)/.test(name);
        const plain = Object.fromEntries(CELL_COLOURS.map((name) => [name, ground(name) ? "#fff" : "#000"]));
        for (let state = 0; state < 6; state++) {
          const context = prepared(canvas, 40, 40);
          drawCell(context, state, 0, 0, 40, 40, plain); seen.push(canvas.toDataURL()); }
        return seen; }"""
    )
    assert len(set(pictures)) == 6
    assert page.evaluate("new Set(STATES.map((state) => state.glyph)).size") == 6


def test_sram_as_bar_map_and_table(opened: Open) -> None:
    trace = lesson("flash2")
    n = next(n for n, event in enumerate(trace.events) if event.block == (1, 0) and event.step == "load_v")
    page = opened("one", f"#step={n + 1}")
    page.locator(".sram summary").click()
    page.locator(".sram tbody tr").first.wait_for()
    rows = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts()
        for row in page.locator(".sram tbody tr").all()
    }
    assert {name: int(cells[0].replace(",", "")) for name, cells in rows.items()} == trace.events[n].sram
    assert rows["v"][3] == "↓ filled now" and rows["q"][3] == "–"
    assert "32 × 64 float16" in rows["q"][2] and "holds rows 32–63" in rows["q"][2]
    total, limit = sum(trace.events[n].sram.values()), trace.sram_limit
    assert page.locator(".sram .note").inner_text().startswith(f"{total:,} of {limit:,} bytes")
    widths = page.locator(".sram-bar").evaluate(
        "bar => [...bar.children].map(part => part.getBoundingClientRect().width / bar.clientWidth)"
    )
    assert widths == pytest.approx([n / limit for n in trace.events[n].sram.values()], abs=0.01)
    assert page.locator(".sram-map .buffer.busy b").all_inner_texts() == ["v"]


def test_a_program_that_names_no_step_and_has_no_kernel(opened: Open, pages: Path) -> None:
    @fl.program
    def own(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("own", rows=problem.row_tiles(tile), warps=1):
            block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
        return out

    fl.player(record(own, LESSON, (32, 32))).save(pages / "own.html")
    page = opened("own")
    assert "(no step named yet)" in story(page)
    assert "block.store(out, block.fetch" in page.locator(".line.move").first.inner_text()
    assert "No kernel is known" in page.locator(".listing").nth(1).inner_text()
    assert "does not touch S" in page.locator(".scores").inner_text()


def test_lines_in_helpers_are_told(opened: Open, pages: Path) -> None:
    """A step that moves its bytes in a function within the program, and in one of another file."""
    sys.path.insert(0, str(pages))
    (pages / "elsewhere.py").write_text(
        "def fetched(block, x, i, rows):\n    return block.fetch(x, i, rows)\n", encoding="utf-8"
    )
    from elsewhere import fetched  # pyright: ignore[reportMissingImports]

    @fl.program
    def own(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")

        def within(block: Any) -> Any:
            return block.fetch(q, block.i, tile.rows)

        for block in m.launch("own", rows=problem.row_tiles(tile), warps=1):
            block.step("add")
            block.store(out, within(block) + fetched(block, v, block.i, tile.rows), block.i, tile.rows)
        return out

    fl.player(record(own, LESSON, (32, 32))).save(pages / "helped.html")
    sys.path.remove(str(pages))
    listing = opened("helped").locator(".listing").first
    remarks = listing.locator(".remarks li").all_inner_texts()
    assert re.fullmatch(r"line \d+, called from here: return block.fetch\(q, block.i, tile.rows\)", remarks[0])
    assert remarks[1] == "fetched(), line 2, called from here: return block.fetch(x, i, rows)"
    assert (
        [text.split("⇄")[0] for text in listing.locator(".line.on.move").all_inner_texts()][0]
        .strip()
        .endswith("tile.rows)")
    )


# -- controls -----------------------------------------------------------------------------------------------------------


def test_buttons(opened: Open) -> None:
    page, trace = opened("one"), lesson("flash2")
    assert at(page) == 1
    button(page, "One step on").click()
    assert at(page) == 2
    button(page, "One step back").click()
    button(page, "One step back").click()
    assert at(page) == 1
    button(page, "Last step").click()
    assert at(page) == len(trace.events) and "the last step" in story(page)
    button(page, "First step").click()
    assert at(page) == 1
    starts = [n + 1 for n, event in enumerate(trace.events) if event.step == "load_q"]
    button(page, "Next block").click()
    assert at(page) == starts[1]
    button(page, "One step on").click()
    back = button(page, "This block's beginning, or the block before")
    back.click()
    assert at(page) == starts[1]
    back.click()
    assert at(page) == starts[0]


def test_jumps(opened: Open) -> None:
    page, trace = opened("one"), lesson("flash2")
    page.get_by_label("Jump to a block").select_option(label="2")
    assert at(page) == next(n for n, event in enumerate(trace.events, 1) if event.block == (2, 0))
    page.get_by_label("Step name to jump to").select_option(label="rescale")
    places = [n for n, event in enumerate(trace.events, 1) if event.step == "rescale"]
    here = at(page)
    button(page, "Next step of this name").click()
    assert at(page) == min(n for n in places if n > here)
    button(page, "Next step of this name").click()
    button(page, "Previous step of this name").click()
    assert at(page) == min(n for n in places if n > here)
    slider = page.locator("input[type=range]")
    slider.fill("40")
    assert at(page) == 40 and "step 40 of" in story(page)
    assert slider.get_attribute("aria-valuetext").startswith("step 40 of")


def test_a_click_on_a_tile_of_s_goes_there(opened: Open) -> None:
    page = opened("one")
    canvas = page.locator(".scores canvas").first
    box = canvas.bounding_box()
    canvas.click(position={"x": 26 + (box["width"] - 30) * 0.3, "y": 26 + (box["height"] - 30) * 0.9})
    assert "block 3" in story(page) and "load_k" in story(page) and "k rows 32–63" in story(page)


def test_keys(opened: Open) -> None:
    page, trace = opened("one"), lesson("flash2")
    starts = [n for n, event in enumerate(trace.events, 1) if event.step == "load_q"]
    presses = [
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("Shift+End", len(trace.events)),
        ("Shift+Home", 1),
        ("Shift+ArrowRight", starts[1]),
        ("Shift+PageDown", starts[2]),
        ("Shift+PageUp", starts[1]),
        ("Shift+ArrowLeft", 1),
    ]
    for key, step in presses:
        page.keyboard.press(key)
        assert at(page) == step, key
    page.set_viewport_size({"width": 900, "height": 500})
    for key in ("Control+ArrowRight", "End", "PageDown", "Home"):
        page.keyboard.press(key)
        assert at(page) == 1, key  # the browser's own
    page.keyboard.press("End")
    until(page, "scrollY > 0")
    page.get_by_label("Step name to jump to").focus()
    page.keyboard.press("ArrowDown")
    assert at(page) == 1  # the select's own


def test_play_and_pause(opened: Open) -> None:
    page, n = opened("one"), len(lesson("flash2").events)
    page.get_by_label("Speed").select_option(label="very fast")
    page.keyboard.press("Space")
    until(page, "document.querySelector('input[type=range]').value > 4")
    button(page, "Pause").click()
    here = at(page)
    page.wait_for_timeout(150)
    assert at(page) == here and button(page, "Play").is_visible()
    page.locator("input[type=range]").fill(str(n - 3))
    button(page, "Play").click()
    until(page, f"document.querySelector('input[type=range]').value == {n}")
    assert button(page, "Play").is_visible()  # it stops by itself
    button(page, "Play").click()  # and starts over
    until(page, f"document.querySelector('input[type=range]').value < {n}")


def test_everything_is_reached_by_keyboard_alone(opened: Open) -> None:
    page = opened("one")
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        reached.append(
            page.evaluate(
                "(on => on.getAttribute('aria-label') ?? on.labels?.[0]?.textContent ?? on.textContent)(document.activeElement)"
            )
        )
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none", reached[-1]
    wanted = {
        "First step", "One step back", "Play", "One step on", "Last step", "Step", "Speed", "Jump to a block", "Next block",
        "Step name to jump to", "Next step of this name", "Link to this step", "Tile program, line by line",
        "CUDA kernel, line by line", "Values in registers", "Bytes moved so far", "As a table", "Keys", "What the words mean",
    }  # fmt: skip
    assert {each for each in wanted if not any(each in text for text in reached)} == set()


def test_words_explain_themselves(opened: Open) -> None:
    page = opened("one")
    tip = page.get_by_role("tooltip")
    assert tip.is_hidden()
    page.locator(".sram .term").first.focus()
    assert "CUDA calls it shared memory" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator(".values .term").first.hover()
    assert tip.is_visible()
    page.get_by_text("What the words mean").click()
    assert "Counts are bytes that instructions request" in page.locator("footer").inner_text()


# -- links --------------------------------------------------------------------------------------------------------------


def test_a_link_leads_to_the_step(opened: Open, pages: Path) -> None:
    page = opened("one", "#step=33")
    assert at(page) == 33
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("one.html#step=34")
    button(page, "Link to this step").click()
    assert page.get_by_label("Link to this step").last.input_value() == (pages / "one.html").as_uri() + "#step=34"
    page.evaluate("location.hash = '#step=7'")
    until(page, "document.querySelector('input[type=range]').value == 7")
    for wrong, step in (
        ("#step=0", 1),
        ("#step=99999", len(lesson("flash2").events)),
        ("#step=x", 1),
        ("#clock=moon", 1),
    ):
        assert at(opened("one", wrong)) == step


# -- two traces ---------------------------------------------------------------------------------------------------------


def requested(trace: fl.Trace) -> np.ndarray:
    """Bytes requested from HBM by the end of each step."""
    steps = [
        sum(n for t in e.transfers for kind, n in t.nbytes.items() if kind.startswith("hbm")) for e in trace.events
    ]
    return np.cumsum(steps)


def step_of(page: Any, view: int) -> int:
    found = re.search(r"step ([\d,]+) of", page.locator(".story").nth(view).inner_text())
    return int(found[1].replace(",", "")) if found else 0


def test_two_traces_on_the_clock_of_bytes(opened: Open) -> None:
    page = opened("two")
    bytes_of = [requested(lesson("standard")), requested(lesson("flash2"))]
    total = sum(map(len, bytes_of))
    for position in (1, 2, 3, 50, 120, 200, total - 1, total):
        page.locator("input[type=range]").fill(str(position))
        steps = [step_of(page, 0), step_of(page, 1)]
        assert sum(steps) == position  # every step of either is one position
        now = [0 if step == 0 else int(each[step - 1]) for each, step in zip(bytes_of, steps, strict=True)]
        for each, step in zip(bytes_of, steps, strict=True):  # what would come next requests at least as much
            assert step == len(each) or each[step] >= max(now)
    assert "✓ finished" in page.locator(".race").inner_text()
    page.locator("input[type=range]").fill(str(total - 20))
    done = [text for text in page.locator(".race li").all_inner_texts() if "finished" in text]
    assert len(done) == 1 and done[0].startswith("flash2")


def test_two_traces_on_the_clock_of_steps(opened: Open) -> None:
    page = opened("two", "#step=40&clock=steps")
    assert [step_of(page, 0), step_of(page, 1)] == [40, 40]
    assert page.url.endswith("#step=40&clock=steps")
    page.keyboard.press("Shift+End")
    assert [step_of(page, 0), step_of(page, 1)] == [len(lesson("standard").events), len(lesson("flash2").events)]
    page.keyboard.press("Shift+Home")
    page.get_by_label("Clock").select_option(label="HBM bytes requested")
    assert step_of(page, 0) == 1 and page.evaluate("document.querySelector('input[type=range]').max") == str(
        len(lesson("standard").events) + len(lesson("flash2").events)
    )
    page.get_by_label("Jump to a block").select_option(value="1:2")
    assert "block 2, step 1" in page.locator(".story").nth(1).inner_text()


# -- where and how it is shown --------------------------------------------------------------------------------------------


LOOKS = [
    ("one", 360, "light"),
    ("two", 1600, "dark"),
    *itertools.product(["one", "two"], [360, 1600], ["light", "dark"]),
]


@pytest.mark.parametrize("look", one_of_each(dict.fromkeys(LOOKS), lambda look: look[0]))
def test_axe_finds_nothing_serious(opened: Open, look: tuple[str, int, str]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    name, width, scheme = look
    page = opened(name, "#step=47", width=width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    button(page, "Link to this step").click()
    found = Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []


def test_axe_would_find_something(opened: Open) -> None:
    """A seeded fault: a button without a name, and text that is hardly there."""
    from axe_playwright_python.sync_playwright import Axe

    page = opened("one")
    page.evaluate(
        "document.querySelector('.play').removeAttribute('aria-label'); document.querySelector('.play').title = ''"
    )
    page.evaluate("document.querySelector('.about').style.color = 'color-mix(in srgb, currentcolor 20%, white)'")
    assert {"button-name", "color-contrast"} <= {each["id"] for each in Axe().run(page).response["violations"]}


@pytest.mark.parametrize("width", one_of_each([320, 1180, 360, 700, 1600], lambda width: width < 700))
@pytest.mark.parametrize("name", ["one", "two", "hostile"])
def test_no_width_needs_scrolling_sideways(opened: Open, name: str, width: int) -> None:
    page = opened(name, "#step=47", width=width)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_and_light(opened: Open) -> None:
    page = opened("one", color_scheme="light")
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    light, picture = page.evaluate(shade), page.locator(".scores canvas").first.screenshot()
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(shade) < 150 < 600 < light
    page.wait_for_timeout(100)
    assert page.locator(".scores canvas").first.screenshot() != picture


def test_reduced_motion_is_kept(opened: Open) -> None:
    moving = "getComputedStyle(document.querySelector('.meter i')).transitionDuration"
    assert opened("one", reduced_motion="no-preference").evaluate(moving) != "0s"
    page = opened("one", reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0
    button(page, "Last step").click()
    assert page.evaluate(moving) == "0s" and page.evaluate("document.getAnimations().length") == 0


def test_a_long_trace_stays_fluid(opened: Open) -> None:
    """With ten thousand events, a step changes no more of the page than with the few of a lesson, and the page is hardly larger."""
    work = """async () => {
      let changes = 0;
      new MutationObserver((all) => { changes += all.length; }).observe(
        document.body, { subtree: true, childList: true, attributes: true, characterData: true });
      for (const label of ["One step on", "One step back"])
        for (let n = 0; n < 10; n++) {
          document.querySelector(`[aria-label="${label}"]`).click();
          await new Promise(requestAnimationFrame);
        }
      return [changes, document.querySelectorAll("*").length]; }"""
    (few, small), (many, large) = (opened(*of).evaluate(work) for of in (("one", "#step=40"), ("long", "#step=9500")))
    assert 0 < many < 2 * few and large < 2 * small, (few, many, small, large)


def test_a_page_over_the_limit_says_so(opened: Open) -> None:
    text = opened("long").locator(".warning").inner_text()
    assert re.search(
        r"Over the size limit of 1 MB, values are thinned: of each matrix, accumulators included, at most \d+ rows",
        text,
    )
    assert opened("one").locator(".warning").count() == 0


def test_inline_in_a_notebook(opened: Open) -> None:
    page = opened("notebook", width=900)
    frame = page.frame_locator("iframe")
    frame.locator("main[data-ready]").wait_for()
    slider = frame.locator("input[type=range]")
    assert slider.input_value() == "5"
    frame.get_by_role("button", name="One step on", exact=True).click()
    assert slider.input_value() == "6"
    frame.locator("body").press("Shift+End")
    assert slider.input_value() == str(len(lesson("flash2").events))
    frame.get_by_role("button", name="Link to this step", exact=True).click()
    assert frame.get_by_label("Link to this step").last.input_value() == f"#step={len(lesson('flash2').events)}"
    assert "append it to the address of the saved page" in frame.locator(".link-box").inner_text()
    assert page.evaluate("document.querySelector('iframe').contentDocument") is None  # the frame is sealed off


def test_texts_of_a_trace_stay_text(opened: Open) -> None:
    page = opened("hostile")
    for _ in range(12):
        page.keyboard.press("ArrowRight")
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
        assert page.evaluate("document.querySelectorAll('script').length") == 6
    assert "owned" not in page.title().replace("document.title='owned'", "")
    assert "<img src=x onerror" in page.locator(".view").first.inner_text()
    page.get_by_label("Step name to jump to").select_option(label="constructor")
    button(page, "Previous step of this name").click()
    assert "constructor" in story(page) and "function" not in story(page)


def test_the_policy_stops_what_would_slip_through(opened: Open, pages: Path) -> None:
    """Were a text ever to become markup, its script would still not run."""
    page = opened("one")
    failures: list[str] = []
    page.on("requestfailed", lambda request: failures.append(request.failure))
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = `owned`\">')")
    page.wait_for_timeout(200)
    assert page.title() == "flash2, step by step"
    assert all("Content Security Policy" in error for error in opened.errors) and opened.errors
    assert failures == ["csp"] and opened.requests.pop().endswith("/x")  # asked for, and stopped
    opened.errors.clear()


@pytest.mark.parametrize("required", ["", "all"])
def test_without_a_browser(required: str) -> None:
    """Skipped and counted; with FLASHLAB_REQUIRE=all failed."""
    environment = {**os.environ, "PATH": "", "FLASHLAB_REQUIRE": required}
    command = [sys.executable, "-m", "pytest", "-q", f"{Path(__file__)}::test_keys"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=120)
    assert "no Chromium: on Debian, apt-get install chromium" in done.stdout
    assert done.returncode == (1 if required else 0)
