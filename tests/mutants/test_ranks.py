"""Every seeded bug of the ranks is found by what is always tested: outputs and gradients, events, and what is received."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.parallel import formulas, layouts, ranks
from tests.flashlab.parallel.test_ranks import errors, held_together
from tests.mutants.ranks import RANKS, Bug

P = fl.Problem(
    batch=1, heads=4, kv_heads=2, len_q=16, head_dim=16, head_dim_v=24, dtype="float16", causal=True, scale=0.3, soft_cap=3.0
)  # fmt: skip


def inputs(p: fl.Problem) -> tuple[Any, ...]:
    q, k, v = fl.random_inputs(p, seed=1)
    return q, k, v, np.random.default_rng(2).standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)


def hold(scheme: str) -> None:
    """What all tests of a scheme have in common, in small shapes. Four ranks have fewer KV heads than they are."""
    for n, layout, p in (
        (4, "zigzag", P),
        (2, "zigzag", P.replace(causal=False, len_kv=8)),
        (4, "contiguous", P.replace(batch=2)),
    ):
        p = p.replace(kv_heads=4) if scheme == "heads" else p
        q, k, v, dout = inputs(p)
        how: dict[str, Any] = {"ranks": n, "layout": layout}
        run = ranks.simulate(scheme, q, k, v, dout=dout, **how, **p.masks)
        assert run.events == formulas.count(scheme, p, backward=True, **how).events
        held_together(run.links)
        assert max(errors(run, q, k, v, dout)) <= 1


def hold_striped() -> None:
    p = P.replace(batch=2, len_q=1, len_kv=70, causal=False)
    q, k, v, _ = inputs(p)
    for interleave, size in ((3, None), (2, 8)):
        pages: dict[str, Any] = {} if size is None else {"page_size": size, "lengths": ((1, 70), (1, 9))}
        how: dict[str, Any] = {"ranks": 4, "interleave": interleave, "algorithm": "flash2" if size is None else "paged"}
        run = ranks.simulate("dcp", q, k, v, **{**p.masks, **how, **pages})
        counted = formulas.count("dcp", p.replace(**pages), **how)
        assert run.events == counted.events
        held_together(run.links)
        for b, n in enumerate((70, 9 if pages else 70)):
            alone = fl.naive(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **p.masks)
            np.testing.assert_allclose(run.out[b : b + 1].astype(float), alone.out, atol=3e-3)
            np.testing.assert_allclose(run.lse[b : b + 1], alone.lse, atol=1e-4)
    for rank in range(4):
        assert all(n // 3 % 4 == rank for n in layouts.striped(50, 4, rank, 3))


def hold_own() -> None:
    q, k, v, _ = inputs(P.replace(soft_cap=None, scale=None))
    for scheme in (reuses_a_buffer, leaves_a_message):
        try:
            ranks.simulate(scheme, q, k, v, ranks=4)
        except fl.UsageError as error:
            assert "nobody receives it" in str(error)
        else:
            raise AssertionError(f"{scheme.__name__} passes")


def reuses_a_buffer(rank: Any) -> Any:
    """Sends what it then changes. Whoever receives it has it as it was; the last message is one too many."""
    buffer = rank.k.copy()
    rank.send(rank.right, 0, k=buffer)
    buffer[:] = 0
    came = yield rank.receive(rank.left)
    assert came.any()
    rank.send(rank.right, 1, k=buffer)
    return rank.attend(rank.k, rank.v, of=rank.index)


def leaves_a_message(rank: Any) -> Any:
    rank.send(rank.right, 0, k=rank.k)
    return rank.attend(rank.k, rank.v, of=rank.index)


def hold_sums() -> None:
    """dV of eight ranks is that of one but for steps of the last bit here and there: its sums are rounded once."""
    p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="bfloat16")
    q, k, v, dout = inputs(p)
    one, eight = (ranks.simulate("ring", q, k, v, dout=dout, ranks=n).dv.astype(float) for n in (1, 8))
    assert np.linalg.norm(one - eight) <= 0.05 * np.linalg.norm(one) * 2.0**-8


HOLDS: dict[str, Callable[[], None]] = {
    **{scheme: partial(hold, scheme) for scheme in ("ring", "all_gather", "ulysses", "heads")},
    "dcp": hold_striped,
    "own": hold_own,
    "sums": hold_sums,
}


@pytest.mark.parametrize("by", HOLDS)
def test_without_a_bug_all_holds(by: str):
    HOLDS[by]()


@pytest.mark.parametrize("bug", RANKS, ids=lambda bug: bug.name)
def test_killed(bug: Bug):
    with bug.seeded(), pytest.raises(Exception, match=r"(?s).*") as found:
        HOLDS[bug.by]()
    assert not isinstance(found.value, AttributeError | NameError | SyntaxError), (
        found.value
    )  # the seed itself is at fault


def test_the_zoo_is_as_large_as_claimed():
    assert len({bug.name for bug in RANKS}) == len(RANKS) >= 45
