"""The kernels that measure an SM: they compile for Hopper, and hold what they are asked for, not what the compiler made of it."""

from __future__ import annotations

import pytest

import kernels_cu
from flashlab import compiler
from tools.machine_rates.__main__ import MACROS, SOURCE

pytestmark = pytest.mark.nvrtc


@pytest.fixture(scope="module")
def compiled() -> compiler.Compiled:
    options = (*MACROS, "-std=c++17", "-arch=sm_90a", f"-I{kernels_cu.include_dir()}", "--ptxas-options=-v")
    return compiler._compile(compiler._nvrtc(), SOURCE, options, ptx=False)  # pyright: ignore[reportPrivateUsage]


def test_they_compile_without_spills_or_warnings(compiled: compiler.Compiled):
    assert compiled.spills == 0
    assert not compiled.warnings  # C75xx: products that the compiler serialised would be measured as slow


def test_what_is_asked_is_there(compiled: compiler.Compiled):
    """A warpgroup that multiplies holds 64 x N accumulators, N / 2 registers a lane; exponentials hold the scores."""
    registers = {name: found.registers for name, found in compiled.resources.items()}
    for name, least in {"products_128_sram": 64, "products_256_registers": 128, "exponentials": 64 - 8}.items():
        assert registers[name] >= least, name
