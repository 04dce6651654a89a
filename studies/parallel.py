"""Several GPUs: `torchrun --nproc-per-node 2 -m studies parallel [speed] [decode] [bytes] [rule] [train]`.

- `speed` times each scheme forwards, and forwards and back, beside torch's `context_parallel` over cuDNN and one GPU alone.
- `decode` times one request's queries over keys that are striped over the ranks, beside one GPU that has all keys.
- `bytes` reads NVLink's own counters around many calls of each scheme, beside the formula. NCCL's protocols Simple, LL and LL128
  put other bytes around the same rows: `--proto` chooses one for the whole run.
- `rule` holds outputs and gradients of each scheme to the rule for errors, and our kernels under torch's `context_parallel`.
- `train` trains the small model of `studies.model`, with the rows of each window on several ranks, and on one.

Each part writes its file after each length, so a run that is cut off loses little. With `--tiny` it tries all of that on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.measure import results
from flashlab.measure.results import Kind
from simulator.errors import Unavailable, UsageError
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem
from studies.rows import row, shown

Row = dict[str, Any]
SCHEMES = ("ring", "all_gather", "ulysses")
ONE, TORCH = "one GPU", "torch"
GRAPH = ", in a graph"
HEADS, HEAD_DIM = 16, 128
LENGTHS = (16_384, 65_536, 131_072)
KEYS = (131_072, 1_048_576)
CALLS = 100
"""Calls between two looks at NVLink's counters."""

SPEED = row(
    "ParallelSpeed", "Calls of a contender: the median of the rounds, of the slowest rank. `tflops` are those of one GPU."
    " `sm_margin` are the SMs that kernels leave to NCCL. `predicted` are the timeline's milliseconds.",
    contender=str, length=int, backward=bool, sm_margin=int | None, ms=float, tflops=float, predicted=float | None, rounds=int,
)  # fmt: skip
DECODE = row(
    "ParallelDecode", "One query over so many keys. `share` is the time over that of one GPU.",
    contender=str, keys=int, heads=int, kv_heads=int, ms=float, share=float | None, rounds=int,
)  # fmt: skip
BYTES = row(
    "LinkBytes", "What a rank sent in so many calls: by formula, by its own count (`counted`), and by NVLink's counters (`tx`, and"
    " `rx` for what it received). None where there are no counters.",
    contender=str, length=int, backward=bool, rank=int, calls=int, formula=int, counted=int, tx=int | None, rx=int | None,
)  # fmt: skip
RULE = row(
    "ParallelRule", "The largest error of a row over what the rule allows, by array.",
    contender=str, length=int, shares=dict[str, float], passed=bool,
)  # fmt: skip
TRAIN = row(
    "ParallelTraining", "Losses of the small model, in nats per token, a step each: with a window's rows on all ranks, and on one."
    " `apart` is the largest difference.", contender=str, steps=int, losses=tuple[float, ...], alone=tuple[float, ...], apart=float,
)  # fmt: skip
PARALLEL = row(
    "Parallel", "What one part measured on so many ranks. `proto` is NCCL's protocol, where one was chosen.", part=str, ranks=int,
    backend=str, nccl=str | None, proto=str | None, heads=int, head_dim=int, dtype=str, speeds=(tuple[SPEED, ...], ()),
    decodes=(tuple[DECODE, ...], ()), bytes=(tuple[BYTES, ...], ()), rules=(tuple[RULE, ...], ()),
    trainings=(tuple[TRAIN, ...], ()),
)  # fmt: skip
_FIELDS = {"speed": "speeds", "decode": "decodes", "bytes": "bytes", "rule": "rules", "train": "trainings"}


def headline(of: Any) -> str:
    """One sentence of the part."""
    if of.part == "speed":
        longest = max(r.length for r in of.speeds)
        ours = [r for r in of.speeds if r.length == longest and not r.backward and r.contender in SCHEMES]
        best = max(ours, key=lambda r: r.tflops)
        alone = next(
            (r.tflops for r in of.speeds if r.length == longest and not r.backward and r.contender == ONE), None
        )
        beside = f", {best.tflops / alone:.2f} of one GPU's rate" if alone else ""
        return f"{of.ranks} ranks, {longest:,} tokens: {best.contender} reaches {best.tflops:.0f} TFLOP/s a GPU{beside}"
    if of.part == "decode":
        shares = ", ".join(
            f"{r.share:.2f} at {r.keys:,}{GRAPH * r.contender.endswith(GRAPH)}"
            for r in of.decodes
            if r.share is not None
        )
        return f"decoding on {of.ranks} ranks over the time of one: {shares}"
    if of.part == "bytes":
        off = [abs(r.tx - r.formula) / r.formula for r in of.bytes if r.tx is not None and r.formula]
        return (
            f"NVLink's bytes are at most {100 * max(off):.2f} % off the formula"
            if off
            else "bytes by formula and count"
        )
    if of.part == "train":
        apart = max(r.apart for r in of.trainings)
        return f"{of.trainings[0].steps} steps of training by rows of {of.ranks} ranks: losses at most {apart:.1e} from one rank's"
    return f"{sum(r.passed for r in of.rules)} of {len(of.rules)} hold the rule"


def table(of: Any) -> str:
    """A row for each contender."""
    columns = {
        "speeds": "contender | tokens=length:, | way | SMs left=sm_margin | ms:.3f | predicted ms=predicted:.3f"
        " | TFLOP/s a GPU=tflops:.0f",
        "decodes": "contender | keys:, | heads | KV heads=kv_heads | ms:.4f | × one GPU=share:.2f",
        "bytes": "contender | tokens=length:, | way | rank | calls | formula:, | counted:, | NVLink sent=tx:,"
        " | NVLink received=rx:,",
        "rules": "contender | tokens=length:, | worst | verdict",
        "trainings": "contender | steps | loss at the end=end:.4f | on one rank=alone:.4f | apart:.1e",
    }
    made: Mapping[str, Callable[[Any], Any]] = {
        "way": lambda r: "forward and backward" if r.backward else "forward",
        "worst": lambda r: ", ".join(f"{name} {x:.2f}" for name, x in r.shares.items()),
        "verdict": lambda r: "passed" if r.passed else "FAILED",
        "end": lambda r: r.losses[-1],
        "alone": lambda r: r.alone[-1],
    }
    name = _FIELDS[of.part]
    return shown(columns[name], **made)(type("Rows", (), {"rows": getattr(of, name)}))


KIND = Kind(
    "parallel", "Several GPUs", "attention over several GPUs: speed, bytes between them, and errors",
    "torchrun --nproc-per-node 2 -m studies parallel speed", PARALLEL, headline, table,
)  # fmt: skip


class Ranks:
    """What a part needs: torch, the ranks, and what the command line says."""

    def __init__(self, given: Any) -> None:
        self.torch: Any = import_module("torch")
        self.parallel: Any = import_module("flashlab.parallel.distributed")
        self.given, self.dist = given, self.torch.distributed
        gpu = self.torch.cuda.is_available() and not given.tiny
        self.backend = "nccl" if gpu else "gloo"
        if "RANK" not in os.environ:
            raise Unavailable("no ranks here: torchrun --nproc-per-node 2 -m studies parallel …")
        local = int(os.environ["LOCAL_RANK"])
        if gpu:
            self.torch.cuda.set_device(local)
        self.device = f"cuda:{local}" if gpu else "cpu"
        more: Any = {}
        if gpu:  # NCCL's blocks come first where an SM is free
            options = self.dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            more = {"device_id": self.torch.device(self.device), "pg_options": options}
        self.dist.init_process_group(self.backend, timeout=datetime.timedelta(seconds=120), **more)
        self.rank, self.ranks = self.dist.get_rank(), self.dist.get_world_size()
        self.dtype = self.torch.bfloat16 if gpu else self.torch.float32
        self.named: Any = str(self.dtype).removeprefix("torch.")
        self.heads, self.head_dim = (2, 16) if given.tiny else (HEADS, HEAD_DIM)
        self.begun, self.rows = time.perf_counter(), list[Row]()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.perf_counter() - self.begun:6.1f} s  {text}", flush=True)

    def draw(self, seed: int, *shape: int) -> Any:
        """The same numbers on each rank."""
        made = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.randn(shape, generator=made, device=self.device, dtype=self.torch.float32).to(self.dtype)

    def shard(self, x: Any) -> Any:
        return self.parallel.shard(x, 2)

    def wait(self) -> None:
        if self.backend == "nccl":
            self.torch.cuda.synchronize()
        self.dist.barrier()

    def most(self, x: float) -> float:
        """Of all ranks."""
        found = self.torch.tensor([x], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(found, self.dist.ReduceOp.MAX)
        return found.item()

    def save(self, part: str, condition: str | None = None) -> None:
        """Writes the rows so far, on rank 0."""
        if self.rank or not self.rows:
            return
        nccl = ".".join(map(str, self.torch.cuda.nccl.version())) if self.backend == "nccl" else None
        content = {
            "part": part, "ranks": self.ranks, "backend": self.backend, "nccl": nccl, "proto": self.given.proto,
            "heads": self.heads, "head_dim": self.head_dim, "dtype": self.named, _FIELDS[part]: self.rows,
        }  # fmt: skip
        of = PARALLEL(**content)
        print(table(of), headline(of), sep="\n\n", flush=True)
        if self.given.tiny:
            return
        condition = "_".join(filter(None, (f"{self.ranks}-gpus", condition)))
        algorithms = ["flash3", "flash3_backward"] if part != "decode" else ["flash_decoding"]
        named: Row = {"subject": part, "condition": condition, "folder": self.given.out, "dirty": self.given.dirty}
        try:
            print(results.save(KIND, algorithms, content, replace=True, **named), flush=True)
        except UsageError as error:  # the other ranks go on: what comes is printed at least
            print(f"not saved: {error}", file=sys.stderr, flush=True)


def timed(r: Ranks, calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a call of each, the contenders in turn: the median of the rounds, of the slowest rank."""
    took: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            call()
            call()
        except (RuntimeError, UsageError, NotImplementedError, AttributeError) as error:
            r.say(f"not run: {name} ({type(error).__name__}: {str(error).splitlines()[0]})")
        else:
            took[name] = []
        r.wait()
    names, repeat = list(took), dict[str, int]()
    for i in range(-1, rounds):
        for n in range(len(names)):
            name = names[(i + n) % len(names)]
            times = repeat.get(name, 1)
            r.wait()
            begun = time.perf_counter()
            for _ in range(times):
                calls[name]()
            if r.backend == "nccl":
                r.torch.cuda.synchronize()
            each = (time.perf_counter() - begun) / times
            if i < 0:
                repeat[name] = max(1, min(50, int(seconds / max(1e-6, r.most(each)))))
            else:
                took[name].append(1e3 * each)
    return {name: r.most(statistics.median(each)) for name, each in took.items()}


def speed(r: Ranks) -> None:
    """Forward, and forward and backward."""
    torch = r.torch
    for length in (64,) if r.given.tiny else r.given.lengths:
        whole = [r.draw(i, 1, r.heads, length, r.head_dim) for i in range(4)]
        with ExitStack() as stack:
            for backward in (False, True):
                own = [r.shard(x).requires_grad_(backward) for x in whole[:3]]
                alone = [x.detach().requires_grad_(backward) for x in whole[:3]]
                dout = r.shard(whole[3])

                def call(
                    f: Callable[..., Any], arrays: list[Any], d: Any, backward: bool = backward
                ) -> Callable[[], Any]:
                    def run() -> None:
                        with torch.set_grad_enabled(backward):
                            out = f(*arrays)
                            if backward:
                                torch.autograd.grad(out, arrays, d)

                    return run

                one = partial(import_module("flashlab.integrations.torch").attention, causal=True)
                calls = {ONE: call(one, alone, whole[3])}
                margins: dict[str, int] = {}
                for name in SCHEMES:
                    f = getattr(r.parallel, f"{name}_attention")
                    calls[name] = call(partial(f, causal=True), own, dout)
                for margin in r.given.margins:
                    name = f"ring, {margin} SMs left"
                    margins[name] = margin
                    calls[name] = call(partial(r.parallel.ring_attention, causal=True, sm_margin=margin), own, dout)
                if r.backend == "nccl":
                    calls[TORCH] = call(_torchs(r, stack if not backward else None, whole), own, dout)
                p = Problem(batch=1, heads=r.heads, len_q=length, head_dim=r.head_dim, dtype="bfloat16", causal=True)
                flops = ATTENTION.flops(p) + backward * BACKWARD.flops(p)
                for name, ms in timed(r, calls, r.given.rounds, 0.02).items():
                    rate = flops / (1 if name == ONE else r.ranks) / ms / 1e9
                    usual = r.parallel.SM_MARGIN if name in SCHEMES[:2] else None
                    r.rows.append({
                        "contender": name, "length": length, "backward": backward, "sm_margin": margins.get(name, usual), "ms": ms,
                        "tflops": rate, "predicted": predicted(r, name, p, backward) if name in SCHEMES else None,
                        "rounds": r.given.rounds,
                    })  # fmt: skip
                    way = "both ways" if backward else "forward"
                    r.say(f"{name}, {length:,}, {way}: {ms:.3f} ms, {rate:.0f} TFLOP/s a GPU")
                r.save("speed")


def predicted(r: Ranks, scheme: str, p: Problem, backward: bool) -> float:
    """Milliseconds by formula and timeline, at the rates of this GPU, or of an H100 where it has none."""
    parallel: Any = import_module("flashlab.parallel")
    counts = parallel.count(scheme, p, ranks=r.ranks, algorithm="flash3", backward=backward)
    title = r.torch.cuda.get_device_name() if r.backend == "nccl" else None
    try:
        rates = parallel.rates(results.device_name(title))
    except UsageError:
        rates = None
    return 1e3 * parallel.timeline(counts, rates).seconds


def _torchs(r: Ranks, stack: ExitStack | None, whole: list[Any]) -> Callable[..., Any]:
    """SDPA by torch's `context_parallel` over cuDNN. `stack` opens it, and leaves it open: its buffers are a row, to have one."""
    attention: Any = import_module("torch.nn.attention")
    if stack is not None:
        experimental: Any = import_module("torch.distributed.tensor.experimental")
        mesh = import_module("torch.distributed.device_mesh").init_device_mesh("cuda", (r.ranks,))
        buffer = whole[0][:, :1, :, :1].clone()
        stack.enter_context(attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION))
        stack.enter_context(experimental.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]))
    return partial(_sdpa, r.torch)


def _sdpa(torch: Any, q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # looked up now: it is patched


def graphed(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call in a CUDA graph, as servers replay it: nothing of it is decided on the host again."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        call()
    return graph.replay


def decode(r: Ranks) -> None:
    """One request's query."""
    one: Any = import_module("flashlab").attention
    heads, kv_heads = (4, 2) if r.given.tiny else (64, 8)
    for keys in (96,) if r.given.tiny else r.given.keys:
        own, share = keys // r.ranks, heads // r.ranks
        q = r.draw(0, 1, heads, 1, r.head_dim)
        k, v = (r.draw(1 + i, 1, kv_heads, keys, r.head_dim) for i in range(2))
        backend = "gpu" if r.backend == "nccl" else "emulator"
        mine = q[:, r.rank * share : (r.rank + 1) * share].contiguous()
        near, far = k[:, :, :own].contiguous(), v[:, :, :own].contiguous()
        calls: dict[str, Callable[[], Any]] = {
            ONE: partial(one, q, k, v, algorithm="auto", backend=backend),
            "ranks": partial(r.parallel.decode_attention, mine, near, far),
        }
        if r.backend == "nccl":
            for name, call in [*calls.items()]:
                try:
                    calls[f"{name}{GRAPH}"] = graphed(r.torch, call)
                except RuntimeError as error:
                    r.say(f"no graph of {name}: {str(error).splitlines()[0]}")
        found = timed(r, calls, r.given.rounds, 0.02)
        for name, ms in found.items():
            alone = ONE + GRAPH * name.endswith(GRAPH)
            share_of = ms / found[alone] if name != alone and alone in found else None
            r.rows.append({
                "contender": name, "keys": keys, "heads": heads, "kv_heads": kv_heads, "ms": ms, "share": share_of,
                "rounds": r.given.rounds,
            })  # fmt: skip
            r.say(f"decode, {name}, {keys:,} keys: {ms:.4f} ms")
        r.save("decode")


def nvlink(r: Ranks) -> tuple[int, int] | None:
    """Bytes that this GPU's links have sent and received so far, by their own counters."""
    if r.backend != "nccl":
        return None
    uuid = f"GPU-{r.torch.cuda.get_device_properties(r.device).uuid}"
    try:
        text = subprocess.run(
            ["nvidia-smi", "nvlink", "-gt", "d", "-i", uuid], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        r.say(f"no counters: {error}")
        return None
    found = re.findall(r"Data (Tx|Rx): (\d+) KiB", text)
    if not found:
        r.say(f"no counters in: {text[:200]!r}")
        return None
    tx, rx = (sum(1024 * int(n) for way, n in found if way == wanted) for wanted in ("Tx", "Rx"))
    return tx, rx


def link_bytes(r: Ranks) -> None:
    """Many calls of each scheme, between two looks at the counters."""
    torch, length = r.torch, 32 if r.given.tiny else r.given.lengths[0]
    count: Any = import_module("flashlab.parallel").count
    calls = 2 if r.given.tiny else CALLS
    whole = [r.draw(i, 1, r.heads, length, r.head_dim) for i in range(4)]
    share = r.heads // r.ranks
    own_heads = [x[:, r.rank * share : (r.rank + 1) * share].contiguous() for x in whole]
    p = Problem(
        batch=1,
        heads=r.heads,
        len_q=length,
        head_dim=r.head_dim,
        dtype=r.named,
        causal=True,
    )
    by_heads = partial(import_module("flashlab.integrations.torch").attention, causal=True)
    for backward in (False, True):
        for name in (*SCHEMES, "heads"):
            f = by_heads if name == "heads" else partial(getattr(r.parallel, f"{name}_attention"), causal=True)
            arrays = own_heads if name == "heads" else [r.shard(x) for x in whole]
            own, dout = [x.detach().requires_grad_(backward) for x in arrays[:3]], arrays[3]

            def run(f: Any = f, own: Any = own, dout: Any = dout, backward: bool = backward) -> None:
                out = f(*own)
                if backward:
                    torch.autograd.grad(out, own, dout)

            run()
            r.wait()
            time.sleep(0.0 if r.given.tiny else 0.2)
            before = nvlink(r)
            r.wait()
            with r.parallel.counted() as ledger:
                for _ in range(calls):
                    run()
            r.wait()
            time.sleep(0.0 if r.given.tiny else 0.2)
            after = nvlink(r)
            tx, rx = (None, None) if before is None or after is None else (after[0] - before[0], after[1] - before[1])
            formula = count(name, p, ranks=r.ranks, backward=backward)
            mine = {
                "rank": r.rank,
                "formula": calls * formula.sent[r.rank],
                "counted": sum(ledger.values()),
                "tx": tx,
                "rx": rx,
            }
            of_ranks: list[Any] = [None] * r.ranks
            r.dist.all_gather_object(of_ranks, mine)
            for each in of_ranks:
                r.rows.append({"contender": name, "length": length, "backward": backward, "calls": calls, **each})
            r.say(f"bytes, {name}, {'both ways' if backward else 'forward'}: {of_ranks[0]}")
            if any(each["counted"] != each["formula"] for each in of_ranks):
                raise UsageError("bytes", of_ranks[0]["counted"], f"{of_ranks[0]['formula']}, by formula, for {name}")
        r.save("bytes", r.given.proto and r.given.proto.lower())


def rule(r: Ranks) -> None:
    """Outputs and gradients of each scheme, held to the rule by the float64 judge."""
    torch = r.torch
    length, heads, dim = (32, 2, 16) if r.given.tiny else (1024, 4, 128)
    whole = [r.draw(i, 1, heads, length, dim) for i in range(4)]
    contenders: dict[str, Callable[..., Any]] = {
        name: partial(getattr(r.parallel, f"{name}_attention"), causal=True) for name in SCHEMES
    }
    with ExitStack() as stack:
        if r.backend == "nccl":
            attention: Any = import_module("torch.nn.attention")
            import_module("flashlab.integrations.torch").register_sdpa()
            attention.activate_flash_attention_impl("flashlab")
            stack.callback(attention.restore_flash_attention_impl)
            experimental: Any = import_module("torch.distributed.tensor.experimental")
            mesh = import_module("torch.distributed.device_mesh").init_device_mesh("cuda", (r.ranks,))

            def under(q: Any, k: Any, v: Any) -> Any:
                return _sdpa(torch, q, k, v)

            stack.enter_context(attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION))
            stack.enter_context(
                experimental.context_parallel(mesh, buffers=[whole[0][:, :1, :, :1].clone()], buffer_seq_dims=[2])
            )
            contenders["SDPA by our kernels, torch's context_parallel"] = under
        for name, f in contenders.items():
            own = [r.shard(x).requires_grad_() for x in whole[:3]]
            try:
                out = f(*own)
                gradients = torch.autograd.grad(out, own, r.shard(whole[3]))
            except (RuntimeError, UsageError, NotImplementedError, AttributeError) as error:
                r.say(f"not run: {name} ({type(error).__name__}: {str(error).splitlines()[0]})")
                continue
            found = [r.parallel.unshard(x.detach().contiguous(), 2) for x in (out, *gradients)]
            if r.rank == 0:
                shares = judged(r, whole, found)
                r.rows.append(
                    {"contender": name, "length": length, "shares": shares, "passed": max(shares.values()) <= 1}
                )
                r.say(f"rule, {name}: {shares}")
            r.dist.barrier()
    r.save("rule")


def judged(r: Ranks, whole: list[Any], found: list[Any]) -> dict[str, float]:
    """The largest error over what is allowed, of out, dq, dk and dv."""
    as_numpy = import_module("flashlab.base.host").to_numpy
    q, k, v, dout = (as_numpy("x", x.cpu()) for x in whole)
    p = Problem(batch=1, heads=q.shape[1], len_q=q.shape[2], head_dim=q.shape[3], dtype=r.named, causal=True)
    given = {"q": q, "k": k, "v": v}
    truth = ATTENTION.judge(p, given)
    arrays = dict(zip(("out", "dq", "dk", "dv"), (as_numpy("x", x.cpu()) for x in found), strict=True))
    back = {**given, "dout": dout, "out": arrays["out"], "lse": truth["lse"].astype(np.float32)}
    allowed = ATTENTION.bounds(p, given, truth)
    truths = {"out": truth["out"], **BACKWARD.judge(p, back)}
    allowed = {"out": allowed["out"], **BACKWARD.bounds(p, back, truths)}
    shares: dict[str, float] = {}
    for name, x in arrays.items():
        off = np.linalg.norm(x.astype(np.float64) - truths[name], axis=-1)
        shares[name] = float((off / allowed[name]).max())
    return shares


def train(r: Ranks) -> None:
    """The same steps from the same weights: with a window's rows on all ranks, whose gradients are averaged, and on one rank."""
    torch, m, clients = r.torch, import_module("studies.model"), import_module("studies.clients")
    steps = r.given.steps or (20 if r.given.tiny else 200)
    config = m.Config(**(clients.TINY if r.given.tiny else clients.SMALL))
    batch, text = 2 if r.given.tiny else 32, m.library()[0].to(r.device)
    m.ATTENTION["ring"] = partial(r.parallel.ring_attention, causal=True)

    def of_rows(model: Any, window: Any, dtype: Any) -> Any:
        """The mean loss of this rank's rows: as many as each rank has."""
        tokens, told = (r.parallel.shard(x, 1) for x in (window[:, :-1], window[:, 1:]))
        with torch.autocast(window.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(tokens)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), told.long().flatten())

    def average(x: Any) -> None:
        r.dist.all_reduce(x.grad)
        x.grad /= r.ranks

    found: dict[str, list[float]] = {}
    for name in ("ring", "flashlab"):
        torch.manual_seed(0)
        model = m.Transformer(config).to(r.device).use(name)
        if name == "ring":
            model.angles = r.parallel.shard(model.angles, 0)
            for x in model.parameters():
                x.register_post_accumulate_grad_hook(average)
        drawn = m.windows(text, config.context, batch, 0)
        more: Any = {"loss_of": of_rows} if name == "ring" else {}
        losses = torch.stack([*m.trained(model, drawn, steps, dtype=r.dtype, **more)])
        if name == "ring":
            r.dist.all_reduce(losses)
            losses /= r.ranks
        found[name] = losses.tolist()
        r.say(f"train, {name}: {found[name][0]:.4f} to {found[name][-1]:.4f}")
    apart = max(abs(x - y) for x, y in zip(found["ring"], found["flashlab"], strict=True))
    r.rows.append(
        {"contender": "ring", "steps": steps, "losses": found["ring"], "alone": found["flashlab"], "apart": apart}
    )
    r.save("train")
    if r.dtype is torch.float32 and apart > APART:
        raise UsageError("loss", apart, f"at most {APART} from one rank's")


APART = 1e-5
"""Of a loss in float32 from one rank's."""
PARTS: Mapping[str, Callable[[Ranks], None]] = {
    "rule": rule,
    "speed": speed,
    "decode": decode,
    "bytes": link_bytes,
    "train": train,
}


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("torchrun --nproc-per-node 2 -m studies parallel", description=KIND.holds)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU; nothing is saved")
    parser.add_argument("--lengths", type=_numbers, default=list(LENGTHS), help="tokens of all ranks (%(default)s)")
    parser.add_argument("--keys", type=_numbers, default=list(KEYS), help="keys of a request (%(default)s)")
    parser.add_argument(
        "--margins", type=_numbers, default=[8, 16, 32], help="SMs left to NCCL, beside the usual (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of calls that are timed (%(default)s)")
    parser.add_argument("--steps", type=int, help="of training (200, or 20)")
    parser.add_argument("--proto", choices=("Simple", "LL", "LL128"), help="NCCL's protocol (its own choice)")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the files (%(default)s)")
    parser.add_argument("--dirty", action="store_true", help="save what changed sources measured")
    given = parser.parse_args(words)
    for part in given.parts:
        if part not in PARTS:
            raise UsageError("part", part, f"some of {', '.join(PARTS)}")
    if given.proto:
        os.environ["NCCL_PROTO"] = given.proto
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast
    r = Ranks(given)
    try:
        for part in given.parts or PARTS:
            r.say(part)
            r.rows = []
            PARTS[part](r)
    finally:
        r.dist.destroy_process_group()
