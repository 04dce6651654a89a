"""`flashlab run` runs a whole CUDA program on the CPU: its `main`, or one of its functions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import options, output
from flashlab.cli.emulate import keep, print_launch, values, verdict
from flashlab.cli.options import DeviceName, Force, Json
from flashlab.views import progress, tables
from simulator.errors import UsageError

if TYPE_CHECKING:
    from flashlab.emulator.programs import ProgramLaunch, ProgramRun

_SECONDS = 300


def register(app: typer.Typer) -> None:
    options.add(
        app,
        run,
        "flashlab run saxpy.cu",
        "flashlab run saxpy.cu -- 1000 --verbose",
        "flashlab run mine.cu --call solve --arg 'x=float32[100]' --arg n=100",
    )


def run(
    file: Annotated[str, typer.Argument(metavar="FILE.cu", help="A CUDA program.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments, behind --.")] = None,
    call: Annotated[
        str | None, typer.Option(metavar="FUNCTION", help="Call this function of the host in place of main.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A parameter of that function, said as for `flashlab emulate`: an array is passed as a pointer to device memory.",
        ),
    ] = None,
    define: Annotated[list[str] | None, typer.Option("--define", "-D", metavar="NAME=VALUE", help="A macro.")] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", "-I", metavar="FOLDER", help="Where headers lie.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="The standard of C++: c++14, c++17 (unless said) or c++20.")] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help=f"Seconds of processor time after which it is stopped; 0: never. Default {_SECONDS}."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE.npz", help="Save the arrays of --arg as the function left them.")
    ] = None,
    force: Force = False,
    device: DeviceName = "h100",
    sanitize: Annotated[bool, typer.Option("--sanitize/--no-sanitize", help="Look for misuse.")] = True,
    json: Json = False,
) -> None:
    """Run a CUDA program on the CPU: its output, every misuse named, every byte counted. It is native code, in no sandbox."""
    from flashlab.emulator.programs import run_program

    if call is None and (arg or out):
        raise UsageError(
            "--arg" if arg else "--out",
            (arg or [out])[0],
            "nothing without --call: a program's own stand behind --",
        )
    if call is not None and arguments:
        raise UsageError("arguments", " ".join(arguments), "nothing with --call: a function takes --arg")
    read = [file, *(options.named("--arg", each)[1] for each in arg or ())]
    options.check_outputs({"--out": (out, (".npz",))}, inputs=read, force=force)
    given: dict[str, Any] = {
        "call": call,
        "given": values("--arg", arg or []) if call else None,
        "macros": dict(options.named("--define", each, default="1") for each in define or []),
        "includes": include or [],
        "std": std or "c++17",
        "device": device,
        "sanitize": sanitize,
        "time_limit": _SECONDS if time_limit is None else time_limit,
    }
    with options.compiling(), progress.busy("running"):
        done = run_program(file, arguments or [], **given)
    if out is not None:
        keep(Path(out), done.arrays)
    if json:
        output.document(done.to_dict())
    else:
        _show(done)
    print("flashlab: native code of the file ran here, with your rights", file=sys.stderr)
    if not done.passed:
        raise typer.Exit(2 if done.unfinished else 1)


def _show(done: ProgramRun) -> None:
    print(done.printed, end="" if done.printed.endswith("\n") or not done.printed else "\n")
    for each in done.launches:
        print_launch(each.launched, _title(each))
    if any(each.launched.plain for each in done.launches):
        tables.line("Loads and stores are as the host compiler made them: nvcc may merge, hoist or split others.")
    for each in done.launches:
        for note in each.launched.notes:
            tables.line(f"note: {note}")
    for note in done.notes:
        tables.line(f"note: {note}")
    verdict(done.complaints(), "no misuse")


def _title(each: ProgramLaunch) -> str:
    """`scale<128> at mine.cu:12: grid 8, block 128, 3 times`."""

    def spelled(extent: tuple[int, int, int]) -> str:
        x, y, z = extent
        return ",".join(map(str, (x, y, z) if z > 1 else (x, y) if y > 1 else (x,)))

    sram = f", {each.sram:,} bytes of dynamic SRAM" if each.sram else ""
    times = f", {each.times:,} times" if each.times > 1 else ""
    return f"{each.kernel} at {each.line or '?'}: grid {spelled(each.grid)}, block {spelled(each.block)}{sram}{times}"
