"""A user's script under type checkers: what is right passes in their strict modes, and a wrong name is found where it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import flashlab as fl
from flashlab.verify.targets import BACKENDS
from simulator.devices import ALIASES
from simulator.names import AnyBackend, Backend, DeviceName, DType
from simulator.problem import DTYPES, ITEMSIZE

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import numpy as np

import flashlab as fl


@fl.program
def mine(m: fl.Machine, q: fl.HbmTensor, k: fl.HbmTensor, v: fl.HbmTensor, problem: fl.Problem, tile: fl.Tile) -> fl.HbmTensor:
    for block in m.launch("mine", rows=problem.row_tiles(tile), warps=4):
        block.step("store")
        block.store(m.output("out"), block.full(tile.rows, v.cols, 0.0), block.i, tile.rows)
    return m.output("out")


p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float16", causal=True)
q, k, v = fl.random_inputs(p, seed=0)
run = fl.simulate("flash2", q, k, v, causal=True, device="a100", lse=True)
error: float = float(np.abs(run.out - fl.naive(q, k, v, causal=True).out).max())
counts: fl.Counts = fl.count(mine, p, device=fl.DEVICES["h100"], tile=(64, 64))
total: int = counts.hbm.read + fl.count("softmax_safe", length=8, dtype="float32").exp
rows: list[dict[str, object]] = list(fl.sweep(["flash1", mine], p, len_q=[64, 128], progress=True).rows)
passed: bool = fl.verify("flash2", "emulator", dtypes=["float16", "bfloat16"], device="t4", progress=True).passed
out = fl.attention(q, k, v, causal=True, backend="emulator", device="h100")
seconds: float = fl.timeline("flash2", p, device="h200").seconds
figures = fl.compare(p, algorithms=["flash1"], device="b200").plot()

fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float17")  # wrong
fl.count("flash2", p, device="h101")  # wrong
fl.attention(q, k, v, backend="cuda")  # wrong
fl.verify("flash2", "cpu")  # wrong
fl.verify("flash2", dtypes=["half"])  # wrong
fl.plan("flash2", p, backend="tpu")  # wrong
fl.timeline("flash2", p, device="rtx")  # wrong
"""
WRONG = {n for n, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")}


def test_types_have_the_names_that_are_taken() -> None:
    assert set(get_args(DType)) == set(ITEMSIZE) >= set(DTYPES)
    assert set(get_args(DeviceName)) == {*fl.DEVICES, *ALIASES}
    assert set(get_args(AnyBackend)) == set(BACKENDS) == {*get_args(Backend), "simulator"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's script, and the packages as an installation has them."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    for package in ("flashlab", "simulator", "kernels_cu"):
        (folder / package).symlink_to(ROOT / package)
    return folder


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="links")
def test_pyright(folder: Path) -> None:
    config = {"include": ["script.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
    errors = {x["range"]["start"]["line"] + 1: x["message"] for x in json.loads(done.stdout)["generalDiagnostics"]}
    assert set(errors) == WRONG, errors


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="links")
def test_mypy(folder: Path) -> None:
    """In an environment of its own: nothing else here needs it."""
    made = subprocess.run([sys.executable, "-m", "venv", folder / "env"], capture_output=True, text=True, check=False)
    pip = [folder / "env" / "bin" / "pip", "install", "--quiet", "mypy"]
    got = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=250)
    if made.returncode or got.returncode:
        pytest.skip(f"mypy can't be installed: {got.stderr[-200:]}")
    command = [folder / "env" / "bin" / "mypy", "--strict", "--python-executable", sys.executable, "script.py"]
    done = subprocess.run(
        [*command, "--follow-imports=silent"], cwd=folder, capture_output=True, text=True, check=False, timeout=280
    )
    found = {int(n): line for line in done.stdout.splitlines() if (n := _line(line))}
    assert set(found) == WRONG, done.stdout


def _line(said: str) -> str | None:
    match = re.match(r"script\.py:(\d+): error", said)
    return match and match[1]
