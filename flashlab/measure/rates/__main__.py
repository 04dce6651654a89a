"""What an SM does per clock, and how long it waits: the figures of simulator/time/rates.py, measured on a GPU.

    python -m flashlab.measure.rates          writes docs/results

Throughputs are of a whole SM that is kept as busy as possible. Latencies are of loads that wait for each other. Both
are in clocks that the SM itself counts. `clocks` says at which rate these clocks came while attention kernels ran,
interleaved as `flashlab bench` times them.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from flashlab.measure import peers, results, speed
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.measure.timing import interleaved
from flashlab.run import tma
from flashlab.run.arrays import cupy

SOURCE = Path(__file__).with_name("rates.cu")
CHAINS = 8  # of rates.cu
MACROS = ("-DFL_DTYPE=2", "-DHEAD_DIM=128", "-DBR=128", "-DBC=128", "-DSTAGES=2", "-DDYNAMIC=0")
"""The macros of flash3 for head dim 128 in bfloat16."""
MB = 1 << 20
LANES = 1024  # threads that keep an SM's units busy
INSTRUCTIONS: dict[str, tuple[type[np.generic], int]] = {
    "multiply_add": (np.float32, 1),
    "add": (np.float32, 1),
    "maximum": (np.float32, 1),
    "maximum_of_three": (np.int32, 1),
    "exponential": (np.float32, 1),
    "convert_pair": (np.uint32, 1),
    "convert_two_pairs_e4m3": (np.uint32, 2),
}
"""The kernels that INSTRUCTION of rates.cu defines: their argument's type, and machine instructions per statement."""
STATEMENTS = 256  # per turn in rates.cu
PRODUCT = 64
"""The clocks of one product, 64 x 128 x 16, at the tensor cores' full rate."""
WATCHED = ("flash3", "flash3_3", "flash3_2", "flash3_1", "flash2")
SECONDS = 0.35
Row = dict[str, Any]


class Machine:
    """The kernels of rates.cu on this machine's GPU."""

    def __init__(self) -> None:
        self.cp = cupy()
        options = (*MACROS, "-std=c++17", "-arch=sm_90a", f"-I{kernels_cu.include_dir()}")
        self.module = self.cp.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options)
        self.sms: int = self.cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
        self.sink = self.cp.zeros(4, "i8")

    def function(self, name: str, sram: int = 0) -> Any:
        function = self.module.get_function(name)
        if sram > 48 * 1024:
            function.max_dynamic_shared_size_bytes = sram
        return function

    def clocks(
        self,
        name: str,
        rounds: int,
        argument: Any = 0,
        *more: Any,
        threads: int = LANES,
        blocks: int | None = None,
        sram: int = 0,
    ) -> float:
        """The clocks of a kernel's median block, in its second launch."""
        blocks = self.sms if blocks is None else blocks
        found, function = self.cp.zeros(blocks, "i8"), self.function(name, sram)
        for _ in range(2):
            function((blocks,), (threads,), (found, self.cp.int32(rounds), argument, *more), shared_mem=sram)
        return float(self.cp.median(found))


def throughputs(m: Machine) -> list[Row]:
    """Each instruction's results per clock and SM, and the bandwidth of SRAM."""
    cp = m.cp
    rows: list[Row] = []
    for name, (kind, results_each) in {**INSTRUCTIONS, "compare_and_select": (np.float32, 1)}.items():
        clocks = m.clocks(name, 512, kind(1), m.sink)
        rows.append(
            {
                "what": name,
                "unit": "instructions of a lane / clock",
                "value": LANES * CHAINS * 512 * results_each / clocks,
            }
        )
    bytes_read = LANES * CHAINS * 256 * 16
    rows.append(
        {
            "what": "shared_bandwidth",
            "unit": "bytes / clock",
            "value": bytes_read / m.clocks("shared_bandwidth", 256, cp.uint32(0), m.sink, sram=48 * 1024),
        }
    )
    return rows


def latencies(m: Machine) -> list[Row]:
    """The clocks that one load or instruction takes when each waits for the one before it."""
    cp = m.cp
    found = {
        "shared_latency": m.clocks("shared_latency", 4096, cp.uint32(0), m.sink, threads=32, blocks=1, sram=1024) / 4096
    }
    found["dependent"] = m.clocks("dependent", 4096, cp.float32(1), m.sink, threads=32, blocks=1) / 4096
    for name, size, hops in (("l2_latency", 16 * MB, 4096), ("dram_latency", 1024 * MB, 4096)):
        lines = size // 256
        order = cp.random.permutation(lines)
        chain = cp.zeros((lines, 32), "i8")
        chain[order, 0] = chain.data.ptr + 256 * cp.roll(order, -1)
        if name == "dram_latency":
            cp.zeros(256 * MB, "u1")  # this replaces what the L2 holds
            function, clocks = m.function("global_latency"), cp.zeros(1, "i8")
            function((1,), (1,), (clocks, cp.int32(hops), cp.int64(chain.data.ptr), m.sink))
            found[name] = float(clocks[0]) / hops
        else:
            m.clocks(
                "global_latency", lines, cp.int64(chain.data.ptr), m.sink, threads=1, blocks=1
            )  # brings the chain into the L2
            found[name] = m.clocks("global_latency", hops, cp.int64(chain.data.ptr), m.sink, threads=1, blocks=1) / hops
    return [{"what": name, "unit": "clocks", "value": value} for name, value in found.items()]


def bandwidths(m: Machine) -> list[Row]:
    """Bytes per clock and SM from the L2, by loads and by boxes of the copy engine (TMA).

    They are measured for one SM alone, and while all SMs ask. The latency of a single box, from the L2 and from DRAM,
    is measured too.
    """
    cp = m.cp
    rows: list[Row] = []
    data = cp.zeros(16 * MB, "u1")
    for name, blocks in (("l2_bandwidth_of_one", 1), ("l2_bandwidth_of_all", m.sms)):
        clocks = m.clocks("global_bandwidth", 128, cp.uint64(data.data.ptr), m.sink, cp.int32(16 * MB), blocks=blocks)
        rows.append({"what": name, "unit": "bytes / clock", "value": LANES * CHAINS * 16 * 128 / clocks})
    box, sram = 128 * 128, 8 * 128 * 128 + 64
    boxes = 16 * MB // box
    map_of = tma.descriptor(data.data.ptr, (1, 1, boxes * 128, 64), (16 * MB, 16 * MB, 128), "float16", 128)
    for name, blocks, in_flight in (
        ("boxes_of_one", 1, 8),
        ("boxes_of_all", m.sms, 8),
        ("boxes_of_all_in_fours", m.sms, 4),
    ):
        clocks = m.clocks(
            "boxes", 512, map_of, cp.int32(in_flight), cp.int32(boxes), threads=32, blocks=blocks, sram=sram
        )
        rows.append({"what": name, "unit": "bytes / clock", "value": 512 * box / clocks})
    one = m.clocks("boxes", 512, map_of, cp.int32(1), cp.int32(boxes), threads=32, blocks=1, sram=sram) / 512
    rows.append({"what": "box_latency", "unit": "clocks", "value": one})
    big = cp.zeros(2048 * MB, "u1")
    boxes = big.size // box
    map_of = tma.descriptor(big.data.ptr, (1, 1, boxes * 128, 64), (big.size, big.size, 128), "float16", 128)
    clocks = cp.zeros(1, "i8")
    function = m.function("boxes", sram)
    function((1,), (32,), (clocks, cp.int32(512), map_of, cp.int32(1), cp.int32(boxes)), shared_mem=sram)
    rows.append({"what": "box_latency_dram", "unit": "clocks", "value": float(clocks[0]) / 512})
    return rows


def reductions(m: Machine) -> list[Row]:
    """Bytes per clock and SM that reductions add, 16 per lane: by one SM alone, by all of them, by all to what comes from
    DRAM, and by all while they load twice as many bytes.

    If additions and loads take turns at the L2, the last one is as low as both times together make it.
    """
    cp = m.cp
    rows: list[Row] = []
    data, big = cp.zeros(16 * MB, "u1"), cp.zeros(2048 * MB, "u1")
    for name, blocks, memory, loads in (
        ("reductions_of_one", 1, data, 0),
        ("reductions_of_all", m.sms, data, 0),
        ("reductions_of_all_from_dram", m.sms, big, 0),
        ("reductions_beside_loads", m.sms, data, 2),
    ):
        rounds, once = 224, LANES // 2 * CHAINS * 16  # of the big one, each block adds to bytes of its own
        given = cp.uint64(memory.data.ptr), cp.int64(memory.size), cp.int32(loads)
        clocks = m.clocks("reductions", rounds, *given, m.sink, blocks=blocks)
        rows.append({"what": name, "unit": "bytes / clock", "value": once * rounds / clocks})
    return rows


def products(m: Machine) -> list[Row]:
    """The tensor cores' FLOPs per clock and SM, by instruction and by how many warps issue it."""
    cp = m.cp
    rows: list[Row] = []
    for warps in (4, 8, 16):
        clocks = m.clocks("warp_products", 512, cp.uint32(0), m.sink, threads=32 * warps)
        rows.append(
            {
                "what": "warp_products",
                "unit": "FLOPs / clock",
                "warps": warps,
                "value": warps * CHAINS * 512 * 2 * 16 * 8 * 16 / clocks,
            }
        )
    for name, n, deep, batch in (
        ("products_64_sram", 64, 16, 8),
        ("products_128_sram", 128, 16, 8),
        ("products_64_registers", 64, 16, 8),
        ("products_128_registers", 128, 16, 8),
        ("products_256_registers", 256, 16, 8),
        ("products_128_sram_e4m3", 128, 32, 8),
        ("products_128_registers_e4m3", 128, 32, 8),
        ("product_128_sram", 128, 16, 1),
    ):
        for groups in (1, 2, 3):
            if n == 256 and groups == 3:
                continue  # too many registers
            clocks = m.clocks(name, 256, cp.int32(0), m.sink, threads=128 * groups, sram=64 * 1024)
            rows.append(
                {
                    "what": name,
                    "unit": "FLOPs / clock",
                    "warps": 4 * groups,
                    "value": groups * batch * 256 * 2 * 64 * n * deep / clocks,
                    "clocks": clocks / 256,
                }
            )
    return rows


def softmax(m: Machine) -> list[Row]:
    """The clocks that flash3's exponentials of 64 x 128 scores per warpgroup take, alone and beside other work.

    The other work is a warpgroup that multiplies all the time; the clocks that its eight products take are measured
    too. Then come the clocks of one turn (ping-pong) that two warpgroups pass to each other.
    """
    cp = m.cp
    rows: list[Row] = []
    for groups in (1, 2, 3):
        value = m.clocks("exponentials", 512, cp.float32(1e-3), m.sink, threads=128 * groups) / 512
        rows.append({"what": "exponentials", "unit": "clocks", "warps": 4 * groups, "value": value})
    for name in ("128_sram", "64_registers", "128_registers"):
        for groups in (1, 2):
            found: list[Any] = []
            for rounds, products in (
                (128, 2048),
                (1024, 256),
            ):  # first the products outlast the exponentials, then the exponentials the products
                times = cp.zeros((m.sms, 2), "i8")
                function = m.function(f"exponentials_beside_{name}", 64 * 1024)
                for _ in range(2):
                    function(
                        (m.sms,),
                        (128 * (groups + 1),),
                        (times, cp.int32(rounds), cp.float32(1e-3), m.sink, cp.int32(products)),
                        shared_mem=64 * 1024,
                    )
                found.append(cp.median(times, axis=0) / cp.asarray([rounds, products]))
            rows.append(
                {
                    "what": f"exponentials_beside_{name}",
                    "unit": "clocks",
                    "warps": 4 * groups,
                    "value": float(found[0][0]),
                    "products": float(found[1][1]),
                }
            )
    rows.append(
        {"what": "turn", "unit": "clocks", "value": m.clocks("turns", 512, cp.int32(0), m.sink, threads=256) / 1024}
    )
    return rows


def instructions_beside_products(m: Machine) -> list[Row]:
    """How instructions and matrix products slow each other down when two warpgroups do them side by side.

    For each kind of instruction: how many a warp issues per clock of its sub-partition, and the share of their full
    rate that the tensor cores reach, each alone and both together. Products follow each other without end
    (`_beside_products`), or come in batches of eight, each of which is waited for before the next is issued
    (`_beside_batches`).
    """
    cp, sram, many, never = m.cp, 64 * 1024, 1 << 15, 1 << 20  # `never`: more turns than fit beside the products

    def rates(name: str, kind: type[np.generic], each: int, rounds: int, count: int) -> tuple[float, float]:
        found, function = cp.zeros((m.sms, 3), "i8"), m.function(name, sram)
        for _ in range(2):
            function((m.sms,), (256,), (found, cp.int32(rounds), kind(1), m.sink, cp.int32(count)), shared_mem=sram)
        turns, clocks, of_products = found.T
        return float(cp.median(STATEMENTS * each * turns / clocks)), float(cp.median(PRODUCT * count / of_products))

    rows: list[Row] = []
    for how in ("products", "batches"):
        for instruction, (kind, each) in INSTRUCTIONS.items():
            name = f"{instruction}_beside_{how}"
            value, share = rates(name, kind, each, never, many)
            alone, _ = rates(name, kind, each, 4096, 0)
            _, share_alone = rates(name, kind, each, 0, many)
            rows.append({"what": name, "unit": "instructions of a warp / clock of a sub-partition", "value": value,
                         "tensor_share": share, "alone": alone, "tensor_share_alone": share_alone})  # fmt: skip
    return rows


def turnover(m: Machine) -> list[Row]:
    """The clocks from a block's last instruction to the first of the block that takes its place, for blocks that fill
    an SM; and the microseconds of a launch that does nothing, by events."""
    cp, sram, each = m.cp, 200 * 1024, 8
    blocks = m.sms * each
    times = cp.zeros((blocks, 3), "i8")
    function = m.function("blocks", sram)
    for _ in range(2):
        function((blocks,), (384,), (times, cp.int32(20000), cp.int32(0), m.sink), shared_mem=sram)
    gaps: list[float] = []
    by_sm: dict[int, list[tuple[int, int]]] = {}
    for sm, begun, ended in times.get().tolist():
        by_sm.setdefault(sm, []).append((begun, ended))
    for runs in by_sm.values():
        runs.sort()
        gaps += [after[0] - before[1] for before, after in zip(runs, runs[1:], strict=False)]
    pause, nothing = m.function("multiply_add"), m.function("nothing")
    spent: list[float] = []
    for _ in range(50):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        pause((m.sms,), (LANES,), (cp.zeros(m.sms, "i8"), cp.int32(20000), cp.float32(1), m.sink))
        begin.record()
        nothing((m.sms,), (384,), ())
        end.record()
        end.synchronize()
        spent.append(1e3 * cp.cuda.get_elapsed_time(begin, end))
    return [
        {"what": "block_turnover", "unit": "clocks", "value": statistics.median(gaps)},
        {"what": "empty_launch", "unit": "microseconds", "value": statistics.median(spent)},
    ]


def clocks(m: Machine, cells: Sequence[speed.Cell]) -> list[Row]:
    """The SMs' clock rate in GHz during each kernel, while a cell's kernels are timed in turn: the calls' median."""
    torch: Any = importlib.import_module("torch")
    rows: list[Row] = []
    watch = m.function("watch")
    for cell in cells:
        p = cell.problem
        q = [
            torch.randn((p.batch, p.heads, p.len_q, p.head_dim), device="cuda").to(getattr(torch, p.dtype))
            for _ in "qkv"
        ]
        seen: dict[str, list[tuple[Any, Any]]] = {name: [] for name in WATCHED}

        def watched(name: str, call: Callable[[], Any], seen: list[tuple[Any, Any]]) -> Callable[[], Any]:
            def both() -> Any:
                stream = m.cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
                before, after = (m.cp.zeros((m.sms, 2), "i8") for _ in range(2))
                with stream:
                    watch((4 * m.sms,), (32,), (before,))
                    call()
                    watch((4 * m.sms,), (32,), (after,))
                seen.append((before, after))

            return both

        calls = [watched(name, peers.prepare(name, *q, causal=p.causal, scale=p.scale), seen[name]) for name in WATCHED]
        times = interleaved(torch, calls, SECONDS)
        for name, found, spent in zip(WATCHED, seen.values(), times, strict=True):
            rates = [
                (b - a).get().astype(float) for a, b in found[len(found) // 3 :]
            ]  # skip the calls before the clock has settled
            gigahertz = statistics.median(float(m.cp.median(m.cp.asarray(r[:, 0] / r[:, 1]))) for r in rates)
            rows.append(
                {"algorithm": name, **vars(cell), "milliseconds": statistics.median(spent), "gigahertz": gigahertz}
            )
    return rows


class Rate(Data):
    """One rate or latency. `products` and `tensor_share` say what the tensor cores did at the same time."""

    what: str
    unit: str
    value: float
    warps: int | None = None
    clocks: float | None = None
    products: float | None = None
    tensor_share: float | None = None
    alone: float | None = None
    tensor_share_alone: float | None = None


class Clock(Data):
    """A kernel in a cell of `flashlab bench`, and the SMs' clock rate while it ran."""

    algorithm: str
    dtype: str
    head_dim: int
    causal: bool
    length: int
    milliseconds: float
    gigahertz: float


class Rates(Data):
    """What was measured of the machine."""

    rows: tuple[Rate, ...]
    clocks: tuple[Clock, ...]


def headline(data: Rates) -> str:
    """One sentence: how many rates there are, and the range of the clock rate."""
    ghz = [row.gigahertz for row in data.clocks]
    return (
        f"{len(data.rows)} rates and latencies of an SM; its clock while attention kernels run: {min(ghz):.2f} to "
        f"{max(ghz):.2f} GHz (median {statistics.median(ghz):.2f})"
    )


def table(data: Rates) -> str:
    """A Markdown table with one row per rate."""
    rows = [
        (r.what, "" if r.warps is None else str(r.warps), f"{r.value:,.{1 if r.value >= 1 else 2}f}", r.unit)
        for r in data.rows
    ]
    return markdown_table(("what", "warps", "", "unit"), rows)


KIND = Kind(
    "rates",
    "Speed: what an SM does per clock",
    "throughputs, latencies and bandwidths of an SM in its own clocks; its clock while attention kernels run",
    "python -m flashlab.measure.rates",
    Rates,
    headline,
    table,
)


def main() -> None:
    m = Machine()
    parts = (throughputs, latencies, bandwidths, reductions, products, softmax, instructions_beside_products, turnover)
    rows = [row for part in parts for row in part(m)]
    for row in rows:
        print(row)
    cells = speed.cells(("bfloat16", "float16"), (64, 128, 256), (False, True), (1024, 4096, 16384))
    watched = clocks(m, cells)
    for row in watched:
        print(row)
    about = {**results.environment(), "command": "python -m flashlab.measure.rates"}
    print(results.save(KIND, [], {"rows": rows, "clocks": watched}, subject="machine", replace=True, about=about))


if __name__ == "__main__":
    main()
