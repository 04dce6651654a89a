"""What binds the attention kernels: how busy each unit is, what the main loop is made of, clock and power under load.

    python -m flashlab.measure.profile [--out docs/results] [--force] [--seconds 0.5]

This writes a result of kind `profile`. It needs a Hopper GPU, CuPy, torch, ncu and NVIDIA's NVML bindings
(nvidia-ml-py). It asks three questions about each kernel in a cell of `flashlab bench`:

 - By ncu, in one launch from a cold L2 with nothing else running: in which share of the clocks is each unit of an SM
   busy? Such shares don't depend on the clock rate. And where do the computing warps wait, by reason, inside the main
   loop and outside of it?
 - From the machine code that ran (`flashlab.measure.sass`): how many instructions does one round of the main loop
   issue to each pipe, per score?
 - In a loop without ncu: which clock rate does the GPU hold, at what power, and for which share of the time does its
   power limit lower the clock? The same is measured on inputs that are all zero. They take as many instructions in as
   many clocks, but hardly any bit changes, which costs less power. A kernel that is faster on zeros was bound by
   power.

So the time is the clocks that the busiest unit works, over the share in which it is busy, over the clock rate. The
result says which of the three is to blame.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashlab.measure import fp8, ncu, peers, results, sass
from flashlab.measure.load import Gpu, loaded
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.speed import Cell, cells
from flashlab.views.progress import track
from simulator.programs.flash3_fp8 import ONES

MATMUL, FP8 = "matmul", "flash3_fp8"
_N = 8192

UNITS = {
    "tensor": "sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active",
    "exp": "sm__inst_executed_pipe_xu",
    "fma": "sm__inst_executed_pipe_fma",
    "alu": "sm__inst_executed_pipe_alu",
    "uniform": "sm__inst_executed_pipe_uniform",
    "issue": "smsp__inst_issued",
    "sram": "l1tex__data_pipe_lsu_wavefronts",
    "l2": "lts__throughput",
    "dram": "dram__throughput",
}
"""For each unit, the metric that ncu gives as a share of the unit's peak over the elapsed clocks."""
SUMS = {
    "exp": "sm__inst_executed_pipe_xu",
    "fma": "sm__inst_executed_pipe_fma",
    "alu": "sm__inst_executed_pipe_alu",
    "uniform": "sm__inst_executed_pipe_uniform",
    "all": "smsp__inst_executed",
}
"""Metrics of executed warp instructions, by pipe. The sorting of opcodes into pipes (`sass.PIPES`) is held to them."""
FLOPS = ("sm__ops_path_tensor_src_bf16_dst_fp32", "sm__ops_path_tensor_src_fp8")
"""Metrics of the tensor cores' FLOPs, by the operands' dtype. A kernel has only one of them."""
CLOCKS, ACTIVE, DURATION = "sm__cycles_elapsed.max", "sm__cycles_active.avg", "gpu__time_duration.sum"

EXPECTED = {
    "power": "Head dims 128 and 256 at 16k: tensor cores busy 85 to 92 % of the clocks, but the power limit holds the clock down "
    "all of the time, to 1.55 to 1.70 GHz of 1.98; with zeros 10 to 15 % faster.",
    "exp": "Head dim 64 at 16k: exponential units as busy as tensor cores, 70 to 75 % of the clocks; the power limit holds the "
    "clock down there, too.",
    "issue": "Slots of instructions bind nowhere: under 60 % used, even at head dim 64.",
    "memory": "Nor does memory: DRAM under 15 % busy, L2 under 50 %, SRAM under 65 %.",
    "ends": "1k: at head dim 128 a quarter of the computing warps' time passes outside of the main loop, for one of eight key "
    "tiles begins a row tile; the power limit isn't reached under a causal mask.",
    "rung 1": "Head dim 64, 1k: rung 2 executes 1.1 (full) to 1.3 (causal) times rung 1's products, its tiles being larger; that, "
    "and not idle tensor cores, is why it loses.",
}
"""What was expected, in the words of that time, before anything here was measured. Only one launch of flash3 had been
measured, to try out the tool (head dim 128, 4k, full: tensor cores busy 86 %, SRAM 55 %)."""

RATES = {"exp": 16, "fma": 128, "alu": 64, "issue": 128}
"""Lanes per clock of a Hopper SM (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions")."""


@dataclass(frozen=True)
class Item:
    """A kernel in a cell: an algorithm, a peer of `flashlab bench`, or `MATMUL` (8192³). `FP8`'s dtype is its
    output's."""

    kernel: str
    cell: Cell


def chosen() -> list[Item]:
    """All 18 cells of flash3, some cells of the kernels beside it, four of FP8, and the matrix product."""
    every = cells(("bfloat16",), (64, 128, 256))
    few = [x for x in every if (x.length == 16384 and not x.causal) or (x.length == 1024 and x.head_dim == 64)]
    beside = [Item(name, x) for name in ("flash3_3", "flash3_2", "flash3_1", "flash2", "cudnn") for x in few[::-1]]
    eight = [Item(FP8, x) for x in every if x.length == 16384 and x.head_dim > 64]
    return [*(Item("flash3", x) for x in every), *beside, *eight, Item(MATMUL, Cell("bfloat16", 128, False, _N))]


def prepare(item: Item, *, zeros: bool = False) -> Callable[[], Any]:
    """A function that launches the kernel once per call, on inputs from N(0, 1) or on zeros."""
    torch: Any = importlib.import_module("torch")
    generator = torch.Generator(device="cuda").manual_seed(0)
    p = item.cell.problem

    def array(*shape: int) -> Any:
        x = torch.randn(shape, generator=generator, device="cuda")
        return (0 * x if zeros else x).to(getattr(torch, p.dtype))

    if item.kernel == MATMUL:
        a, b = array(_N, _N), array(_N, _N)
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, b, out=out)
    tensors = [array(p.batch, p.heads, p.len_q, p.head_dim) for _ in "qkv"]
    if item.kernel == FP8:
        return fp8.on_torch(p, *tensors)
    if peers.layout(item.kernel) == "bshd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    return peers.prepare(item.kernel, *tensors, causal=p.causal, scale=p.scale)


def useful(item: Item) -> float:
    """The FLOPs of one call by the field's convention, by which a causal mask halves them exactly."""
    return 2.0 * _N**3 if item.kernel == MATMUL else item.cell.flops


# -- ncu ------------------------------------------------------------------------------------------------------------


def launch(items: Iterable[Item]) -> None:
    """Call each kernel twice, the second time with the profiler on. This runs under `ncu --profile-from-start off`."""
    torch: Any = importlib.import_module("torch")
    profiler = torch.cuda.profiler
    for item in items:
        call = prepare(item)
        call()
        torch.cuda.synchronize()
        profiler.start()
        call()
        torch.cuda.synchronize()
        profiler.stop()


def profiled(items: Sequence[Item], timeout: float = 500) -> list[tuple[ncu.Measured, sass.Code]]:
    """What ncu counted of each item, and its machine code with samples. Every call must be one launch.

    Raises `RuntimeError` if ncu saw another number of launches.
    """
    metrics = [f"{name}.avg.pct_of_peak_sustained_elapsed" for name in UNITS.values()]
    metrics += [f"{name}.sum" for name in (*SUMS.values(), *FLOPS)] + [CLOCKS, ACTIVE, DURATION]
    with tempfile.TemporaryDirectory() as folder:
        file, report = Path(folder) / "items.json", Path(folder) / "report.ncu-rep"
        file.write_text(json.dumps([asdict(item) for item in items]), encoding="utf-8")
        ncu.profile(
            [sys.executable, "-m", "flashlab.measure.profile", "launch", str(file)],
            kernels=[".*"],
            metrics=metrics,
            timeout=timeout,
            options=["--profile-from-start", "off", "--section", "SourceCounters", "--export", str(report)],
        )
        counted = ncu.parse(_page(report, "raw"))
        codes = sass.parse(_page(report, "source", "--print-source", "sass"))
    if len(counted) != len(items):
        raise RuntimeError(f"ncu saw {len(counted)} launches of {len(items)} calls")
    return list(zip(counted, listings(counted, codes), strict=True))


def listings(counted: Iterable[ncu.Measured], codes: Iterable[sass.Code]) -> list[sass.Code]:
    """The listing of each launch.

    For a file with two kernels, ncu's source page shows further listings, some of them twice. A launch's listing is the
    next one with its name and about as many executed instructions as were counted.
    """
    left = iter(codes)
    found: list[sass.Code] = []
    for launch in counted:
        for code in left:
            executed, told = sum(code.executed().values()), launch.metrics[f"{SUMS['all']}.sum"]
            if code.kernel.partition("(")[0] == launch.kernel and abs(executed - told) <= 0.05 * told:
                found.append(code)
                break
        else:
            raise RuntimeError(f"the listing of launch {len(found) + 1}, {launch.kernel}, isn't there")
    return found


def _page(report: Path, page: str, *options: str) -> str:
    command = ["ncu", "--import", str(report), "--csv", "--print-units", "base", "--page", page, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def counters(measured: ncu.Measured) -> dict[str, Any]:
    """A launch's clocks, the share of them in which each unit was busy, instructions by pipe, and FLOPs."""
    m = measured.metrics
    return {
        "entry": measured.kernel,
        "clocks": m[CLOCKS],
        "clocks_active": m[ACTIVE],
        "nanoseconds": m[DURATION],
        "busy": {name: m[f"{metric}.avg.pct_of_peak_sustained_elapsed"] / 100 for name, metric in UNITS.items()},
        "executed": {name: m[f"{metric}.sum"] for name, metric in SUMS.items()},
        "flops": measured.total(FLOPS),
    }


def code(of: sass.Code, flops_a_score: int | None) -> dict[str, Any]:
    """A kernel's main loop: one warp's round of it by pipe, and the samples of the warps that compute.

    `scores` are one warp's scores per round, which follow from the FLOPs of its products (None for the matrix product).
    `spent` counts samples in the main loop, by the pipe of the instruction that was next.
    """
    executed = of.executed()
    outside = of.computing - of.loop
    stalls = {name: dict(of.stalls(indices)) for name, indices in (("loop", of.loop), ("outside", outside))}
    spent: Counter[str] = Counter()
    for i in of.loop:
        spent[sass.pipe_of(of.instructions[i].name)] += of.instructions[i].samples
    flops = of.flops(of.round)
    return {
        "instructions": len(of.instructions),
        "round": {
            "instructions": len(of.round),
            "pipes": dict(of.issued(of.round)),
            "flops": flops,
            "tensor_clocks": of.tensor_clocks(of.round),
            "scores": flops_a_score and flops / flops_a_score,
        },
        "executed": dict(executed),
        "stalls": stalls,
        "spent": dict(spent),
    }


def clocks_of_a_round(found: Mapping[str, Any], lanes: Mapping[str, int] = RATES) -> dict[str, float]:
    """The clocks for which one warp's round of the main loop occupies each unit of an SM.

    >>> pipes = {"tensor": 16, "exp": 64, "fma": 141, "alu": 77, "uniform": 103, "other": 18}
    >>> clocks_of_a_round({"instructions": 419, "pipes": pipes, "tensor_clocks": 256.0})
    {'tensor': 256.0, 'exp': 128.0, 'fma': 35.25, 'alu': 38.5, 'issue': 104.75}
    """
    pipes = {**found["pipes"], "issue": found["instructions"]}
    return {"tensor": found["tensor_clocks"], **{name: 32 * pipes.get(name, 0) / rate for name, rate in lanes.items()}}


# -- the whole ------------------------------------------------------------------------------------------------------


def measure(items: Sequence[Item], seconds: float) -> dict[str, Any]:
    """Measure all items, for the data of a result."""
    gpu = Gpu()
    rows: list[dict[str, Any]] = []
    seen = profiled(items)
    for item, (counted, listing) in track("cells")(list(zip(items, seen, strict=True))):
        flops_a_score = None if item.kernel == MATMUL else 4 * item.cell.head_dim + 2 * ONES * (item.kernel == FP8)
        row = {"kernel": item.kernel, **asdict(item.cell), "useful_flops": useful(item)}
        row |= {"counters": counters(counted), "code": code(listing, flops_a_score)}
        row["loaded"] = loaded(prepare(item), useful(item), gpu, seconds)
        if item.kernel == MATMUL or (item.kernel == "flash3" and item.cell.length != 4096):
            row["zeros"] = loaded(prepare(item, zeros=True), useful(item), gpu, seconds)
        rows.append(row)
    return {
        "expected": EXPECTED,
        "limit_watts": gpu.limit,
        "highest_mhz": gpu.highest,
        "seconds": seconds,
        "rows": rows,
    }


class Counters(Data):
    """One launch under ncu: its clocks, how busy each unit was, and warp instructions by pipe."""

    entry: str
    clocks: float
    clocks_active: float
    nanoseconds: float
    busy: dict[str, float]
    executed: dict[str, float]
    flops: int


class Round(Data):
    """One warp's round of the main loop, by the shortest way."""

    instructions: int
    pipes: dict[str, int]
    flops: int
    tensor_clocks: float
    scores: float | None


class Code(Data):
    """The machine code that ran: a round of its main loop, instructions by pipe, and samples of warps' states."""

    instructions: int
    round: Round
    executed: dict[str, int]
    stalls: dict[str, dict[str, int]]
    spent: dict[str, int]


class Loaded(Data):
    """Call after call without a pause: clock, power, and the share of time in which the power limit lowers the
    clock."""

    calls: int
    milliseconds: float
    tflops: float
    samples: int
    mhz: float
    mhz_set: float
    watts: float
    capped: float
    reasons: dict[str, int]


class Row(Data):
    """A kernel in a cell. `zeros` is measured on inputs that are zero."""

    kernel: str
    dtype: str
    head_dim: int
    causal: bool
    length: int
    useful_flops: float
    counters: Counters
    code: Code | None
    loaded: Loaded
    zeros: Loaded | None = None


class Profiled(Data):
    """What `measure` found, and what was expected before it."""

    expected: dict[str, str]
    limit_watts: float
    highest_mhz: int
    seconds: float
    rows: tuple[Row, ...]


def headline(data: Profiled) -> str:
    """One sentence: how busy the first kernel's tensor cores are, and its clock under load."""
    first = data.rows[0].kernel
    mine = [row for row in data.rows if row.kernel == first]
    tensor = [row.counters.busy["tensor"] for row in mine]
    ghz = [row.loaded.mhz / 1000 for row in mine]
    capped = sum(row.loaded.capped > 0.5 for row in mine)
    return (
        f"{first}: tensor cores busy {min(tensor):.0%} to {max(tensor):.0%} of the clocks; "
        f"called without pauses, it runs at {min(ghz):.2f} to {max(ghz):.2f} GHz, "
        f"and power limits the clock in {capped} of {len(mine)} cells"
    )


def table(data: Profiled) -> str:
    """A Markdown table with one row per kernel and cell."""
    units = ("tensor", "exp", "issue", "sram", "l2", "dram")
    header = ("kernel", "head dim", "mask", "length", *units, "GHz", "W", "power-limited", "TFLOP/s", "on zeros")
    rows = [
        (r.kernel, str(r.head_dim), "causal" if r.causal else "full", str(r.length),
         *(f"{r.counters.busy[unit]:.0%}" for unit in units), f"{r.loaded.mhz / 1000:.2f}",
         f"{r.loaded.watts:.0f}", f"{r.loaded.capped:.0%}", f"{r.loaded.tflops:.0f}",
         "" if r.zeros is None else f"{r.zeros.tflops:.0f}")
        for r in data.rows
    ]  # fmt: skip
    return markdown_table(header, rows)


KIND = Kind(
    "profile",
    "Speed: what binds: units, waits, clock and power",
    "what binds: how busy each unit is, the main loop's instructions, waits, clock and power under load",
    "python -m flashlab.measure.profile",
    Profiled,
    headline,
    table,
)


def main() -> None:
    if sys.argv[1:2] == ["launch"]:
        found = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        return launch(Item(item["kernel"], Cell(**item["cell"])) for item in found)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of measured load per kernel and cell")
    given = parser.parse_args()
    items = chosen()
    names = [name for name in dict.fromkeys(item.kernel for item in items) if name != MATMUL]
    print(
        results.save(
            KIND,
            names,
            measure(items, given.seconds),
            subject=names[0],
            folder=given.out,
            replace=given.force,
        )
    )
    return None


if __name__ == "__main__":
    main()
