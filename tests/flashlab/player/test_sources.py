"""Which lines do a step, in the tile program and in the .cu."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
import kernels_cu
from flashlab.player.sources import kernels_of, marks, step_lines
from tests.flashlab.player.traces import small

KERNELS = sorted(path.stem for path in kernels_cu.include_dir().parent.glob("*.cu"))


def lines_of(trace: fl.Trace, step: str) -> str:
    """The text of a step, as the player marks it."""
    event = next(event for event in trace.events if event.step == step)
    first, text = trace.sources[event.source]
    begin, end = step_lines(text, first, event.line)
    return "\n".join(line.strip() for line in text.splitlines()[begin - first : end - first + 1])


@pytest.mark.parametrize("algorithm", fl.catalogue.of())
def test_every_step_of_a_tile_program_has_its_own_lines(algorithm: str) -> None:
    trace = small(algorithm)
    taken: dict[tuple[str, int], str] = {}
    for event in trace.events:
        first, text = trace.sources[event.source]
        begin, end = step_lines(text, first, event.line)
        assert f'.step("{event.step}")' in text.splitlines()[begin - first]
        assert sum(".step(" in line for line in text.splitlines()[begin - first : end - first + 1]) == 1
        for line in range(begin, end + 1):
            assert taken.setdefault((event.source, line), event.step) == event.step
        for transfer in event.transfers:
            if transfer.source == event.source:
                assert begin < transfer.line <= end, (event.step, transfer.line)
            else:  # it lies in a helper's text, which has no steps
                assert ".step(" not in trace.sources[transfer.source][1], (event.step, transfer.source)


def test_a_step_ends_where_its_loop_does() -> None:
    assert lines_of(small("flash2"), "output").splitlines() == [
        'block.step("output")',
        "p = variant.drop(block, p, j)",
        'acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)',
    ]
    assert lines_of(small("flash1"), "load_v").splitlines()[-1].startswith("v_j = block.load(v")
    assert lines_of(small("flash2"), "store_lse").splitlines()[-1].startswith("block.store(lse")


def test_a_line_outside_the_text_stands_alone() -> None:
    assert step_lines("", 1, 1) == (1, 1)
    assert step_lines("x = 1", 10, 9) == (9, 9)


@pytest.mark.parametrize("name", KERNELS)
def test_marks_are_the_kernels(name: str) -> None:
    text = kernels_cu.source(name).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = marks(text)
    assert sum(map(len, found.values())) == len(re.findall(r"// step: ", text))
    covered: set[int] = set()
    for step, places in found.items():
        assert [not tag for _, _, tag in places].count(True) == 1, f"{step}: one place in turn"
        for first, last, tag in places:
            assert lines[first - 1].strip() == f"// step: {step}" + (f" ({tag})" if tag else "")
            assert last > first or tag, f"{name}.cu:{first}: a mark without code"
            assert lines[last - 1].strip() not in ("", "}")
            assert not any(line.startswith(("}", "extern")) for line in lines[first:last]), "it ends with its function"
            assert covered.isdisjoint(range(first, last + 1))
            covered |= set(range(first, last + 1))


def test_a_launch_finds_its_kernel() -> None:
    found = kernels_of(small("online_softmax"), None)
    assert {launch: kernel.name for launch, kernel in found.items()} == {
        "standard_scores": "standard.cu",
        "online_softmax": "online_softmax.cu",
        "standard_output": "standard.cu",
    }
    for algorithm in ("standard", "flash1", "flash2"):
        trace = small(algorithm)
        kernels = kernels_of(trace, None)
        assert {event.step for event in trace.events if event.step not in kernels[event.launch].marks} == set()


def test_ones_own_kernel(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text("// step: load_q\nload();\n", encoding="utf-8")
    assert kernels_of(small("flash2"), path)["flash2"].marks == {"load_q": [(1, 2, "")]}
    assert kernels_of(small("flash1"), "flash2")["flash1"].name == "flash2.cu"
    with pytest.raises(fl.UsageError, match=r"kernel = 'flash9': expected a \.cu file, or one of standard"):
        kernels_of(small("flash2"), "flash9")


@pytest.mark.parametrize("kernel", ["/bin/ls", "notes.txt", "nowhere.cu", 5, "a\0.cu", "x" * 5000 + ".cu", "latin.cu"])
def test_only_a_cuda_source_is_shown(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("private")
    Path("latin.cu").write_bytes(b"\xff\xfe")
    p = fl.Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype="float16")
    trace = fl.simulate("flash2", *fl.random_inputs(p), trace=True).trace
    assert trace is not None
    with pytest.raises(fl.UsageError, match="^kernel = "):
        kernels_of(trace, kernel)
