"""A published file for a compiler of CUDA: what its kernels reach stays under its own line numbers, and the host's code is gone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlab.emulator.build import parsed
from flashlab.emulator.reduced import Reduced, write
from simulator.errors import UsageError
from tests.flashlab.emulator.test_source import PUBLISHED
from tests.tiers import examples

pytestmark = pytest.mark.compiler

HOST = re.compile(r"torch::|cublas|\bmain\b|PYBIND11|\bHost\b")


def reduced(text: str, entry: str, folder: Path, **headers: str) -> Reduced:
    (folder / "repository" / ".git").mkdir(parents=True, exist_ok=True)
    for name, content in {"k.cu": text, **headers}.items():
        (folder / "repository" / name.replace("_h", ".h")).write_text(content, encoding="utf-8")
    return write(parsed(folder / "repository" / "k.cu", [entry]), [entry], folder / "reduced")


def lines(made: Reduced) -> list[str]:
    """The lines of the file itself: those behind the head, before the pointers."""
    head, _, rest = made.path.read_text(encoding="utf-8").partition('\n#line 1 "k.cu"\n')
    assert "\n" not in head
    return rest.partition('\n#line 1 "pointers"')[0].split("\n")


@pytest.mark.parametrize(
    ("entry", "stays", "goes"),
    [
        (
            "space::scale",
            ("counter", "weights", "struct Params", "p.twice()", "__global__ void scale"),
            ("filled", "MAKE(added"),
        ),
        ("filled<N>", ("__global__ void filled", "#define N 64"), ("void scale", "counter")),
        ("taken", ("MAKE(taken, -)", "#define MAKE"), ("MAKE(added", "counter")),
    ],
)
def test_what_a_kernel_reaches_stays_where_it_was(
    entry: str, stays: tuple[str, ...], goes: tuple[str, ...], tmp_path: Path
) -> None:
    published, found = PUBLISHED.removeprefix("\ufeff").split("\n"), lines(reduced(PUBLISHED, entry, tmp_path))
    assert len(found) == len(published)
    for word in stays:
        here = [i for i, line in enumerate(found) if word in line]
        assert here and all(word in published[i] for i in here), word
    text = "\n".join(line for line in found if not line.startswith(("#include", "using")))
    assert not [word for word in goes if word in text]
    assert not HOST.search(text)


@pytest.mark.alike(1)
@pytest.mark.nvcc
@pytest.mark.parametrize("entry", ["space::scale", "filled<N>", "taken"])
def test_a_compiler_of_cuda_takes_it(entry: str, tmp_path: Path) -> None:
    made = reduced(PUBLISHED, entry, tmp_path)
    command = ["nvcc", "-cubin", "-arch=sm_90", "-Xptxas=-v", *made.options, "-o", str(tmp_path / "k.cubin")]
    done = subprocess.run([*command, str(made.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (compiled,) = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
    assert entry.partition("<")[0].rpartition(":")[2] in compiled
    whole = subprocess.run(
        [*command, str(tmp_path / "repository" / "k.cu")], capture_output=True, text=True, check=False
    )
    assert whole.returncode, "the file as it is needs what isn't here, or this test shows nothing"


HEADER = """\
#pragma once
#include <nowhere/host.h>
#define TWICE(x) (2 * (x))
inline void report(nowhere::Error e) {
  #ifdef LOUD
  e.shout();
  #endif
}; __device__ inline float bias() { return 1; } /* and
   a comment */ struct Other { nowhere::Error e; };
"""
TERSE = """\
#include "near.h"
namespace a { void host() { nowhere::call(); } namespace { __global__ void k(float* x) { // says "why
  x[0] = TWICE(bias()); } } void more() { host(); } }
"""


def test_lines_that_both_have_a_part_of_keep_the_words_of_what_stays(tmp_path: Path) -> None:
    made = reduced(TERSE, "k", tmp_path, near_h=HEADER)
    text = "\n".join(lines(made))
    assert "nowhere" not in text and "host" not in text and "more" not in text
    assert "bias" in text.split("\n")[2]
    header = (made.path.parent / "near.h").read_text(encoding="utf-8").split("\n")
    assert header[0] == "#pragma once" and header[4].strip() == "#ifdef LOUD" and header[6].strip() == "#endif"
    assert "bias" in header[7] and "Error" not in "".join(header)
    folders = [option.partition(",")[2] for option in made.options if "idirafter" in option]
    assert any((Path(folder) / "nowhere" / "host.h").is_file() for folder in folders)


def test_an_unknown_kernel_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kernel = 'nothing'"):
        reduced(PUBLISHED, "nothing", tmp_path)


@st.composite
def files(draw: st.DrawFn) -> tuple[str, set[int]]:
    """A file of device and host functions, on lines of their own or not, and the numbers of those that its kernel reaches."""
    n = draw(st.integers(1, 6))
    host = [draw(st.booleans()) for _ in range(n)]
    calls = [draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set[int]() for i in range(n)]
    breaks = st.sampled_from(["\n", " ", "\n// a brace: {\n", " /* }\n */ ", "\n#if 0\n}\n#endif\n", "\n#define M\n"])
    text, device = "", [i for i in range(n) if not host[i]]
    for i in range(n):
        inside = "".join(f"f{j}(); " for j in calls[i] if host[i] or not host[j])
        opened = draw(st.sampled_from(["", "namespace { "]))
        text += (
            f"{opened}{'' if host[i] else '__device__ '}void f{i}() {{ {inside}}}{' }' * bool(opened)}{draw(breaks)}"
        )
    first = draw(st.sets(st.sampled_from(device))) if device else set[int]()
    text += f"__global__ void k() {{ {''.join(f'f{j}(); ' for j in first)}}}"
    reached, left = set[int](), list(first)
    while left:
        i = left.pop()
        if i not in reached:
            reached.add(i)
            left += [j for j in calls[i] if not host[j]]
    return text, reached


@examples(12)
@given(made=files())
def test_exactly_what_is_reached_is_defined_and_on_its_line(
    made: tuple[str, set[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text, reached = made
    found = lines(reduced(text, "k", tmp_path_factory.mktemp("reduced")))
    defined = re.compile(r"void\s+f(\d)\s*\(")
    assert {int(m[1]) for line in found for m in defined.finditer(line)} == reached
    for line, published in zip(found, text.split("\n"), strict=True):
        assert set(re.findall(r"\w+", line)) <= set(re.findall(r"\w+", published))
    assert "".join(found).count("{") == "".join(found).count("}")


def test_what_launch_bounds_name_stays(tmp_path: Path) -> None:
    text = "constexpr int T = 64;\nconstexpr int U = 1;\n__global__ void __launch_bounds__(T) k() {}\n"
    assert lines(reduced(text, "k", tmp_path)) == text.replace("constexpr int U = 1;", "").split("\n")
