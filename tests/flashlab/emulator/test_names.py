"""A file may define macros with short names before it includes a header, or the command may: `#define N 64`, `-D T=128`."""

from __future__ import annotations

import re
import string
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.emulator.build import compiler, run

FOLDER = kernels_cu.emulator_dir()
HIDDEN = re.findall(r"#undef (\w+)", (FOLDER / "emu_hide_names.h").read_text())
SHOWN = re.findall(r'pop_macro\("(\w+)"\)', (FOLDER / "emu_show_names.h").read_text())
OF_THE_RUNTIME = {
    path.name
    for path in FOLDER.glob("*.h")
    if path.name
    in ("counts.h", "faults.h", "fiber.h", "grid.h", "launch.h", "order.h", "report.h", "told.h", "watch.h")
    or path.name.startswith("emu_")
    or path.name == "keywords.h"
}
HEADERS = sorted(
    str(path.relative_to(FOLDER))
    for path in FOLDER.rglob("*")
    if path.is_file() and path.suffix != ".cpp" and path.name not in OF_THE_RUNTIME
)
PUBLIC = re.compile(
    r"(EMU|AT|ATOMIC|BLOCK|C10|CUDART|CUDA|CU|HUGE|CUDA_R|INFINITY|NAN|SIGVTALRM|GCC)(_|$)"
    r"|HUGE_VALF|(INFINITIES|A_|B_|A_COLUMNS|B_ROWS|IS_B|MBARRIER|MOST_DIMENSIONS|MOVES\d|NAMED_BARRIERS|SRAM_ORIGIN)$"
)
"""CUDA's, torch's and the emulator's own macros, and names that nobody defines."""


def test_all_letters_are_hidden_and_shown_again() -> None:
    assert set(string.ascii_letters) <= set(HIDDEN) and HIDDEN == SHOWN


def test_so_are_all_words_in_capitals_that_headers_have_beside_macros() -> None:
    found: set[str] = set()
    for name in HEADERS:
        text = re.sub(r'//[^\n]*|/\*.*?\*/|"(\\.|[^"\\])*"', "", (FOLDER / name).read_text(), flags=re.DOTALL)
        found |= set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
    assert not {name for name in found if not PUBLIC.match(name)} - set(HIDDEN)


def test_each_header_hides_them() -> None:
    """Or it includes headers, and says macros, without a name of its own."""
    for name in HEADERS:
        text = (FOLDER / name).read_text()
        if "emu_hide_names.h" not in text:
            code = re.sub(r"//[^\n]*|/\*.*?\*/|\\\n", "", text, flags=re.DOTALL).splitlines()
            assert not [line for line in code if line.strip() and not line.lstrip().startswith("#")], name
        else:
            assert text.rstrip().endswith('#include "emu_show_names.h"'), name


@pytest.mark.compiler
def test_a_file_defines_them_all_before_it_includes_anything(tmp_path: Path) -> None:
    file, output = tmp_path / "all.cu", tmp_path / "all.cpp"
    defined = "".join(f"#define {name} )(\n" for name in HIDDEN)
    still = "".join(f"#ifndef {name}\n#error {name}\n#endif\n" for name in HIDDEN)
    file.write_text(defined + "".join(f'#include "{name}"\n' for name in HEADERS) + still)
    common = [compiler()[0], "-std=c++20", f"-I{FOLDER}", "-x", "c++"]
    run([*common, "-DEMULATOR", "-D__CUDA_ARCH__=900", "-E", str(file), "-o", str(output)])
    output.write_text(f'#include "keywords.h"\n{output.read_text()}')
    run([*common, "-fsyntax-only", "-w", str(output)])


@pytest.mark.compiler
def test_the_command_defines_some(tmp_path: Path) -> None:
    file = tmp_path / "scale.cu"
    file.write_text(
        "#include <cooperative_groups.h>\n#include <cuda_fp16.h>\n"
        "__global__ void scale(float* x) { for (int i = 0; i < T; ++i) x[i * N + threadIdx.x] *= A + WIDTH; }\n"
    )
    run = fl.emulate_file(
        file,
        {"x": np.ones(128, np.float32)},
        grid=1,
        block=32,
        macros={"T": 4, "N": 32, "A": 3, "WIDTH": 2, "C": 1, "M": 8},
    )
    assert run.arrays["x"].tolist() == [5] * 128
