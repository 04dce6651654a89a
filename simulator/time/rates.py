"""What an operation takes on a unit of the SM, in clocks, from figures of the device and constants that were measured.

Figures without another source were measured on an H200 by `python -m tools.machine_rates` (docs/results/rates/machine_h200_…),
rounded. They stand for other devices, too, where none is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from simulator.devices import Device

AT_REST, DRAWN = 0.95, 0.17
"""Share of the boost clock at which an SM runs whose tensor cores have nothing to do, and what of it they cost if they are busy all
the time: the power limit. A line through the clocks of 180 kernels (`clocks` of the same file). Measured."""

LAUNCH = 2.8e-6
"""Seconds of a launch that does nothing, as events have it."""
TURNOVER = 370.0
"""Clocks from the last instruction of a block to the first of the next one in its place."""
VECTOR, ALONE = 0.71, 0.94
"""Share of the exponential and FMA/ALU rates that a softmax reaches, beside products and without."""
PRODUCTS = 1.15
"""How much longer products take beside exponentials."""
DEPENDENT = 4.5
"""Clocks from an instruction to the next one that wants its result."""
TURN = 33.0
"""Clocks in which a named barrier hands over from one warpgroup to the next."""
SRAM_BYTES, SRAM_LATENCY = 128.0, 23.0
EXP = 16.0
L2_LATENCY, DRAM_LATENCY = 280.0, 670.0
BOX_L2_LATENCY, BOX_DRAM_LATENCY = 330.0, 980.0
"""Of the copy engine, beside the time that a box takes to pass."""
SS_LATENCY, RS_LATENCY = 64.0, 88.0
"""Of a chain of wgmma, beside its products, with A in SRAM or in registers."""
DRAM_SHARE = 0.886
"""Of DRAM's bandwidth that a copy within it reaches (the yardstick of `flashlab bench`)."""
L2_BYTES = 36.0
"""A clock and SM, while all SMs ask."""
_LANES = {(7, 5): 64, (8, 0): 64}  # as datasheets' float32 rates and boost clocks have it
MMA_SHARE = {9: 0.646}  # of wgmma's rate; before that, mma.sync is what datasheets quote


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
        """Hertz under load, with idle tensor cores."""
        return AT_REST * self.boost

    def loaded(self, tensor: float) -> float:
        """Hertz with tensor cores that are busy for a share of the time."""
        return (AT_REST - DRAWN * tensor) * self.boost

    @property
    def tensor(self) -> float:
        """16-bit tensor-core FLOPs a clock: a power of two, of which datasheets quote the rate at a clock of their own."""
        return 2.0 ** round(log2(self.device.tensor_flops / (self.device.sms * self.boost)))

    def warpgroup_matmul(self, flops: float) -> float:
        """Products by wgmma, operands in SRAM."""
        return flops / self.tensor

    def warp_matmul(self, flops: float) -> float:
        """Products by mma.sync, operands in registers."""
        return flops / (self.tensor * MMA_SHARE.get(self.device.compute_capability[0], 1.0))

    def exp(self, elements: float) -> float:
        return elements / EXP

    def alu(self, operations: float) -> float:
        """Operations of one lane each; what runs at half rate counts twice."""
        return operations / self.lanes

    def fma(self, flops: float) -> float:
        """float32 products on the FMA lanes."""
        return flops / (2 * self.lanes)

    def sram(self, nbytes: float) -> float:
        return nbytes / SRAM_BYTES

    def copy(self, nbytes: float, dram: float = 0.0) -> float:
        """Between the L2, whose clock stays at boost, and the SM; a share `dram` of it goes on to DRAM, of whose bandwidth an SM
        has its part."""
        l2 = L2_BYTES / AT_REST
        return nbytes * ((1 - dram) / l2 + dram / min(l2, self.bandwidth / (self.device.sms * self.clock)))

    @property
    def bandwidth(self) -> float:
        """Bytes a second of DRAM."""
        return DRAM_SHARE * self.device.bandwidth
