"""The command: studies are found by their names, what a user can mend is one line, and none is in the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashlab.measure import results
from studies import __main__ as command
from studies import timed
from studies.timed import STUDIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 0, "  append\n  audited\n  blind\n"),
        (("nothing",), 2, "studies: study = 'nothing': expected one of "),
        (("tiles", "--only", "x"), 2, "studies: only = 'x': expected nothing\n"),
        (("features", "--only", "sink"), 2, "studies: only = 'sink': expected soft cap 50 or "),
        (("decoding", "mla", "--only", "int8"), 2, "studies: only = 'int8': expected the algorithm paged\n"),
        (("append", "flash3", "--against", "cudnn"), 2, "studies: against = 'cudnn': expected "),
        (("revisions", "flash2"), 2, "studies: sources = None: expected the folder kernels_cu of another revision"),
    ],
)
def test_what_can_be_mended_is_one_line(words: tuple[str, ...], status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "studies", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status and said in done.stdout + done.stderr
    assert not status or len(done.stderr.splitlines()) == 1


def test_every_study_has_a_kind_and_a_command() -> None:
    kinds = results.kinds()
    assert {study.name: study for study in STUDIES.values()}.items() <= kinds.items()
    for name in command.OTHERS:
        assert name == "model" or any(f"-m studies {name}" in kind.command for kind in kinds.values())


def test_a_run_writes_a_file_for_each_algorithm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against stand-ins for a GPU: the cells of each algorithm become rows, and what wasn't run is told."""
    saved: list[Any] = []

    def row(algorithm: str, cell: Any, asked: timed.Asked) -> list[timed.Row]:
        asked.not_run.append(f"a peer of {algorithm}")
        return [{"cell": cell, "ratios": {"fa4": 1.5, "read": 0.5}}]

    monkeypatch.setitem(vars(timed.APPEND), "measure", row)
    monkeypatch.setattr(
        results, "save", lambda kind, names, data, **named: saved.append((kind.name, names, data, named))
    )
    timed.main("append", ["flash3", "flash3_paged", "--condition", "odd", "--out", str(tmp_path)])
    assert [(kind, names) for kind, names, *_ in saved] == [
        ("append", ["flash3", "fa4"]),
        ("append", ["flash3_paged", "fa4"]),
    ]
    data, named = saved[0][2:]
    assert data["algorithm"] == "flash3" and [x["cell"] for x in data["rows"]] == list(timed.APPENDED["flash3"])
    assert named == {"subject": "flash3", "condition": "odd", "folder": tmp_path, "replace": False}


def test_what_sets_a_run_of_decoding_apart_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setitem(vars(timed.DECODING), "measure", lambda *_: [])
    monkeypatch.setattr(results, "save", lambda kind, names, data, **named: saved.append(named["condition"]))
    for words in ((), ("--only", "int8"), ("--only", "sinks"), ("--only", "int8", "--condition", "odd")):
        timed.main("decoding", ["paged", *words])
    assert saved == [None, "quantized", "features", "odd"]
