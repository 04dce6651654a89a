"""Latent attention on Hopper: TMA brings tiles, one warpgroup has the scores, and two have the output.

The warpgroups of the output hold half of its columns each, which is all that their registers have room for. The third one computes
the scores of the next tile in the meantime, and hands P over through SRAM. Chunks of keys run in parallel, and a second
launch adds up what they have, in a fixed order: so a result is the same bit for bit, whatever lies beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from simulator.block import Block
from simulator.machine import Machine
from simulator.operations.latent import LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import PANEL
from simulator.programs.flash_decoding import Part, Splits
from simulator.programs.scores import join_sink, of_packed_heads, soft_cap
from simulator.registers import Registers
from simulator.tensors import HbmTensor

CHUNK = 1024
"""Keys of a chunk, whatever the tile is."""
STAGES = 2
WARPS = 16
MBARRIERS = 48
"""Room for 24 mbarriers, in float32 elements."""
HALVES = 2
"""Warpgroups that have the output, each half of its columns."""
MERGE_WARPS = 4
"""Warps that add up a row, 128 columns each."""


def splits(problem: Problem, tile: Tile) -> Splits:
    """How a problem is split: into chunks of `CHUNK` keys unless callers say how many, and no runs."""
    return Splits(problem, tile, 1, max(1, (problem.chunk or CHUNK) // tile.cols))


def merges(problem: Problem, tile: Tile) -> bool:
    """Is there a second launch? With lengths there is: how long sequences are is known when it runs."""
    return problem.apart or problem.len_kv > splits(problem, tile).chunk * tile.cols


@program(operation=LATENT)
def mla_hopper(m: Machine, q: HbmTensor, latent: HbmTensor, problem: Problem, tile: Tile) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), on Hopper: see `attend`."""
    return attend(m, "mla_hopper", q, latent, problem, tile, panel=PANEL)


def attend(
    m: Machine, name: str, q: HbmTensor, latent: HbmTensor, problem: Problem, tile: Tile, panel: int | None
) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), split as Flash-Decoding, a warpgroup per task.

    q (batch, heads, len_q, 576); latent (batch, 1, len_kv, 576); out (batch, heads, len_q, 512); lse (batch, heads, len_q) float32,
    natural logarithm. There is one unit of work per row tile and chunk of 1,024 keys, or of the problem's `chunk`. Latent rows
    come in boxes of `panel` columns, or row by row. In pages, a box lies in one page. There and in a ragged batch, rows behind
    the last key are cleared. One warpgroup computes S, and hands on P, and what the output of the tiles before is multiplied with.
    Two warpgroups compute the output, each for half of its columns.
    """
    s, d = splits(problem, tile), problem.head_dim_v
    outputs = tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))
    q, out = m.packed(q), [m.packed(x) for x in outputs]
    partial = workspaces(m, s, q)
    for block in m.launch(name, rows=s.row_tiles, cols=s.runs, walk=s.walk, of=q, warps=WARPS, readers=HALVES):
        row_tile = int(block.i.min()) if not isinstance(block.i, int) else block.i
        chunks = s.chunks_of(row_tile, block.j)
        if not chunks:
            continue  # this row tile sees fewer chunks
        q_i = block.alloc("q", tile.rows, q.cols, q.dtype)
        block.alloc("latent", tile.cols, latent.cols, latent.dtype, copies=STAGES)
        p_i, alpha_i = block.alloc("p", tile.rows, tile.cols, q.dtype), block.alloc("alpha", tile.rows)
        block.alloc("mbarriers", MBARRIERS)
        if block.walk:
            block.step("load_q")
            q_i = block.load(q, block.i, tile.rows)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, d, 0.0)
        for j in block.walk:
            block.step("load_latent")
            box = m.config.page_box
            block.look_up(latent, j, tile.cols, box=box)  # where it lies in pages
            k_j = block.load(latent, j, tile.cols, stages=STAGES, panel=panel, clear=box > 0 or problem.ragged)
            block.step("scores")
            x = block.matmul(q_i, k_j.T, split=("rows", 1), scale=problem.scale)
            x = soft_cap(block, x, problem)
            block.step("mask")
            x = block.mask(x, block.i, j, group=s.group)
            block.step("softmax")
            m_new = block.maximum(m_i, x.max())
            p = block.exp(x - m_new.finite())
            block.put(p_i, p.round(problem.dtype))
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha + p.sum()
            block.put(alpha_i, alpha)
            m_i = m_new
            block.step("rescale")
            acc = acc * block.get(alpha_i, HALVES)
            block.step("output")
            v_j = k_j.columns(0, d)  # the same tile
            acc = block.matmul(p_i, v_j, split=(HALVES, "cols"), acc=acc)
        whole = len(s.chunks(row_tile)) <= 1  # then it has all keys that its rows see
        block.step("share_sum")
        sink = of_packed_heads("sinks", m, block, tile.rows, together=8) if whole else None
        block.put(alpha_i, l_i)
        l_i = block.get(alpha_i, HALVES)
        if whole:
            finish(block, out, join_sink(block, sink, m_i, l_i, acc), tile.rows)
        else:
            block.step("store_partial")
            for tensor, x in zip(partial, (acc, m_i, l_i), strict=True):
                block.store(tensor.at(parts=block.j), x, block.i, tile.rows)
    if merges(problem, tile):
        merge(m, f"{name}_merge", s, q, partial, out)
    return outputs


def workspaces(m: Machine, s: Splits, q: HbmTensor) -> tuple[HbmTensor, HbmTensor, HbmTensor]:
    """Where partial results lie: outputs, maxima and sums. A single chunk has none."""
    if s.runs == 1:
        return q, q, q
    axes = {"parts": s.runs}
    return (
        m.workspace("partial", s.problem.head_dim_v, rows=q.rows, of=q, axes=axes, flat=True),
        m.workspace("partial_m", 1, rows=q.rows, of=q, axes=axes, vector=True),
        m.workspace("partial_l", 1, rows=q.rows, of=q, axes=axes, vector=True),
    )


def merge(
    m: Machine, name: str, s: Splits, q: HbmTensor, partial: Sequence[HbmTensor], outputs: Sequence[HbmTensor]
) -> None:
    """The launch that adds up what the chunks of a row have, of each row that sees several."""

    def chunks(row: int) -> range:
        return s.chunks(row // s.tile.rows)

    for block in m.launch(name, rows=s.rows, walk=chunks, of=q, warps=MERGE_WARPS):
        if len(block.walk) < 2:
            continue  # one block had the whole row
        block.step("merge")
        parts: list[Part] = []
        for n in range(len(block.walk)):
            o, *statistics = (x.at(parts=n) for x in partial)
            m_n, l_n = (block.fetch(x, block.i, 1, warps=MERGE_WARPS) for x in statistics)
            parts.append((block.fetch(o, block.i, 1), m_n, l_n))
        o, m_i, l_i = added_up(block, parts)
        block.step("store_o")
        sink = of_packed_heads("sinks", m, block, 1, warps=MERGE_WARPS)
        finish(block, outputs, join_sink(block, sink, m_i, l_i, o), 1)


def added_up(block: Block, parts: list[Part]) -> Part:
    """Partial results in one."""
    top = parts[0][1]
    for _, m_n, _ in parts[1:]:
        top = block.maximum(top, m_n)
    weights = [block.exp(m_n - top.finite()) for _, m_n, _ in parts]
    o, l_i = parts[0][0] * weights[0], parts[0][2] * weights[0]
    for (o_n, _, l_n), weight in zip(parts[1:], weights[1:], strict=True):
        o, l_i = o + o_n * weight, l_i + l_n * weight
    return o, top, l_i


def finish(
    block: Block, outputs: Sequence[HbmTensor], found: tuple[Registers, Registers, Registers], rows: int
) -> None:
    """Write the output and the LSE of rows that have seen all their keys. `found` has their maximum, their sum and their output."""
    m_i, l_i, o = found
    block.step("store_o")
    block.store(outputs[0], o / l_i.nonzero(), block.i, rows)
    if len(outputs) > 1:
        block.step("store_lse")
        block.store(outputs[1], m_i + block.log(l_i), block.i, rows)
