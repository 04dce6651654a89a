"""The corpus: what becomes of published files, each in a process of its own."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from simulator.errors import UsageError
from studies import corpus
from studies.corpus import KIND

FILES = {
    "src/add.cu": """
__global__ void vectorAdd(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
__global__ void bad(float* x) { x[1 << 29] = 1; }
__global__ void leaves() { exit(3); }
template <int N> __global__ void fill(float* x) { x[threadIdx.x] = N; }
__global__ void last(float* x) { *x = 1; }
int main() { fill<7><<<1, 32>>>(nullptr); }
""",
    "src/races.cu": "__global__ void vectorAdd(float* a, float* b, float* c, int n) { c[threadIdx.x / 2] = threadIdx.x; }",
    "src/wrong.cu": "__global__ void vectorAdd(float* a, float* b, float* c, int n) { c[threadIdx.x] = 0; }",
    "typo.cu": "__global__ void k(int* x) { *x = nothing; }",
    "void.cu": "__global__ void k(int* x);",
    "host.cu": "int main() { return 0; }",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "owner__name"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "All"]):
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(folder), *who, *command], check=True)
    return folder


@pytest.mark.long
@pytest.mark.compiler
def test_what_becomes_of_files_and_kernels(checkout: Path) -> None:
    [row] = corpus.measured([checkout], jobs=2)
    assert row["repository"] == "owner/name" and len(row["commit"]) == 40
    assert [(file["path"], file["built"]) for file in row["files"]] == [
        ("src/add.cu", True), ("src/races.cu", True), ("src/wrong.cu", True), ("typo.cu", False), ("void.cu", False),
    ]  # fmt: skip
    add, races, wrong, typo, void = row["files"]
    assert void["reason"] == "kernels = none: expected one with its body, or a named instance of a template"
    assert (
        typo["reason"].startswith("typo.cu doesn't compile at typo.cu:1, in k:") and str(checkout) not in typo["reason"]
    )
    found = {kernel["name"]: kernel for kernel in add["kernels"]}
    assert [(name, kernel["ran"], kernel["right"]) for name, kernel in found.items()] == [
        ("vectorAdd", True, None), ("bad", False, None), ("leaves", False, None), ("fill<7>", True, None), ("last", True, None),
    ]  # fmt: skip
    assert "out of bounds" in found["bad"]["reason"] and found["leaves"]["reason"]
    assert found["vectorAdd"]["reason"] is None and races["kernels"][0]["ran"] and wrong["kernels"][0]["ran"]
    data = KIND.schema.model_validate({"checkouts": [row]})
    assert (
        "3 of 5 files (60.0 %) build unchanged; 5 of their 7 kernels (71.4 %) run to an end, 0 of them"
        in KIND.headline(data)
    )
    assert KIND.table(data).splitlines()[-1] == f"| owner/name | {row['commit'][:9]} | 5 | 3 | 7 | 5 | 0 |"


def test_what_is_stopped_leaves_no_compiler(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, started = tmp_path / "g++", tmp_path / "started"
    stuck.write_text(
        f"#!/bin/sh\ncase $* in --version) echo 'g++ () 14.2';; *) sleep 1000 & echo $! > {started}; wait;; esac"
    )
    stuck.chmod(0o755)
    monkeypatch.setenv("CXX", str(stuck))
    stopped = Event()
    with ThreadPoolExecutor() as pool:
        row = pool.submit(corpus.tried, checkout / "typo.cu", checkout, stopped)
        while not row.done() and not (started.exists() and started.read_text()):
            time.sleep(0.01)
        stopped.set()
    assert (row.result()["built"], row.result()["reason"]) == (False, "the process took too long")
    sleeper = Path("/proc") / started.read_text().strip() / "stat"
    while sleeper.exists() and sleeper.read_text().split()[2] != "Z":
        time.sleep(0.01)  # or the test runs into its limit


def test_what_takes_too_long(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_SILENCE", 0)
    row = corpus.tried(checkout / "typo.cu", checkout, Event())
    assert (row["built"], row["reason"]) == (False, "the process took too long")


def test_what_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder that git knows"):
        corpus.measured([tmp_path])
