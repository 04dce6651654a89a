"""FlashAttention-3, forward, for Hopper. TMA loads whole boxes, warpgroups multiply from SRAM, walks go backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

from simulator.block import Block
from simulator.config import Config, dividing, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.machine import Machine
from simulator.problem import Problem, Tile, round_up
from simulator.program import program
from simulator.programs.dropout import dropped, kept_sum, read_state
from simulator.programs.mask import pack_mask
from simulator.programs.scores import alibi, join_sink, of_head, soft_cap
from simulator.tensors import HbmTensor

PANEL = 64
"""Columns of a box: 128 bytes of 16-bit elements, the widest row that TMA swizzles."""
MBARRIERS = 32
"""Room for the ring's mbarriers in float32 elements: 128 bytes of SRAM."""


def choose_tile(problem: Problem, device: Device) -> Tile:
    """The tile of the top rung: as many keys as registers and SRAM leave room for beside O, or three warpgroups."""
    d, extra = padded(problem.head_dim), problem.alibi or problem.mask or problem.dropout
    if d <= 64:
        # in a short causal problem, the mask hides too much of a tile of 192 rows
        short = triangular(problem) and problem.padded.len_kv <= 2048
        # three warpgroups leave a thread no registers for a bias, for bits, or for random bytes
        return Tile(128 if short or extra else 192, 128)
    if extra or problem.soft_cap or problem.sinks or problem.lengths is not None:  # they take registers, too
        # the exponentials of a soft cap and the numbers of a sequence leave no room for 64 columns, nor do random bytes
        tight = (d > 128 and problem.soft_cap and problem.lengths is not None) or (
            d > 192 and problem.dropout and not problem.soft_cap
        )
        return Tile(128, 48 if tight else 64 if d > 128 else 128)
    if d <= 96:  # the taller is faster, unless the last round of its blocks is emptier
        tall, usual = Tile(192, 112 if d <= 80 else 96), Tile(128, 128)
        return tall if rounds(problem, tall, device) * 192 < 1.08 * rounds(problem, usual, device) * 128 else usual
    if 160 < d <= 192 and problem.padded.len_kv <= 1024:
        return Tile(128, 80)  # wide tiles are mostly padding or hidden there
    return Tile(128, next((cols for most, cols in ((128, 128), (160, 96), (192, 112), (256, 64)) if d <= most), 16))


def rounds(problem: Problem, tile: Tile, device: Device) -> int:
    """How many row tiles the busiest SM computes, if all are dealt out evenly."""
    return -(-problem.batch * problem.heads * problem.row_tiles(tile) // device.sms)


def configure_rung(
    problem: Problem,
    device: Device,
    tile: Tile | tuple[int, int] | str | None,
    default: Tile,
    *,
    producers: int = 1,
    stages: int = 2,
    sram: Callable[[Problem, Tile, int], int] | None = None,
) -> Config:
    """The configuration of a rung: one warpgroup per 64 rows, further `producers`, and a ring of so many stages.

    The ring has fewer stages if these don't fit. `sram(problem, tile, stages)` is the bytes per block (None: `sram_bytes`).
    Raises `SramOverflow` if no configuration fits.
    """
    needs = sram or sram_bytes
    chosen = default if tile is None else Tile.parse(tile)
    # 64 x 16 is a last resort for float32 and small GPUs, where the kernels don't run anyway
    candidates = [*((chosen, n) for n in range(stages, 0, -1)), *([(Tile(64, 16), 1)] if tile is None else [])]
    for chosen, stages in candidates:
        needed = needs(problem, chosen, stages)
        if needed <= device.sram_per_block:
            break
    else:
        chosen, stages = candidates[-1]
        needed = needs(problem, chosen, stages)
        raise SramOverflow("tile", str(chosen), needed=needed, limit=device.sram_per_block, device=device.name)
    consumers = max(1, chosen.rows // 64)
    return Config(tile=chosen, warps=4 * (consumers + producers), stages=stages, consumers=consumers, blocks_per_sm=1)


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block: Q, the ring of K and V, the mbarriers."""
    d, dv = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL)
    rows, cols = round_up(tile.rows, 16), round_up(tile.cols, 16)
    return (rows * d + stages * cols * (d + dv)) * problem.itemsize + 4 * MBARRIERS


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The kernel's configuration: the tile by head dim and length, and the order of work."""
    default = choose_tile(problem, device)
    if problem.mask == "blocks":
        default = Tile(dividing(default.rows, problem.block.rows, 64), dividing(default.cols, problem.block.cols))
    rung = configure_rung(problem, device, tile, default)
    together = heads_that_share_the_l2(problem, device)
    return replace(rung, heads_together=together, constants=features(problem), **order(problem))


def order(problem: Problem) -> dict[str, bool]:
    """The order of work: `persistent` and `dynamic` of a `Config`.

    If a mask makes rows unequal, persistent blocks draw them, the longest first, unless the registers are needed for a mask's
    bits, or beside a wide head for what bends scores. Then each has a block of its own instead. So it is in a ragged batch,
    whose row tiles are unequal, too, unless its sequences are all alike and none of its rows sees more than another. (Wide heads
    leave it no registers for more than one.)
    """
    p, stepped, wide = problem, triangular(problem), problem.head_dim > 2 * PANEL
    crowded = p.mask is not None or (wide and (p.soft_cap is not None or p.sinks or p.alibi))
    alike = len(p.different) == 1 and not stepped and not wide
    persistent = alike if p.lengths is not None else not (stepped and crowded)
    return {"persistent": persistent, "dynamic": persistent and stepped}


def counter(m: Machine) -> HbmTensor | None:
    """The counter from which blocks draw their row tiles, if they do."""
    return m.workspace("drawn", 1, "int32", rows=1, vector=True, shared=True, zeros=True) if m.config.dynamic else None


def draw(block: Block, drawn: HbmTensor | None, warps: int) -> None:
    """Where blocks draw their row tiles: draw the next one's number, which the producer tells the `warps` that multiply."""
    if drawn is not None:
        block.arrive(drawn, 0)
        block.tell("number", warps)


def backwards(problem: Problem, tile: Tile, i: int) -> range:
    """The walk of row tile i: the key tiles that the mask leaves, from the last to the first."""
    return problem.tiles_of_row(i, tile)[::-1]


def triangular(problem: Problem) -> bool:
    """Does each row see more keys than the row before, or does each see fewer?"""
    return (problem.left is None) != (problem.right is None)


def attend(
    name: str, m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """The launch of any rung. Rungs differ in what runs beside what, not in what they move.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); out like q; lse (batch, heads, len_q) float32,
    natural logarithm. A block has a row tile of Br queries, 64 per warpgroup. So each warpgroup reads all of K_j and
    V_j from SRAM, but no columns that pad a box. In a ragged batch, boxes of Q and V that reach into the next sequence are
    cleared there.
    """
    c, ragged = m.config, problem.lengths is not None
    out, lse = m.output("out"), m.output("lse")
    drawn = counter(m)
    packed = pack_mask(m, tile, backwards=True)
    visible = packed.walk if packed else partial(backwards, problem, tile)
    for block in m.launch(name, rows=problem.row_tiles(tile), warps=c.warps, readers=c.consumers, walk=visible):
        i = block.i
        block.step("load_q")
        for ring in (k, v):
            block.alloc(ring.name, tile.cols, ring.cols, ring.dtype, copies=c.stages, panel=PANEL)
        block.alloc("mbarriers", MBARRIERS)
        draw(block, drawn, 4 * c.consumers)
        q_i = block.load(q, i, tile.rows, panel=PANEL, clear=ragged)
        slope = of_head("alibi_slopes", m, block, 4 * c.consumers)
        read_state(m, block, 4 * c.consumers)
        if packed:
            packed.begin(block, 1 + 4 * c.consumers)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages, panel=PANEL)
            if packed:
                packed.visit(block, j, 1 + 4 * c.consumers)
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
            v_j = block.load(v, j, tile.cols, stages=c.stages, panel=PANEL, clear=ragged)
            block.step("output")
            p = dropped(m, block, p, i, j)
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
        block.step("normalize")
        m_i, l_i, acc = join_sink(block, of_head("sinks", m, block, 4 * c.consumers), m_i, l_i, acc)
        acc = acc / kept_sum(l_i, problem).nonzero()
        logsumexp = m_i + block.log(l_i)
        block.step("store_o")
        block.store(out, acc, i, tile.rows)
        block.step("store_lse")
        block.store(lse, logsumexp, i, tile.rows)
    return out, lse


@program(configure=configure)
def flash3(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """Algorithm 1 of FlashAttention-3 (arXiv 2407.08608), forward. The top rung: `flash3_3` with a tile scheduler."""
    return attend("flash3", m, q, k, v, problem, tile)


ABOUT = {
    "load_q": "TMA brings this block's queries, in boxes of 64 columns. Its rows of O, m and ℓ never leave the registers.",
    "load_k": "Walk on, from the last key tile to the first: TMA brings the next tile of keys that the mask leaves to these rows.",
    "scores": "Each warpgroup multiplies its 64 queries by the transposed key tile, straight from SRAM: one tile of S.",
    "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
    "softmax": "The new row maximum m, and P = exp(S − m). Nothing is divided yet.",
    "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α = exp(m_old − m_new).",
    "load_v": "Fetch the values of the same keys.",
    "output": "Weigh the values with P, and add them to the accumulator.",
    "normalize": "After the last key tile, and only now, divide the accumulator by ℓ.",
    "store_o": "Write the finished rows of the output to HBM, for the first and only time.",
    "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
}
"""What each step of each launch is for, in a sentence or two: the player's words."""
