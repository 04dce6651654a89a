"""Documentation is run: the examples of every docstring, and the code of README.md and docs/*.md, page by page.

On a page, blocks run in order and share one namespace and one folder. What is fenced as

- `python` runs: as a doctest where it has prompts, else as it stands;
- `console` has lines `$ flashlab …`, `$ pytest …` or `$ python …` and what they print, where `...` stands for anything; with
  `console fails` they must exit with status 1;
- what has `gpu`, `compiler`, `torch` or `transformers` behind the language needs it; any other language is not run.

A block below `<!-- file: NAME -->` is also that file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import flashlab
import kernels_cu
import simulator
import studies
from docs._site import emulator, headlines, race, race_picture, readme, release, speeds
from docs._site.blocks import replaced
from flashlab.lessons.catalogue import LESSONS
from flashlab.measure import results
from tests.conftest import NEEDS

ROOT = Path(__file__).resolve().parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?ms)(?:<!-- file: (?P<file>\S+) -->\n+)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$")
GPU_PAGES = [page for page in PAGES if re.search(r"(?m)^```\w+ gpu$", page.read_text(encoding="utf-8"))]
TORCH_PAGES = [page for page in PAGES if re.search(r"(?m)^```\w+ torch", page.read_text(encoding="utf-8"))]


MODULES = sorted(
    module.name
    for package in (flashlab, simulator, kernels_cu, studies)
    for module in [package.__spec__, *pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    if not module.name.endswith("__main__")
)
COMPILED = {"flashlab.emulator.files", "flashlab.emulator.programs", "flashlab.run.emulated", "flashlab.verify.kernels"}
"""Their examples need a C++ compiler."""
TORCH = {
    "flashlab.run.autograd",
    "flashlab.run.operators",
    "flashlab.integrations.torch",
    "flashlab.parallel.distributed",
    "flashlab.parallel.merging",
    "flashlab.parallel.passes",
    "flashlab.parallel.transfers",
    "flashlab.integrations.sdpa",
    "flashlab.integrations.flash_attn",
    "studies.model",
}
"""Torch's functions are made as they are imported, and its modules."""


def _needs(name: str) -> Any:
    """What a module, or its examples, can't do without."""
    if name.startswith("flashlab.triton."):
        return pytest.mark.triton
    if name in TORCH:
        return pytest.mark.torch, pytest.mark.compiler
    return pytest.mark.compiler if name in COMPILED else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=_needs(name)) for name in MODULES])
def test_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=report.write)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()


@dataclass
class Code:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    file: str | None

    @property
    def needs(self) -> set[str]:
        return {"gpu", "compiler", "torch", "transformers"} & set(self.language.split())


def blocks(page: Path) -> list[Code]:
    text = page.read_text(encoding="utf-8")
    return [
        Code(found["language"].strip(), found["code"], text[: found.start("code")].count("\n") + 1, found["file"])
        for found in FENCE.finditer(text)
    ]


def run_python(code: Code, page: Path, names: dict[str, Any]) -> None:
    if ">>>" in code.text:
        test = doctest.DocTestParser().get_doctest(code.text, names, page.name, str(page), code.line)
        report = io.StringIO()
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write, clear_globs=False)
        names.update(test.globs)
        assert result.failed == 0, report.getvalue()
    else:
        # the line numbers of a failure are the page's
        exec(compile("\n" * code.line + code.text, str(page), "exec"), names)


def run_console(code: Code, page: Path) -> None:
    """Each command, as a user would type it, beside what the page says that it prints."""
    for part in re.split(r"(?m)^\$ ", code.text)[1:]:
        command, _, wanted = part.partition("\n")
        while command.endswith("\\"):
            more, _, wanted = wanted.partition("\n")
            command = command[:-1] + more
        name, *words = shlex.split(command)
        assert name in ("flashlab", "pytest", "python"), (
            f"{page.name}:{code.line}: {name} is no command of a console block"
        )
        terminal = {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "PYTHONUTF8": "1"}
        if name == "pytest":  # our plugin, installed or not, and no other
            terminal |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            words = ["-p", "_flashlab_pytest", *words]
        words = [sys.executable, *words] if name == "python" else [sys.executable, "-m", name, *words]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120, env={**os.environ, **terminal})
        printed = done.stdout + done.stderr
        assert done.returncode == ("fails" in code.language.split()), f"$ {command}\n{printed}"
        if wanted.strip() and not doctest.OutputChecker().check_output(wanted, printed, FLAGS):
            pytest.fail(f"{page.name}:{code.line}: $ {command}\nprints\n{printed}\nnot\n{wanted}", pytrace=False)


def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder as Python started there does: its modules can be imported."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another page's, or another test's


def run_page(page: Path, *have: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks(page):
        if code.file:
            Path(code.file).write_text(code.text, encoding="utf-8")
        if not code.needs <= set(have):
            continue
        if code.language.startswith("python"):
            with contextlib.redirect_stdout(io.StringIO()):
                run_python(code, page, names)
        elif code.language.startswith("console"):
            run_console(code, page)


LONG = {
    "ask-causal-alignment.md", "ask-counter-permissions.md", "audit.md", "emulator.md", "verify-your-kernel.md",
    "verify-in-ci.md", "add-an-algorithm.md", "your-own-algorithm.md",
}  # fmt: skip
"""Pages that compile and verify kernels: up to half a minute each."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.long] if page.name in LONG else []) for page in PAGES]
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(tmp_path, monkeypatch)
    run_page(page, *([] if NEEDS["compiler"]() else ["compiler"]))


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize("page", TORCH_PAGES, ids=lambda page: page.name)
def test_page_with_torch(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(tmp_path, monkeypatch)
    run_page(page, "torch", "compiler", *([] if NEEDS["transformers"]() else ["transformers"]))


@pytest.mark.gpu
@pytest.mark.parametrize("page", GPU_PAGES, ids=lambda page: page.name)
def test_page_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(tmp_path, monkeypatch)
    run_page(page, "gpu", "compiler")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path):
    """Links and pictures within the project are there. The site's own pages are made: tests/test_site.py follows links to them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    targets += re.findall(r"(?m)^\[\w+\]: (\S+)", text)
    made = ("lessons/", "measured/", "commands/")
    near = [target for target in targets if ":" not in target and not target.startswith(made)]
    assert [target for target in near if not (page.parent / target).exists()] == []


GENERATED = re.compile(r"(?s)<!-- (\w+): begin .*?<!-- \1: end -->")


def too_long(text: str) -> list[str]:
    """Lines of prose over 100 columns: tables, code and what tools write may run on."""
    lines = GENERATED.sub("", FENCE.sub("", text)).splitlines()
    return [line for line in lines if len(line) > 100 and not line.startswith("|")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_prose_keeps_to_100_columns(page: Path):
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_a_long_line_is_found():
    long = "x" * 101
    assert too_long(f"{long}\n\n| {long} |\n\n```sh\n{long}\n```\n<!-- a: begin -->\n{long}\n<!-- a: end -->\n") == [
        long
    ]


TODAY = release.stated()
POSITIONS = [
    dataclasses.replace(TODAY, repository=address, released=released)
    for address in ("", "https://github.com/us/it", "https://host.org/it")
    for released in (False, True)
]
"""Where the project may be had: it has a repository or none, and is on a package index or not."""


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_pages_say_what_catalogue_and_results_say(page: Path):
    text, found = page.read_text(encoding="utf-8"), dict(readme.drawn(TODAY))[page]
    assert replaced(text, "readme", found) == text, "run python -m docs._site.readme"
    name = next(iter(found))
    with pytest.raises(ValueError, match=f"no block '{name}'"):
        replaced(text.replace(f"<!-- {name}: end -->", ""), "readme", found)


def test_the_first_page_has_numbers_from_files():
    text = headlines.PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, "headlines", headlines.blocks()), "run python -m docs._site.headlines"
    numbers = [each.number for each in headlines.headlines()]
    assert len(numbers) == 4 and all(re.search(r"\d", number) and number in text for number in numbers)


def test_no_algorithm_is_missing_from_the_matrix_and_each_has_one_family():
    names = [row.name for row in readme.evidence.rows()]
    shown = re.findall(r"(?m)^\| `(\w+)` ", readme.matrix())
    assert sorted(shown) == sorted(names) and len(shown) >= 28
    assert len(readme.families()) == 10 and all(readme.families().values())


def test_what_serves_has_a_speed():
    """F6b: decoding, pages, MLA and the cascade are timed by kinds of their own."""
    timed = {one.algorithm for one in readme.speeds()}
    assert timed >= {"flash_decoding", "paged", "flash3_paged", "mla_paged", "mla_hopper_paged", "cascade"}
    rows = {row.name: row for row in readme.evidence.rows()}
    assert all(readme.tick(readme.COLUMNS["speed"](rows[name])) for name in timed if name in rows)


def test_a_familys_sign_is_the_worst_of_it():
    sign = readme.together
    row = readme.evidence.rows()[0]
    found = readme.COLUMNS["bytes = counters"](row)
    assert isinstance(found, readme.evidence.Evidence) and found.result is not None
    none = dataclasses.replace(found, result=None)
    failed = dataclasses.replace(found, failed=found.result)
    assert sign([ROOT, ROOT]) == "✓" and sign([None, none]) == "" and sign([ROOT, None]) == "✓ 1/2"
    assert sign([ROOT, failed]) == "✗" and sign([none, failed]) == "✗ 1/2"


FROM_AN_INDEX = re.compile(r"(?:pip|uv|pipx) install (?!--upgrade)[^\n|]*flashlab-attention(?!\S* @)")
"""What tells a reader to install it from a package index."""


def pages_as(release: Any) -> dict[Path, str]:
    """The texts of all pages, as they would be where this is so."""
    found = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page, made in readme.drawn(release):
        found[page] = replaced(found[page], "readme", made)
    return found


@pytest.mark.parametrize("where", POSITIONS, ids=lambda x: f"{x.repository or 'nowhere'}, {x.released}")
def test_nothing_pretends_to_be_where_it_is_not(where: Any):
    """No text says to install from an index without it, no link leads to a repository that isn't, and README stays short."""
    found = pages_as(where)
    told = [page.name for page, text in found.items() if FROM_AN_INDEX.search(text)]
    assert bool(told) == where.released, told
    if where.released:
        assert {"README.md", "install.md", "verify-in-ci.md"} <= set(told)
    page = found[readme.PAGE]
    assert len(page.splitlines()) <= 100
    assert ("mybinder.org" in page) == ("colab" in page) == where.repository.startswith("https://github.com/")
    assert (f"git clone {where.repository} flashlab" in page) == (bool(where.repository) and not where.released)
    assert (f"git+{where.repository}" in found[readme.INSTALL]) == (bool(where.repository) and not where.released)
    assert ("not on a package index" in found[readme.INSTALL]) != where.released


def test_no_message_says_to_install_from_an_index():
    """A message is the same in any position, so it names what is missing, and not this project."""
    sources = [
        path for name in ("flashlab", "simulator", "_flashlab_pytest.py") for path in (ROOT / name).rglob("*.py")
    ]
    assert [path.name for path in sources if FROM_AN_INDEX.search(path.read_text(encoding="utf-8"))] == []
    assert FROM_AN_INDEX.search("pip install 'flashlab-attention[gpu]'")


def test_the_matrix_ticks_only_what_is_there():
    """A row without a formula, a kernel or results has no ticks for them. (Measured: flashlab/measure/test_sources.py)"""
    row = simulator.catalogue.CATALOGUE["flash2"]
    assert all(readme.tick(find(row)) for find in readme.COLUMNS.values())
    bare = dataclasses.replace(row, name="mine", formula=None, kernels=(), lesson=None)
    assert [name for name, find in readme.COLUMNS.items() if readme.tick(find(bare))] == ["program"]


FIGURE = re.compile(r"\d(?:\.\d+)? (?:times|×)(?! a)|TFLOP|\d ?% (?:slower|faster|of)|\d (?:µs|us|ms)\b|docs/results/")
"""A speed that somebody measured, or a file of it."""
SOURCES = [*kernels_cu.include_dir().glob("*.cuh"), *kernels_cu.include_dir().parent.glob("*.cu")]


def test_comments_of_kernels_quote_no_measurement():
    """A newer file would contradict them, and nothing would say so. They lead to a page, which is drawn from files."""
    comments = {path.name: " ".join(re.findall("//.*", path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {name: FIGURE.findall(said) for name, said in comments.items() if FIGURE.search(said)} == {}


@pytest.mark.parametrize("said", ["1.02 to 1.13 times the better", "350 TFLOP/s", "10 % slower", "took 12 µs"])
def test_a_quoted_measurement_is_found(said: str):
    assert FIGURE.search(f"// Measured: {said}")


def test_readme_is_short():
    """At most 100 lines, tables included (in each position: above), and at most eight rows of speeds."""
    text = readme.PAGE.read_text(encoding="utf-8")
    assert 0 < len(re.findall(r"(?m)^\| `", text)) <= 8


def test_the_race_moves_and_its_figures_are_those_of_the_counts():
    """The picture is of today's data; README and the picture say the same bytes."""
    data, text = race.data(), readme.PAGE.read_text(encoding="utf-8")
    with Image.open(race_picture.PICTURE) as picture:
        frames, comment = getattr(picture, "n_frames", 1), picture.info["comment"].decode()
    assert frames == race_picture.FRAMES + 1 and race_picture.PICTURE.stat().st_size <= 1_500_000
    assert comment == race_picture.digest(data), "run python -m docs._site.race_picture"
    both = [sum(n for *_, n in each["moves"]) for each in data["programs"]]
    assert all(f"{n:,}" in text for n in both) and f"{round(both[0] / both[1])} times fewer bytes" in text


def test_the_emulators_times_are_those_measured():
    text = emulator.PAGE.read_text(encoding="utf-8")
    assert emulator.block()
    assert text == replaced(text, "emulator", {"times": emulator.block()}), "run python -m docs._site.emulator"
    assert text != replaced(text, "emulator", {"times": emulator.block().replace("0.", "9.")})


def test_flash3_is_as_fast_as_its_page_says():
    """Faster than FlashAttention-4 and cuDNN in every cell, and as fast as FlashAttention-3 to a hundredth."""
    runs = [
        results.latest("bench", ROOT / results.FOLDER, algorithm="flash3", device="h200", condition=x)
        for x in (None, "fa3")
    ]
    found = [cell for run in runs if run is not None for cell in speeds.cells(run)]
    for peer, least in ("fa4", 1), ("cudnn", 1), ("fa3", 0.99):
        ratios = [cell[peer] for cell in found if peer in cell]
        assert len(ratios) == 18 and min(ratios) > least


def test_pages_count_the_lessons():
    words = {12: "Twelve", 13: "Thirteen", 14: "Fourteen", 15: "Fifteen", 16: "Sixteen"}
    others, all_of_them = words[len(LESSONS) - 1], words[len(LESSONS)]
    for page, said in (
        ("README.md", f"{others} more lead"),
        ("docs/index.md", all_of_them),
        ("CHANGELOG.md", all_of_them),
    ):
        assert re.search(rf"\b{said}\b", (ROOT / page).read_text(encoding="utf-8")), page
