"""What an SM does per clock, and how long it waits, for simulator/time/rates.py, on a Hopper GPU: `python -m studies rates`.

Throughputs are of a whole SM that is kept as busy as possible. Latencies are of loads that wait for each other. Both are in clocks
that the SM itself counts. `clocks` says at which rate these clocks came while attention kernels ran, interleaved as
`flashlab bench` times them. docs/_site/time_model.py makes the model's constants of these rates.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from flashlab.measure import peers, results, speed
from flashlab.measure.results import Kind
from flashlab.measure.timing import interleaved
from flashlab.run import tma
from flashlab.run.arrays import cupy
from studies.rows import CELL, row, shown

SOURCE = Path(__file__).with_name("rates.cu")
CHAINS = 8  # of rates.cu
MACROS = ("-DFL_DTYPE=2", "-DHEAD_DIM=128", "-DBR=128", "-DBC=128", "-DSTAGES=2", "-DDYNAMIC=0")
"""The macros of flash3 for head dim 128 in bfloat16."""
KB, MB = 1 << 10, 1 << 20
LANES = 1024  # threads that keep an SM's units busy
INSTRUCTIONS: dict[str, type[np.generic]] = {
    "multiply_add": np.float32, "add": np.float32, "maximum": np.float32, "maximum_of_three": np.int32,
    "exponential": np.float32, "convert_pair": np.uint32,
}  # fmt: skip
"""The kernels that INSTRUCTION of rates.cu defines, and their argument's type."""
STATEMENTS = 256  # per turn in rates.cu
PRODUCT = 64
"""The clocks of one product, 64 x 128 x 16, at the tensor cores' full rate."""
WATCHED = ("flash3", "flash3_3", "flash3_2", "flash3_1", "flash2")
SECONDS = 0.35
PER_CLOCK = "bytes / clock"
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
        if sram > 48 * KB:
            function.max_dynamic_shared_size_bytes = sram
        return function

    def run(
        self, name: str, shape: Any, *given: Any, threads: int, blocks: int, sram: int = 0, launches: int = 2
    ) -> Any:
        """What a kernel wrote in its last launch: an array of clocks, of this shape."""
        found, function = self.cp.zeros(shape, "i8"), self.function(name, sram)
        for _ in range(launches):
            function((blocks,), (threads,), (found, *given), shared_mem=sram)
        return found

    def clocks(
        self, name: str, rounds: int, *given: Any, threads: int = LANES, blocks: int | None = None, **how: int
    ) -> float:
        """The clocks of a kernel's median block, in its second launch."""
        blocks = self.sms if blocks is None else blocks
        return float(
            self.cp.median(self.run(name, blocks, self.cp.int32(rounds), *given, threads=threads, blocks=blocks, **how))
        )


def rate(what: str, value: float, unit: str = PER_CLOCK, **more: Any) -> Row:
    return {"what": what, "unit": unit, "value": value, **more}


def throughputs(m: Machine) -> Iterator[Row]:
    """Each instruction's results per clock and SM, and the bandwidth of SRAM."""
    for name, kind in INSTRUCTIONS.items():
        clocks = m.clocks(name, 512, kind(1), m.sink)
        yield rate(name, LANES * CHAINS * 512 / clocks, "instructions of a lane / clock")
    clocks = m.clocks("shared_bandwidth", 256, m.cp.uint32(0), m.sink, sram=48 * KB)
    yield rate("shared_bandwidth", LANES * CHAINS * 256 * 16 / clocks)


def latencies(m: Machine) -> Iterator[Row]:
    """The clocks that one load or instruction takes when each waits for the one before it."""
    cp, hops, one = m.cp, 4096, {"threads": 1, "blocks": 1}
    clocks = m.clocks("shared_latency", hops, cp.uint32(0), m.sink, threads=32, blocks=1, sram=1024)
    yield rate("shared_latency", clocks / hops, "clocks")
    yield rate("dependent", m.clocks("dependent", hops, cp.float32(1), m.sink, threads=32, blocks=1) / hops, "clocks")
    for name, size in (("l2_latency", 16 * MB), ("dram_latency", 1024 * MB)):
        lines = size // 256
        order, chain = cp.random.permutation(lines), cp.zeros((lines, 32), "i8")
        chain[order, 0] = chain.data.ptr + 256 * cp.roll(order, -1)
        given = cp.int64(chain.data.ptr), m.sink
        if name == "dram_latency":
            cp.zeros(256 * MB, "u1")  # this replaces what the L2 holds
        else:
            m.clocks("global_latency", lines, *given, **one)  # brings the chain into the L2
        launches = 1 if name == "dram_latency" else 2
        yield rate(name, m.clocks("global_latency", hops, *given, **one, launches=launches) / hops, "clocks")


def bandwidths(m: Machine) -> Iterator[Row]:
    """Bytes per clock and SM from the L2, by loads and by boxes of the copy engine (TMA), for one SM and while all ask; and the
    latency of a single box, from the L2 and from DRAM."""
    cp, box, sram = m.cp, 128 * 128, 8 * 128 * 128 + 64
    data = cp.zeros(16 * MB, "u1")
    clocks = m.clocks("global_bandwidth", 128, cp.uint64(data.data.ptr), m.sink, cp.int32(16 * MB))
    yield rate("l2_bandwidth_of_all", LANES * CHAINS * 16 * 128 / clocks)

    def boxes(memory: Any, in_flight: int, blocks: int, **how: int) -> float:
        number = memory.size // box
        shape, strides = (1, 1, number * 128, 64), (memory.size, memory.size, 128)
        given = tma.descriptor(memory.data.ptr, shape, strides, "float16", 128), cp.int32(in_flight), cp.int32(number)
        return m.clocks("boxes", 512, *given, threads=32, blocks=blocks, sram=sram, **how)

    for name, blocks in (("boxes_of_one", 1), ("boxes_of_all", m.sms)):
        yield rate(name, 512 * box / boxes(data, 8, blocks))
    yield rate("box_latency", boxes(data, 1, 1) / 512, "clocks")
    yield rate("box_latency_dram", boxes(cp.zeros(2048 * MB, "u1"), 1, 1, launches=1) / 512, "clocks")


def reductions(m: Machine) -> Iterator[Row]:
    """Bytes per clock and SM that reductions add, 16 per lane: by all SMs, to what lies in the L2, and to what comes from DRAM."""
    rounds = 224  # of the big one, each block adds to bytes of its own
    for name, size in (("reductions_of_all", 16 * MB), ("reductions_of_all_from_dram", 2048 * MB)):
        memory = m.cp.zeros(size, "u1")
        clocks = m.clocks("reductions", rounds, m.cp.uint64(memory.data.ptr), m.cp.int64(size), threads=LANES // 2)
        yield rate(name, LANES // 2 * CHAINS * 16 * rounds / clocks)


def products(m: Machine) -> Iterator[Row]:
    """The tensor cores' FLOPs per clock and SM, by instruction and by how many warps issue it."""
    for warps in (4, 8, 16):
        clocks = m.clocks("warp_products", 512, m.cp.uint32(0), m.sink, threads=32 * warps)
        yield rate("warp_products", warps * CHAINS * 512 * 2 * 16 * 8 * 16 / clocks, "FLOPs / clock", warps=warps)
    for name in ("products_128_sram", "products_128_registers"):
        for groups in (1, 2, 3):
            clocks = m.clocks(name, 256, m.cp.int32(0), m.sink, threads=128 * groups, sram=64 * KB)
            found = groups * 8 * 256 * 2 * 64 * 128 * 16 / clocks
            yield rate(name, found, "FLOPs / clock", warps=4 * groups, clocks=clocks / 256)


def softmax(m: Machine) -> Iterator[Row]:
    """The clocks that flash3's exponentials of 64 x 128 scores per warpgroup take, alone and beside other work.

    The other work is a warpgroup that multiplies all the time; the clocks that its eight products take are measured too. Then come
    the clocks of one turn (ping-pong) that two warpgroups pass to each other.
    """
    cp = m.cp
    for groups in (1, 2, 3):
        value = m.clocks("exponentials", 512, cp.float32(1e-3), m.sink, threads=128 * groups) / 512
        yield rate("exponentials", value, "clocks", warps=4 * groups)
    for name in ("128_sram", "64_registers", "128_registers"):
        for groups in (1, 2):
            found = list[Any]()
            # first the products outlast the exponentials, then the exponentials the products
            for rounds, count in ((128, 2048), (1024, 256)):
                given = cp.int32(rounds), cp.float32(1e-3), m.sink, cp.int32(count)
                sizes: Any = {"threads": 128 * (groups + 1), "blocks": m.sms, "sram": 64 * KB}
                times = m.run(f"exponentials_beside_{name}", (m.sms, 2), *given, **sizes)
                found.append(cp.median(times, axis=0) / cp.asarray([rounds, count]))
            value, spent = float(found[0][0]), float(found[1][1])
            yield rate(f"exponentials_beside_{name}", value, "clocks", warps=4 * groups, products=spent)
    yield rate("turn", m.clocks("turns", 512, cp.int32(0), m.sink, threads=256) / 1024, "clocks")


def instructions_beside_products(m: Machine) -> Iterator[Row]:
    """How instructions and matrix products slow each other down when two warpgroups do them side by side, products without end.

    For each kind of instruction: how many a warp issues per clock of its sub-partition, and the share of their full rate that the
    tensor cores reach, each alone and both together.
    """
    cp, many, never = m.cp, 1 << 15, 1 << 20  # `never`: more turns than fit beside the products
    for instruction, kind in INSTRUCTIONS.items():
        name = f"{instruction}_beside_products"

        def rates(rounds: int, count: int, name: str = name, kind: type[np.generic] = kind) -> tuple[float, float]:
            given = cp.int32(rounds), kind(1), m.sink, cp.int32(count)
            turns, clocks, spent = m.run(name, (m.sms, 3), *given, threads=256, blocks=m.sms, sram=64 * KB).T
            return float(cp.median(STATEMENTS * turns / clocks)), float(cp.median(PRODUCT * count / spent))

        (value, share), (alone, _), (_, share_alone) = rates(never, many), rates(4096, 0), rates(0, many)
        shares = {"tensor_share": share, "alone": alone, "tensor_share_alone": share_alone}
        yield rate(name, value, "instructions of a warp / clock of a sub-partition", **shares)


def turnover(m: Machine) -> Iterator[Row]:
    """The clocks from a block's last instruction to the first of the block in its place, for blocks that fill an SM; and the
    microseconds of a launch that does nothing, by events."""
    cp, blocks = m.cp, 8 * m.sms
    given = cp.int32(20000), cp.int32(0), m.sink
    times = m.run("blocks", (blocks, 3), *given, threads=384, blocks=blocks, sram=200 * KB)
    by_sm: dict[int, list[tuple[int, int]]] = {}
    for sm, begun, ended in times.get().tolist():
        by_sm.setdefault(sm, []).append((begun, ended))
    runs = [sorted(found) for found in by_sm.values()]
    gaps = [after[0] - before[1] for found in runs for before, after in zip(found, found[1:], strict=False)]
    yield rate("block_turnover", statistics.median(gaps), "clocks")
    pause, nothing, spent = m.function("multiply_add"), m.function("nothing"), list[float]()
    for _ in range(50):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        pause((m.sms,), (LANES,), (cp.zeros(m.sms, "i8"), cp.int32(20000), cp.float32(1), m.sink))
        begin.record()
        nothing((m.sms,), (384,), ())
        end.record()
        end.synchronize()
        spent.append(1e3 * cp.cuda.get_elapsed_time(begin, end))
    yield rate("empty_launch", statistics.median(spent), "microseconds")


def clocks(m: Machine, cells: Sequence[speed.Cell]) -> Iterator[Row]:
    """The SMs' clock rate in GHz during each kernel, while a cell's kernels are timed in turn: the calls' median."""
    torch: Any = importlib.import_module("torch")
    watch = m.function("watch")
    for cell in cells:
        p, q = cell.problem, speed.normal(torch, cell, "qkv")
        seen: dict[str, list[tuple[Any, Any]]] = {name: [] for name in WATCHED}

        def watched(call: Callable[[], Any], seen: list[tuple[Any, Any]]) -> Callable[[], Any]:
            def both() -> None:
                before, after = (m.cp.zeros((m.sms, 2), "i8") for _ in range(2))
                with m.cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                    watch((4 * m.sms,), (32,), (before,))
                    call()
                    watch((4 * m.sms,), (32,), (after,))
                seen.append((before, after))

            return both

        calls = [watched(peers.prepare(name, *q, causal=p.causal, scale=p.scale), seen[name]) for name in WATCHED]
        times = interleaved(torch, calls, SECONDS)
        for (name, found), spent in zip(seen.items(), times, strict=True):
            settled = found[len(found) // 3 :]  # the calls before it, the clock hasn't
            rates = [(b - a).get().astype(float) for a, b in settled]
            ghz = statistics.median(float(np.median(r[:, 0] / r[:, 1])) for r in rates)
            yield {"algorithm": name, **vars(cell), "milliseconds": statistics.median(spent), "gigahertz": ghz}


def headline(of: Any) -> str:
    ghz = [r.gigahertz for r in of.clocks]
    span = f"{min(ghz):.2f} to {max(ghz):.2f} GHz (median {statistics.median(ghz):.2f})"
    return f"{len(of.rows)} rates and latencies of an SM; its clock while attention kernels run: {span}"


MAYBE = (float | None, None)
RATE = row(
    "Rate", "One rate or latency. `products` and `tensor_share` say what the tensor cores did meanwhile.", what=str, unit=str,
    value=float, warps=(int | None, None), clocks=MAYBE, products=MAYBE, tensor_share=MAYBE, alone=MAYBE, tensor_share_alone=MAYBE,
)  # fmt: skip
CLOCK = row("Clock", "A kernel in a cell of `flashlab bench`, and the SMs' clock rate while it ran.", algorithm=str, **CELL,
            milliseconds=float, gigahertz=float)  # fmt: skip
KIND = Kind(
    "rates", "Speed: what an SM does per clock",
    "throughputs, latencies and bandwidths of an SM in its own clocks; its clock while attention kernels run",
    "python -m studies rates",
    row("Rates", "What was measured of the machine.", rows=tuple[RATE, ...], clocks=tuple[CLOCK, ...]), headline,
    shown("what | warps | value=said | unit", said=lambda r: f"{r.value:,.{1 if r.value >= 1 else 2}f}"),
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    del words
    m, parts = (
        Machine(),
        (throughputs, latencies, bandwidths, reductions, products, softmax, instructions_beside_products, turnover),
    )
    found: dict[str, list[Row]] = {"rows": [], "clocks": []}
    cells = speed.cells(("bfloat16", "float16"), (64, 128, 256), (False, True), (1024, 4096, 16384))
    for name, rows in (*(("rows", part(m)) for part in parts), ("clocks", clocks(m, cells))):
        for each in rows:
            print(each)
            found[name].append(each)
    print(results.save(KIND, [], found, subject="machine", replace=True))
