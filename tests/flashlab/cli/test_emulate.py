"""`flashlab emulate` and `counters --backend emulator`, as typed: tables, JSON, files, exit statuses, lines on stderr."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels_cu
from flashlab.base import cache
from flashlab.base.apart import Answer
from tests.flashlab.cli.typed import document, one_line, run
from tests.patches import patched

pytestmark = pytest.mark.compiler

KERNELS = """
// step: whole
__global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
__global__ void careless(const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  // step: copy
  y[i] = x[i];
}
__global__ void flags(bool* out, bool a, const int* nothing) { *out = a && !nothing; }
__global__ void put(int* out) { *out = VALUE; }
"""
ONE = ["--grid", 1, "--block", 1]


@pytest.fixture
def without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's kernel runs in this process: a child takes a second to begin."""

    def called(function: Callable[..., Any], *given: Any, seconds: float, memory: int, **named: Any) -> Answer:
        return Answer(function(*given, **named), "")

    monkeypatch.setattr("flashlab.emulator.apart.call_apart", called)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "mine.cu"
    path.write_text(
        KERNELS.replace("VALUE", "VALUE_OR_0")
        .replace("// step: whole\n", "")
        .replace("__global__ void put", "#ifndef VALUE_OR_0\n#define VALUE_OR_0 0\n#endif\n__global__ void put")
    )
    return str(path)


# An algorithm


def test_an_algorithm() -> None:
    text = run("emulate", "flash1", "--len-q", 40, "--head-dim", 16, "--tile", "16x32").stdout
    assert "row_max" in text and "SRAM ldsm" in text and "conflicts" in text
    assert "largest difference from naive attention in float64: 0.00" in text
    assert text.splitlines()[-1].startswith("passed: the numbers are right, and every byte is the formula's (")
    assert run("emulate", "flash1", "--len-q", 40, "--head-dim", 16, "--tile", "16x32", "--no-sanitize").exit_code == 0


def test_an_algorithm_as_json() -> None:
    found = document("emulate", "standard", "--len-q", 20, "--device", "a100", "--lse")
    assert set(found) == {
        "schema", "passed", "algorithm", "device", "problem", "tile", "launches", "unwritten", "differences", "max_error",
        "numbers",
    }  # fmt: skip
    assert found["passed"] and found["device"] == "a100-40" and found["problem"]["len_q"] == 20
    assert found["max_error"] < 2e-3 and found["unwritten"] == {} and found["differences"] == []
    launch = found["launches"][0]
    assert set(launch) == {
        "kernel",
        "moved",
        "findings",
        "dropped",
        "plain",
        "flops",
        "exp",
        "shuffles",
        "notes",
        "stopped",
        "unfinished",
    }
    row = launch["moved"][0]
    assert {
        "step",
        "tensor",
        "space",
        "op",
        "instructions",
        "bytes",
        "overlapped",
        "sectors",
        "wavefronts",
        "ideal",
        "what",
    } == set(row)
    assert (
        sum(row["bytes"] for row in launch["moved"] if row["what"] == "hbm.read" and row["tensor"] == "q")
        == 2 * 20 * 128
    )


def test_the_default_is_flash2() -> None:
    assert document("emulate", "--len-q", 40)["algorithm"] == "flash2"


def changed(tmp_path: Path, step: str, old: str, new: str) -> Path:
    path = tmp_path / "mine.cu"
    path.write_text(
        patched(kernels_cu.source("flash2").read_text(encoding="utf-8"), old, new, step=step), encoding="utf-8"
    )
    return path


SIZE = ["--len-q", 40, "--head-dim", 16]


def test_a_file_in_an_algorithms_place(tmp_path: Path) -> None:
    path = changed(tmp_path, "rescale", "rescale(o[i], alpha[i]);", "rescale<O_FRAGMENTS>(o[i], alpha[i]);")
    assert (
        "passed: the numbers are right, and every byte is the formula's"
        in run("emulate", path, "--as", "flash2", *SIZE).stdout
    )


def test_its_numbers_are_judged(tmp_path: Path) -> None:
    """Every byte moves as it should, and the result is wrong."""
    path = changed(tmp_path, "rescale", "rescale(o[i], alpha[i]);", "rescale(o[i], alpha[i]), rescale(o[i], alpha[i]);")
    text = run("emulate", path, "--as", "flash2", "--len-q", 200, "--head-dim", 16, code=1).stdout
    assert "wrong numbers: out at (batch, head, row) (0, " in text and text.splitlines()[-1] == "1 finding"
    said = document("emulate", path, "--as", "flash2", "--len-q", 200, "--head-dim", 16, code=1)
    assert not said["passed"] and said["numbers"].startswith("out at") and not said["differences"]


def test_its_misuse_has_status_1(tmp_path: Path) -> None:
    path = changed(tmp_path, "load_k", "copy_wait<0>(); … barrier();", "")
    text = run("emulate", path, "--as", "flash2", *SIZE, code=1).stdout
    assert "mine.cu:" in text and ": race: " in text and "findings" in text.splitlines()[-1]
    assert not document("emulate", path, "--as", "flash2", *SIZE, code=1)["passed"]


def test_its_bytes_are_held_to_the_formula(tmp_path: Path) -> None:
    path = changed(tmp_path, "load_q", "", "  (void)load_global<float>(q.data);\n")
    text = run("emulate", path, "--as", "flash2", *SIZE, code=1).stdout
    assert "flash2, step load_q, hbm.read of q: " in text and "bytes, the formula" in text


def test_its_endless_loop_is_ended(tmp_path: Path) -> None:
    path = changed(tmp_path, "load_q", "", "  for (volatile int i = 0;;) i = 0;\n")
    text = run("emulate", path, "--as", "flash2", *SIZE, "--time-limit", 0.3, code=2).stdout
    assert "mine.cu:" in text and "time limit: " in text and "is still running after 0.3 s" in text
    assert text.splitlines()[-1] == "1 finding"  # there are no numbers to judge


def test_an_algorithm_has_a_limit_where_one_is_said() -> None:
    text = run("emulate", "flash2", "--len-q", 4096, "--time-limit", 0.01, code=2).stdout
    assert "is still running after 0.01 s" in text


def test_what_cannot_stand_in(source: str) -> None:
    assert "algorithm = 'flsh2'" in one_line("emulate", source, "--as", "flsh2")
    assert "file = 'nowhere.cu'" in one_line("emulate", "nowhere.cu", "--as", "flash2")


# A file


def test_a_file(source: str) -> None:
    words = [
        "--grid",
        8,
        "--block",
        128,
        "--arg",
        "x=float32[1000]",
        "--arg",
        "y=float32[1000]:out",
        "--arg",
        "factor=2",
    ]
    text = run("emulate", source, "--kernel", "scale", *words, "--arg", "n=1000").stdout
    assert "HBM ld" in text and "4,000" in text and "host compiler" in text
    assert text.splitlines()[-1] == "passed: no misuse"


def test_a_file_as_json(source: str, tmp_path: Path) -> None:
    words = [
        "--kernel",
        "careless",
        "--arg",
        "x=float32[100]",
        "--arg",
        "y=float32[100]:out",
        "--grid",
        1,
        "--block",
        128,
    ]
    found = document("emulate", source, *words, code=1)
    assert set(found) == {"schema", "passed", "launch", "unwritten", "notes"} and found["notes"] == []
    assert not found["passed"]
    (finding,) = found["launch"]["findings"]
    assert finding["kind"] == "out of bounds" and finding["step"] == "copy" and finding["tensor"] == "x"
    assert finding["thread"] == [100, 0, 0] and finding["index"] == "[100]"
    assert finding["line"] == [source, KERNELS.count("\n", 0, KERNELS.index("y[i] = x[i]"))]
    assert finding["text"].startswith("mine.cu:") and "x[100] in HBM" in finding["text"]


@pytest.mark.usefixtures("without_child")
def test_one_finding_is_one(source: str) -> None:
    words = [
        "--kernel",
        "careless",
        "--arg",
        "x=float32[100]",
        "--arg",
        "y=float32[100]:out",
        "--grid",
        1,
        "--block",
        128,
    ]
    assert run("emulate", source, *words, code=1).stdout.splitlines()[-1] == "1 finding"


@pytest.mark.usefixtures("without_child")
def test_arguments_of_every_kind(source: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(8, dtype=np.float32))
    np.savez(tmp_path / "both.npz", x=np.ones(8, np.float32), other=np.zeros(3))
    for given, expected in (
        (tmp_path / "x.npy", np.arange(8)),
        (f"{tmp_path / 'both.npz'}:x", np.ones(8)),
        ("float32[8]:zeros", np.zeros(8)),
        ("float32[2x4]", np.random.default_rng(0).standard_normal((2, 4), np.float32).ravel()),
        ("float32[2, 4]:random", np.random.default_rng(0).standard_normal((2, 4), np.float32).ravel()),
    ):
        out = tmp_path / "out.npz"
        words = [
            "--arg",
            f"x={given}",
            "--arg",
            "y=float32[8]:out",
            "--arg",
            "factor=1e0",
            "--arg",
            "n=8",
            "--out",
            out,
        ]
        run("emulate", source, "--kernel", "scale", "--grid", 1, "--block", "8,1", *words)
        kept = np.load(out)
        assert set(kept) == {"x", "y"} and np.array_equal(kept["y"], expected)
    flags = ["--kernel", "flags", *ONE, "--arg", "out=bool[1]:out", "--out", tmp_path / "flags.npz"]
    for a, expected in (("true", True), ("false", False), ("1", True)):
        run("emulate", source, *flags, "--arg", f"a={a}", "--arg", "nothing=null")
        assert np.load(tmp_path / "flags.npz")["out"] == [expected]


@pytest.mark.usefixtures("without_child")
def test_random_integers_are_small(source: str, tmp_path: Path) -> None:
    words = ["--arg", "x=float32[8]", "--arg", "y=float32[8]:out", "--out", tmp_path / "out.npz"]
    run("emulate", source, "--kernel", "careless", "--grid", 1, "--block", 8, *words)
    ints = ["--kernel", "put", *ONE, "--arg", "out=int32[5]", "--out", tmp_path / "ints.npz", "-D", "VALUE_OR_0=-1"]
    run("emulate", source, *ints)
    kept = np.load(tmp_path / "ints.npz")["out"]
    assert kept[0] == -1 and np.all((kept[1:] >= 0) & (kept[1:] < 100))


@pytest.mark.usefixtures("without_child")
def test_macros(source: str, tmp_path: Path) -> None:
    words = ["--kernel", "put", *ONE, "--arg", "out=int32[1]:out", "--out", tmp_path / "out.npz"]
    for define, expected in (("VALUE_OR_0=7", 7), ("VALUE_OR_0", 1), ("VALUE_OR_0=2+3", 5)):
        run("emulate", source, *words, "--define", define)
        assert np.load(tmp_path / "out.npz")["out"] == [expected]


@pytest.mark.usefixtures("without_child")
def test_what_is_not_written_fails(source: str) -> None:
    words = ["--kernel", "put", *ONE, "--arg", "out=int32[3]:out"]
    text = run("emulate", source, *words, code=1).stdout
    assert text.splitlines()[-2:] == ["out: 8 bytes were never written", "1 finding"]


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--arg out=int32[1]:out --kernel putt", "did you mean put?"),
        ("--arg out=int32[1]:out", "kernel = None: expected the name of one of mine.cu's"),
        ("--kernel put", "expected also out"),
        ("--kernel put --arg out", "--arg = 'out': expected NAME=VALUE"),
        ("--kernel put --arg =3", "--arg = '=3'"),
        ("--kernel put --arg out=", "--arg out = ''"),
        ("--kernel put --arg out=int32[1] --arg out=int32[2]", "expected out once"),
        ("--kernel put --arg out=int33[1]", "--arg out = 'int33[1]': expected a number"),
        ("--kernel put --arg out=float[1]", "--arg out = 'float[1]': expected a number"),
        ("--kernel put --arg out=float32[1]", "out = 'array of float32': expected int32"),
        ("--kernel put --arg out=int32[a]", "--arg out = 'int32[a]'"),
        ("--kernel put --arg out=int32[,]", "--arg out = 'int32[,]'"),
        ("--kernel put --arg out=int32[1]:ones", "with :zeros, :full(VALUE) or :out behind it"),
        ("--kernel put --arg out=nowhere.npy", "--arg out = 'nowhere.npy': expected NumPy arrays in a file"),
        ("--kernel put --arg out=3", "out = 3: expected an array"),
        ("--kernel put --arg out=int32[1] --define 3X", "--define = '3X'"),
        ("--kernel put --arg out=int32[1] --define", "--define"),
        ("--kernel put --arg out=int32[1] --sram 1e9", "--sram"),
        ("--kernel put --arg out=int32[1] --sram 400000", "sram = 400000: expected at most 232,448"),
        ("--kernel put --arg out=int32[1] --grid many", "--grid = 'many'"),
        ("--kernel put --arg out=int32[1] --grid 0", "grid = "),
        ("--kernel put --arg out=int32[1] --out /nowhere/out.npz", "--out = '/nowhere/out.npz'"),
        ("--kernel put --arg out=int32[1] --causal", "--causal"),
        ("--kernel put --arg out=int32[1] --lse", "--lse"),
        ("--kernel put --arg out=int32[1] --tile 16x16", "--tile = '16x16': expected nothing: it is for an algorithm"),
        ("--kernel put --arg out=int32[1] --len-q 5", "--len-q = 5"),
        ("--kernel put --arg out=int32[1] --time-limit -1", "time_limit = -1.0"),
    ],
)
def test_bad_usage_is_one_line(source: str, words: str, line: str) -> None:
    assert line in one_line("emulate", source, *ONE, *words.split())


@pytest.mark.usefixtures("without_child")
def test_files_of_arrays_that_cannot_be_read(source: str, tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_text("text")
    (tmp_path / "bad.npz").write_text("text")
    np.save(tmp_path / "object.npy", np.array([object()]), allow_pickle=True)
    np.savez(tmp_path / "some.npz", a=np.zeros(1))
    for name, says in (
        ("bad.npy", "NumPy arrays"),
        ("bad.npz", "NumPy arrays"),
        ("object.npy", "NumPy arrays"),
        ("some.npz", "one of a"),
        ("some.npz:b", "one of a"),
    ):
        assert says in one_line("emulate", source, *ONE, "--kernel", "put", "--arg", f"out={tmp_path / name}")


def test_what_does_not_compile(tmp_path: Path) -> None:
    path = tmp_path / "typo.cu"
    path.write_text("__global__ void typo(int* x) {\n  *x = 1\n}\n")
    result = run("emulate", path, *ONE, "--arg", "x=int32[1]:out", code=2)
    assert result.stdout == "" and result.stderr.startswith(
        "flashlab: typo.cu doesn't compile at typo.cu:2, in typo:\n"
    )
    assert "\ntypo.cu:2:" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.usefixtures("without_child")
@pytest.mark.alike(1)
@pytest.mark.parametrize("name", ["put<1;>", "put<[]{return 1;}()>", "put<1>;put<2>"])
def test_a_name_with_a_semicolon_reaches_no_kernel(name: str, tmp_path: Path) -> None:
    path = tmp_path / "names.cu"
    path.write_text("template <int N> __global__ void put(int* x) { *x = N; }\n")
    said = one_line("emulate", path, *ONE, "--arg", "x=int32[1]:out", "--kernel", name)
    assert said == f"flashlab: names.cu doesn't compile: no kernel can be reached by that name: {name}\n"


# Counters


def test_counters() -> None:
    text = run("counters", "flash2", "--backend", "emulator", "--len-q", 40, "--head-dim", 16).stdout
    assert "hbm.read" in text
    found = document("counters", "flash2", "flash1", "--backend", "emulator", "--len-q", 40, "--device", "t4")
    assert found["passed"] and found["device"] == "t4" and found["errors"] == []
    assert found["summary"]["equal"] == found["summary"]["compared"] > 10
    assert "--save" in one_line("counters", "--backend", "emulator", "--save", "x")


# What is missing here


def start(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own: what it finds is kept while a process lives."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "flashlab", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(root), **environment}
    )


@pytest.mark.alike(2)
@pytest.mark.parametrize("command", ["emulate", "counters --backend emulator", "verify --backend emulator"])
def test_without_a_compiler_one_line_says_what_to_install(command: str, tmp_path: Path) -> None:
    done = start(*command.split(), PATH=str(tmp_path), CXX="", FLASHLAB_CACHE=str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert "no C++ compiler" in done.stderr and "apt install g++" in done.stderr and "xcode-select" in done.stderr


def test_an_old_compiler_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    """As g++ 4.8 says it, of any source."""
    script = """#!/bin/sh
if [ "$1" = --version ]; then echo "g++ (GCC) 4.8.5"; exit; fi
echo "g++: error: unrecognized command line option ‘-std=c++17’" >&2
exit 1
"""
    (tmp_path / "old").write_text(script)
    (tmp_path / "old").chmod(0o755)
    done = start("emulate", *SIZE, CXX=str(tmp_path / "old"), FLASHLAB_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    needs = "has no C++17, which the emulator needs: g++ 7 or newer, or CXX names another"
    assert done.stderr == f"flashlab: {tmp_path / 'old'} {needs}\n"


def test_without_binutils_too(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    assert compiler is not None
    (tmp_path / "g++").symlink_to(compiler)
    done = start("emulate", *SIZE, PATH=str(tmp_path), CXX="", FLASHLAB_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "no addr2line, c++filt, objcopy, readelf" in done.stderr and "binutils" in done.stderr


def test_a_cache_that_cannot_be_written_is_a_remark(tmp_path: Path) -> None:
    expected = start("emulate", *SIZE).stdout
    (tmp_path / "runtime").symlink_to(cache.folder() / "runtime")  # which takes seconds to build
    (tmp_path / "emulator").write_text("")
    done = start("emulate", *SIZE, FLASHLAB_CACHE=str(tmp_path))
    assert done.returncode == 0 and done.stdout == expected
    why = f"can't keep compiled kernels in {tmp_path} (File exists)"
    assert done.stderr == f"flashlab: {why}: set FLASHLAB_CACHE to a folder that can be written\n"


# A published file

PUBLISHED = """
#include "library.h"
__constant__ float factor[1];
__global__ void scale(const float* x, float* y) { y[threadIdx.x] = FACTOR * factor[0] * x[threadIdx.x]; }
int main() { scale<<<1, 8>>>(nullptr, nullptr); }
"""


def test_a_published_file(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "library.h").write_text("#define FACTOR 2\n")
    path, out = tmp_path / "published.cu", tmp_path / "out.npz"
    path.write_text(PUBLISHED)
    words = ["--arg", "x=float32[8]:full(3)", "--arg", "y=float32[8]:out", "--symbol", "factor=float32[1]:full(-inf)"]
    text = run("emulate", path, *words, "-I", tmp_path / "given", "--std", "c++20", "--out", out).stdout
    assert "grid 1, block 8: as launched at published.cu:5" in text and text.splitlines()[-1] == "passed: no misuse"
    kept = np.load(out)
    assert (kept["y"] == -np.inf).all() and (kept["x"] == 3).all() and kept["factor"] == [-np.inf]
    assert "--symbol factor = 'float32[1]:full()'" in one_line("emulate", path, "--symbol", "factor=float32[1]:full()")
    assert "--std = 'c++20'" in one_line("emulate", "flash2", "--std", "c++20")


@pytest.mark.usefixtures("without_child")
def test_a_file_without_symbols_says_so(tmp_path: Path) -> None:
    (tmp_path / "none.cu").write_text("__global__ void k() {}")
    assert one_line("emulate", tmp_path / "none.cu", *ONE, "--symbol", "z=1") == (
        "flashlab: symbol = 'z': expected none: the file has no __constant__ or __device__ variable\n"
    )


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    "text", ["float32[99999999999999]", "int8[100000,1000000000]:full(1)", "float32[10000000000000]:out"]
)
def test_an_array_that_memory_does_not_hold_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "none.cu").write_text("__global__ void k(float* x) {}")
    line = one_line("emulate", tmp_path / "none.cu", *ONE, "--arg", f"x={text}")
    assert line.startswith(f"flashlab: memory = --arg x, {text}, ") and "expected at most the " in line


def test_what_a_kernel_prints_stays_out_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "hello.cu").write_text('__global__ void k() { printf("hello\\n"); }')
    words = ["emulate", tmp_path / "hello.cu", *ONE]
    assert document(*words)["passed"]
    assert run(*words).stdout.startswith("hello\n") and run(*words, "--json").stderr == "hello\n"
