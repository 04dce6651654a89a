"""`flashlab parallel`: attention on several ranks, by formula and by a timeline; with `--demo` in NumPy, too."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import completion, options, output
from flashlab.cli.options import PICTURES, DeviceName, Force, Json, ProblemOptions
from flashlab.views import figures, tables
from simulator.errors import UsageError
from simulator.problem import Problem

if TYPE_CHECKING:
    from flashlab.parallel import ParallelCounts, ParallelTimeline

_RUN, _RATES = "Run", "Rates"
_SCHEMES = ("ring", "all_gather", "ulysses", "heads", "dcp")
_PREFILL = _SCHEMES[:-1]
_LAYOUTS = ("contiguous", "zigzag")
_DEMO = Problem(batch=1, heads=4, len_q=512, head_dim=64, dtype="float16", causal=True)
_DEMO_RUNS = (
    ("ring", "contiguous"),
    ("ring", "zigzag"),
    ("all_gather", "zigzag"),
    ("ulysses", "zigzag"),
    ("heads", "zigzag"),
)
_LONG = Problem(batch=1, heads=32, kv_heads=8, len_q=131_072, head_dim=128, dtype="bfloat16", causal=True)


def register(app: typer.Typer) -> None:
    options.add(
        app,
        parallel,
        "flashlab parallel --demo",
        "flashlab parallel ring --heads 32 --len-q 131072 --head-dim 128 --ranks 4",
        "flashlab parallel --heads 64 --kv-heads 8 --len-q 1048576 --ranks 8 --json",
        "flashlab parallel dcp --heads 64 --len-q 1 --len-kv 131072 --ranks 8",
    )


def _number(help: str, panel: str, metavar: str = "N") -> Any:
    return typer.Option(help=help, rich_help_panel=panel, metavar=metavar)


def parallel(
    problem: ProblemOptions,
    scheme: Annotated[
        str | None,
        typer.Argument(
            metavar="SCHEME",
            help="ring, all_gather, ulysses, heads or dcp; left out, all but dcp.",
            autocompletion=completion.one_of(lambda: _SCHEMES),
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Four ranks in NumPy, beside one; who sends what when; and a picture.")
    ] = False,
    ranks: Annotated[int, _number("Ranks, a GPU each.", _RUN)] = 4,
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Which rows a rank has: zigzag or contiguous.", rich_help_panel=_RUN,
            autocompletion=completion.one_of(lambda: _LAYOUTS),
        ),
    ] = "zigzag",
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What computes each part.", rich_help_panel=_RUN, autocompletion=completion.algorithms
        ),
    ] = "flash2",
    backward: Annotated[bool, typer.Option("--backward", help="The way back, too.", rich_help_panel=_RUN)] = False,
    interleave: Annotated[int, _number("Of dcp: keys that lie on a rank side by side.", _RUN)] = 1,
    device: DeviceName = "h100",
    link: Annotated[float | None, _number("GB/s of a link, each way.", _RATES, "X")] = None,
    latency: Annotated[float | None, _number("Microseconds of a message beyond its bytes.", _RATES, "X")] = None,
    per_host: Annotated[int | None, _number("Ranks of a host; others are reached by the network.", _RATES)] = None,
    network: Annotated[float | None, _number("GB/s of the network, each way.", _RATES, "X")] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the timelines (.png, .svg, .pdf).", rich_help_panel="Output"),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:  # fmt: skip
    """What ranks send and compute, and when: by formula at any size, and predicted at stated rates."""
    from flashlab import parallel as of
    from flashlab.parallel.plot import draw

    if demo and scheme is not None:
        raise UsageError("SCHEME", scheme, "nothing with --demo")
    plot = plot or ("parallel.svg" if demo else None)
    options.check_outputs({"--plot": (plot, PICTURES)}, force=force)
    names = ("ranks", "layout", "algorithm", "interleave", "device", "link", "latency", "network", "per_host")
    with options.spelled(scheme="SCHEME", dout="--backward", **{name: options.spelling(name) for name in names}):
        given = {"link": (link, 1e9), "latency": (latency, 1e-6), "network": (network, 1e9)}
        own = {name: value * unit for name, (value, unit) in given.items() if value is not None}
        rates = of.rates(device, per_host=per_host, **own)
        alone, errors, refused = None, dict[str, float](), dict[str, str]()
        if demo:
            posed, found, errors = _demo()
        else:
            posed = problem.problem(algorithm)
            how: Any = {"algorithm": algorithm, "backward": backward, "device": device}
            found, refused = _counted(scheme, posed, ranks=ranks, layout=layout, interleave=interleave, **how)
            if posed.page_size is None:
                alone = of.timeline(of.count("heads", posed, ranks=1, **how), rates).seconds
    timelines = {name: of.timeline(each, rates) for name, each in found.items()}
    drawn = timelines
    if demo:  # in the demo's small shapes nothing but latency would be seen
        longer = {f"{name}, {dealt}": of.count(name, _LONG, ranks=4, layout=dealt) for name, dealt in _DEMO_RUNS[:-1]}
        drawn = {name: of.timeline(each, rates) for name, each in longer.items()}
    if plot is not None:
        from flashlab.views.plots import save

        with options.spelled(path="--plot"):
            save(draw(drawn), plot)
    if json:
        runs = [
            {**each.to_dict(), "error": errors.get(name), "predicted": timelines[name].to_dict()}
            for name, each in found.items()
        ]
        not_run = [{"scheme": name, "reason": reason} for name, reason in refused.items()]
        output.document(
            {"problem": asdict(posed), "alone": alone, "runs": runs, "not_run": not_run, "rates": asdict(rates)}
        )
        return
    _print(posed, found, timelines, errors, alone)
    for name, reason in refused.items():
        tables.line(f"{name}: not run, {reason}")
    if demo or scheme is not None:
        _who_sends_what(next(each for name, each in found.items() if "contiguous" not in name))
    shown = drawn if demo or scheme is not None else {}
    for name, each in shown.items():
        _over_time(name, each, max(one.seconds for one in shown.values()), _LONG if demo else posed)
    if shown:
        tables.line("# computes, . waits")
    tables.line(f"rates: {rates.source}")
    if plot is not None:
        tables.line(plot)


def _counted(scheme: str | None, posed: Problem, **how: Any) -> tuple[dict[str, ParallelCounts], dict[str, str]]:
    """The counts of a scheme, or of all but dcp; and of those that can't share the problem, why."""
    from flashlab.parallel import count

    if scheme is not None:
        return {scheme: count(scheme, posed, **how)}, {}
    found, refused = dict[str, Any](), dict[str, str]()
    for name in _PREFILL:
        try:
            found[name] = count(name, posed, **how)
        except UsageError as error:
            if error.argument not in ("heads", "kv_heads", "len_q", "len_kv"):
                raise
            refused[name] = str(error)
    if not found:
        raise UsageError("SCHEME", None, f"a problem that ranks can share ({next(iter(refused.values()))})")
    return found, refused


def _demo() -> tuple[Problem, dict[str, ParallelCounts], dict[str, float]]:
    """Four ranks on data: what they moved, and how far their outputs are from one rank's, over the largest output."""
    import numpy as np

    import flashlab as fl
    from flashlab.views.progress import track

    q, k, v = fl.random_inputs(_DEMO, seed=0)
    dout = fl.random_inputs(_DEMO, seed=1)[0]
    one = fl.parallel.simulate("heads", q, k, v, dout=dout, ranks=1, causal=True)
    found, errors = dict[str, Any](), dict[str, float]()
    for name, dealt in track("schemes")(_DEMO_RUNS):
        run = fl.parallel.simulate(name, q, k, v, dout=dout, ranks=4, layout=dealt, causal=True)
        title = f"{name}, {dealt}" if name == "ring" else name
        counted = fl.parallel.count(name, _DEMO, ranks=4, layout=dealt, backward=True)
        if run.events != counted.events:
            raise AssertionError(f"{title}: the program isn't its formula")
        found[title] = run
        errors[title] = max(
            float(np.abs(getattr(run, x).astype(np.float64) - getattr(one, x)).max() / np.abs(getattr(one, x)).max())
            for x in ("out", "dq", "dk", "dv")
        )
    return _DEMO, found, errors


def _print(
    posed: Problem, found: dict[str, ParallelCounts], timelines: dict[str, ParallelTimeline], errors: dict[str, float],
    alone: float | None,
) -> None:  # fmt: skip
    ranks = next(iter(found.values())).ranks
    columns = (
        "",
        "a rank sends",
        "receives",
        "FLOPs, most / least",
        "predicted",
        "ranks compute",
        "of one GPU's rate",
        "off one rank's",
    )
    rows = [
        (
            name,
            figures.nbytes(max(each.sent)),
            figures.nbytes(max(each.received)),
            f"{max(each.flops) / least:.4g}" if (least := min(each.flops)) else "",
            f"{timelines[name].seconds * 1e3:.4g} ms",
            f"{timelines[name].busy:.0%}",
            "" if alone is None else f"{alone / ranks / timelines[name].seconds:.2f}",
            f"{errors[name]:.1e}" if name in errors else "",
        )
        for name, each in found.items()
    ]
    tables.table(f"{figures.problem(posed)}, {ranks} ranks", columns, rows)


def _who_sends_what(counts: ParallelCounts) -> None:
    """A line for each step: who sends to whom, and what."""
    from flashlab.parallel.ledger import Sent

    steps = defaultdict[tuple[str, tuple[tuple[str, int], ...]], list[str]](list)
    for rank, events in enumerate(counts.events):
        for event in events:
            if isinstance(event, Sent):
                steps[event.step, event.tensors].append(f"{rank}→{event.peer}")
    rows = [
        (step, " ".join(pairs[:12]) + (f" … {len(pairs):,}" if len(pairs) > 12 else ""), ", ".join(name for name, _ in tensors),
         figures.nbytes(sum(nbytes for _, nbytes in tensors)))
        for (step, tensors), pairs in steps.items()
    ]  # fmt: skip
    if rows:
        most = 24
        tables.table(
            f"{counts.scheme}: who sends what when", ("step", "from and to", "what", "each"), rows[:most], left=3
        )
        if len(rows) > most:
            tables.line(f"… {len(rows) - most:,} more steps")


def _over_time(name: str, found: ParallelTimeline, longest: float, posed: Problem) -> None:
    from flashlab.parallel.plot import lines

    tables.line()
    tables.line(
        f"{name}, {found.counts.ranks} ranks, {figures.problem(posed)}: {found.seconds * 1e3:.4g} ms, predicted"
    )
    shown = list(lines(found, seconds=longest))
    for line in shown[:16]:
        tables.line(f"  {line}")
    if len(shown) > 16:
        tables.line(f"  … {len(shown) - 16:,} more ranks")
    for (rank, peer), seconds in list(found.waited_for.items())[:4]:
        tables.line(f"  rank {rank} waits for rank {peer}: {seconds * 1e3:.3g} ms")
