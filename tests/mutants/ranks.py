"""Bugs of ranks, seeded: in what they send, in who sees what, in how parts are merged and added up, and in the formulas."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashlab.parallel import layouts
from tests.mutants.zoo import module_from

FOLDER = Path(layouts.__file__).parent
MODULES = ("layouts", "rank", "schemes", "problems", "ranks", "formulas")


@dataclass(frozen=True)
class Bug:
    """Each `find`, which occurs once in a file of flashlab/parallel, becomes its `put`."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    by: str
    """The scheme that shows it."""

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """The package with the bug: what the file defines is replaced, wherever it is known by its name."""
        text = (FOLDER / f"{self.file}.py").read_text(encoding="utf-8")
        for find, put in self.edits:
            assert text.count(find) == 1, f"{self.name}: {find!r} occurs {text.count(find)} times"
            text = text.replace(find, put)
        modules = [importlib.import_module(f"flashlab.parallel.{name}") for name in MODULES]
        real = importlib.import_module(f"flashlab.parallel.{self.file}")
        changed = module_from(text, real.__name__)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in vars(changed).items():
                if name.startswith("__") or not _defined(value, changed.__name__):
                    continue
                known = vars(real).get(name)
                for module in modules:
                    if name in vars(module) and vars(module)[name] is known:
                        patch.setattr(module, name, value)
            yield


def _defined(value: Any, module: str) -> bool:
    return isinstance(value, dict) or getattr(value, "__module__", None) == module


def bug(name: str, file: str, *edits: str, by: str = "ring") -> Bug:
    return Bug(name, file, tuple(zip(edits[::2], edits[1::2], strict=True)), by)


# ruff: noqa: E501
RANKS = [
    # who holds and sees what
    bug("a zigzag's late chunk is r + w", "layouts", "2 * ranks - 1 - rank\n", "ranks + rank\n"),
    bug("contiguous rows overlap by one", "layouts", "range(rank * n, (rank + 1) * n),)", "range(rank * n, rank * n + n - 1),)"),
    bug("a stripe begins on the next rank", "layouts", "interleave % ranks == rank", "interleave % ranks == (rank + 1) % ranks", by="dcp"),
    bug("the interleave is ignored", "layouts", "keys // interleave % ranks", "keys % ranks", by="dcp"),
    bug("a rank's own keys are all seen", "layouts", "return every_row, every_key, causal", "return every_row, every_key, False"),
    bug("later ranks' keys are seen", "layouts", "if of < rank else None", "if of > rank else None"),
    bug("a zigzag sees all of an earlier rank's keys", "layouts", "(every_row, slice(0, keys // 2), False)", "(every_row, every_key, False)"),
    bug("a zigzag's early rows see a later rank's keys", "layouts", "(slice(rows // 2, rows), every_key, False)",
        "(every_row, every_key, False)"),
    bug("a zigzag's early rows see them, and the late ones don't", "layouts", "slice(rows // 2, rows), every_key", "slice(0, rows // 2), every_key"),
    # what a rank does
    bug("what is sent may still change", "rank", "{name: x.copy() for name, x in tensors.items()}", "dict(tensors)", by="own"),
    bug("what a rank sends to itself is counted", "rank", "if peer != self.index:\n            self.events", "if True:\n            self.events", by="all_gather"),
    bug("rows that see nothing have an LSE of 0", "rank", "np.full(self.q.shape[:3], -np.inf, np.float32)", "np.zeros(self.q.shape[:3], np.float32)"),
    bug("rows of all ranks aren't put in order", "rank", "return whole[:, :, np.argsort(layouts.order(self.layout, whole.shape[2], self.ranks))]", "return whole", by="ulysses"),
    bug("rows are put in order by the order itself", "rank", "np.argsort(layouts.order(self.layout, whole.shape[2], self.ranks))",
        "layouts.order(self.layout, whole.shape[2], self.ranks)", by="ulysses"),
    bug("an exchange returns what came as it came", "rank", "return [got[peer] for peer in range(self.ranks)]", "return list(got.values())", by="ulysses"),
    bug("gradients without the scale", "rank", "*inputs, causal=causal, partial=partial, **self._options)",
        "*inputs, causal=causal, partial=partial, soft_cap=self.problem.soft_cap)"),
    bug("parts without the soft cap", "rank", '"soft_cap": problem.soft_cap', '"soft_cap": None'),
    bug("pages hold a request's first keys only", "rank", "pool[page, :, : keys.shape[1]] = keys", "pool[page, :, : keys.shape[1]] = x[b, :, : keys.shape[1]]", by="dcp"),
    bug("requests share pages", "rank", "table[b, first // size] = page = next(free)", "table[b, first // size] = page = first // size", by="dcp"),
    bug("lengths of pages are those of the longest", "rank", "seq_lens = np.array(lens, np.int32)", "seq_lens = np.full(len(lens), max(lens), np.int32)", by="dcp"),
    # schemes
    bug("the ring turns the other way", "schemes", "        of = (rank.index - i) % rank.ranks  # whose keys these are",
        "        of = (rank.index + i) % rank.ranks"),
    bug("a ring makes one hop too many", "schemes", "        if i < rank.ranks - 1:\n            rank.send(rank.right, f\"forward {i}\", k=k, v=v)",
        "        rank.send(rank.right, f\"forward {i}\", k=k, v=v)"),
    bug("a ring sends K twice", "schemes", 'f"forward {i}", k=k, v=v)', 'f"forward {i}", k=k, v=k)'),
    bug("the last part is left out of the merge", "schemes", "(parts[of] for of in range(rank.ranks)), strict=True)\n    return merge(outs, lses)\n\n\ndef ring_backward",
        "(parts[of] for of in range(max(1, rank.ranks - 1))), strict=True)\n    return merge(outs, lses)\n\n\ndef ring_backward"),
    bug("gradients of keys aren't added to what came", "schemes", "dk, dv = so_far[0] + dk, so_far[1] + dv", "pass"),
    bug("a rank's own gradients are left out", "schemes", "own = so_far[0] + own[0], so_far[1] + own[1]", "own = so_far[0], so_far[1]"),
    bug("gradients come home a hop too early", "schemes", "    if n > 1:\n        so_far = yield rank.receive(rank.left)\n        own = so_far[0] + own[0], so_far[1] + own[1]\n", ""),
    bug("gradients travel in 16 bits", "schemes", 'dk=dk, dv=dv)\n        if i', 'dk=dk.astype(k.dtype), dv=dv.astype(k.dtype))\n        if i', by="sums"),
    bug("dQ of the last step alone", "schemes", "dq += dq_part", "dq[:] = dq_part"),
    bug("of a gathered chunk the keys after it, too", "schemes", "slice(0, chunk.stop)))", "slice(0, p.len_kv)))", by="all_gather"),
    bug("parts of gathered dK overwrite one another", "schemes", "dk[:, :, keys] += dk_part", "dk[:, :, keys] = dk_part", by="all_gather"),
    bug("each rank keeps its own parts of dK", "schemes", "(cast(\"Array\", sum(parts)) for parts in zip(*got, strict=True))",
        "(cast(\"Array\", parts[rank.index]) for parts in zip(*got, strict=True))", by="all_gather"),
    bug("Ulysses deals the heads in turn", "schemes", "return slice(rank * heads // ranks, (rank + 1) * heads // ranks)", "return slice(rank, None, ranks)", by="ulysses"),
    bug("a KV head for the wrong group", "schemes", "slice(peer * kv // n, peer * kv // n + 1)", "slice(peer % kv, peer % kv + 1)", by="ulysses"),
    bug("a shared KV head's gradient of the last rank alone", "schemes", "total[:, _kv_heads_of(rank, peer)] += part", "total[:, _kv_heads_of(rank, peer)] = part", by="ulysses"),
    bug("heads without a mask", "schemes", "return rank.attention(rank.q, rank.k, rank.v, causal=rank.problem.causal)",
        "return rank.attention(rank.q, rank.k, rank.v)", by="heads"),
    bug("outputs of a striped cache are averaged", "schemes", "    outs, lses = zip(*got, strict=True)\n    return merge(outs, lses)",
        "    outs, lses = zip(*got, strict=True)\n    return merge(outs, [lses[0]] * len(lses))", by="dcp"),
    # what is put together
    bug("a rank's rows are put where another's are", "ranks", "return slice(None), slice(None), rank.rows_of(rank.index, shape[2])",
        "return slice(None), slice(None), rank.rows_of((rank.index + 1) % rank.ranks, shape[2])"),
    bug("the latest message comes first", "ranks", "].popleft()", "].pop()"),
    bug("nobody looks for messages that are left", "ranks", "        if left:\n            shown", "        if False:\n            shown", by="own"),
    # formulas
    bug("the formula's ring makes w hops", "formulas", '        if i < s.n - 1:\n            yield Sent(f"forward {i}", right, kv)', '        yield Sent(f"forward {i}", right, kv)'),
    bug("gradients of 2 bytes in the formula", "formulas", "(itemsize or (4 if gradients else self.p.itemsize))", "(itemsize or self.p.itemsize)"),
    bug("values as wide as keys in the formula", "formulas", 'each * self.p.head_dim_v)', 'each * self.p.head_dim)'),
    bug("repeated KV heads aren't counted", "formulas", "yield from s.exchange(\"to heads forward\", rank, to_heads)",
        "yield from s.exchange(\"to heads forward\", rank, (*s.queries(\"q\", heads, s.rows, p.head_dim), *s.kv(p.kv_heads, s.keys // s.n)))", by="ulysses"),
    bug("query heads for K and V in the formula", "formulas", "kv = (rank - 1) % s.n, (rank + 1) % s.n, s.kv(s.p.kv_heads, s.keys)\n    for i", "kv = (rank - 1) % s.n, (rank + 1) % s.n, s.kv(s.p.heads, s.keys)\n    for i"),
    bug("a zigzag's launches of whole rows in the formula", "formulas", "keys //= self.parts", "keys //= 1"),
    bug("an LSE of 2 bytes in the formula", "formulas", "p.batch * heads * p.len_q * 4", "p.batch * heads * p.len_q * 2", by="dcp"),
    bug("a stripe's rest is left out in the formula", "formulas", "+ min(max(rest - rank * self.interleave, 0), self.interleave)", "+ 0", by="dcp"),
]  # fmt: skip
