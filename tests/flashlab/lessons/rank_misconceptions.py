# ruff: noqa: E501  (a table)
"""What learners get wrong in lesson 14: each solution with one thought in it changed, and what the check has to say.

A row is an exercise, a name, what the text was, what it becomes, the kind of verdict, the step that it names, and the reason.
"""

from __future__ import annotations

from typing import NamedTuple


class Misconception(NamedTuple):
    exercise: str
    name: str
    was: str
    becomes: str
    kind: str
    step: str
    why: str


_SEND = "        if step < rank.ranks - 1:  # solution\n            rank.send(rank.right, step, k=k, v=v)  # solution\n"
_RECEIVE = "        if step < rank.ranks - 1:  # solution\n            k, v = yield rank.receive(rank.left)  # solution\n"
_WHOSE = "whose = (rank.index - step) % rank.ranks"
_KEPT = "        outs.append(out)  # solution\n        lses.append(lse)  # solution\n"
_MERGED = "return fl.merge(outs, lses)"
_ROWS = "[*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]"
_LATE = "2 * ranks - 1 - rank"
_EARLIER = "everything, slice(0, size), False"
_LATER = "slice(size, 2 * size), everything, False"

MISCONCEPTIONS = [
    Misconception(*row)
    for row in [
        ("14.1", "the-ring-turns-the-other-way", _WHOSE, "whose = (rank.index + step) % rank.ranks", "numbers", "attend", r"rank 0, its product 1 .*this is K of rank 3, and it is said to be rank 1's"),
        ("14.1", "all-keys-are-my-own", "of=whose", "of=rank.index", "numbers", "attend", r"this is K of rank 3, and it is said to be rank 0's"),
        ("14.1", "the-step-is-the-rank", _WHOSE, "whose = step", "numbers", "attend", r"rank 0, its product 1 .*this is K of rank 3, and it is said to be rank 1's"),
        ("14.1", "a-ring-of-one-too-many", _WHOSE, "whose = (rank.index - step - 1) % rank.ranks", "numbers", "attend", r"rank 0, its product 0 .*this is K of rank 0, and it is said to be rank 3's"),
        ("14.1", "always-sends-its-own", "step, k=k, v=v)", "step, k=rank.k, v=rank.v)", "numbers", "attend", r"its product 2 .*this is K of rank 3, and it is said to be rank 2's"),
        ("14.1", "k-and-v-change-places", "step, k=k, v=v)", "step, k=v, v=k)", "numbers", "send", r"what it takes for K is V of rank 3"),
        ("14.1", "only-v-travels", "rank.send(rank.right, step, k=k, v=v)  # solution", "rank.send(rank.right, step, v=v)", "crash", "attend", r"ValueError"),
        ("14.1", "k-stays-at-home", "step, k=k, v=v)", "step, k=rank.k, v=v)", "numbers", "send", r"K of rank \d meets V of rank \d"),
        ("14.1", "waits-for-the-wrong-side", "rank.receive(rank.left)", "rank.receive(rank.right)", "hang", "receive", r"waits for ever \(rank 0 for rank 1"),
        ("14.1", "sends-to-the-left", "rank.send(rank.right", "rank.send(rank.left", "hang", "receive", r"waits for ever \(rank 0 for rank 3"),
        ("14.1", "the-last-send-is-for-nobody", _SEND, "        rank.send(rank.right, step, k=k, v=v)\n", "asked", "send", r"k, v of rank 0, step 3, to rank 1: nobody receives it"),
        ("14.1", "a-hop-too-many", _SEND + "§" + _RECEIVE, "        rank.send(rank.right, step, k=k, v=v)\n§        k, v = yield rank.receive(rank.left)\n", "bytes", "send", r"rank 0 sends K and V 4 times, and 3 would do"),
        ("14.1", "computes-first", _SEND + "§" + _RECEIVE, "§        if step < rank.ranks - 1:\n            rank.send(rank.right, step, k=k, v=v)\n            k, v = yield rank.receive(rank.left)\n", "asked", "order", r"rank 0 computes product 0 before it sends the K and V of that product on"),
        ("14.1", "tells-everybody", "    for step in range(rank.ranks):  # solution\n" + _SEND + "§" + _RECEIVE, "    for other in range(rank.ranks):\n        if other != rank.index:\n            rank.send(other, 0, k=k, v=v)\n    for step in range(rank.ranks):\n§        if step < rank.ranks - 1:\n            k, v = yield rank.receive((rank.index - step - 1) % rank.ranks)\n", "asked", "send", r"rank 0 sends to rank 2: in a ring it sends to rank.right alone"),
        ("14.1", "a-step-is-left-out", "range(rank.ranks):", "range(rank.ranks - 1):", "numbers", "attend", r"rank 0 looks never at the keys of rank 1"),
        ("14.1", "the-mean-of-the-parts", _MERGED, "return sum(outs) / len(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"merges them wrongly: the result is their mean"),
        ("14.1", "the-sum-of-the-parts", _MERGED, "return sum(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"merges them wrongly: the result is their sum"),
        ("14.1", "the-last-part-is-all", _MERGED, "return out, lse", "numbers", "merge", r"the result is the last one alone"),
        ("14.1", "the-first-part-is-all", _MERGED, "return outs[0], lses[0]", "numbers", "merge", r"the result is the first one alone"),
        ("14.1", "the-lse-of-its-own-keys", _MERGED, "return fl.merge(outs, lses)[0], lses[0]", "numbers", "merge", r"out is right, and lse isn't"),
        ("14.1", "its-own-keys-twice", _KEPT, "        outs.append(out)\n        lses.append(lse)\n        if step == 0:\n            part = rank.attend(k, v, of=whose)\n            outs.append(part[0])\n            lses.append(part[1])\n", "numbers", "attend", r"rank 0 looks 2 times at the keys of rank 0"),
        ("14.1", "receives-without-yield", "yield rank.receive", "rank.receive", "crash", "receive", r"Without `yield` before it, rank.receive doesn't wait"),
        ("14.1", "returns-out-alone", _MERGED, "return fl.merge(outs, lses)[0]", "usage", "return", r"return value of my_ring, rank 0"),
        ("14.2", "contiguous-rows", _ROWS, "list(range(2 * rank * size, 2 * (rank + 1) * size))", "asked", "rows", r"rank 3 has 5\.\d+ times the pairs of rank 0"),
        ("14.2", "chunks-r-and-r-plus-w", _LATE, "ranks + rank", "asked", "rows", r"rank 3 has [\d.]+ times the pairs of rank 0"),
        ("14.2", "a-chunk-too-far", _LATE, "2 * ranks - rank", "asked", "rows", r"which isn't there"),
        ("14.2", "row-by-row", _ROWS, "[row for row in range(n) if row % (2 * ranks) in (rank, late)]", "asked", "rows", r"lie in 3 pieces, and two are enough"),
        ("14.2", "late-rows-first", _ROWS, "[*range(late * size, (late + 1) * size), *range(rank * size, (rank + 1) * size)]", "asked", "rows", r"the rows of rank 0 don't rise"),
        ("14.2", "the-end-is-included", "range(rank * size, (rank + 1) * size)", "range(rank * size, (rank + 1) * size + 1)", "asked", "rows", r"rank 1 has row 2, and so has rank 0"),
        ("14.2", "one-chunk-is-forgotten", _ROWS, "list(range(rank * size, (rank + 1) * size))", "asked", "rows", r"nobody has row 8"),
        ("14.2", "chunks-of-ranks", "size, late = n // (2 * ranks)", "size, late = n // ranks", "asked", "rows", r"which isn't there|and so has rank"),
        ("14.2", "numbers-of-chunks", _ROWS, "[rank, late]", "asked", "rows", r"nobody has row 8"),
        ("14.2", "own-keys-without-a-mask", "return everything, everything, True", "return everything, everything, False", "numbers", "seen", r"rank 0 and its own keys: row 0 must not see key 1"),
        ("14.2", "all-keys-of-an-earlier-rank", _EARLIER, "everything, everything, False", "numbers", "seen", r"rank 1 and the keys of rank 0, an earlier rank: row 2 must not see key 14"),
        ("14.2", "an-earlier-rank-s-late-keys", _EARLIER, "everything, slice(size, 2 * size), False", "numbers", "seen", r"an earlier rank: row 2 sees key 0, and no launch has that pair"),
        ("14.2", "an-earlier-rank-for-late-rows-alone", _EARLIER, "slice(size, 2 * size), slice(0, size), False", "numbers", "seen", r"an earlier rank: row 2 sees key 0"),
        ("14.2", "a-mask-for-an-earlier-rank", _EARLIER, "everything, everything, True", "numbers", "seen", r"an earlier rank: row \d+ (sees|must not see) key \d+"),
        ("14.2", "all-rows-for-a-later-rank", _LATER, "everything, everything, False", "numbers", "seen", r"rank 0 and the keys of rank 1, a later rank: row 0 must not see key 2"),
        ("14.2", "early-rows-for-a-later-rank", _LATER, "slice(0, size), everything, False", "numbers", "seen", r"a later rank: row 0 must not see key 2"),
        ("14.2", "a-later-rank-isn-t-seen", "        return slice(size, 2 * size), everything, False  # solution\n", "        return None\n", "numbers", "seen", r"a later rank: row 14 sees key 2, and no launch has that pair"),
        ("14.2", "a-later-rank-s-early-keys-alone", _LATER, "slice(size, 2 * size), slice(0, size), False", "numbers", "seen", r"a later rank: row 14 sees key 12, and no launch"),
        ("14.2", "earlier-is-later", "if of < rank", "if of > rank", "numbers", "seen", r"rank 0 and the keys of rank 1, a later rank"),
        ("14.2", "two-things-instead-of-three", "return everything, everything, True", "return everything, everything", "usage", "seen", r"\(rows, keys, causal\) is asked"),
    ]
]
"""A § in a text parts two places, each of which changes."""
