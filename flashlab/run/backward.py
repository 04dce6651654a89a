"""The gradients of attention: arrays of any framework in, the same kind out."""

from __future__ import annotations

from typing import Any, Unpack

from flashlab.run.facade import called
from simulator.devices import Device
from simulator.names import Backend, DeviceName
from simulator.operations.backward import BACKWARD
from simulator.problem import Masks, spell_masks
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["attention_backward"]


@spell_masks
def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, sinks: Any = None,
    algorithm: str | Program = "auto", tile: TileLike = None,
    backend: Backend = "gpu", device: Device | DeviceName | None = None, seed: int | None = None, offset: int = 0,
    rng_state: Any = None, deterministic: bool = False, **masks: Unpack[Masks],
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients `(dq, dk, dv)` of attention, or with `sinks` `(dq, dk, dv, dsinks)`, for `dout`, the gradient of its output.

    `out` and `lse` are what `attention(q, k, v, lse=True)` returned, and the masks are those that it was given. P is
    recomputed from them, so nothing of size len_q × len_kv is kept. Arrays are as `attention` takes them: CuPy, torch or JAX
    in GPU memory, strided or not, and with `backend="emulator"` also NumPy. `dout` and `out` have the shape and dtype of q,
    `lse` is float32 `(batch, heads, len_q)`, contiguous. So is `dlse`, the gradient of the LSE, if the loss depends on that, too:
    where parts of attention are merged by their LSEs, say. `sinks` are those of the forward pass, float32 `(heads,)`, and so is
    their gradient. The gradients have the dtype of q; dk and dv are summed over the
    query heads that share a KV head. `algorithm="auto"` is the fastest that takes the problem there.
    With `partial`, dk and dv are float32: the sums as the kernel has them, unrounded. They are parts of larger sums,
    over ranks say. `flash2_backward` and `flash3_backward` know it, and those that are deterministic; the others refuse it.
    With `dropout`, seed and offset (or `rng_state`) are those that `attention` was given too. `flash2_backward` takes
    `lengths` and `soft_cap`, with `deterministic` or without. `flash3_backward` and `flash3_backward_wide` take `lengths`.

    dq may be added up by atomics, in an order that differs from call to call: so may its last bits. dk and dv don't change. With
    `deterministic`, dq doesn't either: an algorithm is taken that adds it up in one order.
    Gradients in float16 can overflow or vanish: scale the loss, as in all training in float16. Raises `UsageError` for bad
    input, `Unavailable` without a GPU or CuPy, and `EmulationError` if a kernel misuses the emulated machine.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=20, head_dim=16, dtype="float16", causal=True)
    >>> q, k, v = fl.random_inputs(p)
    >>> out, lse = fl.attention(q, k, v, causal=True, lse=True, backend="emulator")
    >>> dq, dk, dv = fl.attention_backward(out, q, k, v, out, lse, causal=True, backend="emulator")
    >>> dq.shape, dk.dtype.name
    ((1, 2, 20, 16), 'float16')
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        "dout": dout,
        "dlse": dlse,
        "sinks": sinks,
        "rng_state": rng_state,
    }
    dq, dk, dv, *dsinks = called(
        BACKWARD, given, masks, algorithm=algorithm, one_order=deterministic, tile=tile, backend=backend, device=device, seed=seed,
        offset=offset,
    )  # fmt: skip
    return dq, dk, dv, *[x.sum(0) for x in dsinks]  # the kernel writes one for each batch
