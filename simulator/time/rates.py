"""How many clocks an operation takes on a unit of the SM, from figures of the device and measured constants.

`python -m studies rates` measured the constants on an H200 (docs/results/rates/machine_h200_…), unless they name another
source. They are rounded, and stand for other devices as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from simulator.devices import Device

AT_REST, DRAWN, FLOAT16, MOVED = 0.98, 0.085, 0.0235, 0.12
"""Clock rates as shares of the boost clock. An SM under a light load runs at `AT_REST`. The power that it draws lowers
this: by `DRAWN` if the tensor cores are busy all the time, by `FLOAT16` more if their operands are float16, and by
`MOVED` if bytes arrive from the L2 all the time. All come from a plane through the clocks of 180 launches (`clocks` in
the same file). Two runs on different cards gave 0.020 and 0.027 for `FLOAT16`; this is between."""

LAUNCH = 2.8e-6
"""Seconds that an empty launch takes, by CUDA events."""
TURNOVER = 370.0
"""Clocks from the last instruction of a block to the first instruction of the next block in its place."""
VECTOR, ALONE = 0.71, 0.94
"""Share of the exponential and FMA/ALU rates that a softmax reaches: beside matrix products, and without them."""
COMPARED = 0.5
"""Share of their rate that maxima, comparisons and selections reach beside matrix products."""
PRODUCTS = 1.15
"""The factor by which matrix products take longer beside exponentials."""
DEPENDENT = 4.5
"""Clocks from an instruction to the next one that needs its result."""
TURN = 33.0
"""Clocks that a named barrier takes to hand over from one warpgroup to the next."""
SRAM_BYTES, SRAM_LATENCY = 128.0, 23.0
"""Bytes per clock of an SM's shared memory, and its latency in clocks."""
EXP = 16.0
"""Exponentials per clock and SM."""
L2_LATENCY, DRAM_LATENCY = 280.0, 670.0
"""Latencies of loads by threads, in clocks."""
BOX_L2_LATENCY, BOX_DRAM_LATENCY = 330.0, 980.0
"""Latencies of the copy engine (TMA) in clocks, on top of the time in which a box passes."""
SS_LATENCY, RS_LATENCY = 64.0, 88.0
"""Latencies of a chain of wgmma in clocks, on top of its products: with A in SRAM, and with A in registers."""
DRAM_SHARE = 0.886
"""Share of DRAM's bandwidth that a copy within DRAM reaches (the yardstick of `flashlab bench`)."""
L2_BYTES = 36.0
"""Bytes per clock and SM from the L2 while all SMs load."""
RED_BYTES, RED_DRAM_BYTES = 15.2, 5.6
"""Bytes per clock and SM that reductions (red.v4.f32) add while all SMs do: to what lies in the L2, and to what comes from
DRAM and goes back."""
_LANES = {(7, 5): 64, (8, 0): 64}  # float32 lanes per SM, from the datasheets' rates and boost clocks
MMA_SHARE = {9: 0.646}  # mma.sync's share of wgmma's rate; for older GPUs, datasheets quote the rate of mma.sync
MMA_ALONE = {9: 0.509}  # the same for one warp per scheduler


@dataclass(frozen=True)
class Rates:
    """How many cycles operations take on one SM of a device, for operands of a storage dtype.

    >>> from simulator import DEVICES
    >>> rates = Rates(DEVICES["h200"], "bfloat16")
    >>> rates.warpgroup_matmul(2 * 64 * 128 * 128), round(rates.boost / 1e9, 2)
    (512.0, 1.98)
    """

    device: Device
    dtype: str

    @property
    def lanes(self) -> int:
        """float32 FMAs per clock and SM."""
        return _LANES.get(self.device.compute_capability, 128)

    @property
    def boost(self) -> float:
        """Hertz at which the datasheet's float32 rate holds."""
        return self.device.fp32_flops / (2 * self.lanes * self.device.sms)

    @property
    def clock(self) -> float:
        """Hertz under a light load."""
        return AT_REST * self.boost

    def loaded(self, tensor: float, copy: float) -> float:
        """Hertz while the tensor cores, and the way to the L2, are busy for these shares of the time, 0 to 1."""
        drawn = DRAWN + (FLOAT16 if self.dtype == "float16" else 0.0)
        return (AT_REST - drawn * tensor - MOVED * copy) * self.boost

    @property
    def tensor(self) -> float:
        """16-bit tensor-core FLOPs per clock and SM, a power of two. Datasheets quote it at a clock of their own."""
        return 2.0 ** round(log2(self.device.tensor_flops / (self.device.sms * self.boost)))

    def warpgroup_matmul(self, flops: float) -> float:
        """Cycles of matrix products by wgmma, with operands in SRAM."""
        return flops / self.tensor

    def warp_matmul(self, flops: float) -> float:
        """Cycles of matrix products by mma.sync, with operands in registers."""
        return flops / (self.tensor * MMA_SHARE.get(self.device.compute_capability[0], 1.0))

    @property
    def alone(self) -> float:
        """How many times as long mma.sync takes if a scheduler has no other warp that multiplies."""
        major = self.device.compute_capability[0]
        return MMA_SHARE.get(major, 1.0) / MMA_ALONE.get(major, 1.0)

    def exp(self, elements: float) -> float:
        return elements / EXP

    def alu(self, operations: float) -> float:
        """Cycles of operations of one lane each. An operation that runs at half rate counts twice."""
        return operations / self.lanes

    def fma(self, flops: float) -> float:
        """Cycles of float32 matrix products on the FMA lanes."""
        return flops / (2 * self.lanes)

    def sram(self, nbytes: float) -> float:
        return nbytes / SRAM_BYTES

    def copy(self, nbytes: float, dram: float = 0.0) -> float:
        """Cycles of a copy between the L2 and the SM. The share `dram` of it goes on to DRAM.

        The L2's clock stays at boost, and the SM's is what it is while bytes arrive all the time. An SM has its part of
        DRAM's bandwidth.
        """
        clock = self.loaded(0.0, 1.0)
        l2 = L2_BYTES * self.boost / clock
        return nbytes * ((1 - dram) / l2 + dram / min(l2, self.bandwidth / (self.device.sms * clock)))

    def reduce(self, nbytes: float, cold: float = 0.0) -> float:
        """Cycles of additions in the L2, of which the share `cold` is the first to its bytes. They take the L2's turns, as
        copies do. The L2's clock stays at boost.
        """
        boost = self.boost / self.loaded(0.0, 1.0)
        return nbytes * ((1 - cold) / RED_BYTES + cold / RED_DRAM_BYTES) / boost

    @property
    def bandwidth(self) -> float:
        """Bytes per second from and to DRAM."""
        return DRAM_SHARE * self.device.bandwidth
