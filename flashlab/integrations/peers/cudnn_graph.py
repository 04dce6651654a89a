"""cuDNN's graphs of one operation, as `nvidia-cudnn-frontend` makes them, on torch tensors and torch's stream."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulator.errors import Unavailable

__all__ = ["library", "planned", "versions"]

_KINDS = {
    "float8_e4m3fn": "FP8_E4M3", "bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT", "int32": "INT32",
}  # fmt: skip
"""What cuDNN calls torch's dtypes."""


def library() -> Any:
    """The package. Raises `Unavailable` where it isn't installed."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise Unavailable(f"cudnn cannot be imported ({error}): pip install nvidia-cudnn-frontend") from None


def versions() -> str:
    """The library's versions, in words. Raises `Unavailable` where it isn't installed."""
    cudnn = library()
    return f"nvidia-cudnn-frontend {cudnn.__version__}, cuDNN {cudnn.backend_version_string()}"


def planned(
    given: Mapping[str, Any], outputs: Sequence[Any], operation: Callable[[Any, dict[str, Any]], Sequence[Any]]
) -> Callable[[], None]:
    """A function that queues a graph, as often as it is called. All that can be done ahead is done here.

    `given` are its inputs by name, torch tensors of which the first has the graph's dtype. `operation` gets the graph and its
    tensors by the same names, and returns what is to be written to `outputs`. Raises what cuDNN raises for what it has no plan for.
    """
    cudnn, torch = library(), importlib.import_module("torch")
    first = next(iter(given.values()))

    def kind(x: Any) -> Any:
        return getattr(cudnn.data_type, _KINDS[str(x.dtype).removeprefix("torch.")])

    handle = cudnn.create_handle()
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=kind(first), intermediate_data_type=single, compute_data_type=single, handle=handle
    )
    inputs = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind(x))
        for name, x in given.items()
    }
    made = list(zip(operation(graph, inputs), outputs, strict=True))
    for each, x in made:
        each.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind(x))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=first.device)
    bound = {inputs[name]: x for name, x in given.items()} | dict(made)

    def call() -> None:
        # The stream of now: a CUDA graph is captured on one of its own.
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, workspace, handle=handle)

    return call
