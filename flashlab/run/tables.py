"""A block table, as `flashlab.attention` takes it: made of the indptr, indices and last pages that FlashInfer takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlab.base.host import is_array, like, to_numpy
from simulator.dtypes import Array
from simulator.errors import Said, UsageError
from simulator.fields import integer
from simulator.memory import check_memory

__all__ = ["block_table"]

_MOST = 2**31 - 1  # that int32 holds


def block_table(
    indptr: Any, indices: Any, last_page_len: Any, *, page_size: int, pages: int | None = None
) -> dict[str, Any]:
    """`block_table` and `seq_lens`, as `fl.attention` and `fl.mla` take them, from FlashInfer's three arrays.

    They are arrays of the same framework.

    `indices[indptr[b]:indptr[b + 1]]` are the pages of request b, and `last_page_len[b]` says how many keys the last of them has:
    1 to `page_size`. A request without pages has no keys. `indices` may have more entries than the requests have pages. `pages` is
    how many there are in the pool: with it, pages beyond are refused.

    A pool in FlashInfer's layout HND, `(pages, kv_heads, page_size, head_dim)`, goes in as it is. One in NHD goes in as
    `pool.swapaxes(1, 2)`, and of one that has K and V in one array, `pool[:, 0]` is K and `pool[:, 1]` is V. All are views.

    This looks at the arrays: those on a GPU are waited for, so it has no place in a CUDA graph. Raises `UsageError`.

    >>> import numpy as np, flashlab as fl
    >>> found = fl.block_table(np.array([0, 3, 4]), np.array([2, 5, 0, 1]), np.array([6, 16]), page_size=16)
    >>> found["block_table"].tolist(), found["seq_lens"].tolist()
    ([[2, 5, 0], [1, 0, 0]], [38, 16])
    >>> q, pool = np.ones((2, 4, 1, 64), np.float16), np.ones((6, 2, 16, 2, 64), np.float16)  # K and V, NHD
    >>> k, v = pool[:, 0].swapaxes(1, 2), pool[:, 1].swapaxes(1, 2)
    >>> fl.simulate("paged", q, k, v, **found).out.shape
    (2, 4, 1, 64)
    """
    size = integer("page_size", page_size, 1)
    begins, entries = _numbers("indptr", indptr, "requests + 1"), _numbers("indices", indices, "pages")
    last = _numbers("last_page_len", last_page_len, "requests")
    counts: Array = np.diff(begins)
    if len(begins) < 2 or begins[0] or (counts < 0).any() or begins[-1] > len(entries):
        accepted = f"two or more numbers that rise from 0 to at most {len(entries)}, the length of indices"
        raise UsageError("indptr", Said(f"{begins.tolist()[:8]}"), accepted)
    if last.shape != counts.shape:
        raise UsageError("last_page_len.shape", last.shape, f"({len(counts)},), a number for each request of indptr")
    if (wrong := (counts > 0) & ((last < 1) | (last > size))).any():
        at = int(np.argmax(wrong))
        raise UsageError(f"last_page_len[{at}]", int(last[at]), f"1 to {size}, the page size")
    own = entries[: begins[-1]]
    most = _MOST if pages is None else integer("pages", pages, 0) - 1
    if (wrong := (own < 0) | (own > most)).any():
        at = int(np.argmax(wrong))
        accepted = "the number of a page, from 0 on" if pages is None else f"a page of the pool, 0 to {most:,}"
        raise UsageError(f"indices[{at}]", int(own[at]), accepted)
    widest = max(1, int(counts.max()))
    if widest * size > _MOST:
        raise UsageError("page_size", size, f"{_MOST // widest:,} at most: a request has {widest:,} pages")
    check_memory("the block table", 4 * len(counts) * widest)
    table = np.zeros((len(counts), widest), np.int32)
    table[np.arange(widest) < counts[:, None]] = own
    lengths = np.where(counts > 0, (counts - 1) * size + last, 0).astype(np.int32)
    return {"block_table": like(indices, table), "seq_lens": like(indices, lengths)}


def _numbers(name: str, x: Any, axis: str) -> Array:
    """An array of integers with one axis, int64."""
    accepted = f"integers ({axis},)"
    if not is_array(x):
        raise UsageError(name, Said(type(x).__name__), f"an array of {accepted}")
    values = to_numpy(name, x)
    if values.dtype.kind not in "iu":
        raise UsageError(f"{name}.dtype", values.dtype.name, accepted)
    if values.ndim != 1:
        raise UsageError(f"{name}.shape", values.shape, accepted)
    return values.astype(np.int64)
