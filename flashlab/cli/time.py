"""`flashlab time` predicts how long a kernel takes, by a model of an SM's units."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from flashlab.cli import options, output
from flashlab.cli.options import PICTURES, Algorithm, DeviceName, Force, Json, ProblemOptions
from flashlab.views import figures, tables
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.problem import Tile

_OUTPUT = "Output"


def register(app: typer.Typer) -> None:
    options.add(
        app,
        time,
        "flashlab time flash2 --heads 16 --len-q 4096 --head-dim 128",
        "flashlab time flash3 --len-q 8192 --device h200 --trace flash3.json",
    )


def time(
    algorithm: Algorithm,
    problem: ProblemOptions,
    tile: Annotated[
        str | None,
        typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.", rich_help_panel="Run"),
    ] = None,
    device: DeviceName = "h100",
    claim: Annotated[
        float | None,
        typer.Option(
            metavar="MICROSECONDS",
            help="A time that somebody claims for it, from cold inputs. Less than the memory needs is refused: status 1.",
            rich_help_panel="Run",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write what runs on an SM to this file, for ui.perfetto.dev.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw it into this file (.png, .svg, .pdf).", rich_help_panel=_OUTPUT),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Predict how long a kernel takes, how busy each unit is, and what binds it. Nothing is run."""
    import flashlab as fl
    from flashlab.base.files import replace_file

    options.check_outputs({"--trace": (trace, (".json",)), "--plot": (plot, PICTURES)}, inputs=[algorithm], force=force)
    posed, on = problem.problem(algorithm), Device.named(device)
    refusal = ""
    if claim is not None:
        from flashlab.verify.claims import refused

        if not 0 <= claim < math.inf:
            raise UsageError("--claim", claim, "a time in microseconds, of at least 0")
        refusal = refused(posed, claim / 1e6, on)
    found = fl.timeline(options.algorithm(algorithm), posed, tile=options.tile(tile), device=on)
    if trace is not None:
        import json as text

        replace_file(trace, text.dumps(found.chrome_trace(), allow_nan=False) + "\n", argument="--trace")
    if plot is not None:
        from flashlab.views.plots import save

        with options.spelled(path="--plot"):
            save(found.plot(), plot)
    if json:
        output.document(found.to_dict() | ({} if claim is None else {"refused": refusal}))
    else:
        _print(found)
        for path in (trace, plot):
            if path is not None:
                tables.line(path)
        if claim is not None:
            tables.line(f"refused: {refusal}" if refusal else f"{claim:g} µs may be true")
    if refusal:
        raise typer.Exit(1)


def _print(found: Any) -> None:
    from simulator.catalogue import get
    from simulator.formulas.walk import walk

    p = found.problem
    visible = sum(n * walk(one, Tile(1, 1)).pairs for one, n in p.different.items())
    of_k, of_v = get(found.algorithm).operation.products
    flops = 2 * visible * (of_k * p.head_dim + of_v * p.head_dim_v)
    rate = flops * p.batch * p.heads / found.seconds / 1e12
    title = f"{found.algorithm}: {figures.problem(found.problem)}, tile {found.tile}, on {found.device.title or found.device.name}"
    columns = ("launch", "milliseconds", *found.utilisation, "places taken", "blocks per SM")
    rows = [
        (
            x.name,
            f"{x.seconds * 1e3:.4g}",
            *(f"{share:.0%}" for share in x.utilisation.values()),
            f"{x.balance:.0%}",
            str(x.blocks_per_sm),
        )
        for x in found.launches
    ]
    tables.table(title, columns, rows)
    tables.line(f"predicted: {found.seconds * 1e3:.4g} ms, {rate:.3g} TFLOP/s, counting the pairs that the mask leaves")
    tables.line(f"bound by {found.bound}")
