"""Makes of anybody's CUDA source the text that a host compiler takes: its kernels, and what they use.

The preprocessor runs first, so that macros, headers and conditions are what the compiler would see. `scan` splits the result
into declarations. What the asked-for kernels don't reach is blanked: host functions, `main`, launches. A header that isn't
here counts as empty, because most are for the host; what a kernel needs of it is missed when the kernel is compiled.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import kernels_cu
from flashlab.emulator import launches, reach, scan
from flashlab.emulator.host import host_edits
from flashlab.emulator.launches import Launch
from flashlab.emulator.ptx import PtxError, translated
from flashlab.emulator.scan import Lines, Piece, Tokens
from simulator.errors import Unavailable, UsageError, unknown

__all__ = [
    "BuildError",
    "Kernel",
    "Source",
    "Survey",
    "above",
    "explained",
    "headers_of",
    "inside",
    "kernels_of",
    "predeclared",
    "prepared",
    "read",
]

_LETTER = re.compile(r"(?<!\\)\\U([0-9a-f]{8})")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_MARK = re.compile(r"//\s*step:\s*(\w+)")
_DOORS = "doors"
_BODY = "body"
_SOURCE = "source.cpp"
_ASM = frozenset(("asm", "__asm__", "__asm"))
_BESIDE = ("", "include", "inc", "csrc", "src", "Common", "common", "utils", "tools/util/include")
_ROUNDS = 8  # of the preprocessor: a header that stands in for a missing one may include others
_MOST_LINES = 15
_MOST_FOLDERS = 5000  # of a repository in which a missing header is looked for
_STUBS = (  # headers of hosts' libraries whose types stand in kernels' signatures, and what stands in for them
    (re.compile(r"(torch|ATen|c10)/"), "torch_names.h"),
    (re.compile(r"cu(blas|dnn|solver|sparse|fft)"), "host_names.h"),
)


_HAS = {"17": "g++ 7", "20": "g++ 10"}
"""The first that has a standard of C++."""


class BuildError(RuntimeError):
    """A source can't be built. The message's first line says of what; what the compiler said follows."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as its source has it: its name with namespaces, its place, whether it is a template, its parameters."""

    name: str
    file: str
    line: int
    template: bool
    parameters: tuple[str, ...]
    clusters: bool = False
    """Does it ask for clusters of several blocks?"""


@dataclass(frozen=True)
class Survey:
    """What a source holds: its `kernels` (of the file itself; of its headers if it has none), and their `launches`."""

    kernels: tuple[Kernel, ...]
    others: tuple[Kernel, ...]  # of its headers, where it has kernels itself
    launches: tuple[Launch, ...]

    def kernel(self, entry: str) -> Kernel:
        """The kernel that `k`, `ns::k` or `k<64>` means. Raises `UsageError` for a name that the source lacks."""
        names = [kernel.name for kernel in (*self.kernels, *self.others)]
        name = _named(entry, names, [kernel.name for kernel in self.kernels])
        return (*self.kernels, *self.others)[names.index(name)]

    def instances(self, kernel: str) -> list[str]:
        """The instances of a template that the source names, in their order."""
        return list(dict.fromkeys(x.instance for x in self.of(kernel) if x.arguments))

    def of(self, kernel: str) -> list[Launch]:
        """The launches of a kernel."""
        return [x for x in self.launches if x.kernel == kernel]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Survey:
        """The survey from its `asdict`, through JSON."""

        def as_it_was(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(cast("list[Any]", x)) if isinstance(x, list) else x for key, x in fields.items()}

        kernels, others = (tuple(Kernel(**as_it_was(each)) for each in document[key]) for key in ("kernels", "others"))
        found = (Launch(**as_it_was(each)) for each in document["launches"])
        return cls(kernels, others, tuple(found))


@dataclass(frozen=True, eq=False)
class Source:
    """A preprocessed source: its declarations, and the headers that are `missing`. Before it stands the text of `prefix`."""

    path: Path
    prefix: str
    tokens: Tokens
    pieces: list[Piece]
    lines: Lines
    missing: tuple[str, ...]
    asked: tuple[str, ...] = ()  # the kernels asked for, their macros replaced
    _kernels: dict[Piece, Kernel] = field(default_factory=dict[Piece, Kernel])

    @property
    def kernels(self) -> list[Kernel]:
        """All kernels, those of headers included."""
        return list(self._by_piece().values())

    @property
    def own(self) -> list[Kernel]:
        """The kernels of the file itself; if it has none, those of its headers."""
        return [kernel for kernel in self.kernels if kernel.file == str(self.path)] or self.kernels

    def named(self, entry: str) -> list[Piece]:
        """The kernels (of one name, in one namespace) that an entry such as `k`, `ns::k` or `k<64>` means.

        Raises `UsageError` for a name that the source lacks or has in several namespaces.
        """
        name = _named(entry, [kernel.name for kernel in self.kernels], [kernel.name for kernel in self.own])
        return [piece for piece in self._by_piece() if piece.name == name]

    def survey(self) -> Survey:
        """The file's kernels and how its host code launches them."""
        own = self.own
        spelled = {
            name: kernel.name for kernel in self.kernels for name in (kernel.name, kernel.name.rpartition("::")[2])
        }
        found = [
            replace(launch, kernel=spelled[launch.kernel], file=file, line=line)
            for token, launch in launches.launches_of(self.tokens, self.pieces)
            if launch.kernel in spelled
            for file, line in [self.at(token)]
        ]
        others = (kernel for kernel in self.kernels if kernel not in own)
        return Survey(tuple(own), tuple(others), tuple(dict.fromkeys(found)))

    def at(self, token: int) -> tuple[str, int]:
        """The file and line of a token."""
        return self.lines.at(self.tokens.starts[token])

    def _by_piece(self) -> dict[Piece, Kernel]:
        if not self._kernels:
            for piece in self.pieces:
                if piece.kernel:
                    names = tuple(scan.parameters(self.tokens, piece))
                    clusters = scan.clusters(self.tokens, piece)
                    self._kernels[piece] = Kernel(piece.name, *self.at(piece.start), piece.template, names, clusters)
        return self._kernels

    def reached(self, entries: Sequence[str]) -> set[int]:
        """The places in `pieces` of the kernels of `entries`, and of what they use. Raises `UsageError` for an unknown kernel."""
        roots = [piece for entry in entries for piece in self.named(entry)]
        words = {word for entry in self.asked or entries for word in re.findall(r"\w+", entry.partition("<")[2])}
        return reach.reached(self.tokens, self.pieces, roots, words)

    def unit(self, entries: Sequence[str]) -> str:
        """The text for the compiler: the kernels of `entries`, what they reach, and a door to each.

        It belongs behind the `prefix`, and that behind `keywords.h`. Raises `UsageError` for an unknown kernel, and `BuildError`
        for one that launches another.
        """
        given = self.asked or entries
        kept = self.reached(entries)
        text = reach.rendered(self.tokens, self.pieces, kept, self._replaced(kept))
        doors = "".join(self._door(i, *both) for i, both in enumerate(zip(entries, given, strict=True)))
        if fields := self._fields(kept):
            doors += "".join(f"EMU_FIELD({name})\n" for name in fields)
            doors += f"EMU_FIELDS({' '.join(f'EMU_SAY({name})' for name in fields)})\n"
            both = enumerate(zip(entries, given, strict=True))
            doors += "".join(self._door(i, *names, macro="EMU_FIELDS_OF") for i, names in both)
        data = [(piece, name) for i in sorted(kept) if (piece := self.pieces[i]).data for name in piece.names]
        doors += "".join(inside(piece, f"EMU_SYMBOL({i}, {name})") for i, (piece, name) in enumerate(data))
        return f'{predeclared(self.tokens, self.pieces)}\n{text}\n# 1 "{_DOORS}"\n{doors}'

    def program(self, call: str | None = None) -> str:
        """The text for the compiler of the whole file, host code and all, with a door to the function that `call` names.

        It belongs behind the `prefix`, and that behind `keywords.h`. Raises `UsageError` for an unknown function.
        """
        edits = [*host_edits(self.tokens, self.pieces), *self._replaced(range(len(self.pieces)), whole=True)]
        text = reach.rendered(self.tokens, [], set(), edits)
        door = f"EMU_CALL({call})\n" if call else ""
        return f'{predeclared(self.tokens, self.pieces)}\n{text}\n# 1 "{_DOORS}"\n{door}'

    def _fields(self, kept: set[int]) -> list[str]:
        """The names of members of structs with pointers, if there are any."""
        structs = [self.pieces[i] for i in sorted(kept) if self.pieces[i].kind == "class" and self.pieces[i].inner]
        if not any("*" in self.tokens.words[piece.start : piece.end] for piece in structs):
            return []
        return list(dict.fromkeys(name for piece in structs for name in _members(piece)))

    def _door(self, index: int, entry: str, given: str, macro: str = "EMU_DOOR") -> str:
        piece = self.named(entry)[0]
        arguments = given[given.index("<") :] if "<" in given else ""
        return inside(piece, f"{macro}({index}, {piece.names[0]}{arguments})")

    def _replaced(self, kept: Iterable[int], *, whole: bool = False) -> list[tuple[int, int, str]]:
        """What of the kept pieces isn't C++: where it starts and ends in the text, and what takes its place.

        In a `whole` program, launches are somebody else's, and host code has its own asm.
        """
        words, found = self.tokens.words, list[tuple[int, int, str]]()
        for index in sorted(kept):
            piece, i = self.pieces[index], self.pieces[index].start
            gone = [] if whole else [(each.start, each.end) for each in reach.hidden(piece)]
            while i < piece.end:
                start = i
                if any(first <= i < last for first, last in gone):
                    pass
                elif words[i] in _ASM and not (whole and piece.host):
                    while words[i] != "(":
                        i += 1
                    i = self.tokens.partner[i] + 1  # the semicolon
                    found.append(self._cpp(start, i))
                elif not whole and words[i : i + 3] == ["<", "<", "<"]:
                    file, line = self.at(i)
                    raise BuildError(
                        f"{Path(file).name}:{line}: a kernel that launches another (<<<…>>>) can't run here"
                    )
                elif words[i] == "__noinline__" and words[i - 1] != "(":  # (( in g++'s own __attribute__
                    found.append((self.tokens.starts[i], self.tokens.end(i), "__attribute__((noinline))"))
                elif words[i] == "alignas" and words[i - 1] == "__shared__":  # the standard has it in front only
                    bracket = self.tokens.partner[i + 1]
                    found.append((self.tokens.starts[i], self.tokens.end(i), "__attribute__((aligned"))
                    found.append((self.tokens.starts[bracket], self.tokens.end(bracket), ")))"))
                i += 1
        return found

    def _cpp(self, start: int, end: int) -> tuple[int, int, str]:
        """An asm statement as C++. Where it isn't known, a thread that comes there says so."""
        a, b = self.tokens.starts[start], self.tokens.end(end)
        try:
            return a, b, translated(self.tokens.text[a:b])
        except PtxError as error:
            return a, b, f"emu_ptx_refuse({json.dumps(str(error))});"


_BEHIND_OPERATORS = ("const", "volatile", "noexcept")
"""Words behind a conversion, `operator int() const`, which reads like a variable."""


def _members(piece: Piece) -> Iterator[str]:
    """The names of a class's variables, and of those of classes within it."""
    for inner in piece.inner:
        if inner.kind == "variable" and not inner.words & {"static", "using", "friend"}:
            yield from (name for name in inner.names if name.isidentifier() and name not in _BEHIND_OPERATORS)
        yield from _members(inner)


def _named(entry: str, names: Sequence[str], told: Sequence[str]) -> str:
    """The one of `names` that an entry means, with its namespaces or without."""
    wanted = entry.partition("<")[0].strip().removeprefix("::")
    found = [wanted] if wanted in names else [name for name in names if name.endswith(f"::{wanted}")]
    if not found:
        raise unknown("kernel", entry, list(dict.fromkeys(told)))
    if len(set(found)) > 1:
        raise UsageError("kernel", entry, f"one of {', '.join(dict.fromkeys(found))}")
    return found[0]


def inside(piece: Piece, text: str) -> str:
    """A text in the namespaces of a piece, so that the names in it mean there what they mean to the piece."""
    spaces = [name for name in piece.path if name]
    return "".join(f"namespace {name} {{ " for name in spaces) + text + " }" * len(spaces) + "\n"


def read(path: Path) -> str:
    """The text of a source. Raises `UsageError` for a file that can't be read, or isn't text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError("file", str(path), f"a CUDA source that can be read ({error.strerror})") from None
    except ValueError:  # also a name that no file can have
        raise UsageError("file", str(path), "a CUDA source: this file isn't UTF-8 text") from None


@functools.lru_cache(maxsize=8)
def prepared(
    path: Path, text: str, command: tuple[str, ...], asked: tuple[str, ...], digest: str, host: bool = False
) -> Source:
    """A source, preprocessed by `command` (a compiler and its options) and split.

    `asked` are kernels whose template arguments may be macros; `digest` stands for the headers. `host` brings CUDA's runtime for
    host code. Raises `BuildError` where the preprocessor fails.
    """
    del digest
    marked = _MARK.sub(lambda m: f'emulator::step("{m[1]}"); {m[0]}', text)
    doors = "".join(f"{entry};\n" for entry in asked)
    whole = f'#line 1 "{_BODY}"\n#line 1 {_quoted(path)}\n{marked}\n#line 1 "{_DOORS}"\n{doors}'
    runtime = '#include "host_runtime.h"\n' if host else ""
    made = _split(path, f'#include "cuda.h"\n{runtime}{whole}', command)
    if not _ASM.isdisjoint(made.tokens.words):
        made = _split(path, f'#include "cuda.h"\n#include "ptx.h"\n{runtime}{whole}', command)
    if len(made.asked) != len(asked):  # a name has a semicolon in it, and was more than one
        raise BuildError(f"{path.name} doesn't compile: no kernel can be reached by that name: {', '.join(asked)}")
    return made


def _split(path: Path, text: str, command: Sequence[str]) -> Source:
    """A text, preprocessed and split."""
    output, missing = _preprocessed(path, text, command)
    prefix, output = _parted(output)
    lines = Lines(output)
    near = tuple(f"{folder}{os.sep}" for folder in above(path))
    foreign = {_DOORS, *(file for file in lines.systems() if not file.startswith(near))}
    emulator = f"{kernels_cu.emulator_dir()}{os.sep}"
    stretches = list(lines.ranges())
    own = [(a, b) for a, b, file in stretches if file not in foreign and not file.startswith((emulator, "<"))]
    tokens = Tokens.of(output, own)
    behind = "".join(output[a:b] for a, b, file in stretches if file == _DOORS)
    cut = min((a for a, _, file in stretches if file == _DOORS), default=len(output))
    names = tuple(" ".join(entry.split()) for entry in behind.split(";")[:-1])
    shown = output[:cut].rsplit("\n#", 1)[0] if cut < len(output) else output
    tokens = Tokens(shown, tokens.words, tokens.starts, tokens.partner)
    return Source(path, prefix, tokens, scan.pieces_of(tokens), lines, missing, names)


def _parted(output: str) -> tuple[str, str]:
    """What the emulator's own headers came to, which is the same for every kernel, and the rest."""
    start = re.search(rf'^# 1 "{re.escape(str(kernels_cu.emulator_dir()))}/cuda\.h" 1$', output, re.MULTILINE)
    end = output.find(f'\n# 1 "{_BODY}"')
    if not start or end < 0:
        return "", output
    return f'# 1 "{_SOURCE}"\n{output[start.start() : end]}\n', output[end + 1 :]


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _preprocessed(path: Path, text: str, command: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What the preprocessor makes of a text, and the headers that are missing, each of which counts as empty."""
    missing: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        work, stubs = Path(folder), Path(folder) / "a" / "b" / "c" / "d" / "e"  # "../../x.h" must stay inside
        stubs.mkdir(parents=True)
        (work / _SOURCE).write_text(text, encoding="utf-8")
        options = [
            *command,
            f"-iquote{stubs}",
            f"-idirafter{stubs}",
            "-DEMU_SCAN",
            "-x",
            "c++",
            str(work / _SOURCE),
        ]
        said = ""
        for _ in range(_ROUNDS):
            done = subprocess.run([*options, "-E"], capture_output=True, text=True, check=False, errors="replace")
            if not done.returncode:
                # some preprocessors write the letters of a name like größe as \U000000f6
                output = _LETTER.sub(lambda m: chr(int(m[1], 16)), done.stdout)
                return output.replace(str(work / _SOURCE), _SOURCE), tuple(missing)
            said = done.stderr
            wanted = re.search(r"fatal error: (?:'(.+?)' file not found|(.+?): No such file or directory)", said)
            if not wanted:
                break
            listed = subprocess.run([*options, "-M", "-MG"], capture_output=True, text=True, check=False, cwd=work)
            names = [
                name for name in re.split(r"(?<!\\)\s+", listed.stdout.replace("\\\n", " ")) if name and name[-1] != ":"
            ]
            for name in [wanted[1] or wanted[2], *(name for name in names if not (work / name).exists())]:
                stub = Path(os.path.normpath(stubs / name))
                if name not in missing and work in stub.parents and not stub.exists():
                    missing[name] = None
                    stub.parent.mkdir(parents=True, exist_ok=True)
                    stub.write_text("".join(f'#include "{own}"\n' for pattern, own in _STUBS if pattern.match(name)))
    if re.search(r"unrecognized .*-std=|invalid value .*-std=", said):
        n = re.sub(r"\D", "", command[1])
        raise Unavailable(
            f"{command[0]} has no C++{n}, which the emulator needs: {_HAS[n]} or newer, or CXX names another"
        )
    rows = [row for row in said.splitlines() if "error" in row][:_MOST_LINES]
    raise BuildError("\n".join([f"{path.name} can't be preprocessed:", *rows]).replace(f"{path.parent}{os.sep}", ""))


def predeclared(tokens: Tokens, pieces: Sequence[Piece]) -> str:
    """Empty namespaces for `using namespace` of those that only missing headers have."""
    aliases = {piece.names[0] for piece in pieces if piece.kind == "alias" and "namespace" in piece.words}
    found: dict[str, None] = {}
    for piece in pieces:
        words = tokens.words[piece.start : piece.end]
        if piece.kind == "directive" or (piece.kind == "alias" and "namespace" in piece.words):
            names = [word for word in words if word.isidentifier()][2:]
            if names and names[0] not in aliases and names[0] != "std":
                found["".join(f"namespace {name} {{ " for name in names) + "}" * len(names)] = None
    return " ".join(found)


def kernels_of(text: str) -> tuple[str, ...]:
    """The names of a source's kernels, without templates, as its text has them before any macro is replaced.

    >>> kernels_of("extern \\"C\\" __global__ void __launch_bounds__(128) scale(float* x) {}")
    ('scale',)
    """
    found = scan.pieces_of(Tokens.of(text))
    return tuple(dict.fromkeys(piece.names[0] for piece in found if piece.kernel and not piece.template))


@functools.lru_cache(maxsize=256)
def above(path: Path) -> Sequence[Path]:
    """Where a published file's headers may lie besides: in the folders above it, up to its repository's root."""
    parents = path.resolve().parents
    root = next((i for i, folder in enumerate(parents) if (folder / ".git").exists()), 0)
    places = [folder / name for folder in parents[: root + 1] for name in _BESIDE]
    return [place for place in places if place.is_dir() and place != parents[0]]


def headers_of(path: Path, text: str, folders: Iterable[Path] = ()) -> dict[Path, str]:
    """The headers beside a source, or in `folders`, that it includes, directly or through others, with their text."""
    found: dict[Path, str] = {}
    left = [(path.parent, text)]
    beside = [path.parent, *folders]
    while left:
        folder, source = left.pop()
        for match in _INCLUDE.finditer(source):
            for place in (folder, *beside):
                if os.path.isfile(name := os.path.join(place, match[1])):
                    header = Path(name).resolve()
                    if header not in found:
                        found[header] = header.read_text(encoding="utf-8", errors="replace")
                        left.append((header.parent, found[header]))
                    break
    return found


# What the compiler says


def explained(source: Source, entries: Sequence[str], log: str) -> str:
    """A compiler's log for people: a line of what was tried and what is missing, and at most 15 of the log."""
    if match := re.search(r"undefined reference to [`'‘](.+?)['’]", log):
        return f"{source.path.name} can't be linked: {match[1]} is declared, but neither the file nor its headers define it"
    rows = [row for row in log.splitlines() if "kernel.cpp" not in row]
    errors = [row for row in rows if " error: " in row]
    # of a kernel with a parameter of an unknown type, g++ says first that it were a void variable
    errors = [row for row in errors if " declared void" not in row] or errors
    if errors and (match := re.match(rf"{_DOORS}:.* error: (.*)$", errors[0])):
        return f"{source.path.name} doesn't compile: no kernel can be reached by that name: {match[1]}"
    first = re.match(r"(.+?):(\d+):(?:\d+:)? (?:fatal )?error: ", errors[0]) if errors else None
    piece = _piece_at(source, first[1], int(first[2])) if first else None
    at = f" at {Path(first[1]).name}:{first[2]}" if first else ""
    where = f", in {piece.name}" if piece and piece.names else ""
    used = f" (which {', '.join(entries)} uses)" if piece and len(entries) == 1 and not piece.kernel else ""
    shown = rows[rows.index(errors[0]) :] if errors else rows
    head = f"{source.path.name} doesn't compile{at}{where}{used}:"
    text = "\n".join([head, *_hints(source, errors[:1]), *shown[:_MOST_LINES]])
    for folder in (source.path.parent, kernels_cu.emulator_dir(), kernels_cu.include_dir()):
        text = text.replace(f"{folder}{os.sep}", "")
    return text.strip()


def _piece_at(source: Source, file: str, line: int) -> Piece | None:
    for piece in source.pieces:
        if piece.kind == "directive" or piece.end <= piece.start:
            continue
        (first, start), (last, end) = source.at(piece.start), source.at(piece.end - 1)
        if first == last == file and start <= line <= end:
            return piece
    return None


def _hints(source: Source, errors: Sequence[str]) -> list[str]:
    """Why a name may be unknown: it is the host's, or comes from a header that isn't here."""
    hints: list[str] = []
    for row in errors:
        match = re.search(
            r"[‘'](?:[\w:]*::)?(\w+)(?:<.*>)?[’'] (?:was not declared|does not name|has not been|is not a member)", row
        )
        if not match:
            continue
        name = match[1]
        if any(name in piece.names and piece.host for piece in source.pieces):
            hints.append(f"{name} is host code, which no kernel may use: it lacks __device__")
            continue
        found = {header: folder for header in source.missing if (folder := _lies_in(source.path, header))}
        places = [f"<{header}>, which lies in {folder}: -I {folder}" for header, folder in found.items()]
        if not places and source.missing:
            places = [f"{', '.join(f'<{x}>' for x in source.missing[:4])}, which isn't here"]
        if re.fullmatch(r"_*[A-Z][A-Z0-9_]*", name):
            hints.append(f"{name} may be a macro of the file's build: -D {name}=VALUE")
        if places:
            hints.append(f"{name} comes perhaps from {'; '.join(places)}")
    return hints


def _lies_in(path: Path, header: str) -> str | None:
    """The folder in a file's repository from which `header` is found, as seen from here. None: it isn't there, or no repository."""
    root = next((folder for folder in path.resolve().parents if (folder / ".git").exists()), None)
    wanted = Path(header)
    if root is None or ".." in wanted.parts:
        return None
    for seen, (at, folders, files) in enumerate(os.walk(root)):
        if seen > _MOST_FOLDERS:
            return None
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        if wanted.name in files and Path(at, wanted.name).parts[-len(wanted.parts) :] == wanted.parts:
            return os.path.relpath(Path(at, wanted.name).parents[len(wanted.parts) - 1])
    return None
