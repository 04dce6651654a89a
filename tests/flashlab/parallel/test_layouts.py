"""Which rows a rank holds."""

from __future__ import annotations

import re

import numpy as np
import pytest

import flashlab as fl
from flashlab.parallel import layouts


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_row_lies_on_one_rank_and_all_ranks_have_as_many(layout: str, ranks: int):
    held = [layouts.rows(layout, 48, ranks, rank) for rank in range(ranks)]
    assert {len(rows) for rows in held} == {48 // ranks}
    order = layouts.order(layout, 48, ranks)
    assert sorted(order) == list(range(48)) and np.array_equal(order, np.concatenate(held))
    assert np.array_equal(order[np.argsort(order)], np.arange(48))


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_under_a_causal_mask_all_ranks_of_a_zigzag_see_as_much(ranks: int):
    """Row i sees i + 1 keys. Contiguous rows are the contrast: there the last rank sees most."""
    seen = {
        layout: [int((layouts.rows(layout, 160, ranks, rank) + 1).sum()) for rank in range(ranks)]
        for layout in layouts.LAYOUTS
    }
    assert len(set(seen["zigzag"])) == 1
    assert seen["contiguous"] == sorted(set(seen["contiguous"]))


@pytest.mark.parametrize(("interleave", "length"), [(1, 0), (1, 37), (4, 37), (64, 37)])
def test_a_striped_cache_grows_evenly(interleave: int, length: int):
    held = [layouts.striped(length, 4, rank, interleave) for rank in range(4)]
    assert sorted(np.concatenate(held)) == list(range(length))
    assert max(map(len, held)) - min(map(len, held)) <= interleave
    assert all(n // interleave % 4 == rank for rank, keys in enumerate(held) for n in keys)


def test_bad_layouts_are_a_line():
    for call, line in (
        (lambda: layouts.rows("zigzag", 12, 4, 0), "length = 12: expected a multiple of 8: zigzag deals 8 chunks to 4 ranks"),
        (lambda: layouts.order("contiguous", 10, 4, argument="len_q"),
         "len_q = 10: expected a multiple of 4: contiguous deals 4 chunks to 4 ranks"),
        (lambda: layouts.rows("zigzags", 16, 4, 0),
         "layout = 'zigzags': expected one of contiguous, zigzag (did you mean zigzag?)"),
    ):  # fmt: skip
        with pytest.raises(fl.UsageError, match=f"^{re.escape(line)}$"):
            call()


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_zigzag_is_the_order_of_torchs_head_tail_balancer(ranks: int):
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    theirs = _load_balancer._HeadTailLoadBalancer(64, ranks, "cpu")
    assert np.array_equal(layouts.order("zigzag", 64, ranks), theirs._generate_indices()[0].numpy())
    assert np.array_equal(
        np.argsort(layouts.order("zigzag", 64, ranks)), theirs._generate_indices(restore=True)[0].numpy()
    )
