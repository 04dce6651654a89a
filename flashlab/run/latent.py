"""Latent attention (MLA): arrays of any framework in, the same kind out."""

from __future__ import annotations

from typing import Any

from flashlab.run.facade import called
from simulator.devices import Device
from simulator.names import Backend, DeviceName
from simulator.operations.latent import LATENT, PAGED_LATENT
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["mla"]


def mla(
    q: Any, latent: Any, *, block_table: Any = None, seq_lens: Any = None, sinks: Any = None, algorithm: str | Program = "auto",
    out: Any = None, lse: bool = False, causal: bool = False, window: Any = None, scale: float | None = None,
    soft_cap: float | None = None, lengths: Any = None, chunk: int | None = None, tile: TileLike = None, backend: Backend = "gpu",
    device: Device | DeviceName | None = None,
) -> Any:  # fmt: skip
    """DeepSeek's latent attention, in the absorbed form that decodes: arrays of CuPy, torch or JAX in GPU memory in, the same kind
    out.

    q `(batch, heads, len_q, 576)` are queries that have absorbed the heads' key matrices. latent `(batch, 1, len_kv, 576)` has one
    row per token for all heads: the row is the key, and its first 512 numbers are the value. Both are float16 or bfloat16. Returns
    `out` `(batch, heads, len_q, 512)`; with `lse=True` `(out, lse)`. The caller still applies the heads' value matrices to `out`.
    `out=` is written in place.

    `scale=None` is 1/sqrt(192), that of a head before absorption (128 numbers, and 64 of RoPE). `causal` is aligned bottom-right:
    with it, several new tokens are `len_q` queries. `soft_cap` and `sinks` are as in `fl.attention`.

    `lengths=[(1, 4000), (1, 28000)]` says that the rows of a batch of 1 are sequences of these lengths (queries and keys), one
    behind the other, as in `fl.attention`. All have the same number of queries.

    With `block_table`, int32 `(batch, pages)`, latent is a pool of pages, `(pages, 1, page_size, 576)`. `seq_lens`, int32
    `(batch,)`, says how many tokens each request has. Both are as in `fl.attention`. A pool `(pages, page_size, 1, 576)` goes in as
    `pool.swapaxes(1, 2)`, and isn't copied.

    Keys are split into chunks, and what they have is added up: `chunk` is how many keys one has, a multiple of 64. Blocks take
    chunks, so few long requests want short ones; a row of one chunk has no partial results. The last bits of a request depend on
    `chunk`, and on no other request. `None` is the algorithm's own: 512 in `mla`, 1,024 in `mla_hopper`. `fl.latent_chunk`
    says which is fastest in a plan with fixed capacities.

    `algorithm="auto"` is `mla_hopper` on Hopper, else `mla`, or the same in pages. On the emulator it is `mla`.

    `backend="emulator"` runs the kernel on the CPU as built for `device`, and takes NumPy arrays, too. Raises `UsageError` for bad
    input, `Unavailable` without a GPU or CuPy.

    >>> import numpy as np, flashlab as fl
    >>> p = fl.latent_problem(heads=16, len_kv=100, dtype="float16")
    >>> arrays = fl.CATALOGUE["mla"].operation.draw(p)
    >>> arrays["q"].shape, arrays["latent"].shape
    ((1, 16, 1, 576), (1, 1, 100, 576))
    >>> fl.mla(**arrays, backend="emulator").shape                                     # doctest: +SKIP
    (1, 16, 1, 512)
    """
    given = {"q": q, "latent": latent, "block_table": block_table, "seq_lens": seq_lens, "sinks": sinks, "out": out}
    outputs = called(
        LATENT if block_table is None else PAGED_LATENT, given,
        {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap, "lengths": lengths, "chunk": chunk},
        algorithm=algorithm, lse=lse, tile=tile, backend=backend, device=device,
    )  # fmt: skip
    return outputs if lse else outputs[0]
