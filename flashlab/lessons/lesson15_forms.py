"""Lesson 15: its exercises on the two forms of latent attention, whose answers are classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from numbers import Real
from typing import Any, NamedTuple, cast

import numpy as np

from flashlab.lessons.asked import Asked, judged, near, softmax
from flashlab.lessons.class_exercise import ClassExercise, Found
from flashlab.lessons.lesson15 import DIM, HEADS, ROPE, Form, absorbed, crossing, unfolded
from simulator import DEVICES
from simulator.dtypes import Array
from simulator.operations.latent import HEAD_DIM, HEAD_DIM_V

# -- 15.1, absorbed -----------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Queries of some heads, their matrices, and the rows of a latent cache. All float64."""

    q: Array
    a: Array
    b: Array
    rows: Array

    @classmethod
    def drawn(cls, seed: int, heads: int, queries: int, tokens: int, spread: float = 1.0) -> Layer:
        draw = np.random.default_rng(seed)
        q = spread * draw.standard_normal((heads, queries, DIM + ROPE))
        a, b = (draw.standard_normal((heads, DIM, HEAD_DIM_V)) / HEAD_DIM_V**0.5 for _ in range(2))
        return cls(q, a, b, draw.standard_normal((tokens, HEAD_DIM)))

    def unfolded(self) -> Array:
        """Attention with each head's own keys and values, (heads, queries, 128)."""
        c, r = self.rows[:, :HEAD_DIM_V], self.rows[:, HEAD_DIM_V:]
        keys = np.concatenate([c @ self.a.swapaxes(1, 2), np.broadcast_to(r, (len(self.a), *r.shape))], axis=-1)
        p = softmax(self.q @ keys.swapaxes(1, 2) / (DIM + ROPE) ** 0.5)
        return p @ (c @ self.b.swapaxes(1, 2))


def _layers() -> dict[str, Layer]:
    return {
        "4 heads, 3 queries, 70 tokens": Layer.drawn(0, 4, 3, 70),
        "2 heads, scores up to some thousands": Layer.drawn(1, 2, 5, 40, spread=1000.0),
        "1 head, 1 query, 1 token": Layer.drawn(2, 1, 1, 1),
    }


def _query_slips(q: Array, a: Array) -> dict[str, Array]:
    c, r = q[..., :DIM] @ a, q[..., DIM:]
    both = np.concatenate([c, r], axis=-1)
    return {
        "the 64 numbers with the position are missing: they meet r, and absorb nothing": c,
        "the 64 numbers with the position stand in front: in a row they come last": np.concatenate([r, c], axis=-1),
        "the 64 numbers with the position are 0, and they meet r": np.concatenate([c, 0 * r], axis=-1),
        "each head absorbs A of head 0, and each head has an A of its own": np.concatenate(
            [q[..., :DIM] @ a[0], r], -1
        ),
        "A of the heads are added up, and each head has an A of its own": np.concatenate(
            [q[..., :DIM] @ a.sum(0), r], -1
        ),
        "the query is scaled here, and attend scales the scores": both / (DIM + ROPE) ** 0.5,
        "the numbers with the position come first in q, by what it does: they are the last 64": np.concatenate(
            [q[..., ROPE:] @ a, q[..., :ROPE]], -1
        ),
    }


def _attend_slips(x: Array, rows: Array) -> dict[str, Array]:
    c, s = rows[:, :HEAD_DIM_V], x @ rows.T
    scaled = s / (DIM + ROPE) ** 0.5
    raw = np.exp(scaled - scaled.max(-1, keepdims=True))
    return {
        "the scores are divided by √576, what a row has: a score is q · k of 192 numbers still": softmax(s / HEAD_DIM**0.5) @ c,
        "the scores are divided by √128, and a key has 64 more numbers": softmax(s / DIM**0.5) @ c,
        "the scores are divided by √512, and a key has 128 + 64 numbers": softmax(s / HEAD_DIM_V**0.5) @ c,
        "the scores aren't scaled": softmax(s) @ c,
        "the values are whole rows: a value is made of c alone, the first 512 numbers": softmax(scaled) @ rows,
        "the values are the last 512 numbers of the rows, and c are the first ones": softmax(scaled) @ rows[:, -HEAD_DIM_V:],
        "the scores have c alone: r belongs to them, too": softmax(x[..., :HEAD_DIM_V] @ c.T / (DIM + ROPE) ** 0.5) @ c,
        "the weights aren't divided by their sum": raw @ c,
        "the softmax goes over queries, and each query's weights have to add up to 1": raw / raw.sum(-2, keepdims=True) @ c,
        "it is the plain mean: the weights are lost": np.broadcast_to(c.mean(0), (*x.shape[:2], HEAD_DIM_V)),
    }  # fmt: skip


def _output_slips(o: Array, b: Array) -> dict[str, Array]:
    right = o @ b.swapaxes(1, 2)
    return {
        "each head gets B of head 0, and each head has a B of its own": o @ b[0].T,
        "the heads are added up: each one has an output of its own": right.sum(0),
        "B isn't applied: these are still means of latent rows": o,
        "the last two axes are exchanged": right.swapaxes(1, 2),
        "the mean over the queries is taken: each query has an output of its own": right.mean(1),
    }


def _methods(answer: Asked, layer: Layer) -> None:
    """Each method by itself, with right arrays. What the last one gives is attention unfolded."""
    q, a, b, rows = layer
    x = np.concatenate([q[..., :DIM] @ a, q[..., DIM:]], axis=-1)
    answer.array("query", answer.call("query", q.copy(), a.copy()), x, lambda: _query_slips(q, a))
    o = softmax(x @ rows.T / (DIM + ROPE) ** 0.5) @ rows[:, :HEAD_DIM_V]
    answer.array("attend", answer.call("attend", x.copy(), rows.copy()), o, lambda: _attend_slips(x, rows))
    out = answer.call("output", o.copy(), b.copy())
    answer.array("output", out, layer.unfolded(), lambda: _output_slips(o, b), close=1e-9)


@judged
def _absorbed(answer: Asked) -> Found:
    layers = _layers()
    for answer.case, layer in layers.items():
        _methods(answer, layer)
    row, own = 2 * HEAD_DIM, HEADS * 2 * (2 * DIM + ROPE)
    return Found(
        "passed",
        f"{len(layers)} layers, and each output is that of keys and values unfolded, in float64",
        said=f"with {HEADS} heads a token has {row:,} bytes as a row, and {own:,} as keys and values",
    )


# -- 15.3, the cheaper form ---------------------------------------------------------------------------------------


class Asking(NamedTuple):
    """A request: so many heads of a GPU, new queries and keys, and the GPU."""

    heads: int
    queries: int
    keys: int
    device: str

    def __str__(self) -> str:
        queries = "1 query" if self.queries == 1 else f"{self.queries:,} queries"
        return f"{self.heads} heads, {queries}, {self.keys:,} keys, {self.device}"

    def least(self, cost: Callable[[Form], float]) -> str:
        """The form that costs less."""
        return min(FORMS, key=lambda form: cost(FORMS[form](*self[:3])))

    def seconds(self, form: str) -> float:
        return FORMS[form](*self[:3]).seconds(*self.gpu)

    @property
    def best(self) -> str:
        return min(FORMS, key=self.seconds)

    @property
    def gpu(self) -> tuple[float, float]:
        """Bytes and FLOPs per second."""
        return DEVICES[self.device].bandwidth, DEVICES[self.device].flops("bfloat16")


FORMS: Mapping[str, Callable[[int, int, int], Form]] = {"absorbed": absorbed, "unfolded": unfolded}
DAY = [
    Asking(heads, queries, keys, device)
    for device, heads in product(("h200", "h100", "l4"), (16, HEADS))
    for keys in (512, 4096, 65_536)
    for queries in (1, 4, 100, 127, 135, 160, 169, 173, 178, 183, 200, 236, 245, 300, 512, 2048)
    if queries <= keys
]
"""Requests of a day: one new token, drafts, and prompts after a prefix that is there. Many lie where the forms are about equal."""


def cost_slips(form: str, heads: int, queries: int, keys: int) -> tuple[dict[str, float], dict[str, float]]:
    """Wrong bytes of a form, and wrong FLOPs, by what is wrong with them."""
    (nbytes, flops), row, rows = FORMS[form](heads, queries, keys), 2 * keys * HEAD_DIM, heads * queries
    matrix = DIM * HEAD_DIM_V
    always = {"these are elements, of 2 bytes each": nbytes / 2}, {"a multiply-add is two FLOPs": flops / 2}
    if form == "absorbed":
        pair, both = HEAD_DIM + HEAD_DIM_V, 2 * matrix
        return always[0] | {
            "a row for each head, and all heads share it": row * heads,
            "a row for each query, and all queries share it": row * queries,
            "V is read once more, and it lies inside of the row": 2 * keys * pair,
            "the 64 numbers with the position are in the row, too": 2 * keys * HEAD_DIM_V,
        }, always[1] | {
            "queries absorb A, and outputs get B: that is missing": 2 * rows * keys * pair,
            "of the two matrices one is missing": 2 * rows * (keys * pair + matrix),
            "a score takes 576 multiply-adds, not 512": 2 * rows * (2 * keys * HEAD_DIM_V + both),
            "a value takes 512 multiply-adds, not 576": 2 * rows * (2 * keys * HEAD_DIM + both),
            "each head computes": flops / heads,
            "matrices are applied to queries, not to keys": 2 * heads * keys * (queries * pair + both),
        }  # fmt: skip
    made, pairs = 2 * keys * heads * (2 * DIM + ROPE), 2 * rows * keys * (2 * DIM + ROPE)
    return always[0] | {
        "what is unfolded is written, and then read": row + made,
        "to unfold rows, they are read": 2 * made,
        "a key has the 64 numbers with the position, too": row + 2 * 2 * keys * heads * 2 * DIM,
        "each head has keys and values of its own": row + 2 * made / heads,
    }, always[1] | {
        "keys and values have to be made, and that is missing": pairs,
        "keys are made, and values are, too": pairs + 2 * heads * keys * matrix,
        "a score takes 192 multiply-adds": flops - 2 * rows * keys * ROPE,
        "keys and values are made once for all queries": pairs + 2 * rows * keys * 2 * matrix,
        "each head makes its own keys and values": pairs + 2 * keys * 2 * matrix,
    }  # fmt: skip


CHOICE_SLIPS: Mapping[str, Callable[[Asking], str]] = {
    "it is always the absorbed form, as if bytes alone counted": lambda x: "absorbed",
    "it is always the unfolded form": lambda x: "unfolded",
    "it looks at FLOPs alone, and bytes take time as well": lambda x: x.least(lambda form: form.flops),
    "it adds up both times, and a GPU reads while it computes: the slower of both counts": lambda x: x.least(
        lambda form: form.nbytes / x.gpu[0] + form.flops / x.gpu[1]
    ),
    "it takes the form that is slower": lambda x: max(FORMS, key=x.seconds),
    "it asks whether there is one query, and a few are like one": lambda x: (
        "absorbed" if x.queries == 1 else "unfolded"
    ),
    "it goes by the number of queries, and keys and GPU count as well": lambda x: (
        "absorbed" if x.queries < crossing() else "unfolded"
    ),
}
"""Rules that don't choose the best, by what they forget."""


def _costs(answer: Asked, form: str, x: Asking) -> None:
    """Bytes and FLOPs of a form, as the answer counts them."""
    answer.case = str(x).rpartition(",")[0]  # no GPU
    found: Any = answer.call(form, *x[:3])
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(n, Real) for n in found):  # pyright: ignore
        raise answer.wrong("usage", form, f"it returns {found!r}, and two numbers belong here: (bytes, flops)")
    slips, costs = cost_slips(form, *x[:3]), cast("tuple[float, float]", found)
    for what, mine, due, looks in zip(("bytes", "FLOPs"), costs, FORMS[form](*x[:3]), slips, strict=True):
        if not near(mine, due, 1e-12):
            why = next((f": {said}" for said, wrong in looks.items() if near(mine, wrong, 1e-12)), "")
            raise answer.wrong("numbers", form, f"it says {mine:,} {what}, and there are {due:,}{why}")


@judged
def _choice(answer: Asked) -> Found:
    """The costs of both forms, and each choice of a day against the best."""
    shown = Asking(HEADS, 1, 8192, "h200")
    for form, x in product(FORMS, (Asking(16, 3, 700, "h200"), shown)):
        _costs(answer, form, x)
    budget = tuple((form, "moved", nbytes, nbytes) for form in FORMS for nbytes in FORMS[form](*shown[:3])[:1])
    chosen, spent = dict[Asking, str](), [0.0, 0.0, 0.0]
    for x in DAY:
        answer.case = str(x)
        chosen[x] = answer.call("choose", *x[:3], *x.gpu)
        if chosen[x] not in FORMS:
            said = f'it returns {chosen[x]!r}, and "absorbed" or "unfolded" belongs here'
            raise answer.wrong("usage", "choose", said)
        spent = [time + x.seconds(form) for time, form in zip(spent, (chosen[x], *FORMS), strict=True)]
    for x, form in chosen.items():
        if form != x.best:
            answer.case = str(x)
            why = next(
                (f": {said}" for said, rule in CHOICE_SLIPS.items() if all(rule(y) == chosen[y] for y in DAY)), ""
            )
            took = [f"{x.seconds(each) * 1e6:.4g} µs" for each in (form, x.best)]
            message = f"it chooses {form}, which takes {took[0]}, and {x.best} takes {took[1]}"
            raise answer.wrong("asked", "choose", message + why)
    times = zip(("yours", "always absorbed", "always unfolded"), spent, strict=True)
    return Found(
        "passed",
        f"the best form for each of {len(DAY)} requests, on three GPUs",
        said="a day of one layer: " + ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in times),
        budget=budget,
        problem=str(shown),
    )


_COST = ("heads", "queries", "keys")

EXERCISES = (
    ClassExercise(
        name="15.1",
        title="Absorb",
        task="Compute attention over latent rows, and unfold none of them. The query absorbs the head's key matrix A, once, and "
        "then meets rows as they lie. What carries the position absorbs nothing. The scores keep their scale: they are the same "
        "numbers as before. The mean is taken of the c of the rows, and the head's value matrix B waits until after the sum. The "
        "check compares with keys and values unfolded: equal, in float64.",
        methods={"query": ("q", "a"), "attend": ("x", "rows"), "output": ("o", "b")},
        judge=_absorbed,
        hints=(
            "q · (A c) is a sum over 128 numbers of a sum over 512. Add up the other way round: (Aᵀq) · c. As rows: `q @ a`.",
            "The last 64 numbers of q meet the last 64 of a row. `np.concatenate([…, …], axis=-1)` puts both parts side by side.",
            "A key has 128 + 64 numbers, however long the rows are. Scores of some thousands want their maximum subtracted.",
            "Σ p (B c) = B (Σ p c). Rows again: `o @ b.swapaxes(-1, -2)`.",
        ),
        slips={
            "query": "query: of 192 numbers 128 absorb A, each head its own, and 64 stay as they are, at the end.",
            "attend": "attend: all 576 numbers for the scores, scaled as before, and the first 512 for the mean.",
            "output": "output: each head's B takes a mean of c to a mean of values, 512 numbers to 128.",
        },
        afterwards="Next: your `attend` is attention with one KV head, whose values lie inside of its keys. So it is a loop that "
        "you know, with one load less.",
    ),
    ClassExercise(
        name="15.3",
        title="The cheaper form",
        task="A request has so many new queries, and so many keys. Which form takes less time? Count both: of the cache, and of "
        "what is made of it, each byte that moves; and all FLOPs, those of A and B included. Absorbed, a row is read once for all "
        "heads and queries. Unfolded, each head's keys and values are made once, written, and read. A form takes as long as the "
        "slower of its bytes and its FLOPs. Choose for a day of requests on three GPUs; the check compares each choice with the "
        "best.",
        methods={"absorbed": _COST, "unfolded": _COST, "choose": (*_COST, "bandwidth", "rate")},
        judge=_choice,
        hints=(
            "A multiply-add is two FLOPs. A query and a key take a head 576 + 512 of them absorbed, and 192 + 128 unfolded.",
            "A matrix times a vector takes 128 · 512 multiply-adds. Absorbed: A and B for each query of each head. Unfolded: A and "
            "B for each key of each head.",
            "Bytes, unfolded: the rows are read, 192 + 128 numbers for each head and key are written, and read again.",
            "Bytes by bandwidth and FLOPs by rate are both seconds: `max(…)`. Then the form with less of them.",
        ),
        slips={
            "absorbed": "absorbed: what moves doesn't grow with the heads, and what is computed does.",
            "unfolded": "unfolded: to make keys and values costs FLOPs, and bytes twice.",
            "choose": "choose: make seconds of bytes and of FLOPs; the larger one is the form's time.",
        },
        afterwards="Next: a server has such a rule. vLLM takes the unfolded form for prompts, and the absorbed one for decoding.",
    ),
)
