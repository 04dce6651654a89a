"""Other libraries' decoding over pages, made ready to be timed: their calls get the very tensors that ours gets.

All that can be done ahead is done ahead: plans, lists of pages, graphs and scratch memory. A call only queues kernels, so it can be
kept in a CUDA graph. No page is copied: a pool is seen in the order of axes that a library wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from flashlab.integrations.peers import cudnn_graph
from simulator.errors import Unavailable

__all__ = ["PEERS", "check", "flashinfer", "prepare", "reason"]

Call = Callable[[], Any]


def prepare(name: str, torch: Any, arrays: Mapping[str, Any]) -> Call:
    """A function that queues a peer's kernels and returns `out` (batch, heads, 1, head_dim).

    `arrays` are those of `flashlab.attention` with one query for each head: `q`, pools `k` and `v` (pages, kv_heads, page_size,
    head_dim), `block_table` and `seq_lens`. The peer is called once here. Raises `Unavailable` where it doesn't take them.
    """
    try:
        call = PEERS[name](torch, **arrays)
        call()  # some refuse only now
    except Exception as error:  # other libraries raise what they like
        raise Unavailable(reason(error)) from error
    return call


def check(name: str) -> None:
    """Raise `Unavailable` for a peer that isn't installed."""
    if name == "cudnn-paged":
        cudnn_graph.library()
    else:
        flashinfer()


def flashinfer() -> Any:
    """The package. Raises `Unavailable` where it isn't installed."""
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise Unavailable(f"flashinfer cannot be imported ({error}): pip install flashinfer-python") from None


def reason(error: Exception) -> str:
    """What an exception says, in one line."""
    if isinstance(error, Unavailable):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class _Pages:
    """Requests as FlashInfer wants them: one list of all their pages, and where each request's pages begin in it."""

    def __init__(self, torch: Any, q: Any, k: Any, v: Any, block_table: Any, seq_lens: Any) -> None:
        self.batch, self.heads, _, self.head_dim = q.shape
        self.kv_heads, self.size = k.shape[1:3]
        counts = (seq_lens + self.size - 1) // self.size
        self.each = torch.arange(self.batch + 1, dtype=torch.int32, device=q.device)
        self.starts = torch.zeros_like(self.each)
        self.starts[1:] = counts.cumsum(0)
        places = torch.arange(block_table.shape[1], device=q.device)
        self.indices = block_table[places < counts[:, None]]
        self.last = (seq_lens - 1) % self.size + 1
        self.rows, self.pools = q[:, :, 0], tuple(x.transpose(1, 2) for x in (k, v))
        self.out = torch.empty_like(self.rows)
        self.how: dict[str, Any] = {
            "sm_scale": self.head_dim**-0.5, "q_data_type": q.dtype, "kv_data_type": k.dtype,
        }  # fmt: skip


def _flashinfer(torch: Any, **arrays: Any) -> Call:
    """FlashInfer's call for decoding, on tensor cores: several queries share a head of the keys."""
    pages = _Pages(torch, **arrays)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=pages.out.device)
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        pages.starts, pages.indices, pages.last, pages.heads, pages.kv_heads, pages.head_dim, pages.size, **pages.how
    )

    def call() -> Any:
        return wrapper.run(pages.rows, pages.pools, out=pages.out).unsqueeze(2)

    return call


def _flashinfer_batch(torch: Any, **arrays: Any) -> Call:
    """FlashInfer's call for requests of all kinds: one persistent launch, whose plan deals out the lengths evenly."""
    pages = _Pages(torch, **arrays)
    lse = torch.empty(pages.rows.shape[:2], dtype=torch.float32, device=pages.out.device)
    wrapper = flashinfer().BatchAttention("NHD", pages.out.device)
    wrapper.plan(
        pages.each, pages.starts, pages.indices, arrays["seq_lens"], pages.heads, pages.kv_heads, pages.head_dim, pages.head_dim,
        pages.size, causal=False, **pages.how,
    )  # fmt: skip

    def call() -> Any:
        return wrapper.run(pages.rows, pages.pools, out=pages.out, lse=lse)[0].unsqueeze(2)

    return call


def _cudnn(torch: Any, q: Any, k: Any, v: Any, block_table: Any, seq_lens: Any) -> Call:
    """cuDNN's graph of one operation, `sdpa`, whose K and V are pools and tables of pages."""
    batch = q.shape[0]
    table = block_table.view(batch, 1, -1, 1)
    given = {
        "q": q, "k": k, "v": v, "paged_attention_k_table": table, "paged_attention_v_table": table,
        "seq_len_q": torch.ones((batch, 1, 1, 1), dtype=torch.int32, device=q.device),
        "seq_len_kv": seq_lens.view(batch, 1, 1, 1),
    }  # fmt: skip
    out = torch.empty_like(q)

    def sdpa(graph: Any, inputs: dict[str, Any]) -> list[Any]:
        made, _ = graph.sdpa(
            **inputs, attn_scale=q.shape[-1] ** -0.5, generate_stats=False, use_padding_mask=True,
            paged_attention_max_seq_len_kv=table.shape[2] * k.shape[2],  # all that a line of the table has room for
        )  # fmt: skip
        return [made]

    run = cudnn_graph.planned(given, [out], sdpa)

    def call() -> Any:
        run()
        return out

    return call


PEERS: Mapping[str, Callable[..., Call]] = {
    "flashinfer": _flashinfer,
    "flashinfer-batch": _flashinfer_batch,
    "cudnn-paged": _cudnn,
}
"""What makes a peer's call, by its name."""
