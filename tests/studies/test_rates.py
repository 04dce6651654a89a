"""The kernels that measure an SM: they compile for Hopper, and hold what they are asked for, not what the compiler made of it."""

from __future__ import annotations

import json
import struct
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

import kernels_cu
from flashlab.run import nvrtc
from studies.rates import (
    INSTRUCTIONS,
    MACROS,
    SOURCE,
    STATEMENTS,
    Machine,
    instructions_beside_products,
)


@pytest.fixture(scope="module")
def compiled() -> nvrtc.Compiled:
    options = (*MACROS, "-std=c++17", "-arch=sm_90a", f"-I{kernels_cu.include_dir()}", "--ptxas-options=-v")
    return nvrtc._compile(nvrtc._nvrtc(), SOURCE, options, ptx=False)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.nvrtc
def test_they_compile_without_spills_or_warnings(compiled: nvrtc.Compiled):
    assert compiled.spills == 0
    assert not compiled.warnings  # C75xx: products that the compiler serialised would be measured as slow


@pytest.mark.nvrtc
def test_what_is_asked_is_there(compiled: nvrtc.Compiled):
    """A warpgroup that multiplies holds 64 x N accumulators, N / 2 registers a lane; exponentials hold the scores."""
    registers = {name: found.registers for name, found in compiled.resources.items()}
    for name, least in {"products_128_sram": 64, "exponentials": 64 - 8}.items():
        assert registers[name] >= least, name


@pytest.mark.nvrtc
def test_reductions_are_vectors(compiled: nvrtc.Compiled):
    """A turn has eight of them, unrolled. Nothing comes back."""
    opcodes = Counter(word & 0xFFF for word, _ in struct.iter_unpack("<QQ", machine_code(compiled.image, "reductions")))
    assert opcodes[0x9A6] == 8, opcodes


def machine_code(cubin: bytes, kernel: str) -> bytes:
    """The section .text.<kernel> of an ELF file of 64 bits."""
    (first,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<II8x8xQQ", cubin, first + i * size) for i in range(count)]
    for name, _, begin, length in headers:
        at = headers[names][2] + name
        if cubin[at : cubin.index(0, at)].decode() == f".text.{kernel}":
            return cubin[begin : begin + length]
    raise KeyError(kernel)


@pytest.mark.nvrtc
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_turn_beside_products_is_of_one_instruction(compiled: nvrtc.Compiled, instruction: str):
    """ptxas merged, dropped and copied none of its statements: a turn's opcode (12 bits of an instruction's 16 bytes) is its
    kernel's most common one by far, and little of it lies outside the loop."""
    code = machine_code(compiled.image, f"{instruction}_beside_products")
    opcodes = Counter(word & 0xFFF for word, _ in struct.iter_unpack("<QQ", code))
    asked = STATEMENTS
    (_, found), (_, second) = opcodes.most_common(2)
    assert asked <= found <= asked + 64
    assert second <= asked / 5  # of the lines before the loop, mostly
    assert compiled.resources[f"{instruction}_beside_products"].registers >= 64 + 32  # accumulators and results


class Pretended:
    """A machine of four SMs and known rates. Its warps issue an instruction every second clock alone and every fourth beside
    products; those take 80 clocks alone and 100 beside instructions."""

    cp, sms, sink = np, 4, None

    def run(self, name: str, shape: Any, rounds: Any, _: Any, sink: Any, products: Any, **how: int) -> Any:
        clocks = int(products) * (100 if rounds else 80)
        turns = min(int(rounds), clocks // (STATEMENTS * 4)) if products else int(rounds)
        spent = turns * STATEMENTS * (4 if products else 2)
        found = np.zeros(shape, "i8")
        found[:] = turns, spent + 1, clocks + 1  # one for the reading of the clock
        return found


def test_rates_beside_products_are_shares_of_what_they_are_out_of():
    rows = list(instructions_beside_products(cast(Machine, Pretended())))
    assert [row["what"] for row in rows] == [f"{instruction}_beside_products" for instruction in INSTRUCTIONS]
    for row in json.loads(json.dumps(rows)):  # nothing but plain figures
        found = [row[key] for key in ("value", "alone", "tensor_share", "tensor_share_alone")]
        assert found == pytest.approx([1 / 4, 1 / 2, 0.64, 0.8], rel=1e-5), row["what"]


@pytest.mark.nvrtc
def test_every_kernel_that_is_asked_for_is_there(compiled: nvrtc.Compiled):
    """Each is found by its name when the study runs, on a GPU."""
    text = (SOURCE.with_suffix(".py")).read_text(encoding="utf-8")
    named = {
        name for name in compiled.resources if name in text or name.removesuffix("_beside_products") in INSTRUCTIONS
    }
    beside = {name for name in compiled.resources if name.startswith("exponentials_beside_")}
    assert named | beside == compiled.resources.keys()
