"""How fast pools are written, and a server's mixed step: `python -m studies pools|mixed [--out docs/results]`, on a GPU with torch.

Appends and copies of pages stand beside a plain copy by torch that reads and writes as many bytes in all. Slots and pages are in
any order. Calls take turns on a cold L2, as in `timed`. A mixed step has a chunk of one prompt and a query of each other request.
It stands beside the sum of the chunk's launch and the decodes' launch, timed apart, all in CUDA graphs.
"""

from __future__ import annotations

import statistics
from functools import partial
from importlib import import_module
from typing import Any

from flashlab.measure.results import Data
from flashlab.measure.timing import captured, turns
from flashlab.run.plan import gpu_plan
from simulator import Problem
from simulator.catalogue import get
from studies.rows import data, grouped, row, shown
from studies.timed import Asked, Call, Row, Study, over, timed

SIZES = (4, 64, 256, 1024)
"""Megabytes that are read and written together."""
CACHES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"kv_dtype": "int8", "k_scale": "token", "v_scale": "token"},
    "float8_e4m3fn": {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "v_scale": "token"},
}
"""Pools, by the dtype of their elements."""


class Cell(Data):
    """A pool, and about how many megabytes are moved."""

    kv_dtype: str
    megabytes: int

    def problem(self, algorithm: str) -> Problem:
        """The problem of so many bytes: 8 heads of 128, pages of 16 keys, and a pool with twice the room."""
        sizes: dict[str, Any] = {
            "batch": 1,
            "heads": 8,
            "head_dim": 128,
            "dtype": "bfloat16",
            "page_size": 16,
            **CACHES[self.kv_dtype],
        }

        def posed(n: int) -> Problem:
            return Problem(**sizes, len_q=n, pages=2 * n if algorithm == "copy_pages" else n // 8 + 2)

        return posed(max(1, round(self.megabytes * 1e6 / (moved(algorithm, posed(1000)) / 1000))))


def moved(algorithm: str, p: Problem) -> int:
    """Bytes of HBM that are read and written, by the formula."""
    from simulator import count

    counts = count(algorithm, p)
    return counts.hbm.read + counts.hbm.write


def drawn(torch: Any, algorithm: str, p: Problem) -> dict[str, Any]:
    """Tensors of a problem. New rows lie token by token, as a model makes them."""
    found: dict[str, Any] = {}
    for x in get(algorithm).operation.taken(p):
        shape, dtype = x.shape(p), getattr(torch, x.dtype_in(p))
        if x.name in ("k", "v"):
            found[x.name] = (
                torch.randn((p.len_q, p.kv_heads, p.head_dim), device="cuda").to(dtype).transpose(0, 1)[None]
            )
        elif x.name == "slot_mapping":
            found[x.name] = torch.randperm(p.pages * (p.page_size or 1), device="cuda")[: p.len_q].contiguous()
        elif x.name == "pairs":
            found[x.name] = torch.randperm(p.pages, device="cuda")[: 2 * p.len_q].view(-1, 2).int().contiguous()
        else:
            found[x.name] = torch.randint(-9, 10, shape, dtype=torch.int8, device="cuda").to(dtype)
    return found


def row_of(algorithm: str, cell: Cell, asked: Asked) -> list[Row]:
    """Time a cell. Raises `RuntimeError` if a row isn't where it belongs."""
    torch: Any = import_module("torch")
    p = cell.problem(algorithm)
    arrays, nbytes = drawn(torch, algorithm, p), moved(algorithm, p)
    plan = gpu_plan(algorithm, p)
    plan.run(**arrays)
    if not landed(algorithm, arrays):
        raise RuntimeError(f"{algorithm} wrote something else at {cell}")
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device="cuda")
    calls: dict[str, Call] = {
        "ours": partial(plan.run, **arrays),
        "copy": partial(torch.empty_like(source).copy_, source),
    }
    times = timed(calls, asked.seconds or 0.3)
    shares = over(times["copy"], times["ours"])
    low, middle, high = statistics.quantiles(shares, n=4)
    return [{
        **cell.model_dump(), "algorithm": algorithm, "nbytes": nbytes, "milliseconds": statistics.median(times["ours"]),
        "copy_milliseconds": statistics.median(times["copy"]), "ratio": middle, "quartiles": (low, high), "rounds": len(shares),
    }]  # fmt: skip


def landed(algorithm: str, arrays: dict[str, Any]) -> bool:
    """Does the last token, or the last pair, stand where it belongs? A pool of 8 bits has something other than zeros there."""
    pool = arrays["k_pool"]
    if algorithm == "copy_pages":
        source, target = arrays["pairs"][-1].tolist()
        return bool((pool[source].view(-1).float() == pool[target].view(-1).float()).all())
    slot = int(arrays["slot_mapping"][-1])
    there = pool[slot // pool.shape[2], :, slot % pool.shape[2]].float()
    new = arrays["k"][0, :, -1].float()
    return (
        bool((there == new).all())
        if pool.dtype == arrays["k"].dtype
        else bool(((there != 0) | (new.abs() < 0.1)).all())
    )


def headline(of: Any) -> str:
    worst = grouped((r for r in of.rows if r.megabytes >= 64), "algorithm")
    return "; ".join(f"{name}: at least {min(x):.2f} of a plain copy's rate from 64 MB on" for name, x in worst.items())


POOLS_ROW = row(
    "PoolsRow", "An append or a copy of pages in one cell: bytes read and written, milliseconds of it and of a plain copy of as"
    " many bytes (medians), and the median share of the copy's rate.", Cell, algorithm=str, nbytes=int, milliseconds=float,
    copy_milliseconds=float, ratio=float, quartiles=tuple[float, float], rounds=int,
)  # fmt: skip
POOLS = Study(
    "pools", "Speed: writing pages", "the time of appends and copies of pages, each round beside a plain copy of as many bytes",
    "python -m studies pools", data("Pools", "Of both.", POOLS_ROW, page_size=int, heads=int, head_dim=int), headline,
    shown("call=algorithm | pool of=kv_dtype | MB=megabytes:, | ms=milliseconds:.4f | a copy's ms=copy_milliseconds:.4f"
          " | GB/s=rate:,.0f | of a copy's rate=ratio:.2f", rate=lambda r: r.nbytes / r.milliseconds / 1e6),
    algorithms=("append_kv", "copy_pages"), subject="pages", together=True, only=tuple(map(str, SIZES)),
    cells=lambda _, asked: [Cell(kv_dtype=x, megabytes=int(n)) for x in CACHES for n in asked.only or SIZES],
    measure=row_of, head=lambda _names, _asked: {"page_size": 16, "heads": 8, "head_dim": 128},
)  # fmt: skip


class Step(Data):
    """A mixed step: a chunk of new tokens of one request, a query of so many others, and the tokens that all have already."""

    new: int
    decodes: int
    context: int
    page_size: int = 16


STEPS = [
    Step(new=512, decodes=63, context=4096),
    Step(new=2048, decodes=31, context=4096),
    Step(new=512, decodes=255, context=1024),
]
_SETS, _REPEATS = 3, 4  # sets of inputs of a graph, so that K and V come from DRAM, and how often they take turns


def step_inputs(torch: Any, of: Step) -> dict[str, Any]:
    """Tensors of a step: 32 heads over 8 KV heads of 128, bfloat16, pages in any order, decodes first."""
    requests, most = of.decodes + 1, of.context + of.new
    pages = -(-most // of.page_size)
    pool = (requests * pages, 8, of.page_size, 128)
    found = {name: torch.randn(pool, device="cuda", dtype=torch.bfloat16) for name in "kv"}
    found["q"] = torch.randn((1, 32, of.decodes + of.new, 128), device="cuda", dtype=torch.bfloat16)
    found["block_table"] = torch.randperm(pool[0], device="cuda").int().view(requests, pages)
    found["seq_lens"] = torch.tensor([of.context + 1] * of.decodes + [most], dtype=torch.int32, device="cuda")
    begins = [*range(of.decodes + 1), of.decodes + of.new]
    return found | {"cu_seqlens_q": torch.tensor(begins, dtype=torch.int32, device="cuda")}


def step_calls(of: Step, x: dict[str, Any]) -> dict[str, Call]:
    """The step in one call, its chunk and its decodes by themselves, and the step in one launch of `flash3_paged`."""
    from flashlab.run.call import attention

    n, pools = of.decodes, {name: x[name] for name in "kv"}
    chunk = pools | {"q": x["q"][:, :, n:], "block_table": x["block_table"][n:], "seq_lens": x["seq_lens"][n:]}
    decodes = pools | {
        "q": x["q"][0, :, :n].transpose(0, 1)[:, :, None], "block_table": x["block_table"][:n], "seq_lens": x["seq_lens"][:n],
    }  # fmt: skip
    return {
        "step": partial(attention, **x, causal=True, num_decodes=n),
        "chunk": partial(attention, **chunk, causal=True, algorithm="flash3_paged"),
        "decodes": partial(attention, **decodes, causal=True, algorithm="paged"),
        "one launch": partial(attention, **x, causal=True),
    }


def step_row(algorithm: str, of: Step, asked: Asked) -> list[Row]:
    """Time a step. Raises `RuntimeError` if it gives other numbers than its parts."""
    del algorithm
    torch: Any = import_module("torch")
    sets = [step_calls(of, step_inputs(torch, of)) for _ in range(_SETS)]
    step, chunk, decodes = (sets[0][name]() for name in ("step", "chunk", "decodes"))
    if not (
        torch.equal(step[:, :, of.decodes :], chunk)
        and torch.equal(step[0, :, : of.decodes].transpose(0, 1), decodes[:, :, 0])
    ):
        raise RuntimeError(f"the step isn't its parts at {of}")
    graphs = {name: captured(torch, [each[name] for each in sets], _REPEATS)[0] for name in sets[0]}
    times = {name: [t / _SETS / _REPEATS for t in found] for name, found in turns(torch, graphs, asked.rounds).items()}
    apart = [a + b for a, b in zip(times["chunk"], times["decodes"], strict=True)]
    middle = {name: statistics.median(found) for name, found in times.items()}
    ratios = {
        "apart": statistics.median(over(times["step"], apart)),
        "one launch": statistics.median(over(times["one launch"], apart)),
    }
    torch.cuda.empty_cache()
    return [
        {
            **of.model_dump(),
            "microseconds": middle,
            "ratio": ratios["apart"],
            "one_launch": ratios["one launch"],
            "rounds": asked.rounds,
        }
    ]


def step_headline(of: Any) -> str:
    return "; ".join(
        f"{r.new:,} new tokens and {r.decodes} decodes: {r.ratio:.2f} × the sum of both launches" for r in of.rows
    )


MIXED_ROW = row(
    "MixedRow", "A step: microseconds (medians) of it, of its parts, and of it in one launch; and the median ratio of a round, of"
    " the step and of the one launch, over the sum of the parts.", Step, microseconds=dict[str, float], ratio=float,
    one_launch=float, rounds=int,
)  # fmt: skip
MIXED = Study(
    "mixed", "Speed: mixed steps", "the time of a server's step with a chunk and decodes, beside both timed apart, in CUDA graphs",
    "python -m studies mixed", data("Mixed", "Of all steps.", MIXED_ROW), step_headline,
    shown("new tokens=new:, | decodes | context:, | µs=step:.1f | chunk's µs=chunk:.1f | decodes' µs=decoding:.1f"
          " | over their sum=ratio:.3f | in one launch=one_launch:.3f", step=lambda r: r.microseconds["step"], chunk=lambda r:
          r.microseconds["chunk"], decoding=lambda r: r.microseconds["decodes"]),
    algorithms=("flash3_paged",), subject="step", together=True, cells=lambda _name, _asked: STEPS, measure=step_row,
    head=lambda _names, _asked: {},
)  # fmt: skip
