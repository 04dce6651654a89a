"""What differs between two results: rows are found by what they say of themselves, times only within a tolerance."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.measure import results
from flashlab.views.differences import compare, differences, read
from simulator.errors import UsageError
from tests.flashlab.cli.typed import document, one_line, run

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def row(case: str, **more: Any) -> dict[str, Any]:
    return {"check": "rule", "case": case, "status": "passed", "seconds": 1.0, **more}


def test_a_row_more_is_one_difference() -> None:
    a = {"rows": [row("a"), row("b"), row("b", worst=0.5), row("c")]}
    b = {"rows": [row("b"), row("b", worst=0.25), row("c", status="failed"), row("d")]}
    found = {each.where: (each.a, each.b) for each in differences(a, b).found}
    assert found == {
        "rows[rule, a].status": ("passed", "-"),
        "rows[rule, a].seconds": (1.0, "-"),
        "rows[rule, b, 1].worst": (0.5, 0.25),
        "rows[rule, c].status": ("passed", "failed"),
        "rows[rule, d].status": ("-", "passed"),
        "rows[rule, d].seconds": ("-", 1.0),
    }


def test_times_differ_by_more_than_the_tolerance() -> None:
    a, b = {"seconds": 1.0, "quartiles": [1.0, 2.0], "n": 1}, {"seconds": 1.05, "quartiles": [1.0, 3.0], "n": 1}
    assert not differences(a, b).found and differences(a, b).skipped == 3
    assert [each.where for each in differences(a, b, 0.1).found] == ["quartiles[1]"]
    assert len(differences(a, b, 0.0).found) == 2


@pytest.mark.parametrize(
    ("a", "b", "cells"),
    [
        ({"x": [1, 2]}, {"x": [1]}, ("x[1]", "2", "-", "")),
        ({"x": 1000}, {"x": 1250}, ("x", "1,000", "1,250", "+250 (+25.0%)")),
        ({"x": 0}, {"x": 2}, ("x", "0", "2", "+2")),
        ({"x": "inf"}, {"x": 1.5}, ("x", "inf", "1.5", "")),
        ({"x": True}, {"x": 1}, ("x", "true", "1", "")),
        ({"x": {}}, {"x": None}, ("x", "{}", "null", "")),
    ],
)
def test_a_difference_in_words(a: Any, b: Any, cells: tuple[str, ...]) -> None:
    assert differences(a, b).cells == [cells]
    assert not differences(a, a).found and not differences(b, b).found


def test_of_a_result_only_its_data_counts() -> None:
    result = results.latest("verify", RESULTS, algorithm="flash2")
    assert result is not None
    content = result.content
    other = json.loads(json.dumps(content)) | {"date": "2027-01-01T00:00:00Z", "commit": "0" * 40, "driver": "1.0"}
    assert not compare(content, other).found
    other["data"]["rows"][3]["status"] = "failed"
    (found,) = compare(content, other).found
    assert found.where.startswith("rows[rule, ") and found.where.endswith(".status")


def test_how_a_result_is_written_makes_no_difference(tmp_path: Path) -> None:
    """A file of schema 2 is one JSON document, one of schema 3 is JSON Lines."""
    new = next((RESULTS / "fp8").glob("*.jsonl"))
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**results.load(new).content, "schema": 2}))
    assert document("diff", old, new)["same"]
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(new.read_text().splitlines(keepends=True)[:-1]))
    assert "a JSON document" in one_line("diff", old, cut)


@pytest.mark.parametrize("kind", sorted(results.kinds()))
def test_every_kind_is_the_same_as_itself_and_no_place_is_there_twice(kind: str) -> None:
    files = sorted((RESULTS / kind).glob("*.jsonl"))
    for path in files[:1]:
        content = read("a", path)
        same = compare(content, content, 0.0)
        leaves = len(json.dumps(content["data"]))
        assert not same.found and 0 < same.equal < leaves


def test_what_cannot_be_compared() -> None:
    verify, bench = (read("a", next((RESULTS / kind).glob("*.jsonl"))) for kind in ("verify", "bench"))
    with pytest.raises(UsageError, match="B = a result of kind bench: expected kind verify, as A has"):
        compare(verify, bench)
    with pytest.raises(UsageError, match="B = a result of schema 2: expected schema 1, as A has"):
        compare({"schema": 1, "x": 1}, {"schema": 2, "x": 1})
    with pytest.raises(UsageError, match="expected one of the command that wrote A: schema, x, y …"):
        compare({"schema": 1, "x": 1, "y": 1}, {"schema": 1, "z": 1, "w": 1})


def test_the_command(tmp_path: Path) -> None:
    p = fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16")
    for name, problem in (("a", p), ("b", p.replace(head_dim=128))):
        (tmp_path / f"{name}.json").write_text(json.dumps(fl.count("flash2", problem).to_dict()))
    a, b = (str(tmp_path / name) for name in ("a.json", "b.json"))
    assert "0 of 87 values differ" in run("diff", a, a).stdout
    different = run("diff", a, b, code=1)
    assert "hbm.read" in different.stdout and "+100.0%" in different.stdout
    told = json.loads(run("diff", a, b, "--json", code=1).stdout)
    assert not told["same"] and {each["where"] for each in told["differences"]} >= {"hbm.read", "sram.peak"}
    assert document("diff", a, a)["same"]
    (tmp_path / "list.json").write_text("[1]")
    for words, says in (
        ((a, str(tmp_path / "none.json")), "No such file"),
        ((str(tmp_path / "list.json"), a), "it holds list"),
        ((a, b, "--tolerance", "-1"), "--tolerance = -1.0: expected a share of at least 0"),
    ):
        assert says in one_line("diff", *words)


@given(st.text(), st.text())
def test_a_strangers_words_never_command_a_terminal(key: str, word: str) -> None:
    """Keys, values, what a row says of itself, and what the refusals quote."""
    a = {"schema": word, key: word, "rows": [{"name": word, key: 1}]}
    b = {"schema": word, key: 0, "rows": [{"name": key, key: word}]}
    shown = [*differences(a, b).cells, (differences(a, b).text,)]
    for x, y in (
        (a, b | {"schema": 0}),
        ({"kind": key}, {"kind": word}),
        ({key: 1}, {word: 1, "other": 2, "third": 3}),
    ):
        try:
            shown += compare(x, y).cells
        except UsageError as refused:
            shown.append((str(refused),))
    for text in (text for row in shown for text in row):
        assert all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


def test_the_command_shows_what_a_terminal_would_obey(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"algorithm": "\x1b[2J", "\x1b]0;title\x07": 1, "x": 1}))
    (tmp_path / "b.json").write_text(json.dumps({"algorithm": "flash2", "\x1b]0;title\x07": 2, "x": 1}))
    done = run("diff", tmp_path / "a.json", tmp_path / "b.json", code=1)
    assert "\\x1b[2J" in done.stdout and "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500])
def test_a_deep_document_is_refused_in_one_line(deep: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(deep)
    assert "(it is nested more than 100 deep)" in one_line("diff", path, path)
    with pytest.raises(UsageError, match="a result that can be read"):
        results.load(path)


def test_numbers_that_no_float_holds(tmp_path: Path) -> None:
    """JSON has integers of any length."""
    a, b = {"x": 10**400, "seconds": 10**400}, {"x": 1.5, "seconds": 1.5}
    assert [each.change for each in differences(a, b, 0.1).found] == ["", ""]
    assert not differences(a, a).found
