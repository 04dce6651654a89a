"""`flashlab emulate` runs, sanitises and counts an algorithm's kernels, or anybody's `.cu` file, on the CPU."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import completion, options, output
from flashlab.cli.options import Force, Json, ProblemOptions, RunOptions
from flashlab.views import progress, tables
from simulator import catalogue
from simulator.errors import UsageError, unknown
from simulator.memory import check_memory

if TYPE_CHECKING:
    from flashlab.emulator import FileRun, Launched
    from flashlab.run.emulated import Emulation
    from simulator import Problem

_FILE = "A .cu file, or a .py file with CUDA in a string"
_FILES = re.compile(r"\.cu$|\.py(:.+)?$")
_FILE_SECONDS = 60
_WORDS = {"null": None, "nullptr": None, "true": True, "false": False}
_POISON = re.compile(r":poison\((\d+:\d+(?:,\d+:\d+)*)\)$")
_ARRAY = re.compile(r"(bool|[a-z]+\d\w*)\[([\d, x]+)\](?::(\w+)(?:\((.*)\))?)?$")


def register(app: typer.Typer) -> None:
    options.add(
        app,
        emulate,
        "flashlab emulate flash2 --len-q 256 --causal",
        "flashlab emulate sums.cu --grid 4 --block 128 --arg 'x=float32[512]'",
        "flashlab emulate mine.py:scale --grid 4 --block 128 --arg 'x=float32[512]'",
        "flashlab emulate attention.cu --as flash2 --len-q 100",
    )


def emulate(
    problem: ProblemOptions,
    run: RunOptions,
    target: Annotated[
        str,
        typer.Argument(
            help="An algorithm, a .cu file, or a .py file with CUDA in a string: FILE.py:kernel.",
            autocompletion=completion.algorithms,
        ),
    ] = "flash2",
    stands_for: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="ALGORITHM", help="Run it in place of this algorithm's own file.", rich_help_panel=_FILE
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="Which of its kernels to run: k, space::k, or 'k<64, float>'.", rich_help_panel=_FILE),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(metavar="X,Y,Z", help="Blocks per grid; else as the file launches it.", rich_help_panel=_FILE),
    ] = None,
    block: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="Threads per block; likewise.", rich_help_panel=_FILE)
    ] = None,
    sram: Annotated[
        int | None,
        typer.Option(help="Dynamic shared memory, bytes per block; likewise.", rich_help_panel=_FILE),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", help="Run only N of the grid's blocks, spread over it.", rich_help_panel=_FILE),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A parameter: a number, float32\\[100,64] (random; with :zeros, :full(-inf) or :out behind it, "
            "zeros, a value, or an array for the kernel to fill), or x.npy; with :poison(32:64) elements 32 to 63 belong to "
            "nobody.",
            rich_help_panel=_FILE,
        ),
    ] = None,
    define: Annotated[
        list[str] | None, typer.Option("--define", "-D", metavar="NAME=VALUE", help="A macro.", rich_help_panel=_FILE)
    ] = None,
    symbol: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A __constant__ or __device__ variable, said as for --arg.",
            rich_help_panel=_FILE,
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", "-I", metavar="FOLDER", help="Where headers lie.", rich_help_panel=_FILE),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(help="The standard of C++: c++14, c++17 (unless said) or c++20.", rich_help_panel=_FILE),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds of processor time after which it is stopped; 0: never. Default 60, for an algorithm of flashlab's "
            "own never.",
            rich_help_panel=_FILE,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE.npz", help="Save the arrays as the kernel left them.", rich_help_panel=_FILE),
    ] = None,
    script: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Run the .py file itself, its CuPy kernels on the emulator, with memory as it lies.",
            rich_help_panel=_FILE,
        ),
    ] = False,
    force: Force = False,
    sanitize: Annotated[bool, typer.Option("--sanitize/--no-sanitize", help="Look for misuse.")] = True,
    json: Json = False,
) -> None:
    """Run CUDA on the CPU: right numbers, every misuse named, every byte counted. It needs a C++ compiler, no GPU."""
    if script:
        if not target.endswith(".py") or stands_for is not None:
            raise UsageError("--run", target, "a .py file: only a script runs as a whole")
        _refuse_without_meaning(problem, run)
        others: dict[str, Any] = {
            "--kernel": kernel,
            "--grid": grid,
            "--block": block,
            "--sram": sram,
            "--arg": arg,
            "--symbol": symbol,
            "--out": out,
        }
        for name, value in others.items():
            if value is not None:
                raise UsageError(name, value, "nothing: a script says it with --run")
        with options.compiling():
            limit = _FILE_SECONDS if time_limit is None else time_limit
            _run_script(target, _compiled(define, include, std) | {
                "blocks": blocks, "device": run.device, "sanitize": sanitize, "time_limit": limit}, json)  # fmt: skip
        return
    if _FILES.search(target) and stands_for is None:
        _refuse_without_meaning(problem, run)
        read = [
            target.partition(":")[0] if ".py:" in target else target,
            *(options.named("--arg", each)[1] for each in (*(arg or ()), *(symbol or ()))),
        ]
        options.check_outputs({"--out": (out, (".npz",))}, inputs=read, force=force)
        given: dict[str, Any] = {
            "kernel": kernel,
            "grid": grid and options.values("--grid", grid, int),
            "block": block and options.values("--block", block, int),
            "sram": sram,
            "blocks": blocks,
            **_compiled(define, include, std),
            "symbols": values("--symbol", symbol or []),
            "device": run.device,
            "sanitize": sanitize,
            "time_limit": _FILE_SECONDS if time_limit is None else time_limit,
        }
        with options.compiling():
            _run_file(target, values("--arg", arg or []), given, out, json)
        return
    if stands_for is None and target not in catalogue.CATALOGUE:
        raise unknown("target", target, [*catalogue.CATALOGUE, "a file that ends in .cu or .py"])
    others = {
        "--kernel": kernel,
        "--grid": grid,
        "--block": block,
        "--sram": sram,
        "--blocks": blocks,
        "--arg": arg,
        "--define": define,
        "--symbol": symbol,
        "--include": include,
        "--std": std,
        "--out": out,
    }
    for name, value in others.items():
        if value is not None:
            raise UsageError(name, value, "nothing: an algorithm brings its launches and arguments")
    seconds = (_FILE_SECONDS if stands_for else 0) if time_limit is None else time_limit
    with options.compiling():
        _run_algorithm(stands_for or target, target if stands_for else None, problem, run, seconds, sanitize, json)


def _compiled(define: Sequence[str] | None, include: Sequence[str] | None, std: str | None) -> dict[str, Any]:
    """How a file is compiled."""
    macros = dict(options.named("--define", each, default="1") for each in define or [])
    return {"macros": macros, "includes": include or [], "std": std or "c++17"}


def _refuse_without_meaning(problem: ProblemOptions, run: RunOptions) -> None:
    given: dict[str, Any] = {**problem.given, "tile": run.tile, "lse": run.lse or None}
    for name, value in given.items():
        if value is not None:
            raise UsageError(options.spelling(name), value, "nothing: it is for an algorithm, or with --as")


def _run_algorithm(
    algorithm: str,
    source: str | None,
    problem: ProblemOptions,
    run: RunOptions,
    time_limit: float,
    sanitize: bool,
    json: bool,
) -> None:
    import numpy as np

    import flashlab as fl

    p, operation = problem.problem(algorithm), catalogue.get(algorithm).operation
    catalogue.get(algorithm).check(p)  # arrays don't say all of it
    arrays = operation.draw(p, seed=0)
    options_of_run: dict[str, Any] = {
        **p.masks,
        **run.keywords(operation),
        "sanitize": sanitize,
        "source": source,
        "time_limit": time_limit,
    }
    with progress.busy("emulating"):
        done = fl.emulate(algorithm, **arrays, **options_of_run)
    truth = operation.judge(p, arrays)
    differences = [np.abs(done.outputs[x.name].astype(np.float64) - truth[x.name]) for x in operation.written(p)]
    error = max(float(x.max(initial=0)) for x in differences)
    stopped = any(launched.stopped for launched in done.launches)  # then there are no numbers to judge
    wrong = None if stopped else _wrong(algorithm, p, arrays, done)
    passed = done.passed and wrong is None
    if json:
        output.document(
            {
                **done.to_dict(),
                "passed": passed,
                "max_error": error,
                "numbers": "not judged" if stopped else wrong or "right",
            }
        )
    else:
        for launched in done.launches:
            print_launch(launched)
            _note(launched)
        tables.line(f"largest difference from naive {operation.name} in float64: {error:.2g}")
        complaints = [*done.complaints(), *([] if wrong is None else [f"wrong numbers: {wrong}"])]
        hbm = done.counts.hbm
        moved = hbm.read + hbm.write + hbm.atomic
        verdict(complaints, f"the numbers are right, and every byte is the formula's ({moved:,} of HBM)")
    if not passed:
        raise typer.Exit(2 if any(launched.unfinished for launched in done.launches) else 1)


def _wrong(algorithm: str, problem: Problem, arrays: dict[str, Any], done: Emulation) -> str | None:
    """What the rule of the algorithm's operation says against the numbers; None: they are right."""
    from flashlab.verify.bench import Failure
    from flashlab.verify.general import judged
    from flashlab.verify.rule import expect, judge
    from simulator.operations.attention import ATTENTION

    row = catalogue.get(algorithm)
    if row.operation is ATTENTION:  # whose rule says which row
        return judge(expect(problem, **arrays), done.out, done.lse).message
    try:
        judged(row, problem, arrays, done.outputs)
    except Failure as failure:
        return str(failure)
    return None


def _run_file(path: str, arguments: dict[str, Any], given: dict[str, Any], out: str | None, json: bool) -> None:
    from flashlab.emulator.apart import emulate_apart

    # what the kernel prints stands beside a document, not in it
    with progress.busy("emulating"), redirect_stdout(sys.stderr if json else sys.stdout):
        done = emulate_apart(path, arguments, **given)
    if out is not None:
        keep(Path(out), done.symbols | done.arrays)
    if json:
        output.document(done.to_dict())
    else:
        _print_file(done)
        verdict(done.complaints(), "no misuse")
    if not done.passed:
        raise typer.Exit(2 if done.launched.unfinished else 1)


def _run_script(path: str, given: dict[str, Any], json: bool) -> None:
    from flashlab.emulator.apart import run_script_apart

    with progress.busy("running"), redirect_stdout(sys.stderr if json else sys.stdout):
        done = run_script_apart(path, **given)
    if json:
        output.document(done.to_dict())
    else:
        for launch in done.launches:
            _print_file(launch)
        complaints = [each for launch in done.launches for each in launch.complaints()]
        if done.error is not None:
            complaints.append(f"the script failed: {done.error}")
        n = len(done.launches)
        verdict(complaints, f"no misuse in {n} launch{'es' if n != 1 else ''}")
    if not done.passed:
        raise typer.Exit(2 if any(launch.launched.unfinished for launch in done.launches) else 1)


def values(option: str, texts: Iterable[str]) -> dict[str, Any]:
    """What NAME=VALUE says of each name, once."""
    found: dict[str, Any] = {}
    for name, text in (options.named(option, each) for each in texts):
        if name in found:
            raise UsageError(option, f"{name}={text}", f"{name} once")
        found[name] = _value(f"{option} {name}", text)
    return found


def _value(name: str, text: str) -> Any:
    """A parameter's value from its text: a number, an array from a file, or an array described by dtype and shape."""
    import numpy as np

    from flashlab.emulator import Empty, Poisoned
    from simulator.dtypes import numpy_dtype

    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if text in _WORDS:
        return _WORDS[text]
    if found := _POISON.search(text):
        parts = [tuple(int(n) for n in part.split(":")) for part in found[1].split(",")]
        with options.spelled(parts=name, values=name):
            return Poisoned(_value(name, text[: found.start()]), [(start, stop) for start, stop in parts])
    file, _, key = text.partition(":")
    if file.endswith((".npy", ".npz")):
        try:
            with open(file, "rb") as opened:
                stored: Any = np.load(opened, allow_pickle=False)
                if file.endswith(".npy"):
                    return stored
                if key not in stored.files:
                    raise UsageError(name, text, f"FILE.npz:NAME, one of {', '.join(stored.files)}")
                return stored[key]
        except UsageError:
            raise
        except Exception as error:  # parsers of a stranger's file raise a dozen kinds
            raise UsageError(name, text, f"NumPy arrays in a file ({error or type(error).__name__})") from None
    accepted = "a number, DTYPE[SHAPE] as in float32[100,64] (random), with :zeros, :full(VALUE) or :out behind it, or a .npy file"
    if "poison" in text:
        raise UsageError(
            name, text, "elements from and to in :poison(…) at the end, as in float32[128]:poison(32:64,96:128)"
        )
    match = _ARRAY.match(text)
    if not match or match[3] not in (None, "zeros", "out", "random", "full"):
        raise UsageError(name, text, accepted)
    try:
        dtype, shape = numpy_dtype(match[1]), tuple(int(n) for n in re.split("[,x]", match[2]))
    except (TypeError, ValueError):
        raise UsageError(name, text, accepted) from None
    made = 0 if match[3] in ("out", "zeros") else 8  # what is drawn or filled is wide first
    check_memory(f"{name}, {text}", math.prod(shape) * (dtype.itemsize + made))
    if match[3] == "out":
        return Empty(shape, match[1])
    if match[3] == "zeros":
        return np.zeros(shape, dtype)
    if match[3] == "full":
        try:
            return np.full(shape, float(match[4]) if dtype.kind not in "iub" else int(match[4])).astype(dtype)
        except (TypeError, ValueError):
            raise UsageError(name, text, "a number in :full(…), as in float32[8]:full(-inf)") from None
    random = np.random.default_rng(0)
    if dtype.kind in "iu":
        return random.integers(0, 100, shape).astype(dtype)
    return random.standard_normal(shape, np.float32).astype(dtype)


def keep(path: Path, arrays: Mapping[str, Any]) -> None:
    """Save arrays in an .npz file."""
    import io

    import numpy as np

    from flashlab.base.files import replace_file

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    replace_file(path, buffer.getvalue(), argument="--out")


def print_launch(launched: Launched, title: str | None = None) -> None:
    """Print what a launch moved: one line per step, tensor and kind of instruction."""
    rows = [
        (
            row.step or "-",
            row.tensor,
            f"{row.space.upper()} {row.op}",
            f"{row.instructions:,}",
            f"{row.bytes:,}",
            f"{row.sectors:,}" if row.space == "hbm" else "",
            f"{row.wavefronts:,}" if row.space == "sram" else "",
            f"{row.wavefronts - row.ideal:,}" if row.space == "sram" else "",
        )
        for row in launched.moved
    ]
    columns = ("step", "tensor", "", "warp instructions", "bytes", "sectors", "wavefronts", "conflicts")
    tables.table(title or launched.kernel, columns, rows, left=3)


def _print_file(done: FileRun) -> None:
    print_launch(done.launched)
    for note in done.notes:
        tables.line(note)
    if done.launched.plain:
        tables.line("Loads and stores are as the host compiler made them: nvcc may merge, hoist or split others.")
    _note(done.launched)


def _note(launched: Launched) -> None:
    for note in launched.notes:
        tables.line(f"note: {note}")


def verdict(complaints: Sequence[str], praise: str) -> None:
    """Print what is wrong, a line each, and how much that is; or that nothing is."""
    for complaint in complaints:
        tables.line(complaint)
    found = f"{len(complaints)} finding{'s' if len(complaints) > 1 else ''}"
    tables.line(found if complaints else f"passed: {praise}")
