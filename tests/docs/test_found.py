"""docs/found-in-public-kernels.md: it shows what is on record, and each defect on record is found at a line of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs._site import found as page
from docs._site.blocks import replaced
from docs._site.defects import DEFECTS, NUMBERS, Defect, command
from flashlab.measure import results
from flashlab.measure.sanitizers import TOOLS
from studies.closed import FOUND, FOUND_ON_GPU, ON_GPU, PLAIN, SEEN

ROOT = Path(__file__).resolve().parents[2]
RESULT = results.latest("found", ROOT / results.FOLDER)
assert RESULT is not None
ROWS = FOUND.data(RESULT).rows


def test_the_page_is_what_the_data_say() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert replaced(text, "found", page.blocks()) == text, "run python -m docs._site.found"


def test_every_defect_is_on_record_and_found_where_it_is() -> None:
    by_name = {(row.repository, row.file, row.kernel): row for row in ROWS}
    assert by_name.keys() == {(each.repository, each.file, each.kernel) for each in (*DEFECTS, *NUMBERS)}
    assert all(by_name[each.repository, each.file, each.kernel].nans for each in NUMBERS)
    for each in DEFECTS:
        assert set(each.lines) & set(by_name[each.repository, each.file, each.kernel].lines), each.kernel


ABOUT = {
    "device": {"name": "NVIDIA H200", "compute_capability": "9.0", "sms": 132, "memory": 1, "l2": 1},
    "driver": "580.1", "cuda_runtime": "13.0", "nvrtc": "13.0", "cudnn": None, "versions": {"flashlab": "1"},
    "date": "2026-11-23T00:00:00Z", "commit": "abc", "command": "found_gpu",
}  # fmt: skip


def on_gpu(folder: Path, **changed: str) -> None:
    """Puts what a GPU might show into a folder: the first defect is seen by racecheck and in the results, the second by nobody."""

    def row(i: int, tools: list[Any], plain: Any) -> Any:
        of = ROWS[i].model_dump(include={"repository", "file", "commit", "kernel"}) | changed
        return ON_GPU(**of, registers=32, plain=plain, tools=tools)

    quiet = [
        SEEN(tool=tool, findings=0, warnings=0, first="", kernel=False, lines=[], takes_part=False) for tool in TOOLS
    ]
    loud = {
        "findings": 3,
        "warnings": 1,
        "first": "Error: hazard",
        "kernel": True,
        "lines": [268, 288],
        "takes_part": True,
    }
    hung = {"findings": None, "first": "not done within 120 s"}
    mixed = [quiet[0], quiet[1].model_copy(update=loud), quiet[2].model_copy(update=hung), quiet[3]]
    same = PLAIN(launches=1000, distinct=1, error=0.0, nans=0, said="")
    rows = [row(0, mixed, same.model_copy(update={"distinct": 17, "error": 0.25})), row(1, quiet, same)]
    data = FOUND_ON_GPU.schema(rows=rows).model_dump()  # pyright: ignore[reportCallIssue]
    results.save(FOUND_ON_GPU, [], data, subject="kernels", folder=folder, about=ABOUT)
    assert RESULT is not None
    about = {key: RESULT.content[key] for key in ABOUT}
    results.save(FOUND, [], RESULT.data, subject="kernels", folder=folder, about=about)


def test_what_a_gpu_showed_stands_in_the_table_and_in_the_sections(tmp_path: Path) -> None:
    on_gpu(tmp_path)
    blocks = page.blocks(tmp_path)
    tools = "racecheck: 3, at its lines; initcheck: no end"
    first = f"| `softmax_forward_kernel4` | 17 results, 0.25 off | {tools} | race, 6.5e-09 off |"
    assert "On an NVIDIA H200 (2026-11-23) the same launches ran" in blocks["gpu"]
    assert first in blocks["gpu"]
    assert re.search(r"\| `attention_forward_fused1` \| same results \| nothing \| race, \S+ off \|", blocks["gpu"])
    sections = blocks["defects"].split("\n## ")
    assert "1,000 launches left 17 different results. They are at most 0.25 from NumPy in float64." in sections[0]
    assert "Nothing is found by memcheck and synccheck." in sections[0]
    assert "racecheck finds 3 (1 of them as warnings), at lines 268, 288; the first: `Error: hazard`." in sections[0]
    assert "initcheck didn't come to its end: `not done within 120 s`." in sections[0]
    assert "1,000 launches left the same result. It is exact." in sections[1]
    assert "Nothing is found by memcheck, racecheck, initcheck and synccheck." in sections[1]
    assert not any("H200" in section for section in sections[2:])


def test_another_commit_is_no_comparison(tmp_path: Path) -> None:
    on_gpu(tmp_path, commit="f" * 40)
    blocks = page.blocks(tmp_path)
    assert blocks["gpu"] == page.NOT_RUN
    assert "H200" not in blocks["defects"]


def test_a_finding_s_kind_is_read_from_its_words() -> None:
    for row in ROWS:
        said = page.kinds(row)
        kinds = "race|race, race between blocks|out of bounds|divergent collective"
        assert re.fullmatch(rf"({kinds})(, \S+ off)?|32 NaN", said), said


@pytest.mark.compiler
@pytest.mark.long
def test_a_section_s_command_shows_the_finding(tmp_path: Path) -> None:
    """A launch that misuses memory, and one that doesn't."""
    source = "__global__ void k(float* x, int n) {\n  x[threadIdx.x + n] = 1;\n}\n"
    (tmp_path / "k.cu").write_text(source, encoding="utf-8")
    for n, said in ((0, ""), (1, "k.cu:2: out of bounds")):
        arguments = ("x=float32[32]:zeros", f"n={n}")
        defect = Defect("a/b", "k.cu", "k", "Too far", (2,), "It is.", "None.", arguments, (1,), (32,))
        words = [sys.executable, "-m", "flashlab", *command(defect, "k.cu")]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", cwd=tmp_path)
        assert done.returncode == n and said in done.stdout
