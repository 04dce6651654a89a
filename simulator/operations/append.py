"""Rows of new keys and values, each put into its slot of a pool of pages: what a server does before it attends.

Slot s is row `s % page_size` of page `s // page_size`. A token whose slot is below 0 is skipped. The pools are read and written:
all other rows stay as they are. A pool of 8 bits gets each row quantised as `fl.quantize_cache` does it with a scale for each key,
to the bit, and the scales go to the same slots of `k_scale` and `v_scale`. Nothing here is rounded otherwise, so every bound is 0.

Of a problem, `len_q` is how many new tokens there are, and `len_kv` how many of them have a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from simulator.dtypes import Array
from simulator.errors import Said, UsageError
from simulator.operations.caches import dtypes_of, quantized, scale_fields
from simulator.operations.operation import Arrays, Operand
from simulator.operations.paged import PAGE_SIZE
from simulator.operations.pools import LABELS, POOLS, QUANTIZED, SCALES, Writing, codes, pool_sizes, scales
from simulator.operations.problems import Problems, Sizes, posed
from simulator.problem import DTYPES, Problem, Tile
from simulator.support import Support


class Append(Writing):
    """New keys and values into their slots."""

    name = "append"
    kinds: ClassVar[Mapping[str, str]] = {
        "normal": "standard normal", "sizes": "of a size for each token, up to 2^12, elements of many sizes, and some of zeros",
    }  # fmt: skip
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one token": {"heads": 2, "len_q": 1, "page_size": 16, "pages": 4},
        "a prompt": {"heads": 4, "kv_heads": 2, "len_q": 200, "page_size": 16, "pages": 20},
        "some are skipped": {"heads": 2, "len_q": 75, "len_kv": 60, "page_size": 16, "pages": 7},
        "all are skipped": {"heads": 1, "len_q": 9, "len_kv": 0, "page_size": 16, "pages": 1},
        "pages of one key": {"heads": 3, "len_q": 40, "page_size": 1, "pages": 50},
        "an odd page, an odd head dim": {"heads": 2, "len_q": 33, "len_kv": 30, "head_dim": 19, "page_size": 7, "pages": 6},
        "narrow heads": {"heads": 2, "len_q": 70, "head_dim": 8, "page_size": 16, "pages": 6},
        "wide heads": {"heads": 1, "len_q": 40, "head_dim": 256, "page_size": 64, "pages": 2},
        "no tokens": {"heads": 1, "len_q": 0, "page_size": 16, "pages": 2},
        **{
            f"{LABELS[dtype]}, head dim {dim}": {
                "heads": 4, "kv_heads": 2, "len_q": 70, "len_kv": 61, "head_dim": dim, "page_size": 16, "pages": 8, **sizes,
            }
            for dtype, sizes in QUANTIZED.items() for dim in (40, 128)
        },
    }  # fmt: skip
    sanitized: ClassVar[Problems] = {
        "some are skipped": {"heads": 4, "kv_heads": 2, "len_q": 75, "len_kv": 60, "head_dim": 64, "page_size": 7, "pages": 12},
        **{
            LABELS[dtype]: {"heads": 2, "len_q": 40, "len_kv": 33, "head_dim": 48, "page_size": 16, "pages": 4, **sizes}
            for dtype, sizes in QUANTIZED.items()
        },
    }  # fmt: skip
    shown: ClassVar[Mapping[str, Any]] = {"len_q": 40, "len_kv": 36, "page_size": 16, "pages": 4, "head_dim": 64}
    inputs = (
        Operand(name="k", axes=("batch", "kv_heads", "len_q", "head_dim")),
        Operand(name="v", axes=("batch", "kv_heads", "len_q", "head_dim_v")),
        *POOLS,
        Operand(name="slot_mapping", axes=("len_q",), dtype="int64"),
        *SCALES,
    )

    def matrix(self, support: Support, dtype: str, *, boxes: bool) -> dict[str, Sizes]:
        sizes: Sizes = {
            "batch": 1,
            "heads": 8,
            "kv_heads": 4,
            "len_q": 999,
            "head_dim": 64,
            "page_size": 16,
            "pages": 80,
        }
        skipped = {**sizes, "len_kv": 700}
        found: dict[str, Sizes] = {
            "aligned": {**sizes, "len_q": 1024}, "ragged": sizes, "some are skipped": skipped,
            "odd pages": {**sizes, "page_size": 7, "pages": 150}, "wide heads": {**sizes, "head_dim": 256},
        }  # fmt: skip
        return dict(posed(found | {LABELS[x]: {**skipped, **of} for x, of in QUANTIZED.items()}, dtype))

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        for name in "kv":
            x = arrays[name]
            if len(getattr(x, "shape", ())) != 4 or x.shape[0] != 1:
                shown = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
                raise UsageError(f"{name}.shape", shown, "(1, kv_heads, tokens, head_dim)")
        pages, heads, size, dim, dim_v = pool_sizes(arrays)
        told = {"q": arrays["k"], "k": arrays["k_pool"], "v": arrays["v_pool"]}
        try:
            dtype, kv_dtype = dtypes_of(told, f"one of {', '.join(DTYPES)}")
        except UsageError as error:  # it knows attention's names
            name = {"q": "k", "k": "k_pool", "v": "v_pool"}[error.argument[0]]
            raise UsageError(f"{name}.dtype", error.value, error.accepted.replace("q has", "k has")) from None
        scales = {name: arrays.get(name) for name in ("k_scale", "v_scale")}
        fields = scale_fields(dtype, kv_dtype, scales)
        for name, x in scales.items() if kv_dtype != dtype else ():
            if x is None or fields[name] != "token":
                shown = None if x is None else Said(f"{tuple(x.shape)}")
                accepted = f"{(pages, heads, size)} float32: a pool of {kv_dtype} gets a scale for each key"
                raise UsageError(name if x is None else f"{name}.shape", shown, accepted)
        problem = Problem(
            batch=1, heads=heads, len_q=arrays["k"].shape[2], head_dim=dim, head_dim_v=dim_v, dtype=dtype, page_size=size,
            pages=pages, **fields, **masks,
        )  # fmt: skip
        super().check(problem, {name: x for name, x in arrays.items() if x is not None})
        return problem

    def refusal(self, problem: Problem, by: str) -> UsageError | None:
        p = problem
        if (error := super().refusal(p, by)) is not None:
            return error
        if p.batch != 1 or p.lengths is not None:
            return UsageError("batch", p.batch, f"1, and no lengths: {by} takes all tokens in one row")
        if p.len_kv > p.len_q:
            return UsageError("len_kv", p.len_kv, f"at most {p.len_q:,}: so many of the new tokens have a slot")
        if p.len_kv > p.pages * (p.page_size or 1):
            return UsageError("pages", p.pages, f"room for {p.len_kv:,} tokens")
        if p.quantized and None in (p.k_scale, p.v_scale) or {p.k_scale, p.v_scale} - {None, "token"}:
            return UsageError("k_scale", p.k_scale, f"token, and so v_scale: {by} writes a scale for each key")
        return None

    def settled(self, problem: Problem, arrays: Mapping[str, Any]) -> Problem:
        """NumPy's slots say how many tokens have one."""
        slots = arrays.get("slot_mapping")
        if not isinstance(slots, np.ndarray):
            return problem
        self.check(problem, {"slot_mapping": slots})
        written = int((slots >= 0).sum())
        return problem if written == problem.len_kv else problem.replace(len_kv=written, pages=problem.pages)

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation. NumPy's slots are looked at, too; to look at those on a GPU would wait for it."""
        super().check(problem, arrays, tile)
        slots = arrays.get("slot_mapping")
        if not isinstance(slots, np.ndarray):
            return
        numbers: Array = slots  # pyright: ignore[reportUnknownVariableType]
        room = problem.pages * (problem.page_size or 1)
        wrong = np.flatnonzero((numbers < -1) | (numbers >= room))
        if wrong.size:
            accepted = f"-1 to skip the token, or a slot of the pool, 0 to {room - 1:,}"
            raise UsageError(f"slot_mapping[{wrong[0]}]", int(numbers[wrong[0]]), accepted)
        places = np.flatnonzero(numbers >= 0)
        taken, first, number = np.unique(numbers[places], return_index=True, return_inverse=True)
        if len(taken) < len(places):
            again = int(np.setdiff1d(np.arange(len(places)), first)[0])
            at = int(places[first[number[again]]])
            raise UsageError(
                f"slot_mapping[{places[again]}]", int(taken[number[again]]), f"another slot than slot_mapping[{at}]"
            )

    def fitted(self, problem: Problem) -> Problem:
        p = problem if problem.page_size else problem.replace(page_size=PAGE_SIZE)
        return p.replace(len_kv=min(p.len_kv, p.len_q), pages=max(p.pages, -(-p.len_q // (p.page_size or 1))))

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """Tokens in slots of any order. Every row of the pools, and every scale, is some number before."""
        p = problem
        found = super().draw(p, seed, kind)
        random = np.random.default_rng((seed, 7))
        if kind == "sizes":
            for name in "kv":
                x = found[name].astype(np.float32)
                powers = random.integers(-24, 13, (p.len_q, 1), np.int32) - random.integers(0, 16, x.shape, np.int32)
                size = np.exp2(powers) * (random.random((p.len_q, 1)) > 0.1)
                found[name] = (x * size.astype(np.float32)).astype(found[name].dtype)
        found |= codes(p, found, random)
        slots = np.full(p.len_q, -1, np.int64)
        some = random.permutation(p.len_q)[: p.len_kv]
        slots[some] = random.permutation(p.pages * (p.page_size or 1))[: p.len_kv]
        found["slot_mapping"] = slots
        return found | scales(p, random)

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        p, found = problem, dict[str, Array]()
        slots = arrays["slot_mapping"]
        has = slots >= 0
        page, row = np.divmod(slots[has], p.page_size or 1)
        for name in "kv":
            pool = found[f"{name}_pool"] = arrays[f"{name}_pool"].astype(np.float64)
            rows = arrays[name][:, :, has]
            if p.quantized:
                rows, scale = quantized(rows.astype(np.float32), p.kv_dtype, "token")
                assert scale is not None
                scales = found[f"{name}_scale"] = arrays[f"{name}_scale"].astype(np.float64)
                scales[page, :, row] = scale[0].T
            pool[page, :, row] = rows[0].swapaxes(0, 1).astype(np.float64)
        return found


APPEND = Append()
