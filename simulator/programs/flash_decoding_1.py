"""Decoding, rung 1: the query heads that share a KV head are rows of one tile. So K and V are read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from simulator.block import Block
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.registers import Registers
from simulator.tensors import HbmTensor


@program
def flash_decoding_1(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Algorithm 1 of FlashAttention-2 (arXiv 2307.08691) for one query per sequence, whose heads are rows.

    q, out (batch, heads, 1, d); k, v (batch, kv_heads, len_kv, d); lse (batch, heads, 1) float32, natural logarithm. There is one
    block per KV head and Br heads of its group. It is a single warp, and walks over all keys.
    """
    outputs, q = outputs_of(m), m.packed(q)
    rows = [m.packed(x) for x in outputs]
    for block in m.launch("flash_decoding_1", rows=row_tiles(problem, tile), warps=1, of=q, walk=partial(all_tiles, m)):
        acc, m_i, l_i = attend(m, block, q, k, v)
        finish(block, rows, acc, m_i, l_i, tile.rows)
    return outputs


def row_tiles(problem: Problem, tile: Tile) -> int:
    """How many tiles the heads of a group fill as rows. Without a query there is none."""
    return -(-problem.len_q * problem.queries_per_kv // tile.rows)


def all_tiles(m: Machine, i: int) -> range:
    """All key tiles, for each row tile: one query sees all keys, with a causal mask or without."""
    del i
    return range(m.problem.key_tiles(m.tile))


def outputs_of(m: Machine) -> tuple[HbmTensor, ...]:
    """What an algorithm writes: out, and the LSE if that was asked for."""
    return tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))


def attend(
    m: Machine, block: Block, q: HbmTensor, k: HbmTensor, v: HbmTensor
) -> tuple[Registers, Registers, Registers]:
    """What a block makes of the key tiles that it walks over: O, which isn't divided by ℓ yet, m, and ℓ."""
    problem, (rows, cols) = m.problem, m.tile
    block.step("load_q")
    q_i = block.load(q, block.i, rows)
    m_i, l_i = block.full(rows, 1, -inf), block.full(rows, 1, 0.0)
    acc = block.full(rows, v.cols, 0.0)
    for j in block.walk:
        block.step("load_k")
        block.look_up(k, j, cols)  # the pages of these keys, if they lie in pages
        k_j = block.load(k, j, cols, stages=m.config.stages)
        block.step("scores")
        s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
        block.step("mask")
        s = block.mask(s, block.i, j, group=problem.queries_per_kv)
        block.step("softmax")
        m_new = block.maximum(m_i, s.max())
        p = block.exp(s - m_new.finite())
        block.step("rescale")
        alpha = block.exp(m_i - m_new.finite())
        l_i = l_i * alpha + p.sum()
        acc = acc * alpha
        m_i = m_new
        block.step("load_v")
        v_j = block.load(v, j, cols, stages=m.config.stages)
        block.step("output")
        acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
    return acc, m_i, l_i


def finish(
    block: Block, outputs: Sequence[HbmTensor], acc: Registers, m_i: Registers, l_i: Registers, rows: int
) -> None:
    """Divide by ℓ, and write a block's tile of so many rows to out, and to the LSE if there is one."""
    block.step("normalize")
    acc = acc / l_i.nonzero()
    block.step("store_o")
    block.store(outputs[0], acc, block.i, rows)
    for lse in outputs[1:]:
        block.step("store_lse")
        block.store(lse, m_i + block.log(l_i), block.i, rows)
