"""The translation of asm statements: what it reads, what it refuses, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator.ptx import PtxError, translated


def test_a_statement_stays_one() -> None:
    cpp = translated(
        'asm volatile("add.u32 %0,\\n\\t%1, %2;" :\n "=r"(x) // the sum\n : "r"(a ? b : c), "r"(f(1, 2)));'
    )
    assert "\n" not in cpp
    assert cpp.startswith("do {")
    assert cpp.endswith("while (0);")
    assert "(a ? b : c)" in cpp
    assert "(f(1, 2))" in cpp
    assert not translated('asm("bar.sync 0;")').endswith(";")  # as the statement had it


def test_nothing_stays_nothing() -> None:
    # the registers of a product that still runs mustn't be touched by a fence for the compiler
    assert translated('asm volatile("" : "+f"(c[0]), "+f"(c[1]) :: "memory");') == "do {} while (0);"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ('asm("frob.b32 %0, 1;" : "=r"(x));', "frob.b32"),
        ('asm("add.cc.u32 %0, %0, 1;" : "+r"(x));', "add.cc.u32 (carries)"),
        (
            'asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0}, {%0}, {%0}, {%0};" : "+f"(x));',
            "1 + 1 + 1 + 1",
        ),
        ('asm("tcgen05.wait::ld.sync.aligned;");', "tcgen05.wait::ld"),
        ('asm("add.u32 %0, %1, 1;" : "=r"(x));', "%1 of a statement with 1 operands"),
        ('asm("add.u32 %0, y, 1;" : "=r"(x));', "register y"),
        ('asm("bra NOWHERE;");', "NOWHERE"),
        ('asm("ld.global.v4.b32 {%0, %0}, [%1];" : "=r"(x) : "l"(p));', "ld.global.v4.b32"),
        ('asm("{ bar.sync 0;");', "{"),
        ('asm(NAME " %0, 1;" : "=r"(x));', "strings"),
        ('asm("mov.u32 %0, 1;" : "=m"(x));', '"=m"'),
    ],
)
def test_what_isnt_known_is_named(statement: str, said: str) -> None:
    with pytest.raises(PtxError) as caught:
        translated(statement)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_preprocessors_marks_are_no_part_of_it() -> None:
    statement = 'asm volatile("bar.sync 0;"\n# 12 "f.cu" 3\n :: "r"(x >> 1)\n#line 7\n);'
    assert translated(statement) == translated('asm volatile("bar.sync 0;" :: "r"(x >> 1));')


@pytest.mark.compiler
def test_what_isnt_known_is_said_where_it_is_reached(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        "__global__ void k(int* y, int go) {\n  int v = 7;\n  if (go)\n"
        '    asm volatile("frob.b32 %0, 1;" : "=r"(v));\n  y[threadIdx.x] = v;\n}\n'
    )
    for go in (0, 1):
        ran = fl.emulate_file(source, {"y": fl.Empty((32,), "int32"), "go": go}, grid=1, block=32)
        if not go:
            assert ran.passed
            assert np.array_equal(ran.arrays["y"], np.full(32, 7))
            continue
        (finding,) = ran.launched.findings
        assert finding.line is not None
        assert (finding.kind, finding.line.number) == ("not emulated", 4)
        assert "frob.b32" in finding.message
