"""cuDNN's forward pass in FP8, as `nvidia-cudnn-frontend` has it: a graph of one operation, `sdpa_fp8`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flashlab.integrations.peers import cudnn_graph
from simulator import Problem

__all__ = ["forward"]

SCALE_OF_P = 256.0
"""What cuDNN multiplies P, at most 1, by before it rounds it: e4m3 ends at 448. Its sums are multiplied by the inverse."""


def forward(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """A function that queues the pass on torch's stream, as often as it is called, and returns `out`.

    q, k, v are torch tensors in e4m3 (batch, heads, length, head_dim), as many queries as keys, with scales of 1. They are
    copied here, ahead of the calls, so that a token's heads lie side by side, as in cuDNN's own samples. `out` is bfloat16, or e4m3
    where cuDNN has no such plan. It writes no LSE. Raises what cuDNN raises for a problem that it has no plan for.
    """
    torch = importlib.import_module("torch")
    try:
        return _planned(torch, problem, (q, k, v), torch.bfloat16)
    except Exception:  # it has several ways to say that it has no such plan
        return _planned(torch, problem, (q, k, v), torch.float8_e4m3fn)


def _planned(torch: Any, p: Problem, tensors: tuple[Any, ...], out_dtype: Any) -> Callable[[], Any]:
    """`forward` for one dtype of the output."""
    single = [1, 1, 1, 1]
    given = {name: _by_tokens(x) for name, x in zip("qkv", tensors, strict=True)}
    factors = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), 1.0)
    factors |= {"scale_s": SCALE_OF_P, "descale_s": 1 / SCALE_OF_P}
    given |= {name: torch.full(single, factor, dtype=torch.float32, device="cuda") for name, factor in factors.items()}
    out = torch.empty_like(given["q"], dtype=out_dtype)  # with the strides of q
    largest = [torch.zeros(single, dtype=torch.float32, device="cuda") for _ in range(2)]

    causal = {"right_bound": 0} if p.causal else {}

    def sdpa(graph: Any, inputs: dict[str, Any]) -> list[Any]:
        made, _, *amaxes = graph.sdpa_fp8(**inputs, attn_scale=p.scale, generate_stats=False, **causal)
        return [made, *amaxes]

    run = cudnn_graph.planned(given, [out, *largest], sdpa)

    def call() -> Any:
        run()
        return out

    return call


def _by_tokens(x: Any) -> Any:
    """(batch, heads, length, head_dim), in memory (batch, length, heads, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
