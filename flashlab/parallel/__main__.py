"""One attention on several ranks, held to one: `torchrun --nproc-per-node 2 -m flashlab.parallel --backend gloo --scheme ring`.

Each rank prints the error of its rows, forwards and back, against one rank that computes all, and the bytes that it sent beside
the formula's. With gloo kernels run on the emulator.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from flashlab.parallel.distributed import Interrupted, attention, counted, shard
from flashlab.parallel.formulas import count
from flashlab.parallel.passes import SCHEMES
from flashlab.run.autograd import attention as on_one_rank
from flashlab.run.autograd import torch
from simulator.errors import Unavailable, UsageError
from simulator.problem import Problem

ALLOWED = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""The norm of an array's error over the array's."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs on this rank. Returns the status: 0, or 1 for an error that is too large or bytes that aren't the formula's."""
    parser = argparse.ArgumentParser("torchrun --nproc-per-node 2 -m flashlab.parallel", description=__doc__)
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="nccl for GPUs, gloo for CPUs (where there is a GPU, nccl)"
    )
    parser.add_argument("--scheme", choices=tuple(SCHEMES), default="ring", help="%(default)s")
    parser.add_argument("--layout", choices=("zigzag", "contiguous"), default="zigzag", help="%(default)s")
    parser.add_argument("--length", type=int, help="tokens of all ranks (64 per rank with gloo, 8192 with nccl)")
    parser.add_argument("--heads", type=int, default=4, help="%(default)s")
    parser.add_argument("--kv-heads", type=int, default=2, help="%(default)s")
    parser.add_argument("--head-dim", type=int, default=64, help="%(default)s")
    parser.add_argument("--dtype", choices=tuple(ALLOWED), help="float32 with gloo, bfloat16 with nccl")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another (%(default)s)")
    given = parser.parse_args(words)
    if "RANK" not in os.environ:
        raise Unavailable("no ranks here: torchrun --nproc-per-node 2 -m flashlab.parallel …")
    gpu = (given.backend or ("nccl" if torch.cuda.is_available() else "gloo")) == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=given.timeout), device_id=device if gpu else None
    )
    try:
        return held(given, device)
    finally:
        torch.distributed.destroy_process_group()


def held(given: Any, device: Any) -> int:
    """The rank's rows, their errors and bytes, in a line each."""
    dist, gpu, causal = torch.distributed, device.type == "cuda", not given.full
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = given.dtype or ("bfloat16" if gpu else "float32")
    p = Problem(
        batch=1, heads=given.heads, kv_heads=given.kv_heads, len_q=given.length or ranks * (8192 if gpu else 64),
        head_dim=given.head_dim, dtype=dtype, causal=causal,
    )  # fmt: skip
    formula = count(given.scheme, p, ranks=ranks, layout=given.layout, backward=True)  # refuses what can't be dealt
    share = 2 * p.kv_heads * (p.len_kv // ranks) * p.head_dim
    if rank == 0:
        needed = 4 * share * p.itemsize + 4 * share * 4 + 6 * p.heads * p.len_q * p.head_dim * (p.itemsize + 4)
        print(f"{given.scheme}, {given.layout}, on {ranks} ranks: {p}", flush=True)
        print(f"a rank needs about {needed / 1e6:,.0f} MB, for the whole problem is computed on each, too", flush=True)
    drawn = torch.Generator(device).manual_seed(0)
    sizes = [(1, heads, p.len_q, p.head_dim) for heads in (p.heads, p.kv_heads, p.kv_heads, p.heads)]
    q, k, v, dout = (torch.randn(x, generator=drawn, device=device).to(getattr(torch, dtype)) for x in sizes)
    own = [shard(x, 2, layout=given.layout).requires_grad_() for x in (q, k, v)]
    begun = time.perf_counter()
    with counted() as ledger:
        out = attention(*own, scheme=given.scheme, causal=causal, layout=given.layout)
        found = [out.detach(), *torch.autograd.grad(out, own, shard(dout, 2, layout=given.layout))]
    took = time.perf_counter() - begun
    whole = [x.requires_grad_() for x in (q, k, v)]
    judge = on_one_rank(*whole, causal=causal)
    right = [judge.detach(), *torch.autograd.grad(judge, whole, dout)]
    right = [shard(x, 2, layout=given.layout).float() for x in right]
    errors = [((x.float() - y).norm() / y.norm()).item() for x, y in zip(found, right, strict=True)]
    sent, said = sum(ledger.values()), formula.sent[rank]
    passed = max(errors) <= ALLOWED[dtype] and sent == said
    named = ", ".join(f"{name} {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True))
    text = (
        f"rank {rank}: relative errors {named}; sent {sent:,} bytes, formula {said:,}; {took:.1f} s; "
        f"{'passed' if passed else 'FAILED'}"
    )
    for each in range(ranks):
        dist.barrier()
        if rank == each:
            print(text, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        status = main()
    except (UsageError, Unavailable, Interrupted) as error:
        print(f"flashlab.parallel: {error}", file=sys.stderr, flush=True)
        status = 1 if isinstance(error, Interrupted) else 2
    sys.exit(status)
