"""Lesson 15: its exercise on a cache of int8, whose answer is a class."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from flashlab.lessons.asked import Asked, judged, near, softmax
from flashlab.lessons.class_exercise import ClassExercise, Found
from simulator.dtypes import Array

ROWS, DIM = 5, 64
"""Queries of a case, and the numbers of a token. There are fewer scores than codes: so their sizes tell them apart."""


class Kept(NamedTuple):
    """Queries, keys and values, float64: (ROWS, DIM), (tokens, DIM), (tokens, DIM)."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def drawn(cls, seed: int, tokens: int, *, of_k: Any = 1.0, of_v: Any = 1.0, shift: float = 0.0) -> Kept:
        draw = np.random.default_rng(seed)
        q, k, v = (draw.standard_normal((n, DIM)) for n in (ROWS, tokens, tokens))
        k[:, 3] += shift
        return cls(q, k * of_k, v * of_v)


def kept() -> dict[str, Kept]:
    """What the check keeps in eight bits."""
    small_to_large, seventh = np.geomspace(1e-3, 1e3, 90)[:, None], (np.arange(70) % 7 > 0)[:, None]
    return {
        "100 tokens": Kept.drawn(0, 100),
        "values of every size": Kept.drawn(1, 90, of_k=small_to_large**0.25, of_v=small_to_large),
        "a channel of K far from 0": Kept.drawn(2, 120, shift=-20.0),
        "tokens of zeros": Kept.drawn(3, 70, of_k=seventh, of_v=seventh),
    }


def attention(q: Array, k: Array, v: Array) -> Array:
    return softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


class Codes(np.ndarray):  # pyright: ignore[reportMissingTypeArgument]
    """Codes of a cache. Where all of them are multiplied one by one, which unfolds the cache, it is noted. A product doesn't."""

    unfolded: ClassVar[int] = 0
    """So many were."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(x) if isinstance(x, Codes) else x for x in inputs]
        found = getattr(ufunc, method)(*plain, **options)
        if ufunc in (np.multiply, np.true_divide) and np.size(found) % DIM == 0 and np.size(found) > ROWS * DIM:
            Codes.unfolded = np.size(found)
        return found


def _stored(answer: Asked, x: Array, what: str) -> tuple[Array, Array]:
    """Codes and scales of "K" or "V", held to what eight bits can say."""
    found: Any = answer.call("store", x.copy())
    returned = type(found).__name__
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(y, np.ndarray) for y in found):  # pyright: ignore
        said = f"it returns {returned}, and two arrays belong here: codes and scales"
        raise answer.wrong("usage", "store", said)
    for name, y, shape, dtype in zip(
        ("codes", "scales"),
        cast("tuple[Array, Array]", found),
        (x.shape, (len(x), 1)),
        ("int8", "float32"),
        strict=True,
    ):
        if y.shape != shape:
            one = ": each token has one" if name == "scales" else ""
            raise answer.wrong("numbers", "store", f"the {name} of {what} are {y.shape}, and {shape} belongs here{one}")
        if y.dtype.name != dtype:
            least = np.dtype(dtype).itemsize
            said = f"the {name} of {what} are {y.dtype.name}, of {y.itemsize} bytes each: {dtype} has {least}"
            raise answer.wrong("bytes", "store", said)
    codes, scales = cast("tuple[Array, Array]", found)
    if (bad := ~((scales > 0) & (scales < np.inf))).any():
        said = f"a scale of {what} is {scales[bad][0]:g}: a token of zeros may have any that is positive"
        raise answer.wrong("numbers", "store", said)
    top = np.abs(x).max(-1, keepdims=True)
    sizes = np.abs(codes.astype(int)).max(-1, keepdims=True)
    off = np.where(top > 0, np.abs(codes - x / scales), np.abs(codes))
    if (off > 0.5 + 1e-4).any() or (sizes != 127 * (top > 0)).any():
        raise answer.wrong("numbers", "store", _why(x, codes, scales, off))
    return codes, scales


def _why(x: Array, codes: Array, scales: Array, off: Array) -> str:
    """What was done otherwise, of codes that aren't right."""
    top = np.abs(x).max(-1, keepdims=True)
    own = top[:, 0] > 0
    for said, wrong in {
        "the largest becomes 128, and int8 ends at 127": top / 128,
        "the largest becomes 255: with a sign there are 127": top / 255,
        "one scale is made for all tokens, and each has its own": np.full_like(top, top.max() / 127),
        "the largest is looked for with its sign: a token's largest number may be negative": x.max(-1, keepdims=True)
        / 127,
        "the scale is one over what it should be: a code *times* it is the value": 127 / np.where(top > 0, top, 1),
        "the scale is made of the mean size, and larger numbers don't fit": np.abs(x).mean(-1, keepdims=True) / 127,
    }.items():
        if np.allclose(scales[own], wrong[own], rtol=1e-5, atol=0):
            return said
    for said, rounded in {
        "they are cut off, towards 0: astype doesn't round": np.trunc,
        "they are rounded down": np.floor,
    }.items():
        if np.array_equal(codes, rounded(x / scales).astype(np.int8)):
            return f"codes are to be the nearest ones, and {said}"
    t, n = (int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
    return f"code [{t}, {n}] is {codes[t, n]}, and {x[t, n]:.4g} / {scales[t, 0]:.4g} is {x[t, n] / scales[t, 0]:.4g}"


def _attended(answer: Asked, q: Array, keys: tuple[Array, Array], values: tuple[Array, Array]) -> None:
    """Attention to a cache, held to what its codes and scales stand for: that they were rounded is no error of this."""
    (k, of_k), (v, of_v) = ((codes.astype(float), scales.astype(float)) for codes, scales in (keys, values))
    root = q.shape[-1] ** 0.5

    def slips() -> dict[str, Array]:
        p, s = softmax(q @ (k * of_k).T / root), q @ k.T / root
        return {
            "the scores lack the scales of K": softmax(s) @ (v * of_v),
            "the output lacks the scales of V": p @ v,
            "scores and output lack their scales": softmax(s) @ v,
            "the scales of V come after the sum: but each token of the sum has its own": p @ v * of_v.mean(),
            "the scores have the scales of V": softmax(s * of_v.T) @ (v * of_v),
            "the weights have the scales of K": (p * of_k.T) @ v,
            "the scores have K's scales twice": softmax(s * of_k.T**2) @ (v * of_v),
            "the scores are divided by K's scales: a code times its scale is the value": softmax(s / of_k.T)
            @ (v * of_v),
            "the weights are divided by V's scales: a code times its scale is the value": (p / of_v.T) @ v,
            "the scores aren't divided by √d": softmax(s * root * of_k.T) @ (v * of_v),
            "K's scales are multiplied after the softmax, and they belong to the scores": (softmax(s) * of_k.T * of_v.T)
            @ v,
        }

    Codes.unfolded = 0
    watched = [(codes.view(Codes), scales.copy()) for codes, scales in (keys, values)]
    answer.array(
        "attend", answer.call("attend", q.copy(), *watched), attention(q, k * of_k, v * of_v), slips, close=1e-6
    )
    if Codes.unfolded:
        said = f"it multiplies {Codes.unfolded:,} codes one by one, which unfolds the cache: a scale for each token can wait"
        raise answer.wrong("asked", "attend", said)


def _apart(answer: Asked, given: Kept, of: dict[str, Array]) -> tuple[float, float]:
    """The errors that 8 bits of K and of V make, held to what they are. `of` has what the codes stand for, by name."""
    q, k, v = given
    exact = attention(q, k, v)
    only_k, only_v, both = attention(q, of["k"], v), attention(q, k, of["v"]), attention(q, of["k"], of["v"])

    def norm(out: Array, due: Array = exact) -> float:
        return float(np.linalg.norm(out - due) / np.linalg.norm(due))

    due = norm(only_k), norm(only_v)
    found: Any = answer.call("errors", q.copy(), k.copy(), v.copy())
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(n, float) for n in found):  # pyright: ignore
        raise answer.wrong("usage", "errors", f"it returns {found!r}, and two numbers belong here: (of K, of V)")
    largest = [float(np.abs(out - exact).max() / np.abs(exact).max()) for out in (only_k, only_v)]
    size = float(np.linalg.norm(exact))
    looks: dict[str, tuple[float, float]] = {
        "they are exchanged: K comes first": (due[1], due[0]),
        "both K and V are rounded in each: so nothing is told apart": (norm(both), norm(both)),
        "the second one has K rounded, too: V is to be rounded alone": (due[0], norm(both)),
        "the first one has V rounded, too: K is to be rounded alone": (norm(both), due[1]),
        "the second one is beside an output whose K is rounded, and both are beside the exact one": (
            due[0],
            norm(both, only_k),
        ),
        "these are errors of the cache, and those of the output are asked": (norm(of["k"], k), norm(of["v"], v)),
        "divide by the norm of the exact output": (due[0] * size, due[1] * size),
        "the largest elements are compared, and 2-norms are asked": (largest[0], largest[1]),
        "these are squares of norms": (due[0] ** 2, due[1] ** 2),
        "per cent: 0.01 is one": (100 * due[0], 100 * due[1]),
    }
    if not all(near(mine, right, 1e-4) for mine, right in zip(found, due, strict=True)):  # pyright: ignore
        named = (
            said for said, wrong in looks.items() if near(found[0], wrong[0], 1e-4) and near(found[1], wrong[1], 1e-4)
        )
        said = next(named, f"({found[0]:.3g}, {found[1]:.3g}) should be ({due[0]:.3g}, {due[1]:.3g})")
        raise answer.wrong("numbers", "errors", said)
    return due


@judged
def _int8(answer: Asked) -> Found:
    """Bytes and codes; attention to what the codes stand for; and what the rounding of K and of V does, told apart."""
    told, budget, caches = list[str](), list[tuple[str, str, int, int]](), kept()
    for answer.case, given in caches.items():
        stored = {name: _stored(answer, x, name.upper()) for name, x in (("k", given.k), ("v", given.v))}
        _attended(answer, given.q, stored["k"], stored["v"])
        of = {name: codes.astype(float) * scales.astype(float) for name, (codes, scales) in stored.items()}
        told.append("{}: K {:.2%}, V {:.2%}".format(answer.case, *_apart(answer, given, of)))
        tokens = len(given.k)
        budget = [(n.upper(), "stored", sum(y.nbytes for y in x), tokens * (DIM + 4)) for n, x in stored.items()]
    return Found(
        "passed",
        f"{len(caches)} caches, each held to what its codes stand for",
        said=f"what 8 bits of one alone change in the output: {'; '.join(told)}",
        budget=tuple(budget),
        problem=f"{budget[0][3] // (DIM + 4)} tokens, d = {DIM}",
    )


EXERCISES = (
    ClassExercise(
        name="15.4",
        title="Eight bits",
        task="Keep K and V in int8, with a float32 scale for each token: d + 4 bytes for K, as many for V. Then attend to them "
        "without unfolding them: the codes are multiplied as they are, K's scales meet the scores, and V's the weights. Last, "
        "measure how far that takes the output, with K alone rounded, and with V alone. The check looks at three things apart: "
        "bytes; your attention, against the numbers that the codes stand for; and both errors.",
        methods={"store": ("x",), "attend": ("q", "keys", "values"), "errors": ("q", "k", "v")},
        judge=_int8,
        hints=(
            "127 codes on each side: scale = largest absolute value / 127. `np.rint` rounds to the nearest, `.astype(np.int8)` "
            "alone cuts off.",
            "Column t of the scores belongs to token t. `of_k` is (tokens, 1), so `of_k.T` has a number for each column.",
            "Σ p_t (scale_t · code_t) = Σ (p_t · scale_t) code_t: V's scales go into the weights.",
            "`unrounded(v)` gives `attend` a V that isn't rounded. What is left is K's error.",
        ),
        slips={
            "store": "store: a scale for each token, from its largest number by size; codes from -127 to 127, rounded.",
            "attend": "attend: K's scales on the scores, V's scales on the weights, and neither on codes.",
            "errors": "errors: three outputs. One is exact, one has K rounded and one has V rounded.",
        },
        afterwards="Next: look at which of the two forgives more, on these caches and on your own. It isn't always the same one.",
    ),
)
