"""Reports where people and machines meet them: few lines, annotations of GitHub, SARIF."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
from flashlab.verify import Failing, Report, Row
from flashlab.verify.formats import FORMATS, github, sarif

ROOT = Path(__file__).resolve().parents[3]


def row(n: int, status: Any, detail: str = "") -> Row:
    return Row(
        check="rule",
        case=f"case {n}",
        problem=f"1x2x{n}x{n}x64 float16 causal",
        dtype="float16",
        status=status,
        detail=detail,
    )


def report(failed: int = 0, passed: int = 100, not_run: int = 0, **more: Any) -> Report:
    rows = [
        *(
            row(n, "failed", f"out at (batch, head, row) (0, 0, {n}) holds NaN or inf: 100% wrong")
            for n in range(failed)
        ),
        *(row(n, "passed") for n in range(passed)),
        *(row(n, "not run", f"reason {n}") for n in range(not_run)),
    ]
    python = "import flashlab as fl\nfrom flashlab.verify import Case, run_case\n\nprint(run_case(target, Case(...)))"
    failing = (
        Failing(message="out holds NaN", python=python, likely="the scale is 1/head_dim by default") if failed else None
    )
    given = {"backend": "callable", "rule": "a rule", "seed": 0, "full": False, "lse_checked": True, "seconds": 1.0}
    return Report(target="mine:attention", rows=rows, failing=failing, **given | more)


MANY = report(200, 100, 150, domain="head_dim 128, multiple 64")


def test_a_pipe_has_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`flashlab verify … | grep ^failed` shows the reason, too."""
    monkeypatch.delenv("COLUMNS", raising=False)
    MANY.print()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert lines and all(line.endswith("holds NaN or inf: 100% wrong") for line in lines)


@pytest.mark.parametrize("found", [report(), MANY, report(passed=3, not_run=90)], ids=["passed", "failed", "little"])
def test_a_report_is_short_wherever_it_is_met(found: Report) -> None:
    for text in (str(found), found._repr_html_()):  # pyright: ignore[reportPrivateUsage]
        assert len(text.splitlines()) < 20, text
        assert found.headline in text
    assert "\n" not in repr(found) and len(repr(found)) < 240


def test_a_notebook_shows_the_report_whole() -> None:
    """A template's name is no HTML tag, and no cell of the table is missing."""
    named = replace(MANY, target="flash.cu:k<float, 64>")
    shown = named._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "✘ flash.cu:k&lt;float, 64&gt; on callable: failed" in shown and "✔" in report()._repr_html_()  # pyright: ignore
    assert "<td>rule</td><td>100</td><td>200</td><td>150</td>" in shown
    assert "likely: the scale is 1/head_dim by default" in shown and "<pre>import flashlab" in shown
    xml.etree.ElementTree.fromstring(f"<p>{shown}</p>")  # every tag is closed


def test_a_summary_says_what_counts() -> None:
    text = str(MANY)
    for words in (
        "200 failed, 300 of 450 checks ran",
        "case 0",
        "and 197 more",
        "not run (1): reason 0",
        "147 more reasons",
        "likely: the scale is 1/head_dim by default",
        "domain: head_dim 128",
        "print(run_case(target, Case(...)))",
    ):
        assert words in text, words
    assert MANY.verdict == "failed" and report(passed=3, not_run=90).verdict == "too little ran"
    assert (
        report(passed=45, not_run=45).verdict == "passed" and report(passed=44, not_run=45).verdict == "too little ran"
    )


def test_an_assertion_in_pytest_is_short(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import flashlab as fl\n"
        "def test_mine():\n"
        "    report = fl.verify(lambda q, k, v: 2 * q, checks=['gqa', 'rule'], dtypes=['float32'], examples=0)\n"
        "    assert report.passed, report\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(tmp_path)]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = [line for line in done.stdout.splitlines() if line.startswith("E")]
    assert 0 < len(shown) < 20 and "failed (" in shown[0] and "rule, aligned" in shown[0], done.stdout


def test_github_shows_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = github(report(2, place=(str(tmp_path / "a,b.py"), 7))).splitlines()
    assert lines[0] == (
        "::error file=a%2Cb.py,line=7,title=flashlab verify%3A rule::case 0 (1x2x0x0x64 float16 causal): out at (batch, head, row) "
        "(0, 0, 0) holds NaN or inf: 100%25 wrong. Likely: the scale is 1/head_dim by default"
    )
    assert len(lines) == 2 and len(github(MANY).splitlines()) == 10 and "191 more checks failed" in github(MANY)
    assert re.match(r"::notice title=flashlab verify::mine:attention on callable: passed", github(report()))
    assert github(report(passed=1, not_run=9)).startswith("::error title=")


@pytest.mark.parametrize("found", [report(), MANY, report(passed=1, not_run=9)], ids=["passed", "failed", "little"])
def test_sarif_has_the_shape_of_its_schema(found: Report) -> None:
    """The parts of the SARIF 2.1.0 schema that a consumer goes by: what is required, and what refers to what."""
    document = json.loads(sarif(found))
    assert set(document) == {"$schema", "version", "runs"} and document["version"] == "2.1.0"
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] and driver["version"] == fl.__version__
    rules = driver["rules"]
    assert all(rule["id"] and rule["shortDescription"]["text"] for rule in rules)
    assert run["invocations"] == [{"executionSuccessful": True}]
    assert len(run["results"]) == (len(found.failed) or (not found.passed))
    for result in run["results"]:
        assert result["level"] == "error" and result["message"]["text"]
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]


def test_sarif_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, uri in ((tmp_path / "mine.py", "mine.py"), (Path("/elsewhere/mine.py"), "file:///elsewhere/mine.py")):
        (result,) = json.loads(sarif(report(1, place=(str(file), 3))))["runs"][0]["results"]
        (location,) = result["locations"]
        assert location == {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": 3}}}


def test_a_function_has_a_place() -> None:
    found = fl.verify(fl.Adapter(lambda q, k, v: q), checks=["determinism"], dtypes=["float32"])
    assert (
        found.place
        and found.place[0] == __file__
        and "determinism" in Path(__file__).read_text().splitlines()[found.place[1] - 1]
    )
    assert fl.verify("flash2", checks=["gqa"], dtypes=["float16"]).place is None


def test_formats_have_names() -> None:
    assert set(FORMATS) == {"markdown", "github", "sarif"}
    assert FORMATS["markdown"](MANY).startswith("## mine:attention")


def refused(kind: str, detail: str = "raised ValueError: shapes (4,9) (2,9)", n: int = 3) -> list[Row]:
    """Rows of one kind that failed."""
    sizes = {"grouped": "1x4:2x9x9x16", "empty": "1x2x0x9x16", "both": "1x4:2x0x9x16", "plain": "1x2x9x9x16"}[kind]
    return [replace(row(i, "failed", detail), case=f"{kind} {i}", problem=f"{sizes} float16") for i in range(n)]


EMPTY = "raised ValueError: zero-size array"
NUMERIC = "out at (batch, head, row) (0, 0, 0) is off by 3 x what the rule allows"


def told(*rows: Row) -> list[str]:
    """The lines about failures, of a function that passed elsewhere."""
    found = replace(report(), rows=[row(0, "passed"), *rows])
    return [line.strip() for line in str(found).splitlines() if line.strip().startswith(("failed", "..."))]


def test_a_kind_that_is_never_taken_has_one_line_and_numbers_come_first() -> None:
    rows = [
        *refused("grouped"),
        *refused("both", n=1),
        *refused("empty", EMPTY),
        *refused("plain", "raised KeyError: 1", 1),
    ]
    lines = told(*rows, *refused("plain", NUMERIC, 1))
    assert lines[0].endswith(NUMERIC) and lines[1].endswith("raised KeyError: 1"), lines
    assert (
        lines[2].startswith("failed (4): every failure with grouped heads is a ValueError") and "--groups 1" in lines[2]
    )
    assert lines[3].startswith("failed (3): every failure with no queries or no keys") and "--no-empty" in lines[3]
    assert len(lines) == 4
    assert replace(report(), rows=rows).verdict == "failed"


@pytest.mark.parametrize(
    "rows",
    [
        [*refused("grouped"), *refused("plain", n=1)],  # it raises so elsewhere, too
        [*refused("grouped"), *refused("grouped", NUMERIC, 1)],  # some of them are wrong in numbers
        [*refused("grouped"), *refused("grouped", "raised KeyError: 1", 1)],
        refused("grouped", NUMERIC),
        refused("both"),  # of which kind is it?
    ],
)
def test_other_failures_are_told_one_by_one(rows: list[Row]) -> None:
    assert not any("every failure" in line for line in told(*rows))
    assert len(told(*rows)) == min(len(rows), 4)


def test_keywords_that_a_function_lacks_are_one_reason() -> None:
    rows = [row(n, "not run", f"the function takes no {name}") for n, name in enumerate(("causal", "sinks", "sinks"))]
    assert "not run (3): the function takes no causal, sinks" in str(replace(report(), rows=[row(0, "passed"), *rows]))
