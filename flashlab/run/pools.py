"""What a server writes into a pool of pages: new keys and values, and copies of pages. Both change the caller's arrays."""

from __future__ import annotations

from typing import Any

from flashlab.run.facade import called
from simulator.devices import Device
from simulator.names import Backend, DeviceName
from simulator.operations.append import APPEND
from simulator.operations.copies import COPIES
from simulator.simulate import TileLike

__all__ = ["append_kv", "copy_pages"]


def append_kv(
    k: Any, v: Any, k_pool: Any, v_pool: Any, *, slot_mapping: Any, k_scale: Any = None, v_scale: Any = None, tile: TileLike = None,
    backend: Backend = "gpu", device: Device | DeviceName | None = None,
) -> None:  # fmt: skip
    """Put new keys and values into their slots of a pool of pages, in place: arrays of CuPy or torch in GPU memory.

    k and v `(1, kv_heads, tokens, head_dim)` are the new rows, float32, float16 or bfloat16. Rows `(tokens, kv_heads, head_dim)` go
    in as `k.swapaxes(0, 1)[None]`, and aren't copied. k_pool and v_pool `(pages, kv_heads, page_size, head_dim)` are the pools that
    `fl.attention` reads, strided or not, of any size. `slot_mapping`, contiguous int64 `(tokens,)`, says where each token goes:
    slot s is row `s % page_size` of page `s // page_size`, and -1 skips the token. The kernel reads it, so a captured CUDA graph
    may be replayed with other slots.

    A pool of int8 or float8_e4m3fn (of CuPy uint8) beside rows of 16 bits is quantised on the way, each row as `fl.quantize_cache`
    does it with a scale for each key, to the bit. `k_scale` and `v_scale`, contiguous float32 `(pages, kv_heads, page_size)`, are
    then written, too, at the same slots. A row with a NaN has a scale of 1/127 or 1/448, and the NaN becomes that of e4m3, or -128.

    The pools and scales are changed, and nothing else of them than the slots. Their rows have to be whole chunks of 16 bytes, and
    so have base and strides: a pool isn't copied. On a GPU nobody looks at the slots, for a look would wait: a slot beyond the pool
    is written all the same, and of two tokens with one slot either may stay. On a CPU both are refused.

    Runs on the framework's current stream. Who reads the pool on another stream waits for an event first. `backend="emulator"` runs
    the kernel on the CPU as built for `device`, and takes arrays of NumPy, or torch's on a CPU. Raises `UsageError` for bad input,
    `Unavailable` without a GPU or CuPy.

    >>> import numpy as np, flashlab as fl
    >>> k, v = np.ones((2, 1, 2, 3, 64), np.float16)
    >>> k_pool, v_pool = np.zeros((2, 5, 2, 16, 64), np.float16)
    >>> fl.append_kv(k, v, k_pool, v_pool, slot_mapping=np.array([79, -1, 32]), backend="emulator")
    >>> k_pool[:, 0, :, 0].nonzero()[0].tolist()
    [2, 4]
    """
    given = {
        "k": k,
        "v": v,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    called(APPEND, given, {}, algorithm="append_kv", tile=tile, backend=backend, device=device)


def copy_pages(
    k_pool: Any, v_pool: Any, pairs: Any, *, k_scale: Any = None, v_scale: Any = None, backend: Backend = "gpu",
    device: Device | DeviceName | None = None,
) -> None:  # fmt: skip
    """Copy pages of a pool to other pages, in place, for copy-on-write: arrays of CuPy or torch in GPU memory.

    `pairs`, contiguous int32 `(n, 2)`, has a page and the page that it is copied to. A page may be copied to several others. All
    pairs run at once, so a target is the target of one pair, and isn't copied itself. k_pool and v_pool are as in `fl.append_kv`,
    float32, float16, bfloat16, int8 or float8_e4m3fn. `k_scale` and `v_scale`, float32 `(pages, kv_heads, page_size)`, are copied,
    too, if they are given.

    On a GPU nobody looks at the pairs: a page that isn't there is read or written all the same. On a CPU that is refused. Streams
    and `backend` are as in `fl.append_kv`. Raises `UsageError` for bad input, `Unavailable` without a GPU or CuPy.

    >>> import numpy as np, flashlab as fl
    >>> k_pool, v_pool = np.random.default_rng(0).standard_normal((2, 5, 2, 16, 64)).astype(np.float16)
    >>> fl.copy_pages(k_pool, v_pool, np.array([[0, 3], [0, 4]], np.int32), backend="emulator")
    >>> bool((k_pool[3] == k_pool[0]).all() and (v_pool[4] == v_pool[0]).all())
    True
    """
    given = {"k_pool": k_pool, "v_pool": v_pool, "pairs": pairs, "k_scale": k_scale, "v_scale": v_scale}
    called(COPIES, given, {}, algorithm="copy_pages", tile=None, backend=backend, device=device)
