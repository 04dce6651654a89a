"""Defects of published kernels on a GPU: all but the GPU, with stand-ins for CuPy and compute-sanitizer; and one on a GPU."""

from __future__ import annotations

import ctypes
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlab.emulator import BuildError, Empty
from flashlab.measure import found, found_answers, found_child, found_gpu, results, sanitizers
from flashlab.measure.corpus_defects import DEFECTS, NUMBERS, Defect
from flashlab.measure.found_gpu import Job, prepared
from flashlab.measure.sanitizers import TOOLS
from simulator.errors import Unavailable, UsageError

SOURCE = """\
#include <nowhere/host.h>
__global__ void race(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[63 - threadIdx.x];
}
template <int N> __global__ void overrun(const int* from, float* y, float value) {
  y[threadIdx.x + N] = value + from[threadIdx.x];
}
nowhere::Handle handle;
"""
RACE = Defect("us/toy", "k.cu", "race", "Too early", (4, 5), "It is.", "A barrier.", ("x=float32[64]",), (1,), (64,))
ARGUMENTS = ("from=int32[64]", "y=float32[64]:out", "value=0.5")
OVERRUN = Defect("us/toy", "k.cu", "overrun<64>", "Too far", (8,), "It is.", "None.", ARGUMENTS, (1,), (64,))
SAYS = {
    "memcheck": """\
========= Invalid __global__ write of size 4 bytes
=========     at void overrun<(int)64>(const int *, float *, float)+0x90 in k.cu:8
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: 64 errors""",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "========= ERROR SUMMARY: 0 errors",
    "synccheck": "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "us__toy"
    folder.mkdir()
    (folder / "k.cu").write_text(SOURCE, encoding="utf-8")
    return folder


def folder_of(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


@pytest.mark.compiler
@pytest.mark.nvcc
def test_a_job_holds_the_kernel_and_the_arguments_of_the_emulator(checkout: Path, tmp_path: Path) -> None:
    job = prepared(OVERRUN, checkout, folder_of(tmp_path, "job"), 90)
    said = json.loads((job.folder / "job.json").read_text(encoding="utf-8"))
    assert "overrun" in said["entry"] and (job.folder / "kernel.cubin").read_bytes().startswith(b"\x7fELF")
    assert said["arrays"] == {"from": 256, "y": 256}
    assert said["arguments"] == [{"array": "from"}, {"array": "y"}, {"bytes": np.float32(0.5).tobytes().hex()}]
    with np.load(job.folder / "written.npz") as written:  # what the kernel is to fill, nobody has written
        assert written.files == ["from"] and written["from"].view("i4").max() > 0
    assert job.outputs == ("y",) and 0 < job.registers < 256


def test_a_kernel_that_nvcc_refuses_is_one_line(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        found_gpu.shutil, "which", lambda _: str(program(tmp_path / "nvcc", "echo 'k.cu(3): error: no' >&2; exit 1"))
    )
    monkeypatch.setattr(found_gpu, "parsed", lambda *_, **__: None)
    monkeypatch.setattr(found_gpu, "write", lambda *_: SimpleNamespace(path=checkout / "k.cu", options=()))
    with pytest.raises(BuildError, match=r"^race of k.cu doesn't compile: k.cu\(3\): error: no$"):
        found_gpu._compiled(RACE, checkout / "k.cu", tmp_path, 90)
    monkeypatch.setattr(found_gpu.shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match="nvcc is not on the PATH"):
        found_gpu._compiled(RACE, checkout / "k.cu", tmp_path, 90)


def program(path: Path, shell: str) -> Path:
    path.write_text(f"#!/bin/sh\n{shell}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Memory:
    """GPU memory, as CuPy hands it out."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.ptr = self.bytes.ctypes.data

    def copy_from_host(self, source: int, size: int) -> None:
        ctypes.memmove(self.ptr, source, size)

    def copy_to_host(self, target: int, size: int) -> None:
        ctypes.memmove(target, self.ptr, size)


def stand_in(kernel: Callable[..., None], log: list[Any]) -> Any:
    """CuPy with one kernel, which logs how it is launched."""

    def launch(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        log.append((grid, block, shared_mem, launch.max_dynamic_shared_size_bytes))
        kernel(*arguments)

    launch.max_dynamic_shared_size_bytes = 48 * 1024
    runtime = SimpleNamespace(deviceSynchronize=lambda: log.append("waited"))
    cuda = SimpleNamespace(set_allocator=lambda x: log.append(x), alloc=Memory, runtime=runtime)
    module = SimpleNamespace(get_function=lambda name: log.append(name) or launch)
    return SimpleNamespace(cuda=cuda, RawModule=lambda path: log.append(Path(path).name) or module)


@pytest.mark.parametrize("changes", [False, True])
def test_every_launch_has_the_same_arrays_and_what_differs_is_counted(
    changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values, calls = np.arange(4, dtype=np.float32), 0

    def kernel(x: np.uintp, y: np.uintp, add: np.uint32) -> None:
        nonlocal calls
        mine = (ctypes.c_float * 4).from_address(int(x))
        out = (ctypes.c_float * 4).from_address(int(y))
        number = add.view(np.float32) + changes * (calls // 2)
        calls += 1
        for i in range(4):
            mine[i] += 1  # of what was copied anew
            out[i] = mine[i] + number

    job = {
        "entry": "_Zk", "grid": [2, 1], "block": [4], "sram": 50_000, "arrays": {"x": 16, "y": 16},
        "arguments": [{"array": "x"}, {"array": "y"}, {"bytes": np.float32(0.5).tobytes().hex()}],
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    np.savez(tmp_path / "written.npz", x=values.view(np.uint8))
    log: list[Any] = []
    cupy = stand_in(kernel, log)
    monkeypatch.setattr(found_child, "cupy", lambda: cupy)
    found_child.main(tmp_path, folder_of(tmp_path, "out"), 4)
    assert log[:4] == [None, "kernel.cubin", "_Zk", ((2, 1), (4,), 50_000, 50_000)] and log.count("waited") == 4
    assert json.loads((tmp_path / "out" / "distinct.json").read_text(encoding="utf-8")) == 1 + changes
    with np.load(tmp_path / "out" / "kept.npz") as kept:
        assert kept.files == ["0/x", "0/y", "1/x", "1/y"][: 2 + 2 * changes]
        assert np.array_equal(kept["0/y"].view(np.float32), values + 1.5)
        assert np.array_equal(kept[kept.files[-1]].view(np.float32), values + 1.5 + changes)
    assert "launched 4 times" in capsys.readouterr().out


SANITIZER = """\
import subprocess, sys
says = {says!r}
print("========= COMPUTE-SANITIZER")
done = subprocess.run(sys.argv[sys.argv.index("--end") + 1 :])
print(says[sys.argv[sys.argv.index("--tool") + 1]])
"""
CHILD = """\
import json, sys
from pathlib import Path
import numpy as np
folder, out, launches = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
np.savez(out / "kept.npz", **{{f"{{i}}/y": np.full(64, x, np.float32).view(np.uint8) for i, x in enumerate({values})}})
(out / "distinct.json").write_text("30")
print("launched", launches, "times")
"""


@pytest.fixture
def machine(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU, as far as `found_gpu` looks, and a record of the toy on the emulator."""
    tool = tmp_path / "sanitizer.py"
    tool.write_text(SANITIZER.format(says=SAYS), encoding="utf-8")
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(values="[np.nan]"), encoding="utf-8")
    shell = program(tmp_path / "compute-sanitizer", f'exec {sys.executable} {tool} "$@"')

    def command(job: Job, out: str, launches: int) -> list[str]:
        return ["--end"] * (out != "plain") + [
            sys.executable,
            str(child),
            str(job.folder),
            str(folder_of(job.folder, out)),
            str(launches),
        ]

    monkeypatch.setattr(sanitizers, "program", lambda: str(shell))
    monkeypatch.setattr(found_gpu, "current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    monkeypatch.setattr(Job, "command", command)
    monkeypatch.setattr(found, "DEFECTS", (OVERRUN,))
    monkeypatch.setattr(found, "NUMBERS", ())
    monkeypatch.chdir(tmp_path)
    row = found.Row(
        repository="us/toy", file="k.cu", commit="c" * 40, blob=found.blob_of(checkout / "k.cu"), kernel=OVERRUN.kernel,
        findings=["k.cu:8: out of bounds: far"], lines=[8], nans=0, error=None,
    )  # fmt: skip
    results.save(found.KIND, [], {"rows": [row.model_dump()]}, subject="kernels")
    return checkout


@pytest.mark.compiler
@pytest.mark.nvcc
def test_the_record_says_what_each_tool_saw(machine: Path) -> None:
    data = found_gpu.measured([machine], 2, 60)
    (row,) = data.rows
    assert (row.repository, row.commit, row.kernel) == ("us/toy", "c" * 40, "overrun<64>")
    assert [each.tool for each in row.tools] == list(TOOLS)
    by_tool = {each.tool: each for each in row.tools}
    memcheck = by_tool["memcheck"]
    assert (memcheck.findings, memcheck.kernel, memcheck.lines, memcheck.takes_part) == (64, True, [8], True)
    assert memcheck.first == "Invalid __global__ write of size 4 bytes"
    for quiet in ("racecheck", "initcheck"):
        assert (by_tool[quiet].findings, by_tool[quiet].kernel, by_tool[quiet].takes_part) == (0, False, False)
    assert by_tool["synccheck"].findings is None, "without its summary it didn't come to its end"
    assert (row.plain.distinct, row.plain.nans, row.plain.error) == (30, 64, None), "nobody knows what the toy computes"
    assert "names at a line that takes part: memcheck 1, racecheck 0" in found_gpu.headline(data)
    assert "| 64, at its lines | – | – | no end | 30 results, 64 NaN |" in found_gpu.table(data)


@pytest.mark.parametrize(("values", "far", "nans"), [("[2, 3.5, 1.25]", 1.5, 0), ("[2, np.nan]", np.inf, 64)])
def test_the_farthest_result_is_held_to_numpy(
    values: str, far: float, nans: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is one that is known to sum."""
    defect = replace(RACE, kernel="sum_v4_kernel<1>")
    job = Job(defect, tmp_path, 8, {"input": np.full((64, 4), 0.5, np.float32), "y": Empty((64,))}, ("y",))
    monkeypatch.setitem(found_answers._ANSWERS, "sum_v4_kernel", lambda given: {"y": given["input"].sum(-1)})
    words = [
        sys.executable,
        "-c",
        CHILD.format(values=values),
        str(tmp_path),
        str(folder_of(tmp_path, "plain")),
        "1000",
    ]
    monkeypatch.setattr(Job, "command", lambda *_: words)
    plain = found_gpu.run(job, 60)
    assert (plain.distinct, plain.error, plain.nans, plain.said) == (30, far, nans, "")


def test_a_tool_that_hangs_and_a_launch_that_fails_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(RACE, tmp_path, 8, {}, ())
    monkeypatch.setattr(Job, "command", lambda *_: ["sh", "-c", "echo 'an illegal access'; exit 1"])
    assert found_gpu.run(job, 60).said == "an illegal access"
    monkeypatch.setattr(Job, "command", lambda *_: ["sleep", "60"])
    assert found_gpu.run(job, 0.2).said == "not done within 0 s"
    hanging = program(tmp_path / "tool", "sleep 60")
    hung = found_gpu.seen(job, "synccheck", str(hanging), 0.2)
    assert (hung.findings, hung.first, found_gpu.said(hung)) == (None, "not done within 0 s", "no end")


def test_another_file_than_the_one_on_record_is_refused(machine: Path) -> None:
    (machine / "k.cu").write_text(SOURCE + "// changed\n", encoding="utf-8")
    with pytest.raises(
        UsageError, match=f"checkout = '.*us__toy': expected commit {'c' * 40} of us/toy: k.cu is another"
    ):
        found_gpu.measured([machine], 1, 1)


def test_folders_of_nothing_known_are_refused(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "flashlab.measure.found_gpu", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"checkouts = '{tmp_path}': expected folders of karpathy/llm.c, ")
    assert len(done.stderr.splitlines()) == 1


def test_racecheck_is_asked_for_all_and_the_others_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, asked = Job(RACE, tmp_path, 8, {}, ()), dict[str, str]()

    def limited(command: list[str], _: float) -> sanitizers.Ran:
        asked[command[2]] = " ".join(command[3:])
        return sanitizers.Ran("", False, 0)

    monkeypatch.setattr(sanitizers, "limited", limited)
    for tool in TOOLS:
        found_gpu.seen(job, tool, "compute-sanitizer", 1)
    assert asked["racecheck"].startswith("--racecheck-report all ")
    assert "--report-api-errors no" in asked["memcheck"]
    assert all(words.endswith(f"found_child {tmp_path} {tmp_path / tool} 1") for tool, words in asked.items())


@pytest.mark.parametrize("defect", [*DEFECTS, *NUMBERS], ids=lambda defect: defect.kernel)
def test_every_defect_has_an_answer_in_the_shapes_of_its_arrays(defect: Defect) -> None:
    given = found_gpu.values("--arg", defect.arguments)
    answer = found_answers._ANSWERS[defect.kernel.partition("<")[0]](given)
    assert answer and {name: x.shape for name, x in answer.items()} == {name: given[name].shape for name in answer}
    assert found_answers.error(defect, given, answer) == pytest.approx(0, abs=1e-2)  # in float16 beside float64
    assert found_answers.error(defect, given, {name: x + np.nan for name, x in answer.items()}) == np.inf


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("defect", "tool", "quiet"),
    [(RACE, "racecheck", "memcheck"), (OVERRUN, "memcheck", "racecheck")],
    ids=["race", "overrun"],
)
def test_on_a_gpu_a_tool_names_the_line(defect: Defect, tool: str, quiet: str, checkout: Path, tmp_path: Path) -> None:
    try:
        path = sanitizers.program()
    except Unavailable as reason:
        pytest.skip(str(reason))
    major, minor = found_gpu.current_device().compute_capability
    job = prepared(defect, checkout, folder_of(tmp_path, "job"), 10 * major + minor)
    saw = found_gpu.seen(job, tool, path, 120)
    assert saw.findings and saw.kernel and saw.takes_part, saw
    assert found_gpu.seen(job, quiet, path, 120).findings == 0
    plain = found_gpu.run(job, 120)
    assert plain.distinct is not None, plain.said
