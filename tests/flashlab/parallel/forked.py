"""Ranks on gloo for tests: one process that has imported torch forks them, scenario after scenario.

It reads a line of JSON for each, `{"ranks": 2, "scenario": "name", ...}`, and answers with a line: for each rank how it ended.
What a rank returns as arrays lies in `<folder>/<rank>.npz`.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

TIMEOUT = 4.0
"""Seconds that a rank waits for another, where it should wait in vain."""


class Ranks:
    """The process that forks. `run` returns how each rank ended: its `status`, an error's `kind` and `line`, and `seconds`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, ranks: int, scenario: str, **options: Any) -> list[dict[str, Any]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ranks": ranks, "scenario": scenario, **options}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


def drawn(seed: int, *shape: int) -> Any:
    """Numbers that bfloat16 holds, the same everywhere."""
    return np.round(np.random.default_rng(seed).standard_normal(shape) * 64) / 64


def scheme(
    rank: int, folder: str, *, name: str, heads: list[int], length: int, dtype: str, masks: dict[str, Any], **how: Any
) -> None:
    """Both ways; a ring twice, each time with other values in memory beside K and V."""
    torch: Any = import_module("torch")

    from flashlab.parallel import distributed as parallel

    q, k, v, dout = (
        torch.from_numpy(drawn(i, 1, h, length, 16)).to(getattr(torch, dtype))
        for i, h in enumerate([*heads, heads[1], heads[0]])
    )
    dlse = torch.from_numpy(drawn(9, 1, heads[0], length)).float()
    found: list[list[Any]] = []
    sent = 0
    for other in (0.0, float("nan"))[: 1 + (name == "ring")]:
        own = [parallel.shard(x, 2, layout=how["layout"]) for x in (q, k, v)]
        wide = [torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), other, dtype=x.dtype) for x in own]
        for x, y in zip(wide, own, strict=True):
            x[:, :, : y.shape[2]] = y
        given = [x[:, :, : y.shape[2]].requires_grad_() for x, y in zip(wide, own, strict=True)]
        with parallel.counted() as ledger:
            out, lse = getattr(parallel, f"{name}_attention")(*given, lse=True, **how, **masks)
            losses = (
                (out, lse),
                (parallel.shard(dout, 2, layout=how["layout"]), parallel.shard(dlse, 2, layout=how["layout"])),
            )
            gradients = torch.autograd.grad(losses[0], given, losses[1])
        found.append([x.detach() for x in (out, lse, *gradients)])
        sent = sum(nbytes for (_, step, _), nbytes in ledger.items() if "LSE" not in step)
    assert all(torch.equal(x, y) for x, y in zip(found[0], found[-1], strict=True)), "other bits"
    whole = [parallel.unshard(x, 2, layout=how["layout"]) for x in found[0]]
    arrays = dict(zip(("out", "lse", "dq", "dk", "dv"), (x.float().numpy() for x in whole), strict=True))
    np.savez(Path(folder, f"{rank}.npz"), sent=sent, **arrays)


def decode(
    rank: int, folder: str, *, ranks: int, heads: list[int], keys: int, interleave: int, page_size: int | None
) -> None:
    """Keys are striped; without pages, or in pages of the rank's own whose other rows are NaN."""
    torch: Any = import_module("torch")

    from flashlab.parallel import distributed as parallel
    from flashlab.parallel import layouts

    q, k, v = (
        torch.from_numpy(drawn(i, 1, h, n, 16)).float()
        for i, (h, n) in enumerate([(heads[0], 1), *[(heads[1], keys)] * 2])
    )
    share = heads[0] // ranks
    mine, own = q[:, rank * share : (rank + 1) * share], layouts.striped(keys, ranks, rank, interleave)
    k, v = k[:, :, own], v[:, :, own]
    pages: dict[str, Any] = {}
    if page_size is not None:
        n = -(-len(own) // page_size)
        pages = {
            "block_table": torch.arange(n, dtype=torch.int32).flip(0)[None].contiguous(),
            "seq_lens": torch.tensor([len(own)], dtype=torch.int32),
        }
        k, v = (_in_pages(x, n, page_size) for x in (k, v))
    out = parallel.decode_attention(mine, k, v, interleave=interleave, **pages)
    np.savez(Path(folder, f"{rank}.npz"), out=out.numpy())


def _in_pages(x: Any, pages: int, size: int) -> Any:
    """(1, heads, length, dim) as (pages, heads, size, dim), the last page first."""
    torch: Any = import_module("torch")

    room = torch.full((1, x.shape[1], pages * size, x.shape[3]), float("nan"))
    room[:, :, : x.shape[2]] = x
    return room[0].unflatten(1, (pages, size)).transpose(0, 1).flip(0).contiguous()


def fault(rank: int, folder: str, *, how: str) -> None:
    """Rank 1 does something else. The others call, and may have called before."""
    torch: Any = import_module("torch")

    from flashlab.parallel import distributed as parallel
    from flashlab.parallel.transfers import Peers

    def call(length: int = 32, dtype: Any = torch.float32, **options: Any) -> None:
        x = torch.ones(1, 1, length, 16, dtype=dtype)
        out = parallel.ring_attention(x, x, x, **options)
        np.savez(Path(folder, f"{rank}.npz"), out=out.float().numpy())

    other = rank == 1
    if how in ("dies later", "interrupted"):
        call()
        Path(folder, f"{rank}.npz").unlink()
    if other and how.startswith("dies"):
        os._exit(3)
    if other and how == "late":
        time.sleep(2 * TIMEOUT)
    if other and how == "interrupted":

        def half(self: Any, step: str, **tensors: Any) -> None:
            (first, *_) = tensors.values()
            self._dist.isend(first, group=self.group, group_dst=0, tag=0).wait()
            os._exit(3)

        Peers.shift = half  # pyright: ignore
    lengths = {"another length": 34, "does not divide": 33}
    call(
        lengths.get(how, 32) if other else 32, torch.bfloat16 if other and how == "another dtype" else torch.float32,
        causal=how in ("another mask", "does not divide") and (other or how != "another mask"),
    )  # fmt: skip


SCENARIOS: dict[str, Callable[..., None]] = {"scheme": scheme, "decode": decode, "fault": fault}


def _rank(rank: int, command: dict[str, Any], port: int, told: int) -> None:
    """A rank, in a process of its own."""
    torch: Any = import_module("torch")
    dist: Any = import_module("torch.distributed")

    torch.set_num_threads(1)
    begun, seconds = time.perf_counter(), command.pop("timeout", 60.0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(command["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said: dict[str, Any] = {"kind": None, "line": None}
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
        options = {name: x for name, x in command.items() if name not in ("ranks", "scenario")}
        if command["scenario"] == "decode":
            options["ranks"] = command["ranks"]
        SCENARIOS[command["scenario"]](rank, **options)
        dist.destroy_process_group()
    except BaseException as error:
        said = {"kind": type(error).__name__, "line": str(error)}
    os.write(told, json.dumps({**said, "seconds": time.perf_counter() - begun}).encode())
    os._exit(0 if said["kind"] is None else 1)


def _served(command: dict[str, Any], limit: float = 100.0) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, children = [os.pipe() for _ in range(command["ranks"])], list[int]()
    for rank in range(command["ranks"]):
        child = os.fork()
        if not child:
            os.dup2(2, 1)  # the answers are the parent's
            _rank(rank, dict(command), port, pipes[rank][1])
        children.append(child)
    ended, begun = list[dict[str, Any]](), time.perf_counter()
    for child, (read, write) in zip(children, pipes, strict=True):
        os.close(write)
        status = None
        while status is None and time.perf_counter() - begun < limit:
            done, found = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if done else None
            time.sleep(0.01)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        text = os.read(read, 1 << 16) if status is not None else b""
        os.close(read)
        ended.append(
            {"status": status, **(json.loads(text) if text else {"kind": None, "line": None, "seconds": None})}
        )
    return ended


if __name__ == "__main__":
    import_module("flashlab.parallel.distributed")  # once, before ranks are forked

    for line in sys.stdin:
        print(json.dumps(_served(json.loads(line))), flush=True)
