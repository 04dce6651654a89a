"""Every command's `--json`: its document is what its published schema says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from docs._site.commands import page, schemas
from flashlab.cli import app
from flashlab.cli.documents import DOCUMENTS
from tests.flashlab.cli.typed import document

TWO = """
__global__ void two(const float* x, float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = s[63 - threadIdx.x];
}
"""
SMALL = {
    "compare": ["flash1", "--sample"],
    "count": ["flash3", "--lengths", "10,20:30"],
    "simulate": ["flash2", "--lse", "--len-q", 16],
    "sweep": ["flash2", "--len-q", "64,128"],
    "trace": ["flash2", "--len-q", 16],
    "devices": [],
    "verify": ["flash2", "--check", "key_sets", "--dtype", "float16"],
    "time": ["flash2"],
    "serve": ["lognormal:alpaca", "--requests", 2, "--layers", 1],
    "parallel": ["--ranks", 2, "--backward"],
    "info": [],
    "cache": ["dir"],
}
NEED_A_GPU_OR_TORCH = {"bench", "sanitize", "fp8", "capture"}
"""What they print is on record under docs/results, or held by their own tests."""


def check(command: str, found: object) -> None:
    Draft202012Validator(json.loads(schemas()[f"{command}.json"])).validate(found)


@pytest.mark.parametrize("command", SMALL)
def test_a_document_is_what_its_schema_says(command: str) -> None:
    check(command, document(command, *SMALL[command]))


@pytest.mark.compiler
def test_documents_of_the_emulator(tmp_path: Path) -> None:
    """Of an algorithm, of a file with findings, and of the counters that it stands for."""
    check("emulate", document("emulate", "flash2", "--len-q", 16))
    check("counters", document("counters", "flash2", "--backend", "emulator", "--len-q", 16))
    path = tmp_path / "two.cu"
    path.write_text(TWO)
    words = ["emulate", path, "--grid", 1, "--block", 64, "--arg", "x=float32[64]", "--arg", "y=float32[64]:out"]
    found = document(*words, code=1)
    assert any(x["other_line"] for x in found["launch"]["findings"]), "a race has two lines"
    check("emulate", found)
    path.write_text(
        f"{TWO}int main() {{ int x; cudaMalloc((int**)nullptr, 0); cudaFree(&x); two<<<1, 2000>>>(0, 0); }}\n"
    )
    check("run", document("run", path, code=1))


def test_documents_of_two_runs(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for path, tile in ((a, "64x64"), (b, "128x64")):
        path.write_text(json.dumps(document("count", "flash2", "--tile", tile)))
    check("diff", document("diff", a, b, code=1))


def test_every_command_has_a_schema_and_a_test() -> None:
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert {name.replace("_", "-") for name in names} == set(DOCUMENTS) == {
        *SMALL, *NEED_A_GPU_OR_TORCH, "lessons", "emulate", "run", "counters", "diff", "audit-test",
    }  # fmt: skip


def test_each_command_has_a_valid_schema() -> None:
    assert set(schemas()) == {f"{name}.json" for name in DOCUMENTS}
    for text in schemas().values():
        Draft202012Validator.check_schema(json.loads(text))


def test_a_key_that_is_lost_or_new_is_seen() -> None:
    found = document("count", "flash2")
    for wrong in ({key: x for key, x in found.items() if key != "exp"}, {**found, "more": 1}, {**found, "exp": "many"}):
        with pytest.raises(ValidationError):
            check("count", wrong)


def test_the_page_has_every_command_with_examples_and_schema() -> None:
    text = page()
    for name in DOCUMENTS:
        section = text.partition(f"## `flashlab {name}`")[2].partition("\n## ")[0]
        assert f"```sh\nflashlab {name}" in section and f"(../schemas/{name}.json)" in section, name
