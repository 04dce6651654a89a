"""Building: once, by content; nothing of it for who doesn't emulate."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.base import cache as caches
from flashlab.emulator import build

building: Any = importlib.import_module(
    "flashlab.emulator.build"
)  # the package has the function under the module's name

ROOT = Path(__file__).resolve().parents[3]
NEEDS_COMPILER = pytest.mark.compiler

RUN = """
import sys
import numpy as np
import flashlab as fl
done = fl.emulate_file(sys.argv[1], {"x": np.zeros(32, "f4")}, grid=1, block=32)
assert done.passed and (done.arrays["x"] == VALUE).all()
"""


def source(folder: Path, name: str = "add.cu", value: int = 1) -> Path:
    path = folder / name
    path.write_text(f"__global__ void add(float* x) {{ x[threadIdx.x] += {value}; }}\n")
    return path


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A log of what the compiler is called with."""
    real = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    (tmp_path / "cxx").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {real} "$@"\n')
    (tmp_path / "cxx").chmod(0o755)
    return tmp_path / "calls"


def compiled(calls: Path) -> list[str]:
    """The compilations of kernels; asking for the version is none."""
    found = calls.read_text().splitlines()
    calls.write_text("")
    return [call for call in found if call != "--version"]


def fresh_cache(folder: Path) -> Path:
    """An empty cache, but for the runtime, which is the same for all."""
    fl.emulate_file(source(folder, "any.cu"), {"x": np.zeros(32, "f4")}, grid=1, block=32)
    (folder / "cache").mkdir()
    (folder / "cache" / "runtime").symlink_to(caches.folder() / "runtime")
    return folder / "cache"


def start(path: Path, cache: Path, *, value: int = 1, **environment: str) -> subprocess.Popen[str]:
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHLAB_CACHE": str(cache), **environment}
    command = [sys.executable, "-c", RUN.replace("VALUE", str(value)), str(path)]
    return subprocess.Popen(command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(path: Path, cache: Path, **options: Any) -> None:
    process = start(path, cache, **options)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said


@NEEDS_COMPILER
def test_built_once_and_again_when_the_source_changes(tmp_path: Path, compiler: Path) -> None:
    cache, path, cxx = fresh_cache(tmp_path), source(tmp_path), str(tmp_path / "cxx")
    run(path, cache, CXX=cxx)
    assert len(compiled(compiler)) == 3  # the preprocessor, the kernel, and the link
    run(path, cache, CXX=cxx)
    assert compiled(compiler) == []
    run(source(tmp_path, value=5), cache, CXX=cxx, value=5)
    assert len(compiled(compiler)) == 3


@NEEDS_COMPILER
def test_a_changed_header_of_ours_builds_anew(tmp_path: Path) -> None:
    path = source(tmp_path)
    shutil.copytree(kernels_cu.include_dir(), tmp_path / "include")
    with kernels_cu.sources_in(tmp_path):
        first = build(path)
        assert build(path) is first
        with (tmp_path / "include" / "mask.cuh").open("a") as file:
            file.write("// changed\n")
        assert build(path).path != first.path


@NEEDS_COMPILER
def test_findings_name_the_headers_of_this_checkout(tmp_path: Path) -> None:
    """Two checkouts share a cache; a finding may not name a file of the other one, which may be gone."""
    path = tmp_path / "out.cu"
    path.write_text('#include "put.cuh"\n__global__ void out(float* x) { put(x); }\n')
    for name in ("one", "another"):
        shutil.copytree(kernels_cu.include_dir(), tmp_path / name / "include")
        header = tmp_path / name / "include" / "put.cuh"
        header.write_text("__device__ inline void put(float* x) { x[32 + threadIdx.x] = 1; }\n")
        with kernels_cu.sources_in(tmp_path / name):
            done = fl.emulate_file(path, {"x": np.zeros(32, "f4")}, grid=1, block=32)
        assert {line.file for finding in done.launched.findings for line in finding.via} == {str(header)}


@pytest.mark.alike(1)
@NEEDS_COMPILER
@pytest.mark.parametrize("option", [{"macros": ["-DX=1"]}, {"arch": 750}, {"watch": False}])
def test_each_way_of_building_has_a_library_of_its_own(tmp_path: Path, option: dict[str, Any]) -> None:
    path = source(tmp_path)
    assert build(path, **option).path != build(path).path
    assert build(path, **option) is build(path, **option)


@NEEDS_COMPILER
def test_several_processes_at_once(tmp_path: Path) -> None:
    """Each builds, one library stays, and nothing half-built is ever seen."""
    cache, path = fresh_cache(tmp_path), source(tmp_path)
    processes = [start(path, cache) for _ in range(2)]
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    (kept,) = (cache / "emulator").iterdir()
    assert sorted(file.name for file in kept.iterdir()) == ["digests.json", "kernel.so", "sites.json"]


@NEEDS_COMPILER
def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache, path = fresh_cache(tmp_path), tmp_path / "typo.cu"
    path.write_text("__global__ void typo(float* x) { y = 1; }\n")
    process = start(path, cache)
    assert "typo.cu doesn't compile" in process.communicate(timeout=120)[0] and process.returncode == 1
    assert list((cache / "emulator").iterdir()) == []


@pytest.mark.alike("sites.json")
@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["kernel.so", "sites.json"])
def test_a_damaged_library_is_built_anew(tmp_path: Path, compiler: Path, name: str) -> None:
    cache, path, cxx = fresh_cache(tmp_path), source(tmp_path), str(tmp_path / "cxx")
    run(path, cache, CXX=cxx)
    (kept,) = (cache / "emulator").iterdir()
    os.truncate(kept / name, 100)
    compiled(compiler)
    run(path, cache, CXX=cxx)
    assert len(compiled(compiler)) == 3
    run(path, cache, CXX=cxx)
    assert compiled(compiler) == [] and list((cache / "emulator").iterdir()) == [kept]


def test_nothing_is_imported_for_who_does_not_emulate() -> None:
    program = """
import sys
import flashlab as fl
p = fl.Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype="float32")
fl.simulate("flash2", *fl.random_inputs(p))
fl.count("flash2", p)
import flashlab.cli
assert "emulate" in dir(fl)
print([name for name in sys.modules if name.startswith("flashlab.emulator")])
fl.emulate
print("flashlab.emulator" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["[]", "True"]


@pytest.mark.parametrize("cxx", ["/bin/false", "ccache g++", "nosuch"])
def test_a_cxx_that_is_no_compiler_is_told_in_a_line(cxx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    building.compiler.cache_clear()
    try:
        with pytest.raises(fl.Unavailable, match="is no C") as error:
            building.compiler()
        assert cxx in str(error.value) and "\n" not in str(error.value)
    finally:
        building.compiler.cache_clear()


def test_a_full_disk_is_no_fault_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    full = subprocess.CompletedProcess([], 1, "", "x.s: fatal error: error writing to x.o: No space left on device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: full)
    with pytest.raises(OSError, match="No space left on device"):
        building._compiled(["g++"])
