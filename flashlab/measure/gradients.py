"""A backward pass of ours and of other libraries, ready to be timed on the same tensors, and judged in some rows.

Each library's backward pass gets the output and the LSE of its own forward pass, which is not timed. The rule judges each
gradient given that output and that LSE.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from flashlab.base.host import to_numpy
from flashlab.integrations.peers import fa3_wheel
from flashlab.measure.speed import Cell, normal, outer_heads, sampled
from simulator import Problem
from simulator.dtypes import Array
from simulator.errors import Unavailable
from simulator.operations.backward import BACKWARD

FORWARD = "flash3"
"""The algorithm whose output and LSE our backward passes get."""


class Backward:
    """The backward pass of a cell, as `speed.Trial` wants it."""

    PRODUCTS: ClassVar[float] = 2.5

    def __init__(self, torch: Any, cell: Cell) -> None:
        self.torch, self.problem = torch, cell.problem
        self.q, self.k, self.v, self.dout = normal(torch, cell, ("q", "k", "v", "dout"))
        self._results: dict[str | None, tuple[Any, Any]] = {}  # the output and the LSE of each one's forward pass

    def ours(self, algorithm: str, tile: Any) -> Callable[[], Any]:
        from flashlab.run.backward import attention_backward
        from flashlab.run.call import attention

        p = self.problem
        out, lse = attention(self.q, self.k, self.v, algorithm=FORWARD, lse=True, **p.masks)
        self._results[None] = self._results[algorithm] = out, lse

        def call() -> Any:
            return attention_backward(
                self.dout, self.q, self.k, self.v, out, lse, algorithm=algorithm, tile=tile, **p.masks
            )

        return call

    def peer(self, name: str) -> Callable[[], Any]:
        """Raises `Unavailable` for a library whose backward pass isn't known here."""
        if name not in _PEERS:
            raise Unavailable(f"only the backward passes of {', '.join(_PEERS)} are known")
        call, out, lse = _PEERS[name](self)
        self._results[name] = out, lse
        return call

    def error(self, name: str | None, call: Callable[[], Any]) -> float:
        litter = [self.torch.full_like(self.q, float("nan")) for _ in range(3)]  # the allocator hands this memory on
        del litter
        dq, dk, dv = call()
        found = {"dq": dq, "dk": dk, "dv": dv}
        out, lse = self._results[name]
        given = {"q": self.q, "k": self.k, "v": self.v, "out": out, "lse": lse, "dout": self.dout}
        return max(errors(self.problem, given, found))


def errors(p: Problem, given: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[float]:
    """How far some rows of each gradient are off, of the first head and of the last, as a share of what the rule allows.

    They are problems of their own: few queries and their keys for dQ, few keys and the queries of all heads that share them for
    dK and dV. The LSE is given, so nothing else is missing. Of a ragged batch the first sequence and the last are looked at.
    """
    for places in dict.fromkeys([p.spans[0], p.spans[-1]]):
        rows, keys = (slice(each.start, each.stop) for each in places)
        alone = p.replace(lengths=None, len_q=len(places[0]), len_kv=len(places[1])) if p.ragged else p
        of_sequence = [
            {name: x[:, :, keys if name.lstrip("d") in ("k", "v") else rows] for name, x in each.items()}
            for each in (given, found)
        ]
        yield from _errors(alone, *of_sequence)


def _errors(p: Problem, given: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[float]:
    group = p.queries_per_kv
    for b, h in outer_heads(p):
        kv_head = h // group
        heads = {name: slice(kv_head, kv_head + 1) for name in ("k", "v", "dk", "dv")}
        sharing = slice(kv_head * group, (kv_head + 1) * group)
        head, mine = (
            {name: to_numpy(name, x[b : b + 1, heads.get(name, sharing)]) for name, x in each.items()}
            for each in (given, found)
        )
        member = slice(h % group, h % group + 1)
        one = {name: x if name in heads else x[:, member] for name, x in head.items()}
        for rows in sampled(p.len_q, p.causal):
            keys = np.arange(max(0, rows[-1] + 1 + p.offset) if p.causal else p.len_kv)
            own = p.replace(batch=1, heads=1, kv_heads=1, len_q=len(rows), len_kv=len(keys))
            yield _worst(own, _part(one, np.array(rows), keys), {"dq": mine["dq"][:, member, rows]})
        for rows in sampled(p.len_kv, p.causal):
            # queries from the first that sees a key on: the mask shows query i its keys up to i + offset
            first = max(0, rows[0] - p.offset) if p.causal else 0
            queries = np.arange(first, p.len_q)
            own = p.replace(batch=1, heads=group, kv_heads=1, len_q=len(queries), len_kv=len(rows))
            if p.causal:
                last = first + p.offset - rows[0]  # of these keys, that the first of these queries sees
                own = own.replace(causal=False, window=(None, last + len(queries) - len(rows)))
            of_keys = {name: mine[name][:, :, rows] for name in ("dk", "dv")}
            yield _worst(own, _part(head, queries, np.array(rows)), of_keys)


def _part(head: Mapping[str, Array], queries: Array, keys: Array) -> dict[str, Array]:
    return {name: x[:, :, keys if name in ("k", "v") else queries] for name, x in head.items()}


def _worst(p: Problem, given: Mapping[str, Array], found: Mapping[str, Array]) -> float:
    truth = BACKWARD.judge(p, given)
    bounds = BACKWARD.bounds(p, given, truth)
    worst = 0.0
    for name, x in found.items():
        off = np.linalg.norm(x.astype(np.float64) - truth[name], axis=-1) / bounds[name]
        worst = max(worst, float(np.where(np.isnan(off), np.inf, off).max(initial=0.0)))
    return worst


def _sdpa(backend: str, operator: str) -> Callable[[Backward], tuple[Callable[[], Any], Any, Any]]:
    """torch's own, by a backend of `scaled_dot_product_attention`. The operator behind it returns the LSE."""

    def prepare(trial: Backward) -> tuple[Callable[[], Any], Any, Any]:
        torch, p = trial.torch, trial.problem
        if p.ragged:
            raise Unavailable("takes no ragged batch without padding")
        if p.causal and p.offset:
            raise Unavailable("aligns a causal mask with the first key, where there are more keys than queries")
        attention = importlib.import_module("torch.nn.attention")
        q, k, v = (x.detach().requires_grad_() for x in (trial.q, trial.k, trial.v))
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=p.causal, scale=p.scale, enable_gqa=p.queries_per_kv > 1
            )
        lse = getattr(torch.ops.aten, operator)(
            trial.q,
            trial.k,
            trial.v,
            *((None, True) if backend.startswith("CUDNN") else ()),
            0.0,
            p.causal,
            scale=p.scale,
        )[1]

        def call() -> Any:
            return torch.autograd.grad(out, (q, k, v), trial.dout, retain_graph=True)

        return call, out.detach(), lse.reshape(lse.shape[:3])

    return prepare


def _fa4(trial: Backward) -> tuple[Callable[[], Any], Any, Any]:
    try:
        library = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute cannot be imported ({error}): pip install flash-attn-4") from None
    p = trial.problem
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (trial.q, trial.k, trial.v, trial.dout))
    forward, options = library.flash_attn_func, {"softmax_scale": p.scale, "causal": p.causal}
    if p.ragged:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        forward, options = library.flash_attn_varlen_func, options | _sequences(trial)
    out, lse = forward(q, k, v, return_lse=True, **options)[:2]

    def back(x: Any) -> Any:
        return (x[None] if p.ragged else x).transpose(1, 2)

    def call() -> Any:
        return [back(x) for x in library._flash_attn_bwd(q, k, v, out, dout, lse, **options)[:3]]

    return call, back(out), lse[None] if p.ragged else lse


def _fa3_wheel(trial: Backward) -> tuple[Callable[[], Any], Any, Any]:
    p = trial.problem
    dout, q, k, v = (x.transpose(1, 2).contiguous() for x in (trial.dout, trial.q, trial.k, trial.v))
    said: Any = {"causal": p.causal, "scale": p.scale, "lengths": p.lengths}
    out, lse = fa3_wheel.prepare(q, k, v, **said)()
    run = fa3_wheel.prepare_backward(dout, q, k, v, out, lse, **said)

    def call() -> Any:
        return [x.transpose(1, 2) for x in run()]

    return call, out.transpose(1, 2), lse


def _sequences(trial: Backward) -> dict[str, Any]:
    """Where the sequences of a ragged batch begin, as FlashAttention's functions are told."""
    said: dict[str, Any] = {}
    for side, spans in zip("qk", zip(*trial.problem.spans, strict=True), strict=True):
        ends = [0, *(span.stop for span in spans)]
        said[f"cu_seqlens_{side}"] = trial.torch.tensor(ends, dtype=trial.torch.int32, device=trial.q.device)
        said[f"max_seqlen_{side}"] = max(len(span) for span in spans)
    return said


_PEERS: dict[str, Callable[[Backward], tuple[Callable[[], Any], Any, Any]]] = {
    "sdpa-flash": _sdpa("FLASH_ATTENTION", "_scaled_dot_product_flash_attention"),
    "cudnn": _sdpa("CUDNN_ATTENTION", "_scaled_dot_product_cudnn_attention"),
    "fa4": _fa4,
    "fa3-wheel": _fa3_wheel,
}
