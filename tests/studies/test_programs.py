"""The study of programs: what becomes of published files with a main, each in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from studies import programs
from studies.programs import KIND

pytestmark = [pytest.mark.compiler, pytest.mark.long]

FILES = {
    "right.cu": "int main() { return 0; }",
    "wrong.cu": 'int main() { printf("2 results mismatch"); return 1; }',
    "races.cu": "__global__ void k(int* x) { *x = threadIdx.x; }\n"
    "int main() { int* x; cudaMalloc(&x, 4); k<<<1, 64>>>(x); return cudaFree(x); }",
    "typo.cu": "int main() { retrun 0; }",
    "kernel.cu": "__global__ void k() {}",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repositories") / "someone__course"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


def test_each_programs_end_is_told(checkout: Path) -> None:
    [row] = programs.measured([checkout], most=None, seconds=20, jobs=2, true=frozenset(["races.cu"]))
    assert row["repository"] == "someone/course"
    ends = {x["path"]: (x["ended"], x["wrong"], x["true"]) for x in row["programs"]}
    assert ends == {
        "right.cu": ("passed", False, None), "wrong.cu": ("failed", True, None), "races.cu": ("found", False, True),
        "typo.cu": ("not built", False, None),
    }  # fmt: skip
    data = programs.PROGRAMS(checkouts=[row], seconds=20)
    assert KIND.headline(data).startswith("2 of 4 programs of 1 repositories") and "| 4 | 1 | 1 | 1 |" in KIND.table(
        data
    )


def test_a_draw_is_the_same_each_time(checkout: Path) -> None:
    assert programs.drawn(checkout, 2) == programs.drawn(checkout, 2) and len(programs.drawn(checkout, 2)) == 2
