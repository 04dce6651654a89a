"""Whatever a kernel does, the emulator names it and its line, and lives on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import BuildError
from simulator.errors import UsageError

pytestmark = pytest.mark.compiler

FILE = Path(__file__).parent / "cuda" / "misuse.cu"


def _cases() -> list[tuple[str, str, int | None]]:
    """Kernel, kind of finding and line, as the source says; a finding may be in a function before its kernel."""
    found: list[tuple[str, str, int | None]] = []
    waiting: tuple[str, int | None] | None = None
    kernel = ""
    for number, line in enumerate(FILE.read_text().splitlines(), 1):
        if match := re.search(r"__(global|device)__ \w+ (\w+)\(", line):
            kernel = match[2] if match[1] == "global" else ""
        if match := re.search(r"// wrong: ([\w ]+)(, nowhere)?$", line):
            waiting = match[1], None if match[2] else number
        if kernel and waiting:
            found.append((kernel, *waiting))
            waiting = None
    return found


CASES = _cases()


def arguments() -> dict[str, object]:
    return {"a": np.zeros(64, np.int32), "n": 0}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_named_with_its_line(case: tuple[str, str, int | None]) -> None:
    kernel, kind, line = case
    ran = fl.emulate_file(FILE, arguments(), kernel=kernel, grid=1, block=64, sram=256, time_limit=1)
    assert (kind, line) in [(x.kind, x.at and x.at.number) for x in ran.launched.findings], ran.complaints()
    assert not ran.passed


@pytest.mark.parametrize("kernel", [kernel for kernel, kind, _ in CASES if kind not in ("deadlock", "time limit")])
def test_without_sanitisers_nothing_crashes_either(kernel: str) -> None:
    fl.emulate_file(FILE, arguments(), kernel=kernel, grid=1, block=64, sram=256, time_limit=1, sanitize=False)


def test_after_a_fault_the_next_launch_is_sound() -> None:
    for _ in range(3):
        fl.emulate_file(FILE, arguments(), kernel="recursion", grid=4, block=256, time_limit=10)
        ran = fl.emulate_file(FILE, {**arguments(), "n": 1}, kernel="divides", grid=1, block=64)
        assert ran.passed
        assert (ran.arrays["a"] == 7).all()


def source(folder: Path, text: str) -> Path:
    path = folder / "mine (1).cu"
    path.write_text(text)
    return path


def test_ptx_that_is_not_known_is_told_by_the_thread_that_comes_there(tmp_path: Path) -> None:
    text = '// asm\n__global__ void k(int n) {\n  if (n) asm volatile("no.such.instruction %0;" :: "r"(1));\n}'
    assert fl.emulate_file(source(tmp_path, text), {"n": 0}, grid=1, block=32).passed
    (finding,) = fl.emulate_file(source(tmp_path, text), {"n": 1}, grid=1, block=1).launched.findings
    assert str(finding.line) == "mine (1).cu:3" and "PTX" in str(finding) and "no.such.instruction" in str(finding)


def test_strings_and_hidden_code_may_have_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
    __global__ void k() {
      if (threadIdx.x == 33) printf("asm %d <<<>>> int main(\\n", blockIdx.x);
    #ifndef EMULATOR
      asm volatile("");
    #endif
    }"""
    ran = fl.emulate_file(source(tmp_path, text), {}, grid=2, block=64, workers=1)
    assert ran.passed
    assert capfd.readouterr().out == "asm 0 <<<>>> int main(\nasm 1 <<<>>> int main(\n"


def test_the_compilers_log_is_about_the_source(tmp_path: Path) -> None:
    (tmp_path / "types.cuh").write_text("struct Mine { int x; };\n")  # and not the project's header of that name
    text = '#include "types.cuh"\n__global__ void k(Mine* m) {\n  m->y = 3;\n}'
    with pytest.raises(BuildError) as caught:
        fl.emulate_file(source(tmp_path, text), {"m": np.zeros(1, np.int32)}, grid=1, block=1)
    log = str(caught.value)
    assert "mine (1).cu:3:6: error:" in log
    assert str(tmp_path) not in log
    assert "kernel.cpp" not in log


def test_a_changed_header_is_seen(tmp_path: Path) -> None:
    path = source(tmp_path, '#include "value.h"\n__global__ void k(int* a) { a[threadIdx.x] = VALUE; }')
    for value in (3, 4):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        ran = fl.emulate_file(path, {"a": fl.Empty((32,), "int32")}, grid=1, block=32)
        assert (ran.arrays["a"] == value).all()


def test_too_much_static_shared_memory(tmp_path: Path) -> None:
    text = "__global__ void k(int* a) { __shared__ int s[12289]; s[threadIdx.x] = 1; a[0] = s[0]; }"
    with pytest.raises(UsageError, match="49,156 bytes"):
        fl.emulate_file(source(tmp_path, text), {"a": np.zeros(1, np.int32)}, grid=1, block=1)


def test_an_instance_that_is_none(tmp_path: Path) -> None:
    path = source(tmp_path, "template <class T> __global__ void k(T* a) {}")
    with pytest.raises(BuildError, match="Nothing"):
        fl.emulate_file(path, {"a": np.zeros(1)}, kernel="k<Nothing>", grid=1, block=1)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_launch_that_was_stopped_is_not_judged_for_what_it_left(tmp_path: Path, workers: int) -> None:
    """How far the other blocks had come is an accident: what they left unwritten is nobody's mistake."""
    text = "__global__ void k(const float* x, float* y) { int i = blockIdx.x * 32 + threadIdx.x; y[i] = x[i]; }"
    x = np.zeros(40, np.float32)
    ran = fl.emulate_file(source(tmp_path, text), {"x": x, "y": fl.Empty((256,))}, grid=8, block=32, workers=workers)
    assert ran.launched.stopped and not ran.passed and ran.unwritten == {}
    assert all("out of bounds" in line for line in ran.complaints())
    ran = fl.emulate_file(source(tmp_path, text), {"x": x, "y": fl.Empty((256,))}, grid=1, block=32, workers=workers)
    assert not ran.launched.stopped and ran.unwritten == {"y": 4 * 224}
