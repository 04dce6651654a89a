"""The commands that judge kernels and programs: verify, bench, fp8, counters, sanitize."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json, ProblemOptions
from flashlab.files import replace_file
from flashlab.views import tables
from simulator.catalogue import CATALOGUE, get, with_kernels
from simulator.errors import UsageError, unknown


def register(app: typer.Typer) -> None:
    for command, example in (
        (verify, "flashlab verify mypackage:attention --framework torch --layout bshd"),
        (bench, "flashlab bench flash2 --against sdpa-flash,cudnn,fa4 --dtype bfloat16 --head-dim 128"),
        (counters, "flashlab counters flash2 --len-q 1000 --head-dim 64 --causal"),
        (sanitize, "flashlab sanitize flash1 flash2"),
        (fp8, "flashlab fp8 --head-dim 128 --len-q 16384"),
    ):
        app.command(epilog=f"Example: {example}")(options.expand(command))


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Where a result is saved, and under which name."""

    save: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Also save it there as <kind>/<subject>[_<condition>]_<device>_<date>.json."
        ),
    ] = None
    condition: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --save: what sets this run apart, such as another framework."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="With --save: replace a file of that name.")] = False

    def keep(self, kind: str, algorithms: list[str], report: Any) -> None:
        if self.save is None:
            return
        from flashlab.measure import results

        path = results.save(
            results.kinds()[kind],
            algorithms,
            report.to_dict(),
            condition=self.condition,
            folder=self.save,
            replace=self.force,
        )
        output.remark(str(path))


def _finish(report: Any, json: bool, passed: bool) -> None:
    if json:
        output.document(report.to_dict())
    else:
        report.print()
    if not passed:
        raise typer.Exit(1)


_FOREIGN = "An attention function from elsewhere"


def verify(
    save: SaveOptions,
    target: Annotated[
        str,
        typer.Argument(
            help="An algorithm, a tile program (my_file.py:my_program), another library's kernel by its name here "
            "(such as sdpa-flash), or any package:function."
        ),
    ] = "flash2",
    backend: Annotated[str, typer.Option(help="simulator, gpu or emulator, for flashlab's algorithms.")] = "simulator",
    full: Annotated[bool, typer.Option("--full", help="Also run long and wide problems.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Storage dtypes; default all that the target takes.")
    ] = None,
    check: Annotated[str | None, typer.Option(metavar="NAME,…", help="Checks to run; default all.")] = None,
    examples: Annotated[int | None, typer.Option(help="How many random problems to try.")] = None,
    device: Annotated[str | None, typer.Option(help="The GPU that the simulator or emulator stands for.")] = None,
    tile: Annotated[str | None, typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="Framework of its arrays: numpy, torch, cupy or jax.", rich_help_panel=_FOREIGN)
    ] = None,
    layout: Annotated[str, typer.Option(help="Order of its axes: bhsd or bshd.", rich_help_panel=_FOREIGN)] = "bhsd",
    causal_align: Annotated[
        str, typer.Option(help="Alignment of its causal mask: bottom-right or top-left.", rich_help_panel=_FOREIGN)
    ] = "bottom-right",
    lse: Annotated[
        str, typer.Option(help="Base of the LSE that it returns: e, 2, or none.", rich_help_panel=_FOREIGN)
    ] = "none",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the report as Markdown.")] = False,
    json: Json = False,
) -> None:
    """Check the numbers, hard: edges, probes and random problems against naive attention in float64."""
    import flashlab as fl

    found = options.target(target)
    if not isinstance(found, str | fl.Program | fl.Adapter):
        chosen: Any = {"layout": layout, "causal": causal_align, "lse": None if lse == "none" else lse}
        found = fl.Adapter(found, framework or "numpy", **chosen, name=target)
    elif (layout, causal_align, lse) != ("bhsd", "bottom-right", "none"):
        given = f"{layout}, {causal_align}, {lse}"
        raise UsageError("--layout, --causal-align, --lse", given, "none of them: they describe a package:function")
    names: Any = {
        "dtypes": options.values("--dtype", dtype, str) or None,
        "checks": options.values("--check", check, str) or None,
    }
    with output.busy("checks") as tick:
        report = fl.verify(
            found, backend, full=full, seed=seed, **names, examples=examples, device=device, tile=options.tile(tile),
            framework=framework, on_row=tick,
        )  # fmt: skip
    save.keep("verify", [_name(target)], report)
    if markdown and not json:
        tables.line(report.to_markdown())
        raise typer.Exit(0 if report.passed else 1)
    _finish(report, json, report.passed)


def _name(target: str) -> str:
    """The target's name, as it may stand in a file's name."""
    return target.rpartition("/")[2].replace(".py", "").replace(":", ".")


def bench(
    save: SaveOptions,
    algorithm: Annotated[str, typer.Argument(help="One of flashlab's algorithms.")] = "flash2",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="What to time beside it: fa4, cudnn, sdpa-flash, sdpa-efficient, flashinfer, or another algorithm.",
        ),
    ] = "sdpa-flash",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Default bfloat16; also float16 for kernels that aren't Hopper's alone."),
    ] = None,
    head_dim: Annotated[
        str | None, typer.Option(metavar="N,…", help="Default 64,128; also 256 for Hopper's kernels.")
    ] = None,
    len_q: Annotated[
        str, typer.Option(metavar="N,…", help="Tokens per sequence; a problem has 16,384 tokens in all.")
    ] = "1024,4096,16384",
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="With a causal mask or without; default both.")
    ] = None,
    tile: Annotated[str | None, typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds per problem.")] = 1.0,
    cells: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a flat list, one row per problem.")
    ] = None,
    json: Json = False,
) -> None:
    """Time a kernel beside others that you might use instead: calls interleaved, the median of the ratios."""
    from flashlab.measure import speed

    hopper = get(algorithm).arch
    problems = speed.cells(
        options.values("--dtype", dtype or ("bfloat16" if hopper else "bfloat16,float16"), str),
        options.values("--head-dim", head_dim or ("64,128,256" if hopper else "64,128"), int),
        (False, True) if causal is None else (causal,),
        options.values("--len-q", len_q, int),
    )
    peers = options.values("--against", against, str)
    report = speed.run(
        algorithm,
        peers,
        cells=problems,
        tile=options.tile(tile),
        seconds=seconds,
        progress=output.track("problems"),
    )
    save.keep("ladder" if any(name in CATALOGUE for name in peers) else "bench", [algorithm], report)
    if cells is not None:
        replace_file(Path(cells), jsonlib.dumps(report.cells(), indent=1) + "\n", argument="cells")
    _finish(report, json, report.passed)


def fp8(
    save: SaveOptions,
    head_dim: Annotated[str, typer.Option(metavar="N,…", help="Head dims.")] = "128,256",
    len_q: Annotated[
        str, typer.Option(metavar="N,…", help="Tokens per sequence; a problem has 16,384 tokens in all.")
    ] = "1024,4096,16384",
    json: Json = False,
) -> None:
    """Measure FlashAttention-3 in FP8: its error on inputs with outliers, and its speed beside bfloat16."""
    from flashlab.measure import fp8 as eight

    report = eight.run(
        lengths=options.values("--len-q", len_q, int), head_dims=options.values("--head-dim", head_dim, int)
    )
    save.keep("fp8", ["flash3_fp8"], report)
    _finish(report, json, report.passed)


def counters(
    problem: ProblemOptions,
    save: SaveOptions,
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(help="Algorithms; default flash2, with --matrix or --l2 all that have kernels."),
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Run the matrix of problems instead of one.")] = False,
    l2: Annotated[bool, typer.Option("--l2", help="Run the large problems that the L2 model is held to.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Of these problems, run those with WORDS in their name.")
    ] = None,
    tile: Annotated[str | None, typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.")] = None,
    lse: Annotated[bool, typer.Option("--lse", help="Also write the log-sum-exp.")] = False,
    backend: Annotated[
        str, typer.Option(help="gpu, emulator, or both (the emulator against the GPU, outputs included).")
    ] = "gpu",
    device: Annotated[str, typer.Option(help="The GPU that the emulator's kernels are built for.")] = "h100",
    json: Json = False,
) -> None:
    """Hold simulator and formula to the GPU's own counters (ncu), or to the emulator's, to the byte."""
    from flashlab.measure import counters as hardware
    from flashlab.measure import problems
    from flashlab.measure.workload import Case

    if matrix or l2:
        problem.refuse_shape()
    names = algorithms or (with_kernels() if matrix or l2 else ["flash2"])
    cases = [
        *(problems.matrix(names) if matrix else []),
        *(c for c in (problems.l2_problems() if l2 else []) if c.algorithm in names),
    ]
    if not matrix and not l2:
        cases = [Case(name, name, problem.problem(name), options.tile(tile), lse) for name in names]
    if only is not None:
        known, cases = cases, [case for case in cases if only in case.name]
        if not cases:
            raise UsageError("--only", only, f"words from a problem's name, such as {known[-1].name!r}")
    report: Any
    if backend == "gpu":
        report = hardware.run(cases, progress=output.track("algorithms"))
    elif backend == "emulator":
        from flashlab.measure import emulated

        if save.save is not None:
            raise UsageError("--save", save.save, "nothing: results on record are measured on a GPU")
        report = emulated.run(cases, device=device, progress=output.track("problems"))
    elif backend == "both":
        from flashlab.measure import agreement

        report = agreement.run(cases, progress=output.track("problems"))
    else:
        raise unknown("--backend", backend, ("gpu", "emulator", "both"))
    save.keep("agreement" if backend == "both" else "counters", report.algorithms, report)
    _finish(report, json, report.passed)


def sanitize(
    save: SaveOptions,
    algorithms: Annotated[list[str] | None, typer.Argument(help="Algorithms; default all that have kernels.")] = None,
    faults: Annotated[
        bool, typer.Option("--faults/--no-faults", help="Also run planted faults, which the tools must find.")
    ] = True,
    json: Json = False,
) -> None:
    """Run compute-sanitizer's four tools on every kernel, over a small grid of problems."""
    from flashlab.measure import sanitizers

    report = sanitizers.run(sanitizers.grid(algorithms), faults=faults, progress=output.track("runs"))
    save.keep("sanitizers", report.algorithms, report)
    _finish(report, json, report.passed)
