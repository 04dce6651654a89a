"""FlashAttention-3 in FP8, forward. A first launch transposes V. The second is `flash3` with two-level accumulation."""

from __future__ import annotations

from functools import partial
from math import inf, log

from simulator.machine import Machine
from simulator.problem import Problem, Tile, round_up
from simulator.program import program
from simulator.programs.flash3 import MBARRIERS, backwards, counter, draw
from simulator.tensors import HbmTensor

PANEL = 128
"""Columns of a box: 128 bytes, the widest row that TMA swizzles."""
KEYS = 128
"""How many rows of V a block transposes."""
ONES = 8
"""Rows of ones behind each tile of transposed V. The tensor cores take no fewer."""
LARGEST_P = 32.0
"""The factor of P, which is at most 1: e4m3 reaches from 2^-9 to 448, and the kernel's m may lag behind the maximum."""


def transpose(m: Machine, v: HbmTensor, problem: Problem) -> HbmTensor:
    """V transposed: (batch, kv_heads, head_dim, len_kv padded to 16), e4m3.

    The tensor cores take 8-bit operands along the summed dimension only. The kernel stores each 16 keys in the order of
    P's accumulators. Here they keep their own order.
    """
    d, n = problem.head_dim_v, problem.len_kv
    v_t = m.workspace("v_t", round_up(n, 16), problem.dtype, rows=d, of=v)
    for block in m.launch("flash3_fp8_transpose", cols=-(-n // KEYS), warps=4, of=v):
        block.step("fetch_v")
        rows = block.fetch(v, block.j, KEYS)
        block.step("transpose")
        turned = block.alloc("turned", KEYS, d, problem.dtype)
        block.put(turned, rows)
        columns = block.get(turned).T
        block.step("store_v")
        block.store(v_t, columns, block.i, d, block.j, KEYS)
    return v_t


@program
def flash3_fp8(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Section 3.3 of FlashAttention-3 (arXiv 2407.08608): operands in e4m3, with a scale for each tile of Q, K and V.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d), all e4m3; scales float32; out like q, bfloat16; lse
    (batch, heads, len_q) float32. The tensor cores keep about 14 bits of a sum of 8-bit products. So each key tile has
    a sum of its own, which is then added to O in float32 (two-level accumulation, or promotion). A product with ones
    adds up l: it is the sum of the rounded P, which are the weights in `out`. An exact LSE has a sum of its own.
    """
    c, warps = m.config, 4 * m.config.consumers
    d = round_up(problem.head_dim_v, PANEL)
    out, lse = m.output("out"), m.output("lse")
    q_scale, k_scale, v_scale = m.optional("q_scale"), m.optional("k_scale"), m.optional("v_scale")
    v_t = transpose(m, v, problem)
    drawn = counter(m)
    visible = partial(backwards, problem, tile)
    for block in m.launch("flash3_fp8", rows=problem.row_tiles(tile), warps=c.warps, readers=c.consumers, walk=visible):
        i = block.i
        block.step("load_q")
        block.alloc("k", tile.cols, k.cols, k.dtype, copies=c.stages, panel=PANEL)
        block.alloc("v_t", d, tile.cols, v_t.dtype, copies=c.stages, panel=PANEL)
        block.alloc("ones", c.stages * ONES * round_up(tile.cols, PANEL) // 4)
        block.alloc("mbarriers", MBARRIERS)
        draw(block, drawn, warps)
        q_i = block.load(q, i, tile.rows, panel=PANEL, whole=True)
        of_q = block.fetch(q_scale, i, 1, warps=warps)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = exact_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, d, 0.0)
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages, panel=PANEL, whole=True)
            of_k = block.fetch(k_scale, j, 1, warps=warps)
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = s * (of_q * of_k)
            block.step("mask")
            s = block.mask(s, i, j)
            block.step("softmax")
            m_new = block.maximum(m_i, s.max())
            p = block.exp(s - (m_new.finite() - log(LARGEST_P)))
            block.step("rescale")
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha
            if problem.exact_lse:
                exact_i = exact_i * alpha + p.sum()
            acc = acc * alpha
            m_i = m_new
            block.step("load_v")
            v_j = (
                block.load(v_t, 0, d, j, tile.cols, stages=c.stages, panel=PANEL).columns(0, tile.cols).with_ones(ONES)
            )
            of_v = block.fetch(v_scale, j, 1, warps=warps)
            block.step("output")
            products = block.matmul(p.round(problem.dtype), v_j.T, split=("rows", "none"))
            l_i = l_i + products.columns(d, 1)
            acc = acc + products.columns(0, d) * of_v
        block.step("normalize")
        acc = acc / l_i.nonzero()
        logsumexp = m_i - log(LARGEST_P) + block.log(exact_i if problem.exact_lse else l_i)
        block.step("store_o")
        block.store(out, acc.columns(0, out.cols), i, tile.rows)
        block.step("store_lse")
        block.store(lse, logsumexp, i, tile.rows)
    return out, lse
