"""The problems that verification runs: edges that have hurt users, and random ones, which Hypothesis can shrink."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from simulator import Problem
from simulator.errors import unknown
from simulator.names import DType
from simulator.operations.attention import ATTENTION
from simulator.problem import FEATURES, FIELDS, SCORES

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

INPUTS = ATTENTION.kinds
"""The kinds of input values, by name."""

LAYOUTS = {
    "plain": "contiguous",
    "bshd": "a transposed view of (batch, length, heads, head_dim)",
    "padded": "rows with garbage between them",
    "misaligned": "a base one element past a boundary",
    "strided": "every other element of the last axis",
}
"""The ways in which arrays lie in memory, by name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem with its inputs (a name in `INPUTS`), layout (one in `LAYOUTS`), tile (None: the default) and seed."""

    problem: Problem
    inputs: str = "normal"
    layout: str = "plain"
    tile: tuple[int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("inputs", INPUTS), ("layout", LAYOUTS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)

    def arrays(self) -> dict[str, Any]:
        """Its operands by name, contiguous, as stored. The same seed gives the same arrays."""
        return ATTENTION.draw(self.problem, self.seed, self.inputs)

    @property
    def source(self) -> str:
        """Python that makes this case, where `fl` is flashlab and `Case` is imported."""
        rest = "".join(
            f", {f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name != "problem" and getattr(self, f.name) != f.default
        )
        return f"Case(problem={problem_source(self.problem)}{rest})"


def problem_source(problem: Problem) -> str:
    """Python that makes a problem, where `fl` is flashlab.

    >>> problem_source(Problem(batch=1, heads=2, len_q=3, head_dim=8, dtype="float16", causal=True))
    "fl.Problem(batch=1, heads=2, len_q=3, head_dim=8, dtype='float16', causal=True)"
    """
    return f"fl.{problem!r}"


def describe(problem: Problem) -> str:
    """A problem in a few words, for a table: batch x heads x len_q x len_kv x head_dim, dtype and masks."""
    p = problem
    heads = f"{p.heads}" if p.kv_heads == p.heads else f"{p.heads}:{p.kv_heads}"
    words = [word.replace("none", "None") for word in p.words]  # as the results on record have it
    shared = [] if p.len_prefix is None else [f"prefix {p.len_prefix}"]
    return " ".join([f"{p.batch}x{heads}x{p.len_q}x{p.len_kv}x{p.head_dim}", p.dtype, *shared, *words])


_WORDS = {
    "causal": "causal",
    "window": "window",
    "scale": "scale",
    "soft_cap": "soft cap",
    "sinks": "sinks",
    "alibi": "ALiBi",
    "head_dim": "head dim",
    "batch": "batch|of [0-9]",
    "queries_per_kv": r"GQA|MQA|[0-9]:[0-9]",
    "heads": r"\bheads\b",
    "len_q": "aligned|length|quer|row|nothing|tile",
    "len_kv": "aligned|length|key|row|nothing|tile|cut",
}
"""The words by which labels say a problem's fields."""


def said(label: str, wanted: Problem, got: Problem) -> str:
    """The label of a problem that a domain changed: without the words that are no longer true.

    >>> p = Problem(batch=1, heads=2, len_q=113, head_dim=64, dtype="float16", causal=True)
    >>> said("length 113, causal", p, p.replace(causal=False)), said("aligned", p, p.replace(len_q=144))
    ('length 113, shaped', 'shaped')
    """
    if got == wanted:
        return label
    untrue = "|".join(words for name, words in _WORDS.items() if getattr(wanted, name) != getattr(got, name))
    kept = [part for part in label.split(", ") if not (untrue and re.search(untrue, part))]
    return ", ".join([*kept, "shaped"])


def usual(dtype: DType, **changes: Any) -> Problem:
    """The problem that most checks vary: two heads of 97 queries and keys."""
    return Problem(batch=1, heads=2, len_q=97, head_dim=64, dtype=dtype).replace(**changes)


EMPTY_ROWS: dict[str, Any] = {"len_q": 100, "len_kv": 37, "causal": True}
EVERY_SCORE: dict[str, Any] = {"soft_cap": 5.0, "sinks": True, "alibi": True}
"""All that changes the scores."""
SCORE_EDGES: dict[str, dict[str, Any]] = {
    "soft cap": {"soft_cap": 5.0, "len_q": 97},
    "soft cap, causal, GQA": {"soft_cap": 30.0, "heads": 8, "kv_heads": 2, "len_q": 113, "causal": True},
    "soft cap below large logits": {"soft_cap": 5.0, "inputs": "large", "len_q": 150, "causal": True},
    "soft cap, rising logits": {"soft_cap": 5.0, "inputs": "rising", "len_q": 150},
    "soft cap, empty rows": {"soft_cap": 5.0, **EMPTY_ROWS},
    "soft cap, window, scale below 0": {"soft_cap": 5.0, "len_q": 97, "window": (16, 8), "scale": -0.2},
    "soft cap, one query": {"soft_cap": 5.0, "len_q": 1, "len_kv": 113},
    "sinks": {"sinks": True, "len_q": 97},
    "sinks, causal, GQA, batch 2": {
        "sinks": True, "batch": 2, "heads": 6, "kv_heads": 2, "len_q": 81, "causal": True,
    },
    "sinks, empty rows": {"sinks": True, **EMPTY_ROWS},
    "sinks, whole tiles of empty rows": {"sinks": True, "len_q": 239, "len_kv": 5, "causal": True},
    "sinks, no keys": {"sinks": True, "len_q": 5, "len_kv": 0},
    "sinks, one query, window": {"sinks": True, "len_q": 1, "len_kv": 113, "window": (16, None)},
    "sinks, large logits": {"sinks": True, "inputs": "large", "len_q": 150, "causal": True},
    "sinks, one key with a large negative logit": {"sinks": True, "inputs": "lone", "len_q": 97, "window": (0, 0)},
    "sinks, scale 0": {"sinks": True, "len_q": 70, "scale": 0.0},
    "ALiBi": {"alibi": True, "len_q": 97},
    "ALiBi, causal, fewer queries than keys": {"alibi": True, "len_q": 64, "len_kv": 200, "causal": True},
    "ALiBi, more queries than keys": {"alibi": True, "len_q": 150, "len_kv": 70},
    "ALiBi, window, GQA": {"alibi": True, "heads": 8, "kv_heads": 2, "len_q": 97, "window": (40, 30)},
    "ALiBi, long row of 1025 keys": {"alibi": True, "heads": 1, "len_q": 3, "len_kv": 1025},
    "ALiBi, empty rows": {"alibi": True, **EMPTY_ROWS},
    "ALiBi, one query": {"alibi": True, "len_q": 1, "len_kv": 113},
    "ALiBi, scale below 0": {"alibi": True, "len_q": 97, "scale": -0.2, "causal": True},
    "ALiBi, scale 0": {"alibi": True, "len_q": 97, "scale": 0.0},
    "soft cap, sinks, ALiBi": {**EVERY_SCORE, "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 97, "causal": True},
    "soft cap, sinks, ALiBi, window": {**EVERY_SCORE, "len_q": 113, "len_kv": 150, "window": (40, 5)},
    "soft cap, sinks, ALiBi, empty rows": {**EVERY_SCORE, **EMPTY_ROWS},
    "soft cap, sinks, ALiBi, head dim 111": {**EVERY_SCORE, "len_q": 65, "head_dim": 111, "layout": "bshd"},
    "soft cap, sinks, ALiBi, one query, scale below 0": {**EVERY_SCORE, "len_q": 1, "len_kv": 97, "scale": -0.2},
}  # fmt: skip
"""Edges of what changes the scores, with its neighbours: the keywords of a case by its label."""


def edges(dtype: DType, *, full: bool, head_dims: Sequence[int] | None = None) -> Iterator[tuple[str, Case]]:
    """The edge cases of one dtype, each with a label. `full` adds long and wide ones; `head_dims` replaces its own."""
    base = Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype=dtype)

    def case(word: str, inputs: str = "normal", layout: str = "plain", **changes: Any) -> tuple[str, Case]:
        return word, Case(problem=base.replace(**changes), inputs=inputs, layout=layout)

    yield case("aligned")
    yield case("aligned, causal", causal=True)
    yield case("length 97", len_q=97)
    yield case("length 113, causal", len_q=113, causal=True)
    yield case("length 239, causal", len_q=239, causal=True)
    # few queries and one head: long rows cost little then
    yield case("long row of 1025 keys", heads=1, len_q=3, len_kv=1025)
    yield case("long row of 2049 keys, causal", heads=1, len_q=2, len_kv=2049, causal=True)
    yield case("513 causal rows", heads=1, len_q=513, causal=True)
    yield case("40 heads", heads=40, len_q=17, len_kv=33)
    yield case("GQA 40:8", heads=40, kv_heads=8, len_q=9, len_kv=33, causal=True)
    yield case("fewer queries than keys, causal", len_q=64, len_kv=200, causal=True)
    yield case("a few queries of many keys, causal", len_q=5, len_kv=97, causal=True)
    yield case("more queries than keys, causal: empty rows", len_q=100, len_kv=37, causal=True)
    yield case("whole tiles of empty rows, causal", len_q=239, len_kv=5, causal=True)
    yield case("one query", len_q=1, len_kv=113)
    yield case("one query, causal", len_q=1, len_kv=113, causal=True)
    yield case("one key", len_q=113, len_kv=1)
    yield case("one query, window", len_q=1, len_kv=113, window=(16, None))
    yield case("one query, one key", len_q=1)
    yield case("no keys", len_q=5, len_kv=0)
    yield case("no queries", len_q=0, len_kv=5)
    yield case("nothing", len_q=0)
    yield case("window", len_q=113, window=(16, 8))
    yield case("window of one key", len_q=97, window=(0, 0))
    yield case("window open to the left", len_q=97, len_kv=113, window=(None, 5))
    yield case("window open to the right", len_q=113, len_kv=97, window=(7, None))
    yield case("window under a causal mask", len_q=150, len_kv=130, window=(31, None), causal=True)
    yield case("window wider than the tile", len_q=239, window=(100, 0))
    for dim in head_dims or (32, 40, 72, 96, 111, 128, 256):
        yield case(f"head dim {dim}", len_q=97, head_dim=dim, causal=dim % 32 != 0)
    yield case("GQA 4:1", batch=2, heads=8, kv_heads=2, len_q=97, causal=True)
    yield case("GQA 8:1", heads=8, kv_heads=1, len_q=40, len_kv=97)
    yield case("GQA 7:1", heads=14, kv_heads=2, len_q=33, len_kv=65, causal=True)
    yield case("MQA, batch 3", batch=3, heads=5, kv_heads=1, len_q=50)
    for layout in ("bshd", "padded", "strided"):
        yield case(f"layout {layout}", layout=layout, heads=4, kv_heads=2, batch=2, len_q=65, causal=True)
    yield case("scale 0.3", len_q=97, scale=0.3)
    yield case("the default scale, said", len_q=81, scale=0.125)
    for inputs in list(INPUTS)[1:]:
        yield case(f"inputs {inputs}", inputs=inputs, len_q=150, causal=True)
    yield case("one valid key with a large negative logit", inputs="lone", len_q=97, window=(0, 0))
    for word, changes in SCORE_EDGES.items():
        yield case(word, **changes)
    if full:
        for n in (799, 1023, 2049):
            yield case(f"length {n}", len_q=n)
            yield case(f"length {n}, causal", len_q=n, causal=True)
        yield case("length 2049 of 799 keys, causal", len_q=2049, len_kv=799, causal=True)
        yield case("length 799 of 2049 keys, causal", len_q=799, len_kv=2049, causal=True)
        yield case("long window", len_q=2049, window=(255, 0))
        for dim in head_dims or (32, 40, 64, 72, 96, 111, 128, 160, 192, 200, 256):
            yield case(f"head dim {dim}, 239", len_q=239, head_dim=dim)
            yield case(f"head dim {dim}, 239, causal", len_q=239, head_dim=dim, causal=True)
        for inputs in list(INPUTS)[1:]:
            yield case(f"inputs {inputs}, 1023", inputs=inputs, len_q=1023)


def random_cases(
    dtypes: Sequence[str],
    *,
    longest: int,
    head_dims: Sequence[int],
    tiles: Sequence[tuple[int, int] | None],
    layouts: Sequence[str] = tuple(LAYOUTS),
    scales: Sequence[float | None] = (None, 0.3),
    scores: Sequence[Sequence[str]] = ((),),
) -> SearchStrategy[Case]:
    """Random cases for Hypothesis, with lengths up to `longest`. Every number shrinks towards the plainest problem.

    `scores` are what may change the scores together, of `SCORES`.
    """
    from hypothesis import strategies as st  # imported only for a search, since it is slow to import

    side = st.none() | st.integers(0, longest // 4)
    length = st.integers(0, 9) | st.integers(0, longest)

    @st.composite
    def draw_case(draw: Any) -> Case:
        kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        problem = Problem(
            batch=draw(st.integers(1, 2)),
            heads=kv_heads * group,
            kv_heads=kv_heads if group > 1 else None,
            len_q=draw(length),
            len_kv=draw(length),
            head_dim=draw(st.sampled_from(sorted(head_dims))),
            dtype=draw(st.sampled_from(list(dtypes))),
            causal=draw(st.booleans()),
            window=draw(st.none() | st.tuples(side, side)),
            scale=draw(st.sampled_from(list(scales))),
            **_scores(draw(st.sampled_from(list(scores))), draw(st.sampled_from([5.0, 30.0, 0.3]))),
        )
        return Case(
            problem=problem,
            inputs=draw(st.sampled_from(list(INPUTS))),
            layout=draw(st.sampled_from(list(layouts))),
            tile=draw(st.sampled_from(list(tiles))),
            seed=draw(st.integers(0, 99)),
        )

    return draw_case()


def _scores(names: Sequence[str], soft_cap: float) -> dict[str, Any]:
    """Fields of a problem that has these of `SCORES`."""
    return {name: {**EVERY_SCORE, "soft_cap": soft_cap}[name] for name in SCORES if name in names}


def smaller_cases(case: Case) -> SearchStrategy[Case]:
    """Cases like this one, none of them larger in any size. Hypothesis shrinks a failing case by them."""
    from hypothesis import strategies as st

    p = case.problem

    def at_most(n: int, low: int) -> SearchStrategy[int]:
        # each size is one choice, smallest first, since Hypothesis shrinks towards the first; half of the choices are n
        steps = sorted(
            {low, *range(max(low, 1), min(n, 5)), *(max(low, n // part) for part in (8, 4, 2)), max(low, n - 1), n}
        )
        return st.sampled_from([*steps, *[n] * len(steps)])

    @st.composite
    def draw_case(draw: Any) -> Case:
        kv_heads, group = draw(at_most(p.kv_heads, 1)), draw(at_most(p.queries_per_kv, 1))
        problem = p.replace(
            batch=draw(at_most(p.batch, 1)),
            heads=kv_heads * group,
            kv_heads=kv_heads if group > 1 else None,
            len_q=draw(at_most(p.len_q, 0)),
            len_kv=draw(at_most(p.len_kv, 0)),
            head_dim=draw(at_most(p.head_dim, 1)),
            **{name: draw(st.sampled_from([FIELDS[name].default, getattr(p, name)])) for name in FEATURES},
        )
        inputs, layout = draw(st.sampled_from(["normal", case.inputs])), draw(st.sampled_from(["plain", case.layout]))
        return Case(problem=problem, inputs=inputs, layout=layout, tile=case.tile, seed=case.seed)

    return draw_case()
