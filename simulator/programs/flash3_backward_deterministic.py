"""FlashAttention-2's backward pass on Hopper, with the same bits in each run: blocks add to dQ in the order of their key tiles."""

from __future__ import annotations

from functools import partial

from simulator.block import Block
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash2_backward_deterministic as ordered
from simulator.programs import flash3_backward as unordered
from simulator.tensors import HbmTensor


class InTurn(ordered.InTurn):
    """In the order of key tiles. The first launch sets the counters to the first key tiles that the queries see."""

    ZEROS = False

    def begin(self, block: Block) -> None:
        block.store(self.turns, block.full(1, 1, 0.0), block.i, 1)


configure = partial(unordered.configure, in_turn=True)


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
    another counter, so they wait only for blocks that have begun.
    """
    return unordered.backward("flash3_backward", m, q, k, v, out, lse, dout, problem, tile, order=InTurn)


_MAIN = {
    **unordered.ABOUT["flash3_backward"],
    "load_kv": "Draw the next key tile from a counter: whoever has a lower number has begun. TMA brings its keys and their values.",
    "dq": "dS K belongs to dQ of these queries. Wait until the key tiles before have added theirs, add this one, and count up.",
}
ABOUT = unordered.ABOUT | {"flash3_backward": _MAIN}
"""What each step of each launch is for, in a sentence or two: the player's words."""
