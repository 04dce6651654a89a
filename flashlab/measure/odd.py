"""Cells off the beaten track, drawn by a seed before anything was timed there: `flashlab bench flash3 --odd`.

Nobody tuned a kernel on them. Lengths fill no tile, head dims are those between the usual ones, groups of heads share a KV head,
queries and keys differ in number, and heads are one or hundreds. Of a backward pass some cells are ragged batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from flashlab.measure.speed import Cell
from simulator import Problem

__all__ = ["OddCell", "RaggedCell", "backward_cells", "cells"]

_WORK = 2e12
"""FLOPs of a cell, at most: about 4 ms."""
_TILE = 64  # no length is a multiple of it, so none fills a tile
_ROOM = 16_384
"""Tokens of a ragged batch, at most."""


@dataclass(frozen=True)
class OddCell(Cell):
    """One problem. `length` is that of the queries, and a causal mask is aligned bottom-right."""

    batch: int
    heads: int
    kv_heads: int
    len_kv: int

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            len_q=self.length,
            len_kv=self.len_kv,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
        )

    @property
    def flops(self) -> float:
        """Of a forward pass: 4 · head dim · heads · pairs of a query and a key that it sees."""
        pairs = self.length * self.len_kv - (self.length * (self.length - 1) // 2 if self.causal else 0)
        return 4.0 * self.batch * self.heads * self.head_dim * pairs

    @property
    def shape(self) -> str:
        return f"{self.batch} × ({self.heads}, {self.kv_heads}) × {self.length:,} × {self.len_kv:,}"


@dataclass(frozen=True)
class RaggedCell(Cell):
    """A ragged batch: self-attention over sequences of any `lengths`, whose sum is `length`."""

    heads: int
    kv_heads: int
    lengths: tuple[int, ...]

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            lengths=list(self.lengths),
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
        )

    @property
    def flops(self) -> float:
        """Of a forward pass: 4 · head dim · heads · pairs of a query and a key that it sees."""
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        return 4.0 * self.heads * self.head_dim * pairs

    @property
    def shape(self) -> str:
        many, least, most = len(self.lengths), min(self.lengths), max(self.lengths)
        return f"({self.heads}, {self.kv_heads}) × {many} sequences of {least:,} to {most:,}"


def cells(seed: int = 0, number: int = 24) -> list[OddCell]:
    """The cells of a seed. One has a single head, one 512 heads and one 65k tokens; the others are drawn whole.

    >>> len(cells()), cells()[:2] == cells()[:2], cells(0)[3] == cells(1)[3]
    (24, True, False)
    >>> [cell.shape for cell in cells()[:3]]
    ['1 × (1, 1) × 7,020 × 7,020', '1 × (512, 128) × 1,683 × 2,709', '1 × (4, 4) × 65,521 × 65,521']
    """
    random = Random(seed)
    found = [
        _drawn(random, head_dim=128, heads=1),
        _drawn(random, head_dim=64, heads=512),
        _drawn(random, length=65_521),
    ]
    while len(found) < number:
        found.append(_drawn(random))
    return found


def backward_cells(seed: int = 0, number: int = 12) -> list[OddCell | RaggedCell]:
    """The cells of a seed for a backward pass. Each third one is a ragged batch; head dims and masks take turns.

    >>> len(backward_cells()), backward_cells() == backward_cells(), backward_cells(0)[2] == backward_cells(1)[2]
    (12, True, False)
    >>> [cell.shape for cell in backward_cells()[:2]]
    ['(16, 4) × 3 sequences of 1,406 to 8,110', '3 × (8, 1) × 5,340 × 5,340']
    """
    random = Random(f"backward {seed}")
    found: list[OddCell | RaggedCell] = []
    for i in range(number):
        head_dim, causal = (96, 192, 64, 128)[i % 4], (i + i // 4) % 2 == 0
        drawn = _ragged(random, head_dim) if i % 3 == 0 else _drawn(random, head_dim, groups=(4, 8))
        found.append(replace(drawn, causal=causal))
    return found


def _ragged(random: Random, head_dim: int) -> RaggedCell:
    group, kv_heads = random.choice([1, 4, 8]), random.choice([2, 4])
    lengths, longest = list[int](), random.choice([1000, 4000, 9000])
    while sum(lengths) + (drawn := random.randint(130, longest)) <= _ROOM:
        lengths += [drawn] if drawn % _TILE else []
    return RaggedCell(
        dtype=random.choice(["bfloat16", "float16"]),
        head_dim=head_dim,
        causal=random.random() < 0.5,
        length=sum(lengths),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        lengths=tuple(lengths),
    )


def _drawn(
    random: Random, head_dim: int = 0, heads: int = 0, length: int = 0, groups: Sequence[int] = (1, 1, 4, 8)
) -> OddCell:
    while True:
        group = random.choice(groups)
        dim = head_dim or random.choice([64, 80, 96, 128, 160, 192])
        kv_heads = 1 if heads == 1 else random.choice([1, 2, 4, 8, 16])
        many = heads or kv_heads * group
        queries = length or random.randint(130, 9000)
        keys = queries if random.random() < 0.6 else random.randint(queries, 3 * queries)
        cell = OddCell(
            dtype=random.choice(["bfloat16", "float16"]),
            head_dim=dim,
            causal=random.random() < 0.5,
            length=queries,
            batch=1 if length or heads else random.choice([1, 2, 3, 5]),
            heads=many,
            kv_heads=many // group if many % group == 0 else many,
            len_kv=keys,
        )
        if cell.flops <= _WORK * (8 if length else 1) and queries % _TILE and keys % _TILE:
            return cell
