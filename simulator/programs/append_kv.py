"""New keys and values into their slots of a pool of pages, as vLLM's reshape_and_cache and FlashInfer's append_paged_kv_cache
do."""

from __future__ import annotations

from functools import partial

import numpy as np

from simulator.block import Block
from simulator.machine import Machine
from simulator.operations.append import APPEND
from simulator.operations.caches import LARGEST, rounded
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.registers import Registers
from simulator.tensors import HbmTensor

LEAST = float(np.finfo(np.float32).tiny)
"""The least scale: a smaller one would have few bits."""


@program(operation=APPEND)
def append_kv(
    m: Machine, k: HbmTensor, v: HbmTensor, k_pool: HbmTensor, v_pool: HbmTensor, slot_mapping: HbmTensor, problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, ...]:  # fmt: skip
    """PagedAttention's append (arXiv 2309.06180), one head of tile.rows new tokens.

    k, v (1, kv_heads, len_q, d); slot_mapping (len_q) int64, below 0 for a token that is skipped; k_pool, v_pool (pages, kv_heads,
    page_size, d) are read and written. Of a pool of 8 bits so are k_scale, v_scale (pages, kv_heads, page_size) float32. Slot s is
    row s % page_size of page s // page_size. Nothing passes through SRAM.
    """
    outputs = {name: m.output(name) for name in m.outputs}
    for block in m.launch("append_kv", rows=problem.row_tiles(tile), warps=m.config.warps, of=k):
        block.step("load_slots")
        slots = block.slots(slot_mapping, block.i, tile.rows)
        block.step("load_k")
        new_k = block.fetch_placed(k, block.i, tile.rows, slots)
        block.step("load_v")
        new_v = block.fetch_placed(v, block.i, tile.rows, slots)
        for name, x, pool in (("k", new_k, k_pool), ("v", new_v, v_pool)):
            block.step(f"store_{name}")
            if problem.quantized:
                x, scale = quantize(block, x, problem.kv_dtype)
                block.scatter(outputs[f"{name}_scale"], scale, slots)
            block.scatter(pool, x, slots)
    return tuple(outputs.values())


def quantize(block: Block, x: Registers, dtype: str) -> tuple[Registers, Registers]:
    """Each row in 8 bits, so that its largest element becomes the dtype's. And its scale."""
    top = block.elementwise(np.abs, x).max()
    scale = block.maximum(block.elementwise(_or_one, top) / LARGEST[dtype], LEAST)
    return block.elementwise(partial(rounded, dtype=dtype), x / scale), scale


def _or_one(top: np.ndarray) -> np.ndarray:
    """A maximum, or 1 for a row of zeros or with a NaN."""
    return np.where(top > 0, top, np.float32(1))
