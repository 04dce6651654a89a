"""Hypothesis strategies: random problems, tiles, devices."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from simulator import CATALOGUE, DEVICES, Device, HbmTensor, Machine, Problem, Tile, catalogue
from simulator.problem import FIELDS, SCORES

DTYPES = ("float32", "float16", "bfloat16")
ALGORITHMS = tuple(catalogue.of())
FP8 = "float8_e4m3fn"


def taken_by(algorithm: str, problem: Problem) -> Problem:
    """The problem, in another dtype if an algorithm doesn't take its own, with its widest heads if its kernels take none that
    wide, with no more queries than they take, and without what it doesn't know of windows and scores."""
    row = CATALOGUE[algorithm]
    problem = row.support.fitted(problem)
    if (widest := row.support.head_dims[-1]) < problem.head_dim:
        problem = problem.replace(head_dim=widest, head_dim_v=widest)
    problem = problem.replace(
        **{name: FIELDS[name].default for name in ("window", *SCORES) if name not in row.support.masks}
    )
    return problem if row.refusal(problem) is None else problem.replace(dtype=row.dtypes[0])


def zeros(m: Machine, problem: Problem, tile: Tile) -> HbmTensor:
    """The output of a program that is about something else: full of zeros."""
    out = m.output("out")
    for block in m.launch("zeros", rows=problem.row_tiles(tile), warps=1):
        block.step("zeros")
        block.store(out, block.full(tile.rows, out.cols, 0.0), block.i, tile.rows)
    return out


_side = st.none() | st.integers(0, 60)

scores: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"soft_cap": st.sampled_from([None, 5.0, 0.3]), "sinks": st.booleans(), "alibi": st.booleans()}
)
"""What changes the scores of a problem; most algorithms know none of it."""


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    longest: int = 150,
    dims: st.SearchStrategy[int] | None = None,
    scores: st.SearchStrategy[dict[str, Any]] | None = None,
) -> Problem:
    """Every option of `Problem`: GQA, ragged lengths, zero lengths, windows, odd head dims, head_dim_v, a scale."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dim = draw(dims if dims is not None else st.sampled_from([1, 8, 16, 40, 64, 72, 96, 111, 128, 256]))
    return Problem(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        len_q=draw(st.integers(0, longest)),
        len_kv=draw(st.none() | st.integers(0, longest)),
        head_dim=dim,
        head_dim_v=draw(st.none() | st.sampled_from([8, 24, 72])),
        dtype=draw(st.sampled_from(DTYPES)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(_side, _side)),
        scale=draw(st.none() | st.sampled_from([1.0, 0.3])),
        **(draw(scores) if scores is not None else {}),
    )


tiles = st.builds(Tile, st.integers(1, 70), st.integers(1, 70))
"""Any tile, the kernels' multiples of 16 and others."""

kernel_tiles = st.builds(Tile, st.sampled_from([16, 32, 64, 128]), st.sampled_from([16, 32, 64, 128]))

devices: st.SearchStrategy[Device] = st.sampled_from(sorted(DEVICES.values(), key=lambda d: d.name))

ROOMY = DEVICES["b200"].replace(name="roomy", sram_per_block=1 << 20)
"""A device on which every tile fits."""
SLOW = ROOMY.replace(name="slow", sms=20, tensor_flops=1e9)
"""There a backward pass takes the heads of a group in parts: one launch more is nothing to the products."""
