"""Makes of a whole CUDA program the text that a host compiler takes: launches become calls, and calls of CUDA tell their names.

What is rewritten is told by neighbouring words, as in `scan`. `kernels_cu/emulator/host_runtime.h` has what the new text calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from flashlab.emulator.scan import Piece, Tokens, is_word

__all__ = ["host_edits", "host_function"]

Edit = tuple[int, int, str]
"""A stretch of a text, from and to, and what takes its place."""

_ALLOCATES = frozenset(
    "cudaMalloc cudaMallocAsync cudaMallocManaged cudaMallocHost cudaHostAlloc cudaMallocPitch".split()
)
_OF_CUDA = re.compile(r"cuda[A-Z]\w*$")
_ASKS = frozenset(("cudaGetLastError", "cudaPeekAtLastError"))
_BEFORE_A_STATEMENT = frozenset((";", "{", "}", ")", "else", "do"))
_CASTS = frozenset(("reinterpret_cast", "static_cast"))
_NULL = frozenset(("__null", "NULL"))
_FROM_A_KERNEL = 'emu_ptx_refuse("a launch from a kernel (<<<…>>>)")'


def host_edits(tokens: Tokens, pieces: Sequence[Piece]) -> list[Edit]:
    """What of a program's text changes: each stretch once, in any order."""
    reader = _Reader(tokens, pieces)
    edits: list[Edit] = []
    for piece in pieces:
        if piece.kind != "directive":
            edits += reader.edits(piece)
    return edits


def host_function(pieces: Sequence[Piece], name: str) -> Piece | None:
    """A function of the host, with its body, outside of all namespaces; None if there is none of that name."""
    found = (piece for piece in pieces if piece.kind == "function" and piece.name == name and piece.body >= 0)
    return next((piece for piece in found if not piece.words & {"__global__", "__device__", "template"}), None)


class _Reader:
    def __init__(self, tokens: Tokens, pieces: Sequence[Piece]) -> None:
        self.tokens, self.words, self.partner = tokens, tokens.words, tokens.partner
        self.kernels: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.kind == "function" and "__global__" in piece.words:
                self.kernels.setdefault(piece.names[0], []).append(piece)
        self.before: dict[int, list[str]] = {}  # inserted in front of a token
        self.behind: dict[int, list[str]] = {}

    def edits(self, piece: Piece) -> Iterator[Edit]:
        device = bool(piece.words & {"__global__", "__device__"}) and "__host__" not in piece.words
        self.before, self.behind = {}, {}
        replaced: list[tuple[int, int, str]] = []
        for i in range(piece.start, piece.end - 1):
            if self.words[i : i + 3] == ["<", "<", "<"]:
                replaced += self.launch(i, piece, device)
            elif not device:
                self.call(i, piece)
                self.address(i)
        for first, last, text in replaced:
            yield self.tokens.starts[first], self.tokens.end(last), text
        taken = {i for first, last, _ in replaced for i in range(first, last + 1)}
        for i, texts in self.before.items():
            if i not in taken:
                yield self.tokens.starts[i], self.tokens.starts[i], "".join(texts)
        for i, texts in self.behind.items():
            if i not in taken:
                yield self.tokens.end(i), self.tokens.end(i), "".join(reversed(texts))

    def launch(self, i: int, piece: Piece, device: bool) -> list[tuple[int, int, str]]:
        """`k<<<grid, block>>>(x)` becomes `launcher("k", k, Configuration(grid, block))(x)`. A template's arguments may follow from
        the call's, so a call stands for it: `launcher("k", [&](auto&... given) { k(given...); }, …)(x)`."""
        words = self.words
        first, close = self.callee(i, piece), self.closing(i + 3, piece)
        if first is None or close is None or words[close + 3 : close + 4] != ["("]:
            return []
        if device:
            return [(first, self.partner[close + 3], _FROM_A_KERNEL)]
        text = self.tokens.text[self.tokens.starts[first] : self.tokens.end(i - 1)]
        plain = [word for word in words[first:i] if is_word(word)]
        name = words[i - 1] if is_word(words[i - 1]) else ""
        by_call = words[i - 1] == ">" or any(each.template for each in self.kernels.get(name, ())) or self.many(name)
        if not plain:
            return []
        spelled = json.dumps(re.sub(r"\s+", "" if len(plain) == 1 else " ", text), ensure_ascii=False)
        self.before.setdefault(first, []).append(
            f"::emulator::launcher({spelled}, {'[&](auto&... emu_given) { ' if by_call else ''}"
        )
        for at in range(close + 4, self.partner[close + 3]):
            if words[at] in _NULL and words[at - 1] in ("(", ",") and words[at + 1] in (")", ","):
                self.before.setdefault(at, []).append("(decltype(nullptr))")
        opening = "(emu_given...); }" if by_call else ""
        return [
            (i, i + 2, f"{opening}, ::emulator::Configuration("),
            (close, close + 2, "))"),
        ]

    def many(self, name: str) -> bool:
        """Are there several kernels of a name, with other parameters? One that is only announced isn't another."""
        return sum(each.body >= 0 for each in self.kernels.get(name, ())) > 1

    def callee(self, i: int, piece: Piece) -> int | None:
        """The first token of what stands before `<<<`: `k`, `ns::k<64>`, `kernels[2]`, `(*k)`, `this->k`."""
        words, at = self.words, i - 1
        while at > piece.start:
            if words[at] == ">":
                depth = 0
                while at > piece.start:
                    depth += (words[at] == ">") - (words[at] == "<")
                    if not depth:
                        break
                    at = self.partner[at] - 1 if words[at] in (")", "]", "}") else at - 1
                at -= 1
            elif words[at] == "]":
                at = self.partner[at] - 1
            elif words[at] == ")":
                return self.partner[at]
            elif is_word(words[at]):
                if words[at - 1] == "::" and is_word(words[at - 2]) and words[at - 2] not in ("return", "else"):
                    at -= 2
                elif words[at - 1] == "::":
                    return at - 1
                elif words[at - 1] in (".", "->"):
                    at -= 2
                else:
                    return at
            else:
                return None
        return None

    def closing(self, i: int, piece: Piece) -> int | None:
        """The `>>>` of a launch whose configuration begins at `i`."""
        words = self.words
        while i < piece.end - 2:
            if words[i] == words[i + 1] == words[i + 2] == ">":
                return i + 1 if words[i + 3] == ">" else i  # of k<<<f<2>>>>, hardly ever
            if words[i] in ("(", "[", "{"):
                i = self.partner[i]
            elif words[i] == ";":
                return None
            i += 1
        return None

    def call(self, i: int, piece: Piece) -> None:
        """A call of CUDA: an allocation tells its name, and a result that nobody takes is looked at."""
        words = self.words
        if not _OF_CUDA.match(words[i]) or words[i - 1] in ("::", ".", "->") or i < piece.start:
            return
        opening = i + 1
        if words[opening] == "<" and (close := self.closing_angle(opening, piece)):
            opening = close + 1
        if words[opening] != "(" or not (piece.body < i if piece.kind == "function" else piece.kind == "class"):
            return
        end = self.partner[opening]
        if words[i] in _ALLOCATES and (name := self.first_argument(opening)):
            self.before.setdefault(i, []).append(f'(::emulator::named("{name}"), ')
            self.behind.setdefault(end, []).append(")")
        dropped = i > piece.start and words[i - 1] in _BEFORE_A_STATEMENT and words[end + 1 : end + 2] == [";"]
        if dropped and words[i] not in _ASKS:
            self.before.setdefault(i, []).insert(0, "::emulator::unchecked(")
            self.behind.setdefault(end, []).insert(0, ")")

    def closing_angle(self, i: int, piece: Piece) -> int | None:
        for j in range(i, min(i + 12, piece.end)):
            if self.words[j] == ">":
                return j
        return None

    def first_argument(self, opening: int) -> str:
        """The last name in a call's first argument, outside of brackets: `d_x` of `(void**)&d_x`, `x` of `&p->x[3]`."""
        name, i = "", opening + 1
        while i < self.partner[opening] and self.words[i] != ",":
            if self.words[i] in ("(", "[", "{"):
                inside = self.words[i + 1 : self.partner[i]]
                if self.words[i] == "(" and "*" not in inside:
                    name = next((word for word in reversed(inside) if word.isidentifier()), name)
                i = self.partner[i]
            elif self.words[i].isidentifier():
                name = self.words[i]
            i += 1
        return name

    def address(self, i: int) -> None:
        """A kernel's address as a pointer to anything, `(void*)k<64>`: the kernel is to be known by it."""
        words = self.words
        if words[i] not in self.kernels:
            return
        first = i
        while words[first - 1] == "::":
            first -= 2 if is_word(words[first - 2]) else 1
        first -= words[first - 1] == "&"
        cast = words[first - 1]
        if cast == ")" and words[first - 2] == "*" and "void" in words[self.partner[first - 1] : first - 1]:
            pass
        elif (
            cast == "("
            and words[first - 2] == ">"
            and words[first - 3] == "*"
            and "void" in words[first - 6 : first - 3]
        ):
            pass
        else:
            return
        last = i
        if words[i + 1] == "<" and words[i + 2] != "<":
            depth = 0
            for j in range(i + 1, len(words)):
                depth += (words[j] == "<") - (words[j] == ">")
                if not depth:
                    last = j
                    break
        self.before.setdefault(first, []).append("::emulator::known(")
        self.behind.setdefault(last, []).append(")")
