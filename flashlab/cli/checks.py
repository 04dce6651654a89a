"""The commands that judge kernels and programs: verify, bench, fp8, counters, sanitize."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flashlab.base.files import replace_file
from flashlab.cli import completion, options, output
from flashlab.cli.options import Json, ProblemOptions
from flashlab.views import progress
from simulator.catalogue import CATALOGUE, get, with_kernels
from simulator.errors import Unavailable, UsageError, among, unknown
from simulator.operations.backward import BACKWARD


def register(app: typer.Typer) -> None:
    options.add(
        app,
        verify,
        "flashlab verify flash2 --backend emulator --check key_sets",
        "flashlab verify my_file.py:attention --framework torch --layout bshd",
        "flashlab verify my_file.py:backward --operation backward",
        "flashlab verify kernel.cu:attention --format github",
    )
    options.add(
        app,
        bench,
        "flashlab bench flash3 --dtype bfloat16 --head-dim 128 --len-q 4096",
        "flashlab bench flash2 --against sdpa-flash,cudnn,fa4",
    )
    options.add(
        app,
        counters,
        "flashlab counters flash2 --len-q 1000 --head-dim 64 --causal",
        "flashlab counters flash2 --len-q 100 --backend emulator",
    )
    options.add(app, sanitize, "flashlab sanitize flash1 flash2", "flashlab sanitize --no-faults")
    options.add(app, fp8, "flashlab fp8", "flashlab fp8 --head-dim 128 --len-q 16384")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Where a result is saved, and under which name."""

    save: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Also save it there as <kind>/<subject>[_<condition>]_<device>_<date>.jsonl."
        ),
    ] = None
    condition: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --save: what sets this run apart, such as another framework."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="With --save: replace a file of that name.")] = False
    dirty: Annotated[
        bool,
        typer.Option("--dirty", help="With --save: save although sources were changed since the commit; it is marked."),
    ] = False

    def check(self, kind: str, algorithms: list[str]) -> None:
        """Look whether the result could be saved, before anything is run for it. Raises `UsageError`."""
        if self.save is None:
            return
        from flashlab.measure import results

        where: Any = {"condition": self.condition, "folder": self.save, "replace": self.force, "dirty": self.dirty}
        with options.spelled(output="--save", folder="--save", condition="--condition"):
            results.place(results.kinds()[kind], algorithms, **where)

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
            dirty=self.dirty,
        )
        output.remark(str(path))


def _finish(report: Any, json: bool, keep: Callable[[], None], left_out: str = "") -> None:
    """Print a report, and then keep it: whatever is in the way of that, it isn't lost."""
    if left_out:
        output.remark(left_out)
    if json:
        output.document(report.to_dict())
    else:
        report.print()
    keep()
    if not report.passed:
        raise typer.Exit(1)


def _with_kernels(backend: str) -> tuple[list[str], str]:
    """The algorithms that have kernels, and why those in Triton are left out, where it can't run them; else an empty text."""
    from flashlab.run import tritonc

    try:
        if backend != "emulator":
            tritonc.compiler()
        if backend != "gpu":
            tritonc.interpreter()
    except Unavailable as error:
        return with_kernels(language="cuda"), f"not run: {', '.join(with_kernels(language='triton'))} ({error})"
    return with_kernels(), ""


_FOREIGN = "A function from elsewhere"
_DOMAIN = "What it takes; every check then runs on such problems"


@dataclass(frozen=True, kw_only=True)
class OutsiderOptions:
    """The conventions of a package:function, and the problems that it is for."""

    framework: Annotated[
        str | None, typer.Option(help="Framework of its arrays: numpy, torch, cupy or jax.", rich_help_panel=_FOREIGN)
    ] = None
    layout: Annotated[str, typer.Option(help="Order of its axes: bhsd or bshd.", rich_help_panel=_FOREIGN)] = "bhsd"
    causal_align: Annotated[
        str, typer.Option(help="Alignment of its causal mask: bottom-right or top-left.", rich_help_panel=_FOREIGN)
    ] = "bottom-right"
    lse: Annotated[
        str,
        typer.Option(
            help="Base of the LSE that it returns: e, 2, or none. That of the LSE that a backward pass takes is e or 2.",
            rich_help_panel=_FOREIGN,
        ),
    ] = "none"
    operation: Annotated[
        str,
        typer.Option(
            help="attention, backward (it takes dout, q, k, v, out, lse and returns dq, dk, dv), gradients (attention in torch, "
            "of which autograd's gradients are checked), or paged (it takes q, k, v, block_table, seq_lens).",
            rich_help_panel=_FOREIGN,
        ),
    ] = "attention"
    atomics: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Gradients that atomics add up, so that their last bits may differ from run to run: dq, dk, dv.",
            rich_help_panel=_FOREIGN,
        ),
    ] = None
    arg_names: Annotated[
        str | None,
        typer.Option(metavar="NAME=ITS,…", help="Its keywords, as in causal=is_causal.", rich_help_panel=_FOREIGN),
    ] = None
    head_dims: Annotated[
        str | None, typer.Option(metavar="N,…", help="Head dims; default any.", rich_help_panel=_DOMAIN)
    ] = None
    multiple: Annotated[
        int, typer.Option(metavar="N", help="Both lengths are multiples of N tokens.", rich_help_panel=_DOMAIN)
    ] = 1
    queries: Annotated[
        str | None, typer.Option(metavar="N,…", help="Queries: 1 for decoding; default any.", rich_help_panel=_DOMAIN)
    ] = None
    same_lengths: Annotated[
        bool, typer.Option("--same-lengths", help="As many keys as queries.", rich_help_panel=_DOMAIN)
    ] = False
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="N,…", help="Query heads per KV head: 1 for no grouped heads; default any.", rich_help_panel=_DOMAIN
        ),
    ] = None
    no_empty: Annotated[
        bool, typer.Option("--no-empty", help="No sequences without queries or keys.", rich_help_panel=_DOMAIN)
    ] = False
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Contiguous and aligned arrays only.", rich_help_panel=_DOMAIN)
    ] = False
    pairs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="At most N (query, key) pairs; default 32,768 for a .cu file.", rich_help_panel=_DOMAIN
        ),
    ] = None

    def adapter(self, fn: Any, name: str) -> Any:
        """The adapter of a function. Raises `UsageError` that names the options."""
        import flashlab as fl

        chosen: Any = {
            "layout": self.layout,
            "causal": self.causal_align,
            "lse": None if self.lse == "none" else self.lse,
            "operation": self.operation,
            "atomics": options.values("--atomics", self.atomics, str),
        }
        spelled: Any = {name: f"--{name}" for name in ("layout", "lse", "operation", "atomics", "framework")}
        with options.spelled(names="--arg-names", causal="--causal-align", **spelled):
            return fl.Adapter(
                fn,
                self.framework or "numpy",
                **chosen,
                name=name,
                names=options.pairs("--arg-names", self.arg_names),
                domain=self._domain(),
            )

    def refuse(self) -> None:
        """Raise `UsageError` for options that only a package:function can have."""
        given = [
            (options.spelling(f.name), getattr(self, f.name))
            for f in fields(self)
            if f.name != "framework" and getattr(self, f.name) != f.default
        ]
        if given:
            raise UsageError(
                ", ".join(name for name, _ in given),
                ", ".join(str(value) for _, value in given),
                "none of them: they describe a package:function",
            )

    def _domain(self) -> Any:
        import flashlab as fl

        with options.spelled(
            head_dim="--head-dims", len_q="--queries", groups="--groups", multiple="--multiple", pairs="--pairs"
        ):
            return fl.Domain(
                head_dim=options.values("--head-dims", self.head_dims, int) or None,
                len_q=options.values("--queries", self.queries, int) or None,
                groups=options.values("--groups", self.groups, int) or None,
                multiple=self.multiple,
                same_lengths=self.same_lengths,
                empty=False if self.no_empty else None,
                layouts="plain" if self.contiguous else None,
                pairs=self.pairs,
            )


_KERNEL = "A kernel of a .cu file. Sizes are expressions of a problem's fields"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a kernel of a `.cu` file is launched."""

    grid: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="Blocks: cdiv(len_q,64),heads.", rich_help_panel=_KERNEL)
    ] = None
    block: Annotated[str | None, typer.Option(metavar="X,Y,Z", help="Threads.", rich_help_panel=_KERNEL)] = None
    sram: Annotated[
        str | None, typer.Option(help="Dynamic shared memory in bytes: 8*head_dim.", rich_help_panel=_KERNEL)
    ] = None
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A parameter: q, k, v, out, lse, an expression, or an array as in float32\\[heads,len_q]:full(-inf). "
            "Usual names need none.",
            rich_help_panel=_KERNEL,
        ),
    ] = None
    define: Annotated[
        list[str] | None, typer.Option("--define", "-D", metavar="NAME=VALUE", help="A macro.", rich_help_panel=_KERNEL)
    ] = None
    include: Annotated[
        list[str] | None,
        typer.Option("--include", "-I", metavar="FOLDER", help="Where headers lie.", rich_help_panel=_KERNEL),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(help="The standard of C++: c++14, c++17 (unless said) or c++20.", rich_help_panel=_KERNEL),
    ] = None

    def kernel(self, target: str, device: str | None, time_limit: float | None) -> Any:
        """The kernel that a target names. Raises `UsageError` that names the options."""
        from flashlab.verify import kernel_named

        launch: dict[str, Any] = {
            "grid": self.grid,
            "block": self.block,
            "sram": self.sram,
            "arguments": dict(options.named("--arg", text) for text in self.arg or []),
            "macros": dict(options.named("--define", text, "1") for text in self.define or []),
            "includes": self.include,
            "std": self.std,
            "device": device,
        }
        limit = {} if time_limit is None else {"time_limit": time_limit}
        return kernel_named(target, {name: value for name, value in launch.items() if value} | limit)

    def refuse(self) -> None:
        """Raise `UsageError` for options that only a `.cu` file can have."""
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                raise UsageError(options.spelling(each.name), value, "nothing: only a kernel of a .cu file is launched")


def verify(
    save: SaveOptions,
    outsider: OutsiderOptions,
    launch: LaunchOptions,
    target: Annotated[
        str,
        typer.Argument(
            help="An algorithm, a tile program (my_file.py:my_program), another library's kernel by its name here "
            "(such as sdpa), any package:function, or a kernel of a CUDA source, on the emulator: flash.cu:forward, or "
            "flash.py:forward if it stands in a string.",
            autocompletion=completion.targets,
        ),
    ] = "flash2",
    backend: Annotated[
        str,
        typer.Option(help="simulator, gpu or emulator, for flashlab's algorithms.", autocompletion=completion.backends),
    ] = "simulator",
    full: Annotated[bool, typer.Option("--full", help="Also run long and wide problems.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: few checks on small problems in one dtype, none random.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of everything random. Default 0; for what runs in a process of its own, drawn once it is loaded."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Storage dtypes; default all that the target takes.",
            autocompletion=completion.dtypes,
        ),
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Checks to run; default all.", autocompletion=completion.checks)
    ] = None,
    examples: Annotated[int | None, typer.Option(help="How many random problems to try.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The GPU that the simulator or emulator stands for.", autocompletion=completion.devices),
    ] = None,
    tile: Annotated[str | None, typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.")] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which one call is stopped, of processor time while it works; 0: never. Default 60 for a kernel "
            "of a .cu file, 300 for a function."
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format", help="text, markdown, github (annotations of a workflow) or sarif (a SARIF 2.1.0 document)."
        ),
    ] = "text",
    json: Json = False,
) -> None:
    """Check the numbers, hard: edges, probes and random problems against naive attention in float64."""
    import flashlab as fl
    from flashlab.verify import CALL_SECONDS, OUTSIDERS, Options, is_kernel
    from flashlab.verify.apart import verify_apart
    from flashlab.verify.formats import FORMATS
    from flashlab.verify.outsiders import outsider as made

    if format != "text" and format not in FORMATS:
        raise unknown("--format", format, ["text", *FORMATS])
    if time_limit is not None and not 0 <= time_limit < math.inf:
        raise UsageError("--time-limit", time_limit, "seconds, at least 0 (0: never stopped)")
    somebodys = ":" in target or is_kernel(target) or target in OUTSIDERS
    asked: Any = {
        "backend": backend, "full": full, "quick": quick, "examples": examples, "tile": options.tile(tile),
        "seed": 0 if seed is None and not somebodys else seed,
        "dtypes": options.values("--dtype", dtype, str) or None,
        "checks": options.values("--check", check, str) or None,
        "framework": outsider.framework,
    }  # fmt: skip
    where: Any = {"device": device}
    save.check("verify", [_name(target)])
    with progress.busy("checks") as tick, options.compiling():
        if is_kernel(target):
            kernel = launch.kernel(target, device, time_limit)
            adapter = outsider.adapter(kernel, target.rpartition("/")[2])
            report = verify_apart(target, lambda: adapter, Options(**asked), **kernel.limits(), on_row=tick)
        elif ":" in target or target in OUTSIDERS:
            launch.refuse()
            load = partial(made, target) if target in OUTSIDERS else partial(options.target, target)
            seconds = CALL_SECONDS if time_limit is None else time_limit or math.inf
            report = verify_apart(
                target, load, Options(**asked, **where), seconds=seconds, on_row=tick, refuse=outsider.refuse,
                adapt=lambda fn: outsider.adapter(fn, target),
            )  # fmt: skip
        else:
            launch.refuse()
            outsider.refuse()
            if time_limit is not None:
                raise UsageError("--time-limit", time_limit, "nothing: flashlab's own algorithms have no limit")
            report = fl.verify(target, **asked, **where, on_row=tick)
    keep = partial(save.keep, "verify", [_name(target)], report)
    if format != "text" and not json:
        print(FORMATS[format](report), end="")
        keep()
        raise typer.Exit(0 if report.passed else 1)
    _finish(report, json, keep)


def _name(target: str) -> str:
    """The target's name, as it may stand in a file's name."""
    return target.rpartition("/")[2].replace(".py", "").replace(":", ".")


def bench(
    save: SaveOptions,
    algorithm: Annotated[
        str, typer.Argument(help="One of flashlab's algorithms.", autocompletion=completion.algorithms)
    ] = "flash2",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="What to time beside it: fa3, fa3-wheel (flash-attn3-jax), fa4, cudnn, flex, sdpa-flash, sdpa-efficient, "
            "flashinfer, or another algorithm.",
            autocompletion=completion.peers,
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
    odd: Annotated[
        bool,
        typer.Option(
            "--odd", help="Cells that a seed drew, in place of those: GQA, any head dim and length. Backward: ragged."
        ),
    ] = False,
    tile: Annotated[str | None, typer.Option(metavar="64x64", help="Rows x columns; default the kernel's own.")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds per problem.")] = 1.0,
    cells: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a flat list, one row per problem.")
    ] = None,
    json: Json = False,
) -> None:
    """Time a kernel beside others that you might use instead: calls interleaved, the median of the ratios."""
    from flashlab.measure import odd as off_the_track
    from flashlab.measure import speed

    hopper, support = get(algorithm).arch, get(algorithm).support
    timed = support.head_dims if hopper else range(129)
    named: list[Any] = options.values("--dtype", dtype or ("bfloat16" if hopper else "bfloat16,float16"), str)
    problems: Sequence[speed.Cell] = speed.cells(
        named,
        options.values("--head-dim", head_dim, int) if head_dim else [d for d in (64, 128, 256) if d in timed],
        (False, True) if causal is None else (causal,),
        options.values("--len-q", len_q, int),
    )
    if odd:
        backward = get(algorithm).operation is BACKWARD
        drawn = off_the_track.backward_cells() if backward else off_the_track.cells()
        problems = [cell for cell in drawn if get(cell.kernel(algorithm)).refuses(cell.problem) is None]
        save = replace(save, condition=save.condition or "odd")  # a file beside that of the usual cells
    peers = options.values("--against", against, str)
    rungs = sum(name in CATALOGUE for name in peers)  # one of ours is a peer, and only several are rungs of a ladder
    kind = "ladder" if rungs > 1 else "bench"
    save.check(kind, [algorithm])
    options.check_outputs({"--cells": (cells, (".json",))}, force=save.force)
    report = speed.run(
        algorithm,
        peers,
        cells=problems,
        tile=options.tile(tile),
        seconds=seconds,
        progress=progress.track("problems"),
    )

    def keep() -> None:
        save.keep(kind, [algorithm], report)
        if cells is not None:
            replace_file(Path(cells), jsonlib.dumps(report.cells(), indent=1) + "\n", argument="--cells")

    _finish(report, json, keep)


def fp8(
    save: SaveOptions,
    head_dim: Annotated[str, typer.Option(metavar="N,…", help="Head dims.")] = "128,256",
    len_q: Annotated[
        str, typer.Option(metavar="N,…", help="Tokens per sequence; a problem has 16,384 tokens in all.")
    ] = "1024,4096,16384",
    json: Json = False,
) -> None:
    """Measure FlashAttention-3 in FP8: its error on inputs with outliers, and its speed beside bfloat16.

    cuDNN's FP8 is timed in the same rounds, where nvidia-cudnn-frontend is installed.
    """
    from flashlab.measure import fp8 as eight

    save.check("fp8", ["flash3_fp8"])
    report = eight.run(
        lengths=options.values("--len-q", len_q, int), head_dims=options.values("--head-dim", head_dim, int)
    )
    _finish(report, json, partial(save.keep, "fp8", ["flash3_fp8"], report))


def counters(
    problem: ProblemOptions,
    save: SaveOptions,
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(
            help="Algorithms; default flash2, with --matrix or --l2 all that have kernels.",
            autocompletion=completion.algorithms,
        ),
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
    device: Annotated[
        str, typer.Option(help="The GPU that the emulator's kernels are built for.", autocompletion=completion.devices)
    ] = "h100",
    json: Json = False,
) -> None:
    """Hold simulator and formula to the GPU's own counters (ncu), or to the emulator's, to the byte."""
    from flashlab.measure import counters as hardware
    from flashlab.measure import problems
    from flashlab.measure.workload import Case

    if matrix or l2:
        problem.refuse_shape()
    every, left_out = _with_kernels(backend) if (matrix or l2) and not algorithms else (["flash2"], "")
    names = [among("algorithms", name, CATALOGUE) for name in algorithms or every]
    cases = [
        *(problems.matrix(names) if matrix else []),
        *(c for c in (problems.l2_problems() if l2 else []) if c.algorithm in names),
    ]
    if not matrix and not l2:
        cases = [Case(name, name, problem.problem(name), options.tile(tile), lse) for name in names]
    if not cases:
        raise UsageError("algorithms", ", ".join(names), "one that the L2 model has problems for, such as flash2")
    if only is not None:
        known, cases = cases, [case for case in cases if only in case.name]
        if not cases:
            raise UsageError("--only", only, f"words from a problem's name, such as {known[-1].name!r}")
    report: Any
    kind = "agreement" if backend == "both" else "counters"
    save.check(kind, list(dict.fromkeys(case.algorithm for case in cases)))
    if backend == "gpu":
        report = hardware.run(cases, progress=progress.track("algorithms"))
    elif backend == "emulator":
        from flashlab.measure import emulated

        if save.save is not None:
            raise UsageError("--save", save.save, "nothing: results on record are measured on a GPU")
        report = emulated.run(cases, device=device, progress=progress.track("problems"))
    elif backend == "both":
        from flashlab.measure import agreement

        report = agreement.run(cases, progress=progress.track("problems"))
    else:
        raise unknown("--backend", backend, ("gpu", "emulator", "both"))
    _finish(report, json, partial(save.keep, kind, report.algorithms, report), left_out)


def sanitize(
    save: SaveOptions,
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(help="Algorithms; default all that have kernels.", autocompletion=completion.algorithms),
    ] = None,
    faults: Annotated[
        bool,
        typer.Option("--faults/--no-faults", help="Also run planted faults, which the tools must find, and controls."),
    ] = True,
    json: Json = False,
) -> None:
    """Run compute-sanitizer's four tools on every kernel, over a small grid of problems."""
    from flashlab.measure import sanitizers

    for name in algorithms or []:
        if name not in with_kernels():
            raise unknown("algorithms", name, with_kernels())
    every, left_out = ([], "") if algorithms else _with_kernels("gpu")
    save.check("sanitizers", algorithms or every)
    report = sanitizers.run(sanitizers.grid(algorithms or every), faults=faults, progress=progress.track("runs"))
    _finish(report, json, partial(save.keep, "sanitizers", report.algorithms, report), left_out)
