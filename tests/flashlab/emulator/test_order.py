"""Fences, flags, locks and counters order threads. Without one of its fences each pattern is a race; harmless races are notes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import Arena, Finding, Launched, Library, build

pytestmark = pytest.mark.compiler

FILE = Path(__file__).parent / "cuda" / "order.cu"
TEXT = FILE.read_text()
KERNELS = {
    match[1]: match[0] for match in re.finditer(r"^__global__ void (\w+)\(.*?^}$", TEXT, re.MULTILINE | re.DOTALL)
}
FENCES = [(name, int(n)) for name, body in KERNELS.items() for n in re.findall(r"without != (\d)", body)]
NOTES = ("same_value", "swapped")


@cache
def library() -> Library:
    return build(FILE, entries=tuple(KERNELS))


def run(
    kernel: str,
    *,
    without: int = 0,
    blocks: int = 8,
    threads: int = 64,
    workers: int | None = None,
    time_limit: float = 20,
) -> Launched:
    arena = Arena()
    x = np.arange(1024, dtype=np.float32)
    for name, values in {"x": x, "y": np.zeros_like(x), "state": np.zeros(1024, np.int32)}.items():
        arena.put(name, values)
    arguments = [np.uint64(arena.pointer(name)).tobytes() for name in "x y state".split()]
    return library().launch(
        kernel,
        (blocks,),
        (threads,),
        [*arguments, np.int32(without).tobytes()],
        arena,
        workers=workers,
        time_limit=time_limit,
    )


def marked(kernel: str, mark: str) -> set[int]:
    """The lines of a kernel that end in a mark."""
    first = TEXT[: TEXT.index(KERNELS[kernel])].count("\n") + 1
    return {first + i for i, line in enumerate(KERNELS[kernel].splitlines()) if line.endswith(f"// {mark}")}


def lines(findings: tuple[Finding, ...]) -> set[int]:
    return {x.at.number for x in findings if x.at is not None}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in NOTES])
def test_a_pattern_with_its_fences_is_no_race(kernel: str, workers: int) -> None:
    ran = run(kernel, workers=workers)
    assert (ran.findings, ran.notes) == ((), ())


@pytest.mark.parametrize(("kernel", "without"), FENCES)
def test_without_a_fence_it_is_one(kernel: str, without: int) -> None:
    races = [x for x in run(kernel, without=without).findings if x.kind in ("race", "race between blocks")]
    assert marked(kernel, "race") & lines(tuple(races)), races


def test_there_are_many_fences() -> None:
    assert len(FENCES) == 13


@pytest.mark.parametrize(("kernel", "kind"), [("same_value", "same value"), ("swapped", "checked guess")])
def test_what_is_harmless_is_a_note(kernel: str, kind: str) -> None:
    ran = run(kernel, workers=1)
    assert ran.findings == ()
    assert {x.kind for x in ran.notes} == {kind} and marked(kernel, "note") <= lines(ran.notes) | {
        x.other_at.number for x in ran.notes if x.other_at
    }
    ran = run(kernel, without=1, workers=1)
    assert {x.kind for x in ran.findings} <= {"race", "race between blocks"}
    assert marked(kernel, "race") & lines(ran.findings)


@pytest.mark.long
def test_more_blocks_than_can_be_resident_are_said() -> None:
    """Each waits for the one behind it: that ends only if all are resident."""
    assert run("chain_from_the_end", blocks=200, workers=1).findings == ()
    found = run("chain_from_the_end", blocks=40, threads=1024, workers=1, time_limit=5).findings
    # one at each line where threads happen to be when the time is up
    assert found and all(each.kind == "deadlock" and "at a time is the most" in each.message for each in found)


def test_notes_are_shown_and_no_misuse(tmp_path: Path) -> None:
    path = tmp_path / "flag.cu"
    path.write_text("__global__ void flag(int* a) { a[0] = 7; }")
    done = fl.emulate_file(path, {"a": np.zeros(1, "i4")}, grid=1, block=32)
    assert done.passed and not done.complaints()
    (note,) = done.to_dict()["launch"]["notes"]
    assert note["kind"] == "same value" and "note: flag.cu:1: same value: " in repr(done)


def test_copies_of_structs_are_compared_when_they_have_happened(tmp_path: Path) -> None:
    """The compiler announces the store of `y[0] = x[i]` before the load, and a large one in pieces."""
    path = tmp_path / "copies.cu"
    path.write_text(
        "struct Large { float a[12]; };\n"
        "__global__ void copies(const float4* x, float4* y, const Large* u, Large* v, const int* at) {\n"
        "  y[0] = x[at[threadIdx.x]];\n"
        "  v[0] = u[at[threadIdx.x]];\n"
        "}\n"
    )

    def run_with(at: np.ndarray[Any, Any]) -> fl.FileRun:
        x, u = (np.arange(32 * n, dtype="f4").reshape(32, n) for n in (4, 12))
        given = {"x": x, "y": fl.Empty((4,)), "u": u, "v": fl.Empty((12,)), "at": at.astype("i4")}
        return fl.emulate_file(path, given, grid=1, block=32)

    same = run_with(np.full(32, 3))
    assert same.passed and lines(same.launched.notes) == {3, 4}
    assert lines(run_with(np.arange(32)).launched.findings) == {3, 4}
