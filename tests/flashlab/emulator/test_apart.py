"""A kernel in a process of its own: what it answers is the same, and what ends that process is a finding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
from flashlab.base.process import Outcome
from flashlab.emulator import BuildError, apart
from simulator.errors import UsageError
from tests.flashlab.cli.typed import run

pytestmark = pytest.mark.compiler

SOURCE = """
#include <csignal>
__global__ void k(float* y, int n) {
  if (n == 1) raise(SIGKILL);
  if (n == 2) printf("hello\\n");
  y[threadIdx.x + (n == 3)] = n;
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources") / "ends.cu"
    path.write_text(SOURCE)
    return path


def test_the_answer_is_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, passed in ((2, True), (3, False)):
        given = {"y": fl.Empty((1,)), "n": n}
        here, there = (f(path, given, grid=1, block=1) for f in (fl.emulate_file, apart.emulate_apart))
        assert here.passed == there.passed == passed and here.to_dict() == there.to_dict()
        assert n == 3 or np.array_equal(here.arrays["y"], there.arrays["y"])
    assert capsys.readouterr().out == "hello\n"  # only the child's comes through Python


def test_its_death_is_a_finding(path: Path) -> None:
    done = apart.emulate_apart(path, {"y": fl.Empty((1,)), "n": 1}, grid=1, block=1)
    assert not done.passed and done.launched.stopped
    assert done.complaints() == ["crash: the kernel's code ended it: its process was ended by SIGKILL"]


def test_what_took_too_long_is_no_crash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it would have come to: that is neither a finding of the kernel's nor a pass."""
    late = Outcome("no end", "no end within 300 seconds", "")
    monkeypatch.setattr(
        "flashlab.base.apart.run_child", lambda folder, *_, **__: ((folder / "printed.txt").touch(), late)[1]
    )
    done = apart.emulate_apart(path, {"y": fl.Empty((1,)), "n": 0}, grid=1, block=1)
    assert done.complaints() == ["time limit: no end within 300 seconds"] and done.launched.unfinished
    typed = run("emulate", path, "--grid", 1, "--block", 1, "--arg", "y=float32[1]:out", "--arg", "n=0", code=2)
    assert "time limit: no end within 300 seconds" in typed.stdout


def test_its_errors_are_raised_here(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^argument = 'z'") as caught:
        apart.emulate_apart(path, {"z": 1}, grid=1, block=1)
    assert caught.value.argument == "argument"
    (tmp_path / "wrong.cu").write_text("__global__ void k() { nothing(); }")
    with pytest.raises(BuildError, match="nothing"):
        apart.emulate_apart(tmp_path / "wrong.cu", {}, grid=1, block=1)


def test_its_address_space_is_limited(path: Path) -> None:
    most = path.parent / "most.cu"
    most.write_text(f"""
#include <sys/mman.h>
__global__ void k(int* y) {{
  y[0] = mmap(0, {2 * apart.MEMORY}ull, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0) == MAP_FAILED;
}}""")
    done = apart.emulate_apart(most, {"y": fl.Empty((1,), "int32")}, grid=1, block=1)
    assert done.arrays["y"][0] == 1
    assert apart.emulate_apart(path, {"y": fl.Empty((1024,)), "n": 0}, grid=1, block=1024).passed
