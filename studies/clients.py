"""Models that run on our kernels, beside PyTorch's own attention: `python -m studies clients PART`.

- `train` trains the small model of `studies.model` with each attention, from the same weights on the same text. Before that, the
  gradients of the first step are held to those in float32: an attention passes if its error is at most 1.1 times SDPA's. With
  `--tiny` it does so on a CPU, where our kernels run on the emulator.
- `speed` times steps of a transformer of four layers, the contenders in turn, in four shapes. It needs a GPU.
- `profile` says where the time of such a step goes: the host's for attention's calls and in all, and the GPU's by kernels.
- `families` has logits and gradients of six families of Transformers' models, with random weights, against eager ones in float32:
  in bfloat16 on a GPU, beside SDPA, and in float32 on the emulator.
- `generate` has Transformers answer requests of several lengths by continuous batching, beside SDPA.

What a run needs of memory is said before it starts: 16 bytes for each parameter (itself, its gradient and AdamW's two moments),
and what a forward pass keeps for the backward pass, which is counted in passes of one and of two windows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashlab.measure import results
from flashlab.measure.results import Kind
from simulator.errors import UsageError, unknown
from studies.families import OURS, bar, families, mean_error
from studies.generation import generate
from studies.profiled import Watched, of_steps
from studies.rows import row, shown

Row = dict[str, Any]
JUDGE = "math"
LAST = 20
"""The loss at the end of a run is the mean of so many steps."""
LIMIT, ROUNDING = 1.1, 2e-6
"""An error may be so many times SDPA's. Where both compute in float32, it may be this."""
TINY: Row = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "hidden": 96,
    "context": 64,
    "dropout": 0.0,
}
SMALL: Row = {"dropout": 0.0}
FOUR: Row = {"layers": 4, "width": 1024, "heads": 8, "head_dim": 128, "hidden": 2816, "dropout": 0.0}
SHAPES = ((4, 4096, 8), (1, 16384, 2), (16, 1024, 8), (32, 512, 8))
"""Of the steps that are timed: windows, tokens of each, KV heads."""
PROFILED = SHAPES[2:]
"""Of the steps that are taken apart: those in which attention has the least to compute."""
STEPS = 10
"""Of a contender in a round. Between rounds the GPU is waited for, and then waits for the host: the more steps, the less of a round
is that wait, which a training run hasn't."""

RUN = row(
    "TrainingRun", "A training run. `losses` are nats per token, a step each. `error` is that of the first step's gradients: the"
    " root mean square of each parameter's relative error against float32. `host_ms` is how long a step takes to be queued. `peak`"
    " and `formula` are bytes.",
    attention=str, seed=int, losses=tuple[float, ...], tokens_per_s=float, host_ms=float, peak=int | None, formula=int,
    error=float, passed=bool,
)  # fmt: skip
STEP = row(
    "TrainingSpeed", "Steps of a contender: the medians of the rounds. `ratio` is its tokens per second over those of the fastest"
    " other one, the median of the rounds.",
    attention=str, batch=int, context=int, heads=int, kv_heads=int, tokens_per_s=float, ratio=float | None, rounds=int,
    peak=int | None,
)  # fmt: skip
FAMILY = row(
    "Family", "A family of models, against eager attention in float32. An error is the largest of an array over the largest"
    " magnitude in it (`worst`), and the norm of the errors over that of the array (`mean`, the root mean square over arrays)."
    " Of so many `tokens` that were generated, so many are `equal`.",
    family=str, attention=str, dtype=str, logits_worst=float, logits_mean=float, gradients_worst=float, gradients_mean=float,
    tokens=(int | None, None), equal=(int | None, None),
)  # fmt: skip
KERNEL = row(
    "StepKernel",
    "A kernel of a step: its launches, and its milliseconds on the GPU.",
    kernel=str,
    launches=float,
    ms=float,
)
PROFILE = row(
    "TrainingProfile", "Where the time of a step goes, in milliseconds. `host_ms` is how long the host takes to queue a step on an"
    " idle GPU, and `gpu_ms` how long kernels run: the GPU is idle for the rest of `step_ms`. `forward_us` and `backward_us` are"
    " microseconds of the host for attention's call and for its node in the backward pass. `kernels` are those that take most.",
    attention=str, batch=int, context=int, step_ms=float, host_ms=float, gpu_ms=float | None, launches=float | None,
    forward_us=float, backward_us=float, kernels=tuple[KERNEL, ...],
)  # fmt: skip
GENERATION = row(
    "Generation", "Requests that were batched continuously. `tokens_per_s` counts new tokens, and takes the median of the rounds."
    " Of the new tokens so many are `equal` to those by SDPA.",
    attention=str, requests=int, prompt_tokens=int, new_tokens=int, equal=int, tokens_per_s=float, rounds=int,
)  # fmt: skip
CLIENTS = row(
    "Clients", "What one part measured. Of a model it gives the sizes.", part=str, dtype=str, model=dict[str, float],
    batch=int | None, runs=(tuple[RUN, ...], ()), speeds=(tuple[STEP, ...], ()), profiles=(tuple[PROFILE, ...], ()),
    families=(tuple[FAMILY, ...], ()), generations=(tuple[GENERATION, ...], ()),
)  # fmt: skip


def end(run: Any) -> float:
    return statistics.mean(run.losses[-LAST:])


def apart(runs: Sequence[Any]) -> tuple[list[float], float]:
    """How far our loss at the end is from SDPA's, a seed each, and how far SDPA's runs of one seed are from each other."""
    ends: dict[tuple[str, int], list[float]] = {}
    for r in runs:
        ends.setdefault((r.attention, r.seed), []).append(end(r))
    beside = next(name for name, _ in ends if name != OURS)
    seeds = [seed for name, seed in ends if name == OURS and (beside, seed) in ends]
    return [abs(ends[OURS, x][0] - ends[beside, x][0]) for x in seeds], max(
        max(each) - min(each) for (name, _), each in ends.items() if name == beside
    )


def headline(of: Any) -> str:
    """One sentence of the part."""
    if of.runs:
        ends = ", ".join(f"{end(r):.3f} ({name})" for name, r in {r.attention: r for r in of.runs}.items())
        found = f"{len(of.runs[0].losses)} training steps end at a loss of {ends}"
        if len({(r.attention, r.seed) for r in of.runs}) < len(of.runs):
            off, spread = apart(of.runs)
            holds = "at most" if max(off) <= 2 * spread else "NOT within"
            found += f"; with the same seed ours is {max(off):.1e} from SDPA's, {holds} twice the {spread:.1e} between its own runs"
        return found
    if of.speeds:
        ours = [f"{r.ratio:.2f} × at {r.batch} × {r.context:,}" for r in of.speeds if r.attention == OURS and r.ratio]
        return f"training tokens per second over the fastest other attention's: {', '.join(ours)}"
    if of.profiles:
        each = [
            f"{r.step_ms:.1f} ms at {r.batch} × {r.context:,}, the GPU idle for {_idle(r):.0%}"
            for r in of.profiles
            if r.attention == OURS and r.gpu_ms
        ]
        return f"a training step takes {'; '.join(each) or 'what a CPU needs'}"
    if of.generations:
        speeds = {r.attention: r for r in of.generations}
        ours, ratio = speeds[OURS], speeds[OURS].tokens_per_s / speeds["sdpa"].tokens_per_s
        found = (
            f"continuous batching of {ours.requests} requests: {ours.tokens_per_s:,.0f} tokens/s, {ratio:.2f} × SDPA's"
        )
        return f"{found}; {ours.equal:,} of {ours.new_tokens:,} tokens are equal"
    ours = [r for r in of.families if r.attention == OURS]
    worst = max(max(r.logits_worst, r.gradients_worst) for r in ours)
    found = (
        f"{len(ours)} families of models in {of.dtype}: logits and gradients off by at most {worst:.1e} of their size"
    )
    beside = {r.family: r for r in of.families if r.attention != OURS}
    names = ("logits_mean", "gradients_mean")
    if tokens := sum(r.tokens or 0 for r in ours):
        found += f"; {sum(r.equal or 0 for r in ours)} of {tokens} generated tokens are equal"
    shares = [getattr(r, x) / getattr(beside[r.family], x) for r in ours if r.family in beside for x in names]
    return f"{found}, at most {max(shares):.2f} × the mean errors of PyTorch's attention" if shares else found


def _idle(r: Any) -> float | None:
    return None if r.gpu_ms is None else max(0.0, 1 - r.gpu_ms / r.step_ms)


def table(of: Any) -> str:
    """A row for each run, shape or family. Kernels of steps have a table of their own."""
    giga: Mapping[str, Callable[[Any], Any]] = {
        "peak": lambda r: None if r.peak is None else r.peak / 1e9, "formula": lambda r: r.formula / 1e9,
        "first": lambda r: r.losses[0], "end": end, "verdict": lambda r: "passed" if r.passed else "FAILED",
        "idle": _idle, "alike": lambda r: f"{r.equal} of {r.tokens}" if r.tokens else None,
    }  # fmt: skip
    columns = {
        "runs": "attention | seed | tokens/s=tokens_per_s:,.0f | host ms=host_ms:.1f | peak GB=peak:.3f | formula GB=formula:.3f"
        " | first loss=first:.4f | loss at the end=end:.4f | error of gradients=error:.1e | verdict",
        "speeds": "attention | windows=batch | tokens=context:, | heads | KV heads=kv_heads | tokens/s=tokens_per_s:,.0f"
        " | × the fastest other=ratio:.3f | peak GB=peak:.2f",
        "profiles": "attention | windows=batch | tokens=context:, | step ms=step_ms:.2f | host ms=host_ms:.2f | GPU ms=gpu_ms:.2f"
        " | GPU idle=idle:.0% | launches:.0f | forward µs=forward_us:.0f | backward µs=backward_us:.0f",
        "families": "family | attention | dtype | logits worst=logits_worst:.1e | logits mean=logits_mean:.1e"
        " | gradients worst=gradients_worst:.1e | gradients mean=gradients_mean:.1e"
        + (" | equal tokens=alike" if any(r.tokens for r in of.families) else ""),
        "generations": "attention | requests | prompt tokens=prompt_tokens:, | new tokens=new_tokens:, | equal:,"
        " | new tokens/s=tokens_per_s:,.0f | rounds",
    }  # fmt: skip
    (name,) = (x for x in columns if getattr(of, x))
    parts = [shown(columns[name], **giga)(SimpleNamespace(rows=getattr(of, name)))]
    for r in of.profiles:
        if r.kernels:
            parts += [
                f"{r.attention} at {r.batch} × {r.context:,}:",
                shown("launches:.0f | ms:.3f | kernel")(SimpleNamespace(rows=r.kernels)),
            ]
    return "\n\n".join(parts)


KIND = Kind(
    "clients", "Clients: models that train and generate",
    "models on our kernels beside PyTorch's attention: losses, errors, tokens per second, memory, host time",
    "python -m studies clients train", CLIENTS, headline, table,
)  # fmt: skip


def models() -> Any:
    """The module of the small model, which needs torch."""
    return import_module("studies.model")


def _free(torch: Any) -> None:
    """Give back what nobody holds, and begin to watch the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        import_module("cupy").get_default_memory_pool().free_all_blocks()
        torch.cuda.reset_peak_memory_stats()


def _peak(torch: Any, before: int) -> int | None:
    """The most bytes that were allocated since, by torch and in CuPy's pool. None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_allocated() - before + import_module("cupy").get_default_memory_pool().total_bytes()


def needed(torch: Any, model: Any, window: Any, dtype: Any, batch: int) -> int:
    """Bytes of a training step by formula: 16 a parameter, and what the forward pass keeps of `batch` windows."""
    parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}

    def kept(windows: int) -> int:
        found: dict[int, int] = {}

        def same(x: Any) -> Any:
            return x

        def keep(x: Any) -> Any:
            storage = x.untyped_storage()
            if storage.data_ptr() not in parameters:
                found[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, same):
            alive: Any = models().loss_of(model, window[:1].expand(windows, -1).contiguous(), dtype)
        del alive
        return sum(found.values())

    one, two = kept(1), kept(2)
    return 16 * sum(x.numel() for x in model.parameters()) + one + (batch - 1) * (two - one)


def gradients(torch: Any, model: Any, window: Any, dtype: Any) -> dict[str, Any]:
    """The gradients of the loss, by parameter."""
    model.zero_grad(set_to_none=True)
    models().loss_of(model, window, dtype).backward()
    found = {name: x.grad.detach().float() for name, x in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def able(torch: Any, names: str, device: str, dtype: Any, config: Any) -> list[str]:
    """The contenders among `names`, between commas, that run here. The others are told in a line each."""
    found, known = list[str](), models().ATTENTION
    for name in names.split(","):
        if name not in known:
            raise unknown("attention", name, known)
        shapes = [(1, heads, 16, config.head_dim) for heads in (config.heads, config.kv_heads, config.kv_heads)]
        q, k, v = (torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        try:
            known[name](q, k, v).sum().backward()
            found.append(name)
        except RuntimeError as error:
            print(f"not run: {name} ({str(error).splitlines()[0]})", file=sys.stderr)
    return found


def train(torch: Any, given: Any) -> Row:
    """Runs of the small model, a row each."""
    m = models()
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = m.Config(**TINY if given.tiny else SMALL)
    text = m.library()[0].to(device)

    def fresh(name: str, seed: int) -> Any:
        torch.manual_seed(seed)
        return m.Transformer(config).to(device).use(name)

    names = able(torch, given.attention, device, dtype, config)
    window = next(m.windows(text, config.context, given.batch, given.seeds[0]))
    right = gradients(torch, fresh(JUDGE, given.seeds[0]), window, torch.float32)
    errors = {x: mean_error(gradients(torch, fresh(x, given.seeds[0]), window, dtype), right) for x in {*names, JUDGE}}
    beside = next((x for x in names if x.startswith("sdpa")), JUDGE)
    limit = LIMIT * errors[beside] if dtype is torch.bfloat16 else ROUNDING
    runs, todo = list[Row](), [(x, seed) for seed in given.seeds for x in names]
    todo += [(beside, given.seeds[0])] * given.again
    formulas = {x: needed(torch, fresh(x, 0), window, dtype, given.batch) for x in names}
    for name, nbytes in formulas.items():
        print(
            f"{name} needs {nbytes / 1e9:.3f} GB for {given.batch} windows of {config.context:,} tokens",
            file=sys.stderr,
        )
        if device == "cuda" and nbytes > torch.cuda.mem_get_info()[0]:
            free = f"{torch.cuda.mem_get_info()[0] / 1e9:.1f} GB are free"
            raise UsageError("batch", given.batch, f"fewer windows: {name} needs {nbytes / 1e9:.1f} GB, and {free}")
    for name, seed in todo:
        _free(torch)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        model, drawn = fresh(name, seed), m.windows(text, config.context, given.batch, seed)
        steps, losses, queued = m.trained(model, drawn, given.steps, dtype=dtype), list[Any](), list[float]()
        warm, begun = min(10, given.steps // 4), 0.0
        for i in bar(range(given.steps), f"{name}, seed {seed}"):
            if i == warm:
                _wait(torch)
                begun = time.perf_counter()
            at = time.perf_counter()
            losses.append(next(steps))
            queued.append(time.perf_counter() - at)
        _wait(torch)
        seconds = time.perf_counter() - begun
        tokens = (given.steps - warm) * given.batch * config.context
        runs.append({
            "attention": name, "seed": seed, "losses": torch.stack(losses).tolist(), "tokens_per_s": tokens / seconds,
            "host_ms": 1e3 * statistics.median(queued[warm:]), "peak": _peak(torch, before), "formula": formulas[name],
            "error": errors[name], "passed": errors[name] <= limit,
        })  # fmt: skip
        del model, steps, losses
    return {"dtype": str(dtype).removeprefix("torch."), "model": vars(config), "batch": given.batch, "runs": runs}


def _wait(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(torch: Any, given: Any) -> Row:
    """Steps of the contenders in turn, a row for each shape and contender."""
    m = models()
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = list[Row]()
    shapes = ((2, 32, 2),) if given.tiny else SHAPES
    sizes = {**TINY, "layers": 1} if given.tiny else FOUR
    for batch, context, kv_heads in bar(shapes, "speed"):
        config = m.Config(**{**sizes, "context": context, "kv_heads": kv_heads})
        names = able(torch, given.attention, device, dtype, config)
        text = torch.randint(config.vocabulary, (1_000_000,), device=device).to(torch.uint8)
        rounds, each = (1, 1) if given.tiny else (given.rounds, STEPS)
        peaks = dict[str, int | None]()
        took: dict[str, list[float]] = {name: [] for name in names}
        _free(torch)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        model = m.Transformer(config).to(device)
        steps = m.trained(model, m.windows(text, context, batch, 0), (rounds + 2) * each * len(names), dtype=dtype)
        for i in range(-2, rounds):
            for n in range(len(names)):
                model.use(name := names[(i + n) % len(names)])
                if i == -1:
                    _free(torch)
                _wait(torch)
                begun = time.perf_counter()
                for _ in range(each):
                    next(steps)
                _wait(torch)
                if i == -1:
                    peaks[name] = _peak(torch, before)
                if i >= 0:
                    took[name].append((time.perf_counter() - begun) / each)
        fastest = min((x for x in names if x != OURS), key=lambda x: statistics.median(took[x]), default=None)
        for name in names:
            other = took[fastest] if fastest else []
            ratios = [b / a for a, b in zip(took[name], other, strict=False)]
            rows.append({
                "attention": name, "batch": batch, "context": context, "heads": config.heads, "kv_heads": kv_heads,
                "tokens_per_s": batch * context / statistics.median(took[name]), "rounds": rounds, "peak": peaks[name],
                "ratio": statistics.median(ratios) if ratios and name != fastest else None,
            })  # fmt: skip
        del model, steps
    return {"dtype": str(dtype).removeprefix("torch."), "model": sizes, "batch": None, "speeds": rows}


def profile(torch: Any, given: Any) -> Row:
    """Where the time of a step goes in the shapes with the shortest windows, a row for each contender."""
    m = models()
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = list[Row]()
    sizes = {**TINY, "layers": 1} if given.tiny else FOUR
    for batch, context, kv_heads in ((2, 32, 2),) if given.tiny else PROFILED:
        config = m.Config(**{**sizes, "context": context, "kv_heads": kv_heads})
        names = able(torch, given.attention, device, dtype, config)
        text = torch.randint(config.vocabulary, (1_000_000,), device=device).to(torch.uint8)
        model = m.Transformer(config).to(device)
        steps = m.trained(model, m.windows(text, context, batch, 0), 1000, dtype=dtype)
        for name in bar(names, f"{batch} × {context:,}"):
            _free(torch)
            watched = Watched(m.ATTENTION[name])
            model.attending(watched)
            found = of_steps(torch, lambda steps=steps: next(steps), lambda: _wait(torch))
            both = {"forward_us": watched.forward, "backward_us": watched.backward}
            times = {name: 1e6 * statistics.median(each[len(each) // 10 :]) for name, each in both.items()}
            rows.append({"attention": name, "batch": batch, "context": context, **found, **times})
        del model, steps
    return {"dtype": str(dtype).removeprefix("torch."), "model": sizes, "batch": None, "profiles": rows}


def drawn(runs: Sequence[Any], path: Path) -> None:
    """A plot of the losses."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for r in runs:
        axes.plot(range(1, len(r.losses) + 1), r.losses, label=f"{r.attention}, seed {r.seed}", linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


PARTS: Mapping[str, Callable[[Any, Any], Row]] = {
    "train": train,
    "speed": speed,
    "profile": profile,
    "families": families,
    "generate": generate,
}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m studies clients", description=KIND.holds)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--attention", default="flashlab,sdpa-flash,cudnn,math", help="contenders (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU in float32; nothing is saved")
    parser.add_argument("--steps", type=int, help="of a run (200, or 12)")
    parser.add_argument("--batch", type=int, help="windows per step (32, or 2)")
    parser.add_argument(
        "--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0], help="a run each (0)"
    )
    parser.add_argument("--again", type=int, default=0, help="more runs of SDPA's with the first seed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="of steps that are timed (%(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("out/clients-losses.svg"), help="the losses (%(default)s)")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    given = parser.parse_args(words)
    given.steps, given.batch = given.steps or (12 if given.tiny else 200), given.batch or (2 if given.tiny else 32)
    torch: Any = import_module("torch")
    data = {"part": given.part, **PARTS[given.part](torch, given)}
    of = CLIENTS(**data)
    print(table(of), headline(of), sep="\n\n")
    if of.runs:
        drawn(of.runs, given.plot)
        print(given.plot)
    if not given.tiny:
        algorithms = ["flash2", "flash2_backward"] + (
            ["flash3", "flash3_backward"] if torch.cuda.is_available() else []
        )
        print(results.save(KIND, algorithms, data, subject=given.part, folder=given.out, replace=given.force))
    failed = [r.attention for r in of.runs if not r.passed]
    for name in dict.fromkeys(failed):
        print(f"studies: {name}: gradients are off by more than they may be", file=sys.stderr)
    sys.exit(bool(failed))
