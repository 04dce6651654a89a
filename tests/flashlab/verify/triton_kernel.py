"""FlashAttention-2's forward in Triton, as short as it gets: what a user might bring to `fl.verify`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(
    q, k, v, out, lse, scale, len_q, len_kv, group, dim, CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inside = tl.arange(0, DIM), row < len_q
    visible = (row[:, None] < len_q) & (column[None, :] < dim)
    q_i = tl.load(q + (head * len_q + row[:, None]) * dim + column[None, :], mask=visible, other=0.0)
    m, l = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, DIM), tl.float32)
    for first in range(0, len_kv, KEYS):
        key = first + tl.arange(0, KEYS)
        there = (key[:, None] < len_kv) & (column[None, :] < dim)
        place = ((head // group) * len_kv + key[:, None]) * dim + column[None, :]
        k_j, v_j = tl.load(k + place, mask=there, other=0.0), tl.load(v + place, mask=there, other=0.0)
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale
        if MASKED:
            s = tl.where(key[None, :] < len_kv, s, float("-inf"))
        if CAUSAL:
            s = tl.where(key[None, :] <= row[:, None] + len_kv - len_q, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp(s - base[:, None]), tl.exp(m - base)
        l = alpha * l + tl.sum(p, 1)
        o = alpha[:, None] * o + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
        m = m_new
    o = o / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out + (head * len_q + row[:, None]) * dim + column[None, :], o, mask=visible)
    tl.store(lse + head * len_q + row, m + tl.log(tl.where(l > 0, l, 1.0)), mask=inside)


def attention(q: Any, k: Any, v: Any, causal: bool, scale: float, masked: bool = True) -> Any:
    """(out, lse) of tensors (batch, heads, length, head_dim)."""
    (batch, heads, len_q, dim), (kv_heads, len_kv) = q.shape, k.shape[1:3]
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), torch.empty((batch, heads, len_q), dtype=torch.float32, device=q.device)
    if out.numel():
        _forward[(triton.cdiv(len_q, 32), batch * heads)](
            q, k, v, out, lse, scale, len_q, len_kv, heads // kv_heads, dim, causal, masked, 32, 32,
            max(16, triton.next_power_of_2(dim)),
        )  # fmt: skip
    return out, lse
