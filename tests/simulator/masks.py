"""Masks for tests: random pairs, with whole blocks of them hidden or visible, rows that see nothing, one visible key."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.pairs import block_lists, packed_bits


def blocky(problem: Problem, *, seed: int, density: float, block: int) -> Array:
    """Booleans (len_q, len_kv): of squares of `block` pairs a third is hidden, a third visible, and the rest random."""
    rng, shape = np.random.default_rng(seed), (problem.len_q, problem.len_kv)
    squares = rng.integers(0, 3, [-(-n // block) for n in shape])
    kind = np.kron(squares, np.ones((block, block), int))[: shape[0], : shape[1]]
    mask = np.where(kind == 2, rng.random(shape) < density, kind == 1)
    mask[rng.random(shape[0]) < 0.1] = False
    return mask


def lone(problem: Problem, *, seed: int) -> Array:
    """Booleans of which one is True, if there is any."""
    mask = np.zeros((problem.len_q, problem.len_kv), bool)
    if mask.size:
        mask.flat[np.random.default_rng(seed).integers(mask.size)] = True
    return mask


def formed(problem: Problem, shown: Array) -> Array:
    """The pairs that a mask shows, as an array of the problem's form."""
    if problem.mask == "blocks":  # those of whose pairs the first is shown
        rows, cols = problem.block
        return block_lists(shown[::rows, ::cols])
    return packed_bits(problem, shown) if problem.mask == "bits" else shown


@st.composite
def masks(draw: st.DrawFn, problem: Problem) -> Array:
    """Any of them, and masks that hide all or nothing, in the problem's form."""
    return formed(problem, draw(_shown(problem)))


@st.composite
def _shown(draw: st.DrawFn, problem: Problem) -> Array:
    seed = draw(st.integers(0, 99))
    kind = draw(st.sampled_from(["blocky", "blocky", "blocky", "lone", "all", "none"]))
    if kind == "blocky":
        density, block = draw(st.sampled_from([0.02, 0.5, 0.98])), draw(st.sampled_from([16, 40, 64]))
        return blocky(problem, seed=seed, density=density, block=block)
    return lone(problem, seed=seed) if kind == "lone" else np.full((problem.len_q, problem.len_kv), kind == "all")
