"""FlashAttention-2, forward: Q outside, K and V inside. The warps split Q (split-Q). It skips hidden tiles."""

from __future__ import annotations

from functools import partial
from math import inf

from simulator.config import Config, dividing, features, heads_that_share_the_l2, padded, warps_for
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.dropout import dropped, kept_sum, read_state
from simulator.programs.mask import pack_mask
from simulator.programs.scores import alibi, join_sink, of_head, soft_cap
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The kernel's configuration. The default tile depends on the device, the head dim and the dtype.

    In 16 bits two blocks share an SM, so that the matrix products of one hide the exponentials of the other. So this
    takes the first candidate that leaves room for two blocks, else the first that fits at all. K and V are
    double-buffered where that fits. Q's fragments stay in registers where those have room for them.
    """
    d, dv, capability = padded(problem.head_dim), padded(problem.head_dim_v), device.compute_capability
    half = problem.itemsize == 2
    if tile is not None:
        asked = Tile.parse(tile)
        candidates = [(*asked, 2), (*asked, 1)] if half else [(*asked, 1)]
    elif not half and d == 208:  # with 16 columns, ptxas spills here
        candidates = [(64, 32, 1), (32, 32, 1)]
    elif not half:
        candidates = [(64, max(16, min(64, 4096 // d // 16 * 16)), 1), (32, 16, 1)]
    elif d <= 48 or (d <= 64 and capability >= (9, 0)):
        candidates = [(128, 128, 2), (128, 64, 2), (128, 64, 1)]
    elif d <= 96 or (d == 128 and capability >= (9, 0)):
        candidates = [(128, 64, 2), (128, 64, 1), (64, 32, 1)]
    elif d <= 128:
        candidates = [(128, 32, 2), (128, 32, 1), (64, 32, 1)]
    else:
        candidates = [(64, 64, 1), (64, 32, 1)]
    bent = problem.soft_cap or problem.alibi or problem.mask
    if tile is None and half and d <= 128 and (bent or problem.dropout):  # these need registers, too
        least = 16 if bent else 32  # of 16 columns, a lane's random bytes are half for nothing
        candidates = [(rows, max(cols // 2, least), stages) for rows, cols, stages in candidates]
    elif tile is None and half and d in (64, 128) and capability >= (9, 0) and problem.lengths:  # so does a sequence
        candidates = [(rows, cols * 3 // 4, stages) for rows, cols, stages in candidates]
    if tile is None and problem.mask == "blocks":
        rows, cols = problem.block
        candidates = [(dividing(m, rows), dividing(n, cols), stages) for m, n, stages in candidates]
    if capability < (8, 0):  # without cp.async there is nothing to load ahead
        candidates = [c for c in candidates if c[2] == 1]

    def sram(rows: int, cols: int, stages: int) -> int:
        return (padded(rows) * d + stages * padded(cols) * (d + dv)) * problem.itemsize

    last_resort = [(16, 16, 1)] if tile is None else []
    roomy = [c for c in candidates if half and sram(*c) <= device.sram_per_block // 2]
    fitting = roomy + [c for c in candidates + last_resort if sram(*c) <= device.sram_per_block]
    if not fitting:
        rows, cols, stages = (candidates + last_resort)[-1]
        needed, most = sram(rows, cols, stages), device.sram_per_block
        raise SramOverflow("tile", f"{rows}x{cols}", needed=needed, limit=most, device=device.name)
    rows, cols, stages = fitting[0]
    return Config(
        tile=Tile(rows, cols),
        warps=warps_for(rows),
        stages=stages,
        q_in_registers=half and d <= 64 and cols == 64,
        heads_together=heads_that_share_the_l2(problem, device),
        blocks_per_sm=2,
        constants=features(problem),
    )


@program(configure=configure)
def flash2(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Algorithm 1 of FlashAttention-2 (arXiv 2307.08691), forward.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); out like q; lse (batch, heads, len_q) float32,
    natural logarithm. There is one block per row tile of Br queries. Its warps split the rows, so every warp reads all
    of K_j and V_j.
    """
    c = m.config
    out, lse = m.output("out"), m.output("lse")
    packed = pack_mask(m, tile)
    visible = packed.walk if packed else partial(problem.tiles_of_row, tile=tile)
    for block in m.launch("flash2", rows=problem.row_tiles(tile), warps=c.warps, readers=c.readers, walk=visible):
        i = block.i
        block.step("load_q")
        q_i: SramTile | Registers = block.load(q, i, tile.rows)
        if c.q_in_registers:
            q_i = block.to_registers(q_i)
        slope = of_head("alibi_slopes", m, block, c.warps)
        read_state(m, block, c.warps)
        if packed:
            packed.begin(block, c.warps)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages)
            if packed:
                packed.visit(block, j, c.warps)
            block.step("scores")
            s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
            s = soft_cap(block, s, problem)
            block.step("mask")
            s = alibi(block, s, slope, j)
            s = packed.hide(block, s, j) if packed else block.mask(s, i, j)
            block.step("softmax")
            m_new = block.maximum(m_i, s.max())
            p = block.exp(s - m_new.finite())
            block.step("rescale")
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha + p.sum()
            acc = acc * alpha
            m_i = m_new
            block.step("load_v")
            v_j = block.load(v, j, tile.cols, stages=c.stages)
            block.step("output")
            p = dropped(m, block, p, i, j)
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
        block.step("normalize")
        m_i, l_i, acc = join_sink(block, of_head("sinks", m, block, c.warps), m_i, l_i, acc)
        acc = acc / kept_sum(l_i, problem).nonzero()
        logsumexp = m_i + block.log(l_i)
        block.step("store_o")
        block.store(out, acc, i, tile.rows)
        block.step("store_lse")
        block.store(lse, logsumexp, i, tile.rows)
    return out, lse


ABOUT = {
    "flash2": {
        "load_q": "Fetch this block's queries once. Its rows of O, m and ℓ never leave the registers.",
        "load_k": "Walk on: fetch the next tile of keys that the mask leaves to these rows.",
        "scores": "Multiply the query tile by the transposed key tile: one tile of S, each query's scores for these keys.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "softmax": "The new row maximum m, and P = exp(S − m). Nothing is divided yet.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α = exp(m_old − m_new).",
        "load_v": "Fetch the values of the same keys.",
        "output": "Weigh the values with P, and add them to the accumulator.",
        "normalize": "After the last key tile, and only now, divide the accumulator by ℓ.",
        "store_o": "Write the finished rows of the output to HBM, for the first and only time.",
        "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""
