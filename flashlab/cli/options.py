"""The options that commands share, and how their text becomes what the Python API takes.

A command takes a whole group of options as one parameter, a dataclass of annotated fields; `expand` spreads the fields
out for typer. Fields are None when not given, so that a command can tell.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from simulator.errors import UsageError

if TYPE_CHECKING:
    from simulator import Problem, Program, Tile

T = TypeVar("T")

DEFAULTS: dict[str, Any] = {
    "batch": 1, "heads": 2, "kv_heads": None, "len_q": 128, "len_kv": None, "head_dim": 64, "head_dim_v": None,
    "dtype": "float16", "causal": True, "window": None, "scale": None,
}  # fmt: skip
"""The problem of every command that is told none."""

_PROBLEM, _RUN = "Problem", "Run"

Algorithm = Annotated[str, typer.Argument(help="An algorithm, or a tile program of your own: my_file.py:my_program.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
DeviceName = Annotated[
    str, typer.Option("--device", help="A GPU by name: see `flashlab devices`.", rich_help_panel=_RUN)
]
Input = Annotated[
    str | None,
    typer.Option("--input", metavar="FILE", help="A .npz or .safetensors with q, k, v.", rich_help_panel=_PROBLEM),
]


def _problem_option(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=_PROBLEM)


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """Which keys a query sees, and the scale of the scores."""

    causal: Annotated[bool | None, _problem_option("Mask out later keys (default).", "--causal/--no-causal")] = None
    window: Annotated[
        str | None, _problem_option("Keys visible left and right, as in 128,0; none for all.", metavar="L,R")
    ] = None
    scale: Annotated[float | None, _problem_option("Of the scores; default 1/sqrt(head dim).")] = None

    def masks(self, causal: bool | None = None) -> dict[str, Any]:
        """The keyword arguments of `simulate`, `naive` and `Problem`; `causal` is what the data says of itself."""
        default = DEFAULTS["causal"] if causal is None else causal
        return {
            "causal": default if self.causal is None else self.causal,
            "window": window(self.window),
            "scale": self.scale,
        }


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Sizes and dtype."""

    batch: Annotated[int | None, _problem_option("Sequences; default 1.")] = None
    heads: Annotated[int | None, _problem_option("Query heads; default 2.")] = None
    kv_heads: Annotated[int | None, _problem_option("Key and value heads; default as many as the query's.")] = None
    len_q: Annotated[int | None, _problem_option("Queries of a head; default 128.")] = None
    len_kv: Annotated[int | None, _problem_option("Keys of a head; default as many as queries.")] = None
    head_dim: Annotated[int | None, _problem_option("Default 64.")] = None
    head_dim_v: Annotated[int | None, _problem_option("Head dim of the values; default the same.")] = None
    dtype: Annotated[
        str | None, _problem_option("float32, float16 (default) or bfloat16; of flash3_fp8 float8_e4m3fn.")
    ] = None

    def shape(self) -> dict[str, Any]:
        """What was given of the shape, masks apart."""
        given = {field.name: getattr(self, field.name) for field in fields(ShapeOptions)}
        return {name: value for name, value in given.items() if value is not None}

    def refuse_shape(self) -> None:
        """Called when the data says the shape: options that say it too cannot both be right."""
        for name, value in self.shape().items():
            raise UsageError(f"--{name.replace('_', '-')}", value, "nothing, the data says the shape")


@dataclass(frozen=True, kw_only=True)
class ProblemOptions(MaskOptions, ShapeOptions):
    """The fields of `Problem`."""

    def problem(self, algorithm: str | None = None) -> Problem:
        """What was given, and the defaults for the rest: of an algorithm that takes but one dtype, that."""
        from simulator import CATALOGUE, Problem

        row = CATALOGUE.get(algorithm or "")
        only: dict[str, Any] = {"dtype": row.dtypes[0]} if row and len(row.dtypes) == 1 else {}
        return Problem(**{**DEFAULTS, **only, **self.shape(), **self.masks()})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how it runs."""

    tile: Annotated[
        str | None,
        typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.", rich_help_panel=_RUN),
    ] = None
    device: DeviceName = "h100"
    lse: Annotated[bool, typer.Option("--lse", help="Also write the log-sum-exp.", rich_help_panel=_RUN)] = False

    def keywords(self) -> dict[str, Any]:
        return {"tile": tile(self.tile), "device": self.device, "lse": self.lse}


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: a parameter that is a dataclass of options replaced by its fields."""
    hints = get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = hints[name]
        if not is_dataclass(group):
            plain.append(parameter.replace(annotation=group, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(group, type)
        inner = get_type_hints(group, include_extras=True)
        groups[name] = group, [field.name for field in fields(group)]
        plain += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=inner[field.name]
            )
            for field in fields(group)
        ]

    def run(**values: Any) -> None:
        for name, (group, members) in groups.items():
            values[name] = group(**{member: values.pop(member) for member in members})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(plain)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in plain}
    return run


def window(text: str | None) -> tuple[int | None, int | None] | None:
    """A window from text.

    >>> window("128,0"), window("none,64")
    ((128, 0), (None, 64))
    """
    if text is None:
        return None
    sides = [side.strip().lower() for side in text.split(",")]
    try:
        left, right = (None if side in ("", "none") else int(side) for side in sides)
    except ValueError:
        raise UsageError("--window", text, "left,right: each a number of keys or none, as in 128,0") from None
    return left, right


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

    found = target(text)
    if not isinstance(found, str | Program):
        raise UsageError("algorithm", text, "a tile program, as @flashlab.program makes them")
    return found


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
