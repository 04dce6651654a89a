"""The commands that run anywhere: compare, count, simulate, sweep, trace, devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import completion, options, output
from flashlab.cli.options import PICTURES, Algorithm, AxesOptions, Force, Input, Json, ProblemOptions, RunOptions
from flashlab.views import figures, progress, sheets, tables
from simulator.catalogue import get
from simulator.devices import Device
from simulator.errors import SramOverflow, UsageError
from simulator.memory import check_memory
from simulator.operations.attention import ATTENTION
from simulator.problem import MASKS, Problem, Tile
from simulator.simulate import trace_size

if TYPE_CHECKING:
    from flashlab.run.inputs import Inputs
    from simulator.operations.operation import Operation
    from simulator.simulate import Run
    from simulator.trace import Trace

_OUTPUT = "Output"
_MANY_SCORES = 1e10


def register(app: typer.Typer) -> None:
    options.add(
        app,
        compare,
        "flashlab compare --sample --out pictures",
        "flashlab compare flash1 flash2 --len-q 4096 --heads 8 --device a100",
        "flashlab compare standard my_file.py:my_program --input mine.npz",
    )
    options.add(
        app,
        count,
        "flashlab count flash2 --len-q 4096 --head-dim 128 --tile 64x64",
        "flashlab count standard --len-q 1000000 --heads 8 --json",
        "flashlab count flash3 --lengths 100,2000:3000,7 --dtype bfloat16",
    )
    options.add(
        app,
        simulate,
        "flashlab simulate flash1 --len-q 256 --no-causal --lse",
        "flashlab simulate flash2 --input mine.npz --window 128,0",
    )
    options.add(
        app,
        sweep,
        "flashlab sweep flash1 flash2 --len-q 1024,4096 --sram 65536,232448",
        "flashlab sweep flash2 --head-dim 64,128 --csv rows.csv --plot rows.png",
    )
    options.add(
        app,
        trace,
        "flashlab trace flash2 --len-q 128 --tile 32x32 --html flash2.html",
        "flashlab trace standard --tile 32x32 --against flash2 --html page.html",
        "flashlab trace flash2 --head 0,1 --json",
    )
    options.add(app, devices, "flashlab devices", "flashlab devices --json")


def compare(
    problem: ProblemOptions,
    run: RunOptions,
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names, or programs of your own; all that there are by default.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    input: Input = None,
    sample: Annotated[
        bool,
        typer.Option("--sample", help="Run on the real q, k, v that come with flashlab.", rich_help_panel="Problem"),
    ] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Compare backward passes.")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Draw pictures into this folder.", rich_help_panel=_OUTPUT)
    ] = None,
    json: Json = False,
) -> None:
    """Algorithms side by side: by formula or, on real data, with the error against naive attention."""
    import flashlab as fl
    from flashlab.base.files import check_folder

    if out is not None:
        check_folder(out, argument="--out")
    targets = [options.algorithm(name) for name in algorithms] if algorithms else None
    keywords: dict[str, Any] = {"algorithms": targets, "backward": backward, **run.keywords()}
    keywords["progress"] = progress.track("algorithms")
    data = _data(problem, input, sample=sample)
    if data is None:
        found = fl.compare(problem.problem(options.of_one_operation(algorithms or [])), **keywords)
    else:
        found = fl.compare(data, **problem.masks(data.causal), **keywords)
    document = found.to_dict()
    if not json:
        sheets.of_comparison(found).print()
        tables.line("HBM: bytes requested, exact. DRAM: what reaches it, estimated. Tiles: " + _tiles(found.rows))
        if data is not None:
            unchecked = any(row.error is None for row in found.rows)
            said = (
                "not computed: naive attention would take too much" if unchecked else "2-norm, relative to the result's"
            )
            judge = (
                "gradients in float64, for a random gradient of the output"
                if backward
                else "naive attention in float64"
            )
            tables.line(f"error: against {judge}, {said}")
    if out is not None:
        with progress.busy("drawing"), options.spelled(path="--out"):
            pictures = found.plot(out)
        paths = {name: str(Path(out) / f"{name}.png") for name in pictures}
        document["pictures"] = paths
        if not json:
            for path in paths.values():
                tables.line(path)
    if json:
        output.document(document)


def _tiles(rows: Any) -> str:
    return ", ".join(f"{row.algorithm} {row.counts.tile}" for row in rows)


def _data(problem: ProblemOptions, path: str | None, *, sample: bool) -> Inputs | None:
    """What a command was told to use; None for nothing."""
    import flashlab as fl

    if path is None and not sample:
        return None
    if path is not None and sample:
        raise UsageError("--input", path, "one of --input and --sample")
    problem.refuse_shape()
    if path is None:
        return fl.sample()
    with options.spelled(path="--input"):
        data = fl.load_inputs(path)
    if "converted" in data.note:
        output.remark(f"{path}: {data.note['converted']}")
    return data


def _arrays(
    problem: ProblemOptions, path: str | None, seed: int, algorithm: str, shown: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], bool | None]:
    """An algorithm's operands by name, given or random, and whether a file says that they are causal. `shown` is what random ones
    are of, where nothing else is given."""
    operation = get(options.algorithm(algorithm)).operation
    if seed < 0:
        raise UsageError("--seed", seed, "an integer of at least 0")
    if path is not None and operation is not ATTENTION:
        raise UsageError("--input", path, f"nothing: {operation.name} gets random operands")
    data = _data(problem, path, sample=False)
    if data is None:
        posed = problem.problem(algorithm, shown)
        get(options.algorithm(algorithm)).check(posed)  # arrays don't say all of it
        return operation.draw(posed, seed), None
    return {"q": data.q, "k": data.k, "v": data.v}, data.causal


def count(algorithm: Algorithm, problem: ProblemOptions, run: RunOptions, json: Json = False) -> None:
    """The bytes and FLOPs of one algorithm, from its formula, at any size."""
    import flashlab as fl

    target = options.algorithm(algorithm)
    counted = fl.count(target, problem.problem(algorithm), **run.keywords(get(target).operation))
    if json:
        output.document(counted.to_dict())
    else:
        for sheet in sheets.of_counts(counted):
            sheet.print()


def simulate(
    algorithm: Algorithm,
    problem: ProblemOptions,
    run: RunOptions,
    input: Input = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.", rich_help_panel="Problem")] = 0,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save out (and lse) as .npz.", rich_help_panel=_OUTPUT)
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Run a tile program on random or given data: the numbers, their error, and every byte."""
    import flashlab as fl

    options.check_outputs({"--out": (out, (".npz",))}, inputs=(input, algorithm), force=force)
    target = options.algorithm(algorithm)
    data, causal = _arrays(problem, input, seed, algorithm)
    operation = get(target).operation
    posed = operation.problem(data, **problem.masks(causal))
    scores = posed.batch * posed.heads * posed.len_q * posed.len_kv
    slow = f"{scores:.1e} scores take a while; `flashlab count` gets the same counts from the formula at once"
    with progress.busy("simulating"), progress.remark(slow if "q" in data and scores > _MANY_SCORES else ""):
        found = fl.simulate(target, **data, **problem.masks(causal), **run.keywords(operation))
        error, said = _error_of(operation, found, data)
    if out is not None:
        _save(out, found)
    numbers = {
        x.name: _numbers(found.outputs[x.name]) if x.name in found.outputs else None
        for x in operation.outputs
        if x.when(found.counts.problem)
    }
    if json:
        output.document({**numbers, "error": error, "counts": found.counts.to_dict()})
        return
    columns = ("numbers", "shape", "dtype", "min", "mean", "max")
    rows = [
        (name, " × ".join(map(str, n["shape"])), n["dtype"], *(f"{n[key]:.4g}" for key in ("min", "mean", "max")))
        for name, n in numbers.items()
        if n is not None
    ]
    tables.table(f"{found.counts.algorithm} on {'random data' if input is None else input}", columns, rows, left=3)
    tables.line(said)
    for x in operation.written(found.counts.problem):
        if lost := int((found.outputs[x.name] != found.outputs[x.name]).sum()):  # NaN, in any dtype
            tables.line(
                f"{lost:,} elements of {x.name} are NaN: never stored, or 0 / 0? `flashlab verify` finds a small case"
            )
    if out is not None:
        tables.line(out)
    tables.line()
    for sheet in sheets.of_counts(found.counts):
        sheet.print()


def _error_of(operation: Operation, run: Run, arrays: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """How far a run's outputs are from the truth in float64, as data and in words."""
    import numpy as np

    from flashlab.views.comparison import MOST_SCORES, Error, Reference, error_of, reference_of

    p = run.counts.problem
    if operation is ATTENTION:
        reference = reference_of(p, arrays)
        if reference is None:
            return None, "error: not computed, naive attention would take too much memory or time"
        error = error_of(run.out, run.lse, reference)
        return asdict(error), f"error against naive attention in float64: {_words(error)}"
    if p.batch * p.heads * p.len_q * p.len_kv > MOST_SCORES[0]:
        return None, f"error: not computed, naive {operation.name} would take too much memory or time"
    truth = operation.judge(p, arrays)
    errors: dict[str, Error] = {
        x.name: error_of(run.outputs[x.name], None, Reference(truth[x.name], np.empty(0))) for x in operation.written(p)
    }
    said = "; ".join(f"{name} {_words(error)}" for name, error in errors.items())
    return {
        name: asdict(error) for name, error in errors.items()
    }, f"error against naive {operation.name} in float64: {said}"


def _words(error: Any) -> str:
    lse = "" if error.lse is None else f"; LSE {error.lse:.1e}"
    return f"{error.relative:.1e} relative, largest {error.max:.1e}{lse}"


def _numbers(x: Any) -> dict[str, Any]:
    import numpy as np

    wide = np.asarray(x, np.float64)
    finite = wide[np.isfinite(wide)]
    some = finite.size > 0
    return {
        "shape": list(x.shape),
        "dtype": x.dtype.name,
        "finite": int(finite.size),
        "min": float(finite.min()) if some else float("nan"),
        "mean": float(finite.mean()) if some else float("nan"),
        "max": float(finite.max()) if some else float("nan"),
    }


def _save(path: str, run: Any) -> None:
    """bfloat16, which .npz files have no type for, becomes float32: no bit is lost."""
    import io

    import numpy as np

    from flashlab.base.files import replace_file

    wide = {name: x.astype(np.float32) if x.dtype.name == "bfloat16" else x for name, x in run.outputs.items()}
    content = io.BytesIO()
    np.savez(content, **wide)
    replace_file(path, content.getvalue(), argument="--out")


def _axis(text: str, metavar: str) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=options.AXES)


@dataclass(frozen=True, kw_only=True)
class MachineAxes:
    """What a sweep varies beside the problem, as text."""

    sram: Annotated[str | None, _axis("Bytes that a block may use; default the device's.", "BYTES,…")] = None
    tile: Annotated[str | None, _axis("Default the kernel's own.", "64x64,…")] = None
    device: Annotated[str, _axis("GPUs by name.", "NAME,…")] = "h100"

    def swept(self) -> dict[str, Any]:
        """The keyword arguments of `sweep`."""
        axes: dict[str, Any] = {
            "device": options.values("--device", self.device, str),
            "sram": options.values("--sram", self.sram, int),
            "tile": options.values("--tile", self.tile, options.tile),
        }
        return {name: each for name, each in axes.items() if each}


def sweep(
    algorithms: Annotated[
        list[str], typer.Argument(help="Names, or programs of your own.", autocompletion=completion.algorithms)
    ],
    axes: AxesOptions,
    machine: MachineAxes,
    lse: Annotated[bool, typer.Option("--lse", help="Also write the log-sum-exp.")] = False,
    dram: Annotated[bool, typer.Option("--dram", help="Also estimate DRAM reads, up to half a second a row.")] = False,
    csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the rows here.", rich_help_panel=_OUTPUT)
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw them here (.png, .svg, .pdf).", rich_help_panel=_OUTPUT)
    ] = None,
    x: Annotated[str | None, typer.Option(help="Of the plot; default the first axis.", rich_help_panel=_OUTPUT)] = None,
    y: Annotated[
        str | None, typer.Option(help="Of the plot: any figure of a row; default hbm_read.", rich_help_panel=_OUTPUT)
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Every combination of the axes as a row: table, CSV, plot. What doesn't fit in SRAM is a row with the reason."""
    import flashlab as fl

    for option, value in (("--x", x), ("--y", y)):
        if value is not None and plot is None:
            raise UsageError(option, value, "--plot FILE beside it: it is for the plot")
    files = {"--csv": (csv, (".csv",)), "--plot": (plot, PICTURES)}
    options.check_outputs(files, inputs=algorithms, force=force)
    base = axes.problem(options.of_one_operation(algorithms))
    targets = [options.algorithm(name) for name in algorithms]
    found = fl.sweep(
        targets, base, **axes.swept, **machine.swept(), lse=lse, dram=dram, progress=progress.track("cells")
    )
    if csv is not None:
        with options.spelled(path="--csv"):
            found.to_csv(csv)
    if plot is not None:
        with options.spelled(path="--plot", x="--x", y="--y"):
            found.plot(x, y or "hbm_read", plot)
    if json:
        output.document(found.to_dict())
        return
    with suppress(UsageError):  # one value may need another axis's: 4 KV heads more than the default heads
        base = base.replace(**{name: values[0] for name, values in axes.swept.items() if len(values) == 1})
    sheets.of_sweep(found, figures.problem(base, length=False)).print()
    for path in (csv, plot):
        if path is not None:
            tables.line(path)


def trace(
    algorithm: Algorithm,
    problem: ProblemOptions,
    run: RunOptions,
    input: Input = None,
    head: Annotated[str, typer.Option(metavar="B,H", help="The batch and head to record.")] = "0,0",
    seed: Annotated[int, typer.Option(help="Of the random inputs.", rich_help_panel="Problem")] = 0,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the trace here, as JSON.", rich_help_panel=_OUTPUT)
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page here that steps through it.", rich_help_panel=_OUTPUT),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="ALGORITHM",
            help="With --html: side by side with this one.",
            rich_help_panel=_OUTPUT,
            autocompletion=completion.algorithms,
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --html: the .cu to show; default its own.", rich_help_panel=_OUTPUT),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Record every step of one head: what it moved, what was alive in SRAM, and the values it computed.

    Without lengths or pages it is a small problem of what the algorithm is for: a query or two against keys in four chunks, two
    requests in shuffled pages, four requests with a prefix. Without --tile, tiles are a quarter of each length, where the algorithm
    takes such tiles."""
    import flashlab as fl
    from flashlab.base.files import replace_file

    for option, value in (("--against", against), ("--kernel", kernel)):
        if value is not None and html is None:
            raise UsageError(option, value, "--html FILE beside it: it is for the page")
    files = {"--out": (out, (".json",)), "--html": (html, (".html", ".htm"))}
    options.check_outputs(files, inputs=(input, algorithm, against, kernel), force=force)
    which = options.values("--head", head, int)
    if len(which) != 2:
        raise UsageError("--head", head, "batch,head, as in 0,1")
    shown: Mapping[str, Any] = problem.shown(algorithm) if input is None else {}
    data, causal = _arrays(problem, input, seed, algorithm, shown)
    masks = {name: value for name, value in shown.items() if name in MASKS} | problem.masks(causal)
    targets = [options.algorithm(name) for name in (algorithm, against) if name is not None]
    if run.tile is None:
        run = replace(run, tile=_tile(targets, data, masks, run.device, shown.get("tile")))
    asked = run.keywords(get(targets[0]).operation)
    keywords: dict[str, Any] = {**masks, **asked, "trace": (which[0], which[1])}
    if html is not None:
        _check_page(targets, data, masks, run)
    with progress.busy("tracing"):
        traces = [fl.simulate(target, **data, **keywords).trace for target in targets]
    if html is not None:
        steps = max(len(each.events) for each in traces if each is not None)
        with progress.busy(f"writing a page of {steps:,} steps"), options.spelled(path="--html", kernel="--kernel"):
            fl.player(*filter(None, traces), kernel=kernel).save(html)
    recorded = traces[0]
    assert recorded is not None
    if out is not None:
        replace_file(out, recorded.to_json(), argument="--out")
    if json:
        tables.line(recorded.to_json())
        return
    _print_trace(recorded)
    tables.line("\n".join(filter(None, (out, html))) or "--html FILE steps through it, --out FILE keeps it")


def _tile(
    targets: Sequence[Any], data: Mapping[str, Any], masks: Mapping[str, Any], device: str, shown: str | None
) -> str | None:
    """The tile that is `shown`, or one that cuts S into four by four, so that there is something to watch, or into rows of 64 for
    a kernel of warpgroups. None, the kernel's own, if an algorithm takes none of these."""
    rows = [get(target) for target in targets]
    problems = [row.operation.problem(data, **masks) for row in rows]
    height, width = (max(16, -(-n // 64) * 16) for n in (problems[0].len_q, problems[0].len_kv))
    for tile in (*([Tile.parse(shown)] if shown else []), Tile(height, width), Tile(64, width)):
        if all(_takes(*each, tile, device) for each in zip(rows, problems, strict=True)):
            return str(tile)
    return None


def _takes(row: Any, problem: Problem, tile: Tile, device: str) -> bool:
    """Does an algorithm take a tile?"""
    try:
        row.program.configure(problem, Device.named(device), tile)
    except (UsageError, SramOverflow):
        return False
    return row.support.tile(tile, problem) is None


def _check_page(targets: Sequence[Any], data: Mapping[str, Any], masks: Mapping[str, Any], run: RunOptions) -> None:
    """Refuse a page beforehand that would exceed the memory, together with the traces that it shows."""
    from flashlab.player.page import page_bytes

    sizes: list[tuple[int, int]] = []
    for row in map(get, targets):
        problem, asked = row.operation.problem(data, **masks), ("lse",) if run.lse else ()
        row.check(problem)
        tile, on = options.tile(run.tile), Device.named(run.device)
        sizes.append(trace_size(row.program, problem, tile=tile, device=on, asked=asked))
    steps = sum(n for n, _ in sizes)
    check_memory(f"a page of {steps:,} steps", page_bytes(steps) + sum(nbytes for _, nbytes in sizes))


def _print_trace(recorded: Trace) -> None:
    """How often each step was taken, and what it moved."""
    steps: dict[tuple[str, str], list[int]] = {}
    for event in recorded.events:
        moved = steps.setdefault((event.launch, event.step), [0, 0, 0])
        moved[0] += 1
        for transfer in event.transfers:
            for what, n in transfer.nbytes.items():
                moved[1 if what.startswith("hbm") else 2] += n
    rows = [
        (launch, step, f"{n:,}", figures.nbytes(hbm), figures.nbytes(sram))
        for (launch, step), (n, hbm, sram) in steps.items()
    ]
    batch, head = recorded.head
    title = f"{recorded.algorithm}, batch {batch}, head {head}: {len(recorded.events):,} steps"
    tables.table(title, ("launch", "step", "times", "HBM", "SRAM"), rows, left=2)


def devices(json: Json = False) -> None:
    """The GPUs of the table, with the figures that the models use and where they come from."""
    import flashlab as fl

    if json:
        ridges = {
            d.name: {dtype: d.ridge(dtype) for dtype in ("float32", "float16", "bfloat16")} for d in fl.DEVICES.values()
        }
        output.document({"devices": [{**asdict(d), "ridge": ridges[d.name]} for d in fl.DEVICES.values()]})
        return
    columns = ("name", "GPU", "cc", "SMs", "SRAM a block", "SRAM an SM", "L2", "memory", "GB/s", "16-bit TFLOP/s",
               "float32 TFLOP/s", "ridge, 16-bit")  # fmt: skip
    rows = [
        (d.name, d.title, "{}.{}".format(*d.compute_capability), str(d.sms), figures.nbytes(d.sram_per_block),
         figures.nbytes(d.sram_per_sm), figures.nbytes(d.l2), figures.nbytes(d.memory), f"{d.bandwidth / 1e9:,.0f}",
         f"{d.tensor_flops / 1e12:,.4g}", f"{d.fp32_flops / 1e12:,.4g}", f"{d.ridge('float16'):.0f}")
        for d in fl.DEVICES.values()
    ]  # fmt: skip
    tables.table("devices (a100 is a100-40; the default is h100)", columns, rows, left=2)
    for d in fl.DEVICES.values():
        tables.line(f"{d.name}: {d.source}")
