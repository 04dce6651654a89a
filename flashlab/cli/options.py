"""The options that commands share, and how their text becomes what the Python API takes.

A command takes a whole group of options as one parameter: a dataclass of annotated fields, or those of `Problem`, whose
metadata say what the options are. `expand` spreads them out for typer. What isn't given is None, so that a command can tell.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer

from flashlab.base.files import check_file
from flashlab.cli import completion, output
from flashlab.views import progress
from simulator.errors import UsageError
from simulator.fields import Field
from simulator.operations.attention import ATTENTION
from simulator.operations.operation import Operation
from simulator.problem import FIELDS, MASKS, Masks, Problem

if TYPE_CHECKING:
    from simulator import Program, Tile

T = TypeVar("T")

DEFAULTS: dict[str, Any] = {
    "batch": 1, "heads": 2, "len_q": 128, "head_dim": 64, "dtype": "float16", "causal": True,
}  # fmt: skip
"""What the problem of every command that is told none has."""

_EXTENT = {"batch", "len_q", "len_kv", "lengths", "page_size", "pages", "len_prefix"}
_PROBLEM, _RUN = "Problem", "Run"

Algorithm = Annotated[
    str,
    typer.Argument(
        help="An algorithm, or a tile program of your own: my_file.py:my_program.", autocompletion=completion.algorithms
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help="A GPU by name: see `flashlab devices`.",
        rich_help_panel=_RUN,
        autocompletion=completion.devices,
    ),
]
Input = Annotated[
    str | None,
    typer.Option("--input", metavar="FILE", help="A .npz or .safetensors with q, k, v.", rich_help_panel=_PROBLEM),
]


def spelling(name: str) -> str:
    """A parameter's name as an option's: "--len-q"."""
    return f"--{name.replace('_', '-')}"


def _help(known: Field) -> str:
    """What a field is, and what it has where it isn't given."""
    default = DEFAULTS.get(known.name, known.follows and known.follows.words)
    return f"{known.help}." if default is None else f"{known.help}; default {'yes' if default is True else default}."


def _option(known: Field) -> inspect.Parameter:
    """A field as an option that takes one value."""
    flag = (f"{spelling(known.name)}/{spelling(f'no_{known.name}')}",) if known.kind is bool else ()
    metavars: dict[type, str] = {tuple: "L,R", list: "N,N:M,…"}
    metavar = metavars.get(known.kind)
    option = typer.Option(
        *flag, help=_help(known), metavar=metavar, rich_help_panel=_PROBLEM, autocompletion=_completed(known)
    )
    return _parameter(known, str if metavar else known.kind, option)


def _completed(known: Field) -> completion.Complete | None:
    """What a shell completes where only some words are accepted."""
    return completion.one_of(lambda: known.among) if known.among else None


def _parameter(known: Field, kind: type, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(known.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class ProblemOptions:
    """The fields of `Problem`: `given` are those that the user gave."""

    parameters: ClassVar[list[inspect.Parameter]] = [_option(known) for known in FIELDS.values()]

    def __init__(self, **options: Any) -> None:
        read: dict[type, Callable[[str, str], Any]] = {tuple: pair, list: lengths}
        self.given: dict[str, Any] = {
            name: read[kind](spelling(name), value) if (kind := FIELDS[name].kind) in read else value
            for name, value in options.items()
            if value is not None
        }

    def masks(self, causal: bool | None = None) -> Masks:
        """What `simulate`, `naive` and `Problem` take as keywords; `causal` is what the data says of itself."""
        default = DEFAULTS if causal is None else {**DEFAULTS, "causal": causal}
        masks: Any = {name: value for name, value in {**default, **self.given}.items() if name in MASKS}
        return masks

    def refuse_shape(self) -> None:
        """Called when the data says the shape: options that say it too cannot both be right."""
        for name, value in self.given.items():
            if name not in MASKS:
                raise UsageError(spelling(name), value, "nothing, the data says the shape")

    def shown(self, algorithm: str) -> Mapping[str, Any]:
        """What an algorithm shows step by step if no lengths and no pages were given; nothing for a program of one's own."""
        from simulator import CATALOGUE

        row = CATALOGUE.get(algorithm)
        return {} if row is None or _EXTENT & self.given.keys() else row.shown or row.operation.shown

    def problem(self, algorithm: str | None = None, shown: Mapping[str, Any] | None = None) -> Problem:
        """What was given, and the defaults for the rest: of an algorithm that takes but one dtype, that.

        `shown` comes before these.

        Raises `UsageError` for what was given and the algorithm has otherwise, such as mla its head dim."""
        from simulator import CATALOGUE

        row = CATALOGUE.get(algorithm or "")
        only: dict[str, Any] = {"dtype": row.dtypes[0]} if row and len(row.dtypes) == 1 else {}
        if "lengths" in self.given:
            only["len_q"] = None  # it follows
            only |= row.operation.batched(self.given["lengths"]) if row else {}
        fields = {name: value for name, value in (shown or {}).items() if name in FIELDS}
        if "lengths" in fields:
            only["len_q"] = None
        posed = Problem(**{**DEFAULTS, **only, **fields, **self.given})
        if row is None:
            return posed
        fitted = row.operation.fitted(posed)
        for name in self.given:
            if (value := getattr(fitted, name)) != getattr(posed, name):
                raise UsageError(spelling(name), self.given[name], f"{value} for {algorithm}, or nothing")
        return fitted if {"len_q", "lengths"} & self.given.keys() else row.fitted(posed)


def of_one_operation(algorithms: Sequence[str]) -> str | None:
    """The first of the algorithms if all are of one operation, whose defaults a problem of theirs has; else None."""
    from simulator import CATALOGUE

    rows = [CATALOGUE.get(name) for name in algorithms]
    return algorithms[0] if len({row and row.operation for row in rows}) == 1 and rows[0] else None


AXES = "Axes: one value, or several with commas between them"


def _axis(known: Field) -> inspect.Parameter:
    """A field as an option that takes several values."""
    metavar = {int: "N,…", float: "X,…", str: "NAME,…"}[known.kind]
    return _parameter(
        known,
        str,
        typer.Option(help=_help(known), metavar=metavar, rich_help_panel=AXES, autocompletion=_completed(known)),
    )


def _listed(known: Field) -> bool:
    """Can several of its values stand in a list with commas?"""
    return known.kind in (int, float, str)


def _value(known: Field, text: str) -> Any:
    """One value from text; "none" leaves out what may be left out."""
    return None if known.default is None and text.lower() == "none" else known.kind(text)


class AxesOptions(ProblemOptions):
    """The fields of `Problem` for a sweep: those that lists can hold take several values."""

    parameters: ClassVar[list[inspect.Parameter]] = [
        *(_option(known) for known in FIELDS.values() if not _listed(known)),
        *(_axis(known) for known in FIELDS.values() if _listed(known)),
    ]

    def __init__(self, **options: Any) -> None:
        lists = {name: text for name, text in options.items() if _listed(FIELDS[name]) and text is not None}
        super().__init__(**{name: value for name, value in options.items() if not _listed(FIELDS[name])})
        self.swept = {name: values(spelling(name), text, partial(_value, FIELDS[name])) for name, text in lists.items()}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how it runs."""

    tile: Annotated[
        str | None,
        typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.", rich_help_panel=_RUN),
    ] = None
    device: DeviceName = "h100"
    lse: Annotated[bool, typer.Option("--lse", help="Also write the log-sum-exp.", rich_help_panel=_RUN)] = False

    def keywords(self, operation: Operation = ATTENTION) -> dict[str, Any]:
        """The keyword arguments for an algorithm of an operation, which may take the LSE rather than write it."""
        found = {"tile": tile(self.tile), "device": self.device, "lse": self.lse}
        if any(operand.name == "lse" for operand in operation.inputs):
            del found["lse"]
            if self.lse:
                raise UsageError("--lse", self.lse, f"nothing: {operation.name} takes the LSE, and writes none")
        return found


def pairs(option: str, text: str | None) -> dict[str, str]:
    """The value of an option such as `causal=is_causal,scale=sm_scale`."""
    found = [each.partition("=") for each in values(option, text, str)]
    if not all(name and own for name, _, own in found):
        raise UsageError(option, text, "pairs with commas between them, as in causal=is_causal")
    return {name.strip(): own.strip() for name, _, own in found}


def add(app: typer.Typer, command: Callable[..., None], *examples: str) -> None:
    """Make a function a command of `app`. Its help shows each example on a line of its own, of at most 76 characters."""
    lines = (example.replace("[", r"\[") for example in examples)
    app.command(epilog="\n\n".join(("Examples:", *lines)))(expand(command))


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: a parameter that is a group of options replaced by the group's own."""
    hints = get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        own = _members(hints[name])
        if own is None:
            plain.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[name] = hints[name], [member.name for member in own]
            plain += own

    def run(**values: Any) -> None:
        for name, (group, members) in groups.items():
            values[name] = group(**{member: values.pop(member) for member in members})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(plain)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in plain}
    return run


def _members(group: Any) -> list[inspect.Parameter] | None:
    """The options of a group, as a dataclass of annotated fields or as its `parameters`; None for what is no group."""
    if is_dataclass(group):
        hints, only = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
        return [inspect.Parameter(x.name, only, default=x.default, annotation=hints[x.name]) for x in fields(group)]
    return group.parameters if group in (ProblemOptions, AxesOptions) else None


def pair(option: str, text: str) -> tuple[int | None, int | None]:
    """A pair from text.

    >>> pair("--window", "128,0"), pair("--window", "none,64")
    ((128, 0), (None, 64))
    """
    sides = [side.strip().lower() for side in text.split(",")]
    try:
        left, right = (None if side in ("", "none") else int(side) for side in sides)
    except ValueError:
        raise UsageError(option, text, "left,right: each an integer or none, as in 128,0") from None
    return left, right


def lengths(option: str, text: str) -> list[tuple[int, int]]:
    """The queries and keys of each sequence from text.

    >>> lengths("--lengths", "100,200:300")
    [(100, 100), (200, 300)]
    """
    try:
        pairs = [[int(n) for n in each.split(":")] for each in text.split(",")]
        return [(n, m) for n, m in (pair if len(pair) > 1 else pair * 2 for pair in pairs)]
    except ValueError:
        raise UsageError(option, text, "a length per sequence, n or queries:keys, as in 100,200:300") from None


def tile(text: str | None) -> Tile | None:
    """A tile from text."""
    from simulator import Tile

    return None if text is None else Tile.parse(text)


def values(option: str, text: str | None, convert: Callable[[str], T]) -> list[T]:
    """The values of a list with commas; none if the option isn't given."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    try:
        return [convert(part) for part in parts]
    except UsageError:
        raise
    except ValueError:
        raise UsageError(option, text, "values with commas between them, as in 1024,4096") from None


def algorithm(text: str) -> str | Program:
    """An algorithm's name, or a tile program."""
    from simulator import Program
    from simulator.misuse import undecorated

    found = target(text)
    undecorated(found)
    if not isinstance(found, str | Program):
        raise UsageError("algorithm", text, "a tile program, as @flashlab.program makes them")
    return found


def named(option: str, text: str, default: str | None = None) -> tuple[str, str]:
    """A name and the text of its value. An argument's name may be that of a struct's member, as `p.x`.

    >>> named("--arg", "n=100"), named("--define", "FAST", default="1")
    (('n', '100'), ('FAST', '1'))
    """
    name, equals, value = text.partition("=")
    parts = name.split(".") if option == "--arg" else [name]
    if not all(part.isidentifier() for part in parts) or not (equals or default):
        raise UsageError(option, text, "NAME=VALUE")
    return name, value if equals else default or ""


Force = Annotated[bool, typer.Option("--force", help="Replace a file of another kind, too.", rich_help_panel="Output")]
PICTURES = (".png", ".svg", ".pdf")
"""What the names of pictures end in."""


def check_outputs(
    outputs: Mapping[str, tuple[str | None, tuple[str, ...]]], *, inputs: Iterable[str | None] = (), force: bool = False
) -> None:
    """Look, before a command runs, at the files that it is told to write: by option the path, and what such files' names end in.

    None may be an input of the same call, as which a file.py:name counts. A file that is there is replaced if its name says
    that it is of the kind, or with `force`. Raises `UsageError`.
    """
    read = {os.path.realpath(text.rpartition(":")[0] or text): text for text in inputs if text is not None}
    for option, (path, endings) in outputs.items():
        if path is None:
            continue
        check_file(path, argument=option)
        target = Path(os.path.realpath(path))
        if str(target) in read:
            raise UsageError(option, path, f"another file than the input {read[str(target)]}")
        if target.is_file() and not force and not target.name.lower().endswith(endings):
            kinds = " or ".join(endings)
            raise UsageError(option, path, f"a new file, or one that ends in {kinds}; --force replaces others, too")


@contextmanager
def compiling() -> Generator[None]:
    """Print what the C++ compiler says of a source whole: it is more than one line, and the user needs all of it.

    The emulator's runtime is built with the first kernel. That takes a while, so it is said.
    """
    from flashlab.emulator import BuildError
    from flashlab.emulator.build import is_ready

    try:
        with progress.remark("" if is_ready() else "flashlab: the emulator is built first, once for all kernels"):
            yield
    except BuildError as error:
        output.remark(f"flashlab: {error}")
        raise typer.Exit(2) from None


@contextmanager
def spelled(**names: str) -> Generator[None]:
    """Errors inside name the options, not the parameters that they are passed to."""
    try:
        yield
    except UsageError as error:
        raise UsageError(names.get(error.argument, error.argument), error.value, error.accepted) from error


def target(text: str) -> Any:
    """An algorithm's name as it stands; `file.py:name` and `package.module:name` as the object of that name."""
    where, colon, name = text.rpartition(":")
    if not colon:
        return text
    accepted = "an algorithm's name, my_file.py:my_program or my_package.module:my_program"
    if where.endswith(".py") or "/" in where or "\\" in where:
        module = _module_of_file(text, Path(where), accepted)
    else:
        here = str(Path.cwd())
        if here not in sys.path:  # as `python -m` does; an installed script's path lacks the working directory
            sys.path.insert(0, here)
        module = _imported(text, lambda: importlib.import_module(where), accepted)
    found: Any = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise UsageError("algorithm", text, f"a name that {where} has") from None
    return found


def _module_of_file(text: str, path: Path, accepted: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError("algorithm", text, f"{accepted} (there is no file {path})")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # what dataclasses and pickles of the file look for
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # its own imports, as when it is run
    loader = spec.loader
    _imported(text, lambda: loader.exec_module(module), accepted)
    return module


def _imported(text: str, load: Callable[[], T], accepted: str) -> T:
    try:
        return load()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file does; its traceback would bury the reason
        raise UsageError("algorithm", text, f"{accepted} ({type(error).__name__}: {error})") from error
