"""`flashlab serve` serves a trace: what a server's pages, bytes and times would be, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import options, output
from flashlab.cli.options import PICTURES, DeviceName, Force, Json
from flashlab.views import figures, progress, tables
from simulator.errors import UsageError, among

if TYPE_CHECKING:
    from flashlab.serve.day import Day

_SERVER, _MODEL, _TRACE, _OUTPUT = "Server", "Model", "Trace", "Output"
_COUNTED = "counted"
_NAMES = (
    "requests", "rate", "seed", "page_size", "max_num_seqs", "max_num_batched_tokens", "policy", "watermark", "layers", "heads",
    "kv_heads", "head_dim", "dtype", "weights", "device",
)  # fmt: skip
"""Options that errors name as they are spelled here."""


def register(app: typer.Typer) -> None:
    options.add(
        app,
        serve,
        "flashlab serve --demo",
        "flashlab serve lognormal:sharegpt --requests 200 --pages 2048",
        "flashlab serve mooncake_trace.jsonl --requests 100 --device h200 --json",
        "flashlab serve lognormal:alpaca --requests 50 --html pages.html",
    )


def _number(help: str, panel: str, metavar: str = "N") -> Any:
    return typer.Option(help=help, rich_help_panel=panel, metavar=metavar)


def serve(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake's JSON Lines, Azure's CSV, lognormal:sharegpt or lognormal:alpaca.",
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="40 requests that share a prefix, with real numbers, and a page to open.")
    ] = False,
    requests: Annotated[int | None, _number("Serve so many of the trace.", _TRACE)] = None,
    rate: Annotated[float, _number("Of lognormal: requests per second.", _TRACE, "X")] = 4.0,
    seed: Annotated[int, _number("Of lognormal, and of the tiny model.", _TRACE)] = 0,
    pages: Annotated[int, _number("Pages in the pool, of which one is the null page.", _SERVER)] = 8192,
    page_size: Annotated[int, _number("Tokens in a page.", _SERVER)] = 16,
    max_num_seqs: Annotated[int, _number("Requests in a step.", _SERVER)] = 128,
    max_num_batched_tokens: Annotated[int, _number("Tokens in a step.", _SERVER)] = 2048,
    policy: Annotated[str, _number("Who is let in first: fcfs or shortest.", _SERVER, "NAME")] = "fcfs",
    caching: Annotated[
        bool, typer.Option("--caching/--no-caching", help="Find prefixes in pages.", rich_help_panel=_SERVER)
    ] = True,
    watermark: Annotated[float, _number("The share of pages that newcomers leave free.", _SERVER, "X")] = 0.01,
    layers: Annotated[int, _number("Layers of attention.", _MODEL)] = 32,
    heads: Annotated[int, _number("Query heads.", _MODEL)] = 32,
    kv_heads: Annotated[int, _number("Heads of K and V.", _MODEL)] = 8,
    head_dim: Annotated[int, _number("Elements of a head.", _MODEL)] = 128,
    dtype: Annotated[str, _number("float16 or bfloat16.", _MODEL, "NAME")] = "bfloat16",
    weights: Annotated[int, _number("Bytes of weights that each step reads, too.", _MODEL)] = 0,
    device: DeviceName = "h100",
    backend: Annotated[
        str,
        _number("counted (bytes by formula), or a tiny model on simulator, emulator or gpu.", "Run", "NAME"),
    ] = _COUNTED,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the player of the pages.", rich_help_panel=_OUTPUT)
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the day into this file (.png, .svg, .pdf).", rich_help_panel=_OUTPUT),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Serve a trace, step by step: pages, prefixes, preemptions, bytes, and times that follow from the bytes."""
    from flashlab.base.files import replace_file
    from flashlab.serve import real, traces
    from flashlab.serve.blocks import KVCacheManager
    from flashlab.serve.costs import Costs, Model
    from flashlab.serve.day import serve as served
    from flashlab.serve.scheduler import Scheduler

    if demo == (trace is not None):
        raise UsageError("TRACE", trace, "a trace, or --demo without one")
    if demo:
        pages, page_size, max_num_seqs, max_num_batched_tokens = 32, 8, 12, 64
        backend, html = "simulator" if backend == _COUNTED else backend, html or "serve.html"
    among("--backend", backend, (_COUNTED, *real.BACKENDS))
    inputs = [] if trace is None or trace.startswith("lognormal:") else [trace]
    options.check_outputs({"--html": (html, (".html", ".htm")), "--plot": (plot, PICTURES)}, inputs=inputs, force=force)
    names = {name: options.spelling(name) for name in _NAMES}
    with options.spelled(num_blocks="--pages", block_size="--page-size", trace="TRACE", **names):
        arrivals = traces.demo() if trace is None else traces.read(trace, requests=requests, seed=seed, rate=rate)
        model: Any = Model(
            layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, weights=weights
        )
        model = model if backend == _COUNTED else real.TINY
        manager = KVCacheManager(pages, page_size, enable_caching=caching, watermark=watermark)
        limits: Any = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        scheduler = Scheduler(manager, **limits, policy=policy)
        costs = Costs(model, page_size, device)
        engine = None if backend == _COUNTED else real.Engine(manager, real.Tiny(seed=seed), backend)
        day = served(
            arrivals, scheduler, costs, engine=engine, trace=trace or "demo", changes=html is not None,
            progress=progress.track("requests"),
        )  # fmt: skip
    if html is not None:
        from flashlab.serve.page import page

        replace_file(html, page(day), argument="--html")
    if plot is not None:
        from flashlab.serve.plot import draw
        from flashlab.views.plots import save

        with options.spelled(path="--plot"):
            save(draw(day), plot)
    if json:
        output.document(day.to_dict())
        return
    _print(day)
    for path in (html, plot):
        if path is not None:
            tables.line(path)


def _print(day: Day) -> None:
    s, m, least = day.summary(), day.model, day.bound
    tables.table(
        f"{day.trace}: {s['requests']:,} requests, {day.num_blocks - 1:,} pages of {day.block_size}, {day.policy}, {day.backend}",
        ("", "mean", "median", "99 %"),
        [
            (name, *(f"{s[key][each] * 1e3:,.3g} ms" for each in ("mean", "p50", "p99")))
            for name, key in (("until the first token", "first_token"), ("from token to token", "per_token"))
        ],
    )
    tables.table(
        "Reached, and the least with all pages free",
        ("", "reached", "least"),
        [
            ("steps", f"{s['steps']:,}", f"{least.steps:,}"),
            ("tokens computed", f"{s['computed']:,}", f"{least.tokens:,}"),
            ("bytes of K and V read", figures.nbytes(s["kv_bytes"]), figures.nbytes(least.kv_bytes)),
            ("predicted time of all steps", f"{s['busy'] * 1e3:,.4g} ms", f"{least.seconds * 1e3:,.4g} ms"),
        ],
    )
    tables.table(
        "Tokens and pages",
        ("", ""),
        [
            ("tokens of prompts and answers", f"{s['prompt_tokens']:,} and {s['answer_tokens']:,}"),
            ("tokens reused", f"{s['reused']:,}"),
            ("tokens recomputed", f"{s['recomputed']:,} after {s['preempted']:,} preemptions"),
            ("most pages in use", f"{s['peak_blocks']:,} of {day.num_blocks - 1:,}"),
            (
                "that is, without sharing",
                f"{figures.nbytes(s['peak_bytes'])}, {figures.nbytes(s['peak_bytes_unshared'])}",
            ),
            (f"waste, with pages of {day.block_size}", f"{s['waste']:.1%}"),
            ("pages that sharing saves", f"{s['saved']:.1%}"),
        ],
    )
    what = f"{m.layers} layers of attention {'and the weights' if m.weights else 'alone'}"
    tables.line(f"times are predicted: {what}, bytes over a measured rate, and a cost per launch")
    tables.line(f"rate: {day.source}")
