# ruff: noqa: E501  (a table)
"""What learners get wrong in lesson 14: each solution with one thought in it changed, and what the check has to say.

A row is an exercise, a name, what the text was, what it becomes, the kind of verdict, the step that it names, and the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from flashlab.lessons.catalogue import CLASS_EXERCISES


class Misconception(NamedTuple):
    exercise: str
    name: str
    was: str
    becomes: str
    kind: str
    step: str
    why: str


_SEND = "        if step < rank.ranks - 1:  # solution\n            rank.send(rank.right, step, k=k, v=v)  # solution\n"
_RECEIVE = (
    "        if step < rank.ranks - 1:  # solution\n            k, v = yield rank.receive(rank.left)  # solution\n"
)
_WHOSE = "whose = (rank.index - step) % rank.ranks"
_KEPT = "        outs.append(out)  # solution\n        lses.append(lse)  # solution\n"
_MERGED = "return fl.merge(outs, lses)"
_ROWS = "[*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]"
_LATE = "2 * ranks - 1 - rank"
_EARLIER = "everything, slice(0, size), False"
_LATER = "slice(size, 2 * size), everything, False"

_HOME = "own_dk, own_dv = dk_so_far + own_dk, dv_so_far + own_dv"
_SCHEDULE = CLASS_EXERCISES["14.5"].marked
_ALL = _SCHEDULE[_SCHEDULE.index("    peers =") : _SCHEDULE.index("    outs, lses")]
_OWN = '    for peer in peers:  # solution\n        rank.send(peer, "own", k=rank.k, v=rank.v)  # solution\n'
_ACROSS = '    rank.send(twin, "across", k=rank.k, v=rank.v)  # solution\n'
_TWIN = "    k, v = yield rank.receive(twin)  # solution\n"
_ON = '    for peer in peers:  # solution\n        rank.send(peer, "theirs", k=k, v=v)  # solution\n'
_ATTEND = "    parts.append(rank.attend(k, v, of=twin))  # solution\n"
_RING = """    k, v, parts = rank.k, rank.v, []
    for step in range(rank.ranks):
        if step < rank.ranks - 1:
            rank.send(rank.right, step, k=k, v=v)
        parts.append(rank.attend(k, v, of=(rank.index - step) % rank.ranks))
        if step < rank.ranks - 1:
            k, v = yield rank.receive(rank.left)
"""
_EACH = """    others = [(rank.index + i) % rank.ranks for i in range(1, rank.ranks)]
    for peer in others:
        rank.send(peer, "own", k=rank.k, v=rank.v)
    parts = [rank.attend(rank.k, rank.v, of=rank.index)]
    for peer in reversed(others):
        k, v = yield rank.receive(peer)
        parts.append(rank.attend(k, v, of=peer))
"""
_GATHER = _EACH.replace("    parts = [rank", "    got = {}\n    parts = [rank").replace(
    "        parts.append(rank.attend(k, v, of=peer))\n",
    "        got[peer] = k, v\n    for peer in others:\n        parts.append(rank.attend(*got[peer], of=peer))\n",
)
_GATHER = _GATHER.replace("    parts = [rank.attend(rank.k, rank.v, of=rank.index)]\n", "").replace(
    "    for peer in others:\n        parts",
    "    parts = [rank.attend(rank.k, rank.v, of=rank.index)]\n    for peer in others:\n        parts",
)

# fmt: off
ROWS = [
    # a ring
    ("14.1", "the-ring-turns-the-other-way", _WHOSE, "whose = (rank.index + step) % rank.ranks", "numbers", "attend", r"rank 0, its product 1: this is K of rank 3, and it is said to be rank 1's"),
    ("14.1", "all-keys-are-my-own", "of=whose", "of=rank.index", "numbers", "attend", r"this is K of rank 3, and it is said to be rank 0's"),
    ("14.1", "the-step-is-the-rank", _WHOSE, "whose = step", "numbers", "attend", r"rank 0, its product 1: this is K of rank 3, and it is said to be rank 1's"),
    ("14.1", "a-ring-of-one-too-many", _WHOSE, "whose = (rank.index - step - 1) % rank.ranks", "numbers", "attend", r"rank 0, its product 0: this is K of rank 0, and it is said to be rank 3's"),
    ("14.1", "always-sends-its-own", "step, k=k, v=v)", "step, k=rank.k, v=rank.v)", "numbers", "attend", r"its product 2: this is K of rank 3, and it is said to be rank 2's"),
    ("14.1", "k-and-v-change-places", "step, k=k, v=v)", "step, k=v, v=k)", "numbers", "send", r"what it takes for K is V of rank 3"),
    ("14.1", "only-v-travels", "rank.send(rank.right, step, k=k, v=v)  # solution", "rank.send(rank.right, step, v=v)", "crash", "attend", r"ValueError"),
    ("14.1", "k-stays-at-home", "step, k=k, v=v)", "step, k=rank.k, v=v)", "numbers", "send", r"K of rank \d meets V of rank \d"),
    ("14.1", "waits-for-the-wrong-side", "rank.receive(rank.left)", "rank.receive(rank.right)", "hang", "receive", r"waits for ever \(rank 0 for rank 1"),
    ("14.1", "sends-to-the-left", "rank.send(rank.right", "rank.send(rank.left", "hang", "receive", r"waits for ever \(rank 0 for rank 3"),
    ("14.1", "the-last-send-is-for-nobody", _SEND, "        rank.send(rank.right, step, k=k, v=v)\n", "asked", "send", r"k, v of rank 0, step 3, to rank 1: nobody receives it"),
    ("14.1", "a-hop-too-many", _SEND + "§" + _RECEIVE, "        rank.send(rank.right, step, k=k, v=v)\n§        k, v = yield rank.receive(rank.left)\n", "bytes", "send", r"rank 0 sends K and V 4 times, and 3 would do"),
    ("14.1", "computes-first", _SEND + "§" + _RECEIVE, "§        if step < rank.ranks - 1:\n            rank.send(rank.right, step, k=k, v=v)\n            k, v = yield rank.receive(rank.left)\n", "asked", "order", r"rank 0 computes product 0 before it sends the K and V of that product on"),
    ("14.1", "tells-everybody", "    for step in range(rank.ranks):  # solution\n" + _SEND + "§" + _RECEIVE, "    for other in range(rank.ranks):\n        if other != rank.index:\n            rank.send(other, 0, k=k, v=v)\n    for step in range(rank.ranks):\n§        if step < rank.ranks - 1:\n            k, v = yield rank.receive((rank.index - step - 1) % rank.ranks)\n", "asked", "send", r"rank 0 sends to rank 2: in a ring it sends to rank.right alone"),
    ("14.1", "a-step-is-left-out", "range(rank.ranks):", "range(rank.ranks - 1):", "numbers", "attend", r"rank 0 never looks at the keys of rank 1"),
    ("14.1", "the-mean-of-the-parts", _MERGED, "return sum(outs) / len(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"merges them wrongly: the result is their mean"),
    ("14.1", "the-sum-of-the-parts", _MERGED, "return sum(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"merges them wrongly: the result is their sum"),
    ("14.1", "the-last-part-is-all", _MERGED, "return out, lse", "numbers", "merge", r"the result is the last one alone"),
    ("14.1", "the-first-part-is-all", _MERGED, "return outs[0], lses[0]", "numbers", "merge", r"the result is the first one alone"),
    ("14.1", "the-lse-of-its-own-keys", _MERGED, "return fl.merge(outs, lses)[0], lses[0]", "numbers", "merge", r"out is right, and lse isn't"),
    ("14.1", "its-own-keys-twice", _KEPT, "        outs.append(out)\n        lses.append(lse)\n        if step == 0:\n            part = rank.attend(k, v, of=whose)\n            outs.append(part[0])\n            lses.append(part[1])\n", "numbers", "attend", r"rank 0 looks 2 times at the keys of rank 0"),
    ("14.1", "receives-without-yield", "yield rank.receive", "rank.receive", "crash", "receive", r"Without `yield` before it, rank.receive doesn't wait"),
    ("14.1", "returns-out-alone", _MERGED, "return fl.merge(outs, lses)[0]", "usage", "return", r"return value of my_ring, rank 0"),
    # a zigzag
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
    # the way back
    ("14.3", "sums-of-float16", "dk=dk, dv=dv)", "dk=dk.astype(k.dtype), dv=dv.astype(v.dtype))", "bytes", "round", r"sends sums in float16: half the bytes, and the error of dK is [\d.]+ times that of one GPU"),
    ("14.3", "rounded-and-widened", "dk=dk, dv=dv)", "dk=dk.astype(k.dtype).astype(np.float32), dv=dv.astype(v.dtype).astype(np.float32))", "asked", "round", r"sends sums that were rounded to float16 before"),
    ("14.3", "rounded-before-the-own-share", _HOME, "own_dk, own_dv = dk_so_far.astype(k.dtype) + own_dk.astype(k.dtype), dv_so_far.astype(k.dtype) + own_dv.astype(k.dtype)", "asked", "round", r"dK of rank 0 is rounded before all shares are in it"),
    ("14.3", "dq-in-float16", "dq = dq + dq_part", "dq = dq + dq_part.astype(k.dtype)", "asked", "dq", r"dQ of rank 0 is rounded before all shares are in it"),
    ("14.3", "dq-of-the-last-step", "dq = dq + dq_part", "dq = dq_part", "numbers", "dq", r"dQ of rank 0 lacks the share of rank \d's keys"),
    ("14.3", "dq-of-its-own-keys", "return dq, own_dk", "return rank.attend_back(rank.k, rank.v, of=rank.index)[0], own_dk", "numbers", "attend_back", r"rank 0 looks 2 times at the keys of rank 0"),
    ("14.3", "the-mean-of-dq", "return dq, own_dk", "return dq / rank.ranks, own_dk", "numbers", "dq", r"dQ of rank 0 has the share of rank \d's keys 0.13 times"),
    ("14.3", "only-the-last-share-comes-home", "dk, dv = dk_so_far + dk, dv_so_far + dv", "pass", "numbers", "add", r"dK that comes home to rank 0 lacks rank \d's share"),
    ("14.3", "only-the-first-share-comes-home", "dk, dv = dk_so_far + dk, dv_so_far + dv", "dk, dv = dk_so_far, dv_so_far", "numbers", "add", r"dK that comes home to rank 0 lacks rank \d's share"),
    ("14.3", "the-own-share-is-forgotten", _HOME, "own_dk, own_dv = dk_so_far, dv_so_far", "numbers", "home", r"dK that comes home to rank 0 lacks rank 0's share"),
    ("14.3", "the-own-share-twice", _HOME, "own_dk, own_dv = dk_so_far + 2 * own_dk, dv_so_far + 2 * own_dv", "numbers", "home", r"has rank 0's share 2 times"),
    ("14.3", "the-own-share-alone", "return dq, own_dk, own_dv", "return (dq, *rank.attend_back(rank.k, rank.v, of=rank.index)[1:])", "numbers", "attend_back", r"looks 2 times"),
    ("14.3", "what-comes-home-is-dropped", _HOME, "pass", "numbers", "add", r"dK that comes home to rank 0 lacks rank 1's share"),
    ("14.3", "gradients-of-others-keys", "return dq, own_dk, own_dv", "return dq, dk, dv", "numbers", "home", r"dK that comes home to rank 0 has rank \d's share of rank 1's keys"),
    ("14.3", "dk-and-dv-change-places", "return dq, own_dk, own_dv", "return dq, own_dv, own_dk", "numbers", "home", r"dK that comes home to rank 0 has rank 0's share of dV"),
    ("14.3", "dk-and-dv-change-places-on-the-link", "dk=dk, dv=dv)", "dk=dv, dv=dk)", "numbers", "add", r"dK that comes home to rank 0 has rank \d's share of dV"),
    ("14.3", "a-journey-from-home-to-home", "            own_dk, own_dv = dk, dv  # solution\n        else:  # solution\n            if step > 1:  # solution\n                dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution\n                dk, dv = dk_so_far + dk, dv_so_far + dv  # solution\n            rank.send(rank.right, f\"sums {step}\", dk=dk, dv=dv)§" + _HOME, "            own_dk, own_dv = dk, dv\n        else:\n            dk_so_far, dv_so_far = yield rank.receive(rank.left)\n            dk, dv = dk_so_far + dk, dv_so_far + dv\n        if rank.ranks > 1:\n            rank.send(rank.right, f\"sums {step}\", dk=dk, dv=dv)§own_dk, own_dv = dk_so_far, dv_so_far", "bytes", "send", r"rank 0 sends dK and dV 8 times, and 7 would do"),
    ("14.3", "straight-home", "                dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution\n                dk, dv = dk_so_far + dk, dv_so_far + dv  # solution\n            rank.send(rank.right, f\"sums {step}\", dk=dk, dv=dv)§        dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution\n        own", "                pass\n            rank.send((rank.index - step) % rank.ranks, f\"sums {step}\", dk=dk, dv=dv)§        dk_so_far, dv_so_far = 0, 0\n        for step in range(1, rank.ranks):\n            so_far = yield rank.receive((rank.index + step) % rank.ranks)\n            dk_so_far, dv_so_far = dk_so_far + so_far[0], dv_so_far + so_far[1]\n        own", "asked", "send", r"in a ring it sends to rank.right alone"),
    ("14.3", "dq-travels-too", "dk=dk, dv=dv)§dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution\n                dk§dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution\n        own", "dk=dk, dv=dv, dq=dq)§dk_so_far, dv_so_far, _ = yield rank.receive(rank.left)\n                dk§dk_so_far, dv_so_far, _ = yield rank.receive(rank.left)\n        own", "bytes", "send", r"rank 0 sends something of the shape of Q: dQ stays with its rows"),
    ("14.3", "the-ring-turns-the-other-way", "(rank.index - step)", "(rank.index + step)", "numbers", "attend_back", r"rank 0, its product 1: this is K of rank 7, and it is said to be rank 1's"),
    ("14.3", "all-keys-are-my-own", "of=(rank.index - step) % rank.ranks", "of=rank.index", "numbers", "attend_back", r"this is K of rank 7, and it is said to be rank 0's"),
    ("14.3", "k-and-v-go-around-once-too-often", "        if step < rank.ranks - 1:  # solution\n            rank.send(rank.right, f\"keys {step}\", k=k, v=v)§        if step < rank.ranks - 1:  # solution\n            k, v = yield", "        if rank.ranks > 1:\n            rank.send(rank.right, f\"keys {step}\", k=k, v=v)§        if rank.ranks > 1:\n            k, v = yield", "bytes", "send", r"rank 0 sends K and V 8 times, and 7 would do"),
    ("14.3", "computes-first", "        if step < rank.ranks - 1:  # solution\n            rank.send(rank.right, f\"keys {step}\", k=k, v=v)  # solution\n§        dq = dq + dq_part", "§        if step < rank.ranks - 1:\n            rank.send(rank.right, f\"keys {step}\", k=k, v=v)\n        dq = dq + dq_part", "asked", "order", r"rank 0 computes product 0 before it sends the K and V of that product on"),
    ("14.3", "keys-come-before-sums", "            if step > 1:  # solution\n                dk_so_far", "            if step > 1:\n                k, v = yield rank.receive(rank.left)\n                dk_so_far", "numbers", "receive", r"rank 0, its product 3: what it takes for K is something that no rank has"),
    ("14.3", "the-last-sums-are-for-nobody", "        dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution\n        own_dk, own_dv = dk_so_far + own_dk, dv_so_far + own_dv", "        pass", "asked", "send", r"dk, dv of rank \d, step sums 7, to rank \d: nobody receives it"),
    ("14.3", "receives-without-yield", "yield rank.receive", "rank.receive", "crash", "receive", r"Without `yield` before it"),
    ("14.3", "returns-dk-and-dv-alone", "return dq, own_dk, own_dv", "return own_dk, own_dv", "usage", "return", r"return value of my_way_back, rank 0"),
    # a striped cache
    ("14.4", "its-own-heads-alone", "np.concatenate(queries, axis=1)§out=out[:, theirs], lse=lse[:, theirs])", "queries[rank.index]§out=out, lse=lse)", "numbers", "gather", r"rank 0 looks with the queries of its own heads alone"),
    ("14.4", "queries-from-oneself-on", "queries.append((yield rank.receive(peer)))", "queries.append((yield rank.receive((rank.index + peer) % rank.ranks)))", "numbers", "gather", r"rank 1 looks with the queries of ranks 1, 2, 3, 0: heads belong in the order of the ranks"),
    ("14.4", "queries-backwards", "np.concatenate(queries, axis=1)", "np.concatenate(queries[::-1], axis=1)", "numbers", "gather", r"rank 0 looks with what isn't the queries of all heads"),
    ("14.4", "v-for-k", "rank.k, rank.v)", "rank.v, rank.k)", "numbers", "attend", r"rank 0 looks at V of rank 0 and K of rank 0"),
    ("14.4", "outputs-of-its-own-heads", "slice(peer * heads, (peer + 1) * heads)", "slice(rank.index * heads, (rank.index + 1) * heads)", "numbers", "give", r"rank 0 sends the output of the heads of rank 0 to rank 1"),
    ("14.4", "all-outputs-to-everybody", "out=out[:, theirs], lse=lse[:, theirs])§outs.append(out)§lses.append(lse)", "out=out, lse=lse)§outs.append(out[:, rank.index * heads : (rank.index + 1) * heads])§lses.append(lse[:, rank.index * heads : (rank.index + 1) * heads])", "bytes", "give", r"sends [\d.]+ times the bytes that it has to, because outputs of all heads go to everybody"),
    ("14.4", "keys-come-to-the-queries", '"queries", q=rank.q)§queries.append((yield rank.receive(peer)))', '"queries", q=rank.q, k=rank.k, v=rank.v)§queries.append((yield rank.receive(peer))[0])', "bytes", "give", r"times the bytes that it has to, because keys travel"),
    ("14.4", "lses-of-float16", "lse=lse[:, theirs])§lses.append(lse)", "lse=lse[:, theirs].astype(np.float16))§lses.append(lse.astype(np.float32))", "numbers", "give", r"sends LSEs in float16"),
    ("14.4", "outputs-of-float32", "out=out[:, theirs]§outs.append(out)", "out=out[:, theirs].astype(np.float32)§outs.append(out.astype(rank.q.dtype))", "bytes", "give", r"because outputs travel in float32 \(2 ranks"),
    ("14.4", "the-mean-of-the-parts", "return fl.merge(outs, lses)", "return sum(outs) / len(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"rank 0 merges the outputs of its heads wrongly: the result is their mean"),
    ("14.4", "the-sum-of-the-parts", "return fl.merge(outs, lses)", "return sum(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"the result is their sum"),
    ("14.4", "weighed-by-numbers-of-keys", "return fl.merge(outs, lses)", "counts = [len(range(peer, sum(rank.problem.seq_lens[:1]) if rank.problem.lengths else rank.problem.len_kv, rank.ranks)) for peer in range(rank.ranks)]\n    return np.average(outs, axis=0, weights=counts), fl.merge(outs, lses)[1]", "numbers", "merge", r"the result is weighed by numbers of keys"),
    ("14.4", "its-own-part-alone", "return fl.merge(outs, lses)", "return outs[rank.index], lses[rank.index]", "numbers", "merge", r"the result is (its own part|the first one) alone"),
    ("14.4", "without-its-own-part", "outs.append(out)§lses.append(lse)", "outs.append(out if peer != rank.index or rank.ranks == 1 else 0 * out)§lses.append(lse if peer != rank.index or rank.ranks == 1 else lse - np.inf)", "numbers", "merge", r"the result is without its own part"),
    ("14.4", "the-lse-of-its-own-keys", "return fl.merge(outs, lses)", "return fl.merge(outs, lses)[0], lses[rank.index]", "numbers", "merge", r"out is right, and lse isn't"),
    ("14.4", "a-weight-of-nothing", "return fl.merge(outs, lses)", "out, lse = 0 * outs[0], -np.inf * np.ones_like(lses[0])\n    for part, log in list(zip(outs, lses))[::-1]:\n        both = np.logaddexp(lse, log)\n        out, lse = out * np.exp(lse - both)[..., None] + part * np.exp(log - both)[..., None], both\n    return out.astype(part.dtype), lse", "numbers", "merge", r"NaN where a rank has no keys: there the LSE is -inf"),
    ("14.4", "begins-with-oneself", "out, lse = yield rank.receive(peer)", "out, lse = yield rank.receive((rank.index + peer) % rank.ranks)", "asked", "order", r"out of head \d has other bits on rank 0 than on rank 1"),
    ("14.4", "its-own-part-last", "return fl.merge(outs, lses)", "outs.append(outs.pop(rank.index))\n    lses.append(lses.pop(rank.index))\n    return fl.merge(outs, lses)", "asked", "order", r"has other bits on rank"),
    ("14.4", "queries-to-the-right-only", '    for peer in range(rank.ranks):  # solution\n        rank.send(peer, "queries"', '    for peer in {rank.index, rank.right}:\n        rank.send(peer, "queries"', "hang", "receive", r"waits for ever"),
    ("14.4", "sends-twice", 'rank.send(peer, "outputs", out=out[:, theirs], lse=lse[:, theirs])', 'rank.send(peer, "outputs", out=out[:, theirs], lse=lse[:, theirs])\n        rank.send(peer, "again", lse=lse[:, theirs])', "asked", "send", r"lse of rank 0, step again, to rank \d: nobody receives it"),
    ("14.4", "receives-without-yield", "out, lse = yield rank.receive(peer)", "out, lse = rank.receive(peer)", "crash", "receive", r"in line \d+: out, lse = rank.receive\(peer\).*Without `yield`"),
    ("14.4", "returns-out-alone", "return fl.merge(outs, lses)", "return fl.merge(outs, lses)[0]", "usage", "return", r"return value of my_decoding, rank 0"),
    # two hosts
    ("14.5", "a-plain-ring", _ALL, _RING, "asked", "waits", r"22 ms, .* The longest wait: .* for step \d of rank [37]\. .* and took 3 ms"),
    ("14.5", "across-first", _OWN + _ACROSS, _ACROSS + _OWN, "asked", "waits", r"for step own of rank \d\. That left at 3(\.5)? ms, behind one to rank \d, and took 0.5 ms"),
    ("14.5", "everybody-to-everybody", _ALL, _EACH, "asked", "waits", r"sends 4 messages over the network"),
    ("14.5", "all-of-them-first", _ALL, _GATHER, "asked", "waits", r"29 ms, .* with 0 of 8 products done"),
    ("14.5", "across-in-the-end", _ACROSS + "§" + _TWIN, "§" + _ACROSS + _TWIN, "asked", "waits", r"for step across of rank \d\. That left at \d ms, and took 3 ms"),
    ("14.5", "computes-before-it-hands-on", _ON + _ATTEND, _ATTEND + _ON, "asked", "waits", r"^9 ms.* for step theirs of rank \d\. That left at 5.5 ms"),
    ("14.5", "sends-its-own-again", '"theirs", k=k, v=v)', '"theirs", k=rank.k, v=rank.v)', "numbers", "attend", r"rank 0, its product 5: this is K of rank \d, and it is said to be rank \d's"),
    ("14.5", "the-sender-s-keys", "of=(peer + half) % rank.ranks", "of=peer", "numbers", "attend", r"this is K of rank \d, and it is said to be rank \d's"),
    ("14.5", "the-twin-s-keys-are-its-own", "of=twin", "of=rank.index", "numbers", "attend", r"rank 0, its product 4: this is K of rank 4, and it is said to be rank 0's"),
    ("14.5", "the-other-host-is-left-out", "        parts.append(rank.attend(k, v, of=(peer + half) % rank.ranks))", "        pass", "numbers", "attend", r"rank 0 never looks at the keys of rank 5"),
    ("14.5", "the-mean-of-the-parts", "return fl.merge(outs, lses)", "return sum(outs) / len(outs), fl.merge(outs, lses)[1]", "numbers", "merge", r"the result is their mean"),
    ("14.5", "the-last-message-is-for-nobody", '        rank.send(peer, "theirs", k=k, v=v)', '        rank.send(peer, "theirs", k=k, v=v)\n        rank.send(peer, "again", k=k, v=v)', "asked", "send", r"nobody receives it"),
    ("14.5", "waits-for-a-rank-over-there", "k, v = yield rank.receive(twin)", "k, v = yield rank.receive((twin + 1) % rank.ranks)", "hang", "receive", r"waits for ever"),
    ("14.5", "returns-out-alone", "return fl.merge(outs, lses)", "return fl.merge(outs, lses)[0]", "usage", "return", r"return value of my_schedule, rank 0"),
]
# fmt: on
"""A § in a text parts two places, each of which changes."""
MISCONCEPTIONS = [Misconception(*row) for row in ROWS]
