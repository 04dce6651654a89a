"""Lesson 14, several GPUs: its exercises and its predictions. Ranks are in NumPy, so that no GPU is needed."""

from __future__ import annotations

from flashlab.lessons.class_exercise import ClassExercise
from flashlab.lessons.lesson14_ranks import decoding, ring, schedule, way_back
from flashlab.lessons.lesson14_zigzag import zigzag
from flashlab.lessons.prediction import Prediction
from flashlab.parallel.formulas import count
from simulator import Problem

EXERCISES = (
    ClassExercise(
        name="14.1",
        title="A ring",
        task="Each rank has some rows of Q, K and V. Its rows have to meet the keys of all ranks. So K and V go around: each "
        "rank sends what it has to `rank.right`, and gets what `rank.left` had. `rank.attend(k, v, of=r)` computes your rows "
        "over the keys of rank r, with the mask that is left between you and r. Merge what came out by the LSEs. Budget: K "
        "and V make as many hops as they must, and no more. And they travel while you compute: send first.",
        function=("rank",),
        judge=ring,
        hints=(
            "In step 0 the keys are your own, in step 1 rank.left's. In step s they have come s ranks: (index − s) % ranks.",
            "`k, v = yield rank.receive(rank.left)` waits for the next message of the left one.",
            "After ranks − 1 hops everybody has seen all keys. One hop more would bring them home, where nobody needs them.",
            "`fl.merge(outs, lses)` takes a list of outputs and a list of LSEs, and returns both for all keys.",
        ),
        slips={
            "send": "send: K and V, what this rank just has, to rank.right, ranks − 1 times.",
            "receive": "receive: from rank.left, with `yield`, as often as it sends.",
            "attend": "attend: step s has the keys that began s ranks to the left.",
            "merge": "merge: a part weighs e^LSE. fl.merge does that, for outputs and LSEs.",
            "order": "send before attend: the link and the tensor cores work side by side.",
            "return": "return (out, lse), both for your rows.",
        },
        afterwards="Next: this is Ring Attention. In a causal ring with contiguous rows rank 0 had one product, and then only "
        "passed on what others needed.",
    ),
    ClassExercise(
        name="14.2",
        title="Zigzag",
        task="Row i of a causal attention sees i + 1 keys. Deal n rows so that all ranks have as many rows, and within 1 % as "
        "many pairs, in two pieces at most. Then say what a rank's rows see of another rank's keys: *one* launch, a rectangle "
        "or a causal square, in which each visible pair is, and no other. n is a multiple of 2 · ranks.",
        methods={"rows": ("n", "ranks", "rank"), "seen": ("n", "ranks", "rank", "of")},
        judge=zigzag,
        hints=(
            "A late row beside an early one: rows i and n − 1 − i see n + 1 keys together, whatever i is.",
            "Cut the rows into 2 · ranks chunks. A rank has one from the front, and one from the back, in this order.",
            "An earlier rank's early chunk lies before all your rows, and its late chunk behind them.",
            "A later rank's two chunks lie before your late chunk, and behind your early one.",
        ),
        slips={
            "rows": "rows: chunks r and 2 · ranks − 1 − r, the early one first.",
            "seen": "seen: own keys, an earlier rank's, a later rank's: half of a square each, and the same work.",
        },
        afterwards="Next: in each step of the ring all ranks have the same work now, so nobody waits. torch calls it head-tail.",
    ),
    ClassExercise(
        name="14.3",
        title="The way back",
        task="On the way back K and V go around once more. `rank.attend_back(k, v, of=r)` says what your rows and the keys of "
        "rank r add to dQ, and to dK and dV of these keys: float32. Your dQ stays with your rows, and you add it up. But dK "
        "and dV of rank r's keys must come home to rank r, with the shares of all ranks in them. So they follow K and V: each "
        "rank adds its share, and sends the sums to `rank.right`. Budget: K and V make ranks − 1 hops, and so do dK and dV, "
        "for a rank adds the share of its own rows at home. Sums stay float32 until all shares are in them. And K and V leave "
        "before you compute.",
        function=("rank",),
        judge=way_back,
        hints=(
            "Step 0 has your own keys, and nothing to send but K and V: keep its dK and dV until the end.",
            "The sums of the keys that you have in step s were at rank.left in step s − 1. So they come from there, but for "
            "step 1: you are the first to add something.",
            "In each step: send K and V, compute, get the sums, add, send the sums, get the next K and V. Messages of one "
            "rank arrive in the order in which it sends them.",
            "After the last step one message is on its way: the sums of your own keys.",
        ),
        slips={
            "send": "send: K, V and sums, each to rank.right, ranks − 1 times.",
            "receive": "receive: from rank.left, with `yield`, in the order in which it sends: first sums, then K and V.",
            "attend_back": "attend_back: step s has the keys that began s ranks to the left.",
            "add": "add: the sums of these keys so far, and this rank's share. Nothing else.",
            "home": "home: the sums of a rank's own keys come back to it last, and it adds the share of its own rows then.",
            "dq": "dQ: it is this rank's, a sum in float32 over all steps.",
            "round": "round: once, when all shares are in the sum. `rank.attend_back` gives float32, and so it travels.",
            "order": "send K and V before you compute: the link and the tensor cores work side by side.",
            "return": "return (dq, dk, dv), of your rows, and of your keys.",
        },
        afterwards="Next: this is the backward pass of Ring Attention. Its sums have twice the bytes of K and V in 16 bits: "
        "so the way back sends three times what the way there sends, and computes 2.5 times as much.",
    ),
    ClassExercise(
        name="14.4",
        title="A striped cache",
        task="A new token has a query for each head, and many keys. They are dealt out like cards: rank r has keys r, r + "
        "ranks, r + 2 · ranks and so on, of *all* KV heads. Its queries are those of *some* heads. Keys stay where they are. "
        "So get the queries of all heads, in the order of the ranks, and look at your keys with them: `rank.attention(q, k, "
        "v)` returns (out, lse). Then give each rank the rows of its heads, and merge those of yours. Budget: a rank gets "
        "what it needs, and no more. LSEs are float32. A head must have the same bits, whichever rank it lives on.",
        function=("rank",),
        judge=decoding,
        hints=(
            "A message to oneself costs nothing. So a loop over all ranks needs no exception.",
            "`x = yield rank.receive(peer)`: one array comes alone, two as a tuple.",
            "Heads are axis 1: `np.concatenate(queries, axis=1)`, and heads `peer * heads` to `(peer + 1) * heads` are a peer's.",
            "Sums of floats depend on their order. Rank 2 must not begin with its own part where rank 3 begins with another one.",
        ),
        slips={
            "gather": "gather: the queries of ranks 0, 1, 2 …, one behind the other. So each head meets its own KV head.",
            "attend": "attend: rank.attention(queries, rank.k, rank.v), once.",
            "give": "give: out and lse of a peer's heads to that peer, in the dtypes that they have.",
            "merge": "merge: a part weighs e^LSE. fl.merge does that, and knows that a part without keys weighs nothing.",
            "order": "order: ranks 0, 1, 2 …, on each rank. That costs nothing.",
            "send": "send: once to each rank what it waits for, and nothing else.",
            "receive": "receive: from each rank, with `yield`.",
            "return": "return (out, lse), both of your heads.",
        },
        afterwards="Next: this is what vLLM calls decode context parallel. The cache grows evenly, and no rank has a part of "
        "the queries to itself: that's why each one works for all heads.",
    ),
    ClassExercise(
        name="14.5",
        title="Two hosts",
        task="Eight ranks, four on each host, and a causal zigzag. A product takes 1 ms, so eight of them take 8. K and V of "
        "a rank take 0.5 ms to a rank of the same host, and 3 ms over the network to the other one. A rank sends one message "
        "at a time and receives one at a time, while it computes. A plain ring waits for the network in each step. Write a "
        "schedule in which ranks compute nine tenths of the time. `rank.attend` and `fl.merge` are as in 14.1, and you may "
        "send to any rank. The timeline says which rank waits for which, and why.",
        function=("rank",),
        judge=schedule,
        extra=True,
        hints=(
            "How often must K and V of a rank cross the network at least, so that four ranks over there have them?",
            "Once: to one rank, which hands them on to the others of its host.",
            "3 ms of network need something to do meanwhile: the products with the keys of one's own host.",
            "A short message behind a long one waits for it. So in which order do a rank's first four messages leave?",
        ),
        slips={
            "waits": "waits: what is the message doing that is waited for? Is it sent too late, or behind another one, or "
            "over the network although somebody on this host has the same?",
            "attend": "attend: `of` is the rank whose keys these are, and not the one that sends them.",
            "merge": "merge: fl.merge(outs, lses), over all eight parts.",
            "send": "send: as often as somebody receives it.",
            "receive": "receive: with `yield`, as often as somebody sends.",
            "return": "return (out, lse), both for your rows.",
        },
        afterwards="Next: that's a ring within a host and one step between hosts, as large clusters do it. Is there a "
        "schedule with less than 8.5 ms?",
    ),
)


# -- predictions ---------------------------------------------------------------------------------------------------

RANKS = 8
SHARED = Problem(batch=1, heads=32, kv_heads=8, len_q=131_072, head_dim=128, dtype="bfloat16", causal=True)


def sends(scheme: str, kv_heads: int) -> int:
    """The bytes that each of eight ranks sends in a forward pass.

    >>> sends("ring", 8) == sends("all_gather", 8), sends("heads", 8)
    (True, 0)
    """
    return count(scheme, SHARED.replace(kv_heads=kv_heads), ranks=RANKS).sent[0]


def _of_ring(kv_heads: int) -> dict[str, float]:
    block = 2 * kv_heads * SHARED.len_q // RANKS * SHARED.head_dim * SHARED.itemsize
    return {
        "half: K alone, or elements in place of bytes": (RANKS - 1) * block / 2,
        "eight hops: but after seven everybody has seen all keys": RANKS * block,
        "one hop: but K and V go on": block,
        "all query heads': but only heads of K and V travel": (RANKS - 1) * block * SHARED.heads // kv_heads,
        "each row sent seven times, of all ranks": RANKS * (RANKS - 1) * block,
    }


def _of_ulysses(kv_heads: int) -> dict[str, float]:
    row = SHARED.len_q // RANKS * SHARED.head_dim * SHARED.itemsize
    own = SHARED.heads // RANKS
    kv = max(1, kv_heads // RANKS)
    found: dict[str, float] = {
        "the way to heads alone: but outputs go back to rows": (RANKS - 1) * row * (own + 2 * kv),
        "Q and the output alone": (RANKS - 1) * row * 2 * own,
        "its own heads, too, which stay": RANKS * row * (2 * own + 2 * kv),
        "K and V of all query heads": (RANKS - 1) * row * 4 * own,
    }
    if kv_heads < RANKS:
        few = "2 heads of K and V as they are: but each rank needs one of its own"
        found[few] = (RANKS - 1) * row * (2 * own + 2 * kv_heads / RANKS)
    return found


COMPUTES, CARRIES = 800e12, 300e9
"""FLOPs per second of a rank and bytes per second of a link, in round numbers."""


def hides(*, causal: bool) -> float:
    """The tokens from which on a step of a ring of eight ranks computes longer than its K and V travel."""
    p = SHARED.replace(causal=causal)
    counts = count("ring", p, ranks=RANKS)
    product = counts.counts[0][1].flops.matmul / COMPUTES
    return (
        p.len_q * counts.sent[0] / (RANKS - 1) / CARRIES / product
    )  # one grows as the square, the other one as the length


def _hidden_slips(*, causal: bool) -> dict[str, float]:
    right = hides(causal=causal)
    half = "all pairs: but a zigzag's ranks compute half of them" if causal else "K alone: but V travels, too"
    return {
        "rows of a rank: but eight ranks have eight times as many tokens": right / RANKS,
        "one product: but S is one, and P times V another": 2 * right,
        "K and V of all 32 heads: but 8 travel": 4 * right,
        half: right / 2,
    }


PREDICTIONS = (
    Prediction(
        name="14.1",
        truth=lambda: {f"{scheme}_{n}": sends(scheme, n) for n in (8, 2) for scheme in ("ring", "ulysses")},
        slips=lambda: {
            f"{name}_{n}": of(n) for n in (8, 2) for name, of in (("ring", _of_ring), ("ulysses", _of_ulysses))
        },
        because="A ring sends K and V of a rank seven times, and an all-gather sends as much. So fewer heads of K and V help "
        "it: with 2 it sends a quarter. Ulysses sends each row once, in eighths: Q, K, V, and the output back. With 2 heads "
        "of K and V each is sent to four ranks, so that costs as much as 8 heads do.",
    ),
    Prediction(
        name="14.2",
        truth=lambda: {"causal": hides(causal=True), "full": hides(causal=False)},
        slips=lambda: {"causal": _hidden_slips(causal=True), "full": _hidden_slips(causal=False)},
        because="A product grows as the square of a rank's rows, and what travels as their number. So from some length on the "
        "link is always fast enough. With n rows a rank a step computes n · n / 2 pairs in a zigzag, and sends n rows of K "
        "and V. Without a mask it computes twice as many, so half the length will do.",
    ),
)
