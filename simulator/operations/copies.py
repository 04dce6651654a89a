"""Pages of a pool copied to other pages of it: the copy of copy-on-write.

A pair is a page and the page that it is copied to. The pools are read and written: all other pages stay as they are. The scales of
a pool of 8 bits are copied like K and V, if they are given. Of a problem, `len_q` is how many pairs there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from simulator.counts import Spec
from simulator.dtypes import Array
from simulator.errors import UsageError, dtype_name
from simulator.operations.caches import scale_fields
from simulator.operations.operation import Arrays, Operand
from simulator.operations.paged import PAGE_SIZE
from simulator.operations.pools import LABELS, POOLS, QUANTIZED, SCALES, Writing, codes, pool_sizes, scales
from simulator.operations.problems import Problems, Sizes, posed
from simulator.problem import CACHES, DTYPES, Problem, Tile
from simulator.support import Support


class Pairs(Operand):
    """Two numbers for each copy: which page, and to which page."""

    def shape(self, problem: Problem, tile: Tile | None = None) -> tuple[int, ...]:
        return problem.len_q, 2

    def spec(self, problem: Problem, tile: Tile | None, role: str) -> Spec:
        return Spec(self.name, 1, 2 * problem.len_q, 1, "int32", role, vector=True)


class Copies(Writing):
    """Pages copied to others."""

    name = "copy of pages"
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one page": {"heads": 2, "len_q": 1, "page_size": 16, "pages": 4},
        "many pages": {"heads": 4, "kv_heads": 2, "len_q": 30, "page_size": 16, "pages": 70},
        "pages of one key": {"heads": 3, "len_q": 9, "page_size": 1, "pages": 30},
        "an odd page, an odd head dim": {"heads": 2, "len_q": 3, "head_dim": 19, "page_size": 7, "pages": 6},
        "large pages, wide heads": {"heads": 1, "len_q": 2, "head_dim": 256, "page_size": 130, "pages": 4},
        "no pairs": {"heads": 1, "len_q": 0, "page_size": 16, "pages": 2},
        **{
            LABELS[dtype]: {"heads": 2, "len_q": 5, "head_dim": 40, "page_size": 16, "pages": 12, **sizes}
            for dtype, sizes in QUANTIZED.items()
        },
        "int8 without scales": {"heads": 2, "len_q": 2, "page_size": 16, "pages": 5, "kv_dtype": "int8"},
    }  # fmt: skip
    sanitized: ClassVar[Problems] = {
        "pages": {"heads": 4, "kv_heads": 2, "len_q": 9, "head_dim": 64, "page_size": 7, "pages": 20},
        **{
            LABELS[dtype]: {"heads": 2, "len_q": 5, "head_dim": 48, "page_size": 16, "pages": 12, **sizes}
            for dtype, sizes in QUANTIZED.items()
        },
    }  # fmt: skip
    shown: ClassVar[Mapping[str, Any]] = {"len_q": 2, "page_size": 16, "pages": 5, "head_dim": 64}
    inputs = (*POOLS, Pairs(name="pairs", axes=("len_q", "two"), dtype="int32"), *SCALES)

    def matrix(self, support: Support, dtype: str, *, boxes: bool) -> dict[str, Sizes]:
        sizes: Sizes = {
            "batch": 1,
            "heads": 8,
            "kv_heads": 4,
            "len_q": 99,
            "head_dim": 64,
            "page_size": 16,
            "pages": 200,
        }
        found: dict[str, Sizes] = {
            "pages": sizes, "odd pages": {**sizes, "page_size": 7}, "large pages": {**sizes, "page_size": 256},
            "wide heads": {**sizes, "head_dim": 256},
        }  # fmt: skip
        return dict(posed(found | {LABELS[x]: {**sizes, **of} for x, of in QUANTIZED.items()}, dtype))

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        pages, heads, size, dim, dim_v = pool_sizes(arrays)
        kv_dtype, accepted = dtype_name(arrays["k_pool"]), ", ".join((*DTYPES, *CACHES))
        if kv_dtype not in (*DTYPES, *CACHES):
            raise UsageError("k_pool.dtype", kv_dtype, f"one of {accepted}")
        dtype = "float16" if kv_dtype in CACHES else kv_dtype
        if len(getattr(arrays["pairs"], "shape", ())) != 2:
            shown = (
                tuple(arrays["pairs"].shape) if hasattr(arrays["pairs"], "shape") else type(arrays["pairs"]).__name__
            )
            raise UsageError("pairs.shape", shown, "(pairs, 2): a page, and the page that it is copied to")
        fields = scale_fields(dtype, kv_dtype, {name: arrays.get(name) for name in ("k_scale", "v_scale")})
        problem = Problem(
            batch=1, heads=heads, len_q=arrays["pairs"].shape[0], head_dim=dim, head_dim_v=dim_v, dtype=dtype, page_size=size,
            pages=pages, **fields, **masks,
        )  # fmt: skip
        if (error := self.refusal(problem, "copy_pages")) is not None:
            raise error
        super().check(problem, {name: x for name, x in arrays.items() if x is not None})
        return problem

    def refusal(self, problem: Problem, by: str) -> UsageError | None:
        p = problem
        if (error := super().refusal(p, by)) is not None:
            return error
        if p.batch != 1 or p.lengths is not None:
            return UsageError("batch", p.batch, f"1, and no lengths: {by} takes all pairs together")
        if {p.k_scale, p.v_scale} not in ({None}, {"token"}):
            return UsageError(
                "k_scale", p.k_scale, f"token, and so v_scale, or neither: {by} copies a scale for each key"
            )
        return None

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation. NumPy's pairs are looked at, too; to look at those on a GPU would wait for it."""
        super().check(problem, arrays, tile)
        pairs = arrays.get("pairs")
        if not isinstance(pairs, np.ndarray):
            return
        numbers: Array = pairs  # pyright: ignore[reportUnknownVariableType]
        for place, side in np.argwhere((numbers < 0) | (numbers >= problem.pages)).tolist():
            accepted = f"a page of the pool, 0 to {problem.pages - 1:,}"
            raise UsageError(f"pairs[{place}, {side}]", int(numbers[place, side]), accepted)
        seen = set[int]()
        sources = set(numbers[:, 0].tolist())
        for place, page in enumerate(numbers[:, 1].tolist()):
            if page in seen or page in sources:
                other = "the target of another pair" if page in seen else "copied, too"
                raise UsageError(
                    f"pairs[{place}, 1]", page, f"another page: this one is {other}, and all pairs run at once"
                )
            seen.add(page)

    def fitted(self, problem: Problem) -> Problem:
        p = problem if problem.page_size else problem.replace(page_size=PAGE_SIZE)
        return p.replace(pages=max(p.pages, 2 * p.len_q))

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """Pages of any order. If there are too few for all pairs, some are copied to several others."""
        p = problem
        found = super().draw(p, seed, kind)
        random = np.random.default_rng((seed, 8))
        found |= codes(p, found, random)
        if p.pages <= p.len_q:
            raise UsageError("pages", p.pages, f"more than {p.len_q:,}: no target is copied")
        order = random.permutation(p.pages)
        rest = order[p.len_q :]
        sources = rest[: p.len_q] if len(rest) >= p.len_q else random.choice(rest, p.len_q)
        found["pairs"] = np.stack([sources, order[: p.len_q]], 1).astype(np.int32)
        return found | scales(p, random)

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        found = {x.name: arrays[x.name].astype(np.float64) for x in self.outputs if x.when(problem)}
        sources, targets = arrays["pairs"].T
        for x in found.values():
            x[targets] = x[sources]
        return found


COPIES = Copies()
