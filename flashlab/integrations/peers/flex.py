"""PyTorch's FlexAttention, compiled, on any problem whose masks and scores its functions can say.

It takes a `mask_mod` and a `score_mod` of (batch, head, query, key) in place of named features, and compiles them into a kernel of
their own. The rest is refused. Needs torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from simulator import Problem
from simulator.errors import Unavailable

__all__ = ["arguments", "prepare", "refuses"]

SAID = ("causal", "window", "scale", "soft_cap", "alibi", "mask", "lengths")
"""The features of a problem that its functions say."""


def refuses(p: Problem) -> str | None:
    """Why FlexAttention isn't asked for a problem, in one line, or None.

    >>> refuses(Problem(batch=1, heads=2, len_q=8, head_dim=64, dtype="float16", window=(3, 0), sinks=True))
    "FlexAttention's functions can't say sinks"
    """
    unsaid = [name for name in p.applied if name not in SAID]
    if unsaid:
        return f"FlexAttention's functions can't say {', '.join(unsaid)}"
    if p.mask not in (None, "dense") or (p.mask and p.ragged):
        return "FlexAttention is given a mask as booleans, of one sequence"
    return None


def prepare(p: Problem, arrays: Mapping[str, Any], optional: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of it on torch's tensors (batch, heads, length, head_dim), which returns `out`. `optional` are the operands beside
    q, k and v. Raises `Unavailable` for what it can't say or hasn't."""
    if reason := refuses(p):
        raise Unavailable(reason)
    torch: Any = importlib.import_module("torch")
    module = _module()
    given = arguments(p, optional, arrays["q"].device)
    torch.compiler.reset()  # or a number that differs from the last problem's becomes a variable, which it refuses
    compiled = torch.compile(module.flex_attention, dynamic=False)

    def call() -> Any:
        return compiled(arrays["q"], arrays["k"], arrays["v"], **given)

    return call


def arguments(p: Problem, optional: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """What `flex_attention` is told of a problem beside q, k and v."""
    torch: Any = importlib.import_module("torch")
    cap, causal = p.soft_cap, p.causal
    slopes, visible = optional.get("alibi_slopes"), optional.get("mask")
    left, right = p.window or (None, None)
    shift: Any = p.offset  # the key at a query's place is so many further
    queries: Any = None
    keys: Any = None
    if p.ragged:  # the sequence of each query, and of each key
        numbers = torch.arange(len(p.spans), device=device)
        queries, keys = (
            torch.repeat_interleave(numbers, torch.tensor([len(span[side]) for span in p.spans], device=device))
            for side in (0, 1)
        )
        shift = torch.tensor([own_keys.stop - own.stop for own, own_keys in p.spans], device=device)[queries]

    def place(i: Any) -> Any:
        return i + (shift if queries is None else shift[i])

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s if cap is None else cap * torch.tanh(s / cap)
        return s if slopes is None else s - slopes[h] * (place(i) - j).abs()

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        found = j >= 0  # nothing is hidden yet
        if causal:
            found = found & (j <= place(i))
        if left is not None:
            found = found & (place(i) - j <= left)
        if right is not None:
            found = found & (j - place(i) <= right)
        if queries is not None:
            found = found & (queries[i] == keys[j])
        return found if visible is None else found & visible[i, j]

    masked = causal or p.window is not None or p.ragged or visible is not None
    build = _module().create_block_mask
    return {
        "score_mod": score if cap is not None or slopes is not None else None,
        "block_mask": build(seen, None, None, p.len_q, p.len_kv, device=device) if masked else None,
        "scale": p.scale,
        "enable_gqa": p.heads != p.kv_heads,
    }


def _module() -> Any:
    try:
        return importlib.import_module("torch.nn.attention.flex_attention")
    except ImportError as error:
        raise Unavailable(f"torch has no FlexAttention ({error}): pip install torch") from None
