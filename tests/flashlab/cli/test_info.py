"""`flashlab info`: each part is found or says how to get it, and no more than that is needed to run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flashlab.cli import app
from flashlab.measure import here, results
from flashlab.run import nvrtc


def run(*words: str) -> Any:
    result = CliRunner().invoke(app, ["info", *words])
    assert result.exit_code == 0, result.output
    return result


def forget() -> None:
    """What was found once is kept: a compiler, versions, headers."""
    build = sys.modules["flashlab.emulator.build"]
    for kept in (build.compiler, results._tool_version, nvrtc.cuda_include_dir, nvrtc._nvrtc_version, here.cupy):
        kept.cache_clear()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without any of it; the folder is its PATH."""

    def version(name: str) -> str:
        raise here.PackageNotFoundError(name)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(here, "version", version)
    for name in ("cupy", "torch", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    forget()
    yield tmp_path
    forget()


def program(folder: Path, name: str, prints: str = "") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def parts() -> dict[str, here.Part]:
    return {part.name: part for part in here.look().parts}


def test_the_document_says_what_is_here():
    found = json.loads(run("--json").stdout)
    assert found["schema"] == 1
    assert found["versions"]["numpy"] == np.__version__
    names = [part["name"] for part in found["parts"]]
    assert {"GPU", "CuPy", "NVRTC", "ncu", "compute-sanitizer", "C++ compiler", "Chromium"} <= set(names)
    assert all((part["found"] is None) != (part["missing"] is None) for part in found["parts"])


def test_it_is_a_line_for_each():
    found = here.look()
    lines = run().stdout.splitlines()
    assert "numpy" in lines[0]
    assert lines[1:] == [part.line for part in found.parts]


def test_what_is_missing_says_how_to_get_it(bare: Path):
    found = parts()
    assert [part.name for part in found.values() if part.found is not None] == []
    for part in found.values():
        assert "install" in part.line or part.name == "GPU", part.line


def test_what_is_on_the_path_is_found(bare: Path):
    ncu = program(bare, "ncu", "Version 2099.1.0.0 (build 1)")
    compiler, browser = program(bare, "g++", "g++ 99.1"), program(bare, "google-chrome")
    for name in ("objcopy", "readelf", "addr2line", "c++filt"):
        program(bare, name)
    program(bare, "nvidia-smi", "999.1")
    found = parts()
    assert found["ncu"].found == f"2099.1.0.0, {ncu}"
    assert found["C++ compiler"].found == f"g++ 99.1, {compiler}"
    assert found["Chromium"].found == str(browser)
    assert "driver 999.1" in (found["GPU"].found or "")
    assert found["compute-sanitizer"].found is None


def test_a_compiler_without_binutils_is_not_enough(bare: Path):
    program(bare, "g++", "g++ 99.1")
    assert "binutils" in parts()["C++ compiler"].line
