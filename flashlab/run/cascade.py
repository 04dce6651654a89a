"""Attention of requests that begin with the same keys: arrays of any framework in, the same kind out."""

from __future__ import annotations

from typing import Any

from flashlab.run.facade import called
from simulator.devices import Device
from simulator.names import Backend, DeviceName
from simulator.operations.cascade import CASCADE
from simulator.simulate import TileLike

__all__ = ["cascade"]


def cascade(
    q: Any, k: Any, v: Any, k_prefix: Any, v_prefix: Any, *, seq_lens: Any = None, sinks: Any = None, out: Any = None,
    lse: bool = False, causal: bool = False, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
    soft_cap: float | None = None, tile: TileLike = None, backend: Backend = "gpu", device: Device | DeviceName | None = None,
) -> Any:  # fmt: skip
    """Attention of requests that begin with the same keys, which are read once for many requests: arrays of CuPy, torch or JAX in
    GPU memory in, the same kind out.

    q `(batch, heads, len_q, head_dim)` are the requests' queries. k and v `(batch, kv_heads, len_kv, head_dim)` are each one's own
    keys and values, k_prefix and v_prefix `(1, kv_heads, len_prefix, head_dim)` those of the shared prefix. All are float16 or
    bfloat16. Either side may have no keys. Returns `out` `(batch, heads, len_q, head_dim)`; with `lse=True` `(out, lse)`. `out=` is
    written in place.

    `seq_lens`, int32 `(batch,)`, says how many keys each request has of its own, of the `len_kv` that there is room for. What lies
    behind them isn't read. The kernels read the lengths, so a captured CUDA graph may be replayed with others.

    Masks are aligned bottom-right: query i of a request with n own keys sits at own key `n - len_q + i`. `window=(left, right)`
    counts back from there, on into the prefix. `causal` and `right` are about own keys, as all of the prefix comes before them.
    With `causal`, several new tokens are `len_q` queries. `soft_cap` and `sinks` are as in `fl.attention`. A request has the same
    bits alone and in any batch.

    `backend="emulator"` runs the kernels on the CPU as built for `device`, and takes NumPy arrays, too. Raises `UsageError` for bad
    input, `Unavailable` without a GPU or CuPy.

    >>> import flashlab as fl, numpy as np
    >>> p = fl.Problem(batch=4, heads=8, kv_heads=2, len_q=1, len_kv=30, len_prefix=500, head_dim=64, dtype="float16")
    >>> arrays = fl.CATALOGUE["cascade"].operation.draw(p)
    >>> arrays["k_prefix"].shape, arrays["k"].shape
    ((1, 2, 500, 64), (4, 2, 30, 64))
    >>> fl.cascade(**arrays, backend="emulator").shape                                     # doctest: +SKIP
    (4, 8, 1, 64)
    >>> lens = np.array([30, 7, 0, 12], np.int32)
    >>> fl.cascade(**arrays, seq_lens=lens, window=(128, 0), backend="emulator").shape     # doctest: +SKIP
    (4, 8, 1, 64)
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "k_prefix": k_prefix,
        "v_prefix": v_prefix,
        "seq_lens": seq_lens,
        "sinks": sinks,
        "out": out,
    }
    outputs = called(
        CASCADE, given, {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap}, algorithm="cascade", lse=lse,
        tile=tile, backend=backend, device=device,
    )  # fmt: skip
    return outputs if lse else outputs[0]
