"""Bugs of block managers, seeded: those that servers had, by the numbers of their issues, and others of the same shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.serve import blocks
from tests.mutants.zoo import module_from


@dataclass(frozen=True)
class Bug:
    """Each `find`, which occurs once in blocks.py, becomes its `put`. `seen` is where such a bug was reported."""

    name: str
    edits: tuple[tuple[str, str], ...]
    seen: str = ""

    def manager(self) -> Any:
        text = Path(blocks.__file__).read_text(encoding="utf-8")
        for find, put in self.edits:
            assert text.count(find) == 1, f"{self.name}: {find!r} occurs {text.count(find)} times"
            text = text.replace(find, put)
        return module_from(text, "flashlab.serve.blocks").KVCacheManager


def bug(name: str, *edits: str, seen: str = "") -> Bug:
    return Bug(name, tuple(zip(edits[::2], edits[1::2], strict=True)), seen)


WITHOUT_SALT = ("content.tokens, content.salt) == (tokens, request.salt)", "content.tokens,) == (tokens,)")
ANY_CONTENT = ("if content is not None and same and content.follows(parent)", "if content is not None")

MANAGERS = [
    bug("freed twice", "if own.freed:\n            raise UsageError(", "if False:\n            raise UsageError(",
        seen="vLLM #1556, #3347, #1584, #1930, #42571"),
    bug("a block is freed that others own", "if not self.refs[block] and not self.holds[block]:", "if not self.holds[block]:",
        seen="SGLang #38941"),
    bug("evictable twice: a hit stays on the free list", "self.free_list.pop(block, None)", "pass", seen="SGLang #35270"),
    bug("the null block is free", "OrderedDict.fromkeys(range(1, num_blocks))", "OrderedDict.fromkeys(range(num_blocks))",
        seen="vLLM, 2026"),
    bug("the null block is freed with a table", "for block in reversed(own.table):", "for block in (*reversed(own.table), NULL):",
        seen="vLLM, 2026"),
    bug("a phantom hit after everything was evicted", "del self.cached[content.digest]", "pass", seen="vLLM, 2026"),
    bug("an evicted block keeps what it held", "            self.contents[block] = None\n", "", seen="vLLM, 2026"),
    bug("blocks are freed while their launch is queued", "own.freed = True\n        if not own.reserved:\n",
        "own.freed = True\n        if True:\n", seen="vLLM, 2026"),
    bug("a part of a block can be found", "for i in range(len(own.contents), own.written // self.block_size):",
        "for i in range(len(own.contents), -(-own.written // self.block_size)):", seen="vLLM #49125"),
    bug("found before the launch wrote it", "own.table += new[shared:]\n",
        "own.table += new[shared:]\n        own.written += n\n        self._cache(request, own)\n        own.written -= n\n"),
    bug("equal digests are taken for equal tokens", "sha256(parent + tokens).digest()",
        "sha256(parent + tokens).digest()[:1]", *ANY_CONTENT, seen="vLLM #12621, #54727, Megatron #4158"),
    bug("the digest leaves out what comes before", "sha256(parent + tokens)", "sha256(tokens)", "(content.tokens, content.salt)",
        "(content.tokens, request.salt)", " and content.follows(parent)", "", seen="vLLM #12621"),
    bug("requests of other adapters share", "else request.salt.encode()", 'else b""', *WITHOUT_SALT),
    bug("a hit of the whole prompt", "full = (len(request.tokens) - 1) //", "full = len(request.tokens) //"),
    bug("a shared block is written", "shared = tail < len(table) and self.refs[table[tail]] > 1", "shared = False"),
    bug("a copied block stays in the table's count", "            self._left(own.source)\n", ""),
    bug("what is copied from isn't kept", "self.holds[own.source] += 1", "pass", "self.holds[own.source] -= 1", "pass"),
    bug("a copy is never told", "self.copies.append((own.source, own.table[tail]))", "pass"),
    bug("a copy is told twice", "copies, self.copies = self.copies, []", "copies = list(self.copies)"),
    bug("a copy outlives its request", "if copy[0] != own.source or copy[1] not in own.table", "if True"),
    bug("a failed launch's copy is forgotten", "if own.source is not None:  # from", "if shared:  # from"),
    bug("a fork isn't counted", "for block in own.table:\n            self.refs[block] += 1", "for block in ():\n            pass"),
    bug("a fork has the parent's own table", "Owned(list(own.table), own.written,", "Owned(own.table, own.written,"),
    bug("a failed launch leaks its blocks", "self._left(own.table.pop())", "own.table.pop()"),
    bug("a failed launch counts as written", "        own.reserved = 0\n        if own.freed:",
        "        own.written, own.reserved = own.written + own.reserved, 0\n        if own.freed:"),
    bug("a request freed in flight is never released", "        if own.freed:\n            self._release(request)\n\n",
        "\n"),
    bug("hits are kept though there is no room", "            return None\n        if own is None:\n", """\
            for block in hits:
                self.refs[block] += 1
            return None
        if own is None:
"""),
    bug("free hits are counted as room", "sum(block in self.free_list for block in hits)", "0"),
    bug("a copy needs no room", "if blocks - len(table) + shared > room:", "if blocks - len(table) > room:"),
    bug("newcomers take the reserve", "room -= self.watermark", "room -= 0"),
    bug("a block too many", "blocks = -(-(written + n) // self.block_size)", "blocks = (written + n) // self.block_size + 1"),
    bug("slots begin a token late", "for n in range(own.written, own.written + own.reserved):",
        "for n in range(own.written + 1, own.written + own.reserved + 1):"),
    bug("what can be found is taken first", "self.free_list.move_to_end(block, last=False)", "pass"),
    bug("the beginning is taken first", "for block in reversed(own.table):", "for block in own.table:"),
    bug("a used block is taken like an unused one", "popitem(last=False)", "popitem(last=True)"),
    bug("nothing is ever found", "if self.enable_caching else 0", "if False else 0"),
]  # fmt: skip
