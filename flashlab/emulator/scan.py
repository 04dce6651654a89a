"""Splits a preprocessed CUDA source into its declarations.

A *piece* is a declaration at the level of namespaces: a function, a class, a variable, a type's name. Nothing is looked up:
what a word means is told by its neighbours, as a reader would who doesn't know the headers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Lines", "Piece", "Tokens", "is_word", "parameters", "pieces_of"]

_TOKEN = re.compile(
    r"""
    (?P<skip> \s+ | //[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:[^\\\n]|\\.)*)
    | (?P<string> (?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)"
        | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | [uUL]?'(?:\\.|[^'\\\n])+')
    | (?P<word> [^\W\d]\w*|\$\w*)
    | (?P<number> \.?\d(?:[eEpP][-+]|['.\w])*)
    | (?P<mark> ::|->\*?|\.\.\.|&&|\|\||[-+*/%&|^!=<>]=|.)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_OPENING = {"(": ")", "[": "]", "{": "}"}
_CLOSING = frozenset(_OPENING.values())
_CLASS_KEYS = frozenset(("struct", "class", "union", "enum"))
_CALLED = frozenset(  # words whose parentheses hold no parameters
    "__attribute__ __attribute alignas __align__ __launch_bounds__ __cluster_dims__ __block_size__ __maxnreg__ decltype "
    "__decltype typeof __typeof__ noexcept explicit requires throw __declspec".split()
)
_FOR_DEVICE = frozenset(("__global__", "__device__", "constexpr", "consteval"))
_DATA = frozenset(("__constant__", "__device__", "__managed__"))
_STEADY = _DATA | frozenset(("const", "constexpr", "constinit", "__shared__", "texture"))
_TYPES = frozenset("void bool char short int long unsigned signed float double size_t".split())
"""Words that are no parameter's name."""
_QUALIFIERS = frozenset("const volatile struct __restrict__ __restrict restrict __grid_constant__".split())
_ACCESS = frozenset(("public", "private", "protected"))


@dataclass(frozen=True)
class Tokens:
    """The words and marks of a text, where each starts, and for each bracket the place of its partner."""

    text: str
    words: list[str]
    starts: list[int]
    partner: dict[int, int]

    @classmethod
    def of(cls, text: str, ranges: Iterable[tuple[int, int]] | None = None) -> Tokens:
        """The tokens of a text, or of some ranges of it."""
        words: list[str] = []
        starts: list[int] = []
        for start, end in ranges or [(0, len(text))]:
            for match in _TOKEN.finditer(text, start, end):
                if match.lastgroup != "skip":
                    words.append(match[0])
                    starts.append(match.start())
        return cls(text, words, starts, _partners(words))

    def end(self, index: int) -> int:
        """The position in the text behind a token."""
        return self.starts[index] + len(self.words[index])


@dataclass(eq=False)
class Piece:
    """A declaration: tokens `start` to `end` (exclusive), of the namespaces `path`.

    `kind` is function, class, variable, alias, directive, assertion, instantiation or other. `words` are its specifiers and
    keywords, `names` what it declares. A function's parameters lie between the brackets at `opening`; `body` is its brace
    (-1: it has none). `inner` are a class's own declarations.
    """

    kind: str
    start: int
    end: int
    path: tuple[str, ...]
    names: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    opening: int = -1
    body: int = -1
    inner: list[Piece] = field(default_factory=list["Piece"])

    @property
    def kernel(self) -> bool:
        """Is it a kernel, with its body?"""
        return self.kind == "function" and "__global__" in self.words and self.body >= 0

    @property
    def template(self) -> bool:
        return "template" in self.words

    @property
    def name(self) -> str:
        """The name with its namespaces, without those that have no name."""
        return "::".join([*filter(None, self.path), self.names[0] if self.names else ""])

    @property
    def host(self) -> bool:
        """May only the host use it, by the rules of CUDA?"""
        if self.kind == "function":
            return not self.words & _FOR_DEVICE
        return self.kind == "variable" and not self.words & _STEADY

    @property
    def data(self) -> bool:
        """Is it a variable in a GPU's memory, which the host may set?"""
        return self.kind == "variable" and bool(self.words & _DATA) and not self.words & {"__shared__"}


def _partners(words: Sequence[str]) -> dict[int, int]:
    partner: dict[int, int] = {}
    open_: list[int] = []
    for i, word in enumerate(words):
        if word in _OPENING:
            open_.append(i)
        elif word in _CLOSING:
            # a bracket that has lost its partner to an #if of two branches is passed over
            while open_ and _OPENING[words[open_[-1]]] != word:
                partner[open_.pop()] = i - 1
            if open_:
                partner[open_[-1]], partner[i] = i, open_[-1]
                open_.pop()
    for i in open_:
        partner[i] = len(words) - 1
    return partner


def is_word(text: str) -> bool:
    """Is it an identifier or a keyword?"""
    return text[0].isalpha() or text[0] in "_$"


# Splitting


def pieces_of(tokens: Tokens) -> list[Piece]:
    """The declarations of a text in their order, namespaces opened."""
    return list(_Splitter(tokens).split(0, len(tokens.words), ()))


class _Splitter:
    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.words, self.partner = tokens, tokens.words, tokens.partner

    def split(self, i: int, end: int, path: tuple[str, ...], *, owner: str = "") -> Iterator[Piece]:
        """The declarations between two tokens. `owner` is the class that they are members of."""
        words = self.words
        while i < end:
            word = words[i]
            following = words[i + 1] if i + 1 < end else ""
            if word in (";", "}", "#"):
                i += 1
            elif owner and word in _ACCESS and following == ":":
                i += 2
            elif word == "namespace" or (word == "inline" and following == "namespace"):
                body, names = self.namespace(i + 1 + (word == "inline"), end)
                if body < 0:  # an alias
                    stop = self.past(i, end)
                    yield Piece("alias", i, stop, path, tuple(names[:1]), frozenset(("namespace",)))
                    i = stop
                else:
                    yield from self.split(body + 1, self.partner[body], (*path, *(names or [""])))
                    i = self.partner[body] + 1
            elif word == "extern" and following.startswith('"') and i + 2 < end and words[i + 2] == "{":
                yield from self.split(i + 3, self.partner[i + 2], path)
                i = self.partner[i + 2] + 1
            else:
                piece = self.piece(i, end, path, owner)
                yield piece
                i = max(piece.end, i + 1)

    def namespace(self, i: int, end: int) -> tuple[int, list[str]]:
        """The brace of a namespace (-1: an alias), and the names before it."""
        names: list[str] = []
        while i < end and self.words[i] not in "{;=":
            if self.words[i] in ("[", "("):
                i = self.partner[i]
            elif is_word(self.words[i]) and self.words[i] not in ("__attribute__", "inline"):
                names.append(self.words[i])
            i += 1
        return (i if i < end and self.words[i] == "{" else -1), names

    def past(self, i: int, end: int) -> int:
        """The token behind the next semicolon."""
        while i < end and self.words[i] != ";":
            i = self.partner[i] + 1 if self.words[i] in _OPENING else i + 1
        return min(i + 1, end)

    def angles(self, i: int, end: int) -> int:
        """The token behind a template's list, whose `<` is at `i`; `i` if it is a comparison."""
        depth, j = 0, i
        while j < end:
            word = self.words[j]
            if word in _OPENING:
                j = self.partner[j]
            elif word == "<":
                depth += 1
            elif word == ">":
                depth -= 1
                if not depth:
                    return j + 1
            elif word in (";", "}", ")", "]", "&&", "||"):
                return i
            j += 1
        return i

    def piece(self, start: int, end: int, path: tuple[str, ...], owner: str) -> Piece:
        words = self.words
        i, seen = start, set[str]()
        while i < end and words[i] in ("template", "extern", "export") and words[i + 1 : i + 2] != ["class"]:
            seen.add(words[i])
            i += 1
            if i < end and words[i] == "<":
                i = max(self.angles(i, end), i + 1)
            elif words[i - 1] == "template":  # without a list it instantiates
                return Piece("instantiation", start, self.past(i, end), path, words=frozenset(seen))
            elif i < end and words[i].startswith('"'):
                i += 1
        first = words[i] if i < end else ""
        if first == "using" and words[i + 1 : i + 2] == ["namespace"]:
            return Piece("directive", start, self.past(i, end), path)
        if first in ("using", "typedef", "concept"):
            return self.alias(start, i, end, path, seen)
        if first in ("static_assert", "_Static_assert"):
            return Piece("assertion", start, self.past(i, end), path)
        if first in ("asm", "__asm__", "__asm"):
            return Piece("other", start, self.past(i, end), path)
        if self.is_call_of_macro(i, end) and not owner:
            return Piece("other", start, self.partner[i + 1] + 1, path, (first,))
        return self.declaration(start, i, end, path, owner, seen)

    def is_call_of_macro(self, i: int, end: int) -> bool:
        """NAME(…) before the start of another declaration: a macro whose header isn't here."""
        if i + 1 >= end or not is_word(self.words[i]) or self.words[i] in _CALLED or self.words[i + 1] != "(":
            return False
        behind = self.partner[i + 1] + 1
        return behind < end and self.words[behind] in (
            "template __global__ __device__ static inline struct class void namespace using typedef extern".split()
        )

    def alias(self, start: int, i: int, end: int, path: tuple[str, ...], seen: set[str]) -> Piece:
        words, stop = self.words, self.past(i, end)
        if words[i] == "typedef":
            names = self.typedefs(i + 1, stop)
        elif "=" in words[i:stop]:
            names = [words[i + 1]]
        else:
            names = [words[j] for j in range(i + 1, stop) if words[j + 1 : j + 2] and words[j + 1] in ";,"]
        return Piece("alias", start, stop, path, tuple(names), frozenset(seen))

    def typedefs(self, i: int, end: int) -> list[str]:
        words, names = self.words, list[str]()
        while i < end:
            if is_word(words[i]) and words[i + 1 : i + 2] and words[i + 1] in ";,[":
                names.append(words[i])
            elif words[i] == "(" and words[i + 1] in ("*", "&"):
                names.append(words[self.partner[i] - 1])
            i = self.partner[i] + 1 if words[i] in _OPENING else i + 1
        return names

    def declaration(self, start: int, i: int, end: int, path: tuple[str, ...], owner: str, seen: set[str]) -> Piece:
        """A function, a class or variables: the words up to the brackets, the sign or the semicolon that tell which."""
        words, partner = self.words, self.partner
        names: list[str] = []
        last, qualifier = "", ""
        while i < end:
            word = words[i]
            if word == ";":
                break
            if word in _CLASS_KEYS and not seen & {"friend"} and (found := self.class_(start, i, end, path, seen)):
                return found
            if word == "operator":
                last, qualifier = "operator", qualifier or (words[i - 2] if words[i - 1] == "::" else "")
                i += 1
                while i < end and words[i] != "(":
                    last, i = last + words[i], i + 1
                if words[i : i + 2] == ["(", ")"]:
                    last, i = "operator()", i + 2
                continue
            if is_word(word):
                if word in _CALLED:
                    seen.add(word)
                    i = partner[i + 1] + 1 if words[i + 1 : i + 2] == ["("] else i + 1
                    continue
                seen.add(word)
                if words[i - 1] == "::" and i > start + 1 and last:
                    qualifier = qualifier or last
                else:
                    qualifier = ""
                last = f"~{word}" if i > start and words[i - 1] == "~" else word
            elif word == "<":
                behind = self.angles(i, end)
                if behind > i:
                    i = behind
                    continue
            elif word == "(" and last:
                if words[i + 1 : i + 2] and words[i + 1] in ("*", "&") and i + 3 < end and words[i + 3] in (")", "["):
                    names.append(words[i + 2])  # a pointer to a function, a reference to an array
                    return Piece("variable", start, self.past(i, end), path, tuple(names), frozenset(seen))
                declared = qualifier or last
                body, stop = self.body(partner[i] + 1, end)
                known = seen | (
                    set[str](("default",)) if "default" in words[partner[i] : stop] and body < 0 else set[str]()
                )
                return Piece("function", start, stop, path, (declared,), frozenset(known), opening=i, body=body)
            elif word in ("=", "[", "{", ",", ":"):
                if last and (not names or names[-1] != last):
                    names.append(last)
                if word == "=" or word == ":":
                    while i < end and words[i] not in (",", ";"):
                        i = partner[i] + 1 if words[i] in _OPENING else i + 1
                    continue
                i = partner[i] if word in _OPENING else i
            i += 1
        if last and last not in names:
            names.append(last)
        return Piece("variable", start, min(i + 1, end), path, tuple(names), frozenset(seen))

    def body(self, i: int, end: int) -> tuple[int, int]:
        """A function's brace (-1: none) and the token behind the function, from behind its parameters on."""
        words, initialised = self.words, False
        while i < end:
            word = words[i]
            if word == ";":
                return -1, i + 1
            if word == ":":
                initialised = True
            elif word == "=" and words[i + 1 : i + 2] and words[i + 1] in ("default", "delete", "0"):
                return -1, self.past(i, end)
            elif word == "=" or (word == "," and not initialised):  # variables with arguments: dim3 a(1), b(2);
                return -1, self.past(i, end)
            elif word == "{":
                if not initialised or words[i - 1] in (")", "}", "..."):
                    return i, self.partner[i] + 1
                i = self.partner[i]
            elif word in _OPENING:
                i = self.partner[i]
            i += 1
        return -1, end

    def class_(self, start: int, i: int, end: int, path: tuple[str, ...], seen: set[str]) -> Piece | None:
        """A class or an enumeration with its members, or announced; None for `struct X x` and the like."""
        words, partner = self.words, self.partner
        key, name, j = words[i], "", i + 1
        if words[j : j + 1] and words[j] in ("class", "struct"):
            j += 1
        while j < end and words[j] not in "{;:":
            word = words[j]
            if word in _CALLED or word == "[":
                j = partner[j + (word != "[")] + 1
                continue
            if word == "<":
                behind = self.angles(j, end)
                if behind == j:
                    return None
                j = behind
                continue
            if word in ("(", "=", "*", "&") or (name and is_word(word) and word != "final" and words[j - 1] != "::"):
                return None
            if is_word(word) and word != "final":
                name = word
            j += 1
        if j >= end:
            return None
        if words[j] == ";":
            return Piece("class", start, j + 1, path, (name,) if name else (), frozenset(seen | {key}))
        while j < end and words[j] != "{":
            if words[j] == ";":  # an enumeration announced, with its type
                return Piece("class", start, j + 1, path, (name,), frozenset(seen | {key}))
            j = partner[j] + 1 if words[j] in "([" else j + 1
        stop = self.past(partner.get(j, end - 1) + 1, end)
        names = [name] if name else []
        close = partner.get(j, end - 1)
        inner: list[Piece] = []
        if key == "enum":
            names += [words[k] for k in range(j + 1, close) if is_word(words[k]) and words[k - 1] in "{,"]
        else:
            inner = list(self.split(j + 1, close, path, owner=name))
        names += [
            words[k]
            for k in range(close + 1, stop)
            if is_word(words[k]) and words[k + 1 : k + 2] and words[k + 1] in ";,=[{"
        ]
        return Piece("class", start, stop, path, tuple(names), frozenset(seen | {key}), body=j, inner=inner)


def parameters(tokens: Tokens, piece: Piece) -> list[str]:
    """The names of a function's parameters, empty where one has none."""
    words, names, i = tokens.words, list[str](), piece.opening + 1
    last, alone = "", True  # a word that stands alone is a type: a name has one before it
    close = tokens.partner[piece.opening]
    splitter = _Splitter(tokens)
    while i < close:
        word = words[i]
        if word == ",":
            names.append("" if alone or last in _TYPES else last)
            last, alone = "", True
        elif word == "=":
            while i < close and words[i] != ",":
                i = (
                    tokens.partner[i] + 1
                    if words[i] in _OPENING
                    else splitter.angles(i, close)
                    if words[i] == "<"
                    else i + 1
                )
            continue
        elif word == "<" and (behind := splitter.angles(i, close)) > i:
            i = behind
            continue
        elif word in _OPENING:
            if word == "(" and words[i + 1] in ("&", "*"):
                last, alone = words[tokens.partner[i] - 1], False
            i = tokens.partner[i]
        elif is_word(word) and word not in _QUALIFIERS:
            last, alone = word, not last
        i += 1
    if (last and last != "void") or names:
        names.append("" if alone or last in _TYPES else last)
    return names


def clusters(tokens: Tokens, piece: Piece) -> bool:
    """Does a kernel say `__cluster_dims__` with anything but ones?"""
    words = tokens.words[piece.start : piece.opening]
    if "__cluster_dims__" not in words:
        return False
    behind = piece.start + words.index("__cluster_dims__") + 1
    return any(word not in ("1", ",") for word in tokens.words[behind + 1 : tokens.partner[behind]])


class Lines:
    """Which file and line each position of a preprocessed text came from."""

    _MARKER = re.compile(r'^#(?: line)? (\d+)(?: "((?:\\.|[^"\\])*)"([ 0-9]*))?[^\n]*$', re.MULTILINE)

    def __init__(self, text: str) -> None:
        self.text = text
        self.places: list[tuple[int, str, int, str]] = [(0, "", 1, "")]
        for match in self._MARKER.finditer(text):
            file = self.places[-1][1] if match[2] is None else match[2].replace("\\\\", "\\").replace('\\"', '"')
            self.places.append((match.end() + 1, file, int(match[1]), match[3] or ""))
        self._starts = [place[0] for place in self.places]

    def at(self, position: int) -> tuple[str, int]:
        """The file and the line of a position."""
        start, file, line, _ = self.places[max(0, bisect_right(self._starts, position) - 1)]
        return file, line + self.text.count("\n", start, position)

    def ranges(self) -> Iterator[tuple[int, int, str]]:
        """Start, end and file of each stretch of text."""
        for (start, file, *_), behind in zip(self.places, [*self._starts[1:], len(self.text) + 1], strict=True):
            end = min(behind - 1, len(self.text))
            yield min(start, end), end, file

    def systems(self) -> set[str]:
        """The files that the preprocessor took for the system's when it opened them.

        Elsewhere the same flag is about a macro: a word of the file itself that a header of the system defines.
        """
        return {file for _, file, line, flags in self.places if line == 1 and {"1", "3"} <= set(flags.split())}
