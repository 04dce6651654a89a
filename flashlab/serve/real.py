"""A tiny random model whose K and V lie in pages: what a day computes where it is `real`.

Its tokens mean nothing. But each follows from all before it through two layers, so that one wrong row of a page changes what comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Model
from flashlab.serve.requests import Request
from simulator.api import simulate
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError, among
from simulator.memory import check_memory
from simulator.operations.attention import ATTENTION
from simulator.problem import Problem

__all__ = ["BACKENDS", "TINY", "Engine", "Tiny"]

BACKENDS = ("simulator", "emulator", "gpu")
TINY = Model(layers=2, heads=4, kv_heads=2, head_dim=16, dtype="float16")
_VOCABULARY, _LONGEST = 512, 4096


class Tiny:
    """A model of two layers with random weights, in float32 but for q, K, V and the attention's output."""

    def __init__(self, model: Model = TINY, seed: int = 0) -> None:
        self.model = model
        random, width = np.random.default_rng(seed), model.heads * model.head_dim
        of_kv = model.kv_heads * model.head_dim

        def weights(*shape: int) -> Array:
            return random.normal(0, 1, shape).astype(np.float32)

        self.embedding, self.positions = weights(_VOCABULARY, width), weights(_LONGEST, width)
        self.into = [weights(width, width + 2 * of_kv) / width**0.5 for _ in range(model.layers)]
        self.out = [weights(width, width) / width**0.5 for _ in range(model.layers)]
        self.head = weights(width, _VOCABULARY)

    def begin(self, tokens: Sequence[int], first: int) -> Array:
        """What goes into the first layer for tokens whose positions begin at `first`, (tokens, width)."""
        if first + len(tokens) > _LONGEST:
            raise UsageError(
                "trace", f"a request of {first + len(tokens):,} tokens", f"at most {_LONGEST:,} with real numbers"
            )
        numbers = np.array([token % _VOCABULARY for token in tokens])
        return self.embedding[numbers] + self.positions[first : first + len(tokens)]

    def qkv(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim), in the storage dtype."""
        m, dtype = self.model, numpy_dtype(self.model.dtype)
        found = (np.tanh(x) @ self.into[layer]).astype(dtype).reshape(len(x), -1, m.head_dim)
        return found[:, : m.heads], found[:, m.heads : -m.kv_heads], found[:, -m.kv_heads :]

    def after(self, layer: int, x: Array, attended: Array) -> Array:
        """What leaves a layer, whose attention gave (tokens, heads, head_dim)."""
        return x + attended.astype(np.float32).reshape(len(x), -1) @ self.out[layer]

    def token(self, x: Array) -> int:
        """The next token, from what left the last layer for the last one."""
        return int(np.argmax(np.tanh(x) @ self.head))

    def alone(self, tokens: Sequence[int]) -> int:
        """The next token by naive attention in float64, without pages."""
        x, m = self.begin(tokens, 0), self.model
        n = len(tokens)
        sizes: Any = {
            "batch": 1,
            "heads": m.heads,
            "kv_heads": m.kv_heads,
            "len_q": n,
            "head_dim": m.head_dim,
            "dtype": m.dtype,
        }
        problem = Problem(**sizes, causal=True)
        for layer in range(m.layers):
            q, k, v = (part.swapaxes(0, 1)[None] for part in self.qkv(layer, x))
            out = ATTENTION.judge(problem, {"q": q, "k": k, "v": v})["out"]
            x = self.after(layer, x, out[0].swapaxes(0, 1).astype(numpy_dtype(m.dtype)))
        return self.token(x[-1])


class Engine:
    """Computes steps: K and V into pages, attention by the kernels, a token for each request that is to get one.

    `backend` is "simulator" (NumPy's tile programs), "emulator" (the kernels on a CPU; needs a C++ compiler) or "gpu". What no
    request has written is NaN: a kernel that read it would say so.
    """

    def __init__(self, manager: KVCacheManager, tiny: Tiny, backend: str = "simulator") -> None:
        self.tiny, self.manager, self.backend = tiny, manager, among("backend", backend, BACKENDS)
        m = tiny.model
        shape = (manager.num_blocks, m.kv_heads, manager.block_size, m.head_dim)
        if backend != "gpu":
            nbytes = 2 * m.layers * prod(shape) * numpy_dtype(m.dtype).itemsize
            check_memory(f"{manager.num_blocks:,} pages of {manager.block_size:,} tokens", nbytes)
        self._np: Any = np if backend != "gpu" else _cupy()
        self.pools = [[self._np.full(shape, np.nan, numpy_dtype(m.dtype)) for _ in "kv"] for _ in range(m.layers)]

    def run(self, step: Mapping[Request, int], answers: Sequence[Request]) -> dict[Request, int]:
        """The next token of each request in `answers`. K and V of all new tokens of the step are written."""
        m, requests = self.manager, list(step)
        if copies := m.take_copies():
            for pools in self.pools:
                self._write("copy_pages", pools, pairs=np.array(copies, np.int32))
        slots = m.slot_mapping(requests)
        first = {request: m.num_computed_tokens(request) for request in requests}
        xs = [self.tiny.begin(r.tokens[first[r] : first[r] + n], first[r]) for r, n in step.items()]
        x, ends = np.concatenate(xs), np.cumsum([len(one) for one in xs])
        groups = defaultdict[int, list[int]](list)
        for i, n in enumerate(step.values()):
            groups[n].append(i)
        for layer, pools in enumerate(self.pools):
            q, k, v = self.tiny.qkv(layer, x)
            self._write("append_kv", pools, k=k.swapaxes(0, 1)[None], v=v.swapaxes(0, 1)[None], slot_mapping=slots)
            k_pool, v_pool = pools
            attended = np.empty_like(q)
            for n, group in groups.items():
                rows = ends[group][:, None] + np.arange(-n, 0)
                lens = np.array([first[requests[i]] + n for i in group], np.int32)
                table = m.block_table([requests[i] for i in group])
                out = self._attend(q[rows].swapaxes(1, 2), k_pool, v_pool, table, lens)
                attended[rows] = out.swapaxes(1, 2)
            x = self.tiny.after(layer, x, attended)
        return {r: self.tiny.token(x[end - 1]) for r, end in zip(requests, ends, strict=True) if r in answers}

    def _write(self, algorithm: str, pools: list[Any], **arrays: Array) -> None:
        """Append to the pools of a layer, or copy pages of them."""
        given: dict[str, Any] = {**dict(zip(("k_pool", "v_pool"), pools, strict=True)), **arrays}
        if self.backend == "simulator":
            outputs = simulate(algorithm, **given).outputs
            pools[:] = [outputs[name] for name in ("k_pool", "v_pool")]
            return
        from flashlab.run import pools as kernels

        backend: Any = self.backend
        getattr(kernels, algorithm)(
            **given | {name: self._np.asarray(x) for name, x in arrays.items()}, backend=backend
        )

    def _attend(self, q: Array, k: Any, v: Any, table: Array, lens: Array) -> Array:
        """Attention of a launch: q and the output are (requests, heads, new tokens, head_dim)."""
        algorithm = "paged" if q.shape[2] == 1 else "flash3_paged"
        named: dict[str, Any] = {"block_table": table, "seq_lens": lens}
        if self.backend == "simulator":
            return simulate(algorithm, q, k, v, causal=True, **named).out
        from flashlab.run.call import attention

        arrays = {name: self._np.asarray(np.ascontiguousarray(x)) for name, x in {"q": q, **named}.items()}
        backend: Any = self.backend
        out = attention(k=k, v=v, algorithm=algorithm, causal=True, backend=backend, **arrays)
        return out if backend == "emulator" else self._np.asnumpy(out)


def _cupy() -> Any:
    from flashlab.run.arrays import cupy

    return cupy()
