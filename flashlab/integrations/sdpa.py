"""PyTorch's own attention by our kernels: `scaled_dot_product_attention`, `varlen_attn`, and all that calls them, unchanged.

    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
    from flashlab.integrations.torch import register_sdpa

    register_sdpa()
    activate_flash_attention_impl("flashlab")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model(x)

Torch chooses a backend for each call, and where it chooses flash, our kernels run. From torch 2.13 on it prefers cuDNN on Hopper,
so `sdpa_kernel` has to say flash. `restore_flash_attention_impl()` gives torch its own kernels back.

The functions here are torch's operators: they have their names, arguments, shapes and layouts in memory. They stand below
autograd, which torch does itself.
"""

from __future__ import annotations

import warnings
from typing import Any

from flashlab.base.host import refused
from flashlab.run.autograd import backward_pass, check_axes, forward_pass, torch
from simulator.errors import Unavailable, UsageError
from simulator.fields import flag

__all__ = ["register_sdpa"]

_KEYS = {False: ("CUDA",), True: ("CUDA", "CPU")}
_SDPA_AXES = "(batch, heads, length, head_dim)"
_FLASH_AXES = {True: "(batch, length, heads, head_dim)", False: "(total, heads, head_dim)"}
"""Without offsets, and with them."""
_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"


def register_sdpa(name: str = "flashlab", *, cpu: bool = False) -> None:
    """Makes our kernels one of the implementations that `torch.nn.attention.activate_flash_attention_impl(name)` activates.

    From then on the operators behind SDPA's flash backend and `torch.nn.attention.varlen.varlen_attn` are ours on a GPU, forward
    and backward. With `cpu`, they are on a CPU, too: there the kernels run on the emulator, which is slow. A call with a mask goes
    to torch's own kernel there, as on a GPU torch never gives one to flash. What our kernels don't have raises `UsageError`.
    Raises `Unavailable` before torch 2.11.

    >>> from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    >>> import torch
    >>> q = torch.randn(1, 2, 20, 16)
    >>> own = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> register_sdpa(cpu=True)
    >>> activate_flash_attention_impl("flashlab")
    >>> ours = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> restore_flash_attention_impl()
    >>> torch.allclose(ours, own, atol=1e-5)
    True
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("name", name, "a name for activate_flash_attention_impl")
    keys = _KEYS[flag("cpu", cpu)]
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise Unavailable(f"register_sdpa needs torch 2.11 or newer, and this is {torch.__version__}")
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: _Active(keys))


class _Active:
    """Our kernels in torch's places, until `remove`."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # of torch: a kernel stands in another's place, and is meant to
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self._fill(keys)

    def _fill(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            for name, function in _OPERATORS.items():
                if hasattr(torch.ops.aten, name):  # one isn't in torch 2.11
                    self._library.impl(name, function, key)
        if "CPU" in keys:
            for name, function in ((_FOR_CPU, _for_cpu), (f"{_FOR_CPU}_backward", _for_cpu_backward)):
                self._library.impl(name, _unless_masked(name, function), "CPU", with_keyset=True)

    def remove(self) -> None:
        self._library = None


def _unless_masked(name: str, function: Any) -> Any:
    """A function for the operator that leaves calls with a mask to torch's kernel."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def run(keys: Any, *given: Any, attn_mask: Any = None, scale: float | None = None) -> Any:
        if attn_mask is None:
            return function(*given, scale=scale)
        return own.call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)

    return run


def _check(query: Any, key: Any, is_causal: bool, return_debug_mask: bool = False) -> None:
    """Raises `UsageError` for what isn't SDPA's where it isn't ours."""
    if is_causal and query.shape[-2] != key.shape[-2]:
        lengths = f"{query.shape[-2]} queries and {key.shape[-2]} keys: torch's mask is top-left, and the kernels' bottom-right"
        raise UsageError("is_causal", True, f"False with {lengths}")
    if return_debug_mask:
        raise UsageError("return_debug_mask", True, "False: no kernel writes the probabilities")


def _drawn(query: Any, dropout_p: float) -> Any:
    """Seed and offset of dropout, by torch's generator; None where nothing is dropped."""
    if not dropout_p:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=query.device)


def _beside(query: Any, state: Any) -> tuple[Any, Any, Any]:
    """What the operators return beside `out` and LSE: seed and offset, nothing, and no mask."""
    state = query.new_empty(2, dtype=torch.uint64) if state is None else state.view(torch.uint64)
    return state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _masks(
    is_causal: bool, scale: float | None, dropout_p: float = 0.0, window: tuple[Any, Any] = (None, None)
) -> dict[str, Any]:
    """Masks as our doors have them. In torch's windows, -1 stands for no bound, too."""
    sides = tuple(None if side is None or side < 0 else side for side in window)
    return {"causal": is_causal, "scale": scale, "dropout": dropout_p or None, "window": sides}


def _sdpa(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """`_scaled_dot_product_flash_attention`, over (batch, heads, length, head_dim)."""
    check_axes(_SDPA_AXES, query=query, key=key, value=value)
    _check(query, key, is_causal, return_debug_mask)
    state = _drawn(query, dropout_p)
    out, lse = forward_pass(query, key, value, rng_state=state, **_masks(is_causal, scale, dropout_p))
    return out, lse, None, None, query.shape[2], key.shape[2], *_beside(query, state)


def _sdpa_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_offset
    check_axes(_SDPA_AXES, grad_out=grad_out, query=query, key=key, value=value, out=out)
    check_axes("(batch, heads, len_q)", logsumexp=logsumexp)
    _check(query, key, is_causal)
    state = philox_seed.view(torch.int64) if dropout_p else None
    options = {"rng_state": state, **_masks(is_causal, scale, dropout_p)}
    return tuple(backward_pass(grad_out, query, key, value, out, logsumexp, **options))


def _for_cpu(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None
) -> tuple[Any, Any]:
    """The same on a CPU. Its LSE lies with the heads innermost. It returns no seed, and torch drops nothing by it."""
    if dropout_p:
        raise UsageError("dropout_p", dropout_p, "0.0: on a CPU the operator has no place for the seed")
    out, lse, *_ = _sdpa(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _for_cpu_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients lie with the heads inside the rows, wherever q, k and v do."""
    nothing = (None, None, 0, 0)
    found = _sdpa_backward(
        grad_out, query, key, value, out, logsumexp, *nothing, dropout_p, is_causal, None, None, scale=scale
    )
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in found)


def _flash(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """`_flash_attention_forward`: (batch, length, heads, head_dim), or with offsets (total, heads, head_dim). Masks are aligned
    bottom-right, as FlashAttention has them."""
    del max_q, max_k, num_splits  # the longest follows from the offsets, and our order of sums from a sequence alone
    if block_table is not None:
        raise refused("block_table", "torch tensor", "None: keys and values lie in no pages here")
    if return_debug_mask:
        raise UsageError("return_debug_mask", True, "False: no kernel writes the probabilities")
    if seqused_k is not None and cum_seq_q is None:
        raise refused("seqused_k", "torch tensor", "None without cum_seq_k, which say where sequences begin")
    check_axes(_FLASH_AXES[cum_seq_q is None], query=query, key=key, value=value)
    state = _drawn(query, dropout_p)
    masks = _masks(is_causal, scale, dropout_p, (window_size_left, window_size_right))
    ends = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "seqused_k": seqused_k}
    arrays = _heads_first(cum_seq_q, query, key, value)
    out, lse = forward_pass(*arrays, alibi_slopes=alibi_slopes, rng_state=state, **ends, **masks)
    return _rows_first(cum_seq_q, out), lse if cum_seq_q is None else lse[0], *_beside(query, state)


def _flash_in_place(out: Any, *given: Any, **options: Any) -> Any:
    """`_flash_attention_forward_no_dropout_inplace`: writes `out`, and returns the LSE."""
    found, lse, *_ = _flash(*given, **options)
    out.copy_(found)
    return lse


def _flash_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    del max_q, max_k, unused
    check_axes(_FLASH_AXES[cum_seq_q is None], grad_out=grad_out, query=query, key=key, value=value, out=out)
    check_axes("(batch, heads, len_q)" if cum_seq_q is None else "(heads, total)", logsumexp=logsumexp)
    state = rng_state.view(torch.int64) if dropout_p else None
    masks = _masks(is_causal, scale, dropout_p, (window_size_left, window_size_right))
    dout, q, k, v, o = _heads_first(cum_seq_q, grad_out, query, key, value, out)
    lse = logsumexp if cum_seq_q is None else logsumexp[None]
    ends = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
    found = backward_pass(dout, q, k, v, o, lse, rng_state=state, **ends, **masks)
    return tuple(_rows_first(cum_seq_q, x) for x in found)


def _heads_first(cum_seq_q: Any, *tensors: Any) -> list[Any]:
    """Tensors as our doors have them, (batch, heads, length, head_dim)."""
    return [x.transpose(1, 2) if cum_seq_q is None else x.transpose(0, 1)[None] for x in tensors]


def _rows_first(cum_seq_q: Any, x: Any) -> Any:
    """The opposite."""
    return x.transpose(1, 2) if cum_seq_q is None else x[0].transpose(0, 1)


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_in_place,
    "_flash_attention_backward": _flash_backward,
}
"""What SDPA and `varlen_attn` call on a GPU."""
