"""cuDNN's forward pass in FP8, as `nvidia-cudnn-frontend` has it: a graph of one operation, `sdpa_fp8`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from simulator import Problem
from simulator.errors import Unavailable

__all__ = ["forward", "library", "versions"]

SCALE_OF_P = 256.0
"""What cuDNN multiplies P, at most 1, by before it rounds it: e4m3 ends at 448. Its sums are multiplied by the inverse."""


def versions() -> str:
    """The library's versions, in words. Raises `Unavailable` where it isn't installed."""
    cudnn = library()
    return f"nvidia-cudnn-frontend {cudnn.__version__}, cuDNN {cudnn.backend_version_string()}"


def forward(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """A function that queues the pass on torch's stream, as often as it is called, and returns `out`.

    q, k, v are torch tensors in e4m3 (batch, heads, length, head_dim), as many queries as keys, with scales of 1. They are
    copied here, ahead of the calls, so that a token's heads lie side by side, as in cuDNN's own samples. `out` is bfloat16, or e4m3
    where cuDNN has no such plan. It writes no LSE. Raises what cuDNN raises for a problem that it has no plan for.
    """
    cudnn, torch = library(), importlib.import_module("torch")
    try:
        return _planned(cudnn, torch, problem, (q, k, v), torch.bfloat16)
    except Exception:  # it has several ways to say that it has no such plan
        return _planned(cudnn, torch, problem, (q, k, v), torch.float8_e4m3fn)


def library() -> Any:
    """The package. Raises `Unavailable` where it isn't installed."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise Unavailable(f"cudnn cannot be imported ({error}): pip install nvidia-cudnn-frontend") from None


def _planned(cudnn: Any, torch: Any, p: Problem, tensors: tuple[Any, ...], out_dtype: Any) -> Callable[[], Any]:
    """`forward` for one dtype of the output."""
    kinds, single = cudnn.data_type, [1, 1, 1, 1]
    types = {torch.float8_e4m3fn: kinds.FP8_E4M3, torch.bfloat16: kinds.BFLOAT16, torch.float32: kinds.FLOAT}
    given = {name: _by_tokens(x) for name, x in zip("qkv", tensors, strict=True)}
    factors = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), 1.0)
    factors |= {"scale_s": SCALE_OF_P, "descale_s": 1 / SCALE_OF_P}
    given |= {name: torch.full(single, factor, dtype=torch.float32, device="cuda") for name, factor in factors.items()}
    out = torch.empty_like(given["q"], dtype=out_dtype)  # with the strides of q
    largest = [torch.zeros(single, dtype=torch.float32, device="cuda") for _ in range(2)]

    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    inputs = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=types[x.dtype])
        for name, x in given.items()
    }
    causal = {"right_bound": 0} if p.causal else {}
    made, _, *amaxes = graph.sdpa_fp8(**inputs, attn_scale=p.scale, generate_stats=False, **causal)
    outputs = list(zip((made, *amaxes), (out, *largest), strict=True))
    for each, x in outputs:
        each.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(types[x.dtype])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    bound = {inputs[name]: x for name, x in given.items()} | dict(outputs)

    def call() -> Any:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, workspace, handle=handle)
        return out

    return call


def _by_tokens(x: Any) -> Any:
    """(batch, heads, length, head_dim), in memory (batch, length, heads, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
