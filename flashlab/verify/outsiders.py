"""Adapters for other libraries' kernels, with their conventions. A library is imported only when it is asked for.

`sdpa` is torch's `scaled_dot_product_attention` itself, which runs on a CPU too. Torch's backends are called through the
operators behind it. These return the LSE, and the function itself might quietly choose another backend. At this level
their conventions differ: `flash` aligns a causal mask bottom-right (the function never passes it one with len_q !=
len_kv), `efficient` and `cudnn` align it top-left.

A backward pass has a name of its own. All but torch's function are given the output and the LSE, as the functions behind
autograd are. No library has a public function for that.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flashlab.verify.adapter import GRADIENTS, Adapter
from flashlab.verify.cases import LAYOUTS
from flashlab.verify.domain import Domain
from simulator.errors import Unavailable, unknown

HALF = ("float16", "bfloat16")
WHOLE_ROWS = tuple(name for name in LAYOUTS if name != "strided")
"""The layouts whose last axis is contiguous."""


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported ({error}): pip install {package}") from None


def _operator(name: str) -> Callable[..., Any]:
    return getattr(_module("torch", "torch").ops.aten, name)


def _sdpa() -> Adapter:
    attention = _module("torch", "torch").nn.functional.scaled_dot_product_attention

    def sdpa(q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> Any:
        return attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    # it scales scores after the mask: a scale of 0 makes NaN of -inf
    return Adapter(
        sdpa,
        "torch",
        causal="top-left",
        supports=lambda p: p.scale > 0 or "positive scales",
        name="sdpa",
        domain=Domain(empty=False),
    )


def _flash() -> Adapter:
    op = _operator("_scaled_dot_product_flash_attention")

    def sdpa_flash(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return op(q, k, v, 0.0, causal, False, scale=scale)[:2]

    # this operator's LSE of an empty row is +inf
    domain = Domain(dtype=HALF, head_dim=range(8, 257, 8), empty=False, layouts=WHOLE_ROWS)
    return Adapter(sdpa_flash, "torch", lse="e", name="sdpa-flash", empty_lse=math.inf, domain=domain)


def _cudnn() -> Adapter:
    op = _operator("_scaled_dot_product_cudnn_attention")

    def cudnn(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(lse.shape[:3])

    return Adapter(
        cudnn,
        "torch",
        causal="top-left",
        lse="e",
        name="cudnn",
        domain=Domain(dtype=HALF, head_dim=range(8, 129, 8), empty=False, layouts=WHOLE_ROWS),
    )


def _efficient() -> Adapter:
    op = _operator("_scaled_dot_product_efficient_attention")

    def sdpa_efficient(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]  # its LSE is padded to more rows

    domain = Domain(head_dim=range(8, 513, 8), groups=1, empty=False)  # rows of whole 16 bytes in every dtype
    return Adapter(sdpa_efficient, "torch", causal="top-left", lse="e", name="sdpa-efficient", domain=domain)


def _fa4() -> Adapter:
    attention = _module("flash_attn.cute", "flash-attn-4").flash_attn_func

    def fa4(q: Any, k: Any, v: Any, causal: bool, scale: float, window: Any = (None, None)) -> Any:
        return attention(q, k, v, softmax_scale=scale, causal=causal, window_size=tuple(window), return_lse=True)[:2]

    domain = Domain(dtype=HALF, head_dim=range(8, 257, 8), empty=False)
    return Adapter(fa4, "torch", layout="bshd", lse="e", name="fa4", domain=domain)


def _fa3_wheel() -> Adapter:
    from flashlab.integrations.peers import fa3_wheel  # only where it is asked for

    fa3_wheel.handler()  # is it there?

    def fa3(
        q: Any, k: Any, v: Any, causal: bool, scale: float, window: Any = (None, None), lengths: Any = None
    ) -> Any:  # fmt: skip
        q, k, v = (x.contiguous() for x in (q, k, v))
        return fa3_wheel.prepare(q, k, v, causal, scale, window, lengths)()

    # its LSE is +inf where there are no keys at all, and -inf where a mask hides them
    domain = Domain(dtype=HALF, head_dim=fa3_wheel.HEAD_DIM)
    return Adapter(fa3, "torch", layout="bshd", lse="e", name="fa3-wheel", empty_lse=math.inf, domain=domain)


def _flashinfer() -> Adapter:
    prefill = _module("flashinfer", "flashinfer-python").single_prefill_with_kv_cache

    def flashinfer(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        out, lse = prefill(q[0], k[0], v[0], causal=causal, sm_scale=scale, return_lse=True)
        return out[None], lse.swapaxes(0, 1)[None]

    domain = Domain(dtype=HALF, head_dim=(64, 128, 256), batch=1, empty=False)
    return Adapter(flashinfer, "torch", layout="bshd", lse="2", name="flashinfer", domain=domain)


@contextmanager
def _refusing(words: str) -> Generator[None]:
    """What a library says when it does not do a problem becomes "not run"."""
    try:
        yield
    except RuntimeError as error:
        if words not in str(error):
            raise
        raise NotImplementedError(str(error)[:150]) from None


def _sdpa_backward() -> Adapter:
    return replace(_sdpa(), name="sdpa-backward", operation="gradients")


def _flash_backward() -> Adapter:
    op, torch = _operator("_scaled_dot_product_flash_attention_backward"), _module("torch", "torch")

    def sdpa_flash(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
        lengths = q.shape[2], k.shape[2]
        return op(dout, q, k, v, out, lse, None, None, *lengths, 0.0, causal, state, state[:0], scale=scale)

    named: Any = {"name": "sdpa-flash-backward", "operation": "backward", "atomics": "dq"}
    return replace(_flash(), fn=sdpa_flash, **named)


def _cudnn_backward() -> Adapter:
    op, torch = _operator("_scaled_dot_product_cudnn_attention_backward"), _module("torch", "torch")

    def cudnn(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
        state = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, which is 0
        rest = None, None, None, q.shape[2], k.shape[2], 0.0, causal
        with _refusing("execution plan"):
            return op(dout, q, k, v, out, lse[..., None], state, state, *rest, scale=scale)

    named: Any = {"name": "cudnn-backward", "operation": "backward", "atomics": "dq"}
    return replace(_cudnn(), fn=cudnn, **named)


def _fa4_backward() -> Adapter:
    backward = _module("flash_attn.cute.interface", "flash-attn-4")._flash_attn_bwd

    def fa4(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float,
        window: Any = (None, None), softcap: float = 0.0, dlse: Any = None,
    ) -> Any:  # fmt: skip
        left, right = window
        masks = {"causal": causal, "window_size_left": left, "window_size_right": right}
        return backward(q, k, v, out, dout, lse, softmax_scale=scale, softcap=softcap, dlse=dlse, **masks)[:3]

    # of grouped heads it adds up dk and dv by atomics, too
    domain = Domain(dtype=HALF, head_dim=range(8, 257, 8), empty=False)
    named: Any = {"name": "fa4-backward", "operation": "backward", "atomics": GRADIENTS}
    return Adapter(fa4, "torch", layout="bshd", domain=domain, **named)


def _fa3_backward() -> Adapter:
    source = "'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
    backward = _module("flash_attn_interface", source)._flash_attn_backward
    torch = _module("torch", "torch")

    def fa3(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float,
        window: Any = (None, None), softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        left, right = (-1 if side is None else side for side in window)
        masks = {"is_causal": causal, "window_size_left": left, "window_size_right": right, "softcap": softcap}
        with _refusing("does not support"):  # a build may leave features out
            backward(dout, q, k, v, out, lse, *[None] * 6, *gradients, softmax_scale=scale, **masks)
        return gradients

    domain = Domain(dtype=HALF, head_dim=range(8, 257, 8), empty=False)
    named: Any = {"name": "fa3-backward", "operation": "backward", "atomics": GRADIENTS}
    return Adapter(fa3, "torch", layout="bshd", domain=domain, **named)


def _fa3_wheel_backward() -> Adapter:
    from flashlab.integrations.peers import fa3_wheel  # only where it is asked for

    def fa3(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float,
        window: Any = (None, None), lengths: Any = None,
    ) -> Any:  # fmt: skip
        dout, q, k, v, out, lse = (x.contiguous() for x in (dout, q, k, v, out, lse))
        return fa3_wheel.prepare_backward(dout, q, k, v, out, lse, causal, scale, window, lengths)()

    # it adds up dq by atomics, and of grouped heads dk and dv
    named: Any = {"name": "fa3-wheel-backward", "operation": "backward", "atomics": GRADIENTS}
    return replace(_fa3_wheel(), fn=fa3, empty_lse=-math.inf, **named)


OUTSIDERS: dict[str, Callable[[], Adapter]] = {
    "sdpa": _sdpa,
    "sdpa-flash": _flash,
    "cudnn": _cudnn,
    "sdpa-efficient": _efficient,
    "fa4": _fa4,
    "fa3-wheel": _fa3_wheel,
    "flashinfer": _flashinfer,
    "sdpa-backward": _sdpa_backward,
    "sdpa-flash-backward": _flash_backward,
    "cudnn-backward": _cudnn_backward,
    "fa4-backward": _fa4_backward,
    "fa3-backward": _fa3_backward,
    "fa3-wheel-backward": _fa3_wheel_backward,
}
"""The built-in adapters by name."""


def outsider(name: str) -> Adapter:
    """The adapter of this name. Raises `UsageError` for an unknown name, and `Unavailable` with what to install."""
    if name not in OUTSIDERS:
        raise unknown("target", name, OUTSIDERS)
    return OUTSIDERS[name]()
