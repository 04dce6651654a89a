"""Why values are wrong: what small thing, done otherwise, would explain them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from simulator.dtypes import Array, round_to

CLOSE = 1e-3
"""How far values of the same step may be apart, relative to the largest: no order of sums comes near."""


def same(a: Array, b: Array) -> bool:
    if a.shape != b.shape:
        return False
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return False
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    largest = np.abs(b[finite]).max(initial=0.0)
    return bool((np.abs(a[finite] - b[finite]) <= CLOSE * largest).all())


def worst(actual: Array, expected: Array) -> tuple[int, int]:
    """The first wrong row of a tile, and the column in it that is most wrong.

    >>> worst(np.array([[1.0, -np.inf, 3.0]]), np.array([[1.0, -np.inf, 4.0]]))
    (0, 2)
    """
    rows = [r for r in range(len(expected)) if not same(actual[r : r + 1], expected[r : r + 1])]
    with np.errstate(invalid="ignore"):
        off = np.abs(actual.astype(np.float64) - expected)
    equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))  # also infinities, whose difference is none
    off = np.where(equal, 0, np.where(np.isnan(off), np.inf, np.nan_to_num(off)))
    row = rows[0] if rows else int(np.argmax(off.max(-1)))
    return row, int(np.argmax(off[row]))


def reasons(
    name: str, actual: Array, expected: Array, scope: Mapping[str, Array], before: Array | None, row: int, *,
    rest: str = "",
) -> Iterator[str]:  # fmt: skip
    """What explains that a tile of this name is not as expected, the likeliest first.

    `scope` has the other tiles by name, `before` is what the tile held before, and a value is told from `row`. `rest` says
    what is missing where a maximum or a sum is that of one tile; empty, nothing is.

    >>> tile, alpha = np.array([[2.0, 4.0], [3.0, 1.0]]), np.array([[0.5], [0.25]])
    >>> next(reasons("acc", tile, tile * alpha, {"alpha": alpha}, None, 1))
    'acc was not multiplied by alpha = 0.25'
    """
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        if e.shape[1] == 1 and np.isneginf(e).all() and np.ptp(a) == 0:
            yield f"{name} starts at {a[0, 0]:g} and not at -inf"
        if np.isneginf(e).any() and np.isfinite(a[np.isneginf(e)]).all() and same(a[np.isfinite(e)], e[np.isfinite(e)]):
            yield f"{name} has values where the mask hides the key, and -inf belongs there"
        if e[row].max() < 0 and same(a, np.maximum(e, 0)):
            yield f"{name} is never below 0, as if the maximum had started at 0 and not at -inf"
        if np.isnan(a).any() and not np.isnan(e).any():
            if np.abs(e).max() == 448 and np.array_equal(round_to(expected, "float8_e4m3fn"), expected):
                yield f"{name} is no number (NaN): a number beyond 448, e4m3's largest, was rounded to e4m3"
            why = "-inf less -inf, a division by 0, or 0 times infinity (is an exponent's sign right?)"
            yield f"{name} is no number (NaN): {why}"
            return
        for x, values in scope.items():
            if len(values) != len(a):
                continue
            if values.shape[1] > 1 == e.shape[1]:
                top, size = (f.max(-1, keepdims=True) for f in (values.astype(np.float64), np.abs(values)))
                if (top != size).any() and same(a * size, e * top):
                    yield f"{name} comes from the maximum of {x}, and should come from that of its absolute values"
            if not values[row].any() and not a[row].any() and e[row].any():
                yield f"row {row} of {x} is all zeros, and so is {name}: .nonzero() has 1 in place of 0"
        for x, values in scope.items():
            f = values.astype(np.float64)
            if x == name or len(f) != len(e):
                continue
            top = f.max(-1, keepdims=True)
            for result, what in (
                (np.exp(f), f"is exp({x}) itself: no maximum was subtracted"),
                (
                    np.exp(f - np.maximum(top, 0)),
                    f"is exp({x} - 0) where {x} is below 0: the maximum must not start at 0",
                ),
                (top, f"is the maximum of {x} alone: {rest}"),
                (f.sum(-1, keepdims=True), f"is the sum of {x} alone: {rest}"),
            ):
                if not rest and what.startswith("is the"):
                    continue
                if f.shape[1] > 1 and result.shape == a.shape and same(a, result.astype(np.float32)):
                    yield f"{name} {what}"
        logarithm = name.endswith(" lse")  # a factor means nothing there
        factors = dict(_factors(name, scope, e))
        for x, f in factors.items():
            value = f" = {f[row, 0]:.3g}" if f.shape[1] == 1 else ""
            for result, what in (
                (a * f, f"was not multiplied by {x}{value}"),
                (a / f, f"was not divided by {x}{value}"),
                (a + f, f"lacks {x}{value}, which was not added"),
                (a - f, f"still has {x}{value}, which was not subtracted"),
            ):
                if same(result, e) and not (logarithm and "ed by" in what):
                    yield f"{name} {what}"
            for result, what in ((e * f, "multiplied"), (e / f, "divided")):
                if same(a, result) and not logarithm:
                    yield f"{name} was {what} by {x}{value}, which it should not be"
        if before is not None and before.shape == e.shape and np.isfinite(before).all():
            if same(e - a, before.astype(np.float64)):
                yield f"what {name} had before is lost"
            for x, f in factors.items():
                value = f" = {f[row, 0]:.3g}" if f.shape[1] == 1 else ""
                if same(a - e, before * (1 - f)):
                    yield f"what {name} had before was not multiplied by {x}{value}"
                if same(e - a, before * f):
                    yield f"what {name} had before, times {x}{value}, is lost"
            if same(a, before):
                yield f"{name} was left as it was"
        ratio = a / e
        steady = np.isfinite(ratio).all() and np.ptp(ratio) < CLOSE * abs(np.median(ratio))
        if ratio.size > 1 and steady and not logarithm:
            yield f"{name} is {np.median(ratio):.4g} times what it should be, throughout"
        if e.shape[0] == e.shape[1] > 1 and same(a, e.T):
            yield f"{name} is transposed"


def _factors(name: str, scope: Mapping[str, Array], like: Array) -> Iterator[tuple[str, Array]]:
    """What may have been forgotten, by name: the other tiles of the step, and the sums and maxima of their rows."""
    for x, values in scope.items():
        f = values.astype(np.float64)
        if x == name or len(f) != len(like) or not np.isfinite(f).all():
            continue
        if f.shape in (like.shape, (len(like), 1)):
            yield x, f
        if f.shape[1] > 1:
            yield f"{x}.sum()", f.sum(-1, keepdims=True)
            yield f"{x}.max()", f.max(-1, keepdims=True)
