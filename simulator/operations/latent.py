"""DeepSeek's latent attention (MLA), in its absorbed form: its operands, and a judge that unfolds the latent cache first.

The cache has one row per token for all heads (arXiv 2405.04434): 512 numbers, from which a head would make its keys and values,
and 64 that carry RoPE. A head's key is K = [A c, r], so q . K = [A^T q, q_r] . [c, r]: the query absorbs A, and meets the row as
it lies. So a query has 576 numbers, the row is the key of every head, and its first 512 numbers are the value. What a head makes
of values, a matrix too, waits until after the softmax.

The default scale is 1/sqrt(192), that of the head before absorption: 128 numbers and 64 of RoPE. 1/sqrt(576) would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.fields import Lengths
from simulator.names import DType
from simulator.operations.attention import ATTENTION, check_optional
from simulator.operations.operation import Arrays, Operand, Operation, storage_dtypes
from simulator.operations.paged import PagedAttention, Pool
from simulator.problem import Problem, Tile

HEAD_DIM, HEAD_DIM_V = 576, 512
"""Numbers of a row of the latent cache, and how many of them are the value."""
SCALE = 1 / math.sqrt(192)
_SIZES: Mapping[str, Any] = {"kv_heads": 1, "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V, "scale": SCALE}
_DTYPES = "float16 or bfloat16"


def latent_problem(
    *, batch: int = 1, heads: int, len_q: int | None = None, len_kv: int | None = None, dtype: DType = "bfloat16",
    scale: float | None = None, lengths: Lengths | None = None, page_size: int | None = None, pages: int | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, soft_cap: float | None = None, sinks: bool = False,
    chunk: int | None = None,
) -> Problem:  # fmt: skip
    """A problem of latent attention: one KV head of 576 numbers, of which 512 are the value, and the scale 1/sqrt(192).

    The other fields are those of `Problem`. One query per head is what decoding has, so `len_q` is 1 by default.

    >>> import flashlab as fl
    >>> p = fl.latent_problem(heads=128, len_kv=8192)
    >>> p.kv_heads, p.head_dim, p.head_dim_v, round(p.scale**-2)
    (1, 576, 512, 192)
    >>> fl.count("mla", p, device="h200").by_tensor["latent"].hbm_read == 2 * 8192 * 1152  # once per 64 heads
    True
    """
    return Problem(
        batch=batch, heads=heads, kv_heads=1, len_q=1 if len_q is None and lengths is None else len_q, len_kv=len_kv,
        head_dim=HEAD_DIM, head_dim_v=HEAD_DIM_V, dtype=dtype, scale=SCALE if scale is None else scale, lengths=lengths,
        page_size=page_size, pages=pages, causal=causal, window=window, soft_cap=soft_cap, sinks=sinks, chunk=chunk,
    )  # fmt: skip


def refusal(problem: Problem) -> UsageError | None:
    """The error for a problem that latent attention doesn't have, or None."""
    for name, value in (("kv_heads", 1), ("head_dim", HEAD_DIM), ("head_dim_v", HEAD_DIM_V)):
        if getattr(problem, name) != value:
            return UsageError(name, getattr(problem, name), f"{value} for latent attention: see fl.latent_problem")
    if "scale" not in problem.given:
        return UsageError("scale", None, "a number, 1/sqrt(192) for a head of 128 + 64: see fl.latent_problem")
    return None


def fitted(problem: Problem) -> Problem:
    """A plain problem with latent attention's sizes, and its scale where none was given."""
    return problem.replace(**{**_SIZES, "scale": problem.given.get("scale", SCALE)})


def _posed(arrays: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, Any]:
    """What arrays say of a problem by their shapes and dtypes: `wanted` are their axes. Raises a `UsageError`."""
    for name, axes in wanted.items():
        x = arrays[name]
        if len(getattr(x, "shape", ())) != axes.count(",") + 1:
            raise UsageError(f"{name}.shape", tuple(x.shape) if hasattr(x, "shape") else type(x).__name__, axes)
    for name in ("q", "latent"):
        if arrays[name].shape[3] != HEAD_DIM:
            raise UsageError(f"{name}.shape", tuple(arrays[name].shape), f"{wanted[name]}: 512 and 64 of RoPE")
    if arrays["latent"].shape[1] != 1:
        raise UsageError("latent.shape", tuple(arrays["latent"].shape), f"{wanted['latent']}: all heads share one row")
    dtype = storage_dtypes(arrays, ("q", "latent"), _DTYPES)
    batch, heads, len_q, _ = arrays["q"].shape
    return {"batch": batch, "heads": heads, "len_q": len_q, "dtype": dtype, "sinks": arrays.get("sinks") is not None}


def _asked(masks: Mapping[str, Any]) -> dict[str, Any]:
    """The masks that a caller asks for. The scale that is left out is latent attention's."""
    return {name: value for name, value in masks.items() if value is not None}


_Q_AXES = f"(batch, heads, len_q, {HEAD_DIM})"


class LatentAttention(Operation):
    """The absorbed form over rows that lie one behind the other."""

    name = "latent attention"
    kinds: ClassVar[Mapping[str, str]] = {
        k: about for k, about in ATTENTION.kinds.items() if k not in ("biased", "ahead")
    }
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        word: {**_SIZES, **shape}
        for word, shape in {
            "one query": {"heads": 16, "len_q": 1, "len_kv": 200},
            "few heads, batch 2": {"batch": 2, "heads": 5, "len_q": 1, "len_kv": 70},
            "chunks": {"heads": 4, "len_q": 1, "len_kv": 1100},
            "many heads": {"heads": 70, "len_q": 1, "len_kv": 90},
            "several new tokens, causal": {"heads": 6, "len_q": 5, "len_kv": 130, "causal": True},
            "more queries than keys, causal": {"heads": 2, "len_q": 20, "len_kv": 7, "causal": True},
            "a window, a scale": {"heads": 3, "len_q": 3, "len_kv": 150, "window": (40, 0), "scale": 0.03},
            "one key": {"heads": 2, "len_q": 1, "len_kv": 1},
            "a soft cap, sinks, chunks": {"heads": 4, "len_q": 2, "len_kv": 1100, "soft_cap": 2.0, "sinks": True},
            "sinks, causal": {"batch": 2, "heads": 3, "len_q": 5, "len_kv": 3, "causal": True, "sinks": True},
            "short chunks": {"batch": 2, "heads": 4, "len_q": 1, "len_kv": 330, "chunk": 128},
            "a long chunk": {"heads": 3, "len_q": 1, "len_kv": 1100, "chunk": 2048},
            "sequences": {"heads": 3, "lengths": [(1, 600), (1, 1), (1, 0), (1, 70)]},
            "sequences, causal, sinks": {"heads": 4, "lengths": [(5, 1100), (5, 5), (5, 2)], "causal": True, "sinks": True},
        }.items()
    }  # fmt: skip
    shown: ClassVar[Mapping[str, Any]] = {"len_q": 1, "len_kv": 256, "chunk": 64}
    inputs = (
        ATTENTION.operand("q"),
        Operand(name="latent", axes=("batch", "kv_heads", "len_kv", "head_dim")),
        ATTENTION.operand("sinks"),
        ATTENTION.operand("offsets_kv"),
    )
    outputs = ATTENTION.outputs

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        posed = _posed(arrays, {"q": _Q_AXES, "latent": f"(batch, 1, len_kv, {HEAD_DIM})"})
        if (batch := arrays["latent"].shape[0]) != posed["batch"]:
            raise UsageError(
                "latent.shape", tuple(arrays["latent"].shape), f"batch {posed['batch']}, as q has: not {batch}"
            )
        return latent_problem(len_kv=arrays["latent"].shape[2], **posed).replace(**_asked(masks))

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation. What NumPy's optional arrays hold is looked at, too."""
        super().check(problem, arrays, tile)
        check_optional(problem, arrays)

    def refusal(self, problem: Problem, by: str) -> UsageError | None:
        return super().refusal(problem, by) or refusal(problem)

    def fitted(self, problem: Problem) -> Problem:
        return fitted(problem)

    def idle(self, problem: Problem) -> bool:
        return not problem.len_q

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        drawn = ATTENTION.draw(problem, seed, kind)
        drawn["latent"] = drawn.pop("k")
        return {name: drawn[name] for name in ("q", "latent", "sinks") if name in drawn}

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        return ATTENTION.judge(problem.replace(chunk=None), unfolded(arrays))

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        return ATTENTION.bounds(problem.replace(chunk=None), unfolded(arrays), truth)

    def flops(self, problem: Problem) -> int:
        return ATTENTION.flops(problem)


def unfolded(arrays: Arrays) -> dict[str, Array]:
    """The q, k and v of plain attention: the row is the key, and its first 512 numbers are the value."""
    latent = arrays["latent"]
    return {name: arrays[name] for name in ("q", "sinks") if name in arrays} | {
        "k": latent,
        "v": latent[..., :HEAD_DIM_V],
    }


LATENT = LatentAttention()


class PagedLatentAttention(PagedAttention):
    """The absorbed form over rows in pages."""

    name = "paged latent attention"
    plain = LATENT
    pools = ("latent",)
    kinds: ClassVar[Mapping[str, str]] = LATENT.kinds
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        word: {**_SIZES, **shape}
        for word, shape in {
            "one request": {"batch": 1, "heads": 16, "len_q": 1, "len_kv": 150, "page_size": 64},
            "requests": {"batch": 4, "heads": 3, "lengths": [(1, 600), (1, 1), (1, 0), (1, 70)], "page_size": 64, "pages": 20},
            "pages of one row": {"batch": 2, "heads": 2, "lengths": [(1, 90), (1, 33)], "page_size": 1},
            "small pages": {"batch": 2, "heads": 2, "lengths": [(1, 390), (1, 50)], "page_size": 8},
            "an odd page": {"batch": 2, "heads": 3, "lengths": [(1, 100), (1, 7)], "page_size": 7, "len_kv": 500},
            "several new tokens, causal": {
                "batch": 3, "heads": 4, "lengths": [(5, 150), (5, 5), (5, 2)], "causal": True, "page_size": 8,
            },
            "a soft cap, sinks": {
                "batch": 3, "heads": 4, "lengths": [(2, 1100), (2, 0), (2, 70)], "page_size": 64, "soft_cap": 2.0, "sinks": True,
            },
            "short chunks": {"batch": 3, "heads": 4, "lengths": [(1, 330), (1, 64), (1, 65)], "page_size": 16, "chunk": 64},
        }.items()
    }  # fmt: skip
    shown: ClassVar[Mapping[str, Any]] = {
        "batch": 2, "lengths": [(1, 250), (1, 90)], "page_size": 16, "pages": 28, "chunk": 64,
    }  # fmt: skip
    inputs = (
        ATTENTION.operand("q"),
        Pool(name="latent", axes=("pages", "kv_heads", "page_size", "head_dim")),
        *(x for x in PagedAttention.inputs if x.name not in ("q", "k", "v", "cu_seqlens_q")),
    )

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        table = "(batch, pages per request)"
        wanted = {"q": _Q_AXES, "latent": f"(pages, 1, page_size, {HEAD_DIM})", "block_table": table}
        posed = _posed(arrays, wanted)
        pages, _, size, _ = arrays["latent"].shape
        if size < 1:
            raise UsageError("latent.shape", tuple(arrays["latent"].shape), "pages of at least one row")
        length = arrays["block_table"].shape[1] * size
        problem = latent_problem(len_kv=length, page_size=size, pages=pages, **posed).replace(**_asked(masks))
        self.check_shapes(problem, arrays)
        return problem

    def refusal(self, problem: Problem, by: str) -> UsageError | None:
        return super().refusal(problem, by) or refusal(problem)

    def fitted(self, problem: Problem) -> Problem:
        return fitted(super().fitted(problem))


PAGED_LATENT = PagedLatentAttention()
