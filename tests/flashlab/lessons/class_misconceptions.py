# ruff: noqa: E501  (a table)
"""What learners get wrong where the answer is a class: each solution with one thought in it changed, and what the check has to say.

A row is an exercise, a name, what the line was, what it becomes, the kind of verdict, the verb that the mistake is in, and the reason
that the message has to name. All were written before the checks were tuned.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import flashlab.lessons


class Misconception(NamedTuple):
    exercise: str
    name: str
    was: str
    becomes: str
    kind: str
    at: str
    why: str
    serving: tuple[str, ...] = ()
    """The seeded bugs of the library's manager that are this mistake."""


_COUNTS_MORE = "            self.refs[block] += 1  # solution\n"
_FREES = (
    "            if self.refs[block] == 0:  # solution\n                self.free_blocks.append(block)  # solution\n"
)

_CACHE = (Path(flashlab.lessons.__file__).parent / "solutions" / "13_5.py").read_text(encoding="utf-8")
_BOTH_LOOPS = _CACHE[
    _CACHE.index("for i in range(len(") : _CACHE.index(":  # solution", _CACHE.index("for i in range((len("))
]
"""From the loop of `enter` to that of `find`."""

_ROWS = [
    ("13.2", "frees-what-others-have", _FREES, "            self.free_blocks.append(block)\n", "history", "free", r"block \d+ is free, and \w has it", ("a block is freed that others own", "evictable twice: a hit stays on the free list")),
    ("13.2", "a-fork-isn-t-counted", _COUNTS_MORE, "            pass\n", "history", "fork", r"refs\[\d+\] is 1, and 2 tables have block \d+ \(a and b\)", ("a fork isn't counted",)),
    ("13.2", "freed-twice-in-silence", "table = self.tables.pop(request)  # solution\n        del self.lengths[request]", "table = self.tables.pop(request, [])\n        self.lengths.pop(request, None)", "history", "free", r"there is no request 'a': a KeyError belongs here", ("freed twice",)),
    ("13.2", "the-parent-s-own-list", "shared = self.tables[parent][: self.lengths[parent] // self.block_size]", "shared = self.tables[parent]", "history", "fork", r"one and the same list", ("a fork has the parent's own table",)),
    ("13.2", "shares-a-block-that-isn-t-full", "self.lengths[parent] // self.block_size]", "-(-self.lengths[parent] // self.block_size)]", "history", "fork", r"it returns \d+, and \d+ tokens of a are in full blocks", ("a part of a block can be found",)),
    ("13.2", "a-block-too-many", "-(-length // self.block_size) - len(table)", "length // self.block_size + 1 - len(table)", "history", "allocate_slots", r"a has 2 blocks for 1 token: 1 would do", ("a block too many",)),
    ("13.2", "a-block-too-few", "-(-length // self.block_size) - len(table)", "length // self.block_size - len(table)", "history", "allocate_slots", r"a has 0 blocks for 1 token: 1 would do"),
    ("13.2", "forgets-the-room-in-the-last-block", "more = -(-length // self.block_size) - len(table)", "more = -(-n // self.block_size)", "history", "allocate_slots", r"a has 2 blocks for 2 tokens: 1 would do"),
    ("13.2", "takes-what-there-is", "        if more > len(self.free_blocks):  # solution\n            return False  # solution\n        new = [self.free_blocks.pop() for _ in range(more)]  # solution\n", "        new = []\n        for _ in range(more):\n            if not self.free_blocks:\n                return False\n            new.append(self.free_blocks.pop())\n", "history", "allocate_slots", r"there is no room, and yet free_blocks has changed, from .* to .*", ("hits are kept though there is no room", "a failed launch leaks its blocks")),
    ("13.2", "the-last-block-is-never-given", "if more > len(self.free_blocks)", "if more >= len(self.free_blocks)", "history", "allocate_slots", r"it returns False, and there are enough blocks"),
    ("13.2", "nobody-asks-for-room", "        if more > len(self.free_blocks):  # solution\n            return False  # solution\n", "", "crash", "allocate_slots", r"it raises IndexError: pop from empty list"),
    ("13.2", "new-blocks-aren-t-counted", "            self.refs[block] = 1  # solution\n", "            pass\n", "history", "allocate_slots", r"refs\[\d+\] is 0, and 1 table has block \d+ \(a\)"),
    ("13.2", "a-block-stays-free", "[self.free_blocks.pop() for _ in range(more)]", "self.free_blocks[:more]", "history", "allocate_slots", r"block \d+ is free, and a has it", ("evictable twice: a hit stays on the free list",)),
    ("13.2", "counts-all-blocks-again", "for block in new:  # solution\n            self.refs[block] = 1", "for block in table + new:\n            self.refs[block] += 1", "history", "allocate_slots", r"refs\[\d+\] is 2, and 1 table has block \d+"),
    ("13.2", "the-length-of-this-call", "table + new, length  # solution", "table + new, n", "history", "allocate_slots", r"lengths\['a'\] is 1, and a has 2 tokens"),
    ("13.2", "the-new-blocks-alone", "table + new, length", "new, length", "history", "allocate_slots", r"a has \d blocks? for \d tokens"),
    ("13.2", "a-child-that-isn-t-new", " or child in self.tables", "", "history", "fork", r"there is a request '\w' already: a KeyError belongs here"),
    ("13.2", "counts-before-it-refuses", "        if parent not in self.tables or child in self.tables:  # solution\n            raise KeyError(f\"{parent}, {child}\")  # solution\n        shared = self.tables[parent][: self.lengths[parent] // self.block_size]  # solution\n        for block in shared:  # solution\n            self.refs[block] += 1  # solution\n", "        shared = self.tables[parent][: self.lengths[parent] // self.block_size]\n        for block in shared:\n            self.refs[block] += 1\n        if child in self.tables:\n            raise KeyError(child)\n", "history", "fork", r"it is refused, and yet refs has changed"),
    ("13.2", "two-is-all-there-is", "            self.refs[block] += 1  # solution\n", "            self.refs[block] = 2\n", "history", "fork", r"refs\[\d+\] is 2, and 3 tables have block \d+"),
    ("13.2", "the-child-s-length-is-the-parent-s", "len(shared) * self.block_size  # solution", "self.lengths[parent]  # solution", "history", "fork", r"it returns \d+, and \d+ tokens of a are in full blocks"),
    ("13.2", "a-child-with-blocks-of-its-own", "        for block in shared:  # solution\n            self.refs[block] += 1  # solution\n        self.tables[child]", "        shared = [self.free_blocks.pop() for _ in shared]\n        for block in shared:\n            self.refs[block] = 1\n        self.tables[child]", "history", "fork", r"token 0 of b isn't in block \d+"),
    ("13.2", "nothing-is-ever-free-again", _FREES, "", "history", "free", r"block \d+ is lost: no table has it"),
    ("13.2", "only-the-last-block", "for block in table:  # solution\n            self.refs[block] -= 1", "for block in table[-1:]:\n            self.refs[block] -= 1", "history", "free", r"refs\[\d+\] is 1, and 0 tables have block \d+", ("a copied block stays in the table's count",)),
    ("13.2", "counts-nothing-down", "            self.refs[block] -= 1  # solution\n            if self.refs[block] == 0:  # solution\n", "            if self.refs[block] == 1:\n                self.refs[block] = 0\n", "history", "free", r"refs\[\d+\] is 2, and 1 table has block \d+"),
    ("13.2", "one-owner-is-none", "if self.refs[block] == 0", "if self.refs[block] <= 1", "history", "free", r"block \d+ is free, and \w has it", ("a block is freed that others own",)),
    ("13.2", "the-length-outlives-the-request", "        del self.lengths[request]  # solution\n", "", "history", "free", r"a is over, and lengths still has it", ("a request freed in flight is never released",)),
    ("13.2", "the-table-outlives-the-request", "self.tables.pop(request)", "self.tables[request]", "history", "free", r"a is over, and tables still has it"),
    ("13.2", "starts-with-block-one", "[self.free_blocks.pop() for _ in range(more)]", "[self.free_blocks.pop() + 1 for _ in range(more)]", "crash", "allocate_slots", r"it raises IndexError: list assignment index out of range", ("the null block is free", "the null block is freed with a table")),
    ("13.3", "a-shared-block-is-written", "length % self.block_size > 0 and self.refs[table[-1]] > 1", "False", "history", "allocate_slots", r"\w writes token 1 into block \d+, and \w has it, too", ("a shared block is written",)),
    ("13.3", "copies-what-nobody-shares", "length % self.block_size > 0 and self.refs[table[-1]] > 1", "length % self.block_size > 0", "history", "allocate_slots", r"block \d+ is lost: no table has it"),
    ("13.3", "copies-a-block-that-is-full", "length % self.block_size > 0 and self.refs[table[-1]] > 1", "len(table) > 0 and self.refs[table[-1]] > 1", "bytes", "allocate_slots", r"it copies 1 block, and none would do"),
    ("13.3", "copies-the-whole-table", "            self.refs[table[-1]] -= 1  # solution\n            copies = [(table[-1], new[0])]  # solution\n            table = table[:-1]  # solution\n", "            more = len(table) - 1\n            if more > len(self.free_blocks):\n                self.free_blocks += new\n                for block in new:\n                    self.refs[block] = 0\n                return None\n            own = [self.free_blocks.pop() for _ in range(more)] + new[:1]\n            for old, block in zip(table, own):\n                self.refs[old] -= 1\n                self.refs[block] = 1\n                if self.refs[old] == 0:\n                    self.free_blocks.append(old)\n            copies, table, new = list(zip(table, own)), own, new[1:]\n", "bytes", "allocate_slots", r"it copies 2 blocks, and 1 would do"),
    ("13.3", "a-copy-is-never-told", "            copies = [(table[-1], new[0])]  # solution\n", "", "history", "allocate_slots", r"token 0 of \w isn't in block \d+, where \w's table has it", ("a copy is never told", "a failed launch's copy is forgotten")),
    ("13.3", "a-copy-is-told-twice", "copies = [(table[-1], new[0])]", "copies = [(table[-1], new[0])] * 2", "bytes", "allocate_slots", r"it copies 2 blocks, and 1 would do", ("a copy is told twice", "a copy outlives its request")),
    ("13.3", "from-the-copy-to-the-shared", "(table[-1], new[0])", "(new[0], table[-1])", "history", "allocate_slots", r"token 0 of \w isn't in block \d+"),
    ("13.3", "the-source-stays-counted", "            self.refs[table[-1]] -= 1  # solution\n", "", "history", "allocate_slots", r"refs\[\d+\] is 2, and 1 table has block \d+", ("a copied block stays in the table's count",)),
    ("13.3", "the-source-is-free-at-once", "            self.refs[table[-1]] -= 1  # solution\n", "            self.refs[table[-1]] -= 1\n            self.free_blocks.append(table[-1])\n", "history", "allocate_slots", r"block \d+ is free, and \w has it", ("what is copied from isn't kept",)),
    ("13.3", "the-table-keeps-the-shared-block", "            table = table[:-1]  # solution\n", "", "history", "allocate_slots", r"\w has 2 blocks for 2 tokens: 1 would do"),
    ("13.3", "a-copy-needs-no-room", "- len(table) + shared  # solution\n        if more > len(self.free_blocks)", "- len(table) + shared\n        if more - shared > len(self.free_blocks)", "crash", "allocate_slots", r"it raises IndexError: pop from empty list", ("a copy needs no room",)),
    ("13.3", "no-block-for-the-copy", "- len(table) + shared", "- len(table)", "crash", "allocate_slots", r"it raises IndexError: list index out of range"),
    ("13.3", "copies-the-first-block", "copies = [(table[-1], new[0])]", "copies = [(table[0], new[0])]", "history", "allocate_slots", r"token \d of \w isn't in block \d+"),
    ("13.3", "counts-only-two", "self.refs[table[-1]] > 1", "self.refs[table[-1]] == 2", "history", "allocate_slots", r"\w writes token 1 into block \d+, and \w and \w ha\w+ it, too"),
    ("13.3", "a-fork-copies-at-once", "        for block in self.tables[parent]:  # solution\n            self.refs[block] += 1  # solution\n        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]  # solution\n", "        full = self.tables[parent][: self.lengths[parent] // self.block_size]\n        for block in full:\n            self.refs[block] += 1\n        rest = [self.free_blocks.pop() for _ in self.tables[parent][len(full) :]]\n        for block in rest:\n            self.refs[block] = 1\n        self.tables[child], self.lengths[child] = full + rest, self.lengths[parent]\n", "history", "fork", r"token 0 of b isn't in block \d+"),
    ("13.3", "a-fork-isn-t-counted", "        for block in self.tables[parent]:  # solution\n            self.refs[block] += 1  # solution\n", "", "history", "fork", r"refs\[\d+\] is 1, and 2 tables have block \d+ \(a and b\)", ("a fork isn't counted",)),
    ("13.3", "the-parent-s-own-list", "list(self.tables[parent])", "self.tables[parent]", "history", "fork", r"a and b have one and the same list", ("a fork has the parent's own table",)),
    ("13.3", "full-blocks-only", "list(self.tables[parent]), self.lengths[parent]", "self.tables[parent][: self.lengths[parent] // self.block_size], self.lengths[parent]", "history", "fork", r"b has 0 blocks for 1 token: 1 would do"),
    ("13.3", "the-child-begins-with-nothing", "list(self.tables[parent]), self.lengths[parent]", "list(self.tables[parent]), 0", "history", "fork", r"lengths\['b'\] is 0, and b has 1 token"),
    ("13.3", "the-count-goes-down-and-none-is-free", "  # solution\n            return None", "\n            if shared:\n                self.refs[table[-1]] -= 1\n            return None", "history", "allocate_slots", r"there is no room, and yet refs has changed"),
    ("13.3", "true-in-place-of-copies", "return copies", "return True", "history", "allocate_slots", r"it returns True, and a list of pairs \(from, to\) belongs here"),
    ("13.5", "equal-digests-are-trusted", "if held != tuple(tokens[:end])", "if held is None", "history", "find", r"it finds block \d+, which holds the end of .*: somebody else's prompt", ("equal digests are taken for equal tokens",)),
    ("13.5", "its-own-tokens-alone-are-compared", "if held != tuple(tokens[:end])", "if held is None or held[-self.block_size :] != tuple(tokens[end - self.block_size : end])", "history", "find", r"it finds block \d+, which holds the end of .*: somebody else's prompt", ("requests of other adapters share",)),
    ("13.5", "what-comes-before-is-left-out", "parent = self.digest(parent, tuple(tokens[end - self.block_size : end]))  # solution\n            block, held = self.entries.get(parent, (None, None))  # solution\n            if held != tuple(tokens[:end])", "parent = self.digest(None, tuple(tokens[end - self.block_size : end]))\n            block, held = self.entries.get(parent, (None, None))\n            if held is None", "history", "find", r"it finds block \d+, which holds the end of .*: somebody else's prompt", ("the digest leaves out what comes before",)),
    ("13.5", "a-hit-of-the-whole-prompt", "range((len(tokens) - 1) // self.block_size)", "range(len(tokens) // self.block_size)", "history", "find", r"it finds \d+ tokens of \d+: the last one has to be computed", ("a hit of the whole prompt",)),
    ("13.5", "a-block-that-isn-t-full", _BOTH_LOOPS, _BOTH_LOOPS.replace("(len(tokens) // self.block_size)", "(-(-len(tokens) // self.block_size))").replace("((len(tokens) - 1) // self.block_size)", "(-(-len(tokens) // self.block_size))"), "history", "find", r"it finds block \d+, which nobody may find: it was given away, or isn't full"),
    ("13.5", "nothing-is-forgotten", "self.entries = {digest: entry for digest, entry in self.entries.items() if entry[0] != block}  # solution", "pass", "history", "find", r"it finds block \d+, which nobody may find: it was given away", ("a phantom hit after everything was evicted", "an evicted block keeps what it held")),
    ("13.5", "forgets-everything", "{digest: entry for digest, entry in self.entries.items() if entry[0] != block}", "{}", "history", "find", r"it returns \[\], and \[\d+.*\] are there"),
    ("13.5", "goes-on-behind-a-gap", "                break  # solution", "                continue", "history", "find", r"which holds the end of .*: somebody else's prompt|it returns .*, and .* are there"),
    ("13.5", "the-last-one-stays", "            if parent not in self.entries:  # solution\n                self.entries[parent] = table[i], tuple(tokens[:end])", "            self.entries[parent] = table[i], tuple(tokens[:end])", "history", "find", r"it returns \[\d+.*\], and \[\d+.*\] are there"),
    ("13.5", "the-first-block-alone", "            found.append(block)  # solution", "            found.append(block)\n            break", "history", "find", r"it returns \[\d+\], and \[\d+, \d+.*\] are there"),
    ("13.5", "a-list-for-a-digest", "parent = self.digest(parent, tuple(tokens[end - self.block_size : end]))  # solution\n            if parent", "parent = self.digest(parent, tokens[end - self.block_size : end])\n            if parent", "crash", "enter", r"it raises TypeError: unhashable type: 'list'"),
    ("13.5", "nothing-is-ever-entered", "                self.entries[parent] = table[i], tuple(tokens[:end])  # solution", "                pass", "history", "find", r"it returns \[\], and \[\d+.*\] are there", ("nothing is ever found",)),
    ("13.5", "tokens-are-counted-and-not-blocks", "            found.append(block)  # solution\n        return found", "            found.append(block)  # solution\n        return len(found) * self.block_size", "history", "find", r"it returns \d+, and a list of blocks belongs here"),
    ("13.6", "the-shortest-first", "return late + sorted(others, key=lambda x: x.prompt)", "return sorted(waiting, key=lambda x: x.prompt)", "starved", "choose", r"r\d+ waits \d+ steps in a row, and nobody may wait more than \d+"),
    ("13.6", "the-latest-first", "return late + sorted(others, key=lambda x: x.prompt)", "return list(reversed(waiting))", "starved", "choose", r"r\d+ waits \d+ steps in a row"),
    ("13.6", "the-longest-first", "return late + sorted(others, key=lambda x: x.prompt)", "return sorted(waiting, key=lambda x: -x.prompt)", "starved", "choose", r"r\d+ waits \d+ steps in a row"),
    ("13.6", "sorts-in-place", "return late + sorted(others, key=lambda x: x.prompt)", "waiting.sort(key=lambda x: x.prompt)\n        return waiting", "crash", "choose", r"it raises AttributeError: 'tuple' object has no attribute 'sort'"),
    ("13.6", "names-in-place-of-requests", "return late + sorted(others, key=lambda x: x.prompt)", "return [x.name for x in waiting]", "history", "choose", r"it returns 'r0', which is none of the requests in `waiting`"),
    ("13.6", "one-of-them-alone", "return late + sorted(others, key=lambda x: x.prompt)", "return min(waiting, key=lambda x: x.prompt, default=waiting)", "history", "choose", r"a list of requests that wait belongs here"),
    ("13.6", "nobody-at-all", "return late + sorted(others, key=lambda x: x.prompt)", "return [x for x in waiting if x.waited > 10**6]", "history", "choose", r"step \d+: nobody runs, \d+ wait, and nobody is let in: that stays so for ever"),
    ("13.6", "room-for-the-longest", "return late + sorted(others, key=lambda x: x.prompt)", "return [x for x in waiting if free_tokens >= 4096 + x.prompt]", "history", "choose", r"nobody runs, \d+ wait, and nobody is let in"),
    ("13.6", "the-first-one-twice", "return late + sorted(others, key=lambda x: x.prompt)", "return [*waiting[:1], *waiting]", "history", "choose", r"it returns r0 twice"),
    ("13.6", "an-empty-queue", "return late + sorted(others, key=lambda x: x.prompt)", "return [min(waiting, key=lambda x: x.prompt)]", "crash", "choose", r"it raises ValueError: min\(\)"),
    ("15.1", "the-root-of-576", "np.sqrt(128 + 64)", "np.sqrt(x.shape[-1])", "numbers", "attend", r"divided by √576"),
    ("15.1", "a-of-the-first-head", "q[..., :128] @ a,", "q[..., :128] @ a[0],", "numbers", "query", r"absorbs A of head 0"),
    ("15.1", "a-of-all-heads-added", "q[..., :128] @ a,", "q[..., :128] @ a.sum(0),", "numbers", "query", r"A of the heads are added up"),
    ("15.1", "position-left-out", "return np.concatenate([c, r], axis=-1)", "return c", "numbers", "query", r"the 64 numbers with the position are missing"),
    ("15.1", "position-in-front", "np.concatenate([c, r], axis=-1)", "np.concatenate([r, c], axis=-1)", "numbers", "query", r"with the position stand in front"),
    ("15.1", "position-is-zero", "np.concatenate([c, r], axis=-1)", "np.concatenate([c, np.zeros_like(r)], axis=-1)", "numbers", "query", r"with the position are 0"),
    ("15.1", "position-taken-from-the-front", "q[..., :128] @ a, q[..., 128:]", "q[..., 64:] @ a, q[..., :64]", "numbers", "query", r"they are the last 64"),
    ("15.1", "scaled-twice", "np.concatenate([c, r], axis=-1)", "np.concatenate([c, r], axis=-1) / np.sqrt(192)", "numbers", "query", r"the query is scaled here"),
    ("15.1", "a-the-wrong-way-round", "q[..., :128] @ a,", "q[..., :128] @ a.swapaxes(-1, -2),", "crash", "query", r"it raises ValueError: matmul"),
    ("15.1", "the-root-of-128", "np.sqrt(128 + 64)", "np.sqrt(128)", "numbers", "attend", r"divided by √128"),
    ("15.1", "no-scale", " / np.sqrt(128 + 64)", "", "numbers", "attend", r"the scores aren't scaled"),
    ("15.1", "values-are-whole-rows", "@ rows[:, :512]", "@ rows", "numbers", "attend", r"the values are whole rows"),
    ("15.1", "values-are-the-last-numbers", "rows[:, :512]", "rows[:, 64:]", "numbers", "attend", r"the values are the last 512"),
    ("15.1", "scores-without-position", "x @ rows.T", "x[..., :512] @ rows[:, :512].T", "numbers", "attend", r"the scores have c alone"),
    ("15.1", "no-maximum", " - s.max(-1, keepdims=True)", "", "numbers", "attend", r"NaN: e to a large number overflows"),
    ("15.1", "the-largest-of-all", " - s.max(-1, keepdims=True)", " - s.max()", "numbers", "attend", r"NaN"),
    ("15.1", "weights-not-divided", "(p / p.sum(-1, keepdims=True))", "p", "numbers", "attend", r"aren't divided by their sum"),
    ("15.1", "softmax-over-queries", "p.sum(-1, keepdims=True)", "p.sum(-2, keepdims=True)", "numbers", "attend", r"the softmax goes over queries"),
    ("15.1", "b-of-the-first-head", "o @ b.swapaxes(-1, -2)", "o @ b[0].T", "numbers", "output", r"each head gets B of head 0"),
    ("15.1", "b-isn-t-applied", "return o @ b.swapaxes(-1, -2)", "return o", "numbers", "output", r"B isn't applied"),
    ("15.1", "heads-added-up", "return o @ b.swapaxes(-1, -2)", "return (o @ b.swapaxes(-1, -2)).sum(0)", "numbers", "output", r"the heads are added up"),
    ("15.1", "b-as-it-is", "o @ b.swapaxes(-1, -2)", "o @ b", "crash", "output", r"it raises ValueError: matmul"),
    ("15.1", "in-float32", "return o @ b.swapaxes(-1, -2)", "return (o.astype(np.float32) @ b.swapaxes(-1, -2).astype(np.float32)).astype(float)", "numbers", "output", r"that is float32"),
    ("15.3", "by-the-queries-alone", "if seconds(self.absorbed) <= seconds(self.unfolded) else", "if queries <= 170 else", "asked", "choose", r"goes by the number of queries"),
    ("15.3", "a-row-for-each-head", "nbytes = 2 * keys * 576  # solution\n        flops = 2 * heads * queries", "nbytes = 2 * keys * heads * 576\n        flops = 2 * heads * queries", "numbers", "absorbed", r"all heads share it"),
    ("15.3", "a-row-for-each-query", "nbytes = 2 * keys * 576  # solution\n        flops = 2 * heads * queries", "nbytes = 2 * keys * queries * 576\n        flops = 2 * heads * queries", "numbers", "absorbed", r"all queries share it"),
    ("15.3", "v-read-once-more", "nbytes = 2 * keys * 576  # solution\n        flops = 2 * heads * queries", "nbytes = 2 * keys * (576 + 512)\n        flops = 2 * heads * queries", "numbers", "absorbed", r"V is read once more"),
    ("15.3", "elements-for-bytes", "nbytes = 2 * keys * 576  # solution\n        flops = 2 * heads * queries", "nbytes = keys * 576\n        flops = 2 * heads * queries", "numbers", "absorbed", r"these are elements"),
    ("15.3", "rows-without-position", "nbytes = 2 * keys * 576  # solution\n        flops = 2 * heads * queries", "nbytes = 2 * keys * 512\n        flops = 2 * heads * queries", "numbers", "absorbed", r"in the row, too"),
    ("15.3", "absorbing-is-free", " + 2 * 128 * 512)", ")", "numbers", "absorbed", r"queries absorb A, and outputs get B"),
    ("15.3", "b-is-free", " + 2 * 128 * 512)", " + 128 * 512)", "numbers", "absorbed", r"one is missing"),
    ("15.3", "a-multiply-add-is-one", "flops = 2 * heads * queries * (keys * (576", "flops = heads * queries * (keys * (576", "numbers", "absorbed", r"a multiply-add is two"),
    ("15.3", "matrices-for-each-key", "(keys * (576 + 512) + 2 * 128 * 512)", "keys * (576 + 512) + 2 * heads * keys * 2 * 128 * 512", "numbers", "absorbed", r"applied to queries, not to keys"),
    ("15.3", "values-of-576", "keys * (576 + 512)", "keys * (576 + 576)", "numbers", "absorbed", r"a value takes 512"),
    ("15.3", "written-and-never-read", "2 * keys * 576 + 2 * made", "2 * keys * 576 + made", "numbers", "unfolded", r"is written, and then read"),
    ("15.3", "rows-aren-t-read", "2 * keys * 576 + 2 * made", "2 * made", "numbers", "unfolded", r"to unfold rows, they are read"),
    ("15.3", "keys-without-position", "made = 2 * keys * heads * (192 + 128)", "made = 2 * keys * heads * (128 + 128)", "numbers", "unfolded", r"a key has the 64 numbers"),
    ("15.3", "one-head-is-unfolded", "made = 2 * keys * heads * (192", "made = 2 * keys * (192", "numbers", "unfolded", r"keys and values of its own"),
    ("15.3", "unfolding-is-free", "(keys * 2 * 128 * 512 + queries * keys * (192 + 128))", "(queries * keys * (192 + 128))", "numbers", "unfolded", r"have to be made"),
    ("15.3", "keys-alone-are-made", "(keys * 2 * 128 * 512 +", "(keys * 128 * 512 +", "numbers", "unfolded", r"keys are made, and values are, too"),
    ("15.3", "made-for-each-query", "(keys * 2 * 128 * 512 +", "(queries * keys * 2 * 128 * 512 +", "numbers", "unfolded", r"are made once for all queries"),
    ("15.3", "bytes-alone", "return max(nbytes / bandwidth, flops / rate)", "return nbytes / bandwidth", "asked", "choose", r"as if bytes alone counted"),
    ("15.3", "flops-alone", "return max(nbytes / bandwidth, flops / rate)", "return flops / rate", "asked", "choose", r"it looks at FLOPs alone"),
    ("15.3", "both-times-added", "return max(nbytes / bandwidth, flops / rate)", "return nbytes / bandwidth + flops / rate", "asked", "choose", r"it adds up both times"),
    ("15.3", "the-faster-of-both", "return max(nbytes", "return min(nbytes", "asked", "choose", r"always the absorbed form"),
    ("15.3", "bytes-beside-flops", "return max(nbytes / bandwidth, flops / rate)", "return max(nbytes, flops)", "asked", "choose", r"FLOPs alone"),
    ("15.3", "the-slower-form", "\"absorbed\" if seconds(self.absorbed) <= seconds(self.unfolded)", "\"absorbed\" if seconds(self.absorbed) > seconds(self.unfolded)", "asked", "choose", r"takes the form that is slower"),
    ("15.3", "one-query-or-many", "if seconds(self.absorbed) <= seconds(self.unfolded) else", "if queries == 1 else", "asked", "choose", r"asks whether there is one query"),
    ("15.3", "always-absorbed", "if seconds(self.absorbed) <= seconds(self.unfolded) else", "if True else", "asked", "choose", r"always the absorbed"),
    ("15.3", "rates-exchanged", "max(nbytes / bandwidth, flops / rate)", "max(nbytes / rate, flops / bandwidth)", "asked", "choose", r"FLOPs alone"),
    ("15.3", "always-unfolded", "return \"absorbed\" if seconds(self.absorbed) <= seconds(self.unfolded) else", "return", "asked", "choose", r"always the unfolded"),
    ("15.3", "another-word", "return \"absorbed\" if", "return \"mla\" if", "usage", "choose", r"returns 'mla', and \"absorbed\""),
    ("15.4", "v-s-scales-behind-the-sum", "(p * of_v.T) @ v", "p @ v * of_v.mean()", "numbers", "attend", r"come after the sum"),
    ("15.4", "one-scale-for-all", "np.abs(x).max(axis=-1, keepdims=True)", "np.abs(x).max() + 0 * x[:, :1]", "numbers", "store", r"one scale is made for all tokens"),
    ("15.4", "a-scale-for-each-channel", "np.abs(x).max(axis=-1, keepdims=True)", "np.abs(x).max(axis=0, keepdims=True)", "numbers", "store", r"the scales of K are \(1, 64\), and \(100, 1\) belongs here: each token has one"),
    ("15.4", "the-sign-counts", "np.abs(x).max(axis=-1", "x.max(axis=-1", "numbers", "store", r"looked for with its sign"),
    ("15.4", "becomes-128", "/ 127)", "/ 128)", "numbers", "store", r"becomes 128, and int8 ends at 127"),
    ("15.4", "becomes-255", "/ 127)", "/ 255)", "numbers", "store", r"becomes 255"),
    ("15.4", "cut-off", "np.rint(x / scales)", "(x / scales)", "numbers", "store", r"cut off, towards 0"),
    ("15.4", "rounded-down", "np.rint(x / scales)", "np.floor(x / scales)", "numbers", "store", r"rounded down"),
    ("15.4", "zeros-divide", "np.where(top > 0, top, 1.0)", "top", "numbers", "store", r"a token of zeros may have any"),
    ("15.4", "scales-of-64-bits", ".astype(np.float32)", "", "bytes", "store", r"the scales of K are float64, of 8 bytes each"),
    ("15.4", "codes-of-32-bits", ".astype(np.int8)", ".astype(np.int32)", "bytes", "store", r"the codes of K are int32, of 4 bytes each"),
    ("15.4", "one-over-the-scale", "(np.where(top > 0, top, 1.0) / 127).astype(np.float32)  # solution\n        return np.rint(x / scales)", "(127 / np.where(top > 0, top, 1.0)).astype(np.float32)\n        return np.rint(x * scales)", "numbers", "store", r"one over what it should be"),
    ("15.4", "the-mean-for-the-largest", "np.abs(x).max(axis=-1", "np.abs(x).mean(axis=-1", "numbers", "store", r"made of the mean size"),
    ("15.4", "scores-without-scales", " * of_k.T / np.sqrt", " / np.sqrt", "numbers", "attend", r"the scores lack the scales of K"),
    ("15.4", "output-without-scales", "(p * of_v.T) @ v", "p @ v", "numbers", "attend", r"the output lacks the scales of V"),
    ("15.4", "v-s-scales-on-scores", "of_k.T / np.sqrt", "of_v.T / np.sqrt", "numbers", "attend", r"the scores have the scales of V"),
    ("15.4", "k-s-scales-on-weights", "(p * of_v.T) @ v", "(p * of_k.T) @ v", "numbers", "attend", r"the weights have the scales of K"),
    ("15.4", "divided-by-k-s-scales", "(q @ k.T) * of_k.T /", "(q @ k.T) / of_k.T /", "numbers", "attend", r"divided by K's scales"),
    ("15.4", "no-root-of-d", " / np.sqrt(q.shape[-1])", "", "numbers", "attend", r"aren't divided by √d"),
    ("15.4", "unfolds-k", "(q @ k.T) * of_k.T", "(q @ (k * of_k).T)", "asked", "attend", r"it multiplies 6,400 codes one by one, which unfolds the cache"),
    ("15.4", "unfolds-v", "(p * of_v.T) @ v", "p @ (v * of_v)", "asked", "attend", r"which unfolds the cache"),
    ("15.4", "products-of-8-bits", "(q @ k.T)", "(q.astype(np.int8) @ k.T)", "numbers", "attend", r"should be"),
    ("15.4", "k-and-v-exchanged", "for out in (of_k, of_v))", "for out in (of_v, of_k))", "numbers", "errors", r"they are exchanged"),
    ("15.4", "both-rounded-in-each", "of_k = self.attend(q, self.store(k), unrounded(v))  # solution\n        of_v = self.attend(q, unrounded(k), self.store(v))", "of_k = of_v = self.attend(q, self.store(k), self.store(v))", "numbers", "errors", r"nothing is told apart"),
    ("15.4", "v-beside-a-rounded-k", "of_v = self.attend(q, unrounded(k), self.store(v))", "of_v = self.attend(q, self.store(k), self.store(v))", "numbers", "errors", r"the second one has K rounded, too"),
    ("15.4", "k-beside-a-rounded-v", "of_k = self.attend(q, self.store(k), unrounded(v))", "of_k = self.attend(q, self.store(k), self.store(v))", "numbers", "errors", r"the first one has V rounded, too"),
    ("15.4", "errors-as-they-are", " / np.linalg.norm(due)", "", "numbers", "errors", r"divide by the norm of the exact output"),
    ("15.4", "the-largest-element", "np.linalg.norm(out - due) / np.linalg.norm(due)", "np.abs(out - due).max() / np.abs(due).max()", "numbers", "errors", r"the largest elements are compared"),
    ("15.4", "in-per-cent", "tuple(np.linalg", "tuple(100 * np.linalg", "numbers", "errors", r"per cent"),
    ("15.4", "an-array-for-two-numbers", "return tuple(np.linalg.norm(out - due) / np.linalg.norm(due) for out in (of_k, of_v))", "return np.array([np.linalg.norm(out - due) / np.linalg.norm(due) for out in (of_k, of_v)])", "usage", "errors", r"two numbers belong here"),
]  # fmt: skip

MISCONCEPTIONS = [Misconception(*row) for row in _ROWS]
