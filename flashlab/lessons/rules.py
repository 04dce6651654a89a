"""What an exercise asks of the order of things and of single calls, where neither numbers nor bytes tell.

The watched machine notes what a program does. A rule reads those notes and has one line for the first thing that the text
of the exercise forbids, or "".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple


class Did(NamedTuple):
    """One thing that a block did: a "load", a "product" or a "division" by registers.

    `of` is the tensor that was loaded, or the name of the product's second operand, whose dtype is `dtype`. `where` names
    step and line. `split` and `acc`, was there an accumulator, are those of a product.
    """

    block: int
    what: str
    where: str
    of: str = ""
    dtype: str = ""
    split: Sequence[object] = ()
    acc: bool = False


Rule = Callable[[Sequence[Did]], str]


def _by_block(did: Sequence[Did]) -> list[list[Did]]:
    return [list(group) for _, group in groupby(did, lambda x: x.block)]


def divides_at_the_end(did: Sequence[Did]) -> str:
    """A sum that is divided in each round has to be multiplied back in the next one."""
    for block in _by_block(did):
        last = max((n for n, x in enumerate(block) if x.what == "product"), default=0)
        for x in block[:last]:
            if x.what == "division":
                return f"a division {x.where}, and a product comes after it: divide once, after the last product"
    return ""


def rows_and_none(did: Sequence[Did]) -> str:
    """The warps share the rows of the first operand, and each reads all of the second one."""
    for x in did:
        if x.what == "product" and tuple(x.split) != ("rows", "none"):
            return (
                f'block.matmul {x.where}: split={tuple(x.split)!r}, and this asks for ("rows", "none"): the warps share '
                "the rows of the first operand, and each reads all of the second one"
            )
    return ""


def own_sums(did: Sequence[Did]) -> str:
    """In e4m3 each tile's product is a sum of its own, because the next tile has another scale."""
    for x in did:
        if x.what == "product" and x.acc and x.dtype == "float8_e4m3fn":
            return (
                f"block.matmul {x.where}: with acc= the tensor cores go on with the sum of the tiles before, whose scales are "
                "others; each tile's product is to be a sum of its own, which joins acc in float32"
            )
    return ""


def v_lags_k(did: Sequence[Did]) -> str:
    """S of a tile is issued, and its K loaded, before P V of the tile before."""
    for what, said in (
        ("load", "block.load {}: V of a tile is loaded before K of the next tile: V is to lag K by one"),
        ("product", "block.matmul {}: O += P V of a tile is issued before S of the next tile: V is to lag K by one"),
    ):
        for block in _by_block([x for x in did if x.what == what and x.of in ("k", "v")]):
            tiles = sum(x.of == "k" for x in block)
            seen = {"k": 0, "v": 0}
            for x in block:
                seen[x.of] += 1
                if seen["k"] < min(seen["v"] + 1, tiles):
                    return said.format(x.where)
    return ""
