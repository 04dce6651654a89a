"""Pages of a pool copied to other pages: what copy-on-write asks for before a shared page is written."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.copies import COPIES
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.registers import Registers
from simulator.tensors import HbmTensor


@program(operation=COPIES)
def copy_pages(
    m: Machine, k_pool: HbmTensor, v_pool: HbmTensor, pairs: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """The copy of PagedAttention's copy-on-write (arXiv 2309.06180), one head of one pair of pages.

    k_pool, v_pool (pages, kv_heads, page_size, d) are read and written, and so are k_scale, v_scale (pages, kv_heads, page_size)
    float32 if they are given; pairs (len_q, 2) int32: a page, and the page that it is copied to. Nothing passes through SRAM.
    """
    size, outputs = problem.page_size or 1, {name: m.output(name) for name in m.outputs}
    for block in m.launch("copy_pages", rows=problem.len_q, warps=m.config.warps, of=k_pool):
        block.step("load_pair")
        source, target = block.page_pair(pairs, block.i, size, warps=m.config.warps)
        rows = dict[str, Registers]()
        for name in "kv":
            block.step(f"load_{name}")
            rows |= {
                x: block.gather(outputs[x], source, size) for x in (f"{name}_pool", f"{name}_scale") if x in outputs
            }
        for name in "kv":
            block.step(f"store_{name}")
            for x in (f"{name}_pool", f"{name}_scale"):
                if x in outputs:
                    block.scatter(outputs[x], rows[x], target)
    return tuple(outputs.values())
