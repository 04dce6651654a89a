"""FlashAttention-1, backward, as printed: K and V outside, Q inside. dQ lies in HBM, and each key tile reads and writes it."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.dropout import dropped, kept_sum, of_kept, of_kept_sum, read_state
from simulator.programs.flash2_backward import warp_grid
from simulator.programs.scores import less_dlse
from simulator.tensors import HbmTensor


@program(operation=BACKWARD)
def flash1_backward(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, HbmTensor, HbmTensor]:
    """Algorithm 4 of FlashAttention (arXiv 2205.14135), backward, as printed. The LSE stands for its l and m.

    q, dq (batch, heads, len_q, d); k, v, dk, dv (batch, kv_heads, len_kv, d); out, dout like q; lse (batch, heads,
    len_q) float32. There is one block per KV head, which takes the query heads of its group in turn. dQ lies in HBM as
    float32. Each j reads and writes it, and the last j writes `dq` in place of it. Every tile is walked, masked ones
    too, and D is computed anew at each. The warps share the work as in FlashAttention-2's backward pass.
    """
    c, last = m.config, max(1, problem.key_tiles(tile)) - 1
    dq, dk, dv = (m.output(name) for name in ("dq", "dk", "dv"))
    dq_sum = m.workspace("dq_sum", problem.head_dim)
    along, across = warp_grid(problem, tile)
    shared = across, along  # how many warps read each byte of the left and of the right operand of a product
    for block in m.launch("flash1_backward", warps=c.warps, of=k):
        p_shared, ds_shared = (block.alloc(name, tile.cols, tile.rows, problem.dtype) for name in ("p", "ds"))
        d_shared = block.alloc("d", tile.rows)
        block.step("init")
        read_state(m, block, c.warps)
        for g in range(problem.queries_per_kv):
            for i in range(problem.row_tiles(tile)):
                block.store(dq_sum.head(g), block.full(tile.rows, q.cols, 0.0), i, tile.rows)
        for j in range(problem.key_tiles(tile)):
            block.store(dk, block.full(tile.cols, k.cols, 0.0), j, tile.cols)
            block.store(dv, block.full(tile.cols, v.cols, 0.0), j, tile.cols)
        for j in range(last + 1):
            block.step("load_kv")
            k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)
            dk_j, dv_j = block.full(tile.cols, k.cols, 0.0), block.full(tile.cols, v.cols, 0.0)
            for g in range(problem.queries_per_kv):
                for i in range(problem.row_tiles(tile)):
                    block.step("load_q")
                    q_i = block.load(q.head(g), i, tile.rows)
                    lse_i = block.fetch(lse.head(g), i, tile.rows, warps=along).T
                    block.step("load_do")
                    do_i, o_i = block.load(dout.head(g), i, tile.rows), block.load(out.head(g), i, tile.rows)
                    block.step("delta")
                    d_i = (block.to_registers(do_i) * block.to_registers(o_i)).sum()
                    block.put(d_shared, kept_sum(less_dlse(m, block, d_i, i, tile.rows, g), problem))
                    block.step("scores")
                    s = block.matmul(k_j, q_i.T, split=shared, scale=problem.scale)
                    block.step("mask")
                    s = block.mask(s.T, i, j).T
                    block.step("exp")
                    p = block.exp(s - lse_i.finite())
                    block.put(p_shared, dropped(m, block, p.T, i, j, member=g).T.round(problem.dtype))
                    block.step("dp")
                    d_i = block.get(d_shared, split=along).T
                    dp = block.matmul(v_j, do_i.T, split=shared)
                    dp = dropped(m, block, dp.T, i, j, member=g).T
                    block.step("ds")
                    block.put(ds_shared, (p * (dp - d_i)).round(problem.dtype))
                    block.step("dv")
                    dv_j = block.matmul(p_shared, do_i, split=shared, acc=dv_j)
                    block.step("dk")
                    dk_j = block.matmul(ds_shared, q_i, split=shared, acc=dk_j)
                    block.step("dq")
                    part = block.matmul(ds_shared.T, k_j, split=shared)
                    block.step("update_dq")
                    dq_i = block.fetch(dq_sum.head(g), i, tile.rows) + part * of_kept(problem.scale, problem)
                    block.store((dq if j == last else dq_sum).head(g), dq_i, i, tile.rows)
            block.step("store_dkv")
            block.store(dk, dk_j * of_kept(problem.scale, problem), j, tile.cols)
            block.store(dv, of_kept_sum(dv_j, problem), j, tile.cols)
    return dq, dk, dv
