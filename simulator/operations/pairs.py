"""Which pairs of queries and keys a problem's masks show, as arrays of booleans, and the forms in which a mask comes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.dtypes import Array
from simulator.operations.operation import Arrays
from simulator.problem import Problem


def distances(problem: Problem) -> Array:
    """How far key j is from the key that query i is aligned with, |i + len_kv - len_q - j|, (len_q, len_kv)."""
    return np.abs(_behind(problem))


def _behind(problem: Problem) -> Array:
    """How far key j lies behind the key that query i is aligned with, (len_q, len_kv). Hidden pairs have some number."""
    shifts, rows = zip(*((keys.stop - rows.stop, len(rows)) for rows, keys in problem.spans), strict=True)
    return np.arange(problem.len_kv) - (np.arange(problem.len_q) + np.repeat(shifts, rows))[:, None]


def hidden_pairs(problem: Problem) -> Array:
    """Is key j hidden from query i? A boolean array (len_q, len_kv)."""
    p, distance = problem, _behind(problem)
    rows, keys = (np.repeat(np.arange(len(p.spans)), [len(x) for x in each]) for each in zip(*p.spans, strict=True))
    hidden: Array = rows[:, None] != keys
    if p.right is not None:
        hidden = np.logical_or(hidden, distance > p.right)
    if p.left is not None:
        hidden = np.logical_or(hidden, -distance > p.left)
    return hidden


def visible_pairs(problem: Problem, arrays: Arrays) -> Array:
    """Does query i see key j? A boolean array (len_q, len_kv), of causal mask, window and the array `mask` together."""
    visible = ~hidden_pairs(problem)
    return visible & shown_pairs(problem, arrays[mask_operand(problem)]) if problem.mask else visible


def mask_operand(problem: Problem) -> str:
    """The operand that a problem's mask is."""
    return "block_mask" if problem.mask == "blocks" else "mask"


def shown_pairs(problem: Problem, mask: Array) -> Array:
    """Which pairs the mask of a problem shows, (len_q, len_kv), whatever its form."""
    p = problem
    if p.mask == "dense":
        return mask.reshape(p.len_q, p.len_kv) != 0
    if p.mask == "blocks":
        lists, (rows, cols) = mask.reshape(p.row_blocks, p.block_list).astype(np.int64), p.block
        blocks = np.zeros((p.row_blocks, p.block_list - 1), bool)
        listed = np.arange(p.block_list - 1) < lists[:, :1]
        blocks[np.nonzero(listed)[0], lists[:, 1:][listed]] = True
        return np.repeat(np.repeat(blocks, rows, 0), cols, 1)[: p.len_q, : p.len_kv]
    shown, packed = np.zeros((p.len_q, p.len_kv), bool), mask.reshape(-1).astype(np.uint8)
    for own, bits in _each_own(p, shown):
        own[...] = np.unpackbits(packed[bits.start : bits.stop], count=own.size, bitorder="little").reshape(own.shape)
    return shown


def packed_bits(problem: Problem, shown: Array) -> Array:
    """The mask of bits that shows these pairs, (len_q, len_kv): what `shown_pairs` undoes. Other sequences' keys are left out.

    >>> p = Problem(batch=1, heads=1, len_q=2, len_kv=5, head_dim=8, dtype="float16", mask="bits")
    >>> packed_bits(p, np.eye(2, 5, dtype=bool)).tolist()  # bits 0 and 6
    [65, 0]
    """
    packed = np.zeros(problem.bit_bytes, np.uint8)
    for own, bits in _each_own(problem, shown):
        packed[bits.start : bits.stop] = np.packbits(own, bitorder="little")
    return packed


def block_lists(visible: Array) -> Array:
    """The lists of blocks for booleans (row_blocks, key_blocks): how many are visible, these, and behind them the others.

    >>> block_lists(np.array([[False, True, True], [False, False, False]])).tolist()
    [[2, 1, 2, 0], [0, 0, 1, 2]]
    """
    order = np.argsort(~visible, axis=1, kind="stable")
    return np.concatenate([visible.sum(1, keepdims=True), order], axis=1).astype(np.int32)


def _each_own(problem: Problem, pairs: Array) -> Iterator[tuple[Array, range]]:
    """Of each sequence a view of its own queries and keys, and which bytes of a mask of bits it has."""
    for (rows, keys), bits in zip(problem.spans, problem.bit_spans, strict=True):
        yield pairs[rows.start : rows.stop, keys.start : keys.stop], bits
