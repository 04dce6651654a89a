"""Our own kernels from the bodies that nvcc compiles: inline PTX must do what the emulator's primitives do, to the last byte."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.emulator.build import compiler
from tests.flashlab.emulator.run import attention_job

pytestmark = pytest.mark.compiler

# what the emulator's bodies have and PTX has no word for: names of SRAM, lanes that meet, counted operations
_ONLY_THERE = r"emu_name_sram|__any_sync|emulator::count_flops"


def from_ptx(name: str, macros: tuple[str, ...], arch: int, folder: Path) -> Path:
    """A kernel's source after preprocessing, with the bodies of PTX in place of the emulator's."""
    for file in [*kernels_cu.include_dir().glob("*.cuh"), kernels_cu.source(name)]:
        text = re.sub(rf"#ifdef EMULATOR\n(?!\s*(?:{_ONLY_THERE}))", "#ifdef PRIMITIVES\n", file.read_text("utf-8"))
        (folder / file.name).write_text(text.replace("#ifndef EMULATOR", "#ifndef PRIMITIVES"))
    options = ["-E", "-C", "-x", "c++", "-std=c++17", "-DEMULATOR", f"-D__CUDA_ARCH__={arch}", f"-I{folder}", *macros]
    source = folder / f"{name}_ptx.cu"
    made = subprocess.run(
        [compiler()[0], *options, str(folder / f"{name}.cu")], capture_output=True, text=True, check=True
    )
    source.write_text(made.stdout)
    assert "asm" in made.stdout
    return source


@pytest.mark.alike("flash3")
@pytest.mark.parametrize(
    ("algorithm", "dtype", "head_dim", "device"),
    [
        ("flash2", "bfloat16", 64, "a100-40"),
        ("flash3", "float16", 64, "h200"),
        pytest.param("flash2", "float16", 128, "t4", marks=pytest.mark.long),
        pytest.param("flash2", "float32", 64, "a100-40", marks=pytest.mark.long),
        pytest.param("flash3_fp8", "float8_e4m3fn", 128, "h200", marks=pytest.mark.long),
        pytest.param("flash3", "bfloat16", 128, "h200", marks=pytest.mark.long),
    ],
)
def test_ptx_bodies(algorithm: str, dtype: str, head_dim: int, device: str, tmp_path: Path) -> None:
    problem = fl.Problem(batch=1, heads=2, len_q=150, len_kv=190, head_dim=head_dim, dtype=dtype, causal=True)
    job, _ = attention_job(algorithm, problem, device=device)
    source = from_ptx(algorithm, job.launches[-1].macros, job.arch, tmp_path)
    inputs = fl.random_inputs(problem)
    a, b = (
        fl.emulate(algorithm, *inputs, causal=True, device=device, lse=True, source=path)
        for path in (kernels_cu.source(algorithm), source)
    )
    assert [*map(str, a.findings)] == [*map(str, b.findings)] == []
    for first, second in zip(a.launches, b.launches, strict=True):
        assert first.moved == second.moved
        assert (first.flops, first.exp) == (second.flops, second.exp)
    assert np.array_equal(a.out, b.out)
    assert a.lse is not None and b.lse is not None and np.array_equal(a.lse, b.lse)
