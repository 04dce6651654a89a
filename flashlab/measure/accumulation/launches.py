"""Runs the same products on a GPU and on the emulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kernels_cu
from flashlab.emulator import Arena, build
from flashlab.measure.accumulation.cases import SOURCE, Array, Cases, Instruction
from flashlab.run.arrays import cupy

__all__ = ["Run", "emulated", "on_gpu"]

Run = Callable[[Instruction, Cases], Array]
"""A way of running an instruction on n cases. It returns the sums, float32 (n,)."""

SIDE, STEP, THREADS = 64, 32, 128  # cases per block, bytes of an operand's row, threads per block
SRAM = 2 * SIDE * 128


def on_gpu(instruction: Instruction, cases: Cases) -> Array:
    """The sums (n,) from this machine's GPU, which must be a Hopper."""
    cp = cupy()
    options = ("-std=c++17", "-arch=sm_90a", f"-DFL_DTYPE={instruction.macro}", f"-I{kernels_cu.include_dir()}")
    kernel = cp.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options).get_function(instruction.entry)
    a, b, c = map(cp.asarray, _blocks(cases))
    d = cp.empty_like(c)
    kernel((a.shape[0],), (THREADS,), (a, b, c, d, np.int32(a.shape[1])), shared_mem=SRAM)
    return d.get().reshape(-1)[: len(cases.c)]


def emulated(instruction: Instruction, cases: Cases) -> Array:
    """The sums (n,) from the emulator, which must find no misuse."""
    a, b, c = _blocks(cases)
    arena = Arena()
    arena.put("a", a)
    arena.put("b", b)
    arena.put("c", c)
    d = arena.put("d", c, written=False)
    arguments = [np.uintp(arena.pointer(name)).tobytes() for name in "abcd"] + [np.int32(a.shape[1]).tobytes()]
    library = build(SOURCE, (f"-DFL_DTYPE={instruction.macro}",), watch=False)
    launched = library.launch(instruction.entry, (len(a),), (THREADS,), arguments, arena, sram=SRAM, time_limit=60)
    assert not launched.findings, launched.findings[0]
    return d.reshape(-1)[: len(cases.c)]


def _blocks(cases: Cases) -> tuple[Array, Array, Array]:
    """The cases as products.cu takes them: a and b as bytes (blocks, steps, 64, 32), c as float32 (blocks, 64)."""
    n = len(cases.c)
    blocks = -(-n // SIDE)
    c = np.zeros(blocks * SIDE, np.float32)
    c[:n] = cases.c
    return _operand(cases.a, blocks), _operand(cases.b, blocks), c.reshape(blocks, SIDE)


def _operand(x: Array, blocks: int) -> Array:
    rows = np.ascontiguousarray(x).view(np.uint8)
    whole = np.zeros((blocks * SIDE, rows.shape[1]), np.uint8)
    whole[: len(rows)] = rows
    return np.ascontiguousarray(whole.reshape(blocks, SIDE, -1, STEP).swapaxes(1, 2))
