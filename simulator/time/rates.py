"""What an operation takes on a unit of the SM, in cycles, from the device's figures; and the three measured constants.

Sources. Lanes and MUFU results a clock: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions". 128 bytes
a clock of shared memory: the same, "Shared Memory". L2: 5,120 bytes a clock of the A100 whitepaper, shared by its SMs, taken for
Hopper too; elsewhere the 64 bytes of an SM's port. `mma.sync` at 62.9 % of Hopper's peak, latencies of L2 and DRAM: Luo et al.
2024 (arXiv 2402.13499).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from simulator.devices import Device

SUSTAINED = 0.79
"""Share of the boost clock that the power limit leaves while attention kernels run one after the other. Measured (H200, 700 W)."""
VECTOR = 0.75
"""Share of the exponential and FMA/ALU rates that the softmax's dependent instructions keep up. Measured."""
LAUNCH = 4e-6
"""Seconds from the event before a launch to its first block, and from its last block to the event after. Measured."""

SRAM_BYTES = 128.0
EXP = 16.0
L2_LATENCY, SRAM_LATENCY = 270.0, 30.0
DRAM_LATENCY = 480.0
_LANES = {(7, 5): 64, (8, 0): 64}
_L2_BYTES = 5120.0
_MMA_SHARE = {9: 0.629}


@dataclass(frozen=True)
class Rates:
    """Cycles on one SM of a device, for operands of a storage dtype.

    >>> from simulator import DEVICES
    >>> rates = Rates(DEVICES["h200"], "bfloat16")
    >>> rates.warpgroup_matmul(2 * 64 * 128 * 128), round(rates.boost / 1e9, 2)
    (512.0, 1.98)
    """

    device: Device
    dtype: str

    @property
    def lanes(self) -> int:
        """float32 FMAs a clock."""
        return _LANES.get(self.device.compute_capability, 128)

    @property
    def boost(self) -> float:
        """Hertz at which the datasheet's float32 rate holds."""
        return self.device.fp32_flops / (2 * self.lanes * self.device.sms)

    @property
    def clock(self) -> float:
        """Hertz under load."""
        return SUSTAINED * self.boost

    @property
    def tensor(self) -> float:
        """16-bit tensor-core FLOPs a clock: a power of two, of which datasheets quote the rate at a clock of their own."""
        return 2.0 ** round(log2(self.device.tensor_flops / (self.device.sms * self.boost)))

    def warpgroup_matmul(self, flops: float) -> float:
        """Products by wgmma, operands in SRAM."""
        return flops / self.tensor

    def warp_matmul(self, flops: float) -> float:
        """Products by mma.sync, operands in registers."""
        return flops / (self.tensor * _MMA_SHARE.get(self.device.compute_capability[0], 1.0))

    def exp(self, elements: float) -> float:
        return elements / (EXP * VECTOR)

    def alu(self, operations: float) -> float:
        """Operations of one lane each; what runs at half rate counts twice."""
        return operations / (self.lanes * VECTOR)

    def fma(self, flops: float) -> float:
        """float32 products on the FMA lanes."""
        return flops / (2 * self.lanes)

    def sram(self, nbytes: float) -> float:
        return nbytes / SRAM_BYTES

    def copy(self, nbytes: float, dram: float = 0.0) -> float:
        """Between the L2 and the SM; a share `dram` of it goes on to DRAM, of whose bandwidth an SM has its part."""
        share = _L2_BYTES / self.device.sms if self.device.compute_capability in ((8, 0), (9, 0)) else 64.0
        l2 = min(64.0, share)
        return nbytes * ((1 - dram) / l2 + dram / min(l2, self.device.bandwidth / (self.device.sms * self.clock)))
