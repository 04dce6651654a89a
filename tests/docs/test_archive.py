"""What left docs/results is on record: what it was, which commit has it, and what superseded it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs._site import archive
from flashlab.measure import results

ROWS = [json.loads(line) for line in archive.MANIFEST.read_text(encoding="utf-8").splitlines()]
LINES, BYTES = 60_000, 16_000_000
"""The most that docs/results may take."""


def files() -> list[Path]:
    """All of docs/results, but what the site's build makes there."""
    return [path for path in archive.RESULTS.rglob("*") if path.is_file() and path.parent.name != "schema"]


def test_results_stay_small() -> None:
    """Run python -m docs._site.archive when they don't."""
    texts = [path.read_bytes() for path in files()]
    assert sum(text.count(b"\n") for text in texts) <= LINES
    assert sum(map(len, texts)) <= BYTES


def test_a_row_says_what_left_and_what_took_its_place() -> None:
    known = {path.relative_to(archive.RESULTS).with_suffix("").as_posix() for path in files()}
    known |= {Path(row["path"]).with_suffix("").as_posix() for row in ROWS}
    for row in ROWS:
        assert list(row) == ["path", "sha256", "bytes", "commit", "superseded_by"]
        assert re.fullmatch(r"[0-9a-f]{64}", row["sha256"]) and re.fullmatch(r"[0-9a-f]{40}", row["commit"])
        assert row["bytes"] > 0 and row["superseded_by"]
        place = archive.RESULTS / row["path"]
        assert not list(place.parent.glob(f"{place.stem}.json*"))
        assert {Path(each).with_suffix("").as_posix() for each in row["superseded_by"]} <= known
        assert {Path(each).parent for each in row["superseded_by"]} == {Path(row["path"]).parent}


def test_nothing_left_twice() -> None:
    assert len({row["path"] for row in ROWS}) == len(ROWS)


def test_git_has_what_left() -> None:
    names = [f"{row['commit']}:{results.FOLDER.as_posix()}/{row['path']}" for row in ROWS]
    found = subprocess.run(
        ["git", "-C", str(archive.ROOT), "cat-file", "--batch"], input="\n".join(names).encode(), capture_output=True
    )
    if found.returncode or b" missing\n" in found.stdout:
        pytest.skip("git's history isn't here, or not all of it")
    rest = found.stdout
    for row in ROWS:
        head, _, rest = rest.partition(b"\n")
        size = int(head.split()[-1])
        assert size == row["bytes"]
        assert hashlib.sha256(rest[:size]).hexdigest() == row["sha256"], row["path"]
        rest = rest[size + 1 :]


# -- what may leave -------------------------------------------------------------------------------------------------


def result(day: int, *algorithms: str, device: str = "NVIDIA H200", condition: str | None = None, **data: Any) -> Any:
    content = {
        "kind": "toy", "algorithms": algorithms, "condition": condition, "device": {"name": device}, "date": str(day), "data": data,
    }  # fmt: skip
    return results.Result(Path(str(day)), content)


OLD = result(1, "a", "b", passed=True, full=True)


@pytest.mark.parametrize(
    ("newer", "by"),
    [
        ([result(2, "a", "b", passed=True, full=True)], [2]),
        ([result(2, "a", "b"), result(3, "a", "b", "c")], [3]),
        ([result(2, "a"), result(3, "b")], [2, 3]),
        ([result(2, "a"), result(3, "c")], None),
        ([result(2, "a", "b", device="NVIDIA A100")], None),
        ([result(2, "a", "b", condition="torch")], None),
        ([result(2, "a", "b", passed=False)], None),
        ([result(2, "a", "b", passed=True, full=False)], None),
    ],
)
def test_what_is_superseded(newer: list[results.Result], by: list[int] | None) -> None:
    found = [(old, [int(each.path.name) for each in new]) for old, new in archive.superseded([OLD, *newer])]
    assert [new for old, new in found if old is OLD] == ([] if by is None else [by])


def test_a_result_of_no_algorithm_is_superseded_too() -> None:
    assert [old.path.name for old, _ in archive.superseded([result(1), result(2)])] == ["1"]


def test_a_text_cites_a_file_with_its_kind_or_without() -> None:
    text = "[data](results/bench/a_b_h200_2026-11-21.jsonl), `c_h100_2026-11-22.jsonl`, machine_h200_…"
    assert archive.cited([text]) == {("bench", "a_b_h200_2026-11-21"), ("", "c_h100_2026-11-22")}
