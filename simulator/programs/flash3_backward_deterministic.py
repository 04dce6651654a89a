"""FlashAttention-2's backward pass on Hopper, with the same bits in each run: blocks add to dQ in the order of their key tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from simulator.block import Block
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, Walk
from simulator.program import program
from simulator.programs import flash3_backward as unordered
from simulator.programs.dropout import of_kept
from simulator.programs.flash2_backward import prepare
from simulator.programs.flash3 import PANEL, triangular
from simulator.registers import Registers
from simulator.tensors import HbmTensor

FEW = 10
"""Under a causal mask so many key tiles of a head cost no time by their turns, about."""
LATE = 1.5
"""Without a mask, so many visits of an SM for each pair of a head's key tiles are enough, about."""
LATE_NARROW = 6
"""The same at head dims up to 64."""


class InTurn(unordered.Turns):
    """In the order of key tiles. The first one writes its part, and the last one writes dQ. A counter per query tile, at its first
    row, says whose turn it is."""

    def prepare(self, out: HbmTensor, dout: HbmTensor, dq_sum: HbmTensor) -> HbmTensor:
        """Sets the counters to the first key tiles that the queries see. dQ of queries that see none is 0."""
        problem, tile = self.problem, self.tile
        self.turns = self.m.workspace("turns", 1, "int32", vector=True).firsts(tile.rows)

        def begin(block: Block) -> None:
            block.step("zero_dq")
            block.store(self.turns, block.full(1, 1, 0.0), block.i, 1)
            if not block.walk:
                block.store(self.dq, block.full(tile.rows, self.dq.cols, 0.0), block.i, tile.rows)

        def walk(i: int) -> range:
            return range(bool(problem.tiles_of_row(i, tile)))

        return prepare("flash3_backward", self.m, out, dout, rows=tile.rows, walk=walk, begin=begin)

    def apart(self) -> Callable[[int], object]:
        """At which query tiles a key tile comes first, and at which last."""
        visible = partial(self.problem.transposed.tiles_of_row, tile=Tile(self.tile.cols, self.tile.rows))
        return lambda j: tuple(self._place(i, j) for i in visible(j))

    def announce(self, block: Block) -> None:
        """Where in the order this block comes."""
        block.leave("place")

    def walk(self, walk: Walk) -> Iterable[int]:
        """From the last query tile to the first: blocks that begin together wait least so."""
        return reversed(walk)

    def add(self, block: Block, dq_sum: HbmTensor, part: Registers, i: int, rows: int, head: int) -> None:
        """Wait until all key tiles before this one have added, add, and let the next one."""
        first, last = self._place(i, int(np.ravel(block.i)[0]))
        sums, turns = dq_sum.head(head), self.turns.head(head)
        part = part.columns(0, dq_sum.cols)  # the products go over whole boxes
        block.fetch(turns, i, 1)
        block.hear("place", 4 * self.m.config.consumers)
        if not last:
            if first:
                block.store(sums, part, i, rows)
            else:
                block.atomic_add(sums, part, i, rows)
            block.arrive(turns, i)
            return
        total = part if first else block.fetch(sums, i, rows) + part
        block.arrive(turns, i)
        total = total * of_kept(self.problem.scale, self.problem)
        block.store(self.dq.head(head), total.columns(0, self.dq.cols), i, rows)

    def finish(self, dq_sum: HbmTensor) -> None:
        """Nothing is left."""

    def _place(self, i: int, j: int) -> tuple[bool, bool]:
        """Is key tile j the first one of query tile i, and is it the last one?"""
        seen = self.problem.tiles_of_row(i, self.tile)
        return j == seen[0], j == seen[-1]


configure = partial(unordered.configure, in_turn=True)


def pays(problem: Problem, device: Device) -> bool:
    """Is it faster than `flash3_backward`, which sets the sums to 0 first and rounds them in a launch of its own?

    What those launches cost is the smaller a share, the more key tiles a head has. And the last key tile of a head is the later,
    the more there are before it. So without a mask, the square of their number counts, beside all visits of query tiles that an
    SM makes. (They count less at narrow heads, whose blocks are persistent in `flash3_backward`.) Under a causal mask, few key
    tiles cost next to nothing.

    >>> from simulator import DEVICES
    >>> p = Problem(batch=16, heads=16, len_q=1024, head_dim=128, dtype="bfloat16")
    >>> [pays(p.replace(batch=n, causal=causal), DEVICES["h200"]) for causal in (False, True) for n in (16, 4)]
    [True, False, True, True]
    """
    p, tile = problem, unordered.choose_tile(problem)
    tiles = p.key_tiles(tile)
    if triangular(p):
        return tiles <= FEW
    visits = p.batch * p.heads * p.row_tiles(tile) * tiles / device.sms
    enough = (LATE_NARROW if p.head_dim <= PANEL else LATE) * tiles**2
    return p.left is None and p.right is None and p.queries_per_kv == 1 and visits >= enough


@program(configure=configure, operation=BACKWARD)
def flash3_backward_deterministic(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, ...]:
    """`flash3_backward`, in which blocks wait for their turns to add to dQ. All shapes are the same.

    A counter per query tile, at its first row, says which key tile adds to its dQ next. Blocks draw their key tiles from
    another counter, so they wait only for blocks that have begun. The first key tile writes its part of the sum, so nobody sets
    it to 0. The last one reads the sum, adds its part and writes dQ, so no launch rounds the sums.
    """
    return unordered.backward("flash3_backward", m, q, k, v, out, lse, dout, problem, tile, order=InTurn)


ABOUT = {
    "flash3_backward_delta": {
        **unordered.ABOUT["flash3_backward_delta"],
        "zero_dq": "Say which key tile adds to dQ first. dQ of queries that see no key is 0.",
    },
    "flash3_backward": {
        **unordered.ABOUT["flash3_backward"],
        "load_kv": "Draw the next key tile: whoever has a lower number has begun. TMA brings its keys and their values.",
        "dq": "dS K belongs to dQ of these queries. Wait for the key tiles before. The first one writes its part, others add "
        "theirs, and the last one adds its part to what it reads, and writes dQ.",
    },
    **{name: unordered.ABOUT[name] for name in ("flash3_backward_parts", "flash3_backward_sinks")},
}
"""What each step of each launch is for, in a sentence or two: the player's words."""
