"""A block table of FlashInfer's indptr, indices and last pages: the same pages, and every malformed one in one line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl


def triple(requests: list[list[int]], last: list[int]) -> dict[str, Any]:
    """Lists of pages as FlashInfer has them."""
    return {
        "indptr": np.cumsum([0, *map(len, requests)], dtype=np.int32),
        "indices": np.array([page for each in requests for page in each], np.int32),
        "last_page_len": np.array(last, np.int32),
    }


@given(
    st.data(),
    st.integers(1, 20),
    st.lists(st.lists(st.integers(0, 99), max_size=7), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_a_request_has_its_pages_and_as_many_keys(
    data: st.DataObject, size: int, requests: list[list[int]], spare: int
) -> None:
    last = [data.draw(st.integers(1, size)) if pages else data.draw(st.integers(-1, 99)) for pages in requests]
    given_ = triple(requests, last)
    given_["indices"] = np.concatenate([given_["indices"], np.full(spare, -7, np.int32)])
    found = fl.block_table(**given_, page_size=size, pages=100)
    table, lengths = found["block_table"], found["seq_lens"]
    assert table.dtype == lengths.dtype == np.int32
    for pages, n, line, length in zip(requests, last, table, lengths, strict=True):
        keys = [(page, row) for page in pages for row in range(size)][: len(pages) * size - (size - n if pages else 0)]
        assert [(int(line[key // size]), key % size) for key in range(length)] == keys
        assert not line[len(pages) :].any()


def test_the_call_reads_the_requests_keys() -> None:
    p = fl.Problem(
        batch=3, heads=4, kv_heads=2, lengths=[(1, 21), (1, 0), (1, 8)], head_dim=16, dtype="float16", page_size=8
    )
    arrays: Any = fl.CATALOGUE["paged"].operation.draw(p)
    table = arrays["block_table"]
    made = fl.block_table(
        **triple([table[0, :3].tolist(), [], table[2, :1].tolist()], [5, 0, 8]), page_size=8, pages=p.pages
    )
    assert made["seq_lens"].tolist() == [21, 0, 8]
    pools = np.stack([arrays["k"], arrays["v"]], 1).swapaxes(2, 3).copy()  # K and V in one, NHD
    k, v = (pools[:, i].swapaxes(1, 2) for i in range(2))
    found = fl.simulate("paged", arrays["q"], k, v, **made).out
    assert found.tobytes() == fl.simulate("paged", **arrays).out.tobytes()


GOOD = triple([[2, 5, 0], [1]], [6, 16])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"indptr": np.array([0, 3, 2])}, "indptr = [0, 3, 2]: expected two or more numbers that rise from 0 to at most 4"),
        ({"indptr": np.array([1, 3, 4])}, "indptr = [1, 3, 4]"),
        ({"indptr": np.array([0, 3, 5])}, "indptr = [0, 3, 5]"),
        ({"indptr": np.array([0])}, "indptr = [0]"),
        ({"indptr": [0, 3, 4]}, "indptr = list: expected an array of integers (requests + 1,)"),
        ({"indptr": np.array([[0, 3, 4]])}, "indptr.shape = (1, 3): expected integers (requests + 1,)"),
        ({"indices": np.array([2.0, 5, 0, 1])}, "indices.dtype = 'float64': expected integers (pages,)"),
        ({"indices": np.array([2, -1, 0, 1])}, "indices[1] = -1: expected the number of a page, from 0 on"),
        ({"indices": np.array([2, 6, 0, 1]), "pages": 6}, "indices[1] = 6: expected a page of the pool, 0 to 5"),
        ({"last_page_len": np.array([6])}, "last_page_len.shape = (1,): expected (2,), a number for each request of indptr"),
        ({"last_page_len": np.array([0, 16])}, "last_page_len[0] = 0: expected 1 to 16, the page size"),
        ({"last_page_len": np.array([6, 17])}, "last_page_len[1] = 17: expected 1 to 16, the page size"),
        ({"page_size": 0}, "page_size = 0: expected an integer of at least 1"),
        ({"page_size": 2**30, "last_page_len": np.array([1, 1])}, "page_size = 1073741824: expected 715,827,882 at most"),
        ({"pages": -1}, "pages = -1"),
    ],
)  # fmt: skip
def test_what_is_malformed_gets_one_line(changes: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {**GOOD, "page_size": 16, **changes}
    with pytest.raises(fl.UsageError) as raised:
        fl.block_table(**asked)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.torch
def test_a_table_is_of_the_arrays_framework() -> None:
    torch: Any = import_module("torch")
    found = fl.block_table(**{name: torch.from_numpy(x) for name, x in GOOD.items()}, page_size=16)
    assert isinstance(found["block_table"], torch.Tensor)
    assert found["seq_lens"].dtype == torch.int32
