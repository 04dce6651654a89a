"""The site, as `make docs` builds it: no warning, complete, every link leads somewhere, nothing is fetched, players play.

Of what was measured, each `make test` builds the pages of some results of each kind, and `make test-long` those of all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

import flashlab as fl
from docs._site import figures as site_figures
from docs._site import pages as site_pages
from flashlab.measure import results
from tests.tiers import those_in

pytestmark = pytest.mark.xdist_group("site")  # which is built once
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OUTPUTS = ROOT / "notebooks" / "outputs"
PLAYERS = {path.stem: path.read_text(encoding="utf-8").count('"step_through(') for path in NOTEBOOKS}
RACES = {path.stem: path.read_text(encoding="utf-8").count('"race(') for path in NOTEBOOKS}
WATCHED = {path.stem: path.read_text(encoding="utf-8").count('"watch(') for path in NOTEBOOKS}
"""Of the players that are no picture where a page is made: they take the place of lines."""
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}

LOCAL = ("file:", "about:", "data:")
ELSEWHERE = re.compile(r"(?:url\(|@import\s)\s*['\"]?((?:https?:)?//[^'\")\s]+)")
"""What a style sheet loads from another host."""


def sphinx(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(out / ".doctrees")]
    command += [*options, str(source), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600)


@pytest.fixture(scope="session")  # of a module, it is built again where a worker goes to and fro between modules
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"), "-t", "few")


@pytest.fixture(scope="session")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("whole"))


def built(out: Path, *options: str) -> Path:
    done = sphinx(ROOT / "docs", out, *options)
    assert (done.returncode, done.stderr) == (0, "")
    return out


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.links, self.loaded, self.anchors = path, list[str](), list[str](), {"", "top"}
        self.frames = list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.anchors |= {has[name] for name in ("id", "name") if name in has}
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        if tag == "iframe" and "srcdoc" in has:
            self.frames.append(has["srcdoc"])
            assert has["sandbox"] == "allow-scripts"
        if LOADS.get(tag) in has and not has[LOADS[tag]].startswith("data:"):
            self.loaded.append(has[LOADS[tag]])
        if tag == "link" and has.get("rel") not in ("canonical", "search", "index", "next", "prev"):
            self.loaded.append(has["href"])


def pages(site: Path) -> list[Page]:
    return [Page(path) for path in sorted(site.rglob("*.html"))]


def problems(site: Path) -> Iterator[str]:
    """Links within the site that lead nowhere, addresses that are none, and all that would be loaded from a network."""
    found = {page.path: page for page in pages(site)}
    for path, page in found.items():
        where = path.relative_to(site).as_posix()
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    yield f"{where} loads {link}"
                elif parts.scheme not in ("https", "http", "mailto") or not (parts.hostname or parts.path):
                    yield f"{where}: {link} is no address"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{where}: {link} is not there"
            elif target in found and unquote(parts.fragment) not in found[target].anchors:
                yield f"{where}: {link} is no place on that page"
    for path in sorted(site.rglob("*.css")):
        for url in ELSEWHERE.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site).as_posix()} loads {url}"


def missing(site: Path, measured: Iterable[results.Result]) -> set[str]:
    """The pages that aren't there."""
    wanted = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    wanted |= {f"lessons/{path.stem}.html" for path in NOTEBOOKS} | {"measured/index.html", "results/README.html"}
    wanted |= {f"measured/{each.kind}_{each.path.stem}.html" for each in measured}
    return wanted - {path.relative_to(site).as_posix() for path in site.rglob("*.html")}


def test_every_page_is_there(site: Path):
    assert missing(site, site_pages.some_of_each_kind()) == set()


def test_the_few_have_all_kinds_and_figures():
    few, every = site_pages.some_of_each_kind(), site_pages.every_result()
    assert {each.kind for each in few} == {each.kind for each in every}
    assert {each.kind for each in few if site_figures.of(each)} == set(site_figures.FIGURES)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_site_is_there_and_its_links_lead_somewhere(whole_site: Path):
    assert missing(whole_site, site_pages.every_result()) == set()
    assert list(problems(whole_site)) == []


def test_links_lead_somewhere_and_nothing_comes_from_a_network(site: Path):
    assert list(problems(site)) == []


@pytest.mark.parametrize(
    "bad",
    [
        '<a href="gone.html">',
        '<a href="#gone">',
        '<a href="other.html#gone">',
        '<a href="https://">',
        '<a href="htp://x.org">',
        '<img src="gone.png">',
        '<script src="https://x.org/x.js">',
        '<link rel="stylesheet" href="//x.org/x.css">',
    ],
)
def test_a_bad_link_is_found(bad: str, tmp_path: Path):
    (tmp_path / "index.html").write_text(f'<a href="other.html#here">{bad}', encoding="utf-8")
    (tmp_path / "other.html").write_text("<p id=here>", encoding="utf-8")
    assert len(list(problems(tmp_path))) == 1


def test_a_font_from_a_network_is_found(tmp_path: Path):
    (tmp_path / "a.css").write_text("@font-face { src: url('https://x.org/font.woff2') }", encoding="utf-8")
    assert len(list(problems(tmp_path))) == 1


BAD = ["[gone](gone.md)", "[gone](#gone)", "```{nonsense}\n```", "![gone](gone.png)"]


def test_a_warning_is_an_error(tmp_path: Path):
    """Of each bad line, on a page of its own."""
    pages = [f"bad{n}" for n in range(len(BAD))]
    (tmp_path / "index.md").write_text(
        "\n".join(["# Index", "", "```{toctree}", *pages, "good", "```", ""]), encoding="utf-8"
    )
    for page, bad in [*zip(pages, BAD, strict=True), ("good", "good")]:
        (tmp_path / f"{page}.md").write_text(f"# Page\n\n{bad}\n", encoding="utf-8")
    (tmp_path / "conf.py").write_text("extensions = ['myst_nb']\nmyst_heading_anchors = 3\n", encoding="utf-8")
    done = sphinx(tmp_path, tmp_path / "out")
    assert done.returncode == 1
    assert sorted(set(re.findall(r"(\w+)\.md:\d+: WARNING", done.stderr))) == pages


def test_a_newcomer_finds_the_way_from_the_first_page(site: Path):
    """The race comes first, then the three doors, each with a picture, then numbers from files."""
    text = re.search(r"(?s)<article.*?</article>", (site / "index.html").read_text(encoding="utf-8"))[0]
    links = [*dict.fromkeys(re.findall(r'href="([^"#]+)"', text))]
    ways = ["race.html", "lessons/index.html", "first-steps.html", "verify-your-kernel.html", "measured/index.html"]
    assert [link for link in links if link in ways] == ways
    assert text.count('class="door docutils container"') == 3 == len(re.findall(r'(?s)class="door .*?<img ', text))


def test_the_navigation_is_short(site: Path):
    """At most 20 entries, under four captions. What lies below an entry opens with it."""
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 12 <= len(re.findall(r'class="toctree-l1', text)) <= 20
    assert re.findall(r'class="caption".*?<span class="caption-text">(\w+)', text) == [
        "Learn",
        "Count",
        "Verify",
        "Facts",
    ]


def test_a_lesson_says_how_long_it_takes(site: Path):
    text = (site / "lessons" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r'(?s)<tr.*?href="(\w+)\.html".*?<td><p>(\d+) min</p></td>\s*<td><p>([^<]+)</p></td>', text)
    assert [name for name, *_ in rows] == [path.stem for path in NOTEBOOKS]


def test_every_file_has_a_row_that_says_what_it_is(site: Path):
    """Of all files, and not only of those that this build has pages of."""
    every = site_pages.every_result()
    rows = [site_pages.facts(result) for result in every]
    assert {row[0] for row in rows} == {result.kind for result in every}
    assert {row[4] for row in rows} >= {"", "passed", "failed"} and {row[5] for row in rows} == {"", "today's", "older"}
    assert all(row[2] and re.fullmatch(r"\d{4}-\d\d-\d\d", row[3]) for row in rows)
    shown = (site / "measured" / "index.html").read_text(encoding="utf-8")
    assert shown.count("<tr><td>") == len(site_pages.some_of_each_kind())


def test_no_table_of_a_page_has_a_head_without_words(site: Path):
    """A reader by ear is told what a column is: on pages that people write, and on those of what was measured."""
    paths = [
        *(site / f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")),
        *(site / "measured").glob("*.html"),
    ]
    bare = re.compile(r"<th\b[^>]*>(<p></p>)?</th>")
    assert [path.name for path in paths if bare.search(path.read_text(encoding="utf-8"))] == []


def test_the_reference_has_every_public_name(site: Path):
    anchors = Page(site / "reference.html").anchors
    # a module has its anchor under another name
    missing = {name for name in fl.__all__ if not {f"flashlab.{name}", f"module-flashlab.{name}"} & anchors}
    assert missing == set()
    # a signature that Sphinx could not parse is shown raw, with such paths in it
    assert re.search(r"~\w+\.\w", (site / "reference.html").read_text(encoding="utf-8")) is None


@pytest.mark.parametrize("name", PLAYERS)
def test_a_lesson_has_its_players_and_tables(name: str, site: Path):
    path = site / "lessons" / f"{name}.html"
    text, page = path.read_text(encoding="utf-8"), Page(path)
    assert len(page.frames) == PLAYERS[name] + RACES[name] + WATCHED[name]
    assert all(len(frame) <= 300_000 for frame in page.frames)
    assert "there is a player here" not in text
    figures = (OUTPUTS / f"{name}.ipynb").read_text(encoding="utf-8").count('"image/svg+xml"')
    assert text.count("<figure class=") == figures - PLAYERS[name] - RACES[name]  # they take the place of one each


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_a_lesson_can_be_taken(name: str, site: Path):
    text = (site / "lessons" / f"{name}.html").read_text(encoding="utf-8")
    (link,) = re.findall(rf'href="(\.\./_downloads/[0-9a-f]+/{name}\.ipynb)"', text)
    taken = nbformat.read(site / "lessons" / link, as_version=4)
    kept = nbformat.read(OUTPUTS / f"{name}.ipynb", as_version=4)
    assert [cell.source for cell in taken.cells] == [cell.source for cell in kept.cells]
    assert not any(cell.get("outputs") for cell in taken.cells)


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_what_a_question_asks_for_is_folded(name: str, site: Path):
    """Up to the next section, and nothing else is."""
    cells, asked, due = nbformat.read(OUTPUTS / f"{name}.ipynb", as_version=4).cells, False, 0
    for cell in cells:
        if cell.cell_type == "markdown":
            asked &= not re.search(r"(?m)^## ", cell.source)
        elif not cell.source.startswith("%%writefile"):
            due += asked and bool(cell.outputs)
            asked |= cell.source.startswith("fl.predict(")
    text = (site / "lessons" / f"{name}.html").read_text(encoding="utf-8")
    assert text.count("Predict first; then show what this gives") == due > 0


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("instal", "install"), ("uninstal", "install"), ("upgrad", "install"), ("pipx", "install"), ("uv", "install"),
        ("window", "install"), ("wsl", "install"), ("docker", "install"), ("lab", "install"), ("cuda13", "install"),
        ("cli", "commands/index"), ("sanit", "commands/index"), ("sweep", "commands/index"), ("licenc", "licence"),
        ("cite", "licence"), ("changelog", "changelog"), ("softmax", "lessons/02_softmax"),
    ],
)  # fmt: skip
def test_a_word_that_people_search_for_leads_to_its_page(word: str, page: str, site: Path):
    """By the index that the search page looks into. Words stand there by their stems."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    found = {index["docnames"][n] for kind in ("terms", "titleterms") for n in _listed(index[kind].get(word, []))}
    assert page in found


def _listed(found: Any) -> list[int]:
    return found if isinstance(found, list) else [found]


def test_lessons_without_kernels_lead_to_the_browser(site: Path):
    for path in NOTEBOOKS:
        text = (site / "lessons" / f"{path.stem}.html").read_text(encoding="utf-8")
        runs = path.name[:2] in ("00", "01", "02", "03", "04", "11", "12", "13", "14", "15")
        assert (f'href="../lite/lab/index.html?path={path.name}"' in text) == runs, path.name


def test_a_click_leads_to_a_running_notebook_where_there_is_a_repository():
    assert "binder" not in site_pages.taken("00.ipynb", "")
    assert "(https://mybinder.org/v2/gh/us/it/HEAD?labpath=notebooks/00.ipynb)" in site_pages.taken("00.ipynb", "us/it")


def test_what_was_measured_is_drawn_from_the_files(site: Path):
    """Another number in a file is another number on the page."""
    result = results.latest("bench", site_pages.RESULTS)
    assert result is not None
    row = result.data["rows"][0]
    before = site_pages.page(result), site_figures.of(result)
    row["tflops"] *= 2
    after = site_pages.page(result), site_figures.of(result)
    assert before[0] != after[0]
    assert before[1].svg != after[1].svg
    assert before[1].rows != after[1].rows


def test_a_cell_with_a_player_stands_on_its_own_and_ends_in_it(tmp_path: Path):
    cells = ["from flashlab.lessons.show import step_through", "a = 1\nstep_through(a)\nb = 1", "step_through(unknown)"]
    for wrong, what in (([0, 1], ValueError), ([0, 2], NameError)):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cells[n]) for n in wrong])
        nbformat.write(notebook, tmp_path / "00.ipynb")
        with pytest.raises(what):
            list(site_pages.lesson(tmp_path / "00.ipynb"))


# -- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(browser: Any, site: Path) -> Iterator[Any]:
    """`opened(name)` is a page of the site; at the end, nothing was amiss and nothing was fetched but files."""
    contexts: list[Any] = []
    amiss: list[str] = []

    def load(name: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: amiss.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(LOCAL) else amiss.append(f"fetched {r.url}"))
        page.on("requestfailed", lambda request: amiss.append(f"failed {request.url}"))
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield load
    for context in contexts:
        context.close()
    assert amiss == []


@pytest.mark.browser
def test_the_theme_reaches_the_players(opened: Any):
    """The page's button changes what a sandboxed frame shows, and so does the system where the page leaves it to that."""
    page = opened(f"lessons/{next(name for name, players in PLAYERS.items() if players)}", color_scheme="light")
    page.locator("details").evaluate_all("all => all.forEach(each => each.open = true)")  # it may be folded
    frame = page.frame_locator("iframe").first
    frame.locator("main[data-ready]").wait_for()

    def ground() -> str:
        page.wait_for_timeout(100)
        return frame.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")

    shown: dict[str, str] = {}
    for _ in range(3):
        page.locator(".theme-toggle:visible").first.click()
        shown[page.evaluate("document.body.dataset.theme")] = ground()
    assert shown == {"dark": "rgb(18, 22, 27)", "light": "rgb(246, 247, 249)", "auto": "rgb(246, 247, 249)"}
    page.emulate_media(color_scheme="dark")
    assert ground() == "rgb(18, 22, 27)"


TOO_WIDE = """() => [...document.querySelectorAll('article pre, article table, article .table-wrapper')]
  .filter(e => e.scrollWidth > e.clientWidth + 1 || (e.tagName == 'TABLE' && e.clientWidth > e.closest('article').clientWidth + 1))
  .map(e => e.innerText.slice(0, 200))"""


@pytest.mark.browser
@pytest.mark.parametrize(
    "name", those_in({"00_memory", "01_standard_attention", "13_pages"}, [path.stem for path in NOTEBOOKS])
)
def test_code_and_tables_of_lessons_fit_their_column(name: str, opened: Any):
    """What a lesson shows, and what it folds away, scrolls nowhere on a laptop's screen."""
    page = opened(f"lessons/{name}", viewport={"width": 1400, "height": 900})
    assert page.evaluate(TOO_WIDE) == []
    page.evaluate("() => document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate(TOO_WIDE) == []


@pytest.mark.browser
def test_a_table_that_scrolls_is_found(opened: Any):
    page = opened("lessons/07_measuring", viewport={"width": 1400, "height": 900})
    page.add_style_tag(
        content=".cell_output .highlight pre { white-space: pre !important; font-size: 1rem !important; }"
    )
    assert page.evaluate(TOO_WIDE)


@pytest.mark.browser
@pytest.mark.parametrize(
    "name", those_in({"04_flash2", "12_one_token"}, [name for name, players in PLAYERS.items() if players])
)
def test_a_player_plays_on_its_lesson(name: str, opened: Any):
    page = opened(name=f"lessons/{name}")
    page.locator("details").evaluate_all(
        "all => all.forEach(each => each.open = true)"
    )  # what follows a prediction is folded
    frame = page.frame_locator("iframe").first
    frame.locator("main[data-ready]").wait_for()
    before = frame.locator("main").inner_text()
    frame.get_by_role("button", name="One step on").first.click()
    page.wait_for_timeout(300)
    assert frame.locator("main").inner_text() != before


@pytest.mark.browser
def test_the_race_runs_on_its_page_and_no_other_page_loads_it(opened: Any, site: Path):
    page = opened("race")
    page.get_by_role("slider").press("End")
    assert all(", done: " in said for said in page.locator("p.said").all_inner_texts())
    assert page.locator("p.said").count() == 2
    loads = [each.path.name for each in pages(site) if any("race" in link for link in each.loaded)]
    assert loads == ["index.html", "race.html"]


@pytest.mark.browser
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_the_first_page_races_on_arrival_and_is_still_where_motion_is_reduced(motion: Any, opened: Any):
    page = opened("index", reduced_motion=motion)
    clock = page.get_by_role("slider")
    if motion == "reduce":
        assert clock.input_value() == clock.get_attribute("max")
        assert "All tiles have come" in page.locator("#race").inner_text()
    else:
        page.wait_for_function("document.querySelector('#race input').value > 2")
        clock.press("End")
    page.wait_for_function("document.getElementById('race').textContent.includes('times fewer bytes')")


@pytest.mark.browser
def test_words_narrow_the_list_of_files(opened: Any):
    page = opened("measured/index")
    rows = page.locator("#files tbody tr")
    every = rows.count()
    page.get_by_label("Show files with").fill("H100  Append")
    assert page.locator("#files tbody tr:visible").count() == 1 < every
    assert page.locator(".files [role=status]").inner_text() == "1 file"
    page.get_by_label("Show files with").fill("no such word")
    assert page.locator("#files tbody tr:visible").count() == 0


FIRST = ("index", "race", "lessons/00_memory", "verify-your-kernel", "measured/index", "lessons/index", "matrix")
"""Pages that stand for all others in `make test`: each is looked at once there, in one width and one scheme."""
WRITTEN = {path.stem for path in (ROOT / "docs").glob("*.md")} | {f"lessons/{path.stem}" for path in NOTEBOOKS}
EVERY = (*FIRST, *sorted((WRITTEN | {"commands/index", "results/README"}) - set(FIRST)))
LOOKS = [(360, "light"), (1600, "dark"), (390, "dark"), (1400, "light")]


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        pytest.param(name, *look, marks=[] if i < len(FIRST) and n == i % 2 else pytest.mark.long)
        for i, name in enumerate(EVERY)
        for n, look in enumerate((LOOKS[:2] if i % 2 else LOOKS[2:]) if i < len(FIRST) else LOOKS[i % 4 :][:1])
    ],
)
def test_a_page_fits_and_is_accessible(name: str, width: int, scheme: str, opened: Any):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(name, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page, options={"resultTypes": ["violations"], "preload": False}).response["violations"]
    serious = [
        f"{violation['id']}: {node['html'][:200]}"
        for violation in found
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:3]
    ]
    assert serious == []
