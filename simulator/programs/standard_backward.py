"""Standard attention, backward: P, dP and dS pass through HBM, each as large as len_q x len_kv. It is what recomputation saves."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.dropout import drop_loaded, dropped, kept_sum, of_kept, read_state
from simulator.programs.scores import less_dlse
from simulator.programs.standard import COLS, ROWS
from simulator.tensors import HbmTensor


def product_of_columns(
    m: Machine, name: str, x: HbmTensor, y: HbmTensor, to: HbmTensor, problem: Problem, tile: Tile
) -> None:
    """X^T Y for a tile of keys, summed over all queries of the group's heads: dV = P^T dO and dK = scale dS^T Q.

    P is loaded without what dropout drops.
    """
    factor = of_kept(problem.scale if to.name == "dk" else 1.0, problem)
    tag = {"p": "p", "ds": "ds", "dout": "do", "q": "q"}
    for block in m.launch(name, cols=problem.key_tiles(tile), warps=m.config.warps, of=to):
        acc = block.full(tile.cols, y.cols, 0.0)
        if x.name == "p":
            block.step("load_p")
            read_state(m, block, m.config.warps)
        for g in range(problem.queries_per_kv):
            for i in range(problem.row_tiles(tile)):
                block.step(f"load_{tag[x.name]}")
                x_ij = block.load(x.head(g), i, tile.rows, block.j, tile.cols, dtype=problem.dtype)
                if x.name == "p":
                    drop_loaded(m, block, x_ij, i, block.j, tile.cols, member=g)
                block.step(f"load_{tag[y.name]}")
                y_i = block.load(y.head(g), i, tile.rows)
                block.step(to.name)
                acc = block.matmul(x_ij.T, y_i, split=("rows", "none"), acc=acc)
        block.step(f"store_{to.name}")
        block.store(to, acc * factor if factor != 1.0 else acc, block.j, tile.cols)


@program(operation=BACKWARD)
def standard_backward(
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
    """Algorithm 3 of FlashAttention (arXiv 2205.14135), after a launch that computes its P again from the LSE.

    q, dq (batch, heads, len_q, d); k, v, dk, dv (batch, kv_heads, len_kv, d); out, dout like q; lse (batch, heads,
    len_q) float32. P and dP are float32, dS has the storage dtype. All three are (batch, heads, len_q, len_kv) in HBM.
    As in all the other programs D is rowsum(dO * O), which is the sum of P dP that is printed.
    """
    warps, rows, cols = m.config.warps, problem.row_tiles(tile), problem.key_tiles(tile)
    dq, dk, dv = (m.output(name) for name in ("dq", "dk", "dv"))
    p, dp, ds = (m.workspace(name, problem.len_kv, dtype) for name, dtype in _squares(problem))
    for block in m.launch("standard_backward_p", rows=rows, cols=cols, warps=warps):
        block.step("load_q")
        q_i, lse_i = block.load(q, block.i, tile.rows), block.fetch(lse, block.i, tile.rows)
        block.step("load_k")
        k_j = block.load(k, block.j, tile.cols)
        block.step("scores")
        s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
        block.step("mask")
        s = block.mask(s, block.i, block.j)
        block.step("exp")
        p_ij = block.exp(s - lse_i.finite())
        block.step("store_p")
        block.store(p, p_ij, block.i, tile.rows, block.j, tile.cols)
    product_of_columns(m, "standard_backward_dv", p, dout, dv, problem, tile)
    for block in m.launch("standard_backward_dp", rows=rows, cols=cols, warps=warps):
        block.step("load_do")
        do_i = block.load(dout, block.i, tile.rows)
        block.step("load_v")
        v_j = block.load(v, block.j, tile.cols)
        block.step("dp")
        dp_ij = block.matmul(do_i, v_j.T, split=("rows", "none"))
        block.step("store_dp")
        block.store(dp, dp_ij, block.i, tile.rows, block.j, tile.cols)
    for block in m.launch("standard_backward_ds", rows=-(-problem.len_q // ROWS), warps=ROWS):
        i, chunks = block.i, range(-(-problem.len_kv // COLS))
        block.step("delta")
        d_i = (block.fetch(dout, i, ROWS) * block.fetch(out, i, ROWS)).sum()
        d_i = kept_sum(less_dlse(m, block, d_i, i, ROWS), problem)
        block.step("store_ds")
        read_state(m, block, ROWS)
        for c in chunks:
            dp_ic = dropped(m, block, block.fetch(dp, i, ROWS, c, COLS), i, c, COLS)
            ds_ic = block.fetch(p, i, ROWS, c, COLS) * (dp_ic - d_i)
            block.store(ds, ds_ic, i, ROWS, c, COLS)
    for block in m.launch("standard_backward_dq", rows=rows, warps=warps):
        acc = block.full(tile.rows, k.cols, 0.0)
        for j in range(cols):
            block.step("load_ds")
            ds_ij = block.load(ds, block.i, tile.rows, j, tile.cols)
            block.step("load_k")
            k_j = block.load(k, j, tile.cols)
            block.step("dq")
            acc = block.matmul(ds_ij, k_j, split=("rows", "none"), acc=acc)
        block.step("store_dq")
        block.store(dq, acc * of_kept(problem.scale, problem), block.i, tile.rows)
    product_of_columns(m, "standard_backward_dk", ds, q, dk, problem, tile)
    return dq, dk, dv


def _squares(problem: Problem) -> tuple[tuple[str, str], ...]:
    return ("p", "float32"), ("dp", "float32"), ("ds", problem.dtype)
