"""The check of dropout: which weights are kept is read off bit by bit, and what is left obeys the rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flashlab.verify.adapter import CallableTarget
from flashlab.verify.bench import Bench, Failure, Trial, fitted, held, visible
from flashlab.verify.cases import EVERY_SCORE, usual
from flashlab.verify.rule import judge
from simulator import Problem
from simulator.operations.attention import UNIT
from simulator.philox import kept_weights


def dropout(bench: Bench) -> Iterator[Trial]:
    """Exactly the weights that seed, offset, head, row and column say are dropped, at every tile; the LSE has all of them.

    Which weights an outsider's function drops is its own affair.
    """
    if isinstance(bench.target, CallableTarget):
        return
    for dtype in bench.dtypes:
        for word, changes in (
            ("which are kept", {"len_q": 70, "len_kv": 64}),
            ("which are kept, causal, GQA, batch 2",
             {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 50, "len_kv": 61, "causal": True}),
            ("which are kept, one in 256", {"len_q": 150, "len_kv": 64, "dropout": 0.996}),
            ("which are kept, several tiles of keys", {"len_q": 40, "len_kv": 128, "head_dim": 128}),
            ("which are kept, one query", {"heads": 3, "len_q": 1, "len_kv": 60}),
        ):  # fmt: skip
            p = usual(dtype, **{"dropout": 0.25, **changes})
            yield fitted(bench, word, p, _which, lambda p: p.dropout and p.len_kv <= p.head_dim_v)
        for word, changes in (
            ("normal, causal", {"dropout": 0.1, "causal": True}),
            ("long rows, GQA", {"dropout": 0.5, "heads": 4, "kv_heads": 2, "len_q": 20, "len_kv": 513}),
            ("window, more queries", {"dropout": 0.25, "len_q": 150, "len_kv": 70, "window": (40, 30)}),
            ("soft cap, sinks, ALiBi", {"dropout": 0.25, "len_kv": 150, **EVERY_SCORE}),
            ("a mask", {"dropout": 0.25, "len_kv": 150, "mask": "dense"}),
        ):
            yield fitted(bench, word, usual(dtype, **changes), _rule, lambda p: p.dropout)


def _which(bench: Bench, p: Problem) -> None:
    arrays = bench.draw(p)
    arrays["q"][...] = arrays["v"][...] = 0
    arrays["rng_state"][1] |= (1 << 32) - 1  # heads carry into its upper half
    keys = np.arange(p.len_kv)
    arrays["v"][:, :, keys, keys] = 1
    seen = np.broadcast_to(visible(p, bench.target), (p.batch, p.heads, p.len_q, p.len_kv))
    z = kept_weights(p, arrays["rng_state"]).reshape(seen.shape)
    number = seen.sum(-1, keepdims=True)
    wanted = seen * z / np.maximum(1, number)
    bench.check_oracles(p, arrays, bench.expect(p, arrays))
    for tile in bench.target.tiles:
        result = bench.run(p, arrays, tile=tile)
        got = result.out[..., : p.len_kv].astype(np.float64)
        if (wrong := (got != 0) != (wanted != 0)).any():
            b, h, i, j = np.argwhere(wrong)[0].tolist()
            verb = "keeps" if got[b, h, i, j] else "drops"
            raise Failure(
                f"batch {b}, head {h}: row {i} {verb} key {j}, and {int(wrong.sum())} weights are wrong in all"
            )
        if (off := np.abs(got - wanted) > 3 * UNIT[p.dtype] * wanted).any():
            b, h, i, j = np.argwhere(off)[0].tolist()
            said = f"batch {b}, head {h}, row {i} gives key {j} the weight"
            raise Failure(f"{said} {got[b, h, i, j]:.5g}, not {wanted[b, h, i, j]:.5g}")
        if result.lse is not None:
            with np.errstate(divide="ignore"):
                logs = np.log(number[..., 0])
            if not np.isclose(result.lse, logs, rtol=0, atol=2e-5).all():
                raise Failure("the LSE isn't that of all weights")


def _rule(bench: Bench, p: Problem) -> float:
    arrays = bench.draw(p)
    expected = bench.expect(p, arrays)
    bench.check_oracles(p, arrays, expected)
    result = bench.run(p, arrays)
    return held(judge(expected, result.out, result.lse)).worst
