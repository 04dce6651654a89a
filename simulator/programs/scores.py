"""What a kernel does to scores beside scaling and masking them: soft cap, ALiBi, sinks. And what gradients do to D."""

from __future__ import annotations

import numpy as np

from simulator.block import Block, Rows
from simulator.dtypes import Array
from simulator.machine import Machine
from simulator.problem import Problem
from simulator.registers import Registers


def of_head(name: str, m: Machine, block: Block, warps: int) -> Registers | None:
    """The ALiBi slope or the sink of a block's head, which each of `warps` warps requests, or None without any."""
    has = name in (operand.name for operand in m.operation.taken(m.problem))
    return block.fetch(m.optional(name), 0, 1, warps=warps) if has else None


def of_packed_heads(
    name: str, m: Machine, block: Block, rows: int, *, together: int = 1, warps: int = 1
) -> Registers | None:
    """The sink of the head of each packed row (`Machine.packed`), or None without any.

    `warps` warps finish rows. Each of them requests the sinks of `together` rows at a time, and then a head's sink once.
    """
    if not m.operation.operand(name).when(m.problem):
        return None
    tensor, group = m.optional(name), m.problem.queries_per_kv
    first = np.atleast_1d(block.i) * rows
    inside = np.minimum(m.problem.len_q * group - first, rows)
    block.request(tensor, [(0, 1, 0, 4)] * int(distinct_heads(inside, group, together).sum()), warps=warps)
    data = None
    if m.data:
        heads = (first[:, None] + np.arange(rows)) % group
        data = np.asarray(m.values[name][:, :, heads, 0, 0], np.float32)[:, :, None, ..., None]
    return block.registers(rows, 1, data)


def distinct_heads(rows: Array, group: int, together: int) -> Array:
    """How many heads packed rows have, counted anew for each `together` rows.

    >>> distinct_heads(np.array([20, 3]), group=5, together=8)  # 5 + 5 + 4, and 3
    array([14,  3])
    """
    return rows // together * min(together, group) + np.minimum(rows % together, group)


def soft_cap(block: Block, s: Registers, problem: Problem) -> Registers:
    """cap * tanh(s / cap), as Gemma 2 bounds its scores (arXiv 2408.00118, section 2)."""
    cap = problem.soft_cap
    return s if cap is None else block.tanh(s * (1 / cap)) * cap


def cap_slope(s: Registers, problem: Problem) -> Registers | None:
    """The derivative of the soft cap, 1 - tanh^2, at capped scores, or None without any."""
    cap = problem.soft_cap
    if cap is None:
        return None
    tanh = s * (1 / cap)
    return (tanh * tanh) * -1.0 + 1.0


def less_dlse(m: Machine, block: Block, delta: Registers, i: Rows, rows: int, head: int | None = None) -> Registers:
    """D - dLSE for `rows` rows of tile i, of the `head`-th head of the group: the LSE's derivative by a score is P, too."""
    if not m.problem.dlse:
        return delta
    dlse = m.optional("dlse")
    return delta - block.fetch(dlse if head is None else dlse.head(head), i, rows)


def alibi(block: Block, s: Registers, slope: Registers | None, j: int) -> Registers:
    """s - slope * |i + len_kv - len_q - j|, the bias of ALiBi (arXiv 2108.12409, section 3)."""
    return s if slope is None else s - slope * block.distances(s, block.i, j)


def join_sink(
    block: Block, sink: Registers | None, m_i: Registers, l_i: Registers, acc: Registers
) -> tuple[Registers, Registers, Registers]:
    """m, l and the accumulator of rows that see one key more. Its logit is the sink, and its value is 0.

    So a row may attend to nothing (StreamingLLM, arXiv 2309.17453, found such keys; gpt-oss learns their logits).
    """
    if sink is None:
        return m_i, l_i, acc
    m_new = block.maximum(m_i, sink)
    alpha = block.exp(m_i - m_new.finite())
    return m_new, l_i * alpha + block.exp(sink - m_new.finite()), acc * alpha
