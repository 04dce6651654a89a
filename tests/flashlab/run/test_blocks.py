"""Lists of blocks, made of what other libraries have: torch's BlockMask, and the indptr and indices of a matrix in BSR."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import memory
from simulator.dtypes import Array
from simulator.operations.pairs import block_lists

VISIBLE = np.array([[True, False, True], [False, False, False]])


def ordered(visible: Array) -> tuple[Array, Array]:
    """`kv_num_blocks` and `kv_indices`, with axes of batch and heads, as torch has them."""
    lists = block_lists(visible)
    return lists[None, None, :, 0], lists[None, None, :, 1:]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 99))
def test_all_say_the_same(rows: int, columns: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    visible = random.integers(0, 2, (rows, columns), bool)
    full = visible & random.integers(0, 2, (rows, columns), bool)
    lists = block_lists(visible)
    assert fl.block_mask(*ordered(visible)).tolist() == lists.tolist()
    number, indices = ordered(visible & ~full)
    full_number, full_indices = ordered(full)
    whole = SimpleNamespace(
        kv_num_blocks=number, kv_indices=indices, full_kv_num_blocks=full_number, full_kv_indices=full_indices
    )
    assert fl.block_mask(whole).tolist() == lists.tolist()
    indptr = np.concatenate([[0], visible.sum(1).cumsum()])
    found = fl.block_mask(indptr=indptr, indices=np.nonzero(visible)[1], key_blocks=columns)
    assert found.tolist() == lists.tolist() and found.dtype == np.int32


NUMBER, INDICES = (x[0, 0] for x in ordered(VISIBLE))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "kv_num_blocks = NoneType: expected an array of integers (row_blocks,)"),
        ({"kv_num_blocks": NUMBER}, "kv_indices = NoneType: expected an array of integers (row_blocks, key_blocks)"),
        ({"kv_num_blocks": NUMBER[:1], "kv_indices": INDICES}, "kv_num_blocks.shape = (1,): expected (2,), as many rows as"),
        ({"kv_num_blocks": NUMBER * 2.0, "kv_indices": INDICES}, "kv_num_blocks.dtype = 'float64': expected integers"),
        ({"kv_num_blocks": np.array([4, 0]), "kv_indices": INDICES}, "kv_num_blocks[0] = 4: expected 0 to 3, the key blocks"),
        ({"kv_num_blocks": NUMBER, "kv_indices": INDICES + 1}, "kv_indices of row 0 = 3: expected a key block, 0 to 2"),
        ({"kv_num_blocks": np.stack([NUMBER, NUMBER]), "kv_indices": INDICES}, "kv_num_blocks.shape = (2, 2): expected integers "
         "(row_blocks,): all batches and heads share a mask"),
        ({"kv_num_blocks": NUMBER, "kv_indices": INDICES, "full_kv_num_blocks": NUMBER, "full_kv_indices": INDICES[:, :2]},
         "full_kv_indices of row 0 = 2: expected a key block, 0 to 1"),
        ({"indptr": np.array([0, 1])}, "indices = NoneType: expected an array of integers (blocks,)"),
        ({"indptr": np.array([0, 1]), "indices": np.array([0])}, "key_blocks = None: expected how many key blocks there are"),
        ({"indptr": np.array([0, 2]), "indices": np.array([0]), "key_blocks": 3}, "indptr = [0, 2]: expected numbers that rise "
         "from 0 to 1, the length of indices"),
        ({"indptr": np.array([0, 1]), "indices": np.array([3]), "key_blocks": 3}, "indices of row 0 = 3: expected a key block"),
        ({"indptr": np.array([0, 1]), "indices": np.array([0]), "key_blocks": 2**40},
         "key_blocks = 1099511627776: expected at most 2,147,483,646, as int32 holds"),
        ({"kv_num_blocks": NUMBER, "indptr": np.array([0]), "indices": np.array([0])}, "kv_num_blocks = 'given': expected None"),
        ({"kv_num_blocks": NUMBER, "kv_indices": INDICES, "key_blocks": 3}, "key_blocks = 3: expected None: kv_indices says it"),
    ],
)  # fmt: skip
def test_bad_lists_get_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.UsageError) as refused:
        fl.block_mask(**given)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_lists_that_memory_does_not_hold_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda: 1 << 30)
    with pytest.raises(fl.UsageError, match=r"^memory = the lists of blocks, 26 GiB: expected at most the 1 GiB"):
        fl.block_mask(indptr=np.array([0, 1]), indices=np.array([0]), key_blocks=2**30)


def test_the_facade_takes_them() -> None:
    p = fl.Problem(batch=1, heads=2, len_q=200, len_kv=300, head_dim=16, dtype="float16", causal=True)
    q, k, v = fl.random_inputs(p)
    lists = fl.block_mask(np.array([1, 2]), np.array([[0, 1, 2], [0, 2, 1]]))
    ours = fl.attention(q, k, v, block_mask=lists, causal=True, backend="emulator")
    np.testing.assert_allclose(ours.astype(float), fl.naive(q, k, v, block_mask=lists, causal=True).out, atol=5e-3)
