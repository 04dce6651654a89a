"""The check of ragged batches: sequences of any lengths that lie one behind the other in the rows of one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from flashlab.verify.bench import Arrays, Bench, Failure, Result, Trial, fitted, held, near
from flashlab.verify.cases import EVERY_SCORE, usual
from flashlab.verify.rule import judge
from simulator import Problem
from simulator.operations.attention import ATTENTION

SHORT: list[Any] = [1, 17, 64, 0, 33, 5]
LONG: list[Any] = [3, (71, 131), 2, (0, 9), (40, 0), (31, 12)]
"""One long sequence among short ones, some of them without queries or keys."""
FEW: list[Any] = [(3, 131), (3, 0), (3, 1), (3, 65), (3, 300)]
"""As many queries of each sequence, as those who split the keys want."""
TILE = (64, 32)
"""Both the batch and a sequence alone are run with it, or with the first tile that the target says it takes. The default may be
another one in a ragged batch."""


def ragged(bench: Bench) -> Iterator[Trial]:
    """A sequence of a ragged batch obeys the rule. Its bits are those that it has alone, whatever lies in its neighbours' rows."""
    for dtype in bench.dtypes:
        for word, changes in (
            ("causal, GQA", {"lengths": LONG, "causal": True, "heads": 4, "kv_heads": 2}),
            ("window, short ones", {"lengths": SHORT, "window": (20, 3)}),
            ("soft cap, sinks, ALiBi", {"lengths": LONG, **EVERY_SCORE}),
            ("few queries, causal, GQA", {"lengths": FEW, "causal": True, "heads": 4, "kv_heads": 2}),
            ("few queries, soft cap, sinks", {"lengths": FEW, "soft_cap": 2.0, "sinks": True}),
        ):
            yield fitted(bench, word, usual(dtype, len_q=None, **changes), _ragged, lambda p: p.lengths is not None)


def _ragged(bench: Bench, p: Problem) -> float:
    tile = next(filter(None, bench.target.tiles), TILE)
    arrays = bench.draw(p, "biased")
    expected = bench.expect(p, arrays)
    bench.check_oracles(p, arrays, expected)
    plain = bench.run(p, arrays)
    worst, together = held(judge(expected, plain.out, plain.lse)).worst, bench.run(p, arrays, tile=tile)
    longest = sorted(range(len(p.spans)), key=lambda s: len(p.spans[s][0]))[-2:]
    for s, garbage in zip(longest, (math.inf, math.nan), strict=True):
        with np.errstate(invalid="ignore"):
            littered = bench.run(p, _littered(p, s, arrays, garbage))
        if not _rows(p, s, littered).same_bits(_rows(p, s, plain)):
            raise Failure(f"sequence {s} changes when {garbage} lies in the rows of the others")
        one, alone = p.sequences[s].replace(lengths=None), _cut(p, s, arrays)
        a, b = _rows(p, s, together), bench.run(one, alone, tile=tile)
        if bench.target.bitwise and not a.same_bits(b):
            raise Failure(f"sequence {s} has other bits alone than in a ragged batch of {len(p.spans)}")
        worst = max(worst, near(a, b, bench.expect(one, alone), what=f"sequence {s} alone and in a ragged batch"))
    return worst


def _places(p: Problem, s: int) -> dict[str, slice]:
    """Where a sequence lies along the axes of arrays."""
    rows, keys = p.spans[s]
    return {"len_q": slice(rows.start, rows.stop), "len_kv": slice(keys.start, keys.stop)}


def _cut(p: Problem, s: int, arrays: Arrays) -> dict[str, Any]:
    """The operands of one sequence."""
    return {name: ATTENTION.operand(name).cut(x, _places(p, s)) for name, x in arrays.items()}


def _rows(p: Problem, s: int, result: Result) -> Result:
    """What was returned for one sequence."""
    rows = _places(p, s)["len_q"]
    return Result(result.out[:, :, rows], None if result.lse is None else result.lse[:, :, rows])


def _littered(p: Problem, s: int, arrays: Arrays, garbage: float) -> dict[str, Any]:
    """The operands, with garbage in the rows of all sequences but one."""
    found = dict(arrays)
    for name in "qkv":
        operand, places = ATTENTION.operand(name), _places(p, s)
        found[name] = np.full_like(arrays[name], garbage)
        operand.cut(found[name], places)[...] = operand.cut(arrays[name], places)
    return found
