"""The command line: `flashlab count flash2 --len-q 4096`. Every command wraps one Python call.

The exit status is 0 on success and 1 for a failed check. It is 2 for bad usage, for a tile that doesn't fit, and for a
missing GPU, compiler or ncu.
"""

from __future__ import annotations

import io
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashlab.base import interrupts
from flashlab.base.files import printable
from flashlab.cli import (
    audits,
    cache,
    capture,
    checks,
    counts,
    diff,
    emulate,
    info,
    lessons,
    parallel,
    run,
    serve,
    time,
)
from flashlab.views import tables
from simulator.errors import Unavailable, UsageError

__all__ = ["app", "main"]


class _OneLineErrors(TyperGroup):
    """Puts an error that the user can mend into one line on stderr, with status 2. Our own bugs give a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **more: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **more)
        try:
            status = super().main(*args, standalone_mode=False, **more)
        except Exception as error:
            text = _explained(error)
            if text is None:
                raise
            print("flashlab:", printable(" ".join(text.split())), file=sys.stderr, flush=True)
            status = 2
        sys.exit(status if isinstance(status, int) else 0)


def _explained(error: Exception) -> str | None:
    """The line that explains an error, or None where the error is a bug of ours."""
    if isinstance(error, UsageError | Unavailable):
        return str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory here: {error or 'try a smaller problem'}"
    if (
        type(error).__module__.split(".")[0] in ("torch", "cupy", "cupy_backends")
        and "out of memory" in str(error).lower()
    ):
        return f"not enough memory on the GPU: {str(error).splitlines()[0][:200]}"
    if isinstance(error, OSError):
        return f"{error.filename or _unnamed()}: {error.strerror or error}"
    if isinstance(error, typer.Abort):
        return "interrupted"
    if format_message := getattr(error, "format_message", None):  # typer's own errors, in any of its versions
        context = getattr(error, "ctx", None)
        return f"{format_message()} (see {context.command_path if context else 'flashlab'} --help)"
    return None


def _unnamed() -> str:
    """What an error of the system's is about that names no file."""
    try:
        Path.cwd()
    except OSError:
        return "the folder that this runs in is gone"
    return "input or output"


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Attention algorithms, counted to the byte: by simulator, by formula and by a GPU's own counters.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from flashlab.base.version import __version__

        print(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(  # pyright: ignore[reportUnusedFunction]
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")


lessons.register(app)
counts.register(app)
checks.register(app)
audits.register(app)
emulate.register(app)
run.register(app)
time.register(app)
serve.register(app)
parallel.register(app)
capture.register(app)
diff.register(app)
info.register(app)
cache.register(app)


def _warning(message: Warning | str, *_: object, **__: object) -> str:
    """A line, as errors have, without the source that warns."""
    return f"flashlab: {message}\n"


class Terminated(BaseException):
    """SIGTERM came. It is no SystemExit, which would be a finding where a verified kernel raises it."""


def _terminated(*_: object) -> None:
    """As at an interrupt, what was started is ended with this process."""
    raise Terminated


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks is shown as ?
    tables.give_columns()
    warnings.formatwarning = _warning
    signal.signal(signal.SIGTERM, _terminated)
    try:
        interrupts.loaded()
        app(prog_name="flashlab")
    except Terminated:
        sys.exit(143)
    except KeyboardInterrupt:
        sys.exit(130)
