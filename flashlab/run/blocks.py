"""Lists of blocks of a mask, as `flashlab.attention` takes them: made of torch's BlockMask, or of indptr and indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlab.base.host import is_array, like, to_numpy
from simulator.dtypes import Array
from simulator.errors import Said, UsageError
from simulator.fields import integer
from simulator.memory import check_memory
from simulator.operations.pairs import block_lists

__all__ = ["block_mask"]

_MOST = 2**31 - 2  # with the number in front of them, the entries of a list have places of int32
_NBYTES = 26  # of an entry: a boolean and its opposite, its place in order, beside the number, and that as int32


def block_mask(
    kv_num_blocks: Any = None, kv_indices: Any = None, full_kv_num_blocks: Any = None, full_kv_indices: Any = None, *,
    indptr: Any = None, indices: Any = None, key_blocks: int | None = None,
) -> Any:  # fmt: skip
    """The lists of blocks that `fl.attention(block_mask=…)` takes, int32 (row_blocks, 1 + key_blocks), of the same framework.

    `kv_num_blocks` (row_blocks,) says how many key blocks each row of blocks sees, and `kv_indices` (row_blocks, key_blocks)
    which ones. These are the arrays of torch's BlockMask, or the BlockMask itself. Axes of batch and heads before them
    have length 1, because all heads share a mask. A BlockMask tells partial blocks from full ones. Here all that are listed are
    visible, but for what `causal` and `window` hide: no function is called. Or else, as of a matrix in BSR, `indices`
    [indptr[r]:indptr[r + 1]] are those of row r, of `key_blocks` in all.

    This looks at the arrays: those on a GPU are waited for. Raises `UsageError`.

    >>> import flashlab as fl, numpy as np
    >>> fl.block_mask(indptr=np.array([0, 1, 3]), indices=np.array([0, 0, 2]), key_blocks=3).tolist()
    [[1, 0, 1, 2], [2, 0, 2, 1]]
    >>> p = fl.Problem(batch=1, heads=2, len_q=200, len_kv=300, head_dim=16, dtype="float16", mask="blocks", causal=True)
    >>> lists = fl.block_mask(np.array([1, 2]), np.array([[0, 1, 2], [0, 2, 1]]))
    >>> fl.naive(*fl.random_inputs(p), block_mask=lists, causal=True).out.shape
    (1, 2, 200, 16)
    """
    if indptr is not None or indices is not None:
        for name, x in (("kv_num_blocks", kv_num_blocks), ("kv_indices", kv_indices)):
            if x is not None:
                raise UsageError(name, "given", "None beside indptr and indices")
        return _of_rows(indptr, indices, key_blocks)
    if key_blocks is not None:
        raise UsageError("key_blocks", key_blocks, "None: kv_indices says it")
    if hasattr(kv_num_blocks, "full_kv_num_blocks"):  # torch's BlockMask
        whole, kv_num_blocks = kv_num_blocks, kv_num_blocks.kv_num_blocks
        kv_indices, full_kv_num_blocks = whole.kv_indices, whole.full_kv_num_blocks
        full_kv_indices = whole.full_kv_indices
    visible = _listed("kv_num_blocks", kv_num_blocks, "kv_indices", kv_indices)
    if full_kv_num_blocks is not None or full_kv_indices is not None:
        full = _listed("full_kv_num_blocks", full_kv_num_blocks, "full_kv_indices", full_kv_indices)
        if full.shape != visible.shape:
            raise UsageError("full_kv_indices.shape", full.shape, f"{visible.shape}, as kv_indices has")
        visible |= full
    return like(kv_num_blocks, block_lists(visible))


def _integers(name: str, x: Any, axes: tuple[str, ...]) -> Array:
    """An array of integers with these axes, int64. Axes of batch and heads before them go."""
    accepted = f"integers ({', '.join(axes)}{',' * (len(axes) == 1)})"
    if not is_array(x):
        raise UsageError(name, Said(type(x).__name__), f"an array of {accepted}")
    values = to_numpy(name, x)
    if values.dtype.kind not in "iu":
        raise UsageError(f"{name}.dtype", values.dtype.name, accepted)
    lead = values.shape[: values.ndim - len(axes)]
    if values.ndim < len(axes) or len(lead) > 2 or any(n != 1 for n in lead):
        raise UsageError(f"{name}.shape", values.shape, f"{accepted}: all batches and heads share a mask")
    return values.reshape(values.shape[len(lead) :]).astype(np.int64)


def _listed(number_name: str, number: Any, name: str, indices: Any) -> Array:
    """Booleans (row_blocks, key_blocks) of the first `number` entries of each row of lists."""
    lengths = _integers(number_name, number, ("row_blocks",))
    entries = _integers(name, indices, ("row_blocks", "key_blocks"))
    rows, blocks = entries.shape
    if lengths.shape != (rows,):
        raise UsageError(f"{number_name}.shape", lengths.shape, f"({rows},), as many rows as {name} has")
    if (wrong := (lengths < 0) | (lengths > blocks)).any():
        at = int(np.argmax(wrong))
        raise UsageError(f"{number_name}[{at}]", int(lengths[at]), f"0 to {blocks}, the key blocks")
    places: Any = np.arange(int(blocks))
    first: Any = np.less(places, lengths[:, None])
    row, column = np.nonzero(first)
    found: Array = entries[row, column]
    return _marked(name, row, found, (rows, blocks))


def _of_rows(indptr: Any, indices: Any, key_blocks: int | None) -> Any:
    """The lists of a matrix in BSR."""
    begins, entries = _integers("indptr", indptr, ("row_blocks + 1",)), _integers("indices", indices, ("blocks",))
    if key_blocks is None:
        raise UsageError("key_blocks", None, "how many key blocks there are: indices don't say it")
    if (blocks := integer("key_blocks", key_blocks, 0)) > _MOST:
        raise UsageError("key_blocks", blocks, f"at most {_MOST:,}, as int32 holds")
    lengths = np.diff(begins)
    if not len(begins) or begins[0] or begins[-1] != len(entries) or (lengths < 0).any():
        accepted = f"numbers that rise from 0 to {len(entries)}, the length of indices"
        raise UsageError("indptr", Said(f"{begins.tolist()[:8]}"), accepted)
    row = np.repeat(np.arange(len(lengths)), lengths)
    return like(indices, block_lists(_marked("indices", row, entries, (len(lengths), blocks))))


def _marked(name: str, row: Array, entries: Array, shape: tuple[int, int]) -> Array:
    """Booleans with True at each (row, entry). Raises `UsageError` for an entry that is no key block."""
    if (wrong := (entries < 0) | (entries >= shape[1])).any():
        at = int(np.argmax(wrong))
        raise UsageError(f"{name} of row {int(row[at])}", int(entries[at]), f"a key block, 0 to {shape[1] - 1}")
    check_memory("the lists of blocks", _NBYTES * shape[0] * shape[1])
    visible = np.zeros(shape, bool)
    visible[row, entries] = True
    return visible
