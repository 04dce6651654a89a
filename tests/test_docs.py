"""Documentation is run: the examples of every docstring, and the code of README.md and docs/*.md, page by page.

On a page, blocks run in order and share one namespace and one folder. What is fenced as

- `python` runs: as a doctest where it has prompts, else as it stands;
- `console` has lines `$ flashlab …` or `$ pytest …` and what they print, where `...` stands for anything; with `console fails`
  they must exit with status 1;
- what has `gpu` or `compiler` behind the language needs one; any other language is not run.

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

import flashlab
import kernels_cu
import simulator
import studies
from docs._site import emulator, readme
from docs._site.blocks import replaced
from flashlab.measure import results
from tests.conftest import NEEDS

ROOT = Path(__file__).resolve().parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?ms)(?:<!-- file: (?P<file>\S+) -->\n+)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$")
GPU_PAGES = [page for page in PAGES if re.search(r"(?m)^```\w+ gpu$", page.read_text(encoding="utf-8"))]


MODULES = sorted(
    module.name
    for package in (flashlab, simulator, kernels_cu, studies)
    for module in [package.__spec__, *pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    if not module.name.endswith("__main__")
)
COMPILED = {"flashlab.emulator.files", "flashlab.run.emulated", "flashlab.verify.kernels"}
"""Their examples need a C++ compiler."""
TORCH = {"flashlab.run.autograd", "flashlab.integrations.torch", "flashlab.integrations.flash_attn", "studies.model"}
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
        return {"gpu", "compiler"} & set(self.language.split())


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
        assert name in ("flashlab", "pytest"), f"{page.name}:{code.line}: a console block runs flashlab or pytest"
        terminal = {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "PYTHONUTF8": "1"}
        if name == "pytest":  # our plugin, installed or not, and no other
            terminal |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            words = ["-p", "_flashlab_pytest", *words]
        words = [sys.executable, "-m", name, *words]
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


LONG = {"emulator.md", "verify-your-kernel.md", "verify-in-ci.md", "add-an-algorithm.md", "your-own-algorithm.md"}
"""Pages that compile and verify kernels: up to half a minute each."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.long] if page.name in LONG else []) for page in PAGES]
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(tmp_path, monkeypatch)
    run_page(page, *([] if NEEDS["compiler"]() else ["compiler"]))


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


def test_readme_says_what_catalogue_and_results_say():
    text = readme.PAGE.read_text(encoding="utf-8")
    assert replaced(text, "readme", dict(readme.drawn())) == text, "run python -m docs._site.readme"
    with pytest.raises(ValueError, match="no block 'speed'"):
        replaced(text.replace("<!-- speed: end -->", ""), "readme", dict(readme.drawn()))


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
    """At most 100 lines beside tables, whose rows are algorithms and measurements; none over 100 columns but in tables."""
    lines = readme.PAGE.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if not line.startswith("|")]) <= 100
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_the_emulators_times_are_those_measured():
    text = emulator.PAGE.read_text(encoding="utf-8")
    assert emulator.block()
    assert text == replaced(text, "emulator", {"times": emulator.block()}), "run python -m docs._site.emulator"
    assert text != replaced(text, "emulator", {"times": emulator.block().replace("0.", "9.")})


def test_flash3_is_as_fast_as_the_readme_says():
    """Faster than FlashAttention-4 and cuDNN in every cell, and as fast as FlashAttention-3 to a hundredth."""
    runs = [
        results.latest("bench", ROOT / results.FOLDER, algorithm="flash3", device=readme.DEVICE, condition=x)
        for x in (None, "fa3")
    ]
    timed = [row for run in runs if run is not None for row in run.data["rows"]]
    for peers, least in (["fa4"], 1), (["cudnn"], 1), (["fa3"], 0.99):
        cells = readme.best(timed, peers)
        assert len(cells) == 18 and min(map(min, cells)) > least
