"""Why values are wrong: what small thing, done otherwise, would explain them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from simulator.dtypes import Array, round_to

CLOSE = 1e-3
"""How far values of the same step may be apart, relative to the largest: no order of sums comes near."""
CLOSER = 2e-5
"""The same where nothing is found that is farther apart than `CLOSE`, and yet the numbers are wrong."""
TYPES = {"float8_e4m3fn": "e4m3", "float16": "float16", "bfloat16": "bfloat16"}
"""What values may be rounded to, and how that is called."""


class Form(NamedTuple):
    """How the solution computes a variable: the lines that assign it in the step that differs, and the whole text."""

    lines: str
    text: str


def form_of(name: str, step: str, text: str) -> Form | None:
    """The `Form` of a variable, from the text of a step and of the whole, in Python or C++; None if the step assigns it not.

    >>> form_of("acc", "m = n\\nacc = acc * alpha", "").lines
    'acc = acc * alpha'
    >>> form_of("acc", "acc[d].x *= alpha;", "").lines
    'acc[d].x *= alpha;'
    """
    assigned = re.compile(rf"\b{re.escape(name)}\b(\[[^\]]*\])*(\.\w+)?\s*([-+*/]?=(?!=)|,[^=(]*=(?!=))")
    lines = [line for line in step.splitlines() if assigned.search(line)]
    return Form("\n".join(lines), text) if lines else None


def multiplies(text: str, x: str) -> bool:
    """Is anything multiplied by x in a text?

    >>> multiplies("o_i * (l_i * alpha)", "l_i"), multiplies("acc / l_i", "l_i"), multiplies("l *= expf(m - n)", "exp(m - n)")
    (True, False, True)
    """
    return _takes(text, x, r"\*") or bool(re.search(rf"{_as_written(x)}\s*\*", _normal(text)))


def divides(text: str, x: str) -> bool:
    """Is anything divided by x in a text?"""
    return _takes(text, x, "/")


def _takes(text: str, x: str, operator: str) -> bool:
    return bool(re.search(rf"{operator}=?\s*\(*\s*{_as_written(x)}", _normal(text)))


def _as_written(x: str) -> str:
    """A pattern of a variable or a call: also as an element, or with a .nonzero() or the like behind it."""
    return rf"(?<![\w.]){re.escape(x)}(?!\w)(?:\[[^\]]*\]|\.\w+(?:\(\))?)*\)*"


def _normal(text: str) -> str:
    return re.sub(r"\bblock\.|(?<=\bexp)f\b|(?<=\blog)f\b", "", re.sub(r"(//|#) .*", "", text))


def same(a: Array, b: Array, close: float = CLOSE) -> bool:
    if a.shape != b.shape:
        return False
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return False
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    largest = np.abs(b[finite]).max(initial=0.0)
    return bool((np.abs(a[finite] - b[finite]) <= close * largest).all())


def worst(actual: Array, expected: Array, close: float = CLOSE) -> tuple[int, int]:
    """The first wrong row of a tile, and the column in it that is most wrong.

    >>> worst(np.array([[1.0, -np.inf, 3.0]]), np.array([[1.0, -np.inf, 4.0]]))
    (0, 2)
    """
    rows = [r for r in range(len(expected)) if not same(actual[r : r + 1], expected[r : r + 1], close)]
    with np.errstate(invalid="ignore"):
        off = np.abs(actual.astype(np.float64) - expected)
    equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))  # also infinities, whose difference is none
    off = np.where(equal, 0, np.where(np.isnan(off), np.inf, np.nan_to_num(off)))
    row = rows[0] if rows else int(np.argmax(off.max(-1)))
    return row, int(np.argmax(off[row]))


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Two numbers in so many digits that they differ, five at least.

    >>> told_apart(5.16441, 5.16444), told_apart(1.0, 2.0)
    (('5.16441', '5.16444'), ('1', '2'))
    """
    texts = ((f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(5, 18))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{a}", f"{b}"))


def reasons(
    name: str, actual: Array, expected: Array, scope: Mapping[str, Array], before: Array | None, row: int, *,
    rest: str = "", form: Form | None = None, old: Mapping[str, Array] | None = None,
) -> Iterator[str]:  # fmt: skip
    """What explains that a tile of this name is not as expected, the likeliest first.

    `scope` has the other tiles by name, `old` what those of the steps before were, `before` is what the tile itself held
    before, and a value is told from `row`. `rest` says what is missing where a maximum or a sum is that of one tile; empty,
    nothing is. `form` tells a factor that is missing from a division that is too much.

    >>> tile, alpha = np.array([[2.0, 4.0], [3.0, 1.0]]), np.array([[0.5], [0.25]])
    >>> next(reasons("acc", tile, tile * alpha, {"alpha": alpha}, None, 1))
    'acc was not multiplied by alpha = 0.25'
    >>> form = form_of("acc", "acc = acc * alpha", "")
    >>> next(reasons("acc", tile * alpha**2, tile * alpha, {"alpha": alpha}, None, 1, form=form))
    'acc was multiplied by alpha = 0.25 once too often'
    """
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        yield from _of_maxima(name, a, e, scope, row)
        if np.isnan(a).any() and not np.isnan(e).any():
            if np.abs(e).max() == 448 and np.array_equal(round_to(expected, "float8_e4m3fn"), expected):
                yield f"{name} is no number (NaN): a number beyond 448, e4m3's largest, was rounded to e4m3"
            why = "-inf less -inf, a division by 0, or 0 times infinity (is an exponent's sign right?)"
            yield f"{name} is no number (NaN): {why}"
            return
        yield from _of_zeros(name, a, e, scope, row, form)
        yield from _of_roundings(name, actual, expected, scope, form)
        yield from _of_tiles(name, a, e, scope, old or {}, rest)
        yield from _of_columns(name, a, e, scope, form)
        yield from _of_factors(name, a, e, scope, old or {}, before, row, form)
        if before is not None and before.shape == e.shape and np.array_equal(actual, before):
            yield f"{name} was left as it was"
        if a.size and np.isfinite(e).all() and same(a, 1 / e):
            yield f"{name} is one over what it should be (is an exponent's sign right?)"
        ratio = (a / e)[e != 0]
        steady = ratio.size > 1 and np.isfinite(ratio).all() and np.ptp(ratio) < CLOSE * abs(np.median(ratio))
        if steady and abs(ratio[0] - 1) > CLOSE and not _is_logarithm(name) and not a[e == 0].any():
            yield f"{name} is {np.median(ratio):.4g} times what it should be, throughout"
        if e.shape[0] == e.shape[1] > 1 and same(a, e.T):
            yield f"{name} is transposed"
        yield from _of_pairs(name, a, scope)
        if a.size > 1 and (a == a.flat[0]).all():
            yield f"{name} is {a.flat[0] or 0:g} throughout"


def _exp(x: Array) -> Array:
    """As float32 has it, where what is too small is 0."""
    return np.exp(x).astype(np.float32)


def _is_logarithm(name: str) -> bool:
    """A factor means nothing there."""
    return name == "lse" or name.endswith(" lse")


def _of_maxima(name: str, a: Array, e: Array, scope: Mapping[str, Array], row: int) -> Iterator[str]:
    """Of where a maximum starts, and whose it is; of masks."""
    if e.shape[1] == 1 and np.isneginf(e).all() and np.ptp(a) == 0:
        yield f"{name} starts at {a[0, 0]:g} and not at -inf"
    if np.isneginf(e).any() and np.isfinite(a[np.isneginf(e)]).all() and same(a[np.isfinite(e)], e[np.isfinite(e)]):
        yield f"{name} has values where the mask hides the key, and -inf belongs there"
    if e.shape[1] == 1 and np.ptp(a) == 0 and _differ(e) and same(a[:1], e.max(keepdims=True)):
        yield f"{name} is the largest of all rows: a maximum is that of its row, and not of the whole tile"
    for x, values in scope.items():
        top = values.max(-1, keepdims=True)
        if x != name and values.shape == e.shape and e.shape[1] > 1 and _differ(top):
            if a.any() and same(a, _exp(values - top.max())):
                yield f"{name} is exp({x} - the maximum of the whole tile): a maximum is that of its row"
    if e[row].max() < 0 and same(a, np.maximum(e, 0)):
        yield f"{name} is never below 0, as if the maximum had started at 0 and not at -inf"


def _lies_along(x: Array, like: Array) -> bool:
    """Has x a number for each row, or for each column, of a tile?"""
    return x.shape == (len(like), 1) or (x.shape == (1, like.shape[1]) and len(like) > 1)


def _differ(x: Array) -> bool:
    """Are there different numbers?"""
    finite = x[np.isfinite(x)]
    return bool(finite.size and np.ptp(finite) > 0)


def _of_zeros(name: str, a: Array, e: Array, scope: Mapping[str, Array], row: int, form: Form | None) -> Iterator[str]:
    """Of rows of zeros, and of signs that were to be taken away."""
    for x, values in scope.items():
        if len(values) != len(a):
            continue
        if values.shape[1] > 1 == e.shape[1]:
            top, size = (f.max(-1, keepdims=True) for f in (values.astype(np.float64), np.abs(values)))
            if (top != size).any() and same(a * size, e * top):
                yield f"{name} comes from the maximum of {x}, and should come from that of its absolute values"
        guarded = form is None or (".nonzero()" in form.lines and re.search(rf"\b{x}\b", form.lines))
        if guarded and not values[row].any() and not a[row].any() and e[row].any():
            yield f"row {row} of {x} is all zeros, and so is {name}: .nonzero() has 1 in place of 0"


def _of_roundings(
    name: str, actual: Array, expected: Array, scope: Mapping[str, Array], form: Form | None
) -> Iterator[str]:
    """Of what was rounded too late, or too early."""
    for dtype, said in TYPES.items() if form is not None and "round(" in form.lines else ():
        if np.isfinite(actual).all() and np.array_equal(round_to(expected, dtype), expected):
            if not np.array_equal(actual, expected) and np.mean(round_to(actual, dtype) == expected) > 0.999:
                yield f"{name} was not rounded to {said}"
            break  # what e4m3 holds float16 holds as well
    off = actual.astype(np.float64) - expected
    for x, values in scope.items():
        if len(values) != len(off) or values.shape[1] == 1 or off.shape[1] > 1:
            continue
        for dtype in ("float16", "bfloat16"):
            moved = (round_to(values.astype(np.float32), dtype).astype(np.float64) - values).sum(-1, keepdims=True)
            if moved.any() and np.abs(off - moved).max() < 0.1 * np.abs(moved).max():
                yield (
                    f"{name} adds up {x} after it was rounded to {dtype}: add it up as it is, and round what is multiplied"
                )


def _of_tiles(
    name: str, a: Array, e: Array, scope: Mapping[str, Array], old: Mapping[str, Array], rest: str
) -> Iterator[str]:
    """Of another tile: its exponential under a wrong maximum, or its maximum or sum alone."""
    columns = [(y, values) for y, values in scope.items() if _lies_along(values, e)]
    earlier = [(f"the old {y}" if y in scope else y, f) for y, f in old.items() if f.shape == (len(e), 1)]
    for x, values in scope.items():
        f = values.astype(np.float64)
        if x == name or len(f) != len(e) or f.shape[1] == 1:
            continue
        top, result = f.max(-1, keepdims=True), f.sum(-1, keepdims=True)
        if f.shape == a.shape:
            taken = [y for y, less in columns if y != name and same(e, _exp(f - less))]
            if taken and same(a, _exp(f)) and "lse" in taken[0]:
                yield f"{name} is exp({x}) itself: {taken[0]} was not subtracted"
            if taken and a.any() and same(a, _exp(f - top)):
                yield f"{name} is exp({x} - the maximum of its row), and {taken[0]} belongs there"
            if same(a, _exp(f)):
                below = "no maximum was subtracted" + (", or one that is never below 0" if (top <= 0).all() else "")
                yield f"{name} is exp({x}) itself: {below}"
            if (top < 0).any() and same(a, _exp(f - np.maximum(top, 0))):
                yield f"{name} is exp({x} - 0) where {x} is below 0: the maximum must not start at 0"
            for y, less in (*columns, *earlier):
                for value in (less, np.where(np.isneginf(less), 0, less)):
                    if y == name or not a.any():
                        continue
                    if same(a, _exp(f - value)):
                        yield f"{name} is exp({x} - {y}): another maximum belongs there"
                    if same(a, np.exp2(f - value)) and same(e, _exp(f - value)):
                        yield f"{name} is 2 to the power of {x} - {y}, and e belongs there: {y} is natural"
        if a.shape == top.shape and same(a, top) and same(e, result):
            yield f"{name} is the maximum of {x}, and should be its sum"
        if a.shape == top.shape and same(a, result) and same(e, top):
            yield f"{name} is the sum of {x}, and should be its maximum"
        if not rest or a.shape != top.shape:
            continue
        if same(a, top):
            yield f"{name} is the maximum of {x} alone: {rest}"
        if same(a, result):
            yield f"{name} is the sum of {x} alone: {rest}"
    tiles = [(x, f) for x, f in scope.items() if rest and np.isfinite(a).all() and a.shape == (len(f), 1) != f.shape]
    for x, f in tiles:
        for y, less in columns:
            if y != name and same(a, _exp(f - less).sum(-1, keepdims=True)):
                yield f"{name} is the sum of exp({x} - {y}) alone: {rest}"


def _of_columns(name: str, a: Array, e: Array, scope: Mapping[str, Array], form: Form | None) -> Iterator[str]:
    """Of a number for each row that should be the exponential of a difference."""
    if e.shape[1] != 1 or form is None or a.shape != e.shape:
        return
    if np.isneginf(a).any() and ".finite()" in form.lines and same(np.where(np.isneginf(a), 0, a), e):
        yield f"{name} is -inf where a row has seen no key: .finite() has 0 in place of it"
    columns = {
        x: f.astype(np.float64) for x, f in scope.items() if x != name and f.shape == e.shape and _names(form, x)
    }
    largest = re.search(rf"\b{re.escape(name)}\s*=\s*(block\.maximum|fmaxf)\(", form.lines)
    for x, f in columns.items():
        if x.startswith("exp(") and same(e, f) and same(a, f ** np.log(2)):
            yield f"{name} is 2 to the power of {x[4:-1]}, and e belongs there"
        if largest and len(columns) > 1 and np.isfinite(f).all() and same(a, f):
            yield f"{name} is {x} itself, and the larger of both belongs there"
        for y, less in columns.items():
            if x == y or not same(e, _exp(f - less)):
                continue
            if same(a, np.exp2(f - less)):
                yield f"{name} is 2 to the power of {x} - {y}, and e belongs there: {x} is natural"
            if same(a, _exp(f)):
                yield f"{name} is exp({x}) itself: {y} was not subtracted, or one that starts at 0"
            if np.isneginf(f).any() and same(a, _exp(np.where(np.isneginf(f), 0, f) - less)):
                yield f"{name} takes {x} as 0 where it is -inf: what is empty weighs nothing"


def _of_factors(
    name: str, a: Array, e: Array, scope: Mapping[str, Array], old: Mapping[str, Array], before: Array | None, row: int,
    form: Form | None,
) -> Iterator[str]:  # fmt: skip
    """Of a factor or a term that is missing or too much: in the whole, in what was there before, in a part."""
    factors = dict(_factors(name, scope, old, e))
    factors = dict(sorted(factors.items(), key=lambda one: "(" in one[0]))  # a variable, before a sum that may equal it
    said = {x: f"{x} = {f[row, 0]:.3g}" if f.shape == (len(e), 1) else x for x, f in factors.items()}
    logarithm = _is_logarithm(name)
    zeros = [x for x, f in factors.items() if f.shape == (len(e), 1) and not f.any()]
    if zeros and not a.any() and e.any():  # which of them it was does not show
        yield f"{name} is 0, as if it were multiplied by {' or '.join(zeros)}"
    for x, f in factors.items():
        if x not in zeros and not logarithm and np.ptp(f) + abs(f.flat[0] - 1) > CLOSE:  # a factor 1 explains nothing
            if e.any() and same(a * f, e):
                yield f"{name} {_too_small(x, said[x], form)}"
            elif same(a, e * f):
                yield f"{name} {_too_large(x, said[x], form)}"
        added = _names(form, x) and (form is None or not multiplies(form.lines, x))
        if f.any() and added and same(a + f, e):
            yield f"{name} lacks {said[x]}, which was not added"
        if f.any() and added and same(a - f, e):
            yield f"{name} still has {said[x]}, which was not subtracted"
        if logarithm and same((a - f) * np.log(2), e - f):
            yield f"{name} has a logarithm to base 2 beside {said[x]}, and a natural one belongs there"
    if logarithm and same(a * np.log(2), e):
        yield f"{name} is to base 2 throughout, and should be natural"
    parts = {f"{y} in it": f for y, f in scope.items() if y != name and form and _names(form, y)}
    if before is not None:
        parts = {f"what {name} had before": before} | parts
    for what, part in parts.items():
        if part.shape != e.shape or not np.isfinite(part).all() or not part.any():
            continue
        if same(e - a, part.astype(np.float64)):
            yield f"{what} is lost"
        for x, f in factors.items():
            if f is part or not np.ptp(f) + abs(f.flat[0] - 1) > CLOSE:
                continue
            if same(a - e, part * (1 - f)):
                yield f"{what} was not multiplied by {said[x]}"
            if same(a - e, part * (f * f - f)):
                yield f"{what} was multiplied by {said[x]} once too often"
            if form is not None and _names(form, x) and any(same(a - e, sign * 2 * part * f) for sign in (1, -1)):
                yield f"{what}, times {said[x]}, has the wrong sign"
            if same(e - a, part * f) and (form is None or multiplies(form.lines, x)):
                yield f"{what}, times {said[x]}, is lost"


def _of_pairs(name: str, a: Array, scope: Mapping[str, Array]) -> Iterator[str]:
    """Of another tile, a multiple of it, or another operation on two."""
    wide = {x: f.astype(np.float64) for x, f in scope.items() if x != name and np.isfinite(f).all() and f.any()}
    for x, f in wide.items():
        if f.shape != a.shape or not _differ(f):
            continue
        ratio = a[f != 0] / f[f != 0]
        if np.ptp(ratio) < CLOSE * abs(np.median(ratio)):
            yield f"{name} is {x}" + (f" times {np.median(ratio):.4g}" if abs(ratio[0] - 1) > CLOSE else " itself")
        for y, g in wide.items():
            if g.shape not in (a.shape, (len(a), 1)):
                continue
            for result, said in ((f + g, "+"), (f - g, "-"), (f * g, "*"), (f / g, "/")):
                if _differ(result) and same(a, result):
                    yield f"{name} is {x} {said} {y}"
            if x < y and g.shape == a.shape and same(a, (f + g) / 2):
                yield f"{name} is the plain mean of {x} and {y}"


def _names(form: Form | None, x: str) -> bool:
    """Does the solution take x there?"""
    return form is None or bool(re.search(rf"(?<![\w.]){re.escape(x)}(?!\w)", _normal(form.lines)))


def _too_small(x: str, said: str, form: Form | None) -> str:
    """Of what is a factor too small: was it not multiplied, or divided?"""
    if form is None or multiplies(form.lines, x):
        return f"was not multiplied by {said}"
    if divides(form.lines, x):
        return f"was divided by {said} once too often"
    elsewhere = "the solution does that elsewhere" if divides(form.text, x) else "the solution does not"
    return f"was divided by {said} here, and {elsewhere}"


def _too_large(x: str, said: str, form: Form | None) -> str:
    """Of what is a factor too large: was it not divided, or multiplied?"""
    if form is None or divides(form.lines, x):
        return f"was not divided by {said}"
    if multiplies(form.lines, x):
        return f"was multiplied by {said} once too often"
    elsewhere = "the solution does that elsewhere" if multiplies(form.text, x) else "the solution does not"
    return f"was multiplied by {said} here, and {elsewhere}"


def _factors(
    name: str, scope: Mapping[str, Array], old: Mapping[str, Array], like: Array
) -> Iterator[tuple[str, Array]]:
    """What may have been forgotten, by name: the other tiles of the step, the sums and maxima of their rows, and rescalings."""
    for x, values in scope.items():
        f = values.astype(np.float64)
        if x == name or not np.isfinite(f).all():
            continue
        if f.shape == like.shape or _lies_along(f, like):
            yield x, f
        if f.shape == (like.shape[1], 1) and like.shape[1] > 1:
            yield f"{x}.T", f.T
        if len(f) == len(like) and f.shape[1] > 1:
            yield f"{x}.sum()", f.sum(-1, keepdims=True)
            yield f"{x}.max()", f.max(-1, keepdims=True)
    for x, values in old.items():
        now = scope.get(x)
        if now is not None and values.shape == now.shape == (len(like), 1):
            yield f"exp(the old {x} - {x})", np.exp(values.astype(np.float64) - now)
